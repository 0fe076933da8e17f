//! The blocks of a caching allocator: pieces of segments that are linked to their neighbours, and pools of free blocks.
//!
//! In: blocks that the allocator cuts and joins. Out: the best-fitting free block. Never: a decision about the device.

use std::collections::BTreeSet;

use crate::Stream;

/// Index of a block in its [`Blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub u32);

/// The pool of a block. Requests of at most 1 MiB never share a pool with larger ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PoolKind {
    Small,
    Large,
}

/// One piece of a segment.
#[derive(Debug, Clone)]
pub(super) struct BlockState {
    pub stream: Stream,
    pub pool: PoolKind,
    pub address: u64,
    pub bytes: u64,
    /// Number of the block's segment, in the order in which segments were taken from the device. Of free blocks of
    /// equal size, the one with the lowest number comes first, then the one with the lowest address.
    pub age: u64,
    /// True if the program holds the block.
    pub allocated: bool,
    /// True if physical memory backs the block. Only blocks of expandable segments may be unmapped.
    pub mapped: bool,
    /// The expandable segment of the block, if any.
    pub expandable: Option<u32>,
    pub previous: Option<BlockId>,
    pub next: Option<BlockId>,
    /// Other streams that have used the block since it was handed out.
    pub used_by: Vec<Stream>,
    /// Number of streams whose work on the block is not finished, although the program has freed it.
    pub pending_events: u32,
    /// Number of searches of the pool when the block became free, for garbage collection.
    pub searches_when_freed: u64,
}

impl BlockState {
    /// True if the block is only a part of its segment.
    pub(super) fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }

    /// True if neither the program nor the device uses the block.
    pub(super) fn is_idle(&self) -> bool {
        !self.allocated && self.pending_events == 0 && self.used_by.is_empty()
    }
}

type FreeKey = (Stream, u64, u64, u64, BlockId);

/// Free blocks of one pool.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Free blocks by stream, then size, then age. The first entry at or after a request is the best fit.
    pub free: BTreeSet<FreeKey>,
    /// Address space without memory, by stream and address.
    pub unmapped: BTreeSet<(Stream, u64, BlockId)>,
    /// Searches so far.
    pub searches: u64,
}

/// All blocks and both pools.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    states: Vec<BlockState>,
    vacant: Vec<BlockId>,
    pools: [Pool; 2],
    segments: u64,
}

impl Blocks {
    pub(super) fn get(&self, id: BlockId) -> &BlockState {
        &self.states[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: BlockId) -> &mut BlockState {
        &mut self.states[id.0 as usize]
    }

    pub(super) fn pool(&self, kind: PoolKind) -> &Pool {
        &self.pools[kind as usize]
    }

    pub(super) fn pool_mut(&mut self, kind: PoolKind) -> &mut Pool {
        &mut self.pools[kind as usize]
    }

    /// Creates a segment as one block, which is in no set yet.
    pub(super) fn create_segment(&mut self, stream: Stream, pool: PoolKind, address: u64, bytes: u64) -> BlockId {
        self.segments += 1;
        self.insert(BlockState {
            stream,
            pool,
            address,
            bytes,
            age: self.segments,
            allocated: false,
            mapped: true,
            expandable: None,
            previous: None,
            next: None,
            used_by: Vec::new(),
            pending_events: 0,
            searches_when_freed: 0,
        })
    }

    fn insert(&mut self, state: BlockState) -> BlockId {
        if let Some(id) = self.vacant.pop() {
            *self.get_mut(id) = state;
            return id;
        }
        let id = BlockId(u32::try_from(self.states.len()).expect("fewer than 2^32 blocks at a time"));
        self.states.push(state);
        id
    }

    /// Removes a block. It must be in no set, and no neighbour may point to it.
    pub(super) fn destroy(&mut self, id: BlockId) {
        self.get_mut(id).bytes = 0;
        self.vacant.push(id);
    }

    /// All existing blocks, in no particular order.
    pub(super) fn all(&self) -> impl Iterator<Item = &BlockState> {
        self.states.iter().filter(|state| state.bytes > 0)
    }

    /// Adds an idle mapped block to the free blocks of its pool.
    pub(super) fn insert_free(&mut self, id: BlockId) {
        let searches = self.pool(self.get(id).pool).searches;
        self.get_mut(id).searches_when_freed = searches;
        let (key, pool) = (self.free_key(id), self.get(id).pool);
        let inserted = self.pool_mut(pool).free.insert(key);
        debug_assert!(inserted, "a block becomes free once");
    }

    pub(super) fn remove_free(&mut self, id: BlockId) {
        let (key, pool) = (self.free_key(id), self.get(id).pool);
        let removed = self.pool_mut(pool).free.remove(&key);
        debug_assert!(removed, "a free block is in its pool");
    }

    pub(super) fn insert_unmapped(&mut self, id: BlockId) {
        let block = self.get(id);
        let (key, pool) = ((block.stream, block.address, id), block.pool);
        self.pool_mut(pool).unmapped.insert(key);
    }

    pub(super) fn remove_unmapped(&mut self, id: BlockId) {
        let block = self.get(id);
        let (key, pool) = ((block.stream, block.address, id), block.pool);
        self.pool_mut(pool).unmapped.remove(&key);
    }

    /// The free blocks of one stream with at least `bytes`, the smallest first.
    pub(super) fn fitting(&self, kind: PoolKind, stream: Stream, bytes: u64) -> impl Iterator<Item = BlockId> + '_ {
        let from = (stream, bytes, 0, 0, BlockId(0));
        self.pool(kind).free.range(from..).take_while(move |key| key.0 == stream).map(|key| key.4)
    }

    /// All free blocks of a pool, in the pool's order.
    pub(super) fn free_blocks(&self, kind: PoolKind) -> Vec<BlockId> {
        self.pool(kind).free.iter().map(|key| key.4).collect()
    }

    /// Cuts `bytes` off the front of an idle block, which must be in no set. The front becomes a new block; `id` keeps
    /// the rest.
    pub(super) fn split_front(&mut self, id: BlockId, bytes: u64) -> BlockId {
        let whole = self.get(id).clone();
        let front = self.insert(BlockState { bytes, next: Some(id), ..whole.clone() });
        if let Some(previous) = whole.previous {
            self.get_mut(previous).next = Some(front);
        }
        let rest = self.get_mut(id);
        (rest.address, rest.bytes, rest.previous) = (whole.address + bytes, whole.bytes - bytes, Some(front));
        front
    }

    /// Cuts an idle block, which must be in no set, after `bytes`. The rest becomes a new block; `id` keeps the front.
    pub(super) fn split_back(&mut self, id: BlockId, bytes: u64) -> BlockId {
        let whole = self.get(id).clone();
        let (address, rest) = (whole.address + bytes, whole.bytes - bytes);
        let back = self.insert(BlockState { address, bytes: rest, previous: Some(id), ..whole.clone() });
        if let Some(next) = whole.next {
            self.get_mut(next).previous = Some(back);
        }
        let front = self.get_mut(id);
        (front.bytes, front.next) = (bytes, Some(back));
        back
    }

    /// Joins `neighbour` into `id` if there is a neighbour, the neighbour is idle, and both are mapped or both are
    /// unmapped. `id` must be in no set. Returns true if the two were joined.
    pub(super) fn merge(&mut self, id: BlockId, neighbour: Option<BlockId>) -> bool {
        let Some(other) = neighbour else { return false };
        if !self.get(other).is_idle() || self.get(other).mapped != self.get(id).mapped {
            return false;
        }
        if self.get(other).mapped {
            self.remove_free(other);
        } else {
            self.remove_unmapped(other);
        }
        let BlockState { address, bytes, previous, next, .. } = *self.get(other);
        if self.get(id).previous == Some(other) {
            let state = self.get_mut(id);
            (state.address, state.previous) = (address, previous);
            if let Some(previous) = previous {
                self.get_mut(previous).next = Some(id);
            }
        } else {
            self.get_mut(id).next = next;
            if let Some(next) = next {
                self.get_mut(next).previous = Some(id);
            }
        }
        self.get_mut(id).bytes += bytes;
        self.destroy(other);
        true
    }

    fn free_key(&self, id: BlockId) -> FreeKey {
        let block = self.get(id);
        (block.stream, block.bytes, block.age, block.address, id)
    }
}
