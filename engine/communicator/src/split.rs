//! Who is in which part when a communicator is split, for all backends.

use crate::{Communicator, Result};

/// A rank's part.
pub(super) struct Places {
    /// Number of the part among the parts, in the order of colors.
    pub(super) color: usize,
    /// Its ranks, as they were before.
    pub(super) members: Vec<usize>,
    /// This rank, among them.
    pub(super) rank: usize,
}

/// Tells all ranks of each other's color and key. A collective operation.
pub(super) fn places(whole: &mut dyn Communicator, color: usize, key: usize) -> Result<Places> {
    const WORD: usize = size_of::<usize>();
    let mut bytes = vec![0; 2 * WORD * whole.size()];
    whole.all_gather(&[color.to_ne_bytes(), key.to_ne_bytes()].concat(), &mut bytes)?;
    let words = bytes.chunks_exact(WORD).map(|word| usize::from_ne_bytes(word.try_into().expect("a word's bytes")));
    let words: Vec<usize> = words.collect();

    let mut colors: Vec<usize> = words.iter().copied().step_by(2).collect();
    let mut members: Vec<usize> = (0..whole.size()).filter(|rank| colors[*rank] == color).collect();
    members.sort_by_key(|rank| (words[2 * rank + 1], *rank));
    let rank = members.iter().position(|rank| *rank == whole.rank()).expect("a rank has its own color");
    colors.sort_unstable();
    colors.dedup();
    let color = colors.partition_point(|other| *other < color);
    Ok(Places { color, members, rank })
}
