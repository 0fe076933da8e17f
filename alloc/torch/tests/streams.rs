//! Random iterations on three streams whose work takes time. A shadow of the device knows which work was seen to be
//! complete, and nothing else of the allocator.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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
    #![cases(24)]

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

    /// A loop with requests that stay for up to two iterations is recorded and saved. The next run plays its plan, and
    /// some of its iterations are changed.
    #[test]
    fn a_saved_plan_survives_changes(
        templates in prop::collection::vec(template(), 2..12),
        runs in prop::collection::vec(prop::collection::vec(change(), 1..3), 6),
    ) {
        let folder = Folder::new("changes");
        for changes in std::iter::once(&Vec::new()).chain(&runs) {
            let clock = Arc::new(Mutex::new(Clock::default()));
            let pages = SlowPages(CountedPages::new(1 << 30), clock.clone());
            let options = Options { check: true, wait_for_plan: true, saved_plan: Some(folder.0.join("plan")) };
            let device = Device::new(0, Box::new(pages), options).unwrap();
            let mut shadow = Shadow { device, clock, living: Vec::new(), used: BTreeMap::new() };
            run_loop(&mut shadow, &templates, changes)?;
        }
    }
}

/// A request of every iteration of a loop: its size, and when it is used on another stream and freed.
#[derive(Debug, Clone)]
struct Template {
    bytes: u64,
    stream: usize,
    /// Iterations between the request and its free.
    age: usize,
    /// The free comes before the template of this number.
    before: usize,
    /// Another stream uses the request before its free.
    shared: bool,
}

fn template() -> impl Strategy<Value = Template> {
    let bytes = prop_oneof![9 => (1..4u64).prop_map(|k| k * 16_384), 1 => Just((2 << 20) + 16_384)];
    let streams = prop_oneof![3 => Just(0usize), 1 => Just(1)];
    (bytes, streams, 0..3usize, 0..12usize, any::<bool>()).prop_map(|(bytes, stream, age, before, shared)| Template {
        bytes,
        stream,
        age,
        before,
        shared: shared && age > 0,
    })
}

/// A change of one iteration.
#[derive(Debug, Clone, Copy)]
enum Change {
    None,
    /// Exchanges a request with the next one.
    Swap,
    LeaveOut,
    /// Adds requests that are freed at the end of the iteration.
    Add,
}

/// A change: iteration, kind, place. Every second one is of the first iteration, whose requests later ones free.
fn change() -> impl Strategy<Value = (usize, Change, usize)> {
    let iteration = prop_oneof![Just(0usize), 0..10usize];
    let kind = prop_oneof![2 => Just(Change::Swap), 1 => Just(Change::LeaveOut), 2 => Just(Change::Add)];
    (iteration, kind, 0..12usize)
}

/// Runs a loop. Requests are known by iteration and index, as in the recording, so that a changed iteration has the frees
/// of the unchanged one.
fn run_loop(
    shadow: &mut Shadow,
    templates: &[Template],
    changes: &[(usize, Change, usize)],
) -> Result<(), TestCaseError> {
    // Addresses of the requests of each iteration.
    let mut made: Vec<Vec<Option<u64>>> = Vec::new();
    for iteration in 0..10 {
        let &(_, change, at) = changes.iter().find(|change| change.0 == iteration).unwrap_or(&(0, Change::None, 0));
        made.push(Vec::new());
        let at = at % templates.len();
        let mut order: Vec<usize> = (0..templates.len()).collect();
        match change {
            Change::Swap => order.swap(at, (at + 1) % templates.len()),
            Change::LeaveOut => drop(order.remove(at)),
            Change::Add | Change::None => {}
        }
        let mut added = Vec::new();
        for place in 0..=templates.len() {
            for (index, template) in templates.iter().enumerate() {
                let before = template.before.min(templates.len());
                let due = before == place && (template.age > 0 || index < before)
                    || place == templates.len() && template.age == 0 && index >= before;
                if !due || template.age > iteration {
                    continue;
                }
                let slot = made[iteration - template.age].get_mut(index).and_then(Option::take);
                if let Some(at) = slot.and_then(|address| shadow.living.iter().position(|l| l.0 == address)) {
                    if template.shared {
                        shadow.apply(&Op::Use(at, 2), 1)?;
                    }
                    shadow.apply(&Op::Free(at), 1)?;
                }
            }
            if matches!(change, Change::Add) && place == at {
                for bytes in [16_384, 32_768, 49_152, 49_152, 16_384, 2 << 20] {
                    shadow.apply(&Op::Allocate { pages: 0, bytes, stream: 0 }, 1)?;
                    added.extend(shadow.living.last().map(|living| living.0));
                }
            }
            if let Some(&next) = order.get(place) {
                let Template { bytes, stream, .. } = templates[next];
                shadow.apply(&Op::Allocate { pages: 0, bytes, stream }, 1)?;
                made[iteration].push(shadow.living.last().map(|living| living.0));
            }
        }
        for address in added {
            let at = shadow.living.iter().position(|living| living.0 == address).expect("it is alive");
            shadow.apply(&Op::Free(at), 1)?;
        }
        shadow.device.step();
    }
    Ok(())
}

/// A folder of its own for a test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("gapless-torch-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A device that plays or saves the plan at `path`.
fn with_plan(path: &Path) -> Device {
    let options = Options { check: true, wait_for_plan: true, saved_plan: Some(path.into()) };
    Device::new(0, Box::new(CountedPages::new(1 << 32)), options).unwrap()
}

/// One request of each size, freed in the same order, and the iteration's end.
fn simple_iteration(device: &mut Device, sizes: &[u64]) {
    let addresses: Vec<u64> = sizes.iter().map(|&bytes| device.allocate(bytes, 0).unwrap()).collect();
    assert!(addresses.into_iter().all(|address| device.free(address)));
    device.step();
}

/// A first iteration in another order changes which request an index names. Play must not be exact while the script frees
/// requests of that iteration.
#[test]
fn a_request_in_another_order_is_not_mistaken() {
    let folder = Folder::new("order");
    for swapped in [false, true] {
        let mut device = with_plan(&folder.0.join("plan"));
        let sizes = if swapped { [20 << 20, 40 << 20] } else { [40 << 20, 20 << 20] };
        let mut first = sizes.map(|bytes| device.allocate(bytes, 0).unwrap())[0];
        device.step();
        for _ in 0..4 {
            device.free(first);
            let large = device.allocate(40 << 20, 0).unwrap();
            device.free(large);
            first = device.allocate(4 << 20, 0).unwrap();
            device.step();
        }
    }
}

/// In the repeated iteration, the use of a request two iterations old is the script's next event, but of a request that
/// the script has planned.
#[test]
fn a_planned_request_that_another_stream_uses_ends_exact_play() {
    let folder = Folder::new("use");
    for evaluated in [false, true] {
        let mut device = with_plan(&folder.0.join("plan"));
        let mut batches = std::collections::VecDeque::from([device.allocate(30 << 20, 0).unwrap()]);
        for iteration in 0..6 {
            batches.push_back(device.allocate(20 << 20, 0).unwrap());
            if batches.len() > 3 {
                let batch = batches.remove(1).unwrap();
                device.record_use(batch, 7);
                device.free(batch);
            }
            if evaluated && iteration == 4 {
                let evaluation = [(); 12].map(|()| device.allocate(19 << 20, 0).unwrap());
                assert!(evaluation.into_iter().all(|address| device.free(address)));
            }
            let activations = device.allocate(50 << 20, 0).unwrap();
            device.free(activations);
            device.step();
        }
    }
}

/// Devices of one process write their plans at the same time, so their partial files differ.
#[test]
fn a_plan_is_written_beside_its_own_name() {
    let folder = Folder::new("partial");
    let mut device = with_plan(&folder.0.join("plan.1"));
    let other = folder.0.join(format!("plan.{}.partial", std::process::id()));
    std::fs::create_dir(&other).unwrap();
    (0..3).for_each(|_| simple_iteration(&mut device, &[1 << 20, 2 << 20]));
    assert!(folder.0.join("plan.1").exists(), "{:?}", device.report());
}

/// A file that is not a saved plan keeps its content.
#[test]
fn another_file_is_not_overwritten() {
    let folder = Folder::new("notes");
    let path = folder.0.join("notes.0");
    std::fs::write(&path, "buy milk").unwrap();
    let mut device = with_plan(&path);
    (0..4).for_each(|_| simple_iteration(&mut device, &[1 << 20, 2 << 20]));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "buy milk");
    let report = device.report();
    assert!(report.remark.as_ref().is_some_and(|remark| remark.contains("not overwritten")), "{report:?}");
    assert_eq!(report.exact_iterations, 3);
}

/// A saved plan whose first iteration is still right is replaced when the later ones are not.
#[test]
fn a_stale_plan_is_replaced() {
    let folder = Folder::new("stale");
    let path = folder.0.join("plan");
    for (later, exact) in [([2 << 20], 2), ([3 << 20], 3), ([3 << 20], 6)] {
        let mut device = with_plan(&path);
        simple_iteration(&mut device, &[1 << 20]);
        (0..5).for_each(|_| simple_iteration(&mut device, &later));
        let report = device.report();
        assert!(report.exact_iterations >= exact, "{report:?}");
    }
}

/// The report says that a plan could not be written.
#[test]
fn a_failed_write_is_reported() {
    let folder = Folder::new("failed");
    let mut device = with_plan(&folder.0.join("missing").join("plan"));
    (0..4).for_each(|_| simple_iteration(&mut device, &[1 << 20]));
    let report = device.report();
    assert!(report.remark.as_ref().is_some_and(|remark| remark.contains("missing/plan")), "{report:?}");
    assert_eq!(report.exact_iterations, 3);
}

/// A plan that cannot be used is not made again in every iteration, and leaves no remark once another one is played.
#[test]
fn a_plan_without_memory_is_not_made_again() {
    let options = Options { check: true, wait_for_plan: true, saved_plan: None };
    let mut device = Device::new(0, Box::new(CountedPages::new(64 << 20)), options).unwrap();
    let kept = device.allocate(30 << 20, 0).unwrap();
    // Two streams in turns: together they are planned with 60 MiB, but need 30 MiB.
    let iteration = |device: &mut Device| {
        for stream in [0, 7] {
            let address = device.allocate(30 << 20, stream).unwrap();
            device.free(address);
        }
        device.step();
    };
    let mut calls = Vec::new();
    for _ in 0..6 {
        iteration(&mut device);
        calls.push(device.report().device_calls);
    }
    let report = device.report();
    assert!(report.remark.as_ref().is_some_and(|remark| remark.contains("no memory")), "{report:?}");
    assert_eq!((report.plans, calls[3]), (0, calls[5]), "{calls:?}");
    device.free(kept);
    (0..4).for_each(|_| simple_iteration(&mut device, &[1 << 20]));
    assert_eq!((device.report().plans, device.report().remark), (1, None));
}

/// A plan that has no memory does not end play of the one before it.
#[test]
fn a_plan_without_memory_leaves_the_earlier_one() {
    let options = Options { check: true, wait_for_plan: true, saved_plan: None };
    let mut device = Device::new(0, Box::new(CountedPages::new(40 << 20)), options).unwrap();
    (0..3).for_each(|_| simple_iteration(&mut device, &[20 << 20]));
    // Each iteration needs 24 MiB and keeps 10. After two of them, no 24 MiB are left.
    let mut kept = Vec::new();
    for _ in 0..2 {
        let address = device.allocate(24 << 20, 0).unwrap();
        device.free(address);
        kept.push(device.allocate(10 << 20, 0).unwrap());
        device.step();
    }
    let before = device.report();
    assert!(before.remark.as_ref().is_some_and(|remark| remark.contains("no memory")), "{before:?}");
    assert_eq!((before.plans, before.planned, before.exact_iterations), (1, 20 << 20, 2), "{before:?}");
    assert!(kept.into_iter().all(|address| device.free(address)));
    (0..3).for_each(|_| simple_iteration(&mut device, &[20 << 20]));
    let report = device.report();
    assert_eq!((report.plans, report.exact_iterations), (1, 4), "{report:?}");
}

/// Sizes that no device has are refused like any other that does not fit.
#[test]
fn a_size_above_all_addresses_is_refused() {
    let mut device = Device::new(0, Box::new(CountedPages::new(1 << 32)), Options::default()).unwrap();
    let small = device.allocate(1, 0).unwrap();
    for bytes in [u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 62] {
        let error = device.allocate(bytes, 0).unwrap_err().to_string();
        assert!(error.contains("out of memory"), "{error}");
    }
    assert!(device.free(small));
}

/// Plans that would stop the job are refused with a reason, and the run goes on without them.
#[test]
fn a_wrong_plan_is_refused() {
    let folder = Folder::new("wrong");
    let path = folder.0.join("plan");
    let mut device = with_plan(&path);
    (0..3).for_each(|_| simple_iteration(&mut device, &[1 << 20, 2 << 20]));
    let right: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    type Fault = fn(&mut serde_json::Value);
    let faults: [(&str, Fault); 9] = [
        ("no iterations", |script| script["iterations"] = serde_json::json!([])),
        ("end at 0", |script| script["streams"] = serde_json::json!([])),
        ("height", |script| script["height"] = (1u64 << 40).into()),
        ("height", |script| {
            script["height"] = (u64::MAX - 511).into();
            script["streams"][0][1]["end"] = (u64::MAX - 511).into();
        }),
        ("stream", |script| script["streams"][0][0] = u64::MAX.into()),
        ("events", |script| script["iterations"][0]["requests"][0]["bytes"] = 512.into()),
        ("events", |script| script["iterations"][0]["requests"][0]["outlives"] = 9.into()),
        ("not alive", |script| script["iterations"][0]["events"][2]["Free"]["index"] = 9.into()),
        ("follow", |script| script["streams"][0][1]["start"] = 512.into()),
    ];
    for (reason, fault) in faults {
        let mut wrong = right.clone();
        fault(&mut wrong["script"]);
        std::fs::write(&path, wrong.to_string()).unwrap();
        let mut device = with_plan(&path);
        let remark = device.report().remark.unwrap_or_default();
        assert!(remark.contains(reason), "{reason}: {remark}");
        (0..3).for_each(|_| simple_iteration(&mut device, &[1 << 20, 2 << 20]));
        assert_eq!((device.report().exact_iterations, device.report().remark), (2, None), "it is replaced");
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
    assert_eq!((report.plans, report.exact_iterations, report.deviations), (1, 9, 0));
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
        assert_eq!(report.exact_iterations, if run == 0 { 4 } else { 5 }, "{report:?}");
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
