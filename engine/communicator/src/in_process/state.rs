//! The shared state of the ranks of one process, behind one lock.

use std::sync::Arc;

use super::memory::{Disagreement, Entry, Range};
use crate::{Awaited, CommunicatorError, Tag};

/// All groups and operations of a world.
#[derive(Debug)]
pub(super) struct State {
    /// The first failure of any rank. No operation can start after a failure.
    pub(super) failure: Option<Failure>,
    /// The communicators: the world, and the groups that it was split into.
    pub(super) groups: Vec<Group>,
    /// Operations, by world rank.
    pub(super) slots: Vec<Vec<Slot>>,
    /// Collectives in progress, and empty ones for reuse.
    pub(super) rounds: Vec<CollectiveInProgress>,
    /// Number of messages posted so far.
    posted: u64,
}

/// The rank that failed first, and why.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) rank: usize,
    pub(super) why: String,
}

/// A communicator, shared by all of its ranks.
#[derive(Debug)]
pub(super) struct Group {
    /// The split that created the group: the group that was split, the number of collectives which that group had
    /// started, and the color.
    pub(super) origin: (usize, u64, usize),
    /// World ranks of the members.
    pub(super) members: Arc<[usize]>,
    /// For each member, true if it has dropped its communicator.
    pub(super) left: Vec<bool>,
}

/// One operation of one rank. Slots are reused, so that a step allocates nothing in its steady state.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) group: usize,
    pub(super) status: Status,
}

/// The progress of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Status {
    /// No operation.
    Free,
    /// A message whose other end has not been posted yet.
    Posted(Post),
    /// A message that the other end's thread is copying.
    Copying,
    /// A message that was copied.
    Done,
    /// A message whose ends differ in size.
    Mismatched { post: Post, other: usize },
    /// This rank's share in `rounds[i]`.
    Round(usize),
}

/// One end of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Post {
    pub(super) sends: bool,
    pub(super) group: usize,
    /// The other end's world rank.
    pub(super) peer: usize,
    pub(super) tag: Tag,
    pub(super) range: Range,
    /// Number of the post, which orders messages with the same tag.
    serial: u64,
}

/// A collective in progress.
#[derive(Debug)]
pub(super) struct CollectiveInProgress {
    pub(super) group: usize,
    /// Index of the collective among those of its group.
    pub(super) serial: u64,
    /// One entry per member of the group. `None` if the member has not started the collective, or has left the round.
    pub(super) entries: Vec<Option<Entry>>,
    /// Number of members that have started the collective.
    pub(super) entered: usize,
    /// Number of members that have started the collective and not waited for it yet.
    present: usize,
    /// The next item to hand out, below `items`.
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

    /// Opens a slot for an operation.
    pub(super) fn open(&mut self, rank: usize, group: usize, status: Status) -> usize {
        let slots = &mut self.slots[rank];
        let index = slots.iter().position(|slot| matches!(slot.status, Status::Free)).unwrap_or_else(|| {
            slots.push(Slot { group, status: Status::Free });
            // Each round in use is held by at least one slot. As many rounds as slots are allocated, so that
            // allocations don't depend on how the ranks interleave.
            self.rounds.push(CollectiveInProgress::empty(self.groups[0].members.len()));
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

    /// Returns the peer's oldest posted end of a message that matches this end, or `None`.
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

    /// Enters a member into the collective with index `serial` of its group. Returns the index of the collective's
    /// round.
    pub(super) fn enter(&mut self, group: usize, serial: u64, member: usize, entry: Entry) -> usize {
        let under_way =
            |round: &CollectiveInProgress| round.present > 0 && (round.group, round.serial) == (group, serial);
        let index = self.rounds.iter().position(under_way).unwrap_or_else(|| {
            let free = self.rounds.iter().position(|round| round.present == 0);
            let index = free.unwrap_or_else(|| {
                self.rounds.push(CollectiveInProgress::empty(self.groups[0].members.len()));
                self.rounds.len() - 1
            });
            let round = &mut self.rounds[index];
            round.entries.clear();
            round.entries.resize(self.groups[group].members.len(), None);
            let entries = std::mem::take(&mut round.entries);
            *round = CollectiveInProgress { group, serial, entries, ..CollectiveInProgress::empty(0) };
            index
        });
        let round = &mut self.rounds[index];
        round.entries[member] = Some(entry);
        round.entered += 1;
        round.present += 1;
        index
    }

    /// Returns what a rank's blocked operation waits for.
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

    /// Returns a rank for which a blocked operation waits although that rank has left, or `None`.
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

    /// Returns the world ranks of the members that have not started the round, each with true if that rank has left the
    /// group.
    fn missing(&self, round: &CollectiveInProgress) -> impl Iterator<Item = (usize, bool)> {
        let group = &self.groups[round.group];
        let all = round.entries.iter().zip(group.members.iter().zip(&group.left));
        all.filter(|(entry, _)| entry.is_none()).map(|(_, (rank, left))| (*rank, *left))
    }

    /// Removes a member from a round, either after its wait or because it can no longer wait.
    pub(super) fn leave(&mut self, round: usize, member: usize) {
        let round = &mut self.rounds[round];
        round.entries[member] = None;
        round.present -= 1;
    }

    /// Records a failure of the world, unless another one was recorded before.
    pub(super) fn fail(&mut self, rank: usize, why: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(Failure { rank, why: why() });
        }
    }

    /// Returns an error for rank `by` if any rank has failed.
    pub(super) fn check(&self, by: usize, awaited: impl FnOnce() -> Awaited) -> Result<(), CommunicatorError> {
        match &self.failure {
            None => Ok(()),
            Some(Failure { rank, why }) => {
                Err(CommunicatorError::PeerGone { rank: *rank, why: why.clone(), by, awaited: awaited() })
            }
        }
    }
}

impl CollectiveInProgress {
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

    /// Returns the next item and counts it as handed out. Returns `None` if all items have been handed out.
    pub(super) fn hand_out(&mut self) -> Option<usize> {
        let item = self.next;
        (item < self.items).then(|| {
            self.next += 1;
            item
        })
    }

    /// True if all members have started the collective. Any single member can then complete the collective.
    pub(super) fn is_full(&self) -> bool {
        self.entered == self.entries.len()
    }
}
