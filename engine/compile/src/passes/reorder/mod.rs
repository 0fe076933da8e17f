//! Reorders instructions to lower the peak of live bytes.
//!
//! - In: a program.
//! - Out: the same program, with a lower or equal peak.
//! - Never: moves an instruction across a message, a collective, a copy out of the arena, or from one action into
//!   another.
//!
//! The pass takes a window of up to [`WINDOW`] neighbouring instructions around the peak. Among all orders of the
//! window that respect data dependencies, it searches for the order with the lowest peak. It repeats this until the
//! peak of the program cannot be lowered any more. (OLLA, Steiner et al., arXiv 2210.12924, and ROAM, Shu et al., arXiv
//! 2310.19295, give whole graphs to a solver instead.)
//!
//! Two instructions keep their order if they touch the same bytes and one of them writes these bytes. So neither the
//! results nor the order in which gradients are summed change.

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

/// Lowers the peak of live bytes of a program.
fn order(program: &mut Program) {
    let mut profile = Profile::new(program);
    // The best order of each solved window. Layers and micro-batches repeat, so many windows are equal.
    let mut known: HashMap<Window, Option<Vec<usize>>> = HashMap::new();
    // Positions ordered by live bytes. Entries whose live bytes have changed since they were added are skipped.
    let places = profile.live.iter().enumerate().map(|(at, &live)| (live, Reverse(at)));
    let mut highest: BinaryHeap<(u64, Reverse<usize>)> = places.collect();
    // At most as many windows are solved as there are instructions.
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

/// An access of an instruction to a resource: a buffer, or a row count.
#[derive(Debug, Clone, Copy)]
struct Touch {
    resource: usize,
    writes: bool,
}

/// The live bytes at every position of an order, and the data from which they are computed.
pub(crate) struct Profile {
    /// The instruction at each position.
    order: Vec<usize>,
    /// By instruction: its accesses.
    touches: Vec<Vec<Touch>>,
    /// By instruction: its scratch bytes.
    workspace: Vec<u64>,
    /// By resource: its size.
    pub bytes: Vec<u64>,
    /// By resource: the position of its first use. `None` if it is live before the program starts.
    pub born: Vec<Option<usize>>,
    /// By resource: the position of its last use. `None` if it is live after the program ends.
    pub dies: Vec<Option<usize>>,
    /// By position: live bytes.
    pub live: Vec<u64>,
    /// Ranges of positions, in order, within which instructions may move.
    pub segments: Vec<Range<usize>>,
}

impl Profile {
    pub fn new(program: &Program) -> Self {
        let instrs = program.instrs.len();
        let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
        let buffers = program.buffers.iter();
        let mut bytes: Vec<u64> =
            buffers.map(|b| if b.dynamic_rows.is_some() { 0 } else { aligned(b.bytes) }).collect();
        bytes.resize(bytes.len() + program.row_counts, 0);
        let touches: Vec<Vec<Touch>> = program.instrs.iter().map(|instr| touches(program, instr)).collect();
        let (mut born, mut dies) = (vec![None; bytes.len()], vec![None; bytes.len()]);
        for (at, touch) in
            touches.iter().enumerate().flat_map(|(at, touched)| touched.iter().map(move |touch| (at, touch)))
        {
            born[touch.resource] = born[touch.resource].or(Some(at));
            dies[touch.resource] = Some(at);
        }
        let mut change = vec![0i128; instrs + 1];
        for (resource, buffer) in program.buffers.iter().enumerate() {
            // A buffer that only the host touches is live in every order.
            let (Some(first), Some(last)) = (born[resource], dies[resource]) else { continue };
            let before = matches!(buffer.kind, BufferKind::Input | BufferKind::Persistent { .. } | BufferKind::Cache);
            let after = matches!(buffer.kind, BufferKind::Output | BufferKind::Persistent { .. } | BufferKind::Cache);
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

    /// Returns candidate windows around a position: one centred on the position, one that is mostly after the position,
    /// and one that is mostly before.
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

    /// Returns the window at these positions, and the bytes that are live at all of these positions in every order of
    /// the window.
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

    /// Applies a new order to the window at these positions.
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

/// Returns the accesses of an instruction. Row counts are resources too: the instruction that defines a row count must
/// stay before the instructions that use buffers sized by that count.
fn touches(program: &Program, instr: &Instr) -> Vec<Touch> {
    let mut touches: Vec<Touch> = Vec::new();
    let mut touch = |resource: usize, writes: bool| match touches.iter_mut().find(|known| known.resource == resource) {
        Some(known) => known.writes |= writes,
        None => touches.push(Touch { resource, writes }),
    };
    let operands = instr.inputs.iter().map(|operand| (operand, false));
    for (operand, writes) in operands.chain(instr.outputs.iter().map(|operand| (operand, true))) {
        touch(operand.buffer.index(), writes);
        if let Some(counted) = program.buffers[operand.buffer.index()].dynamic_rows {
            touch(program.buffers.len() + counted.count as usize, false);
        }
    }
    if let Some(count) = instr.defines_count {
        touch(program.buffers.len() + count as usize, true);
    }
    touches
}

/// Returns the ranges within which instructions may move. Each range consists of consecutive computations of one
/// action, or of the update. A range of an action includes operations of the update that were moved into the action.
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
            // The recomputation of evicted rows must stay before the first reader of the rows. The reader frees the
            // memory of the rows, which an instruction that may be skipped could not do.
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
