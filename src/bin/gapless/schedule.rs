//! `gapless schedule`: checks, simulates and draws a pipeline schedule.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use gapless::step::Origin;
use gapless::timeline;
use gapless_parallel::{
    Automatic, Cell, Costs, Interleaved, Placement, Saved, Schedule, SearchedZb, SearchedZbv, Sends, Shape, Timeline,
    Violation, Waits, by_name, check, communicate, fetch_weights, merge_backwards, read_table_file, reduce_gradients,
    simulate, update_weights, write_table,
};

use crate::output::{picture, print, tell, tell_error};
use crate::step::{RunArguments, is_run};

/// The largest [`Shape::extent`] that is accepted. A table of this extent takes seconds to generate, check, simulate
/// and draw.
const MAX_EXTENT: u128 = 1 << 17;

/// Print a pipeline schedule, in ticks or with the times of a model's step (--model), or check and draw a table of your own.
///
/// A cell is a stage, an action and a micro-batch, like 0F3. Actions: F forward, B whole backward, I input gradient, W weight
/// gradient. Exit code: 0 if the table is valid, 2 for invalid input, 3 if the checker refuses the table.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// gpipe, 1f1b, interleaved, looped-bfs, zb-h1, interleaved-zb, zb-h2, zbv, v-half, v-min, v-1f1b, dualpipev,
    /// layered-accumulation, modular-pipeline; or an order computed for the ticks given below: automatic (the shortest that is
    /// found), zb-searched and zbv-searched (by the zero-bubble authors' searches). Or the file of a run (.toml), whose step is drawn
    /// in nanoseconds.
    #[arg(value_name = "NAME|RUN.toml")]
    name: Option<String>,
    /// For interleaved: the number of micro-batches that pass one chunk before the next (Megatron's micro-batch group
    /// size per virtual stage); by default micro-batches are split into as many equal rounds as keep all ranks busy.
    #[arg(long, value_name = "N", conflicts_with_all = ["table", "model"])]
    micro_batch_group: Option<u32>,
    /// For automatic, zb-searched and zbv-searched: the maximum number of activations alive on a rank, each of one stage and
    /// one micro-batch; by default as many as 1F1B keeps.
    #[arg(long, value_name = "ACTIVATIONS", conflicts_with_all = ["table", "model"])]
    peak: Option<u32>,
    /// For zb-searched and zbv-searched: the relative sizes of what the input gradient and the weight gradient free of
    /// a forward's activations; by default 82,32, as in a transformer layer. With 0,1, activations count until the
    /// weight gradient.
    #[arg(long, value_name = "INPUT,WEIGHT", conflicts_with_all = ["table", "model"], value_parser = saved)]
    saved: Option<Saved>,
    #[command(flatten)]
    run: RunArguments,
    #[command(flatten)]
    lowering: Lowering,
    #[command(flatten)]
    durations: Durations,
    /// Print the table as CSV.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print the table, the times of all actions, makespan, bubbles and peaks as JSON.
    #[arg(long)]
    json: bool,
    /// Where to draw the timeline: a page with zoom and each rank's activations (.html), or a picture (.svg).
    #[arg(long, visible_alias = "svg", value_name = "FILE.html|svg", value_parser = |path: &str| picture(path, &["html", "svg"]))]
    out: Option<PathBuf>,
    /// Where to write the timeline for chrome://tracing or Perfetto.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Characters per line of the printed timeline; 0 for no limit.
    #[arg(long, value_name = "COLUMNS", default_value_t = 160)]
    width: usize,
}

/// The instructions that are added around the actions.
#[derive(Debug, clap::Args)]
struct Lowering {
    /// Insert sends, receives and waits into the table, as PyTorch's runtime does.
    #[arg(long, visible_alias = "comm", conflicts_with = "model")]
    communicate: bool,
    /// With --communicate: wait for a send before the stage's next one, not after the micro-batch's backward.
    #[arg(long, requires = "communicate")]
    wait_early: bool,
    /// Merge an input gradient and the weight gradient right after it into one whole backward.
    #[arg(long, conflicts_with = "model")]
    merge_backwards: bool,
    /// Insert the reduction of each stage's gradients after the last of them.
    #[arg(long, conflicts_with = "model")]
    reduce_gradients: bool,
    /// Insert the update of every stage's weights at the end.
    #[arg(long, conflicts_with = "model")]
    update_weights: bool,
    /// Fetch the weights of this many stages at a time, and release them in between.
    #[arg(long, value_name = "STAGES", conflicts_with = "model")]
    fetch_weights: Option<NonZeroUsize>,
}

/// Ticks; one number for all stages, or as many as there are stages with commas between them.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Ticks: one number, or one per stage, separated by commas")]
struct Durations {
    /// Ticks of a forward.
    #[arg(long, value_name = "TICKS", value_delimiter = ',', conflicts_with = "model", default_value = "1")]
    forward: Vec<u32>,
    /// Ticks of an input gradient.
    #[arg(long, value_name = "TICKS", value_delimiter = ',', conflicts_with = "model", default_value = "1")]
    backward_input: Vec<u32>,
    /// Ticks of a weight gradient.
    #[arg(long, value_name = "TICKS", value_delimiter = ',', conflicts_with = "model", default_value = "1")]
    backward_weight: Vec<u32>,
    /// Ticks of an overlapped forward and whole backward; by default the sum of both.
    #[arg(long, value_name = "TICKS", value_delimiter = ',', conflicts_with = "model")]
    overlapped: Vec<u32>,
    /// Ticks of a message from one rank to another.
    #[arg(long, value_name = "TICKS", value_delimiter = ',', conflicts_with = "model", default_value = "0")]
    transfer: Vec<u32>,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    match show(arguments) {
        Ok(violations) if violations.is_empty() => ExitCode::SUCCESS,
        Ok(violations) => {
            tell(format_args!("gapless schedule: the table is not valid, for {} reason(s):", violations.len()));
            violations.iter().for_each(|violation| tell(format_args!("  {violation}")));
            ExitCode::from(3)
        }
        Err(error) => {
            tell_error("gapless schedule", &error);
            ExitCode::from(2)
        }
    }
}

/// Checks a table and shows it, or shows the step of a run. If the checker rejects the table, returns the violations,
/// and does not show the table. Otherwise returns an empty list.
fn show(arguments: &Arguments) -> anyhow::Result<Vec<Violation>> {
    let names_a_run = arguments.run.names_a_run(file(arguments));
    if arguments.run.table.is_some() {
        if let Some(name) = arguments.name.as_ref().filter(|_| file(arguments).is_none()) {
            bail!("the schedule {name} cannot be used with --table; leave one of them out");
        }
        if arguments.run.has_keys() && !names_a_run {
            bail!(
                "keys of a run have no effect on --table; leave the keys out, or give a --model whose step has this order"
            );
        }
    }
    if names_a_run {
        return of_model(arguments);
    }
    let (title, actions) = read(arguments)?;
    let extent = Extent::of(&actions)?;
    let violations = check(&actions, extent.stages, extent.micro_batches, Sends::Buffered);
    if !violations.is_empty() {
        return Ok(violations);
    }
    let costs = arguments.durations.costs(extent.stages)?;
    let table = arguments.lowering.lower(actions)?;
    let violations = check(&table, extent.stages, extent.micro_batches, Sends::Buffered);
    if !violations.is_empty() {
        return Ok(violations);
    }
    if has_messages(&table) && !check(&table, extent.stages, extent.micro_batches, Sends::Blocking).is_empty() {
        tell("gapless schedule: this table needs buffered sends; --communicate inserts messages that do not");
    }
    let timeline = simulate(&table, &costs[..])?;
    let origin = Origin::new(None);
    write_output(arguments, (&title, &origin), &extent, &table, &timeline, "ticks")?;
    Ok(violations)
}

/// Returns the path of the run file, or `None` if the given name is not a run file.
fn file(arguments: &Arguments) -> Option<&Path> {
    arguments.name.as_deref().map(Path::new).filter(|name| is_run(name))
}

/// Returns the keys of the run, including a schedule that is given by name.
fn keys(arguments: &Arguments) -> anyhow::Result<RunArguments> {
    let mut keys = arguments.run.clone();
    if let (Some(name), None) = (&arguments.name, file(arguments)) {
        if keys.has("schedule") {
            bail!("the schedule is given twice; leave --schedule out");
        }
        keys.assign("pipeline.schedule", name);
    }
    Ok(keys)
}

/// Shows the timeline of a run's step, in nanoseconds on the step's device. The returned list of violations is empty.
fn of_model(arguments: &Arguments) -> anyhow::Result<Vec<Violation>> {
    let step = keys(arguments)?.step(file(arguments))?;
    check_size(&Shape {
        ranks: u32::try_from(step.options.mesh.pipeline)?,
        chunks: u32::try_from(step.options.pipeline.chunks)?,
        micro_batches: u32::try_from(step.options.micro_batches)?,
    })?;
    let timing = step.timing(&step.programs(&step.record()?)?)?;
    let table: Vec<Vec<Cell>> =
        timing.timeline.ranks.iter().map(|spans| spans.iter().map(|span| span.cell).collect()).collect();
    let title = format!("{} under {} on {}", step.title(), step.options.pipeline.schedule.name(), step.device.name);
    let origin = Origin::new(Some(&step));
    write_output(arguments, (&title, &origin), &Extent::of(&table)?, &table, &timing.timeline, "ns")?;
    Ok(Vec::new())
}

/// Writes the files and prints the text that the arguments ask for.
fn write_output(
    arguments: &Arguments,
    (title, origin): (&str, &Origin),
    extent: &Extent,
    table: &[Vec<Cell>],
    timeline: &Timeline,
    unit: &str,
) -> anyhow::Result<()> {
    let write = |path: &Option<PathBuf>, picture: &dyn Fn() -> String| match path {
        Some(path) => std::fs::write(path, picture()).with_context(|| format!("cannot write {}", path.display())),
        None => Ok(()),
    };
    let is_page = arguments.out.as_ref().is_some_and(|path| path.extension().is_some_and(|name| name == "html"));
    write(&arguments.out, &|| if is_page { timeline::page(title, timeline, unit) } else { timeline.svg() })?;
    write(&arguments.trace, &|| timeline.trace())?;
    let text = match arguments {
        Arguments { csv: true, .. } => write_table(table),
        Arguments { json: true, .. } => json((title, unit, origin), extent, table, timeline) + "\n",
        _ => text(title, extent, timeline, arguments.width, unit),
    };
    print(|out| out.write_all(text.as_bytes()))
}

/// Returns the title and the table of the named schedule, or of the given file.
fn read(arguments: &Arguments) -> anyhow::Result<(String, Vec<Vec<Cell>>)> {
    if let Some(path) = &arguments.run.table {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok((name, read_table_file(path)?));
    }
    let mut keys = keys(arguments)?;
    if arguments.name.is_none() && !keys.has("pipeline_ranks") {
        bail!("nothing to show; give the name of a schedule, the file of a run, --model, or --table");
    }
    for (what, name, flag) in
        [("ranks", "pipeline_ranks", "--pipeline-ranks"), ("micro-batches", "micro_batches", "--micro-batches")]
    {
        if !keys.has(name) {
            bail!("the number of {what} is missing; give {flag}");
        }
    }
    // Only the schedule is drawn, so the choice of the model does not matter.
    keys.assign("model", "small");
    let run = keys.unchecked()?;
    let name = run.pipeline.schedule.name().to_owned();
    let mut schedule: Box<dyn Schedule + Send + Sync> = by_name(&name)?;
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let shape = Shape {
        ranks: number(run.mesh.pipeline),
        chunks: number(run.pipeline.chunks),
        micro_batches: number(run.step.micro_batches),
    };
    check_size(&shape)?;
    if let Some(measured) = searched_schedule(arguments, &name, &shape)? {
        schedule = measured;
    } else if arguments.peak.is_some() {
        bail!(
            "--peak has no effect on {name}, whose peak is fixed; leave it out, or use automatic, zb-searched or zbv-searched"
        );
    }
    if arguments.saved.is_some() && !matches!(name.as_str(), "zb-searched" | "zbv-searched") {
        bail!("--saved has no effect on {name}; leave it out, or use zb-searched or zbv-searched");
    }
    if let Some(group) = arguments.micro_batch_group {
        if name != Interleaved::default().name() {
            bail!("--micro-batch-group has no effect on {name}; leave it out, or use interleaved");
        }
        schedule = Box::new(Interleaved { micro_batch_group: Some(group) });
    }
    Ok((name, schedule.table(&shape)?))
}

/// Returns an error if a table of this shape is too large to show. This is called before the table is generated or
/// checked.
fn check_size(shape: &Shape) -> anyhow::Result<()> {
    let &Shape { ranks, chunks, micro_batches } = shape;
    if shape.extent() > MAX_EXTENT {
        bail!(
            "{ranks} ranks × {chunks} chunks × {micro_batches} micro-batches are too many to show: ranks × chunks × (micro-batches \
             + ranks) is at most {MAX_EXTENT}; use fewer"
        );
    }
    Ok(())
}

/// Returns the schedule that computes an order for the given ticks, or `None` if `name` is not the name of such a
/// schedule.
fn searched_schedule(
    arguments: &Arguments,
    name: &str,
    shape: &Shape,
) -> anyhow::Result<Option<Box<dyn Schedule + Send + Sync>>> {
    // In a V, the path of the stages turns back after every chunk. So the last stage is on the first rank only if the
    // number of chunks is even.
    let placement = if shape.chunks.is_multiple_of(2) { Placement::V } else { Placement::Loop };
    let (peak, saved) = (arguments.peak, arguments.saved.unwrap_or_default());
    let costs = || arguments.durations.costs(shape.ranks * shape.chunks);
    Ok(match name {
        "automatic" => Some(Box::new(Automatic { costs: costs()?, peak, placement })),
        "zb-searched" => Some(Box::new(SearchedZb { costs: costs()?, peak, saved })),
        "zbv-searched" => Some(Box::new(SearchedZbv { costs: costs()?, peak, saved })),
        _ => None,
    })
}

fn saved(text: &str) -> anyhow::Result<Saved> {
    let (input, weight) = text.split_once(',').context("not two numbers separated by a comma, like 82,32")?;
    Ok(Saved { for_input: input.trim().parse()?, for_weight: weight.trim().parse()? })
}

/// The number of ranks, stages and micro-batches of a table.
struct Extent {
    ranks: usize,
    stages: u32,
    micro_batches: u32,
}

impl Extent {
    fn of(table: &[Vec<Cell>]) -> anyhow::Result<Self> {
        let actions = || table.iter().flatten().flat_map(Cell::actions);
        let (Some(stage), Some(micro_batch)) =
            (actions().map(|action| action.stage.0).max(), actions().map(|action| action.micro_batch.0).max())
        else {
            bail!("the table has no actions");
        };
        let (stages, micro_batches) = (u128::from(stage) + 1, u128::from(micro_batch) + 1);
        // Without this check, a mistyped number in a cell would lead to a very long list of missing actions.
        let count = actions().count() as u128;
        if stages * micro_batches > 2 * count + 64 {
            bail!(
                "{count} actions cannot reach stage {stage} and micro-batch {micro_batch}; correct the number that is mistyped"
            );
        }
        let (ranks, work) = (table.len(), stages * (micro_batches + table.len() as u128));
        if work > MAX_EXTENT {
            bail!(
                "{ranks} ranks, {stages} stages and {micro_batches} micro-batches are too many to show: stages × (micro-batches + \
                 ranks) is at most {MAX_EXTENT}; show a part of the table"
            );
        }
        Ok(Self { ranks, stages: stages as u32, micro_batches: micro_batches as u32 })
    }
}

impl Lowering {
    fn lower(&self, mut table: Vec<Vec<Cell>>) -> anyhow::Result<Vec<Vec<Cell>>> {
        if self.merge_backwards {
            table = merge_backwards(&table);
        }
        if self.reduce_gradients {
            table = reduce_gradients(&table);
        }
        if self.update_weights {
            table = update_weights(&table);
        }
        if let Some(stages) = self.fetch_weights {
            table = fetch_weights(&table, stages);
        }
        if self.communicate {
            table = communicate(&table, if self.wait_early { Waits::NextSend } else { Waits::Late })?;
        }
        Ok(table)
    }
}

impl Durations {
    fn costs(&self, stages: u32) -> anyhow::Result<Vec<Costs>> {
        let lists = [
            ("--forward", &self.forward),
            ("--backward-input", &self.backward_input),
            ("--backward-weight", &self.backward_weight),
            ("--overlapped", &self.overlapped),
            ("--transfer", &self.transfer),
        ];
        for (flag, list) in lists {
            if list.len() > 1 && list.len() != stages as usize {
                bail!("{flag} has {} numbers for {stages} stages; give one for all, or one for each", list.len());
            }
        }
        let of_stage = |stage: usize| {
            let for_stage = |list: &[u32]| list.get(stage).or(list.first()).copied().map(u64::from);
            let [forward, backward_input, backward_weight, overlapped, transfer] =
                lists.map(|(_, list)| for_stage(list));
            let [forward, backward_input, backward_weight, transfer] =
                [forward, backward_input, backward_weight, transfer].map(Option::unwrap_or_default);
            let overlapped = overlapped.unwrap_or(forward + backward_input + backward_weight);
            Costs { forward, backward_input, backward_weight, overlapped, transfer }
        };
        Ok((0..stages as usize).map(of_stage).collect())
    }
}

fn has_messages(table: &[Vec<Cell>]) -> bool {
    table.iter().flatten().any(|cell| matches!(cell, Cell::Communicate(message) if message.micro_batch.is_some()))
}

fn json(
    (title, unit, origin): (&str, &str, &Origin),
    extent: &Extent,
    table: &[Vec<Cell>],
    timeline: &Timeline,
) -> String {
    let spans = timeline.ranks.iter().map(|spans| {
        let span = |span: &gapless_parallel::Span| {
            serde_json::json!({"cell": span.cell.to_string(), "start": span.start, "end": span.end})
        };
        spans.iter().map(span).collect::<Vec<_>>()
    });
    let table: Vec<Vec<String>> = table.iter().map(|row| row.iter().map(Cell::to_string).collect()).collect();
    let mut json = serde_json::json!({
        "version": origin.version,
        "commit": origin.commit,
        "name": title,
        "unit": unit,
        "ranks": extent.ranks,
        "stages": extent.stages,
        "micro_batches": extent.micro_batches,
        "table": table,
        "spans": spans.collect::<Vec<_>>(),
        "makespan": timeline.makespan(),
        "bubble": (0..extent.ranks).map(|rank| timeline.bubble(rank)).collect::<Vec<_>>(),
        "bubble_share": timeline.bubble_share(),
        "peak": (0..extent.ranks).map(|rank| timeline.peak(rank)).collect::<Vec<_>>(),
    });
    if let Some(step) = &origin.step {
        json["step"] = step.as_str().into();
    }
    json.to_string()
}

fn text(title: &str, extent: &Extent, timeline: &Timeline, width: usize, unit: &str) -> String {
    let &Extent { ranks, stages, micro_batches } = extent;
    let gantt = timeline.gantt_folded(if width == 0 { usize::MAX } else { width });
    let (makespan, share) = (timeline.makespan(), 100.0 * timeline.bubble_share());
    let [busy, idle] = ["busy", "idle"].map(|state| format!("{state} {unit}"));
    let mut text = format!(
        "{title}: {ranks} rank(s), {stages} stage(s), {micro_batches} micro-batch(es)\n\n{gantt}\n\
         makespan {makespan} {unit}, bubble {share:.1} %\n\n rank  {busy:>10}  {idle:>10}  peak activations\n"
    );
    for rank in 0..ranks {
        let (idle, peak) = (timeline.bubble(rank), timeline.peak(rank));
        text += &format!("{rank:5}  {:10}  {idle:10}  {peak:16}\n", makespan - idle);
    }
    text + "\nAn activation is what one stage keeps of one micro-batch.\n"
}
