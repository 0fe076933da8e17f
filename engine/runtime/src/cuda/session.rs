//! The methods of a session that are only available in builds with GPU support.

use std::any::Any;

use gapless_communicator::Communicator;
use gapless_compile::{Executable, ProgramId};

use super::{CudaBackend, DeviceMemory, Timed};
use crate::error::Result;
use crate::session::{RunOptions, Session};

/// Methods for sessions on a GPU. On the CPU they have no effect and return `None`.
impl Session {
    fn on_gpu(&self) -> Option<&CudaBackend> {
        (&self.backend as &dyn Any).downcast_ref()
    }

    fn on_gpu_mut(&mut self) -> Option<(&Executable, &mut CudaBackend)> {
        let backend = (&mut self.backend as &mut dyn Any).downcast_mut()?;
        Some((&self.executable, backend))
    }

    /// Returns the use of the device's memory, or `None` on the CPU.
    ///
    /// # Errors
    /// Returns [`Error::Device`](crate::Error::Device) if the driver fails.
    pub fn device_memory(&self) -> Result<Option<DeviceMemory>> {
        self.on_gpu().map(CudaBackend::memory).transpose()
    }

    /// Creates a device communicator of the ranks of `world`. Returns `None` if two ranks share a device, or if a
    /// device cannot exchange tensors directly. A collective operation: all ranks must call it.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`](crate::Error::Communicator) if another rank or NCCL fails.
    pub fn connect_devices(&mut self, world: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        self.on_gpu_mut().map_or(Ok(None), |(_, gpu)| gpu.connect_devices(world))
    }

    /// Runs a program like [`Self::run`], but launch by launch instead of as a graph, and returns the time of each
    /// instruction. Updates that are launched together have one entry. Returns `None` on the CPU.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::run`].
    pub fn profile(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<Vec<Timed>>> {
        self.on_gpu_mut().map(|(executable, gpu)| gpu.profile(executable, id, options)).transpose()
    }
}
