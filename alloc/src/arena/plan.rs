//! The plan of an arena: everything that is decided about the requests before the step runs.
//!
//! In: the static plan and the requests. Out: the address ranges that each request may use, and the size of the
//! reserve. Never: the size of a request, which only the run determines.
//!
//! If the reserve promises sizes ([`Reserve::Balanced`], [`Reserve::Worst`]), every request gets a *home*: the planner
//! places all requests at their promised sizes, with the static buffers pinned at their offsets. A request then has two
//! kinds of ranges. *Idle* ranges are addresses that the static plan does not use during the request's whole lifetime.
//! *Spare* ranges also avoid the homes of requests that start during that lifetime. [`Arena`](super::Arena) explains
//! why a step within its promises never overflows.
//!
//! [`Reserve::Balanced`]: super::Reserve::Balanced [`Reserve::Worst`]: super::Reserve::Worst

use std::ops::Range;

use super::idle::NextUse;
use super::request::{ArenaOptions, Request, RequestId, checked};
use crate::order::sort_by_key;
use crate::{Buffer, Error, Options, Problem, lower_bound, plan};

/// Most ranges of each kind that are kept per request; the longest ranges are kept. This bounds the work of a request
/// at run time.
const RANGES: usize = 16;

/// The requests with their ranges, and the reserve: everything that an [`Arena`](super::Arena) is built from.
#[derive(Debug, Clone)]
pub struct ArenaPlan {
    requests: Vec<Request>,
    places: Vec<Places>,
    ranges: Vec<Range<u64>>,
    /// A lifetime of more ticks than this counts as long.
    long: u64,
    grain: u64,
    static_height: u64,
    reserve: Range<u64>,
}

/// The ranges and the home of one request. All ranges are whole grains. Ranges below the reserve come first, the
/// shortest first. Ranges that extend into the reserve follow.
#[derive(Debug, Clone)]
struct Places {
    spare: Range<u32>,
    idle: Range<u32>,
    home: Option<Range<u64>>,
}

impl ArenaPlan {
    /// Plans the arena of `requests` around the buffers of `problem` at their `offsets`.
    ///
    /// # Errors
    /// Returns an error if
    ///
    /// - a request has an empty lifetime, an alignment that is not a power of two, or a balanced size above its bound;
    /// - the requests are not in order of their first tick, or the factor is negative or not finite;
    /// - `offsets` does not have one entry per buffer;
    /// - `offsets` is not a plan (this is checked only if homes are planned);
    /// - the base lies inside of the static plan;
    /// - addresses would exceed 2^64 - 1.
    pub fn new(
        problem: &Problem,
        offsets: &[u64],
        requests: Vec<Request>,
        options: &ArenaOptions,
    ) -> Result<Self, Error> {
        let grain = checked(&requests, options)?;
        if offsets.len() != problem.len() {
            let (entries, buffers) = (offsets.len(), problem.len());
            return Err(Error::NotOnePerBuffer { table: "offsets", entries, buffers });
        }
        let sized = || problem.buffers().iter().zip(offsets).filter(|(b, _)| b.bytes > 0);
        let ends = sized().map(|(b, at)| at.checked_add(b.bytes).ok_or(Error::NoRoom));
        let static_height = ends.into_iter().try_fold(0, |height, end| end.map(|end| height.max(end)))?;
        let base = options.base.unwrap_or(static_height);
        if base < static_height {
            return Err(Error::ReserveInside { base, height: static_height });
        }
        let base = base.checked_next_multiple_of(grain).ok_or(Error::NoRoom)?;
        let outside = static_height..base;
        let fixed: Vec<(Buffer, u64)> = sized().map(|(b, &at)| (b.clone(), at)).collect();
        let homes = homes(problem, &fixed, &requests, options, grain, outside.clone())?;
        let reserve_bytes = match options.reserve {
            super::Reserve::Bytes(bytes) => bytes / grain * grain,
            _ => homes.iter().flatten().map(|home| home.end).max().unwrap_or(0).saturating_sub(base),
        };
        let reserve = base..base.checked_add(reserve_bytes).ok_or(Error::NoRoom)?;
        let long = long(&requests);
        let mut this = Self { requests, places: Vec::new(), ranges: Vec::new(), long, grain, static_height, reserve };
        this.find_ranges(problem, fixed, homes, outside);
        Ok(this)
    }

    /// Goes back in time over requests and static buffers, and records the ranges that each request may use.
    fn find_ranges(
        &mut self,
        problem: &Problem,
        mut fixed: Vec<(Buffer, u64)>,
        homes: Vec<Option<Range<u64>>>,
        outside: Range<u64>,
    ) {
        let mut idle = NextUse::new();
        for range in problem.forbidden().iter().cloned().chain([outside]) {
            idle.paint(range, &(0..u64::MAX));
        }
        let mut spare = idle.clone();
        fixed.sort_unstable_by_key(|(b, _)| b.lifetime.end);
        let mut places: Vec<Places> = Vec::with_capacity(self.requests.len());
        for (request, home) in self.requests.iter().zip(homes).rev() {
            while let Some((b, at)) = fixed.pop_if(|(b, _)| b.lifetime.end > request.ticks.start) {
                idle.paint(at..at + b.bytes, &b.lifetime);
                spare.paint(at..at + b.bytes, &b.lifetime);
            }
            let mut keep = |next: &NextUse| {
                let mut ranges = next.idle(&request.ticks, self.reserve.end, self.grain);
                let is_home = |r: &Range<u64>| home.as_ref().is_some_and(|h| r.start <= h.start && h.end <= r.end);
                let is_below = |r: &Range<u64>| r.end <= self.reserve.start;
                sort_by_key(&mut ranges, |r| (!is_home(r), is_below(r), std::cmp::Reverse(r.end - r.start)));
                ranges.truncate(RANGES);
                sort_by_key(&mut ranges, |r| (!is_below(r), r.end - r.start, r.start));
                let first = self.ranges.len() as u32;
                self.ranges.extend(ranges);
                first..self.ranges.len() as u32
            };
            let (spare_ranges, idle_ranges) = match &home {
                Some(_) => (keep(&spare), keep(&idle)),
                None => (0..0, keep(&idle)),
            };
            if let Some(home) = &home {
                spare.paint(home.clone(), &request.ticks);
            }
            places.push(Places { spare: spare_ranges, idle: idle_ranges, home });
        }
        places.reverse();
        self.places = places;
    }

    /// The requests, indexed by [`RequestId`].
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// One request.
    pub fn request(&self, id: RequestId) -> &Request {
        &self.requests[id.index()]
    }

    /// All request ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = RequestId> + use<> {
        (0..self.requests.len() as u32).map(RequestId)
    }

    /// Returns the promised size of a request in bytes, or `None` if the reserve promises nothing. A request of this
    /// size always finds room while no request of the step has exceeded its promised size.
    pub fn promised(&self, id: RequestId) -> Option<u64> {
        self.places[id.index()].home.as_ref().map(|home| home.end - home.start)
    }

    /// One past the highest byte of the static plan.
    pub fn static_height(&self) -> u64 {
        self.static_height
    }

    /// The reserve: the arena's own range of addresses.
    pub fn reserve(&self) -> Range<u64> {
        self.reserve.clone()
    }

    /// Bytes that the static plan and the reserve take together.
    pub fn height(&self) -> u64 {
        if self.reserve.is_empty() { self.static_height } else { self.reserve.end }
    }

    /// Every block begins at a multiple of this: the coarsest alignment of any request.
    pub fn grain(&self) -> u64 {
        self.grain
    }

    /// True if the request's lifetime counts as long: its buffer waits for the backward pass rather than for the next
    /// instruction.
    pub(super) fn lives_long(&self, id: RequestId) -> bool {
        let ticks = &self.request(id).ticks;
        ticks.end - ticks.start > self.long
    }

    /// The ranges of a request that avoid the homes of other requests; empty if the reserve promises nothing.
    pub(super) fn spare_ranges(&self, id: RequestId) -> &[Range<u64>] {
        self.slice(&self.places[id.index()].spare)
    }

    /// The idle ranges of a request, which the static plan does not use during its lifetime.
    pub(super) fn idle_ranges(&self, id: RequestId) -> &[Range<u64>] {
        self.slice(&self.places[id.index()].idle)
    }

    fn slice(&self, range: &Range<u32>) -> &[Range<u64>] {
        &self.ranges[range.start as usize..range.end as usize]
    }
}

/// The lifetime above which a request counts as long: the geometric mean of the longest and the shortest lifetime.
/// Buffers live either for a few instructions or for half a step; hardly any are in between.
fn long(requests: &[Request]) -> u64 {
    let ticks = || requests.iter().map(|r| r.ticks.end - r.ticks.start);
    let (shortest, longest) = (ticks().min().unwrap_or(1), ticks().max().unwrap_or(1));
    (u128::from(shortest) * u128::from(longest)).isqrt() as u64
}

/// Places a home for every request. Each entry is `None` if the reserve promises nothing.
fn homes(
    problem: &Problem,
    fixed: &[(Buffer, u64)],
    requests: &[Request],
    options: &ArenaOptions,
    grain: u64,
    outside: Range<u64>,
) -> Result<Vec<Option<Range<u64>>>, Error> {
    let promises: Option<Vec<u64>> = requests.iter().map(|r| options.reserve.promise(r)).collect();
    let Some(promises) = promises else { return Ok(vec![None; requests.len()]) };
    let pinned = fixed.iter().map(|(b, at)| b.clone().at(*at));
    let mut buffers: Vec<Buffer> = pinned.collect();
    for (request, bytes) in requests.iter().zip(promises) {
        let bytes = bytes.checked_next_multiple_of(grain).ok_or(Error::NoRoom)?;
        buffers.push(Buffer::new(request.ticks.clone(), bytes).aligned(grain));
    }
    let mut joint = Problem::new(buffers)?;
    for range in problem.forbidden().iter().cloned().chain([outside.clone()]) {
        joint = joint.forbid(range)?;
    }
    // Bytes by which the static plan exceeds its own lower bound are granted to the joint plan as well.
    let slack =
        (outside.start - lower_bound(problem)).saturating_add(outside.end - outside.start).saturating_add(grain);
    let capacity = Some(lower_bound(&joint).saturating_add(slack));
    let solution = plan(&joint, &Options { capacity, work: options.work, ..Options::default() });
    if solution.offsets.is_empty() && !joint.is_empty() {
        return Err(Error::NoRoom);
    }
    let placed = joint.buffers().iter().zip(&solution.offsets).skip(fixed.len());
    Ok(placed.map(|(b, &at)| Some(at..at + b.bytes)).collect())
}
