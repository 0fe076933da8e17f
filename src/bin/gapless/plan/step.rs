//! `gapless plan --model`: what a training step takes, layer by layer and role by role, and what fewer bytes would cost.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use gapless::engine::compile::Error as CompileError;
use gapless::engine::compile::report::{RecomputedLayer, recomputed_layers, recomputed_per_micro_batch};
use gapless::engine::compile::{CompileOptions, Executable, Program, compile};
use gapless::{Recompute, Report, TrainError, TrainOptions};
use gapless_alloc::draw::{Bytes, MemoryMap, RoleBytes, Summary};
use gapless_alloc::{Fit, Options, explain};
use gapless_parallel::Rates;
use serde::Serialize;

use super::curve::{Curve, curve};
use super::draw;
use crate::model::{Model, StepArguments};
use crate::output::{picture, print, tell};

/// What is asked about a training step.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Training step")]
#[group(id = "training_step")]
pub struct Arguments {
    /// Plan the training step of this model instead of a table: small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama2-7b, llama3-8b,
    /// mixtral8x7b, qwen-moe, or a folder or config.json of Hugging Face's, whose weights are not read.
    #[arg(long)]
    pub model: Option<Model>,
    #[command(flatten)]
    pub step: StepArguments,
    /// Bytes that the step must fit into, e.g. 20GiB: the cheapest recomputation that does is sought.
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = Bytes::read,
        allow_hyphen_values = true,
        conflicts_with = "recompute",
        requires = "model"
    )]
    budget: Option<u64>,
    /// What is computed again: none, layers, first:8, layers:h.3,h.7 or ops:layer_norm,gelu.
    #[arg(long, value_name = "POLICY", default_value = "none", requires = "model")]
    recompute: Recompute,
    /// TFLOP/s of the device that time is estimated for; as a matrix product reaches on an H100 in bf16.
    #[arg(long, value_name = "NUMBER", default_value_t = 770.0, allow_negative_numbers = true)]
    tflops: f64,
    /// TB/s of its memory; as a copy reaches on an H100.
    #[arg(long, value_name = "NUMBER", default_value_t = 3.0, allow_negative_numbers = true)]
    terabytes: f64,
    /// Also plan so many budgets, from the smallest that works to everything kept.
    #[arg(long, value_name = "POINTS", requires = "model", allow_negative_numbers = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(2..=100))]
    curve: Option<u16>,
    /// Where to draw them.
    #[arg(long, value_name = "FILE.svg", requires = "curve", value_parser = |path: &str| picture(path, &["svg"]))]
    curve_svg: Option<PathBuf>,
}

impl Arguments {
    pub fn rates(&self) -> Rates {
        Rates { flops: self.tflops * 1e12, bytes: self.terabytes * 1e12 }
    }

    fn model(&self) -> &Model {
        self.model.as_ref().expect("required where there is no table")
    }

    /// The options under a policy.
    fn options(&self, recompute: Recompute) -> TrainOptions {
        TrainOptions { recompute, ..self.step.options(self.model()) }
    }

    /// The program under a policy.
    pub fn program(&self, recompute: Recompute) -> Result<Program, TrainError> {
        self.model().program(&self.options(recompute))
    }
}

/// A planned step in figures.
#[derive(Debug, Serialize)]
pub struct Step {
    /// Name of the model.
    model: String,
    buffers: usize,
    /// Plan and reserve.
    pub arena_bytes: u64,
    lower_bound_bytes: u64,
    /// Of the plan.
    gap: f64,
    /// What the arena has above the plan, for the rows that an expert rank receives.
    reserve_bytes: u64,
    /// Time of compiling and planning, the search for a budget's recomputation included.
    plan_ms: f64,
    /// Modelled time of the step.
    pub step_ms: f64,
    /// Time of what is computed again, as a part of the time of the rest.
    pub overhead: f64,
    /// Arithmetic of what is computed again, as a part of that of the rest.
    pub extra_flops: f64,
    layers: Vec<RecomputedLayer>,
    /// Operations that each micro-batch runs again.
    again: Vec<usize>,
    /// Size of the file that offloaded activations wait in.
    host_bytes: u64,
    summary: Summary,
    /// Arenas of whole runs, by rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ranks: Vec<Run>,
    #[serde(skip_serializing_if = "Option::is_none")]
    curve: Option<Curve>,
}

/// What a rank of a run takes: its training step, evaluation and sampling in one arena.
#[derive(Debug, Serialize)]
struct Run {
    arena_bytes: u64,
    roles: Vec<RoleBytes>,
}

/// Plans a step under a policy.
pub fn plan_step(arguments: &Arguments, recompute: Recompute) -> Result<(Step, Executable), TrainError> {
    let start = Instant::now();
    let options = arguments.options(recompute.clone());
    let within = CompileOptions::within(recompute.capacity(), options.planning, options.routing);
    let program = arguments.program(recompute)?;
    let [all, again] = program.nanoseconds(&arguments.rates());
    let (layers, again_by_micro_batch) = (recomputed_layers(&program), recomputed_per_micro_batch(&program));
    let flops = program.flops();
    let rematerialized_flops = program.rematerialized_flops();
    let executable = compile(&[program], &within)?;
    let model = arguments.model().to_string();
    let step = Step {
        buffers: executable.problem.len(),
        arena_bytes: executable.arena_bytes(),
        lower_bound_bytes: executable.solution.lower_bound,
        gap: executable.solution.gap(),
        reserve_bytes: executable.arena_bytes() - executable.solution.height,
        plan_ms: start.elapsed().as_secs_f64() * 1e3,
        step_ms: all as f64 / 1e6,
        overhead: again as f64 / (all - again).max(1) as f64,
        extra_flops: rematerialized_flops as f64 / (flops - rematerialized_flops).max(1) as f64,
        layers,
        again: again_by_micro_batch,
        host_bytes: executable.host_bytes(),
        summary: map(&model, &executable)?.summary(8),
        model,
        ranks: Vec::new(),
        curve: None,
    };
    Ok((step, executable))
}

fn map<'a>(title: &'a str, executable: &'a Executable) -> Result<MemoryMap<'a>, TrainError> {
    let Executable { problem, solution, labels, parts, .. } = executable;
    Ok(MemoryMap::new(title, problem, &solution.offsets, labels)?.with_marks(parts)?)
}

/// Does what the arguments ask.
pub fn plan(arguments: &super::Arguments) -> anyhow::Result<Fit> {
    let of = &arguments.step;
    if !of.rates().are_sound() {
        bail!("{} TFLOP/s and {} TB/s are no device; both are above 0", of.tflops, of.terabytes);
    }
    let recompute = match of.budget {
        Some(bytes) => Recompute::Budget { bytes, rates: of.rates() },
        None => of.recompute.clone(),
    };
    let planned = plan_step(of, recompute.clone()).and_then(|(step, executable)| {
        let runs = of.model().ranks(&of.options(recompute))?;
        let run = |Report { arena_bytes, summary, .. }| Run { arena_bytes, roles: summary.roles };
        Ok((Step { ranks: runs.into_iter().map(run).collect(), ..step }, executable))
    });
    let (mut step, executable) = match planned {
        Err(error @ TrainError::Compile(CompileError::OverBudget { budget, smallest })) => {
            tell(format_args!("gapless plan: {error}"));
            return tell_why(of, budget, smallest);
        }
        planned => planned?,
    };
    if let Some(points) = of.curve {
        step.curve = Some(curve(of, points.into())?);
    }
    if let (Some(path), Some(curve)) = (&of.curve_svg, &step.curve) {
        std::fs::write(path, curve.svg()).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    if let Some(path) = &arguments.draw {
        draw(path, &map(&step.model, &executable)?)?;
    }
    match arguments.json {
        true => {
            let json = serde_json::to_string_pretty(&step)?;
            print(|out| writeln!(out, "{json}"))?;
        }
        false => print(|out| report(out, of, &step))?,
    }
    Ok(Fit::Fits)
}

/// Explains why not even the smallest step that was found fits.
fn tell_why(arguments: &Arguments, budget: u64, smallest: u64) -> anyhow::Result<Fit> {
    let (step, executable) = plan_step(arguments, Recompute::Budget { bytes: smallest, rates: arguments.rates() })?;
    let Executable { problem, solution, labels, parts, .. } = &executable;
    if step.reserve_bytes > 0 {
        tell(format_args!("{} of it are for rows that this rank receives, above the plan", Bytes(step.reserve_bytes)));
    }
    let capacity = Some(budget.saturating_sub(step.reserve_bytes));
    if let Some(why) = explain(problem, labels, solution, &Options { capacity, ..Options::default() }) {
        tell(why.during(parts).to_string().trim_end());
    }
    Ok(Fit::Unknown)
}

fn report(out: &mut dyn Write, arguments: &Arguments, step: &Step) -> std::io::Result<()> {
    writeln!(out, "{}", step.summary)?;
    for (rank, run) in step.ranks.iter().enumerate() {
        let roles = run.roles.iter().map(|of| format!("{} {}", of.role.name(), Bytes(of.bytes))).collect::<Vec<_>>();
        let (rank, arena) = (format!("rank {rank}"), run.arena_bytes);
        writeln!(
            out,
            "{rank}: a run takes {arena} bytes, evaluation and sampling included; at the peak {}",
            roles.join(", ")
        )?;
    }
    let [flops, bytes] = [arguments.tflops, arguments.terabytes];
    writeln!(
        out,
        "\nplanned in {:.0} ms; a step of {:.2} ms at {flops} TFLOP/s and {bytes} TB/s",
        step.plan_ms, step.step_ms
    )?;
    let (time, flops) = (100.0 * step.overhead, 100.0 * step.extra_flops);
    writeln!(out, "computed again: {time:.2} % of the time, {flops:.2} % of the arithmetic")?;
    if step.reserve_bytes > 0 {
        let (reserve, arena) = (Bytes(step.reserve_bytes), Bytes(step.arena_bytes));
        writeln!(out, "above the plan: {reserve} for rows that this rank receives, {arena} in all")?;
    }
    if step.host_bytes > 0 {
        writeln!(out, "waiting in a file: {}, whose copies are not in the time", Bytes(step.host_bytes))?;
    }
    if let [first, .., last] = step.again[..]
        && first != last
    {
        writeln!(out, "the first micro-batch runs {first} operations again, the last {last}:")?;
    }
    let mut from = 0;
    while let Some(first) = step.layers.get(from) {
        let count = step.layers[from..].iter().take_while(|layer| layer.ops == first.ops).count();
        let last = &step.layers[from + count - 1];
        let range = if count == 1 { first.layer.clone() } else { format!("{} … {}", first.layer, last.layer) };
        let ops = if first.ops.is_empty() { "nothing".to_owned() } else { first.ops.join(", ") };
        writeln!(out, "  {range:<28} {ops}")?;
        from += count;
    }
    match &step.curve {
        Some(curve) => write!(out, "\n{curve}"),
        None => Ok(()),
    }
}
