//! Checks with a counting allocator that serving requests allocates no heap memory, even for overflows.

mod moe_step;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, RequestId, Reserve};
use gapless_alloc::{Options, plan};
use moe_step::{MoeStep, Routing};

struct Counting;

thread_local! {
    /// Allocations are counted per thread, since the test harness has a thread of its own.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded unchanged to the system's allocator, which upholds the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: our caller upholds the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: our caller upholds the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn serving_takes_no_heap_memory() {
    let built = MoeStep { layers: 2, ..MoeStep::mixtral() }.build().unwrap();
    let offsets = plan(&built.fixed, &Options::default()).offsets;
    let ticks = |id: RequestId| built.requests[id.index()].ticks.clone();
    let ids = || (0..built.requests.len() as u32).map(RequestId);
    // `false < true`: at one tick, releases come first.
    let mut events: Vec<(u64, bool, RequestId)> =
        ids().flat_map(|id| [(ticks(id).start, true, id), (ticks(id).end, false, id)]).collect();
    events.sort_unstable();
    let mut is_live = vec![false; built.requests.len()];
    let mut play = |arena: &mut Arena, events: &[(u64, bool, RequestId)], bytes: &[u64]| {
        let mut overflows = 0;
        for &(_, is_birth, id) in events {
            match is_birth {
                true => {
                    is_live[id.index()] = arena.request(id, bytes[id.index()]).is_ok();
                    overflows += u64::from(!is_live[id.index()]);
                }
                false if is_live[id.index()] => arena.release(id),
                false => {}
            }
        }
        overflows
    };
    for reserve in [Reserve::Bytes(1 << 30), Reserve::Balanced { factor: 1.0 }, Reserve::Worst] {
        let options = ArenaOptions::with_reserve(reserve);
        let mut arena = Arena::new(ArenaPlan::new(&built.fixed, &offsets, built.requests.clone(), &options).unwrap());
        let mut overflows = 0;
        for routing in Routing::ALL {
            let bytes = built.bytes(routing, 0);
            let before = ALLOCATIONS.get();
            overflows += play(&mut arena, &events, &bytes);
            // The step is aborted in the middle.
            overflows += play(&mut arena, &events[..events.len() / 2], &bytes);
            arena.reset();
            assert_eq!(ALLOCATIONS.get() - before, 0, "{reserve:?} {routing:?}");
        }
        assert_eq!(arena.report().overflows, overflows);
        assert_eq!(overflows > 0, reserve != Reserve::Worst);
    }
}
