//! A planned executable together with the arena it runs in, on any backend.
//!
//! In: an [`Executable`], and the [`Backend`] whose memory it was planned for. Out: inputs written, programs run,
//! outputs and persistent tensors read. Never: computation of its own, or an address that was not planned.

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

use candle_core::{DType, Tensor};
use gapless_alloc::Label;
use gapless_alloc::arena::ArenaReport;
use gapless_compile::internal::{Activity, Persistent};
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::cpu::args::Address;
use gapless_kernels::{Element, Spec};
use half::bf16;

use crate::error::{Error, Result};
use crate::transfers::{Communicators, Transfers};

/// The options of one run of a program.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// The seed of the whole run.
    pub seed: u64,
    /// The training step, from which the run's random numbers are derived.
    pub step: u64,
    /// Fill every dead range with NaN between instructions. Results must not change. A debugging aid.
    pub poison: bool,
    /// Check every output, and report the first instruction with an output that is not finite.
    pub watch: bool,
    /// Index of this rank's micro-batch 0 among the micro-batches of the whole batch.
    pub first_micro_batch: u64,
    /// Difference between the indices, among the micro-batches of the whole batch, of two consecutive micro-batches
    /// of this rank; 0 if the rank has only one micro-batch.
    pub micro_batch_stride: u64,
}

/// The time of a run, by activity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// The forward pass.
    pub forward: Duration,
    /// The backward pass, including recomputation.
    pub backward: Duration,
    /// The work that is done once per step: norm, clipping, optimizer.
    pub update: Duration,
    /// Messages and collectives: starting them, and waiting for them.
    pub communication: Duration,
}

impl RunOptions {
    /// Returns the index, in the whole batch, of this rank's micro-batch `micro_batch`.
    pub(crate) fn index_in_batch(&self, micro_batch: u32) -> u64 {
        // Overflow is harmless, because the index is only used to derive random numbers.
        self.first_micro_batch.wrapping_add(self.micro_batch_stride.wrapping_mul(micro_batch.into()))
    }
}

impl Times {
    pub(crate) fn add(&mut self, activity: Activity, time: Duration) {
        *match activity {
            Activity::Forward => &mut self.forward,
            Activity::Backward => &mut self.backward,
            Activity::Update => &mut self.update,
            Activity::Communication => &mut self.communication,
        } += time;
    }
}

/// A tensor that outlives the step, as passed to the closure of [`Session::with_persistent`].
#[derive(Debug)]
pub struct PersistentBytes<'a> {
    /// Its names and role.
    pub label: &'a Label,
    /// Shape and type.
    pub spec: &'a Spec,
    /// True if this rank's instructions update the tensor; false if this rank receives the updated tensor from another
    /// rank.
    pub changes_here: bool,
    /// Its elements.
    pub bytes: &'a [u8],
}

/// An arena on a device, and the means to run programs in it. All addresses passed to a backend must come from the
/// [`Executable`] for which it was created.
#[doc(hidden)]
pub trait Backend: Any + Debug + Send {
    /// Runs a program. With [`RunOptions::watch`], returns the name of the first instruction whose output is not
    /// finite, or `None` if all outputs are finite.
    fn run(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Option<String>>;

    /// Connects the backend to the other ranks.
    fn connect(&mut self, executable: &Executable, transfers: Transfers) -> Result<()>;

    /// Calls `show` once, with one byte slice per address, in the same order.
    fn read(&self, addresses: &[&Address], show: &mut dyn FnMut(&[&[u8]])) -> Result<()>;

    /// Calls `change` with the current bytes at an address, which it may overwrite in part or completely.
    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Calls `make` with the bytes at an address, all of which it must overwrite. It must not read them.
    fn fill(&mut self, address: &Address, make: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        self.modify(address, make)
    }

    /// Overwrites all bytes at an address.
    fn write(&mut self, address: &Address, bytes: &[u8]) -> Result<()> {
        self.modify(address, &mut |to| to.copy_from_slice(bytes))
    }

    /// Returns the tensor at an address: a view of the arena's bytes where candle supports this, and a copy
    /// elsewhere.
    fn tensor(&self, address: &Address) -> Result<Tensor>;

    /// Returns the number of CPU worker threads that run kernels.
    fn threads(&self) -> usize {
        1
    }

    /// Returns the time that the last run spent on each activity, or `None` if the backend does not measure it.
    fn times(&self) -> Option<Times> {
        None
    }

    /// Returns the report on the arena's dynamic buffers, or `None` if no size depends on data.
    fn routing(&self) -> Option<ArenaReport>;

    /// Checks the places assigned to dynamic buffers during the last run, and returns the number of these buffers.
    fn check_run(&self, executable: &Executable) -> Result<usize>;

    /// Allows dynamic buffers that find no room in the arena to be placed outside of it, as long as they and the arena
    /// together take at most `limit` bytes.
    fn allow_overflow_heap(&mut self, limit: u64);

    /// Enlarges the arena, to at most `limit` bytes, if the last run needed more room than the arena had.
    fn grow(&mut self, executable: &mut Executable, limit: u64) -> Result<()>;
}

/// An executable with its arena reserved on a backend of type `B`. `Box<Session>` stands for a session on any
/// backend. [`Session::on_cpu`] and `Session::on_cuda` create sessions.
#[derive(Debug)]
pub struct Session<B: Backend + ?Sized = dyn Backend> {
    pub(crate) executable: Executable,
    pub(crate) backend: B,
}

impl<B: Backend> Session<B> {
    /// Fills the persistent tensors of a newly reserved arena with their initial values.
    pub(crate) fn with_initial_values(executable: Executable, mut backend: B, seed: u64) -> Result<Self> {
        for persistent in executable.persistent() {
            let mut outcome = Ok(());
            backend.fill(&persistent.address, &mut |bytes| outcome = write_initial_value(persistent, seed, bytes))?;
            outcome?;
        }
        Ok(Self { executable, backend })
    }
}

impl<B: Backend + ?Sized> Session<B> {
    /// The executable.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Returns the number of CPU worker threads that run kernels. On a GPU this is 1, for the thread that waits for
    /// the device.
    pub fn threads(&self) -> usize {
        self.backend.threads()
    }

    /// Returns the time that the last run spent on each activity, or `None` on a GPU, which runs a whole step as one
    /// graph.
    pub fn times(&self) -> Option<Times> {
        self.backend.times()
    }

    /// Connects the session to the other ranks. This must be done before programs that were lowered for several ranks
    /// can run. It is a collective operation: all ranks must call it.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`] if another rank fails, or if the messages that the ranks plan do not match.
    /// Returns `Error::NoHostMemory` if data between GPUs passes through the host and the host has no room for it.
    pub fn connect(&mut self, communicators: Communicators) -> Result<()> {
        let transfers = Transfers::new(communicators, &self.executable)
            .map_err(|source| Error::Communicator { instruction: "agreeing on an order of messages".into(), source })?;
        self.backend.connect(&self.executable, transfers)
    }

    /// Runs a program. With [`RunOptions::watch`], returns the name of the first instruction whose output is not
    /// finite, or `None` if all outputs are finite.
    ///
    /// # Errors
    /// - [`Error::Communicator`] if another rank fails
    /// - [`Error::Routing`] or [`Error::Growth`] if a dynamic buffer finds no room
    /// - [`Error::NonFinite`] if a dynamic buffer finds no room and values that are not finite were routed before
    /// - [`Error::Offload`] if the offload file cannot be written or read
    /// - `Error::Device` if the GPU or its driver fails
    pub fn run(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        self.backend.run(&self.executable, id, options)
    }

    /// True if the program has an input of this name on this rank.
    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.executable.has_input(id, name)
    }

    /// True if the program has an output of this name on this rank.
    pub fn has_output(&self, id: ProgramId, name: &str) -> bool {
        self.executable.programs()[id.0].outputs.iter().any(|output| output.name == name)
    }

    /// Writes an input of a program, for one micro-batch.
    ///
    /// # Errors
    /// Returns an error if the program has no input of this name, if the input's element count or type differs from
    /// that of `data`, or if the device fails (`Error::Device`).
    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        let address = self.executable.programs()[id.0].input_for::<T>(name, micro_batch, data.len())?;
        self.backend.write(address, T::bytes(data))
    }

    /// Like [`Self::write_input`], for data in pieces that follow one another.
    ///
    /// # Errors
    /// Returns the errors of [`Self::write_input`].
    pub fn write_input_pieces<'d, T: Element + 'd>(
        &mut self,
        id: ProgramId,
        name: &str,
        micro_batch: u32,
        pieces: impl Iterator<Item = &'d [T]> + Clone,
    ) -> Result<()> {
        let elements = pieces.clone().map(<[T]>::len).sum();
        let address = self.executable.programs()[id.0].input_for::<T>(name, micro_batch, elements)?;
        self.backend.fill(address, &mut |mut to| {
            for piece in pieces.clone().map(T::bytes) {
                let (here, behind) = to.split_at_mut(piece.len());
                here.copy_from_slice(piece);
                to = behind;
            }
        })
    }

    /// Returns an output of a program that has run. On the CPU, an f32 output is returned as a candle tensor over the
    /// arena's own bytes, valid until the next run. In all other cases the tensor is a copy.
    ///
    /// # Errors
    /// Returns an error if the program has no output of this name, or if the device fails (`Error::Device`).
    pub fn output(&self, id: ProgramId, name: &str) -> Result<Tensor> {
        self.backend.tensor(&self.executable.programs()[id.0].output(name)?.address)
    }

    /// Calls `f` with the elements of an output of a program that has run. The output must have type `T` and be
    /// contiguous. On the CPU, this neither copies nor allocates.
    ///
    /// # Errors
    /// Returns an error if the program has no output of this name, if the output has another type, or if the device
    /// fails (`Error::Device`).
    pub fn with_output<T: Element, R>(&self, id: ProgramId, name: &str, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let address = &self.executable.programs()[id.0].output(name)?.address;
        let (mut f, mut result) = (Some(f), None);
        self.backend.read(&[address], &mut |bytes| {
            let elements = (address.dtype == T::DTYPE).then(|| T::elements(bytes[0])).flatten();
            result = elements.and_then(|elements| f.take().map(|f| f(elements)));
        })?;
        result.ok_or_else(|| Error::NotFloat { name: name.into(), dtype: address.dtype })
    }

    /// Returns a scalar output of a program that has run. On the CPU, this does not allocate.
    ///
    /// # Errors
    /// Returns an error if the program has no output of this name, if the output is neither f32 nor bf16, or if the
    /// device fails (`Error::Device`).
    pub fn scalar(&self, id: ProgramId, name: &str) -> Result<f32> {
        let address = &self.executable.programs()[id.0].output(name)?.address;
        let mut scalar = None;
        self.backend.read(&[address], &mut |bytes| {
            scalar = match (address.dtype, bytes[0]) {
                (DType::F32, &[a, b, c, d, ..]) => Some(f32::from_ne_bytes([a, b, c, d])),
                (DType::BF16, &[a, b, ..]) => Some(bf16::from_ne_bytes([a, b]).to_f32()),
                _ => None,
            }
        })?;
        scalar.ok_or_else(|| Error::NotFloat { name: name.into(), dtype: address.dtype })
    }

    /// Returns a parameter or an optimizer state by its full name. On the CPU, an f32 tensor is returned as a candle
    /// tensor over the arena's own bytes. In all other cases the tensor is a copy.
    ///
    /// # Errors
    /// Returns an error if there is no persistent tensor of that name, or if the device fails (`Error::Device`).
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.backend.tensor(&self.executable.find_persistent(name)?.address)
    }

    /// Calls `f` once with the bytes of all persistent tensors. On the CPU, the bytes are not copied.
    ///
    /// # Errors
    /// Returns `Error::Device` if the device fails.
    pub fn with_persistent<R>(&self, f: impl FnOnce(&[PersistentBytes<'_>]) -> R) -> Result<R> {
        let all = self.executable.persistent();
        let addresses: Vec<&Address> = all.iter().map(|p| &p.address).collect();
        let (mut f, mut result) = (Some(f), None);
        self.backend.read(&addresses, &mut |bytes| {
            let shown = all.iter().zip(bytes).map(|(persistent, &bytes)| {
                let &Persistent { ref label, ref spec, changes_here, .. } = persistent;
                PersistentBytes { label, spec, changes_here, bytes }
            });
            result = f.take().map(|f| f(&shown.collect::<Vec<_>>()));
        })?;
        result.ok_or_else(not_called)
    }

    /// Calls `fill` with the bytes of a persistent tensor, which `fill` may overwrite. Returns the result of `fill`.
    ///
    /// # Errors
    /// Returns an error if there is no persistent tensor of that name, or if the device fails (`Error::Device`).
    pub fn fill_tensor<R>(&mut self, name: &str, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let address = &self.executable.find_persistent(name)?.address;
        let (mut fill, mut result) = (Some(fill), None);
        self.backend.modify(address, &mut |bytes| result = fill.take().map(|fill| fill(bytes)))?;
        result.ok_or_else(not_called)
    }

    /// Overwrites a persistent tensor of type f32 or bf16. For bf16, `data` is rounded.
    ///
    /// # Errors
    /// Returns an error if there is no persistent tensor of that name, if its element count differs from that of
    /// `data`, if its type is neither f32 nor bf16, or if the device fails (`Error::Device`).
    pub fn write_tensor(&mut self, name: &str, data: &[f32]) -> Result<()> {
        let address = &self.executable.find_persistent(name)?.address;
        if address.span != data.len() {
            return Err(Error::ElementCount { name: name.into(), expected: address.span, given: data.len() });
        }
        match address.dtype {
            DType::F32 => self.backend.write(address, f32::bytes(data)),
            DType::BF16 => {
                let rounded: Vec<u8> = data.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect();
                self.backend.write(address, &rounded)
            }
            dtype => Err(Error::NotFloat { name: name.into(), dtype }),
        }
    }

    /// Returns the report on the arena's dynamic buffers over all runs so far, or `None` if no size depends on data.
    pub fn routing(&self) -> Option<ArenaReport> {
        self.backend.routing()
    }

    /// Checks that buffers of the last run that were alive at the same time do not overlap, both planned buffers and
    /// those placed at run time. Returns the number of buffers placed at run time.
    ///
    /// # Errors
    /// Returns [`Error::BadRun`] if two buffers that were alive at the same time share a byte.
    pub fn check_run(&self) -> Result<usize> {
        self.backend.check_run(&self.executable)
    }

    /// Allows dynamic buffers that find no room in the arena to be placed outside of it, as long as the arena and
    /// these buffers take at most `limit` bytes together. [`grow`](Self::grow) then enlarges the arena, so that later
    /// steps find room inside.
    pub fn allow_overflow_heap(&mut self, limit: u64) {
        self.backend.allow_overflow_heap(limit);
    }

    /// Enlarges the arena if the last run had to place buffers outside of it. The new arena has room for 1.25 times the
    /// load of that run or, if `limit` bytes do not suffice for this, for exactly its load. If `limit` does not suffice
    /// for that load either, nothing changes. The arena's contents and offsets are kept. Candle tensors that were
    /// returned earlier keep the old contents and no longer share the arena's bytes.
    ///
    /// # Errors
    /// Returns an error if the larger arena cannot be reserved.
    pub fn grow(&mut self, limit: u64) -> Result<()> {
        self.backend.grow(&mut self.executable, limit)
    }
}

/// Writes the value that a persistent tensor has before the first step.
fn write_initial_value(Persistent { fill, address, label, .. }: &Persistent, seed: u64, out: &mut [u8]) -> Result<()> {
    match address.dtype {
        DType::F32 => fill.fill(seed, out.as_chunks_mut::<4>().0, |x| (x as f32).to_ne_bytes()),
        DType::BF16 => fill.fill(seed, out.as_chunks_mut::<2>().0, |x| bf16::from_f32(x as f32).to_ne_bytes()),
        DType::U32 => fill.fill(seed, out.as_chunks_mut::<4>().0, |x| (x as u32).to_ne_bytes()),
        DType::U8 => fill.fill(seed, out, |x| x as u8),
        dtype => return Err(Error::NotFloat { name: label.tensor.clone(), dtype }),
    }
    Ok(())
}

fn not_called() -> Error {
    Error::BadRun { what: "the backend did not show what it was asked for".into() }
}
