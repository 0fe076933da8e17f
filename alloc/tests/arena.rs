//! Checks of the online arena. Two checkers examine the addresses that the arena serves, and a slow reference
//! implementation repeats every placement.

use std::ops::Range;

use gapless_alloc::arena::{
    Arena, ArenaOptions, ArenaPlan, Need, Overflow, Rehearsal, Request, RequestId, Reserve, Served, check_run, rehearse,
};
use gapless_alloc::{Buffer, Error, Label, Options, Problem, Role, check, plan};
use gapless_testing::prelude::*;

const TICKS: u64 = 24;

/// A planned step and its requests.
#[derive(Debug, Clone)]
struct ArenaStep {
    problem: Problem,
    offsets: Vec<u64>,
    requests: Vec<Request>,
}

fn lifetimes() -> impl Strategy<Value = Range<u64>> {
    (0..TICKS, 1..=TICKS).prop_map(|(start, length)| start..(start + length).min(TICKS))
}

fn steps() -> impl Strategy<Value = ArenaStep> {
    let buffers = prop::collection::vec((lifetimes(), 0..40u64), 0..24);
    let request = (lifetimes(), 0..300u64, 0..900u64, prop_oneof![Just(1u64), Just(8), Just(16)]);
    (buffers, prop::collection::vec(request, 0..24)).prop_map(|(buffers, requests)| {
        let buffers = buffers.into_iter().map(|(ticks, bytes)| Buffer::new(ticks, 16 * bytes).aligned(16)).collect();
        let problem = Problem::new(buffers).unwrap();
        let offsets = plan(&problem, &Options { work: 20_000, ..Options::default() }).offsets;
        let request =
            |(ticks, balanced, more, alignment)| Request::new(ticks, balanced, balanced + more).aligned(alignment);
        let mut requests: Vec<Request> = requests.into_iter().map(request).collect();
        requests.sort_by_key(|r| r.ticks.start);
        ArenaStep { problem, offsets, requests }
    })
}

/// The ways in which sizes may vary.
#[derive(Debug, Clone)]
enum Sizes {
    Nothing,
    Most,
    /// The n-th request has its bound ÷ n^0.6, in an order that changes.
    Zipf(u64),
    /// Requests have their bound and zero bytes in turns.
    Oscillating(u64),
    /// One request has its bound, all others have zero bytes.
    One(prop::sample::Index),
    /// Each request has this share of its bound.
    Any(Vec<f64>),
}

impl Sizes {
    fn bytes(&self, requests: &[Request], id: RequestId) -> u64 {
        let (index, count) = (id.index() as u64, requests.len() as u64);
        let most = requests[id.index()].most;
        match self {
            Self::Nothing => 0,
            Self::Most => most,
            Self::Zipf(turn) => (most as f64 / ((index * 7 + turn) % count + 1) as f64).powf(0.6) as u64,
            Self::Oscillating(turn) => most * ((index + turn) % 2),
            Self::One(which) => most * u64::from(which.index(requests.len()) == id.index()),
            Self::Any(shares) => (most as f64 * shares[id.index() % shares.len()]) as u64,
        }
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    prop_oneof![
        Just(Sizes::Nothing),
        Just(Sizes::Most),
        (0..9u64).prop_map(Sizes::Zipf),
        (0..2u64).prop_map(Sizes::Oscillating),
        any::<prop::sample::Index>().prop_map(Sizes::One),
        prop::collection::vec(0.0..=1.0f64, 1..24).prop_map(Sizes::Any),
    ]
}

impl ArenaStep {
    fn arena(&self, reserve: Reserve) -> Arena {
        let options = ArenaOptions::with_reserve(reserve);
        Arena::new(ArenaPlan::new(&self.problem, &self.offsets, self.requests.clone(), &options).unwrap())
    }

    /// Runs a step and passes all addresses, static and dynamic, to both checkers.
    fn run(&self, arena: &mut Arena, bytes: impl Fn(RequestId) -> u64) -> Rehearsal {
        let run = rehearse(arena, bytes);
        let limit = arena.plan().height();
        check_run(&self.problem, &self.offsets, &self.requests, &run.served, limit).unwrap();
        let (mut buffers, mut offsets) = (self.problem.buffers().to_vec(), self.offsets.clone());
        for one in &run.served {
            let Request { ticks, alignment, .. } = &self.requests[one.request.index()];
            buffers.push(Buffer::new(ticks.clone(), one.bytes).aligned(*alignment));
            offsets.push(one.offset);
        }
        check(&Problem::new(buffers).unwrap(), &offsets, Some(limit.max(arena.plan().reserve().start))).unwrap();
        run
    }
}

generated! {
    #![cases(128)]

    #[test]
    fn nothing_overlaps_and_the_report_adds_up(
        step in steps(), rounds in prop::collection::vec(sizes(), 1..4), reserve in 0..3000u64, factor in 0.0..3.0f64,
    ) {
        for reserve in [Reserve::Bytes(reserve), Reserve::Balanced { factor }, Reserve::Worst] {
            let (mut arena, mut again) = (step.arena(reserve), step.arena(reserve));
            let (mut served, mut refused) = (0, 0);
            for sizes in &rounds {
                let bytes = |id| sizes.bytes(&step.requests, id);
                let run = step.run(&mut arena, bytes);
                prop_assert_eq!(&run.served, &rehearse(&mut again, bytes).served, "deterministic");
                served += run.served.iter().map(|one| one.bytes).sum::<u64>();
                refused += run.overflows.iter().map(|overflow| overflow.bytes).sum::<u64>();
                for Overflow { bytes, largest_hole, free, .. } in &run.overflows {
                    prop_assert!(bytes.next_multiple_of(arena.plan().grain()) > *largest_hole && largest_hole <= free);
                }
            }
            let report = arena.report();
            prop_assert_eq!(report.requests, (rounds.len() * step.requests.len()) as u64);
            prop_assert_eq!((report.reused_bytes + report.reserve_served_bytes, report.refused_bytes), (served, refused));
            prop_assert_eq!(report.asked_bytes, served + refused);
            prop_assert!(report.most_live_bytes <= report.high_water_bytes);
            prop_assert!(report.high_water_bytes <= report.reserve_bytes);
        }
    }

    #[test]
    fn the_worst_case_never_overflows(step in steps(), rounds in prop::collection::vec(sizes(), 1..4)) {
        let mut arena = step.arena(Reserve::Worst);
        for sizes in rounds {
            let run = step.run(&mut arena, |id| sizes.bytes(&step.requests, id));
            prop_assert_eq!(run.overflows, []);
        }
    }

    /// After the arena has grown to the factor that a step needed, the arena serves that step, and its report
    /// continues.
    #[test]
    fn growing_by_the_reported_factor_serves_the_step(mut step in steps(), sizes in sizes(), reserve in 0..2000u64) {
        for request in &mut step.requests {
            (request.balanced, request.most) = (request.balanced.max(1), request.most.max(1));
        }
        let mut arena = step.arena(Reserve::Bytes(reserve));
        let bytes = |id| sizes.bytes(&step.requests, id);
        let first = step.run(&mut arena, bytes).overflows;
        for Overflow { factor_hundredths, .. } in &first {
            prop_assert!(*factor_hundredths as f64 / 100.0 <= arena.factor());
        }
        let before = arena.report();
        let larger = step.arena(Reserve::Balanced { factor: arena.factor() });
        arena.grow(larger.plan().clone());
        prop_assert_eq!(step.run(&mut arena, bytes).overflows, []);
        let report = arena.report();
        prop_assert_eq!((report.growths, report.overflows), (1, first.len() as u64));
        prop_assert_eq!(report.first_reserve_bytes, before.reserve_bytes);
        prop_assert_eq!(report.reserve_bytes, larger.report().reserve_bytes);
        prop_assert_eq!(report.requests, 2 * before.requests);
    }

    /// A request with [`Need::Certain`] always has room, whatever was offered to other requests. An offer within the
    /// factor always has room, too.
    #[test]
    fn offers_leave_room_for_certain_requests(
        mut step in steps(), rounds in prop::collection::vec(sizes(), 1..4), factor in 0.0..2.0f64,
        needs in prop::collection::vec(prop_oneof![Just(Need::Optional), Just(Need::Certain)], 24),
    ) {
        step.requests.iter_mut().zip(needs).for_each(|(request, need)| request.need = need);
        let mut arena = step.arena(Reserve::Balanced { factor });
        for sizes in rounds {
            let (mut live, mut served): (Vec<(u64, RequestId)>, _) = (Vec::new(), Vec::new());
            for request in arena.plan().ids() {
                let Request { ticks, need, .. } = step.requests[request.index()].clone();
                live.extract_if(.., |(end, _)| *end <= ticks.start).for_each(|(_, over)| arena.release(over));
                let bytes = sizes.bytes(&step.requests, request);
                let offset = match need {
                    Need::Optional => arena.try_request(request, bytes),
                    _ => Some(arena.request(request, bytes).unwrap()),
                };
                prop_assert!(offset.is_some() || bytes > arena.plan().promised(request).unwrap());
                if let Some(offset) = offset {
                    live.push((ticks.end, request));
                    served.push(Served { request, offset, bytes });
                }
            }
            live.into_iter().for_each(|(_, over)| arena.release(over));
            check_run(&step.problem, &step.offsets, &step.requests, &served, arena.plan().height()).unwrap();
        }
    }

    /// Requests within the factor are served, whatever other requests within the factor ask for. An overflow happens
    /// only in a step in which some request has exceeded the factor.
    #[test]
    fn a_factor_is_a_promise(
        step in steps(), rounds in prop::collection::vec(sizes(), 1..4), factor in 0.0..3.0f64, scale in 0.0..=1.0f64,
    ) {
        let mut arena = step.arena(Reserve::Balanced { factor });
        let promised: Vec<u64> = arena.plan().ids().map(|id| arena.plan().promised(id).unwrap()).collect();
        for (request, promised) in step.requests.iter().zip(&promised) {
            prop_assert!(*promised >= ((request.balanced as f64 * factor) as u64).min(request.most));
        }
        for sizes in rounds {
            let kept = |id: RequestId| sizes.bytes(&step.requests, id).min((promised[id.index()] as f64 * scale) as u64);
            prop_assert_eq!(step.run(&mut arena, kept).overflows, []);
            let run = step.run(&mut arena, |id| sizes.bytes(&step.requests, id));
            let is_over = |id: usize| sizes.bytes(&step.requests, RequestId(id as u32)) > promised[id];
            for overflow in run.overflows {
                prop_assert!((0..=overflow.request.index()).any(is_over));
            }
        }
    }

    #[test]
    fn serves_the_same_offsets_as_the_twin(step in steps(), sizes in sizes(), reserve in 0..3000u64) {
        let mut arena = step.arena(Reserve::Bytes(reserve));
        let run = step.run(&mut arena, |id| sizes.bytes(&step.requests, id));
        let served: Vec<Option<u64>> = step
            .requests
            .iter()
            .zip(arena.plan().ids())
            .map(|(_, id)| run.served.iter().find(|one| one.request == id).map(|one| one.offset))
            .collect();
        prop_assert_eq!(served, twin(&step, arena.plan(), &sizes));
    }
}

/// Reference implementation: finds the offset of every request by looking at every grain of memory each time.
fn twin(step: &ArenaStep, plan: &ArenaPlan, sizes: &Sizes) -> Vec<Option<u64>> {
    let (grain, reserve) = (plan.grain(), plan.reserve());
    let length = |r: &Request| r.ticks.end - r.ticks.start;
    let lengths = || step.requests.iter().map(length);
    let long = ((lengths().min().unwrap_or(1) * lengths().max().unwrap_or(1)) as f64).sqrt();
    let mut placed: Vec<Option<(u64, u64)>> = Vec::new();
    let mut high_water = reserve.start;
    let meets = |one: &Range<u64>, other: &Range<u64>| one.start < other.end && other.start < one.end;
    for (request, id) in step.requests.iter().zip(plan.ids()) {
        let bytes = sizes.bytes(&step.requests, id).next_multiple_of(grain);
        if bytes == 0 {
            placed.push(Some((reserve.start, 0)));
            continue;
        }
        let is_idle = |grains: u64| {
            let here = grains * grain..(grains + 1) * grain;
            let in_static = step.problem.buffers().iter().zip(&step.offsets);
            let mut clash =
                in_static.filter(|(b, at)| meets(&b.lifetime, &request.ticks) && meets(&(**at..*at + b.bytes), &here));
            clash.next().is_none() && (here.end <= plan.static_height() || reserve.start <= here.start)
        };
        let in_use = |grains: u64| {
            let here = grains * grain..(grains + 1) * grain;
            let mut live = placed.iter().zip(&step.requests).filter(|(_, other)| other.ticks.end > request.ticks.start);
            live.any(|(at, _)| at.is_some_and(|(at, bytes)| meets(&(at..at + bytes), &here)))
        };
        let mut ranges = runs(0..reserve.end / grain, is_idle);
        ranges.sort_by_key(|r| (r.end * grain > reserve.start, r.end - r.start, r.start));
        assert!(ranges.len() <= 16, "few enough for the arena to know all");
        let gap = ranges.into_iter().find_map(|range| {
            let gaps = runs(range, |grains| !in_use(grains)).into_iter();
            let fitting = gaps.filter(|gap| (gap.end - gap.start) * grain >= bytes).take(8);
            fitting.min_by_key(|gap| gap.end - gap.start)
        });
        placed.push(gap.map(|gap| {
            let (start, end) = (gap.start * grain, gap.end * grain);
            let at = if length(request) as f64 > long { start } else { end.min(high_water.max(start + bytes)) - bytes };
            high_water = high_water.max(at + bytes);
            (at, bytes)
        }));
    }
    placed.into_iter().map(|at| at.map(|(at, _)| at)).collect()
}

/// Returns the longest runs of numbers for which `wanted` is true.
fn runs(within: Range<u64>, wanted: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for n in within.filter(|&n| wanted(n)) {
        match runs.last_mut() {
            Some(last) if last.end == n => last.end += 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

#[test]
fn an_overflow_names_all_that_helps() {
    let problem = Problem::new(vec![Buffer::new(0..4, 1024)]).unwrap();
    let label = Label { tensor: "received".into(), op: "dispatch".into(), layer: "h.3".into(), role: Role::Routing };
    let request = Request::new(2..6, 512, 8192).in_rows(64).labelled(label);
    let check = |reserve, bytes, expected: &str| {
        let options = ArenaOptions::with_reserve(reserve);
        let mut arena = Arena::new(ArenaPlan::new(&problem, &[0], vec![request.clone()], &options).unwrap());
        let overflow = arena.request(RequestId(0), bytes).unwrap_err();
        assert_eq!(overflow.to_string(), expected);
        assert_eq!(arena.request(RequestId(0), 640).unwrap(), 1024, "an overflow changes nothing");
        assert_eq!(arena.report().overflows, 1);
    };
    check(
        Reserve::Bytes(1000),
        2112,
        "the arena of routing buffers cannot serve request 0, received (dispatch) of layer h.3: 2112 bytes (33 rows of 64 \
         bytes) requested, 512 when balanced, 8192 at most; 960 free in one piece, 960 in total, with a reserve of 960 bytes; \
         use Reserve::Worst, Reserve::Balanced with a factor of at least 4.13, or Reserve::Bytes(3072); or recompute the \
         layer, or bound its rows by a capacity factor",
    );
    check(
        Reserve::Balanced { factor: 1.25 },
        9000,
        "the arena of routing buffers cannot serve request 0, received (dispatch) of layer h.3: 9000 bytes (140 rows of 64 \
         bytes) requested, 512 when balanced, 8192 at most, 640 promised; 640 free in one piece, 640 in total, with a reserve \
         of 640 bytes; the request exceeds its own bound; correct the bound (Request::most)",
    );
}

/// A request beyond its bound is refused even if memory is idle, since nothing guarantees that the caller's tensors are
/// larger than the bound.
#[test]
fn no_request_is_served_beyond_its_bound() {
    let problem = Problem::new(vec![Buffer::new(0..1, 1 << 20)]).unwrap();
    let request = Request::new(1..3, 64, 128);
    let plan = |reserve| ArenaPlan::new(&problem, &[0], vec![request.clone()], &ArenaOptions::with_reserve(reserve));
    for reserve in [Reserve::Worst, Reserve::Balanced { factor: 1.0 }, Reserve::Bytes(1 << 20)] {
        let mut arena = Arena::new(plan(reserve).unwrap());
        for bytes in [129, 1 << 19, u64::MAX] {
            let overflow = arena.request(RequestId(0), bytes).unwrap_err();
            assert!(
                overflow.to_string().ends_with("the request exceeds its own bound; correct the bound (Request::most)"),
                "{overflow}"
            );
            assert_eq!(arena.try_request(RequestId(0), bytes), None);
        }
        assert!(arena.request(RequestId(0), 128).is_ok());
    }
}

#[test]
fn unsound_requests_are_errors() {
    let problem = Problem::new(vec![Buffer::new(0..4, 1024)]).unwrap();
    let check = |requests: Vec<Request>, options: ArenaOptions, expected: &str| {
        let error = ArenaPlan::new(&problem, &[0], requests, &options).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    let sound = || Request::new(0..4, 1, 2);
    let options = ArenaOptions::default;
    check(vec![Request::new(4..4, 1, 2)], options(), "empty lifetime");
    check(vec![Request::new(0..4, 3, 2)], options(), "balanced size above its bound");
    check(vec![sound().aligned(0)], options(), "power of two");
    check(vec![Request::new(1..4, 1, 2), sound()], options(), "order of their first tick");
    check(vec![sound()], ArenaOptions { base: Some(512), ..options() }, "inside the static plan");
    check(vec![sound()], ArenaOptions::with_reserve(Reserve::Balanced { factor: f64::NAN }), "finite");
    check(vec![sound()], ArenaOptions::with_reserve(Reserve::Bytes(u64::MAX)), "exceed the address space");
    check(
        vec![Request::new(0..4, 1, u64::MAX)],
        ArenaOptions::with_reserve(Reserve::Worst),
        "exceed the address space",
    );
    assert!(matches!(
        ArenaPlan::new(&problem, &[], vec![sound()], &options()),
        Err(Error::NotOnePerBuffer { entries: 0, buffers: 1, .. })
    ));
}

#[test]
fn the_reserve_may_lie_elsewhere() {
    let problem = Problem::new(vec![Buffer::new(0..4, 1000)]).unwrap().forbid(6400..6464).unwrap();
    let requests = vec![Request::new(0..2, 256, 256), Request::new(1..3, 256, 256)];
    let options = ArenaOptions { reserve: Reserve::Worst, base: Some(6300), ..ArenaOptions::default() };
    let plan = ArenaPlan::new(&problem, &[0], requests.clone(), &options).unwrap();
    let mut arena = Arena::new(plan);
    let run = rehearse(&mut arena, |_| 256);
    check_run(&problem, &[0], &requests, &run.served, arena.plan().height()).unwrap();
    assert_eq!(run.overflows, []);
    assert!(run.served.iter().all(|one| one.offset >= 6464), "behind what is forbidden");
}
