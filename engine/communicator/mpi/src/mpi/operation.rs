//! An operation in progress, composed of messages.
//!
//! Collectives consist of messages between all pairs of ranks. These move no more bytes than a ring, allow sums in the
//! order of ranks (MPI guarantees no order), and show which rank a blocked operation waits for.
//!
//! ```text
//! reduce_scatter   every rank sends part r to rank r, window by window; rank r sums the parts in the order of ranks
//! all_reduce       the same, and then every rank sends its sum to all
//! ```

use std::sync::Arc;

use gapless_communicator::backend::sum;
use gapless_communicator::{Awaited, Collective, CommunicatorError, Result};

use super::raw::{self, LARGEST, Outcome};

/// Number of elements of each part that are exchanged at a time. This bounds the memory for received data.
const WINDOW: usize = 1 << 18;

/// A communicator, as seen by the MPI thread.
#[derive(Debug)]
pub(super) struct Group {
    /// The communicator for messages.
    pub(super) messages: raw::Comm,
    /// The communicator for the messages of collectives.
    pub(super) collectives: raw::Comm,
    /// This rank's index in the group.
    pub(super) rank: usize,
    /// World ranks of the members.
    pub(super) members: Arc<[usize]>,
    /// Number of collectives started so far.
    pub(super) started: u64,
}

/// An operation and its unfinished messages.
pub(super) struct Operation {
    /// The slot to which the outcome is reported.
    pub(super) slot: usize,
    pub(super) group: usize,
    pub(super) awaited: Awaited,
    pieces: Vec<Piece>,
    sums: Option<Sums>,
}

/// A message, or a part of a message that is too long for one MPI call.
struct Piece {
    request: raw::Request,
    /// The other end's index in the group.
    peer: usize,
    /// The expected size of a receive; `None` for a send.
    expected: Option<usize>,
}

/// The remaining work of a collective that computes sums.
struct Sums {
    tag: i32,
    /// The parts that this rank sends to all ranks, one after another.
    send: *const f32,
    /// This rank's part of the sum.
    result: *mut f32,
    /// The sizes of the parts.
    part: Part,
    /// The target for gathering the summed parts; `None` if the sums are not gathered.
    gather: Option<*mut f32>,
    /// Number of elements of each part that are finished.
    done: usize,
    /// Number of elements of each part that are exchanged at a time.
    width: usize,
    /// True if a window was exchanged but not summed yet.
    exchanged: bool,
    /// Room for `width` elements from each rank.
    received: Vec<f32>,
}

/// The division of elements into one part per rank.
#[derive(Clone, Copy)]
enum Part {
    /// Parts as equal as possible.
    Even { count: usize, ranks: usize },
    /// Parts of this size each.
    Each(usize),
}

impl Part {
    /// Start and length of a rank's part.
    fn range(self, rank: usize) -> (usize, usize) {
        match self {
            Self::Even { count, ranks } => {
                let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
                (start(rank), start(rank + 1) - start(rank))
            }
            Self::Each(count) => (rank * count, count),
        }
    }
}

impl Operation {
    fn new(slot: usize, group: usize, awaited: Awaited) -> Self {
        Self { slot, group, awaited, pieces: Vec::new(), sums: None }
    }

    /// Starts a message.
    ///
    /// # Safety
    /// The bytes must stay lent until the operation has ended.
    pub(super) unsafe fn message(
        slot: usize,
        (index, group): (usize, &Group),
        (sends, address, len): (bool, *mut u8, usize),
        (peer, tag): (usize, i32),
        awaited: Awaited,
    ) -> Result<Self> {
        let mut this = Self::new(slot, index, awaited);
        // SAFETY: by this function's contract.
        unsafe {
            if sends {
                this.send(group.messages, address, len, peer, tag)?;
            } else {
                this.receive(group.messages, address, len, peer, tag)?;
            }
        }
        Ok(this)
    }

    /// Starts a collective.
    ///
    /// # Safety
    /// The collective's memory must stay lent until the operation has ended.
    pub(super) unsafe fn collective(
        slot: usize,
        (index, group): (usize, &mut Group),
        collective: Collective,
        awaited: Awaited,
    ) -> Result<Self> {
        let mut this = Self::new(slot, index, awaited);
        // Few collectives are in progress at once, so tags can be reused.
        let tag = (group.started & 0x7FFF) as i32;
        group.started += 1;
        let (me, ranks, comm) = (group.rank, group.members.len(), group.collectives);
        let others = (0..ranks).filter(|rank| *rank != me);
        // SAFETY: by this function's contract. Sizes and allowed overlaps are those in the documentation of
        // `Collective`.
        unsafe {
            match collective {
                Collective::AllReduce { values, count } => {
                    let part = Part::Even { count, ranks };
                    let result = values.add(part.range(me).0);
                    this.sums = Some(Sums::new(tag, values, result, part, Some(values)));
                }
                Collective::ReduceScatter { send, receive, count } => {
                    this.sums = Some(Sums::new(tag, send, receive, Part::Each(count), None));
                }
                Collective::AllGather { send, receive, len } => {
                    std::ptr::copy(send, receive.add(me * len), len);
                    for rank in others {
                        this.receive(comm, receive.add(rank * len), len, rank, tag)?;
                        this.send(comm, send, len, rank, tag)?;
                    }
                }
                Collective::AllToAllV { send, send_lens, receive, receive_lens } => {
                    let (mut send, mut receive) = (send, receive);
                    for rank in 0..ranks {
                        let (send_len, receive_len) = (*send_lens.add(rank), *receive_lens.add(rank));
                        // This rank's own part goes through MPI as well, which checks that the two sizes are equal.
                        this.receive(comm, receive, receive_len, rank, tag)?;
                        this.send(comm, send, send_len, rank, tag)?;
                        (send, receive) = (send.add(send_len), receive.add(receive_len));
                    }
                }
                Collective::Broadcast { bytes, len, root } if root == me => {
                    for rank in others {
                        this.send(comm, bytes, len, rank, tag)?;
                    }
                }
                Collective::Broadcast { bytes, len, root } => this.receive(comm, bytes, len, root, tag)?,
                Collective::Barrier => {
                    let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
                    for rank in others {
                        this.receive(comm, nothing, 0, rank, tag)?;
                        this.send(comm, nothing, 0, rank, tag)?;
                    }
                }
            }
        }
        Ok(this)
    }

    /// Makes all progress that is possible without waiting. Returns true once the operation has ended, after which its
    /// memory is not accessed any more.
    pub(super) fn advance(&mut self, group: &Group) -> Result<bool> {
        loop {
            let mut at = 0;
            while at < self.pieces.len() {
                match self.ended(at, group)? {
                    true => drop(self.pieces.swap_remove(at)),
                    false => at += 1,
                }
            }
            if !self.pieces.is_empty() {
                return Ok(false);
            }
            let Some(mut sums) = self.sums.take() else { return Ok(true) };
            if sums.exchanged {
                sums.add_up(group);
            }
            let more = sums.exchange(self, group)?;
            if more {
                self.sums = Some(sums);
            }
        }
    }

    /// True if the operation waits for this world rank.
    pub(super) fn waits_for(&self, rank: usize, group: &Group) -> bool {
        self.pieces.iter().any(|piece| group.members[piece.peer] == rank)
    }

    /// The world ranks for which the operation waits.
    pub(super) fn missing(&self, group: &Group) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.pieces.iter().map(|piece| group.members[piece.peer]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// True if the piece at index `at` has been transferred.
    fn ended(&mut self, at: usize, group: &Group) -> Result<bool> {
        let piece = &mut self.pieces[at];
        let (sent, expected) = match (raw::test(&mut piece.request)?, piece.expected) {
            (Outcome::UnderWay, _) => return Ok(false),
            (Outcome::Ended(_), None) => return Ok(true),
            (Outcome::Ended(len), Some(expected)) if len == expected => return Ok(true),
            (Outcome::Ended(len), Some(expected)) => (len, expected),
            (Outcome::Truncated(len), expected) => (len, expected.unwrap_or(0)),
        };
        let what = match &self.awaited {
            Awaited::Message { tag, .. } | Awaited::Taken { tag, .. } => tag.to_string(),
            Awaited::Collective { what, .. } => what.clone(),
            Awaited::Start => String::new(),
        };
        let (from, to) = (group.members[piece.peer], group.members[group.rank]);
        Err(CommunicatorError::SizeMismatch { what, from, to, sent, expected })
    }

    /// # Safety
    /// The bytes must stay lent until the operation has ended.
    unsafe fn send(&mut self, comm: raw::Comm, bytes: *const u8, len: usize, peer: usize, tag: i32) -> Result<()> {
        for (start, len) in pieces(len) {
            // SAFETY: by this function's contract.
            let request = unsafe { raw::isend(comm, bytes.add(start), len, peer, tag) }?;
            self.pieces.push(Piece { request, peer, expected: None });
        }
        Ok(())
    }

    /// # Safety
    /// The bytes must stay lent until the operation has ended.
    unsafe fn receive(&mut self, comm: raw::Comm, bytes: *mut u8, len: usize, peer: usize, tag: i32) -> Result<()> {
        for (start, len) in pieces(len) {
            // SAFETY: by this function's contract.
            let request = unsafe { raw::irecv(comm, bytes.add(start), len, peer, tag) }?;
            self.pieces.push(Piece { request, peer, expected: Some(len) });
        }
        Ok(())
    }
}

impl Sums {
    fn new(tag: i32, send: *const f32, result: *mut f32, part: Part, gather: Option<*mut f32>) -> Self {
        // The first part is the longest.
        let width = WINDOW.min(part.range(0).1);
        Self { tag, send, result, part, gather, done: 0, width, exchanged: false, received: Vec::new() }
    }

    /// Start and length of the current window in a rank's part.
    fn window(&self, rank: usize) -> (usize, usize) {
        let (start, len) = self.part.range(rank);
        let done = self.done.min(len);
        (start + done, self.width.min(len - done))
    }

    /// Sums the window that was exchanged last.
    fn add_up(&mut self, group: &Group) {
        let (start, len) = self.window(group.rank);
        let source = |rank: usize| match rank == group.rank {
            // SAFETY: the window lies within this rank's part, which is lent.
            true => unsafe { self.send.add(start) },
            false => self.received[rank * self.width..].as_ptr(),
        };
        // SAFETY: each source has `len` elements: `received` has room for `width` elements per rank, and its receives
        // have ended. The result is lent and as long as the part. If the result overlaps `send`, it is exactly this
        // rank's own part, of which each block is read before it is written.
        unsafe {
            let result = self.result.add(self.done);
            sum(group.members.len(), len, source, |at, block| {
                std::ptr::copy_nonoverlapping(block.as_ptr(), result.add(at), block.len());
            });
        }
        self.done += self.width;
        self.exchanged = false;
    }

    /// Starts to exchange the next window. After the last one, starts to exchange the sums, if these are gathered.
    /// Returns false if nothing is left to exchange.
    fn exchange(&mut self, operation: &mut Operation, group: &Group) -> Result<bool> {
        let (me, ranks, comm, tag) = (group.rank, group.members.len(), group.collectives, self.tag);
        let others = (0..ranks).filter(|rank| *rank != me);
        if self.done < self.part.range(0).1 {
            self.received.resize(ranks * self.width, 0.0);
            let (_, own) = self.window(me);
            for rank in others {
                let (start, len) = self.window(rank);
                let into = self.received[rank * self.width..].as_mut_ptr();
                // SAFETY: windows lie within parts, which are lent. `received` has room for `width` elements per rank,
                // and is not accessed until the operation's messages have ended.
                unsafe {
                    operation.receive(comm, into.cast(), 4 * own, rank, tag)?;
                    operation.send(comm, self.send.add(start).cast(), 4 * len, rank, tag)?;
                }
            }
            self.exchanged = true;
            return Ok(true);
        }
        let Some(values) = self.gather.take() else { return Ok(false) };
        let (own, own_len) = self.part.range(me);
        for rank in others {
            let (start, len) = self.part.range(rank);
            // SAFETY: parts lie within the values, which are lent. All earlier sends from the values have ended.
            unsafe {
                operation.receive(comm, values.add(start).cast(), 4 * len, rank, tag)?;
                operation.send(comm, values.add(own).cast(), 4 * own_len, rank, tag)?;
            }
        }
        Ok(true)
    }
}

/// Start and length of each piece of a message. Even an empty message has one piece.
fn pieces(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len.div_ceil(LARGEST).max(1)).map(move |i| (i * LARGEST, LARGEST.min(len - i * LARGEST)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_below_the_largest_count() {
        let all = |len| pieces(len).collect::<Vec<_>>();
        assert_eq!(all(0), [(0, 0)]);
        assert_eq!(all(5), [(0, 5)]);
        assert_eq!(all(LARGEST), [(0, LARGEST)]);
        assert_eq!(all(2 * LARGEST + 1), [(0, LARGEST), (LARGEST, LARGEST), (2 * LARGEST, 1)]);
        assert!(i32::try_from(LARGEST).is_ok());
    }

    #[test]
    fn parts_cover_everything_and_the_first_is_the_longest() {
        for ranks in 1..9 {
            for count in 0..50 {
                let parts: Vec<_> = (0..ranks).map(|rank| Part::Even { count, ranks }.range(rank)).collect();
                let end = parts.iter().fold(0, |end, (start, len)| {
                    assert_eq!(*start, end);
                    end + len
                });
                assert_eq!(end, count);
                assert!(parts.iter().all(|(_, len)| *len <= parts[0].1));
            }
        }
    }
}
