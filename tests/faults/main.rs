//! Fault injection. Whatever happens to a run or its files, there are two allowed outcomes. The run resumes with the
//! bits of an uninterrupted run, or it is refused with an error that names the file. No checkpoint that the run has
//! reported as saved may be lost.
//!
//! The program runs itself a second time as the victim, so it has its own `main`. By default, each test tries a
//! sample of cases. `GAPLESS_FAULTS=SECONDS` divides that time among the tests, and `GAPLESS_SEED=N` draws another
//! sample. `GAPLESS_SOAK=MINUTES` keeps a run of four ranks going for that time, with a kill every minute.

#[path = "../common/mod.rs"]
mod common;
mod corruptions;
#[cfg(target_os = "linux")]
mod file_calls;
#[cfg(unix)]
mod outputs;
mod preparation;
#[cfg(unix)]
mod signals;
mod soak;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use common::{TinyRun, VOCABULARY, on_cpu, parameters};
use gapless::engine::checkpoint::Checkpoint;
use gapless::models::{Gpt, GptConfig};
use gapless::run::{Console, RunFolder, Stop};
use gapless::{MemoryOptions, StepOptions, TrainOptions, Trainer};
use gapless_testing::only_test;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, dir, steps] = &arguments[..]
        && flag == "--victim"
    {
        return victim(Path::new(dir), steps.parse().expect("a number of steps")).unwrap_or_else(|error| {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{error:#}\n").as_bytes());
            ExitCode::FAILURE
        });
    }
    if let [_, flag, dir] = &arguments[..]
        && flag == "--prepare"
    {
        return preparation::prepare(Path::new(dir), "cache").map_or(ExitCode::FAILURE, |_| ExitCode::SUCCESS);
    }
    only_test("corruptions_are_seen", corruptions::are_seen);
    only_test("a_kill_while_text_is_tokenized_loses_nothing", preparation::a_kill_loses_nothing);
    #[cfg(target_os = "linux")]
    {
        only_test("a_kill_at_any_file_call_loses_nothing", file_calls::a_kill_loses_nothing);
        only_test("an_error_of_any_file_call_loses_nothing", file_calls::an_error_loses_nothing);
    }
    #[cfg(unix)]
    {
        only_test("signals_save_and_are_told_by_the_exit_code", signals::save_and_are_told);
        only_test("a_second_run_in_a_folder_is_refused", signals::a_second_run_is_refused);
        only_test("training_goes_on_unheard", outputs::training_goes_on_unheard);
        only_test("a_full_disk_loses_nothing", outputs::a_full_disk_loses_nothing);
        only_test("a_limit_of_file_sizes_loses_nothing", outputs::a_limit_of_file_sizes_loses_nothing);
    }
    let name = "a_run_that_is_killed_again_and_again_is_the_same_run";
    only_test(name, soak::a_run_that_is_killed_again_and_again_is_the_same_run);
    ExitCode::SUCCESS
}

/// The victim, a run like `train_gpt`. It resumes from the newest checkpoint of a folder, saves after every step, and
/// reports each save.
fn victim(dir: &Path, steps: u64) -> anyhow::Result<ExitCode> {
    let folder = RunFolder::open(dir)?;
    let checkpoint = Checkpoint::latest(folder.checkpoints())?;
    let (run, mut trainer) = tiny();
    if let Some(checkpoint) = &checkpoint {
        trainer.resume(checkpoint)?;
    }
    folder.claim()?;
    let mut console = Console::default();
    console.write_rows(&dir.join("rows.jsonl"), true)?;
    let stop = Stop::on_signals()?;
    while trainer.steps() < steps && stop.signal().is_none() {
        run.step(&mut trainer);
        folder.save(&mut trainer, serde_json::Value::Null)?;
        console.row(&trainer.steps());
        console.say(trainer.steps());
    }
    Ok(console.exit_code(&stop)?)
}

fn victim_command(dir: &Path, steps: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.arg("--victim").arg(dir).arg(steps.to_string());
    command
}

/// Creates a run whose checkpoints only have a few kilobytes, and a trainer of this run.
fn tiny() -> (TinyRun, Trainer) {
    let options = TrainOptions {
        step: StepOptions {
            batch: 2,
            sequence: 8,
            memory: MemoryOptions { planning: common::PLANNING, ..on_cpu().step.memory },
            ..on_cpu().step
        },
        threads: 1,
        seed: 7,
        ..on_cpu()
    };
    let run = TinyRun { options: options.clone(), ..TinyRun::default() };
    let config = GptConfig {
        vocabulary: VOCABULARY as usize,
        sequence: 8,
        layers: 1,
        heads: 1,
        width: 8,
        dropout: 0.1,
        ..GptConfig::default()
    };
    let trainer = Trainer::new(|vb| Gpt::new(&config, vb), options).expect("the model is sound");
    (run, trainer)
}

/// Compares resumed runs with a run that was never interrupted.
struct Checker {
    run: TinyRun,
    straight: Trainer,
    /// Parameters after each step.
    reference: Vec<Vec<(String, u64)>>,
    resumed: Trainer,
}

impl Checker {
    fn new() -> Self {
        let ((run, straight), (_, resumed)) = (tiny(), tiny());
        let reference = vec![parameters(&straight)];
        Self { run, straight, reference, resumed }
    }

    fn expected(&mut self, step: u64) -> &[(String, u64)] {
        while self.reference.len() as u64 <= step {
            self.run.step(&mut self.straight);
            self.reference.push(parameters(&self.straight));
        }
        &self.reference[step as usize]
    }

    /// Resumes from a checkpoint and does one step, which also reveals wrong optimizer states. Returns the step of the
    /// checkpoint, or the error of resuming.
    fn goes_on(&mut self, checkpoint: &Checkpoint) -> Result<u64, String> {
        self.resumed.resume(checkpoint).map_err(|error| error.to_string())?;
        let step = checkpoint.step();
        assert_eq!(parameters(&self.resumed), self.expected(step), "after resuming step {step}");
        self.run.step(&mut self.resumed);
        let next = parameters(&self.resumed);
        assert_eq!(next, self.expected(step + 1), "a step after resuming step {step}");
        Ok(step)
    }

    /// Resumes from the newest checkpoint of a run's folder, and returns its step. Returns 0 if there is no
    /// checkpoint.
    fn resumes(&mut self, dir: &Path) -> u64 {
        let checkpoint = Checkpoint::latest(&dir.join("checkpoints")).expect("what is left is sound");
        checkpoint.map_or(0, |checkpoint| self.goes_on(&checkpoint).expect("what is left is sound"))
    }
}

/// Creates a run's folder with the checkpoints of two steps.
fn two_steps() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let status = victim_command(dir.path(), 2).stdout(std::process::Stdio::null()).status().unwrap();
    assert!(status.success(), "{status}");
    dir
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// The number of cases that a test tries: the declared number, or as many as fit into the test's percentage of the
/// given time.
struct Budget {
    cases: usize,
    until: Option<Instant>,
}

impl Budget {
    fn new(cases: usize, share: u64) -> Self {
        let seconds: Option<u64> = std::env::var("GAPLESS_FAULTS").ok().and_then(|seconds| seconds.parse().ok());
        Self { cases, until: seconds.map(|seconds| Instant::now() + Duration::from_millis(10 * seconds * share)) }
    }

    fn allows(&self, done: usize) -> bool {
        self.until.map_or(done < self.cases, |until| Instant::now() < until)
    }
}

/// Random numbers that depend only on the seed.
struct Draw(u64);

impl Draw {
    fn new() -> Self {
        Self(std::env::var("GAPLESS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(gapless_testing::SEED))
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end.max(1) as u64) as usize
    }
}
