//! Writes a long table (by default, of ten million buffers), or reads and plans one. Planning prints the time and
//! memory that each step took.
//!
//! ```text
//! cargo run --release -p gapless-alloc --example long_table -- write TABLE.csv [MICRO_BATCHES]
//! cargo run --release -p gapless-alloc --example long_table -- plan TABLE.csv
//! ```

use std::error::Error;
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::time::Instant;

use gapless_alloc::synthetic::SyntheticStep;
use gapless_alloc::{Options, check, csv, plan};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["write", path] => write(path, 10_000),
        ["write", path, micro_batches] => write(path, micro_batches.parse()?),
        ["plan", path] => place(path),
        _ => Err("usage: write TABLE.csv [MICRO_BATCHES] | plan TABLE.csv".into()),
    }
}

fn write(path: &str, micro_batches: u64) -> Result<(), Box<dyn Error>> {
    let step = SyntheticStep { layers: 64, micro_batches, stages: 16, persistent: true, ..SyntheticStep::default() };
    let problem = step.problem()?;
    let ids: Vec<String> = problem.ids().map(|id| id.0.to_string()).collect();
    let table = csv::Table::new(ids, problem);
    table.write(BufWriter::new(File::create(path)?), None)?;
    println!("{} lines in {path}", table.problem.len() + 1);
    Ok(())
}

fn place(path: &str) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let table = csv::read(BufReader::with_capacity(1 << 20, File::open(path)?))?;
    println!("read {} buffers: {:.2} s, {}", table.problem.len(), start.elapsed().as_secs_f64(), most_memory());
    let start = Instant::now();
    let solution = plan(&table.problem, &Options::default());
    let (seconds, proof) = (start.elapsed().as_secs_f64(), solution.proof.name());
    println!("planned at {:.6} × the bound ({proof}): {seconds:.2} s, {}", solution.gap(), most_memory());
    let start = Instant::now();
    check(&table.problem, &solution.offsets, None).map_err(|violations| format!("{violations:?}"))?;
    println!("checked: {:.2} s, {}", start.elapsed().as_secs_f64(), most_memory());
    Ok(())
}

/// Describes the most memory that the process has used so far. The text says `unknown` if the system does not report
/// this.
fn most_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown");
    format!("at most {} resident", line.trim())
}
