//! Steady-state steps allocate no heap memory and touch no new pages.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use common::{Kind, TinyRun};
use gapless::alloc::arena::ArenaReport;
use gapless::engine::optim::{AdamW8bit, GaLore, Optimizer};
use gapless::models::{Gpt, GptConfig, MoeStyle};
use gapless::parallel::Axes;
use gapless::{
    Checkpoint, DType, GenerateOptions, Generation, Mesh, NextToken, Overflow, ParameterGroup, Reserve, Sampling,
    StepOptions, TrainOptions, Trainer, UpdateOptions, communicator,
};
use gapless_testing::{few, not_checked, only_test};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes that are allocated at the moment, and the most since a test has set it to them. Arenas are not on the heap.
static LIVE: AtomicU64 = AtomicU64::new(0);
static MOST: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system allocator, which upholds the contract of `GlobalAlloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        let bytes = layout.size() as u64;
        MOST.fetch_max(LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs a single test without the test harness, so that no other thread of this process allocates. The harness
/// allocates when it starts to wait, and when it reports a slow test.
fn main() {
    only_test("steady_state_steps_allocate_nothing", || {
        one_rank_and_memory_stays_flat();
        tokens();
        optimizers_of_fewer_bytes();
        what_an_update_does_beside_its_rule();
        what_waits_otherwise_than_as_it_is();
        several_ranks();
        saving_and_resuming();
        rows_without_room();
    });
}

/// Returns the number of steps whose allocations are counted. The call itself allocates.
fn counted() -> usize {
    few(&[20, 40], 1).last().copied().unwrap()
}

/// Counts allocations per generated token, for several sequences, with caches and every sampling rule.
fn tokens() {
    for kind in [Kind::Gpt, Kind::Llama, Kind::Moe(MoeStyle::Mixtral)] {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.generation = Some(Generation { batch: 3, window: Some(16), chunk: 4 });
        let mut trainer = run.trainer();
        let sampling = Sampling { top_p: 0.9, min_p: 0.01, repetition_penalty: 1.1, ..Sampling::default() };
        let options = GenerateOptions { tokens: 100, sampling, ..GenerateOptions::default() };
        let mut counts = Vec::with_capacity(300);
        let count = |_: &NextToken<'_>| {
            counts.push(ALLOCATIONS.load(Ordering::Relaxed));
            ControlFlow::Continue(())
        };
        trainer.generate(&[&[1, 2, 3], &[4], &[5; 20]], &options, count).unwrap();
        assert_eq!(counts.len(), 300);
        // The window is filled and read again many times.
        assert_eq!(counts[299] - counts[30], 0, "{kind:?}: heap allocations in 90 tokens of three sequences");
    }
}

/// Counts allocations of steps whose routed rows are evicted and recomputed, and of steps after an arena has grown.
fn rows_without_room() {
    let mesh = Mesh { expert: 2, ..Mesh::default() };
    for (overflow, factor) in [(Overflow::Recompute, 1.0), (Overflow::Grow, 0.5)] {
        let mut run = TinyRun { kind: Kind::Moe(MoeStyle::Mixtral), ..TinyRun::default() };
        run.options.threads = 1;
        run.options.step.micro_batches = 4;
        run.options.step.mesh = mesh;
        run.options.step.memory.routing = Reserve::Balanced { factor };
        run.options.step.memory.overflow = overflow;
        let (counts, reports) = allocations_on_ranks(&run);
        assert_eq!(counts, vec![0; 2], "{overflow:?}: heap allocations");
        let had_to = |report: &ArenaReport| match overflow {
            Overflow::Recompute => report.evicted > 0 && report.overflows == 0,
            _ => report.growths > 0,
        };
        assert!(reports.iter().all(|report| report.as_ref().is_some_and(had_to)), "{overflow:?}: {reports:?}");
    }
}

/// Counts the heap allocations of all ranks in the steps after the first ten. For each rank, returns the count, and
/// the report of the rank's arena on all steps.
fn allocations_on_ranks(run: &TinyRun) -> (Vec<u64>, Vec<Option<ArenaReport>>) {
    let counted = counted();
    let together = Barrier::new(run.options.step.mesh.ranks().unwrap());
    let ranks = run.on_ranks(|mut trainer| {
        let batches: Vec<_> = (0..4).map(|step| run.batch(step)).collect();
        let mut steps = |count: usize| {
            let batches = batches.iter().cycle().take(count);
            batches.for_each(|(tokens, targets)| _ = trainer.step(tokens, targets).unwrap());
        };
        steps(10);
        together.wait();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        together.wait();
        steps(counted);
        together.wait();
        let after = ALLOCATIONS.load(Ordering::Relaxed);
        // The end of a thread allocates, so no rank ends before all have counted.
        together.wait();
        (after - before, trainer.routing())
    });
    ranks.into_iter().unzip()
}

/// Counts allocations with ranks as threads, including messages and collectives. Expert ranks place a different
/// number of rows in every step.
fn several_ranks() {
    let both = Mesh { data: 2, pipeline: 2, ..Mesh::default() };
    let experts = Mesh { expert: 2, ..Mesh::default() };
    for (kind, mesh) in [
        (Kind::Gpt, both),
        (Kind::Moe(MoeStyle::DeepSeek), both),
        (Kind::Moe(MoeStyle::Mixtral), experts),
        (Kind::Moe(MoeStyle::Switch), experts),
        (Kind::Moe(MoeStyle::Qwen), Mesh { pipeline: 2, ..experts }),
        (Kind::Moe(MoeStyle::Qwen), Mesh { context: 2, ..experts }),
        (Kind::Moe(MoeStyle::Switch), Mesh { tensor: 2, fold: Axes::TENSOR, ..Mesh::default() }),
    ] {
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.threads = 1;
        run.options.step.micro_batches = 4;
        run.options.step.mesh = mesh;
        let (counts, reports) = allocations_on_ranks(&run);
        for report in reports {
            let served = report.map(|report| report.requests);
            assert_eq!(
                served > Some(0),
                mesh.size(mesh.experts()) > 1,
                "{kind:?} on {mesh:?}: rows are given room: {served:?}"
            );
        }
        assert!(counts.iter().all(|&count| count == 0), "{kind:?} on {mesh:?}: {counts:?} heap allocations");
    }
}

/// Ranks save and resume in blocks: they take less than 2 MiB of the heap each, however large the parts are that they hold, and none
/// for tensors. The arenas stay as planned.
fn saving_and_resuming() {
    let config =
        GptConfig { vocabulary: 12_000, sequence: 32, layers: 2, heads: 4, width: 256, ..GptConfig::default() };
    let dir = tempfile::tempdir().unwrap();
    let one = Mesh::default();
    let (shard, tensor, hybrid) =
        (Mesh { shard: 2, ..one }, Mesh { tensor: 2, ..one }, Mesh { data: 2, shard: 2, ..one });
    for (mesh, is_resumed) in [(shard, false), (shard, true), (tensor, true), (hybrid, true)] {
        let ranks = mesh.ranks().unwrap();
        let together = Barrier::new(ranks);
        let held = communicator::on_threads(ranks, |world| {
            let step = StepOptions { batch: 8, sequence: 32, mesh, ..common::on_cpu().step };
            let options = TrainOptions { threads: 1, step, ..common::on_cpu() };
            let mut trainer = Trainer::builder(|vb| Gpt::new(&config, vb), options).distributed(world).build()?;
            let tokens: Vec<u32> = (0..8 * 32).map(|i| i % 12_000).collect();
            trainer.step(&tokens, &tokens)?;
            let before = trainer.report().arena_bytes;
            together.wait();
            let live = LIVE.load(Ordering::Relaxed);
            MOST.store(live, Ordering::Relaxed);
            together.wait();
            if is_resumed {
                let checkpoint = Checkpoint::latest(dir.path())?.expect("one was saved");
                trainer.resume(&checkpoint)?;
            } else {
                trainer.save(dir.path(), serde_json::Value::Null)?;
            }
            together.wait();
            let most = MOST.load(Ordering::Relaxed);
            together.wait();
            assert_eq!(trainer.report().arena_bytes, before, "{mesh:?}: the arena is as planned");
            Ok((most - live, trainer.report().parameters * 12 / (ranks / mesh.data) as u64))
        });
        for (bytes, part) in held.unwrap() {
            println!("{mesh:?}, resumed: {is_resumed}: {bytes} bytes of the heap, {part} bytes of tensors per rank");
            assert!(part > 20 * MIB, "{part} bytes are too few to be told from blocks");
            assert!(bytes < 2 * MIB * ranks as u64, "{mesh:?}, resumed: {is_resumed}: {bytes} bytes of the heap");
        }
    }
}

const MIB: u64 = 1 << 20;

/// Counts the heap allocations of the steps after the first ten.
fn allocations_of_steps(run: &TinyRun) -> u64 {
    let (mut trainer, counted) = (run.trainer(), counted());
    let (tokens, targets) = run.batch(0);
    let mut steps = |count: usize| (0..count).for_each(|_| _ = trainer.step(&tokens, &targets).unwrap());
    steps(10);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    steps(counted);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// Includes several refreshes of GaLore's projections.
fn optimizers_of_fewer_bytes() {
    let galore = GaLore { rank: 12, refresh_steps: 3, ..GaLore::default() };
    let rules: [Arc<dyn Optimizer>; 2] = [AdamW8bit::default().into(), galore.into()];
    for optimizer in rules {
        let mut run = TinyRun::default();
        run.options.step.optimizer = optimizer;
        assert_eq!(allocations_of_steps(&run), 0, "{:?}: heap allocations", run.options.step.optimizer);
    }
}

/// Covers groups, clamped gradients, averages, and guarded steps.
fn what_an_update_does_beside_its_rule() {
    let mut run = TinyRun::default();
    let (names, optimizer) = (vec!["h.0".to_owned()], run.options.step.optimizer.clone());
    let groups = vec![ParameterGroup { names, optimizer, learning_rate: 0.5 }];
    run.options.step.update = UpdateOptions { groups, max_value: Some(1e-2), guarded: true, average: Some(0.9) };
    assert_eq!(allocations_of_steps(&run), 0, "{:?}: heap allocations", run.options.step.update);
}

/// Covers compressed activations, and activations that are offloaded to a file.
fn what_waits_otherwise_than_as_it_is() {
    for dtype in [DType::F32, DType::BF16] {
        let mut run = TinyRun::default();
        run.options.step.precision = dtype.try_into().unwrap();
        run.options.step.micro_batches = 2;
        run.options.step.memory.compress = vec!["gelu".into(), "layer_norm".into()];
        run.options.step.memory.offload = vec!["linear".into(), "add".into()];
        assert_eq!(allocations_of_steps(&run), 0, "{dtype:?}: heap allocations");
    }
}

fn one_rank_and_memory_stays_flat() {
    for (turn, kind) in Kind::all().enumerate() {
        let steps = if turn < 2 { 10 * counted() } else { counted() };
        let mut run = TinyRun { kind, ..TinyRun::default() };
        run.options.step.micro_batches = 2;
        let mut trainer = run.trainer();
        let (tokens, targets) = run.batch(0);
        for _ in 0..10 {
            trainer.step(&tokens, &targets).unwrap();
        }
        let resident = own_pages();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..steps {
            trainer.step(&tokens, &targets).unwrap();
        }
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(allocations, 0, "{kind:?}: heap allocations in {steps} steps");
        match (resident, own_pages()) {
            // The stack may grow by a page or two if a thread is interrupted at a deep point.
            (Some(before), Some(after)) => assert!(after <= before + (64 << 10), "{kind:?}: {before} to {after} bytes"),
            _ => not_checked("resident memory is not known on this system"),
        }
    }
}

/// Returns the bytes in private pages of this process, or `None` if the system does not report them. For smaps_rollup,
/// the kernel counts the pages one by one. By contrast, the numbers in /proc/self/status are off by some dozen pages
/// per core. Huge pages are excluded, because the kernel creates them from small pages, including untouched ones.
fn own_pages() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse().ok()
    };
    Some(((kib("Anonymous:")? + kib("Swap:")?).saturating_sub(kib("AnonHugePages:")?)) << 10)
}
