//! The CPU backend: runs one instruction after another at planned addresses, without allocating and without looking
//! up names.

use std::path::Path;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use candle_core::{DType, Device, Tensor};
use gapless_alloc::arena::ArenaReport;
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cpu::overflow_heap::OverflowHeap;
use gapless_kernels::cpu::peak::{Bf16Products, Peak, has_amx, has_pairs};

use super::arena::Arena;
use super::run::{Failure, RunContext, run_all};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::offload::OffloadFile;
use crate::routed::DynamicBuffers;
use crate::session::{Backend, RunOptions, Session, Times};
use crate::transfers::{ArenaBase, Transfers};

/// The element types that the CPU kernels read and write.
const KERNELS: [DType; 5] = [DType::F32, DType::BF16, DType::F64, DType::U32, DType::U8];

/// An arena on the CPU, and the threads that compute in it.
#[derive(Debug)]
pub struct CpuBackend {
    /// Transfers between ranks. Locked only by the current run. Dropped first, because transfers in progress access
    /// the arena.
    transfers: Mutex<Transfers>,
    arena: Arena,
    /// The dynamic buffers. Locked only by the current run.
    routed: Mutex<DynamicBuffers>,
    workers: Workers,
    /// The file for offloaded activations. Locked only by the current run.
    file: Mutex<Option<OffloadFile>>,
    /// The time that the last run spent on each activity. Locked only by the current run.
    times: Mutex<Times>,
}

/// Logs how this CPU computes products of bf16, and the measured rates of the two methods.
fn describe_bf16() {
    if !has_pairs() {
        tracing::warn!(
            "this CPU has no products of bf16 (vdpbf16ps); they are computed in f32, which saves memory but no time"
        );
        return;
    }
    let Peak { f32, bf16_pairs } = Peak::known();
    let gflops = |rate: f64| (rate / 1e9).round();
    tracing::info!(
        products = Bf16Products::chosen().name(),
        f32_gflops_per_core = gflops(f32),
        pairs_gflops_per_core = bf16_pairs.map(gflops),
        amx = if has_amx() { "present, not used" } else { "absent" },
        "products of bf16 on this CPU"
    );
}

impl Session<CpuBackend> {
    /// Reserves the arena and fills the persistent tensors with their initial values. Programs that were lowered for
    /// several ranks can run only after [`connect`](Self::connect).
    ///
    /// # Errors
    /// - [`Error::NoKernels`] if a tensor has an element type without CPU kernels, such as f16
    /// - [`Error::OtherTarget`] if the executable was lowered for a GPU and writes tensors that are not contiguous
    /// - [`Error::DoesNotFit`] if the machine has too little memory available; the arena is then not reserved
    pub fn on_cpu(executable: Executable, workers: Workers, seed: u64) -> Result<Self> {
        if let Some(dtype) = executable.dtypes().find(|dtype| !KERNELS.contains(dtype)) {
            return Err(Error::NoKernels { dtype });
        }
        // CPU kernels are given outputs as contiguous slices. If an output had gaps, its slice could contain bytes of
        // other tensors.
        let mut instructions = executable.programs().iter().flat_map(|program| &program.instructions);
        if let Some(other) =
            instructions.find(|other| other.outputs.iter().any(|output| !output.layout.is_contiguous()))
        {
            return Err(Error::OtherTarget { instruction: other.describe() });
        }
        if executable.dtypes().any(|dtype| dtype == DType::BF16) {
            static ONCE: Once = Once::new();
            ONCE.call_once(describe_bf16);
        }
        let needed = executable.arena_bytes();
        if let Some((available, limit)) = crate::process_memory::available_memory().filter(|(bytes, _)| *bytes < needed)
        {
            let largest = gapless_compile::report::largest_at_peak(&executable, 8);
            return Err(Error::DoesNotFit { needed, available, limit, largest });
        }
        let transfers = Mutex::new(Transfers::default());
        let routed = Mutex::new(DynamicBuffers::new(&executable, OverflowHeap::default()));
        let (arena, file, times) = (arena_of(needed)?, Mutex::default(), Mutex::default());
        Self::with_initial_values(executable, CpuBackend { transfers, arena, routed, workers, file, times }, seed)
    }

    /// Creates the file for offloaded activations. An executable that offloads cannot run without it.
    ///
    /// # Errors
    /// Returns [`Error::Offload`] if the file cannot be created in this folder.
    pub fn offload_to(&mut self, folder: &Path) -> Result<()> {
        let file = OffloadFile::new(folder, self.executable.host_bytes())?;
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
            let base = ArenaBase(base);
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
                // SAFETY: a checked plan puts every address inside the arena. `exclusive` holds the lock, and `show`
                // cannot keep the slice after the call.
                unsafe { std::slice::from_raw_parts(base.add(address.offset as usize).cast_const(), len(address)) }
            };
            match addresses {
                // The usual case of one address does not allocate.
                &[one] => show(&[bytes(&one)]),
                all => show(&all.iter().map(bytes).collect::<Vec<_>>()),
            }
        })
    }

    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        debug_assert!(address.layout.is_contiguous());
        self.arena.exclusive(|base| {
            // SAFETY: a checked plan puts every address inside the arena. `exclusive` holds the lock, and every bit
            // pattern is a valid element.
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

    fn allow_overflow_heap(&mut self, limit: u64) {
        self.routed.get_mut().unwrap_or_else(PoisonError::into_inner).allow_overflow_heap(limit);
    }

    fn grow(&mut self, executable: &mut Executable, limit: u64) -> Result<()> {
        let routed = self.routed.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(factor) = routed.factor_needed() else { return Ok(()) };
        let limit = limit.min(crate::process_memory::available_memory_bytes().unwrap_or(u64::MAX));
        let planned = executable.solution().height as usize;
        routed.grow(executable, factor, limit, |bytes| {
            let arena = arena_of(bytes)?;
            self.arena.exclusive(|from| {
                // SAFETY: both arenas begin with the static plan. Both are locked by `exclusive`, and they are
                // separate allocations.
                arena.exclusive(|to| unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, planned) })
            })??;
            self.arena = arena;
            Ok(true)
        })
    }
}

/// Reserves an arena in large pages, if the system supports them. Large pages need fewer address translations, which
/// speeds up reading weights that are read once per token.
fn arena_of(bytes: u64) -> Result<Arena> {
    let arena = Arena::new(bytes)?;
    #[cfg(target_os = "linux")]
    arena.exclusive(|base| {
        let page = LARGE_PAGE as usize;
        let first = base.addr().next_multiple_of(page) - base.addr();
        let whole = (bytes as usize).saturating_sub(first) / page * page;
        if whole > 0 {
            // SAFETY: these are whole pages inside the arena. The advice does not change their contents, and the
            // system may ignore the advice.
            unsafe { libc::madvise(base.add(first).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    })?;
    Ok(arena)
}

/// Bytes of a large page on x86-64, and on 64-bit Arm with 4 KiB pages.
#[cfg(target_os = "linux")]
const LARGE_PAGE: u64 = 2 << 20;

/// Size in bytes of the tensor at an address.
fn len(address: &Address) -> usize {
    address.span * address.dtype.size_in_bytes()
}
