//! Verifies that a program can run correctly. The checks cover every property on which kernels, messages and the
//! runtime rely and that the plan does not guarantee.
//!
//! - In: programs, which a user may have changed, with operations ([`Op`](gapless_graph::Op)) that may describe
//!   themselves wrongly.
//! - Out: the first problem found, in words.
//! - Never: addresses. The buffers of any program that passes are planned, so its addresses are valid.

use std::collections::HashSet;

use candle_core::DType;
use gapless_graph::ops::Collective;
use gapless_kernels::cpu::args::{MAX_OUTPUTS, byte_range, span};
use gapless_kernels::cpu::bf16::widened_layout;

use crate::error::{Error, Result};
use crate::program::{
    Buffer, BufferId, BufferKind, DynamicRows, Instr, InstrKind, IoTensor, OffloadId, Operand, Program,
};

/// Maximum bytes of all tensors of a program together: an exbibyte. This ensures that sums of sizes do not overflow,
/// even if the sizes are rounded up.
const MAX_BYTES: u64 = 1 << 60;

/// The reason, in words, why a program cannot run.
type Verdict<T = ()> = Result<T, String>;

/// Returns an error for a program with more bytes than any machine has.
pub(crate) fn check_sizes(program: &Program) -> Result<()> {
    let mut all: u64 = 0;
    for buffer in &program.buffers {
        all = all.saturating_add(buffer.bytes);
        if all > MAX_BYTES {
            let (program, what, op) = (program.name.clone(), buffer.label.tensor.clone(), buffer.label.op.clone());
            return Err(Error::TooLarge { program, what, op });
        }
    }
    let on_host = program.offload.iter().fold(0, |all: u64, buffer| all.saturating_add(buffer.bytes));
    if on_host > MAX_BYTES {
        let (program, what, op) = (program.name.clone(), "what is offloaded".into(), "offload".into());
        return Err(Error::TooLarge { program, what, op });
    }
    Ok(())
}

/// Returns an error for a program that could not run correctly.
pub(crate) fn verify(program: &Program) -> Result<()> {
    check_sizes(program)?;
    check(program).map_err(|what| Error::Unsound { program: program.name.clone(), what })
}

fn check(program: &Program) -> Verdict {
    program.buffers.iter().try_for_each(|buffer| buffer_is_sound(program, buffer))?;
    names_are_apart(program)?;
    let mut votes = Vec::new();
    for instr in &program.instrs {
        let layer = if instr.layer.is_empty() { "the model" } else { &instr.layer };
        let named = |what: String| format!("{} in {layer}: {what}", instr.kind.name());
        let mut of_instr = || {
            operands_are_inside(program, instr)?;
            operands_are_apart(program, instr)?;
            counts_exist(program, instr)?;
            kind_fits(program, instr, &mut votes)
        };
        of_instr().map_err(named)?;
    }
    transfers_own_operands(program)?;
    program.inputs.iter().chain(&program.outputs).try_for_each(|tensor| host_can_reach(program, tensor))?;
    match program
        .parts
        .iter()
        .find(|part| part.instrs.end > program.instrs.len() || part.instrs.start > part.instrs.end)
    {
        Some(part) => {
            Err(format!("part {:?} covers instructions {:?} of {}", part.name, part.instrs, program.instrs.len()))
        }
        None => Ok(()),
    }
}

/// Checks that the size of a dynamic buffer is a number of whole rows, and that the buffer is a temporary. The host and
/// other programs need planned addresses.
fn buffer_is_sound(program: &Program, buffer: &Buffer) -> Verdict {
    let Buffer { bytes, label, kind, dynamic_rows } = buffer;
    if let BufferKind::Persistent { spec, .. } = kind
        && spec.checked_bytes().is_none_or(|declared| declared > *bytes)
    {
        return Err(format!("{:?} has {bytes} bytes, too few for {spec:?}", label.tensor));
    }
    match *dynamic_rows {
        None => Ok(()),
        Some(DynamicRows { count, row_bytes, .. })
            if matches!(kind, BufferKind::Temporary)
                && (count as usize) < program.row_counts
                && bytes.checked_rem(row_bytes) == Some(0) =>
        {
            Ok(())
        }
        Some(rows) => Err(format!("{:?} of {bytes} bytes cannot have {rows:?}", label.tensor)),
    }
}

/// Checks that a program has no two tensors with the same name among those that programs share by name.
fn names_are_apart(program: &Program) -> Verdict {
    let shared = program.buffers.iter().filter(|b| matches!(b.kind, BufferKind::Persistent { .. } | BufferKind::Cache));
    let mut names = HashSet::new();
    match shared.map(|buffer| &buffer.label.tensor).find(|name| !names.insert(*name)) {
        Some(name) => Err(format!("two tensors that outlive the step are named {name:?}; rename one")),
        None => Ok(()),
    }
}

fn buffer(program: &Program, id: BufferId) -> Verdict<&Buffer> {
    program
        .buffers
        .get(id.index())
        .ok_or_else(|| format!("it names buffer {} of {}", id.index(), program.buffers.len()))
}

/// Checks that every operand lies within its buffer, and that the f32 copy of an operand lies within a piece of
/// scratch.
fn operands_are_inside(program: &Program, instr: &Instr) -> Verdict {
    let mut copies = Vec::new();
    for operand in instr.inputs.iter().chain(&instr.outputs) {
        operand_is_inside(program, operand)?;
        let Some(piece) = operand.widened else { continue };
        let needed = byte_range(&widened_layout(&operand.layout), DType::F32).map_or(u64::MAX, |copy| copy.end);
        if operand.dtype != DType::BF16 || needed > buffer(program, piece)?.bytes {
            return Err(format!(
                "the copy of {:?} of {:?} in f32 does not fit its scratch",
                operand.layout.dims(),
                operand.dtype
            ));
        }
        copies.push(piece);
    }
    // The last pieces of scratch are the f32 copies, in any order. The other pieces belong to the operation.
    let own = instr.workspace.len().checked_sub(copies.len());
    let mut last: Vec<BufferId> = own.map_or_else(Vec::new, |own| instr.workspace[own..].to_vec());
    last.sort_unstable();
    copies.sort_unstable();
    if last != copies {
        return Err("the copies of its operands in f32 are not the last pieces of its scratch".into());
    }
    Ok(())
}

fn operand_is_inside(program: &Program, operand: &Operand) -> Verdict {
    let Operand { layout, dtype, .. } = operand;
    let declared = buffer(program, operand.buffer)?;
    let (dims, strides, start) = (layout.dims(), layout.stride(), layout.start_offset());
    let Some(range) = byte_range(layout, *dtype).filter(|range| range.end <= declared.bytes) else {
        return Err(format!(
            "an operand of {dtype:?} {dims:?} by strides {strides:?} from element {start} on extends beyond its buffer of {} bytes",
            declared.bytes
        ));
    };
    let Some(DynamicRows { row_bytes, .. }) = declared.dynamic_rows else { return Ok(()) };
    let is_whole = layout.is_contiguous() && range == (0..declared.bytes);
    match is_whole && row_bytes.is_multiple_of(dtype.size_in_bytes() as u64) {
        true => Ok(()),
        false => Err(format!("an operand of {dtype:?} {dims:?} is only a part of a tensor with dynamic rows")),
    }
}

/// Checks that no output overlaps another operand, except an input that the output overwrites as a whole.
fn operands_are_apart(program: &Program, instr: &Instr) -> Verdict {
    let Instr { inputs, outputs, workspace, .. } = instr;
    if outputs.len() > MAX_OUTPUTS {
        return Err(format!("it has {} outputs, more than {MAX_OUTPUTS}", outputs.len()));
    }
    for input in inputs {
        match input.overwritten_by {
            None if outputs.iter().any(|output| output.buffer == input.buffer) => {
                return Err("it writes to the buffer of an input that it does not overwrite".into());
            }
            None => {}
            Some(index) => {
                let whole = |o: &Operand| o.layout.is_contiguous() && o.layout.start_offset() == 0;
                let is_of = |output: &Operand| {
                    input.buffer == output.buffer
                        && input.dtype == output.dtype
                        && whole(input)
                        && whole(output)
                        && span(&input.layout) == span(&output.layout)
                };
                let alone = inputs.iter().filter(|other| other.buffer == input.buffer).count() == 1;
                if !alone || input.widened.is_some() || !outputs.get(index).is_some_and(is_of) {
                    return Err("it overwrites an input of another shape or use".into());
                }
            }
        }
    }
    for (index, output) in outputs.iter().enumerate() {
        for other in outputs[..index].iter().filter(|other| other.buffer == output.buffer) {
            // GPU kernels may write interleaved parts of one tensor (see `passes::join`).
            let is_static = buffer(program, output.buffer)?.dynamic_rows.is_none();
            let are_strided = !output.layout.is_contiguous() && !other.layout.is_contiguous();
            let [a, b] =
                [output, other].map(|operand| byte_range(&operand.layout, operand.dtype).unwrap_or(0..u64::MAX));
            if !is_static || !(are_strided || a.end <= b.start || b.end <= a.start) {
                return Err("two of its outputs are the same bytes".into());
            }
        }
    }
    for (index, &piece) in workspace.iter().enumerate() {
        let is_shared = workspace[..index].contains(&piece);
        let is_operand = inputs.iter().chain(outputs).any(|operand| operand.buffer == piece);
        if is_shared || is_operand || buffer(program, piece)?.dynamic_rows.is_some() {
            return Err(format!("piece {index} of its scratch is another operand's, or has dynamic rows"));
        }
    }
    Ok(())
}

/// Checks that a row count that the instruction produces is valid, and that a row count on which it depends exists.
fn counts_exist(program: &Program, instr: &Instr) -> Verdict {
    let known = |count: u32| (count as usize) < program.row_counts;
    if !instr.predicate.is_none_or(known) {
        return Err(format!("it depends on count {:?} of {}", instr.predicate, program.row_counts));
    }
    match instr.defines_count {
        Some(count) if !known(count) || !instr.outputs.first().is_some_and(|o| is_planned(program, o, DType::U32)) => {
            Err(format!("its first output cannot be count {count} of {}", program.row_counts))
        }
        _ => Ok(()),
    }
}

/// True if an operand is contiguous, is not empty, has this type, and has a planned address.
fn is_planned(program: &Program, operand: &Operand, dtype: DType) -> bool {
    let is_dense = operand.layout.is_contiguous() && span(&operand.layout) > 0;
    operand.dtype == dtype && is_dense && buffer(program, operand.buffer).is_ok_and(|b| b.dynamic_rows.is_none())
}

/// Checks that an instruction other than a computation has the operands that its kind requires. `votes` lists the row
/// counts on which the program has voted so far. A vote is applied right after it is taken, so only the last vote may
/// be applied.
fn kind_fits(program: &Program, instr: &Instr, votes: &mut Vec<u32>) -> Verdict {
    let Instr { kind, inputs, outputs, .. } = instr;
    let dense = |operand: &Operand| is_planned(program, operand, operand.dtype);
    let bytes = |operand: &Operand| (span(&operand.layout) * operand.dtype.size_in_bytes()) as u64;
    let fits = match *kind {
        InstrKind::Compute(_) => true,
        InstrKind::Send(_) => matches!((&inputs[..], &outputs[..]), ([sent], []) if dense(sent)),
        InstrKind::Receive(_) => matches!((&inputs[..], &outputs[..]), ([], [received]) if dense(received)),
        InstrKind::Wait(_) | InstrKind::Finish(_) => !inputs.is_empty() && outputs.is_empty(),
        InstrKind::Collective(collective, _) => collective_fits(program, collective, inputs, outputs),
        InstrKind::Offload(id) | InstrKind::Fetch(id) => match (kind, &inputs[..], &outputs[..]) {
            (InstrKind::Offload(_), [operand], []) | (InstrKind::Fetch(_), [], [operand]) => {
                dense(operand) && program.offload.get(id.index()).is_some_and(|host| bytes(operand) <= host.bytes)
            }
            _ => false,
        },
        InstrKind::Offloaded(_) | InstrKind::Fetched(_) => inputs.len() == 1 && outputs.is_empty(),
        InstrKind::Vote(count) => {
            let is_first = (count as usize) < program.row_counts && !votes.contains(&count);
            votes.push(count);
            is_first && matches!(&outputs[..], [number] if is_planned(program, number, DType::F32))
        }
        InstrKind::ApplyVote(count) => {
            votes.last() == Some(&count) && matches!(&inputs[..], [number] if is_planned(program, number, DType::F32))
        }
    };
    if fits { Ok(()) } else { Err("its operands do not fit this kind of instruction".into()) }
}

/// True if the sizes of a collective's operands match the elements that the collective reads and writes.
fn collective_fits(program: &Program, collective: Collective, inputs: &[Operand], outputs: &[Operand]) -> bool {
    let [output] = outputs else { return false };
    let len = |operand: &Operand| span(&operand.layout);
    let times = |operand: &Operand, ranks: usize| len(operand).checked_mul(ranks);
    let floats = |operand: &Operand| is_planned(program, operand, DType::F32);
    let dense = |operand: &Operand| is_planned(program, operand, output.dtype);
    match (collective, inputs) {
        (Collective::AllReduce { .. }, [input]) => input.overwritten_by.is_some() && floats(input) && floats(output),
        (Collective::ReduceScatter { ranks, .. }, [input]) => {
            floats(input) && floats(output) && times(output, ranks) == Some(len(input))
        }
        (Collective::AllGather { ranks, .. }, [input]) => {
            dense(input) && dense(output) && times(input, ranks) == Some(len(output))
        }
        (Collective::Refill { ranks, .. }, [whole, part]) => {
            let are_dense = [whole, part, output].into_iter().all(dense);
            whole.overwritten_by.is_some() && are_dense && times(part, ranks) == Some(len(output))
        }
        (Collective::AllToAll { ranks, .. }, [input]) => {
            let is_cut = len(input).checked_rem(ranks) == Some(0);
            dense(input) && dense(output) && is_cut && len(input) == len(output)
        }
        (Collective::AllToAllRows { ranks, rows, .. }, [input, starts @ ..]) => {
            let are_starts = |starts: &Operand| {
                is_planned(program, starts, DType::U32) && (len(starts) - 1).checked_rem(ranks) == Some(0)
            };
            let are_dense = input.layout.is_contiguous() && output.layout.is_contiguous();
            let is_cut = len(output).checked_rem(rows) == Some(0) && input.dtype == output.dtype;
            starts.len() == 2 && starts.iter().all(are_starts) && are_dense && is_cut
        }
        _ => false,
    }
}

/// Returns the number of the transfer that an instruction starts, and of the transfer that it waits for. Transfers are
/// messages, collectives, and the copies of offloaded activations that the program waits for, as on a GPU.
fn transfers(program: &Program, kind: &InstrKind, is_awaited: &[bool]) -> [Option<usize>; 2] {
    let copy = |id: OffloadId, fetches: bool| program.requests + 2 * id.index() + usize::from(fetches);
    let awaited = |id, fetches| Some(copy(id, fetches)).filter(|&copy| is_awaited.get(copy) == Some(&true));
    match *kind {
        InstrKind::Send(message) | InstrKind::Receive(message) => [Some(message.request), None],
        InstrKind::Collective(_, request) => [Some(request), None],
        InstrKind::Offload(id) => [awaited(id, false), None],
        InstrKind::Fetch(id) => [awaited(id, true), None],
        InstrKind::Wait(message) => [None, Some(message.request)],
        InstrKind::Finish(request) => [None, Some(request)],
        InstrKind::Offloaded(id) => [None, Some(copy(id, false))],
        InstrKind::Fetched(id) => [None, Some(copy(id, true))],
        _ => [None, None],
    }
}

/// Checks that the operands of a message, collective or copy stay unchanged until the instruction that waits for it.
fn transfers_own_operands(program: &Program) -> Verdict {
    // By buffer: the number of transfers in flight that read it, and whether one writes it.
    let mut lent: Vec<(usize, bool)> = vec![(0, false); program.buffers.len()];
    let count = program.requests + 2 * program.offload.len();
    let mut is_awaited = vec![true; program.requests];
    is_awaited.resize(count, false);
    for instr in &program.instrs {
        if let [_, Some(ended)] = transfers(program, &instr.kind, &[])
            && let Some(is_awaited) = is_awaited.get_mut(ended)
        {
            *is_awaited = true;
        }
    }
    let mut under_way: Vec<Option<&Instr>> = vec![None; count];
    let mut was_begun = vec![false; count];
    for instr in &program.instrs {
        let named = |what: &str| format!("{} in {:?}: {what}", instr.kind.name(), &*instr.layer);
        let [begins, ends] = transfers(program, &instr.kind, &is_awaited);
        if let Some(request) = ends {
            let begun = under_way
                .get_mut(request)
                .and_then(Option::take)
                .ok_or_else(|| named("it waits for an operation that was not started"))?;
            let is_collective = |instr: &Instr| matches!(instr.kind, InstrKind::Collective(..) | InstrKind::Finish(_));
            let holds = |operand: &Operand| instr.inputs.iter().any(|held| held.buffer == operand.buffer);
            let is_one = is_collective(begun) == is_collective(instr) && begun.predicate == instr.predicate;
            if !is_one || !begun.inputs.iter().chain(&begun.outputs).all(holds) {
                return Err(named("it waits for an operation of another kind, or lacks its operands"));
            }
            begun.inputs.iter().for_each(|operand| lent[operand.buffer.index()].0 -= 1);
            begun.outputs.iter().for_each(|operand| lent[operand.buffer.index()].1 = false);
            continue;
        }
        let is_written = |operand: &Operand| lent[operand.buffer.index()].1;
        let is_lent = |operand: &Operand| lent[operand.buffer.index()] != (0, false);
        if instr.inputs.iter().any(is_written) || instr.outputs.iter().any(is_lent) {
            return Err(named("it touches a buffer that is being sent, received or copied"));
        }
        if let Some(request) = begins {
            if was_begun.get(request) != Some(&false) {
                return Err(named("its request number is used twice, or out of range"));
            }
            (was_begun[request], under_way[request]) = (true, Some(instr));
            instr.inputs.iter().for_each(|operand| lent[operand.buffer.index()].0 += 1);
            instr.outputs.iter().for_each(|operand| lent[operand.buffer.index()].1 = true);
        }
    }
    match under_way.into_iter().flatten().next() {
        Some(instr) => Err(format!("{} in {:?} is never waited for", instr.kind.name(), &*instr.layer)),
        None => Ok(()),
    }
}

/// Checks that a tensor that the host reads or writes is contiguous, and has its declared shape and type.
fn host_can_reach(program: &Program, IoTensor { name, operand, spec, .. }: &IoTensor) -> Verdict {
    operand_is_inside(program, operand).map_err(|what| format!("{name:?}: {what}"))?;
    let is_called = operand.dtype == spec.dtype && operand.layout.dims() == spec.dims();
    match is_called && is_planned(program, operand, operand.dtype) {
        true => Ok(()),
        false => Err(format!("{name:?} has gaps or is not {spec:?}, so the host cannot read or write it")),
    }
}
