//! The plan that STAlloc makes before the first request. It has an offset or idle ranges for each request of two
//! iterations.

use std::ops::Range;

use gapless_alloc::{BufferId, Lifetime, Problem};

use super::chains::Echo;
use super::layers::Layers;
use super::{GRAIN, lanes, round, strips};
use crate::{Request, Requests};

/// A buffer to place: its lifetime and its size in bytes.
#[derive(Debug, Clone)]
pub(super) struct Rectangle {
    pub lifetime: Lifetime,
    pub bytes: u64,
}

/// The static pool and the plan for each request.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The persistent buffers, then the births of each planned iteration.
    pub requests: Vec<Planned>,
    /// Index of the request with which the plan continues after its last request.
    pub again: usize,
    /// Bytes of the pool.
    pub bytes: u64,
    /// Requests of at most this many bytes are not planned. Each gets a block of [`GRAIN`] bytes.
    pub small: u64,
    /// Number of blocks for small requests.
    pub small_blocks: u64,
}

/// The plan for one request.
#[derive(Debug, Clone)]
pub(super) enum Planned {
    /// The buffer goes to this offset if the request has the planned size `bytes`.
    Static { offset: u64, bytes: u64 },
    /// The buffer goes anywhere in these ranges of the pool (offset, bytes), which are idle throughout its lifetime.
    Dynamic { idle: Vec<(u64, u64)> },
}

/// A birth in one of the planned iterations.
struct Birth {
    id: BufferId,
    iteration: u64,
    lifetime: Lifetime,
}

impl Plan {
    /// Makes a plan like the released code: two iterations together, in ticks of single requests. The algorithm is
    /// `group` if there are phases, otherwise `split-and-fuse`.
    pub(super) fn released(
        problem: &Problem,
        requests: &Requests,
        phases: &[u64],
        is_dynamic: impl Fn(BufferId) -> bool,
    ) -> Self {
        const ITERATIONS: u64 = 2;
        let births = (0..ITERATIONS).flat_map(|iteration| in_ticks_of_requests(requests, iteration));
        let births: Vec<Birth> = births.filter(|birth| problem.buffer(birth.id).bytes > GRAIN).collect();
        let place = |rectangles: &[Rectangle], offsets: &mut [u64]| {
            if phases.is_empty() {
                let mut layers = Layers::default();
                let numbers: Vec<usize> = (0..rectangles.len()).collect();
                layers.fill(rectangles, &numbers, &Echo::default(), offsets);
                return layers.height;
            }
            let phase = |tick: u64| phases.partition_point(|&boundary| boundary <= tick);
            let span = |birth: &Birth| {
                let lifetime = &problem.buffer(birth.id).lifetime;
                (birth.iteration, phase(lifetime.start), phase(lifetime.end - 1))
            };
            let spans: Vec<_> = births.iter().filter(|birth| !is_dynamic(birth.id)).map(span).collect();
            lanes::place(rectangles, &spans, offsets)
        };
        let small_blocks = 2 * most_small(problem, requests);
        let plan = Self { small: GRAIN, small_blocks, ..Self::default() };
        plan.assemble(problem, requests, &births, &is_dynamic, place)
    }

    /// Makes a plan of one iteration in strips, without the losses of the released code.
    pub(super) fn strips(problem: &Problem, requests: &Requests) -> Self {
        let births = in_ticks_of_requests(requests, 0);
        let births: Vec<Birth> =
            births.map(|birth| Birth { lifetime: problem.buffer(birth.id).lifetime.clone(), ..birth }).collect();
        Self::default().assemble(problem, requests, &births, &|_| false, strips::place)
    }

    /// Puts persistent buffers end to end, and the buffers of the iterations above them. `place` finds offsets for the
    /// buffers that are not dynamic, and returns their height.
    fn assemble(
        mut self,
        problem: &Problem,
        requests: &Requests,
        births: &[Birth],
        is_dynamic: &dyn Fn(BufferId) -> bool,
        place: impl FnOnce(&[Rectangle], &mut [u64]) -> u64,
    ) -> Self {
        let bytes = |id: BufferId| problem.buffer(id).bytes;
        for &id in requests.persistent().iter().filter(|&&id| bytes(id) > self.small) {
            self.requests.push(Planned::Static { offset: self.bytes, bytes: bytes(id) });
            self.bytes = self.bytes.saturating_add(round(bytes(id)));
        }
        let last = births.iter().map(|birth| birth.iteration).max();
        self.again = self.requests.len() + births.iter().take_while(|birth| Some(birth.iteration) != last).count();
        let rectangle = |birth: &Birth| Rectangle { lifetime: birth.lifetime.clone(), bytes: round(bytes(birth.id)) };
        let rectangles: Vec<Rectangle> = births.iter().filter(|b| !is_dynamic(b.id)).map(rectangle).collect();
        let mut offsets = vec![0; rectangles.len()];
        let base = self.bytes;
        // Nothing is planned above 2^56 bytes, which no device has.
        let sum: u128 = rectangles.iter().map(|rectangle| u128::from(rectangle.bytes)).sum();
        let height = if sum >> 56 == 0 { place(&rectangles, &mut offsets) } else { u64::MAX };
        self.bytes = base.saturating_add(height);
        // Births are visited in order: `next` is the next rectangle, and `alive` has the earlier ones that are still
        // alive.
        let (mut next, mut alive): (usize, Vec<usize>) = (0, Vec::new());
        for birth in births {
            self.requests.push(if is_dynamic(birth.id) {
                alive.retain(|&number| rectangles[number].lifetime.end > birth.lifetime.start);
                let born = (next..rectangles.len()).take_while(|&n| rectangles[n].lifetime.start < birth.lifetime.end);
                let busy = alive.iter().copied().chain(born).map(|number| {
                    let start = base.saturating_add(offsets[number]);
                    (start, start.saturating_add(rectangles[number].bytes))
                });
                let mut busy: Vec<(u64, u64)> = busy.collect();
                busy.sort_unstable();
                Planned::Dynamic { idle: gaps(base..self.bytes, &busy) }
            } else {
                alive.push(next);
                next += 1;
                Planned::Static { offset: base.saturating_add(offsets[next - 1]), bytes: bytes(birth.id) }
            });
        }
        self
    }
}

/// The births of an iteration. Every request, whether birth or death, is one tick. The first request is tick 1, because
/// parameters are allocated before.
fn in_ticks_of_requests(requests: &Requests, iteration: u64) -> impl Iterator<Item = Birth> {
    let first = 1 + iteration * requests.step().len() as u64;
    let mut births: Vec<Birth> = Vec::new();
    let mut birth_of = vec![usize::MAX; requests.buffers()];
    for (tick, request) in (first..).zip(requests.step()) {
        match *request {
            Request::Allocate(id) => {
                birth_of[id.index()] = births.len();
                births.push(Birth { id, iteration, lifetime: tick..tick });
            }
            Request::Free(id) => births[birth_of[id.index()]].lifetime.end = tick,
        }
    }
    births.into_iter()
}

/// The most buffers of at most [`GRAIN`] bytes that are alive at once.
fn most_small(problem: &Problem, requests: &Requests) -> u64 {
    let is_small = |id: &BufferId| problem.buffer(*id).bytes <= GRAIN;
    let mut now = requests.persistent().iter().filter(|id| is_small(id)).count() as u64;
    let mut most = now;
    for request in requests.step() {
        match request {
            Request::Allocate(id) => now += u64::from(is_small(id)),
            Request::Free(id) => now -= u64::from(is_small(id)),
        }
        most = most.max(now);
    }
    most
}

/// Returns the free ranges (start, bytes) of a range in which the sorted ranges `used` (start, end) are used.
pub(super) fn gaps(within: Range<u64>, used: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut gaps = Vec::new();
    let mut floor = within.start;
    for &(start, end) in used.iter().chain(&[(within.end, within.end)]) {
        if start > floor {
            gaps.push((floor, start - floor));
        }
        floor = floor.max(end);
    }
    gaps
}
