//! The online arena on recorded routing, beside the allocators that served it or would have.

mod recorded_moe;

use std::time::Instant;

use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, Reserve, check_run, rehearse};
use gapless_alloc::peers::{Allocator, Device, PyTorch, PyTorchOptions, StAlloc};
use gapless_alloc::{Options, Requests, lower_bound, plan, replay, smallest_capacity};
use recorded_moe::Recorded;

#[test]
fn explore() {
    let Some(folder) = recorded_moe::folder() else {
        println!("skipped: no recordings");
        return;
    };
    recorded_moe::each(&folder, |recorded| {
        let full = recorded.name.ends_with("full");
        let t = Instant::now();
        let solution = plan(&recorded.fixed, &Options::default());
        println!(
            "{} static {} dyn {} live {} static height {} plan {:?}",
            recorded.name,
            recorded.fixed.len(),
            recorded.requests.len(),
            lower_bound(&recorded.whole),
            solution.height,
            t.elapsed()
        );
        let live = lower_bound(&recorded.whole) as f64;
        for reserve in [
            Reserve::Bytes(1 << 36),
            Reserve::Balanced { factor: 1.0 },
            Reserve::Balanced { factor: 1.5 },
            Reserve::Worst,
        ] {
            if full && reserve != Reserve::Bytes(1 << 36) {
                continue;
            }
            let t = Instant::now();
            let p = ArenaPlan::new(
                &recorded.fixed,
                &solution.offsets,
                recorded.requests.clone(),
                &ArenaOptions::with_reserve(reserve),
            )
            .unwrap();
            let build = t.elapsed();
            let mut arena = Arena::new(p);
            let run = rehearse(&mut arena, |id| recorded.bytes(id.index()));
            let t = Instant::now();
            rehearse(&mut arena, |id| recorded.bytes(id.index()));
            let ns = t.elapsed().as_nanos() / 2 / recorded.requests.len() as u128;
            check_run(&recorded.fixed, &solution.offsets, &recorded.requests, &run.served, arena.plan().height())
                .unwrap();
            let r = arena.report();
            println!(
                "  {reserve:?} reserve {:.4} total {:.4} overflows {} reuse {:.3} frag {:.4} build {build:?} {ns} ns",
                arena.plan().height() as f64 / live,
                (solution.height + r.high_water_bytes) as f64 / live,
                run.overflows.len(),
                r.reuse_share(),
                r.fragmentation()
            );
        }
        let requests = Requests::new(&recorded.whole);
        let iterations = if full { 1 } else { 3 };
        let dynamic: std::collections::HashSet<_> = recorded.dynamic.iter().copied().collect();
        let mut st = StAlloc::with(Device::new(80 << 30), &recorded.whole, &requests, &[], |id| dynamic.contains(&id));
        println!("  stalloc {:.4}", replay(&requests, &mut st, iterations).unwrap().peak_reserved() as f64 / live);
        for o in [PyTorchOptions::default(), PyTorchOptions::expandable()] {
            let mut a = PyTorch::new(Device::new(80 << 30), o.clone());
            let r = replay(&requests, &mut a, iterations).unwrap();
            println!("  {} {:.4}", a.name(), r.peak_reserved() as f64 / live);
        }
    });
}
