//! The threads that run a step.
//!
//! These threads form a rayon pool. One of them waits for steps and starts each step, so a step begins inside the pool.
//! Calling `ThreadPool::install` from a thread outside the pool would put a job into rayon's shared queue, which
//! sometimes allocates a block.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Result;

/// A fixed number of threads that run one job at a time.
#[derive(Debug)]
pub struct Workers {
    mailbox: Arc<Mailbox>,
    /// Held while a job runs, so that jobs of several callers run one after another.
    turn: Mutex<()>,
    threads: usize,
    _pool: ThreadPool,
}

#[derive(Debug)]
struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Idle,
    Job(Job),
    Done(Option<Box<dyn Any + Send>>),
    Closed,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idle => "Idle",
            Self::Job(_) => "Job",
            Self::Done(_) => "Done",
            Self::Closed => "Closed",
        })
    }
}

/// A job whose lifetime was erased; [`Workers::run`] does not return before it is done.
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the pointee is `Sync`, and `Workers::run` keeps it alive until the job has ended.
unsafe impl Send for Job {}

impl Workers {
    /// Starts `threads` threads. If `threads` is 0, starts as many as the machine has cores.
    ///
    /// # Errors
    /// Returns an error if the operating system cannot start the threads.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = resolve_threads(threads);
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("gapless-{i}")).build()?;
        // Wait until all threads have started, because their allocations at start-up could otherwise fall into the
        // first steps.
        pool.broadcast(|_| ());
        let mailbox = Arc::new(Mailbox { state: Mutex::new(State::Idle), changed: Condvar::new() });
        let driver = mailbox.clone();
        pool.spawn(move || driver.serve());
        Ok(Self { mailbox, turn: Mutex::new(()), threads, _pool: pool })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `job` on a thread of the pool, where rayon's parallel iterators use all threads. Returns when the job has
    /// ended. Does not allocate.
    ///
    /// # Panics
    /// If the job panics, panics with the same payload.
    pub fn run(&self, job: &(dyn Fn() + Sync)) {
        let _turn = lock(&self.turn);
        let erased: *const (dyn Fn() + Sync + '_) = job;
        // SAFETY: only the lifetime changes. This function waits for `Done` before it returns, and the pointer is not
        // used after `Done`.
        let erased: *const (dyn Fn() + Sync + 'static) = unsafe { std::mem::transmute(erased) };
        let mut state = lock(&self.mailbox.state);
        *state = State::Job(Job(erased));
        self.mailbox.changed.notify_all();
        loop {
            if let State::Done(panic) = &mut *state {
                let panic = panic.take();
                *state = State::Idle;
                drop(state);
                return panic.map_or((), |panic| resume_unwind(panic));
            }
            state = self.mailbox.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Mailbox {
    fn serve(&self) {
        let mut state = lock(&self.state);
        loop {
            match &*state {
                State::Closed => return,
                State::Job(job) => {
                    let job = job.0;
                    drop(state);
                    // SAFETY: `run` put the pointer here and waits, with the job alive, until it sees `Done`.
                    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)() }));
                    state = lock(&self.state);
                    *state = State::Done(outcome.err());
                    self.changed.notify_all();
                }
                State::Idle | State::Done(_) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        *lock(&self.mailbox.state) = State::Closed;
        self.mailbox.changed.notify_all();
    }
}

/// The maximum number of threads of a rank: more than any machine has cores, and few enough to start quickly.
pub const MAX_THREADS: usize = 1024;

/// Returns the number of threads for a setting in which 0 means all cores.
pub fn resolve_threads(threads: usize) -> usize {
    if threads > 0 { threads } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn jobs_run_in_the_pool_and_their_panics_come_back() {
        let workers = Workers::new(2).unwrap();
        let count = AtomicUsize::new(0);
        for _ in 0..100 {
            workers.run(&|| {
                assert_eq!(rayon::current_num_threads(), 2);
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.load(Ordering::Relaxed), 100);
        let panic = catch_unwind(AssertUnwindSafe(|| workers.run(&|| panic!("mine"))));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"mine"));
        workers.run(&|| {});
    }
}
