//! What a step asks of a GPU.

use std::fmt::{self, Debug};
use std::time::{Duration, Instant};

use gapless_communicator::{self as communicator, Communicator};
use gapless_kernels::cuda::launch::{Features, Launch};

use super::KernelError;

/// Memory at addresses, and an order of launches that is run again and again. Everything that a step does is in there; what stands
/// behind it is a driver, or in tests a stand-in for one.
pub trait Device: Debug + Send {
    /// What it is, in words.
    fn name(&self) -> String;

    /// What it has that not all devices have.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Makes room for so many bytes, once, which may be extended, and returns the address of the first: a multiple of 256.
    ///
    /// # Errors
    /// When the device has no such room.
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError>;

    /// Makes the room at least so many bytes, where it is: what it holds stays.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    fn extend(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// Copies bytes to the device, after all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes from the device, after all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Gets launches ready to be run in this order: kernels compiled, algorithms chosen, all of it captured as one graph. What the
    /// launches read and write may hold anything afterwards: it is to be written behind the last recording.
    ///
    /// # Errors
    /// When a kernel cannot be compiled or loaded, or what the driver says of a launch, which `describe` names.
    fn record(&mut self, launches: Vec<Launch>, describe: Describe<'_>) -> Result<Recording, DeviceError>;

    /// Runs launches, which are for one operation, once, and waits for their end.
    ///
    /// # Errors
    /// As [`Self::record`].
    fn run(&mut self, launches: &[Launch], describe: Describe<'_>) -> Result<(), DeviceError>;

    /// Runs groups of launches once, one group after the other, and says how long each took; `describe` names them by group.
    ///
    /// # Errors
    /// As [`Self::record`].
    fn time(&mut self, groups: &[Vec<Launch>], describe: Describe<'_>) -> Result<Vec<Duration>, DeviceError> {
        time_from_here(self, groups, describe)
    }

    /// Starts what was recorded, behind all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError>;

    /// Fills bytes with zeros, behind all that was started before.
    ///
    /// # Errors
    /// What the driver says.
    fn clear(&mut self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        self.write(address, &vec![0; bytes])
    }

    /// Waits for the end of all that was started.
    ///
    /// # Errors
    /// What the driver says, of anything that was started.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// What tells the device from all others of its host, if ranks can exchange what lies in its memory from device to device; or why
    /// they can't.
    fn exchange_id(&self) -> Result<String, String> {
        Err(format!("{} exchanges nothing by itself", self.name()))
    }

    /// A communicator of device memory, of the same ranks as one of the host, all of which have such a device; some of them may share
    /// this process. A collective operation.
    ///
    /// # Errors
    /// As that communicator says.
    fn connect(
        &mut self,
        control: Box<dyn Communicator>,
        _shares_process: bool,
    ) -> communicator::Result<Box<dyn Communicator>> {
        Ok(control)
    }

    /// What of its memory is in use, and for what.
    ///
    /// # Errors
    /// What the driver says.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;
}

/// Times groups by the host's clock, which counts what it takes to launch them and to wait as well.
pub(super) fn time_from_here<D: Device + ?Sized>(
    device: &mut D,
    groups: &[Vec<Launch>],
    describe: Describe<'_>,
) -> Result<Vec<Duration>, DeviceError> {
    let timed = groups.iter().enumerate().map(|(group, launches)| {
        let begun = Instant::now();
        device.run(launches, &|_| describe(group))?;
        Ok(begun.elapsed())
    });
    timed.collect()
}

/// Names the operation, layer and micro-batch that a launch is for, by its index.
pub type Describe<'a> = &'a dyn Fn(usize) -> String;

/// What of a device's memory is in use, as its driver reports it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceMemory {
    /// All that there is, in bytes.
    pub total: u64,
    /// What is in use now, by anybody.
    pub in_use: u64,
    /// What the arena takes of it, in whole pages.
    pub arena: u64,
    /// What came into use as this was set up, in order: what was there before, libraries, code.
    pub beside: Vec<(&'static str, u64)>,
}

impl DeviceMemory {
    /// What drivers take memory by. A page that was begun for one use is filled by the next, and may come with either.
    pub const PAGE: u64 = 2 << 20;

    /// What is in use and was not seen to come, as far as it may be pages that two uses share: at most one for each.
    pub fn rounding(&self) -> i64 {
        let most = (self.beside.len() as u64 * Self::PAGE) as i64;
        self.difference().clamp(-most, most)
    }

    /// What is in use beyond that; below 0 if others have given memory back.
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
        writeln!(f, "{:>16} rounding: pages of {} bytes", self.rounding(), Self::PAGE)?;
        write!(f, "{:>16} others, since", self.unexplained())
    }
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
        "{device} has {free} of its {total} bytes free, and {needed} are needed; shrink the arena (Recompute::budget, more \
         micro-batches), free some, choose another, or train on the CPU (DeviceChoice::Cpu); what holds its memory:\n{holders}"
    )]
    OutOfMemory { device: String, needed: u64, free: u64, total: u64, holders: String },
    #[error(
        "{device} has no memory left, says {call}; free some, choose another, or train on the CPU (DeviceChoice::Cpu); what holds \
         it:\n{holders}"
    )]
    Full { device: String, call: String, holders: String },
    #[error("{device} cannot be used here: {what}; choose another, install its driver anew, or train on the CPU")]
    Unusable { device: String, what: String },
    #[error(transparent)]
    Kernel(Box<KernelError>),
    #[error("{call} failed on {device}: {what}")]
    Driver { device: String, call: String, what: String },
    /// Of an operation: its name, layer and micro-batch.
    #[error("{what_for}: {source}")]
    During { what_for: String, source: Box<DeviceError> },
}

impl DeviceError {
    /// Whether there is no GPU here, or not all that one needs; as opposed to one that fails.
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

    /// The same, of a launch that is for this.
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
