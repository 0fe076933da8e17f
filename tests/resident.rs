//! The resident memory of a process decreases with the budget and with the activations that are offloaded, by as much
//! as planned.
//!
//! The program runs itself once per budget, so it has its own `main`. It reads /proc, so it only runs on Linux.

use std::process::Command;

use gapless::TrainError;
use gapless::engine::compile::Error as CompileError;
use gapless::models::{Gpt, GptConfig};
use gapless::{DeviceChoice, MemoryOptions, StepOptions, TrainOptions, Trainer};
use gapless_testing::{few, not_checked, only_test};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, bytes, ops] = &arguments[..]
        && flag == "--budget"
    {
        return train(bytes.parse().ok(), ops);
    }
    only_test("measured_memory_is_what_was_planned", || {
        if resident_peak().is_none() {
            return not_checked("there is no /proc/self/status");
        }
        let (all, file, held) = run(None, "");
        assert_eq!(file, 0);
        // Memory that the process uses in addition to the arena.
        let beside = held.saturating_sub(all);
        assert!(beside < 48 * MIB, "{beside} bytes beside the arena");
        measured_memory_falls_with_the_budget(all, beside);
        measured_memory_falls_with_what_is_offloaded(all, beside);
    });
}

/// Returns the peak resident memory of this process in bytes, or `None` if the system does not report it.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Does a step with or without a budget, with the results of some operations offloaded. Prints the sizes of the arena
/// and the file, and the peak resident memory.
fn train(budget: Option<u64>, offload: &str) {
    let config = GptConfig {
        vocabulary: 512,
        sequence: 256,
        layers: 6,
        heads: 4,
        width: 128,
        dropout: 0.0,
        ..GptConfig::default()
    };
    let options = TrainOptions {
        step: StepOptions {
            batch: 16,
            sequence: 256,
            memory: MemoryOptions {
                offload: offload.split_terminator(',').map(str::to_owned).collect(),
                offload_to: Some(env!("CARGO_TARGET_TMPDIR").into()),
                budget,
                ..MemoryOptions::default()
            },
            ..StepOptions::default()
        },
        threads: 1,
        device: DeviceChoice::Cpu,
        ..TrainOptions::default()
    };
    let mut trainer = match Trainer::new(|vb| Gpt::new(&config, vb), options) {
        Ok(trainer) => trainer,
        Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => return println!("{smallest} 0 0"),
        Err(error) => panic!("{error}"),
    };
    let tokens: Vec<u32> = (0..16 * 256).map(|i| i % 512).collect();
    trainer.step(&tokens, &tokens).unwrap();
    let report = trainer.report();
    println!("{} {} {}", report.arena_bytes, report.host_bytes, resident_peak().unwrap());
}

/// Runs [`train`] in a process of its own. Returns the sizes of the arena and the file, and the peak resident memory.
fn run(budget: Option<u64>, offload: &str) -> (u64, u64, u64) {
    let budget = budget.map_or("none".to_owned(), |bytes| bytes.to_string());
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args(["--budget", &budget, offload]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!(numbers.len(), 3, "{text}{}", String::from_utf8_lossy(&output.stderr));
    (numbers[0], numbers[1], numbers[2])
}

const MIB: u64 = 1 << 20;

fn measured_memory_falls_with_the_budget(all: u64, beside: u64) {
    let (smallest, ..) = run(Some(1), "");
    assert!(all > smallest + 64 * MIB, "{all} and {smallest}: too little to be measured");
    for quarters in few(&[1, 0, 2, 3], 1) {
        let budget = smallest + (all - smallest) * quarters / 4;
        let (arena, _, held) = run(Some(budget), "");
        println!("budget {budget}: {arena} planned, {held} held; without {all}");
        assert!(arena <= budget);
        let difference = held.abs_diff(arena + beside);
        assert!(difference < 6 * MIB, "{held} bytes held with an arena of {arena}, {beside} of others");
    }
}

/// The kernel may keep the offload file in memory or write it to disk, so the file does not count as memory of the
/// process.
fn measured_memory_falls_with_what_is_offloaded(all: u64, beside: u64) {
    for ops in few(&["linear,gelu,layer_norm,attention,add", "linear"], 1) {
        let (arena, file, held) = run(None, ops);
        println!("{ops} in a file of {file}: {arena} planned, {held} held; without {all}");
        assert!(arena + 48 * MIB < all && arena + file > all - 48 * MIB);
        let difference = held.abs_diff(arena + beside);
        assert!(difference < 6 * MIB, "{held} bytes held with an arena of {arena}, {beside} of others");
    }
}
