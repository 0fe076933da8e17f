//! Chains of rectangles that take turns: each rectangle starts after the one before has ended.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gapless_alloc::Lifetime;

/// Numbers of rectangles, no two of which overlap in time.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub members: Vec<usize>,
    /// The echoes of the chain's members, see [`Echo`].
    pub echoes: Vec<Lifetime>,
}

/// The ticks of the last planned iteration, whose rectangles count a second time, one iteration later. The released
/// code calls these ticks `iter1_start`, `iter1_end` and `global_max_time`. It takes the first and last tick of the
/// iteration from single buffers only, so there are echoes only if a step ends with a group.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Echo {
    /// First tick of the last iteration.
    pub start: u64,
    /// Number of ticks from `start` to the end of the iteration.
    pub length: u64,
    /// The last tick of all rectangles.
    pub end: u64,
}

impl Echo {
    pub(super) fn of(&self, lifetime: &Lifetime) -> Option<Lifetime> {
        let (start, end) = (lifetime.start + self.length, (lifetime.end + self.length).min(self.end));
        (lifetime.start >= self.start && start < end).then_some(start..end)
    }
}

/// Forms chains. Each rectangle of `numbers`, in that order, joins the chain that ended last before the rectangle
/// starts, or begins a new chain.
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
