//! `gapless compare`: computes the bytes that each allocator would reserve. The requests come from a table of
//! lifetimes, a snapshot or a training step.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use gapless::TrainError;
use gapless::step::{EagerRun, Lowering, Origin, StartUp, Step};
use gapless_alloc::draw::Bytes;
use gapless_alloc::{Options, Problem, Solution, csv, plan_hash, table_hash};
use gapless_allocators::{
    Compared, Comparison, Kind, PyTorchOptions, Refused, Requests, Snapshot, SnapshotError, page, read_snapshot,
};
use serde::Serialize;

use crate::input::open;
use crate::output::{Size, exit_code, picture, print, tell, to_json};
use crate::plan::seconds;
use crate::step::RunArguments;

/// Replay a table of lifetimes, a snapshot or the training step of a run through every allocator and compare what they reserve.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("input"))]
pub struct Arguments {
    /// The file of a run (.toml), whose training step is replayed.
    #[arg(group = "input")]
    file: Option<PathBuf>,
    /// Lifetimes as CSV (columns id,lower,upper,size; gzipped or not).
    #[arg(long, value_name = "FILE.csv[.gz]", group = "input")]
    trace: Option<PathBuf>,
    /// A PyTorch memory snapshot, as torch.cuda.memory._dump_snapshot writes it.
    #[arg(long, value_name = "FILE.pickle", group = "input")]
    snapshot: Option<PathBuf>,
    /// The device of the snapshot to replay, if it has traces of several.
    #[arg(long, value_name = "NUMBER", requires = "snapshot")]
    snapshot_device: Option<usize>,
    /// The number of times that the step runs; buffers that live through all of it are allocated once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    /// With --lowering eager or eager-amp: replay the first N steps of a run instead of a steady step, with what the start allocates.
    #[arg(long, value_name = "N", conflicts_with_all = ["trace", "snapshot", "iterations"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    first_steps: Option<u16>,
    /// Allocators to compare, separated by commas; all by default.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    allocators: Vec<Kind>,
    /// Bytes of the modelled device, e.g. 40GiB; by default 80 GiB, or four times the live bytes if those exceed 60 GiB.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::read, allow_hyphen_values = true)]
    capacity: Option<u64>,
    /// Options of PyTorch's allocator, as in PYTORCH_ALLOC_CONF.
    #[arg(long, default_value = "", value_name = "OPTION:VALUE,…")]
    pytorch_options: PyTorchOptions,
    /// Also find the smallest device on which each allocator completes.
    #[arg(long)]
    smallest_device: bool,
    /// Seconds after which gapless takes its best plan so far.
    #[arg(long, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    deadline: Option<Duration>,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
    /// Also write a page with a picture per allocator over time.
    #[arg(long, value_name = "REPORT.html", value_parser = |path: &str| picture(path, &["html"]))]
    html: Option<PathBuf>,
    #[command(flatten)]
    run: RunArguments,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("compare", compare_all(arguments))
}

fn compare_all(arguments: &Arguments) -> anyhow::Result<()> {
    let programs = read(arguments)?;
    if let ([_, _, ..], Some(report)) = (&programs[..], &arguments.html) {
        bail!("--html would write {} once for each rank; choose one rank with --rank", report.display());
    }
    let mut compared: Vec<Outcome> = Vec::new();
    for program in programs {
        let (title, refused, origin) = (program.title.clone(), program.refused.clone(), program.origin.clone());
        let table_hash = table_hash(&program.problem).to_string();
        let plan_hash = program.plan.as_ref().map(|plan| plan_hash(&program.problem, &plan.offsets).to_string());
        let refused = refused.map(|(refused, program)| {
            let capacity = arguments.capacity.unwrap_or(refused.capacity());
            Ok::<_, anyhow::Error>(OutOfMemory { compared: replayed(arguments, *program, Some(capacity))?, refused })
        });
        let (refused, routed, whole_run) = (refused.transpose()?, program.routed.clone(), program.whole_run.clone());
        let compared_here = compare_one(arguments, program)?;
        compared.push(Outcome {
            title,
            origin,
            table_hash,
            plan_hash,
            refused,
            compared: compared_here,
            routed,
            whole_run,
        });
    }
    let text = match (arguments.json, &compared[..]) {
        (true, all) => to_json(all)? + "\n",
        (false, [one]) => one.to_string(),
        (false, all) => all.iter().map(|one| format!("{}\n{one}\n", one.title)).collect(),
    };
    print(|out| out.write_all(text.as_bytes()))
}

/// The results of all allocators for one program.
#[derive(Serialize)]
struct Outcome {
    #[serde(skip)]
    title: String,
    #[serde(flatten)]
    origin: Origin,
    /// Hash of the lifetimes that were replayed.
    table_hash: String,
    /// Hash of the plan of a step of this engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan_hash: Option<String>,
    #[serde(flatten)]
    compared: Compared,
    #[serde(flatten)]
    routed: Option<Routed>,
    #[serde(flatten)]
    whole_run: Option<WholeRun>,
    /// The last request of the snapshot that PyTorch could not serve; `None` if PyTorch served all requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<OutOfMemory>,
}

/// The rows of experts in the requests of a mixture of experts.
#[derive(Clone, Serialize)]
struct Routed {
    /// The distribution of tokens over experts, as in `estimate.expert_load`.
    expert_load: String,
    /// Bytes of gapless's arena that these rows do not use, because they are reserved for other rows. `None` if no size
    /// depends on the rows.
    #[serde(skip)]
    unused_reserve: Option<u64>,
    /// If the reserve of the step is too small for the rows, the factor of a reserve that is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    reserve_grown_to: Option<f64>,
}

impl Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rows of experts in all requests: --expert-load {}", self.expert_load)?;
        match self.reserve_grown_to {
            Some(factor) => writeln!(
                f,
                "these rows do not fit the reserve of the step (memory.routing); gapless is shown with a reserve of {factor:.2} × balanced rows"
            ),
            None => Ok(()),
        }
    }
}

/// The share of the start in the first steps of a run.
#[derive(Clone, Serialize)]
struct WholeRun {
    start_up: StartUp,
    /// The most bytes alive in each step.
    step_peaks: Vec<u64>,
}

impl Display for WholeRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StartUp { before_bytes, states_bytes } = self.start_up;
        let most = self.step_peaks.iter().copied().max().unwrap_or(0);
        let share = 100.0 * (before_bytes + states_bytes) as f64 / most.max(1) as f64;
        writeln!(
            f,
            "start of the run: {} before the first step, {} of optimizer states in its update, together {share:.1} % of the peak",
            Size(before_bytes),
            Size(states_bytes)
        )?;
        for (number, &peak) in (1..).zip(&self.step_peaks) {
            writeln!(f, "step {number}: at most {} alive", Size(peak))?;
        }
        Ok(())
    }
}

/// A request that PyTorch could not serve, and the results of all allocators for the program up to this request.
#[derive(Serialize)]
struct OutOfMemory {
    #[serde(flatten)]
    refused: Refused,
    #[serde(flatten)]
    compared: Compared,
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.compared)?;
        self.routed.iter().try_for_each(|routed| write!(f, "{routed}"))?;
        self.whole_run.iter().try_for_each(|whole_run| write!(f, "{whole_run}"))?;
        let Some(OutOfMemory { refused, compared }) = &self.refused else { return Ok(()) };
        let &Refused { event, bytes, device_free, reserved, allocated, .. } = refused;
        let (idle, alive) = (reserved.saturating_sub(allocated), allocated.saturating_add(bytes));
        writeln!(
            f,
            "\nPyTorch ran out of memory at event {event}, which requests {}: {} of the device were free, and of the {} that PyTorch had \
             reserved {} were idle. With the request {} are alive, on a device of {}{}:",
            Size(bytes),
            Size(device_free),
            Size(reserved),
            Size(idle),
            Size(alive),
            Size(compared.capacity),
            if alive > compared.capacity { ", so no allocator can serve it" } else { "" }
        )?;
        for gapless_allocators::Entry { kind, outcome, .. } in &compared.allocators {
            match outcome {
                Ok(report) => {
                    writeln!(f, "{:<20}serves it with {} reserved", kind.name(), Size(report.peak_reserved()))?;
                }
                Err(error) => writeln!(f, "{:<20}{error}", kind.name())?,
            }
        }
        Ok(())
    }
}

/// A sequence of allocations and frees, which is replayed through the allocators.
#[derive(Clone)]
struct Program {
    title: String,
    origin: Origin,
    problem: Problem,
    requests: Requests,
    /// The plan of the program; `None` if the program has not been planned yet.
    plan: Option<Solution>,
    /// The maximum work of the planner.
    work: u64,
    /// The rows of experts, if the program is a step of a mixture of experts.
    routed: Option<Routed>,
    /// The share of the start, if the program is the first steps of a run.
    whole_run: Option<WholeRun>,
    /// The last request that PyTorch could not serve, and the program up to this request.
    refused: Option<(Refused, Box<Program>)>,
}

impl Program {
    /// A program that was read from a file, without a plan.
    fn of_file(path: &Path, problem: Problem, requests: Requests) -> Self {
        Self {
            title: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            origin: Origin::new(None),
            problem,
            requests,
            plan: None,
            work: Options::DEFAULT_WORK,
            routed: None,
            whole_run: None,
            refused: None,
        }
    }
}

fn compare_one(arguments: &Arguments, program: Program) -> anyhow::Result<Compared> {
    let title = program.title.clone();
    let compared = replayed(arguments, program, arguments.capacity)?;
    if let Some(report) = &arguments.html {
        let cannot = || format!("cannot write {}", report.display());
        std::fs::write(report, page(&compared, &title)).with_context(cannot)?;
    }
    Ok(compared)
}

fn replayed(arguments: &Arguments, program: Program, capacity: Option<u64>) -> anyhow::Result<Compared> {
    let Program { title, problem, requests, plan, work, routed, .. } = program;
    if problem.is_empty() {
        bail!("{title}: no buffers, nothing to compare");
    }
    let chosen = &arguments.allocators;
    Ok(gapless_allocators::compare(
        &problem,
        &requests,
        &Comparison {
            iterations: arguments.iterations,
            kinds: if chosen.is_empty() { Kind::all() } else { chosen.clone() },
            capacity,
            pytorch: arguments.pytorch_options.clone(),
            smallest_device: arguments.smallest_device,
            pictures: arguments.html.is_some(),
            planner: Options { deadline: arguments.deadline, work, ..Options::default() },
            plan,
            unused_reserve: routed.and_then(|routed| routed.unused_reserve),
        },
    ))
}

/// Reads the programs to replay: one for a table or a snapshot, or one for each rank of a step.
fn read(arguments: &Arguments) -> anyhow::Result<Vec<Program>> {
    let cannot = |path: &Path| format!("cannot read {}", path.display());
    match (&arguments.trace, &arguments.snapshot) {
        (Some(_), _) | (_, Some(_)) if !arguments.run.is_empty() => {
            bail!("keys of a run have no effect on --trace and --snapshot; leave the keys out")
        }
        (Some(path), _) => {
            let table = csv::read(open(path)?).with_context(|| cannot(path))?;
            if !table.gaps.is_empty() {
                tell("gapless compare: gaps are ignored: every buffer keeps its bytes for its whole lifetime");
            }
            let requests = Requests::new(&table.problem);
            Ok(vec![Program::of_file(path, table.problem, requests)])
        }
        (None, Some(path)) => {
            let snapshot = read_snapshot(open(path)?, arguments.snapshot_device).with_context(|| cannot(path))?;
            let program = |snapshot: Snapshot, refused| {
                let requests = Requests::new(&snapshot.problem).on_streams(snapshot.streams);
                Program { refused, ..Program::of_file(path, snapshot.problem, requests) }
            };
            let refused = snapshot.refused.last().cloned();
            let until = refused.map(|refused| {
                let until = snapshot.until(&refused)?;
                Ok::<_, SnapshotError>((refused, Box::new(program(until, None))))
            });
            let until = until.transpose().with_context(|| cannot(path))?;
            Ok(vec![program(snapshot, until)])
        }
        (None, None) if arguments.run.names_a_run(arguments.file.as_deref()) => {
            of_ranks(&arguments.run.step(arguments.file.as_deref())?, arguments.first_steps)
        }
        (None, None) => bail!("nothing to compare; give the file of a run, --model, --trace or --snapshot"),
    }
}

/// Returns the programs of a step's ranks. If `lowering` selects an eager framework, they have the lifetimes in this
/// framework. Otherwise they have the compiled lifetimes, and their plans. Either way, experts have the rows of the
/// step's load.
fn of_ranks(step: &Step, first_steps: Option<u16>) -> anyhow::Result<Vec<Program>> {
    if first_steps.is_some() && step.lowering == Lowering::Gapless {
        bail!(
            "--first-steps is for eager frameworks: the start of a run takes nothing on top of this engine's arena, which is reserved \
             before the first step; give --lowering eager, or leave --first-steps out"
        );
    }
    let graph = step.record()?;
    let planned = |&rank: &usize| {
        let mut routed = step.routed_rows(&graph, rank).map(|_| Routed {
            expert_load: step.expert_load.to_string(),
            unused_reserve: None,
            reserve_grown_to: None,
        });
        let mut whole_run = None;
        let (problem, plan) = match step.lowering {
            Lowering::Gapless => {
                let executable = step.plan(&step.program(&graph, rank)?)?;
                let served = executable.serve_rows(&step.received_rows(&graph, rank)).map_err(TrainError::from)?;
                if let Some(routed) = routed.as_mut().filter(|_| executable.routing().is_some()) {
                    routed.unused_reserve = Some(served.arena_bytes - served.solution.height);
                    routed.reserve_grown_to = served.grown_to;
                }
                (served.problem, Some(served.solution))
            }
            Lowering::Eager | Lowering::EagerAmp | Lowering::Megatron | Lowering::Fsdp2 => match first_steps {
                None => (step.eager(&graph, rank)?, None),
                Some(steps) => {
                    let EagerRun { table, start_up, peaks } = step.eager_run(&graph, rank, steps.into())?;
                    whole_run = Some(WholeRun { start_up, step_peaks: peaks });
                    (table, None)
                }
            },
        };
        let title = match step.ranks.len() {
            1 => step.title().to_owned(),
            _ => format!("{}, rank {rank}", step.title()),
        };
        let requests = Requests::new(&problem);
        Ok(Program {
            title,
            origin: Origin::new(Some(step)),
            problem,
            requests,
            plan,
            work: step.options.memory.planning,
            routed,
            whole_run,
            refused: None,
        })
    };
    step.ranks.iter().map(planned).collect()
}
