//! Compiles kernels for the CPU, and runs them on a simulated device.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use gapless_testing::fake_driver::{
    COMPILERS, KERNELS, build, compiler, kept_library, kernel_options, simulated_device,
};

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

/// The compiled kernels of a family; `None` before the first use. Locked while a kernel runs, because a library simulates
/// one device.
type Device = Mutex<Option<libloading::Library>>;

/// Number of devices, so that tests in several threads run kernels of one family at the same time.
const DEVICES: usize = 4;

/// Returns the devices of a family, which may not have been compiled yet.
fn devices_of(family: Family) -> &'static [Device; DEVICES] {
    static FAMILIES: Mutex<BTreeMap<Family, &[Device; DEVICES]>> = Mutex::new(BTreeMap::new());
    let mut families = FAMILIES.lock().unwrap_or_else(PoisonError::into_inner);
    families.entry(family).or_insert_with(|| Box::leak(Box::default()))
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
    let devices = devices_of(kernel.family);
    let free = devices.iter().enumerate().find_map(|(index, device)| Some((index, device.try_lock().ok()?)));
    let (index, mut device) = match free {
        Some(free) => free,
        None => (0, devices[0].lock().map_err(|_| "another kernel of the family has failed")?),
    };
    let library = device.get_or_insert_with(|| load(kernel.family, index));
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

/// Compiles a family for the CPU and loads it as one of the devices. Uses the library of another device or of an earlier
/// test run if the source is the same.
fn load(family: Family, device: usize) -> libloading::Library {
    let (folder, file) = (simulated_device(), |device| kept_library(family.source(), device));
    let library = file(device);
    if !library.exists() {
        match (0..DEVICES).map(file).find(|other| other.exists()) {
            Some(other) => {
                let copy = tempfile::NamedTempFile::new_in(folder).expect("room for a library");
                std::fs::copy(other, copy.path()).expect("room for a library");
                copy.persist(&library).expect("the folder is ours");
            }
            None => {
                let mut text = tempfile::NamedTempFile::new_in(folder).expect("room for a source");
                text.write_all(family.source().as_bytes()).expect("room for a source");
                build(kernel_options().into_iter().chain(["-I".into(), KERNELS.into(), text.path().into()]), &library);
            }
        }
    }
    // SAFETY: the library was built above, and runs no code when it is loaded.
    unsafe { libloading::Library::new(&library) }.expect("a shared library")
}
