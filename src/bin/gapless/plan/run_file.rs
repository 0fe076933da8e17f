//! `gapless plan RUN.toml`: what a run takes on each of its ranks.

use std::io::Write;
use std::path::Path;

use anyhow::bail;
use gapless::engine::compile::Error as CompileError;
use gapless::run::{RunConfig, RunError};
use gapless::{Report, TrainError};
use gapless_alloc::Fit;

use crate::output::{print, tell, to_json};

/// Whether a file is a run's, by its name.
pub fn is_one(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"))
}

/// Plans every rank of the run, as `gapless train` would.
pub fn plan(arguments: &super::Arguments, file: &Path) -> anyhow::Result<Fit> {
    if arguments.out.is_some() || arguments.draw.is_some() {
        bail!("--out and --draw are for tables and steps; `gapless train` writes plan.csv and memory.html of a run");
    }
    if arguments.capacity.is_some() || arguments.deadline.is_some() {
        bail!("--capacity and --deadline are for tables; a run has a budget: --set memory.budget=600MiB");
    }
    let config = RunConfig::read_without_data(file, &arguments.assignments)?;
    let ranks = match config.plan() {
        Ok(ranks) => ranks,
        Err(RunError::Train(error)) if is_over_budget(&error) => {
            tell(format_args!("gapless plan: {error}"));
            return Ok(Fit::Unknown);
        }
        Err(error) => return Err(error.into()),
    };
    if arguments.json {
        let json = to_json(&ranks)?;
        print(|out| writeln!(out, "{json}"))?;
        return Ok(Fit::Fits);
    }
    match &ranks[..] {
        [one] => print(|out| write!(out, "{one}")),
        all => print(|out| all.iter().enumerate().try_for_each(|(rank, report)| of_rank(out, rank, report))),
    }?;
    Ok(Fit::Fits)
}

fn of_rank(out: &mut dyn Write, rank: usize, report: &Report) -> std::io::Result<()> {
    let gap = if rank == 0 { "" } else { "\n" };
    write!(out, "{gap}rank {rank}: {report}")
}

fn is_over_budget(error: &TrainError) -> bool {
    matches!(error, TrainError::Compile(CompileError::OverBudget { .. }))
}
