//! The messages and collectives that a rank has in progress while a program runs.
//!
//! In: instructions, and the base address of the arena. Out: requests to the communicators. Each request is kept
//! until the instruction that waits for it. Never: a heap allocation while a program runs.

use std::collections::BTreeMap;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use gapless_communicator::Memory;
use gapless_communicator::launch_order::LaunchOrder;
use gapless_communicator::{self as communicator, Communicator, CommunicatorError, Request};
use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, Message};
use gapless_graph::ops::Collective;
use gapless_kernels::cpu::args::{Address, Places};
use gapless_parallel::Axes;

/// The communicators of a rank, one per group of ranks it belongs to.
#[derive(Debug, Default)]
pub struct Communicators {
    /// The ranks of the pipeline.
    pub pipeline: Option<Box<dyn Communicator>>,
    /// This rank's groups, by the axes along which their ranks differ.
    pub groups: BTreeMap<Axes, Box<dyn Communicator>>,
}

impl Communicators {
    fn group(&mut self, axes: Axes) -> communicator::Result<&mut Box<dyn Communicator>> {
        self.groups.get_mut(&axes).ok_or(NO_COMMUNICATOR)
    }

    #[cfg(feature = "cuda")]
    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Communicator>> {
        self.pipeline.iter_mut().chain(self.groups.values_mut())
    }
}

const OTHER_RANKS: CommunicatorError = CommunicatorError::Unsupported {
    what: "a collective over another number of ranks than the mesh has",
    remedy: "take the number from VarBuilder::expert_ranks",
};

const OTHER_ROWS: CommunicatorError = CommunicatorError::Unsupported {
    what: "an exchange of more rows than its tensors have",
    remedy: "pass it the starts of its own rows",
};

pub(crate) const NO_COMMUNICATOR: CommunicatorError = CommunicatorError::Unsupported {
    what: "a program for several ranks without a communicator, or after one of them has failed",
    remedy: "build the trainer again, with the communicator of all its ranks",
};

/// The communicators of a rank, and the transfers that are in progress.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Transfers {
    communicators: Communicators,
    requests: Vec<Option<InProgress>>,
    /// For each request of an all-to-all, the bytes sent to each rank, and the bytes received from each.
    lens: Vec<[Vec<usize>; 2]>,
    /// For each program, the launch order of its messages; `None` if the pipeline's communicator does not require an
    /// order.
    orders: Vec<Option<Arc<LaunchOrder>>>,
}

impl Transfers {
    /// Prepares the transfers of an executable's programs. A collective operation: all ranks must call it.
    pub(crate) fn new(mut communicators: Communicators, executable: &Executable) -> communicator::Result<Self> {
        let requests = executable.requests();
        let mut lens = vec![[vec![], vec![]]; requests];
        for instruction in executable.programs().iter().flat_map(|program| &program.instructions) {
            if let InstrKind::Collective(collective, request) = instruction.kind
                && let Collective::AllToAll { ranks, .. } | Collective::AllToAllRows { ranks, .. } = collective
            {
                lens[request].iter_mut().filter(|lens| lens.len() < ranks).for_each(|lens| lens.resize(ranks, 0));
            }
        }
        let mut order = |program: &CompiledProgram| match &mut communicators.pipeline {
            Some(pipeline) => pipeline.agree(&program.messages),
            None => Ok(None),
        };
        let orders = executable.programs().iter().map(&mut order).collect::<communicator::Result<_>>()?;
        Ok(Self { communicators, requests: (0..requests).map(|_| None).collect(), lens, orders })
    }

    /// True if the communicators exchange device memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn are_on_device(&self) -> bool {
        let Communicators { pipeline, groups } = &self.communicators;
        pipeline.iter().chain(groups.values()).any(|way| way.memory() == Memory::Device)
    }

    /// Begins a run of a program: passes the program's launch order to the pipeline's communicator.
    pub(crate) fn follow(&mut self, program: usize) -> communicator::Result<()> {
        match (self.orders.get(program), &mut self.communicators.pipeline) {
            (Some(Some(order)), Some(pipeline)) => pipeline.follow(order),
            _ => Ok(()),
        }
    }

    /// Waits on the host for all operations that were passed to [`Communicator::wait_on_device`].
    #[cfg(feature = "cuda")]
    pub(crate) fn settle(&mut self) -> communicator::Result<()> {
        self.communicators.all().try_for_each(|way| way.settle())
    }

    /// Guards the transfers of one run.
    pub(crate) fn guard(&mut self) -> RunGuard<'_> {
        RunGuard { transfers: self, is_over: false }
    }
}

/// A transfer in progress.
#[derive(Debug)]
enum InProgress {
    Message(Request),
    Collective(Request, Axes),
}

/// Guards the transfers of one run. If the run fails or panics, dropping the guard ends all transfers in progress,
/// before the memory that they read and write is freed.
pub(crate) struct RunGuard<'l> {
    pub transfers: &'l mut Transfers,
    is_over: bool,
}

impl RunGuard<'_> {
    /// Ends the run. If `is_well` is false, all transfers in progress are ended.
    pub fn end(mut self, is_well: bool) {
        self.is_over = is_well;
    }
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            *self.transfers = Transfers::default();
        }
    }
}

/// The arena's base address, which can be shared with the threads of the pool.
#[derive(Clone, Copy)]
pub(crate) struct ArenaBase(pub *mut u8);

// SAFETY: while a program runs, the backend holds the arena exclusively, and the threads of an instruction access
// disjoint ranges of it.
unsafe impl Send for ArenaBase {}

// SAFETY: as above.
unsafe impl Sync for ArenaBase {}

/// The address of the first byte, and the number of bytes.
pub(crate) type Bytes = (*mut u8, usize);

/// The memory that a collective reads and writes.
pub(crate) struct Operands<'a> {
    pub inputs: [Option<Bytes>; 2],
    pub output: Bytes,
    /// For [`AllToAllRows`](Collective::AllToAllRows): the row offsets of the sent and of the received rows.
    pub row_offsets: [&'a [u32]; 2],
    /// For [`AllToAllRows`](Collective::AllToAllRows): the bytes of one row.
    pub row_bytes: usize,
}

impl Transfers {
    /// Starts a message over `bytes`, or waits for it.
    ///
    /// # Safety
    /// From the message's start to its wait, no other code may write the bytes, nor read those of a receive.
    pub(crate) unsafe fn transfer(
        &mut self,
        work: &InstrKind,
        message: Message,
        bytes: impl FnOnce() -> Bytes,
    ) -> communicator::Result<()> {
        let Message { peer, tag, request } = message;
        let pipeline = self.communicators.pipeline.as_mut().ok_or(NO_COMMUNICATOR)?;
        let started = match work {
            InstrKind::Send(_) => {
                let (from, len) = bytes();
                // SAFETY: by this function's contract.
                unsafe { pipeline.isend(from.cast_const(), len, peer, tag) }?
            }
            InstrKind::Receive(_) => {
                let (to, len) = bytes();
                // SAFETY: by this function's contract.
                unsafe { pipeline.irecv(to, len, peer, tag) }?
            }
            _ => {
                let Some(InProgress::Message(under_way)) = self.requests[request].take() else {
                    unreachable!("lowering starts every message that it waits for")
                };
                return pipeline.wait_on_device(under_way);
            }
        };
        self.requests[request] = Some(InProgress::Message(started));
        Ok(())
    }

    /// Starts a collective. If the rows that ranks send do not fill the output, calls `clear` with the bytes after
    /// these rows. `clear` must fill these bytes with zeros.
    ///
    /// # Safety
    /// The operands must be valid, and overlap only as the collective allows. Until the collective is finished, no
    /// other code may access them.
    pub(crate) unsafe fn begin(
        &mut self,
        collective: Collective,
        request: usize,
        operands: &Operands<'_>,
        clear: impl FnOnce(Bytes),
    ) -> communicator::Result<()> {
        let &Operands { inputs, output, row_offsets, row_bytes } = operands;
        let axes = collective.axes();
        let communicator = self.communicators.group(axes)?;
        if collective.ranks().is_some_and(|ranks| ranks != communicator.size()) {
            return Err(OTHER_RANKS);
        }
        // After a failed run, `self` is empty.
        let lens = self.lens.get_mut(request).ok_or(NO_COMMUNICATOR)?;
        match collective {
            Collective::AllToAll { ranks, .. } => lens.iter_mut().for_each(|lens| lens[..ranks].fill(output.1 / ranks)),
            Collective::AllToAllRows { ranks, .. } => {
                let [sends, receives] = lens;
                let sent = row_lens(row_offsets[0], row_bytes, &mut sends[..ranks]).ok_or(OTHER_ROWS)?;
                let received = row_lens(row_offsets[1], row_bytes, &mut receives[..ranks]).ok_or(OTHER_ROWS)?;
                if received > output.1 || inputs[0].is_none_or(|input| sent > input.1) {
                    return Err(OTHER_ROWS);
                }
                // The output also includes the rows after the last received row, which no rank sends.
                if received < output.1 {
                    clear((output.0.wrapping_add(received), output.1 - received));
                }
            }
            _ => {}
        }
        let request_of = collective.request(inputs, output, [&lens[0], &lens[1]]);
        // SAFETY: by this function's contract. The sizes in `lens` stay unchanged until this request is finished.
        let started = unsafe { communicator.start(request_of) }?;
        self.requests[request] = Some(InProgress::Collective(started, axes));
        Ok(())
    }

    /// Reports a failure to the other ranks and drops the communicators, which ends all transfers in progress.
    #[cfg(feature = "cuda")]
    pub(crate) fn abort(&mut self, reason: &str) {
        self.communicators.all().for_each(|way| way.abort(reason));
        *self = Self::default();
    }

    /// Waits for a collective.
    pub(crate) fn finish(&mut self, request: usize) -> communicator::Result<()> {
        let Some(InProgress::Collective(under_way, axes)) = self.requests[request].take() else {
            unreachable!("lowering starts every collective that it finishes")
        };
        self.communicators.group(axes)?.wait_on_device(under_way)
    }
}

/// Writes the number of bytes of each rank's rows to `lens`, and returns the sum. The rows consist of consecutive runs,
/// with the same number of runs for each rank. `starts` holds the index of the first row of each run, followed by the
/// total number of rows. Returns `None` if `starts` descends or a size overflows.
fn row_lens(starts: &[u32], row_bytes: usize, lens: &mut [usize]) -> Option<usize> {
    let runs = starts.len().checked_sub(1)?.checked_div(lens.len())?;
    let mut all: usize = 0;
    for (rank, len) in lens.iter_mut().enumerate() {
        let rows = starts[(rank + 1) * runs].checked_sub(starts[rank * runs])?;
        *len = (rows as usize).checked_mul(row_bytes)?;
        all = all.checked_add(*len)?;
    }
    Some(all)
}

/// Starts an instruction's message, or waits for it.
///
/// # Safety
/// The operand must lie in the arena at `base`. From the message's start to its wait, no other code may write it, nor
/// read it if it is received.
pub(super) unsafe fn transfer(
    instruction: &Instruction,
    message: Message,
    base: ArenaBase,
    transfers: &mut Transfers,
) -> communicator::Result<()> {
    let operand = match &instruction.kind {
        InstrKind::Receive(_) => &instruction.outputs[0],
        _ => &instruction.inputs[0],
    };
    // SAFETY: by this function's contract.
    unsafe { transfers.transfer(&instruction.kind, message, || range(base, operand, Places::NONE)) }
}

/// Starts an instruction's collective.
///
/// # Safety
/// The operands must lie in the arena at `base`, or where `places` says. Until the collective is finished, no other
/// code may access them.
pub(super) unsafe fn begin(
    collective: Collective,
    request: usize,
    instruction: &Instruction,
    (base, places): (ArenaBase, Places<'_>),
    transfers: &mut Transfers,
) -> communicator::Result<()> {
    let Instruction { inputs, outputs, .. } = instruction;
    // SAFETY: by this function's contract.
    let range = |address: &Address| unsafe { range(base, address, places) };
    let (mut row_offsets, mut row_bytes) = ([&[][..]; 2], 0);
    if let Collective::AllToAllRows { rows, .. } = collective {
        row_bytes = outputs[0].span / rows * outputs[0].dtype.size_in_bytes();
        for (starts, address) in row_offsets.iter_mut().zip(&inputs[1..]) {
            let start = base.0.wrapping_add(address.offset as usize).cast::<u32>().cast_const();
            // SAFETY: by this function's contract. The row offsets are contiguous u32, and no instruction writes them
            // until the collective is finished.
            *starts = unsafe { std::slice::from_raw_parts(start, address.span) };
        }
    }
    let operands = Operands {
        inputs: [inputs.first().map(range), inputs.get(1).map(range)],
        output: outputs.first().map(range).expect("a collective has an output"),
        row_offsets,
        row_bytes,
    };
    // SAFETY: by this function's contract. In the plan, an input and the output are either disjoint or the same
    // buffer.
    let clear = |(start, bytes): Bytes| unsafe { std::slice::from_raw_parts_mut(start, bytes) }.fill(0);
    // SAFETY: as above.
    unsafe { transfers.begin(collective, request, &operands, clear) }
}

/// Returns the address of an operand's first byte, and its size in bytes.
///
/// # Safety
/// The operand must lie in the arena at `base`, or outside of it if `places` says so.
pub(crate) unsafe fn range(base: ArenaBase, address: &Address, places: Places<'_>) -> (*mut u8, usize) {
    // SAFETY: by this function's contract.
    let (start, span) = unsafe { places.locate(base.0, address) };
    (start, span * address.dtype.size_in_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_all_ranks_are_a_number_of_bytes() {
        for (starts, row_bytes, expected) in [
            (&[0, 2, 3][..], 8, Some(24)),
            (&[0, 1, 2, 3, 5], 8, Some(40)),
            (&[4, 4, 4], 8, Some(0)),
            (&[0, 5, 3], 8, None),
            (&[3, 0, 1], 8, None),
            (&[0, 2, 3], usize::MAX, None),
            (&[0, 1 << 31, u32::MAX], 1 << 33, None),
            (&[0, 4, 8], 1 << 61, None),
            (&[], 8, None),
        ] {
            assert_eq!(row_lens(starts, row_bytes, &mut [0; 2]), expected, "{starts:?} of {row_bytes} bytes");
        }
        assert_eq!(row_lens(&[0], 8, &mut []), None, "of no rank");
    }
}
