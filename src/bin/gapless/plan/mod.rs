//! `gapless plan`: plans a table of buffers, a run, or a model's training step.

mod curve;
mod step;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use gapless::run::RunConfig;
use gapless::step::{DeviceProfile, LargestBatch, Lowering, Search, Step, Varied};
use gapless_alloc::Fit;
use gapless_alloc::csv::Table;
use gapless_alloc::draw::{Bytes, MemoryMap, SvgOptions, TextOptions};

use crate::output::{picture, tell, tell_error};
use crate::step::{RunArguments, is_run};

/// Plan the memory of a table of buffers, of a run, or of a model's training step, without a device.
///
/// The file of a run (.toml) is planned as `gapless train` runs it, exact to the byte on every rank, without its data or weights. With
/// --profile (a device) or --budget, the answer is whether every rank fits.
///
/// A table has the columns id,lower,upper,size and optionally alignment and offset; lifetimes are half-open ranges of ticks, [lower,
/// upper). Other column names that minimalloc reads are accepted too. Exit code: 0 if the plan fits (or no capacity is given),
/// 2 for invalid input, 3 if it does not fit.
#[derive(clap::Args)]
#[command(after_help = profiles())]
pub struct Arguments {
    /// A table of buffers (CSV, may be gzipped), or the file of a run (.toml).
    file: Option<PathBuf>,
    /// Bytes that the table's plan must fit into, e.g. 600MiB; by default the plan is made as small as possible.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read, allow_negative_numbers = true)]
    capacity: Option<u64>,
    /// Seconds after which the search for a smaller plan of the table, and for ways to make it fit, stops.
    #[arg(long, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    deadline: Option<Duration>,
    /// Most work that may be spent on the table's plan, in buffers looked at; by default 150 million, which takes about five seconds.
    #[arg(long, value_name = "NUMBER")]
    work: Option<u64>,
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
    /// Find the largest batch that fits into the memory of --profile, and into --budget, and plan it. The number of micro-batches
    /// stays the same.
    #[arg(long)]
    largest_batch: bool,
    /// Compare the meshes of this many ranks, and plan the fastest that fits into the memory of --profile and into --budget. A
    /// pipeline keeps its ranks busy only with several micro-batches per rank (--micro-batches).
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
    /// Search the meshes of this many GPUs, the number of micro-batches and the recomputation for the fastest step that fits, and
    /// plan it. The GPU is --profile's (an h100 by default), with the memory of --memory.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=4096), conflicts_with_all = ["ranks", "largest_batch"])]
    gpus: Option<u16>,
    /// The memory of each of these GPUs, e.g. 80GiB; by default that of the profile.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read, requires = "gpus")]
    memory: Option<u64>,
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
    if arguments.capacity.is_some() || arguments.deadline.is_some() || arguments.work.is_some() {
        bail!("--capacity, --deadline and --work apply to tables only; limit a run with --budget 600MiB");
    }
    let mut run = arguments.run.run(arguments.file.as_deref())?;
    let meshes = match (arguments.ranks, arguments.gpus) {
        (Some(ranks), _) => Some(choose_mesh(arguments, &mut run, ranks.into())?),
        (None, Some(gpus)) => Some(search(arguments, &mut run, gpus.into())?),
        (None, None) => None,
    };
    let mut step = Step::new(&run)?;
    if let Some(budget) = meshes.as_ref().and_then(|choice| choice.budget) {
        step = step.within(Some(budget));
    }
    step.notices().iter().for_each(tell);
    let searches = arguments.largest_batch || meshes.is_some();
    match (step.lowering, &step.ranks[..]) {
        (Lowering::Gapless, _) => {
            let largest = if arguments.largest_batch { choose_batch(&mut step)? } else { None };
            let balance = run.context_balance()?;
            step::plan(arguments, &step, &Searches { meshes, largest }, balance)
        }
        _ if searches => bail!("--largest-batch, --ranks and --gpus plan with this engine; leave --lowering out"),
        (_, &[rank]) => {
            let problem = step.eager(&step.record()?, rank)?;
            let ids = (0..problem.len()).map(|index| index.to_string()).collect();
            table::place_table(arguments, &Table::new(ids, problem), step.title(), step.options.memory.planning)
        }
        _ => bail!("the step of an eager framework is planned one rank at a time; choose the rank with --rank"),
    }
}

/// The results of the searches that were asked for.
#[derive(Debug, Default)]
pub struct Searches {
    meshes: Option<Search>,
    largest: Option<LargestBatch>,
}

/// Lists the built-in device profiles with their memory, for the help.
fn profiles() -> String {
    // Sizes of memory on datasheets in GB. What a driver reports is a little less than the same number of GiB.
    const SIZES: [u64; 8] = [16, 24, 40, 48, 80, 141, 180, 288];
    let known = DeviceProfile::known().map(|DeviceProfile { name, memory, .. }| {
        match SIZES.into_iter().find(|size| memory <= size << 30) {
            Some(size) => format!("{name} ({size} GB)"),
            None => format!("{name} ({})", Bytes(memory)),
        }
    });
    format!("Devices of --profile: {}, this-machine, or a TOML file of your own.", known.join(", "))
}

/// Names of keys of the mesh, which searches choose.
const MESH: [&str; 9] = [
    "pipeline_ranks",
    "data_ranks",
    "shard_ranks",
    "expert_ranks",
    "context_ranks",
    "tensor_ranks",
    "fold",
    "sequence_parallel",
    "zero_stage",
];

/// Searches the meshes of a number of ranks, and gives the run the best one.
fn choose_mesh(arguments: &Arguments, run: &mut RunConfig, ranks: usize) -> anyhow::Result<Search> {
    if let Some(name) = MESH.into_iter().find(|name| arguments.run.has(name)) {
        bail!("--ranks chooses the mesh; leave --{} out, or --ranks", name.replace('_', "-"));
    }
    let search = Search::among(run, ranks, Varied::Mesh)?;
    let Some(best) = search.best() else {
        bail!(
            "the step exists on no mesh of {ranks} ranks:\n{search}change the batch, the micro-batches or the schedule"
        );
    };
    best.layout.apply(run);
    let pipeline = run.mesh.pipeline;
    // The other ranks of the chosen mesh have the plan of their stage.
    let stages = run.estimate.rank.split(',').map(|rank| rank.trim().parse::<usize>());
    if stages.flatten().any(|rank| (pipeline..ranks).contains(&rank)) {
        tell(format_args!("the chosen mesh has {pipeline} pipeline rank(s); all are shown"));
        run.estimate.rank = "all".into();
    }
    Ok(search)
}

/// Searches for the fastest step that fits a number of GPUs, and gives it to the run.
fn search(arguments: &Arguments, run: &mut RunConfig, gpus: usize) -> anyhow::Result<Search> {
    let searched = MESH.into_iter().chain(["micro_batches", "recompute", "budget", "lowering"]);
    if let Some(name) = searched.into_iter().find(|name| arguments.run.has(name)) {
        bail!("--gpus searches for it; leave --{} out, or --gpus", name.replace('_', "-"));
    }
    run.estimate.profile.get_or_insert_with(|| "h100".to_owned());
    run.estimate.memory = arguments.memory.or(run.estimate.memory);
    let search = Search::among(run, gpus, Varied::MeshAndMemory)?;
    match search.best().filter(|_| search.fits()) {
        Some(best) => best.apply(run),
        None => bail!("{search}no step of this batch fits {gpus} GPUs; use more, or a smaller batch"),
    }
    Ok(search)
}

/// Finds the largest batch that fits, and gives it to the step. If no batch fits, the step gets the smallest batch, and
/// the result is `None`.
fn choose_batch(step: &mut Step) -> anyhow::Result<Option<LargestBatch>> {
    let limit =
        step.limit().context("--largest-batch needs a limit; name a device with --profile, or give a --budget")?;
    let largest = step.largest_batch(&limit)?;
    step.options.batch = largest.as_ref().map_or(step.options.parts(), |largest| largest.batch);
    Ok(largest)
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
