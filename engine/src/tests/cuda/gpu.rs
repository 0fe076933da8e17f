//! Tests of kernels on a real GPU. If `GAPLESS_TEST_DEVICE` is `cuda` (or `cuda:1`), all tests of kernels use the GPU
//! instead of the simulated device.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::DeviceChoice;
use crate::cuda::{Cache, Device, Features, Launch, Nvidia};

/// The environment variable that selects the GPU for tests.
const VARIABLE: &str = "GAPLESS_TEST_DEVICE";

/// Returns the ordinal of the selected GPU, or `None` if none is selected.
fn ordinal() -> Option<usize> {
    let asked = std::env::var(VARIABLE).ok()?;
    match asked.parse() {
        Ok(DeviceChoice::Cuda(ordinal)) => Some(ordinal),
        _ => panic!("{VARIABLE} is {asked:?}; cuda or cuda:1 would be a GPU"),
    }
}

/// Returns a new device for the selected GPU, with no memory reserved, or `None` if no GPU is selected.
pub fn another() -> Option<Box<dyn Device>> {
    ordinal().map(|ordinal| -> Box<dyn Device> { Box::new(open(ordinal)) })
}

/// Returns the device that tests of single kernels share, or `None` if no GPU is selected.
fn shared() -> Option<&'static Mutex<Nvidia>> {
    static SHARED: OnceLock<Option<Mutex<Nvidia>>> = OnceLock::new();
    SHARED.get_or_init(|| ordinal().map(|ordinal| Mutex::new(open(ordinal)))).as_ref()
}

fn open(ordinal: usize) -> Nvidia {
    Nvidia::new(ordinal, Cache::of_user()).unwrap_or_else(|why| panic!("{VARIABLE} asks for a GPU: {why}"))
}

/// True if a GPU is selected.
pub fn is_asked_for() -> bool {
    ordinal().is_some()
}

/// The optional features of the GPU under test; `None` on the simulated device.
pub fn features() -> Option<Features> {
    shared().map(|gpu| gpu.lock().unwrap_or_else(PoisonError::into_inner).features())
}

/// The allowed error: `on_stand_in` on the simulated device, which computes as exactly as the CPU, and `on_gpu` on a
/// `on_gpu` on a GPU.
///
/// A GPU has additional errors, because `expf` and sums round differently. In addition, the GELU of cuBLASLt's
/// epilogues may use `tanh.approx.f32`, whose relative error is 2⁻¹¹ = 5e-4 (PTX ISA). The fake driver can simulate
/// this approximation (`double/judges.rs`). Products with epilogues are then off by at most 1e-3, and the losses of
/// small models by 1e-5.
pub fn allowed(on_stand_in: f64, on_gpu: f64) -> f64 {
    if is_asked_for() { on_gpu } else { on_stand_in }
}

/// Runs a launch on the selected GPU, or returns `None` if no GPU is selected.
pub fn run(launch: &Launch) -> Option<Result<(), String>> {
    let mut gpu = shared()?.lock().unwrap_or_else(PoisonError::into_inner);
    let ran = gpu.run(std::slice::from_ref(launch), &|_| "a judge".into());
    Some(ran.map(drop).map_err(|error| error.to_string()))
}

/// Memory that the CPU can read and write. If a GPU is selected, the GPU can too.
#[derive(Debug)]
pub enum Bytes {
    Own(Vec<u8>),
    /// Host memory that the driver has pinned and mapped for the GPU: the address, which is the same for both, and
    /// the length.
    Mapped(u64, usize),
}

impl Bytes {
    /// Allocates `count` bytes of the same value.
    pub fn filled(count: usize, byte: u8) -> Self {
        let Some(gpu) = shared() else { return Self::Own(vec![byte; count]) };
        let address =
            gpu.lock().unwrap_or_else(PoisonError::into_inner).mapped_host_memory(count).expect("memory of a GPU");
        let mut bytes = Self::Mapped(address, count);
        bytes.fill(byte);
        bytes
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match *self {
            Self::Own(ref bytes) => bytes,
            // SAFETY: the allocation is valid until it is dropped, and all work on the GPU has been waited for.
            Self::Mapped(address, count) => unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address as usize), count)
            },
        }
    }
}

impl std::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match *self {
            Self::Own(ref mut bytes) => bytes,
            // SAFETY: as above, and `&mut self` is exclusive.
            Self::Mapped(address, count) => unsafe {
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), count)
            },
        }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let (Self::Mapped(address, _), Some(gpu)) = (&*self, shared()) {
            gpu.lock().unwrap_or_else(PoisonError::into_inner).free_host_memory(*address);
        }
    }
}
