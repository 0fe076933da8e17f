//! Moves what happens once per step forward, to where it lets go of memory sooner.
//!
//! In: a program whose update stands behind all actions. Out: the same program, with those operations of the update that hold
//! fewer bytes after them than before right behind the last instruction that they depend on: sums of a weight's gradients, and
//! the update of a parameter whose gradient is complete, where nothing else is waited for (gradient release, as in LOMO, Lv et
//! al., arXiv 2306.09782). Every instruction keeps its place among those that touch the same bytes, so no result changes.
//! Never: a message or a collective, whose order ranks rely on.

use super::{Context, UPDATE};
use crate::error::Result;
use crate::program::{Held, Program, Step, Work};

/// Bytes that may be held longer without a thought: scalars.
const SMALL: u64 = 4096;

/// Who touches a buffer last, by the anchor of the instruction.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    written: Option<usize>,
    touched: Option<usize>,
}

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let Some(update) = program.parts.iter().rev().find(|part| part.name == UPDATE).map(|part| part.steps.clone())
    else {
        return Ok(());
    };
    let mut last_use = vec![0; program.buffers.len()];
    let mut first_use = vec![usize::MAX; program.buffers.len()];
    for (index, step) in program.steps.iter().enumerate() {
        for buffer in buffers(step) {
            last_use[buffer] = index;
            first_use[buffer] = first_use[buffer].min(index);
        }
    }
    let mut touched = vec![Touched::default(); program.buffers.len()];
    // Behind which instruction each one stands: itself, if it stays.
    let mut anchors: Vec<usize> = (0..program.steps.len()).collect();
    for (index, step) in program.steps.iter().enumerate() {
        if update.contains(&index) && matches!(step.work, Work::Compute(_)) {
            let size = |&buffer: &usize| program.buffers[buffer].bytes;
            let is_free = |&buffer: &usize| matches!(program.buffers[buffer].held, Held::No);
            let is_always = |&buffer: &usize| matches!(program.buffers[buffer].held, Held::Always { .. });
            let made = outputs(step).filter(|&buffer| first_use[buffer] == index && !is_always(&buffer));
            // Scratch counts, for it moves to where more may be alive.
            let scratch: u64 = step.workspace.iter().map(|buffer| size(&buffer.index())).sum();
            let made: u64 = scratch + made.map(|buffer| size(&buffer)).sum::<u64>();
            let mut freed: Vec<usize> = inputs(step).filter(|&b| last_use[b] == index).filter(is_free).collect();
            freed.sort_unstable();
            freed.dedup();
            if made <= SMALL || made <= freed.iter().map(size).sum() {
                let read = inputs(step).filter_map(|buffer| touched[buffer].written);
                let written = outputs(step).filter_map(|buffer| touched[buffer].touched);
                anchors[index] = read.chain(written).max().unwrap_or(index);
            }
        }
        let anchor = anchors[index];
        for buffer in inputs(step) {
            touched[buffer].touched = touched[buffer].touched.max(Some(anchor));
            // What a message or a collective was given is its own until somebody has waited for it.
            if !matches!(step.work, Work::Compute(_)) {
                touched[buffer].written = touched[buffer].written.max(Some(anchor));
            }
        }
        for buffer in outputs(step) {
            touched[buffer].touched = touched[buffer].touched.max(Some(anchor));
            touched[buffer].written = touched[buffer].written.max(Some(anchor));
        }
    }
    // Every instruction behind its anchor; those of one anchor stay in their order.
    let mut order: Vec<usize> = (0..anchors.len()).collect();
    order.sort_by_key(|&index| (anchors[index], index));
    program.rearrange(&order);
    Ok(())
}

fn inputs(step: &Step) -> impl Iterator<Item = usize> + '_ {
    step.inputs.iter().map(|operand| operand.buffer.index())
}

fn outputs(step: &Step) -> impl Iterator<Item = usize> + '_ {
    step.outputs.iter().map(|operand| operand.buffer.index())
}

fn buffers(step: &Step) -> impl Iterator<Item = usize> + '_ {
    inputs(step).chain(outputs(step))
}
