//! `gapless plan FILE`: plans a table of buffers.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum;
use gapless::step::Origin;
use gapless_alloc::csv::{self, Table};
use gapless_alloc::draw::MemoryMap;
use gapless_alloc::{
    Deadline, Explanation, Fit, Label, Options, Problem, Proof, Role, Solution, StopReason, check, explain, plan,
    plan_hash,
};

use super::{Arguments, draw};
use crate::output::{print, replace, tell};

/// The use of a table's offset column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Offsets {
    /// Keep every offset
    Pin,
    /// Keep offsets where that does not make the plan larger
    Keep,
    /// Ignore all offsets
    Ignore,
}

/// Plans the table in a file.
pub fn place(arguments: &Arguments, file: &Path) -> anyhow::Result<Fit> {
    let cannot = || format!("cannot read {}", file.display());
    let input = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let table = csv::read(BufReader::new(input)).with_context(cannot)?;
    place_table(arguments, &table, &file.display().to_string(), Options::DEFAULT_WORK)
}

/// Plans a table with at most `work` work; `name` is its name in messages.
pub fn place_table(arguments: &Arguments, table: &Table, name: &str, work: u64) -> anyhow::Result<Fit> {
    let deadline = Deadline::after(arguments.deadline);
    let problem = match arguments.offsets {
        Offsets::Pin if table.offsets.is_some() => {
            Cow::Owned(table.pinned().with_context(|| format!("cannot read {name}"))?)
        }
        _ => Cow::Borrowed(&table.problem),
    };
    tell_what_it_means(table, &problem);
    let options = Options { capacity: arguments.capacity, deadline: deadline.left(), work, ..Options::default() };
    let start = Instant::now();
    let warm_start = preferred(table, arguments.offsets);
    let solution = plan(&problem, &Options { warm_start, ..options.clone() });
    let plan_ms = start.elapsed().as_secs_f64() * 1e3;
    if solution.offsets.len() != problem.len() {
        bail!("no plan was found below 2^64 bytes; use smaller sizes or alignments, or fewer pinned offsets");
    }
    if let Err(violations) = check(&problem, &solution.offsets, None) {
        panic!("the planner made a plan that the checker rejects: {violations:?}");
    }
    if let Some(out) = &arguments.out {
        replace(out, |out| table.write(out, Some(&solution.offsets)).map_err(io::Error::other))
            .with_context(|| format!("cannot write {}", out.display()))?;
    }
    if let Some(path) = &arguments.draw {
        let labels: Vec<Label> = table.ids.iter().map(|id| label(id)).collect();
        let title = path.file_stem().map_or_else(|| "plan".into(), |stem| stem.to_string_lossy());
        draw(path, &MemoryMap::new(&title, &problem, &solution.offsets, &labels)?)?;
    }
    let verdict = Verdict::new(table, &solution, arguments.capacity);
    report(arguments, &problem, &solution, &verdict, plan_ms)?;
    if verdict.fit != Fit::Fits {
        let why = explain(&problem, &[], &solution, &Options { deadline: deadline.left(), ..options });
        if !table.gaps.is_empty() {
            tell("the following explanation ignores the gaps of buffers");
        }
        tell_why(&verdict, why.map(|why| why.named(|id| table.ids[id.index()].clone())));
    }
    Ok(verdict.fit)
}

/// Returns the offsets of the table that are kept if this does not raise the height of the plan.
fn preferred(table: &Table, offsets: Offsets) -> Option<Vec<Option<u64>>> {
    let kept = table.offsets.as_ref().filter(|_| offsets == Offsets::Keep);
    match (kept, &table.hints) {
        (Some(kept), Some(hints)) => Some(kept.iter().zip(hints).map(|(kept, hint)| kept.or(*hint)).collect()),
        (kept, hints) => kept.or(hints.as_ref()).cloned(),
    }
}

/// Prints how the table's fixed offsets (pins) and gaps affect its plan.
fn tell_what_it_means(table: &Table, problem: &Problem) {
    let pins = problem.buffers().iter().filter(|b| b.offset.is_some()).count();
    if pins > 0 {
        let buffers = problem.len();
        tell(format_args!(
            "{pins} of {buffers} buffers are pinned by their offset; --offsets keep or ignore frees them"
        ));
    }
    if !table.gaps.is_empty() {
        tell("gaps are ignored: every buffer keeps its bytes for its whole lifetime, so a lower plan may exist");
    }
}

/// The result for the table as given. The planner ignores gaps. So if the table has gaps, statements that gaps could
/// make false are replaced by weaker statements.
struct Verdict {
    lower_bound: u64,
    proof: &'static str,
    fit: Fit,
    /// Height of the plan divided by its lower bound.
    gap: f64,
    stop_reason: StopReason,
}

impl Verdict {
    fn new(table: &Table, solution: &Solution, capacity: Option<u64>) -> Self {
        let &Solution { height, lower_bound, proof, fit, stop_reason, .. } = solution;
        if table.gaps.is_empty() {
            return Self { lower_bound, proof: proof.name(), fit, gap: solution.gap(), stop_reason };
        }
        let bound = table.lower_bound();
        let proof = if height <= bound { Proof::MaxLive } else { Proof::None { bound } };
        let fit = match (fit, capacity) {
            (Fit::Impossible, Some(capacity)) if capacity >= bound => Fit::Unknown,
            (fit, _) => fit,
        };
        let gap = if bound == 0 { 1.0 } else { height as f64 / bound as f64 };
        let stop_reason = match (stop_reason, proof, fit) {
            (StopReason::Proven, Proof::None { .. }, _) | (StopReason::Impossible, _, Fit::Unknown) => {
                StopReason::Exhausted
            }
            _ => stop_reason,
        };
        Self { lower_bound: bound, proof: proof.name(), fit, gap, stop_reason }
    }
}

/// Returns the label of a buffer. It has only the buffer's id, because a table has no other names.
fn label(id: &str) -> Label {
    Label { tensor: id.to_owned(), op: String::new(), layer: String::new(), role: Role::Activation }
}

fn report(
    arguments: &Arguments,
    problem: &Problem,
    solution: &Solution,
    verdict: &Verdict,
    plan_ms: f64,
) -> anyhow::Result<()> {
    let &Verdict { lower_bound, proof, fit, gap, stop_reason } = verdict;
    let (buffers, height) = (solution.offsets.len(), solution.height);
    let (stop_reason, stopped) = stopped(stop_reason);
    if arguments.json {
        let Origin { version, commit, .. } = Origin::new(None);
        let mut json = serde_json::json!({
            "version": version,
            "commit": commit,
            "plan_hash": plan_hash(problem, &solution.offsets).to_string(),
            "buffers": buffers,
            "lower_bound": lower_bound,
            "height": height,
            "gap": gap,
            "proof": proof,
            "plan_ms": plan_ms,
            "stop_reason": stop_reason,
        });
        if arguments.capacity.is_some() {
            json["fit"] = match fit {
                Fit::Fits => "fits",
                Fit::Impossible => "impossible",
                Fit::Unknown => "unknown",
            }
            .into();
        }
        return print(|out| writeln!(out, "{json}"));
    }
    print(|out| {
        writeln!(out, "{buffers} buffers in {height} bytes, {gap:.4} × the lower bound ({lower_bound})")?;
        writeln!(out, "proof: {proof}; planned in {plan_ms:.1} ms, {stopped}")
    })
}

/// Returns the reason why planning stopped, as a word for JSON and as a phrase for people.
fn stopped(reason: StopReason) -> (&'static str, &'static str) {
    match reason {
        StopReason::Proven => ("proven", "stopped when proven optimal"),
        StopReason::Fits => ("fits", "stopped when it fitted"),
        StopReason::Impossible => ("impossible", "stopped when proven not to fit"),
        StopReason::Exhausted => ("exhausted", "stopped when nothing was left to try"),
        StopReason::Work => ("work", "stopped when all work was spent"),
        StopReason::Deadline => ("deadline", "stopped by the deadline"),
    }
}

fn tell_why(verdict: &Verdict, why: Option<Explanation>) {
    let late = match verdict.stop_reason {
        StopReason::Deadline => "; the deadline passed, so more time may help",
        _ => "",
    };
    match verdict.fit {
        Fit::Impossible => tell("does not fit: no plan does"),
        _ => tell(format_args!("does not fit: this plan does not, but a smaller one may exist{late}")),
    }
    if let Some(why) = why {
        tell(why.to_string().trim_end());
    }
}
