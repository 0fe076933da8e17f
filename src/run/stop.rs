//! Signals that ask a run to end: it saves, and exits by the convention of 128 + signal, so that who sent it sees that the run is
//! not complete.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
#[cfg(unix)]
use std::time::Duration;

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGXCPU, SIGXFSZ};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGXCPU];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Signals within this time of the first count as the same one: `timeout` and cluster schedulers signal a process and its group.
#[cfg(unix)]
const SAME: Duration = Duration::from_secs(1);

/// Whether a signal has asked the process to end. The first is noted; another one, a second later, ends the process.
#[derive(Debug, Clone)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Listens for Ctrl-C, SIGTERM, SIGHUP and the end of the time that the process may compute (`ulimit -t`, SIGXCPU). A signal that
    /// whoever started the process told it to ignore (`nohup`) stays ignored.
    ///
    /// # Errors
    /// When the operating system refuses a handler.
    pub fn on_signals() -> io::Result<Self> {
        fail_at_file_limit()?;
        let (signal, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let heard: Vec<i32> = SIGNALS.into_iter().filter(|&number| !is_ignored(number)).collect();
        for &number in &heard {
            // The end of its time is told again each second, and gives the process until its hard limit to save.
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
                if signals.forever().next().is_some() {
                    std::thread::sleep(SAME);
                    asked.store(true, Ordering::SeqCst);
                }
            })?;
        }
        Ok(Self { signal })
    }

    /// The signal that has come.
    pub fn signal(&self) -> Option<u8> {
        u8::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|&signal| signal > 0)
    }

    /// How a process ends that a signal has stopped.
    pub fn exit_code(&self) -> Option<ExitCode> {
        self.signal().map(|signal| ExitCode::from(128 + signal))
    }
}

/// Makes writes past the largest size of a file (`ulimit -f`) fail as on a full disk, which is told, where they would end the process
/// in silence (SIGXFSZ).
///
/// # Errors
/// When the operating system refuses a handler.
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

/// Whether the process was started to ignore the signal; false where the operating system does not say.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}
