//! `gapless plan`: places a table of buffers.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use gapless_alloc::csv::{self, Table};
use gapless_alloc::draw::{MemoryMap, SvgOptions, TextOptions};
use gapless_alloc::{Fit, Label, Options, Role, Solution, check, explain, plan};

/// Place a table of buffers as low as can be.
///
/// The table has the columns id,lower,upper,size and, if need be, alignment; lifetimes are half-open ticks [lower,
/// upper). Exit code: 0 when the plan fits (or there is no capacity to fit), 2 for bad input, 3 when it does not fit.
#[derive(clap::Args)]
pub struct Arguments {
    /// Table of buffers.
    file: PathBuf,
    /// Bytes that the plan must fit into; without it the plan is made as low as possible.
    #[arg(long, value_name = "BYTES")]
    capacity: Option<u64>,
    /// Seconds after which the best plan so far is taken.
    #[arg(long, value_name = "S", value_parser = seconds)]
    deadline: Option<Duration>,
    /// Where to write the table with an offset column.
    #[arg(long, value_name = "OUT.csv")]
    out: Option<PathBuf>,
    /// Where to draw the plan: a page (.html), or .svg or .txt.
    #[arg(long, value_name = "MAP.html")]
    draw: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Does what the arguments ask and says how it went.
pub fn run(arguments: &Arguments) -> ExitCode {
    match place(arguments) {
        Ok(Fit::Fits) => ExitCode::SUCCESS,
        Ok(Fit::Impossible | Fit::Unknown) => ExitCode::from(3),
        Err(error) => {
            eprintln!("gapless plan: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn place(arguments: &Arguments) -> anyhow::Result<Fit> {
    let file = &arguments.file;
    let input = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let table = csv::read(BufReader::new(input)).with_context(|| format!("cannot read {}", file.display()))?;
    let options = Options { capacity: arguments.capacity, deadline: arguments.deadline, ..Options::default() };
    let start = Instant::now();
    let solution = plan(&table.problem, &options);
    let plan_ms = start.elapsed().as_secs_f64() * 1e3;
    if solution.offsets.len() != table.problem.len() {
        bail!("no plan was found below 2^64 bytes; sizes and alignments together leave none, or it is well hidden");
    }
    if let Err(violations) = check(&table.problem, &solution.offsets, None) {
        panic!("the planner made a plan that the checker rejects: {violations:?}");
    }
    if let Some(out) = &arguments.out {
        write(out, &table, &solution).with_context(|| format!("cannot write {}", out.display()))?;
    }
    if let Some(map) = &arguments.draw {
        draw(map, &table, &solution).with_context(|| format!("cannot draw {}", map.display()))?;
    }
    report(arguments, &table, &solution, plan_ms);
    Ok(solution.fit)
}

fn report(arguments: &Arguments, table: &Table, solution: &Solution, plan_ms: f64) {
    let (buffers, proof, gap) = (table.problem.len(), solution.proof.name(), solution.gap());
    if arguments.json {
        let json = serde_json::json!({
            "buffers": buffers,
            "lower_bound": solution.lower_bound,
            "height": solution.height,
            "gap": gap,
            "proof": proof,
            "plan_ms": plan_ms,
        });
        println!("{json}");
    } else {
        println!(
            "{buffers} buffers in {} bytes, {gap:.4} × the most alive at once ({})",
            solution.height, solution.lower_bound
        );
        println!("proof: {proof}; planned in {plan_ms:.1} ms");
    }
    let Some(capacity) = arguments.capacity else { return };
    let verdict = match solution.fit {
        Fit::Fits => return,
        Fit::Impossible => "does not fit: no plan can",
        Fit::Unknown => "does not fit: this plan doesn't, whether another would is not known",
    };
    eprintln!("{verdict}");
    // The table names buffers by its own ids, and says nothing of what they are for.
    if let Some(explanation) = explain(&table.problem, &[], solution, capacity) {
        eprint!("{}", explanation.named(|id| table.ids[id.index()].clone()));
    }
}

fn write(path: &Path, table: &Table, solution: &Solution) -> anyhow::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    csv::write(&mut out, &table.ids, &table.problem, Some(&solution.offsets))?;
    Ok(out.flush()?)
}

/// As a page, or by the file's name as SVG or text. A table says nothing of what its buffers are for.
fn draw(path: &Path, table: &Table, solution: &Solution) -> anyhow::Result<()> {
    let label =
        |id: &String| Label { tensor: id.clone(), op: String::new(), layer: String::new(), role: Role::Activation };
    let labels: Vec<Label> = table.ids.iter().map(label).collect();
    let title = path.file_stem().map_or_else(|| "plan".into(), |stem| stem.to_string_lossy());
    let map = MemoryMap::new(&title, &table.problem, &solution.offsets, &labels)?;
    let drawn = match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => map.svg(&SvgOptions::default()),
        Some("txt") => map.text(&TextOptions::default()),
        _ => map.html(),
    };
    Ok(std::fs::write(path, drawn)?)
}

fn seconds(text: &str) -> anyhow::Result<Duration> {
    let seconds: f64 = text.parse().map_err(|_| anyhow!("not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|e| anyhow!("not a time to wait: {e}"))
}
