//! Checks which cases generated tests draw, and what these tests print past the harness. The program starts itself
//! again and inspects the output.

use std::path::Path;
use std::process::{Command, Output};

use gapless_testing::not_checked;
use gapless_testing::prelude::*;

/// The environment variable that activates the tests below. If it is not set, they check nothing.
const SUBJECT: &str = "GAPLESS_TESTING_SUBJECT";

fn is_asked(what: &str) -> bool {
    std::env::var(SUBJECT).is_ok_and(|asked| asked == what)
}

generated! {
    #![cases(5)]

    #[test]
    fn shows_its_cases(x: u64, y in 0..10u8) {
        if is_asked("shown") {
            println!("case {x} {y}");
        }
        prop_assert!(!is_asked("failed"));
    }
}

#[test]
fn lacks_something() {
    if is_asked("lacking") {
        (0..3).for_each(|_| not_checked("there is no\n  such thing"));
    }
}

/// Runs one of the tests above in a new process, and returns its output.
fn run(test: &str, asked: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--test-threads", "2"]).args((asked == "shown").then_some("--nocapture"));
    for variable in ["GAPLESS_EXPLORE", "GAPLESS_SEED", "GAPLESS_SLOW_TESTS"] {
        command.env_remove(variable);
    }
    command.env(SUBJECT, asked);
    command.envs(variables.iter().copied()).output().expect("this program runs")
}

/// Runs the generated test. Returns the cases that the test draws, and the line that it prints about exploring.
fn cases(variables: &[(&str, &str)]) -> (Vec<String>, String) {
    let output = run("generated::shows_its_cases", "shown", variables);
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{out}{err}");
    let explored = err.lines().find(|line| line.starts_with("explored: ")).unwrap_or_default();
    (out.lines().filter(|line| line.starts_with("case ")).map(str::to_owned).collect(), explored.to_owned())
}

#[test]
fn cases_are_the_same_until_others_are_asked_for() {
    let (first, explored) = cases(&[]);
    assert_eq!((first.len(), explored.as_str()), (2, ""));
    assert_eq!(cases(&[]).0, first);
    let (of_another_seed, _) = cases(&[("GAPLESS_SEED", "7")]);
    assert!(of_another_seed.len() == 2 && of_another_seed != first);
    assert_eq!(cases(&[("GAPLESS_SEED", "7")]).0, of_another_seed);
    let (slow, _) = cases(&[("GAPLESS_SLOW_TESTS", "1")]);
    assert!(slow.len() == 5 && slow.starts_with(&first));
}

#[test]
fn exploring_draws_new_cases_which_can_be_drawn_again() {
    let (drawn, explored) = cases(&[("GAPLESS_EXPLORE", "0.05")]);
    let (count, first) = explored.split_once(" cases, GAPLESS_SEED=").expect(&explored);
    assert!(count.ends_with(&format!(": {}", drawn.len())), "{explored}");
    assert_ne!(cases(&[("GAPLESS_EXPLORE", "0.05")]).0[0], drawn[0]);
    let last = (first.parse::<u64>().unwrap() + drawn.len() as u64 - 1).to_string();
    let (again, explored) = cases(&[("GAPLESS_EXPLORE", "0"), ("GAPLESS_SEED", &last)]);
    assert_eq!(again, drawn[drawn.len() - 1..]);
    assert!(explored.contains(": 1 cases, "), "{explored}");
}

#[test]
fn a_failure_is_not_written_down_unless_exploring() {
    let output = run("generated::shows_its_cases", "failed", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && text.contains("minimal failing input"), "{text}");
    assert!(!Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/draws.regressions").exists());
}

#[test]
fn what_is_not_checked_is_said_in_one_line() {
    let output = run("lacks_something", "lacking", &[]);
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "not checked: lacks_something: there is no such thing\n");
}
