//! One step, served by the arena and by the other allocators.

use std::collections::HashSet;

use gapless_alloc::arena::{
    Arena, ArenaOptions, ArenaPlan, ArenaReport, Request, Reserve, Served, check_run, rehearse,
};
use gapless_alloc::{BufferId, Problem, lower_bound};
use gapless_allocators::{Allocator, Device, PyTorch, PyTorchOptions, StAlloc};
use gapless_allocators::{Requests, replay, smallest_capacity};

const STEP: u64 = 2 << 20;

/// A step whose sizes are known in advance.
pub struct Case<'c> {
    pub name: String,
    /// Static and dynamic buffers together.
    pub whole: &'c Problem,
    pub dynamic: &'c [BufferId],
    /// The static buffers and their plan.
    pub fixed: &'c Problem,
    pub offsets: &'c [u64],
    pub requests: &'c [Request],
    /// Bytes that each request asks for.
    pub bytes: &'c [u64],
    /// Ticks at which phases begin, if they are known.
    pub phases: &'c [u64],
    /// Number of times that the allocators run the step.
    pub iterations: u64,
}

/// Bytes reserved on a large device, and on the smallest device that suffices.
#[derive(Debug, Clone, Copy)]
pub struct Reserved {
    pub reserved: u64,
    pub smallest: u64,
}

/// A line of the table.
pub struct Row {
    pub name: String,
    pub live: u64,
    /// Static height plus reserve. On a large device, only the part of the reserve that was ever in use counts.
    pub arena: Reserved,
    pub reuse_share: f64,
    pub fragmentation: f64,
    /// STAlloc, PyTorch with its defaults, and PyTorch with expandable segments.
    pub peers: [Reserved; 3],
}

impl Row {
    /// Returns the fewest bytes that any of the other allocators took.
    pub fn best(&self, bytes: impl Fn(&Reserved) -> u64) -> u64 {
        self.peers.iter().map(bytes).min().expect("there are three")
    }

    pub fn print_header() {
        println!(
            "{:42} {:>8}  {:>13} {:>6} {:>6}  {:>13} {:>13} {:>13}",
            "reserved / live (smallest that does)",
            "live GiB",
            "arena",
            "reuse",
            "frag.",
            "stalloc",
            "pytorch",
            "expandable"
        );
    }

    /// The reserved and the smallest sufficient bytes ÷ the live bytes, of the arena and of the other allocators.
    fn cells(&self, between: &str) -> [String; 4] {
        let [stalloc, pytorch, expandable] = &self.peers;
        [&self.arena, stalloc, pytorch, expandable].map(|r| {
            let [reserved, smallest] = [r.reserved, r.smallest].map(|bytes| bytes as f64 / self.live as f64);
            format!("{reserved:.4}{between}{smallest:.4}")
        })
    }

    /// The line of docs/arena.md.
    pub fn markdown(&self) -> String {
        let [arena, stalloc, pytorch, expandable] = self.cells(" / ");
        format!("| {} | {arena} | {stalloc} | {pytorch} | {expandable} |", self.name)
    }

    pub fn print(&self) {
        let [arena, stalloc, pytorch, expandable] = self.cells(" ");
        let live = self.live as f64 / (1u64 << 30) as f64;
        println!(
            "{:42} {live:>8.2}  {arena:>13} {:>6.3} {:>6.4}  {stalloc:>13} {pytorch:>13} {expandable:>13}",
            self.name, self.reuse_share, self.fragmentation
        );
    }
}

impl Case<'_> {
    /// Runs the step through the arena and all other allocators.
    pub fn row(&self) -> Row {
        let ample = self.checked_report(u64::MAX >> 8).high_water_bytes;
        let static_height = self.static_height();
        // A larger reserve does not always serve the requests that a smaller reserve served. In the same way, other
        // allocators may fail on a larger device than one on which they complete.
        let (mut fails, mut serves) = (0, ample.div_ceil(STEP));
        while self.run(serves * STEP).is_none() {
            serves += serves / 64 + 1;
        }
        while fails < serves {
            let middle = fails + (serves - fails) / 2;
            match self.run(middle * STEP) {
                Some(_) => serves = middle,
                None => fails = middle + 1,
            }
        }
        let report = self.checked_report(serves * STEP);
        let (reserved, smallest) = (static_height + ample, static_height + report.high_water_bytes);
        Row {
            name: self.name.clone(),
            live: lower_bound(self.whole),
            arena: Reserved { reserved, smallest },
            reuse_share: report.reuse_share(),
            fragmentation: report.fragmentation(),
            peers: self.peers(),
        }
    }

    fn static_height(&self) -> u64 {
        let ends =
            self.fixed.buffers().iter().zip(self.offsets).filter(|(b, _)| b.bytes > 0).map(|(b, at)| at + b.bytes);
        ends.max().unwrap_or(0)
    }

    /// Runs the step with a reserve of this many bytes. Returns the arena and the served requests, or `None` if a
    /// request overflows.
    fn run(&self, reserve: u64) -> Option<(Arena, Vec<Served>)> {
        let options = ArenaOptions::with_reserve(Reserve::Bytes(reserve));
        let plan = ArenaPlan::new(self.fixed, self.offsets, self.requests.to_vec(), &options).expect("sound requests");
        let mut arena = Arena::new(plan);
        let run = rehearse(&mut arena, |id| self.bytes[id.index()]);
        run.overflows.is_empty().then_some((arena, run.served))
    }

    /// Like [`run`](Self::run), for a reserve that suffices. It also checks the addresses.
    fn checked_report(&self, reserve: u64) -> ArenaReport {
        let (arena, served) = self.run(reserve).expect("it does");
        let limit = arena.plan().height();
        check_run(self.fixed, self.offsets, self.requests, &served, limit).expect("nothing overlaps");
        arena.report()
    }

    fn peers(&self) -> [Reserved; 3] {
        let requests = Requests::new(self.whole);
        let dynamic: HashSet<BufferId> = self.dynamic.iter().copied().collect();
        let measure = |build: &dyn Fn(Device) -> Box<dyn Allocator>| {
            let report =
                replay(&requests, &mut *build(Device::new(1 << 44)), self.iterations).expect("16 TiB are enough");
            let reserved = report.peak_reserved();
            let build = |capacity| build(Device::new(capacity));
            let (smallest, _) =
                smallest_capacity(&requests, self.iterations, reserved / 8 * 9, build).expect("it did before");
            Reserved { reserved, smallest }
        };
        let pytorch = |options: PyTorchOptions| {
            measure(&move |device| Box::new(PyTorch::new(device, options.clone())) as Box<dyn Allocator>)
        };
        let stalloc = |phases: &[u64]| {
            measure(&|device| {
                Box::new(StAlloc::with(device, self.whole, &requests, phases, |id| dynamic.contains(&id)))
                    as Box<dyn Allocator>
            })
        };
        // STAlloc's planner has two algorithms; the better of their results counts.
        let ways = [&[][..], self.phases].into_iter().take(if self.phases.is_empty() { 1 } else { 2 });
        let stalloc = ways.map(stalloc).min_by_key(|r| r.reserved).expect("there is one");
        [stalloc, pytorch(PyTorchOptions::default()), pytorch(PyTorchOptions::expandable())]
    }
}
