//! A few instructions that may change places, and the order of them in which least is alive.
//!
//! What is alive depends on the set of instructions that have run, not on their order. So the sets are searched, from none to
//! all, those first whose way has needed least so far (Dijkstra's way for a greatest edge instead of a sum); and an
//! instruction that lets go of as much as it makes, and needs no more than was needed before, is taken at once: no order is
//! worse for that.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Instructions of a window, at most: the bits of a [`Done`].
pub(super) const WINDOW: usize = 64;

/// Sets that are looked at before a window is left as it is.
const SETS: usize = 4096;

/// Instructions that have run.
type Done = u64;

/// Instructions in the order that they have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Window {
    resources: Vec<Resource>,
    /// By instruction: the resources that it touches, and its scratch.
    touches: Vec<Vec<usize>>,
    workspace: Vec<u64>,
    /// By instruction: those that must have run.
    before: Vec<Done>,
}

/// Bytes that several of the instructions may use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Resource {
    bytes: u64,
    users: Done,
    /// Users that write, and those behind the last of them in the order that there was.
    last_write: Done,
    behind: Done,
    /// Whether it is there before its first user here, and behind its last.
    born: bool,
    dies: bool,
}

impl Resource {
    fn is_alive(&self, done: Done) -> bool {
        (!self.born || done & self.users != 0) && (!self.dies || self.users & !done != 0)
    }
}

impl Window {
    /// A resource that is born with its first user here, or dies with its last.
    pub fn add(&mut self, bytes: u64, born: bool, dies: bool) -> usize {
        self.resources.push(Resource { bytes, born, dies, ..Resource::default() });
        self.resources.len() - 1
    }

    /// The next instruction: what it touches, and whether it writes that.
    pub fn push(&mut self, touches: Vec<(usize, bool)>, workspace: u64) {
        let own = 1 << self.touches.len();
        let mut before = 0;
        for &(resource, writes) in &touches {
            let resource = &mut self.resources[resource];
            before |= resource.last_write;
            if writes {
                before |= resource.behind;
                (resource.last_write, resource.behind) = (own, 0);
            } else {
                resource.behind |= own;
            }
            resource.users |= own;
        }
        self.before.push(before);
        self.touches.push(touches.into_iter().map(|(resource, _)| resource).collect());
        self.workspace.push(workspace);
    }

    /// The bytes that are alive while each runs, in an order or the beginning of one.
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

    /// The bytes that are alive while an instruction runs, and behind it.
    fn run(&self, index: usize, done: Done, now: u64) -> (u64, u64) {
        let resources = || self.touches[index].iter().map(|&resource| &self.resources[resource]);
        let born = resources().filter(|resource| !resource.is_alive(done));
        let all = now + born.map(|resource| resource.bytes).sum::<u64>();
        let dies = resources().filter(|resource| !resource.is_alive(done | 1 << index));
        (all + self.workspace[index], all - dies.map(|resource| resource.bytes).sum::<u64>())
    }

    /// The order whose most live bytes are least, unless none was found that has less than the one there is.
    pub fn solve(&self) -> Option<Vec<usize>> {
        let count = self.touches.len();
        let there: Vec<usize> = (0..count).collect();
        let limit = self.live(&there).into_iter().max()?;
        let all = Done::MAX >> (Done::BITS as usize - count);
        // By set: the most bytes on the best way to it, and its last instruction.
        let mut best: HashMap<Done, (u64, usize)> = HashMap::new();
        // What was needed so far, how many have run, which, and what is alive then.
        let mut ahead = BinaryHeap::from([Reverse((0, Reverse(0), 0, self.at_first()))]);
        let mut looked_at = 0;
        while let Some(Reverse((most, Reverse(ran), done, now))) = ahead.pop() {
            if done == all {
                return Some(backwards(&best, done));
            }
            if best.get(&done).is_some_and(|known| known.0 < most) {
                continue;
            }
            looked_at += 1;
            if looked_at > SETS {
                return None;
            }
            let ready = (0..count).filter(|&index| done >> index & 1 == 0 && self.before[index] & !done == 0);
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

/// The order that leads to a set.
fn backwards(best: &HashMap<Done, (u64, usize)>, mut done: Done) -> Vec<usize> {
    let mut order = Vec::new();
    while let Some(&(_, last)) = best.get(&done) {
        order.push(last);
        done &= !(1 << last);
    }
    order.reverse();
    order
}
