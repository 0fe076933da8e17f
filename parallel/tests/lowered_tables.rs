//! Tables with messages and weights, as input of the checker. Every schedule is accepted, however it was lowered. Every
//! spoiled table is refused with the right reason.

use std::num::NonZeroUsize;

use gapless_parallel::{
    Action, Cell, Communication, CommunicationKind, Costs, Kind, Placement, Schedule, Sends, Shape, Violation, Waits,
    all, check, communicate, fetch_weights, merge_backwards, read_table, reduce_gradients, simulate, update_weights,
    write_table,
};

/// Returns some shapes for which the schedule exists.
fn shapes(schedule: &dyn Schedule) -> Vec<Shape> {
    let ranks = [1, 2, 3, 4].into_iter();
    let shapes = ranks.flat_map(|ranks| {
        [1, 2, 3, 4]
            .into_iter()
            .flat_map(move |chunks| [1, 2, 4, 5, 9].map(|micro_batches| Shape { ranks, chunks, micro_batches }))
    });
    shapes.filter(|shape| schedule.table(shape).is_ok()).collect()
}

fn refused(table: &[Vec<Cell>], shape: &Shape, sends: Sends) -> Vec<Violation> {
    check(table, shape.ranks * shape.chunks, shape.micro_batches, sends)
}

fn computed(table: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let is_computed = |cell: &Cell| matches!(cell, Cell::One(_) | Cell::Overlap(..));
    table.iter().map(|row| row.iter().copied().filter(is_computed).collect()).collect()
}

#[test]
fn every_lowered_table_trains_even_if_sends_block() {
    let mut judged = 0;
    for schedule in all() {
        for shape in shapes(&*schedule) {
            let table = schedule.table(&shape).unwrap();
            let name = schedule.name();
            for waits in [Waits::Late, Waits::NextSend] {
                let bare = communicate(&table, waits).unwrap();
                assert_eq!(computed(&bare), table, "{name} {shape:?}: another order");
                assert_eq!(communicate(&bare, waits).unwrap(), bare, "{name} {shape:?}: again is another table");
                let fetched = fetch_weights(&update_weights(&reduce_gradients(&table)), NonZeroUsize::new(2).unwrap());
                let whole = communicate(&fetched, waits).unwrap();
                let merged = communicate(&merge_backwards(&table), waits).unwrap();
                for (lowered, what) in [(bare, "messages"), (whole, "weights"), (merged, "merged")] {
                    for sends in [Sends::Buffered, Sends::Blocking] {
                        judged += 1;
                        let violations = refused(&lowered, &shape, sends);
                        assert!(violations.is_empty(), "{name} {shape:?} {what}: {violations:?}");
                    }
                }
            }
        }
    }
    assert!(judged > 2000, "{judged}");
}

/// In every V, one rank has the two stages at the turn. These stages need no message between them.
#[test]
fn stages_of_one_rank_send_nothing() {
    for schedule in all() {
        for shape in shapes(&*schedule) {
            let lowered = communicate(&schedule.table(&shape).unwrap(), Waits::Late).unwrap();
            let stages = shape.ranks * shape.chunks;
            let owner = |stage: u32| {
                (0..shape.ranks).find(|&rank| {
                    (0..shape.chunks).any(|chunk| schedule.placement().stage(shape.ranks, rank, chunk) == stage)
                })
            };
            let boundaries = (1..stages).filter(|&stage| owner(stage) != owner(stage - 1)).count();
            let sends = lowered.iter().flatten().filter(|cell| {
                matches!(cell, Cell::Communicate(Communication { kind: CommunicationKind::SendForward, .. }))
            });
            assert_eq!(sends.count(), boundaries * shape.micro_batches as usize, "{} {shape:?}", schedule.name());
            let turns = if schedule.placement() == Placement::V { 1 } else { 0 };
            if shape.ranks > 1 {
                assert_eq!(boundaries as u32, stages - 1 - turns, "{} {shape:?}", schedule.name());
            }
        }
    }
}

/// Adding messages to a table doesn't change when actions run. The only exception is an overlapped pair, whose messages
/// are sent when both of its actions are done.
#[test]
fn messages_take_the_time_that_they_took_unwritten() {
    let costs = Costs { forward: 7, backward_input: 8, backward_weight: 5, overlapped: 18, transfer: 3 };
    for schedule in all() {
        for shape in shapes(&*schedule) {
            let table = schedule.table(&shape).unwrap();
            let before = simulate(&table, &costs).unwrap();
            // The wait for the last gradient's send takes a transfer time at the very end. No other wait takes time.
            let mut lowered = communicate(&table, Waits::Late).unwrap();
            lowered.iter_mut().for_each(|row| {
                row.retain(|cell| {
                    !matches!(cell, Cell::Communicate(Communication { kind: CommunicationKind::WaitSendBackward, .. }))
                });
            });
            let after = simulate(&lowered, &costs).unwrap();
            assert_eq!(after.makespan(), before.makespan(), "{} {shape:?}", schedule.name());
        }
    }
}

/// Returns all violations that the checker finds in a table, as text.
fn said(table: &str, stages: u32, micro_batches: u32, sends: Sends) -> Vec<String> {
    check(&read_table(table).unwrap(), stages, micro_batches, sends).iter().map(ToString::to_string).collect()
}

#[test]
fn spoiled_tables_are_refused_for_all_that_is_wrong() {
    let good = "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0UPDATE\n\
                1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1UPDATE\n";
    assert_eq!(said(good, 2, 1, Sends::Blocking), [""; 0]);
    for (from, to, expected) in [
        // Weights.
        ("0UPDATE", "", &["stage 0 has no update, though other stages have one"][..]),
        (
            "0B0,",
            "0UPDATE,0B0,",
            &[
                "0UPDATE is done 2 times",
                "rank 0: 0UPDATE does not come after 0WAIT_REDUCE_GRAD, which it needs",
                "rank 0: 0UPDATE does not come after 0B0, which it needs",
            ],
        ),
        (
            "1B0,1SEND_B0,1REDUCE_GRAD",
            "1REDUCE_GRAD,1B0,1SEND_B0",
            &["rank 1: 1REDUCE_GRAD does not come after 1B0, which it needs"],
        ),
        (
            "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,",
            "1WAIT_REDUCE_GRAD,1REDUCE_GRAD,",
            &["rank 1: 1WAIT_REDUCE_GRAD does not come after 1REDUCE_GRAD, which it needs"],
        ),
        (
            "0WAIT_REDUCE_GRAD,",
            "",
            &[
                "stage 0 has no wait for the reduction of its gradients, though other stages have one",
                "rank 0: 0UPDATE does not come after 0WAIT_REDUCE_GRAD, which it needs",
            ],
        ),
        (
            "1UPDATE",
            "0UPDATE",
            &[
                "stage 0 runs on ranks [0, 1], not on one",
                "0UPDATE is done 2 times",
                "stage 1 has no update, though other stages have one",
                "rank 1: 0UPDATE does not come after 0WAIT_REDUCE_GRAD, which it needs",
            ],
        ),
        // Messages.
        (
            "0SEND_F0,",
            "",
            &[
                "rank 1: 1RECV_F0 has no 0SEND_F0",
                "rank 0: 0WAIT_SEND_F0 does not come after 0SEND_F0, which it needs",
                "rank 0 waits forever at 0RECV_B0 (Blocking sends)",
                "rank 1 waits forever at 1RECV_F0 (Blocking sends)",
            ],
        ),
        (
            "1RECV_F0,",
            "",
            &[
                "rank 0: 0SEND_F0 has no 1RECV_F0",
                "rank 1: 1F0 does not come after 1RECV_F0, which it needs",
                "rank 0 waits forever at 0SEND_F0 (Blocking sends)",
                "rank 1 waits forever at 1SEND_B0 (Blocking sends)",
            ],
        ),
        ("0WAIT_SEND_F0,", "", &["rank 0: 0SEND_F0 has no 0WAIT_SEND_F0"]),
        ("1B0,1SEND_B0,", "1SEND_B0,1B0,", &["rank 1: 1SEND_B0 does not come after 1B0, which it needs"]),
        (
            "1B0,",
            "1B0,1SEND_F0,",
            &[
                "rank 1: 1SEND_F0 has no 2RECV_F0",
                "rank 1: 1SEND_F0 has no 1WAIT_SEND_F0",
                "rank 0 waits forever at 0RECV_B0 (Blocking sends)",
                "rank 1 waits forever at 1SEND_F0 (Blocking sends)",
            ],
        ),
        (
            "0F0,0SEND_F0,0RECV_B0",
            "0RECV_B0,0F0,0SEND_F0",
            &["rank 0 waits forever at 0RECV_B0 (Blocking sends)", "rank 1 waits forever at 1RECV_F0 (Blocking sends)"],
        ),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", &["rank 1: 1F0 does not come after 1RECV_F0, which it needs"]),
        // Fetched weights.
        (
            "1UPDATE",
            "1UPDATE,1UNSHARD,1RESHARD,1RESHARD,0RESHARD",
            &[
                "stage 0 runs on ranks [0, 1], not on one",
                "rank 0: 0F0 does not come after 0UNSHARD, which it needs",
                "rank 0: 0B0 does not come after 0UNSHARD, which it needs",
                "rank 1: 1F0 does not come after 1UNSHARD, which it needs",
                "rank 1: 1B0 does not come after 1UNSHARD, which it needs",
                "rank 1: 1RESHARD does not come after 1UNSHARD, which it needs",
                "rank 1: 0RESHARD does not come after 0UNSHARD, which it needs",
            ],
        ),
    ] {
        assert_eq!(good.matches(from).count(), 1, "{from}");
        assert_eq!(said(&good.replace(from, to), 2, 1, Sends::Blocking), expected, "{from} → {to}");
    }
}

/// Two neighbours both send to each other first, which works only if sends are buffered.
#[test]
fn crossed_messages() {
    let crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                   1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    assert_eq!(said(crossed, 2, 2, Sends::Buffered), [""; 0]);
    assert_eq!(
        said(crossed, 2, 2, Sends::Blocking),
        ["rank 0 waits forever at 0SEND_F1 (Blocking sends)", "rank 1 waits forever at 1SEND_B0 (Blocking sends)",]
    );
}

/// Both halves of a pair start at once, so neither half may depend on the other.
#[test]
fn a_pair_that_needs_itself() {
    let forward = Action::new(Kind::Forward, 0, 0);
    let backward = Action::new(Kind::Backward, 0, 0);
    let found = check(&[vec![Cell::Overlap(forward, backward)]], 1, 1, Sends::Buffered);
    let (cell, needs) = (Cell::One(backward), Cell::One(forward));
    assert_eq!(found, [Violation::OutOfOrder { rank: 0, cell, needs }]);
}

#[test]
fn a_stuck_table_is_not_lowered() {
    let table = read_table("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n").unwrap();
    let stuck = communicate(&table, Waits::Late).unwrap_err();
    assert_eq!(stuck.to_string(), "rank 0 waits forever at 0B0; gapless_parallel::check names what it waits for");
}

#[test]
fn small_tables() {
    let table = read_table("0F0,0I0,0W0\n1F0,1I0,1W0\n").unwrap();
    let lowered = |table: &[Vec<Cell>], waits| write_table(&communicate(table, waits).unwrap());
    assert_eq!(
        lowered(&update_weights(&reduce_gradients(&merge_backwards(&table))), Waits::Late),
        "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0UPDATE\n\
         1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1UPDATE,1WAIT_SEND_B0\n"
    );
    let table = read_table("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").unwrap();
    assert_eq!(
        lowered(&table, Waits::NextSend),
        "0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F1\n\
         1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1WAIT_SEND_B0,1SEND_B1,1WAIT_SEND_B1\n"
    );
}
