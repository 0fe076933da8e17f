//! The parts of a session's interface that need a GPU.

use std::any::Any;

use gapless_communicator::Communicator;
use gapless_compile::{Executable, ProgramId};

use super::{CudaBackend, DeviceMemory, Timed};
use crate::error::Result;
use crate::session::{RunOptions, Session};

/// Methods that only have an effect on a GPU; they return `None` on the CPU.
impl Session {
    fn on_gpu(&self) -> Option<&CudaBackend> {
        (&self.backend as &dyn Any).downcast_ref()
    }

    fn on_gpu_mut(&mut self) -> Option<(&Executable, &mut CudaBackend)> {
        let backend = (&mut self.backend as &mut dyn Any).downcast_mut()?;
        Some((&self.executable, backend))
    }

    /// The use of the device's memory; `None` on the CPU.
    ///
    /// # Errors
    /// Returns [`Error::Device`](crate::Error::Device) if the driver fails.
    pub fn device_memory(&self) -> Result<Option<DeviceMemory>> {
        self.on_gpu().map(CudaBackend::memory).transpose()
    }

    /// Creates a device communicator of the ranks of `world`, if every rank has a device of its own that can exchange
    /// tensors directly. Returns `None` otherwise. A collective operation.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`](crate::Error::Communicator) if another rank or NCCL fails.
    pub fn connect_devices(&mut self, world: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        self.on_gpu_mut().map_or(Ok(None), |(_, gpu)| gpu.connect_devices(world))
    }

    /// Runs a program as [`Self::run`] does, but launch by launch instead of as a graph, and returns the time of each
    /// instruction. Updates that are launched together have one entry. Returns `None` on the CPU.
    ///
    /// # Errors
    /// The same as [`Self::run`].
    pub fn profile(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<Vec<Timed>>> {
        self.on_gpu_mut().map(|(executable, gpu)| gpu.profile(executable, id, options)).transpose()
    }
}
