//! Many training steps, and which of them fit: for each configuration of a product of lists its exact bytes under the plan and under
//! other allocators, and its time on a device.
//!
//! In: a [`Sweep`], read from a file of lists. Out: a [`Row`] for each configuration, in `results.jsonl` as they come, and in the end
//! `results.csv` and `report.html` ([`Results`]). Never: a row twice: what is there from an earlier run is taken from there.
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
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use self::evaluate::Evaluator;
pub use self::row::{Row, Status};
pub use self::spec::{Configuration, Planned, Sweep, SweepOptions};
use self::store::Store;
pub use self::store::StoreError;
use crate::step::Step;

/// How far a sweep is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Rows that are there.
    pub done: usize,
    /// Of so many.
    pub all: usize,
}

/// All rows of a sweep, in its order.
#[derive(Debug)]
pub struct Results {
    /// One for each configuration.
    pub rows: Vec<Row>,
    /// How many of them an earlier run had left.
    pub reused: usize,
}

/// Makes the rows that are not in the folder yet, each written as soon as it is there, and then the table and the page. `show` is called
/// after each row and may stop the sweep; the same call goes on then: `None`.
///
/// # Errors
/// When the folder cannot be written, is used by another process, or has other results.
pub fn run(
    sweep: &Sweep,
    folder: &Path,
    threads: usize,
    mut show: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<Results>, StoreError> {
    let (mut store, mut known) = Store::open(folder)?;
    let all = sweep.configurations.len();
    let reused = sweep.configurations.iter().filter(|of| known.contains_key(&of.key)).count();
    // By graph: each is recorded once, by whoever takes it. What is known of a group decides with it what else is planned.
    let graph = |of: &Configuration| of.step.as_ref().ok().map(Step::graph_key);
    let mut groups: Vec<Vec<(&Configuration, Option<Row>)>> = Vec::new();
    for group in sweep.configurations.chunk_by(|a, b| graph(a) == graph(b)) {
        let row = |of: &Configuration| known.get(&of.key).map(|line| store.parse(line)).transpose();
        let group = group.iter().map(|of| Ok((of, row(of)?))).collect::<Result<Vec<_>, StoreError>>()?;
        if group.iter().any(|(_, row)| row.is_none()) {
            groups.push(group);
        }
    }
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let evaluator = Evaluator::new(sweep);
    let mut done = reused;
    let written = std::thread::scope(|scope| {
        let (send, receive) = mpsc::channel::<Row>();
        for _ in 0..threads.max(1) {
            let (send, groups, next, stopped, evaluator) = (send.clone(), &groups, &next, &stopped, &evaluator);
            scope.spawn(move || {
                while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let is_stopped = || stopped.load(Ordering::Relaxed);
                    evaluator.group(group, &mut |row| !is_stopped() && send.send(row).is_ok() && !is_stopped());
                }
            });
        }
        drop(send);
        let written = receive.into_iter().try_for_each(|row| {
            known.insert(row.key.clone(), store.append(&row)?);
            done += 1;
            match show(Progress { done, all }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(None),
            }
        });
        stopped.store(true, Ordering::Relaxed);
        written
    });
    match written {
        Err(Some(error)) => return Err(error),
        Err(None) => return Ok(None),
        Ok(()) => {}
    }
    finish(sweep, folder, store, known, reused).map(Some)
}

/// Puts the rows in order, and writes the table and the page.
fn finish(
    sweep: &Sweep,
    folder: &Path,
    store: Store,
    mut known: HashMap<String, String>,
    reused: usize,
) -> Result<Results, StoreError> {
    let lines: Vec<String> =
        sweep.configurations.iter().map(|of| known.remove(&of.key).expect("there is a row for each")).collect();
    let rows = lines.iter().map(|line| store.parse(line)).collect::<Result<Vec<Row>, _>>()?;
    store.finish(&lines, known)?;
    store::replace(&folder.join("results.csv"), row::csv(sweep, &rows).as_bytes())?;
    store::replace(&folder.join("report.html"), report::page(sweep, &rows).as_bytes())?;
    Ok(Results { rows, reused })
}
