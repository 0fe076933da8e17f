//! Sweeps over many training steps: computes the exact bytes and the estimated time of every combination of given
//! values.
//!
//! In: a [`Sweep`], read from a file of value lists. Out: a [`Row`] per configuration, which is appended to
//! `results.jsonl` as soon as it is known. At the end, `results.csv`, `throughput.csv` and `report.html` are written
//! from all rows ([`Results`]). Rows that an earlier run has written are reused, not computed again.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use gapless::sweep::{Sweep, run};
//!
//! let sweep = Sweep::parse(
//!     r#"
//!     [step]
//!     model = "gpt:vocabulary=64,layers=4,heads=2,width=32"
//!     batch = 8
//!     sequence = 16
//!     pipeline_ranks = 2
//!     [vary]
//!     schedule = ["1f1b", "gpipe"]
//!     micro_batches = [2, 4]
//!     "#,
//! )?;
//! let folder = tempfile::tempdir()?;
//! let results = run(&sweep, folder.path(), 1, |_| ControlFlow::Continue(()))?.expect("nobody stopped it");
//! assert_eq!(results.rows.len(), 4);
//! assert!(folder.path().join("report.html").exists());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod evaluate;
mod map;
mod report;
mod row;
mod spec;
mod store;
mod summary;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use self::evaluate::{BestKnown, Evaluator};
pub use self::row::{Row, Status};
pub use self::spec::{Configuration, PlannedConfigurations, Sweep, SweepOptions};
pub use self::store::StoreError;
use self::store::{Store, StoredRows};
pub use self::summary::{Fragmentation, Gain, Throughput, UnusedReserve};
pub use self::summary::{above_bound, fragmentation, gains, of_other_commits, throughput, unused_reserve};
use crate::step::Step;

/// Number of configurations that are planned in one round. The results of earlier rounds decide which configurations a
/// round skips.
const ROUND: usize = 16;

/// Progress of a sweep. At first, the time and the sure bytes of every configuration are estimated. Then configurations
/// get their final status, some of them by a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Configurations that are estimated or final.
    pub estimated: usize,
    /// Configurations with their final status.
    pub finished: usize,
    /// Configurations in total.
    pub total: usize,
}

/// All rows of a sweep, in the order of its configurations.
#[derive(Debug)]
pub struct Results {
    /// One row per configuration.
    pub rows: Vec<Row>,
    /// Number of rows that were taken from an earlier run.
    pub reused: usize,
    /// Number of rows in the folder's file that were ignored, because they had been edited since they were written.
    pub changed: usize,
    /// For each budget, the throughput of the fastest configuration that fits.
    pub throughput: Vec<Throughput>,
}

/// Computes the rows that the folder does not have yet, and writes each row as soon as it is known. Then writes the
/// tables and the page, and returns all rows. Calls `show` after each row. If `show` returns `Break`, the sweep stops
/// and `run` returns `None`. Another call with the same arguments resumes the sweep.
///
/// # Errors
/// Returns an error if the folder cannot be written, is in use by another process, or has a line that is not a row, or
/// if no thread can be started.
pub fn run(
    sweep: &Sweep,
    folder: &Path,
    threads: usize,
    show: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<Results>, StoreError> {
    let (store, StoredRows { by_key: lines, changed }) = Store::open(folder)?;
    let mut rows = HashMap::new();
    for configuration in &sweep.configurations {
        if let Some(line) = lines.get(&configuration.key) {
            rows.insert(configuration.key.clone(), store.parse(line)?);
        }
    }
    let reused = rows.values().filter(|row| row.is_final()).count();
    let evaluator = Evaluator::new(sweep);
    let progress = Progress { estimated: rows.len(), finished: reused, total: sweep.configurations.len() };
    // While operations are timed on this machine, no other work may run.
    let is_timed = sweep
        .configurations
        .iter()
        .any(|configuration| configuration.step.as_ref().is_ok_and(|step| step.device.is_measured()));
    let threads = if is_timed { 1 } else { threads.max(1) };
    let mut run = SweepInProgress { sweep, evaluator, threads, store, lines, rows, progress, show };
    match run.sketch().and_then(|()| run.place()) {
        Ok(()) => run.finish(folder, reused, changed).map(Some),
        Err(End::Stopped) => Ok(None),
        Err(End::Failed(error)) => Err(error),
    }
}

/// A sweep in progress.
struct SweepInProgress<'a, F> {
    sweep: &'a Sweep,
    evaluator: Evaluator<'a>,
    threads: usize,
    store: Store,
    /// Lines of the file, by key. If several lines have the same key, the last one counts.
    lines: HashMap<String, String>,
    /// Rows of this sweep by key.
    rows: HashMap<String, Row>,
    progress: Progress,
    show: F,
}

/// The reasons for which a sweep ends early.
enum End {
    Stopped,
    Failed(StoreError),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl<F: FnMut(Progress) -> ControlFlow<()>> SweepInProgress<'_, F> {
    /// Computes time and sure bytes of all configurations that have no row yet. Configurations whose graphs have the forward
    /// and the gradients in common are computed by the same job.
    fn sketch(&mut self) -> Result<(), End> {
        let mut jobs: Vec<Vec<&Configuration>> = Vec::new();
        let mut job_of: HashMap<Option<String>, usize> = HashMap::new();
        let missing =
            self.sweep.configurations.iter().filter(|configuration| !self.rows.contains_key(&configuration.key));
        for configuration in missing {
            let key = configuration.step.as_ref().ok().map(Step::whole_key);
            let job = *job_of.entry(key).or_insert(jobs.len());
            if job == jobs.len() {
                jobs.push(Vec::new());
            }
            jobs[job].push(configuration);
        }
        self.run_jobs(&jobs, |evaluator, job, give| evaluator.sketch(job, give))
    }

    /// Plans the configurations that can be on a Pareto front, and replays them through the allocators. This is done in
    /// rounds, the fastest configurations first. Only results of earlier rounds decide which configurations are
    /// skipped. So the rows depend neither on the number of threads nor on the point at which an earlier run was
    /// stopped.
    fn place(&mut self) -> Result<(), End> {
        let mut order: Vec<&Configuration> = self
            .sweep
            .configurations
            .iter()
            .filter(|configuration| self.rows[&configuration.key].figures.is_some())
            .collect();
        // Time is compared per token, because steps may differ in their number of tokens.
        let speed_and_bytes = |configuration: &Configuration| {
            let figures = self.rows[&configuration.key].figures.as_ref();
            figures.map_or((0.0, None), |figures| (figures.tokens_per_second, figures.at_least.iter().max().copied()))
        };
        order.sort_by(|a, b| {
            let ((fast, bytes), (slow, most)) = (speed_and_bytes(a), speed_and_bytes(b));
            slow.total_cmp(&fast).then(bytes.cmp(&most))
        });
        let mut order = order.into_iter().peekable();
        let mut least = BestKnown::new(self.sweep);
        while order.peek().is_some() {
            let (mut round, mut left_out) = (Vec::new(), Vec::new());
            while let Some(configuration) = order.next_if(|_| round.len() < ROUND) {
                match self.evaluator.skipped_row(configuration, &self.rows[&configuration.key], &least) {
                    Some(row) => left_out.push(row),
                    None => round.push(configuration),
                }
            }
            for row in left_out {
                if !self.rows[&row.key].is_final() {
                    self.write(row)?;
                }
            }
            let missing: Vec<(&Configuration, Row)> = round
                .iter()
                .map(|configuration| (*configuration, self.rows[&configuration.key].clone()))
                .filter(|(_, row)| !row.is_final())
                .collect();
            self.run_jobs(&missing, |evaluator, (configuration, row), give| {
                give(evaluator.plan_and_replay(configuration, row.clone(), &least));
            })?;
            round.iter().for_each(|configuration| least.record(configuration, &self.rows[&configuration.key]));
        }
        Ok(())
    }

    /// Runs `job` on every item, on all threads, and writes the rows that the jobs produce. Returns when all items are
    /// done, or when the sweep is stopped.
    fn run_jobs<T: Sync>(
        &mut self,
        work: &[T],
        job: impl Fn(&Evaluator<'_>, &T, &mut dyn FnMut(Row) -> bool) + Sync,
    ) -> Result<(), End> {
        let (next, stopped, evaluator) = (AtomicUsize::new(0), AtomicBool::new(false), Evaluator::new(self.sweep));
        let evaluator = std::mem::replace(&mut self.evaluator, evaluator);
        let written = std::thread::scope(|scope| {
            let (send, receive) = mpsc::channel::<Row>();
            for started in 0..self.threads.min(work.len()) {
                let (send, next, stopped, job, evaluator) = (send.clone(), &next, &stopped, &job, &evaluator);
                let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
                    while let Some(item) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let is_stopped = || stopped.load(Ordering::Relaxed);
                        job(evaluator, item, &mut |row| !is_stopped() && send.send(row).is_ok() && !is_stopped());
                        if is_stopped() {
                            return;
                        }
                    }
                });
                match thread {
                    // If the system refuses further threads, the threads that were started do all of the work.
                    Err(_) if started > 0 => break,
                    thread => drop(thread.map_err(StoreError::Threads)?),
                }
            }
            drop(send);
            let written = receive.into_iter().try_for_each(|row| self.write(row));
            stopped.store(true, Ordering::Relaxed);
            written
        });
        self.evaluator = evaluator;
        written
    }

    /// Writes a row and reports the progress.
    fn write(&mut self, row: Row) -> Result<(), End> {
        let line = self.store.append(&row)?;
        // Parsed back from its line, so that the values are exactly those that a later run reads from the file.
        let row = self.store.parse(&line)?;
        self.lines.insert(row.key.clone(), line);
        let is_final = row.is_final();
        let before = self.rows.insert(row.key.clone(), row);
        self.progress.estimated += usize::from(before.is_none());
        self.progress.finished += usize::from(is_final);
        self.progress.finished -= usize::from(before.is_some_and(|row| row.is_final()));
        match (self.show)(self.progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(End::Stopped),
        }
    }

    /// Writes the rows in the sweep's order, then the tables and the page.
    fn finish(mut self, folder: &Path, reused: usize, changed: usize) -> Result<Results, StoreError> {
        let keys = || self.sweep.configurations.iter().map(|configuration| &configuration.key);
        let lines: Vec<String> = keys().filter_map(|key| self.lines.get(key).cloned()).collect();
        let rows: Vec<Row> = keys().filter_map(|key| self.rows.get(key).cloned()).collect();
        for configuration in &self.sweep.configurations {
            self.lines.remove(&configuration.key);
        }
        self.store.finish(&lines, self.lines)?;
        store::replace(&folder.join("results.csv"), row::csv(self.sweep, &rows).as_bytes())?;
        let throughput = throughput(self.sweep, &rows);
        store::replace(&folder.join("throughput.csv"), summary::csv(self.sweep, &rows, &throughput).as_bytes())?;
        store::replace(&folder.join("report.html"), report::page(self.sweep, &rows, &throughput).as_bytes())?;
        Ok(Results { rows, reused, changed, throughput })
    }
}
