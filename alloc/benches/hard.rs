//! Prints the height, the CPU time and the memory of plans for tables that are hard on a planner.
//!
//! `cargo bench -p gapless-alloc --bench hard` plans each table in a process of its own, with the default options. The
//! tables are those in the folders of `../shared/instances`, if there are any, and generated ones of up to a million
//! buffers. Arguments select tables by name. The columns are
//!
//! - the height ÷ the max-live bound, and the lowest known height ÷ the bound (a dash if none is recorded here);
//! - the seconds of CPU time (user and system, all threads) that one call of `plan` takes;
//! - the milliseconds of the fastest of up to ten calls;
//! - the most memory of the process in MB, the table included.
//!
//! CPU time and memory are read from `/proc`, so they are missing on systems other than Linux.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gapless_alloc::synthetic::{Order, SyntheticStep};
use gapless_alloc::{Buffer, Options, Problem, check, csv, plan};

/// The lowest known heights of tables in `instances/adversarial` (its `README.md` names the planners).
const BEST_KNOWN: [(&str, u64); 9] = [
    ("adv_align_2m_small_3000", 96_471_204),
    ("adv_align_mix_100", 64_527_641),
    ("adv_convoy_5000", 329_980),
    ("iopddl_A_rnd", 3_122_549_892),
    ("perfect_guil_10000", 11_610_000),
    ("perfect_pinw_1000", 1_000_000),
    ("pipe_ds_moe_1f1b_int_p10v3m30r0_rc", 7_732_819_968),
    ("pipe_gpt175b_zbv_p16v2m32r4", 9_878_962_176),
    ("random_short_1000", 8_496_128),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [flag, name] = arguments.as_slice()
        && flag == "--one"
    {
        return measure(name);
    }
    println!(
        "{:36} {:>9} {:>9} {:>9} {:>8} {:>9} {:>7}  stopped by",
        "table", "buffers", "height", "known", "CPU s", "ms", "MB"
    );
    let this = std::env::current_exe().expect("a bench has a path");
    let tables = tables().into_iter().map(|path| path.display().to_string());
    for name in tables.chain(generated().into_iter().map(|(name, _)| name.to_owned())) {
        if arguments.is_empty() || arguments.iter().any(|wanted| name.contains(wanted.as_str())) {
            let status = Command::new(&this).args(["--one", &name]).status().expect("this bench can be started");
            assert!(status.success(), "{name}: {status}");
        }
    }
}

/// The paths of all tables, by folder and name.
fn tables() -> Vec<PathBuf> {
    let root =
        gapless_testing::next_to_repository("instances").unwrap_or_else(|| gapless_testing::evidence("instances"));
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    // The same folders contain figures of another planner, which are not tables.
    let is_table = |path: &PathBuf| gapless_testing::table_name(path).is_some_and(|name| name != "authors_planner");
    let mut paths: Vec<PathBuf> = entries(&root).iter().flat_map(|family| entries(family)).filter(is_table).collect();
    paths.sort();
    paths
}

/// Plans one table and prints its line.
fn measure(name: &str) {
    let problem = match generated().into_iter().find(|(other, _)| *other == name) {
        Some((_, make)) => make(),
        None => {
            let file = gapless_testing::open(Path::new(name)).expect("the table was listed just now");
            csv::read(file).expect("a sound table").problem
        }
    };
    let name = gapless_testing::table_name(Path::new(name)).unwrap_or(name);
    let before = cpu_seconds();
    let start = Instant::now();
    let solution = plan(&problem, &Options::default());
    let mut fastest = start.elapsed();
    let cpu = cpu_seconds() - before;
    let memory = peak_megabytes();
    for _ in 1..10 {
        if start.elapsed() > Duration::from_millis(600) {
            break;
        }
        let start = Instant::now();
        plan(&problem, &Options::default());
        fastest = fastest.min(start.elapsed());
    }
    check(&problem, &solution.offsets, None).expect("every plan passes the checker");
    let bound = solution.lower_bound.max(1) as f64;
    let known = BEST_KNOWN.iter().find(|(table, _)| *table == name);
    let known = known.map_or_else(|| "-".to_owned(), |(_, height)| format!("{:.5}", *height as f64 / bound));
    println!(
        "{name:36} {:>9} {:>9.5} {known:>9} {cpu:>8.2} {:>9.2} {memory:>7}  {:?}",
        problem.len(),
        solution.gap(),
        fastest.as_secs_f64() * 1e3,
        solution.stop_reason
    );
}

/// The CPU time of this process so far.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The 14th and 15th fields are user and system time in hundredths of a second. The second field is in parentheses.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The most memory that this process has used so far.
fn peak_megabytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0) / 1000
}

type Make = Box<dyn Fn() -> Problem>;

/// The generated tables, by name.
fn generated() -> Vec<(&'static str, Make)> {
    let step = |order, layers, micro_batches, stages| -> Make {
        let base = SyntheticStep { persistent: true, ..SyntheticStep::default() };
        Box::new(move || {
            SyntheticStep { order, layers, micro_batches, stages, ..base }.problem().expect("a sound step")
        })
    };
    let pinned = |make: Make| -> Make {
        Box::new(move || {
            let problem = make();
            let offsets = plan(&problem, &Options::default()).offsets;
            let place = |(k, (b, at)): (usize, (&Buffer, u64))| if k % 3 == 0 { b.clone().at(at) } else { b.clone() };
            let buffers = problem.buffers().iter().zip(offsets).enumerate().map(place).collect();
            Problem::new(buffers).expect("the pins are those of a plan")
        })
    };
    use Order::{Interleaved, OneForwardOneBackward as OneByOne, Overlapped};
    vec![
        ("generated 1f1b 10^5", step(OneByOne, 32, 200, 8)),
        ("generated 1f1b 10^5, 1/3 pinned", pinned(step(OneByOne, 32, 200, 8))),
        ("generated 1f1b 10^6", step(OneByOne, 64, 1000, 16)),
        ("generated interleaved 10^5", step(Interleaved, 32, 200, 8)),
        ("generated interleaved 10^6", step(Interleaved, 64, 1000, 16)),
        ("generated overlap 10^5", step(Overlapped, 32, 200, 8)),
        ("generated overlap 10^6", step(Overlapped, 64, 1000, 16)),
        ("generated uniform 10^4", Box::new(|| uniform(10_000, 500))),
        ("generated uniform 10^5", Box::new(|| uniform(100_000, 5_000))),
        ("generated uniform 10^6", Box::new(|| uniform(1_000_000, 50_000))),
        ("generated short 10^5", Box::new(|| uniform(100_000, 200))),
        ("generated short 10^6", Box::new(|| uniform(1_000_000, 200))),
        ("generated often full 3·2·8", step(Overlapped, 3, 8, 2)),
        ("generated often full 4·2·8", step(Overlapped, 4, 8, 2)),
        ("generated often full 6·2·8", step(Overlapped, 6, 8, 2)),
        ("generated often full 4·3·8", step(Overlapped, 4, 8, 3)),
        ("generated often full 4·4·12", step(Overlapped, 4, 12, 4)),
        ("generated often full 8·4·12", step(Overlapped, 8, 12, 4)),
        ("generated perfect 10^3", Box::new(|| perfect(1_000))),
        ("generated perfect 5·10^3", Box::new(|| perfect(5_000))),
        ("generated perfect 10^4", Box::new(|| perfect(10_000))),
        ("generated perfect 4·10^4", Box::new(|| perfect(40_000))),
        ("generated perfect 10^5", Box::new(|| perfect(100_000))),
        ("generated perfect 10^6", Box::new(|| perfect(1_000_000))),
        ("generated aligned 10^5", Box::new(|| aligned(100_000))),
        ("generated aligned 10^6", Box::new(|| aligned(1_000_000))),
    ]
}

/// Pseudo-random numbers (splitmix64).
struct Random(u64);

impl Random {
    /// A number in `from..=to`.
    fn within(&mut self, from: u64, to: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        from + (x ^ (x >> 31)) % (to - from + 1)
    }
}

/// Buffers that start at any of `count` ticks, live for up to `longest` ticks and have up to one MiB.
fn uniform(count: u64, longest: u64) -> Problem {
    let mut random = Random(count);
    let buffer = |_| {
        let start = random.within(0, count);
        let ticks = random.within(1, longest);
        Buffer::new(start..start + ticks, random.within(1, 1 << 20))
    };
    Problem::new((0..count).map(buffer).collect()).expect("sound buffers")
}

/// Short-lived buffers of up to 64 KiB at multiples of one of several alignments.
fn aligned(count: u64) -> Problem {
    let mut random = Random(count);
    let buffer = |_| {
        let start = random.within(0, count);
        let ticks = random.within(1, 60);
        let alignment = 1 << random.within(0, 12);
        Buffer::new(start..start + ticks, random.within(1, 1 << 16)).aligned(alignment)
    };
    Problem::new((0..count).map(buffer).collect()).expect("sound buffers")
}

/// A rectangle that is full without gaps, cut into pieces by random straight cuts.
fn perfect(count: u64) -> Problem {
    let mut random = Random(count);
    let mut open = vec![(0..10 * count, 0..10_000_000u64, count)];
    let mut buffers = Vec::new();
    while let Some((ticks, bytes, pieces)) = open.pop() {
        if pieces == 1 {
            buffers.push(Buffer::new(ticks, bytes.end - bytes.start));
            continue;
        }
        let first = random.within(pieces.div_ceil(3), pieces - pieces.div_ceil(3));
        let (long, high) = (ticks.end - ticks.start, bytes.end - bytes.start);
        // Long rectangles are cut in time and high ones in bytes; 1,000 bytes count as a tick.
        let is_in_time = long > 1 && (long * random.within(50, 150) > high / 1_000 * 100 || high < 2);
        let at = |length: u64| (length * first / pieces).clamp(1, length - 1);
        if is_in_time {
            let cut = ticks.start + at(long);
            open.push((ticks.start..cut, bytes.clone(), first));
            open.push((cut..ticks.end, bytes, pieces - first));
        } else {
            let cut = bytes.start + at(high);
            open.push((ticks.clone(), bytes.start..cut, first));
            open.push((ticks, cut..bytes.end, pieces - first));
        }
    }
    Problem::new(buffers).expect("sound buffers")
}
