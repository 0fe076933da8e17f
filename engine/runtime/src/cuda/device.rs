//! The interface of a GPU: all operations that running a step needs.

use std::fmt::{self, Debug};
use std::path::Path;
use std::time::{Duration, Instant};

use gapless_alloc::draw::Bytes;
use gapless_communicator::{self as communicator, Communicator};
use gapless_kernels::cuda::launch::{Features, Launch};

use super::KernelError;

/// Device memory at stable addresses, and recorded sequences of launches that can be replayed. All of a step's device
/// work goes through this trait. One implementation uses NVIDIA's driver. Tests have another that simulates a device
/// on the host.
pub trait Device: Debug + Send {
    /// The device's name.
    fn name(&self) -> String;

    /// Optional features of the device.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Reserves device memory and returns its address, a multiple of 256. This can be called once.
    /// [`extend`](Self::extend) can add memory later.
    ///
    /// # Errors
    /// Returns an error if the device has too little memory.
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError>;

    /// Extends the reserved memory to at least `bytes` in total. The memory's address and contents stay the same.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::reserve`].
    fn extend(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// Lets products of f32 matrices use TF32 from now on: [`features`](Self::features) returns it.
    fn use_tf32(&mut self) {}

    /// Makes [`reserve_host`](Self::reserve_host) create a file in this folder, instead of host memory for all offloaded
    /// activations.
    fn offload_to(&mut self, _folder: &Path) {}

    /// True if [`reserve_host`](Self::reserve_host) creates a file, or has created one. Its copies may fail, which
    /// [`wait`](Self::wait) reports.
    fn has_offload_file(&self) -> bool {
        false
    }

    /// Reserves `bytes` bytes for offloaded activations: host memory that the device copies to and from directly, or a
    /// file ([`offload_to`](Self::offload_to)) and host memory for one copy of at most `largest` bytes. This can be
    /// called once.
    ///
    /// # Errors
    /// Returns [`DeviceError::Offload`] if the file cannot be created, [`DeviceError::HostMemory`] if the host has too
    /// little memory, or the driver's error.
    fn reserve_host(&mut self, _bytes: u64, _largest: u64) -> Result<(), DeviceError> {
        let what = "it has no memory for offloaded activations".into();
        Err(DeviceError::Driver { device: self.name(), call: "reserving host memory".into(), what })
    }

    /// Copies bytes to the device, after all work that was started before.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes from the device, after all work that was started before.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Prepares launches to run in this order: compiles kernels, chooses algorithms, and captures the launches as one
    /// graph. This may overwrite any memory that the launches read or write. So memory must be initialized after the
    /// last recording.
    ///
    /// # Errors
    /// Returns an error if a kernel cannot be compiled or loaded, or if the driver refuses a launch. The error
    /// contains the launch's name, as returned by `describe`.
    fn record(&mut self, launches: Vec<Launch>, describe: Describe<'_>) -> Result<Recording, DeviceError>;

    /// Runs the launches of one operation once, and waits until all of them are done.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::record`].
    fn run(&mut self, launches: &[Launch], describe: Describe<'_>) -> Result<(), DeviceError>;

    /// Runs launches once, one after another, and returns the time of each. `describe` names them by index.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::record`].
    fn time(&mut self, launches: &[&Launch], describe: Describe<'_>) -> Result<Vec<Duration>, DeviceError> {
        time_from_here(self, launches, describe)
    }

    /// Describes the algorithm that the library uses for a product. Returns `None` for kernels, and on devices
    /// without such a library.
    fn algorithm(&self, _launch: &Launch) -> Option<String> {
        None
    }

    /// Starts a recording, after all work that was started before.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError>;

    /// Sets bytes to one value, after all work that was started before.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn fill(&mut self, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError> {
        self.write(address, &vec![value; bytes])
    }

    /// Waits for all work that was started before.
    ///
    /// # Errors
    /// Returns the driver's error, including an error of any work that was started before. Returns
    /// [`DeviceError::Offload`] if a copy to or from the offload file has failed. All activations that were copied back
    /// after the failure are zero.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// Returns an id that differs from those of all other devices of the host. If ranks cannot exchange tensors
    /// directly between their devices, returns the reason as an error instead.
    fn exchange_id(&self) -> Result<String, String> {
        Err(format!("{} cannot exchange tensors directly", self.name()))
    }

    /// Creates a communicator over device memory for the ranks of the host communicator `control`. Every rank must
    /// have a device with an [exchange id](Self::exchange_id). `_shares_process` says whether some of the ranks are
    /// in the same process. A collective operation: all ranks must call it.
    ///
    /// # Errors
    /// Returns the errors of the communicator.
    fn connect(
        &mut self,
        control: Box<dyn Communicator>,
        _shares_process: bool,
    ) -> communicator::Result<Box<dyn Communicator>> {
        Ok(control)
    }

    /// Returns the use of the device's memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;
}

/// Times launches by the host's clock. The times include the overheads of launching and waiting.
pub(super) fn time_from_here<D: Device + ?Sized>(
    device: &mut D,
    launches: &[&Launch],
    describe: Describe<'_>,
) -> Result<Vec<Duration>, DeviceError> {
    let timed = launches.iter().enumerate().map(|(index, launch)| {
        let begun = Instant::now();
        device.run(std::slice::from_ref(*launch), &|_| describe(index))?;
        Ok(begun.elapsed())
    });
    timed.collect()
}

/// A function that names the operation, layer and micro-batch of a launch, by the launch's index.
pub type Describe<'a> = &'a dyn Fn(usize) -> String;

/// The use of a device's memory, as reported by its driver.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceMemory {
    /// Bytes of memory that the device has.
    pub total: u64,
    /// Bytes in use now, by all processes.
    pub in_use: u64,
    /// Bytes of the arena, in whole pages.
    pub arena: u64,
    /// Other bytes in use whose cause is known: for each cause, its name and bytes. First come the bytes in use before
    /// the trainer was created, then those that libraries and code took during set-up.
    pub beside: Vec<(&'static str, u64)>,
}

impl DeviceMemory {
    /// The unit in which drivers allocate memory. Two uses may share a page, and its bytes may be counted with
    /// either.
    pub const PAGE: u64 = 2 << 20;

    /// Returns the bytes in use that no known allocation explains, limited to one page per entry of `beside`, because
    /// entries may share pages. Negative if fewer bytes are in use than the sum of the known allocations.
    pub fn rounding(&self) -> i64 {
        let most = (self.beside.len() as u64 * Self::PAGE) as i64;
        self.difference().clamp(-most, most)
    }

    /// Returns the unexplained bytes beyond [`Self::rounding`]. Negative if other processes have freed memory since
    /// set-up.
    pub fn unexplained(&self) -> i64 {
        self.difference() - self.rounding()
    }

    fn difference(&self) -> i64 {
        let known = self.arena + self.beside.iter().map(|&(_, bytes)| bytes).sum::<u64>();
        self.in_use as i64 - known as i64
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>16} bytes in use of {}", self.in_use, self.total)?;
        writeln!(f, "{:>16} arena", self.arena)?;
        for (what, bytes) in &self.beside {
            writeln!(f, "{bytes:>16} {what}")?;
        }
        writeln!(f, "{:>16} rounding to pages of {} bytes", self.rounding(), Self::PAGE)?;
        write!(f, "{:>16} allocated by others since", self.unexplained())
    }
}

/// A recording on a device: its index, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recording(pub usize);

/// The reason why a call to a device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum DeviceError {
    #[error("no GPU can be used here: there is no {what}; {remedy}")]
    Missing { what: &'static str, remedy: &'static str },
    #[error(
        "{device} has {} ({free} bytes) of its {} free, but {} ({needed} bytes) are needed; shrink the arena (memory.budget, more \
         micro-batches), free some, choose another GPU, or train on the CPU; its memory is held by:\n{holders}",
        Bytes(*free),
        Bytes(*total),
        Bytes(*needed)
    )]
    OutOfMemory { device: String, needed: u64, free: u64, total: u64, holders: String },
    #[error(
        "{device} has no memory left ({call}); free some, choose another GPU, or train on the CPU; its memory is held \
         by:\n{holders}"
    )]
    Full { device: String, call: String, holders: String },
    #[error("{device} cannot be used here: {what}; choose another, reinstall its driver, or train on the CPU")]
    Unusable { device: String, what: String },
    #[error(transparent)]
    Kernel(Box<KernelError>),
    #[error("{call} failed on {device}: {what}")]
    Driver { device: String, call: String, what: String },
    #[error(
        "offloaded activations need {} ({needed} bytes) of pinned host memory: {why}; name a folder for a file instead \
         (memory.offload_to), or offload less",
        Bytes(*needed)
    )]
    HostMemory { needed: u64, why: String },
    #[error("{what}: {source}; choose another folder (memory.offload_to), or offload less")]
    Offload { what: String, source: std::io::Error },
    /// An error of one operation, with its name, layer and micro-batch.
    #[error("{what_for}: {source}")]
    During { what_for: String, source: Box<DeviceError> },
}

impl DeviceError {
    /// True if there is no usable GPU, or if a library that the GPU needs is missing. False if a GPU has failed.
    pub fn is_absence(&self) -> bool {
        match self {
            Self::Missing { .. } | Self::Unusable { .. } => true,
            Self::Kernel(error) => {
                matches!(**error, KernelError::Missing(_) | KernelError::UnknownArchitecture { .. })
            }
            Self::During { source, .. } => source.is_absence(),
            _ => false,
        }
    }

    /// Returns what failed and why for an error of the offload file, and any other error unchanged.
    pub(crate) fn into_offload(self) -> Result<(String, std::io::Error), Self> {
        match self {
            Self::Offload { what, source } => Ok((what, source)),
            Self::During { what_for, source } => match source.into_offload() {
                Ok((what, source)) => Ok((format!("{what_for}: {what}"), source)),
                Err(error) => Err(error.during(&what_for)),
            },
            error => Err(error),
        }
    }

    /// Adds the name of the launch's operation to the error.
    pub(super) fn during(self, what_for: &str) -> Self {
        Self::During { what_for: what_for.into(), source: Box::new(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_for_each_use_is_rounding_and_more_is_not_explained() {
        let page = DeviceMemory::PAGE as i64;
        for (more, rounding, unexplained) in [
            (0, 0, 0),
            (page, page, 0),
            (2 * page + 1, 2 * page, 1),
            (-page / 2, -page / 2, 0),
            (-5 * page, -2 * page, -3 * page),
        ] {
            let beside = vec![("context", 10 << 20), ("kernels", 20 << 20)];
            let memory = DeviceMemory { total: 1 << 40, in_use: ((70 << 20) + more) as u64, arena: 40 << 20, beside };
            assert_eq!((memory.rounding(), memory.unexplained()), (rounding, unexplained), "{more}");
        }
    }
}
