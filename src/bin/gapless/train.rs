//! `gapless train RUN.toml`: executes a whole run.

use std::fmt::Debug;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use gapless::TrainError;
use gapless::engine::checkpoint::CheckpointError;
use gapless::engine::data::DataError;
use gapless::run::{Console, Ended, Progress, RunConfig, RunError, Start, train};
use indicatif::{ProgressBar, ProgressStyle};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets, filter_fn};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::{Layer, util::SubscriberInitExt};

use crate::output::tell;
use crate::trace::{MAX_BYTES, Trace};

/// Train a model as a run file describes (`gapless init` prints one to start from).
#[derive(clap::Args)]
pub struct Arguments {
    /// The run file
    config: PathBuf,
    /// Set a key of the run, e.g. step.batch=16 (docs/run_file.md lists the keys); can be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    assignments: Vec<String>,
    /// The folder of the run; by default runs/ and the name of the run file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Resume from the newest checkpoint in the folder
    #[arg(long)]
    resume: bool,
    /// Start from a checkpoint of another run, or the newest in its folder, in a new folder
    #[arg(long, value_name = "FOLDER", conflicts_with = "resume")]
    fork: Option<PathBuf>,
    /// Write a trace of where the time goes, for chrome://tracing or Perfetto; it ends at 256 MiB
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

/// Runs the command. The exit code is 0 if the run is complete, 1 if an error ended it, and 2 if it was refused before
/// anything was written. It is 3 if the time limit ended the run, and 128 + n if signal n ended it; in these two cases,
/// a checkpoint was saved.
pub fn run(arguments: &Arguments) -> ExitCode {
    let console = Console::default();
    let config = match RunConfig::read(&arguments.config, &arguments.assignments) {
        Ok(config) => config,
        Err(error) => {
            tell(format_args!("gapless train: {error}"));
            return ExitCode::from(2);
        }
    };
    config.notices.iter().for_each(tell);
    let trace = match start_tracing(&console, arguments.trace.as_deref()) {
        Ok(trace) => trace,
        Err(error) => {
            tell(format_args!("gapless train: {error}"));
            return ExitCode::from(2);
        }
    };
    let code = run_traced(arguments, &config, console);
    match arguments.trace.as_deref().zip(trace.map(|trace| trace.finish())) {
        Some((path, Err(error))) => {
            tell(format_args!("gapless train: the trace {} is incomplete: {error}", path.display()));
            if code == ExitCode::SUCCESS { ExitCode::FAILURE } else { code }
        }
        Some((path, Ok(left_out @ 1..))) => {
            tell(format_args!(
                "the trace {} is full at {} MiB: {left_out} later spans are not in it; trace fewer steps",
                path.display(),
                MAX_BYTES >> 20
            ));
            code
        }
        _ => code,
    }
}

/// Executes the run, and reports how it ended.
fn run_traced(arguments: &Arguments, config: &RunConfig, mut console: Console) -> ExitCode {
    let name = arguments.config.file_stem().unwrap_or_default();
    let out = arguments.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(name));
    let bar = progress_bar();
    let show = |progress: Progress| {
        let Progress { done, steps, loss, learning_rate, tokens_per_second, left } = progress;
        let left = if done == steps { String::new() } else { format!(", {} left", in_words(left)) };
        let line = format!("loss {loss:.4} lr {learning_rate:.1e} {tokens_per_second:.0} tokens/s{left}");
        if bar.is_hidden() && (done % 10 == 0 || done == steps) {
            tell(format_args!("step {done} of {steps} {line}"));
        }
        bar.set_length(steps);
        bar.set_position(done);
        bar.set_message(line);
    };
    let start = match &arguments.fork {
        Some(from) => Start::Fork(from.clone()),
        None if arguments.resume => Start::Resume,
        None => Start::Anew,
    };
    let summary = match train(config, &out, &start, &mut console, show) {
        Ok(summary) => summary,
        Err(error) => {
            bar.finish_and_clear();
            tell(format_args!("gapless train: {error}"));
            return ExitCode::from(if is_refused(&error) { 2 } else { 1 });
        }
    };
    bar.finish_and_clear();
    console.say(format_args!("{summary}\nall results are in {}", out.display()));
    match (summary.signal, console.finish()) {
        (Some(signal), _) => {
            tell(format_args!("stopped by signal {signal}; --resume continues from here"));
            ExitCode::from(128 + signal)
        }
        (None, Ok(())) if summary.ended == Ended::TimeLimit => {
            tell("stopped by max_minutes; --resume continues from here");
            ExitCode::from(3)
        }
        (None, Ok(())) => ExitCode::SUCCESS,
        (None, Err(lost)) => {
            tell(lost);
            ExitCode::FAILURE
        }
    }
}

/// True if the error occurred before anything was written to the folder.
fn is_refused(error: &RunError) -> bool {
    use RunError::{Changed, Checkpoint, Config, Data, NoCheckpointYet, NothingLeft, NothingToResume, Train};
    matches!(
        error,
        Config(_)
            | NothingToResume { .. }
            | NoCheckpointYet { .. }
            | NothingLeft { .. }
            | Changed { .. }
            | Checkpoint(CheckpointError::Foreign { .. } | CheckpointError::Locked { .. })
    ) || matches!(error, Data(error) if !matches!(error, DataError::Read { .. }))
        // Steps are compiled before the folder is claimed.
        || matches!(error, Train(error) if error.refused().is_some() || matches!(**error, TrainError::Compile(_)))
}

/// Sends warnings and the progress of data preparation to the standard error, and spans to the file at `path`, if one
/// is given.
fn start_tracing(console: &Console, path: Option<&Path>) -> Result<Option<Trace>, String> {
    let (errors, is_terminal) = (console.errors(), std::io::stderr().is_terminal());
    let warnings =
        tracing_subscriber::fmt::layer().without_time().with_ansi(is_terminal).with_writer(move || errors.clone());
    // On a terminal, data preparation shows a bar in place of messages.
    let said = Targets::new().with_default(LevelFilter::WARN).with_target("gapless_data", LevelFilter::INFO);
    let said = if is_terminal { said.with_target(DATA_PROGRESS, LevelFilter::OFF) } else { said };
    let shown = Targets::new().with_target(DATA_PROGRESS, LevelFilter::INFO);
    let registry =
        tracing_subscriber::registry().with(warnings.with_filter(said)).with(DataBar::new().with_filter(shown));
    let Some(path) = path else {
        registry.init();
        return Ok(None);
    };
    let trace = Trace::create(path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
    // Spans of other crates are left out, because the tokenizer's training has spans in its inner loops.
    registry.with(trace.clone().with_filter(filter_fn(|metadata| metadata.target().starts_with("gapless")))).init();
    Ok(Some(trace))
}

/// The target of events that report the progress of tokenization.
const DATA_PROGRESS: &str = "gapless_data::progress";

/// A progress bar for the tokenization before the first step.
struct DataBar(ProgressBar);

impl DataBar {
    fn new() -> Self {
        let style = "tokenizing {bytes}/{total_bytes} {wide_bar} {bytes_per_sec} ETA {eta}";
        Self(ProgressBar::new(0).with_style(ProgressStyle::with_template(style).expect("the template is sound")))
    }
}

impl<S: Subscriber> Layer<S> for DataBar {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut BytesOf(&self.0));
        if Some(self.0.position()) == self.0.length() {
            self.0.finish_and_clear();
        }
    }
}

/// Moves a bar to the position that an event reports.
struct BytesOf<'a>(&'a ProgressBar);

impl Visit for BytesOf<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "done" => self.0.set_position(value),
            "all" => self.0.set_length(value),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("step {pos} of {len} {wide_msg}").expect("the template is sound");
    ProgressBar::new(0).with_style(style)
}

/// Formats a time for people: `40 s`, `3 min` or `2 h 5 min`.
fn in_words(time: Duration) -> String {
    let seconds = time.as_secs();
    let minutes = (seconds + 30) / 60;
    match (seconds, minutes) {
        (..90, _) => format!("{seconds} s"),
        (_, ..90) => format!("{minutes} min"),
        _ => format!("{} h {} min", minutes / 60, minutes % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_words() {
        let words = |seconds| in_words(Duration::from_secs(seconds));
        assert_eq!([0, 89, 90, 180].map(words), ["0 s", "89 s", "2 min", "3 min"]);
        assert_eq!([5369, 5370, 7500].map(words), ["89 min", "1 h 30 min", "2 h 5 min"]);
    }
}
