use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gapless_testing::prelude::*;

use super::judge::run;
use super::*;
use crate::on_threads;

fn tag(micro_batch: u32) -> Tag {
    Tag { micro_batch, ..Tag::default() }
}

fn send(to: usize, micro_batch: u32) -> Call {
    Call::Start(Start::Send { to, tag: tag(micro_batch), len: 8 })
}

fn receive(from: usize, micro_batch: u32) -> Call {
    Call::Start(Start::Receive { from, tag: tag(micro_batch), len: 8 })
}

const BARRIER: Call = Call::Start(Start::Collective(Kind::Barrier));

use Call::{Compute, Wait};

/// Checks that each rank launches the `expected` starts, in this order.
fn check(programs: &[Vec<Call>], expected: &[&[usize]]) {
    let orders = LaunchOrder::of(programs).unwrap();
    let launches = |order: &LaunchOrder| -> Vec<usize> {
        let first = |launch: &Launch| match *launch {
            Launch::One(start) | Launch::Oneself { send: start, .. } => start,
        };
        order.launches.iter().map(first).collect()
    };
    assert_eq!(orders.iter().map(launches).collect::<Vec<_>>(), expected);
    run(programs, orders, 1);
}

#[test]
fn messages_are_launched_as_their_receivers_come_to_them() {
    // Both sides use the same order.
    check(
        &[vec![send(1, 0), send(1, 1), Wait(0), Wait(1)], vec![receive(0, 0), Wait(0), receive(0, 1), Wait(1)]],
        &[&[0, 1], &[0, 1]],
    );
    // The receiver needs the second message first.
    check(
        &[vec![send(1, 0), send(1, 1), Wait(0), Wait(1)], vec![receive(0, 1), Wait(0), receive(0, 0), Wait(1)]],
        &[&[1, 0], &[0, 1]],
    );
    // Crossing sends: one of the two ranks receives first.
    check(
        &[vec![send(1, 0), receive(1, 0), Wait(1), Wait(0)], vec![send(0, 0), receive(0, 0), Wait(1), Wait(0)]],
        &[&[1, 0], &[0, 1]],
    );
    // With one tag, the first message sent is the first received.
    check(
        &[vec![send(1, 0), send(1, 0), Wait(0), Wait(1)], vec![receive(0, 0), receive(0, 0), Wait(1), Wait(0)]],
        &[&[0, 1], &[0, 1]],
    );
    // A message of a rank to itself; then a message that one rank starts before a collective and the other after it.
    check(&[vec![receive(0, 3), send(0, 3), Wait(0), Wait(1)]], &[&[1]]);
    check(
        &[vec![send(1, 0), BARRIER, Wait(1), Wait(0)], vec![BARRIER, receive(0, 0), Wait(1), Wait(0)]],
        &[&[1, 0], &[0, 1]],
    );
}

/// With the programs' own orders, the second message is received as the first. The checker must notice that.
#[test]
#[should_panic(expected = "another message than the receiver expects")]
fn the_order_of_the_programs_themselves_confuses_messages() {
    let programs = [vec![send(1, 0), send(1, 1)], vec![receive(0, 1), receive(0, 0)]];
    let orders = LaunchOrder::of(&programs).unwrap();
    run(&programs, orders.iter().map(LaunchOrder::as_started).collect(), 1);
}

/// Rank 1 computes for a long time before it receives a message from rank 0. This must not delay the messages that rank
/// 0 receives meanwhile.
#[test]
fn time_decides_who_is_first() {
    let zero = vec![send(1, 0), receive(2, 0), Wait(1), Wait(0)];
    let late = |time| vec![Compute(time), receive(0, 0), Wait(0)];
    let two = vec![Compute(5), send(0, 0), Wait(0)];
    check(&[zero.clone(), late(9), two.clone()], &[&[1, 0], &[0], &[0]]);
    check(&[zero, late(1), two], &[&[0, 1], &[0], &[0]]);
}

#[test]
fn programs_without_an_order_are_errors_that_say_why() {
    let errors = [
        (
            vec![vec![receive(1, 4), Wait(0), send(1, 5)], vec![receive(0, 5), Wait(0), send(0, 4)]],
            "rank 0 is waiting for the activations of stage 0, micro-batch 4 from rank 1, \
             rank 1 is waiting for the activations of stage 0, micro-batch 5 from rank 0;",
        ),
        (
            vec![vec![send(1, 4)], vec![]],
            "rank 0 is waiting for rank 1 to receive the activations of stage 0, micro-batch 4;",
        ),
        (vec![vec![BARRIER, Wait(0)], vec![]], "rank 0 is waiting for rank 1 to start barrier;"),
        (
            vec![vec![send(1, 0)], vec![Call::Start(Start::Receive { from: 0, tag: tag(0), len: 9 })]],
            "micro-batch 0 from rank 0 to rank 1: 8 bytes were sent, 9 are expected",
        ),
        (
            vec![vec![BARRIER], vec![Call::Start(Start::Collective(Kind::AllToAllV))]],
            "rank 1 started all_to_all_v where rank 0 started barrier",
        ),
        (vec![vec![send(1, 0)]], "there is no rank 1 in a communicator of 1"),
        (vec![vec![Wait(0)]], "the request was not made by this communicator, or was waited for before"),
    ];
    for (programs, expected) in errors {
        let text = LaunchOrder::of(&programs).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn ranks_agree_over_any_communicator_and_on_their_errors() {
    let program = |rank: usize| match rank {
        0 => vec![send(1, 0), send(1, 1), Wait(0), Wait(1)],
        1 => vec![receive(0, 1), Wait(0), receive(0, 0), Wait(1)],
        _ => vec![],
    };
    let orders = on_threads(3, |mut world| {
        let program = program(world.rank());
        LaunchOrder::agree(&mut *world, &program)
    });
    assert_eq!(orders.unwrap(), LaunchOrder::of(&[program(0), program(1), program(2)]).unwrap());

    let texts = on_threads(2, |mut world| {
        let program = if world.rank() == 0 { vec![send(1, 0)] } else { vec![] };
        Ok::<_, CommunicatorError>(LaunchOrder::agree(&mut *world, &program).unwrap_err().to_string())
    });
    let texts = texts.unwrap();
    assert!(texts[0] == texts[1] && texts[0].contains("rank 1 to receive"), "{texts:?}");
}

#[test]
fn a_run_of_another_program_is_an_error() {
    let programs = [vec![send(1, 0), send(1, 1)], vec![receive(0, 1), receive(0, 0)]];
    let order = Arc::new(LaunchOrder::of(&programs).unwrap().remove(0));
    let mut queue = LaunchQueue::new(&order);
    let text = queue.start(0, Start::Send { to: 1, tag: tag(1), len: 8 }).unwrap_err().to_string();
    assert!(
        text.contains("as operation 0 of a run, where the program that the ranks agreed on has a send of"),
        "{text}"
    );
    for (number, start) in order.starts().iter().enumerate() {
        assert!(queue.launch().is_none() && !queue.is_over());
        assert_eq!(queue.held_back_by(), Some(&order.starts()[1]), "which the receiver wants first");
        assert_eq!(queue.start(0, *start).unwrap(), number);
    }
    assert_eq!([queue.launch(), queue.launch(), queue.launch()], [Some(Launch::One(1)), Some(Launch::One(0)), None]);
    assert!(queue.is_over());
    let text = queue.start(0, order.starts()[0]).unwrap_err().to_string();
    assert!(text.contains("has no further operation"), "{text}");
}

/// A message between two ranks: the times at which its ends start, and the time from both starts to the wait of each
/// end.
#[derive(Debug, Clone)]
struct Message {
    ends: [usize; 2],
    tag: u32,
    starts: [u32; 2],
    waits: [u32; 2],
}

fn message(ranks: usize) -> impl Strategy<Value = Message> {
    let pair = || (0u32..300, 0u32..300);
    let ends = (0..ranks, 0..ranks);
    (ends, 0u32..4, pair(), pair()).prop_map(|(ends, tag, starts, waits)| Message {
        ends: ends.into(),
        tag,
        starts: starts.into(),
        waits: waits.into(),
    })
}

/// Programs that can run: every wait is for an operation that is matched by then, in the order of time.
fn programs(ranks: usize, messages: &[Message], barriers: &[Vec<u32>]) -> Vec<Vec<Call>> {
    // Sorted by time, then by index. A wait refers to its start's index.
    let mut events: Vec<Vec<(u32, usize, Option<Call>)>> = vec![Vec::new(); ranks];
    let mut number = 0;
    let mut add = |rank: usize, start: Call, from: u32, until: u32| {
        number += 1;
        events[rank].extend([(from, number, Some(start)), (until, number, None)]);
    };
    // With one tag, the first message sent is the first received, even if they were generated as ends of different
    // messages.
    let mut by_tag: BTreeMap<_, Vec<&Message>> = BTreeMap::new();
    messages.iter().for_each(|message| by_tag.entry((message.ends, message.tag)).or_default().push(message));
    for (([from, to], tag), messages) in by_tag {
        let sorted = |end: usize| {
            let mut times: Vec<u32> = messages.iter().map(|message| message.starts[end]).collect();
            times.sort();
            times
        };
        for ((message, sent), received) in messages.iter().zip(sorted(0)).zip(sorted(1)) {
            let there = sent.max(received) + 1;
            add(from, send(to, tag), sent, there + message.waits[0]);
            add(to, receive(from, tag), received, there + message.waits[1]);
        }
    }
    let mut times = vec![0; ranks];
    for barrier in barriers {
        times.iter_mut().zip(barrier).for_each(|(time, later)| *time += later);
        let there = times.iter().max().expect("there is a rank") + 1;
        times.iter().enumerate().for_each(|(rank, time)| add(rank, BARRIER, *time, there));
    }
    let program = |mut events: Vec<(u32, usize, Option<Call>)>| {
        events.sort_by_key(|(time, number, start)| (*time, start.is_none(), *number));
        let mut calls = Vec::new();
        let (mut now, mut numbers) = (0, HashMap::new());
        for (time, number, start) in events {
            calls.push(Compute(u64::from(time - now)));
            now = time;
            let known = numbers.len();
            calls.push(start.unwrap_or_else(|| Wait(numbers[&number])));
            if start.is_some() {
                numbers.insert(number, known);
            }
        }
        calls
    };
    events.into_iter().map(program).collect()
}

generated! {
    #![cases(300)]

    #[test]
    fn any_programs_run_to_their_end_on_a_device_without_tags(
        (ranks, messages, barriers) in (1usize..6).prop_flat_map(|ranks| (
            Just(ranks),
            prop::collection::vec(message(ranks), 0..40),
            prop::collection::vec(prop::collection::vec(0u32..150, ranks), 0..4),
        )),
        seed in any::<u64>(),
    ) {
        let programs = programs(ranks, &messages, &barriers);
        let orders = LaunchOrder::of(&programs).expect("the programs can be run");
        run(&programs, orders, seed);
    }
}
