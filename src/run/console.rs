//! Output of a run. If a write fails, for example to a closed pipe or a full disk, the run continues. Its exit code
//! then shows that output was lost.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gapless_engine::metrics::{JsonLines, MetricsError};
use serde::Serialize;

use super::{CallbackResult, Event, Stop};

/// Writes lines to the standard output, rows to a file, and warnings to the standard error. Failed writes are counted.
/// The first failure of each output is reported on the standard error, and [`Self::finish`] returns an error with all
/// failures.
#[derive(Debug, Default)]
pub struct Console {
    /// The file of rows, and its path.
    rows: Option<(PathBuf, JsonLines)>,
    errors: ErrorOutput,
    is_silent: bool,
}

impl Console {
    /// Creates a console that writes nothing to the standard output. It is for all ranks but the first, which prints
    /// the messages.
    pub fn silent() -> Self {
        Self { is_silent: true, ..Self::default() }
    }

    /// Also writes rows to a file, as one line of JSON each. The file is replaced, or appended to if `is_appended`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn write_rows(&mut self, path: &Path, is_appended: bool) -> Result<(), MetricsError> {
        let rows = if is_appended { JsonLines::append(path) } else { JsonLines::create(path) }?;
        self.rows = Some((path.to_owned(), rows));
        Ok(())
    }

    /// Also writes all messages and warnings to a log file, including those from before this call. The file is
    /// replaced, or appended to if `is_appended`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn write_log(&self, path: &Path, is_appended: bool) -> io::Result<()> {
        let file = File::options().create(true).write(true).truncate(!is_appended).append(is_appended).open(path)?;
        self.errors.heard().log = Some((path.display().to_string(), file));
        self.errors.log(b"");
        Ok(())
    }

    /// Writes a line to the standard output.
    pub fn say(&self, line: impl Display) {
        if self.is_silent {
            return;
        }
        self.errors.log(format!("{line}\n").as_bytes());
        self.errors.note("the standard output", say_to(&mut io::stdout().lock(), line));
    }

    /// Writes a line to the log only, if [`Self::write_log`] has opened a file.
    pub(super) fn log(&self, line: impl Display) {
        self.errors.log(format!("{line}\n").as_bytes());
    }

    /// Writes a row if [`Self::write_rows`] has opened a file.
    pub fn row(&mut self, row: &impl Serialize) {
        if let Some(Err(MetricsError { path, source })) = self.rows.as_mut().map(|(_, rows)| rows.write(row)) {
            self.errors.note(&path.display().to_string(), Err(source));
        }
    }

    /// Prints an event and writes its row. Of the steps, only every tenth is printed; all other events are printed. A
    /// row is written for each step and each evaluation. The callback of
    /// [`TrainingLoop::run`](super::TrainingLoop::run) can call this method.
    ///
    /// # Errors
    /// Never returns an error: failed writes do not end the training.
    pub fn event(&mut self, event: &Event) -> CallbackResult {
        if !matches!(event, Event::Step { report, .. } if !report.step.is_multiple_of(10)) {
            self.say(event);
        }
        if matches!(event, Event::Step { .. } | Event::Evaluation { .. }) {
            self.row(event);
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Returns a writer to the standard error, for warnings. Writing to it never fails.
    pub fn errors(&self) -> ErrorOutput {
        self.errors.clone()
    }

    /// Returns the exit code of the program. If a signal has stopped the run, this is 128 + the number of the signal.
    /// Otherwise it is 0.
    ///
    /// # Errors
    /// Returns an error if some output could not be written and no signal arrived.
    pub fn exit_code(self, stop: &Stop) -> Result<ExitCode, OutputLost> {
        stop.exit_code().map_or_else(|| self.finish().map(|()| ExitCode::SUCCESS), Ok)
    }

    /// Ends the output of a run, and checks that nothing was lost.
    ///
    /// # Errors
    /// Returns an error if some output could not be written, or if the file of an output has been deleted.
    pub fn finish(self) -> Result<(), OutputLost> {
        let log = self.errors.heard().log.as_ref().map(|(path, _)| PathBuf::from(path));
        for path in self.rows.into_iter().map(|(path, _)| path).chain(log) {
            if let Err(error) = path.symlink_metadata() {
                self.errors.record_failure(&path.display().to_string(), error);
            }
        }
        let lost = std::mem::take(&mut self.errors.heard().lost);
        if lost.is_empty() { Ok(()) } else { Err(OutputLost { lost }) }
    }
}

fn say_to(out: &mut impl Write, line: impl Display) -> io::Result<()> {
    writeln!(out, "{line}")?;
    out.flush()
}

/// A writer to the standard error. It also writes to the log, and counts the failed writes of all outputs.
#[derive(Debug, Clone, Default)]
pub struct ErrorOutput {
    heard: Arc<Mutex<OutputState>>,
}

#[derive(Debug, Default)]
struct OutputState {
    lost: Vec<Lost>,
    /// The log file, and its path.
    log: Option<(String, File)>,
    /// Output from before the log file was opened.
    before: Vec<u8>,
}

/// Maximum number of bytes that are kept for the log before the log file is opened.
const MAX_EARLY_LOG_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Lost {
    output: String,
    error: io::Error,
    count: u64,
}

impl ErrorOutput {
    /// Counts a failed write, and reports the first failure of each output.
    fn note(&self, output: &str, result: io::Result<()>) {
        let Err(error) = result else { return };
        let line = format!("cannot write to {output}: {error}; training continues without it\n");
        if self.record_failure(output, error) {
            self.write_line(line.as_bytes());
        }
    }

    fn heard(&self) -> MutexGuard<'_, OutputState> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds text to the log, without color sequences.
    fn log(&self, said: &[u8]) {
        let mut heard = self.heard();
        let OutputState { log, before, .. } = &mut *heard;
        if before.len() < MAX_EARLY_LOG_BYTES {
            before.extend(plain(said));
        }
        let Some((path, file)) = log else { return };
        let outcome = file.write_all(before).map_err(|error| (path.clone(), error));
        before.clear();
        drop(heard);
        if let Err((path, error)) = outcome {
            self.note(&path, Err(error));
        }
    }

    fn record_failure(&self, output: &str, error: io::Error) -> bool {
        let all = &mut self.heard().lost;
        match all.iter_mut().find(|lost| lost.output == output) {
            Some(lost) => {
                lost.count += 1;
                false
            }
            None => {
                all.push(Lost { output: output.to_owned(), error, count: 1 });
                true
            }
        }
    }

    fn write_line(&self, line: &[u8]) {
        if let Err(error) = io::stderr().write_all(line) {
            self.record_failure("the standard error", error);
        }
    }
}

impl Write for ErrorOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.log(bytes);
        self.write_line(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes color sequences from a text (ECMA-48: ESC, `[`, and everything up to a letter).
fn plain(text: &[u8]) -> impl Iterator<Item = u8> {
    let mut is_inside = false;
    text.iter().copied().filter(move |&byte| {
        let was_inside = is_inside;
        is_inside = byte == 0x1b || is_inside && !byte.is_ascii_alphabetic();
        !was_inside && !is_inside
    })
}

/// Failed writes of a run.
#[derive(Debug)]
pub struct OutputLost {
    lost: Vec<Lost>,
}

impl Display for OutputLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.lost.iter().map(|Lost { output, error, count }| format!("{count} to {output} ({error})"));
        write!(f, "the run is complete, but these writes failed: {}", lost.collect::<Vec<_>>().join(", "))
    }
}

impl std::error::Error for OutputLost {}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/dev/full` exists only on Linux.
    #[cfg(target_os = "linux")]
    #[test]
    fn rows_that_cannot_be_written_are_told_at_the_end() {
        let mut console = Console::default();
        console.write_rows("/dev/full".as_ref(), true).unwrap();
        (0..3).for_each(|step| console.row(&step));
        let error = console.finish().unwrap_err().to_string();
        assert!(error.contains("3 to /dev/full (No space left"), "{error}");
    }

    #[test]
    fn files_that_were_deleted_are_told_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let [rows, log] = ["rows.jsonl", "log.txt"].map(|name| folder.path().join(name));
        let mut console = Console::default();
        console.write_rows(&rows, false).unwrap();
        console.write_log(&log, false).unwrap();
        std::fs::remove_file(&rows).unwrap();
        std::fs::remove_file(&log).unwrap();
        let error = console.finish().unwrap_err().to_string();
        assert!(error.contains("rows.jsonl (No such file") && error.contains("log.txt (No such file"), "{error}");
    }

    #[test]
    fn messages_and_warnings_are_in_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.txt");
        for (is_appended, expected) in [(false, "one\nred\ntwo\n"), (true, "one\nred\ntwo\none\nred\ntwo\n")] {
            let console = Console::default();
            console.say("one");
            writeln!(console.errors(), "\x1b[31mred\x1b[0m").unwrap();
            console.write_log(&path, is_appended).unwrap();
            console.say("two");
            Console::silent().say("nothing");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        }
    }

    #[test]
    fn a_run_that_is_heard_ends_without_an_error() {
        let console = Console::default();
        writeln!(console.errors()).unwrap();
        console.finish().unwrap();
    }
}
