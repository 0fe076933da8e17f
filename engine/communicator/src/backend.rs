//! What implementations of [`Communicator`] share: their requests, the groups that a split makes, and the one sum on the
//! host, in f32 and in the order of ranks, so that bits depend on nothing else.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Communicator, CommunicatorError, Result};

/// An operation under way. Its memory is lent until [`Communicator::wait`] takes the request back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the memory stays lent until the request is waited for"]
pub struct Request {
    /// The communicator that made it: no other may take it for one of its own, and end another operation by it.
    owner: Owner,
    slot: usize,
}

/// A communicator of one rank, unlike all others of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u64);

impl Owner {
    /// An owner that no other equals.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The request for the operation in a slot of its own.
    pub fn request(self, slot: usize) -> Request {
        Request { owner: self, slot }
    }

    /// The slot of a request.
    ///
    /// # Errors
    /// When another has made it.
    pub fn slot(self, request: Request) -> Result<usize> {
        if request.owner == self { Ok(request.slot) } else { Err(CommunicatorError::UnknownRequest) }
    }
}

/// A rank of a group, in the world, by the group's members there.
///
/// # Errors
/// [`CommunicatorError::NoSuchRank`].
pub fn world_rank(members: &[usize], rank: usize) -> Result<usize> {
    members.get(rank).copied().ok_or(CommunicatorError::NoSuchRank { rank, size: members.len() })
}

/// A rank's part.
pub struct Places {
    /// Number of the part among the parts, in the order of colors.
    pub color: usize,
    /// Its ranks, as they were before.
    pub members: Vec<usize>,
    /// This rank, among them.
    pub rank: usize,
}

/// Tells all ranks of each other's color and key. A collective operation.
///
/// # Errors
/// Those of [`Communicator::all_gather`].
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

/// Elements summed at a time, on the stack.
const BLOCK: usize = 1 << 10;

/// Σ over ranks, in their order, of `len` elements, block by block into `put`. Every block is read by all before it is
/// put, so it may be put to where it came from.
///
/// # Safety
/// There is a rank. Of each, `source` gives an aligned address that is valid for reads of `len` elements, which nobody but `put` writes.
pub unsafe fn sum(ranks: usize, len: usize, source: impl Fn(usize) -> *const f32, mut put: impl FnMut(usize, &[f32])) {
    let mut block = [0.0f32; BLOCK];
    for at in (0..len).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min(len - at)];
        // SAFETY: `at + block.len() ≤ len`, and nobody writes meanwhile; the block is on this thread's stack.
        unsafe {
            std::ptr::copy_nonoverlapping(source(0).add(at), block.as_mut_ptr(), block.len());
            for rank in 1..ranks {
                add(block, std::slice::from_raw_parts(source(rank).add(at), block.len()));
            }
        }
        put(at, block);
    }
}

/// Apart, so that the compiler knows the two as separate and adds many at a time.
fn add(block: &mut [f32], values: &[f32]) {
    block.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
