//! Random iterations on three streams whose work takes time. A shadow of the device knows which work was seen to be
//! complete, and nothing else of the allocator.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use gapless_testing::prelude::*;
use gapless_torch::pages::{Event, PagesError, StreamHandle};
use gapless_torch::{CountedPages, Device, Options, Pages};

const STREAMS: [StreamHandle; 3] = [0, 7, 9];

/// Events by number, and the last free on each stream before the last event that was seen to be complete.
#[derive(Default)]
struct Clock {
    now: u64,
    events: Vec<(StreamHandle, u64)>,
    seen: BTreeMap<StreamHandle, u64>,
    /// Queries until the next one that says yes.
    patience: u64,
}

/// Counted pages, with events that are not done at first.
struct SlowPages(CountedPages, Arc<Mutex<Clock>>);

impl SlowPages {
    fn see(clock: &mut Clock, event: Event) {
        let (stream, time) = clock.events[event.0 as usize];
        let seen = clock.seen.entry(stream).or_default();
        *seen = (*seen).max(time);
    }
}

impl Pages for SlowPages {
    fn page(&self) -> u64 {
        self.0.page()
    }
    fn reserve(&mut self, bytes: u64) -> Result<u64, PagesError> {
        self.0.reserve(bytes)
    }
    fn map(&mut self, address: u64, bytes: u64) -> Result<(), PagesError> {
        self.0.map(address, bytes)
    }
    fn unmap(&mut self, address: u64, bytes: u64) {
        self.0.unmap(address, bytes);
    }
    fn trim(&mut self) {
        self.0.trim();
    }
    fn memory(&self) -> (u64, u64) {
        self.0.memory()
    }
    fn record(&mut self, stream: StreamHandle) -> Event {
        let clock = &mut *self.1.lock().unwrap();
        clock.events.push((stream, clock.now));
        Event(clock.events.len() as u64 - 1)
    }
    fn is_done(&mut self, event: Event) -> bool {
        let clock = &mut *self.1.lock().unwrap();
        clock.patience = (clock.patience + 1) % 3;
        if clock.patience == 0 {
            Self::see(clock, event);
        }
        clock.patience == 0
    }
    fn forget(&mut self, _: Event) {}
    fn wait(&mut self, event: Event) {
        Self::see(&mut self.1.lock().unwrap(), event);
    }
}

#[derive(Debug, Clone)]
enum Op {
    Allocate {
        pages: u64,
        bytes: u64,
        stream: usize,
    },
    /// Frees one of the living requests.
    Free(usize),
    Use(usize, usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..3u64, 1..1_500_000u64, 0..3usize)
            .prop_map(|(pages, bytes, stream)| Op::Allocate { pages, bytes, stream: stream.saturating_sub(1) }),
        4 => any::<prop::sample::Index>().prop_map(|index| Op::Free(index.index(64))),
        1 => (0..64usize, 0..3usize).prop_map(|(index, stream)| Op::Use(index, stream)),
    ]
}

/// A request that is alive: address, bytes, stream, other streams.
struct Living(u64, u64, StreamHandle, Vec<StreamHandle>);

/// The device's allocator, and the shadow that judges it.
struct Shadow {
    device: Device,
    clock: Arc<Mutex<Clock>>,
    living: Vec<Living>,
    /// Freed bytes: for each 512 of them the streams that used them, and when they were freed.
    used: BTreeMap<u64, (StreamHandle, Vec<StreamHandle>, u64)>,
}

impl Shadow {
    fn apply(&mut self, op: &Op, scale: u64) -> Result<(), TestCaseError> {
        match *op {
            Op::Allocate { pages, bytes, stream } => {
                let (bytes, stream) = ((pages << 21) + bytes * scale, STREAMS[stream]);
                let Ok(address) = self.device.allocate(bytes, stream) else { return Ok(()) };
                let rounded = bytes.next_multiple_of(512);
                let clock = self.clock.lock().unwrap();
                let seen = |stream: &StreamHandle| clock.seen.get(stream).copied();
                for (piece, (owner, others, freed)) in self.used.range(address..address + rounded) {
                    let waits = others.iter().chain((*owner != stream).then_some(owner));
                    for other in waits {
                        let complete = seen(other).is_some_and(|time| time >= *freed);
                        prop_assert!(complete, "{piece:#x} is reused by {stream} while {other} may still use it");
                    }
                }
                drop(clock);
                let pieces: Vec<u64> = self.used.range(address..address + rounded).map(|(&piece, _)| piece).collect();
                pieces.iter().for_each(|piece| drop(self.used.remove(piece)));
                self.living.push(Living(address, rounded, stream, Vec::new()));
            }
            Op::Free(index) if !self.living.is_empty() => {
                let Living(address, bytes, stream, others) = self.living.remove(index % self.living.len());
                self.clock.lock().unwrap().now += 1;
                let now = self.clock.lock().unwrap().now;
                for piece in (address..address + bytes).step_by(512) {
                    self.used.insert(piece, (stream, others.clone(), now));
                }
                prop_assert!(self.device.free(address));
            }
            Op::Use(index, stream) if !self.living.is_empty() => {
                let index = index % self.living.len();
                let stream = STREAMS[stream];
                if stream != self.living[index].2 {
                    self.living[index].3.push(stream);
                    self.device.record_use(self.living[index].0, stream);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

generated! {
    #![cases(100)]

    /// An iteration repeats, is played, deviates (other sizes, a part of it only, other operations in between) and
    /// repeats again.
    #[test]
    fn no_stream_reuses_bytes_too_early(
        first in prop::collection::vec(op(), 4..60),
        other in prop::collection::vec(op(), 0..20),
        turns in prop::collection::vec((0..8u8, 0..60usize), 4..16),
        capacity in 10..200u64,
    ) {
        let clock = Arc::new(Mutex::new(Clock::default()));
        let pages = SlowPages(CountedPages::new(capacity << 21), clock.clone());
        let options = Options { check: true, wait_for_plan: true, saved_plan: None };
        let device = Device::new(0, Box::new(pages), options).unwrap();
        let mut shadow = Shadow { device, clock, living: Vec::new(), used: BTreeMap::new() };
        for (turn, at) in turns {
            let cut = if turn == 5 { at.min(first.len()) } else { first.len() };
            for (k, op) in first[..cut].iter().enumerate() {
                if turn == 6 && k == at {
                    other.iter().try_for_each(|op| shadow.apply(op, 1))?;
                }
                shadow.apply(op, if turn == 7 { 2 } else { 1 })?;
            }
            // Most iterations free all that they made.
            if turn != 4 {
                while !shadow.living.is_empty() {
                    shadow.apply(&Op::Free(0), 1)?;
                }
            }
            if turn == 3 {
                shadow.device.empty_cache();
            }
            shadow.device.step();
        }
    }
}

/// Iterations without deviations are played exactly, and cost no device calls.
#[test]
fn an_iteration_that_repeats_is_played() {
    let options = Options { check: true, wait_for_plan: true, saved_plan: None };
    let mut device = Device::new(0, Box::new(CountedPages::new(1 << 32)), options).unwrap();
    let weights: Vec<u64> = (1..9).map(|k| device.allocate(k * 1_000_000, 0).unwrap()).collect();
    let mut calls = 0;
    for iteration in 0..10 {
        let activations: Vec<u64> = (1..40).map(|k| device.allocate(k * 300_000, 0).unwrap()).collect();
        for address in activations.into_iter().rev() {
            let gradient = device.allocate(500_000, 0).unwrap();
            device.free(address);
            device.free(gradient);
        }
        device.step();
        if iteration == 2 {
            calls = device.report().device_calls;
        }
    }
    let report = device.report();
    assert_eq!((report.plans, report.exact_iterations, report.deviations), (1, 7, 0));
    assert_eq!((report.device_calls, report.planned), (calls, report.lower_bound));
    // An evaluation in between, and play is exact again.
    let evaluated = device.allocate(77_777_777, 0).unwrap();
    device.free(evaluated);
    device.step();
    assert_eq!(device.report().reserved, report.reserved, "the evaluation's pages were given back");
    assert!(weights.iter().all(|&address| device.free(address)));
}

/// A saved plan is played from the first request on.
#[test]
fn a_saved_plan_is_played_from_the_start() {
    let folder = std::env::temp_dir().join(format!("gapless-torch-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("plan");
    for run in 0..2 {
        let options = Options { check: true, wait_for_plan: true, saved_plan: Some(path.clone()) };
        let mut device = Device::new(0, Box::new(CountedPages::new(1 << 32)), options).unwrap();
        let weights: Vec<u64> = (1..9).map(|k| device.allocate(k * 1_000_000, 0).unwrap()).collect();
        let mut states = Vec::new();
        for iteration in 0..5 {
            let activations: Vec<u64> = (1..40).map(|k| device.allocate(k * 300_000, 0).unwrap()).collect();
            if iteration == 0 {
                states.extend((1..9).map(|k| device.allocate(k * 2_000_000, 0).unwrap()));
            }
            assert!(activations.into_iter().all(|address| device.free(address)));
            device.step();
        }
        let report = device.report();
        assert_eq!(report.exact_iterations, if run == 0 { 2 } else { 5 }, "{report:?}");
        assert!(run == 0 || report.most_reserved < report.most_requested + (2 << 20), "{report:?}");
        drop((weights, states));
    }
    // A file that was changed is refused, and the run goes on without it.
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(
        &path,
        text.replacen("\"offsets\":[0", "\"offsets\":[512", 1).replace("\"version\":1", "\"version\":9"),
    )
    .unwrap();
    let options = Options { saved_plan: Some(path), ..Options::default() };
    let device = Device::new(0, Box::new(CountedPages::new(1 << 32)), options).unwrap();
    assert!(device.report().remark.unwrap().contains("version 9"));
    std::fs::remove_dir_all(folder).unwrap();
}
