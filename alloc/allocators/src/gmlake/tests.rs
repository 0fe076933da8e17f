//! Tests of the blocks that are stitched, reused, or returned to the device.

use super::*;

const MIB: u64 = 1 << 20;

fn allocator(fragmentation_limit: u64, capacity: u64) -> GmLake {
    GmLake::new(Device::new(capacity), GmLakeOptions { fragmentation_limit, ..GmLakeOptions::default() })
}

fn allocate<const N: usize>(allocator: &mut GmLake, sizes: [u64; N]) -> [Block; N] {
    sizes.map(|size| allocator.allocate(size * MIB, Stream::default()).unwrap())
}

#[test]
fn free_blocks_are_stitched_from_the_limit_on() {
    let check = |limit: u64, expected: u64| {
        let mut allocator = allocator(limit * MIB, 1 << 40);
        let [a, keep, b] = allocate(&mut allocator, [30, 2, 40]);
        allocator.free(a);
        allocator.free(b);
        let [block] = allocate(&mut allocator, [60]);
        assert_eq!((block.bytes(), allocator.reserved()), (60 * MIB, expected * MIB), "limit {limit}");
        allocator.free(keep);
    };
    // 30 + 20 (the smallest large segment) + 40.
    check(61, 30 + 20 + 40 + 60);
    check(60, 30 + 20 + 40);
}

#[test]
fn a_stitched_block_is_kept_and_its_parts_are_used() {
    let mut allocator = allocator(4 * MIB, 1 << 40);
    let [a, b] = allocate(&mut allocator, [30, 40]);
    allocator.free(a);
    allocator.free(b);
    let [stitched] = allocate(&mut allocator, [60]); // all of b and 20 MiB of a
    let trips = allocator.statistics().device_calls();
    let [rest] = allocate(&mut allocator, [10]); // what was left of a
    assert_eq!(allocator.reserved(), 70 * MIB);
    allocator.free(stitched);
    let [again] = allocate(&mut allocator, [50]);
    assert_eq!((allocator.reserved(), allocator.statistics().device_calls()), (70 * MIB, trips));
    let [tail] = allocate(&mut allocator, [10]); // the part of the stitched block that is not held
    assert_eq!(allocator.reserved(), 70 * MIB);
    [rest, again, tail].into_iter().for_each(|block| allocator.free(block));
    assert_eq!(allocator.allocated(), 0);
}

#[test]
fn a_stitched_block_serves_down_to_a_tenth() {
    let mut allocator = allocator(4 * MIB, 1 << 40);
    let [a, b] = allocate(&mut allocator, [100, 100]);
    allocator.free(a);
    allocator.free(b);
    let [stitched] = allocate(&mut allocator, [200]);
    allocator.free(stitched);
    let [primitive] = allocate(&mut allocator, [100]); // a primitive block that fits comes first
    let [other] = allocate(&mut allocator, [100]);
    assert_eq!(allocator.reserved(), 200 * MIB);
    [primitive, other].into_iter().for_each(|block| allocator.free(block));
}

#[test]
fn cached_segments_go_back_with_what_was_stitched_of_them() {
    let mut allocator = allocator(4 * MIB, 220 * MIB);
    let [a, b] = allocate(&mut allocator, [100, 100]);
    allocator.free(a);
    allocator.free(b);
    let [stitched] = allocate(&mut allocator, [150]);
    allocator.free(stitched);
    // 204 MiB are more than the free 200 MiB. So both segments are returned to the device, and the stitched block that
    // maps them is unmapped as well.
    let before = allocator.statistics().driver.unmaps;
    let [large] = allocate(&mut allocator, [204]);
    assert_eq!((allocator.reserved(), allocator.statistics().retries), (204 * MIB, 1));
    assert_eq!(allocator.statistics().driver.unmaps - before, (150 + 200) * MIB / CHUNK);
    assert!(allocator.allocate(18 * MIB, Stream::default()).is_err());
    allocator.free(large);
    assert_eq!((allocator.blocks.stitched.len(), allocator.blocks.stitched_bytes), (0, 0));
}

/// Nothing may be stored for each chunk of 2 MiB. This problem has 40 million of them.
#[test]
fn what_blocks_cost_does_not_grow_with_their_bytes() {
    const TIB: u64 = 1 << 20;
    let mut allocator = allocator(4 * MIB, 200 * TIB * MIB);
    let [a, b] = allocate(&mut allocator, [40 * TIB, 40 * TIB]);
    allocator.free(a);
    allocator.free(b);
    let [stitched] = allocate(&mut allocator, [60 * TIB]);
    assert_eq!((allocator.reserved(), allocator.blocks.count()), (80 * TIB * MIB, 40 << 20));
    assert_eq!(allocator.blocks.runs(), 3, "one segment, and the other cut in two");
    allocator.free(stitched);
    assert_eq!(allocator.allocated(), 0);
}
