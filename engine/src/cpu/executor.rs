//! Runs programs: instruction after instruction at planned addresses. No allocation, no name, no free.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{Device, Tensor};
use gapless_alloc::arena::{ArenaReport, Overflow};
use gapless_alloc::{Label, Role};

use super::arena::Arena;
use super::args::{Address, Args, Element, Places};
use super::offload::HostFile;
use super::routed::Routed;
use super::workers::Workers;
use crate::communicator::{self, Communicator, CommunicatorError, Request};
use crate::compile::{CompiledProgram, Executable, Instruction, Message, Named, Persistent, Work};
use crate::error::{Error, Result};
use crate::graph::Spec;
use crate::ops::{Collective, Group};
use crate::random::Stream;

/// Index of a program in its executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramId(usize);

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
    executable: Arc<Executable>,
    arena: Arena,
    /// What is placed while a program runs. Only ever locked by the one run under way.
    routed: Mutex<Routed>,
    workers: Workers,
    /// Where activations wait that are offloaded. Only ever locked by the one run under way.
    file: Mutex<Option<HostFile>>,
}

/// The ways to the other ranks.
#[derive(Debug, Default)]
pub struct Communicators {
    /// To the other ranks of the pipeline.
    pub pipeline: Option<Box<dyn Communicator>>,
    /// To all with the same stages and another share of the batch.
    pub batch: Option<Box<dyn Communicator>>,
    /// To those of them that share this copy's experts.
    pub experts: Option<Box<dyn Communicator>>,
    /// To those of them that have the same experts.
    pub replicas: Option<Box<dyn Communicator>>,
}

impl Communicators {
    fn of(&mut self, group: Group) -> communicator::Result<&mut Box<dyn Communicator>> {
        let group = match group {
            Group::Batch => &mut self.batch,
            Group::Experts => &mut self.experts,
            Group::Replicas => &mut self.replicas,
        };
        group.as_mut().ok_or(NO_COMMUNICATOR)
    }
}

/// The ways to the other ranks, and what is under way to and from them.
#[derive(Debug, Default)]
struct Links {
    communicators: Communicators,
    requests: Vec<Option<Under>>,
    /// Sizes of what goes to and comes from each expert rank, by request.
    lens: Vec<[Vec<usize>; 2]>,
}

/// What is under way.
#[derive(Debug)]
enum Under {
    Message(Request),
    Collective(Request, Group),
}

/// What a run reaches beside the planned arena.
struct Outside<'o> {
    links: &'o mut Links,
    routed: &'o mut Routed,
    file: &'o mut Option<HostFile>,
}

impl Executor {
    /// Reserves the arena and fills the persistent tensors. Programs that were lowered for several ranks need the
    /// communicators to the others.
    ///
    /// # Errors
    /// [`Error::NoKernels`] for an executable that computes in another type than f32. [`Error::DoesNotFit`], before any byte
    /// is touched, when the machine has less memory available.
    pub fn new(executable: Arc<Executable>, workers: Workers, seed: u64, communicators: Communicators) -> Result<Self> {
        if let Some(dtype) =
            executable.dtypes().find(|dtype| ![f32::DTYPE, f64::DTYPE, u32::DTYPE, u8::DTYPE].contains(dtype))
        {
            return Err(Error::NoKernels { dtype });
        }
        let needed = executable.arena_bytes();
        if let Some(available) = crate::metrics::available_memory_bytes().filter(|&available| available < needed) {
            let largest = crate::report::largest_at_peak(&executable, 8);
            return Err(Error::DoesNotFit { needed, available, largest });
        }
        let requests = executable.programs.iter().map(|program| program.requests).max().unwrap_or(0);
        let experts = communicators.experts.as_ref().map_or(0, |experts| experts.size());
        let lens = (0..requests).map(|_| [vec![0; experts], vec![0; experts]]).collect();
        let links = Mutex::new(Links { communicators, requests: (0..requests).map(|_| None).collect(), lens });
        let counts = executable.programs.iter().map(|program| program.counts).max().unwrap_or(0);
        let routed = Mutex::new(Routed::new(executable.routing.as_ref(), counts));
        let (arena, file) = (Arena::new(needed)?, Mutex::new(None));
        let executor = Self { links, executable, arena, routed, workers, file };
        for persistent in &executor.executable.persistent {
            let (init, name, first) = (persistent.init, &persistent.label.tensor, persistent.first);
            match persistent.spec.dtype {
                u8::DTYPE => {
                    executor.with_slice(&persistent.address, |out| init.fill(seed, name, first, out, |x| x as u8))?
                }
                _ => executor.with_slice(&persistent.address, |out| init.fill(seed, name, first, out, |x| x as f32))?,
            }
        }
        Ok(executor)
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

    /// What it runs.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// Finds a program by name.
    pub fn program(&self, name: &str) -> Option<ProgramId> {
        self.executable.programs.iter().position(|p| p.name == name).map(ProgramId)
    }

    /// Runs a program. Returns the first instruction with a non-finite output, if asked to watch for it.
    ///
    /// # Errors
    /// When another rank fails; [`Error::Routing`] when rows find no room; [`Error::Offload`] when a file cannot be written or read.
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
                routed.begin();
                let mut lent = Lent { links: &mut links, over: false };
                let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
                let outside = Outside { links: lent.links, routed: &mut routed, file: &mut file };
                let result = run_all(program, base, bytes, options, outside);
                lent.over = result.is_ok();
                drop(lent);
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
                    Failure::Overflow(source) => Error::Routing { instruction, source },
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

    /// Whether a program reads an input of this name.
    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.executable.programs[id.0].inputs.iter().any(|input| input.name == name)
    }

    /// Writes an input of a program.
    ///
    /// # Errors
    /// When there is no such input, or it holds another number of elements or another type.
    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        let inputs = &self.executable.programs[id.0].inputs;
        let Some(named) = inputs.iter().find(|i| i.name == name && i.micro_batch == micro_batch) else {
            return Err(unknown(name, inputs.iter().map(|i| i.name.as_str())));
        };
        if named.address.span != data.len() || named.spec.dtype != T::DTYPE {
            return Err(Error::ElementCount { name: name.into(), expected: named.address.span, given: data.len() });
        }
        self.with_slice(&named.address, |out| out.copy_from_slice(data))
    }

    /// An output of a program that has run: a candle tensor over the arena's own bytes, valid until the next run.
    ///
    /// # Errors
    /// When there is no such output.
    pub fn output(&self, id: ProgramId, name: &str) -> Result<Tensor> {
        let named = self.find_output(id, name)?;
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
        let named = self.find_output(id, name)?;
        self.with_slice::<f32, _>(&named.address, |x| x[0])
    }

    fn find_output(&self, id: ProgramId, name: &str) -> Result<&Named> {
        let outputs = &self.executable.programs[id.0].outputs;
        outputs.iter().find(|o| o.name == name).ok_or_else(|| unknown(name, outputs.iter().map(|o| o.name.as_str())))
    }

    /// A parameter or an optimizer state by its full name: a candle tensor over the arena's own bytes if it is f32, else a
    /// copy of them.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let found = self.find_persistent(name)?;
        match found.spec.dtype {
            u8::DTYPE => self.with_slice::<u8, _>(&found.address, |bytes| {
                Ok(Tensor::from_slice(bytes, &found.spec.shape, &Device::Cpu)?)
            })?,
            _ => self.arena.view(found.address.offset, &found.spec.shape),
        }
    }

    /// Names of the persistent tensors of a role, in the order of their declaration.
    pub fn names(&self, role: Role) -> impl Iterator<Item = &str> {
        self.executable.persistent.iter().filter(move |p| p.label.role == role).map(|p| p.label.tensor.as_str())
    }

    /// Names, shapes and types of the persistent tensors of a role, in the order of their declaration.
    pub fn specs(&self, role: Role) -> impl Iterator<Item = (&str, &Spec)> {
        let of_role = self.executable.persistent.iter().filter(move |p| p.label.role == role);
        of_role.map(|p| (p.label.tensor.as_str(), &p.spec))
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
        let found = self.find_persistent(name)?;
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
        let found = self.find_persistent(name)?;
        if found.spec.dtype != f32::DTYPE {
            return Err(Error::NotF32 { name: name.into(), dtype: found.spec.dtype });
        }
        if found.address.span != data.len() {
            return Err(Error::ElementCount { name: name.into(), expected: found.address.span, given: data.len() });
        }
        self.with_slice(&found.address, |out| out.copy_from_slice(data))
    }

    fn find_persistent(&self, name: &str) -> Result<&Persistent> {
        let persistent = &self.executable.persistent;
        let found = persistent.iter().find(|p| p.label.tensor == name);
        found.ok_or_else(|| unknown(name, persistent.iter().map(|p| p.label.tensor.as_str())))
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

/// What messages under way hold of the arena; a run that fails or panics takes it back before the arena is let go.
struct Lent<'l> {
    links: &'l mut Links,
    over: bool,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if !self.over {
            *self.links = Links::default();
        }
    }
}

/// The arena's first byte, on its way to the threads of the pool.
#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: the arena is held exclusively while a program runs, and instructions give their threads disjoint parts.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

/// Runs every instruction; returns the index of the first with a non-finite output when watching, or of the one that
/// failed. Ranks that watch go on to the end: others wait for what they send.
fn run_all(
    program: &CompiledProgram,
    base: Base,
    bytes: u64,
    options: RunOptions,
    outside: Outside<'_>,
) -> Result<Option<usize>, (usize, Failure)> {
    let Outside { links, routed, file } = outside;
    let mut culprit = None;
    for (index, instruction) in program.instructions.iter().enumerate() {
        let span = tracing::trace_span!("op", name = instruction.work.name(), layer = &*instruction.layer);
        let _entered = span.enter();
        routed.place(instruction).map_err(|overflow| (index, Failure::Overflow(Box::new(overflow))))?;
        let places = routed.places();
        let failed = |source| (index, Failure::Communicator(source));
        let part = options.first_part + options.part_stride * u64::from(instruction.micro_batch);
        match &instruction.work {
            Work::Compute(op) => {
                let stream = Stream::new(options.seed, options.step, part);
                // SAFETY: the addresses come from a plan that has passed the checker; the arena is held exclusively, and
                // what messages under way read or write is alive until their wait.
                let mut args = unsafe {
                    Args::new(
                        base.0,
                        &instruction.inputs,
                        &instruction.outputs,
                        &instruction.workspace,
                        places,
                        instruction.accumulate,
                        stream,
                    )
                };
                op.run(&mut args);
            }
            Work::Send(message) | Work::Receive(message) | Work::Wait(message) => {
                // SAFETY: as above; a program's last instructions wait for all that is under way.
                unsafe { transfer(instruction, *message, base, links) }.map_err(failed)?;
            }
            Work::Collective(collective, request) => {
                // SAFETY: as above.
                unsafe { begin(*collective, *request, instruction, (base, places), links) }.map_err(failed)?;
            }
            Work::Finish(request) => finish(*request, links).map_err(failed)?,
            Work::Offload(id) | Work::Fetch(id) => {
                // SAFETY: as above.
                unsafe { copy(instruction, program.host[id.index()], base, file) }
                    .map_err(|source| (index, Failure::File(source)))?;
            }
        }
        // What is being received is not to be looked at before the wait for it.
        let watched = match &instruction.work {
            Work::Compute(_) | Work::Fetch(_) => &instruction.outputs,
            Work::Wait(_) | Work::Finish(_) => &instruction.inputs,
            Work::Send(_) | Work::Receive(_) | Work::Collective(..) | Work::Offload(_) => &Box::default(),
        };
        if options.watch && culprit.is_none() && !are_finite(watched, base, places) {
            culprit = Some(index);
        }
        if let Some(count) = instruction.counts {
            // SAFETY: as above; the instruction is over.
            routed.count(count, unsafe { last_u32(base, &instruction.outputs[0]) });
        }
        for range in routed.release(instruction).filter(|_| options.poison) {
            fill_with_nan(range, base, bytes);
        }
        if options.poison {
            instruction.dead_after.iter().for_each(|range| fill_with_nan(range.clone(), base, bytes));
        }
    }
    Ok(culprit)
}

/// Copies an operand to the file, or from it.
///
/// # Safety
/// The operand lies in the arena at `base`, and nobody else touches it meanwhile.
unsafe fn copy(instruction: &Instruction, offset: u64, base: Base, file: &mut Option<HostFile>) -> io::Result<()> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no file was made to offload to");
    let file = file.as_mut().ok_or_else(none)?;
    match &*instruction.outputs {
        [to] => {
            // SAFETY: by this function's contract; every pattern of bits is an element.
            let bytes = unsafe {
                let (start, bytes) = range(base, to, Places::NONE);
                std::slice::from_raw_parts_mut(start, bytes)
            };
            file.read(offset, bytes)
        }
        _ => {
            // SAFETY: by this function's contract.
            let bytes = unsafe {
                let (start, bytes) = range(base, &instruction.inputs[0], Places::NONE);
                std::slice::from_raw_parts(start.cast_const(), bytes)
            };
            file.write(offset, bytes)
        }
    }
}

/// Starts or ends a message.
///
/// # Safety
/// The operand lies in the arena at `base`, and nobody touches it until the message's wait.
unsafe fn transfer(
    instruction: &Instruction,
    message: Message,
    base: Base,
    links: &mut Links,
) -> communicator::Result<()> {
    let Message { peer, tag, request } = message;
    let pipeline = links.communicators.pipeline.as_mut().ok_or(NO_COMMUNICATOR)?;
    // SAFETY: by this function's contract.
    let range = |address| unsafe { range(base, address, Places::NONE) };
    match &instruction.work {
        Work::Send(_) => {
            let (from, bytes) = range(&instruction.inputs[0]);
            // SAFETY: by this function's contract.
            links.requests[request] =
                Some(Under::Message(unsafe { pipeline.isend(from.cast_const(), bytes, peer, tag) }?));
        }
        Work::Receive(_) => {
            let (to, bytes) = range(&instruction.outputs[0]);
            // SAFETY: by this function's contract.
            links.requests[request] = Some(Under::Message(unsafe { pipeline.irecv(to, bytes, peer, tag) }?));
        }
        _ => {
            let Some(Under::Message(under_way)) = links.requests[request].take() else {
                unreachable!("lowering starts every message that it waits for")
            };
            pipeline.wait(under_way)?;
        }
    }
    Ok(())
}

/// Starts a collective.
///
/// # Safety
/// The operands lie in the arena at `base`, and nobody else touches them until it is finished.
unsafe fn begin(
    collective: Collective,
    request: usize,
    instruction: &Instruction,
    (base, places): (Base, Places<'_>),
    links: &mut Links,
) -> communicator::Result<()> {
    // SAFETY: by this function's contract.
    let range = |address: Option<&Address>| address.map(|address| unsafe { range(base, address, places) });
    let inputs = [range(instruction.inputs.first()), range(instruction.inputs.get(1))];
    let output = range(instruction.outputs.first()).expect("a collective has an output");
    // Links that have failed have none.
    let lens = links.lens.get_mut(request).ok_or(NO_COMMUNICATOR)?;
    match collective {
        Collective::AllToAll { ranks } => lens.iter_mut().for_each(|lens| lens.fill(output.1 / ranks)),
        Collective::AllToAllRows { ranks, rows, .. } => {
            let bytes = instruction.outputs[0].span / rows * size_of::<f32>();
            let mut received = 0;
            for (lens, starts) in lens.iter_mut().zip(&instruction.inputs[1..]) {
                // SAFETY: by this function's contract; starts are u32 without gaps, and nobody writes them now.
                let starts = unsafe {
                    std::slice::from_raw_parts(
                        base.0.add(starts.offset as usize).cast::<u32>().cast_const(),
                        starts.span,
                    )
                };
                let runs = (starts.len() - 1) / ranks;
                for (rank, len) in lens.iter_mut().enumerate() {
                    *len = (starts[(rank + 1) * runs] - starts[rank * runs]) as usize * bytes;
                }
                received = lens.iter().sum();
            }
            assert!(received <= output.1, "more rows come than there can be");
            // SAFETY: what comes ends within the output, and behind it nobody writes.
            unsafe { std::slice::from_raw_parts_mut(output.0.add(received), output.1 - received) }.fill(0);
        }
        _ => {}
    }
    let request_of = collective.request(inputs, output, [&lens[0], &lens[1]]);
    let group = collective.group();
    // SAFETY: by this function's contract; the plan keeps inputs and outputs apart, or makes them one. The sizes stay as
    // they are until this request is finished.
    let started = unsafe { links.communicators.of(group)?.start(request_of) }?;
    links.requests[request] = Some(Under::Collective(started, group));
    Ok(())
}

fn finish(request: usize, links: &mut Links) -> communicator::Result<()> {
    let Some(Under::Collective(under_way, group)) = links.requests[request].take() else {
        unreachable!("lowering starts every collective that it finishes")
    };
    links.communicators.of(group)?.wait(under_way)
}

const NO_COMMUNICATOR: CommunicatorError = CommunicatorError::Unsupported {
    what: "a program for several ranks without a communicator, or after one of them has failed",
    remedy: "make the trainer anew, with the communicator of all its ranks",
};

/// An operand's first byte, and its number of bytes.
///
/// # Safety
/// It lies in the arena at `base`.
unsafe fn range(base: Base, address: &Address, places: Places<'_>) -> (*mut u8, usize) {
    let (offset, span) = places.of(address);
    // SAFETY: by this function's contract.
    (unsafe { base.0.add(offset as usize) }, span * address.dtype.size_in_bytes())
}

/// The last element of a tensor of u32 without gaps.
///
/// # Safety
/// It lies in the arena at `base`, and nobody writes it.
unsafe fn last_u32(base: Base, address: &Address) -> u32 {
    // SAFETY: by this function's contract; a tensor has at least one element.
    unsafe { base.0.add(address.offset as usize).cast::<u32>().add(address.span - 1).read() }
}

fn are_finite(operands: &[Address], base: Base, places: Places<'_>) -> bool {
    operands.iter().filter(|operand| operand.dtype == f32::DTYPE).all(|operand| {
        let (offset, span) = places.of(operand);
        // SAFETY: as for the instruction itself, which is over.
        let data = unsafe { std::slice::from_raw_parts(base.0.add(offset as usize).cast::<f32>().cast_const(), span) };
        data.iter().all(|x| x.is_finite())
    })
}

/// Poisons bytes that nobody holds, by the checked plan or because the arena has them back.
fn fill_with_nan(range: Range<u64>, base: Base, bytes: u64) {
    debug_assert!(range.end <= bytes);
    let elements = ((range.end - range.start) / 4) as usize;
    // SAFETY: nobody holds these bytes, which lie in the arena.
    unsafe { std::slice::from_raw_parts_mut(base.0.add(range.start as usize).cast::<f32>(), elements) }.fill(f32::NAN);
}

/// Why a program did not run to its end.
#[derive(Debug)]
enum Failure {
    Communicator(CommunicatorError),
    Overflow(Box<Overflow>),
    File(io::Error),
}

impl Instruction {
    fn describe(&self) -> String {
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        format!("{} in {layer}, micro-batch {}", self.work.name(), self.micro_batch)
    }
}

fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Error {
    let common = |other: &&str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = names.max_by_key(common).unwrap_or("there are none").to_owned();
    Error::UnknownTensor { name: name.into(), nearest }
}
