//! NVIDIA's run-time compiler, NVRTC. Its library is loaded at the first use. If this fails, the error lists the
//! files that were tried.
//!
//! - In: a source, its headers, and an architecture.
//! - Out: machine code for this architecture.
//! - Never: the use of a GPU, of a driver, or of a file other than NVRTC's libraries.
//!
//! The library is not loaded by cudarc, which panics if a library is missing and tries fewer file names. Result codes
//! are plain integers, because a newer library may return codes that an enum would not contain.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use gapless_communicator::MissingLibrary;
use gapless_kernels::cuda::{Family, HEADERS};

use super::error::KernelError;
use super::libraries::{in_packages, keep_siblings, taken};
use super::resources::Resources;

/// The environment variable with the path of a library to load instead of an installed one.
const LIBRARY_VARIABLE: &str = "GAPLESS_NVRTC_LIBRARY";

/// Supported major versions of NVRTC, newest first. CUDA 12 is the oldest with a C++ compiler that accepts the
/// kernels.
const VERSIONS: [c_int; 2] = [13, 12];

/// The file name under which NVRTC is installed. A dot and the major version may follow it.
const NAME: &str = "libnvrtc.so";

/// The start of the file names of the builtins library, which NVRTC loads itself.
const BUILTINS: &str = "libnvrtc-builtins.so";

/// `NVRTC_ERROR_COMPILATION`: the source contains an error. All other codes mean a problem of NVRTC itself, such as
/// missing files.
const NOT_COMPILED: c_int = 6;

/// A GPU's instruction set, identified by its compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// The part of the compute capability before the dot.
    pub major: u32,
    /// The part of the compute capability after the dot.
    pub minor: u32,
    /// True for code that may use features of exactly this capability (`sm_90a`). Such code runs on no other GPUs.
    pub is_specific: bool,
}

impl Architecture {
    /// The oldest supported architecture: the first with `cp.async` and with tensor cores for bf16.
    pub const OLDEST: Self = Self::new(8, 0);

    /// The only architecture with `wgmma`, the matrix products of warpgroups.
    pub const WARPGROUPS: Self = Self::new(9, 0);

    /// Returns the architecture of a compute capability, given by the numbers before and after the dot.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor, is_specific: false }
    }

    /// Returns the architecture for which a family must be compiled to run on this one. Returns `None` if the family
    /// cannot run on it. Families that use warpgroups are compiled as specific code (`sm_90a`), and no others are.
    pub fn of_family(self, family: Family) -> Option<Self> {
        match family.has_warpgroups() {
            true => {
                (Self { is_specific: false, ..self } == Self::WARPGROUPS).then_some(Self { is_specific: true, ..self })
            }
            false => (!self.is_specific).then_some(self),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.is_specific { "a" } else { "" })
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("unknown architecture {text:?}; write, for example, sm_90 or sm_90a");
        let digits = text.strip_prefix("sm_").ok_or_else(unknown)?;
        let (digits, is_specific) = digits.strip_suffix('a').map_or((digits, false), |digits| (digits, true));
        let number: u32 = digits.parse().map_err(|_| unknown())?;
        Ok(Self { major: number / 10, minor: number % 10, is_specific })
    }
}

/// The machine code compiled from one source.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The code as a CUBIN file.
    pub code: Vec<u8>,
    /// The resources that each of its kernels uses.
    pub kernels: Vec<Resources>,
}

/// A program of NVRTC.
type Program = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
        }

        impl Functions {
            /// # Safety
            /// The library must be NVRTC.
            unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those in NVRTC's header. They have not changed since NVRTC's first version.
                unsafe {
                    Ok(Self {
                        $($field: *library.get($symbol)?,)*
                        error_string: *library.get("nvrtcGetErrorString")?,
                    })
                }
            }
        }
    };
}

functions! {
    version = "nvrtcVersion" (*mut c_int, *mut c_int);
    architecture_count = "nvrtcGetNumSupportedArchs" (*mut c_int);
    architectures = "nvrtcGetSupportedArchs" (*mut c_int);
    create = "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    compile = "nvrtcCompileProgram" (Program, c_int, *const *const c_char);
    destroy = "nvrtcDestroyProgram" (*mut Program);
    log_size = "nvrtcGetProgramLogSize" (Program, *mut usize);
    log = "nvrtcGetProgramLog" (Program, *mut c_char);
    cubin_size = "nvrtcGetCUBINSize" (Program, *mut usize);
    cubin = "nvrtcGetCUBIN" (Program, *mut c_char);
}

/// The compiler, loaded into this process. It is never unloaded.
pub struct Nvrtc {
    functions: Functions,
    version: (c_int, c_int),
    /// The supported architectures as integers, such as 90 for sm_90.
    architectures: Vec<c_int>,
    _library: libloading::Library,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version()).finish_non_exhaustive()
    }
}

impl Nvrtc {
    /// Returns the compiler, which is loaded by the first call. `driver` is the driver's major CUDA version. The
    /// order of preference is: NVRTC of the driver's version, older versions, newer versions. Newer ones come last,
    /// because the driver may refuse their code.
    ///
    /// # Errors
    /// Returns [`KernelError::Missing`] if NVRTC cannot be loaded. The error lists the files that were tried, and
    /// says what to install.
    pub fn load(driver: Option<i32>) -> Result<&'static Self, KernelError> {
        static LOADED: OnceLock<Nvrtc> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let found = Self::find(std::env::var_os(LIBRARY_VARIABLE), driver).map_err(KernelError::Missing)?;
        Ok(LOADED.get_or_init(|| found))
    }

    fn find(variable: Option<OsString>, driver: Option<i32>) -> Result<Self, MissingLibrary> {
        let mut tried = Vec::new();
        let names: Vec<OsString> = match variable.filter(|name| !name.is_empty()) {
            Some(name) => vec![name],
            // For each version, first try the library that the system's loader finds, and then the ones in Python
            // packages.
            None => names(driver)
                .into_iter()
                .flat_map(|name| {
                    let packaged = in_packages(&name).into_iter().map(PathBuf::into_os_string);
                    [OsString::from(name)].into_iter().chain(packaged)
                })
                .collect(),
        };
        for name in names {
            // NVRTC loads its builtins by name when it compiles. Most versions do not search their own folder for the
            // builtins, so they are loaded here.
            keep_siblings(Path::new(&name), BUILTINS);
            match Self::open(&name) {
                Ok(library) => return Ok(library),
                Err(why) => tried.push((name.to_string_lossy().into_owned(), why)),
            }
        }
        Err(MissingLibrary {
            what: "NVRTC, CUDA's run-time compiler",
            tried,
            remedy: "install it (Debian and Ubuntu: the package cuda-nvrtc of the driver's CUDA version; Python: \
                     nvidia-cuda-nvrtc, which is found if that python3 is on PATH), or put its file's path into \
                     GAPLESS_NVRTC_LIBRARY",
        })
    }

    /// Loads a file as NVRTC, or returns the reason why this failed.
    fn open(name: &std::ffi::OsStr) -> Result<Self, String> {
        let text = |error: libloading::Error| {
            // The message of the system's loader is in the error's source.
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
        };
        // SAFETY: loading NVRTC only runs its own initialization. If the user has named another file, the user is
        // responsible for the code that loading runs.
        let library = unsafe { libloading::Library::new(name) }.map_err(text)?;
        // SAFETY: a library with this name and these functions is NVRTC.
        let functions = unsafe { Functions::of(&library) }.map_err(text)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the results outlive the calls.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        // SAFETY: `count` outlives the call.
        let code = if code == 0 { unsafe { (functions.architecture_count)(&mut count) } } else { code };
        let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many architectures as the library has counted.
        let code = if code == 0 { unsafe { (functions.architectures)(architectures.as_mut_ptr()) } } else { code };
        match code {
            0 => Ok(Self { functions, version: (major, minor), architectures, _library: library }),
            code => Err(functions.text(code)),
        }
    }

    /// Returns the version of NVRTC, such as "13.0".
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Returns the path of the file that NVRTC was loaded from, or "unknown" if the system does not report it.
    pub fn library(&self) -> String {
        taken(&[NAME]).pop().unwrap_or_else(|| "unknown".into())
    }

    /// Returns the compiler options for kernels, which are part of the cache's key.
    pub(super) fn options(architecture: Architecture) -> [String; 5] {
        [
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
            // A multiplication and an addition may be fused into one operation, which rounds once. No other option
            // trades accuracy for speed.
            "--fmad=true".into(),
            // Without this option, NVRTC before 13.2 takes the body of a generic lambda for host code and rejects it.
            "--device-as-default-execution-space".into(),
            // Makes the assembler write the resource use of each kernel into the log. It does not change the code.
            "--ptxas-options=-v".into(),
        ]
    }

    /// Compiles a kernel family for an architecture. Returns the machine code and the resources that its kernels use.
    ///
    /// # Errors
    /// Returns [`KernelError::UnknownArchitecture`] if this version of NVRTC does not support the architecture, and
    /// [`KernelError::DoesNotCompile`] with the compiler's log if the source has an error. Returns
    /// `KernelError::Nvrtc` if NVRTC itself fails.
    pub fn compile(&self, family: Family, architecture: Architecture) -> Result<Compiled, KernelError> {
        self.compile_source(family.file(), family.source(), architecture)
    }

    fn compile_source(
        &self,
        file: &'static str,
        source: &str,
        architecture: Architecture,
    ) -> Result<Compiled, KernelError> {
        let number = architecture.major * 10 + architecture.minor;
        if !self.architectures.iter().any(|&known| u32::try_from(known) == Ok(number)) {
            let known: Vec<String> = self.architectures.iter().map(|known| format!("sm_{known}")).collect();
            let (version, architecture) = (self.version(), architecture.to_string());
            return Err(KernelError::UnknownArchitecture { version, architecture, known: known.join(", ") });
        }
        let c = |text: &str| CString::new(text).expect("sources and options have no zero bytes");
        let (source, name) = (c(source), c(file));
        let (names, texts): (Vec<CString>, Vec<CString>) =
            HEADERS.iter().map(|&(name, text)| (c(name), c(text))).unzip();
        let options = Self::options(architecture).map(|option| c(&option));
        let pointers = |of: &[CString]| of.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program = Started { functions: &self.functions, program: std::ptr::null_mut() };
        // SAFETY: all texts outlive the program, and there are as many header texts as names.
        let created = unsafe {
            let headers = HEADERS.len() as c_int;
            let (source, name) = (source.as_ptr(), name.as_ptr());
            (self.functions.create)(&mut program.program, source, name, headers, texts.as_ptr(), names.as_ptr())
        };
        self.expect("nvrtcCreateProgram", created)?;
        // SAFETY: the program was created, and the number of options is correct.
        let compiled = unsafe { (self.functions.compile)(program.program, options.len() as c_int, options.as_ptr()) };
        let log = program.text();
        if compiled != 0 {
            let log = log.filter(|log| !log.is_empty());
            let what = [Some(self.functions.text(compiled)), log].into_iter().flatten().collect::<Vec<_>>().join(": ");
            if compiled != NOT_COMPILED {
                return Err(KernelError::Nvrtc { call: "nvrtcCompileProgram", what });
            }
            let (version, architecture) = (self.version(), architecture.to_string());
            return Err(KernelError::DoesNotCompile { file, architecture, version, log: what });
        }
        let mut bytes = 0;
        // SAFETY: the program was compiled, and `bytes` outlives the call.
        self.expect("nvrtcGetCUBINSize", unsafe { (self.functions.cubin_size)(program.program, &mut bytes) })?;
        let mut code = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as the library has reported.
        self.expect("nvrtcGetCUBIN", unsafe { (self.functions.cubin)(program.program, code.as_mut_ptr().cast()) })?;
        Ok(Compiled { code, kernels: Resources::of_log(&log.unwrap_or_default()) })
    }

    fn expect(&self, call: &'static str, code: c_int) -> Result<(), KernelError> {
        match code {
            0 => Ok(()),
            code => Err(KernelError::Nvrtc { call, what: self.functions.text(code) }),
        }
    }
}

impl Functions {
    /// Returns NVRTC's message for a result code.
    fn text(&self, code: c_int) -> String {
        // SAFETY: the function accepts any code; the texts are static strings of NVRTC.
        let text = unsafe { (self.error_string)(code) };
        match text.is_null() {
            true => format!("code {code}"),
            // SAFETY: NVRTC returned a static, terminated string, which is not null.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        }
    }
}

/// Returns the file names to look for, the preferred one first.
fn names(driver: Option<i32>) -> Vec<String> {
    let driver = driver.unwrap_or(c_int::MAX);
    let (too_new, others): (Vec<c_int>, Vec<c_int>) = VERSIONS.into_iter().partition(|&version| version > driver);
    let named = |version: c_int| format!("{NAME}.{version}");
    others.into_iter().map(named).chain([NAME.to_owned()]).chain(too_new.into_iter().map(named)).collect()
}

/// A program of NVRTC, which is destroyed on drop.
struct Started<'a> {
    functions: &'a Functions,
    program: Program,
}

impl Started<'_> {
    /// Returns the compiler's log, or `None` if NVRTC does not provide it.
    fn text(&self) -> Option<String> {
        let mut bytes = 0;
        // SAFETY: the program exists, and the result outlives the call.
        if unsafe { (self.functions.log_size)(self.program, &mut bytes) } != 0 {
            return None;
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as the library has reported.
        let code = unsafe { (self.functions.log)(self.program, log.as_mut_ptr().cast()) };
        (code == 0).then(|| String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created, and is only destroyed here. An error is ignored, because nothing can
            // be done about it.
            let _ = unsafe { (self.functions.destroy)(&mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_symbol_are_named() {
        let missing = |name: &str| Nvrtc::find(Some(name.into()), None).map(|_| ()).unwrap_err().to_string();
        let text = missing("/nowhere/libnvrtc.so.13");
        assert!(text.contains("No such file or directory") && text.contains(LIBRARY_VARIABLE), "{text}");
        let text = missing("libc.so.6");
        assert!(text.contains("undefined symbol: nvrtcVersion"), "{text}");
    }

    #[test]
    fn code_that_a_driver_may_refuse_is_the_last_resort() {
        assert_eq!(names(None), ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]);
        assert_eq!(names(Some(13)), names(None));
        assert_eq!(names(Some(14)), names(None));
        assert_eq!(names(Some(12)), ["libnvrtc.so.12", "libnvrtc.so", "libnvrtc.so.13"]);
    }

    #[test]
    fn architectures_have_names() {
        for (name, architecture) in [
            ("sm_80", Architecture::OLDEST),
            ("sm_90a", Architecture { is_specific: true, ..Architecture::new(9, 0) }),
            ("sm_100", Architecture::new(10, 0)),
        ] {
            assert_eq!(name.parse(), Ok(architecture));
            assert_eq!(architecture.to_string(), name);
        }
        assert!(["sm_", "90", "sm_a", "compute_90"].iter().all(|name| name.parse::<Architecture>().is_err()));
    }

    #[test]
    fn errors_carry_the_compilers_words() {
        let nvrtc = match Nvrtc::load(None) {
            Ok(nvrtc) => nvrtc,
            Err(error) => return gapless_testing::not_checked(error),
        };
        let wrong = nvrtc.compile_source("wrong.cu", "#include \"base.cuh\"\nu32 x = y;", Architecture::new(9, 0));
        let text = wrong.unwrap_err().to_string();
        assert!(text.contains("wrong.cu(2)") && text.contains("identifier \"y\" is undefined"), "{text}");
        let text = nvrtc.compile(Family::Norm, Architecture::new(1, 0)).unwrap_err().to_string();
        assert!(text.contains("cannot compile for sm_10; it supports sm_"), "{text}");
    }
}
