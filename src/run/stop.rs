//! Signals that end a run. The run saves a checkpoint and exits with 128 + the number of the signal, so that the sender
//! can see that the run is incomplete.

use std::io;
#[cfg(unix)]
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
#[cfg(unix)]
use std::time::Duration;

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGXCPU, SIGXFSZ};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::ErrorOutput;

#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGXCPU];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Signals that arrive within this time after the first count as one signal, because `timeout` and cluster schedulers
/// send a signal to both a process and its group.
#[cfg(unix)]
const SAME: Duration = Duration::from_secs(1);

/// Records whether a signal has asked the process to end. The first signal is recorded, and answered by a line. A further signal ends the
/// process at once, unless it arrives within a second after the first.
#[derive(Debug, Clone)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Handles Ctrl-C, SIGTERM, SIGHUP and SIGXCPU (the CPU time limit of `ulimit -t`). Signals that the process was
    /// started to ignore, as by `nohup`, stay ignored. On Unix, the first signal is answered at once by a line on the
    /// standard error.
    ///
    /// # Errors
    /// Returns an error if the operating system refuses a handler.
    pub fn on_signals() -> io::Result<Self> {
        Self::on_signals_answered_by(Some(ErrorOutput::default()))
    }

    /// Like [`Self::on_signals`], but writes the answer to this output, or no answer.
    pub(super) fn on_signals_answered_by(answer: Option<ErrorOutput>) -> io::Result<Self> {
        fail_at_file_limit()?;
        let (signal, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let heard: Vec<i32> = SIGNALS.into_iter().filter(|&number| !is_ignored(number)).collect();
        for &number in &heard {
            // The system repeats SIGXCPU every second until the hard limit ends the process. These repetitions must not
            // end the process earlier, because it is saving a checkpoint.
            if !is_time_limit(number) {
                flag::register_conditional_shutdown(number, 128 + number, asked.clone())?;
            }
            #[cfg(not(unix))]
            flag::register(number, asked.clone())?;
            flag::register_usize(number, signal.clone(), number as usize)?;
        }
        #[cfg(unix)]
        {
            let mut signals = signal_hook::iterator::Signals::new(&heard)?;
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                if let Some(number) = signals.forever().next() {
                    if let Some(mut answer) = answer {
                        // The limit of CPU time is repeated by the system, and ends nothing.
                        let more = if is_time_limit(number) { "" } else { "; once more ends without saving" };
                        // A terminal has shown ^C, or a progress bar.
                        let line_break = if io::stderr().is_terminal() { "\n" } else { "" };
                        // Failed writes are counted by the output.
                        let _ = writeln!(answer, "{line_break}saving{more}");
                    }
                    std::thread::sleep(SAME);
                    asked.store(true, Ordering::SeqCst);
                }
            })?;
        }
        #[cfg(not(unix))]
        drop(answer);
        Ok(Self { signal })
    }

    /// Returns the number of the signal that has arrived, or `None` if no signal has arrived.
    pub fn signal(&self) -> Option<u8> {
        u8::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|&signal| signal > 0)
    }

    /// Returns the exit code of a process that was stopped by a signal, or `None` if no signal has arrived.
    pub fn exit_code(&self) -> Option<ExitCode> {
        self.signal().map(|signal| ExitCode::from(128 + signal))
    }
}

/// Makes writes beyond the maximum file size (`ulimit -f`) return an error, like those to a full disk. Without this,
/// SIGXFSZ would end the process without a message.
///
/// # Errors
/// Returns an error if the operating system refuses a handler.
pub fn fail_at_file_limit() -> io::Result<()> {
    #[cfg(unix)]
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

#[cfg(unix)]
fn is_time_limit(signal: i32) -> bool {
    signal == SIGXCPU
}

#[cfg(not(unix))]
fn is_time_limit(_: i32) -> bool {
    false
}

/// True if the process was started with this signal ignored. False if it was not, or if this is unknown.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}
