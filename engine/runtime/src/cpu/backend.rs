//! Runs programs: instruction after instruction at planned addresses. No allocation, no name, no free.

use std::path::Path;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use candle_core::{DType, Device, Tensor};
use gapless_alloc::arena::ArenaReport;
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cpu::overflow_heap::OverflowHeap;
use gapless_kernels::cpu::simd::multiplies_bf16;

use super::arena::Arena;
use super::offload::HostFile;
use super::run::{Failure, RunContext, run_all};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::routed::Routed;
use crate::session::{Backend, RunOptions, Session, Times};
use crate::transfers::{Base, Transfers};

/// What its kernels read and write.
const KERNELS: [DType; 5] = [DType::F32, DType::BF16, DType::F64, DType::U32, DType::U8];

/// An arena on the CPU, and the threads that compute in it.
#[derive(Debug)]
pub struct CpuBackend {
    /// Only ever locked by the one run under way. First to be dropped: what is under way reads and writes the arena.
    transfers: Mutex<Transfers>,
    arena: Arena,
    /// What is placed while a program runs. Only ever locked by the one run under way.
    routed: Mutex<Routed>,
    workers: Workers,
    /// Where activations wait that are offloaded. Only ever locked by the one run under way.
    file: Mutex<Option<HostFile>>,
    /// Of the last run. Only ever locked by the one run under way.
    times: Mutex<Times>,
}

impl Session<CpuBackend> {
    /// Reserves the arena and fills the persistent tensors. Programs that were lowered for several ranks run once they are
    /// [connected](Self::connect).
    ///
    /// # Errors
    /// [`Error::NoKernels`] for an executable that has tensors of another type than f32 and bf16, or f16, [`Error::OtherTarget`] for one
    /// that was lowered for a GPU and writes as only its kernels do. [`Error::DoesNotFit`], before any byte
    /// is touched, when the machine has less memory available.
    pub fn on_cpu(executable: Executable, workers: Workers, seed: u64) -> Result<Self> {
        if let Some(dtype) = executable.dtypes().find(|dtype| !KERNELS.contains(dtype)) {
            return Err(Error::NoKernels { dtype });
        }
        // Kernels of the CPU are given outputs without gaps, which would else be each other's.
        let mut instructions = executable.programs().iter().flat_map(|program| &program.instructions);
        if let Some(other) =
            instructions.find(|other| other.outputs.iter().any(|output| !output.layout.is_contiguous()))
        {
            return Err(Error::OtherTarget { instruction: other.describe() });
        }
        if executable.dtypes().any(|dtype| dtype == DType::BF16) && !multiplies_bf16() {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                tracing::warn!("this CPU has no products of bf16 (vdpbf16ps) and computes them in f32, in less memory, but no faster")
            });
        }
        let needed = executable.arena_bytes();
        if let Some((available, limit)) = crate::process_memory::available_memory().filter(|(bytes, _)| *bytes < needed)
        {
            let largest = gapless_compile::report::largest_at_peak(&executable, 8);
            return Err(Error::DoesNotFit { needed, available, limit, largest });
        }
        let transfers = Mutex::new(Transfers::default());
        let routed = Mutex::new(Routed::new(&executable, OverflowHeap::default()));
        let (arena, file, times) = (arena_of(needed)?, Mutex::default(), Mutex::default());
        Self::with_initial_values(executable, CpuBackend { transfers, arena, routed, workers, file, times }, seed)
    }

    /// Makes the file that offloaded activations wait in. An executable that has such cannot run without.
    ///
    /// # Errors
    /// [`Error::Offload`] when it cannot be made in this folder.
    pub fn offload_to(&mut self, folder: &Path) -> Result<()> {
        let file = HostFile::new(folder, self.executable.host_bytes())?;
        self.backend.file = Mutex::new(Some(file));
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn run(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        let program = &executable.programs()[id.0];
        let span = tracing::info_span!("run", program = program.name, step = options.step);
        let _entered = span.enter();
        let bytes = self.arena.bytes();
        let outcome = self.arena.exclusive(|base| {
            let base = Base(base);
            let outcome = OnceLock::new();
            self.workers.run(&|| {
                let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
                let mut routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
                routed.begin(bytes);
                let guard = transfers.guard();
                let followed = guard.transfers.follow(id.0).map_err(|error| (0, Failure::Communicator(error)));
                let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
                let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
                *times = Times::default();
                let context = RunContext {
                    transfers: &mut *guard.transfers,
                    routed: &mut routed,
                    file: &mut file,
                    times: &mut times,
                };
                let result = followed.and_then(|()| run_all(program, base, bytes, options, context));
                guard.end(result.is_ok());
                let _ = outcome.set(result);
            });
            outcome.into_inner()
        })?;
        match outcome {
            Some(Ok(culprit)) => Ok(culprit.map(|index| program.instructions[index].describe())),
            Some(Err((index, failure))) => {
                let instruction = program.instructions[index].describe();
                Err(match failure {
                    Failure::Communicator(source) => Error::Communicator { instruction, source },
                    Failure::Overflow(refusal) => refusal.error(instruction),
                    Failure::NonFinite => Error::NonFinite { step: options.step, loss: f32::NAN, culprit: instruction },
                    Failure::File(source) => Error::Offload { what: instruction, source },
                })
            }
            None => Ok(None),
        }
    }

    fn connect(&mut self, _: &Executable, transfers: Transfers) -> Result<()> {
        self.transfers = Mutex::new(transfers);
        Ok(())
    }

    fn read(&self, addresses: &[&Address], show: &mut dyn FnMut(&[&[u8]])) -> Result<()> {
        self.arena.exclusive(|base| {
            let bytes = |address: &&Address| {
                // SAFETY: a checked plan puts every address inside the arena; `exclusive` keeps everyone else out, and `show`
                // cannot keep what it is shown.
                unsafe { std::slice::from_raw_parts(base.add(address.offset as usize).cast_const(), len(address)) }
            };
            match addresses {
                // Without an allocation.
                &[one] => show(&[bytes(&one)]),
                all => show(&all.iter().map(bytes).collect::<Vec<_>>()),
            }
        })
    }

    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        debug_assert!(address.layout.is_contiguous());
        self.arena.exclusive(|base| {
            // SAFETY: a checked plan puts every address inside the arena; `exclusive` keeps everyone else out; every pattern of
            // bits is an element.
            change(unsafe { std::slice::from_raw_parts_mut(base.add(address.offset as usize), len(address)) })
        })
    }

    fn tensor(&self, address: &Address) -> Result<Tensor> {
        if address.dtype == DType::F32 {
            return self.arena.view(address.offset, address.layout.shape());
        }
        let mut tensor = None;
        let dims = address.layout.dims();
        self.read(&[address], &mut |bytes| {
            tensor = Some(Tensor::from_raw_buffer(bytes[0], address.dtype, dims, &Device::Cpu));
        })?;
        Ok(tensor.expect("it was shown")?)
    }

    fn threads(&self) -> usize {
        self.workers.threads()
    }

    fn times(&self) -> Option<Times> {
        Some(*self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn routing(&self) -> Option<ArenaReport> {
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).report()
    }

    fn check_run(&self, executable: &Executable) -> Result<usize> {
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).check(executable)
    }

    fn serve_outside(&mut self, limit: u64) {
        self.routed.get_mut().unwrap_or_else(PoisonError::into_inner).serve_outside(limit);
    }

    fn grow(&mut self, executable: &mut Executable, limit: u64) -> Result<()> {
        let routed = self.routed.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(factor) = routed.factor_needed() else { return Ok(()) };
        let limit = limit.min(crate::process_memory::available_memory_bytes().unwrap_or(u64::MAX));
        let planned = executable.solution().height as usize;
        routed.grow(executable, factor, limit, |bytes| {
            let arena = arena_of(bytes)?;
            self.arena.exclusive(|from| {
                // SAFETY: both arenas begin with the static plan, and are held exclusively; they are two allocations.
                arena.exclusive(|to| unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, planned) })
            })??;
            self.arena = arena;
            Ok(true)
        })
    }
}

/// An arena in large pages, where the system has such: weights that are read once per token are read faster, as hardly any address has
/// to be translated.
fn arena_of(bytes: u64) -> Result<Arena> {
    let arena = Arena::new(bytes)?;
    #[cfg(target_os = "linux")]
    arena.exclusive(|base| {
        let page = LARGE_PAGE as usize;
        let first = base.addr().next_multiple_of(page) - base.addr();
        let whole = (bytes as usize).saturating_sub(first) / page * page;
        if whole > 0 {
            // SAFETY: whole pages inside the arena. The advice changes nothing of what is read or written; one that is not taken
            // leaves the pages as they are.
            unsafe { libc::madvise(base.add(first).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    })?;
    Ok(arena)
}

/// Bytes of a large page of x86-64, and of 64-bit Arm with the usual small ones.
#[cfg(target_os = "linux")]
const LARGE_PAGE: u64 = 2 << 20;

/// Bytes at an address.
fn len(address: &Address) -> usize {
    address.span * address.dtype.size_in_bytes()
}
