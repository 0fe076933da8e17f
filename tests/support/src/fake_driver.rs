//! The simulated device and the fake libraries of NVIDIA, which a C++ compiler builds from
//! `engine/src/tests/cuda/on_host`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The environment variable that marks a process that runs on the fake driver.
pub const VARIABLE: &str = "GAPLESS_DOUBLE";

/// The beginning of the lines that a process on the fake driver prints if it breaks a rule of the documentation.
pub const BROKEN_RULE: &str = "double of the driver:";

/// The supported C++ compilers.
pub const COMPILERS: [&str; 3] = ["g++", "clang++", "c++"];

/// The fake libraries and their sources. The first one is the driver, on which the others depend.
pub const LIBRARIES: [(&str, &[&str]); 4] = [
    ("libcuda.so.1", &["context.cpp", "memory.cpp", "module.cpp", "stream.cpp", "event.cpp"]),
    ("libcublasLt.so.13", &["cublaslt.cpp", "descriptors.cpp", "product.cpp"]),
    ("libnvrtc.so.13", &["nvrtc.cpp"]),
    ("libnccl.so.2", &["nccl.cpp"]),
];

/// The folder of the headers of kernels.
pub const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../engine/kernels/src/cuda/kernels");
const ON_HOST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../engine/src/tests/cuda/on_host");

/// Compiler options for kernels and the simulated device.
const FLAGS: [&str; 9] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    // Clang says of a loop that a GPU's compiler would unroll that it does not.
    "-Wno-pass-failed",
    // The fibers use longjmp to switch stacks, which the fortified version rejects.
    "-U_FORTIFY_SOURCE",
];

/// Compiler options for the fake libraries.
const LIBRARY_FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"];

/// The object file of the simulated device.
const DEVICE: &str = "device.o";

/// Returns the first C++ compiler that is installed, or `None` if there is none.
pub fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    let runs = |name: &str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    *FOUND.get_or_init(|| COMPILERS.into_iter().find(|name| runs(name)))
}

/// Makes a program find the fake libraries under the names of NVIDIA's. Such a program sees a GPU, whose kernels run on
/// the CPU.
///
/// # Panics
/// Panics if there is no [`compiler`], or if the libraries cannot be built.
pub fn use_fake_driver(program: &mut Command) {
    let folder = libraries();
    let quoted = kernel_options().into_iter().map(|option| format!(" '{}'", option.to_string_lossy()));
    let compiler = quoted.fold(compiler().expect("asked before").to_owned(), |words, option| words + &option);
    program
        .envs([("LD_LIBRARY_PATH", folder), ("GAPLESS_CACHE", &folder.join("cache"))])
        .env(VARIABLE, "1")
        // NVRTC appends the folder and the file.
        .env("GAPLESS_DOUBLE_COMPILER", compiler)
        .env("GAPLESS_DOUBLE_KEPT", simulated_device())
        .env_remove("GAPLESS_NVRTC_LIBRARY");
}

/// Returns the folder of the fake libraries, which are built on the first call.
///
/// # Panics
/// Panics if there is no [`compiler`], or if the libraries cannot be built.
pub fn libraries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let texts = std::fs::read_dir(Path::new(ON_HOST).join("driver")).expect("the fake driver's sources");
        // The folder also caches the kernels that the fake NVRTC compiles, so the simulated device is part of the key.
        let device = ["device.hpp", "device.cpp"].map(|text| Path::new(ON_HOST).join(text));
        let texts = texts.map(|text| text.expect("a file").path()).chain(device);
        kept("double", texts.collect(), b"", build_libraries)
    })
}

/// Returns the compiler options for kernels, which precede the kernel's file.
pub fn kernel_options() -> Vec<OsString> {
    let mut options = FLAGS.map(OsString::from).to_vec();
    options.extend(["-shared", "-include"].map(OsString::from));
    options.extend([Path::new(ON_HOST).join("device.hpp"), simulated_device().join(DEVICE)].map(OsString::from));
    options.extend(["-x", "c++"].map(OsString::from));
    options
}

/// Returns the folder for compiled kernels, which also contains the simulated device.
pub fn simulated_device() -> &'static Path {
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

/// Returns where the library of a kernel's source is kept for one of several simulated devices. A file can only be loaded
/// once, so each device has its own. The fake NVRTC keeps what it compiles at the same place, for device 0.
pub fn kept_library(source: &str, device: usize) -> PathBuf {
    let fnv_1a = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = source.bytes().fold(0xcbf2_9ce4_8422_2325, fnv_1a);
    simulated_device().join(format!("{hash:016x}-{device}.so"))
}

/// Compiles to a temporary file and renames it, so that no other process sees an incomplete file.
///
/// # Panics
/// Panics with the compiler's messages if the source does not compile.
pub fn build(arguments: impl IntoIterator<Item = OsString>, output: &Path) {
    let draft = output.with_extension(format!("{}.draft", std::process::id()));
    finish(start(arguments.into_iter().chain(["-o".into(), draft.clone().into()])));
    std::fs::rename(&draft, output).expect("the folder is ours");
}

fn build_libraries(folder: &Path) {
    let object = |source: &str| folder.join(source).with_extension("o");
    let texts = || LIBRARIES.iter().flat_map(|(_, texts)| texts.iter().copied());
    let compiling: Vec<Child> = texts()
        .map(|text| {
            let source = Path::new(ON_HOST).join("driver").join(text);
            start(LIBRARY_FLAGS.map(OsString::from).into_iter().chain([
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
        #[cfg(unix)]
        {
            let short = &name[..name.find(".so").expect("a library") + 3];
            std::os::unix::fs::symlink(name, folder.join(short)).expect("a link");
        }
    }
    texts().map(object).for_each(|object| std::fs::remove_file(object).expect("it was made above"));
}

fn start(arguments: impl IntoIterator<Item = OsString>) -> Child {
    let mut command = Command::new(compiler().expect("asked before"));
    command.args(arguments).stderr(Stdio::piped()).spawn().expect("the compiler runs")
}

fn finish(compiler: Child) {
    let output = compiler.wait_with_output().expect("the compiler ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns a folder next to the test program, whose name ends with a hash of `texts` and `tools`. If the folder does
/// not exist, `make` fills it, and folders for other contents are removed.
fn kept(name: &str, mut texts: Vec<PathBuf>, tools: &[u8], make: impl FnOnce(&Path)) -> PathBuf {
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
