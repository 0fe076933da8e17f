//! Tests of the calls to NVIDIA's libraries on machines without a GPU. The tests use a fake driver, cuBLASLt, NVRTC
//! and NCCL (the *double*), which were written from NVIDIA's documentation (`on_host/driver`). The fake libraries
//! report every call that the documentation forbids.
//!
//! Each test starts its own program again, in a process whose loader finds the fakes under the names of NVIDIA's
//! libraries.

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use super::{gpu, host};

/// The environment variable that marks a process that runs on the fake driver.
const VARIABLE: &str = "GAPLESS_DOUBLE";

/// The prefixes of the output lines that report a broken rule, and a resource that was not released.
const BROKEN: &str = "double of the driver:";
const LEFT: &str = "left at the end:";

/// The fake libraries and their sources. The first one is the driver, on which the others depend.
const LIBRARIES: [(&str, &[&str]); 4] = [
    ("libcuda.so.1", &["context.cpp", "memory.cpp", "module.cpp", "stream.cpp", "event.cpp"]),
    ("libcublasLt.so.13", &["cublaslt.cpp", "descriptors.cpp", "product.cpp"]),
    ("libnvrtc.so.13", &["nvrtc.cpp"]),
    ("libnccl.so.2", &["nccl.cpp"]),
];

/// Compiler options for the fake libraries.
const OPTIONS: [&str; 6] = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"];

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
    } else if let Some(folder) = folder() {
        expect_well(folder, &["--exact", &path(module, name)], &[], true);
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
    let output = run(folder()?, &["--exact", &path], &[]);
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{path}: {}\n{said}\n{told}", output.status);
    Some(told.lines().filter_map(|line| line.strip_prefix(BROKEN)).map(|line| line.trim().to_owned()).collect())
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
pub fn expect_well(folder: &Path, judges: &[&str], settings: &[&str], gives_back: bool) -> String {
    let output = run(folder, judges, settings);
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && !told.contains(BROKEN), "{judges:?}: {}\n{said}\n{told}", output.status);
    assert!(!gives_back || !told.contains(LEFT), "{judges:?}: {told}");
    assert!(told.contains("the double of the driver was asked"), "{judges:?} ask nothing of a device:\n{said}");
    said.into_owned()
}

/// Runs tests of this program on the fake driver.
fn run(folder: &Path, tests: &[&str], settings: &[&str]) -> Output {
    let settings = settings.iter().map(|name| (format!("GAPLESS_DOUBLE_{name}"), "1"));
    command(folder, tests).envs(settings).output().expect("this program runs")
}

fn command(folder: &Path, tests: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(tests)
        .envs([("LD_LIBRARY_PATH", folder), ("GAPLESS_CACHE", &folder.join("cache"))])
        .envs([(VARIABLE, OsStr::new("1")), ("GAPLESS_TEST_DEVICE", OsStr::new("cuda"))])
        .env("GAPLESS_DOUBLE_COMPILER", compiler_of_kernels())
        .env_remove("GAPLESS_NVRTC_LIBRARY");
    command
}

/// Returns the folder of the fake libraries, which are compiled on the first call. Returns `None` if there is no
/// compiler, if a real GPU is selected, or in a process that runs on the fake driver.
#[track_caller]
pub fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let is_needed = std::env::var_os(VARIABLE).is_none() && !gpu::is_asked_for() && host::is_there();
    is_needed.then(|| FOLDER.get_or_init(made).as_path())
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests/cuda/on_host")
}

fn made() -> PathBuf {
    let texts = std::fs::read_dir(sources().join("driver")).expect("the double's sources");
    // The folder also caches the kernels that the fake NVRTC compiles, so the simulated device is part of the key.
    let device = ["device.hpp", "device.cpp"].map(|text| sources().join(text));
    let texts = texts.map(|text| text.expect("a file").path()).chain(device);
    host::kept("double", texts.collect(), b"", compile)
}

/// Returns the command by which the fake NVRTC compiles a kernel, as shell words. NVRTC appends the folder and the
/// file.
fn compiler_of_kernels() -> String {
    let options = host::kernel_options();
    let quoted = options.iter().map(|option| format!(" '{}'", option.to_string_lossy()));
    quoted.fold(host::compiler().expect("asked before").to_owned(), |words, option| words + &option)
}

fn compile(folder: &Path) {
    let object = |source: &str| folder.join(source).with_extension("o");
    let texts = || LIBRARIES.iter().flat_map(|(_, texts)| texts.iter().copied());
    let compiling: Vec<Child> = texts()
        .map(|text| {
            let source = sources().join("driver").join(text);
            start(OPTIONS.map(OsString::from).into_iter().chain([
                "-c".into(),
                source.into(),
                "-o".into(),
                object(text).into(),
            ]))
        })
        .collect();
    compiling.into_iter().for_each(finish);
    for (name, texts) in LIBRARIES {
        let mut arguments: Vec<OsString> = vec!["-shared".into(), format!("-Wl,-soname,{name}").into()];
        arguments.extend(texts.iter().map(|text| object(text).into()));
        // The other libraries call the first one, so they are linked to it.
        let first = LIBRARIES[0].0;
        arguments.extend((name != first).then(|| folder.join(first).into()));
        let library = folder.join(name);
        arguments.extend(["-o".into(), library.into(), "-ldl".into()]);
        finish(start(arguments));
        // cudarc tries the short name first. Without this link, it could find a real library by that name.
        let short = &name[..name.find(".so").expect("a library") + 3];
        std::os::unix::fs::symlink(name, folder.join(short)).expect("a link");
    }
    texts().map(object).for_each(|object| std::fs::remove_file(object).expect("it was made above"));
}

fn start(arguments: impl IntoIterator<Item = OsString>) -> Child {
    let mut command = Command::new(host::compiler().expect("asked before"));
    command.args(arguments).stderr(Stdio::piped()).spawn().expect("the compiler runs")
}

fn finish(compiler: Child) {
    let output = compiler.wait_with_output().expect("the compiler ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

mod calls;
mod judges;
mod nccl;
mod rules;
mod tune;
