//! `gapless sweep SPEC.toml`: compares many training steps by bytes and time.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::available_parallelism;

use gapless::run::Stop;
use gapless::sweep::{Gain, Progress, Results, Row, Status, Sweep, UnusedReserve};
use gapless::sweep::{above_bound, fragmentation, gains, of_other_commits, run as sweep, unused_reserve};
use gapless_alloc::draw::Bytes;
use indicatif::{ProgressBar, ProgressStyle};

use crate::limits;
use crate::output::{print, tell};
use crate::step::assigned_table;

/// Plan all combinations of lists of values for a training step's keys: bytes under the plan and other allocators, and time.
///
/// The file has [step], [vary] and [sweep] (docs/sweep.md); results.jsonl, results.csv and report.html are written to the folder. If
/// interrupted, the same command continues. Exit code: 0 if all is done, 1 if the folder cannot be used, 2 if the file is not a valid
/// sweep, 3 if no configuration fits, 128 + n after signal n.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The sweep file.
    spec: PathBuf,
    /// The folder for the results.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Set a key of all configurations, e.g. estimate.expert_load=worst; can be given several times.
    #[arg(long, value_name = "KEY=VALUE", allow_hyphen_values = true)]
    set: Vec<String>,
    /// A table of your own as the schedule of all configurations: PyTorch's CSV, one row per rank; as --set pipeline.schedule=FILE.csv.
    #[arg(long, value_name = "FILE.csv")]
    table: Option<PathBuf>,
    /// Worker threads; all cores by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    let fail = |error: &dyn std::fmt::Display, code| {
        tell(format_args!("gapless sweep: {error}"));
        ExitCode::from(code)
    };
    let table = arguments.table.as_deref().map(assigned_table).transpose();
    let spec = table.and_then(|table| {
        let set: Vec<String> = arguments.set.iter().cloned().chain(table).collect();
        Ok(Sweep::read(&arguments.spec, &set)?)
    });
    let spec = match spec {
        Ok(spec) => spec,
        Err(error) => return fail(&error, 2),
    };
    spec.notices.iter().for_each(tell);
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, 1),
    };
    let bar = progress_bar(spec.configurations.len() as u64);
    let wanted = arguments.threads.map(usize::from);
    let wanted = wanted.or_else(|| available_parallelism().ok().map(usize::from)).unwrap_or(1);
    let threads = match limits::threads(wanted) {
        Ok(threads) => threads,
        Err(error) => return fail(&error, 1),
    };
    let mut told = None;
    let show = |progress: Progress| {
        let Progress { estimated, finished, total } = progress;
        bar.set_position(finished as u64);
        bar.set_message(if estimated < total { format!("estimated {estimated}") } else { String::new() });
        // Without a terminal, the first row is reported, and then every tenth of each phase.
        let tenths = [estimated, finished].map(|count| 10 * count / total.max(1));
        if bar.is_hidden() && told.replace(tenths) != Some(tenths) {
            tell(format_args!("{estimated} of {total} configurations are estimated, {finished} are finished"));
        }
        if stop.signal().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let results = sweep(&spec, &arguments.out, threads, show);
    bar.finish_and_clear();
    match (results, stop.signal()) {
        (Err(error), _) => fail(&error, 1),
        (Ok(None), signal) => {
            tell("gapless sweep: stopped; the same command continues from here");
            ExitCode::from(128 + signal.unwrap_or(0))
        }
        (Ok(Some(results)), _) => match summary(&spec, &results, arguments) {
            Ok(()) if results.rows.iter().any(|row| row.status == Status::Fits) => ExitCode::SUCCESS,
            Ok(()) => {
                tell(format_args!("gapless sweep: no configuration fits{}", usual_reason(&results.rows)));
                ExitCode::from(3)
            }
            Err(error) => fail(&format_args!("{error:#}"), 1),
        },
    }
}

/// Returns the most frequent reason why configurations are invalid or over their budget, as the end of a sentence.
fn usual_reason(rows: &[Row]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for why in rows.iter().filter_map(|row| row.why.as_deref()) {
        *counts.entry(why).or_default() += 1;
    }
    match counts.into_iter().max_by_key(|&(_, count)| count) {
        Some((why, count)) => format!("; the reason of {count} of {}: {why}", rows.len()),
        None => "; give the step more ranks, more recomputation or a larger device".to_owned(),
    }
}

/// Says how much less or more plans waste ([`gapless::sweep::Fragmentation::reduction`]).
fn difference(reduction: f64) -> String {
    match reduction < 0.0 {
        true => format!("of which the allocator saves {:.1} %", -100.0 * reduction),
        false => format!("{:.1} % less", 100.0 * reduction),
    }
}

/// Returns a mean gain as `1.7 % faster` or `1.7 % slower`.
fn faster(gain: f64) -> String {
    format!("{:.1} % {}", 100.0 * gain.abs(), if gain < 0.0 { "slower" } else { "faster" })
}

/// Says how much faster plans are than an allocator. Averages are left out if no budget fits both.
fn speedup(gain: &Gain) -> String {
    let Gain { allocator, menu, budgets, without, only_planned, only_allocator, mean, most, .. } = gain;
    let mut parts = Vec::new();
    if *budgets > 0 {
        parts.push(format!(
            "plans are {} on average over {budgets} budgets ({without} without a gain), {:.1} % at most",
            faster(*mean),
            100.0 * most
        ));
    }
    parts.push(format!("{only_planned} budgets where only plans fit, {only_allocator} where only the allocator fits"));
    if let (Some(mean), Some(budgets)) = (gain.mean_with_reserve, gain.budgets_with_reserve) {
        parts.push(format!(
            "if the reserve for other rows must fit too, {} on average over {budgets} budgets",
            faster(mean)
        ));
    }
    format!("{allocator}, menu {menu}: {}", parts.join("; "))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn progress_bar(rows: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} {wide_bar} {msg} ETA {eta}").expect("the template is sound");
    ProgressBar::new(rows).with_style(style)
}

fn summary(spec: &Sweep, results: &Results, arguments: &Arguments) -> anyhow::Result<()> {
    let Results { rows, reused, changed, .. } = results;
    if *changed > 0 {
        tell(format_args!(
            "gapless sweep: {changed} rows of results.jsonl were edited or written by another version; they were dropped, and planned again if this sweep has them"
        ));
    }
    match of_other_commits(rows) {
        0 => {}
        others => tell(format_args!(
            "gapless sweep: {others} of {} rows are of other commits; results.csv names the commit of each. Use another folder to compute all with this build",
            rows.len()
        )),
    }
    let count = |status| rows.iter().filter(|row| row.status == status).count();
    let best =
        rows.iter().filter(|row| row.status == Status::Fits).filter_map(|row| Some((row, row.figures.as_ref()?)));
    let best = best.max_by(|(_, a), (_, b)| a.tokens_per_second.total_cmp(&b.tokens_per_second));
    print(|out| {
        writeln!(
            out,
            "{} configurations ({reused} from an earlier run): {} fit, {} are dominated, {} are too large, {} exceed their budget, {} are invalid",
            rows.len(),
            count(Status::Fits),
            count(Status::Dominated),
            count(Status::TooLarge),
            count(Status::OverBudget),
            count(Status::Invalid)
        )?;
        if let Some((row, figures)) = best {
            let values: Vec<String> = row.configuration.iter().map(|(key, value)| format!("{key} = {value}")).collect();
            let (ms, arena) = (figures.nanoseconds as f64 / 1e6, Bytes(figures.arena().unwrap_or(0)));
            writeln!(out, "fastest that fits: {ms:.1} ms in {arena}: {}", values.join(", "))?;
        }
        allocators(out, spec, results)?;
        writeln!(out, "{}", arguments.out.join("report.html").display())
    })
}

/// Prints how much each allocator wastes, and how much throughput plans gain over the allocator. Then prints the plans
/// that exceed their lower bound.
fn allocators(out: &mut dyn std::io::Write, spec: &Sweep, results: &Results) -> std::io::Result<()> {
    let Results { rows, throughput, .. } = results;
    let programs = match spec.replays_eager() {
        true => " (plans of gapless's own step, the allocator on the eager one)",
        false => "",
    };
    for waste in fragmentation(spec, rows) {
        writeln!(
            out,
            "{}: fragmentation {:.2} % on average over {} configurations, {:.2} % at most; plans {:.3} %; wasted {:.3} GiB in all, by plans {:.3} GiB, {}{programs}",
            waste.allocator,
            100.0 * waste.mean,
            waste.configurations,
            100.0 * waste.most,
            100.0 * waste.planned,
            gib(waste.wasted_bytes),
            gib(waste.planned_wasted_bytes),
            difference(waste.reduction),
        )?;
    }
    if let Some(UnusedReserve { configurations, mean_bytes, most_bytes, grown }) = unused_reserve(rows) {
        let (mean, most) = (gib(mean_bytes), gib(most_bytes));
        writeln!(
            out,
            "reserved by plans for other rows of experts, and not counted above: {mean:.3} GiB on average over {configurations} configurations, {most:.3} GiB at most; the reserve of {grown} had to grow for these rows"
        )?;
    }
    for gain in gains(spec, throughput) {
        writeln!(out, "{}", speedup(&gain))?;
    }
    let above = above_bound(rows);
    if let Some(largest) = above.iter().filter_map(|row| row.figures.as_ref()?.fragmentation(None)).reduce(f64::max) {
        let planned = rows
            .iter()
            .filter(|row| row.figures.as_ref().is_some_and(|figures| !figures.arena_bytes.is_empty()))
            .count();
        writeln!(
            out,
            "plans above their bound by 0.05 % or more: {} of {planned}, by {:.3} % at most",
            above.len(),
            100.0 * largest
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_no_negative_gain() {
        let gain = Gain {
            allocator: "stalloc",
            menu: "all".to_owned(),
            budgets: 3,
            without: 2,
            only_planned: 1,
            only_allocator: 0,
            mean: -0.017,
            most: 0.25,
            most_at: 1 << 30,
            mean_with_reserve: Some(0.002),
            budgets_with_reserve: Some(2),
        };
        assert_eq!(
            speedup(&gain),
            "stalloc, menu all: plans are 1.7 % slower on average over 3 budgets (2 without a gain), 25.0 % at most; 1 budgets where only \
             plans fit, 0 where only the allocator fits; if the reserve for other rows must fit too, 0.2 % faster on average over 2 budgets"
        );
        let nothing = Gain { budgets: 0, mean: 0.0, most: 0.0, mean_with_reserve: None, ..gain };
        assert_eq!(
            speedup(&nothing),
            "stalloc, menu all: 1 budgets where only plans fit, 0 where only the allocator fits"
        );
    }
}
