//! Compares results of papers about allocators with our results for the same steps. Each allocator is replayed on the
//! lifetimes of an eager framework. The planner of gapless is also measured on the lifetimes that gapless compiles.
//!
//! `cargo run --release --example schedule_experiments` runs some rows in half a minute; `--all` runs all of them. The
//! papers' results are in `papers.csv`, and the steps in `rows.toml`, next to this file.

use anyhow::{Context, Result};
use clap::Parser;
use gapless::allocators::{Comparison, Entry, Kind, Requests, compare};
use gapless::engine::compile::StagePartition;
use gapless::models::hf::Architecture;
use gapless::run::RunConfig;
use gapless::step::Step;
use serde::Deserialize;

#[derive(Parser)]
#[command(about = "Steps of papers: their results and ours")]
struct Args {
    /// All rows; by default a quick selection
    #[arg(long)]
    all: bool,
    /// Only rows whose name contains this
    #[arg(long, default_value = "")]
    row: String,
    /// Print tab-separated values
    #[arg(long)]
    tsv: bool,
}

#[derive(Deserialize)]
struct Rows {
    row: Vec<Row>,
}

/// A step of a paper.
#[derive(Deserialize)]
struct Row {
    name: String,
    /// The results of the paper that can be compared, and the reason why the others cannot.
    comparable: String,
    #[serde(default)]
    quick: bool,
    run: RunConfig,
}

/// A paper's result about an allocator.
struct Fact {
    paper: String,
    allocator: String,
    text: String,
}

/// The result of one allocator for one step.
struct Outcome {
    name: &'static str,
    reserved: Option<u64>,
    allocated: u64,
}

const PEERS: [Kind; 5] = [Kind::Gapless, Kind::StAlloc, Kind::PyTorch, Kind::PyTorchExpandable, Kind::GmLake];

fn main() -> Result<()> {
    let args = Args::parse();
    let Rows { row: rows } = toml::from_str(include_str!("rows.toml"))?;
    if args.tsv {
        println!("row\tallocator\tpaper\tefficiency %\tfragments GB\treserved GB");
    }
    for row in rows.iter().filter(|row| (args.all || row.quick || !args.row.is_empty()) && row.name.contains(&args.row))
    {
        let outcomes = measure(row).with_context(|| row.name.clone())?;
        print(&args, row, &facts(&row.name)?, &outcomes);
    }
    Ok(())
}

/// Measures gapless on its own lifetimes, and then all allocators on the lifetimes of an eager framework.
fn measure(row: &Row) -> Result<Vec<Outcome>> {
    let mut step = Step::new(&row.run)?;
    step.options.pipeline.cut = equal_stages(&step);
    let graph = step.record()?;
    let rank = step.ranks[0];
    let plan = step.plan(&step.program(&graph, rank)?)?;
    let mut outcomes = vec![Outcome {
        name: "gapless's step",
        reserved: Some(plan.arena_bytes()),
        allocated: plan.solution().lower_bound,
    }];
    let problem = step.eager(&graph, rank)?;
    let comparison = Comparison { kinds: PEERS.to_vec(), iterations: 3, ..Comparison::default() };
    let compared = compare(&problem, &Requests::new(&problem), &comparison);
    outcomes.extend(compared.allocators.iter().map(outcome));
    Ok(outcomes)
}

/// Returns a partition into stages with the same number of layers, as in Megatron.
fn equal_stages(step: &Step) -> StagePartition {
    let stages = step.options.stages();
    let (prefix, layers) = match step.architecture() {
        Architecture::Gpt(gpt) => ("h", gpt.layers),
        Architecture::Llama(llama) => ("model.layers", llama.layers),
        Architecture::Moe(moe) => ("model.layers", moe.llama.layers),
    };
    StagePartition::Before((1..stages).map(|stage| format!("{prefix}.{}", stage * layers / stages)).collect())
}

fn outcome(entry: &Entry) -> Outcome {
    let report = entry.outcome.as_ref().ok();
    Outcome {
        name: entry.kind.name(),
        reserved: report.map(gapless::allocators::Report::peak_reserved),
        allocated: report.map_or(0, gapless::allocators::Report::peak_allocated),
    }
}

/// Returns the papers' results about a row of `rows.toml`.
fn facts(row: &str) -> Result<Vec<Fact>> {
    let mut lines = csv(include_str!("papers.csv"));
    lines.remove(0);
    let of_row = lines.into_iter().filter(|fields| fields.get(2).is_some_and(|name| name == row));
    of_row
        .map(|fields| {
            let fields: [String; 9] = fields.try_into().ok().context("papers.csv has lines of nine fields")?;
            let [paper, place, _, allocator, figure, low, high, unit, note] = fields;
            let range = if low == high { low } else { format!("{low}–{high}") };
            Ok(Fact { paper: format!("{paper}, {place}: {note}"), allocator, text: format!("{figure} {range} {unit}") })
        })
        .collect()
}

/// Parses comma-separated fields, some of which are quoted.
fn csv(text: &str) -> Vec<Vec<String>> {
    let line = |line: &str| {
        let (mut fields, mut is_quoted) = (vec![String::new()], false);
        for letter in line.chars() {
            match letter {
                '"' => is_quoted = !is_quoted,
                ',' if !is_quoted => fields.push(String::new()),
                other => fields.last_mut().expect("there is one").push(other),
            }
        }
        fields
    };
    text.lines().map(line).collect()
}

fn print(args: &Args, row: &Row, facts: &[Fact], outcomes: &[Outcome]) {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let said = |name: &str| {
        let texts: Vec<&str> = facts.iter().filter(|fact| fact.allocator == name).map(|fact| &*fact.text).collect();
        texts.join(", ")
    };
    if !args.tsv {
        println!("{}\n  {}", row.name, row.comparable);
        let mut papers: Vec<&str> = facts.iter().map(|fact| &*fact.paper).collect();
        papers.dedup();
        papers.iter().for_each(|paper| println!("  {paper}"));
        println!("  {:<20} {:>12} {:>14} {:>12}  paper", "", "efficiency", "fragments", "reserved");
    }
    for &Outcome { name, reserved, allocated } in outcomes {
        let figures = reserved
            .map(|reserved| [100.0 * allocated as f64 / reserved as f64, gb(reserved - allocated), gb(reserved)]);
        match (figures, args.tsv) {
            (Some([efficiency, fragments, reserved]), true) => {
                println!("{}\t{name}\t{}\t{efficiency:.1}\t{fragments:.3}\t{reserved:.3}", row.name, said(name));
            }
            (Some([efficiency, fragments, reserved]), false) => {
                println!("  {name:<20} {efficiency:>10.1} % {fragments:>11.3} GB {reserved:>9.2} GB  {}", said(name));
            }
            (None, true) => println!("{}\t{name}\t{}\tout of memory\t\t", row.name, said(name)),
            (None, false) => println!("  {name:<20} {:>40}  {}", "out of memory", said(name)),
        }
    }
    if !args.tsv {
        let rest = facts.iter().filter(|fact| !outcomes.iter().any(|outcome| outcome.name == fact.allocator));
        rest.for_each(|fact| println!("  {:<20} {:>40}  {}", fact.allocator, "", fact.text));
        println!();
    }
}
