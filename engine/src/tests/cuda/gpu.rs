//! A GPU in the place of its stand-in: `GAPLESS_TEST_DEVICE=cuda` (or `cuda:1`) has all judges use it.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::DeviceChoice;
use crate::cuda::{Cache, Device, Features, Launch, Nvidia};

/// Names the GPU that judges use.
const VARIABLE: &str = "GAPLESS_TEST_DEVICE";

/// Which GPU is asked for.
fn ordinal() -> Option<usize> {
    let asked = std::env::var(VARIABLE).ok()?;
    match asked.parse() {
        Ok(DeviceChoice::Cuda(ordinal)) => Some(ordinal),
        _ => panic!("{VARIABLE} is {asked:?}; cuda or cuda:1 would be a GPU"),
    }
}

/// The GPU that is asked for, with nothing in its memory.
pub fn another() -> Option<Box<dyn Device>> {
    ordinal().map(|ordinal| -> Box<dyn Device> { Box::new(open(ordinal)) })
}

/// The GPU that judges of single kernels share.
fn shared() -> Option<&'static Mutex<Nvidia>> {
    static SHARED: OnceLock<Option<Mutex<Nvidia>>> = OnceLock::new();
    SHARED.get_or_init(|| ordinal().map(|ordinal| Mutex::new(open(ordinal)))).as_ref()
}

fn open(ordinal: usize) -> Nvidia {
    Nvidia::new(ordinal, Cache::of_user()).unwrap_or_else(|why| panic!("{VARIABLE} asks for a GPU: {why}"))
}

/// Whether a GPU is asked for.
pub fn is_asked_for() -> bool {
    ordinal().is_some()
}

/// What the GPU has that is asked for.
pub fn features() -> Option<Features> {
    shared().map(|gpu| gpu.lock().unwrap_or_else(PoisonError::into_inner).features())
}

/// How far off something may be: on the stand-in, which computes as exactly as the processor, and on a GPU.
///
/// What a GPU adds is the GELU of cuBLASLt's epilogues, if it is of `tanh.approx.f32`, which is off by 2⁻¹¹ = 5e-4 of itself (PTX ISA);
/// and `expf` and sums that round otherwise. The double has the first, if it is told to (`double/judges.rs`): there the products with
/// epilogues are off by 1e-3 at most, the losses of small models by 1e-5.
pub fn allowed(on_stand_in: f64, on_gpu: f64) -> f64 {
    if is_asked_for() { on_gpu } else { on_stand_in }
}

/// Runs a launch on the GPU that is asked for.
pub fn run(launch: &Launch) -> Option<Result<(), String>> {
    let mut gpu = shared()?.lock().unwrap_or_else(PoisonError::into_inner);
    let ran = gpu.run(std::slice::from_ref(launch), &|_| "a judge".into());
    Some(ran.map(drop).map_err(|error| error.to_string()))
}

/// Bytes that a processor reads and writes, and the GPU too if one is asked for.
#[derive(Debug)]
pub enum Bytes {
    Own(Vec<u8>),
    /// Locked by the driver and mapped for the GPU: the address on both, and how many.
    Mapped(u64, usize),
}

impl Bytes {
    /// So many, of one value.
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
            // SAFETY: as many bytes are there until this is dropped; what ran on the GPU was waited for.
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
            // SAFETY: as above; nobody else has it.
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
