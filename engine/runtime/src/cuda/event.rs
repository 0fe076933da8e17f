//! Marks on a stream, and the time between them.

use std::time::Duration;

use cudarc::driver::{result, sys};

use super::device::DeviceError;
use super::named::Named;

/// The first version of the driver that can say what time is between two: cudarc asks for a symbol that older ones lack, and panics
/// without.
pub(super) const FIRST_VERSION: i32 = 12_080;

/// A mark, in the context that was the thread's own when it was made.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

impl Event {
    /// One that is nowhere yet.
    pub fn new(device: &str) -> Result<Self, DeviceError> {
        let made = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        made.named(device, "cuEventCreate").map(Self)
    }

    /// Puts it behind all that a stream, which is there, has to do.
    pub fn record(&self, device: &str, stream: sys::CUstream) -> Result<(), DeviceError> {
        // SAFETY: both are there.
        unsafe { result::event::record(self.0, stream) }.named(device, "cuEventRecord")
    }

    /// How long after another one it was reached, if both have been.
    pub fn since(&self, other: &Self, device: &str) -> Result<Duration, DeviceError> {
        // SAFETY: both are there.
        let elapsed = unsafe { result::event::elapsed(other.0, self.0) };
        let milliseconds = elapsed.named(device, "cuEventElapsedTime")?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has it; the driver keeps what it needs until it was reached.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
