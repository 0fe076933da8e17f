//! A window of instructions, and the search for its order with the lowest peak of live bytes.
//!
//! The live bytes depend only on the set of instructions that have run, not on their order. So the search runs over
//! sets, from the empty set to the full one, in the order of the lowest peak with which each set can be reached. This
//! is Dijkstra's algorithm, with the maximum edge of a path instead of the sum. An instruction that frees at least as
//! many bytes as it allocates, and does not raise the peak, is taken at once, because no order that postpones the
//! instruction is better.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Maximum number of instructions in a window, which is the number of bits of a [`Done`].
pub(super) const WINDOW: usize = 64;

/// Maximum number of sets that are examined. If the search needs more sets, the window is left unchanged.
const SETS: usize = 4096;

/// The set of instructions that have run.
type Done = u64;

/// Instructions in their current order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Window {
    resources: Vec<Resource>,
    /// By instruction: the resources that it touches.
    touches: Vec<Vec<usize>>,
    /// By instruction: its scratch bytes.
    workspace: Vec<u64>,
    /// By instruction: the instructions that must run before it.
    predecessors: Vec<Done>,
}

/// A buffer or row count that instructions of the window use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Resource {
    bytes: u64,
    users: Done,
    /// The last instruction that writes it, in the current order.
    last_write: Done,
    /// The instructions that read the resource after the last write.
    readers: Done,
    /// Whether the first use of the resource is in this window. If so, the resource is not live before it.
    born: bool,
    /// Whether the last use of the resource is in this window. If so, the resource is not live after it.
    dies: bool,
}

impl Resource {
    fn is_alive(&self, done: Done) -> bool {
        (!self.born || done & self.users != 0) && (!self.dies || self.users & !done != 0)
    }
}

impl Window {
    /// Adds a resource, and returns its index. `born` and `dies` say whether its lifetime starts and ends in this
    /// window.
    pub fn add(&mut self, bytes: u64, born: bool, dies: bool) -> usize {
        self.resources.push(Resource { bytes, born, dies, ..Resource::default() });
        self.resources.len() - 1
    }

    /// Appends an instruction. `touches` lists the resources that the instruction touches, each with true if the
    /// resource is written.
    pub fn push(&mut self, touches: Vec<(usize, bool)>, workspace: u64) {
        let own = 1 << self.touches.len();
        let mut before = 0;
        for &(resource, writes) in &touches {
            let resource = &mut self.resources[resource];
            before |= resource.last_write;
            if writes {
                before |= resource.readers;
                (resource.last_write, resource.readers) = (own, 0);
            } else {
                resource.readers |= own;
            }
            resource.users |= own;
        }
        self.predecessors.push(before);
        self.touches.push(touches.into_iter().map(|(resource, _)| resource).collect());
        self.workspace.push(workspace);
    }

    /// Returns the live bytes while each instruction of an order runs. The order may be incomplete.
    pub fn live(&self, order: &[usize]) -> Vec<u64> {
        let mut done = 0;
        let mut now = self.at_first();
        let live = order.iter().map(|&index| {
            let (during, after) = self.run(index, done, now);
            (done, now) = (done | 1 << index, after);
            during
        });
        live.collect()
    }

    fn at_first(&self) -> u64 {
        self.resources.iter().filter(|resource| resource.is_alive(0)).map(|resource| resource.bytes).sum()
    }

    /// Returns the live bytes while an instruction runs, and the live bytes after it has run. `done` is the set of
    /// instructions that have run before, and `now` is the number of bytes that are live before the instruction.
    fn run(&self, index: usize, done: Done, now: u64) -> (u64, u64) {
        let resources = || self.touches[index].iter().map(|&resource| &self.resources[resource]);
        let born = resources().filter(|resource| !resource.is_alive(done));
        let all = now + born.map(|resource| resource.bytes).sum::<u64>();
        let dies = resources().filter(|resource| !resource.is_alive(done | 1 << index));
        (all + self.workspace[index], all - dies.map(|resource| resource.bytes).sum::<u64>())
    }

    /// Returns the order with the lowest peak, or `None` if no better order than the current one was found.
    pub fn solve(&self) -> Option<Vec<usize>> {
        let count = self.touches.len();
        let there: Vec<usize> = (0..count).collect();
        let limit = self.live(&there).into_iter().max()?;
        let all = Done::MAX >> (Done::BITS as usize - count);
        // By set: the lowest peak with which the set can be reached, and the last instruction of the order that reaches
        // it.
        let mut best: HashMap<Done, (u64, usize)> = HashMap::new();
        // Queue entries: the peak so far, the number of instructions run, their set, and the live bytes after them.
        let mut ahead = BinaryHeap::from([Reverse((0, Reverse(0), 0, self.at_first()))]);
        let mut looked_at = 0;
        while let Some(Reverse((most, Reverse(ran), done, now))) = ahead.pop() {
            if done == all {
                return Some(reconstruct(&best, done));
            }
            if best.get(&done).is_some_and(|known| known.0 < most) {
                continue;
            }
            looked_at += 1;
            if looked_at > SETS {
                return None;
            }
            let ready = (0..count).filter(|&index| done >> index & 1 == 0 && self.predecessors[index] & !done == 0);
            let mut next: Vec<(usize, u64, u64)> = Vec::new();
            for index in ready {
                let (during, after) = self.run(index, done, now);
                if during <= most && after <= now {
                    next = vec![(index, during, after)];
                    break;
                }
                next.push((index, during, after));
            }
            for (index, during, after) in next.into_iter().filter(|next| next.1 < limit) {
                let (then, most) = (done | 1 << index, most.max(during));
                if best.get(&then).is_none_or(|known| most < known.0) {
                    best.insert(then, (most, index));
                    ahead.push(Reverse((most, Reverse(ran + 1), then, after)));
                }
            }
        }
        None
    }
}

/// Reconstructs the order that leads to a set.
fn reconstruct(best: &HashMap<Done, (u64, usize)>, mut done: Done) -> Vec<usize> {
    let mut order = Vec::new();
    while let Some(&(_, last)) = best.get(&done) {
        order.push(last);
        done &= !(1 << last);
    }
    order.reverse();
    order
}
