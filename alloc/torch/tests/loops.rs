//! A real PyTorch over a simulated driver: training loops in their small size, with and without disturbances, and the Python
//! package. Needs `GAPLESS_TORCH_LOOPS`, the folder of `loops.py`, with `FAKECUDA_LIBDIR`, and `GAPLESS_TORCH_PYTHON`, a
//! Python with PyTorch.

use std::path::{Path, PathBuf};
use std::process::Command;

use gapless_testing::{few, not_checked};
use serde_json::Value;

/// The programs and folders that the tests need.
struct Torch {
    /// The folder of `loops.py`.
    loops: PathBuf,
    library: PathBuf,
    /// A folder of the test, removed at the end.
    scratch: PathBuf,
}

impl Torch {
    /// Returns `None` if something is missing, and says so.
    fn new(test: &str) -> Option<Self> {
        let Some(loops) = std::env::var_os("GAPLESS_TORCH_LOOPS").map(PathBuf::from) else {
            not_checked(format_args!("{test}: GAPLESS_TORCH_LOOPS names no folder with loops.py"));
            return None;
        };
        let Some(library) = library() else {
            not_checked(format_args!("{test}: cargo built no libgapless_torch.so here"));
            return None;
        };
        let scratch =
            std::env::temp_dir().join(format!("gapless-torch-{}-{}", test.replace(' ', "-"), std::process::id()));
        std::fs::create_dir_all(&scratch).unwrap();
        Some(Self { loops, library, scratch })
    }

    fn python() -> Command {
        Command::new(std::env::var_os("GAPLESS_TORCH_PYTHON").unwrap_or_else(|| "python3".into()))
    }

    /// Runs a script of `tests/python` with the package and the simulated driver, and returns its output.
    fn script(&self, name: &str, arguments: &[&str]) -> String {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let driver =
            PathBuf::from(std::env::var_os("FAKECUDA_LIBDIR").expect("FAKECUDA_LIBDIR has the simulated driver"));
        let preloaded = ["cuda.so.1", "cudart.so.13", "cublas.so.13", "cublasLt.so.13", "cudnn.so.9", "cupti.so.13"];
        let preloaded: Vec<String> = (preloaded.iter().chain(&["nvidia-ml.so.1"]))
            .map(|library| driver.join(format!("lib{library}")).display().to_string())
            .collect();
        let mut command = Self::python();
        command.arg("-B").arg(here.join("tests/python").join(name)).args(arguments);
        command.env("PYTHONPATH", here.join("python")).env("LD_PRELOAD", preloaded.join(":"));
        command.env("GAPLESS_TORCH_LOOPS", &self.loops).env("GAPLESS_TORCH_LIBRARY", &self.library);
        command.env("GAPLESS_TORCH_WAIT", "1").env("FAKECUDA_MEM_BYTES", (1u64 << 30).to_string());
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let text = String::from_utf8(output.stdout).unwrap() + &errors;
        assert!(output.status.success(), "{name} {arguments:?}: {text}");
        text
    }

    /// Runs a loop and returns its line and the report.
    fn run(&self, name: &str) -> (Value, Value) {
        let mut command = Self::python();
        command.arg("-B").arg(self.loops.join("loops.py"));
        command.args([name, "--size", "small", "--iterations", "6", "--allocator"]).arg(&self.library);
        command.env("GAPLESS_TORCH_CHECK", "1").env("GAPLESS_TORCH_WAIT", "1");
        command.env("GAPLESS_TORCH_PLAN", self.scratch.join(name));
        command.env("GAPLESS_TORCH_REPORT", self.scratch.join("report"));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let line = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"));
        (line, serde_json::from_slice(&std::fs::read(self.scratch.join("report")).unwrap()).unwrap())
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// The library as cargo built it for this test.
fn library() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let folders = test.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("libgapless_torch.so")).find(|path| path.exists())
}

#[test]
fn pytorch_plays_a_plan() {
    let Some(torch) = Torch::new("PyTorch's requests") else { return };
    for name in ["pipe", "gpt2"] {
        let (line, first) = torch.run(name);
        assert_eq!(first[0]["planned"], first[0]["lower_bound"], "{first}");
        assert_eq!((&first[0]["deviations"], &first[0]["exact_iterations"]), (&0.into(), &5.into()), "{first}");
        let (saved_line, second) = torch.run(name);
        assert_eq!((&second[0]["deviations"], &second[0]["exact_iterations"]), (&0.into(), &6.into()), "{second}");
        for (line, report) in [(line, first), (saved_line, second)] {
            assert_eq!(report[0]["later_device_calls"], 0, "{report}");
            // A few pages of 2 MiB: these models are small.
            let bound = report[0]["most_requested"].as_f64().unwrap() * 1.005 + f64::from(8 << 20);
            assert!(line["device_peak"].as_f64().unwrap() <= bound, "{line}\n{report}");
        }
    }
    let (line, report) = torch.run("moe");
    let bound = report[0]["most_requested"].as_f64().unwrap() * 1.03 + f64::from(2 << 20);
    assert!(line["device_peak"].as_f64().unwrap() <= bound, "{line}\n{report}");
}

/// Evaluations, exceptions, other batches, kept tensors, uses by another stream and `empty_cache` at random. The checker
/// sees every request, and play of a loop that repeats is exact again at the end.
#[test]
fn disturbances_are_survived() {
    let Some(torch) = Torch::new("disturbed loops") else { return };
    const LOOPS: [&str; 8] = [
        "gpt2",
        "interleaved-checkpoint",
        "moe",
        "moe-checkpoint",
        "pipe",
        "pipe-checkpoint",
        "interleaved",
        "gpt2-checkpoint",
    ];
    for (seed, name) in few(&LOOPS, 2).iter().enumerate() {
        let text = torch.script("disturbances.py", &[name, &seed.to_string(), "60"]);
        let report: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        let exact = report["exact_iterations"].as_u64().unwrap();
        assert!(report["deviations"].as_u64().unwrap() > 0, "{name}: {report}");
        assert!(exact > 5 || name.starts_with("moe"), "{name}: {report}");
    }
    // Without disturbances, Python ends normally.
    let text = torch.script("disturbances.py", &["gpt2", "0", "6"]);
    let report: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&report["exact_iterations"], &report["deviations"]), (&5.into(), &0.into()), "{report}");
}

#[test]
fn the_python_package_does_what_it_says() {
    let Some(torch) = Torch::new("the Python package") else { return };
    let folder = torch.scratch.to_str().unwrap();
    assert!(torch.script("package.py", &["before_install", folder]).contains("ok"));
    // The second run plays the first one's plan from the start.
    for exact in [5, 6] {
        let text = torch.script("package.py", &["plays", folder]);
        assert!(text.contains(&format!("\"exact\": {exact}")) && text.contains("RuntimeError"), "{text}");
    }
    let compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into())).arg("--version").output();
    match compiler {
        Ok(output) if output.status.success() => {
            assert!(torch.script("package.py", &["out_of_memory", folder]).contains("ok"));
        }
        _ => not_checked("torch.OutOfMemoryError: there is no C++ compiler"),
    }
}
