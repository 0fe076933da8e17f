//! Runs programs: instruction after instruction at planned addresses. No allocation, no name, no free.

use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::{Device, Tensor};
use gapless_alloc::Label;
use gapless_alloc::arena::{ArenaReport, Reserve};
use gapless_compile::internal::Persistent;
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::Spec;
use gapless_kernels::cpu::args::{Address, Element};

use super::arena::Arena;
use super::offload::HostFile;
use super::routed::{Refusal, Routed};
use super::run::{Base, Failure, RunContext, run_all};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::links::{Communicators, Links};

/// A tensor that outlives the step, as [`Executor::with_persistent`] shows it.
#[derive(Debug)]
pub struct PersistentBytes<'a> {
    /// Its names and role.
    pub label: &'a Label,
    /// Shape and type.
    pub spec: &'a Spec,
    /// Whether this rank's instructions change it, rather than a message from the rank that does.
    pub changes_here: bool,
    /// Its elements.
    pub bytes: &'a [u8],
}

/// How a program is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// The run's seed.
    pub seed: u64,
    /// The step, which keys the random numbers.
    pub step: u64,
    /// Fill every dead range with NaN between instructions: results must not change.
    pub poison: bool,
    /// Say which is the first instruction whose output is not finite.
    pub watch: bool,
    /// The part of the whole batch that this rank's micro-batch 0 is.
    pub first_part: u64,
    /// How many parts on its next one is; 0 where there is only one.
    pub part_stride: u64,
}

/// An executable in an arena of its own.
#[derive(Debug)]
pub struct Executor {
    /// Only ever locked by the one run under way. First to be dropped: what is under way reads and writes the arena.
    links: Mutex<Links>,
    executable: Executable,
    arena: Arena,
    /// What is placed while a program runs. Only ever locked by the one run under way.
    routed: Mutex<Routed>,
    workers: Workers,
    /// Where activations wait that are offloaded. Only ever locked by the one run under way.
    file: Mutex<Option<HostFile>>,
}

impl Executor {
    /// Reserves the arena and fills the persistent tensors. Programs that were lowered for several ranks run once they are
    /// [connected](Self::connect).
    ///
    /// # Errors
    /// [`Error::NoKernels`] for an executable that computes in another type than f32. [`Error::DoesNotFit`], before any byte
    /// is touched, when the machine has less memory available.
    pub fn new(executable: Executable, workers: Workers, seed: u64) -> Result<Self> {
        if let Some(dtype) =
            executable.dtypes().find(|dtype| ![f32::DTYPE, f64::DTYPE, u32::DTYPE, u8::DTYPE].contains(dtype))
        {
            return Err(Error::NoKernels { dtype });
        }
        let needed = executable.arena_bytes();
        if let Some(available) = crate::process_memory::available_memory_bytes().filter(|&available| available < needed)
        {
            let largest = gapless_compile::report::largest_at_peak(&executable, 8);
            return Err(Error::DoesNotFit { needed, available, largest });
        }
        let links = Mutex::new(Links::default());
        let counts = executable.programs.iter().map(|program| program.counts).max().unwrap_or(0);
        let routed = Mutex::new(Routed::new(executable.routing.as_ref(), counts));
        let (arena, file) = (Arena::new(needed)?, Mutex::new(None));
        let executor = Self { links, executable, arena, routed, workers, file };
        for persistent in &executor.executable.persistent {
            let Persistent { fill, address, .. } = persistent;
            match persistent.spec.dtype {
                u8::DTYPE => executor.with_slice(address, |out| fill.fill(seed, out, |x| x as u8))?,
                _ => executor.with_slice(address, |out| fill.fill(seed, out, |x| x as f32))?,
            }
        }
        Ok(executor)
    }

    /// Gives it the ways to the other ranks.
    pub fn connect(&mut self, communicators: Communicators) {
        self.links = Mutex::new(Links::new(communicators, &self.executable));
    }

    /// Makes the file that offloaded activations wait in. An executable that has such cannot run without.
    ///
    /// # Errors
    /// [`Error::Offload`] when it cannot be made in this folder.
    pub fn offload_to(&mut self, folder: &Path) -> Result<()> {
        let file = HostFile::new(folder, self.executable.host_bytes())?;
        self.file = Mutex::new(Some(file));
        Ok(())
    }

    /// Lets counted buffers that find no room in the arena have room outside of it, as long as both take no more than `limit`
    /// bytes: what [`grow`](Self::grow) then ends.
    pub fn serve_outside(&mut self, limit: u64) {
        self.routed.get_mut().unwrap_or_else(PoisonError::into_inner).serve_outside(limit);
    }

    /// If the last run had to use room outside of the arena: makes the arena as large as would have served it, and a quarter
    /// more if that fits into `limit` bytes too. If neither does, it stays as it is. Everything in it is what it was, at the
    /// same offsets; candle tensors over its bytes that were given out before are copies from now on.
    ///
    /// # Errors
    /// Only if the arena itself is broken.
    pub fn grow(&mut self, limit: u64) -> Result<()> {
        let routed = self.routed.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(factor) = routed.factor_needed() else { return Ok(()) };
        let limit = limit.min(crate::process_memory::available_memory_bytes().unwrap_or(u64::MAX));
        for factor in [1.25 * factor, factor] {
            let Some(plan) = self.executable.routing_with(Reserve::Balanced { factor })? else { continue };
            if plan.height() > limit || plan.height() <= self.executable.arena_bytes() {
                continue;
            }
            let (arena, bytes) = (Arena::new(plan.height())?, self.executable.solution.height as usize);
            self.arena.exclusive(|from| {
                // SAFETY: both arenas begin with the static plan, and are held exclusively; they are two allocations.
                arena.exclusive(|to| unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, bytes) })
            })??;
            tracing::info!(factor, bytes = plan.height(), "the arena has grown");
            routed.grow(plan.clone());
            self.arena = arena;
            self.executable.routing = Some(plan);
            break;
        }
        Ok(())
    }

    /// What it runs.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// Runs a program. Returns the first instruction with a non-finite output, if asked to watch for it.
    ///
    /// # Errors
    /// When another rank fails; [`Error::Routing`] or [`Error::Growth`] when rows find no room, [`Error::NonFinite`] when that comes
    /// of numbers that are not finite; [`Error::Offload`] when a file cannot be written or read.
    pub fn run(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        let program = &self.executable.programs[id.0];
        let span = tracing::info_span!("run", program = program.name, step = options.step);
        let _entered = span.enter();
        let bytes = self.arena.bytes();
        let outcome = self.arena.exclusive(|base| {
            let base = Base(base);
            let outcome = OnceLock::new();
            self.workers.run(&|| {
                let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
                let mut routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
                routed.begin(bytes);
                let lent = links.lend();
                let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
                let context = RunContext { links: &mut *lent.links, routed: &mut routed, file: &mut file };
                let result = run_all(program, base, bytes, options, context);
                lent.end(result.is_ok());
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
                    Failure::Overflow(Refusal { overflow, needed: None }) => {
                        Error::Routing { instruction, source: overflow }
                    }
                    Failure::Overflow(Refusal { overflow, needed: Some(needed) }) => {
                        Error::Growth { instruction, needed, source: overflow }
                    }
                    Failure::NonFinite => Error::NonFinite { step: options.step, loss: f32::NAN, culprit: instruction },
                    Failure::File(source) => Error::Offload { what: instruction, source },
                })
            }
            None => Ok(None),
        }
    }

    /// What the arena of counted buffers has done so far; nothing if no program counts any.
    pub fn routing(&self) -> Option<ArenaReport> {
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).report()
    }

    /// Judges the addresses that the last run used, those of the plan and those that were found while it ran, and returns how
    /// many of the latter there were.
    ///
    /// # Errors
    /// [`Error::BadRun`] when two that lived at the same time have a byte in common.
    pub fn check_run(&self) -> Result<usize> {
        let routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        routed.check(&self.executable).map_err(|violations| Error::BadRun {
            what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        })
    }

    /// Writes an input of a program.
    ///
    /// # Errors
    /// When there is no such input, or it holds another number of elements or another type.
    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        let address = self.executable.programs[id.0].input_for(name, micro_batch, data)?;
        self.with_slice(address, |out| out.copy_from_slice(data))
    }

    /// An output of a program that has run: a candle tensor over the arena's own bytes, valid until the next run.
    ///
    /// # Errors
    /// When there is no such output.
    pub fn output(&self, id: ProgramId, name: &str) -> Result<Tensor> {
        let named = self.executable.programs[id.0].output(name)?;
        if !named.is_f32() {
            return Err(Error::NotF32 { name: name.into(), dtype: named.spec.dtype });
        }
        self.arena.view(named.address.offset, &named.spec.shape)
    }

    /// A scalar output of a program that has run. Allocates nothing.
    ///
    /// # Errors
    /// When there is no such output.
    pub fn scalar(&self, id: ProgramId, name: &str) -> Result<f32> {
        let named = self.executable.programs[id.0].output(name)?;
        self.with_slice::<f32, _>(&named.address, |x| x[0])
    }

    /// A parameter or an optimizer state by its full name: a candle tensor over the arena's own bytes if it is f32, else a
    /// copy of them.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let found = self.executable.find_persistent(name)?;
        match found.spec.dtype {
            u8::DTYPE => self.with_slice::<u8, _>(&found.address, |bytes| {
                Ok(Tensor::from_slice(bytes, &found.spec.shape, &Device::Cpu)?)
            })?,
            _ => self.arena.view(found.address.offset, &found.spec.shape),
        }
    }

    /// Shows all persistent tensors as bytes, without a copy.
    ///
    /// # Errors
    /// Only if the arena itself is broken.
    pub fn with_persistent<R>(&self, f: impl FnOnce(&[PersistentBytes<'_>]) -> R) -> Result<R> {
        self.arena.exclusive(|base| {
            let show = |p: &'_ Persistent| {
                // SAFETY: a checked plan puts every address inside the arena; `exclusive` keeps everyone else out, and
                // `f` cannot keep what it is shown.
                unsafe {
                    std::slice::from_raw_parts(
                        base.add(p.address.offset as usize).cast_const(),
                        p.address.span * p.address.dtype.size_in_bytes(),
                    )
                }
            };
            let all = self.executable.persistent.iter();
            let tensors: Vec<PersistentBytes<'_>> = all
                .map(|p| PersistentBytes {
                    label: &p.label,
                    spec: &p.spec,
                    changes_here: p.changes_here,
                    bytes: show(p),
                })
                .collect();
            f(&tensors)
        })
    }

    /// Lets `fill` write the bytes of a persistent tensor.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn fill_tensor<R>(&mut self, name: &str, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let found = self.executable.find_persistent(name)?;
        self.arena.exclusive(|base| {
            let bytes = found.address.span * found.address.dtype.size_in_bytes();
            // SAFETY: as in `with_slice`; every pattern of bits is an element.
            fill(unsafe { std::slice::from_raw_parts_mut(base.add(found.address.offset as usize), bytes) })
        })
    }

    /// Overwrites a persistent tensor of f32.
    ///
    /// # Errors
    /// When there is none of that name, size or type.
    pub fn write_tensor(&mut self, name: &str, data: &[f32]) -> Result<()> {
        let found = self.executable.find_persistent(name)?;
        if found.spec.dtype != f32::DTYPE {
            return Err(Error::NotF32 { name: name.into(), dtype: found.spec.dtype });
        }
        if found.address.span != data.len() {
            return Err(Error::ElementCount { name: name.into(), expected: found.address.span, given: data.len() });
        }
        self.with_slice(&found.address, |out| out.copy_from_slice(data))
    }

    fn with_slice<T: Element, R>(&self, address: &Address, f: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        debug_assert!(address.layout.is_contiguous() && address.dtype == T::DTYPE);
        self.arena.exclusive(|base| {
            // SAFETY: a checked plan puts every address inside the arena, aligned for its type; `exclusive` keeps
            // everyone else out.
            let slice =
                unsafe { std::slice::from_raw_parts_mut(base.add(address.offset as usize).cast::<T>(), address.span) };
            f(slice)
        })
    }
}
