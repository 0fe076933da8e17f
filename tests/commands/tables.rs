//! Every table of measurements in the documentation has a source: a test that compares it, or a command that prints it.
//!
//! A table counts as measurements if a third of its cells begin with a digit. Its source is listed here, and its page
//! names the command. A table whose numbers no test compares can become stale: its command is to be run again whenever
//! what it measures changes.

use std::fs;
use std::path::Path;

/// The source of a table.
#[derive(Debug)]
enum Source {
    /// A test that fails if the page differs: the file, and the function. With `GAPLESS_SLOW_TESTS=1` it compares every
    /// line.
    Compared(&'static str, &'static str),
    /// A command that prints the numbers, a file in which it is implemented, and why no test compares them.
    Printed(&'static str, &'static str, Why),
    /// Not measured: definitions, vendors' data, or what follows from the source in this file.
    Stated(&'static str),
}
use Source::{Compared, Printed, Stated};

/// The reason why no test compares a table.
#[derive(Debug, Clone, Copy)]
enum Why {
    /// The numbers are times, memory of processes or losses, which depend on the machine.
    Measured,
    /// The numbers are of a GPU, or of PyTorch.
    Elsewhere,
    /// A run takes minutes.
    Minutes,
    /// The numbers are of earlier versions, which this version cannot print.
    Earlier,
}
use Why::{Earlier, Elsewhere, Measured, Minutes};

const TRAIN_STEP: Source = Printed("--bench train_step", "benches/train_step/main.rs", Measured);
const GPU: Source = Printed("benches/gpu", "benches/gpu/main.rs", Elsewhere);
const PLAN: &str = "src/bin/gapless/plan/mod.rs";
const PLANNER: Source = Printed("--bench planner", "alloc/benches/planner.rs", Measured);
const HARD: Source = Printed("--bench hard", "alloc/benches/hard.rs", Measured);
const ROUTING: Source =
    Compared("alloc/allocators/tests/arena_routing.rs", "reserves_less_than_a_block_more_than_the_best_of_the_others");

/// Every table of measurements, by its page and the beginning of its first line.
const TABLES: &[(&str, &str, Source)] = &[
    ("README.md", "| | memory | Zen 4: tokens/s", TRAIN_STEP),
    (
        "docs/allocators.md",
        "| recording | gapless | stalloc",
        Printed("gapless compare", "src/bin/gapless/compare.rs", Minutes),
    ),
    (
        "docs/allocators.md",
        "| step | split-and-fuse",
        Compared("alloc/allocators/tests/stalloc_planner.rs", "both_algorithms_reserve_what_the_authors_planner_does"),
    ),
    ("docs/architecture.md", "| level | available on", Stated("engine/kernels/src/cpu/simd.rs")),
    (
        "docs/architecture.md",
        "| loop | instructions",
        Printed(".ci/platforms instructions", ".ci/platforms", Elsewhere),
    ),
    (
        "docs/arena.md",
        "| recording | arena",
        Compared("alloc/allocators/tests/arena_recordings.rs", "reserves_at_most_what_the_best_of_the_others_does"),
    ),
    ("docs/arena.md", "| step, routing | arena", ROUTING),
    (
        "docs/arena.md",
        "| | reserve | uniform",
        Compared("alloc/allocators/tests/arena_routing.rs", "policies_do_what_they_say"),
    ),
    ("docs/arena.md", "| step | `Bytes`", Printed("--bench arena", "alloc/allocators/benches/arena.rs", Measured)),
    (
        "docs/build.md",
        "| build | CPU seconds",
        Printed("cargo run --release --example train_gpt", "examples/train_gpt.rs", Measured),
    ),
    (
        "docs/experiments.md",
        "| step | requests",
        Compared("examples/schedule_experiments/main.rs", "the_table_of_the_page_is_what_this_prints"),
    ),
    (
        "docs/experiments.md",
        "| step, with steps of other lengths",
        Compared("examples/schedule_experiments/main.rs", "the_table_of_the_page_is_what_this_prints"),
    ),
    (
        "docs/generation.md",
        "| sequences | share",
        Printed("gapless-bench-generate", "benches/generate/src/main.rs", Measured),
    ),
    ("docs/gpu.md", "| model, sequences | gapless", GPU),
    ("docs/gpu.md", "| model | planned", GPU),
    ("docs/gpu.md", "| model | steps × ids", GPU),
    ("docs/gpu.md", "| launch | 2026-11-26", GPU),
    ("docs/gpu.md", "| kernel | `wgmma` per tile", Stated("engine/kernels/src/cuda/launch/attention.rs")),
    (
        "docs/gpu.md",
        "| | launches | bytes read",
        Compared("engine/src/tests/cuda/fused.rs", "steps_launch_less_and_move_less"),
    ),
    ("docs/gpu.md", "| version | launches", Printed("gapless plan", PLAN, Earlier)),
    ("docs/gpu.md", "| kernel | threads", Printed("every_kernel_compiles", "tests/gpu_bench.rs", Elsewhere)),
    ("docs/gpu.md", "| kernel | loads in flight", Stated("engine/kernels/src/cuda/launch/mod.rs")),
    (
        "docs/hugging_face.md",
        "| trained | parameters",
        Compared("tests/training/trainable.rs", "a_llama_of_1b_is_planned_in_part"),
    ),
    (
        "docs/hugging_face.md",
        "| family | lines",
        Compared("tests/hugging_face/families.rs", "a_family_takes_few_lines"),
    ),
    ("docs/moe.md", "| `--reserve`", Printed("--example train_moe", "examples/train_moe.rs", Measured)),
    ("docs/moe.md", "| `MoeStyle`", Stated("models/src/moe.rs")),
    ("docs/moe.md", "| threads | step", TRAIN_STEP),
    ("docs/moe.md", "| part of the step", TRAIN_STEP),
    (
        "docs/ranks.md",
        "| ranks | sequence parallelism",
        Compared("tests/training/tensor_reports.rs", "activations_of_a_layer_follow_from_the_papers_formula"),
    ),
    (
        "docs/ranks.md",
        "| ranks of `[mesh]` | kept",
        Compared("tests/training/folded_ranks.rs", "experts_keep_and_send_what_the_formulas_say"),
    ),
    ("docs/optimizers.md", "| optimizer | states", Stated("tests/training/optimizers.rs")),
    ("docs/optimizers.md", "| singular values", Stated("engine/graph/src/optim/subspace.rs")),
    ("docs/optimizers.md", "| step | AdamW", Printed("gapless train", "src/bin/gapless/train.rs", Measured)),
    ("docs/planner.md", "| exit code", Stated("src/bin/gapless/plan/mod.rs")),
    ("docs/planner.md", "| instance | buffers", PLANNER),
    ("docs/planner.md", "| step | buffers", PLANNER),
    ("docs/planner.md", "| table | buffers", HARD),
    (
        "docs/pytorch.md",
        "| loop | most requested",
        Printed("--example loops", "alloc/torch/examples/loops.rs", Minutes),
    ),
    (
        "docs/ranks.md",
        "| ranks | kept",
        Compared("tests/training/sharded_ranks.rs", "stages_keep_and_send_what_the_formulas_say"),
    ),
    ("docs/recompute.md", "| step | exact", Printed("gapless train run.toml", "src/bin/gapless/train.rs", Measured)),
    ("docs/recompute.md", "| model | batch", Printed("gapless plan", PLAN, Earlier)),
    (
        "docs/recompute.md",
        "| model | recomputed | arena",
        Compared("tests/training/step_memory.rs", "activations_take_less_than_those_of_recorded_pytorch_runs"),
    ),
    ("docs/recompute.md", "| fraction of the", Compared("tests/training/step_memory.rs", "llama_2_7b_under_budgets")),
    ("docs/recompute.md", "| schedule | recomputed", Printed("gapless plan", PLAN, Minutes)),
    ("docs/recompute.md", "| budget | arena", Printed("gapless plan", PLAN, Minutes)),
    ("docs/recompute.md", "| model | budget", Printed("gapless plan", PLAN, Measured)),
    (
        "docs/recompute.md",
        "| model | recomputed | compressed",
        Compared("tests/commands/plan.rs", "compressed_steps_are_those_of_the_page"),
    ),
    ("docs/runs.md", "| code | meaning", Stated("src/bin/gapless/main.rs")),
    ("docs/sweep.md", "| recording | experts", Compared("tests/eager.rs", "steps_allocate_what_the_library_does")),
    ("docs/sweep.md", "| recording | steps", Compared("tests/eager.rs", "runs_start_as_those_of_the_library")),
    ("docs/sweep.md", "| profile | device", Stated("src/step/cards.rs")),
    ("docs/sweep.md", "| ranks | configurations", Printed("--bench predicted", "benches/predicted/main.rs", Measured)),
    (
        "docs/sweep.md",
        "| allocator | fragmentation",
        Printed("gapless sweep specs/llama-7b.toml", "src/bin/gapless/sweep.rs", Minutes),
    ),
    (
        "docs/sweep.md",
        "| load | allocator",
        Printed("gapless sweep specs/qwen-moe.toml", "src/bin/gapless/sweep.rs", Minutes),
    ),
    (
        "docs/published_bytes.md",
        "| case | tensor",
        Compared("examples/published_bytes.rs", "states_and_peaks_are_those_of_the_page"),
    ),
    (
        "docs/published_bytes.md",
        "| table | model",
        Compared("examples/torchtitan.rs", "reserved_bytes_are_those_of_the_page"),
    ),
    (
        "docs/published_times.md",
        "| model | GPUs",
        Compared("examples/published_times.rs", "estimates_are_those_of_the_page"),
    ),
    ("docs/weights_and_data.md", "| data | rows", Stated("docs/weights_and_data.md")),
];

/// Returns the pages of the documentation. docs/run_file.md is generated as a whole (`tests/run_file/reference.rs`).
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = fs::read_dir(root.join("docs")).unwrap();
    let names = docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().into_string().unwrap()));
    let names = names.filter(|name| name.ends_with(".md") && name != "docs/run_file.md");
    let all = names.chain(["README.md", "CONTRIBUTING.md"].map(str::to_owned));
    all.map(|name| (name.clone(), fs::read_to_string(root.join(name)).unwrap())).collect()
}

/// Returns the first lines of a page's tables of measurements.
fn measured_tables(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let is_row = |line: &&str| line.starts_with('|');
    let is_rule = |line: &str| is_row(&line) && line.chars().all(|letter| "|-: ".contains(letter));
    let starts = (0..lines.len().saturating_sub(1)).filter(|&at| is_row(&lines[at]) && is_rule(lines[at + 1]));
    let is_measured = |&at: &usize| {
        let rows = lines[at + 2..].iter().copied().take_while(is_row);
        let cells: Vec<&str> = rows.flat_map(|row| row.trim_matches('|').split('|')).collect();
        let begins_with_digit = |cell: &&&str| {
            cell.trim_matches([' ', '*', '~', '×', '+', '-', '−']).starts_with(|c: char| c.is_ascii_digit())
        };
        3 * cells.iter().filter(begins_with_digit).count() >= cells.len()
    };
    starts.filter(is_measured).map(|at| lines[at]).collect()
}

#[test]
fn every_table_of_measurements_has_a_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = pages();
    for (page, text) in &pages {
        for first in measured_tables(text) {
            let known = TABLES.iter().any(|(of, start, _)| of == page && first.starts_with(start));
            assert!(known, "{page}: no source is listed for the table\n{first}");
        }
    }
    for (page, start, source) in TABLES {
        let text = &pages.iter().find(|(name, _)| name == page).unwrap_or_else(|| panic!("{page} is missing")).1;
        let is_there = text.lines().any(|line| line.starts_with(start));
        assert!(is_there, "{page} has no table that starts with {start:?}; take it out of TABLES");
        let (Compared(file, _) | Printed(_, file, _) | Stated(file)) = source;
        assert!(root.join(file).exists(), "{page}: {file}, the source of {start:?}, does not exist");
        match source {
            Compared(file, test) => {
                let code = fs::read_to_string(root.join(file)).unwrap();
                assert!(code.contains(&format!("fn {test}()")), "{file} has no test {test}");
                assert!(code.contains(page), "{file} does not read {page}");
            }
            Printed(command, _, why) => {
                assert!(!command.is_empty(), "{page}: no command is listed for {start:?}");
                assert!(
                    text.contains(command),
                    "{page} does not name the command {command:?}, and no test compares its table ({why:?})"
                );
            }
            Stated(_) => {}
        }
    }
}
