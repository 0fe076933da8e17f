//! A run that is killed with SIGKILL goes on from its last checkpoint with the bits of a run that was never killed.
//!
//! The program runs itself a second time as the run to be killed, so it has a `main` of its own.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use common::Run;
use gapless::engine::checkpoint::Checkpoint;
use gapless_testing::only_test;

const STEPS: u64 = 12;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, dir] = &arguments[..]
        && flag == "--victim"
    {
        return victim(Path::new(dir));
    }
    only_test("a_killed_run_goes_on_with_the_same_bits", || {
        [1, 4, 7].into_iter().for_each(a_killed_run_goes_on_with_the_same_bits);
    });
}

/// Saves after every step and says so, until it is killed.
fn victim(dir: &Path) {
    let run = Run::default();
    let mut trainer = run.trainer();
    loop {
        run.step(&mut trainer);
        trainer.save(dir, serde_json::Value::Null).unwrap();
        println!("{}", trainer.steps());
        std::io::stdout().flush().unwrap();
    }
}

fn a_killed_run_goes_on_with_the_same_bits(kill_after: u64) {
    let dir = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program).arg("--victim").arg(dir.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let reached = lines.find(|line| line.as_ref().unwrap().parse::<u64>().unwrap() >= kill_after);
    assert!(reached.is_some(), "the run ended by itself");
    child.kill().unwrap();
    child.wait().unwrap();

    let run = Run::default();
    let checkpoint = Checkpoint::latest(dir.path()).unwrap().expect("a checkpoint was saved");
    assert!(checkpoint.step() >= kill_after);
    let mut resumed = run.trainer();
    resumed.resume(&checkpoint).unwrap();
    let left = STEPS.max(resumed.steps() + 3) - resumed.steps();
    let mut straight = run.trainer();
    run.go_on(&mut straight, checkpoint.step());
    assert_eq!(run.go_on(&mut resumed, left), run.go_on(&mut straight, left));
}
