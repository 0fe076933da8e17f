//! What a run really takes of the machine's memory falls with its budget, as planned.
//!
//! The program runs itself once per budget, so it has a `main` of its own. Linux only: it reads /proc.

use std::process::Command;

use gapless::models::{Gpt, GptConfig};
use gapless::{Recompute, TrainOptions, Trainer};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, bytes] = &arguments[..]
        && flag == "--budget"
    {
        return train(bytes.parse().ok());
    }
    let name = "measured_memory_falls_with_the_budget";
    if arguments.iter().any(|a| a == "--list") {
        println!("{name}: test");
        return;
    }
    if resident_peak().is_none() {
        println!("test {name} ... skipped: no /proc/self/status here");
        return;
    }
    measured_memory_falls_with_the_budget();
    println!("test {name} ... ok");
}

/// Bytes that this process held at most.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Two steps under a budget, or without; prints the arena and what was held.
fn train(budget: Option<u64>) {
    let config = GptConfig { vocabulary: 512, sequence: 256, layers: 6, heads: 4, width: 256, dropout: 0.0 };
    let options = TrainOptions {
        batch: 8,
        sequence: 256,
        threads: 1,
        recompute: budget.map_or(Recompute::None, Recompute::budget),
        ..TrainOptions::default()
    };
    let mut trainer = match Trainer::new(|vb| Gpt::new(&config, vb), options) {
        Ok(trainer) => trainer,
        Err(gapless::Error::OverBudget { smallest, .. }) => return println!("{smallest} 0"),
        Err(error) => panic!("{error}"),
    };
    let tokens: Vec<u32> = (0..8 * 256).map(|i| i % 512).collect();
    for _ in 0..2 {
        trainer.step(&tokens, &tokens).unwrap();
    }
    println!("{} {}", trainer.report().arena_bytes, resident_peak().unwrap());
}

/// Arena and resident peak of a run of its own.
fn run(budget: Option<u64>) -> (u64, u64) {
    let budget = budget.map_or("none".to_owned(), |bytes| bytes.to_string());
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args(["--budget", &budget]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!(numbers.len(), 2, "{text}{}", String::from_utf8_lossy(&output.stderr));
    (numbers[0], numbers[1])
}

fn measured_memory_falls_with_the_budget() {
    const MIB: u64 = 1 << 20;
    let (all, held) = run(None);
    let (smallest, _) = run(Some(1));
    assert!(all > smallest + 64 * MIB, "{all} and {smallest}: too little to be measured");
    // The rest of the process.
    let beside = held.saturating_sub(all);
    assert!(beside < 48 * MIB, "{beside} bytes beside the arena");
    for quarters in 0..4 {
        let budget = smallest + (all - smallest) * quarters / 4;
        let (arena, held) = run(Some(budget));
        println!("budget {budget}: {arena} planned, {held} held; without {all}");
        assert!(arena <= budget);
        let difference = held.abs_diff(arena + beside);
        assert!(difference < 6 * MIB, "{held} bytes held with an arena of {arena}, {beside} of others");
    }
}
