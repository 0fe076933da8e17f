//! The stream on which all of a device's work runs.

use cudarc::driver::{result, sys};

use super::context::Context;
use super::device::DeviceError;
use super::named::Named;

/// A stream of a device's primary context. It does not synchronize with the legacy default stream.
#[derive(Debug)]
pub(super) struct Stream {
    handle: sys::CUstream,
    context: Context,
    device: String,
}

// SAFETY: driver handles are valid in all threads of the process, and the driver synchronizes access to the objects.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream in the current context, which must be `context`.
    pub fn new(context: Context, device: &str) -> Result<Self, DeviceError> {
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking).named(device, "cuStreamCreate")?;
        Ok(Self { handle, context, device: device.into() })
    }

    /// The driver's handle, valid while this stream exists.
    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits until everything started on the stream is done.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is valid while this stream exists.
        unsafe { result::stream::synchronize(self.handle) }.named(&self.device, "cuStreamSynchronize")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // If this fails, the stream stays until the process ends.
        //
        // SAFETY: this struct is the stream's only owner.
        let _ = self.context.enter(&self.device).map(|()| unsafe { result::stream::destroy(self.handle) });
    }
}
