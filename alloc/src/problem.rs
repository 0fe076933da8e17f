//! The input of the planner: buffers with sizes and lifetimes.
//!
//! In: buffers as the caller has them. Out: a [`Problem`] in which every buffer is sound. Never: a decision about offsets.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::Error;
use crate::order::sort_by_key;

/// Half-open range of ticks `[start, end)` during which no other buffer may touch a buffer's bytes.
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

/// Buffers that lie one after another, each starting where the one before ends. Each buffer holds its bytes during its
/// own lifetime only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The members in address order. If the planner chooses the order, this is one order that alignments and pins
    /// allow.
    pub members: Vec<BufferId>,
    /// Whether the planner chooses the order.
    pub any_order: bool,
    /// Ticks from the first birth to the last death among the members.
    pub lifetime: Lifetime,
    /// The members' sizes together.
    pub bytes: u64,
    /// The least common multiple of the members' alignments.
    pub alignment: u64,
    /// Offset of the group if a member is pinned; `None` if the group may go anywhere.
    pub offset: Option<u64>,
}

/// A checked table of buffers: lifetimes are not empty, alignments are positive, pinned buffers are aligned, and the
/// live bytes at every tick fit in a `u64`.
#[derive(Debug, Clone, Default)]
pub struct Problem {
    buffers: Vec<Buffer>,
    groups: Vec<Group>,
    forbidden: Vec<Range<u64>>,
}

impl Problem {
    /// Creates a problem after checking its buffers.
    ///
    /// # Errors
    /// Returns
    ///
    /// - [`Error::TooManyBuffers`] if a `u32` cannot count the buffers;
    /// - the error of the first buffer that has an empty lifetime, a zero alignment, or a misaligned or overflowing
    ///   pinned offset;
    /// - [`Error::PinsOverlap`] if two pinned buffers overlap;
    /// - [`Error::TooLarge`] with the tick at which the live bytes exceed `u64`;
    /// - [`Error::AlignmentsTooLarge`] if the live bytes, together with the largest gaps that alignments may cause,
    ///   exceed `u64`.
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
                    return Err(Error::OutOfAddressSpace { buffer: index, offset, bytes: b.bytes });
                }
            }
        }
        let problem = Self { buffers, groups: Vec::new(), forbidden: Vec::new() };
        let most = crate::bound::most_live(&problem);
        if let Some((tick, bytes)) = most.filter(|&(_, bytes)| bytes > u128::from(u64::MAX)) {
            return Err(Error::TooLarge { bytes, tick });
        }
        // The live bytes plus all gaps that alignments may cause fit in the address space. So no sum in the planner
        // overflows.
        let gaps =
            problem.buffers.iter().filter(|b| b.offset.is_none()).map(|b| u128::from(b.alignment - 1)).sum::<u128>();
        if most.map_or(0, |(_, bytes)| bytes) + gaps > u128::from(u64::MAX) {
            let coarsest = (0..problem.len()).max_by_key(|&index| problem.buffers[index].alignment).unwrap_or(0);
            let alignment = problem.buffers[coarsest].alignment;
            return Err(Error::AlignmentsTooLarge { buffer: coarsest, alignment });
        }
        if let Some((first, second)) = overlapping_pins(&problem) {
            return Err(Error::PinsOverlap { first: first.index(), second: second.index() });
        }
        Ok(problem)
    }

    /// The same problem with `members` one after another in address order, each starting where the one before ends.
    ///
    /// # Errors Returns [`Error::Group`] if a member does not exist or already belongs to a group, if the sizes before
    /// a member violate the member's alignment, or if the pins of two members contradict each other.
    pub fn contiguous(self, members: Vec<BufferId>) -> Result<Self, Error> {
        self.grouped(members, false)
    }

    /// The same problem with `members` one after another in an order that the planner chooses.
    ///
    /// # Errors
    /// Returns [`Error::Group`] if a member does not exist or already belongs to a group, or if no order was found that
    /// suits the members' alignments and pins.
    pub fn adjacent(self, members: Vec<BufferId>) -> Result<Self, Error> {
        self.grouped(members, true)
    }

    fn grouped(mut self, members: Vec<BufferId>, any_order: bool) -> Result<Self, Error> {
        let group = self.groups.len();
        let mut seen: HashSet<BufferId> = self.groups.iter().flat_map(|g| &g.members).copied().collect();
        for id in &members {
            let fail = |what| Err(Error::Group { group, buffer: id.index(), what });
            if id.index() >= self.len() {
                return fail("does not exist");
            }
            if !seen.insert(*id) {
                return fail("appears twice in groups");
            }
        }
        if members.is_empty() {
            return Ok(self);
        }
        let stacked = match any_order {
            true => stack_in_any_order(&self.buffers, &members),
            false => Group::stack(&self.buffers, members),
        };
        let stacked = stacked.map_err(|(id, what)| Error::Group { group, buffer: id.index(), what })?;
        self.groups.push(Group { any_order, ..stacked });
        Ok(self)
    }

    /// The same problem with a range of addresses that no buffer may touch.
    ///
    /// # Errors
    /// Returns [`Error::PinnedOnForbidden`] if a pinned buffer lies in the range, wholly or in part.
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

    /// Returns a problem with the same groups and forbidden ranges but other buffers. Returns `None` if the buffers
    /// contradict the groups or ranges, or are not sound.
    pub(crate) fn with_buffers(&self, buffers: Vec<Buffer>) -> Option<Self> {
        let mut problem = Self::new(buffers).ok()?;
        for range in &self.forbidden {
            problem = problem.forbid(range.clone()).ok()?;
        }
        self.groups
            .iter()
            .try_fold(problem, |problem, group| problem.grouped(group.members.clone(), group.any_order).ok())
    }

    /// The same buffers and ranges with only those groups for which `keep` is true.
    pub(crate) fn with_groups(&self, keep: impl Fn(&Group) -> bool) -> Self {
        let groups = self.groups.iter().filter(|group| keep(group)).cloned().collect();
        Self { buffers: self.buffers.clone(), groups, forbidden: self.forbidden.clone() }
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

/// A member that cannot follow the members before it, and the reason.
type Misfit = (BufferId, &'static str);

impl Group {
    /// Stacks `members` one after another in this order.
    pub(crate) fn stack(buffers: &[Buffer], members: Vec<BufferId>) -> Result<Self, Misfit> {
        let lifetime = members.first().map_or(0..1, |id| buffers[id.index()].lifetime.clone());
        let empty = Self { members: Vec::new(), any_order: false, lifetime, bytes: 0, alignment: 1, offset: None };
        let group = members.iter().try_fold(empty, |group, &id| group.followed_by(buffers, id))?;
        let ends = |at: u64| at.checked_add(group.bytes).is_some();
        match (group.offset, group.members.first()) {
            (Some(at), Some(&first)) if at % group.alignment != 0 || !ends(at) => {
                Err((first, "misses its alignment or leaves the address space because of another member's pin"))
            }
            _ => Ok(group),
        }
    }

    /// The group with one more member at the end.
    fn followed_by(mut self, buffers: &[Buffer], id: BufferId) -> Result<Self, Misfit> {
        let b = &buffers[id.index()];
        if !self.bytes.is_multiple_of(b.alignment) {
            return Err((id, "misses its alignment because of the sizes of the members before it"));
        }
        if let Some(pinned) = b.offset {
            let start = pinned
                .checked_sub(self.bytes)
                .ok_or((id, "is pinned too low: the members before it do not fit below"))?;
            if self.offset.is_some_and(|at| at != start) {
                return Err((id, "has a pinned offset that contradicts another member's"));
            }
            self.offset = Some(start);
        }
        self.alignment = least_common_multiple(self.alignment, b.alignment)
            .ok_or((id, "has an alignment that no address meets along with those of the members before it"))?;
        self.bytes = self.bytes.checked_add(b.bytes).ok_or((id, "makes the group larger than the address space"))?;
        self.lifetime = self.lifetime.start.min(b.lifetime.start)..self.lifetime.end.max(b.lifetime.end);
        self.members.push(id);
        Ok(self)
    }

    /// True if the members have different lifetimes.
    pub(crate) fn is_ragged(&self, buffers: &[Buffer]) -> bool {
        self.members.iter().any(|id| buffers[id.index()].lifetime != self.lifetime)
    }
}

/// Stacks the members in an order that alignments and pins allow. The search tries the most aligned member first, then
/// goes depth-first for at most [`ORDERS_TRIED`] steps. Returns the misfit if no order was found.
fn stack_in_any_order(buffers: &[Buffer], members: &[BufferId]) -> Result<Group, Misfit> {
    fn deepen(buffers: &[Buffer], left: &[BufferId], group: &Group, tries: &mut u32) -> Result<Group, Misfit> {
        if left.is_empty() {
            return Group::stack(buffers, group.members.clone());
        }
        let mut misfit = None;
        for (k, &id) in left.iter().enumerate() {
            if *tries == 0 {
                break;
            }
            *tries -= 1;
            let next = group.clone().followed_by(buffers, id).and_then(|group| {
                let rest = [&left[..k], &left[k + 1..]].concat();
                deepen(buffers, &rest, &group, tries)
            });
            match next {
                Ok(group) => return Ok(group),
                Err(error) => misfit = misfit.or(Some(error)),
            }
        }
        Err(misfit.unwrap_or((left[0], "fits in none of the orders that were tried")))
    }
    let mut sorted = members.to_vec();
    sort_by_key(&mut sorted, |id| std::cmp::Reverse(buffers[id.index()].alignment));
    if let Ok(group) = Group::stack(buffers, sorted.clone()) {
        return Ok(group);
    }
    let empty = Group::stack(buffers, Vec::new())?;
    let lifetime = buffers[sorted[0].index()].lifetime.clone();
    deepen(buffers, &sorted, &Group { lifetime, ..empty }, &mut { ORDERS_TRIED })
}

/// Steps that the search for an order may take.
const ORDERS_TRIED: u32 = 10_000;

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

/// Returns two pinned buffers that overlap, or `None` if there are none.
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
