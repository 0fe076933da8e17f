use gapless_alloc::arena::synthetic::*;
use gapless_alloc::arena::*;
use gapless_alloc::peers::*;
use gapless_alloc::*;

#[test]
fn explore() {
    let deep = MoeStep { layers: 3, ahead: 8, micro_batches: 24, ..MoeStep::qwen() };
    for (name, step) in [("mixtral", MoeStep::mixtral()), ("qwen", MoeStep::qwen()), ("qwen-deep", MoeStep{vocabulary:0, ..deep})] {
        let built = step.build().unwrap();
        let t = std::time::Instant::now();
        let solution = plan(&built.fixed, &Options::default());
        println!("{name} fixed {} dyn {} height {} bound {} {:?}", built.fixed.len(), built.requests.len(), solution.height, solution.lower_bound, t.elapsed());
        for routing in Routing::ALL {
            let sizes = built.bytes(routing, 0);
            let mut all: Vec<Buffer> = built.fixed.buffers().to_vec();
            let n = all.len();
            all.extend(built.requests.iter().zip(&sizes).map(|(r, &b)| Buffer::new(r.ticks.clone(), b).aligned(512)));
            let whole = Problem::new(all).unwrap();
            let live = lower_bound(&whole) as f64;
            let p = ArenaPlan::new(&built.fixed, &solution.offsets, built.requests.clone(), &ArenaOptions::with_reserve(Reserve::Bytes(1 << 40))).unwrap();
            let mut arena = Arena::new(p);
            let run = rehearse(&mut arena, |id| sizes[id.index()]);
            check_run(&built.fixed, &solution.offsets, &built.requests, &run.served, u64::MAX).unwrap();
            let r = arena.report();
            let ours = (solution.height + r.high_water_bytes) as f64 / live;
            let requests = Requests::new(&whole);
            let mut cells = vec![];
            for phases in [&[][..], &built.phases] {
                let mut st = StAlloc::with(Device::new(1 << 40), &whole, &requests, phases, |id| id.index() >= n);
                cells.push(replay(&requests, &mut st, 3).unwrap().peak_reserved() as f64 / live);
            }
            for o in [PyTorchOptions::default(), PyTorchOptions::expandable()] {
                let mut a = PyTorch::new(Device::new(1 << 40), o.clone());
                cells.push(replay(&requests, &mut a, 3).unwrap().peak_reserved() as f64 / live);
            }
            println!("  {routing:?} live {live} ours {ours:.4} reuse {:.3} frag {:.4}  stalloc, phases, pytorch, expandable {cells:.4?}", r.reuse_share(), r.fragmentation());
        }
    }
}
