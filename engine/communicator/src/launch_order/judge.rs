//! The checker of launch orders, which simulates devices without tags. The launches of a rank run one after another,
//! and each is paired with the next launch at its other end. The checker shares no code with the computation of orders.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Call, Launch, LaunchOrder, LaunchQueue, Start};

/// Runs all programs at random speeds on devices without tags. Panics if messages are confused or the ranks deadlock.
pub fn run(programs: &[Vec<Call>], orders: Vec<LaunchOrder>, seed: u64) {
    let mut random = seed;
    let mut ranks: Vec<Device> = programs.iter().zip(orders).map(|(calls, order)| Device::new(calls, order)).collect();
    loop {
        // Start with a random rank.
        let count = ranks.len();
        let first = next(&mut random) as usize % count;
        let moved = (0..count).map(|i| (first + i) % count).any(|rank| {
            let device_first = next(&mut random) & 1 == 0;
            (device_first && connect(&mut ranks, rank)) || ranks[rank].call(rank) || connect(&mut ranks, rank)
        });
        if !moved {
            break;
        }
    }
    for (index, rank) in ranks.iter().enumerate() {
        assert!(rank.calls.is_empty() && rank.stream.is_empty(), "rank {index} hangs before {:?}", rank.calls.first());
        assert!(rank.queue.is_over());
    }
}

struct Device<'a> {
    calls: &'a [Call],
    starts: Vec<Start>,
    queue: LaunchQueue,
    /// Operations that were launched but have not completed.
    stream: VecDeque<Launch>,
    through: Vec<usize>,
}

impl<'a> Device<'a> {
    fn new(calls: &'a [Call], order: LaunchOrder) -> Self {
        let starts = order.starts.clone();
        let queue = LaunchQueue::new(&Arc::new(order));
        Self { calls, starts, queue, stream: VecDeque::new(), through: Vec::new() }
    }

    /// Executes the next call of the program and returns true, or returns false if the call has to wait.
    fn call(&mut self, me: usize) -> bool {
        let Some((call, rest)) = self.calls.split_first() else { return false };
        match call {
            Call::Wait(start) if !self.through.contains(start) => return false,
            Call::Start(start) => {
                self.queue.start(me, *start).expect("the program is the one agreed on");
                self.stream.extend(std::iter::from_fn(|| self.queue.launch()));
            }
            Call::Wait(_) | Call::Compute(_) => {}
        }
        self.calls = rest;
        true
    }

    fn head(&self) -> Option<Start> {
        match self.stream.front()? {
            Launch::One(start) => Some(self.starts[*start]),
            Launch::Oneself { send, .. } => Some(self.starts[*send]),
        }
    }

    /// Completes the first launch of the stream. Returns the number of equal starts that come before this launch's
    /// start in the program.
    fn pass(&mut self) -> usize {
        let Some(Launch::One(start)) = self.stream.pop_front() else { panic!("the head is one start") };
        self.through.push(start);
        self.starts[..start].iter().filter(|other| **other == self.starts[start]).count()
    }
}

/// Completes the next operation of a rank if the rank at the operation's other end is at the operation too. Returns
/// true if the operation was completed.
fn connect(ranks: &mut [Device], me: usize) -> bool {
    if let Some(&Launch::Oneself { send, receive }) = ranks[me].stream.front() {
        let Start::Send { to, tag, len } = ranks[me].starts[send] else { panic!("a send") };
        assert_eq!((to, ranks[me].starts[receive]), (me, Start::Receive { from: me, tag, len }));
        ranks[me].stream.pop_front();
        ranks[me].through.extend([send, receive]);
        return true;
    }
    match ranks[me].head() {
        None | Some(Start::Receive { .. }) => false,
        Some(Start::Send { to, tag, len }) => {
            let Some(Start::Receive { from, tag: expected, len: room }) = ranks[to].head() else { return false };
            if from != me {
                return false;
            }
            assert_eq!((tag, len), (expected, room), "another message than the receiver expects");
            assert_eq!(ranks[me].pass(), ranks[to].pass(), "an older message of the tag is still to come");
            true
        }
        Some(collective @ Start::Collective(_)) => {
            let all = ranks.iter().all(|rank| rank.head() == Some(collective));
            if all {
                ranks.iter_mut().for_each(|rank| _ = rank.pass());
            }
            all
        }
    }
}

/// A xorshift generator.
fn next(state: &mut u64) -> u64 {
    *state |= 1;
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 20
}
