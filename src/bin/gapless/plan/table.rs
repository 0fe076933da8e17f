//! `gapless plan FILE`: plans a table of buffers.

use std::borrow::Cow;
use std::io;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum;
use gapless::step::Origin;
use gapless_alloc::csv::{self, Table};
use gapless_alloc::draw::MemoryMap;
use gapless_alloc::{
    BufferId, Deadline, Explanation, Fit, Label, Options, Problem, Role, Solution, StopReason, check, explain, plan,
    plan_hash,
};

use super::{Arguments, draw};
use crate::input::open;
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

/// Plans the table in a file, which may be gzipped.
pub fn place(arguments: &Arguments, file: &Path) -> anyhow::Result<Fit> {
    let table = csv::read(open(file)?).with_context(|| format!("cannot read {}", file.display()))?;
    let work = arguments.work.unwrap_or(Options::DEFAULT_WORK);
    place_table(arguments, &table, &file.display().to_string(), work)
}

/// Plans a table with at most `work` work; `name` is its name in messages.
pub fn place_table(arguments: &Arguments, table: &Table, name: &str, work: u64) -> anyhow::Result<Fit> {
    let deadline = Deadline::after(arguments.deadline);
    let pinned = arguments.offsets == Offsets::Pin && table.offsets.is_some();
    let cannot = || format!("cannot read {name}");
    let pieces = match table.gaps.is_empty() {
        true => None,
        false => Some(table.pieces(pinned).with_context(cannot)?),
    };
    let problem = match &pieces {
        Some(pieces) => Cow::Borrowed(&pieces.problem),
        None if pinned => Cow::Owned(table.pinned().with_context(cannot)?),
        None => Cow::Borrowed(&table.problem),
    };
    if pinned {
        let (pins, buffers) = (table.offsets.iter().flatten().flatten().count(), table.ids.len());
        if pins > 0 {
            tell(format_args!(
                "{pins} of {buffers} buffers are pinned by their offset; --offsets keep or ignore frees them"
            ));
        }
    }
    let options = Options { capacity: arguments.capacity, deadline: deadline.left(), work, ..Options::default() };
    let start = Instant::now();
    let warm_start = preferred(table, arguments.offsets).map(|earlier| match &pieces {
        Some(pieces) => pieces.spread(&earlier, |at, distance| (*at)?.checked_add(distance)),
        None => earlier,
    });
    let solution = plan(&problem, &Options { warm_start, ..options.clone() });
    let plan_ms = start.elapsed().as_secs_f64() * 1e3;
    if solution.offsets.len() != problem.len() {
        bail!("no plan was found below 2^64 bytes; use smaller sizes or alignments, or fewer pinned offsets");
    }
    if let Err(violations) = check(&problem, &solution.offsets, None) {
        panic!("the planner made a plan that the checker rejects: {violations:?}");
    }
    if let Some(out) = &arguments.out {
        let offsets = pieces.as_ref().map_or(&solution.offsets[..], |pieces| pieces.offsets(&solution.offsets));
        replace(out, |out| table.write(out, Some(offsets)).map_err(io::Error::other))
            .with_context(|| format!("cannot write {}", out.display()))?;
    }
    if let Some(path) = &arguments.draw {
        let labels: Vec<Label> = table.ids.iter().map(|id| label(id)).collect();
        let labels = match &pieces {
            Some(pieces) => pieces.spread(&labels, |label, _| label.clone()),
            None => labels,
        };
        let title = path.file_stem().map_or_else(|| "plan".into(), |stem| stem.to_string_lossy());
        draw(path, &MemoryMap::new(&title, &problem, &solution.offsets, &labels)?)?;
    }
    report(arguments, table, &problem, &solution, plan_ms)?;
    if solution.fit != Fit::Fits {
        let why = explain(&problem, &[], &solution, &Options { deadline: deadline.left(), ..options });
        let name = |id: BufferId| match &pieces {
            Some(pieces) if pieces.origin(id) != id => {
                let ticks = &problem.buffer(id).lifetime;
                format!("{} in ticks {} to {}", table.ids[pieces.origin(id).index()], ticks.start, ticks.end)
            }
            _ => table.ids[id.index()].clone(),
        };
        let why = why.map(|why| why.named(name)).map(|why| if pieces.is_some() { why.of_pieces() } else { why });
        tell_why(&solution, why);
    }
    Ok(solution.fit)
}

/// Returns the offsets of the table that are kept if this does not raise the height of the plan.
fn preferred(table: &Table, offsets: Offsets) -> Option<Vec<Option<u64>>> {
    let kept = table.offsets.as_ref().filter(|_| offsets == Offsets::Keep);
    match (kept, &table.hints) {
        (Some(kept), Some(hints)) => Some(kept.iter().zip(hints).map(|(kept, hint)| kept.or(*hint)).collect()),
        (kept, hints) => kept.or(hints.as_ref()).cloned(),
    }
}

/// Returns the label of a buffer. It has only the buffer's id, because a table has no other names.
fn label(id: &str) -> Label {
    Label { tensor: id.to_owned(), op: String::new(), layer: String::new(), role: Role::Activation }
}

fn report(
    arguments: &Arguments,
    table: &Table,
    problem: &Problem,
    solution: &Solution,
    plan_ms: f64,
) -> anyhow::Result<()> {
    let &Solution { height, lower_bound, proof, fit, .. } = solution;
    let (buffers, gap, bound, bound_gap) = (table.ids.len(), solution.gap(), solution.bound(), solution.bound_gap());
    let (stop_reason, stopped) = stopped(solution.stop_reason);
    if arguments.json {
        let Origin { version, commit, .. } = Origin::new(None);
        let mut json = serde_json::json!({
            "version": version,
            "commit": commit,
            "plan_hash": plan_hash(problem, &solution.offsets).to_string(),
            "buffers": buffers,
            "lower_bound": lower_bound,
            "bound": bound,
            "height": height,
            "gap": gap,
            "bound_gap": bound_gap,
            "proof": proof.name(),
            "work": solution.stats.work,
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
        match bound == lower_bound {
            true => writeln!(out, "{buffers} buffers in {height} bytes, {gap:.4} × the lower bound ({lower_bound})")?,
            false => writeln!(
                out,
                "{buffers} buffers in {height} bytes, {bound_gap:.4} × the best proven bound ({bound}), {gap:.4} × the most alive ({lower_bound})"
            )?,
        }
        writeln!(out, "proof: {}; planned in {plan_ms:.1} ms, {stopped}", proof.name())
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

fn tell_why(solution: &Solution, why: Option<Explanation>) {
    let late = match solution.stop_reason {
        StopReason::Deadline => "; the deadline passed, so more time may help",
        _ => "",
    };
    match solution.fit {
        Fit::Impossible => tell("does not fit: no plan does"),
        _ => tell(format_args!("does not fit: this plan does not, but a smaller one may exist{late}")),
    }
    if let Some(why) = why {
        tell(why.to_string().trim_end());
    }
}
