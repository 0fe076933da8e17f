//! What a step asks of a GPU.

use std::fmt::Debug;

use super::launch::Launch;

/// Memory at addresses, and an order of launches that is run again and again. Everything that a step does is in there; what stands
/// behind it is a driver, or in tests a stand-in for one.
pub trait Device: Debug + Send {
    /// Makes room for so many bytes, once, and returns the address of the first: a multiple of 256.
    ///
    /// # Errors
    /// When the device has no such room.
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError>;

    /// Copies bytes to the device, after all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes from the device, after all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Gets launches ready to be run in this order: kernels compiled, algorithms chosen, all of it captured as one graph.
    ///
    /// # Errors
    /// When a kernel cannot be compiled or loaded, or what the driver says.
    fn record(&mut self, launches: Vec<Launch>) -> Result<Recording, DeviceError>;

    /// Runs what was recorded, and waits for its end.
    ///
    /// # Errors
    /// What the driver says.
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError>;
}

/// What was recorded on a device: its number, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recording(pub usize);

/// Why a device didn't do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum DeviceError {
    #[error("no GPU can be used here; there is no {what}: {remedy}")]
    Missing { what: &'static str, remedy: &'static str },
    #[error(
        "{device} has {free} of its {total} bytes free, and {needed} are needed; what else holds its memory is listed by nvidia-smi"
    )]
    OutOfMemory { device: String, needed: u64, free: u64, total: u64 },
    #[error(transparent)]
    Kernel(Box<super::KernelError>),
    #[error("{call} failed on {device}: {what}")]
    Driver { device: String, call: String, what: String },
}
