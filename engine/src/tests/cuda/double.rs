//! The calls of NVIDIA's libraries, judged where there are none: by a double of the driver, of cuBLASLt, NVRTC and NCCL, which is written
//! from their documentation (`on_host/driver`), and refuses what it does not allow.
//!
//! A judge runs itself once more, in a process whose loader finds the double under the libraries' names.

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use super::{gpu, host};

/// Says that this process is one that the double judges.
const VARIABLE: &str = "GAPLESS_DOUBLE";

/// What lines begin with that tell of a broken rule, and of what was not given back.
const BROKEN: &str = "double of the driver:";
const LEFT: &str = "left at the end:";

/// The libraries, each with its sources. The others need the first.
const LIBRARIES: [(&str, &[&str]); 4] = [
    ("libcuda.so.1", &["context.cpp", "memory.cpp", "module.cpp", "stream.cpp", "event.cpp"]),
    ("libcublasLt.so.13", &["cublaslt.cpp", "descriptors.cpp", "product.cpp"]),
    ("libnvrtc.so.13", &["nvrtc.cpp"]),
    ("libnccl.so.2", &["nccl.cpp"]),
];

/// What a compiler of the double is told.
const OPTIONS: [&str; 6] = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"];

/// The double, in a process that it judges.
pub struct Double(libloading::Library);

impl Double {
    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the types are those of double.hpp.
        unsafe { *self.0.get::<T>(name).expect("a function of double.hpp") }
    }

    /// Sets something that double.hpp lists.
    pub fn set(&self, name: &str, value: u64) {
        let (set, name): (unsafe extern "C" fn(*const c_char, u64), _) = (self.function("double_set"), c(name));
        // SAFETY: the text outlives the call.
        unsafe { set(name.as_ptr(), value) };
    }

    /// Has a call of the driver's fail, counted from 1 from now on.
    pub fn fail(&self, call: &str, number: u64, code: i32) {
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = self.function("double_fail");
        // SAFETY: as above.
        unsafe { fail(c(call).as_ptr(), number, code) };
    }

    fn text(&self, name: &str) -> String {
        let text: unsafe extern "C" fn() -> *const c_char = self.function(name);
        // SAFETY: it is there until the next call of the same.
        unsafe { CStr::from_ptr(text()) }.to_string_lossy().into_owned()
    }

    /// What was not given back.
    pub fn left(&self) -> String {
        self.text("double_left")
    }

    /// Calls since this was last asked, and how often.
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

/// Has a judge, the function of this name in this module or below, run on the double; and expects that it breaks no rule and gives
/// everything back.
pub fn judge(module: &str, name: &str, judge: impl FnOnce(&Double)) {
    if let Some(double) = loaded() {
        judge(&double);
        assert_eq!(double.left(), "", "was not given back");
    } else if let Some(folder) = folder() {
        expect_well(folder, &["--exact", &path(module, name)], &[], true);
    }
}

/// Has a function run on the double that breaks rules, and returns the lines that tell of it.
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

/// The double, if it judges this process.
fn loaded() -> Option<Double> {
    std::env::var_os(VARIABLE)?;
    // SAFETY: it is the double's, which sets nothing up.
    Some(Double(unsafe { libloading::Library::new(LIBRARIES[0].0) }.expect("the double of the driver")))
}

/// A test's name, by its module's with the crate's.
fn path(module: &str, name: &str) -> String {
    let (_, module) = module.split_once("::").expect("a module of this crate");
    format!("{module}::{name}")
}

/// Has judges run on the double that ask [`gpu`] for a device; and expects that they hold and break no rule, and that they give
/// everything back: judges of single kernels share a device that nobody does. Returns what the judges print. `settings` of double.hpp
/// are 1.
pub fn expect_well(folder: &Path, judges: &[&str], settings: &[&str], gives_back: bool) -> String {
    let output = run(folder, judges, settings);
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && !told.contains(BROKEN), "{judges:?}: {}\n{said}\n{told}", output.status);
    assert!(!gives_back || !told.contains(LEFT), "{judges:?}: {told}");
    assert!(told.contains("the double of the driver was asked"), "{judges:?} ask nothing of a device:\n{said}");
    said.into_owned()
}

/// Runs tests of this program on the double.
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

/// Where the double's libraries are, once they are compiled; none where there is no compiler, or a GPU to be used instead.
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
    // What it has compiled is kept with it.
    let device = ["device.hpp", "device.cpp"].map(|text| sources().join(text));
    let texts = texts.map(|text| text.expect("a file").path()).chain(device);
    host::kept("double", texts.collect(), b"", compile)
}

/// How the double of NVRTC compiles a kernel: a shell's words, for its folder and file to follow.
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
        // The others ask the first.
        let first = LIBRARIES[0].0;
        arguments.extend((name != first).then(|| folder.join(first).into()));
        let library = folder.join(name);
        arguments.extend(["-o".into(), library.into(), "-ldl".into()]);
        finish(start(arguments));
        // A real one may be found under a shorter name, which is looked for first.
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
