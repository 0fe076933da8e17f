//! Compiles kernels for the CPU, and runs them on a simulated device.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString, c_char, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::{gpu, products};
use crate::cuda::{Family, Kernel, Launch};

/// The parameters of a run, with the layout of `Run` in device.hpp.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Run {
    grid: [u32; 3],
    block: u32,
    shared_bytes: u32,
    is_reversed: u32,
}

/// The supported C++ compilers.
const COMPILERS: [&str; 3] = ["g++", "clang++", "c++"];

/// Returns the first C++ compiler that is installed, or `None` if there is none.
pub fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    let runs = |name: &str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    *FOUND.get_or_init(|| COMPILERS.into_iter().find(|name| runs(name)))
}

/// True if there is a GPU or a C++ compiler. If there is neither, reports that the test is skipped.
#[track_caller]
pub fn is_there() -> bool {
    let is_there = gpu::is_asked_for() || compiler().is_some();
    if !is_there {
        gapless_testing::not_checked(format_args!("there is no C++ compiler, none of {}", COMPILERS.join(", ")));
    }
    is_there
}

/// True if the device that runs launches has `wgmma`; the simulated device has it.
pub fn has_warpgroups() -> bool {
    gpu::features().is_none_or(|features| features.warpgroups)
}

/// The compiled kernels of a family; `None` before the first use. Locked while a kernel runs, because the library
/// library simulates one device.
type Device = &'static Mutex<Option<libloading::Library>>;

/// Returns the device of a family, which may not have been compiled yet.
fn device_of(family: Family) -> Device {
    static DEVICES: Mutex<BTreeMap<Family, Device>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    devices.entry(family).or_insert_with(|| Box::leak(Box::new(Mutex::new(None))))
}

/// Runs a launch, with blocks and threads in ascending or descending order. On a GPU, the order is the GPU's own.
///
/// # Safety
/// The addresses in the launch's arguments must point to memory as large as the kernel assumes.
pub unsafe fn run(launch: &Launch, is_reversed: bool) -> Result<(), String> {
    if let Some(ran) = gpu::run(launch) {
        return ran;
    }
    match launch {
        // SAFETY: the caller guarantees it.
        Launch::Kernel(kernel) => unsafe { start(kernel, is_reversed) },
        Launch::Product(product) => {
            // SAFETY: as above.
            unsafe { products::compute(product) };
            Ok(())
        }
        Launch::Copy(_) | Launch::CopyEnd(_) => Err("this device has no host memory to copy to".into()),
    }
}

/// # Safety
/// The same as for [`run`].
unsafe fn start(kernel: &Kernel, is_reversed: bool) -> Result<(), String> {
    let mut device = device_of(kernel.family).lock().map_err(|_| "another kernel of the family has failed")?;
    let library = device.get_or_insert_with(|| compile(kernel.family));
    let symbol = |suffix: &str| format!("{}{suffix}", kernel.name);
    // SAFETY: device.hpp defines these two functions for every kernel.
    let (bytes, entry) = unsafe {
        let bytes = library.get::<unsafe extern "C" fn() -> u64>(symbol("_bytes")).map_err(|e| e.to_string())?;
        type Entry = unsafe extern "C" fn(*const Run, *const c_void) -> *const c_char;
        (bytes, library.get::<Entry>(symbol("")).map_err(|e| e.to_string())?)
    };
    // SAFETY: the function takes no arguments.
    let (theirs, ours) = (unsafe { bytes() }, kernel.arguments.as_ref().bytes());
    if theirs != ours as u64 {
        return Err(format!("the arguments of {} are {theirs} bytes, not {ours}", kernel.name));
    }
    let Kernel { grid, block, shared_bytes, .. } = *kernel;
    let run = Run { grid, block, shared_bytes, is_reversed: u32::from(is_reversed) };
    // SAFETY: the struct has the size that the kernel expects, and the caller guarantees the memory.
    let error = unsafe { entry(&run, kernel.arguments.as_ref().address()) };
    match error.is_null() {
        true => Ok(()),
        // SAFETY: the text belongs to the library, which stays loaded.
        false => Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()),
    }
}

/// Compiles a family for the CPU and loads it. Uses the library of an earlier test run if the source is the same.
fn compile(family: Family) -> libloading::Library {
    let folder = compiled();
    let library = folder.join(format!("{}.so", blake3::hash(family.source().as_bytes()).to_hex()));
    if !library.exists() {
        let mut text = tempfile::NamedTempFile::new_in(folder).expect("room for a source");
        text.write_all(family.source().as_bytes()).expect("room for a source");
        build(kernel_options().into_iter().chain(["-I".into(), KERNELS.into(), text.path().into()]), &library);
    }
    // SAFETY: the library was built above, and runs no code when it is loaded.
    unsafe { libloading::Library::new(&library) }.expect("a shared library")
}

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/src/cuda/kernels");
const ON_HOST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tests/cuda/on_host");

/// Returns the compiler options for kernels, which precede the kernel's file.
pub fn kernel_options() -> Vec<OsString> {
    let mut options = FLAGS.map(OsString::from).to_vec();
    options.extend(["-shared", "-include"].map(OsString::from));
    options.extend([Path::new(ON_HOST).join("device.hpp"), compiled().join(DEVICE)].map(OsString::from));
    options.extend(["-x", "c++"].map(OsString::from));
    options
}

/// The object file of the simulated device.
const DEVICE: &str = "device.o";

/// Returns the folder for compiled kernels, which also contains the simulated device.
fn compiled() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let version = Command::new(compiler().expect("asked before")).arg("--version").output().expect("it has run");
        let texts = [KERNELS, ON_HOST].into_iter().flat_map(|folder| std::fs::read_dir(folder).expect("sources"));
        let texts = texts.map(|text| text.expect("a file").path()).filter(|text| text.is_file());
        let tools = [&version.stdout[..], FLAGS.join(" ").as_bytes()].concat();
        kept("on-host", texts.collect(), &tools, |folder| {
            let source = Path::new(ON_HOST).join("device.cpp");
            let options = FLAGS.map(OsString::from).into_iter().chain(["-O2".into(), "-c".into(), source.into()]);
            build(options, &folder.join(DEVICE));
        })
    })
}

/// Returns a folder next to the test program, whose name ends with a hash of `texts` and `tools`. If the folder does
/// not exist, `make` fills it, and folders for other contents are removed.
pub fn kept(name: &str, mut texts: Vec<PathBuf>, tools: &[u8], make: impl FnOnce(&Path)) -> PathBuf {
    texts.sort();
    let mut hash = blake3::Hasher::new();
    hash.update(tools);
    for text in &texts {
        hash.update(&std::fs::read(text).expect("a source"));
    }
    let program = std::env::current_exe().expect("this program");
    let beside = program.parent().expect("a folder");
    let prefix = format!("{name}-");
    let folder = beside.join(format!("{prefix}{}", &hash.finalize().to_hex()[..16]));
    if !folder.exists() {
        let old = std::fs::read_dir(beside).expect("a folder").map(|entry| entry.expect("an entry"));
        let is_old = |file: &std::ffi::OsStr| file.to_string_lossy().starts_with(&prefix);
        for old in old.filter(|entry| is_old(&entry.file_name()) && entry.path().is_dir()) {
            std::fs::remove_dir_all(old.path()).expect("what is of no use any more");
        }
        let making = tempfile::tempdir_in(beside).expect("a folder beside this program");
        make(making.path());
        // Another process may have created the folder in the meantime.
        let is_there = std::fs::rename(making.keep(), &folder).is_ok() || folder.exists();
        assert!(is_there, "no folder {}", folder.display());
    }
    folder
}

const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    // The fibers use longjmp to switch stacks, which the fortified version rejects.
    "-U_FORTIFY_SOURCE",
];

/// Compiles to a temporary file and renames it, so that no other process sees an incomplete file.
fn build(arguments: impl IntoIterator<Item = OsString>, output: &Path) {
    let draft = output.with_extension(format!("{}.draft", std::process::id()));
    let mut command = Command::new(compiler().expect("asked before"));
    let made = command.args(arguments).arg("-o").arg(&draft).output().expect("the compiler runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::rename(&draft, output).expect("the folder is ours");
}
