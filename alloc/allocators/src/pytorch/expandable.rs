//! Expandable segments: one range of addresses per stream and pool, somewhat larger than the device. The range is
//! mapped page by page as memory is needed. Pages have 2 MiB in the small pool and 20 MiB in the large one.

use super::{BlockId, PoolKind, PyTorch, Request, SMALL_SEGMENT};

/// All segments by number; `None` for a segment that was returned to the device.
#[derive(Debug, Default)]
pub(super) struct ExpandableSegments {
    segments: Vec<Option<Segment>>,
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    address: u64,
    bytes: u64,
    page: u64,
}

impl PyTorch {
    /// Maps memory for a request, at the lowest addresses where idle and unmapped bytes together suffice, and returns
    /// the block. Returns `None` if the device has too little memory or too few addresses left.
    pub(super) fn expand(&mut self, request: &Request) -> Option<BlockId> {
        let mut candidate = self.room(request)?;
        if !self.blocks.get(candidate).mapped {
            let bytes = request.bytes.min(self.blocks.get(candidate).bytes);
            self.map(candidate, bytes).then_some(())?;
        }
        while self.blocks.get(candidate).bytes < request.bytes {
            let missing = request.bytes - self.blocks.get(candidate).bytes;
            let next = self.blocks.get(candidate).next.expect("room() saw enough addresses after the candidate");
            let bytes = missing.min(self.blocks.get(next).bytes);
            self.map(next, bytes).then_some(())?;
            // Mapping has joined the candidate with its neighbour.
            candidate = next;
        }
        self.blocks.remove_free(candidate);
        Some(candidate)
    }

    /// Returns the first block of a run of idle and unmapped blocks that can hold the request. If there is no such run,
    /// creates a new segment. Returns `None` if the segment would be smaller than the request or no addresses are left.
    fn room(&mut self, request: &Request) -> Option<BlockId> {
        let holds = |first: BlockId| {
            let (mut bytes, mut at) = (0, Some(first));
            while let Some(id) = at.filter(|&id| self.blocks.get(id).is_idle()) {
                bytes += self.blocks.get(id).bytes;
                if bytes >= request.bytes {
                    return true;
                }
                at = self.blocks.get(id).next;
            }
            false
        };
        let from = (request.stream, 0, BlockId(0));
        let unmapped = self.blocks.pool(request.pool).unmapped.range(from..);
        let found = unmapped.take_while(|key| key.0 == request.stream).find_map(|&(_, _, id)| {
            let previous = self.blocks.get(id).previous.filter(|&previous| self.blocks.get(previous).is_idle());
            let first = previous.unwrap_or(id);
            holds(first).then_some(first)
        });
        found.or_else(|| self.reserve(request))
    }

    fn reserve(&mut self, request: &Request) -> Option<BlockId> {
        let page = match request.pool {
            PoolKind::Small => SMALL_SEGMENT,
            PoolKind::Large => self.options.large_segment_bytes,
        };
        // The segment is an eighth larger than the device, so that pages unmapped in the middle can be mapped again at
        // the end.
        let bytes = (self.device.capacity() + self.device.capacity() / 8).next_multiple_of(page);
        if bytes < request.bytes {
            return None;
        }
        let address = self.device.reserve(bytes)?;
        let id = self.blocks.create_segment(request.stream, request.pool, address, bytes);
        let block = self.blocks.get_mut(id);
        block.mapped = false;
        block.expandable = Some(self.expandable.segments.len() as u32);
        self.expandable.segments.push(Some(Segment { address, bytes, page }));
        self.blocks.insert_unmapped(id);
        Some(id)
    }

    /// Maps the first `bytes` of an unmapped block, in whole pages, and joins them with idle neighbours. Returns false
    /// if the device does not have the pages.
    fn map(&mut self, id: BlockId, bytes: u64) -> bool {
        let page = self.segment(id).page;
        let pages = bytes.div_ceil(page);
        if !self.device.create_and_map(pages, page) {
            return false;
        }
        let mapped = pages * page;
        self.blocks.remove_unmapped(id);
        if mapped < self.blocks.get(id).bytes {
            let rest = self.blocks.split_back(id, mapped);
            self.blocks.insert_unmapped(rest);
        }
        self.blocks.get_mut(id).mapped = true;
        self.statistics.segments += 1;
        self.statistics.segments -= self.mapped_neighbours(id);
        self.recycle(id);
        self.statistics.reserved.rise(mapped);
        self.statistics.device_allocations += 1;
        true
    }

    /// Returns the whole pages inside a free block to the device.
    pub(super) fn unmap(&mut self, id: BlockId) {
        let Segment { address: base, bytes: segment_bytes, page } = self.segment(id);
        let (address, bytes) = (self.blocks.get(id).address, self.blocks.get(id).bytes);
        let first = (address - base).next_multiple_of(page);
        let end = (address + bytes - base) / page * page;
        if first >= end {
            return;
        }
        self.blocks.remove_free(id);
        let before = base + first - address;
        if before > 0 {
            let front = self.blocks.split_front(id, before);
            self.blocks.insert_free(front);
        }
        if end - first < self.blocks.get(id).bytes {
            let back = self.blocks.split_back(id, end - first);
            self.blocks.insert_free(back);
        }
        self.blocks.get_mut(id).mapped = false;
        self.statistics.segments += self.mapped_neighbours(id);
        self.statistics.segments -= 1;
        let (previous, next) = (self.blocks.get(id).previous, self.blocks.get(id).next);
        self.blocks.merge(id, previous);
        self.blocks.merge(id, next);
        self.blocks.insert_unmapped(id);
        self.device.unmap_and_release((end - first) / page, page);
        self.statistics.reserved.fall(end - first);
        self.statistics.device_frees += 1;
        let block = self.blocks.get(id);
        if !block.is_split() {
            assert_eq!(block.bytes, segment_bytes, "a block without neighbours is its whole segment");
            let number = block.expandable.expect("only blocks of expandable segments are unmapped");
            self.blocks.remove_unmapped(id);
            self.blocks.destroy(id);
            self.expandable.segments[number as usize] = None;
        }
    }

    /// Returns the number of mapped neighbours of a block. Each of these neighbours is the end of a mapped range.
    /// Mapping the block joins these ranges, and unmapping the block separates them.
    fn mapped_neighbours(&self, id: BlockId) -> u64 {
        let block = self.blocks.get(id);
        let neighbours = [block.previous, block.next];
        neighbours.into_iter().flatten().filter(|&neighbour| self.blocks.get(neighbour).mapped).count() as u64
    }

    fn segment(&self, id: BlockId) -> Segment {
        let number = self.blocks.get(id).expandable.expect("asked of blocks of expandable segments only");
        self.expandable.segments[number as usize].expect("a segment outlives its blocks")
    }
}
