//! `gapless plan RUN.toml`: shows the memory of a run by layer and role, the time of its step, and the time under
//! smaller budgets.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use gapless::engine::compile::report::{RecomputedLayer, recomputed_layers, recomputed_per_micro_batch};
use gapless::engine::compile::{Error as CompileError, Executable, Program};
use gapless::run::ContextBalance;
use gapless::step::{Fits, LargestBatch, Origin, Search, Step};
use gapless::{MemoryOptions, Precision, Recompute, StepOptions, TrainError};
use gapless_alloc::draw::{Bytes, MemoryMap, RoleBytes, Summary};
use gapless_alloc::{Fit, Options, explain};
use serde::Serialize;

use super::curve::{Curve, curve};
use super::{Searches, draw, of_rank};
use crate::output::{Size, picture, print, replace, tell, to_json};

/// Arguments of the memory-time curve.
#[derive(Debug, clap::Args)]
pub struct CurveArguments {
    /// Also plan the step within this many budgets, from the smallest that works to one without recomputation.
    #[arg(long, value_name = "POINTS", allow_negative_numbers = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(2..=100))]
    curve: Option<u16>,
    /// Where to draw this curve.
    #[arg(long, value_name = "FILE.svg", requires = "curve", value_parser = |path: &str| picture(path, &["svg"]))]
    curve_svg: Option<PathBuf>,
}

/// The figures of a rank's planned step.
#[derive(Debug, Serialize)]
pub struct Planned {
    #[serde(flatten)]
    origin: Origin,
    /// Name of the model.
    model: String,
    /// The pipeline rank.
    rank: usize,
    buffers: usize,
    /// Arena size in bytes, which is the height of the plan plus the reserve.
    pub arena_bytes: u64,
    lower_bound_bytes: u64,
    /// Height of the plan divided by its lower bound.
    gap: f64,
    plan_hash: String,
    /// Bytes of the arena above the plan: the reserve for routed rows.
    reserve_bytes: u64,
    /// Time for compiling and planning in milliseconds, including the search for the recomputation if there is a
    /// budget.
    plan_ms: f64,
    /// Estimated time of the whole step in milliseconds, with messages and with the time that ranks wait for each other:
    /// the makespan that `gapless schedule` draws.
    step_ms: f64,
    /// Estimated time for which the rank is busy in a step, in milliseconds: its operations, the part of collectives that
    /// computation does not hide, and the copies of offloaded activations.
    pub rank_ms: f64,
    /// The part of `rank_ms` that is spent on copies of offloaded activations.
    offload_ms: f64,
    /// The rank's recomputation time divided by its time of everything else.
    pub overhead: f64,
    /// FLOPs of recomputation divided by all other FLOPs.
    pub extra_flops: f64,
    layers: Vec<RecomputedLayer>,
    /// For each micro-batch, the number of operations that it recomputes.
    again: Vec<usize>,
    /// Size of the file for offloaded activations.
    host_bytes: u64,
    summary: Summary,
    /// Arenas of whole runs, by rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ranks: Vec<RankMemory>,
    /// Whether every rank fits into the device or the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<Fits>,
    /// The reason why the step does not run on the GPU that it is planned for.
    #[serde(skip_serializing_if = "Option::is_none")]
    does_not_run: Option<String>,
    /// The configurations that were compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    meshes: Option<Search>,
    /// The largest batch that fits, which was planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    largest_batch: Option<LargestBatch>,
    /// The balance of context ranks, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    context_balance: Option<ContextBalance>,
    #[serde(skip_serializing_if = "Option::is_none")]
    curve: Option<Curve>,
    #[cfg(feature = "cuda")]
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<gapless::step::Roofline>,
}

/// The size of a rank's arena for the training step, the evaluation and the generation together.
#[derive(Debug, Clone, Serialize)]
struct RankMemory {
    arena_bytes: u64,
    plan_hash: String,
    roles: Vec<RoleBytes>,
}

impl RankMemory {
    fn of(Planned { arena_bytes, plan_hash, summary, .. }: &Planned) -> Self {
        Self { arena_bytes: *arena_bytes, plan_hash: plan_hash.clone(), roles: summary.roles.clone() }
    }
}

/// Plans a rank of a step.
pub fn plan_rank(step: &Step, rank: usize) -> Result<(Planned, Executable), TrainError> {
    let (planned, executable, _) = plan_program(step, rank)?;
    Ok((planned, executable))
}

/// Plans a rank of a step, and returns its program too.
fn plan_program(step: &Step, rank: usize) -> Result<(Planned, Executable, Program), TrainError> {
    let start = Instant::now();
    let (executable, compiled) = step.compile(rank)?;
    let program = compiled.program.expect("a step is trained");
    let busy = step.busy_time(&program);
    let (layers, again_by_micro_batch) = (recomputed_layers(&program), recomputed_per_micro_batch(&program));
    let flops = program.flops();
    let rematerialized_flops = program.rematerialized_flops();
    let model = step.title().to_owned();
    let planned = Planned {
        origin: Origin::new(Some(step)),
        rank,
        buffers: executable.problem().len(),
        arena_bytes: executable.arena_bytes(),
        lower_bound_bytes: executable.solution().lower_bound,
        gap: executable.solution().gap(),
        plan_hash: executable.plan_hash().to_string(),
        reserve_bytes: executable.arena_bytes() - executable.solution().height,
        plan_ms: start.elapsed().as_secs_f64() * 1e3,
        step_ms: 0.0,
        rank_ms: busy.all as f64 / 1e6,
        offload_ms: busy.offloaded as f64 / 1e6,
        overhead: busy.overhead(),
        extra_flops: rematerialized_flops as f64 / (flops - rematerialized_flops).max(1) as f64,
        layers,
        again: again_by_micro_batch,
        host_bytes: executable.host_bytes(),
        summary: map(&model, &executable)?.summary(8),
        model,
        ranks: Vec::new(),
        fits: None,
        does_not_run: None,
        meshes: None,
        largest_batch: None,
        context_balance: None,
        curve: None,
        #[cfg(feature = "cuda")]
        roofline: None,
    };
    Ok((planned, executable, program))
}

fn map<'a>(title: &'a str, executable: &'a Executable) -> Result<MemoryMap<'a>, TrainError> {
    let map = MemoryMap::new(title, executable.problem(), &executable.solution().offsets, executable.labels())?;
    Ok(map.with_marks(executable.parts())?)
}

/// Plans every stage of the step, says whether it fits, and prints the figures of the chosen ranks.
pub fn plan(
    arguments: &super::Arguments,
    step: &Step,
    searches: &Searches,
    balance: Option<ContextBalance>,
) -> anyhow::Result<Fit> {
    let curve_arguments = &arguments.curve;
    let mesh = step.options.mesh;
    let (mut planned, mut arenas, mut programs, mut too_large) = (Vec::new(), Vec::new(), Vec::new(), None);
    #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "only GPUs lack kernels"))]
    let mut does_not_run: Option<String> = None;
    // The data and expert ranks of a stage have the same plan, so each stage is planned once.
    for stage in 0..step.options.mesh.pipeline {
        match plan_program(step, stage) {
            Err(error @ TrainError::Compile(CompileError::OverBudget { smallest, .. })) => {
                arenas.push(smallest);
                if too_large.as_ref().is_none_or(|(_, largest, _)| *largest < smallest) {
                    too_large = Some((stage, smallest, error));
                }
            }
            Err(error) => return Err(error.into()),
            #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "only a roofline is added"))]
            Ok((mut figures, executable, program)) => {
                #[cfg(feature = "cuda")]
                if does_not_run.is_none() {
                    does_not_run = step.missing_kernels(&executable);
                }
                if step.ranks.contains(&stage) {
                    #[cfg(feature = "cuda")]
                    if arguments.roofline {
                        let roofline = step
                            .roofline(&executable)
                            .context("--roofline needs kernels for GPUs: give --device cuda, and bf16 with masters")?;
                        figures.roofline = Some(roofline);
                    }
                    write(arguments, step, stage, &executable)?;
                }
                arenas.push(figures.arena_bytes);
                planned.push(figures);
                programs.push(program);
            }
        }
    }
    let fits = step.limit().map(|limit| Fits::new(mesh, &arenas, limit));
    if let Some((stage, smallest, mut error)) = too_large {
        if let TrainError::Compile(CompileError::OverBudget { remedies, .. }) = &mut error {
            remedies.retain(|remedy| searches.meshes.is_none() || !adds_ranks(remedy));
        }
        match arguments.json {
            true => print(|out| {
                let Origin { version, commit, step } = Origin::new(Some(step));
                let json = serde_json::json!({ "version": version, "commit": commit, "step": step, "fits": fits });
                writeln!(out, "{json:#}")
            })?,
            false => print(|out| answer(out, searches, fits.as_ref(), does_not_run.as_deref()))?,
        }
        tell(format_args!("gapless plan: {error}"));
        return tell_why(step, stage, step.options.memory.budget.unwrap_or(0), smallest);
    }
    let step_ms = step.timing_by_rates(&programs)?.nanoseconds() as f64 / 1e6;
    planned.iter_mut().for_each(|planned| planned.step_ms = step_ms);
    let ranks = (0..mesh.ranks()?).map(|rank| RankMemory::of(&planned[mesh.coordinate(rank).pipeline])).collect();
    planned.retain(|planned| step.ranks.contains(&planned.rank));
    let [first, ..] = &mut planned[..] else { bail!("no rank is chosen; give --rank 0 or --rank all") };
    first.ranks = ranks;
    first.fits = fits.clone();
    first.does_not_run = does_not_run.clone();
    first.meshes = searches.meshes.clone();
    first.largest_batch = searches.largest.clone();
    first.context_balance = balance;
    if let Some(points) = curve_arguments.curve {
        first.curve = Some(curve(step, first.rank, points.into())?);
    }
    if let (Some(path), Some(curve)) = (&curve_arguments.curve_svg, &first.curve) {
        std::fs::write(path, curve.svg(step.title(), (first.arena_bytes, first.rank_ms)))
            .with_context(|| format!("cannot draw {}", path.display()))?;
    }
    if arguments.json {
        let json = to_json(&planned)?;
        print(|out| writeln!(out, "{json}"))?;
    } else {
        print(|out| {
            answer(out, searches, fits.as_ref(), does_not_run.as_deref())?;
            planned.iter().try_for_each(|planned| report(out, step, planned))
        })?;
    }
    match fits {
        Some(fits) if !fits.fits => tell_remedies(step, &fits, searches.meshes.is_some()),
        _ => Ok(Fit::Fits),
    }
}

/// Prints the answers to the questions that were asked, before all figures.
fn answer(out: &mut dyn Write, searches: &Searches, fits: Option<&Fits>, does_not_run: Option<&str>) -> io::Result<()> {
    if let Some(meshes) = &searches.meshes {
        writeln!(out, "{meshes}")?;
    }
    if let Some(largest) = &searches.largest {
        writeln!(out, "{largest}")?;
    }
    if let Some(fits) = fits {
        writeln!(out, "{fits}")?;
    }
    if let Some(why) = does_not_run {
        writeln!(out, "{why}")?;
    }
    if fits.is_some() || does_not_run.is_some() { writeln!(out) } else { Ok(()) }
}

/// True if a remedy is a mesh with more ranks.
fn adds_ranks(remedy: &str) -> bool {
    remedy.contains("(mesh.")
}

/// True if the step takes less memory in bf16 with f32 masters.
fn bf16_saves(step: &Step, fits: &Fits) -> bool {
    let mut step = step.clone();
    step.options.precision = Precision::Bf16;
    step.options.memory.planning = step.options.memory.planning.min(Options::QUICK_WORK);
    step.fits(fits.limit.clone()).is_ok_and(|bf16| bf16.arena_bytes < fits.arena_bytes)
}

/// The remedy of a smaller precision. In [`StepOptions::remedies`] it may have a condition.
const BF16: &str = "bf16 (step.precision)";

/// Prints what would make a step fit into its device: a recomputation, if one is found, and the settings that lower its
/// memory. Remedies that add ranks are left out if their number is given.
fn tell_remedies(step: &Step, fits: &Fits, are_ranks_given: bool) -> anyhow::Result<Fit> {
    let MemoryOptions { recompute, budget, .. } = &step.options.memory;
    let mut remedies: Vec<&str> =
        step.remedies().into_iter().filter(|remedy| !are_ranks_given || !adds_ranks(remedy)).collect();
    if let Some(index) = remedies.iter().position(|remedy| remedy.starts_with(BF16)) {
        match bf16_saves(step, fits) {
            true => remedies[index] = BF16,
            false => _ = remedies.remove(index),
        }
    }
    if *recompute == Recompute::None && budget.is_none() {
        let budget = fits.limit.typed_bytes();
        let stage = step.options.mesh.coordinate(fits.rank).pipeline;
        match plan_rank(&step.within(Some(budget)), stage) {
            Ok((planned, _)) => tell(format_args!(
                "with recomputation it fits: --budget {}MiB takes {:.1} % more time",
                budget >> 20,
                100.0 * planned.overhead
            )),
            Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => {
                tell(format_args!("with all recomputation it would still need {}", Bytes(smallest)));
            }
            Err(error) => return Err(error.into()),
        }
    } else {
        remedies.insert(0, "more recomputation (memory.budget)");
    }
    tell(format_args!("what helps: {}", remedies.join("; ")));
    Ok(Fit::Unknown)
}

/// Writes the rank's table and picture, if the arguments ask for them.
fn write(arguments: &super::Arguments, step: &Step, rank: usize, executable: &Executable) -> anyhow::Result<()> {
    let ranks = step.ranks.len();
    if let Some(path) = &arguments.out {
        let path = of_rank(path, rank, ranks);
        replace(&path, |out| executable.write_plan(out).map_err(io::Error::other))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    match &arguments.draw {
        Some(path) => draw(&of_rank(path, rank, ranks), &map(step.title(), executable)?),
        None => Ok(()),
    }
}

/// Explains why the step does not fit the budget, even with the smallest arena that was found, which has `smallest`
/// bytes.
fn tell_why(step: &Step, rank: usize, budget: u64, smallest: u64) -> anyhow::Result<Fit> {
    let (planned, executable) = plan_rank(&step.within(Some(smallest)), rank)?;
    if planned.reserve_bytes > 0 {
        tell(format_args!(
            "{} of that are a reserve for rows that this rank receives, on top of the plan",
            Bytes(planned.reserve_bytes)
        ));
    }
    let capacity = Some(budget.saturating_sub(planned.reserve_bytes));
    let options = Options { capacity, ..Options::default() };
    if let Some(why) = explain(executable.problem(), executable.labels(), executable.solution(), &options) {
        tell(why.during(executable.parts()).to_string().trim_end());
    }
    Ok(Fit::Unknown)
}

fn report(out: &mut dyn Write, configured: &Step, step: &Planned) -> io::Result<()> {
    if configured.ranks.len() > 1 {
        writeln!(out, "rank {} of the pipeline\n", step.rank)?;
    }
    let StepOptions { batch, micro_batches, sequence, mesh, .. } = &configured.options;
    let (ranks, schedule) = (mesh.ranks().unwrap_or(0), configured.options.pipeline.schedule.name());
    let precision = format!("{:?}", configured.precision()).to_lowercase();
    write!(
        out,
        "{batch} sequences of {sequence} tokens in {micro_batches} micro-batch{}, {precision}, {} kernels",
        if *micro_batches == 1 { "" } else { "es" },
        configured.kernels()
    )?;
    writeln!(out, "{}\n", if ranks > 1 { format!(", {ranks} ranks, schedule {schedule}") } else { String::new() })?;
    writeln!(out, "{}", step.summary)?;
    for (rank, run) in step.ranks.iter().enumerate() {
        let roles = run
            .roles
            .iter()
            .map(|role_bytes| format!("{} {}", role_bytes.role.name(), Bytes(role_bytes.bytes)))
            .collect::<Vec<_>>();
        let arena = Size(run.arena_bytes);
        writeln!(
            out,
            "rank {rank}: a run takes {arena}, evaluation and sampling included; at the peak {}",
            roles.join(", ")
        )?;
    }
    let rates = configured.device.rates(configured.precision());
    let [flops, bytes] = [rates.flops, rates.bytes].map(|rate| (rate / 1e10).round() / 100.0);
    let takes = match ranks {
        1 => format!("a step takes {:.2} ms", step.step_ms),
        _ => format!("a step takes {:.2} ms, for {:.2} ms of which this rank is busy,", step.step_ms, step.rank_ms),
    };
    writeln!(
        out,
        "\nplanned in {:.0} ms; {takes} at {flops} TFLOP/s and {bytes} TB/s ({})",
        step.plan_ms, configured.device.name
    )?;
    let (time, flops) = (100.0 * step.overhead, 100.0 * step.extra_flops);
    writeln!(out, "recomputed: {time:.2} % on top of the other time, {flops:.2} % on top of the other arithmetic")?;
    if let Some(balance) = &step.context_balance {
        writeln!(out, "{balance}")?;
    }
    if step.reserve_bytes > 0 {
        let (reserve, arena) = (Bytes(step.reserve_bytes), Bytes(step.arena_bytes));
        writeln!(out, "on top of the plan: {reserve} for rows that this rank receives, {arena} in total")?;
    }
    if step.host_bytes > 0 {
        let (bytes, busy) = (Bytes(step.host_bytes), 100.0 * step.offload_ms / step.rank_ms.max(1e-9));
        let is_on_gpu = configured.kernels() == "CUDA";
        let place = if is_on_gpu && configured.options.memory.offload_to.is_none() { "host memory" } else { "a file" };
        writeln!(
            out,
            "offloaded to {place}: {bytes}; nothing is computed for {:.2} ms ({busy:.2} % of the rank's time), because of its copies",
            step.offload_ms
        )?;
    }
    if let [first, .., last] = step.again[..]
        && first != last
    {
        writeln!(out, "the first micro-batch recomputes {first} operations, the last {last}:")?;
    }
    let mut from = 0;
    while let Some(first) = step.layers.get(from) {
        let ops = |layer: &RecomputedLayer| (layer.ops.clone(), layer.ops_for_weights.clone());
        let count = step.layers[from..].iter().take_while(|layer| ops(layer) == ops(first)).count();
        let last = &step.layers[from + count - 1];
        let range = if count == 1 { first.layer.clone() } else { format!("{} … {}", first.layer, last.layer) };
        let ops = if first.ops.is_empty() { "nothing".to_owned() } else { first.ops.join(", ") };
        writeln!(out, "  {range:<28} {ops}")?;
        if !first.ops_for_weights.is_empty() {
            writeln!(out, "  {:<28} {}", "  for gradients of weights", first.ops_for_weights.join(", "))?;
        }
        from += count;
    }
    #[cfg(feature = "cuda")]
    if let Some(roofline) = &step.roofline {
        write!(out, "\n{roofline}")?;
    }
    match &step.curve {
        Some(curve) => write!(out, "\n{curve}"),
        None => Ok(()),
    }
}
