//! Measures the time of a request and its release in the arena, and in the same run that of a model of PyTorch's
//! caching allocator.
//!
//! `cargo bench -p gapless-allocators --bench arena`

#[path = "../tests/moe_step/mod.rs"]
mod moe_step;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, RequestId, Reserve};
use gapless_alloc::{Options, plan};
use gapless_allocators::{Allocator, Block, Device, PyTorch, PyTorchOptions, Stream};
use moe_step::{MoeStep, Routing};

/// A request or a release, as `(tick, is a request, id)`.
type Event = (u64, bool, RequestId);

fn serve(arena: &mut Arena, events: &[Event], bytes: &[u64]) {
    for &(_, is_birth, id) in events {
        match is_birth {
            true => _ = black_box(arena.request(id, bytes[id.index()]).expect("the reserve is ample")),
            false => arena.release(id),
        }
    }
    arena.reset();
}

fn serve_cached(allocator: &mut PyTorch, live: &mut [Option<Block>], events: &[Event], bytes: &[u64]) {
    for &(_, is_birth, id) in events {
        let place = &mut live[id.index()];
        match is_birth {
            true => *place = Some(allocator.allocate(bytes[id.index()].max(1), Stream::default()).expect("ample")),
            false => allocator.free(place.take().expect("births come first")),
        }
    }
}

fn request_and_release(c: &mut Criterion) {
    let deep = MoeStep { layers: 12, ahead: 8, micro_batches: 24, vocabulary: 0, ..MoeStep::qwen() };
    for (name, step) in [("mixtral", MoeStep::mixtral()), ("qwen deep", deep)] {
        let built = step.build().expect("a sound step");
        let offsets = plan(&built.fixed, &Options::default()).offsets;
        let bytes = built.bytes(Routing::Zipf, 0);
        let ids = (0..built.requests.len() as u32).map(RequestId);
        // `false < true`: at one tick, releases come first.
        let events = ids.flat_map(|id| {
            let ticks = &built.requests[id.index()].ticks;
            [(ticks.start, true, id), (ticks.end, false, id)]
        });
        let mut events: Vec<Event> = events.collect();
        events.sort_unstable();
        let mut group = c.benchmark_group(format!("{name}: {} requests and releases", events.len() / 2));
        group.throughput(Throughput::Elements(events.len() as u64 / 2));
        for reserve in [Reserve::Bytes(1 << 40), Reserve::Balanced { factor: 2.0 }, Reserve::Worst] {
            let options = ArenaOptions::with_reserve(reserve);
            let plan =
                ArenaPlan::new(&built.fixed, &offsets, built.requests.clone(), &options).expect("sound requests");
            let mut arena = Arena::new(plan);
            group.bench_function(format!("arena, {reserve:?}"), |b| b.iter(|| serve(&mut arena, &events, &bytes)));
        }
        for options in [PyTorchOptions::default(), PyTorchOptions::expandable()] {
            let mut allocator = PyTorch::new(Device::new(1 << 44), options);
            let mut live: Vec<Option<Block>> = built.requests.iter().map(|_| None).collect();
            group.bench_function(allocator.name(), |b| {
                b.iter(|| serve_cached(&mut allocator, &mut live, &events, &bytes));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, request_and_release);
criterion_main!(benches);
