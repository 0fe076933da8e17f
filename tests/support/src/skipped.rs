//! What was not checked, and why: for want of a compiler, a device, or files beside the project.

use std::collections::BTreeSet;
use std::fmt::{Arguments, Display};
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Says in one line that the running test did not check something: `not checked: TEST: WHY`. Once, however often it is said.
/// Where tests run one after another on the main thread, which has no name of theirs, TEST is the place that says it.
#[track_caller]
pub fn not_checked(why: impl Display) {
    let thread = std::thread::current();
    match thread.name().filter(|&name| name != "main") {
        Some(test) => say(format_args!("not checked: {test}: {why}")),
        None => say(format_args!("not checked: {}: {why}", Location::caller())),
    }
}

/// Whether `GAPLESS_SLOW_TESTS` is set.
pub(crate) fn is_slow_asked() -> bool {
    std::env::var_os("GAPLESS_SLOW_TESTS").is_some_and(|value| value != "0")
}

/// Whether a test may take long: where `GAPLESS_SLOW_TESTS` is set. Otherwise says that it does not run.
#[track_caller]
pub fn may_take_long() -> bool {
    let is_asked = is_slow_asked();
    if !is_asked {
        not_checked("anything: it takes long; GAPLESS_SLOW_TESTS=1 does");
    }
    is_asked
}

/// All of them where `GAPLESS_SLOW_TESTS` is set; otherwise one, the `turn`-th, round and round: a loop over something else that
/// counts its turns meets each of them, but not every combination. Says so.
#[track_caller]
pub fn in_turn<T>(all: &[T], turn: usize) -> &[T] {
    if is_slow_asked() || all.len() < 2 {
        return all;
    }
    not_checked("every combination; GAPLESS_SLOW_TESTS=1 does");
    std::slice::from_ref(&all[turn % all.len()])
}

/// All of them where `GAPLESS_SLOW_TESTS` is set; otherwise the first `count`. Says so.
#[track_caller]
pub fn few<T>(all: &[T], count: usize) -> &[T] {
    if is_slow_asked() || all.len() <= count {
        return all;
    }
    not_checked("every case; GAPLESS_SLOW_TESTS=1 does");
    &all[..count]
}

/// A file or folder of those that lie beside the project, which are not part of it; if it is not there, says so.
#[track_caller]
pub fn shared(path: &str) -> Option<PathBuf> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path);
    if !found.exists() {
        not_checked(format_args!("there is no ../shared/{path}"));
        return None;
    }
    Some(found)
}

/// Writes a line past the test harness, which keeps what a test prints; once.
pub(crate) fn say(line: Arguments<'_>) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // One line, whatever the reason's own text is.
    let words: Vec<String> = line.to_string().split_whitespace().map(str::to_owned).collect();
    let line = words.join(" ") + "\n";
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(line.clone()) {
        // Whoever closes stderr wants no lines.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
