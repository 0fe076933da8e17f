//! Ranks as threads of one process: a message is one copy, and a sum reads every rank's values in place.
//!
//! A message has two ends, and the rank that posts its end last copies the message. A collective that all ranks have
//! started is executed by the ranks that wait for it. So an operation that all of its ranks have started can complete
//! without any further call by another rank. Only `memory` dereferences addresses; its documentation explains why that
//! is sound. `state` is bookkeeping behind one lock.

mod memory;
mod state;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::memory::{Disagreement, Entry, Range};
use self::state::{Group, Post, Slot, State, Status};
use crate::backend::{Owner, places, world_rank};
use crate::{Awaited, Collective, Communicator, CommunicatorError, Memory, Request, Result, Tag, default_timeout};

/// A rank that is a thread. [`InProcess::world`] creates one per thread.
///
/// The world fails if a rank is dropped while its thread panics, or while the rank has operations in progress.
#[derive(Debug)]
pub struct InProcess {
    world: Arc<World>,
    owner: Owner,
    /// Index of the group of ranks to which this communicator belongs.
    group: usize,
    /// World ranks of the group.
    members: Arc<[usize]>,
    /// This rank's index in the group.
    rank: usize,
    /// Number of collectives that this rank has started so far.
    collectives: u64,
    timeout: Duration,
    /// Buffer for the entries of all ranks in the current collective.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct World {
    state: Mutex<State>,
    /// One condition variable per rank, signalled at every change that the rank may be waiting for.
    changed: Vec<Condvar>,
}

impl InProcess {
    /// Creates a communicator for each of `ranks` threads.
    ///
    /// The timeout is that of [`default_timeout`]. If its environment variable is malformed, a warning is printed and
    /// the timeout is ten minutes.
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

    /// This rank's index in the world.
    fn me(&self) -> usize {
        self.members[self.rank]
    }

    /// Opens a slot for an operation.
    fn open(&self, state: &mut State, status: Status) -> Request {
        self.owner.request(state.open(self.me(), self.group, status))
    }

    /// Posts one end of a message. If the other end has been posted already, copies the message.
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
        // SAFETY: both ends are posted and have the same length. The other end's status is now `Copying`, so no other
        // thread copies the message, and the other rank waits until the status is `Done`.
        unsafe { memory::copy(from, to) };
        let mut state = self.world.lock();
        state.slots[peer][slot].status = Status::Done;
        self.world.changed[peer].notify_all();
        Ok(self.open(&mut state, Status::Done))
    }

    /// Works on an operation until the operation ends, or until `when_blocked` returns an error. After this call, the
    /// operation's memory is not accessed any more.
    fn work_until_ended<'a>(
        &mut self,
        world: &'a World,
        mut state: MutexGuard<'a, State>,
        slot: usize,
        mut when_blocked: impl FnMut(&State, usize) -> Result<Option<Instant>>,
    ) -> (MutexGuard<'a, State>, Result<()>) {
        let me = self.me();
        let outcome = loop {
            match self.state(&state, slot) {
                OperationState::Ended(outcome) => break outcome,
                OperationState::ToDo(round) => state = self.perform(world, state, round),
                OperationState::InWork => state = world.block(state, me, None),
                OperationState::Blocked => match when_blocked(&state, slot) {
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

    /// The state of an operation.
    fn state(&self, state: &State, slot: usize) -> OperationState {
        let me = self.me();
        match state.slots[me][slot].status {
            Status::Free => OperationState::Ended(Err(CommunicatorError::UnknownRequest)),
            Status::Posted(_) => OperationState::Blocked,
            Status::Copying => OperationState::InWork,
            Status::Done => OperationState::Ended(Ok(())),
            Status::Mismatched { post, other } => OperationState::Ended(Err(mismatch(me, &post, other))),
            Status::Round(index) => {
                let round = &state.rounds[index];
                match round.disagreement {
                    _ if !round.is_full() => OperationState::Blocked,
                    Some(disagreement) => OperationState::Ended(Err(self.disagreement(disagreement))),
                    None if round.next < round.items => OperationState::ToDo(index),
                    None if round.done < round.items => OperationState::InWork,
                    None => OperationState::Ended(Ok(())),
                }
            }
        }
    }

    /// Executes items of a round that all members have started, until all items have been handed out.
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
            // SAFETY: `start` has checked the entries when the round became full. No member leaves the round before all
            // items are done, so all memory is still lent. `hand_out` returns each item once.
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

/// The state of an operation.
enum OperationState {
    /// The operation's memory is not accessed any more.
    Ended(Result<()>),
    /// All ranks have started this round, and some of its items are not done.
    ToDo(usize),
    /// Another thread works on the operation, and will finish even if ranks fail.
    InWork,
    /// Another rank has not started the operation.
    Blocked,
}

// SAFETY: after `settle`, which both `wait` and `drop` call, the operation's memory is not accessed any more; the
// documentation of `memory` explains why.
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
            // SAFETY: all members have entered the round, and none has left it. A member leaves only after the world
            // has failed, which `check` above would have reported, or after all items of the full round are done. This
            // round has no items yet.
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
        let (mut state, outcome) = self.work_until_ended(&world, state, slot, |state, slot| {
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
                let (back, outcome) = self.work_until_ended(&world, state, slot, give_up);
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

    /// Waits for a change that concerns a rank, but no longer than until the deadline.
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

/// The error for a message whose ends differ in size.
fn mismatch(me: usize, post: &Post, other: usize) -> CommunicatorError {
    let (from, to, sent, expected) =
        if post.sends { (me, post.peer, post.range.len, other) } else { (post.peer, me, other, post.range.len) };
    CommunicatorError::SizeMismatch { what: post.tag.to_string(), from, to, sent, expected }
}
