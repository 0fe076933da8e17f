//! Ranks that are threads: the cases of all backends, random messages and sums, and every way in which a rank can fail.

mod communicator_cases;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use communicator_cases::CASES;
use gapless_communicator::{Awaited, Collective, Communicator, CommunicatorError, InProcess, Request, Result, Tag};
use gapless_testing::prelude::*;

/// Runs every rank of a world on its own thread. Returns the result of each rank, or its panic.
fn ranks<T: Send>(size: usize, run: impl Fn(InProcess) -> T + Sync) -> Vec<thread::Result<T>> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = InProcess::world(size).into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

/// Returns the error with which each rank ended, if any.
fn errors(size: usize, run: impl Fn(InProcess) -> Result<()> + Sync) -> Vec<Option<CommunicatorError>> {
    ranks(size, run).into_iter().map(|end| end.unwrap_or(Ok(())).err()).collect()
}

fn tag(micro_batch: u32) -> Tag {
    Tag { micro_batch, ..Tag::default() }
}

#[test]
fn every_case_in_worlds_of_every_size() {
    for size in 1..=5 {
        for (name, case) in CASES {
            for (rank, end) in ranks(size, |mut rank| case(&mut rank)).into_iter().enumerate() {
                match end {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => panic!("{name}, rank {rank} of {size}: {error}"),
                    Err(_) => panic!("{name}, rank {rank} of {size} panicked"),
                }
            }
        }
    }
}

#[test]
fn many_cases_one_after_another_in_one_world() {
    for end in ranks(4, |mut rank| CASES.iter().cycle().take(3 * CASES.len()).try_for_each(|(_, case)| case(&mut rank)))
    {
        end.unwrap().unwrap();
    }
}

/// One operation of a random test, as all ranks know it.
#[derive(Debug, Clone)]
enum Event {
    Message { from: usize, to: usize, tag: u32, len: usize },
    AllReduce { count: usize },
}

fn storm() -> impl Strategy<Value = (usize, Vec<Event>, u64)> {
    (1..5usize).prop_flat_map(|size| {
        let message = (0..size, 0..size, 0..3u32).prop_map(|(from, to, tag)| {
            // All messages of one tag have the same size, so that their order does not matter.
            Event::Message { from, to, tag, len: from * 77 + to * 1000 + tag as usize * 20_000 }
        });
        let event = prop_oneof![4 => message, 1 => (0..40_000usize).prop_map(|count| Event::AllReduce { count })];
        (Just(size), prop::collection::vec(event, 0..60), any::<u64>())
    })
}

/// Starts all messages and collectives before it waits for any of them. Receives are started in a random order, and the
/// waits come in another random order.
fn weather(rank: &mut InProcess, events: &[Event], seed: u64) -> Result<()> {
    let me = rank.rank();
    let content = |from: usize, tag: u32, serial: usize| (from * 50 + tag as usize * 17 + serial) as u8;
    let mut order: Vec<usize> = (0..events.len()).collect();
    let mut random = seed ^ me as u64;
    let mut pick = |n: usize| {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (random >> 33) as usize % n
    };
    // Collectives keep their positions, since all ranks must start them in the same order. Messages with the same ends
    // and tag are matched in the order in which they are started.
    for i in (1..order.len()).rev() {
        let other = pick(i + 1);
        let moves = |i: usize| matches!(events[i], Event::Message { .. });
        if moves(order[i]) && moves(order[other]) {
            order.swap(i, other);
        }
    }
    let mut serials = std::collections::HashMap::<(bool, usize, u32), usize>::new();
    let mut serial = |sends, peer, tag| {
        let next = serials.entry((sends, peer, tag)).or_default();
        *next += 1;
        *next
    };
    let mut lent: Vec<(Request, Vec<u8>, Option<u8>)> = Vec::new();
    let mut sums: Vec<(Request, Vec<f32>)> = Vec::new();
    for event in order.into_iter().map(|i| &events[i]) {
        match *event {
            Event::Message { from, to, tag: number, len } => {
                if from == me {
                    let bytes = vec![content(me, number, serial(true, to, number)); len];
                    // SAFETY: the vector's bytes are not moved or accessed until they are waited for below.
                    let request = unsafe { rank.isend(bytes.as_ptr(), len, to, tag(number)) }?;
                    lent.push((request, bytes, None));
                }
                if to == me {
                    let mut bytes = vec![0; len];
                    // SAFETY: the vector's bytes are not moved or accessed until they are waited for below.
                    let request = unsafe { rank.irecv(bytes.as_mut_ptr(), len, from, tag(number)) }?;
                    lent.push((request, bytes, Some(content(from, number, serial(false, from, number)))));
                }
            }
            Event::AllReduce { count } => {
                let mut values = vec![me as f32 + 1.0; count];
                // SAFETY: the vector's elements are not moved or accessed until they are waited for below.
                let request = unsafe { rank.start(Collective::AllReduce { values: values.as_mut_ptr(), count }) }?;
                sums.push((request, values));
            }
        }
    }
    let total = (1..=rank.size()).sum::<usize>() as f32;
    while !lent.is_empty() || !sums.is_empty() {
        if pick(lent.len() + sums.len()) < lent.len() {
            let (request, bytes, expected) = lent.swap_remove(pick(lent.len()));
            rank.wait(request)?;
            assert!(expected.is_none_or(|expected| bytes.iter().all(|byte| *byte == expected)));
        } else {
            let (request, values) = sums.swap_remove(pick(sums.len()));
            rank.wait(request)?;
            assert!(values.iter().all(|value| *value == total));
        }
    }
    Ok(())
}

generated! {
    #![cases(96)]

    #[test]
    fn storms_of_messages_and_sums((size, events, seed) in storm()) {
        for end in ranks(size, |mut rank| weather(&mut rank, &events, seed)) {
            end.expect("no rank panics").unwrap();
        }
    }
}

/// Checks that every rank other than the culprit ended with an error that names the culprit and the reason.
#[track_caller]
fn all_name(errors: &[Option<CommunicatorError>], culprit: usize, reason: &str) {
    for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
        match error {
            Some(CommunicatorError::PeerGone { rank: named, why, by, .. }) => {
                assert_eq!((*named, *by), (culprit, rank), "{why}");
                assert!(why.contains(reason), "rank {rank}: {why}");
            }
            other => panic!("rank {rank} ended with {other:?}"),
        }
    }
}

/// The work of the other ranks while rank 1 fails. It covers every kind of waiting.
fn wait_for_rank_1(rank: &mut InProcess) -> Result<()> {
    match rank.rank() {
        0 => rank.receive(&mut [0; 10], 1, tag(0)),
        2 => rank.send(&[0; 10], 1, tag(0)),
        3 => rank.all_reduce(&mut [1.0]),
        // This rank waits for a rank that waits for rank 1.
        _ => rank.receive(&mut [0; 10], 0, tag(0)),
    }
}

#[test]
fn a_panic_reaches_everyone() {
    let errors = errors(5, |mut rank| match rank.rank() {
        1 => panic!("as the test wants it"),
        _ => wait_for_rank_1(&mut rank),
    });
    all_name(&errors, 1, "panicked");
}

#[test]
fn an_abort_reaches_everyone() {
    let errors = errors(5, |mut rank| match rank.rank() {
        1 => {
            rank.abort("the disk is full");
            rank.barrier()
        }
        _ => wait_for_rank_1(&mut rank),
    });
    all_name(&errors, 1, "the disk is full");
    assert!(matches!(errors[1], Some(CommunicatorError::PeerGone { rank: 1, by: 1, .. })));
}

#[test]
fn leaving_early_reaches_everyone() {
    let errors = errors(5, |mut rank| match rank.rank() {
        1 => Ok(()),
        _ => wait_for_rank_1(&mut rank),
    });
    all_name(&errors, 1, "dropped its communicator");
}

#[test]
fn leaving_with_operations_under_way_reaches_everyone() {
    let errors = errors(5, |mut rank| {
        if rank.rank() != 1 {
            return wait_for_rank_1(&mut rank);
        }
        let bytes = [0; 3];
        // SAFETY: the communicator is dropped before the bytes.
        let _request = unsafe { rank.isend(bytes.as_ptr(), 3, 4, tag(7)) }?;
        drop(rank);
        Ok(())
    });
    all_name(&errors, 1, "1 operation(s) under way");
}

#[test]
fn leaving_when_all_is_done_harms_nobody() {
    for end in ranks(3, |mut rank| {
        // When rank 2 receives from rank 1, rank 0 has already dropped its communicator. This is not an error, because
        // the message of rank 0 was received before.
        match rank.rank() {
            0 => rank.send(&[5], 1, tag(0)),
            1 => {
                let mut byte = [0];
                rank.receive(&mut byte, 0, tag(0))?;
                rank.send(&byte, 2, tag(0))
            }
            _ => rank.receive(&mut [0], 1, tag(0)),
        }
    }) {
        end.unwrap().unwrap();
    }
}

#[test]
fn a_panic_within_a_part_reaches_the_other_part() {
    let errors = errors(4, |mut rank| {
        let mut part = rank.split(rank.rank() / 2, 0)?;
        if rank.rank() == 3 {
            panic!("as the test wants it");
        }
        part.barrier()?;
        part.receive(&mut [0], 1 - part.rank(), tag(0))
    });
    all_name(&errors, 3, "panicked");
}

#[test]
fn a_wait_that_takes_too_long_says_for_what() {
    let errors = errors(3, |mut rank| {
        let me = rank.rank();
        // Rank 1 has a long timeout and gets the error of rank 0's timeout. Rank 2 hangs until the others are done.
        rank.set_timeout(if me == 0 { Duration::from_millis(5) } else { Duration::from_secs(600) });
        match me {
            0 => rank.receive(&mut [0], 2, Tag { stage: 2, micro_batch: 7, ..Tag::default() }),
            1 => rank.all_reduce(&mut [0.0]),
            _ => rank.receive(&mut [0], 1, tag(0)),
        }
    });
    let Some(CommunicatorError::Timeout { rank: 0, awaited: Awaited::Message { from: 2, tag }, .. }) = &errors[0]
    else {
        panic!("{errors:?}")
    };
    assert_eq!((tag.stage, tag.micro_batch), (2, 7));
    let text = errors[0].as_ref().unwrap().to_string();
    assert!(text.contains("waiting for the activations of stage 2, micro-batch 7 from rank 2"), "{text}");
    all_name(&errors, 0, "gave up");
}

#[test]
fn a_collective_that_takes_too_long_names_who_is_missing() {
    let world = InProcess::world(4);
    let errors: Vec<_> = thread::scope(|scope| {
        let mut hung = Vec::new();
        let mut threads = Vec::new();
        for mut rank in world {
            match rank.rank() {
                1 | 3 => hung.push(rank),
                _ => threads.push(scope.spawn(move || {
                    rank.set_timeout(Duration::from_millis(if rank.rank() == 0 { 5 } else { 600_000 }));
                    rank.all_reduce(&mut [0.0])
                })),
            }
        }
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err()).collect()
    });
    match &errors[0] {
        CommunicatorError::Timeout { awaited: Awaited::Collective { missing, .. }, .. } => {
            // Rank 2 may have been late as well.
            assert!(missing.starts_with(&[1]) && missing.ends_with(&[3]), "{missing:?}");
        }
        other => panic!("{other}"),
    }
    assert!(matches!(errors[1], CommunicatorError::PeerGone { rank: 0, by: 2, .. }), "{}", errors[1]);
}

#[test]
fn sizes_that_differ_are_an_error_on_both_sides() {
    let errors = errors(2, |mut rank| match rank.rank() {
        0 => rank.send(&[0; 8], 1, tag(4)),
        _ => rank.receive(&mut [0; 12], 0, tag(4)),
    });
    for error in errors {
        let text = error.as_ref().unwrap().to_string();
        assert!(
            matches!(error, Some(CommunicatorError::SizeMismatch { from: 0, to: 1, sent: 8, expected: 12, .. })),
            "{text}"
        );
        assert!(text.contains("micro-batch 4"), "{text}");
    }
}

/// Each case has the call of two of three ranks, the call of the third, and the error that all of them get.
#[test]
fn collectives_that_differ_are_an_error_on_all_ranks() {
    type Start = fn(&mut InProcess) -> Result<()>;
    let pairs: [(Start, Start, &str); 4] = [
        (|rank| rank.all_reduce(&mut [0.0; 4]), |rank| rank.all_reduce(&mut [0.0; 5]), "all_reduce of 5 elements"),
        (|rank| rank.barrier(), |rank| rank.broadcast(&mut [0; 5], 2), "broadcast of 5 bytes, root 2"),
        (|rank| rank.broadcast(&mut [0; 5], 1), |rank| rank.broadcast(&mut [0; 5], 2), "broadcast of 5 bytes, root 2"),
        (
            |rank| rank.all_to_all_v(&[0; 3], &[1; 3], &mut [0; 3], &[1; 3]),
            |rank| rank.all_to_all_v(&[0; 3], &[1; 3], &mut [0; 4], &[1, 2, 1]),
            "from rank 1 to rank 2: 1 bytes were sent, 2 are expected",
        ),
    ];
    for (two, third, expected) in pairs {
        for error in errors(3, |mut rank| if rank.rank() < 2 { two(&mut rank) } else { third(&mut rank) }) {
            // A rank that calls later gets the error of the rank that found the difference first.
            let text = error.expect("an error").to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
}

#[test]
fn misuse_is_an_error() {
    let mut world = InProcess::world(2);
    let (mut one, mut zero) = (world.pop().unwrap(), world.pop().unwrap());
    assert!(matches!(zero.send(&[], 2, tag(0)), Err(CommunicatorError::NoSuchRank { rank: 2, size: 2 })));
    assert!(matches!(zero.broadcast(&mut [], 2), Err(CommunicatorError::NoSuchRank { rank: 2, size: 2 })));
    assert!(matches!(zero.all_gather(&[1], &mut [0; 3]), Err(CommunicatorError::Length { given: 3, expected: 2, .. })));
    let overflowing = [usize::MAX, 2];
    assert!(zero.all_to_all_v(&[0], &overflowing, &mut [0], &[1, 0]).is_err());

    // A request of another rank cannot end an operation of this rank.
    let mut byte = [0];
    // SAFETY: the byte is not accessed until the wait below; nothing else is lent.
    let (theirs, own) = unsafe {
        let theirs = zero.isend(std::ptr::dangling(), 0, 1, tag(0)).unwrap();
        (theirs, one.irecv(byte.as_mut_ptr(), 1, 0, tag(1)).unwrap())
    };
    assert!(matches!(one.wait(theirs), Err(CommunicatorError::UnknownRequest)));
    zero.send(&[5], 1, tag(1)).unwrap();
    one.wait(own).unwrap();
    assert_eq!(byte, [5]);
    one.receive(&mut [], 0, tag(0)).unwrap();
}

/// After a caught panic the world has failed, because the panic dropped a communicator.
#[test]
fn a_world_does_not_outlive_a_caught_panic() {
    let mut world = InProcess::world(2);
    let (one, mut zero) = (world.pop().unwrap(), world.pop().unwrap());
    let caught = catch_unwind(AssertUnwindSafe(move || {
        let _one = one;
        panic!("as the test wants it");
    }));
    assert!(caught.is_err());
    assert!(matches!(zero.barrier(), Err(CommunicatorError::PeerGone { rank: 1, .. })));
}
