//! The division of a sequence among ranks for causal attention.

use std::ops::Range;

use crate::window::{joined, total};

/// The tokens of a sequence that one of several ranks holds, so that causal attention gives all ranks about the same work.
/// The sequence is divided into rounds, and each round into two chunks per rank. Of each round, rank r of n has chunks r and
/// 2n − 1 − r: the first chunk sees few keys, and the second one sees many (Llama 3, arXiv 2407.21783, section 3.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fold {
    ranks: usize,
    rank: usize,
    rounds: usize,
    /// The number of tokens in a chunk, which is not 0.
    chunk: usize,
}

impl Fold {
    /// The tokens that a rank holds of a sequence of `tokens` tokens. Returns `None` if the chunks would be unequal
    /// or empty.
    pub fn new(tokens: usize, (ranks, rank): (usize, usize), rounds: usize) -> Option<Self> {
        let chunks = 2 * ranks * rounds;
        let is_even = chunks > 0 && tokens > 0 && tokens.is_multiple_of(chunks);
        is_even.then(|| Self { ranks, rank, rounds, chunk: tokens / chunks })
    }

    /// Returns the fold of which these are the [ranges](Self::ranges), joined where they touch, of a sequence of `tokens`
    /// tokens. Returns `None` if there is none.
    pub fn of(held: &[Range<usize>], tokens: usize) -> Option<Self> {
        let first = held.first()?;
        let own = total(held);
        let ranks = (own > 0 && tokens.is_multiple_of(own)).then(|| tokens / own)?;
        // The chunks of the last rank touch within a round, those of the first between rounds.
        [first.len(), first.len() / 2].into_iter().filter(|&chunk| chunk > 0 && own.is_multiple_of(2 * chunk)).find_map(
            |chunk| {
                let fold = Self { ranks, rank: first.start / chunk, rounds: own / (2 * chunk), chunk };
                (fold.rank < ranks && joined(fold.ranges().collect()).as_deref() == Ok(held)).then_some(fold)
            },
        )
    }

    /// Returns the place in the sequence of the rank's token `index`.
    pub fn place(&self, index: usize) -> usize {
        let (number, within) = (index / self.chunk, index % self.chunk);
        let chunk = if number.is_multiple_of(2) { self.rank } else { 2 * self.ranks - 1 - self.rank };
        (number / 2 * 2 * self.ranks + chunk) * self.chunk + within
    }

    /// The number of tokens in a chunk.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// The number of the sequence's tokens in a round.
    pub fn round(&self) -> usize {
        2 * self.ranks * self.chunk
    }

    /// Returns the places of the rank's chunks, in ascending order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        let fold = *self;
        (0..2 * fold.rounds).map(move |number| {
            let start = fold.place(number * fold.chunk);
            start..start + fold.chunk
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hold_every_token_once_and_see_equally_many_keys() {
        for (ranks, rounds, chunk) in [(1, 1, 3), (2, 1, 1), (2, 3, 2), (4, 2, 5), (3, 1, 4)] {
            let tokens = 2 * ranks * rounds * chunk;
            let mut holders = vec![0; tokens];
            let mut seen = Vec::new();
            for rank in 0..ranks {
                let fold = Fold::new(tokens, (ranks, rank), rounds).unwrap();
                let places: Vec<usize> = (0..tokens / ranks).map(|index| fold.place(index)).collect();
                assert_eq!(places, fold.ranges().flatten().collect::<Vec<_>>());
                assert!(places.is_sorted());
                places.iter().for_each(|&place| holders[place] += 1);
                seen.push(places.iter().map(|place| place + 1).sum::<usize>());
                let held = joined(fold.ranges().collect()).unwrap();
                assert_eq!(
                    Fold::of(&held, tokens).map(|fold| fold.ranges().collect::<Vec<_>>()).map(joined),
                    Some(Ok(held))
                );
            }
            assert!(holders.iter().all(|&count| count == 1));
            assert!(seen.iter().all(|&count| count == seen[0]), "{seen:?}");
        }
        assert_eq!(Fold::new(10, (2, 0), 1), None);
        assert_eq!(Fold::of(&[0..3, 5..8], 12), None);
    }
}
