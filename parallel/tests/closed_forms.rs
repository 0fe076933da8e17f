//! Runs every generator's tables through the checker and the simulator, and compares them with the closed forms of the
//! papers.

use gapless_parallel::{
    Action, Cell, Costs, Error, Interleaved, Kind, Schedule, Sends, Shape, Violation, all, by_name, check, register,
    simulate,
};

/// Returns all shapes of a range for which a schedule exists.
fn shapes(schedule: &dyn Schedule) -> Vec<Shape> {
    let ranks = [1, 2, 3, 4, 6, 8];
    let chunks = [1, 2, 3, 4];
    let micro_batches = [1, 2, 3, 4, 5, 8, 12, 16, 24];
    let shapes = ranks.into_iter().flat_map(|ranks| {
        chunks
            .into_iter()
            .flat_map(move |chunks| micro_batches.map(|micro_batches| Shape { ranks, chunks, micro_batches }))
    });
    shapes.filter(|shape| schedule.actions(shape).is_ok()).collect()
}

#[test]
fn every_order_trains() {
    for schedule in all() {
        let shapes = shapes(&*schedule);
        assert!(shapes.len() >= 9, "{}: too few shapes", schedule.name());
        for shape in shapes {
            let table = schedule.actions(&shape).unwrap();
            let violations = check(&table, shape.ranks * shape.chunks, shape.micro_batches, Sends::Buffered);
            assert!(violations.is_empty(), "{} {shape:?}: {violations:?}", schedule.name());
        }
    }
}

#[test]
fn a_table_that_is_too_large_is_refused_before_it_is_made() {
    let mut refused = 0;
    for schedule in all() {
        for (ranks, chunks, micro_batches) in
            [(1, 1, 1 << 21), (1, 2, 1 << 31), (1 << 12, 1, 1), (u32::MAX, u32::MAX, u32::MAX)]
        {
            match schedule.actions(&Shape { ranks, chunks, micro_batches }) {
                Err(Error::TooLarge { most, .. }) => refused += u32::from(most == Shape::MAX_EXTENT),
                Err(Error::Chunks { .. } | Error::Ranks { .. }) => {}
                other => panic!("{}: {other:?}", schedule.name()),
            }
        }
    }
    assert!(refused > 20, "{refused}");
    let long = Shape { ranks: 2, chunks: 2, micro_batches: 1 << 13 };
    assert!(matches!(by_name("automatic").unwrap().actions(&long), Err(Error::TooLarge { most: 16384, .. })));
}

/// A schedule of one's own, which only has a name.
#[derive(Clone)]
struct Named(&'static str);

impl Schedule for Named {
    fn name(&self) -> &'static str {
        self.0
    }

    fn actions(&self, _: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        Ok(Vec::new())
    }
}

#[test]
fn schedules_are_registered_once() {
    assert!(matches!(by_name("own"), Err(Error::Unknown { .. })));
    register(Named("own")).unwrap();
    assert_eq!(by_name("own").unwrap().name(), "own");
    for taken in ["own", "1f1b", "automatic", "own.csv"] {
        assert_eq!(register(Named(taken)), Err(Error::Name { name: taken }));
    }
    assert!(by_name("other").err().unwrap().to_string().contains(", own, or the path"));
}

#[test]
fn groups_of_any_size_train() {
    let (mut legal, mut illegal) = (0, 0);
    for (ranks, chunks, micro_batches, group) in [2, 3, 4]
        .into_iter()
        .flat_map(|p| (1..=3).flat_map(move |v| (1..=13).flat_map(move |m| (1..=7).map(move |g| (p, v, m, g)))))
    {
        let shape = Shape { ranks, chunks, micro_batches };
        match (Interleaved { micro_batch_group: Some(group) }).actions(&shape) {
            Ok(table) => {
                legal += 1;
                let violations = check(&table, ranks * chunks, micro_batches, Sends::Buffered);
                assert!(violations.is_empty(), "{shape:?} in groups of {group}: {violations:?}");
            }
            Err(error) => {
                illegal += 1;
                assert!(matches!(error, Error::Group { .. }), "{error}");
            }
        }
    }
    assert!(legal > 100 && illegal > 100, "{legal} legal, {illegal} not");
}

/// Longer rounds raise the peak from (V−1)P + 2(P−1−r) + 1 chunks to (V−1)R + 2(P−1−r) + 1 chunks, and keep the bubble.
#[test]
fn groups_keep_the_bubble_and_raise_the_peak() {
    for (ranks, chunks, group, groups) in [2, 3, 4]
        .into_iter()
        .flat_map(|p| [1, 2, 3].into_iter().flat_map(move |v| [(p, v, p, 3), (p, v, p + 1, 2), (p, v, 2 * p, 2)]))
    {
        let shape = Shape { ranks, chunks, micro_batches: group * groups };
        let table = Interleaved { micro_batch_group: Some(group) }.table(&shape).unwrap();
        let timeline = simulate(&table, &Costs::default()).unwrap();
        for rank in 0..ranks {
            let peak = (chunks * shape.micro_batches).min((chunks - 1) * group + 2 * (ranks - 1 - rank) + 1);
            let found = (timeline.bubble(rank as usize), timeline.peak(rank as usize));
            assert_eq!(found, (u64::from(3 * (ranks - 1)), i64::from(peak)), "{shape:?} in groups of {group}");
        }
    }
}

/// Returns the ticks of bubble at these costs per chunk; `None` if there is no formula for this shape and these costs.
fn bubble(name: &str, &Shape { ranks: p, micro_batches: m, .. }: &Shape, costs: &Costs) -> Option<u64> {
    let (p, m) = (u64::from(p), u64::from(m));
    let &Costs { forward: f, backward_input: b, backward_weight: w, .. } = costs;
    let unit = *costs == Costs::default();
    // The formulas count in shares of a rank, the ticks in chunks of a rank. The factor V between them cancels the
    // formulas' divisor.
    match name {
        "gpipe" | "1f1b" => Some((p - 1) * (f + b + w)),
        "interleaved" | "looped-bfs" | "modular-pipeline" if m.is_multiple_of(p) => Some((p - 1) * (f + b + w)),
        "layered-accumulation" => Some(0),
        "zb-h1" if m >= p => Some((p - 1) * (f + b - w)),
        "interleaved-zb" if unit && m.is_multiple_of(p) && m >= 2 * p => Some(p - 1),
        "zb-h2" | "zbv" if unit && m >= 2 * p - 1 => Some(p - 1),
        // (P−1)(FB + B − 3W) with FB = 3, B = 2, W = 1.
        "dualpipev" if unit => Some(2 * (p - 1)),
        _ => None,
    }
}

/// Returns the maximum number of chunks of activations alive on rank `r`.
fn peak(name: &str, &Shape { ranks: p, chunks: v, micro_batches: m }: &Shape, r: u32) -> Option<u32> {
    match name {
        "gpipe" | "looped-bfs" | "modular-pipeline" | "layered-accumulation" => Some(v * m),
        "1f1b" => Some(m.min(p - r)),
        "interleaved" if m.is_multiple_of(p) => Some((v * m).min((v - 1) * p + 2 * (p - 1 - r) + 1)),
        "zb-h1" => Some(m.min(p)),
        "interleaved-zb" if m.is_multiple_of(p) => Some(v * m.min(p)),
        "zb-h2" => Some(m.min(2 * p - 1)),
        // A batch smaller than the warm-up runs all of its forwards on the way down, and only those forwards on the way
        // up that come before the drain.
        "zbv" => Some((2 * p).min(2 * m).min(m + r + 1)),
        "dualpipev" => Some(2 * p + 1),
        _ => None,
    }
}

#[test]
fn bubbles_and_peaks_are_the_formulas() {
    let mut wrong = Vec::new();
    let mut judged = 0;
    for schedule in all() {
        for shape in shapes(&*schedule) {
            let name = schedule.name();
            let table = schedule.table(&shape).unwrap();
            let unequal = Costs { forward: 4, backward_input: 5, backward_weight: 3, overlapped: 12, transfer: 0 };
            for costs in [Costs::default(), unequal] {
                let Some(expected) = bubble(name, &shape, &costs) else { continue };
                let timeline = simulate(&table, &costs).unwrap();
                for rank in 0..shape.ranks as usize {
                    judged += 1;
                    let found = timeline.bubble(rank);
                    if found != expected {
                        wrong.push(format!("{name} {shape:?} {costs:?} rank {rank}: bubble {found}, not {expected}"));
                    }
                }
            }
            let timeline = simulate(&table, &Costs::default()).unwrap();
            for rank in 0..shape.ranks {
                if let Some(expected) = peak(name, &shape, rank) {
                    judged += 1;
                    let found = timeline.peak(rank as usize);
                    if found != i64::from(expected) {
                        wrong.push(format!("{name} {shape:?} rank {rank}: peak {found}, not {expected}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {judged} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// The published values for 8 ranks and 16 micro-batches: the bubble, and the largest peak in halves of a rank's share.
#[test]
fn the_v_family_trades_memory_for_time() {
    let shape = Shape { ranks: 8, chunks: 2, micro_batches: 16 };
    for (name, bubble, peak) in [("v-half", 17, 10), ("v-min", 27, 8), ("v-1f1b", 33, 12), ("zbv", 7, 16)] {
        let timeline = simulate(&by_name(name).unwrap().table(&shape).unwrap(), &Costs::default()).unwrap();
        let largest = (0..8).map(|rank| timeline.peak(rank)).max().unwrap();
        assert_eq!((timeline.bubble(0), largest), (bubble, peak), "{name}");
    }
}

/// The peak is two thirds of the P micro-batches of 1F1B, rounded up.
#[test]
fn the_peak_of_v_1f1b() {
    for (ranks, times) in (1..=13).flat_map(|ranks| [1, 2, 5].map(|times| (ranks, times))) {
        let shape = Shape { ranks, chunks: 2, micro_batches: times * ranks };
        let table = by_name("v-1f1b").unwrap().table(&shape).unwrap();
        let timeline = simulate(&table, &Costs::default()).unwrap();
        let largest = (0..ranks as usize).map(|rank| timeline.peak(rank)).max().unwrap();
        assert_eq!(largest, 2 * i64::from((2 * ranks + 1).div_ceil(3)), "{shape:?}");
    }
}

#[test]
fn the_checker_finds_everything() {
    let good = || by_name("zb-h1").unwrap().actions(&Shape { ranks: 2, chunks: 1, micro_batches: 2 }).unwrap();
    assert_eq!(check(&good(), 2, 2, Sends::Buffered), []);

    let mut lost = good();
    let action = lost[1].pop().unwrap();
    let (stage, micro_batch) = (action.stage, action.micro_batch);
    assert_eq!(
        check(&lost, 2, 2, Sends::Buffered),
        [Violation::Missing { stage, micro_batch, what: "weight gradient" }]
    );

    let mut twice = good();
    twice[1].push(action);
    assert_eq!(check(&twice, 2, 2, Sends::Buffered), [Violation::Repeated { cell: Cell::One(action), times: 2 }]);

    let mut moved = good();
    let action = moved[1].pop().unwrap();
    moved[0].push(action);
    let found = check(&moved, 2, 2, Sends::Buffered);
    assert!(found.iter().any(|violation| matches!(violation, Violation::Scattered { .. })), "{found:?}");
    assert!(found.iter().any(|violation| matches!(violation, Violation::OutOfOrder { .. })), "{found:?}");

    let mut turned = good();
    turned[1].reverse();
    let found = check(&turned, 2, 2, Sends::Buffered);
    assert!(found.iter().any(|violation| matches!(violation, Violation::OutOfOrder { .. })), "{found:?}");

    let mut whole = good();
    whole[0].push(Action::new(Kind::Backward, 0, 0));
    let found = check(&whole, 2, 2, Sends::Buffered);
    assert!(found.iter().any(|violation| matches!(violation, Violation::WholeAndSplit { .. })), "{found:?}");

    // The last rank runs micro-batch 1 first. For that order, rank 0 would have to leave out a backward.
    let f = |stage, m| Action::new(Kind::Forward, stage, m);
    let b = |stage, m| Action::new(Kind::Backward, stage, m);
    let stuck = vec![vec![f(0, 0), b(0, 0), f(0, 1), b(0, 1)], vec![f(1, 1), b(1, 1), f(1, 0), b(1, 0)]];
    let sends = Sends::Buffered;
    let expected = [
        Violation::Deadlock { rank: 0, at: Cell::One(b(0, 0)), sends },
        Violation::Deadlock { rank: 1, at: Cell::One(f(1, 1)), sends },
    ];
    assert_eq!(check(&stuck, 2, 2, sends), expected);
}

/// Two neighbours that both send first wait for each other. So their receives must be posted ahead.
#[test]
fn blocking_sends() {
    for (name, trains) in [("gpipe", true), ("1f1b", false)] {
        let shape = Shape { ranks: 2, chunks: 1, micro_batches: 3 };
        let found = check(&by_name(name).unwrap().actions(&shape).unwrap(), 2, 3, Sends::Blocking);
        assert_eq!(found.is_empty(), trains, "{name}: {found:?}");
    }
}

#[test]
fn pictures() {
    let table = by_name("1f1b").unwrap().table(&Shape { ranks: 2, chunks: 1, micro_batches: 2 }).unwrap();
    let timeline = simulate(&table, &Costs::default()).unwrap();
    let expected = "\
rank 0 │ 0F0 0F1 ·   ·   0B0     ·   0B1
rank 1 │ ·   1F0 1B0     1F1 1B1     ·   ·
";
    assert_eq!(timeline.gantt(), expected);
    assert_eq!(timeline.live(0), [(0, 1), (1, 2), (6, 1), (9, 0)]);
    let folded = "\
from tick 0
rank 0 │ 0F0 0F1 ·   ·
rank 1 │ ·   1F0 1B0

from tick 4
rank 0 │ 0B0     ·   0B1
rank 1 │ 1F1 1B1     ·

from tick 8
rank 0 │ …
rank 1 │ ·
";
    assert_eq!(timeline.gantt_folded(27), folded);
    // Even if the durations have no common divisor, every label fits and starts where its box starts, rounded.
    let costs = Costs { forward: 7, backward_input: 5, backward_weight: 4, overlapped: 16, transfer: 1 };
    let timeline = simulate(&table, &costs).unwrap();
    let expected = "\
rank 0 │ 0F0 0F1 ·   · 0B0  ·   0B1
rank 1 │ ·   ·1F0 1B0  1F1 1B1  ·   ·
";
    assert_eq!(timeline.gantt(), expected);
    let svg = timeline.svg();
    assert_eq!((svg.matches("<g>").count(), svg.matches("</g>").count()), (8, 8));
}
