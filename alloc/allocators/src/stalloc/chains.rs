//! Rectangles that take turns: each starts after the one before has ended.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gapless_alloc::Lifetime;

/// Rectangles by number, none of which overlaps another in time.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub members: Vec<usize>,
    /// What the members may be repeated as, one iteration later.
    pub echoes: Vec<Lifetime>,
}

/// Which rectangles of the last planned iteration are seen a second time, an iteration later (`iter1_start`, `iter1_end` and
/// `global_max_time` in the released code). The first and last tick are those of single buffers alone, so that only a
/// step that ends with a group has any.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Echo {
    /// First tick of the last iteration.
    pub start: u64,
    /// Ticks from there to the iteration's end.
    pub length: u64,
    /// The last tick of all.
    pub end: u64,
}

impl Echo {
    pub(super) fn of(&self, lifetime: &Lifetime) -> Option<Lifetime> {
        let (start, end) = (lifetime.start + self.length, (lifetime.end + self.length).min(self.end));
        (lifetime.start >= self.start && start < end).then_some(start..end)
    }
}

/// Each rectangle of `numbers`, in that order, joins the chain that ended last before it starts, or begins a chain.
pub(super) fn chains<'l>(numbers: &[usize], lifetime: impl Fn(usize) -> &'l Lifetime, echo: &Echo) -> Vec<Chain> {
    let mut chains: Vec<Chain> = Vec::new();
    let mut ends: BTreeSet<(u64, Reverse<usize>)> = BTreeSet::new();
    for &number in numbers {
        let lifetime = lifetime(number);
        let apart = |other: &Lifetime| other.end <= lifetime.start || lifetime.end <= other.start;
        let before = ends.range(..=(lifetime.start, Reverse(0))).rev();
        let chain = match before.copied().find(|(_, Reverse(chain))| chains[*chain].echoes.iter().all(apart)) {
            Some(end) => {
                ends.remove(&end);
                end.1.0
            }
            None => {
                chains.push(Chain::default());
                chains.len() - 1
            }
        };
        chains[chain].members.push(number);
        chains[chain].echoes.extend(echo.of(lifetime));
        ends.insert((lifetime.end, Reverse(chain)));
    }
    chains
}
