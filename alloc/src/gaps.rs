//! Gaps in lifetimes: ticks at which a buffer keeps its address, but needs only a part of its bytes, or none.
//!
//! In: a problem and the gaps of its buffers. Out: [`Pieces`], a problem in which each stretch of a lifetime between
//! gaps is a buffer of its own, and all pieces of a buffer lie [together](Problem::together). So other buffers can use
//! the bytes that a gap leaves.

use std::fmt;
use std::ops::Range;

use crate::{Arrangement, Buffer, BufferId, Error, Lifetime, Problem};

/// Ticks during which a buffer keeps its address but not its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The buffer.
    pub buffer: BufferId,
    /// The ticks, inside the buffer's lifetime.
    pub ticks: Lifetime,
    /// The bytes that the buffer needs even during the gap, counted from its offset; `None` if it needs none.
    pub window: Option<Range<u64>>,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ticks.start, self.ticks.end)?;
        self.window.as_ref().map_or(Ok(()), |window| write!(f, "@{}:{}", window.start, window.end))
    }
}

/// A problem in which buffers with gaps are replaced by their pieces.
#[derive(Debug, Clone)]
pub struct Pieces {
    /// The buffers with their ids, followed by the pieces of those that have gaps. A buffer with gaps has no bytes of
    /// its own here, and its offset is the one of the group that it forms with its pieces.
    pub problem: Problem,
    /// Buffer of each piece, and the number of bytes from that buffer's offset to the piece.
    pieces: Vec<(BufferId, u64)>,
    /// Number of buffers without the pieces.
    buffers: usize,
}

impl Pieces {
    /// Splits the buffers of `problem` at their gaps, which must be ordered by buffer and time.
    ///
    /// # Errors
    /// Returns [`Error::Gap`] if
    ///
    /// - a buffer does not exist or the gaps are not in order;
    /// - a gap is empty, lies outside its buffer's lifetime or keeps bytes beyond the buffer's;
    /// - the buffer is to be kept apart from another, or belongs to a group whose order the planner chooses.
    ///
    /// Returns the errors of [`Problem::new`] and [`Problem::together`] if pinned buffers share bytes that both need.
    pub fn new(problem: &Problem, gaps: &[Gap]) -> Result<Self, Error> {
        let mut buffers = problem.buffers().to_vec();
        let (mut pieces, mut split) = (Vec::new(), vec![Vec::new(); problem.len()]);
        let fail = |buffer: BufferId, what| Err(Error::Gap { buffer: buffer.index(), what });
        for gaps in gaps.chunk_by(|a, b| a.buffer == b.buffer) {
            let id = gaps[0].buffer;
            let Some(b) = problem.buffers().get(id.index()) else { return fail(id, "does not exist") };
            if !split[id.index()].is_empty() {
                return fail(id, "has gaps that are not in order");
            }
            if problem.pairs_apart().iter().any(|pair| pair.0 == id || pair.1 == id) {
                return fail(id, "has gaps, so it cannot be kept apart from another buffer");
            }
            let mut from = b.lifetime.start;
            let mut push = |ticks: Lifetime, bytes: Range<u64>| {
                if !ticks.is_empty() && !bytes.is_empty() {
                    split[id.index()].push((BufferId(buffers.len() as u32), bytes.start));
                    pieces.push((id, bytes.start));
                    let offset = b.offset.map(|at| at + bytes.start);
                    buffers.push(Buffer { offset, ..Buffer::new(ticks, bytes.end - bytes.start) });
                }
            };
            for gap in gaps {
                if gap.ticks.is_empty() || gap.ticks.start < from || gap.ticks.end > b.lifetime.end {
                    return fail(id, "has a gap that is empty, out of order or outside its lifetime");
                }
                let window = gap.window.clone().unwrap_or(0..0);
                if window.start > window.end || window.end > b.bytes {
                    return fail(id, "has a gap that keeps bytes beyond its own");
                }
                push(from..gap.ticks.start, 0..b.bytes);
                push(gap.ticks.clone(), window);
                from = gap.ticks.end;
            }
            push(from..b.lifetime.end, 0..b.bytes);
            // The buffer itself keeps only its pin and its alignment.
            split[id.index()].push((id, 0));
        }
        for (b, _) in buffers.iter_mut().zip(&split).filter(|(_, split)| !split.is_empty()) {
            b.bytes = 0;
        }
        let with_pieces = |members: &mut dyn Iterator<Item = (BufferId, u64)>| -> Vec<(BufferId, u64)> {
            let all = members.flat_map(|(id, distance)| match &split[id.index()][..] {
                [] => vec![(id, distance)],
                pieces => pieces.iter().map(|&(piece, more)| (piece, distance + more)).collect(),
            });
            all.collect()
        };
        let mut whole = problem.without_groups(buffers)?;
        let mut grouped = vec![false; problem.len()];
        for group in problem.groups() {
            group.members.iter().for_each(|id| grouped[id.index()] = true);
            let gap = group.members.iter().find(|id| !split[id.index()].is_empty());
            whole = match (group.arrangement, gap) {
                (Arrangement::AnyOrder, Some(&id)) => {
                    return fail(id, "has gaps, so the order of its group must be given");
                }
                (Arrangement::AnyOrder, None) => whole.adjacent(group.members.clone())?,
                (Arrangement::Stacked, None) => whole.contiguous(group.members.clone())?,
                (Arrangement::Given, _) | (_, Some(_)) => {
                    let members = group.members.iter().copied().zip(group.distances.iter().copied());
                    whole.together(with_pieces(&mut { members }))?
                }
            };
        }
        for id in problem.ids().filter(|id| !grouped[id.index()] && !split[id.index()].is_empty()) {
            whole = whole.together(split[id.index()].clone())?;
        }
        for &(first, second) in problem.pairs_apart() {
            whole = whole.apart(first, second)?;
        }
        Ok(Self { problem: whole, pieces, buffers: problem.len() })
    }

    /// Returns the same pieces with every buffer pinned that has an offset.
    ///
    /// # Errors
    /// Returns the errors of [`Problem::new`] and [`Problem::together`]; [`origin`](Self::origin) returns the buffer of
    /// the piece that an error names.
    pub fn pinned(&self, offsets: &[Option<u64>]) -> Result<Self, Error> {
        let offsets = self.spread(offsets, |at, distance| at.map(|at| at.saturating_add(distance)));
        let pin = |(b, offset): (&Buffer, Option<u64>)| Buffer { offset, ..b.clone() };
        let buffers = self.problem.buffers().iter().zip(offsets).map(pin).collect();
        Ok(Self { problem: self.problem.with_buffers(buffers)?, ..self.clone() })
    }

    /// Returns the offsets of the buffers in a plan of [`problem`](Self::problem).
    pub fn offsets<'o>(&self, plan: &'o [u64]) -> &'o [u64] {
        &plan[..self.buffers.min(plan.len())]
    }

    /// Returns one value per buffer and piece, from one value per buffer. `of_piece` makes the value of a piece from the
    /// value of its buffer and the bytes from the buffer's offset to the piece.
    pub fn spread<T: Clone>(&self, values: &[T], of_piece: impl Fn(&T, u64) -> T) -> Vec<T> {
        let pieces = self.pieces.iter().map(|(id, distance)| of_piece(&values[id.index()], *distance));
        values.iter().cloned().chain(pieces).collect()
    }

    /// Returns the buffer of which `id` is a piece, or `id` itself.
    pub fn origin(&self, id: BufferId) -> BufferId {
        id.index().checked_sub(self.buffers).map_or(id, |piece| self.pieces[piece].0)
    }
}
