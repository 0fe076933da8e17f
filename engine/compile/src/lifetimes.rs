//! Computes the lifetime of every buffer in ticks.
//!
//! - In: programs that run one after another in one arena.
//! - Out: the planning problem over all of them.
//!
//! A program of n instructions has 2n + 4 ticks: two in which the host writes the inputs, two per instruction, and two
//! in which the host reads the outputs. An instruction's inputs are read at its first tick and still exist at its
//! second; its outputs are created at the second. If an output overwrites an input, both share one buffer, which needs
//! no ticks of its own.

use std::collections::HashMap;
use std::ops::Range;

use gapless_alloc::{Buffer, Label, Problem};

use crate::error::{Error, Result};
use crate::program::{BufferKind, Program};
use crate::verify::check_sizes;

/// Alignment of all arena addresses: a cache line, and an AVX-512 vector.
pub const ALIGNMENT: u64 = 64;

/// The planning problem of several programs, and the mapping of their buffers to it.
#[derive(Debug)]
pub struct Lifetimes<'p> {
    pub problem: Problem,
    pub labels: Vec<&'p Label>,
    /// `problem_index[program][buffer]` is the buffer's index in the problem.
    pub problem_index: Vec<Vec<usize>>,
    /// The range of ticks of every program.
    pub spans: Vec<Range<u64>>,
}

/// Returns the tick at which instruction `index` of a program reads its inputs. `start` is the program's first tick.
pub fn tick_of(start: u64, index: usize) -> u64 {
    start + 2 + 2 * index as u64
}

/// Returns the planning problem of one program, without names.
///
/// # Errors
/// Returns an error if the live bytes exceed `u64`.
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
    let mut problem_index = Vec::new();
    for (program, span) in programs.iter().zip(&spans) {
        let uses = uses(program, span);
        let mut indices = Vec::with_capacity(program.buffers.len());
        for (buffer, used) in program.buffers.iter().zip(uses) {
            let lifetime = match &buffer.kind {
                BufferKind::Persistent { .. } => whole.clone(),
                BufferKind::Cache => caches[buffer.label.tensor.as_str()].clone(),
                BufferKind::Input => span.start..used.end.max(span.start + 1),
                BufferKind::Output => used.start.min(span.end - 1)..span.end,
                BufferKind::Temporary => used,
            };
            let is_shared = matches!(buffer.kind, BufferKind::Persistent { .. } | BufferKind::Cache);
            if is_shared && let Some(&(index, kind)) = shared.get(buffer.label.tensor.as_str()) {
                let known: &Buffer = &buffers[index];
                let is_one = match (kind, &buffer.kind) {
                    (BufferKind::Persistent { spec, .. }, BufferKind::Persistent { spec: other, .. }) => spec == other,
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
            // Sizes are whole cache lines, so that two buffers never share a cache line that different threads write.
            // Dynamic buffers take no space in the static plan, but their lifetimes are needed.
            let bytes = if buffer.dynamic_rows.is_some() { 0 } else { buffer.bytes.next_multiple_of(ALIGNMENT) };
            buffers.push(Buffer::new(lifetime, bytes).aligned(ALIGNMENT));
            labels.push(&buffer.label);
            indices.push(index);
        }
        problem_index.push(indices);
    }
    Ok(Lifetimes { problem: Problem::new(buffers)?, labels, problem_index, spans })
}

/// Returns the lifetime of each cache. A lifetime begins with the first program that names the cache and ends with the
/// last such program, because these programs may run in any order and any number of times.
fn cache_lifetimes<'p>(programs: &[&'p Program], spans: &[Range<u64>]) -> HashMap<&'p str, Range<u64>> {
    let mut lifetimes: HashMap<&str, Range<u64>> = HashMap::new();
    for (program, span) in programs.iter().zip(spans) {
        for buffer in program.buffers.iter().filter(|buffer| matches!(buffer.kind, BufferKind::Cache)) {
            lifetimes.entry(&buffer.label.tensor).or_insert(span.clone()).end = span.end;
        }
    }
    lifetimes
}

/// Returns the range from the first to the last use of every buffer by instructions. The range of an unused buffer is
/// empty: its start is after its end.
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
