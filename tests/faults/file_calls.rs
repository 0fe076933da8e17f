//! Injects a kill or an error at each file system call of a resume, a save and a removal of old checkpoints, using
//! `strace`.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use gapless_testing::not_checked;

use crate::{Budget, Checker, Draw, copy, two_steps, victim_command};

const ERRORS: [&str; 6] = ["EIO", "ENOSPC", "EACCES", "EMFILE", "EINTR", "EROFS"];

/// A file system call, identified by its name and its index among the calls of this name.
type Call = (String, usize);

pub fn a_kill_loses_nothing() {
    let is_told = |output: &Output, _: &str| output.status.signal() == Some(9);
    at_calls(Budget::new(25, 20), &["signal=KILL".to_owned()], is_told);
}

/// Injects each error at each call. The run must either recover, or report the error with the folder's name.
pub fn an_error_loses_nothing() {
    let is_told = |output: &Output, dir: &str| match output.status.code() {
        Some(0) => true,
        Some(1) => String::from_utf8_lossy(&output.stderr).contains(dir),
        _ => false,
    };
    at_calls(Budget::new(25, 20), &ERRORS.map(|error| format!("error={error}")), is_told);
}

/// Injects each fault at each call, in random order, until the budget is spent.
fn at_calls(budget: Budget, faults: &[String], is_allowed: impl Fn(&Output, &str) -> bool) {
    let (template, mut judge, mut draw) = (two_steps(), Checker::new(), Draw::new());
    let Some(calls) = calls(template.path()) else { return };
    let with_faults = |call: Call| faults.iter().map(move |fault| (call.clone(), fault));
    let mut cases: Vec<(Call, &String)> = calls.into_iter().flat_map(with_faults).collect();
    let all = cases.len();
    let mut done = 0;
    while budget.allows(done) && !cases.is_empty() {
        let ((name, nth), fault) = cases.swap_remove(draw.below(cases.len()));
        let work = tempfile::tempdir().unwrap();
        let dir = work.path().join("run");
        copy(template.path(), &dir);
        let inject = format!("inject={name}:{fault}:when={nth}");
        let output = strace(&["-o", "/dev/null", "-e", &format!("trace={name}"), "-e", &inject], &dir);
        let said = String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.parse().ok()).max();
        let resumed = judge.resumes(&dir);
        assert!(is_allowed(&output, &dir.display().to_string()), "{inject}: {output:?}");
        assert!(resumed >= said.unwrap_or(2), "{inject}: {said:?} was saved, but {resumed} is left");
        // The next run cleans up.
        let next = victim_command(&dir, 4).output().unwrap();
        assert!(next.status.success() && judge.resumes(&dir) == 4, "{inject}, then {next:?}");
        done += 1;
    }
    println!("{done} of {all} faults at file calls");
}

/// Returns the victim's file system calls that refer to the run's folder, or `None` if strace is not available.
fn calls(template: &Path) -> Option<Vec<Call>> {
    let work = tempfile::tempdir().unwrap();
    let (dir, log) = (work.path().join("run"), work.path().join("log"));
    copy(template, &dir);
    if let Err(error) = Command::new("strace").arg("--version").output() {
        not_checked(format_args!("strace cannot be run: {error}"));
        return None;
    }
    let output = strace(&["-y", "-o", log.to_str().unwrap(), "-e", "trace=%file,%desc"], &dir);
    if !output.status.success() {
        not_checked(format_args!("strace may not trace: {}", String::from_utf8_lossy(&output.stderr)));
        return None;
    }
    let (mut counts, mut calls) = (BTreeMap::new(), Vec::new());
    let log = std::fs::read_to_string(log).unwrap();
    let main = log.split_whitespace().next().expect("a first call").to_owned();
    for line in log.lines() {
        let Some((name, rest)) = line.strip_prefix(&main).and_then(|line| line.trim_start().split_once('(')) else {
            continue;
        };
        let count = counts.entry(name.to_owned()).or_insert(0);
        *count += 1;
        // The standard library asserts that closing a directory's descriptor succeeds.
        if rest.contains(dir.to_str().unwrap()) && name != "close" && name != "execve" {
            calls.push((name.to_owned(), *count));
        }
    }
    assert!(calls.len() > 50, "a resume and a save have more calls than {}", calls.len());
    Some(calls)
}

/// Runs the victim under strace for one step beyond the template.
fn strace(arguments: &[&str], dir: &Path) -> Output {
    let victim = victim_command(dir, 3);
    let mut command = Command::new("strace");
    command.args(["-f", "-qq"]).args(arguments).arg(victim.get_program()).args(victim.get_args());
    command.output().unwrap()
}
