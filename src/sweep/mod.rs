//! Many training steps, and which of them fit: for each configuration of a product of lists its exact bytes under the plan and under
//! other allocators, and its time on a device.
//!
//! In: a [`Sweep`], read from a file of lists. Out: a [`Row`] for each configuration, in `results.jsonl` as they come, and in the end
//! `results.csv`, `throughput.csv` and `report.html` ([`Results`]). Never: a row twice: what is there from an earlier run is taken from there.
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

use self::evaluate::{Evaluator, Least};
pub use self::row::{Row, Status};
pub use self::spec::{Configuration, Planned, Sweep, SweepOptions};
pub use self::store::StoreError;
use self::store::{Known, Store};
pub use self::summary::{Fragmentation, Gain, Throughput, above_bound, fragmentation, gains, throughput};
use crate::step::Step;

/// Configurations that are planned at a time.
const ROUND: usize = 16;

/// How far a sweep is. Each configuration counts twice: its time and sure bytes, and what comes of them.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// So much is there.
    pub done: usize,
    /// Of so much.
    pub all: usize,
}

/// All rows of a sweep, in its order.
#[derive(Debug)]
pub struct Results {
    /// One for each configuration.
    pub rows: Vec<Row>,
    /// How many of them an earlier run had left.
    pub reused: usize,
    /// Rows in the folder's file that were not as they were written, and so were not used.
    pub changed: usize,
    /// The fastest of what fits each budget.
    pub throughput: Vec<Throughput>,
}

/// Makes the rows that are not in the folder yet, each written as soon as it is there, and then the table and the page. `show` is called
/// after each and may stop the sweep; the same call goes on then: `None`.
///
/// # Errors
/// When the folder cannot be written, is used by another process, or has other results.
pub fn run(
    sweep: &Sweep,
    folder: &Path,
    threads: usize,
    show: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<Results>, StoreError> {
    let (store, Known { by_key: lines, changed }) = Store::open(folder)?;
    let mut rows = HashMap::new();
    for of in &sweep.configurations {
        if let Some(line) = lines.get(&of.key) {
            rows.insert(of.key.clone(), store.parse(line)?);
        }
    }
    let reused = rows.values().filter(|row| row.is_final()).count();
    let evaluator = Evaluator::new(sweep);
    let done = rows.values().map(weight).sum();
    // What is timed here has the machine for itself.
    let is_timed = sweep.configurations.iter().any(|of| of.step.as_ref().is_ok_and(|step| step.device.is_measured()));
    let threads = if is_timed { 1 } else { threads.max(1) };
    let mut run = Run { sweep, evaluator, threads, store, lines, rows, done, show };
    match run.sketch().and_then(|()| run.place()) {
        Ok(()) => run.finish(folder, reused, changed).map(Some),
        Err(End::Stopped) => Ok(None),
        Err(End::Failed(error)) => Err(error),
    }
}

/// A sweep under way.
struct Run<'a, F> {
    sweep: &'a Sweep,
    evaluator: Evaluator<'a>,
    threads: usize,
    store: Store,
    /// What is written, by key: the last line of each.
    lines: HashMap<String, String>,
    /// The same as rows, of this sweep.
    rows: HashMap<String, Row>,
    /// Of [`Progress`].
    done: usize,
    show: F,
}

/// What a row counts in [`Progress`].
fn weight(row: &Row) -> usize {
    1 + usize::from(row.is_final())
}

/// Why a sweep ends before it is done.
enum End {
    Stopped,
    Failed(StoreError),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl<F: FnMut(Progress) -> ControlFlow<()>> Run<'_, F> {
    /// Time and sure bytes of all configurations, those that share a graph together.
    fn sketch(&mut self) -> Result<(), End> {
        let graph = |of: &Configuration| of.step.as_ref().ok().map(Step::graph_key);
        let missing: Vec<&Configuration> =
            self.sweep.configurations.iter().filter(|of| !self.rows.contains_key(&of.key)).collect();
        let groups: Vec<&[&Configuration]> = missing.chunk_by(|a, b| graph(a) == graph(b)).collect();
        self.each(&groups, |evaluator, group, give| evaluator.sketch(group, give))
    }

    /// Plans and allocators of what can be on a front, the fastest first, in rounds: what a round leaves out is decided by the rounds before
    /// it, so that it depends neither on threads nor on where an earlier run was stopped.
    fn place(&mut self) -> Result<(), End> {
        let mut order: Vec<&Configuration> =
            self.sweep.configurations.iter().filter(|of| self.rows[&of.key].figures.is_some()).collect();
        // Time counts per token, as steps may have more or fewer of them.
        let speed_and_bytes = |of: &Configuration| {
            let figures = self.rows[&of.key].figures.as_ref();
            figures.map_or((0.0, None), |of| (of.tokens_per_second, of.at_least.iter().max().copied()))
        };
        order.sort_by(|a, b| {
            let ((fast, bytes), (slow, most)) = (speed_and_bytes(a), speed_and_bytes(b));
            slow.total_cmp(&fast).then(bytes.cmp(&most))
        });
        let mut order = order.into_iter().peekable();
        let mut least = Least::new(self.sweep);
        while order.peek().is_some() {
            let (mut round, mut left_out) = (Vec::new(), Vec::new());
            while let Some(of) = order.next_if(|_| round.len() < ROUND) {
                match self.evaluator.left_out(of, &self.rows[&of.key], &least) {
                    Some(row) => left_out.push(row),
                    None => round.push(of),
                }
            }
            for row in left_out {
                if !self.rows[&row.key].is_final() {
                    self.write(row)?;
                }
            }
            let missing: Vec<(&Configuration, Row)> =
                round.iter().map(|of| (*of, self.rows[&of.key].clone())).filter(|(_, row)| !row.is_final()).collect();
            self.each(&missing, |evaluator, (of, row), give| {
                give(evaluator.place(of, row.clone(), &least));
            })?;
            round.iter().for_each(|of| least.see(of, &self.rows[&of.key]));
        }
        Ok(())
    }

    /// Does work on all threads, and writes the rows that it gives until it is told that no more are wanted.
    fn each<T: Sync>(
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
                    // A system that starts no more of them still has those.
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

    /// Writes a row, and says so.
    fn write(&mut self, row: Row) -> Result<(), End> {
        let line = self.store.append(&row)?;
        // As whoever reads the file finds it.
        let row = self.store.parse(&line)?;
        self.lines.insert(row.key.clone(), line);
        self.done += weight(&row);
        self.done -= self.rows.insert(row.key.clone(), row).as_ref().map_or(0, weight);
        match (self.show)(Progress { done: self.done, all: 2 * self.sweep.configurations.len() }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(End::Stopped),
        }
    }

    /// Puts the rows in order, and writes the table and the page.
    fn finish(mut self, folder: &Path, reused: usize, changed: usize) -> Result<Results, StoreError> {
        let keys = || self.sweep.configurations.iter().map(|of| &of.key);
        let lines: Vec<String> = keys().filter_map(|key| self.lines.get(key).cloned()).collect();
        let rows: Vec<Row> = keys().filter_map(|key| self.rows.get(key).cloned()).collect();
        for of in &self.sweep.configurations {
            self.lines.remove(&of.key);
        }
        self.store.finish(&lines, self.lines)?;
        store::replace(&folder.join("results.csv"), row::csv(self.sweep, &rows).as_bytes())?;
        let throughput = throughput(self.sweep, &rows);
        store::replace(&folder.join("throughput.csv"), summary::csv(self.sweep, &throughput).as_bytes())?;
        store::replace(&folder.join("report.html"), report::page(self.sweep, &rows, &throughput).as_bytes())?;
        Ok(Results { rows, reused, changed, throughput })
    }
}
