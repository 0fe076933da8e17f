//! Compares results of papers about allocators with our results for the same steps. Each allocator is replayed on the
//! lifetimes of an eager framework. The planner of gapless is also measured on the lifetimes that gapless compiles.
//! Mixtures of experts are measured under three loads of their experts, with the same rows on all sides.
//!
//! `cargo run --release --example schedule_experiments` runs some rows; `--all` runs all of them. `--all --markdown`
//! prints the table of docs/experiments.md, and `--check docs/experiments.md` compares the rows that it runs with those
//! of the page. The papers' results are in `papers.csv`, and the steps in `rows.toml`, next to this file.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use gapless::TrainError;
use gapless::alloc::{Buffer, Lifetime, Problem, Solution};
use gapless::allocators::{Comparison, Entry, Kind, Request, Requests, compare};
use gapless::engine::compile::StagePartition;
use gapless::models::hf::Architecture;
use gapless::run::RunConfig;
use gapless::step::{ExpertLoad, Step};
use serde::Deserialize;

#[path = "../csv.rs"]
mod csv;

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
    /// Print the table of docs/experiments.md
    #[arg(long, conflicts_with = "tsv")]
    markdown: bool,
    /// Compare the rows with the table of this page; the exit code is 1 if they differ
    #[arg(long, value_name = "PAGE.md", conflicts_with_all = ["tsv", "markdown"])]
    check: Option<PathBuf>,
    /// Further allocators, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "NAMES", conflicts_with_all = ["markdown", "check"])]
    allocators: Vec<Kind>,
    /// The load of experts: even, skewed:A, worst, or recorded:FILE.csv; by default three of them in turn
    #[arg(long, value_name = "LOAD", conflicts_with_all = ["markdown", "check"])]
    expert_load: Option<ExpertLoad>,
    /// Between any two steps, run a step whose sequences are three quarters as long
    #[arg(long, conflicts_with = "check")]
    vary_lengths: bool,
}

#[derive(Deserialize)]
struct Rows {
    row: Vec<Row>,
}

/// A step of a paper.
#[derive(Clone, Deserialize)]
struct Row {
    name: String,
    /// The results of the paper that can be compared, and the reason why the others cannot.
    comparable: String,
    #[serde(default)]
    quick: bool,
    /// True if a part of the step that changes the efficiency is not modelled. The table has the paper's efficiencies in
    /// parentheses then.
    #[serde(default)]
    only_bytes: bool,
    run: toml::Table,
}

/// A paper's result about an allocator.
struct Fact {
    paper: String,
    allocator: String,
    figure: String,
    range: String,
    unit: String,
}

/// Our results for one step.
struct Measured {
    /// The name of the row; for a mixture with the load of its experts.
    name: String,
    /// Allocation requests of the eager framework in one iteration.
    requests: usize,
    /// The plan of gapless's step.
    own: Outcome,
    /// Bytes that gapless reserves for other rows of experts.
    reserve: u64,
    /// All allocators, on the lifetimes of the eager framework.
    eager: Vec<Outcome>,
}

/// The result of one allocator for one step.
struct Outcome {
    name: &'static str,
    reserved: Option<u64>,
    allocated: u64,
}

impl Outcome {
    /// Allocated ÷ reserved bytes in percent, or `None` if the allocator ran out of memory.
    fn efficiency(&self) -> Option<f64> {
        self.reserved.map(|reserved| 100.0 * self.allocated as f64 / reserved as f64)
    }
}

/// The allocators of the table. `--allocators` adds others.
const PEERS: [Kind; 5] = [Kind::GAPLESS, Kind::STALLOC, Kind::PYTORCH, Kind::PYTORCH_EXPANDABLE, Kind::GMLAKE];

/// The loads of experts under which mixtures are measured.
static LOADS: [ExpertLoad; 3] = [ExpertLoad::EVEN, ExpertLoad::Skewed(0.6), ExpertLoad::Worst];

fn main() -> Result<()> {
    let args = Args::parse();
    let page = args.check.as_ref().map(|path| {
        std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}; name a page with the table", path.display()))
    });
    let page = page.transpose()?;
    if args.tsv {
        println!("row\tallocator\tpaper\tefficiency %\tfragments GB\treserved GB");
    }
    if args.markdown {
        let title = if args.vary_lengths { "| step, with steps of other lengths |" } else { "| step |" };
        println!("{}", HEAD.replacen("| step |", title, 1));
    }
    let (mut all, mut stale) = (Vec::new(), 0);
    let is_chosen = |row: &&Row| (args.all || row.quick || !args.row.is_empty()) && row.name.contains(&args.row);
    for row in rows()?.iter().filter(is_chosen) {
        let facts = facts(&row.name)?;
        for measured in measure(row, &args.allocators, args.expert_load.as_ref(), args.vary_lengths)
            .with_context(|| row.name.clone())?
        {
            let line = line(&measured, row, &facts);
            match &page {
                Some(page) if page.lines().any(|known| known == line) => {}
                Some(_) => {
                    println!("{line}");
                    stale += 1;
                }
                None if args.markdown => println!("{line}"),
                None => print(&args, row, &facts, &measured),
            }
            all.push(measured);
        }
    }
    if args.markdown {
        println!("\n{}", summary(&all));
    }
    if stale > 0 {
        bail!("{stale} of {} rows differ from the page; write it again with --all --markdown", all.len());
    }
    Ok(())
}

fn rows() -> Result<Vec<Row>> {
    let Rows { row } = toml::from_str(include_str!("rows.toml"))?;
    Ok(row)
}

/// Measures gapless on its own lifetimes, and all allocators on the lifetimes of an eager framework. A mixture is
/// measured once for each load of its experts.
fn measure(row: &Row, further: &[Kind], load: Option<&ExpertLoad>, vary_lengths: bool) -> Result<Vec<Measured>> {
    let mut step = Step::new(&RunConfig::parse(&row.run.to_string(), &[])?)?;
    // As in Megatron.
    step.options.pipeline.cut = StagePartition::Equal;
    let graph = step.record()?;
    let rank = step.ranks[0];
    let executable = step.plan(&step.program(&graph, rank)?)?;
    let is_mixture = matches!(step.architecture(), Architecture::Moe(_));
    let loads = match load {
        Some(load) => std::slice::from_ref(load),
        None if is_mixture => &LOADS[..],
        None => &LOADS[..1],
    };
    let of_load = |load: &ExpertLoad| {
        let mut step = step.clone();
        step.expert_load = load.clone();
        let served = executable.serve_rows(&step.received_rows(&graph, rank)).map_err(TrainError::from)?;
        let mut problem = step.eager(&graph, rank)?;
        let requests = Requests::new(&problem);
        let requests = requests.step().iter().filter(|request| matches!(request, Request::Allocate(_))).count();
        if vary_lengths {
            let mut other = step.clone();
            other.options.sequence = other.options.sequence / 4 * 3;
            problem = in_turn(&problem, &other.eager(&other.record()?, rank)?)?;
        }
        let kinds = [&PEERS, further].concat();
        let comparison = Comparison { kinds, iterations: 3, ..Comparison::default() };
        let compared = compare(&problem, &Requests::new(&problem), &comparison);
        let Solution { height, lower_bound, .. } = served.solution;
        Ok(Measured {
            name: if is_mixture { format!("{}, {load}", row.name) } else { row.name.clone() },
            requests,
            own: Outcome { name: "gapless's step", reserved: Some(height), allocated: lower_bound },
            reserve: served.arena_bytes - served.solution.height,
            eager: compared.allocators.iter().map(outcome).collect(),
        })
    };
    loads.iter().map(of_load).collect()
}

/// One step after the other, with the buffers of the first that outlive it.
fn in_turn(first: &Problem, second: &Problem) -> Result<Problem> {
    let [(one, end), (other, other_end)] = [first, second].map(|problem| (whole(problem), problem.end()));
    let lasts = |buffer: &Buffer| match buffer.lifetime == one {
        true => Buffer { lifetime: one.start..end + other_end, ..buffer.clone() },
        false => buffer.clone(),
    };
    let after = |buffer: &&Buffer| buffer.lifetime != other;
    let later = |buffer: &Buffer| {
        let Lifetime { start, end: last } = buffer.lifetime;
        Buffer { lifetime: start + end..last + end, ..buffer.clone() }
    };
    let second = second.buffers().iter().filter(after).map(later);
    Ok(Problem::new(first.buffers().iter().map(lasts).chain(second).collect())?)
}

/// The lifetime of buffers that outlive the step.
fn whole(problem: &Problem) -> Lifetime {
    problem.buffers().iter().map(|buffer| buffer.lifetime.start).min().unwrap_or(0)..problem.end()
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
    let lines = include_str!("papers.csv").lines().skip(1).map(csv::fields);
    let of_row = lines.filter(|fields| fields.get(2).is_some_and(|name| name == row));
    of_row
        .map(|fields| {
            let fields: [String; 9] = fields.try_into().ok().context("papers.csv has lines of nine fields")?;
            let [paper, place, _, allocator, figure, low, high, unit, note] = fields;
            let range = if low == high { low } else { format!("{low}–{high}") };
            Ok(Fact { paper: format!("{paper}, {place}: {note}"), allocator, figure, range, unit })
        })
        .collect()
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// The allocators in the table of docs/experiments.md.
const COLUMNS: [&str; 4] = ["pytorch", "pytorch-expandable", "gmlake", "stalloc"];

const HEAD: &str = "\
| step | requests | its paper | PyTorch | its paper | expandable | its paper | GMLake | its paper | STAlloc | its paper | plan | PyTorch, GB | its paper | gapless's step, GB | reserve, GB |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|";

/// Returns a line of the table of docs/experiments.md.
fn line(measured: &Measured, row: &Row, facts: &[Fact]) -> String {
    let said = |allocator: &str, figure: &str| {
        let found = facts.iter().find(|fact| fact.allocator == allocator && fact.figure == figure);
        found.map_or_else(String::new, |fact| fact.range.clone())
    };
    // Some papers give the wasted part instead of the efficiency.
    let paper = |allocator: &str| {
        let efficiency = match said(allocator, "fragmentation").parse::<f64>() {
            Ok(wasted) => format!("{:.1}", 100.0 - wasted),
            Err(_) => said(allocator, "efficiency"),
        };
        if row.only_bytes && !efficiency.is_empty() { format!("({efficiency})") } else { efficiency }
    };
    let of = |name: &str| measured.eager.iter().find(|outcome| outcome.name == name).expect("all are measured");
    let percent = |outcome: &Outcome| outcome.efficiency().map_or("out of memory".into(), |part| format!("{part:.1}"));
    let mut cells = vec![measured.name.clone(), measured.requests.to_string(), said("step", "requests")];
    cells.extend(COLUMNS.into_iter().flat_map(|name| [percent(of(name)), paper(name)]));
    cells.push(percent(of("gapless")));
    cells.push(of("pytorch").reserved.map_or_else(String::new, |bytes| format!("{:.1}", gb(bytes))));
    cells.push(said("pytorch", "reserved"));
    cells.push(measured.own.reserved.map_or_else(String::new, |bytes| format!("{:.1}", gb(bytes))));
    cells.push(if measured.reserve > 0 { format!("{:.1}", gb(measured.reserve)) } else { String::new() });
    format!("| {} |", cells.join(" | "))
}

/// Returns the ranges of the table, for dense steps and for mixtures.
fn summary(all: &[Measured]) -> String {
    let mut text = String::new();
    for (title, is_mixture) in [("dense steps", false), ("mixtures", true)] {
        let rows = || all.iter().filter(|row| row.name.starts_with("Qwen") == is_mixture);
        if rows().next().is_none() {
            continue;
        }
        text += &format!("Efficiency in percent, {title}:");
        for name in COLUMNS.into_iter().chain(["gapless"]) {
            let of_name = rows().flat_map(|row| &row.eager).filter(|outcome| outcome.name == name);
            text += &format!(" {name} {};", range(of_name.filter_map(Outcome::efficiency).collect()));
        }
        let own = rows().filter_map(|row| row.own.efficiency()).collect();
        let saved = rows().filter_map(|row| {
            let pytorch = row.eager.iter().find(|outcome| outcome.name == "pytorch")?;
            Some(100.0 - 100.0 * (row.own.reserved? + row.reserve) as f64 / pytorch.reserved? as f64)
        });
        text += &format!(
            " plan of gapless's step {}. The arena of gapless's step, reserve included, takes this many percent less than PyTorch reserves: {}.\n",
            range(own),
            range(saved.collect())
        );
    }
    text
}

/// Returns the least, the median and the most.
fn range(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match &values[..] {
        [] => "–".to_owned(),
        [first, .., last] => format!("{first:.1} to {last:.1} (median {:.1})", values[values.len() / 2]),
        [one] => format!("{one:.1}"),
    }
}

fn print(args: &Args, row: &Row, facts: &[Fact], measured: &Measured) {
    let said = |name: &str| {
        let text = |fact: &Fact| format!("{} {} {}", fact.figure, fact.range, fact.unit);
        let texts: Vec<String> = facts.iter().filter(|fact| fact.allocator == name).map(text).collect();
        texts.join(", ")
    };
    let name = &measured.name;
    if !args.tsv {
        println!("{name}\n  {}", row.comparable);
        let mut papers: Vec<&str> = facts.iter().map(|fact| &*fact.paper).collect();
        papers.dedup();
        papers.iter().for_each(|paper| println!("  {paper}"));
        println!("  {} allocation requests per iteration; paper: {}", measured.requests, said("step"));
        if measured.reserve > 0 {
            println!("  gapless's step reserves a further {:.2} GB for other rows", gb(measured.reserve));
        }
        println!("  {:<20} {:>12} {:>14} {:>12}  paper", "", "efficiency", "fragments", "reserved");
    }
    let outcomes = || std::iter::once(&measured.own).chain(&measured.eager);
    for outcome @ &Outcome { name: allocator, reserved, allocated } in outcomes() {
        let figures = outcome
            .efficiency()
            .zip(reserved)
            .map(|(efficiency, reserved)| (efficiency, gb(reserved - allocated), gb(reserved)));
        let paper = said(allocator);
        match (figures, args.tsv) {
            (Some((efficiency, fragments, reserved)), true) => {
                println!("{name}\t{allocator}\t{paper}\t{efficiency:.1}\t{fragments:.3}\t{reserved:.3}");
            }
            (Some((efficiency, fragments, reserved)), false) => {
                println!("  {allocator:<20} {efficiency:>10.1} % {fragments:>11.3} GB {reserved:>9.2} GB  {paper}");
            }
            (None, true) => println!("{name}\t{allocator}\t{paper}\tout of memory\t\t"),
            (None, false) => println!("  {allocator:<20} {:>40}  {paper}", "out of memory"),
        }
    }
    if !args.tsv {
        println!();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The page has the lines that this program prints: of every row with `GAPLESS_SLOW_TESTS=1`, and of those with steps of
    /// other lengths, else of the smallest rows.
    #[test]
    fn the_table_of_the_page_is_what_this_prints() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/experiments.md")).unwrap();
        assert!(page.contains(HEAD), "write the table of docs/experiments.md again with --all --markdown");
        let (page, varied) = page.split_once("| step, with steps of other lengths |").unwrap();
        let is_slow = std::env::var_os("GAPLESS_SLOW_TESTS").is_some();
        let (rows, next) = (rows().unwrap(), AtomicUsize::new(0));
        let compare = || {
            while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                let facts = facts(&row.name).unwrap();
                // Every row is on the page, with the papers' results.
                let name = format!("| {}", row.name);
                let first = page.lines().find(|line| line.starts_with(&name));
                let first = first.unwrap_or_else(|| panic!("{} is missing", row.name));
                let is_marked = facts.iter().any(|fact| first.contains(&format!(" ({}) |", fact.range)));
                assert_eq!(is_marked, row.only_bytes, "{first}");
                let is_compared = is_slow || ["GPT-2 345M, R", "OPT-1.3B, LoRA and R, batch 1"].contains(&&*row.name);
                let is_varied = is_slow && varied.contains(&format!("\n{name} |"));
                for (table, is_chosen, vary_lengths) in [(page, is_compared, false), (varied, is_varied, true)] {
                    let measured = if is_chosen { measure(row, &[], None, vary_lengths).unwrap() } else { Vec::new() };
                    for measured in measured {
                        let line = line(&measured, row, &facts);
                        assert!(table.lines().any(|known| known == line), "the page has another line than\n{line}");
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            (0..threads).for_each(|_| _ = scope.spawn(compare));
        });
    }

    #[test]
    fn buffers_that_outlive_the_step_outlive_both_steps() {
        let buffers = [(0..6, 10), (0..2, 20), (1..6, 30)].map(|(ticks, bytes)| Buffer::new(ticks, bytes));
        let problem = Problem::new(buffers.to_vec()).unwrap();
        let both = in_turn(&problem, &problem).unwrap();
        let lifetimes: Vec<Lifetime> = both.buffers().iter().map(|buffer| buffer.lifetime.clone()).collect();
        assert_eq!(lifetimes, [0..12, 0..2, 1..6, 6..8, 7..12]);
    }
}
