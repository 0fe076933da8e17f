//! The memory that PyTorch and gapless reserve for eight training loops that a real PyTorch runs over a simulated driver.
//!
//! ```sh
//! cargo run --release -p gapless-torch --example loops -- FOLDER [--python PYTHON] [--size small|full] [--iterations N]
//! ```
//!
//! `FOLDER` has `loops.py`, and `FAKECUDA_LIBDIR` the simulated driver (see the folder's README). Each loop runs with
//! PyTorch's allocator in its two modes, with a plan that is made in the run, and with the plan that this run has saved.
//! Then each runs on a device with 1 % more memory than the most bytes that are requested at once. Calls are those that map
//! or unmap memory after the first iteration.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

const LOOPS: [(&str, bool); 8] = [
    ("gpt2", false),
    ("gpt2", true),
    ("pipe", false),
    ("pipe", true),
    ("interleaved", false),
    ("interleaved", true),
    ("moe", false),
    ("moe", true),
];

type Failure = Box<dyn std::error::Error>;

/// The arguments, and a folder for reports and plans.
struct Bench {
    folder: PathBuf,
    python: String,
    size: String,
    iterations: String,
    library: PathBuf,
    scratch: PathBuf,
}

/// One run of a loop.
struct Run {
    peak: u64,
    out_of_memory: bool,
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("the folder with loops.py is missing")?;
    // This file is target/release/examples/loops. Cargo builds the library of an example into target/release/deps.
    let example = std::env::current_exe()?;
    let library = example.ancestors().nth(2).ok_or("no target folder")?.join("deps/libgapless_torch.so");
    let scratch = std::env::temp_dir().join(format!("gapless-torch-loops-{}", std::process::id()));
    let (python, size, iterations) = ("python3".into(), "full".into(), "20".into());
    let mut bench = Bench { folder: folder.into(), python, size, iterations, library, scratch };
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--python" => bench.python = value,
            "--size" => bench.size = value,
            "--iterations" => bench.iterations = value,
            _ => return Err(format!("{flag} is not an option").into()),
        }
    }
    std::fs::create_dir_all(&bench.scratch)?;
    println!("device's peak ÷ most bytes requested at once (rounded to 512)");
    println!(
        "{:<24} {:>15}  {:>7}  {:>10}  {:>18}  {:>10}  {:>12}  | on a card 1 % larger",
        "loop", "most requested", "default", "expandable", "planned in the run", "saved plan", "calls"
    );
    for loop_ in LOOPS {
        bench.row(loop_)?;
    }
    std::fs::remove_dir_all(&bench.scratch)?;
    Ok(())
}

impl Bench {
    fn row(&self, loop_: (&str, bool)) -> Result<(), Failure> {
        let name = format!("{}{}", loop_.0, if loop_.1 { " --checkpoint" } else { "" });
        let ours = self.library.to_str().ok_or("the library's path is not UTF-8")?;
        let whole = 80.0;
        let recorded = self.run(loop_, ours, whole)?;
        let (most, calls) = (self.figure("most_requested")?, self.figure("later_device_calls")?);
        let saved = self.run(loop_, ours, whole)?;
        let saved_calls = self.figure("later_device_calls")?;
        // Only a saved plan is played in all iterations.
        let is_planned = self.figure("exact_iterations")? == self.figure("iterations")?;
        let (default, expandable) = (self.run(loop_, "default", whole)?, self.run(loop_, "expandable", whole)?);
        let small = most as f64 * 1.01 / (1u64 << 30) as f64;
        let fits = |run: Run| if run.out_of_memory { "out of memory" } else { "runs" };
        let tight = ["default", "expandable", ours].map(|allocator| self.run(loop_, allocator, small).map(fits));
        let [tight_default, tight_expandable, tight_ours] = tight;
        let ratio = |run: &Run| run.peak as f64 / most as f64;
        println!(
            "{name:<24} {most:>15}  {:>7.4}  {:>10.4}  {:>18.4}  {:>10}  {:>12}  | default {}, expandable {}, gapless {}",
            ratio(&default),
            ratio(&expandable),
            ratio(&recorded),
            if is_planned { format!("{:.4}", ratio(&saved)) } else { "not saved".into() },
            format!("{calls}, {saved_calls}"),
            tight_default?,
            tight_expandable?,
            tight_ours?,
        );
        for file in std::fs::read_dir(&self.scratch)? {
            std::fs::remove_file(file?.path())?;
        }
        Ok(())
    }

    /// A figure of the last run's report.
    fn figure(&self, name: &str) -> Result<u64, Failure> {
        let report: Value = serde_json::from_slice(&std::fs::read(self.report())?)?;
        Ok(report[0][name].as_u64().ok_or_else(|| format!("the report has no {name}"))?)
    }

    fn report(&self) -> PathBuf {
        self.scratch.join("report.json")
    }

    fn run(&self, (name, checkpoint): (&str, bool), allocator: &str, gib: f64) -> Result<Run, Failure> {
        let mut command = Command::new(&self.python);
        command.arg("-B").arg(self.folder.join("loops.py")).arg(name).args(checkpoint.then_some("--checkpoint"));
        command.args(["--size", &self.size, "--iterations", &self.iterations, "--allocator", allocator]);
        command.args(["--gib", &gib.to_string()]).env("GAPLESS_TORCH_REPORT", self.report());
        command.env("GAPLESS_TORCH_PLAN", self.scratch.join("plan"));
        let output = command.output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        // Without the Python package, a request without memory gets a null pointer, which PyTorch reports like this.
        if errors.contains("its data is not allocated yet") {
            return Ok(Run { peak: 0, out_of_memory: true });
        }
        read(&output.stdout).ok_or_else(|| format!("{name}: {errors}").into())
    }
}

/// Reads the line that `loops.py` prints.
fn read(line: &[u8]) -> Option<Run> {
    let value: Value = serde_json::from_slice(line).ok()?;
    Some(Run { peak: value["device_peak"].as_u64()?, out_of_memory: !value["error"].is_null() })
}
