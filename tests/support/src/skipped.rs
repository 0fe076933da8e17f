//! Reports of skipped checks. A check is skipped if, for example, a compiler, a device or files next to the
//! repository are missing.

use std::collections::BTreeSet;
use std::fmt::{Arguments, Display};
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Reports once that the running test has skipped a check, as `not checked: TEST: WHY`. If tests run on the main
/// thread, the test's name is unknown, and TEST is the caller's source location.
#[track_caller]
pub fn not_checked(why: impl Display) {
    let thread = std::thread::current();
    match thread.name().filter(|&name| name != "main") {
        Some(test) => print_uncaptured(format_args!("not checked: {test}: {why}")),
        None => print_uncaptured(format_args!("not checked: {}: {why}", Location::caller())),
    }
}

/// True if `GAPLESS_SLOW_TESTS` is set.
pub(crate) fn is_slow_asked() -> bool {
    std::env::var_os("GAPLESS_SLOW_TESTS").is_some_and(|value| value != "0")
}

/// True if slow tests may run, which is the case if `GAPLESS_SLOW_TESTS` is set. If not, reports that the test is
/// skipped.
#[track_caller]
pub fn slow_tests_enabled() -> bool {
    let is_asked = is_slow_asked();
    if !is_asked {
        not_checked("anything: it takes long; GAPLESS_SLOW_TESTS=1 does");
    }
    is_asked
}

/// With `GAPLESS_SLOW_TESTS`, returns all elements. Without it, returns the element at `turn` (modulo the length),
/// and reports this. If a loop passes the number of its iteration as `turn`, it uses every element, but not every
/// combination.
#[track_caller]
pub fn in_turn<T>(all: &[T], turn: usize) -> &[T] {
    if is_slow_asked() || all.len() < 2 {
        return all;
    }
    not_checked("every combination; GAPLESS_SLOW_TESTS=1 does");
    std::slice::from_ref(&all[turn % all.len()])
}

/// With `GAPLESS_SLOW_TESTS`, returns all elements. Without it, returns one of each `count` adjacent elements, with its
/// place among them in turn, and reports this.
#[track_caller]
pub fn one_of_each<T>(all: &[T], count: usize) -> Vec<&T> {
    let mut some = Vec::new();
    for (turn, adjacent) in all.chunks(count).enumerate() {
        some.extend(in_turn(adjacent, turn));
    }
    some
}

/// With `GAPLESS_SLOW_TESTS`, returns every other element, from the one at `turn` (modulo 2) on. Without it, the same as
/// [`in_turn`]. If a loop passes the number of its iteration as `turn`, each element meets half of the iterations: this is
/// for combinations of which no pair is special, and which take long.
#[track_caller]
pub fn every_other<T: Copy>(all: &[T], turn: usize) -> Vec<T> {
    if !is_slow_asked() {
        return in_turn(all, turn).to_vec();
    }
    all.iter().copied().skip(turn % 2).step_by(2).collect()
}

/// With `GAPLESS_SLOW_TESTS`, returns all elements. Without it, returns the first `count` elements, and reports this.
#[track_caller]
pub fn few<T>(all: &[T], count: usize) -> &[T] {
    if is_slow_asked() || all.len() <= count {
        return all;
    }
    not_checked("every case; GAPLESS_SLOW_TESTS=1 does");
    &all[..count]
}

/// Returns the path of a file or folder next to the repository, outside of it. If the file or folder does not exist,
/// reports this and returns `None`.
#[track_caller]
pub fn next_to_repository(path: &str) -> Option<PathBuf> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path);
    if !found.exists() {
        not_checked(format_args!("there is no ../shared/{path}"));
        return None;
    }
    Some(found)
}

/// Prints a line, unless it was printed before. Bypasses the test harness, which would capture the line.
pub(crate) fn print_uncaptured(line: Arguments<'_>) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // Line breaks in the reason are replaced by spaces, so that the report is always one line.
    let words: Vec<String> = line.to_string().split_whitespace().map(str::to_owned).collect();
    let line = words.join(" ") + "\n";
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(line.clone()) {
        // If stderr is closed, the error is ignored, because the report cannot be printed anywhere.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
