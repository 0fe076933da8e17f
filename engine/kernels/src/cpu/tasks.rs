//! Distributes a kernel's tasks over the current rayon pool.

use rayon::prelude::*;

/// Runs `task` for every index below `tasks`, on all threads, without allocating. A thread takes one index at a time.
///
/// A task must not wait for other tasks, for example by `rayon::join`. While it waits, its thread would start another
/// task, which would use the scratch of the same [`slot`].
pub(super) fn for_each(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    in_runs(tasks, 1, 1, task);
}

/// Like [`for_each`], for tasks of similar cost. A thread takes at least `least` consecutive tasks at a time. Idle
/// threads may take over a part of a longer run.
pub(super) fn spread(tasks: usize, least: usize, task: &(dyn Fn(usize) + Sync)) {
    in_runs(tasks, least, usize::MAX, task);
}

fn in_runs(tasks: usize, least: usize, most: usize, task: &(dyn Fn(usize) + Sync)) {
    if tasks <= 1 || rayon::current_num_threads() == 1 {
        (0..tasks).for_each(task);
    } else {
        (0..tasks).into_par_iter().with_min_len(least).with_max_len(most).for_each(task);
    }
}

/// Returns the index of the current thread's part of the scratch, below `rayon::current_num_threads()`.
pub(super) fn slot() -> usize {
    rayon::current_thread_index().unwrap_or(0)
}
