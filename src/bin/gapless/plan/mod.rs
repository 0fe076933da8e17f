//! `gapless plan`: plans a table of buffers, a run, or a model's training step.

mod curve;
mod step;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use gapless::step::Lowering;
use gapless_alloc::Fit;
use gapless_alloc::csv::Table;
use gapless_alloc::draw::{Bytes, MemoryMap, SvgOptions, TextOptions};

use crate::output::{picture, tell, tell_error};
use crate::step::{RunArguments, is_run};

/// Plan the memory of a table of buffers, of a run, or of a model's training step, without a device.
///
/// The file of a run (.toml) is planned as `gapless train` runs it, exact to the byte on every rank, without its data or weights.
///
/// A table has the columns id,lower,upper,size and optionally alignment and offset; lifetimes are half-open ranges of ticks, [lower,
/// upper). Other column names that minimalloc reads are accepted too. Exit code: 0 if the plan fits (or no capacity is given),
/// 2 for invalid input, 3 if it does not fit.
#[derive(clap::Args)]
pub struct Arguments {
    /// A table of buffers (CSV), or the file of a run (.toml).
    file: Option<PathBuf>,
    /// Bytes that the table's plan must fit into, e.g. 600MiB; by default the plan is made as small as possible.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read, allow_negative_numbers = true)]
    capacity: Option<u64>,
    /// Seconds after which the search for a smaller plan of the table, and for ways to make it fit, stops.
    #[arg(long, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    deadline: Option<Duration>,
    /// The use of the table's offset column; --out writes one.
    #[arg(long, value_enum, default_value = "pin")]
    offsets: table::Offsets,
    /// Where to write the table with an offset column; of several ranks, one file each: OUT.0.csv.
    #[arg(long, value_name = "OUT.csv")]
    out: Option<PathBuf>,
    /// Where to draw the plan: a page (.html), or .svg or .txt; of several ranks, one file each: MAP.0.html.
    #[arg(long, value_name = "MAP.html", value_parser = |path: &str| picture(path, &["html", "svg", "txt"]))]
    draw: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunArguments,
    #[command(flatten)]
    curve: step::CurveArguments,
    /// Also list the step's kernels on a GPU, with launches, arithmetic, bytes and estimated time; needs --device cuda. The card is
    /// --profile's.
    #[cfg(feature = "cuda")]
    #[arg(long)]
    roofline: bool,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    let fit = match &arguments.file {
        Some(file) if !is_run(file) && !arguments.run.is_empty() => Err(anyhow!(
            "keys of a run have no effect on a table; leave the keys out, or give the file of a run (.toml)"
        )),
        Some(file) if !is_run(file) => table::place(arguments, file),
        file if arguments.run.names_a_run(file.as_deref()) => step(arguments),
        _ => Err(anyhow!("nothing to plan; give the file of a run, a table, or --model")),
    };
    match fit {
        Ok(Fit::Fits) => ExitCode::SUCCESS,
        Ok(Fit::Impossible | Fit::Unknown) => ExitCode::from(3),
        Err(error) => {
            tell_error("gapless plan", &error);
            ExitCode::from(2)
        }
    }
}

fn step(arguments: &Arguments) -> anyhow::Result<Fit> {
    if arguments.capacity.is_some() || arguments.deadline.is_some() {
        bail!("--capacity and --deadline apply to tables only; limit a run with --budget 600MiB");
    }
    let step = arguments.run.step(arguments.file.as_deref())?;
    step.notices().iter().for_each(tell);
    match (step.lowering, &step.ranks[..]) {
        (Lowering::Gapless, _) => step::plan(arguments, &step),
        (_, &[rank]) => {
            let problem = step.eager(&step.record()?, rank)?;
            let ids = (0..problem.len()).map(|index| index.to_string()).collect();
            table::place_table(arguments, &Table::new(ids, problem), step.title())
        }
        _ => bail!("the step of an eager framework is planned one rank at a time; choose the rank with --rank"),
    }
}

/// Draws a memory map as a page, as SVG or as text, depending on the extension of `path`. The caller must have checked
/// the extension.
fn draw(path: &Path, map: &MemoryMap<'_>) -> anyhow::Result<()> {
    let drawn = match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => map.svg(&SvgOptions::default()),
        Some("txt") => map.text(&TextOptions::default()),
        _ => map.html(),
    };
    std::fs::write(path, drawn).with_context(|| format!("cannot draw {}", path.display()))
}

/// Returns the path of a rank's file. If there are several ranks, this path has the rank's number before the extension.
fn of_rank(path: &Path, rank: usize, ranks: usize) -> PathBuf {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    if ranks == 1 { path.to_owned() } else { path.with_extension(format!("{rank}.{extension}")) }
}

/// Parses a number of seconds.
pub(crate) fn seconds(text: &str) -> anyhow::Result<Duration> {
    let seconds: f64 = text.parse().map_err(|_| anyhow!("not a number of seconds"))?;
    if seconds < 0.0 {
        bail!("a number of seconds cannot be negative; 0 takes the first plan");
    }
    if seconds.is_nan() {
        bail!("NaN is not a number of seconds");
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}
