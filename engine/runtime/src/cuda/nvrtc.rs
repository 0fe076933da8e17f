//! NVIDIA's run-time compiler: found when it is asked for, or what is missing is said.
//!
//! In: a source with its headers, and an architecture. Out: machine code for it. Never: a file, a GPU, or a driver. It is loaded
//! here rather than by cudarc, which panics where a library is missing and goes by fewer names. Result codes are plain numbers,
//! as a newer library may know more of them than an enum.

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

/// Names a file that is loaded instead of whatever is installed.
const LIBRARY_VARIABLE: &str = "GAPLESS_NVRTC_LIBRARY";

/// Major versions of NVRTC, the newest first. CUDA 12 is the oldest whose C++ is that of the kernels.
const VERSIONS: [c_int; 2] = [13, 12];

/// The name under which NVRTC is installed, perhaps with its major version behind it.
const NAME: &str = "libnvrtc.so";

/// What it loads itself, by this name and its version.
const BUILTINS: &str = "libnvrtc-builtins.so";

/// `NVRTC_ERROR_COMPILATION`: it is the source that is wrong. Anything else is wrong with NVRTC, as parts of it that are missing.
const NOT_COMPILED: c_int = 6;

/// A GPU's instruction set by its compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// Before the dot.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
    /// Whether code may use what only GPUs of exactly this capability have, and runs on no other (`sm_90a`).
    pub is_specific: bool,
}

impl Architecture {
    /// The first with `cp.async` and with tensor cores for bf16.
    pub const OLDEST: Self = Self::new(8, 0);

    /// The one with products of warpgroups.
    pub const WARPGROUPS: Self = Self::new(9, 0);

    /// By the numbers before and behind the dot.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor, is_specific: false }
    }

    /// What a family is compiled for to run on this; none if it cannot. Instructions that one capability has alone need code for it alone.
    pub fn of_family(self, family: Family) -> Option<Self> {
        match family.has_warpgroups() {
            true => {
                (Self { is_specific: false, ..self } == Self::WARPGROUPS).then_some(Self { is_specific: true, ..self })
            }
            false => Some(self),
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

/// Machine code of one source.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// A CUBIN.
    pub code: Vec<u8>,
    /// What each of its kernels takes.
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
            /// The library is NVRTC.
            unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of NVRTC's header, which has kept them since its first version.
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

/// The compiler in this process. It is never unloaded.
pub struct Nvrtc {
    functions: Functions,
    version: (c_int, c_int),
    /// Numbers as 90 for sm_90.
    architectures: Vec<c_int>,
    _library: libloading::Library,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version()).finish_non_exhaustive()
    }
}

impl Nvrtc {
    /// The compiler, where it is installed. For a driver of this major version of CUDA the same version comes first, then older
    /// ones: a driver takes their code, and may refuse that of newer ones.
    ///
    /// # Errors
    /// [`KernelError::Missing`] with what was looked for, and the remedy.
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
            // What the loader finds of a version, and what Python's packages have of it.
            None => names(driver)
                .into_iter()
                .flat_map(|name| {
                    let packaged = in_packages(&name).into_iter().map(PathBuf::into_os_string);
                    [OsString::from(name)].into_iter().chain(packaged)
                })
                .collect(),
        };
        for name in names {
            // NVRTC loads its builtins by name when it compiles, and most versions do not look beside themselves.
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

    /// Loads a file as NVRTC, or says why not.
    fn open(name: &std::ffi::OsStr) -> Result<Self, String> {
        let text = |error: libloading::Error| {
            // The loader's own words are in the source.
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
        };
        // SAFETY: loading NVRTC runs nothing but its own set-up. What else a user names is theirs to answer for.
        let library = unsafe { libloading::Library::new(name) }.map_err(text)?;
        // SAFETY: a library with this name and these functions is NVRTC.
        let functions = unsafe { Functions::of(&library) }.map_err(text)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the results outlive the calls.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        // SAFETY: as above.
        let code = if code == 0 { unsafe { (functions.architecture_count)(&mut count) } } else { code };
        let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many as it said.
        let code = if code == 0 { unsafe { (functions.architectures)(architectures.as_mut_ptr()) } } else { code };
        match code {
            0 => Ok(Self { functions, version: (major, minor), architectures, _library: library }),
            code => Err(functions.text(code)),
        }
    }

    /// Its version, as people write it.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The file that it was loaded from, where this can be known.
    pub fn library(&self) -> String {
        taken(&[NAME]).pop().unwrap_or_else(|| "unknown".into())
    }

    /// What kernels are compiled with. A part of the cache's key.
    pub(super) fn options(architecture: Architecture) -> [String; 5] {
        [
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
            // Products and sums are fused where that is closer to the truth; nothing else is traded for speed.
            "--fmad=true".into(),
            // Before 13.2, NVRTC takes the body of a generic lambda for a host's function, and refuses it.
            "--device-as-default-execution-space".into(),
            // Figures of each kernel in the log; the code is the same.
            "--ptxas-options=-v".into(),
        ]
    }

    /// The machine code of a family for an architecture, and what its kernels take.
    ///
    /// # Errors
    /// [`KernelError::UnknownArchitecture`] when this version has never heard of it, [`KernelError::DoesNotCompile`] with the
    /// compiler's words.
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
        // SAFETY: all texts outlive the program, and there are as many headers as names.
        let created = unsafe {
            let headers = HEADERS.len() as c_int;
            let (source, name) = (source.as_ptr(), name.as_ptr());
            (self.functions.create)(&mut program.program, source, name, headers, texts.as_ptr(), names.as_ptr())
        };
        self.expect("nvrtcCreateProgram", created)?;
        // SAFETY: the program was created, and there are as many options.
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
        // SAFETY: the program was compiled, and the result outlives the call.
        self.expect("nvrtcGetCUBINSize", unsafe { (self.functions.cubin_size)(program.program, &mut bytes) })?;
        let mut code = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it said.
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
    /// What NVRTC has to say about a code.
    fn text(&self, code: c_int) -> String {
        // SAFETY: any code may be asked about; texts are NVRTC's own.
        let text = unsafe { (self.error_string)(code) };
        match text.is_null() {
            true => format!("code {code}"),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        }
    }
}

/// The names to look for, the best first.
fn names(driver: Option<i32>) -> Vec<String> {
    let driver = driver.unwrap_or(c_int::MAX);
    let (too_new, others): (Vec<c_int>, Vec<c_int>) = VERSIONS.into_iter().partition(|&version| version > driver);
    let named = |version: c_int| format!("{NAME}.{version}");
    others.into_iter().map(named).chain([NAME.to_owned()]).chain(too_new.into_iter().map(named)).collect()
}

/// A program, to be destroyed.
struct Started<'a> {
    functions: &'a Functions,
    program: Program,
}

impl Started<'_> {
    /// What the compiler wrote.
    fn text(&self) -> Option<String> {
        let mut bytes = 0;
        // SAFETY: the program exists, and the result outlives the call.
        if unsafe { (self.functions.log_size)(self.program, &mut bytes) } != 0 {
            return None;
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it said.
        let code = unsafe { (self.functions.log)(self.program, log.as_mut_ptr().cast()) };
        (code == 0).then(|| String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: it was created, and is destroyed once. There is nothing to be done about one that cannot be.
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
        assert!(text.contains("cannot compile for sm_10; it knows sm_"), "{text}");
    }
}
