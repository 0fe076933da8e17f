//! The C interface: what `torch.cuda.memory.CUDAPluggableAllocator` calls, and what the Python package calls.
//!
//! A panic never leaves a function. It may leave a device's tables half changed, so that device is not used again: its
//! requests fail, and its frees have no effect. [`gapless_torch_error`] returns the text of the error.

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gapless_alloc::{Problem, csv};

use crate::device::{Device, Options};
use crate::driver::CudaPages;
use crate::pages::{CountedPages, Pages, PagesError};

/// Devices that a process can use.
const MOST_DEVICES: usize = 64;

static DEVICES: [Mutex<Option<Device>>; MOST_DEVICES] = [const { Mutex::new(None) }; MOST_DEVICES];

/// For each device, the first and the last address of its requests plus one; 0 before it is used.
static ADDRESSES: [[AtomicU64; 2]; MOST_DEVICES] = [const { [const { AtomicU64::new(0) }; 2] }; MOST_DEVICES];

/// The file of saved plans that [`gapless_torch_save_plans`] set.
static PLANS: Mutex<Option<OsString>> = Mutex::new(None);

/// The function that [`gapless_torch_raise_with`] set, or null.
static RAISE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Bytes of each device's memory in a rehearsal; 0 outside of one.
static REHEARSED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// A C++ function that throws a text as an exception: function, file, line, text. `c10::detail::torchCheckFail` is one.
pub type Raise = unsafe extern "C-unwind" fn(*const c_char, *const c_char, c_uint, *const c_char);

/// Locks a device, which is `None` until it is used.
///
/// # Errors
/// Returns a text if a call panicked while it changed the device.
fn lock(device: usize) -> Result<MutexGuard<'static, Option<Device>>, String> {
    let failed = |_| format!("gapless: CUDA device {device} is not used any more: an earlier call panicked (a bug)");
    DEVICES[device].lock().map_err(failed)
}

/// The index of a device that a process can use.
fn known(device: c_int) -> Option<usize> {
    usize::try_from(device).ok().filter(|&device| device < MOST_DEVICES)
}

/// Runs `body` for a device, if it is in use.
fn with(device: usize, body: impl FnOnce(&mut Device)) {
    if let Ok(mut slot) = lock(device)
        && let Some(allocator) = &mut *slot
    {
        body(allocator);
    }
}

fn remember(text: String) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    ERROR.with(|error| *error.borrow_mut() = text);
}

/// Runs `body`; a panic becomes the text of an error.
fn guarded<T>(body: impl FnOnce() -> T) -> Option<T> {
    let panicked = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        remember(format!("gapless: a bug: the allocator panicked: {}", text.unwrap_or("no text")));
    };
    catch_unwind(AssertUnwindSafe(body)).map_err(panicked).ok()
}

/// Reads the options from the environment: `GAPLESS_TORCH_CHECK`, `GAPLESS_TORCH_WAIT` and, without
/// [`gapless_torch_save_plans`], `GAPLESS_TORCH_PLAN`, the saved plan's file without the device's number.
fn options(device: usize) -> Options {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
    let plan = PLANS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let plan = plan.or_else(|| std::env::var_os("GAPLESS_TORCH_PLAN")).filter(|path| !path.is_empty());
    Options {
        check: set("GAPLESS_TORCH_CHECK"),
        wait_for_plan: set("GAPLESS_TORCH_WAIT"),
        saved_plan: plan.map(|mut path| {
            path.push(format!(".{device}"));
            PathBuf::from(path)
        }),
    }
}

fn allocate(bytes: u64, device: usize, stream: u64) -> Result<u64, String> {
    let mut slot = lock(device)?;
    let allocator = match &mut *slot {
        Some(allocator) => allocator,
        None => {
            let failed = |error: PagesError| format!("gapless: CUDA device {device}: {error}");
            let mut options = options(device);
            let pages: Box<dyn Pages> = match REHEARSED.load(Ordering::Acquire) {
                0 => Box::new(CudaPages::new(device as c_int).map_err(failed)?),
                bytes => {
                    options.check = true;
                    options.wait_for_plan = true;
                    Box::new(CountedPages::new(bytes).from_address((device as u64 + 1) << 44))
                }
            };
            let allocator = slot.insert(Device::new(device, pages, options).map_err(failed)?);
            let addresses = allocator.addresses();
            ADDRESSES[device][0].store(addresses.start, Ordering::Release);
            ADDRESSES[device][1].store(addresses.end, Ordering::Release);
            allocator
        }
    };
    allocator.allocate(bytes, stream).map_err(|error| error.to_string())
}

/// Serves a request of PyTorch. If there is no memory, it throws the exception of the function that
/// [`gapless_torch_raise_with`] set; without one, it returns null.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gapless_torch_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let served = guarded(|| {
        let device = known(device).ok_or_else(|| format!("gapless: there is no CUDA device {device}"))?;
        let bytes = u64::try_from(bytes).map_err(|_| format!("gapless: {bytes} bytes were requested"))?;
        allocate(bytes, device, stream as u64)
    });
    match served {
        Some(Ok(address)) => return address as *mut c_void,
        Some(Err(text)) => remember(text),
        None => {}
    }
    throw(c"gapless_torch_alloc");
    std::ptr::null_mut()
}

/// Throws this thread's last error as a C++ exception of a function, if [`gapless_torch_raise_with`] was called.
fn throw(function: &'static CStr) {
    let raise = RAISE.load(Ordering::Acquire);
    if !raise.is_null() {
        // SAFETY: the caller of `gapless_torch_raise_with` promised a function of this type. The texts outlive the call:
        // literals, and the thread's own text, of which no reference is held. No frame here has anything to drop.
        unsafe {
            let raise: Raise = std::mem::transmute(raise);
            raise(function.as_ptr(), c"gapless".as_ptr(), 0, gapless_torch_error());
        }
    }
}

/// Makes devices that are used from now on count bytes instead of mapping memory, so that requests can be rehearsed
/// without a GPU. Each has a memory of so many bytes. Every request is checked, and plans are waited for.
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_rehearse(bytes: u64) {
    REHEARSED.store(bytes, Ordering::Release);
}

/// Frees what [`gapless_torch_alloc`] returned. Other pointers are ignored.
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_free(pointer: *mut c_void, _bytes: usize, device: c_int, _stream: *mut c_void) {
    guarded(|| {
        if let Some(device) = known(device) {
            with(device, |allocator| {
                allocator.free(pointer as u64);
            });
        }
    });
}

/// Notes that a stream uses a tensor's memory (`record_stream`). Waits for no other device: a call for one may take as
/// long as its work.
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    let address = pointer as u64;
    let holds =
        |[start, end]: &[AtomicU64; 2]| (start.load(Ordering::Acquire)..end.load(Ordering::Acquire)).contains(&address);
    guarded(|| {
        if let Some(device) = ADDRESSES.iter().position(holds) {
            with(device, |allocator| allocator.record_use(address, stream as u64));
        }
    });
}

/// Returns idle pages to the device (`torch.cuda.empty_cache`).
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_empty_cache() {
    each(Device::empty_cache);
}

/// Ends an iteration on all devices. Writes the report to the file that `GAPLESS_TORCH_REPORT` names, if any.
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_step() {
    each(Device::step);
    if let Some(path) = std::env::var_os("GAPLESS_TORCH_REPORT").filter(|path| !path.is_empty()) {
        guarded(|| std::fs::write(path, report()));
    }
}

/// Runs `body` for every device in use.
fn each(mut body: impl FnMut(&mut Device)) {
    guarded(|| (0..MOST_DEVICES).for_each(|device| with(device, &mut body)));
}

/// The reports of all devices in use, as JSON.
fn report() -> String {
    let mut reports = Vec::new();
    each(|allocator| reports.push(allocator.report()));
    serde_json::to_string(&reports).unwrap_or_default()
}

/// Writes the reports of all devices in use as JSON, with a zero at the end. Returns the text's bytes without the zero.
/// Writes nothing if there are fewer than one more than that at `text`.
///
/// # Safety
/// `capacity` bytes at `text` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gapless_torch_report(text: *mut c_char, capacity: usize) -> usize {
    let report = guarded(report).unwrap_or_default();
    if report.len() < capacity && !text.is_null() {
        // SAFETY: the caller promised `capacity` writable bytes, and the text with its zero has at most as many.
        unsafe {
            std::ptr::copy_nonoverlapping(report.as_ptr().cast(), text, report.len());
            text.add(report.len()).write(0);
        }
    }
    report.len()
}

/// Writes the iteration that a device plays, or else the last that it recorded, as a table that `gapless plan` and
/// `gapless compare` read. Returns 0, or 1 with a text in [`gapless_torch_error`].
///
/// # Safety
/// `path` must be a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gapless_torch_write_table(device: c_int, path: *const c_char) -> c_int {
    // SAFETY: the caller promised a text that ends with a zero.
    let path = unsafe { CStr::from_ptr(path) };
    let written = guarded(|| {
        let slot = known(device).map(lock).transpose()?;
        let allocator = slot.as_ref().and_then(|slot| slot.as_ref());
        let allocator = allocator.ok_or_else(|| format!("CUDA device {device} is not in use"))?;
        let (rows, offsets) = allocator.table();
        let ids = (0..rows.len()).map(|id| id.to_string()).collect();
        let problem = Problem::new(rows).map_err(|error| error.to_string())?;
        let file = std::fs::File::create(path_of(path)).map_err(|error| error.to_string())?;
        let mut out = std::io::BufWriter::new(file);
        csv::Table::new(ids, problem).write(&mut out, offsets.as_deref()).map_err(|error| error.to_string())?;
        out.flush().map_err(|error| error.to_string())
    });
    match written {
        Some(Ok(())) => return 0,
        Some(Err(text)) => remember(format!("gapless: {text}")),
        None => {}
    }
    1
}

/// Returns the path that a text names. On Unix, a path need not be UTF-8.
fn path_of(text: &CStr) -> OsString {
    #[cfg(unix)]
    return <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(text.to_bytes()).to_owned();
    #[cfg(not(unix))]
    return text.to_string_lossy().into_owned().into();
}

/// Sets the file of the saved plan of devices that are used from now on, without the device's number.
///
/// # Safety
/// `path` must be a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gapless_torch_save_plans(path: *const c_char) {
    // SAFETY: the caller promised a text that ends with a zero.
    let path = unsafe { CStr::from_ptr(path) };
    let path = path_of(path);
    *PLANS.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
}

/// The text of this thread's last error. It is valid until the thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn gapless_torch_error() -> *const c_char {
    ERROR.with(|error| error.try_borrow().map_or(c"".as_ptr(), |text| text.as_ptr()))
}

/// Sets the function that throws an error of [`gapless_torch_alloc`] as a C++ exception; null for none.
///
/// # Safety
/// `raise` must be null or a function of the type [`Raise`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gapless_torch_raise_with(raise: *mut c_void) {
    RAISE.store(raise, Ordering::Release);
}

/// Refuses a private pool, as CUDA graphs and `torch.cuda.MemPool` begin one: throws, or does nothing without a function
/// that throws.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gapless_torch_refuse_pool() {
    remember(
        "gapless: private pools (CUDA graphs, torch.cuda.MemPool) are not supported: a graph replays addresses at times \
         that the plan does not know. Disable CUDA graphs, or do not install gapless_torch."
            .into(),
    );
    throw(c"gapless_torch_refuse_pool");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device on which a request panicked serves no more requests, and other devices go on.
    #[test]
    fn a_panic_ends_a_device() {
        let pages = Box::new(CountedPages::new(1 << 30).from_address(1 << 50));
        let mut device = Device::new(60, pages, Options::default()).unwrap();
        let address = device.allocate(1 << 20, 0).unwrap();
        *DEVICES[60].lock().unwrap() = Some(device);
        let panicked = guarded(|| {
            let _slot = lock(60);
            panic!("half changed");
        });
        assert_eq!(panicked, None::<()>);
        let text = || ERROR.with(|error| error.borrow().to_str().unwrap().to_owned());
        assert!(text().contains("half changed"), "{}", text());
        assert!(gapless_torch_alloc(1, 60, std::ptr::null_mut()).is_null());
        assert!(text().contains("CUDA device 60 is not used any more"), "{}", text());
        gapless_torch_free(address as *mut c_void, 1 << 20, 60, std::ptr::null_mut());
        gapless_torch_record_stream(address as *mut c_void, std::ptr::null_mut());
        gapless_torch_step();
        assert!(!report().contains("\"device\":60"));
    }

    /// `record_stream` waits for no device but the pointer's own.
    #[test]
    fn a_use_locks_its_device_alone() {
        gapless_torch_rehearse(1 << 30);
        let address = gapless_torch_alloc(1 << 20, 61, std::ptr::null_mut()) as u64;
        assert_ne!(address, 0);
        let busy = lock(62).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            gapless_torch_record_stream(address as *mut c_void, 0x7000 as *mut c_void);
            done.send(()).unwrap();
        });
        assert!(is_done.recv_timeout(std::time::Duration::from_secs(10)).is_ok(), "another device was waited for");
        drop(busy);
        let slot = lock(61).unwrap();
        assert_eq!(slot.as_ref().unwrap().streams_in_use(address), 1);
        drop(slot);

        // SAFETY: the texts end with a zero.
        let code = unsafe { gapless_torch_write_table(61, c"/dev/full".as_ptr()) };
        assert_eq!(code, 1, "the device is full");
        // SAFETY: as above.
        unsafe { gapless_torch_save_plans(c"folder/key".as_ptr()) };
        assert_eq!(options(3).saved_plan, Some(PathBuf::from("folder/key.3")));
    }
}
