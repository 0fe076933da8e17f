//! What goes to other ranks and comes from them, by way of the host.
//!
//! In: the instructions of programs that send, receive, sum and gather. Out: their operands in host memory, each from the start of a
//! message to its wait at a planned place, and requests to the communicators. Never: host memory that was not planned before the
//! first step, or the device's memory lent to a communicator.
//!
//! Sums are in f32, as everywhere ([`Collective`](gapless_communicator::Collective)): bf16 is widened on its way to the host, and
//! rounded once on its way back.

use candle_core::DType;
use gapless_alloc::{Buffer, Options, Problem};
use gapless_compile::internal::{CompiledProgram, Instruction, planned};
use gapless_compile::{Executable, InstrKind};
use gapless_graph::ops::Collective;
use gapless_kernels::cpu::args::Address;

use super::device::{Device, DeviceError};
use super::slots::Located;
use crate::error::{Error, Result};
use crate::transfers::{Bytes, Operands, RunGuard, Transfers};

/// Alignment of all that is staged.
const ALIGNMENT: u64 = 64;

/// What planning it may cost: host memory is plenty, so that a plan need not be the best.
const PLANNING: u64 = 1 << 20;

/// The ways to the other ranks, and the memory that is lent to them.
#[derive(Debug)]
pub(super) struct Staging {
    /// First to be dropped: what is under way reads and writes the memory.
    transfers: Transfers,
    memory: Vec<u64>,
    /// By program and request.
    staged: Vec<Vec<Staged>>,
}

/// What a run exchanges.
pub(super) struct Exchanging<'s> {
    guard: RunGuard<'s>,
    memory: &'s mut [u64],
    staged: &'s [Vec<Staged>],
}

/// What of a request lies in host memory.
#[derive(Debug, Default)]
struct Staged {
    /// What it reads, as the collective counts its inputs.
    inputs: [Option<Copied>; 2],
    /// What it writes.
    output: Option<Copied>,
    /// Whether it reads that as well.
    reads_output: bool,
    /// Where the rows of each rank start that are sent, and that come.
    starts: [Option<Copied>; 2],
    /// Bytes of a row.
    row_bytes: usize,
}

/// A tensor of the arena that has a place in host memory too.
#[derive(Debug)]
struct Copied {
    address: Address,
    /// Whether the host has it in f32.
    is_wide: bool,
    /// Byte offset in host memory.
    at: u64,
}

impl Copied {
    /// If the host can have it.
    fn new(address: &Address, is_sum: bool) -> Option<Self> {
        let is_known = !is_sum || [DType::F32, DType::BF16].contains(&address.dtype);
        let is_wide = is_sum && address.dtype == DType::BF16;
        is_known.then(|| Self { address: address.clone(), is_wide, at: 0 })
    }

    /// Bytes on the device.
    fn stored(&self) -> usize {
        self.address.span * self.address.dtype.size_in_bytes()
    }

    /// Bytes on the host, at most.
    fn bytes(&self) -> usize {
        if self.is_wide { 4 * self.address.span } else { self.stored() }
    }

    /// Bytes on the host, of as many rows as there are now.
    fn bytes_now(&self, located: Located<'_>) -> usize {
        let most = self.bytes();
        if self.address.counted.is_some() { located.of(&self.address).1.min(most) } else { most }
    }
}

impl Staged {
    /// What an instruction that starts something needs; none if it can't be had.
    fn of(instruction: &Instruction) -> Option<Self> {
        let Instruction { inputs, outputs, .. } = instruction;
        let plain = |address: &Address| Copied::new(address, false);
        Some(match instruction.kind {
            InstrKind::Send(_) => Self { inputs: [Some(plain(&inputs[0])?), None], ..Self::default() },
            InstrKind::Receive(_) => Self { output: Some(plain(&outputs[0])?), ..Self::default() },
            InstrKind::Collective(collective, _) => match collective {
                Collective::AllReduce { .. } => {
                    Self { output: Some(Copied::new(&outputs[0], true)?), reads_output: true, ..Self::default() }
                }
                Collective::ReduceScatter { .. } => Self {
                    inputs: [Some(Copied::new(&inputs[0], true)?), None],
                    output: Some(Copied::new(&outputs[0], true)?),
                    ..Self::default()
                },
                Collective::Refill { .. } => Self {
                    inputs: [None, Some(plain(&inputs[1])?)],
                    output: Some(plain(&outputs[0])?),
                    ..Self::default()
                },
                Collective::AllGather { .. } | Collective::AllToAll { .. } => Self {
                    inputs: [Some(plain(&inputs[0])?), None],
                    output: Some(plain(&outputs[0])?),
                    ..Self::default()
                },
                Collective::AllToAllRows { rows, .. } => {
                    let output = plain(&outputs[0])?;
                    Self {
                        row_bytes: output.stored() / rows,
                        inputs: [Some(plain(&inputs[0])?), None],
                        output: Some(output),
                        starts: [Some(plain(&inputs[1])?), Some(plain(&inputs[2])?)],
                        ..Self::default()
                    }
                }
            },
            _ => return None,
        })
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Copied> {
        self.inputs.iter_mut().chain([&mut self.output]).chain(&mut self.starts).flatten()
    }
}

/// The request that an instruction starts, and the one that it ends.
fn requests(work: &InstrKind) -> [Option<usize>; 2] {
    match *work {
        InstrKind::Send(message) | InstrKind::Receive(message) => [Some(message.request), None],
        InstrKind::Collective(_, request) => [Some(request), None],
        InstrKind::Wait(message) => [None, Some(message.request)],
        InstrKind::Finish(request) => [None, Some(request)],
        _ => [None, None],
    }
}

impl Staging {
    /// Plans the host memory of an executable's programs, of which one runs at a time.
    ///
    /// # Errors
    /// What `refused` makes of an instruction whose operands the host cannot have.
    pub fn new(executable: &Executable, refused: impl Fn(&Instruction) -> Error) -> Result<Self> {
        let mut all: Vec<Vec<Staged>> = Vec::new();
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut tick = 0;
        for program in &executable.programs {
            let mut staged: Vec<Staged> = (0..program.requests).map(|_| Staged::default()).collect();
            let ends = ends(program);
            for (index, instruction) in program.instructions.iter().enumerate() {
                let [Some(request), _] = requests(&instruction.kind) else { continue };
                let mut of = Staged::of(instruction).ok_or_else(|| refused(instruction))?;
                for copied in of.all() {
                    // For now the number of its buffer.
                    copied.at = buffers.len() as u64;
                    let lifetime = tick + index as u64..tick + ends[request] as u64 + 1;
                    buffers.push(Buffer::new(lifetime, copied.bytes() as u64).aligned(ALIGNMENT));
                }
                staged[request] = of;
            }
            tick += program.instructions.len() as u64;
            all.push(staged);
        }
        let problem = Problem::new(buffers)?;
        let solution = planned(&problem, &Options { work: PLANNING, ..Options::default() })?;
        for copied in all.iter_mut().flatten().flat_map(Staged::all) {
            copied.at = solution.offsets[copied.at as usize];
        }
        let needed = solution.height;
        if let Some((available, limit)) = crate::process_memory::available_memory().filter(|(bytes, _)| *bytes < needed)
        {
            let largest = "tensors on their way to other ranks, by way of the host".into();
            return Err(Error::DoesNotFit { needed, available, limit, largest });
        }
        if needed > 0 {
            tracing::info!(bytes = needed, "host memory for what goes between ranks");
        }
        let memory = vec![0; needed.div_ceil(8) as usize];
        Ok(Self { transfers: Transfers::default(), memory, staged: all })
    }

    /// Gives it the ways to the other ranks.
    pub fn connect(&mut self, transfers: Transfers) {
        self.transfers = transfers;
    }

    /// For a run.
    pub fn run(&mut self) -> Exchanging<'_> {
        let Self { transfers, memory, staged } = self;
        Exchanging { guard: transfers.guard(), memory, staged }
    }
}

impl Exchanging<'_> {
    /// Ends the run as it ended.
    pub fn end<T>(self, ended: Result<T>) -> Result<T> {
        match &ended {
            // The communicator has told the others.
            Ok(_) | Err(Error::Communicator { .. }) => {}
            Err(error) => self.guard.transfers.give_up(&error.to_string()),
        }
        self.guard.end(ended.is_ok());
        ended
    }

    /// Does what an instruction has to do with other ranks, with its operands where they are now. All that was launched before has ended.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Communicator`] when another rank fails.
    pub fn exchange(
        &mut self,
        program: usize,
        instruction: &Instruction,
        device: &mut dyn Device,
        located: Located<'_>,
    ) -> Result<()> {
        let memory = self.memory.as_mut_ptr().cast::<u8>();
        let [starts, ends] = requests(&instruction.kind);
        let Some(request) = starts.or(ends) else { unreachable!("asked for what has to do with other ranks alone") };
        let staged = &self.staged[program][request];
        // SAFETY: the plan has room for it there, and gives the room to nobody else until the request has ended.
        let place = |copied: &Copied| unsafe { memory.add(copied.at as usize) };
        let bytes = |copied: &Copied| -> Bytes { (place(copied), copied.bytes_now(located)) };
        if starts.is_some() {
            let read_as_well = staged.output.iter().filter(|_| staged.reads_output);
            for copied in staged.inputs.iter().chain(&staged.starts).flatten().chain(read_as_well) {
                // SAFETY: as above; nothing of it is lent yet.
                let host = unsafe { std::slice::from_raw_parts_mut(place(copied), copied.bytes_now(located)) };
                fetch(device, located, copied, host).map_err(|error| error.during(&instruction.describe()))?;
            }
        }
        let failed = |source| Error::Communicator { instruction: instruction.describe(), source };
        match &instruction.kind {
            InstrKind::Collective(collective, _) => {
                let starts = staged.starts.each_ref().map(|starts| match starts {
                    // SAFETY: as above; numbers of rows are u32, and aligned.
                    Some(copied) => unsafe { std::slice::from_raw_parts(place(copied).cast(), copied.address.span) },
                    None => &[],
                });
                let output = bytes(staged.output.as_ref().expect("a collective has an output"));
                let inputs = staged.inputs.each_ref().map(|input| input.as_ref().map(bytes));
                let operands = Operands { inputs, output, starts, row_bytes: staged.row_bytes };
                // SAFETY: as above; what is lent is left alone until the request is finished.
                unsafe { self.guard.transfers.begin(*collective, request, &operands) }.map_err(failed)?;
            }
            InstrKind::Finish(_) => self.guard.transfers.finish(request).map_err(failed)?,
            work => {
                let (InstrKind::Send(message) | InstrKind::Receive(message) | InstrKind::Wait(message)) = *work else {
                    unreachable!("all else is a collective")
                };
                let operand = staged.inputs[0].as_ref().or(staged.output.as_ref());
                let operand = || bytes(operand.expect("a message has an operand"));
                // SAFETY: as above; what is lent is left alone until the message's wait.
                unsafe { self.guard.transfers.transfer(work, message, operand) }.map_err(failed)?;
            }
        }
        if let (Some(_), Some(copied)) = (ends, &staged.output) {
            // SAFETY: as above; it is not lent any more.
            let host = unsafe { std::slice::from_raw_parts_mut(place(copied), copied.bytes_now(located)) };
            bring(device, located, copied, host).map_err(|error| error.during(&instruction.describe()))?;
        }
        Ok(())
    }
}

/// The instruction that ends each of a program's requests.
fn ends(program: &CompiledProgram) -> Vec<usize> {
    let mut ends = vec![program.instructions.len(); program.requests];
    for (index, instruction) in program.instructions.iter().enumerate() {
        if let [_, Some(request)] = requests(&instruction.kind) {
            ends[request] = index;
        }
    }
    ends
}

/// From the device to the host.
fn fetch(device: &dyn Device, located: Located<'_>, copied: &Copied, host: &mut [u8]) -> Result<(), DeviceError> {
    let (address, _) = located.of(&copied.address);
    if !copied.is_wide {
        return device.read(address, host);
    }
    let (stored, elements) = (copied.stored(), copied.address.span);
    device.read(address, &mut host[stored..])?;
    // Every number is read before what is written reaches it.
    for i in 0..elements {
        let half = [host[stored + 2 * i], host[stored + 2 * i + 1]];
        let wide = f32::from_bits(u32::from(u16::from_ne_bytes(half)) << 16);
        host[4 * i..4 * i + 4].copy_from_slice(&wide.to_ne_bytes());
    }
    Ok(())
}

/// From the host to the device.
fn bring(device: &mut dyn Device, located: Located<'_>, copied: &Copied, host: &mut [u8]) -> Result<(), DeviceError> {
    let (address, _) = located.of(&copied.address);
    if !copied.is_wide {
        return device.write(address, host);
    }
    for i in 0..copied.address.span {
        let wide = f32::from_ne_bytes(host[4 * i..4 * i + 4].try_into().expect("four bytes"));
        host[2 * i..2 * i + 2].copy_from_slice(&half::bf16::from_f32(wide).to_ne_bytes());
    }
    device.write(address, &host[..copied.stored()])
}
