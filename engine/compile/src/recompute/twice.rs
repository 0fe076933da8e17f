//! Where what is computed again for the input gradients of a split backward (I) ends with them, and is computed once more for the
//! weight gradients (W).
//!
//! In: the stages of a rank, and the most bytes that are alive there with some of them so. Out: those stages, and the bytes.
//! Never: what is computed again.

use std::collections::BTreeSet;

use gapless_parallel::StageId;

/// The stages in which it pays: all of them, without those whose values may as well wait for W, as long as no more bytes are alive. Of
/// two ways that hold the same, the one with fewer stages is the faster. And the most bytes alive with those.
///
/// # Errors
/// What `most_alive` returns.
pub fn stages_twice<E>(
    all: BTreeSet<StageId>,
    mut most_alive: impl FnMut(&BTreeSet<StageId>) -> Result<u64, E>,
) -> Result<(BTreeSet<StageId>, u64), E> {
    let mut least = most_alive(&all)?;
    let mut twice = all.clone();
    let one_less = all.iter().map(|&stage| BTreeSet::from([stage]));
    // One by one, and in the end all that is left: what is worse for each alone may be better together.
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

    /// Bytes by set of stages, as bits, and the set that is to be found.
    #[test]
    fn stages_are_left_out_as_long_as_no_more_bytes_are_alive() {
        for (bytes, expected) in [
            (&[10, 9][..], 0b1),
            (&[9, 9], 0),
            (&[9, 10], 0),
            (&[10, 8, 9, 7], 0b11),
            (&[10, 7, 9, 7], 0b01),
            (&[10, 9, 7, 7], 0b10),
            // Each alone is worse, none at all is best.
            (&[5, 9, 9, 8], 0),
            (&[8, 8, 8, 8], 0),
        ] {
            let all = (0..bytes.len().ilog2()).map(StageId).collect();
            let set = |stages: &BTreeSet<StageId>| stages.iter().map(|stage| 1usize << stage.0).sum::<usize>();
            let (found, least) = stages_twice(all, |stages| Ok::<u64, ()>(bytes[set(stages)])).unwrap();
            assert_eq!((set(&found), least), (expected, bytes[expected]), "{bytes:?}");
        }
    }
}
