//! The stream that all of a device's work is on.

use cudarc::driver::{result, sys};

use super::context::Context;
use super::device::DeviceError;
use super::named::Named;

/// A stream of a device's primary context, which does not wait for the legacy default stream.
#[derive(Debug)]
pub(super) struct Stream {
    handle: sys::CUstream,
    context: Context,
    device: String,
}

// SAFETY: the driver's handles belong to the process, and the driver locks what is behind them.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// In the context that is the thread's own.
    pub fn new(context: Context, device: &str) -> Result<Self, DeviceError> {
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking).named(device, "cuStreamCreate")?;
        Ok(Self { handle, context, device: device.into() })
    }

    /// What the driver calls it, as long as this is there.
    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits for all that was started on it.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is there as long as this is.
        unsafe { result::stream::synchronize(self.handle) }.named(&self.device, "cuStreamSynchronize")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // What fails here leaves a stream to the end of the process.
        // SAFETY: nobody else has it.
        let _ = self.context.enter(&self.device).map(|()| unsafe { result::stream::destroy(self.handle) });
    }
}
