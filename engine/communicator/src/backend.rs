//! Code that the implementations of [`Communicator`] share: requests, the groups of a split, and the sum. All sums on
//! the host are computed here, in f32 and in the order of ranks, so their bits do not depend on the backend or on
//! timing.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Communicator, CommunicatorError, Result};

/// An operation in progress. Its memory is lent until the request is passed to [`Communicator::wait`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the memory stays lent until the request is waited for"]
pub struct Request {
    /// The communicator that created the request. Other communicators return an error for the request, since its slot
    /// would be one of their own operations.
    owner: Owner,
    slot: usize,
}

/// The identity of one rank's communicator, unique in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u64);

impl Owner {
    /// Creates an owner that equals no other.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates the request for the operation in a slot of this owner.
    pub fn request(self, slot: usize) -> Request {
        Request { owner: self, slot }
    }

    /// Returns the slot of a request.
    ///
    /// # Errors
    /// Returns an error if the request belongs to another owner.
    pub fn slot(self, request: Request) -> Result<usize> {
        if request.owner == self { Ok(request.slot) } else { Err(CommunicatorError::UnknownRequest) }
    }
}

/// Returns the world rank of a group's rank. `members` are the group's world ranks.
///
/// # Errors
/// Returns [`CommunicatorError::NoSuchRank`] if the group has no such rank.
pub fn world_rank(members: &[usize], rank: usize) -> Result<usize> {
    members.get(rank).copied().ok_or(CommunicatorError::NoSuchRank { rank, size: members.len() })
}

/// The group to which a rank belongs after a split.
pub struct Places {
    /// Index of the group, in the order of colors.
    pub color: usize,
    /// The group's ranks, as numbered before the split.
    pub members: Vec<usize>,
    /// Index of this rank among the group's ranks.
    pub rank: usize,
}

/// Exchanges the colors and keys of all ranks and returns this rank's group. This is a collective operation.
///
/// # Errors
/// Returns an error in the same cases as [`Communicator::all_gather`].
pub fn places(whole: &mut dyn Communicator, color: usize, key: usize) -> Result<Places> {
    const WORD: usize = size_of::<usize>();
    let mut bytes = vec![0; 2 * WORD * whole.size()];
    whole.all_gather(&[color.to_ne_bytes(), key.to_ne_bytes()].concat(), &mut bytes)?;
    let words = bytes.chunks_exact(WORD).map(|word| usize::from_ne_bytes(word.try_into().expect("a word's bytes")));
    let words: Vec<usize> = words.collect();

    let mut colors: Vec<usize> = words.iter().copied().step_by(2).collect();
    let mut members: Vec<usize> = (0..whole.size()).filter(|rank| colors[*rank] == color).collect();
    members.sort_by_key(|rank| (words[2 * rank + 1], *rank));
    let rank = members.iter().position(|rank| *rank == whole.rank()).expect("a rank has its own color");
    colors.sort_unstable();
    colors.dedup();
    let color = colors.partition_point(|other| *other < color);
    Ok(Places { color, members, rank })
}

/// Number of elements that are summed at a time, on the stack.
const BLOCK: usize = 1 << 10;

/// Adds `len` elements of all ranks, in the order of ranks, and passes the sums to `put` block by block. Each block is
/// read from all ranks before its sums are passed to `put`. So `put` may overwrite the elements of that block.
///
/// # Safety
/// There must be at least one rank. For each rank, `source` must return an aligned address that is valid for reads of
/// `len` elements. During the call, only `put` may write these elements.
pub unsafe fn sum(ranks: usize, len: usize, source: impl Fn(usize) -> *const f32, mut put: impl FnMut(usize, &[f32])) {
    let mut block = [0.0f32; BLOCK];
    for at in (0..len).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min(len - at)];
        // SAFETY: `at + block.len() ≤ len`, and the sources are not written meanwhile; the block is on this thread's
        // stack.
        unsafe {
            std::ptr::copy_nonoverlapping(source(0).add(at), block.as_mut_ptr(), block.len());
            for rank in 1..ranks {
                add(block, std::slice::from_raw_parts(source(rank).add(at), block.len()));
            }
        }
        put(at, block);
    }
}

/// This is a separate function so that the compiler can assume that the slices do not overlap, and vectorizes the loop.
fn add(block: &mut [f32], values: &[f32]) {
    block.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
