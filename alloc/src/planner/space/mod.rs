//! Indexes of free and taken addresses.

pub(crate) mod by_clique;
pub(crate) mod by_time;
pub(crate) mod free_list;
pub(crate) mod reserved;

/// Returns the lowest multiple of the alignment that is not below `at`, or `None` if it is outside of the address space.
pub(crate) fn aligned(at: u64, alignment: u64) -> Option<u64> {
    match alignment.is_power_of_two() {
        true => at.checked_add(alignment - 1).map(|end| aligned_down(end, alignment)),
        false => at.checked_next_multiple_of(alignment),
    }
}

/// Returns the highest multiple of the alignment that is not above `at`. Most alignments are powers of two, and a
/// division takes longer than all other steps of a look at a place.
pub(crate) fn aligned_down(at: u64, alignment: u64) -> u64 {
    if alignment.is_power_of_two() { at & !(alignment - 1) } else { at - at % alignment }
}

/// Returns the lowest aligned offset at which `bytes` are free between the `taken` ranges, or `None` if there is none
/// in the address space. The ranges ascend by their first byte and may overlap.
pub(crate) fn lowest_gap(taken: impl Iterator<Item = (u64, u64)>, bytes: u64, alignment: u64) -> Option<u64> {
    let mut floor = 0u64;
    for (from, to) in taken {
        let at = aligned(floor, alignment)?;
        if from >= at && from - at >= bytes {
            return Some(at);
        }
        floor = floor.max(to);
    }
    let at = aligned(floor, alignment)?;
    at.checked_add(bytes).map(|_| at)
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Checked against trying one offset after another.
        #[test]
        fn the_lowest_gap_is_found(
            mut taken in prop::collection::vec((0..60u64, 1..9u64), 0..12),
            bytes in 1..9u64,
            alignment in 1..5u64,
        ) {
            taken.iter_mut().for_each(|range| range.1 += range.0);
            taken.sort_unstable();
            let is_free = |at: &u64| taken.iter().all(|&(from, to)| to <= *at || at + bytes <= from);
            let slow = (0..).step_by(alignment as usize).find(is_free);
            prop_assert_eq!(lowest_gap(taken.iter().copied(), bytes, alignment), slow);
        }
    }
}
