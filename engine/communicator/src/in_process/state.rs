//! What the ranks of one process know of each other. All of it is behind one lock.

use std::sync::Arc;

use super::memory::{Disagreement, Entry, Range};
use crate::{Awaited, CommunicatorError, Tag};

/// Everything that is under way.
#[derive(Debug)]
pub(super) struct State {
    /// The first failure of any rank. Nothing starts after it.
    pub(super) failure: Option<Failure>,
    /// Communicators: the world, and what it was split into.
    pub(super) groups: Vec<Group>,
    /// Operations of each rank of the world.
    pub(super) slots: Vec<Vec<Slot>>,
    /// Collectives under way, and empty ones for reuse.
    pub(super) rounds: Vec<Round>,
    /// Number of messages posted so far.
    posted: u64,
}

/// Who failed first.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) rank: usize,
    pub(super) why: String,
}

/// A communicator, as all of its ranks see it.
#[derive(Debug)]
pub(super) struct Group {
    /// What made it: the group that was split, the number of its collectives by then, the color.
    pub(super) origin: (usize, u64, usize),
    /// World ranks.
    pub(super) members: Arc<[usize]>,
    /// Which of the members dropped their end.
    pub(super) left: Vec<bool>,
}

/// One operation of one rank. Reused, so that a step in its steady state allocates nothing.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) group: usize,
    pub(super) status: Status,
}

/// How far it is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Status {
    /// No operation.
    Free,
    /// A message whose other end is not posted yet.
    Posted(Post),
    /// A message that the other end's thread is copying.
    Copying,
    /// A message that is through.
    Done,
    /// A message whose ends differ in size.
    Mismatched { post: Post, other: usize },
    /// A part of `rounds[i]`.
    Round(usize),
}

/// One end of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Post {
    pub(super) sends: bool,
    pub(super) group: usize,
    /// The other end's rank in the world.
    pub(super) peer: usize,
    pub(super) tag: Tag,
    pub(super) range: Range,
    /// Orders messages of one tag.
    serial: u64,
}

/// One collective.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) group: usize,
    /// Its number among the group's collectives.
    pub(super) serial: u64,
    /// One per member of the group; `None` for who has not started it, or has withdrawn.
    pub(super) entries: Vec<Option<Entry>>,
    /// Members that have started it.
    pub(super) entered: usize,
    /// Members that have not waited for it yet.
    present: usize,
    /// The next item to hand out, of `items`.
    pub(super) next: usize,
    pub(super) done: usize,
    pub(super) items: usize,
    pub(super) disagreement: Option<Disagreement>,
}

impl State {
    pub(super) fn new(ranks: usize) -> Self {
        let world = Group { origin: (0, 0, 0), members: (0..ranks).collect(), left: vec![false; ranks] };
        let slots = (0..ranks).map(|_| Vec::new()).collect();
        Self { failure: None, groups: vec![world], slots, rounds: Vec::new(), posted: 0 }
    }

    /// Takes a slot for an operation.
    pub(super) fn open(&mut self, rank: usize, group: usize, status: Status) -> usize {
        let slots = &mut self.slots[rank];
        let index = slots.iter().position(|slot| matches!(slot.status, Status::Free)).unwrap_or_else(|| {
            slots.push(Slot { group, status: Status::Free });
            // A round in use is held by a slot at least. With as many rounds as slots, how ranks interleave does not
            // decide whether a round is allocated.
            self.rounds.push(Round::empty(self.groups[0].members.len()));
            slots.len() - 1
        });
        slots[index] = Slot { group, status };
        index
    }

    pub(super) fn close(&mut self, rank: usize, slot: usize) {
        self.slots[rank][slot].status = Status::Free;
    }

    pub(super) fn post(&mut self, group: usize, sends: bool, peer: usize, tag: Tag, range: Range) -> Post {
        self.posted += 1;
        Post { sends, group, peer, tag, range, serial: self.posted }
    }

    /// The slot of the peer's oldest message end that fits one of `rank`'s.
    pub(super) fn counterpart(&self, rank: usize, post: &Post) -> Option<(usize, Post)> {
        let fits = |other: &Post| {
            (other.sends, other.group, other.peer, other.tag) == (!post.sends, post.group, rank, post.tag)
        };
        let slots = self.slots[post.peer].iter().enumerate();
        let posted = slots.filter_map(|(index, slot)| match slot.status {
            Status::Posted(other) if fits(&other) => Some((index, other)),
            _ => None,
        });
        posted.min_by_key(|(_, other)| other.serial)
    }

    /// Enters a member into the group's collective of a number. Returns the round.
    pub(super) fn enter(&mut self, group: usize, serial: u64, member: usize, entry: Entry) -> usize {
        let under_way = |round: &Round| round.present > 0 && (round.group, round.serial) == (group, serial);
        let index = self.rounds.iter().position(under_way).unwrap_or_else(|| {
            let free = self.rounds.iter().position(|round| round.present == 0);
            let index = free.unwrap_or_else(|| {
                self.rounds.push(Round::empty(self.groups[0].members.len()));
                self.rounds.len() - 1
            });
            let round = &mut self.rounds[index];
            round.entries.clear();
            round.entries.resize(self.groups[group].members.len(), None);
            let entries = std::mem::take(&mut round.entries);
            *round = Round { group, serial, entries, ..Round::empty(0) };
            index
        });
        let round = &mut self.rounds[index];
        round.entries[member] = Some(entry);
        round.entered += 1;
        round.present += 1;
        index
    }

    /// What a rank's blocked operation waits for.
    pub(super) fn awaited(&self, rank: usize, slot: usize) -> Awaited {
        match self.slots[rank][slot].status {
            Status::Posted(Post { sends: true, peer, tag, .. }) => Awaited::Taken { to: peer, tag },
            Status::Posted(Post { peer, tag, .. }) => Awaited::Message { from: peer, tag },
            Status::Round(round) => {
                let round = &self.rounds[round];
                let what = round.entries.iter().flatten().next().map_or_else(String::new, |entry| entry.0.to_string());
                Awaited::Collective { what, missing: self.missing(round).map(|(rank, _)| rank).collect() }
            }
            _ => Awaited::Start,
        }
    }

    /// A rank that a blocked operation waits for, but that has left.
    pub(super) fn absent(&self, rank: usize, slot: usize) -> Option<usize> {
        match self.slots[rank][slot].status {
            Status::Posted(Post { peer, group, .. }) => {
                let Group { members, left, .. } = &self.groups[group];
                members.iter().zip(left).any(|(rank, left)| *rank == peer && *left).then_some(peer)
            }
            Status::Round(round) => self.missing(&self.rounds[round]).find(|(_, left)| *left).map(|(rank, _)| rank),
            _ => None,
        }
    }

    /// Members, by world rank, that have not started a round, and whether they have left.
    fn missing(&self, round: &Round) -> impl Iterator<Item = (usize, bool)> {
        let group = &self.groups[round.group];
        let all = round.entries.iter().zip(group.members.iter().zip(&group.left));
        all.filter(|(entry, _)| entry.is_none()).map(|(_, (rank, left))| (*rank, *left))
    }

    /// Takes a member out of a round, that it has waited for or cannot wait for any longer.
    pub(super) fn leave(&mut self, round: usize, member: usize) {
        let round = &mut self.rounds[round];
        round.entries[member] = None;
        round.present -= 1;
    }

    /// Marks the world as failed, if nothing has failed before.
    pub(super) fn fail(&mut self, rank: usize, why: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(Failure { rank, why: why() });
        }
    }

    /// The error of `by`, if anybody has failed.
    pub(super) fn check(&self, by: usize, awaited: impl FnOnce() -> Awaited) -> Result<(), CommunicatorError> {
        match &self.failure {
            None => Ok(()),
            Some(Failure { rank, why }) => {
                Err(CommunicatorError::PeerGone { rank: *rank, why: why.clone(), by, awaited: awaited() })
            }
        }
    }
}

impl Round {
    fn empty(capacity: usize) -> Self {
        Self {
            group: 0,
            serial: 0,
            entries: Vec::with_capacity(capacity),
            entered: 0,
            present: 0,
            next: 0,
            done: 0,
            items: 0,
            disagreement: None,
        }
    }

    /// The next item, for the thread that asks.
    pub(super) fn hand_out(&mut self) -> Option<usize> {
        let item = self.next;
        (item < self.items).then(|| {
            self.next += 1;
            item
        })
    }

    /// Whether all members have started it. Then it ends without any of them.
    pub(super) fn is_full(&self) -> bool {
        self.entered == self.entries.len()
    }
}
