//! Tests of the calls to NVIDIA's libraries on machines without a GPU. The tests use a fake driver, cuBLASLt, NVRTC
//! and NCCL (the *double*), which were written from NVIDIA's documentation (`on_host/driver`). The fake libraries
//! report every call that the documentation forbids.
//!
//! Each test starts its own program again, in a process whose loader finds the fakes under the names of NVIDIA's
//! libraries.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::process::{Command, Output};

use gapless_testing::fake_driver::{BROKEN_RULE, LIBRARIES, VARIABLE, libraries, use_fake_driver};

use super::{gpu, host};

/// The prefix of the output lines that report a resource that was not released.
const LEFT: &str = "left at the end:";

/// The fake driver, as seen by a process that runs on it.
pub struct Double(libloading::Library);

impl Double {
    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the types are those of double.hpp.
        unsafe { *self.0.get::<T>(name).expect("a function of double.hpp") }
    }

    /// Sets one of the settings listed in double.hpp.
    pub fn set(&self, name: &str, value: u64) {
        let (set, name): (unsafe extern "C" fn(*const c_char, u64), _) = (self.function("double_set"), c(name));
        // SAFETY: the function has this type, and the text outlives the call.
        unsafe { set(name.as_ptr(), value) };
    }

    /// Makes a later call of this driver function fail: the `number`-th from now on, counted from 1.
    pub fn fail(&self, call: &str, number: u64, code: i32) {
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.function("double_fail");
        // SAFETY: as above.
        unsafe { fail(c(call).as_ptr(), number, code) };
    }

    fn text(&self, name: &str) -> String {
        let text: unsafe extern "C" fn() -> *const c_char = self.function(name);
        // SAFETY: the text is valid until the next call of the same function.
        unsafe { CStr::from_ptr(text()) }.to_string_lossy().into_owned()
    }

    /// Describes the resources that have not been released.
    pub fn left(&self) -> String {
        self.text("double_left")
    }

    /// Returns the functions called since the last query, with the number of calls.
    pub fn calls(&self) -> Vec<(String, u64)> {
        let line = |line: &str| {
            let (name, count) = line.split_once(' ').expect("a name and a number");
            (name.to_owned(), count.parse().expect("a number"))
        };
        self.text("double_calls").lines().map(line).collect()
    }
}

fn c(text: &str) -> CString {
    CString::new(text).expect("no zero bytes")
}

/// Runs a test on the fake driver. Checks that the test breaks no rule and releases everything. `name` is the name of
/// the test function in `module`.
pub fn judge(module: &str, name: &str, judge: impl FnOnce(&Double)) {
    if let Some(double) = loaded() {
        judge(&double);
        assert_eq!(double.left(), "", "was not given back");
    } else if folder().is_some() {
        expect_well(&["--exact", &path(module, name)], &[], true);
    }
}

/// Runs a function that breaks rules on the fake driver, and returns the output lines that report them. Returns
/// `None` in the process that runs on the fake driver, which only produces the output.
pub fn told(module: &str, name: &str, break_rules: impl FnOnce()) -> Option<Vec<String>> {
    if loaded().is_some() {
        break_rules();
        return None;
    }
    let path = path(module, name);
    folder()?;
    let output = run(&["--exact", &path], &[]);
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{path}: {}\n{said}\n{told}", output.status);
    Some(told.lines().filter_map(|line| line.strip_prefix(BROKEN_RULE)).map(|line| line.trim().to_owned()).collect())
}

/// Returns the fake driver, or `None` if this process does not run on it.
fn loaded() -> Option<Double> {
    std::env::var_os(VARIABLE)?;
    // SAFETY: this is the fake library, which runs no code when it is loaded.
    Some(Double(unsafe { libloading::Library::new(LIBRARIES[0].0) }.expect("the double of the driver")))
}

/// Returns the full name of a test, given its module path with the crate's name.
fn path(module: &str, name: &str) -> String {
    let (_, module) = module.split_once("::").expect("a module of this crate");
    format!("{module}::{name}")
}

/// Runs tests that get their device from [`gpu`], on the fake driver. Checks that they pass and break no rule. With
/// `gives_back`, also checks that they release everything; this is not the case for tests of single kernels, which
/// share a device that is never released. The `settings` (see double.hpp) are set to 1. Returns the tests' output.
pub fn expect_well(judges: &[&str], settings: &[&str], gives_back: bool) -> String {
    let output = run(judges, settings);
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && !told.contains(BROKEN_RULE), "{judges:?}: {}\n{said}\n{told}", output.status);
    assert!(!gives_back || !told.contains(LEFT), "{judges:?}: {told}");
    assert!(told.contains("the double of the driver was asked"), "{judges:?} ask nothing of a device:\n{said}");
    said.into_owned()
}

/// Runs tests of this program on the fake driver.
fn run(tests: &[&str], settings: &[&str]) -> Output {
    let settings = settings.iter().map(|name| (format!("GAPLESS_DOUBLE_{name}"), "1"));
    command(tests).envs(settings).output().expect("this program runs")
}

fn command(tests: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(tests).env("GAPLESS_TEST_DEVICE", "cuda");
    use_fake_driver(&mut command);
    command
}

/// Returns the folder of the fake libraries, which are compiled on the first call. Returns `None` if there is no
/// compiler, if a real GPU is selected, or in a process that runs on the fake driver.
#[track_caller]
pub fn folder() -> Option<&'static Path> {
    let is_needed = std::env::var_os(VARIABLE).is_none() && !gpu::is_asked_for() && host::is_there();
    is_needed.then(libraries)
}

mod calls;
mod judges;
mod nccl;
mod rules;
mod tune;
