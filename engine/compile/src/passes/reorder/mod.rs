//! Puts operations in an order in which less is alive at once.
//!
//! In: a program. Out: the same program, its most live bytes lower or as they were. Around the instruction at which most bytes
//! are alive, all orders of [`WINDOW`] neighbours that their data allow are searched for the one whose own most is least, again
//! and again until that place cannot be helped. (OLLA, Steiner et al., arXiv 2210.12924, and ROAM, Shu et al., arXiv 2310.19295,
//! give whole graphs to a solver.) Instructions keep their order where they touch the same bytes, so no result changes, nor the
//! order in which a gradient is summed. Never: over a message, a collective, a copy out of the arena, or from one action into
//! another.

mod window;

#[cfg(test)]
mod reference;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use self::window::{WINDOW, Window};
use super::Context;
use crate::error::Result;
use crate::lifetimes::ALIGNMENT;
use crate::program::{BufferKind, Instr, InstrKind, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    order(program);
    Ok(())
}

/// Lowers the most live bytes of a program.
fn order(program: &mut Program) {
    let mut profile = Profile::new(program);
    // Windows that are alike have the same best order: those of layers, and of micro-batches.
    let mut known: HashMap<Window, Option<Vec<usize>>> = HashMap::new();
    // Places by the bytes that are alive there; some are of before, and no longer true.
    let places = profile.live.iter().enumerate().map(|(at, &live)| (live, Reverse(at)));
    let mut highest: BinaryHeap<(u64, Reverse<usize>)> = places.collect();
    // At most as many windows as there are instructions.
    for _ in 0..program.instrs.len() {
        let is_true = |&(live, Reverse(at)): &(u64, Reverse<usize>)| profile.live[at] == live;
        let Some((_, Reverse(at))) = std::iter::from_fn(|| highest.pop()).find(is_true) else { break };
        let improved = profile.windows(at).into_iter().find_map(|places| {
            let (window, base) = profile.window(places.clone());
            let better = known.entry(window).or_insert_with_key(Window::solve).clone()?;
            Some((places, base, better))
        });
        let Some((places, base, better)) = improved else { break };
        profile.rearrange(places.clone(), base, &better);
        highest.extend(places.map(|at| (profile.live[at], Reverse(at))));
    }
    let order = profile.order;
    program.rearrange(&order);
}

/// What an instruction does to a resource: a buffer, or a count of rows.
#[derive(Debug, Clone, Copy)]
struct Touch {
    resource: usize,
    writes: bool,
}

/// The bytes that are alive at every place of an order, and what decides about them.
pub(crate) struct Profile {
    /// The instruction at each place.
    order: Vec<usize>,
    /// By instruction.
    touches: Vec<Vec<Touch>>,
    workspace: Vec<u64>,
    /// By resource.
    pub bytes: Vec<u64>,
    /// The places of its first and of its last use; none if something outside holds it before, or after.
    pub born: Vec<Option<usize>>,
    pub dies: Vec<Option<usize>>,
    /// By place.
    pub live: Vec<u64>,
    /// The places, one after another, within which the instruction of each may move.
    pub segments: Vec<Range<usize>>,
}

impl Profile {
    pub fn new(program: &Program) -> Self {
        let instrs = program.instrs.len();
        let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
        let buffers = program.buffers.iter();
        let mut bytes: Vec<u64> = buffers.map(|b| if b.counted.is_some() { 0 } else { aligned(b.bytes) }).collect();
        bytes.resize(bytes.len() + program.counts, 0);
        let touches: Vec<Vec<Touch>> = program.instrs.iter().map(|instr| touches(program, instr)).collect();
        let (mut born, mut dies) = (vec![None; bytes.len()], vec![None; bytes.len()]);
        for (at, touch) in touches.iter().enumerate().flat_map(|(at, of)| of.iter().map(move |touch| (at, touch))) {
            born[touch.resource] = born[touch.resource].or(Some(at));
            dies[touch.resource] = Some(at);
        }
        let mut change = vec![0i128; instrs + 1];
        for (resource, buffer) in program.buffers.iter().enumerate() {
            // What nothing touches but the host is there in any order.
            let (Some(first), Some(last)) = (born[resource], dies[resource]) else { continue };
            let before = matches!(buffer.kind, BufferKind::FromStart | BufferKind::Always { .. } | BufferKind::Cache);
            let after = matches!(buffer.kind, BufferKind::ToEnd | BufferKind::Always { .. } | BufferKind::Cache);
            let first = if before { 0 } else { first };
            change[first] += i128::from(bytes[resource]);
            change[if after { instrs } else { last + 1 }] -= i128::from(bytes[resource]);
            born[resource] = born[resource].filter(|_| !before);
            dies[resource] = dies[resource].filter(|_| !after);
        }
        let scratch = |instr: &Instr| instr.workspace.iter().map(|piece| bytes[piece.index()]).sum();
        let workspace: Vec<u64> = program.instrs.iter().map(scratch).collect();
        let mut now = 0;
        let live = change.iter().zip(&workspace).map(|(change, workspace)| {
            now += change;
            now as u64 + workspace
        });
        let live = live.collect();
        Self { order: (0..instrs).collect(), touches, workspace, bytes, born, dies, live, segments: segments(program) }
    }

    /// Where to look for an order around a place: on both sides of it alike, most of it behind, and most of it in front.
    fn windows(&self, at: usize) -> Vec<Range<usize>> {
        let segment = self.segments.partition_point(|segment| segment.end <= at);
        let segment = self.segments.get(segment).filter(|segment| segment.contains(&at));
        let mut windows: Vec<Range<usize>> = Vec::new();
        for (segment, before) in
            segment.into_iter().flat_map(|s| [WINDOW / 2, WINDOW / 8, WINDOW - WINDOW / 8].map(|b| (s, b)))
        {
            let start = segment.start.max(at.saturating_sub(before));
            let window = start..segment.end.min(start + WINDOW);
            if !windows.contains(&window) {
                windows.push(window);
            }
        }
        windows
    }

    /// What may change its place, and the bytes that are alive there in any case.
    fn window(&self, places: Range<usize>) -> (Window, u64) {
        let mut window = Window::default();
        let mut local: HashMap<usize, usize> = HashMap::new();
        let is_here = |at: Option<usize>| at.is_some_and(|at| places.contains(&at));
        for &instr in &self.order[places.clone()] {
            let touches = self.touches[instr].iter().map(|touch| {
                let index = *local.entry(touch.resource).or_insert_with(|| {
                    let (born, dies) = (is_here(self.born[touch.resource]), is_here(self.dies[touch.resource]));
                    window.add(self.bytes[touch.resource], born, dies)
                });
                (index, touch.writes)
            });
            let touches = touches.collect();
            window.push(touches, self.workspace[instr]);
        }
        (window.clone(), self.live[places.start] - window.live(&[0])[0])
    }

    /// Puts the instructions of a window in another order.
    fn rearrange(&mut self, places: Range<usize>, base: u64, better: &[usize]) {
        let (window, _) = self.window(places.clone());
        let old = self.order[places.clone()].to_vec();
        for ((at, &index), live) in places.clone().zip(better).zip(window.live(better)) {
            (self.order[at], self.live[at]) = (old[index], base + live);
        }
        let is_here = |at: &Option<usize>| at.is_some_and(|at| places.contains(&at));
        for at in places.clone() {
            for touch in &self.touches[self.order[at]] {
                let dies = &mut self.dies[touch.resource];
                *dies = if is_here(dies) { Some(at) } else { *dies };
            }
        }
        for at in places.clone().rev() {
            for touch in &self.touches[self.order[at]] {
                let born = &mut self.born[touch.resource];
                *born = if is_here(born) { Some(at) } else { *born };
            }
        }
    }
}

/// Who made a count, and what goes by it, keep their order too.
fn touches(program: &Program, instr: &Instr) -> Vec<Touch> {
    let mut touches: Vec<Touch> = Vec::new();
    let mut touch = |resource: usize, writes: bool| match touches.iter_mut().find(|known| known.resource == resource) {
        Some(known) => known.writes |= writes,
        None => touches.push(Touch { resource, writes }),
    };
    let operands = instr.inputs.iter().map(|operand| (operand, false));
    for (operand, writes) in operands.chain(instr.outputs.iter().map(|operand| (operand, true))) {
        touch(operand.buffer.index(), writes);
        if let Some(counted) = program.buffers[operand.buffer.index()].counted {
            touch(program.buffers.len() + counted.count as usize, false);
        }
    }
    if let Some(count) = instr.counts {
        touch(program.buffers.len() + count as usize, true);
    }
    touches
}

/// Runs of operations of one action, with what of the update has moved in between; and runs of the update.
fn segments(program: &Program) -> Vec<Range<usize>> {
    let last_action = program.parts.iter().rposition(|part| part.action.is_some());
    let mut segments: Vec<Range<usize>> = Vec::new();
    let mut action = None;
    let mut continues = false;
    for (index, part) in program.parts.iter().enumerate() {
        let moved_in = part.action.is_none() && last_action.is_some_and(|last| index < last);
        continues &= moved_in || part.action == action;
        action = if moved_in { action } else { part.action };
        for at in part.instrs.clone() {
            // What makes rows again that were let go stays in front of whoever reads them first: their places are given back
            // behind that reader, and what is left out gives nothing back.
            let instr = &program.instrs[at];
            let moves = matches!(instr.kind, InstrKind::Compute(_)) && instr.predicate.is_none();
            match segments.last_mut().filter(|_| continues && moves) {
                Some(segment) => segment.end = at + 1,
                None => segments.extend(moves.then_some(at..at + 1)),
            }
            continues = moves;
        }
    }
    segments
}
