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

/// Buffers at fixed distances from each other. Each buffer holds its bytes during its own lifetime only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The members: in address order if they are stacked, else in the order given. If the planner chooses the order,
    /// this is one order that alignments and pins allow.
    pub members: Vec<BufferId>,
    /// Bytes from the group's offset to the offset of each member.
    pub distances: Vec<u64>,
    /// The rule that determines the distances.
    pub arrangement: Arrangement,
    /// Ticks from the first birth to the last death among the members.
    pub lifetime: Lifetime,
    /// Bytes from the group's offset to the highest end of a member that has bytes.
    pub bytes: u64,
    /// The least common multiple of the members' alignments.
    pub alignment: u64,
    /// The remainder of the group's offset modulo [`alignment`](Self::alignment).
    pub phase: u64,
    /// Offset of the group if a member is pinned; `None` if the group may go anywhere.
    pub offset: Option<u64>,
}

/// The source of the distances between a group's members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// Each member starts where the one before ends.
    Stacked,
    /// Each member starts where another one ends, in an order that the planner chooses.
    AnyOrder,
    /// The caller gave the distances.
    Given,
}

/// A checked table of buffers: lifetimes are not empty, alignments are positive, pinned buffers are aligned, and the
/// live bytes at every tick fit in a `u64`.
#[derive(Debug, Clone, Default)]
pub struct Problem {
    buffers: Vec<Buffer>,
    groups: Vec<Group>,
    /// The members of all groups.
    grouped: HashSet<BufferId>,
    apart: Vec<(BufferId, BufferId)>,
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
        let problem = Self { buffers, ..Self::default() };
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
        if let Some((first, second)) = overlapping_pins(&problem.buffers) {
            return Err(Error::PinsOverlap { first: first.index(), second: second.index() });
        }
        Ok(problem)
    }

    /// The same problem with `members` one after another in address order, each starting where the one before ends.
    ///
    /// # Errors
    /// Returns [`Error::Group`] if a member does not exist or already belongs to a group, or if the alignments or pins
    /// of two members contradict each other.
    pub fn contiguous(self, members: Vec<BufferId>) -> Result<Self, Error> {
        self.grouped(members, Vec::new(), Arrangement::Stacked)
    }

    /// The same problem with `members` one after another in an order that the planner chooses.
    ///
    /// # Errors
    /// Returns [`Error::Group`] if a member does not exist or already belongs to a group, or if no order was found that
    /// suits the members' alignments and pins.
    pub fn adjacent(self, members: Vec<BufferId>) -> Result<Self, Error> {
        self.grouped(members, Vec::new(), Arrangement::AnyOrder)
    }

    /// The same problem with `members` at fixed distances. Each member is given with the number of bytes from the
    /// group's offset to its own. With a distance of 0, a member starts at the group's offset: `[(a, 0), (b, 0)]` gives
    /// `b` the address of `a`.
    ///
    /// # Errors
    /// Returns [`Error::Group`] if a member does not exist or already belongs to a group, if the alignments or pins of
    /// two members contradict each other, or if two members would share bytes while both are alive.
    pub fn together(self, members: Vec<(BufferId, u64)>) -> Result<Self, Error> {
        let (members, distances) = members.into_iter().unzip();
        self.grouped(members, distances, Arrangement::Given)
    }

    /// The same problem with two buffers that never share a byte, not even if one of them dies before the other is
    /// born.
    ///
    /// # Errors
    /// Returns [`Error::Apart`] if a buffer does not exist, if both are the same, or if both are pinned and share
    /// bytes.
    pub fn apart(mut self, first: BufferId, second: BufferId) -> Result<Self, Error> {
        let fail = |what| Err(Error::Apart { first: first.index(), second: second.index(), what });
        if first.max(second).index() >= self.len() {
            return fail("do not both exist");
        }
        if first == second {
            return fail("are the same buffer");
        }
        let range = |id: BufferId| self.buffer(id).offset.map(|at| at..at + self.buffer(id).bytes);
        if let (Some(a), Some(b)) = (range(first), range(second))
            && a.start.max(b.start) < a.end.min(b.end)
        {
            return fail("are pinned onto each other");
        }
        self.apart.push((first, second));
        Ok(self)
    }

    fn grouped(mut self, members: Vec<BufferId>, distances: Vec<u64>, arrangement: Arrangement) -> Result<Self, Error> {
        let group = self.groups.len();
        for id in &members {
            let fail = |what| Err(Error::Group { group, buffer: id.index(), what });
            if id.index() >= self.len() {
                return fail("does not exist");
            }
            if !self.grouped.insert(*id) {
                return fail("appears twice in groups");
            }
        }
        if members.is_empty() {
            return Ok(self);
        }
        let arranged = match arrangement {
            Arrangement::Stacked => Group::stack(&self.buffers, members),
            Arrangement::AnyOrder => stack_in_any_order(&self.buffers, &members),
            Arrangement::Given => Group::at_distances(&self.buffers, members, distances),
        };
        let arranged = arranged.map_err(|(id, what)| Error::Group { group, buffer: id.index(), what })?;
        self.groups.push(Group { arrangement, ..arranged });
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

    /// Returns a problem with the same groups, pairs and forbidden ranges but other buffers.
    ///
    /// # Errors
    /// Returns the error of the buffers, or of the group or range that contradicts them.
    pub(crate) fn with_buffers(&self, buffers: Vec<Buffer>) -> Result<Self, Error> {
        let mut problem = self.without_groups(buffers)?;
        for g in &self.groups {
            problem = problem.grouped(g.members.clone(), g.distances.clone(), g.arrangement)?;
        }
        self.apart.iter().try_fold(problem, |problem, &(first, second)| problem.apart(first, second))
    }

    /// Returns a problem with the same forbidden ranges but other buffers, and without groups and pairs to keep apart.
    pub(crate) fn without_groups(&self, buffers: Vec<Buffer>) -> Result<Self, Error> {
        self.forbidden.iter().try_fold(Self::new(buffers)?, |problem, range| problem.forbid(range.clone()))
    }

    /// The same buffers and ranges with only those groups for which `keep` is true, and without pairs to keep apart.
    pub(crate) fn with_groups(&self, mut keep: impl FnMut(&Group) -> bool) -> Self {
        let groups: Vec<Group> = self.groups.iter().filter(|group| keep(group)).cloned().collect();
        let grouped = groups.iter().flat_map(|group| &group.members).copied().collect();
        Self { buffers: self.buffers.clone(), groups, grouped, apart: Vec::new(), forbidden: self.forbidden.clone() }
    }

    /// The same buffers, groups and pairs without forbidden ranges.
    pub(crate) fn without_forbidden(&self) -> Self {
        Self { forbidden: Vec::new(), ..self.clone() }
    }

    /// The groups of buffers at fixed distances.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The pairs of buffers that never share a byte.
    pub fn pairs_apart(&self) -> &[(BufferId, BufferId)] {
        &self.apart
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

/// A member that cannot join the members before it, and the reason.
type Misfit = (BufferId, &'static str);

impl Group {
    /// Stacks `members` one after another in this order.
    pub(crate) fn stack(buffers: &[Buffer], members: Vec<BufferId>) -> Result<Self, Misfit> {
        let group = members.iter().try_fold(Self::default(), |group, &id| group.followed_by(buffers, id))?;
        group.addressable()
    }

    /// Puts each of `members` at its distance from the group's offset.
    fn at_distances(buffers: &[Buffer], members: Vec<BufferId>, distances: Vec<u64>) -> Result<Self, Misfit> {
        let mut group = Self::default();
        let mut pinned = Vec::new();
        for (&id, distance) in members.iter().zip(distances) {
            group = group.joined_by(buffers, id, distance)?;
            pinned.push(Buffer { alignment: 1, ..buffers[id.index()].clone() }.at(distance));
        }
        match overlapping_pins(&pinned) {
            Some((_, second)) => {
                Err((members[second.index()], "would share bytes with another member that is alive at the same time"))
            }
            None => group.addressable(),
        }
    }

    /// The group with one more member at the end.
    fn followed_by(self, buffers: &[Buffer], id: BufferId) -> Result<Self, Misfit> {
        let end = self.bytes;
        self.joined_by(buffers, id, end)
    }

    /// The group with one more member at this distance from the group's offset.
    fn joined_by(mut self, buffers: &[Buffer], id: BufferId, distance: u64) -> Result<Self, Misfit> {
        let b = &buffers[id.index()];
        if let Some(pinned) = b.offset {
            let start = pinned
                .checked_sub(distance)
                .ok_or((id, "is pinned too low: the members before it do not fit below"))?;
            if self.offset.is_some_and(|at| at != start) {
                return Err((id, "has a pinned offset that contradicts another member's"));
            }
            self.offset = Some(start);
        }
        // The group's offset plus the distance is a multiple of the member's alignment.
        let own = (b.alignment - distance % b.alignment) % b.alignment;
        if self.phase % gcd(self.alignment, b.alignment) != own % gcd(self.alignment, b.alignment) {
            return Err((id, "misses its alignment at any offset that suits the members before it"));
        }
        (self.phase, self.alignment) = congruent((self.phase, self.alignment), (own, b.alignment))
            .ok_or((id, "has an alignment that is too large together with those of the members before it"))?;
        let end = distance.checked_add(b.bytes).ok_or((id, "makes the group larger than the address space"))?;
        // A member without bytes keeps its distance, but takes no space.
        if b.bytes > 0 {
            self.bytes = self.bytes.max(end);
        }
        self.lifetime = match self.members.is_empty() {
            true => b.lifetime.clone(),
            false => self.lifetime.start.min(b.lifetime.start)..self.lifetime.end.max(b.lifetime.end),
        };
        self.members.push(id);
        self.distances.push(distance);
        Ok(self)
    }

    /// The group itself, if it has an offset that pins, alignments and the address space allow.
    fn addressable(self) -> Result<Self, Misfit> {
        let at = self.offset.unwrap_or(self.phase);
        match self.members.first() {
            Some(&first) if at % self.alignment != self.phase || at.checked_add(self.reach()).is_none() => {
                Err((first, "misses its alignment or leaves the address space because of another member"))
            }
            _ => Ok(self),
        }
    }

    /// Bytes from the group's offset to the highest end of a member. A member without bytes may end above
    /// [`bytes`](Self::bytes).
    pub(crate) fn reach(&self) -> u64 {
        self.distances.iter().copied().fold(self.bytes, u64::max)
    }

    /// The lowest offset from `at` on that the members' alignments allow; `None` beyond the address space.
    pub(crate) fn aligned_from(&self, at: u64) -> Option<u64> {
        at.saturating_sub(self.phase).checked_next_multiple_of(self.alignment)?.checked_add(self.phase)
    }

    /// True if one rectangle stands for the group without loss: the members live equally long, lie in its bytes, leave no
    /// byte between them, and any order of them needs the same offsets.
    pub(crate) fn is_rectangle(&self, buffers: &[Buffer]) -> bool {
        let members = || self.members.iter().map(|id| &buffers[id.index()]);
        let is_any_order_alike = self.members.len() < 2
            || (self.offset.is_none() && members().all(|b| b.bytes.is_multiple_of(self.alignment)));
        members().all(|b| b.lifetime == self.lifetime)
            && members().map(|b| u128::from(b.bytes)).sum::<u128>() == u128::from(self.bytes)
            && (self.phase == 0 || self.offset.is_some())
            && self.reach() == self.bytes
            && (self.arrangement != Arrangement::AnyOrder || is_any_order_alike)
    }
}

impl Default for Group {
    /// A group without members.
    fn default() -> Self {
        Self {
            members: Vec::new(),
            distances: Vec::new(),
            arrangement: Arrangement::Stacked,
            lifetime: 0..1,
            bytes: 0,
            alignment: 1,
            phase: 0,
            offset: None,
        }
    }
}

/// Stacks the members in an order that alignments and pins allow. The search tries the most aligned member first, then
/// goes depth-first for at most [`ORDERS_TRIED`] steps. Returns the misfit if no order was found.
fn stack_in_any_order(buffers: &[Buffer], members: &[BufferId]) -> Result<Group, Misfit> {
    fn deepen(buffers: &[Buffer], left: &[BufferId], group: &Group, tries: &mut u32) -> Result<Group, Misfit> {
        if left.is_empty() {
            return group.clone().addressable();
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
    deepen(buffers, &sorted, &Group::default(), &mut { ORDERS_TRIED })
}

/// Steps that the search for an order may take.
const ORDERS_TRIED: u32 = 10_000;

pub(crate) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Returns the numbers that are congruent to `p` modulo `m` and to `r` modulo `a`, as a remainder and a modulus (the
/// Chinese remainder theorem). Returns `None` if there are none or if the modulus exceeds a `u64`.
fn congruent((p, m): (u64, u64), (r, a): (u64, u64)) -> Option<(u64, u64)> {
    // The extended Euclidean algorithm: at its end, `x` is the inverse of `m / gcd` modulo `a / gcd`.
    let (mut old, mut new) = ((i128::from(m), 1), (i128::from(a), 0));
    while new.0 != 0 {
        let quotient = old.0 / new.0;
        (old, new) = (new, (old.0 - quotient * new.0, old.1 - quotient * new.1));
    }
    let (divisor, x) = old;
    let modulus = (m / divisor as u64).checked_mul(a)?;
    let (difference, cycle) = (i128::from(r) - i128::from(p), i128::from(a) / divisor);
    if difference % divisor != 0 {
        return None;
    }
    let steps = (difference / divisor).rem_euclid(cycle) as u128 * x.rem_euclid(cycle) as u128 % cycle as u128;
    Some((p + m * steps as u64, modulus))
}

/// Returns two pinned buffers that overlap, or `None` if there are none.
fn overlapping_pins(buffers: &[Buffer]) -> Option<(BufferId, BufferId)> {
    let mut events: Vec<(u64, bool, u64, BufferId)> = Vec::new();
    for (id, b) in (0..).map(BufferId).zip(buffers) {
        if let Some(at) = b.offset.filter(|_| b.bytes > 0) {
            events.push((b.lifetime.start, true, at, id));
            events.push((b.lifetime.end, false, at, id));
        }
    }
    events.sort_unstable();
    let mut live: BTreeMap<u64, BufferId> = BTreeMap::new();
    for (_, is_birth, at, id) in events {
        if !is_birth {
            live.remove(&at);
            continue;
        }
        let below =
            live.range(..=at).next_back().filter(|&(&other_at, &other)| other_at + buffers[other.index()].bytes > at);
        let above = live.range(at..).next().filter(|&(&other_at, _)| other_at < at + buffers[id.index()].bytes);
        if let Some((_, &other)) = below.or(above) {
            return Some((other, id));
        }
        live.insert(at, id);
    }
    None
}
