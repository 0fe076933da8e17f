//! Tables that no generator of this crate makes, as input of every function that takes a table.

use std::collections::BTreeSet;

use gapless_parallel::{
    Action, Cell, Costs, Kind, Sends, Waits, check, communicate, read_table, reduce_gradients, simulate,
    update_weights, write_table,
};
use gapless_testing::prelude::*;

/// A pipeline with its stages assigned to ranks at random, and random choices among the actions that can run next.
#[derive(Debug, Clone)]
struct Plan {
    owners: Vec<usize>,
    ranks: usize,
    micro_batches: u32,
    splits: bool,
    choices: Vec<usize>,
}

fn plans() -> impl Strategy<Value = Plan> {
    (1_usize..=4, 1_usize..=6, 1_u32..=5, any::<bool>()).prop_flat_map(|(ranks, stages, micro_batches, splits)| {
        let owners = prop::collection::vec(0..ranks, stages);
        let choices = prop::collection::vec(any::<usize>(), 3 * stages * micro_batches as usize);
        (owners, choices).prop_map(move |(owners, choices)| Plan { owners, ranks, micro_batches, splits, choices })
    })
}

/// Runs the actions in a random order that their dependencies allow. Each rank's row is the order in which the rank ran
/// them.
fn table(plan: &Plan) -> Vec<Vec<Cell>> {
    let stages = plan.owners.len() as u32;
    let kinds: &[Kind] = match plan.splits {
        true => &[Kind::Forward, Kind::BackwardInput, Kind::BackwardWeight],
        false => &[Kind::Forward, Kind::Backward],
    };
    let mut todo: BTreeSet<Action> = (0..stages)
        .flat_map(|s| (0..plan.micro_batches).flat_map(move |m| kinds.iter().map(move |&kind| Action::new(kind, s, m))))
        .collect();
    let mut rows = vec![Vec::new(); plan.ranks];
    for &choice in &plan.choices {
        let can_run = |action: &&Action| {
            let (s, m) = (action.stage.0, action.micro_batch.0);
            let open = |kind, stage| todo.contains(&Action::new(kind, stage, m));
            match action.kind {
                Kind::Forward => s == 0 || !open(Kind::Forward, s - 1),
                Kind::BackwardWeight => !open(Kind::BackwardInput, s),
                kind => !open(Kind::Forward, s) && (s + 1 == stages || !open(kind, s + 1)),
            }
        };
        let able: Vec<Action> = todo.iter().filter(can_run).copied().collect();
        let Some(&action) = able.get(choice % able.len().max(1)) else { break };
        todo.remove(&action);
        rows[plan.owners[action.stage.0 as usize]].push(Cell::One(action));
    }
    rows
}

generated! {
    /// Any order that can run can be lowered, and the lowered table can run even with blocking sends.
    #[test]
    fn any_order_that_runs_can_be_lowered(plan in plans(), early in any::<bool>()) {
        let (table, stages) = (table(&plan), plan.owners.len() as u32);
        prop_assert_eq!(check(&table, stages, plan.micro_batches, Sends::Buffered), []);
        let weights = update_weights(&reduce_gradients(&table));
        let lowered = communicate(&weights, if early { Waits::NextSend } else { Waits::Late }).unwrap();
        prop_assert_eq!(check(&lowered, stages, plan.micro_batches, Sends::Blocking), []);
        prop_assert_eq!(check(&lowered, stages, plan.micro_batches, Sends::Buffered), []);
        let (before, after) = (simulate(&table, &Costs::default()), simulate(&lowered, &Costs::default()));
        prop_assert_eq!(before.unwrap().makespan(), after.unwrap().makespan());
        prop_assert_eq!(&read_table(&write_table(&lowered)).unwrap(), &lowered);
    }

    /// Two cells in a row of a lowered table are swapped. Then the checker must refuse the table, or the table must
    /// still run completely.
    #[test]
    fn the_checker_accepts_nothing_that_cannot_run(plan in plans(), rank in any::<usize>(), at in any::<(usize, usize)>()) {
        let mut table = communicate(&table(&plan), Waits::Late).unwrap();
        let row = rank % table.len();
        let length = table[row].len();
        if length > 0 {
            table[row].swap(at.0 % length, at.1 % length);
        }
        let found = check(&table, plan.owners.len() as u32, plan.micro_batches, Sends::Buffered);
        if found.is_empty() {
            prop_assert!(simulate(&table, &Costs::default()).is_ok(), "{}", write_table(&table));
        } else {
            // A table that runs with blocking sends also runs with buffered sends, but not the other way round.
            let blocking = check(&table, plan.owners.len() as u32, plan.micro_batches, Sends::Blocking);
            prop_assert!(!blocking.is_empty(), "blocking sends are the stricter: {}", write_table(&table));
        }
    }
}
