//! Finds the driver and NCCL on this machine, or reports what is missing.
//!
//! cudarc loads the driver but panics if there is none, so the presence of a driver is checked first. NCCL is loaded
//! here, because cudarc looks for `libnccl.so` and for versions that NCCL never had. The package of NCCL installs
//! `libnccl.so.2`, and only its development package installs `libnccl.so`. Loading `libnccl.so.2` before cudarc would
//! not help, since the loader searches by name.
//!
//! The types of NCCL's handles and of its configuration are cudarc's, for the NCCL version that Cargo.toml selects. The
//! configuration is passed as one of NCCL 2.18 ([`OLDEST`]), which newer libraries accept. Result codes are plain
//! integers rather than cudarc's enum, because a newer library may return codes that the enum does not have.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};

use crate::{CommunicatorError, MissingLibrary, Result};

/// The environment variable that names a file to load instead of the installed one.
pub(super) const LIBRARY_VARIABLE: &str = "GAPLESS_NCCL_LIBRARY";

/// Names under which NCCL is installed: by its package, and by its development package.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest supported version, 2.18, as NCCL encodes it. Newer versions accept this version's configuration.
pub(super) const OLDEST: c_int = 21_800;

/// A CUDA stream, as NCCL declares it.
pub(super) type Stream = *mut c_void;

/// The loaded NCCL library. It is never unloaded, because its threads keep running.
pub(super) struct Library {
    pub(super) functions: Functions,
    _library: libloading::Library,
}

/// Declares the functions that are called, all of which return a code, and loads them by symbol.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
        }

        impl Functions {
            /// # Safety
            /// The library must be NCCL, version 2.
            unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of NCCL's header, which all releases of version 2 keep.
                unsafe {
                    Ok(Self {
                        $($field: *library.get($symbol)?,)*
                        error_string: *library.get("ncclGetErrorString")?,
                        last_error: *library.get("ncclGetLastError")?,
                    })
                }
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion" (*mut c_int);
    get_unique_id = "ncclGetUniqueId" (*mut ncclUniqueId);
    init = "ncclCommInitRankConfig" (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t);
    state = "ncclCommGetAsyncError" (ncclComm_t, *mut c_int);
    finalize = "ncclCommFinalize" (ncclComm_t);
    destroy = "ncclCommDestroy" (ncclComm_t);
    abort = "ncclCommAbort" (ncclComm_t);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    send = "ncclSend" (*const c_void, usize, c_int, c_int, ncclComm_t, Stream);
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, ncclComm_t, Stream);
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream);
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream);
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, ncclComm_t, Stream);
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream);
}

impl Functions {
    /// Returns NCCL's description of a result code, with NCCL's last error.
    pub(super) fn text(&self, code: c_int, comm: ncclComm_t) -> String {
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns strings that it owns.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned(),
        };
        // SAFETY: any code is allowed, and a null communicator selects the thread's last error.
        let (what, last) = unsafe { (text((self.error_string)(code)), text((self.last_error)(comm))) };
        if last.is_empty() { what } else { format!("{what}; {last}") }
    }
}

impl Library {
    /// Loads NCCL, if the driver is installed too.
    ///
    /// # Errors
    /// Returns an error that lists everything that is missing, with remedies.
    pub(super) fn load() -> Result<&'static Self> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        // SAFETY: the driver's library may be loaded at any time.
        let driver = unsafe { cudarc::driver::sys::is_culib_present() };
        match (driver, find(std::env::var_os(LIBRARY_VARIABLE))) {
            (true, Ok(library)) => Ok(LOADED.get_or_init(|| library)),
            (true, Err(missing)) => Err(CommunicatorError::Missing { libraries: vec![missing] }),
            (false, library) => {
                let libraries = std::iter::once(driver_is_missing()).chain(library.err()).collect();
                Err(CommunicatorError::Missing { libraries })
            }
        }
    }
}

fn driver_is_missing() -> MissingLibrary {
    // These are the names that cudarc tries, except those that contain a word size, which no driver has.
    let names = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates);
    let names = names.filter(|name| !name.contains("64") && !name.contains("32") && !name.contains("libnv"));
    MissingLibrary {
        what: "NVIDIA driver",
        tried: names.map(|name| (name, String::new())).collect(),
        remedy: "install NVIDIA's driver (in a container: start it with the GPU), or train on the CPU",
    }
}

/// Loads NCCL from the file that the variable names. Without the variable, loads the first installed name that works.
fn find(variable: Option<OsString>) -> Result<Library, MissingLibrary> {
    let mut tried = Vec::new();
    for name in names(variable.as_deref()) {
        match open(&name) {
            Ok(library) => return Ok(library),
            Err(why) => tried.push((name.to_string_lossy().into_owned(), why)),
        }
    }
    Err(MissingLibrary {
        what: "NCCL",
        tried,
        remedy: "install NCCL 2.18 or later (Debian and Ubuntu: libnccl2; Python: nvidia-nccl-cu13) and put its folder on \
                 LD_LIBRARY_PATH, or its file's path into GAPLESS_NCCL_LIBRARY",
    })
}

fn names(variable: Option<&OsStr>) -> Vec<OsString> {
    match variable.filter(|name| !name.is_empty()) {
        Some(name) => vec![name.to_owned()],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

/// Loads a file as NCCL, or returns the reason why it cannot be used.
fn open(name: &OsStr) -> Result<Library, String> {
    let text = |error: libloading::Error| {
        // The loader's own message is the source error.
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
    };
    // SAFETY: loading NCCL only runs its own set-up. If the user names another file, the user is responsible for it.
    let library = unsafe { libloading::Library::new(name) }.map_err(text)?;
    // SAFETY: a library with this name and these functions is NCCL.
    let functions = unsafe { Functions::of(&library) }.map_err(text)?;
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    let code = unsafe { (functions.get_version)(&mut version) };
    match code {
        0 if version >= OLDEST => Ok(Library { functions, _library: library }),
        0 => Err(format!("it is version {}", dotted(version))),
        code => Err(functions.text(code, std::ptr::null_mut())),
    }
}

/// A version in its usual notation.
fn dotted(version: c_int) -> String {
    // Up to 2.8, the major version was encoded one decimal place lower.
    let major = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_goes_before_the_installed_names() {
        let names = |variable: Option<&str>| names(variable.map(OsStr::new));
        assert_eq!(names(None), ["libnccl.so.2", "libnccl.so"]);
        assert_eq!(names(Some("")), ["libnccl.so.2", "libnccl.so"]);
        assert_eq!(names(Some("/opt/nccl/libnccl.so.2.29.7")), ["/opt/nccl/libnccl.so.2.29.7"]);
    }

    #[test]
    fn what_is_not_nccl_is_missing_with_the_loaders_words() {
        let missing = |name: &str| find(Some(name.into())).map(|_| ()).unwrap_err().to_string();
        let text = missing("/nowhere/libnccl.so.2");
        assert!(text.starts_with("NCCL (looked for /nowhere/libnccl.so.2: "), "{text}");
        assert!(text.contains("No such file or directory") && text.contains("GAPLESS_NCCL_LIBRARY"), "{text}");
        // This library is not NCCL.
        let text = missing("libc.so.6");
        assert!(text.contains("undefined symbol: ncclGetVersion"), "{text}");
    }

    /// If the variable names a file, that file is NCCL and has all functions that are called. The test needs no driver.
    #[test]
    fn the_named_file_is_taken() {
        let Some(variable) = std::env::var_os(LIBRARY_VARIABLE) else {
            return gapless_testing::not_checked(format_args!("{LIBRARY_VARIABLE} names no library"));
        };
        let library = find(Some(variable)).map_err(|missing| missing.to_string()).unwrap();
        assert!(!library.functions.text(1, std::ptr::null_mut()).is_empty());
    }

    #[test]
    fn versions_are_written_as_people_do() {
        for (version, text) in [(22_907, "2.29.7"), (OLDEST, "2.18.0"), (2_708, "2.7.8")] {
            assert_eq!(dotted(version), text);
        }
    }
}
