//! Chooses the stages that recompute twice: once for the input gradients (I) of a split backward, and once more for the
//! weight gradients (W).
//!
//! - In: the stages of a rank, and a function that returns the peak of live bytes if a given set of stages recomputes
//!   twice.
//! - Out: the best set of stages, and the peak of live bytes with it.
//! - Never: which values are recomputed.

use std::collections::BTreeSet;

use gapless_parallel::StageId;

/// Returns the stages that should recompute twice, and the peak of live bytes with these stages. `most_alive` returns
/// the peak for a given set. The search starts with all stages. A stage is removed if keeping its values from I to W
/// does not raise the peak, because of two sets with the same peak, the one with fewer stages is faster.
///
/// # Errors
/// Returns the errors of `most_alive`.
pub fn stages_that_recompute_twice<E>(
    all: BTreeSet<StageId>,
    mut most_alive: impl FnMut(&BTreeSet<StageId>) -> Result<u64, E>,
) -> Result<(BTreeSet<StageId>, u64), E> {
    let mut least = most_alive(&all)?;
    let mut twice = all.clone();
    let one_less = all.iter().map(|&stage| BTreeSet::from([stage]));
    // First, stages are removed one by one, then all remaining ones at once. Removals that raise the peak one at a time
    // may lower it together.
    let together = (all.len() > 1).then(|| all.clone());
    for once in one_less.chain(together) {
        let fewer: BTreeSet<StageId> = twice.difference(&once).copied().collect();
        if fewer.len() == twice.len() {
            continue;
        }
        let bytes = most_alive(&fewer)?;
        if bytes <= least {
            (twice, least) = (fewer, bytes);
        }
    }
    Ok((twice, least))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each case has the peak for every set of stages (the index is a bit mask), and the expected set.
    #[test]
    fn stages_are_left_out_as_long_as_no_more_bytes_are_alive() {
        for (bytes, expected) in [
            (&[10, 9][..], 0b1),
            (&[9, 9], 0),
            (&[9, 10], 0),
            (&[10, 8, 9, 7], 0b11),
            (&[10, 7, 9, 7], 0b01),
            (&[10, 9, 7, 7], 0b10),
            // Removing either stage raises the peak. Removing both gives the lowest peak.
            (&[5, 9, 9, 8], 0),
            (&[8, 8, 8, 8], 0),
        ] {
            let all = (0..bytes.len().ilog2()).map(StageId).collect();
            let set = |stages: &BTreeSet<StageId>| stages.iter().map(|stage| 1usize << stage.0).sum::<usize>();
            let (found, least) = stages_that_recompute_twice(all, |stages| Ok::<u64, ()>(bytes[set(stages)])).unwrap();
            assert_eq!((set(&found), least), (expected, bytes[expected]), "{bytes:?}");
        }
    }
}
