//! Orders that are searched for given costs. They pass the checker, and are compared with the rules and with the tables
//! that the zero-bubble authors' search found.

use gapless_parallel::{
    Automatic, Cell, Costs, Error, Placement, Schedule, Sends, Shape, Timeline, by_name, check, read_table, simulate,
};
use gapless_testing::prelude::*;

fn largest_peak(timeline: &Timeline) -> u32 {
    (0..timeline.ranks.len()).map(|rank| timeline.peak(rank)).max().unwrap().try_into().unwrap()
}

fn costs(forward: u64, backward_input: u64, backward_weight: u64, transfer: u64) -> Costs {
    let overlapped = forward + backward_input + backward_weight;
    Costs { forward, backward_input, backward_weight, overlapped, transfer }
}

generated! {
    #![cases(24)]

    #[test]
    fn any_order_trains_within_its_limit(
        (ranks, chunks, micro_batches) in (1_u32..=5, 1_u32..=4, 1_u32..=7),
        room in 0_u32..12,
        ticks in (1_u64..20, 1_u64..20, 1_u64..20, 0_u64..8),
        (is_v, last_differs) in any::<(bool, bool)>(),
    ) {
        let all = costs(ticks.0, ticks.1, ticks.2, ticks.3);
        let last = costs(ticks.1, ticks.2, ticks.0, ticks.3);
        let costs = if last_differs { [vec![all; (ranks * chunks) as usize - 1], vec![last]].concat() } else { vec![all] };
        let placement = if is_v { Placement::V } else { Placement::Loop };
        let automatic = Automatic { costs: costs.clone(), peak: Some(chunks + room), placement };
        let table = automatic.table(&Shape { ranks, chunks, micro_batches }).unwrap();
        prop_assert_eq!(check(&table, ranks * chunks, micro_batches, Sends::Buffered), []);
        prop_assert!(largest_peak(&simulate(&table, &costs[..]).unwrap()) <= chunks + room);
    }
}

#[test]
fn a_limit_below_one_micro_batch_is_refused() {
    let automatic = Automatic { peak: Some(1), ..Automatic::default() };
    let error = automatic.actions(&Shape { ranks: 2, chunks: 2, micro_batches: 3 }).unwrap_err();
    assert_eq!(error, Error::Peak { schedule: "automatic", needed: 2, peak: 1 });
}

/// With stages of very different costs, an order searched for these costs takes 356 ticks, and an order searched for
/// equal costs takes 378.
#[test]
fn stages_may_cost_their_own() {
    let shape = Shape { ranks: 4, chunks: 1, micro_batches: 8 };
    let stages = [costs(12, 7, 5, 2), costs(17, 5, 16, 1), costs(10, 5, 3, 1), costs(18, 17, 3, 0)];
    let makespan = |costs: &[Costs]| {
        let automatic = Automatic { costs: costs.to_vec(), peak: Some(6), placement: Placement::Loop };
        simulate(&automatic.table(&shape).unwrap(), &stages[..]).unwrap().makespan()
    };
    let (knows, does_not) = (makespan(&stages), makespan(&[Costs::default()]));
    assert!(knows < does_not, "{knows} against {does_not}");
}

#[test]
fn no_rule_is_faster_with_its_own_memory() {
    for (name, shape) in [
        ("zb-h1", Shape { ranks: 4, chunks: 1, micro_batches: 7 }),
        ("zb-h2", Shape { ranks: 4, chunks: 1, micro_batches: 9 }),
        ("zbv", Shape { ranks: 4, chunks: 2, micro_batches: 9 }),
        ("v-half", Shape { ranks: 4, chunks: 2, micro_batches: 8 }),
        ("v-min", Shape { ranks: 3, chunks: 2, micro_batches: 8 }),
    ] {
        let rule = by_name(name).unwrap();
        for costs in [Costs::default(), costs(10, 11, 7, 2), costs(5, 9, 3, 0)] {
            let theirs = simulate(&rule.table(&shape).unwrap(), &costs).unwrap();
            let peak = Some(largest_peak(&theirs));
            let ours = Automatic { costs: vec![costs], peak, placement: rule.placement() }.table(&shape).unwrap();
            let ours = simulate(&ours, &costs).unwrap();
            assert!(ours.makespan() <= theirs.makespan(), "{name} {costs:?}");
        }
    }
}

/// Compares with each table of the authors' search, at the costs in the table's name and with the table's own peak as
/// the limit.
#[test]
fn as_fast_as_the_searched_tables() {
    let folder = gapless_testing::evidence("vectors/generated_zerobubble");
    let (mut equal, mut shorter) = (0, 0);
    for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        let Some(name) = gapless_testing::table_name(&path) else { continue };
        let (family, ticks) = (name.split('_').next().unwrap(), name.rsplit('_').next().unwrap());
        let placement = match family {
            "zb1p" | "zb2p" => Placement::Loop,
            "zbv" | "zbvhalf" | "zbvmin" => Placement::V,
            _ => continue,
        };
        let ticks = ticks.split(|c: char| c.is_alphabetic()).filter(|number| !number.is_empty());
        let ticks: Vec<u64> = ticks.map(|number| number.parse().unwrap()).collect();
        let costs = costs(ticks[0], ticks[1], ticks[2], ticks[3]);
        let table = read_table(&std::io::read_to_string(gapless_testing::open(&path).unwrap()).unwrap()).unwrap();
        let theirs = simulate(&table, &costs).unwrap();
        let actions = || table.iter().flatten().flat_map(Cell::actions);
        let ranks = table.len() as u32;
        let shape = Shape {
            ranks,
            chunks: actions().map(|action| action.stage.0 + 1).max().unwrap() / ranks,
            micro_batches: actions().map(|action| action.micro_batch.0 + 1).max().unwrap(),
        };
        let automatic = Automatic { costs: vec![costs], peak: Some(largest_peak(&theirs)), placement };
        let ours = simulate(&automatic.table(&shape).unwrap(), &costs).unwrap();
        assert!(ours.makespan() <= theirs.makespan(), "{name}: {} against {}", ours.makespan(), theirs.makespan());
        match ours.makespan() == theirs.makespan() {
            true => equal += 1,
            false => shorter += 1,
        }
    }
    println!("as long as the searched table: {equal}, shorter: {shorter}");
    assert!(equal + shorter >= 60, "{equal} + {shorter}");
}
