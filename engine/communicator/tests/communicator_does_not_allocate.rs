//! Checks with a counting allocator that ranks in one process exchange messages and sums without heap allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use gapless_communicator::{Collective, Communicator, InProcess, Result, Tag};

thread_local! {
    /// True if this thread is a rank. Other threads are not counted, since the test harness has one that allocates when
    /// it first waits.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: all calls are passed on to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.try_with(Cell::get) == Ok(true) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LEN: usize = 40_000;

/// The communication of a step with pipeline and data parallelism: messages around a ring, and every collective.
fn step(rank: &mut dyn Communicator, part: &mut dyn Communicator, memory: &mut Memory) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    let (next, before) = ((me + 1) % size, (me + size - 1) % size);
    // SAFETY: the memory is not accessed until the waits below.
    unsafe {
        for (micro_batch, (out, into)) in memory.out.iter().zip(&mut memory.into).enumerate() {
            let tag = Tag { micro_batch: micro_batch as u32, ..Tag::default() };
            memory.requests.push(rank.irecv(into.as_mut_ptr(), LEN, before, tag)?);
            memory.requests.push(rank.isend(out.as_ptr(), LEN, next, tag)?);
        }
        let (send, receive) = (memory.values.as_ptr(), memory.shard.as_mut_ptr());
        memory.requests.push(rank.start(Collective::ReduceScatter { send, receive, count: LEN / size })?);
    }
    while let Some(request) = memory.requests.pop() {
        rank.wait(request)?;
    }
    part.all_reduce(&mut memory.values)?;
    rank.all_gather(&memory.out[0][..LEN / size], &mut memory.into[0][..LEN / size * size])?;
    rank.all_to_all_v(&memory.out[0][..size], &[1; RANKS], &mut memory.into[0][..size], &[1; RANKS])?;
    rank.broadcast(&mut memory.into[0], 0)?;
    rank.barrier()
}

const RANKS: usize = 4;

/// A rank's memory, allocated before counting begins.
struct Memory {
    out: Vec<Vec<u8>>,
    into: Vec<Vec<u8>>,
    values: Vec<f32>,
    shard: Vec<f32>,
    requests: Vec<gapless_communicator::Request>,
}

/// There is only one test, because concurrent tests would count each other's allocations.
#[test]
fn ranks_of_one_process_do_not_allocate() {
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let ranks = InProcess::world(RANKS).into_iter().map(|mut rank| {
            scope.spawn(move || {
                COUNTED.set(true);
                let mut memory = Memory {
                    out: vec![vec![1; LEN]; 8],
                    into: vec![vec![0; LEN]; 8],
                    values: vec![1e-20; LEN],
                    shard: vec![0.0; LEN / RANKS],
                    requests: Vec::with_capacity(32),
                };
                let mut part = rank.split(rank.rank() % 2, 0).unwrap();
                for _ in 0..2 {
                    step(&mut rank, &mut *part, &mut memory).unwrap();
                }
                // A rank reads the count only while all ranks are between two barriers.
                rank.barrier().unwrap();
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                rank.barrier().unwrap();
                for _ in 0..100 {
                    step(&mut rank, &mut *part, &mut memory).unwrap();
                }
                rank.barrier().unwrap();
                let after = ALLOCATIONS.load(Ordering::Relaxed);
                rank.barrier().unwrap();
                after - before
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(counts, [0; RANKS]);
    COUNTED.set(true);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![1u8]));
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > before, "the counter counts");
}
