//! An executor on whatever device there is.
//!
//! In: what a trainer asks of one. Out: the same of the CPU's and of a GPU's. Never: a computation of its own.

use candle_core::Tensor;
use gapless_alloc::arena::ArenaReport;
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::Element;

use crate::cpu::{self, PersistentBytes, RunOptions};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Result;
use crate::links::Communicators;

#[derive(Debug)]
/// An executor on whatever device there is.
pub enum Machine {
    Cpu(Box<cpu::Executor>),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Executor>),
}

/// The same call on either.
macro_rules! on_either {
    ($machine:expr, $executor:ident => $call:expr) => {
        match $machine {
            Machine::Cpu($executor) => $call,
            #[cfg(feature = "cuda")]
            Machine::Cuda($executor) => $call,
        }
    };
}

impl Machine {
    pub fn executable(&self) -> &Executable {
        on_either!(self, executor => executor.executable())
    }

    /// Worker threads of the CPU that compute; a GPU has one that waits.
    pub fn threads(&self) -> usize {
        match self {
            Self::Cpu(executor) => executor.threads(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => 1,
        }
    }

    pub fn run(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        on_either!(self, executor => executor.run(id, options))
    }

    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.executable().has_input(id, name)
    }

    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        on_either!(self, executor => executor.write_input(id, name, micro_batch, data))
    }

    pub fn output(&self, id: ProgramId, name: &str) -> Result<Tensor> {
        on_either!(self, executor => executor.output(id, name))
    }

    pub fn scalar(&self, id: ProgramId, name: &str) -> Result<f32> {
        on_either!(self, executor => executor.scalar(id, name))
    }

    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        on_either!(self, executor => executor.tensor(name))
    }

    pub fn write_tensor(&mut self, name: &str, data: &[f32]) -> Result<()> {
        on_either!(self, executor => executor.write_tensor(name, data))
    }

    pub fn fill_tensor<R>(&mut self, name: &str, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        on_either!(self, executor => executor.fill_tensor(name, fill))
    }

    pub fn with_persistent<R>(&self, f: impl FnOnce(&[PersistentBytes<'_>]) -> R) -> Result<R> {
        on_either!(self, executor => executor.with_persistent(f))
    }

    /// What the arena of counted rows has done; a GPU has none.
    pub fn routing(&self) -> Option<ArenaReport> {
        match self {
            Self::Cpu(executor) => executor.routing(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }

    /// What a GPU runs has been judged when it was planned: no address is found while it runs.
    pub fn check_run(&self) -> Result<usize> {
        match self {
            Self::Cpu(executor) => executor.check_run(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => Ok(0),
        }
    }

    pub fn connect(&mut self, communicators: Communicators) {
        on_either!(self, executor => executor.connect(communicators));
    }

    pub fn grow(&mut self, limit: u64) -> Result<()> {
        match self {
            Self::Cpu(executor) => executor.grow(limit),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => Ok(()),
        }
    }
}
