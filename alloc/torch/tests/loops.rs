//! Two training loops of a real PyTorch over a simulated driver, in their small size. Needs `GAPLESS_TORCH_LOOPS`, the
//! folder of `loops.py`, with `FAKECUDA_LIBDIR`, and `GAPLESS_TORCH_PYTHON`, a Python with PyTorch.

use std::path::{Path, PathBuf};
use std::process::Command;

use gapless_testing::not_checked;
use serde_json::Value;

/// The library as cargo built it for this test.
fn library() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let folders = test.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("libgapless_torch.so")).find(|path| path.exists())
}

/// Runs a loop and returns its line and the report.
fn run(folder: &Path, scratch: &Path, name: &str, library: &Path) -> (Value, Value) {
    let python = std::env::var_os("GAPLESS_TORCH_PYTHON").unwrap_or_else(|| "python3".into());
    let mut command = Command::new(python);
    command.arg("-B").arg(folder.join("loops.py")).args([name, "--size", "small", "--iterations", "6", "--allocator"]);
    command.arg(library).env("GAPLESS_TORCH_CHECK", "1").env("GAPLESS_TORCH_WAIT", "1");
    command.env("GAPLESS_TORCH_PLAN", scratch.join(name)).env("GAPLESS_TORCH_REPORT", scratch.join("report"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let line = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"));
    (line, serde_json::from_slice(&std::fs::read(scratch.join("report")).unwrap()).unwrap())
}

#[test]
fn pytorch_plays_a_plan() {
    let Some(folder) = std::env::var_os("GAPLESS_TORCH_LOOPS").map(PathBuf::from) else {
        return not_checked("PyTorch's requests: GAPLESS_TORCH_LOOPS names no folder with loops.py");
    };
    let Some(library) = library() else {
        return not_checked("PyTorch's requests: cargo built no libgapless_torch.so here");
    };
    let scratch = std::env::temp_dir().join(format!("gapless-torch-test-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    for (name, most) in [("pipe", 1.005), ("gpt2", 1.005)] {
        let (_, first) = run(&folder, &scratch, name, &library);
        assert_eq!(first[0]["planned"], first[0]["lower_bound"], "{first}");
        assert_eq!((&first[0]["deviations"], &first[0]["exact_iterations"]), (&0.into(), &3.into()), "{first}");
        let (line, second) = run(&folder, &scratch, name, &library);
        assert_eq!((&second[0]["deviations"], &second[0]["exact_iterations"]), (&0.into(), &6.into()), "{second}");
        // Whole pages of 2 MiB.
        let bound = second[0]["most_requested"].as_f64().unwrap() * most + f64::from(2 << 20);
        assert!(line["device_peak"].as_f64().unwrap() <= bound, "{line}\n{second}");
    }
    let (line, report) = run(&folder, &scratch, "moe", &library);
    let bound = report[0]["most_requested"].as_f64().unwrap() * 1.03 + f64::from(2 << 20);
    assert!(line["device_peak"].as_f64().unwrap() <= bound, "{line}\n{report}");
    std::fs::remove_dir_all(scratch).unwrap();
}
