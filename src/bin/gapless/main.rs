//! The `gapless` program: one subcommand, one module.

mod compare;
mod eval;
mod export;
mod init;
mod input;
mod limits;
mod merge;
mod output;
mod plan;
mod report;
mod sample;
mod schedule;
mod step;
mod sweep;
mod trace;
mod train;
mod weights;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// An LLM training engine whose memory has no gaps.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Compare(Box<compare::Arguments>),
    Eval(Box<eval::Arguments>),
    Export(export::Arguments),
    Init(init::Arguments),
    Merge(merge::Arguments),
    Plan(Box<plan::Arguments>),
    Report(report::Arguments),
    Sample(Box<sample::Arguments>),
    Schedule(Box<schedule::Arguments>),
    Sweep(sweep::Arguments),
    Train(train::Arguments),
}

fn main() -> ExitCode {
    let command = match Cli::from_arg_matches(&command().get_matches()) {
        Ok(cli) => cli.command,
        Err(error) => error.exit(),
    };
    if let Err(error) = limits::prepare() {
        output::tell_error("gapless", &error);
        return ExitCode::FAILURE;
    }
    match command {
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Init(arguments) => init::run(&arguments),
        Command::Merge(arguments) => merge::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Sample(arguments) => sample::run(&arguments),
        Command::Schedule(arguments) => schedule::run(&arguments),
        Command::Sweep(arguments) => sweep::run(&arguments),
        Command::Train(arguments) => train::run(&arguments),
    }
}

/// Returns the command line. `--ranks` is short for `--pipeline-ranks` where a command shows the ranks of a pipeline. In
/// `plan`, it is the number of all ranks.
fn command() -> clap::Command {
    ["compare", "schedule"].into_iter().fold(Cli::command(), |cli, name| {
        cli.mut_subcommand(name, |command| command.mut_arg("pipeline_ranks", |arg| arg.visible_alias("ranks")))
    })
}
