//! Ranks as threads of one process: a message is one copy, a sum reads every rank's values where they lie.
//!
//! Whoever comes second to a message copies it; whoever waits for a collective that all have started does what is left
//! of it. So nothing that all its ranks have started needs any of them to end. Addresses are followed in `memory` alone,
//! which also says why that is sound; `state` is bookkeeping behind one lock.

mod memory;
mod state;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::memory::{Disagreement, Entry, Range};
use self::state::{Group, Post, Slot, State, Status};
use crate::backend::{Owner, places, world_rank};
use crate::{Awaited, Collective, Communicator, CommunicatorError, Memory, Request, Result, Tag, default_timeout};

/// A rank that is a thread. Made by [`InProcess::world`], one per thread.
///
/// A rank that drops it while its thread panics, or with operations under way, fails the world.
#[derive(Debug)]
pub struct InProcess {
    world: Arc<World>,
    owner: Owner,
    /// Index of the group of ranks this is an end of.
    group: usize,
    /// World ranks of the group.
    members: Arc<[usize]>,
    /// This rank in the group.
    rank: usize,
    /// Collectives started so far.
    collectives: u64,
    timeout: Duration,
    /// What all ranks have published for the collective at hand.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct World {
    state: Mutex<State>,
    /// One per rank, for whatever that rank waits for.
    changed: Vec<Condvar>,
}

impl InProcess {
    /// One end for each of `ranks` threads.
    ///
    /// The timeout is [`default_timeout`]'s; ten minutes, with a warning, where its variable is malformed.
    pub fn world(ranks: usize) -> Vec<Self> {
        let changed = (0..ranks).map(|_| Condvar::new()).collect();
        let world = Arc::new(World { state: Mutex::new(State::new(ranks)), changed });
        let members = world.lock().groups[0].members.clone();
        let timeout = default_timeout().unwrap_or_else(|error| {
            tracing::warn!("{error}");
            Duration::from_secs(600)
        });
        (0..ranks).map(|rank| Self::end(&world, 0, &members, rank, timeout)).collect()
    }

    fn end(world: &Arc<World>, group: usize, members: &Arc<[usize]>, rank: usize, timeout: Duration) -> Self {
        let entries = Vec::with_capacity(members.len());
        Self {
            world: world.clone(),
            owner: Owner::unique(),
            group,
            members: members.clone(),
            rank,
            collectives: 0,
            timeout,
            entries,
        }
    }

    /// This rank in the world.
    fn me(&self) -> usize {
        self.members[self.rank]
    }

    /// Takes a slot for an operation.
    fn open(&self, state: &mut State, status: Status) -> Request {
        self.owner.request(state.open(self.me(), self.group, status))
    }

    /// Posts one end of a message, and copies it if the other end is there.
    fn post(&mut self, sends: bool, range: Range, peer: usize, tag: Tag) -> Result<Request> {
        let (me, peer) = (self.me(), world_rank(&self.members, peer)?);
        let mut state = self.world.lock();
        state.check(me, || Awaited::Start)?;
        let post = state.post(self.group, sends, peer, tag, range);
        let Some((slot, other)) = state.counterpart(me, &post) else {
            return Ok(self.open(&mut state, Status::Posted(post)));
        };
        if other.range.len != range.len {
            state.slots[peer][slot].status = Status::Mismatched { post: other, other: range.len };
            self.world.changed[peer].notify_all();
            return Ok(self.open(&mut state, Status::Mismatched { post, other: other.range.len }));
        }
        state.slots[peer][slot].status = Status::Copying;
        drop(state);
        let (from, to) = if sends { (range, other.range) } else { (other.range, range) };
        // SAFETY: both ends are posted, with one length. The other one is `Copying` by now, so that this thread alone has
        // the message, and its owner waits for `Done`.
        unsafe { memory::copy(from, to) };
        let mut state = self.world.lock();
        state.slots[peer][slot].status = Status::Done;
        self.world.changed[peer].notify_all();
        Ok(self.open(&mut state, Status::Done))
    }

    /// Sees an operation to its end, or to where `when_blocked` gives up on it. Afterwards nobody touches its memory.
    fn settle<'a>(
        &mut self,
        world: &'a World,
        mut state: MutexGuard<'a, State>,
        slot: usize,
        mut when_blocked: impl FnMut(&State, usize) -> Result<Option<Instant>>,
    ) -> (MutexGuard<'a, State>, Result<()>) {
        let me = self.me();
        let outcome = loop {
            match self.outlook(&state, slot) {
                Outlook::Ended(outcome) => break outcome,
                Outlook::ToDo(round) => state = self.perform(world, state, round),
                Outlook::InWork => state = world.block(state, me, None),
                Outlook::Blocked => match when_blocked(&state, slot) {
                    Ok(deadline) => state = world.block(state, me, deadline),
                    Err(error) => break Err(error),
                },
            }
        };
        if let Status::Round(round) = state.slots[me][slot].status {
            state.leave(round, self.rank);
        }
        state.close(me, slot);
        (state, outcome)
    }

    /// How an operation stands.
    fn outlook(&self, state: &State, slot: usize) -> Outlook {
        let me = self.me();
        match state.slots[me][slot].status {
            Status::Free => Outlook::Ended(Err(CommunicatorError::UnknownRequest)),
            Status::Posted(_) => Outlook::Blocked,
            Status::Copying => Outlook::InWork,
            Status::Done => Outlook::Ended(Ok(())),
            Status::Mismatched { post, other } => Outlook::Ended(Err(mismatch(me, &post, other))),
            Status::Round(index) => {
                let round = &state.rounds[index];
                match round.disagreement {
                    _ if !round.is_full() => Outlook::Blocked,
                    Some(disagreement) => Outlook::Ended(Err(self.disagreement(disagreement))),
                    None if round.next < round.items => Outlook::ToDo(index),
                    None if round.done < round.items => Outlook::InWork,
                    None => Outlook::Ended(Ok(())),
                }
            }
        }
    }

    /// Does items of a round that all members have started, until none is left to hand out.
    fn perform<'a>(
        &mut self,
        world: &'a World,
        mut state: MutexGuard<'a, State>,
        index: usize,
    ) -> MutexGuard<'a, State> {
        self.entries.clear();
        self.entries.extend(state.rounds[index].entries.iter().flatten());
        while let Some(item) = state.rounds[index].hand_out() {
            drop(state);
            // SAFETY: `start` has passed the entries when the round became full. No member leaves it before all items are
            // done, so all memory is still lent. `hand_out` gives each item once.
            unsafe { memory::perform(&self.entries, item) };
            state = world.lock();
            let round = &mut state.rounds[index];
            round.done += 1;
            if round.done == round.items {
                self.members.iter().for_each(|rank| world.changed[*rank].notify_all());
            }
        }
        state
    }

    fn disagreement(&self, disagreement: Disagreement) -> CommunicatorError {
        match disagreement {
            Disagreement::Started { ranks: [rank, other], entries: [started, other_started] } => {
                CommunicatorError::CollectiveMismatch {
                    rank: self.members[rank],
                    started: started.0.to_string(),
                    other: self.members[other],
                    other_started: other_started.0.to_string(),
                }
            }
            Disagreement::Part { from, to, sent, expected } => CommunicatorError::SizeMismatch {
                what: "all_to_all_v".into(),
                from: self.members[from],
                to: self.members[to],
                sent,
                expected,
            },
        }
    }
}

/// How an operation stands.
enum Outlook {
    /// Nobody touches its memory any longer.
    Ended(Result<()>),
    /// All ranks have started this round, and there is work to share.
    ToDo(usize),
    /// Another thread works on it, and will be done whatever happens.
    InWork,
    /// Another rank has not started it.
    Blocked,
}

// SAFETY: `settle` ends with the memory left alone, by the argument of `memory`; `wait` and `drop` go through it.
unsafe impl Communicator for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn memory(&self) -> Memory {
        Memory::Host
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request> {
        self.post(true, Range { address: bytes.cast_mut(), len }, to, tag)
    }

    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request> {
        self.post(false, Range { address: bytes, len }, from, tag)
    }

    unsafe fn start(&mut self, collective: Collective) -> Result<Request> {
        if let Collective::Broadcast { root, .. } = collective {
            world_rank(&self.members, root)?;
        }
        let me = self.me();
        let mut state = self.world.lock();
        state.check(me, || Awaited::Start)?;
        let slot = state.open(me, self.group, Status::Free);
        let index = state.enter(self.group, self.collectives, self.rank, Entry(collective));
        state.slots[me][slot].status = Status::Round(index);
        self.collectives += 1;
        let round = &mut state.rounds[index];
        if round.is_full() {
            self.entries.clear();
            self.entries.extend(round.entries.iter().flatten());
            // SAFETY: the round is full, and nobody has left it, since nobody leaves a round that has not failed before.
            match unsafe { memory::items(&self.entries) } {
                Ok(items) => round.items = items,
                Err(disagreement) => round.disagreement = Some(disagreement),
            }
            self.members.iter().for_each(|rank| self.world.changed[*rank].notify_all());
        }
        Ok(self.owner.request(slot))
    }

    fn wait(&mut self, request: Request) -> Result<()> {
        let slot = self.owner.slot(request)?;
        let (world, me, timeout) = (self.world.clone(), self.me(), self.timeout);
        let state = world.lock();
        let mut deadline = None;
        let (mut state, outcome) = self.settle(&world, state, slot, |state, slot| {
            let awaited = || state.awaited(me, slot);
            state.check(me, awaited)?;
            if let Some(rank) = state.absent(me, slot) {
                let why = "it dropped its communicator before that".into();
                return Err(CommunicatorError::PeerGone { rank, why, by: me, awaited: awaited() });
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now().checked_add(timeout));
            match deadline {
                Some(at) if Instant::now() >= at => {
                    Err(CommunicatorError::Timeout { rank: me, awaited: awaited(), after: timeout })
                }
                _ => Ok(deadline),
            }
        });
        if let Err(error) = &outcome {
            match error {
                CommunicatorError::PeerGone { rank, .. } => {
                    state.fail(*rank, || format!("it dropped its communicator before rank {me} was done"))
                }
                _ => state.fail(me, || error.to_string()),
            }
            world.wake_all();
        }
        outcome
    }

    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let places = places(self, color, key)?;
        let origin = (self.group, self.collectives, places.color);
        let mut state = self.world.lock();
        let group = state.groups.iter().position(|group| group.origin == origin).unwrap_or_else(|| {
            let members: Arc<[usize]> = places.members.iter().map(|rank| self.members[*rank]).collect();
            let left = vec![false; members.len()];
            state.groups.push(Group { origin, members, left });
            state.groups.len() - 1
        });
        let members = state.groups[group].members.clone();
        drop(state);
        Ok(Box::new(Self::end(&self.world, group, &members, places.rank, self.timeout)))
    }

    fn abort(&mut self, reason: &str) {
        self.world.lock().fail(self.me(), || reason.to_owned());
        self.world.wake_all();
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let (world, me) = (self.world.clone(), self.me());
        let mut state = world.lock();
        let mut under_way = 0;
        for slot in 0..state.slots[me].len() {
            let Slot { group, status, .. } = &state.slots[me][slot];
            if *group == self.group && !matches!(status, Status::Free) {
                let give_up = |_: &State, _| Err(CommunicatorError::UnknownRequest);
                let (back, outcome) = self.settle(&world, state, slot, give_up);
                state = back;
                under_way += usize::from(outcome.is_err());
            }
        }
        if std::thread::panicking() {
            state.fail(me, || "its thread panicked".into());
        } else if under_way > 0 {
            state.fail(me, || format!("it dropped its communicator with {under_way} operation(s) under way"));
        }
        state.groups[self.group].left[self.rank] = true;
        drop(state);
        world.wake_all();
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change that concerns a rank, until a deadline at most.
    fn block<'a>(&self, state: MutexGuard<'a, State>, rank: usize, deadline: Option<Instant>) -> MutexGuard<'a, State> {
        let changed = &self.changed[rank];
        match deadline {
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    fn wake_all(&self) {
        self.changed.iter().for_each(Condvar::notify_all);
    }
}

/// The error of a message whose ends differ in size.
fn mismatch(me: usize, post: &Post, other: usize) -> CommunicatorError {
    let (from, to, sent, expected) =
        if post.sends { (me, post.peer, post.range.len, other) } else { (post.peer, me, other, post.range.len) };
    CommunicatorError::SizeMismatch { what: post.tag.to_string(), from, to, sent, expected }
}
