//! The exchange of tensors with other ranks: between devices directly if the communicators support it, or else
//! through host memory.
//!
//! - In: instructions that send, receive, sum and gather.
//! - Out: requests to the communicators. If a request goes through the host, each of its operands has a copy in host
//!   memory, at a planned place, from the start of the request to the wait.
//! - Never: host memory that was not planned before the first step.

use gapless_alloc::{Buffer, Options, Problem};
use gapless_communicator::CommunicatorError;
use gapless_compile::internal::{CompiledProgram, Instruction, planned};
use gapless_compile::{Executable, InstrKind};
use gapless_graph::ops::Collective;
use gapless_kernels::cpu::args::Address;

use super::device::{Device, DeviceError};
use super::slots::Located;
use crate::error::{Error, Result};
use crate::transfers::{Bytes, NO_COMMUNICATOR, Operands, RunGuard, Transfers};

/// Alignment of all copies in host memory.
const ALIGNMENT: u64 = size_of::<u64>() as u64;

/// The work limit of the planner. The plan of host memory need not be optimal, since host memory is plentiful.
const PLANNING: u64 = 1 << 20;

/// The communicators, and the host memory that they read and write.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// Dropped first, because transfers in progress use the memory.
    transfers: Transfers,
    memory: Vec<u64>,
    /// The operands of each request, indexed by program and request.
    lent: Vec<Vec<Lent>>,
}

/// The messages of one run.
pub(super) struct Exchanging<'s> {
    guard: RunGuard<'s>,
    /// The first byte of the host memory. A raw pointer, because communicators write to parts of this memory.
    memory: *mut u8,
    /// The operands of each of the program's requests, indexed by request.
    lent: &'s [Lent],
}

/// The operands of one request.
#[derive(Debug, Default)]
struct Lent {
    /// Tensors that the request reads, in the order of the collective's inputs.
    inputs: [Option<Operand>; 2],
    /// The tensor it writes.
    output: Option<Operand>,
    /// True if the request also reads the output.
    reads_output: bool,
    /// Row offsets per rank, for the sent rows and for the received rows. The offsets are always copied to host memory,
    /// because the host reads them.
    starts: [Option<Operand>; 2],
    /// Bytes of a row.
    row_bytes: usize,
}

/// A tensor in the arena.
#[derive(Debug)]
struct Operand {
    address: Address,
    /// Byte offset of the tensor's copy in host memory; `None` if the communicator accesses the tensor itself.
    at: Option<u64>,
}

impl Operand {
    fn new(address: &Address) -> Self {
        Self { address: address.clone(), at: None }
    }

    /// Returns the tensor's size in bytes; for dynamic rows, the maximum size.
    fn bytes(&self) -> usize {
        self.address.span * self.address.dtype.size_in_bytes()
    }
}

impl Lent {
    /// Returns the operands that the communicator accesses after an instruction has started a message or a
    /// collective.
    fn of(instruction: &Instruction) -> Self {
        let Instruction { inputs, outputs, .. } = instruction;
        let input = |index: usize| inputs.get(index).map(Operand::new);
        let all = Self { inputs: [input(0), None], output: outputs.first().map(Operand::new), ..Self::default() };
        match instruction.kind {
            InstrKind::Collective(Collective::AllReduce { .. }, _) => {
                Self { inputs: [None, None], reads_output: true, ..all }
            }
            InstrKind::Collective(Collective::Refill { .. }, _) => Self { inputs: [None, input(1)], ..all },
            InstrKind::Collective(Collective::AllToAllRows { rows, .. }, _) => Self {
                row_bytes: all.output.as_ref().map_or(0, Operand::bytes) / rows,
                starts: [input(1), input(2)],
                ..all
            },
            _ => all,
        }
    }

    /// Returns the operands that need a copy in host memory.
    fn staged(&mut self, is_on_device: bool) -> impl Iterator<Item = &mut Operand> {
        let lent = self.inputs.iter_mut().chain([&mut self.output]).flatten();
        lent.filter(move |_| !is_on_device).chain(self.starts.iter_mut().flatten())
    }
}

/// Returns the request that an instruction starts, and the request that it waits for; `None` if there is no such
/// request.
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
    /// Plans host memory for an executable's programs, which run one at a time.
    ///
    /// # Errors
    /// Returns [`Error::NoHostMemory`] if the copies need more host memory than is available.
    pub fn new(executable: &Executable, transfers: Transfers) -> Result<Self> {
        let is_on_device = transfers.are_on_device();
        let mut all: Vec<Vec<Lent>> = Vec::new();
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut tick = 0;
        for program in executable.programs() {
            let mut lent: Vec<Lent> = (0..program.requests).map(|_| Lent::default()).collect();
            let ends = ends(program);
            for (index, instruction) in program.instructions.iter().enumerate() {
                let [Some(request), _] = requests(&instruction.kind) else { continue };
                let mut of = Lent::of(instruction);
                for operand in of.staged(is_on_device) {
                    // Until the offsets are planned, `at` is the index of the copy's buffer.
                    operand.at = Some(buffers.len() as u64);
                    let lifetime = tick + index as u64..tick + ends[request] as u64 + 1;
                    buffers.push(Buffer::new(lifetime, operand.bytes() as u64).aligned(ALIGNMENT));
                }
                lent[request] = of;
            }
            tick += program.instructions.len() as u64;
            all.push(lent);
        }
        let problem = Problem::new(buffers)?;
        let solution = planned(&problem, &Options { work: PLANNING, ..Options::default() })?;
        for operand in all.iter_mut().flatten().flat_map(|lent| lent.staged(is_on_device)) {
            operand.at = operand.at.map(|buffer| solution.offsets[buffer as usize]);
        }
        let needed = solution.height;
        if let Some((available, limit)) = crate::process_memory::available_memory().filter(|(bytes, _)| *bytes < needed)
        {
            return Err(Error::NoHostMemory { needed, available, limit });
        }
        if needed > 0 {
            tracing::info!(bytes = needed, "host memory reserved for messages between ranks");
        }
        let memory = vec![0; needed.div_ceil(8) as usize];
        Ok(Self { transfers, memory, lent: all })
    }

    /// Begins a run of a program.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`] if a communicator has failed in an earlier run.
    pub fn run(&mut self, program: usize) -> Result<Exchanging<'_>> {
        let Self { transfers, memory, lent } = self;
        let guard = transfers.guard();
        guard.transfers.follow(program).map_err(|source| failed("the start of a run", source))?;
        // Before `Backend::connect` there are no requests.
        let lent = lent.get(program).map_or(&[][..], Vec::as_slice);
        Ok(Exchanging { guard, memory: memory.as_mut_ptr().cast(), lent })
    }
}

fn failed(instruction: impl Into<String>, source: CommunicatorError) -> Error {
    Error::Communicator { instruction: instruction.into(), source }
}

impl Exchanging<'_> {
    /// Ends the run. If the run failed, sends the reason to the other ranks.
    pub fn end<T>(self, ended: Result<T>) -> Result<T> {
        if let Err(error) = &ended {
            self.guard.transfers.abort(&error.to_string());
        }
        self.guard.end(ended.is_ok());
        ended
    }

    /// Waits for all messages that the device waits for. The host calls this before it waits for the device. If a rank
    /// has failed, this call returns an error. Without the call, the host would wait forever for the device, which
    /// waits for that rank.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`] if another rank fails.
    pub fn settle(&mut self) -> Result<()> {
        self.guard.transfers.settle().map_err(|source| failed("messages of the step", source))
    }

    /// Runs an instruction that exchanges tensors with other ranks, after all work that was started before. The
    /// operands are at the addresses that `located` gives.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the driver fails, and [`Error::Communicator`] if another rank fails.
    pub fn exchange(&mut self, instruction: &Instruction, device: &mut dyn Device, located: Located<'_>) -> Result<()> {
        let [starts, ends] = requests(&instruction.kind);
        let Some(request) = starts.or(ends) else { unreachable!("asked for what has to do with other ranks alone") };
        let failed = |source| failed(instruction.describe(), source);
        let lent = self.lent.get(request).ok_or(NO_COMMUNICATOR).map_err(failed)?;
        // SAFETY: the plan reserves this range for the operand until the request has ended.
        let place = |at: u64| unsafe { self.memory.add(at as usize) };
        let on_device = |operand: &Operand| located.of(&operand.address).0;
        let bytes = |operand: &Operand| -> Bytes {
            // The range is limited to the planned bytes, in case a row count is wrong.
            let (start, bytes) = located.of(&operand.address);
            let at = operand.at.map_or_else(|| std::ptr::with_exposed_provenance_mut(start as usize), place);
            (at, bytes.min(operand.bytes()))
        };
        let during = |error: DeviceError| error.during(&instruction.describe());
        if starts.is_some() {
            let read_as_well = lent.output.iter().filter(|_| lent.reads_output);
            let read = lent.inputs.iter().chain(&lent.starts).flatten().chain(read_as_well);
            for operand in read.filter(|operand| operand.at.is_some()) {
                self.guard.transfers.settle().map_err(failed)?;
                // SAFETY: as above; the communicator does not access the copy yet.
                let host = unsafe { as_slice(bytes(operand)) };
                device.read(on_device(operand), host).map_err(during)?;
            }
        }
        match &instruction.kind {
            InstrKind::Collective(collective, _) => {
                let starts = lent.starts.each_ref().map(|starts| match starts {
                    // SAFETY: as above; row offsets are u32, and aligned.
                    Some(starts) => unsafe {
                        std::slice::from_raw_parts(bytes(starts).0.cast_const().cast(), starts.address.span)
                    },
                    None => &[],
                });
                let output = lent.output.as_ref().expect("a collective has an output");
                let inputs = lent.inputs.each_ref().map(|input| input.as_ref().map(bytes));
                let operands =
                    Operands { inputs, output: bytes(output), row_offsets: starts, row_bytes: lent.row_bytes };
                let mut cleared = Ok(());
                let clear = |(start, bytes): Bytes| match output.at {
                    // SAFETY: as above.
                    Some(_) => unsafe { as_slice((start, bytes)) }.fill(0),
                    None => cleared = device.fill(start.expose_provenance() as u64, bytes, 0),
                };
                // SAFETY: as above; this memory is not accessed until the request is finished.
                unsafe { self.guard.transfers.begin(*collective, request, &operands, clear) }.map_err(failed)?;
                cleared.map_err(during)?;
            }
            InstrKind::Finish(_) => self.guard.transfers.finish(request).map_err(failed)?,
            work => {
                let (InstrKind::Send(message) | InstrKind::Receive(message) | InstrKind::Wait(message)) = *work else {
                    unreachable!("all else is a collective")
                };
                let operand = lent.inputs[0].as_ref().or(lent.output.as_ref());
                let operand = || bytes(operand.expect("a message has an operand"));
                // SAFETY: as above; this memory is not accessed until the message's wait.
                unsafe { self.guard.transfers.transfer(work, message, operand) }.map_err(failed)?;
            }
        }
        if let (Some(_), Some(output)) = (ends, lent.output.as_ref().filter(|output| output.at.is_some())) {
            // SAFETY: as above; the communicator no longer accesses the copy.
            let host = unsafe { as_slice(bytes(output)) };
            device.write(on_device(output), host).map_err(during)?;
        }
        Ok(())
    }
}

/// Returns a slice of host memory.
///
/// # Safety
/// The bytes must be valid. While the slice exists, they must not be accessed through another pointer.
unsafe fn as_slice<'a>((start, bytes): Bytes) -> &'a mut [u8] {
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts_mut(start, bytes) }
}

/// Returns, for each of a program's requests, the index of the instruction that waits for it.
fn ends(program: &CompiledProgram) -> Vec<usize> {
    let mut ends = vec![program.instructions.len(); program.requests];
    for (index, instruction) in program.instructions.iter().enumerate() {
        if let [_, Some(request)] = requests(&instruction.kind) {
            ends[request] = index;
        }
    }
    ends
}
