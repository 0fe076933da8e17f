//! A session's questions to its GPU.

use std::any::Any;

use gapless_communicator::Communicator;
use gapless_compile::{Executable, ProgramId};

use super::{CudaBackend, DeviceMemory, Timed};
use crate::error::Result;
use crate::session::{RunOptions, Session};

/// What only a GPU can do; nothing of a session on the CPU.
impl Session {
    fn on_gpu(&self) -> Option<&CudaBackend> {
        (&self.backend as &dyn Any).downcast_ref()
    }

    fn on_gpu_mut(&mut self) -> Option<(&Executable, &mut CudaBackend)> {
        let backend = (&mut self.backend as &mut dyn Any).downcast_mut()?;
        Some((&self.executable, backend))
    }

    /// What of the device's memory is in use, and for what.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub fn device_memory(&self) -> Result<Option<DeviceMemory>> {
        self.on_gpu().map(CudaBackend::memory).transpose()
    }

    /// A communicator of device memory of the ranks of `world`, if all have devices that exchange tensors, each its own. A
    /// collective operation.
    ///
    /// # Errors
    /// [`Error::Communicator`](crate::Error::Communicator) when another rank fails, or NCCL does.
    pub fn connect_devices(&mut self, world: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        self.on_gpu_mut().map_or(Ok(None), |(_, gpu)| gpu.connect_devices(world))
    }

    /// Runs a program as [`Self::run`] does, and says how long each instruction took: on a stream instead of as a graph. Updates that
    /// are launched together are one.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn profile(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<Vec<Timed>>> {
        self.on_gpu_mut().map(|(executable, gpu)| gpu.profile(executable, id, options)).transpose()
    }
}
