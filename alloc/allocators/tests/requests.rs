//! Guarantees of every allocator for any requests. PyTorch's allocator is also compared with a slow reference
//! implementation.

use std::collections::BTreeMap;

use gapless_alloc::{Buffer, Problem};
use gapless_allocators::{
    Allocator, Bfc, Block, Device, GmLake, GmLakeOptions, Kind, Malloc, PyTorch, PyTorchOptions, StAlloc, Stream,
};
use gapless_allocators::{Requests, replay_observed, smallest_capacity};
use gapless_testing::prelude::*;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 256 * MIB;

/// A step of a program: an allocation of bytes on a stream, or a free of the n-th live block.
#[derive(Debug, Clone)]
enum Action {
    Allocate(u64, u32),
    Free(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Action>> {
    let bytes = prop_oneof![1..4096u64, 1..2 * MIB, MIB..12 * MIB, 8 * MIB..64 * MIB];
    let allocate = (bytes, 0..2u32).prop_map(|(bytes, stream)| Action::Allocate(bytes, stream));
    prop::collection::vec(prop_oneof![3 => allocate, 2 => any::<prop::sample::Index>().prop_map(Action::Free)], 1..200)
}

/// Checks that live blocks do not overlap and that the extents add up to the statistics.
fn check_layout(allocator: &dyn Allocator) -> Result<(), TestCaseError> {
    let extents = allocator.extents();
    let sum = |in_use: bool| extents.iter().filter(|e| e.in_use || !in_use).map(|e| e.bytes).sum::<u64>();
    prop_assert_eq!(sum(false), allocator.reserved());
    prop_assert_eq!(sum(true), allocator.allocated());
    prop_assert!(extents.windows(2).all(|pair| pair[0].address + pair[0].bytes <= pair[1].address));
    let statistics = allocator.statistics();
    prop_assert!(statistics.allocated.peak <= statistics.reserved.peak);
    prop_assert!(statistics.reserved.current <= statistics.reserved.peak);
    prop_assert!(statistics.reserved.peak <= CAPACITY);
    Ok(())
}

fn check(mut allocator: impl Allocator, steps: &[Action]) -> Result<(), TestCaseError> {
    let mut live: Vec<Block> = Vec::new();
    let mut ranges: BTreeMap<u64, u64> = BTreeMap::new();
    for step in steps {
        match step {
            Action::Allocate(bytes, stream) => match allocator.allocate(*bytes, Stream(*stream)) {
                Ok(block) => {
                    prop_assert!(block.bytes() >= *bytes);
                    let end = block.address() + block.bytes();
                    let below = ranges.range(..end).next_back();
                    prop_assert!(below.is_none_or(|(_, &other_end)| other_end <= block.address()), "blocks overlap");
                    ranges.insert(block.address(), end);
                    live.push(block);
                }
                Err(error) => prop_assert_eq!(error.requested, *bytes),
            },
            Action::Free(_) if live.is_empty() => {}
            Action::Free(which) => {
                let block = live.swap_remove(which.index(live.len()));
                ranges.remove(&block.address());
                allocator.free(block);
            }
        }
        check_layout(&allocator)?;
    }
    live.into_iter().for_each(|block| allocator.free(block));
    prop_assert_eq!(allocator.allocated(), 0);
    check_layout(&allocator)
}

generated! {
    #![cases(64)]

    #[test]
    fn every_allocator_keeps_its_blocks_apart(steps in steps()) {
        let options = |text: &str| text.parse::<PyTorchOptions>().unwrap();
        for text in [
            "",
            "expandable_segments:True",
            "max_split_size_mb:20",
            "roundup_power2_divisions:4",
            "per_process_memory_fraction:0.75,garbage_collection_threshold:0.5",
            "expandable_segments:True,per_process_memory_fraction:0.6,large_segment_size_mb:32",
        ] {
            check(PyTorch::new(Device::new(CAPACITY), options(text)), &steps)?;
        }
        for fragmentation_limit in [4 * MIB, 512 * MIB] {
            let options = GmLakeOptions { fragmentation_limit, ..GmLakeOptions::default() };
            check(GmLake::new(Device::new(CAPACITY), options), &steps)?;
            let options = GmLakeOptions { stitched_limit: 64 * MIB, ..options };
            check(GmLake::new(Device::new(CAPACITY), options), &steps)?;
        }
        check(Bfc::growing(Device::new(CAPACITY)), &steps)?;
        check(Bfc::whole_device(Device::new(CAPACITY)), &steps)?;
        check(Malloc::new(Device::new(CAPACITY)), &steps)?;
    }

    #[test]
    fn every_allocator_serves_a_step_again_and_again(
        rows in prop::collection::vec((0..30u64, 1..30u64, 0..6 * MIB), 1..30)
    ) {
        let buffers = rows.into_iter().map(|(start, length, bytes)| Buffer::new(start..start + length, bytes));
        let problem = Problem::new(buffers.collect()).unwrap();
        let requests = Requests::new(&problem);
        for kind in Kind::all() {
            let mut allocator = kind.build(CAPACITY, &problem, &requests);
            prop_assert_eq!(allocator.name(), kind.name());
            let mut layout = Ok(());
            let report = replay_observed(&requests, &mut *allocator, 3, |_, allocator| {
                if layout.is_ok() && kind != Kind::IDEAL {
                    layout = check_layout(allocator);
                }
            });
            layout?;
            let report = report.unwrap();
            prop_assert!(report.peak_allocated() >= requests.peak_live());
            prop_assert!(report.peak_reserved() >= report.peak_allocated());
            let (capacity, tight) = smallest_capacity(&requests, 3, CAPACITY, |capacity| {
                kind.build(capacity, &problem, &requests)
            }).unwrap();
            prop_assert!(capacity >= requests.peak_live() && tight.peak_reserved() <= capacity);
        }
    }

    #[test]
    fn pytorch_is_its_twin(steps in steps()) {
        let mut allocator = PyTorch::new(Device::new(CAPACITY), PyTorchOptions::default());
        let mut reference = ReferenceArena::default();
        let mut live: Vec<(Block, u64)> = Vec::new();
        for (name, step) in steps.iter().enumerate() {
            let name = name as u64 + 1;
            match step {
                Action::Allocate(bytes, stream) => {
                    let block = allocator.allocate(*bytes, Stream(*stream)).ok();
                    prop_assert_eq!(block.as_ref().map(Block::bytes), reference.allocate(*bytes, *stream, name));
                    live.extend(block.map(|block| (block, name)));
                }
                Action::Free(_) if live.is_empty() => {}
                Action::Free(which) => {
                    let (block, name) = live.swap_remove(which.index(live.len()));
                    allocator.free(block);
                    reference.free(name);
                }
            }
            let statistics = allocator.statistics();
            prop_assert_eq!((allocator.reserved(), allocator.segments()), (reference.reserved(), reference.segments.len() as u64));
            prop_assert_eq!((statistics.device_allocations, statistics.retries), (reference.allocations, reference.retries));
        }
    }

    /// For any phases, STAlloc's plan is valid: no block overlaps another, and no request falls back to the caching
    /// allocator.
    #[test]
    fn stalloc_plans_hold_with_phases(
        rows in prop::collection::vec((0..30u64, 1..30u64, 1..9000u64), 1..40),
        mut phases in prop::collection::vec(0..60u64, 0..6),
    ) {
        phases.sort_unstable();
        let buffers = rows.into_iter().map(|(start, length, bytes)| Buffer::new(start..start + length, bytes));
        let problem = Problem::new(buffers.collect()).unwrap();
        let requests = Requests::new(&problem);
        let mut allocator = StAlloc::with(Device::new(CAPACITY), &problem, &requests, &phases, |_| false);
        let mut layout = Ok(());
        let report = replay_observed(&requests, &mut allocator, 2, |_, allocator| {
            if layout.is_ok() {
                layout = check_layout(allocator);
            }
        });
        layout?;
        prop_assert_eq!(report.unwrap().statistics.device_allocations, 1);
    }
}

/// A reference implementation of PyTorch's default allocator, in which every search looks at every block.
#[derive(Default)]
struct ReferenceArena {
    /// The segments in order of creation. A piece of a segment has its bytes and its owner, which is 0 if the piece is
    /// free.
    segments: Vec<ReferenceSegment>,
    allocations: u64,
    retries: u64,
}

struct ReferenceSegment {
    stream: u32,
    is_small: bool,
    pieces: Vec<(u64, u64)>,
}

impl ReferenceArena {
    fn allocate(&mut self, bytes: u64, stream: u32, name: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(512);
        let is_small = bytes <= MIB;
        let fresh = match bytes {
            _ if is_small => 2 * MIB,
            _ if bytes < 10 * MIB => 20 * MIB,
            _ => bytes.next_multiple_of(2 * MIB),
        };
        let fits = |twin: &Self| {
            let mut best: Option<(u64, usize, usize)> = None;
            for (s, segment) in twin.segments.iter().enumerate() {
                for (p, &(size, holder)) in segment.pieces.iter().enumerate() {
                    let usable = (segment.stream, segment.is_small, holder) == (stream, is_small, 0) && size >= bytes;
                    if usable && best.is_none_or(|(least, ..)| size < least) {
                        best = Some((size, s, p));
                    }
                }
            }
            best
        };
        let mut found = fits(self);
        if found.is_none() {
            if self.reserved() + fresh > CAPACITY {
                self.segments.retain(|segment| segment.pieces.len() > 1 || segment.pieces[0].1 != 0);
                self.retries += 1;
            }
            if self.reserved() + fresh <= CAPACITY {
                self.segments.push(ReferenceSegment { stream, is_small, pieces: vec![(fresh, 0)] });
                self.allocations += 1;
                found = Some((fresh, self.segments.len() - 1, 0));
            }
        }
        let (size, s, p) = found?;
        let left = size - bytes;
        let splits = if is_small { left >= 512 } else { left > MIB };
        let pieces = &mut self.segments[s].pieces;
        if splits {
            pieces[p] = (bytes, name);
            pieces.insert(p + 1, (left, 0));
        } else {
            pieces[p].1 = name;
        }
        Some(pieces[p].0)
    }

    fn free(&mut self, name: u64) {
        for segment in &mut self.segments {
            if let Some(piece) = segment.pieces.iter_mut().find(|piece| piece.1 == name) {
                piece.1 = 0;
                let mut joined: Vec<(u64, u64)> = Vec::new();
                for &(bytes, holder) in &segment.pieces {
                    match joined.last_mut() {
                        Some(last) if last.1 == 0 && holder == 0 => last.0 += bytes,
                        _ => joined.push((bytes, holder)),
                    }
                }
                segment.pieces = joined;
            }
        }
    }

    fn reserved(&self) -> u64 {
        self.segments.iter().flat_map(|segment| &segment.pieces).map(|piece| piece.0).sum()
    }
}

#[test]
fn absurd_tables_end_in_an_answer() {
    const HUGE: u64 = u64::MAX / 4;
    let check = |rows: &[(u64, u64, u64)]| {
        let buffers = rows.iter().map(|&(start, end, bytes)| Buffer::new(start..end, bytes)).collect();
        let problem = Problem::new(buffers).unwrap();
        let requests = Requests::new(&problem);
        for kind in Kind::all() {
            for capacity in [0, 1, CAPACITY, 1 << 50, u64::MAX] {
                let mut allocator = kind.build(capacity, &problem, &requests);
                let _ = replay_observed(&requests, &mut *allocator, 1000, |_, _| {});
            }
        }
    };
    check(&[]);
    check(&[(0, 1, 0)]);
    check(&[(0, u64::MAX, 1)]);
    check(&[(0, 1, HUGE), (1, 2, HUGE - 1), (1, 2, HUGE - 2), (0, 3, HUGE)]);
    check(&[(0, 2, HUGE), (0, 1, HUGE), (1, 2, HUGE - 600), (0, 3, HUGE), (2, 3, HUGE - 600), (2, 3, HUGE)]);
    check(&[(0, 1, 1 << 47), (1, 2, 1 << 46), (2, 3, 1 << 47)]);
}
