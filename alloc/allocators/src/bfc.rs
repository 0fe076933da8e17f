//! TensorFlow's best-fit allocator with coalescing (`bfc_allocator.cc`), with the settings of TensorFlow's GPU device.
//!
//! Requests are rounded to 256 bytes and served by the smallest free chunk that fits. The rest of the chunk is split
//! off only if the chunk is at least twice the request, or 128 MiB larger. Regions come from the device in sizes that
//! double from 2 MiB. If growth is off, one region takes the whole device. Free chunks are joined within their region.
//! If nothing fits and the limit is reached, regions that are entirely free are returned to the device, and one more
//! region is tried.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Allocator, Block, Device, Extent, OutOfMemory, Statistics, Stream};

const GRAIN: u64 = 256;
const FIRST_REGION: u64 = 2 << 20;
const LARGEST_WASTE: u64 = 128 << 20;

/// TensorFlow's BFC allocator. It ignores streams.
#[derive(Debug)]
pub struct Bfc {
    device: Device,
    /// Most bytes that the allocator may reserve.
    limit: u64,
    next_region: u64,
    /// Bytes of each region, by first address.
    regions: BTreeMap<u64, u64>,
    /// All chunks by address. The chunks of one region are adjacent.
    chunks: BTreeMap<u64, Chunk>,
    /// Free chunks by size, then address.
    free: BTreeSet<(u64, u64)>,
    statistics: Statistics,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    bytes: u64,
    region: u64,
    in_use: bool,
}

impl Bfc {
    /// An allocator that grows as needed, up to the size of the device (`allow_growth`).
    pub fn growing(device: Device) -> Self {
        let limit = device.capacity();
        Self::new(device, round_up(limit.min(FIRST_REGION)).unwrap_or(limit))
    }

    /// An allocator that takes the whole device at the first request, which is TensorFlow's default.
    pub fn whole_device(device: Device) -> Self {
        let first = device.capacity() / GRAIN * GRAIN;
        Self::new(device, first)
    }

    fn new(device: Device, next_region: u64) -> Self {
        Self {
            limit: device.capacity(),
            device,
            next_region: next_region.max(GRAIN),
            regions: BTreeMap::new(),
            chunks: BTreeMap::new(),
            free: BTreeSet::new(),
            statistics: Statistics::default(),
        }
    }

    fn take_chunk(&mut self, bytes: u64) -> Option<u64> {
        let &(size, address) = self.free.range((bytes, 0)..).next()?;
        self.free.remove(&(size, address));
        let chunk = self.chunks[&address];
        if size >= 2 * bytes || size - bytes >= LARGEST_WASTE {
            let rest = Chunk { bytes: size - bytes, ..chunk };
            self.chunks.insert(address + bytes, rest);
            self.free.insert((rest.bytes, address + bytes));
            self.chunks.insert(address, Chunk { bytes, in_use: true, ..chunk });
        } else {
            self.chunks.insert(address, Chunk { in_use: true, ..chunk });
        }
        Some(address)
    }

    /// Takes one more region, which can hold `bytes`, from the device. Returns false if the limit or the device does
    /// not allow such a region.
    fn extend(&mut self, bytes: u64) -> bool {
        let available = (self.limit - self.statistics.reserved.current) / GRAIN * GRAIN;
        if bytes > available {
            return false;
        }
        let enough = bytes <= self.next_region;
        while bytes > self.next_region {
            self.next_region *= 2;
        }
        let size = self.next_region.min(available);
        let Some(address) = self.device.malloc(size) else { return false };
        if enough {
            self.next_region = self.next_region.saturating_mul(2);
        }
        self.regions.insert(address, size);
        self.chunks.insert(address, Chunk { bytes: size, region: address, in_use: false });
        self.free.insert((size, address));
        self.statistics.reserved.rise(size);
        self.statistics.segments += 1;
        self.statistics.device_allocations += 1;
        true
    }

    /// Returns all regions that are entirely free to the device, if that can make room for `bytes`. Returns true if
    /// regions were returned.
    fn release_free_regions(&mut self, bytes: u64) -> bool {
        let unused = |(&address, &size): (&u64, &u64)| {
            let first = self.chunks[&address];
            (!first.in_use && first.bytes == size).then_some((address, size))
        };
        let unused: Vec<(u64, u64)> = self.regions.iter().filter_map(unused).collect();
        let total: u64 = unused.iter().map(|(_, size)| size).sum();
        if total == 0 || bytes > self.limit - self.statistics.reserved.current + total {
            return false;
        }
        for (address, size) in unused {
            self.regions.remove(&address);
            self.chunks.remove(&address);
            self.free.remove(&(size, address));
            self.device.free(size);
            self.statistics.reserved.fall(size);
            self.statistics.segments -= 1;
            self.statistics.device_frees += 1;
        }
        true
    }

    fn find(&mut self, bytes: u64) -> Option<u64> {
        if let Some(address) = self.take_chunk(bytes) {
            return Some(address);
        }
        if self.extend(bytes) {
            return self.take_chunk(bytes);
        }
        if self.release_free_regions(bytes) && self.extend(bytes) {
            self.statistics.retries += 1;
            return self.take_chunk(bytes);
        }
        None
    }
}

fn round_up(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRAIN)
}

impl Allocator for Bfc {
    fn name(&self) -> &'static str {
        "bfc"
    }

    fn allocate(&mut self, bytes: u64, _stream: Stream) -> Result<Block, OutOfMemory> {
        let fits = round_up(bytes).filter(|&rounded| rounded <= self.limit);
        let Some(address) = fits.and_then(|rounded| self.find(rounded)) else {
            return Err(OutOfMemory::new(self.name(), bytes, &self.statistics, self.device.capacity()));
        };
        let bytes = self.chunks[&address].bytes;
        self.statistics.allocated.rise(bytes);
        Ok(Block { address, bytes, slot: 0 })
    }

    fn free(&mut self, block: Block) {
        let mut address = block.address;
        let mut chunk = self.chunks[&address];
        assert!(chunk.in_use, "a block goes back to the allocator it came from");
        self.statistics.allocated.fall(chunk.bytes);
        chunk.in_use = false;
        if let Some((&next, &other)) = self.chunks.range(address + 1..).next()
            && other.region == chunk.region
            && !other.in_use
        {
            self.free.remove(&(other.bytes, next));
            self.chunks.remove(&next);
            chunk.bytes += other.bytes;
        }
        if let Some((&previous, &other)) = self.chunks.range(..address).next_back()
            && other.region == chunk.region
            && !other.in_use
        {
            self.free.remove(&(other.bytes, previous));
            self.chunks.remove(&address);
            chunk.bytes += other.bytes;
            address = previous;
        }
        self.chunks.insert(address, chunk);
        self.free.insert((chunk.bytes, address));
    }

    fn statistics(&self) -> Statistics {
        Statistics { driver: self.device.calls(), ..self.statistics }
    }

    fn extents(&self) -> Vec<Extent> {
        let extent = |(&address, chunk): (&u64, &Chunk)| Extent { address, bytes: chunk.bytes, in_use: chunk.in_use };
        self.chunks.iter().map(extent).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn blocks(allocator: &mut Bfc, requests: &[u64]) -> Vec<Block> {
        requests.iter().map(|&bytes| allocator.allocate(bytes, Stream::default()).unwrap()).collect()
    }

    #[test]
    fn regions_double() {
        let check = |requests: &[u64], reserved: u64, regions: u64| {
            let mut allocator = Bfc::growing(Device::new(1 << 30));
            blocks(&mut allocator, requests);
            assert_eq!((allocator.reserved(), allocator.segments()), (reserved, regions), "{requests:?}");
        };
        check(&[1], 2 * MIB, 1);
        check(&[2 * MIB, 1], 6 * MIB, 2); // the second region is twice as large as the first
        check(&[3 * MIB, 4 * MIB], 8 * MIB, 2); // the first region is already doubled to hold its request, the second is not
        check(&[600 * MIB], 1024 * MIB, 1);
        check(&[300 * MIB, 300 * MIB], 1024 * MIB, 2); // two regions of 512 MiB
    }

    #[test]
    fn a_chunk_less_than_twice_the_request_is_not_split() {
        let mut allocator = Bfc::growing(Device::new(1 << 30));
        let given = blocks(&mut allocator, &[MIB + 1]);
        assert_eq!(given[0].bytes(), 2 * MIB);
        let given = blocks(&mut allocator, &[200 * MIB]);
        assert_eq!(given[0].bytes(), 256 * MIB);
        let given = blocks(&mut allocator, &[384 * MIB]);
        assert_eq!(given[0].bytes(), 384 * MIB); // 512 MiB − 384 MiB is 128 MiB
    }

    #[test]
    fn frees_whole_regions_before_it_gives_up() {
        let mut allocator = Bfc::growing(Device::new(64 * MIB));
        let small = blocks(&mut allocator, &[20 * MIB, 20 * MIB]);
        assert_eq!((allocator.reserved(), allocator.segments()), (64 * MIB, 2));
        small.into_iter().for_each(|block| allocator.free(block));
        blocks(&mut allocator, &[60 * MIB]);
        assert_eq!((allocator.segments(), allocator.statistics().retries), (1, 1));
        assert!(allocator.allocate(8 * MIB, Stream::default()).is_err());
    }

    #[test]
    fn without_growth_the_device_is_one_region() {
        let mut allocator = Bfc::whole_device(Device::new(64 * MIB));
        blocks(&mut allocator, &[1]);
        assert_eq!((allocator.reserved(), allocator.segments()), (64 * MIB, 1));
    }
}
