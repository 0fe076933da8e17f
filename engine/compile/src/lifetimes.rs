//! When every buffer lives, in ticks.
//!
//! In: programs that run one after another in one arena. Out: the planning problem over all of them. A program of n steps
//! owns 2n + 4 ticks: two for the host to write its inputs, two per step, two for the host to read its outputs. Inputs
//! of a step are read at its first tick and still there at its second; outputs are born at the second; an overwritten
//! input is the same buffer as the output, so it needs no tick of its own.

use std::collections::HashMap;
use std::ops::Range;

use gapless_alloc::{Buffer, Label, Problem};

use crate::error::{Error, Result};
use crate::program::{BufferKind, Program};
use crate::verify::check_sizes;

/// All arena addresses are multiples of this: a cache line, and an AVX-512 vector.
pub const ALIGNMENT: u64 = 64;

/// The problem of several programs, and which of its buffers each program's buffers are.
#[derive(Debug)]
pub struct Lifetimes<'p> {
    pub problem: Problem,
    pub labels: Vec<&'p Label>,
    /// `of[program][buffer]` is an index into the problem.
    pub of: Vec<Vec<usize>>,
    /// Ticks of every program.
    pub spans: Vec<Range<u64>>,
}

/// The tick at which step `index` of a program that starts at `start` reads its inputs.
pub fn tick_of(start: u64, index: usize) -> u64 {
    start + 2 + 2 * index as u64
}

/// The table that a program's plan is made for, without names.
///
/// # Errors
/// When the live bytes exceed `u64`.
pub fn table(program: &Program) -> Result<Problem> {
    Ok(lifetimes(&[program])?.problem)
}

pub fn lifetimes<'p>(programs: &[&'p Program]) -> Result<Lifetimes<'p>> {
    let mut spans = Vec::new();
    let mut start = 0;
    for program in programs {
        let end = start + 2 * program.instrs.len() as u64 + 4;
        spans.push(start..end);
        start = end;
    }
    let whole = 0..start;
    let (mut buffers, mut labels): (Vec<Buffer>, Vec<&Label>) = (Vec::new(), Vec::new());
    programs.iter().try_for_each(|program| check_sizes(program))?;
    let mut shared: HashMap<&str, (usize, &BufferKind)> = HashMap::new();
    let caches = cache_lifetimes(programs, &spans);
    let mut of = Vec::new();
    for (program, span) in programs.iter().zip(&spans) {
        let uses = uses(program, span);
        let mut indices = Vec::with_capacity(program.buffers.len());
        for (buffer, used) in program.buffers.iter().zip(uses) {
            let lifetime = match &buffer.kind {
                BufferKind::Always { .. } => whole.clone(),
                BufferKind::Cache => caches[buffer.label.tensor.as_str()].clone(),
                BufferKind::FromStart => span.start..used.end.max(span.start + 1),
                BufferKind::ToEnd => used.start.min(span.end - 1)..span.end,
                BufferKind::No => used,
            };
            let is_shared = matches!(buffer.kind, BufferKind::Always { .. } | BufferKind::Cache);
            if is_shared && let Some(&(index, kind)) = shared.get(buffer.label.tensor.as_str()) {
                let known: &Buffer = &buffers[index];
                let is_one = match (kind, &buffer.kind) {
                    (BufferKind::Always { spec, .. }, BufferKind::Always { spec: other, .. }) => spec == other,
                    (BufferKind::Cache, BufferKind::Cache) => true,
                    _ => false,
                };
                if !is_one || known.bytes != buffer.bytes.next_multiple_of(ALIGNMENT) {
                    let what = format!("{:?} is a different tensor in an earlier program", buffer.label.tensor);
                    return Err(Error::Unsound { program: program.name.clone(), what });
                }
                indices.push(index);
                continue;
            }
            let index = buffers.len();
            if is_shared {
                shared.insert(&buffer.label.tensor, (index, &buffer.kind));
            }
            // Whole cache lines, so that neighbours never share one between threads.
            // What is counted while the step runs takes nothing of the plan; its lifetime is known all the same.
            let bytes = if buffer.counted.is_some() { 0 } else { buffer.bytes.next_multiple_of(ALIGNMENT) };
            buffers.push(Buffer::new(lifetime, bytes).aligned(ALIGNMENT));
            labels.push(&buffer.label);
            indices.push(index);
        }
        of.push(indices);
    }
    Ok(Lifetimes { problem: Problem::new(buffers)?, labels, of, spans })
}

/// From the start of the first program that names each cache to the end of the last: the programs run in any order between, and any
/// number of times.
fn cache_lifetimes<'p>(programs: &[&'p Program], spans: &[Range<u64>]) -> HashMap<&'p str, Range<u64>> {
    let mut lifetimes: HashMap<&str, Range<u64>> = HashMap::new();
    for (program, span) in programs.iter().zip(spans) {
        for buffer in program.buffers.iter().filter(|buffer| matches!(buffer.kind, BufferKind::Cache)) {
            lifetimes.entry(&buffer.label.tensor).or_insert(span.clone()).end = span.end;
        }
    }
    lifetimes
}

/// First to last use of every buffer by the steps of a program; backwards where there is none.
fn uses(program: &Program, span: &Range<u64>) -> Vec<Range<u64>> {
    let mut uses = vec![span.end..span.start; program.buffers.len()];
    for (index, instr) in program.instrs.iter().enumerate() {
        let read = tick_of(span.start, index);
        let written = read + 1;
        let inputs = instr.inputs.iter().map(|o| (o.buffer, read));
        let outputs = instr.outputs.iter().map(|o| (o.buffer, written));
        for (buffer, from) in inputs.chain(outputs).chain(instr.workspace.iter().map(|&piece| (piece, read))) {
            let range = &mut uses[buffer.index()];
            *range = range.start.min(from)..range.end.max(written + 1);
        }
    }
    uses
}
