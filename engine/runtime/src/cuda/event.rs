//! Events on a stream, and the time between them.

use std::time::Duration;

use cudarc::driver::{result, sys};

use super::device::DeviceError;
use super::named::Named;

/// The first driver version that can return the time between two events. Older drivers lack the function, and cudarc
/// panics.
pub(super) const FIRST_VERSION: i32 = 12_080;

/// An event of the driver. It belongs to the context that was current when it was created.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

impl Event {
    /// Creates an event that is not recorded yet.
    pub fn new(device: &str) -> Result<Self, DeviceError> {
        let made = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        made.named(device, "cuEventCreate").map(Self)
    }

    /// Records the event on a stream, after all work that was started there before. The stream must be valid.
    pub fn record(&self, device: &str, stream: sys::CUstream) -> Result<(), DeviceError> {
        // SAFETY: the event lives as long as `self`; the caller's stream is valid.
        unsafe { result::event::record(self.0, stream) }.named(device, "cuEventRecord")
    }

    /// Makes a stream wait until the last recording of this event is reached. The stream must be valid.
    pub fn make_wait(&self, device: &str, stream: sys::CUstream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event lives as long as `self`; the caller's stream is valid.
        unsafe { result::stream::wait_event(stream, self.0, flags) }.named(device, "cuStreamWaitEvent")
    }

    /// Returns the time from `other` to this event. The stream must have reached both events.
    pub fn since(&self, other: &Self, device: &str) -> Result<Duration, DeviceError> {
        // SAFETY: both events live as long as `self` and `other`.
        let elapsed = unsafe { result::event::elapsed(other.0, self.0) };
        let milliseconds = elapsed.named(device, "cuEventElapsedTime")?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this struct is the event's only owner. If the stream has not reached the event yet, the driver
        // keeps the event's state until then.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
