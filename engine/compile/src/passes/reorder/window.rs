//! A window of instructions, and the search for its order with the lowest peak of live bytes.
//!
//! The live bytes depend only on the set of instructions that have run, not on their order. So the search runs over
//! sets, from the empty to the full one, in the order of the peak needed to reach them. This is Dijkstra's algorithm
//! with the maximum edge of a path instead of the sum. An instruction that frees at least what it allocates, and needs
//! no higher peak than before, is taken at once, because no order is worse for it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Maximum number of instructions in a window: the bits of a [`Done`].
pub(super) const WINDOW: usize = 64;

/// Maximum number of sets to examine before the window is left unchanged.
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
    /// By instruction: the ones that must run before it.
    predecessors: Vec<Done>,
}

/// A buffer or row count that several of the instructions may use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Resource {
    bytes: u64,
    users: Done,
    /// The last instruction that writes it, in the current order.
    last_write: Done,
    /// Readers after the last write.
    readers: Done,
    /// Whether its first use lies in this window, so that it is not live before.
    born: bool,
    /// Whether its last use lies in this window, so that it is not live after.
    dies: bool,
}

impl Resource {
    fn is_alive(&self, done: Done) -> bool {
        (!self.born || done & self.users != 0) && (!self.dies || self.users & !done != 0)
    }
}

impl Window {
    /// Adds a resource. `born` and `dies` say whether its lifetime starts and ends in this window.
    pub fn add(&mut self, bytes: u64, born: bool, dies: bool) -> usize {
        self.resources.push(Resource { bytes, born, dies, ..Resource::default() });
        self.resources.len() - 1
    }

    /// Appends an instruction: the resources that it touches, and for each whether it writes it.
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

    /// The live bytes while each instruction of an order, or of the beginning of one, runs.
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

    /// The live bytes while an instruction runs, and after it.
    fn run(&self, index: usize, done: Done, now: u64) -> (u64, u64) {
        let resources = || self.touches[index].iter().map(|&resource| &self.resources[resource]);
        let born = resources().filter(|resource| !resource.is_alive(done));
        let all = now + born.map(|resource| resource.bytes).sum::<u64>();
        let dies = resources().filter(|resource| !resource.is_alive(done | 1 << index));
        (all + self.workspace[index], all - dies.map(|resource| resource.bytes).sum::<u64>())
    }

    /// The order with the lowest peak, or `None` if none better than the current order was found.
    pub fn solve(&self) -> Option<Vec<usize>> {
        let count = self.touches.len();
        let there: Vec<usize> = (0..count).collect();
        let limit = self.live(&there).into_iter().max()?;
        let all = Done::MAX >> (Done::BITS as usize - count);
        // By set: the lowest peak needed to reach it, and the last instruction on that path.
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
