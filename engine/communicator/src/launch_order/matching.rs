//! Simulates the programs of all ranks together. The result is a list of messages and collectives, in the order in
//! which all ends of each have been started.

use std::collections::{HashMap, VecDeque};

use super::{Call, Launch, LaunchOrder, Start};
use crate::{Awaited, CommunicatorError, Result, Tag};

/// Determines the orders of all ranks.
///
/// Each rank has a clock. A computation advances the clock by the computation's time; a wait advances it to the time at which
/// the awaited operation was matched. The rank with the lowest clock always goes on first, so that operations are matched in
/// the order of time. With this order, a rank never has to launch an operation before its program can start it, because
/// operations that were matched earlier were also started earlier.
pub(super) fn orders(programs: &[Vec<Call>]) -> Result<Vec<LaunchOrder>> {
    let mut walk = Walk::new(programs);
    while let Some(rank) = walk.next() {
        walk.go_on(rank)?;
    }
    walk.finish()
}

struct Walk<'a> {
    ranks: Vec<Rank<'a>>,
    /// Messages with only one end so far, by (sender, receiver, tag): the starts of the senders, and those of the
    /// receivers.
    halves: HashMap<(usize, usize, Tag), [VecDeque<usize>; 2]>,
    /// For each collective, in the order that all ranks share, the ranks that have started it, each with the index of
    /// its start.
    collectives: Vec<Vec<(usize, usize)>>,
}

struct Rank<'a> {
    /// The remaining calls of the rank's program.
    program: &'a [Call],
    clock: u64,
    starts: Vec<Start>,
    /// The time at which each start was matched; `None` before that.
    matched: Vec<Option<u64>>,
    launches: Vec<Launch>,
    collectives: usize,
}

impl<'a> Walk<'a> {
    fn new(programs: &'a [Vec<Call>]) -> Self {
        let rank = |program: &'a Vec<Call>| Rank {
            program,
            clock: 0,
            starts: Vec::new(),
            matched: Vec::new(),
            launches: Vec::new(),
            collectives: 0,
        };
        Self { ranks: programs.iter().map(rank).collect(), halves: HashMap::new(), collectives: Vec::new() }
    }

    /// Returns the rank with the lowest clock among those that can go on, or `None` if no rank can.
    fn next(&self) -> Option<usize> {
        let clocks = self.ranks.iter().enumerate().filter_map(|(index, rank)| Some((rank.goes_on_at()?, index)));
        clocks.min().map(|(_, index)| index)
    }

    /// Executes the next call of a rank that can go on.
    fn go_on(&mut self, index: usize) -> Result<()> {
        let rank = &mut self.ranks[index];
        rank.clock = rank.goes_on_at().expect("the rank can go on");
        let (call, rest) = rank.program.split_first().expect("the rank has something to do");
        rank.program = rest;
        match *call {
            Call::Compute(time) => rank.clock = rank.clock.saturating_add(time),
            Call::Wait(start) if start < rank.starts.len() => {}
            Call::Wait(_) => return Err(CommunicatorError::UnknownRequest),
            Call::Start(start) => {
                rank.starts.push(start);
                rank.matched.push(None);
                self.start(index, start)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, index: usize, start: Start) -> Result<()> {
        let number = self.ranks[index].starts.len() - 1;
        let (sends, from, to, tag) = match start {
            Start::Send { to, tag, .. } => (true, index, to, tag),
            Start::Receive { from, tag, .. } => (false, from, index, tag),
            Start::Collective(_) => return self.enter(index, number),
        };
        let (peer, size) = (if sends { to } else { from }, self.ranks.len());
        if peer >= size {
            return Err(CommunicatorError::NoSuchRank { rank: peer, size });
        }
        let halves = self.halves.entry((from, to, tag)).or_default();
        let Some(other) = halves[usize::from(sends)].pop_front() else {
            halves[usize::from(!sends)].push_back(number);
            return Ok(());
        };
        let (send, receive) = if sends { (number, other) } else { (other, number) };
        let (sent, expected) = (self.ranks[from].starts[send].len(), self.ranks[to].starts[receive].len());
        if sent != expected {
            return Err(CommunicatorError::SizeMismatch { what: tag.to_string(), from, to, sent, expected });
        }
        let now = self.ranks[index].clock;
        self.ranks[from].matched[send] = Some(now);
        self.ranks[to].matched[receive] = Some(now);
        if from == to {
            self.ranks[from].launches.push(Launch::Oneself { send, receive });
        } else {
            self.ranks[from].launches.push(Launch::One(send));
            self.ranks[to].launches.push(Launch::One(receive));
        }
        Ok(())
    }

    fn enter(&mut self, index: usize, number: usize) -> Result<()> {
        let round = self.ranks[index].collectives;
        self.ranks[index].collectives += 1;
        if round == self.collectives.len() {
            self.collectives.push(Vec::new());
        }
        let entered = &mut self.collectives[round];
        entered.push((index, number));
        let (first, its) = entered[0];
        let (started, other_started) = (self.ranks[index].starts[number], self.ranks[first].starts[its]);
        if started != other_started {
            let (started, other_started) = (started.to_string(), other_started.to_string());
            return Err(CommunicatorError::CollectiveMismatch { rank: index, started, other: first, other_started });
        }
        if entered.len() == self.ranks.len() {
            let now = self.ranks[index].clock;
            for &(member, start) in entered.iter() {
                self.ranks[member].matched[start] = Some(now);
                self.ranks[member].launches.push(Launch::One(start));
            }
        }
        Ok(())
    }

    /// Returns the orders, or an error unless all programs are finished and all starts matched.
    fn finish(self) -> Result<Vec<LaunchOrder>> {
        let stuck = |(index, rank): (usize, &Rank)| Some((index, self.awaited(rank.blocked_by()?, rank)));
        let mut ranks: Vec<_> = self.ranks.iter().enumerate().filter_map(stuck).collect();
        if ranks.is_empty() {
            let alone = |(index, rank): (usize, &Rank)| {
                let start = rank.matched.iter().position(Option::is_none)?;
                Some((index, self.awaited(start, rank)))
            };
            ranks = self.ranks.iter().enumerate().filter_map(alone).collect();
        }
        if !ranks.is_empty() {
            return Err(CommunicatorError::Stuck { ranks });
        }
        Ok(self.ranks.into_iter().map(|Rank { starts, launches, .. }| LaunchOrder { starts, launches }).collect())
    }

    fn awaited(&self, start: usize, rank: &Rank) -> Awaited {
        match rank.starts[start] {
            Start::Send { to, tag, .. } => Awaited::Taken { to, tag },
            Start::Receive { from, tag, .. } => Awaited::Message { from, tag },
            Start::Collective(kind) => {
                let before = rank.starts[..start].iter().filter(|start| matches!(start, Start::Collective(_))).count();
                let has_come = |other: usize| self.ranks[other].collectives > before;
                let missing = (0..self.ranks.len()).filter(|&other| !has_come(other)).collect();
                Awaited::Collective { what: kind.to_string(), missing }
            }
        }
    }
}

impl Rank<'_> {
    /// Returns the time at which the rank can go on. Returns `None` if the rank's program is finished, or if the
    /// program waits for a start that is not matched.
    fn goes_on_at(&self) -> Option<u64> {
        match self.program.first()? {
            // If the program waits for an operation that it has not started, `go_on` returns the error.
            Call::Wait(start) => self.matched.get(*start).map_or(Some(self.clock), |at| Some(self.clock.max((*at)?))),
            _ => Some(self.clock),
        }
    }

    /// Returns the start for which the rank waits, if any.
    fn blocked_by(&self) -> Option<usize> {
        match self.program.first()? {
            Call::Wait(start) => Some(*start),
            _ => None,
        }
    }
}

impl Start {
    /// Size of a message in bytes.
    fn len(&self) -> usize {
        match self {
            Self::Send { len, .. } | Self::Receive { len, .. } => *len,
            Self::Collective(_) => 0,
        }
    }
}
