//! Handles limits of the system that would otherwise end the command silently or by a panic. Exceeding them becomes an
//! ordinary error.

use std::thread::{self, available_parallelism};

use anyhow::{Context, bail};
use gapless::run::fail_at_file_limit;

use crate::output::tell;

/// Makes writes beyond the file size limit return an error, and starts the thread pool on which the command computes.
pub fn prepare() -> anyhow::Result<()> {
    fail_at_file_limit().context("cannot listen to signals")?;
    let cores = available_parallelism().map_or(1, usize::from);
    let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok()).filter(|&n| n > 0);
    let wanted = wanted.unwrap_or(cores);
    let threads = threads(wanted)?;
    // The thread pool can be built only once, so it must not be built with more threads than the system can start.
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build_global() {
        Ok(()) => Ok(()),
        Err(error) => bail!("cannot start {threads} threads: {error}; {REMEDY}"),
    }
}

const REMEDY: &str = "raise the limit of processes (ulimit -u) or of memory (ulimit -v)";

/// Returns `wanted` if the system can start this many threads. Otherwise returns half of the number that the system can
/// start, which leaves threads and memory for the rest of the process.
pub fn threads(wanted: usize) -> anyhow::Result<usize> {
    match startable(wanted) {
        0 => bail!("cannot start a thread for this process; {REMEDY}"),
        all if all == wanted => Ok(all),
        some => {
            tell(format_args!("gapless: only {some} of {wanted} threads can be started; half of them compute"));
            Ok(some.div_ceil(2))
        }
    }
}

/// Returns the number of threads that the system can run at the same time, but at most `wanted`.
fn startable(wanted: usize) -> usize {
    let (keep, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    thread::scope(|scope| {
        let start = |_| {
            let until_dropped = || drop(wait.lock().map(|end| end.recv()));
            thread::Builder::new().spawn_scoped(scope, until_dropped).ok()
        };
        let started = (0..wanted).map_while(start).count();
        drop(keep);
        started
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_and_end() {
        assert_eq!((startable(0), startable(3)), (0, 3));
    }
}
