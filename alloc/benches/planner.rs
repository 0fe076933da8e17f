//! Compares the planner with common alternatives in the same run: greedy by size (as in TensorFlow Lite) and first fit
//! in order of time. The instances are generated steps, and the tables in the folders of `../shared/instances` if there
//! are any.
//!
//! `cargo bench -p gapless-alloc --bench planner` prints one line per instance, with the height ÷ bound and the
//! milliseconds of each planner. The bench then measures gapless's planner on the steps that it plans quickly.
//! Arguments select instances by name; `GAPLESS_INSTANCES` names another folder of instances. Greedy by size is
//! quadratic. Where greedy by size would run for minutes, a dash replaces its result. Both alternatives have a dash for
//! instances with pins, which they don't support.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use gapless_alloc::synthetic::{Order, SyntheticStep};
use gapless_alloc::{Buffer, Options, Problem, check, csv, plan};

struct Instance {
    name: String,
    problem: Problem,
    /// The capacity in the file name, if there is one, as in minimalloc's instances.
    capacity: Option<u64>,
}

fn instances() -> Vec<Instance> {
    let named = std::env::var_os("GAPLESS_INSTANCES").map(PathBuf::from);
    let root = named
        .or_else(|| gapless_testing::next_to_repository("instances"))
        .unwrap_or_else(|| gapless_testing::evidence("instances"));
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let families = entries(&root).into_iter();
    // The same folders contain figures of another planner, which are not tables.
    let is_table = |path: &PathBuf| gapless_testing::table_name(path).is_some_and(|name| name != "authors_planner");
    let mut paths: Vec<PathBuf> = families.flat_map(|family| entries(&family)).filter(is_table).collect();
    paths.sort();
    let mut instances: Vec<Instance> = paths.iter().map(|path| read(path)).collect();
    instances.extend(generated());
    instances
}

fn read(path: &Path) -> Instance {
    let file = gapless_testing::open(path).expect("listed just now");
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let table = csv::read(file).expect("a sound table");
    let capacity = name.split('.').rev().nth(1).and_then(|part| part.parse().ok());
    Instance { name, problem: table.problem, capacity }
}

fn generated() -> Vec<Instance> {
    let step = |name: &str, step: SyntheticStep| Instance {
        name: format!("generated {name}"),
        problem: step.problem().expect("a sound step"),
        capacity: None,
    };
    let base = SyntheticStep { persistent: true, ..SyntheticStep::default() };
    vec![
        step("accumulation 10^4", SyntheticStep { order: Order::Accumulation, layers: 32, micro_batches: 20, ..base }),
        step("1f1b 10^4", SyntheticStep { layers: 32, micro_batches: 20, ..base }),
        step("interleaved 10^4", SyntheticStep { order: Order::Interleaved, layers: 32, micro_batches: 20, ..base }),
        step(
            "varying 10^4",
            SyntheticStep { layers: 32, micro_batches: 20, tokens: &[512, 1024, 768, 896, 640], ..base },
        ),
        step("1f1b 10^5", SyntheticStep { layers: 32, micro_batches: 200, stages: 8, ..base }),
        step(
            "interleaved 10^5",
            SyntheticStep { order: Order::Interleaved, layers: 32, micro_batches: 200, stages: 8, ..base },
        ),
        step("1f1b 10^6", SyntheticStep { layers: 64, micro_batches: 1000, stages: 16, ..base }),
        pinned(step("1f1b 10^4", SyntheticStep { layers: 32, micro_batches: 20, ..base })),
        pinned(step("1f1b 10^5", SyntheticStep { layers: 32, micro_batches: 200, stages: 8, ..base })),
    ]
}

/// Returns the same instance with every third buffer pinned at its offset in a plan.
fn pinned(instance: Instance) -> Instance {
    let offsets = plan(&instance.problem, &Options::default()).offsets;
    let place = |(k, (b, at)): (usize, (&Buffer, u64))| if k % 3 == 0 { b.clone().at(at) } else { b.clone() };
    let buffers = instance.problem.buffers().iter().zip(offsets).enumerate().map(place).collect();
    let problem = Problem::new(buffers).expect("the pins are a plan's");
    Instance { name: format!("{}, 1/3 pinned", instance.name), problem, ..instance }
}

/// Height and time.
type Measured = (u64, Duration);

fn measure(run: impl FnOnce() -> u64) -> Measured {
    let start = Instant::now();
    let height = run();
    (height, start.elapsed())
}

/// Places the buffers by size, the largest first, each at the lowest offset that the earlier buffers leave. The time is
/// quadratic. Returns `None` if the run would take too long, or if the problem has pins.
fn greedy_by_size(problem: &Problem) -> Option<Measured> {
    if problem.len() > 120_000 || has_pins(problem) {
        return None;
    }
    let mut order: Vec<&Buffer> = problem.buffers().iter().collect();
    order.sort_by_key(|b| std::cmp::Reverse(b.bytes));
    Some(measure(|| {
        let mut placed: Vec<(u64, &Buffer)> = Vec::new();
        let mut height = 0;
        for b in order {
            let mut floor = 0u64;
            for &(at, other) in &placed {
                let together = other.lifetime.start < b.lifetime.end && b.lifetime.start < other.lifetime.end;
                if together {
                    if at >= floor.next_multiple_of(b.alignment) + b.bytes {
                        break;
                    }
                    floor = floor.max(at + other.bytes);
                }
            }
            let at = floor.next_multiple_of(b.alignment);
            height = height.max(at + b.bytes);
            placed.insert(placed.partition_point(|p| p.0 < at), (at, b));
        }
        height
    }))
}

/// Places buffers in order of birth, each at the lowest offset that is free at that moment. Returns `None` if the
/// problem has pins.
fn first_fit_by_time(problem: &Problem) -> Option<Measured> {
    if has_pins(problem) {
        return None;
    }
    let mut order: Vec<&Buffer> = problem.buffers().iter().collect();
    order.sort_by_key(|b| (b.lifetime.start, std::cmp::Reverse(b.bytes)));
    Some(measure(|| {
        // `(offset, end, death)` by offset.
        let mut live: Vec<(u64, u64, u64)> = Vec::new();
        let mut height = 0;
        for b in order {
            live.retain(|l| l.2 > b.lifetime.start);
            let mut at = 0u64;
            let mut index = 0;
            while index < live.len() && live[index].0 < at.next_multiple_of(b.alignment) + b.bytes {
                at = at.max(live[index].1);
                index += 1;
            }
            let at = at.next_multiple_of(b.alignment);
            height = height.max(at + b.bytes);
            live.insert(live.partition_point(|l| l.0 < at), (at, at + b.bytes, b.lifetime.end));
        }
        height
    }))
}

fn has_pins(problem: &Problem) -> bool {
    problem.buffers().iter().any(|b| b.offset.is_some())
}

fn table_and_timings(c: &mut Criterion) {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    println!(
        "{:34} {:>8}  {:>16} {:>18}  {:>16}  proof",
        "instance", "buffers", "gapless", "greedy by size", "first fit"
    );
    let mut group = c.benchmark_group("plan");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for Instance { name, problem, capacity } in instances() {
        if !wanted.is_empty() && !wanted.iter().any(|w| name.contains(w.as_str())) {
            continue;
        }
        let options = Options { capacity, ..Options::default() };
        let start = Instant::now();
        let solution = plan(&problem, &options);
        let ours = (solution.height, start.elapsed());
        check(&problem, &solution.offsets, None).expect("every plan passes the checker");
        let cell = |(height, time): Measured| {
            let gap = height as f64 / solution.lower_bound.max(1) as f64;
            format!("{gap:.4} {:>7.1} ms", time.as_secs_f64() * 1e3)
        };
        let greedy = greedy_by_size(&problem).map_or_else(|| "-".into(), cell);
        let first_fit = first_fit_by_time(&problem).map_or_else(|| "-".into(), cell);
        let proof = match capacity {
            Some(_) => format!("{}, {:?}", solution.proof.name(), solution.fit),
            None => solution.proof.name().into(),
        };
        println!("{name:34} {:>8}  {:>16} {greedy:>18}  {first_fit:>16}  {proof}", problem.len(), cell(ours));
        if ours.1 < Duration::from_millis(20) {
            group.bench_function(&name, |b| b.iter(|| plan(&problem, &options)));
        }
    }
    group.finish();
}

criterion_group!(benches, table_and_timings);
criterion_main!(benches);
