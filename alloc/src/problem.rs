//! What is to be planned: buffers with sizes and lifetimes.
//!
//! In: buffers as the caller has them. Out: a [`Problem`] in which every buffer is sound. Never: a decision about offsets.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::Error;

/// Half-open range of ticks `[start, end)` during which a buffer's bytes must not be touched by another.
pub type Lifetime = Range<u64>;

/// Index of a buffer in its [`Problem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl BufferId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One rectangle of bytes × time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Ticks during which the buffer is alive.
    pub lifetime: Lifetime,
    /// Size in bytes; zero is allowed and takes no space.
    pub bytes: u64,
    /// The offset is a multiple of this; at least 1.
    pub alignment: u64,
    /// An offset that the planner must keep, if any.
    pub offset: Option<u64>,
}

impl Buffer {
    /// A buffer that may go anywhere.
    pub fn new(lifetime: Lifetime, bytes: u64) -> Self {
        Self { lifetime, bytes, alignment: 1, offset: None }
    }

    /// The same buffer at multiples of `alignment` only.
    pub fn aligned(self, alignment: u64) -> Self {
        Self { alignment, ..self }
    }

    /// The same buffer, pinned to `offset`.
    pub fn at(self, offset: u64) -> Self {
        Self { offset: Some(offset), ..self }
    }
}

/// Buffers that lie one after another, each starting where the one before ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// In address order.
    pub members: Vec<BufferId>,
    /// From the first birth to the last death among the members. The planner keeps the whole group's bytes this long.
    pub lifetime: Lifetime,
    /// The members' sizes together.
    pub bytes: u64,
    /// The least common multiple of the members' alignments.
    pub alignment: u64,
    /// Where the group must start, if a member is pinned.
    pub offset: Option<u64>,
}

/// A checked table of buffers. Nothing unsound exists in it: lifetimes are not empty, alignments are positive, pinned
/// buffers are aligned, and the live bytes at every tick fit in a `u64`.
#[derive(Debug, Clone, Default)]
pub struct Problem {
    buffers: Vec<Buffer>,
    groups: Vec<Group>,
    forbidden: Vec<Range<u64>>,
}

impl Problem {
    /// Checks the buffers and takes them over.
    ///
    /// # Errors
    /// The first buffer that has an empty lifetime, a zero alignment or a misaligned or overflowing pinned offset;
    /// [`Error::PinsOverlap`] when two are pinned onto each other; [`Error::TooLarge`] when the live bytes exceed `u64`.
    pub fn new(buffers: Vec<Buffer>) -> Result<Self, Error> {
        if u32::try_from(buffers.len()).is_err() {
            return Err(Error::TooManyBuffers { buffers: buffers.len() });
        }
        for (index, b) in buffers.iter().enumerate() {
            if b.lifetime.start >= b.lifetime.end {
                return Err(Error::EmptyLifetime { buffer: index, start: b.lifetime.start, end: b.lifetime.end });
            }
            if b.alignment == 0 {
                return Err(Error::ZeroAlignment { buffer: index });
            }
            if let Some(offset) = b.offset {
                if offset % b.alignment != 0 {
                    return Err(Error::Misaligned { buffer: index, offset, alignment: b.alignment });
                }
                if offset.checked_add(b.bytes).is_none() {
                    return Err(Error::TooLarge { bytes: u128::from(offset) + u128::from(b.bytes) });
                }
            }
        }
        let problem = Self { buffers, groups: Vec::new(), forbidden: Vec::new() };
        let bytes = crate::bound::max_live(&problem);
        if bytes > u128::from(u64::MAX) {
            return Err(Error::TooLarge { bytes });
        }
        if let Some((first, second)) = overlapping_pins(&problem) {
            return Err(Error::PinsOverlap { first: first.index(), second: second.index() });
        }
        Ok(problem)
    }

    /// The same problem with `members` one after another in address order, each starting where the one before ends.
    ///
    /// # Errors
    /// [`Error::Group`] when a member does not exist or already belongs to a group, when the members' sizes put one off
    /// its alignment, or when two of them are pinned at places that contradict each other.
    pub fn contiguous(mut self, members: Vec<BufferId>) -> Result<Self, Error> {
        let group = self.groups.len();
        let fail = |buffer: BufferId, what| Err(Error::Group { group, buffer: buffer.index(), what });
        let mut seen: HashSet<BufferId> = self.groups.iter().flat_map(|g| &g.members).copied().collect();
        let Some(&first) = members.first() else { return Ok(self) };
        let mut lifetime = self.buffers.get(first.index()).map_or(0..1, |b| b.lifetime.clone());
        let (mut bytes, mut alignment, mut offset) = (0u64, 1u64, None);
        for &id in &members {
            let Some(b) = self.buffers.get(id.index()) else { return fail(id, "does not exist") };
            if !seen.insert(id) {
                return fail(id, "stands twice in groups");
            }
            if bytes % b.alignment != 0 {
                return fail(id, "is put off its alignment by the sizes of the members before it");
            }
            if let Some(pinned) = b.offset {
                let Some(start) = pinned.checked_sub(bytes) else {
                    return fail(id, "is pinned too low for the members before it");
                };
                if offset.is_some_and(|o| o != start) {
                    return fail(id, "is pinned at a place that contradicts another member's");
                }
                offset = Some(start);
            }
            let Some(common) = least_common_multiple(alignment, b.alignment) else {
                return fail(id, "has an alignment that no address meets together with the members before it");
            };
            alignment = common;
            let Some(end) = bytes.checked_add(b.bytes) else {
                return fail(id, "makes the group longer than the address space");
            };
            bytes = end;
            lifetime = lifetime.start.min(b.lifetime.start)..lifetime.end.max(b.lifetime.end);
        }
        if offset.is_some_and(|o| o % alignment != 0 || o.checked_add(bytes).is_none()) {
            return fail(first, "is put off its alignment or the address space by another member's pin");
        }
        self.groups.push(Group { members, lifetime, bytes, alignment, offset });
        Ok(self)
    }

    /// The same problem with a range of addresses that no buffer may touch.
    ///
    /// # Errors
    /// [`Error::PinnedOnForbidden`] when a buffer is pinned there.
    pub fn forbid(mut self, range: Range<u64>) -> Result<Self, Error> {
        let meets = |b: &Buffer, at: u64| b.bytes > 0 && at < range.end && range.start < at + b.bytes;
        if let Some(buffer) = self.buffers.iter().position(|b| b.offset.is_some_and(|at| meets(b, at))) {
            return Err(Error::PinnedOnForbidden { buffer, start: range.start, end: range.end });
        }
        if range.start < range.end {
            self.forbidden.push(range);
            self.forbidden.sort_unstable_by_key(|r| r.start);
            self.forbidden.dedup_by(|next, kept| {
                let touches = next.start <= kept.end;
                if touches {
                    kept.end = kept.end.max(next.end);
                }
                touches
            });
        }
        Ok(self)
    }

    /// The same constraints on other buffers; `None` when they contradict each other.
    pub(crate) fn with_buffers(&self, buffers: Vec<Buffer>) -> Option<Self> {
        let mut problem = Self::new(buffers).ok()?;
        for range in &self.forbidden {
            problem = problem.forbid(range.clone()).ok()?;
        }
        self.groups.iter().try_fold(problem, |problem, group| problem.contiguous(group.members.clone()).ok())
    }

    /// The contiguous groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The ranges that no buffer may touch: sorted, disjoint, not empty.
    pub fn forbidden(&self) -> &[Range<u64>] {
        &self.forbidden
    }

    /// The buffers, indexed by [`BufferId`].
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// One buffer.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }

    /// All ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = BufferId> + use<> {
        (0..self.buffers.len() as u32).map(BufferId)
    }

    /// Number of buffers.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether there is nothing to plan.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// One past the last tick at which anything is alive; 0 when empty.
    pub fn end(&self) -> u64 {
        self.buffers.iter().map(|b| b.lifetime.end).max().unwrap_or(0)
    }
}

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

/// Two buffers pinned onto each other, if there are any.
fn overlapping_pins(problem: &Problem) -> Option<(BufferId, BufferId)> {
    let mut events: Vec<(u64, bool, u64, BufferId)> = Vec::new();
    for id in problem.ids() {
        let b = problem.buffer(id);
        if let Some(at) = b.offset.filter(|_| b.bytes > 0) {
            events.push((b.lifetime.start, true, at, id));
            events.push((b.lifetime.end, false, at, id));
        }
    }
    events.sort_unstable();
    let mut live = BTreeMap::new();
    for (_, is_birth, at, id) in events {
        if !is_birth {
            live.remove(&at);
            continue;
        }
        let below =
            live.range(..=at).next_back().filter(|&(&other_at, &other)| other_at + problem.buffer(other).bytes > at);
        let above = live.range(at..).next().filter(|&(&other_at, _)| other_at < at + problem.buffer(id).bytes);
        if let Some((_, &other)) = below.or(above) {
            return Some((other, id));
        }
        live.insert(at, id);
    }
    None
}
