//! PyTorch's options, streams and retries, in cases made by hand.

use gapless_allocators::{Allocator, Block, Device, PyTorch, PyTorchOptions, Stream};

const MIB: u64 = 1 << 20;

fn allocator(options: &str, capacity: u64) -> PyTorch {
    PyTorch::new(Device::new(capacity), options.parse::<PyTorchOptions>().unwrap())
}

fn allocate(allocator: &mut PyTorch, bytes: u64) -> Block {
    allocator.allocate(bytes, Stream(0)).unwrap()
}

/// Allocates blocks of the sizes `freed`, frees them, then allocates `then`. Returns the reserved bytes and the bytes
/// of the last block.
fn reuse(options: &str, freed: &[u64], then: u64) -> (u64, u64) {
    let mut allocator = allocator(options, 1 << 40);
    let blocks: Vec<Block> = freed.iter().map(|&bytes| allocate(&mut allocator, bytes)).collect();
    blocks.into_iter().for_each(|block| allocator.free(block));
    let block = allocate(&mut allocator, then);
    (allocator.reserved(), block.bytes())
}

#[test]
fn segments_have_three_sizes() {
    let check = |bytes: u64, segment: u64| assert_eq!(reuse("", &[], bytes), (segment, bytes.next_multiple_of(512)));
    check(1, 2 * MIB);
    check(MIB, 2 * MIB);
    check(MIB + 512, 20 * MIB);
    check(10 * MIB - 512, 20 * MIB);
    check(12 * MIB, 12 * MIB);
    // The rest of the request's own segment is too small to be split off.
    assert_eq!(reuse("", &[], 10 * MIB + 512), (12 * MIB, 10 * MIB + 512));
    assert_eq!(reuse("", &[], 11 * MIB + 512), (12 * MIB, 12 * MIB));
}

#[test]
fn a_large_block_keeps_a_remainder_of_a_mebibyte() {
    assert_eq!(reuse("", &[30 * MIB], 29 * MIB), (30 * MIB, 30 * MIB));
    assert_eq!(reuse("", &[30 * MIB], 29 * MIB - 512), (30 * MIB, 29 * MIB - 512));
    assert_eq!(reuse("expandable_segments:True", &[40 * MIB], 39 * MIB), (40 * MIB, 39 * MIB));
}

#[test]
fn oversized_blocks_are_neither_split_nor_given_for_less() {
    let options = "max_split_size_mb:40,max_non_split_rounding_mb:20";
    assert_eq!(reuse(options, &[100 * MIB], 30 * MIB), (130 * MIB, 30 * MIB));
    assert_eq!(reuse(options, &[100 * MIB], 82 * MIB), (100 * MIB, 100 * MIB));
    assert_eq!(reuse(options, &[100 * MIB], 80 * MIB), (180 * MIB, 80 * MIB));
    assert_eq!(reuse("", &[100 * MIB], 80 * MIB), (100 * MIB, 80 * MIB));
}

#[test]
fn oversized_blocks_are_freed_before_the_whole_cache() {
    let check = |options: &str, frees: u64, retries: u64| {
        let mut allocator = allocator(options, 300 * MIB);
        let blocks = [50, 60, 70].map(|size| allocate(&mut allocator, size * MIB));
        blocks.into_iter().for_each(|block| allocator.free(block));
        allocate(&mut allocator, 200 * MIB);
        let statistics = allocator.statistics();
        assert_eq!((statistics.device_frees, statistics.retries), (frees, retries), "{options:?}");
    };
    // 70, 60 and 50 MiB together are less than the request. So all three blocks are released, and then the rest of the
    // cache.
    check("max_split_size_mb:40", 3, 1);
    check("", 3, 1);
    let mut allocator = allocator("max_split_size_mb:40", 300 * MIB);
    let blocks = [50, 60, 120].map(|size| allocate(&mut allocator, size * MIB));
    blocks.into_iter().for_each(|block| allocator.free(block));
    allocate(&mut allocator, 90 * MIB);
    let statistics = allocator.statistics();
    assert_eq!((allocator.reserved(), statistics.device_frees, statistics.retries), (200 * MIB, 1, 0));
}

#[test]
fn sizes_are_rounded_to_divisions_of_powers_of_two() {
    assert_eq!(reuse("roundup_power2_divisions:4", &[], 17 * MIB), (20 * MIB, 20 * MIB));
    assert_eq!(reuse("roundup_power2_divisions:[16:1,32:2,>:8]", &[], 17 * MIB), (18 * MIB, 18 * MIB));
    assert_eq!(reuse("roundup_power2_divisions:[16:1,32:2,>:8]", &[], 33 * MIB), (48 * MIB, 48 * MIB));
    assert_eq!(reuse("roundup_power2_divisions:[16:1,32:2,>:8]", &[], 65 * MIB), (72 * MIB, 72 * MIB));
}

#[test]
fn old_blocks_are_collected_above_the_threshold() {
    let run = |options: &str| {
        let mut allocator = allocator(options, 400 * MIB);
        let [old, young] = [40, 60].map(|size| allocate(&mut allocator, size * MIB));
        allocator.free(old);
        for _ in 0..5 {
            let other = allocate(&mut allocator, 14 * MIB);
            allocator.free(other);
        }
        allocator.free(young);
        allocate(&mut allocator, 150 * MIB);
        (allocator.reserved(), allocator.statistics().device_frees)
    };
    let kept = run("");
    assert_eq!(run("garbage_collection_threshold:0.1"), kept, "does nothing without a fraction");
    assert_eq!(run("per_process_memory_fraction:1.0,garbage_collection_threshold:0.9"), kept);
    let collected = run("per_process_memory_fraction:1.0,garbage_collection_threshold:0.1");
    assert!(collected.0 < kept.0 && collected.1 > 0, "{collected:?} {kept:?}");
}

#[test]
fn a_fraction_of_the_device_is_a_limit() {
    let mut allocator = allocator("per_process_memory_fraction:0.5", 100 * MIB);
    allocate(&mut allocator, 40 * MIB);
    let error = allocator.allocate(20 * MIB, Stream(0)).unwrap_err();
    assert_eq!((error.requested, error.reserved, error.capacity), (20 * MIB, 40 * MIB, 100 * MIB));
}

#[test]
fn streams_do_not_share_blocks() {
    let mut allocator = allocator("", 1 << 40);
    let block = allocate(&mut allocator, 30 * MIB);
    allocator.free(block);
    allocator.allocate(30 * MIB, Stream(1)).unwrap();
    assert_eq!(allocator.reserved(), 60 * MIB);
}

#[test]
fn a_block_waits_for_the_streams_that_use_it() {
    let mut allocator = allocator("", 70 * MIB);
    let block = allocate(&mut allocator, 30 * MIB);
    allocator.record_use(&block, Stream(1));
    allocator.record_use(&block, Stream(2));
    allocator.free(block);
    assert_eq!(allocator.allocated(), 0);
    allocator.synchronize(Stream(1));
    let other = allocate(&mut allocator, 30 * MIB);
    assert_eq!(allocator.reserved(), 60 * MIB, "stream 2 is still at work");
    allocator.synchronize(Stream(2));
    let third = allocate(&mut allocator, 30 * MIB);
    assert_eq!(allocator.reserved(), 60 * MIB, "now the first block is free");
    // Before the allocator gives up, it waits for every stream and frees the blocks that the streams used.
    allocator.record_use(&third, Stream(3));
    allocator.free(third);
    allocate(&mut allocator, 40 * MIB);
    assert_eq!((allocator.reserved(), allocator.statistics().retries), (70 * MIB, 1));
    allocator.free(other);
}

#[test]
fn expandable_segments_grow_by_pages_and_give_whole_pages_back() {
    let mut allocator = allocator("expandable_segments:True", 200 * MIB);
    let [first, second] = [30, 30].map(|size| allocate(&mut allocator, size * MIB));
    assert_eq!((allocator.reserved(), allocator.segments()), (60 * MIB, 1));
    let small = allocate(&mut allocator, 1000);
    assert_eq!((allocator.reserved(), allocator.segments()), (62 * MIB, 2));
    // 150 MiB do not fit in addition to 62 MiB. The free 30 MiB at the front contain one whole page of 20 MiB, which is
    // returned to the device.
    allocator.free(first);
    assert!(allocator.allocate(170 * MIB, Stream(0)).is_err());
    assert_eq!((allocator.reserved(), allocator.segments()), (42 * MIB, 2));
    // The free 10 MiB before the remaining blocks serve a request without the device.
    let third = allocate(&mut allocator, 10 * MIB);
    assert_eq!(allocator.reserved(), 42 * MIB);
    // The unmapped page at the front is mapped again before the segment grows at its end.
    allocate(&mut allocator, 20 * MIB);
    assert_eq!((allocator.reserved(), allocator.segments()), (62 * MIB, 2));
    [second, small, third].into_iter().for_each(|block| allocator.free(block));
    assert!(allocator.allocate(500 * MIB, Stream(0)).is_err());
    assert_eq!((allocator.reserved(), allocator.allocated()), (20 * MIB, 20 * MIB));
}

#[test]
fn absurd_sizes_are_out_of_memory() {
    for options in ["", "expandable_segments:True", "roundup_power2_divisions:8"] {
        for bytes in [1 << 50, 1 << 60, (1 << 60) + 1, u64::MAX] {
            assert!(allocator(options, u64::MAX).allocate(bytes, Stream(0)).is_err() || bytes <= Device::LARGEST);
        }
    }
}
