//! A planned executable and the arena that it runs in, on whatever backend there is.
//!
//! In: an [`Executable`], and the [`Backend`] whose memory it was planned for. Out: inputs written, programs run, outputs and
//! persistent tensors read. Never: a computation of its own, or an address that was not planned.

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

/// How a program is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// The run's seed.
    pub seed: u64,
    /// The step, which keys the random numbers.
    pub step: u64,
    /// Fill every dead range with NaN between instructions: results must not change. A debugging aid of the CPU.
    pub poison: bool,
    /// Say which is the first instruction whose output is not finite.
    pub watch: bool,
    /// The part of the whole batch that this rank's micro-batch 0 is.
    pub first_part: u64,
    /// How many parts on its next one is; 0 where there is only one.
    pub part_stride: u64,
}

/// Where the time of a run went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// The forward pass.
    pub forward: Duration,
    /// The backward pass, with what it computes again.
    pub backward: Duration,
    /// What is done once per step: norm, clipping, optimizer.
    pub update: Duration,
    /// Messages and collectives: beginning them, and waiting.
    pub communication: Duration,
}

impl RunOptions {
    /// The part of the whole batch that a micro-batch is.
    pub(crate) fn part_of(&self, micro_batch: u32) -> u64 {
        // A key of random numbers: any number is one.
        self.first_part.wrapping_add(self.part_stride.wrapping_mul(micro_batch.into()))
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

/// A tensor that outlives the step, as [`Session::with_persistent`] shows it.
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

/// An arena on a device, and how programs run in it. All addresses are those of the [`Executable`] that it was made for.
#[doc(hidden)]
pub trait Backend: Any + Debug + Send {
    /// Runs a program. Returns the first instruction with a non-finite output, if asked to watch for it.
    fn run(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Option<String>>;

    /// Connects it to the other ranks.
    fn connect(&mut self, executable: &Executable, transfers: Transfers) -> Result<()>;

    /// Shows the bytes at several addresses at once.
    fn read(&self, addresses: &[&Address], show: &mut dyn FnMut(&[&[u8]])) -> Result<()>;

    /// Lets `change` overwrite some of the bytes at an address.
    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Overwrites all bytes at an address.
    fn write(&mut self, address: &Address, bytes: &[u8]) -> Result<()> {
        self.modify(address, &mut |to| to.copy_from_slice(bytes))
    }

    /// What is at an address: a tensor over the arena's own bytes where candle can have one, else a copy.
    fn tensor(&self, address: &Address) -> Result<Tensor>;

    /// Worker threads of the CPU that compute.
    fn threads(&self) -> usize {
        1
    }

    /// Where the time of the last run went; nothing where that is not known.
    fn times(&self) -> Option<Times> {
        None
    }

    /// What the arena of routed rows has done; nothing where no size depends on data.
    fn routing(&self) -> Option<ArenaReport>;

    /// Judges the addresses that were given during the last run, and returns how many there were.
    fn check_run(&self, executable: &Executable) -> Result<usize>;

    /// Lets rows that find no room in the arena have room outside of it, as long as both take no more than `limit` bytes.
    fn serve_outside(&mut self, limit: u64);

    /// Enlarges the arena if the last run needed more than it had, to `limit` bytes at most.
    fn grow(&mut self, executable: &mut Executable, limit: u64) -> Result<()>;
}

/// An executable whose arena is reserved on a backend. `Box<Session>` is one on any backend; [`Session::on_cpu`] and
/// `Session::on_cuda` make them.
#[derive(Debug)]
pub struct Session<B: Backend + ?Sized = dyn Backend> {
    pub(crate) executable: Executable,
    pub(crate) backend: B,
}

impl<B: Backend> Session<B> {
    /// Fills the persistent tensors of an arena that has just been reserved.
    pub(crate) fn with_initial_values(executable: Executable, mut backend: B, seed: u64) -> Result<Self> {
        for persistent in executable.persistent() {
            let mut outcome = Ok(());
            backend.modify(&persistent.address, &mut |bytes| outcome = write_initial_value(persistent, seed, bytes))?;
            outcome?;
        }
        Ok(Self { executable, backend })
    }
}

impl<B: Backend + ?Sized> Session<B> {
    /// What it runs.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Worker threads of the CPU that compute; one, which waits, for a GPU.
    pub fn threads(&self) -> usize {
        self.backend.threads()
    }

    /// Where the time of the last run went; nothing on a GPU, which runs a step as one graph.
    pub fn times(&self) -> Option<Times> {
        self.backend.times()
    }

    /// Connects it to the other ranks. Programs that were lowered for several ranks do not run before. All ranks call it.
    ///
    /// # Errors
    /// [`Error::Communicator`] when another rank fails, or has messages that this one does not expect; `Error::NoHostMemory`
    /// when the host has no room for what passes through it between GPUs.
    pub fn connect(&mut self, communicators: Communicators) -> Result<()> {
        let transfers = Transfers::new(communicators, &self.executable)
            .map_err(|source| Error::Communicator { instruction: "agreeing on an order of messages".into(), source })?;
        self.backend.connect(&self.executable, transfers)
    }

    /// Runs a program. Returns the first instruction with a non-finite output, if asked to watch for it.
    ///
    /// # Errors
    /// [`Error::Communicator`] when another rank fails; [`Error::Routing`] or [`Error::Growth`] when rows find no room,
    /// [`Error::NonFinite`] when that comes of numbers that are not finite; [`Error::Offload`] when a file cannot be written or
    /// read; `Error::Device`.
    pub fn run(&mut self, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        self.backend.run(&self.executable, id, options)
    }

    /// Whether a program has such an input on this rank.
    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.executable.has_input(id, name)
    }

    /// Whether a program has such an output on this rank.
    pub fn has_output(&self, id: ProgramId, name: &str) -> bool {
        self.executable.programs()[id.0].outputs.iter().any(|output| output.name == name)
    }

    /// Writes an input of a program.
    ///
    /// # Errors
    /// When there is no such input, or it holds another number of elements or another type; `Error::Device`.
    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        let address = self.executable.programs()[id.0].input_for(name, micro_batch, data)?;
        self.backend.write(address, T::bytes(data))
    }

    /// An output of a program that has run. On the CPU, in f32, a candle tensor over the arena's own bytes, valid until the next
    /// run; else a copy.
    ///
    /// # Errors
    /// When there is no such output; `Error::Device`.
    pub fn output(&self, id: ProgramId, name: &str) -> Result<Tensor> {
        self.backend.tensor(&self.executable.programs()[id.0].output(name)?.address)
    }

    /// Shows an output of a program that has run, as [`Element`]s of its type without gaps. On the CPU, this neither copies nor
    /// allocates.
    ///
    /// # Errors
    /// When there is no such output, or it is of another type; `Error::Device`.
    pub fn with_output<T: Element, R>(&self, id: ProgramId, name: &str, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let address = &self.executable.programs()[id.0].output(name)?.address;
        let (mut f, mut result) = (Some(f), None);
        self.backend.read(&[address], &mut |bytes| {
            let elements = (address.dtype == T::DTYPE).then(|| T::elements(bytes[0])).flatten();
            result = elements.and_then(|elements| f.take().map(|f| f(elements)));
        })?;
        result.ok_or_else(|| Error::NotFloat { name: name.into(), dtype: address.dtype })
    }

    /// A scalar output of a program that has run. On the CPU, this allocates nothing.
    ///
    /// # Errors
    /// When there is no such output, or it is no float; `Error::Device`.
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

    /// A parameter or an optimizer state by its full name. On the CPU, in f32, a candle tensor over the arena's own bytes; else a
    /// copy.
    ///
    /// # Errors
    /// When there is none of that name; `Error::Device`.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.backend.tensor(&self.executable.find_persistent(name)?.address)
    }

    /// Shows all persistent tensors as bytes: on the CPU without a copy.
    ///
    /// # Errors
    /// `Error::Device`.
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

    /// Lets `fill` write the bytes of a persistent tensor.
    ///
    /// # Errors
    /// When there is none of that name; `Error::Device`.
    pub fn fill_tensor<R>(&mut self, name: &str, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let address = &self.executable.find_persistent(name)?.address;
        let (mut fill, mut result) = (Some(fill), None);
        self.backend.modify(address, &mut |bytes| result = fill.take().map(|fill| fill(bytes)))?;
        result.ok_or_else(not_called)
    }

    /// Overwrites a persistent tensor of floats, rounded to its type.
    ///
    /// # Errors
    /// When there is none of that name, size or type; `Error::Device`.
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

    /// What the arena of routed rows has done so far; nothing where no size depends on data.
    pub fn routing(&self) -> Option<ArenaReport> {
        self.backend.routing()
    }

    /// Judges the addresses that the last run used, those of the plan and those that were given while it ran, and returns how
    /// many of the latter there were.
    ///
    /// # Errors
    /// [`Error::BadRun`] when two that lived at the same time have a byte in common.
    pub fn check_run(&self) -> Result<usize> {
        self.backend.check_run(&self.executable)
    }

    /// Lets counted buffers that find no room in the arena have room outside of it, as long as both take no more than `limit`
    /// bytes: what [`grow`](Self::grow) then ends.
    pub fn serve_outside(&mut self, limit: u64) {
        self.backend.serve_outside(limit);
    }

    /// If the last run had to use room outside of the arena: makes the arena as large as would have served it, and a quarter
    /// more if that fits into `limit` bytes too. If neither does, it stays as it is. Everything in it is what it was, at the
    /// same offsets; candle tensors over its bytes that were given out before are copies from now on.
    ///
    /// # Errors
    /// When the larger arena cannot be reserved.
    pub fn grow(&mut self, limit: u64) -> Result<()> {
        self.backend.grow(&mut self.executable, limit)
    }
}

/// Writes what a tensor is before the first step.
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
