//! Runs the instructions of a program, one after another.
//!
//! In: a compiled program, and the resources it uses: the arena, the communicators, the dynamic buffers, the offload
//! file. Never: a decision, except where dynamic buffers are placed and whether they are evicted. The compiler has made
//! all other decisions.

use std::io;
use std::ops::Range;
use std::time::Instant;

use gapless_communicator::CommunicatorError;
use gapless_compile::InstrKind;
use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_kernels::Stream;
use gapless_kernels::cpu::args::{Address, Args, Element, Places};
use half::bf16;

use crate::offload::OffloadFile;
use crate::routed::{DynamicBuffers, Refusal, find_nonfinite_origin};
use crate::session::{RunOptions, Times};
use crate::transfers::{ArenaBase, Transfers, begin, range, transfer};

/// The resources of a run besides the planned arena.
pub(super) struct RunContext<'o> {
    pub transfers: &'o mut Transfers,
    pub routed: &'o mut DynamicBuffers,
    pub file: &'o mut Option<OffloadFile>,
    pub times: &'o mut Times,
}

/// Runs every instruction. With `watch`, returns the index of the first instruction whose output is not finite, or
/// `None` if all outputs are finite. The run continues after such an instruction, because other ranks wait for its
/// messages. On failure, returns the index of the failed instruction and the reason.
pub(super) fn run_all(
    program: &CompiledProgram,
    base: ArenaBase,
    bytes: u64,
    options: RunOptions,
    context: RunContext<'_>,
) -> Result<Option<usize>, (usize, Failure)> {
    let mut run = Run { program, base, bytes, options, context };
    let mut culprit = None;
    let mut begun = Instant::now();
    for (index, instruction) in program.instructions.iter().enumerate() {
        let span = tracing::trace_span!("op", name = instruction.kind.name(), layer = &*instruction.layer);
        let _entered = span.enter();
        if run.context.routed.is_left_out(instruction) {
            run.poison(instruction);
            continue;
        }
        if let Err(refusal) = run.context.routed.place(instruction) {
            let is_finite = |planned: &Address| are_finite(std::slice::from_ref(planned), base, Places::NONE);
            let culprit = find_nonfinite_origin(program, index, is_finite);
            return Err((culprit.unwrap_or(index), culprit.map_or(Failure::Overflow(refusal), |_| Failure::NonFinite)));
        }
        run.execute(instruction).map_err(|failure| (index, failure))?;
        if options.watch && culprit.is_none() && !are_finite(instruction.results(), base, run.context.routed.places()) {
            culprit = Some(index);
        }
        run.apply_vote_and_count(instruction);
        let ended = Instant::now();
        run.context.times.add(instruction.activity, ended - begun);
        begun = ended;
        run.context.routed.release(instruction);
        if options.poison {
            run.context.routed.released(instruction).for_each(|range| fill_with_nan(range, base, bytes));
        }
        run.poison(instruction);
    }
    Ok(culprit)
}

/// A run of a program.
struct Run<'r> {
    program: &'r CompiledProgram,
    base: ArenaBase,
    bytes: u64,
    options: RunOptions,
    context: RunContext<'r>,
}

impl Run<'_> {
    /// Executes an instruction, without the votes and row counts that [`Self::settle`] handles.
    fn execute(&mut self, instruction: &Instruction) -> Result<(), Failure> {
        let &mut Self { program, base, options, .. } = self;
        let RunContext { transfers, routed, file, .. } = &mut self.context;
        let places = routed.places();
        let part = options.index_in_batch(instruction.micro_batch);
        match &instruction.kind {
            InstrKind::Compute(op) => {
                let stream = Stream::new(options.seed, options.step, part);
                // SAFETY: the addresses come from a plan that has passed the checker, and the arena is held
                // exclusively. The plan reuses no memory of a message in progress before the message's wait.
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
                // SAFETY: `widen` and its counterpart are called before and after the kernel, which keeps no
                // reference to its arguments.
                unsafe { args.widen() };
                op.run(&mut args);
                // SAFETY: as above.
                unsafe { args.round() };
            }
            InstrKind::Send(message) | InstrKind::Receive(message) | InstrKind::Wait(message) => {
                // SAFETY: as above; before a program ends, it waits for all transfers in progress.
                unsafe { transfer(instruction, *message, base, transfers) }.map_err(Failure::Communicator)?;
            }
            InstrKind::Collective(collective, request) => {
                // SAFETY: as above.
                unsafe { begin(*collective, *request, instruction, (base, places), transfers) }
                    .map_err(Failure::Communicator)?;
            }
            InstrKind::Finish(request) => transfers.finish(*request).map_err(Failure::Communicator)?,
            InstrKind::Vote(_) | InstrKind::ApplyVote(_) | InstrKind::Offloaded(_) | InstrKind::Fetched(_) => {}
            InstrKind::Offload(id) | InstrKind::Fetch(id) => {
                // SAFETY: as above.
                unsafe { copy(instruction, program.host[id.index()], base, file) }.map_err(Failure::File)?;
            }
        }
        Ok(())
    }

    /// Casts or applies a vote if the instruction does so. Records the row count if the instruction computes one.
    fn apply_vote_and_count(&mut self, instruction: &Instruction) {
        let (base, routed) = (self.base, &mut *self.context.routed);
        match instruction.kind {
            InstrKind::Vote(_) => {
                // SAFETY: as in `execute`.
                unsafe { scalar(base, &instruction.outputs[0]).write(routed.try_reserve(instruction)) };
            }
            InstrKind::ApplyVote(_) => {
                // SAFETY: as in `execute`.
                routed.apply_vote(instruction, unsafe { scalar(base, &instruction.inputs[0]).read() });
            }
            _ => {}
        }
        if let Some(count) = instruction.defines_count {
            // SAFETY: as in `execute`; the instruction has finished.
            routed.count(count, unsafe { last_u32(base, &instruction.outputs[0]) });
        }
    }

    /// If `options.poison` is set, overwrites the ranges that are dead after an instruction with NaN.
    fn poison(&self, instruction: &Instruction) {
        if self.options.poison {
            instruction.dead_after.iter().for_each(|range| fill_with_nan(range.clone(), self.base, self.bytes));
        }
    }
}

/// The reason why a program failed.
#[derive(Debug)]
pub(super) enum Failure {
    Communicator(CommunicatorError),
    Overflow(Refusal),
    /// A dynamic buffer found no room because values that are not finite were routed. The reported instruction is the
    /// one that produced these values.
    NonFinite,
    File(io::Error),
}

/// Copies an operand to the offload file or from it, depending on the instruction.
///
/// # Safety
/// The operand must lie in the arena at `base`. Until this function returns, no other code may access it.
unsafe fn copy(
    instruction: &Instruction,
    offset: u64,
    base: ArenaBase,
    file: &mut Option<OffloadFile>,
) -> io::Result<()> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "there is no file to offload to");
    let file = file.as_mut().ok_or_else(none)?;
    match &*instruction.outputs {
        [to] => {
            // SAFETY: by this function's contract; every bit pattern is a valid element.
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

/// Returns the address of a planned tensor of one f32.
///
/// # Safety
/// The tensor must lie in the arena at `base`.
unsafe fn scalar(base: ArenaBase, address: &Address) -> *mut f32 {
    // SAFETY: by this function's contract.
    unsafe { base.0.add(address.offset as usize).cast() }
}

/// Returns the last element of a contiguous u32 tensor.
///
/// # Safety
/// The tensor must lie in the arena at `base`. Until this function returns, no other code may write it.
unsafe fn last_u32(base: ArenaBase, address: &Address) -> u32 {
    // SAFETY: by this function's contract; a tensor has at least one element.
    unsafe { base.0.add(address.offset as usize).cast::<u32>().add(address.span - 1).read() }
}

fn are_finite(operands: &[Address], base: ArenaBase, places: Places<'_>) -> bool {
    // SAFETY: as for the instruction itself, which has finished.
    operands.iter().all(|operand| match operand.dtype {
        f32::DTYPE => unsafe { elements::<f32>(operand, base, places) }.iter().all(|x| x.is_finite()),
        bf16::DTYPE => unsafe { elements::<bf16>(operand, base, places) }.iter().all(|x| x.is_finite()),
        _ => true,
    })
}

/// Returns the elements at an address as a slice.
///
/// # Safety
/// The tensor must have type `T`, and lie in the arena at `base` or where `places` says. While the slice exists, no
/// other code may write the tensor.
unsafe fn elements<'a, T: Element>(operand: &Address, base: ArenaBase, places: Places<'_>) -> &'a [T] {
    // SAFETY: by this function's contract.
    unsafe {
        let (start, span) = places.locate(base.0, operand);
        std::slice::from_raw_parts(start.cast::<T>().cast_const(), span)
    }
}

/// Fills bytes with NaN. The bytes must not belong to a live buffer. This holds if the checked plan says that they are
/// dead, or if their dynamic buffer was released.
fn fill_with_nan(range: Range<u64>, base: ArenaBase, bytes: u64) {
    debug_assert!(range.end <= bytes);
    let elements = ((range.end - range.start) / 4) as usize;
    // SAFETY: these bytes lie in the arena, and belong to no live buffer.
    unsafe { std::slice::from_raw_parts_mut(base.0.add(range.start as usize).cast::<f32>(), elements) }.fill(f32::NAN);
}
