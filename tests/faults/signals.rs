//! Signals at random moments, and two runs in one folder.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use gapless_testing::not_checked;

use crate::{Budget, Checker, Draw, victim_command};

const SIGNALS: [(&str, i32); 5] = [("INT", 2), ("TERM", 15), ("HUP", 1), ("XCPU", 24), ("KILL", 9)];

/// Starts a victim that does not end by itself. Returns its process, and a receiver of the steps that it reports as
/// saved.
fn endless(dir: &Path) -> (Child, Receiver<u64>) {
    let mut child = victim_command(dir, u64::MAX).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, steps) = channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line.parse().unwrap())));
    (child, steps)
}

fn send(signal: &str, child: &Child) {
    let status = Command::new("sh").args(["-c", &format!("kill -s {signal} {}", child.id())]).status().unwrap();
    assert!(status.success());
}

/// Returns the signals that this process does not ignore. Children inherit ignored signals, as under `nohup`.
fn heard_signals() -> Vec<(&'static str, i32)> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let (ignored, heard): (Vec<_>, _) = SIGNALS.into_iter().partition(|&(_, number)| ignored >> (number - 1) & 1 == 1);
    for (name, _) in ignored {
        not_checked(format_args!("SIG{name} is ignored here"));
    }
    heard
}

pub fn save_and_are_told() {
    let (budget, mut draw, mut judge) = (Budget::new(12, 10), Draw::new(), Checker::new());
    let signals = heard_signals();
    let mut case = 0;
    while budget.allows(case) {
        let dir = tempfile::tempdir().unwrap();
        let (name, number) = signals[case % signals.len()];
        let (mut child, steps) = endless(dir.path());
        // Waits for some steps and a part of the next step or, if the number of steps is 0, for a part of the start-up.
        let mut said = 0;
        for _ in 0..draw.below(4) {
            said = steps.recv().unwrap_or(said);
        }
        said = steps.recv_timeout(Duration::from_micros(draw.below(30_000) as u64)).unwrap_or(said);
        // The second signal covers senders that signal both a process and its group.
        (0..1 + case % 2).for_each(|_| send(name, &child));
        let status = child.wait().unwrap();
        said = steps.iter().last().unwrap_or(said);
        let is_killed = status.signal() == Some(number) && (number == 9 || said == 0);
        assert!(is_killed || status.code() == Some(128 + number), "SIG{name} after step {said}: {status}");
        let resumed = judge.resumes(dir.path());
        assert!(resumed >= said, "SIG{name}: {said} was saved, but {resumed} is left");
        case += 1;
    }
    println!("{case} signals");
}

pub fn a_second_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (mut first, steps) = endless(dir.path());
    steps.recv().unwrap();
    let second = victim_command(dir.path(), 3).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{error}");
    assert!(error.contains(&format!("is in use by process {}", first.id())), "{error}");
    // The lock is released when the process that holds it dies.
    first.kill().unwrap();
    first.wait().unwrap();
    let saved = Checker::new().resumes(dir.path());
    let third = victim_command(dir.path(), saved + 1).output().unwrap();
    assert!(third.status.success(), "{third:?}");
}
