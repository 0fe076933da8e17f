//! Removes concatenations (`cat`): operations write their results directly into the concatenated tensor. For example,
//! the gradients of queries, keys and values form the gradient of one projection.
//!
//! - In: a program in which every value has its own buffer.
//! - Out: the same program without each `cat` whose parts can be written directly. All of the parts must be written by
//!   operations that support strided outputs ([`Op::writes_strides`](gapless_graph::Op::writes_strides)), and read by
//!   nothing else.
//! - Never: removes a `cat` of a part that the host, another rank or a message reads, or that has dynamic rows.

use candle_core::Layout;

use super::Context;
use crate::error::Result;
use crate::program::{BufferKind, InstrKind, Operand, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let uses = uses(program);
    let mut is_kept = vec![true; program.instrs.len()];
    for (index, is_kept) in is_kept.iter_mut().enumerate() {
        let Some(places) = places(program, &uses, index) else { continue };
        let whole = program.instrs[index].outputs[0].buffer;
        for JoinedPart { maker, output, layout } in places {
            let part = &mut program.instrs[maker].outputs[output];
            (part.buffer, part.layout) = (whole, layout);
        }
        *is_kept = false;
    }
    if is_kept.contains(&false) {
        program.keep(&is_kept);
    }
    Ok(())
}

/// An output of an instruction, with the layout that it gets in the concatenated tensor.
struct JoinedPart {
    maker: usize,
    output: usize,
    layout: Layout,
}

/// Returns the new place of each part of a `cat`, or `None` if a part cannot be written directly.
fn places(program: &Program, uses: &[Vec<usize>], index: usize) -> Option<Vec<JoinedPart>> {
    let cat = &program.instrs[index];
    let (InstrKind::Compute(op), [whole], None) = (&cat.kind, &cat.outputs[..], cat.predicate) else { return None };
    if op.name() != "cat" || !whole.layout.is_contiguous() {
        return None;
    }
    let dim = (0..whole.layout.dims().len())
        .find(|&dim| cat.inputs.iter().any(|part| part.layout.dims()[dim] != whole.layout.dims()[dim]))?;
    let inner: usize = whole.layout.dims()[dim + 1..].iter().product();
    let mut start = whole.layout.start_offset();
    let place = |part: &Operand| {
        let &[maker, reader] = &uses[part.buffer.index()][..] else { return None };
        let (instr, buffer) = (&program.instrs[maker], &program.buffers[part.buffer.index()]);
        let output = instr.outputs.iter().position(|output| output.buffer == part.buffer)?;
        let (InstrKind::Compute(op), None) = (&instr.kind, instr.predicate) else { return None };
        let is_own = reader == index && matches!(buffer.kind, BufferKind::Temporary) && buffer.dynamic_rows.is_none();
        let is_set = instr.accumulate >> output & 1 == 0 && part.dtype == whole.dtype;
        let made = &instr.outputs[output].layout;
        if !is_own || !is_set || !op.writes_strides(output) || !made.is_contiguous() {
            return None;
        }
        let layout = inside(made, &part.layout, &whole.layout, dim, start)?;
        start += part.layout.dims()[dim] * inner;
        Some(JoinedPart { maker, output, layout })
    };
    cat.inputs.iter().map(place).collect()
}

/// Returns the layout that a part's producer must write in the concatenated tensor `whole`.
///
/// `made`, the producer's layout, and `part` list the same elements in the same order. In `whole`, each row of the part
/// stays contiguous, but the distance between two rows of the part is the length of a row of `whole`. So strides
/// between rows grow, and strides within a row stay the same. Returns `None` if a dimension of `made` crosses rows.
fn inside(made: &Layout, part: &Layout, whole: &Layout, dim: usize, start: usize) -> Option<Layout> {
    let row = |layout: &Layout| layout.dims()[dim..].iter().product::<usize>();
    let (narrow, wide) = (row(part), row(whole));
    let is_all =
        part.is_contiguous() && part.start_offset() == 0 && part.shape().elem_count() == made.shape().elem_count();
    if !is_all || narrow == 0 {
        return None;
    }
    let mut reach = 0;
    let stride = |(&extent, &stride): (&usize, &usize)| {
        if stride % narrow == 0 {
            return Some(stride / narrow * wide);
        }
        reach += extent.saturating_sub(1) * stride;
        (reach < narrow).then_some(stride)
    };
    let strides = made.dims().iter().zip(made.stride()).map(stride).collect::<Option<Vec<_>>>()?;
    Some(Layout::new(made.shape().clone(), strides, start))
}

/// Returns the instructions that touch each buffer, in order. If the host uses a buffer, `usize::MAX` is appended
/// twice, so that the buffer never has exactly two uses.
fn uses(program: &Program) -> Vec<Vec<usize>> {
    let mut uses = vec![Vec::new(); program.buffers.len()];
    for (index, instr) in program.instrs.iter().enumerate() {
        let operands = instr.inputs.iter().chain(&instr.outputs).map(|operand| operand.buffer);
        operands.chain(instr.workspace.iter().copied()).for_each(|buffer| uses[buffer.index()].push(index));
    }
    for instance in program.inputs.iter().chain(&program.outputs) {
        uses[instance.operand.buffer.index()].extend([usize::MAX; 2]);
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_part_lie_as_far_apart_as_those_of_the_whole() {
        // Two batches of three tokens with two heads of size four, as one of three parts of rows of 24 elements.
        let made = Layout::contiguous((2, 3, 2, 4));
        let whole = Layout::contiguous((2, 3, 24));
        let layout = inside(&made, &Layout::contiguous((2, 3, 8)), &whole, 2, 8).unwrap();
        assert_eq!((layout.stride(), layout.start_offset()), (&[72, 24, 4, 1][..], 8));
        // Joined along the batch, the rows of a part are adjacent.
        let whole = Layout::contiguous((4, 3, 8));
        let layout = inside(&made, &Layout::contiguous((2, 3, 8)), &whole, 0, 48).unwrap();
        assert_eq!((layout.stride(), layout.start_offset()), (&[24, 8, 4, 1][..], 48));
        // Not supported are rows that cut a head in two, and views that leave elements out.
        assert!(inside(&made, &Layout::contiguous((2, 16, 3)), &Layout::contiguous((2, 16, 6)), 2, 0).is_none());
        assert!(inside(&made, &Layout::contiguous((2, 3, 4)), &Layout::contiguous((2, 3, 8)), 2, 0).is_none());
    }
}
