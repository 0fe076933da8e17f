//! The memory that ranks lend each other, and all code that accesses it.
//!
//! All ranks share one address space, so a message is one copy from the sender's bytes to the receiver's, and a sum
//! reads every rank's values in place. Addresses are dereferenced only here. This is sound because:
//!
//! 1. By the contract of `isend`, `irecv` and `start`, the memory of an operation is valid and not otherwise accessed,
//!    until the wait for the operation has returned or the communicator was dropped.
//! 2. The state's lock hands every piece of work (one message, or one item of a collective) to exactly one thread,
//!    after all ranks involved have published their memory.
//! 3. `wait` and `drop` return only when no thread works on the memory. Work that was not handed out is withdrawn under
//!    the lock. Work that was handed out is waited for, even if a rank has failed.
//! 4. Items of one collective write disjoint memory, and no item writes memory that another item reads.

use crate::Collective;
use crate::backend::sum;

/// Number of elements (or bytes) of one item: large enough to hide the cost of the lock, small enough to share the
/// work.
const SEGMENT: usize = 1 << 14;

/// The bytes at one end of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) address: *mut u8,
    pub(super) len: usize,
}

// SAFETY: moving an address to another thread is harmless; only `copy` dereferences it.
unsafe impl Send for Range {}

/// One rank's memory in a collective.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry(pub(super) Collective);

// SAFETY: as for `Range`; only `perform` dereferences it.
unsafe impl Send for Entry {}

/// The mismatch between two ranks of one collective.
#[derive(Debug, Clone, Copy)]
pub(super) enum Disagreement {
    /// The ranks have started different operations, or the same operation with different sizes.
    Started { ranks: [usize; 2], entries: [Entry; 2] },
    /// A part of an all-to-all has different sizes at its ends.
    Part { from: usize, to: usize, sent: usize, expected: usize },
}

/// Copies a message.
///
/// # Safety
/// Both ranges must be published and have the same length, and the message must have been handed to this thread.
pub(super) unsafe fn copy(from: Range, to: Range) {
    debug_assert_eq!(from.len, to.len);
    // SAFETY: by this function's contract. Source and target of a message may be the same, so overlap is allowed.
    unsafe { std::ptr::copy(from.address, to.address, from.len) }
}

/// Checks that all entries of a collective agree, and returns the number of its items.
///
/// # Safety
/// All entries must be published.
pub(super) unsafe fn items(entries: &[Entry]) -> Result<usize, Disagreement> {
    let ranks = entries.len();
    let all = |same: &dyn Fn(&Collective) -> bool| match entries.iter().position(|entry| !same(&entry.0)) {
        Some(rank) => Err(Disagreement::Started { ranks: [rank, 0], entries: [entries[rank], entries[0]] }),
        None => Ok(()),
    };
    match entries[0].0 {
        Collective::AllReduce { count, .. } => {
            all(&|other| matches!(other, Collective::AllReduce { count: c, .. } if *c == count))?;
            Ok(count.div_ceil(SEGMENT))
        }
        Collective::ReduceScatter { count, .. } => {
            all(&|other| matches!(other, Collective::ReduceScatter { count: c, .. } if *c == count))?;
            Ok(ranks * count.div_ceil(SEGMENT))
        }
        Collective::AllGather { len, .. } => {
            all(&|other| matches!(other, Collective::AllGather { len: l, .. } if *l == len))?;
            Ok(ranks * len.div_ceil(SEGMENT))
        }
        Collective::Broadcast { len, root, .. } => {
            all(&|other| matches!(other, Collective::Broadcast { len: l, root: r, .. } if (*l, *r) == (len, root)))?;
            Ok(len.div_ceil(SEGMENT))
        }
        Collective::Barrier => {
            all(&|other| matches!(other, Collective::Barrier))?;
            Ok(0)
        }
        Collective::AllToAllV { .. } => {
            all(&|other| matches!(other, Collective::AllToAllV { .. }))?;
            for (from, sender) in entries.iter().enumerate() {
                for (to, receiver) in entries.iter().enumerate() {
                    // SAFETY: both entries are `AllToAllV`, with n sizes each.
                    let (sent, expected) = unsafe { (part(sender, to, true).1, part(receiver, from, false).1) };
                    if sent != expected {
                        return Err(Disagreement::Part { from, to, sent, expected });
                    }
                }
            }
            Ok(ranks * ranks)
        }
    }
}

/// Executes one item of a collective for all ranks.
///
/// # Safety
/// All entries must be published and checked by `items`, and the item must have been handed to this thread.
pub(super) unsafe fn perform(entries: &[Entry], item: usize) {
    let ranks = entries.len();
    // SAFETY: segments lie within the counts on which all entries agree, and parts lie within their sizes.
    unsafe {
        match entries[0].0 {
            Collective::AllReduce { count, .. } => {
                let (start, len) = segment(item, count);
                let values = |rank: usize| match entries[rank].0 {
                    Collective::AllReduce { values, .. } => values.add(start),
                    _ => unreachable!("all ranks started an all_reduce"),
                };
                sum(
                    ranks,
                    len,
                    |rank| values(rank).cast_const(),
                    |at, block| (0..ranks).for_each(|rank| put(values(rank).add(at), block)),
                );
            }
            Collective::ReduceScatter { count, .. } => {
                let segments = count.div_ceil(SEGMENT);
                let (owner, (start, len)) = (item / segments, segment(item % segments, count));
                let Collective::ReduceScatter { receive, .. } = entries[owner].0 else {
                    unreachable!("all ranks started a reduce_scatter")
                };
                let source = |rank: usize| match entries[rank].0 {
                    Collective::ReduceScatter { send, .. } => send.add(owner * count + start),
                    _ => unreachable!("all ranks started a reduce_scatter"),
                };
                sum(ranks, len, source, |at, block| put(receive.add(start + at), block));
            }
            Collective::AllGather { len, .. } => {
                let segments = len.div_ceil(SEGMENT);
                let (owner, (start, len_here)) = (item / segments, segment(item % segments, len));
                let Collective::AllGather { send, .. } = entries[owner].0 else {
                    unreachable!("all ranks started an all_gather")
                };
                for entry in entries {
                    let Collective::AllGather { receive, .. } = entry.0 else {
                        unreachable!("all ranks started an all_gather")
                    };
                    // If the operation is in place, the owner's part is copied onto itself.
                    std::ptr::copy(send.add(start), receive.add(owner * len + start), len_here);
                }
            }
            Collective::Broadcast { len, root, .. } => {
                let (start, len) = segment(item, len);
                let bytes = |rank: usize| match entries[rank].0 {
                    Collective::Broadcast { bytes, .. } => bytes.add(start),
                    _ => unreachable!("all ranks started a broadcast"),
                };
                for rank in (0..ranks).filter(|rank| *rank != root) {
                    std::ptr::copy_nonoverlapping(bytes(root), bytes(rank), len);
                }
            }
            Collective::AllToAllV { .. } => {
                let (from, to) = (item / ranks, item % ranks);
                let (source, len) = part(&entries[from], to, true);
                let (target, _) = part(&entries[to], from, false);
                std::ptr::copy_nonoverlapping(source, target, len);
            }
            Collective::Barrier => unreachable!("a barrier has no items"),
        }
    }
}

/// Start and length of a segment of `count` elements.
fn segment(index: usize, count: usize) -> (usize, usize) {
    let start = index * SEGMENT;
    (start, SEGMENT.min(count - start))
}

/// Address and size of the part for, or from, a rank.
///
/// # Safety
/// The entry must be a published `AllToAllV` with more than `rank` sizes.
unsafe fn part(entry: &Entry, rank: usize, sends: bool) -> (*mut u8, usize) {
    let Collective::AllToAllV { send, send_lens, receive, receive_lens } = entry.0 else {
        unreachable!("all ranks started an all_to_all_v")
    };
    let (base, lens) = if sends { (send.cast_mut(), send_lens) } else { (receive, receive_lens) };
    // SAFETY: by this function's contract; parts are stored one after another.
    unsafe {
        let offset: usize = (0..rank).map(|r| *lens.add(r)).sum();
        (base.add(offset), *lens.add(rank))
    }
}

/// # Safety
/// `target` must be valid for writes of the block's length.
unsafe fn put(target: *mut f32, block: &[f32]) {
    // SAFETY: by this function's contract; the block is on a stack.
    unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), target, block.len()) }
}
