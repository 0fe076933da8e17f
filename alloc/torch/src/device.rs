//! The allocator of one device: it records iterations, plans the first one and those that repeat, and plays the plan.
//!
//! ```text
//! record ──first iteration──▶ predict ──second is as predicted──▶ play ──two equal, other iterations──▶ plan
//!                               └───────second is another───────▶ record ──two equal iterations──▶ plan (a thread) ──▶ play
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use gapless_alloc::Buffer;

use crate::checker::Checker;
use crate::heap::Heap;
use crate::pages::{self, Pages, PagesError, Stream, StreamHandle};
use crate::player::Player;
use crate::recording::{Event, Iteration, Key};
use crate::report::Report;
use crate::saved;
use crate::script::{self, ALIGNMENT, NoPlan, Script};

/// Options of a device's allocator.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Checks every request and free against all living requests.
    pub check: bool,
    /// Plans before the next iteration begins, instead of beside it.
    pub wait_for_plan: bool,
    /// The file of a saved plan. It is played from the first request on if it exists, and written when a plan is made.
    pub saved_plan: Option<PathBuf>,
}

/// A request that could not be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "gapless: out of memory on CUDA device {device}: {requested} bytes were requested; {alive} bytes are alive, \
     {reserved} are mapped, of which {idle} are idle and {planned} are planned; {free} of the device's {total} bytes are \
     free ({cause}). Lower the micro-batch, or recompute activations"
)]
#[allow(missing_docs, reason = "the message names the fields")]
pub struct OutOfMemory {
    pub device: usize,
    pub requested: u64,
    pub alive: u64,
    pub reserved: u64,
    pub idle: u64,
    pub planned: u64,
    pub free: u64,
    pub total: u64,
    pub cause: PagesError,
}

/// The number of iterations from the start that a saved plan may have.
const MOST_SAVED: usize = 16;

/// The number of requests without a free between them after which the first iteration's further ones are expected to stay.
/// An optimizer requests its states like this; a forward frees something every few requests.
const RUN_THAT_STAYS: u32 = 4;

/// The iteration from which on a job without a plan has a reserve: its iterations do not repeat.
const RESERVE_FROM: u64 = 4;

/// The reserve is the most bytes requested, divided by this.
const RESERVE_SHARE: u64 = 100;

/// A living request.
#[derive(Debug)]
struct Block {
    bytes: u64,
    stream: Stream,
    iteration: u64,
    index: u32,
    /// The request of the script that has this place.
    planned: Option<(usize, usize)>,
    /// Other streams that use the memory.
    uses: Vec<Stream>,
}

/// Memory that was freed while another stream may still use it.
struct Limbo {
    address: u64,
    bytes: u64,
    stream: Stream,
    events: Vec<pages::Event>,
}

/// A plan that a thread makes.
struct Planning {
    thread: JoinHandle<Result<Script, NoPlan>>,
    iteration: Arc<Iteration>,
    /// True if the plan is for the second iteration, which has not begun.
    predicted: bool,
    start: Instant,
}

/// The allocator of one device.
pub struct Device {
    heap: Heap,
    options: Options,
    living: HashMap<u64, Block, BuildHasherDefault<AddressHasher>>,
    limbo: Vec<Limbo>,
    player: Option<Player>,
    planning: Option<Planning>,
    /// The thread that plans and writes the next run's plan.
    saving: Option<JoinHandle<Result<(), String>>>,
    /// Why the saved plan is not used, or not written.
    saved_remark: Option<String>,
    /// The last iteration whose plan could not be used. It is not planned again.
    refused: Arc<Iteration>,
    /// This iteration so far.
    recording: Iteration,
    requests: u32,
    /// Requests since the last free.
    run: u32,
    /// True while the second iteration plays the plan that was made from the first one.
    predicted: bool,
    /// Device calls up to the end of the first iteration.
    first_calls: u64,
    previous: Arc<Iteration>,
    /// All iterations from the start, while a plan for the next run can begin with them.
    history: Vec<Arc<Iteration>>,
    checker: Option<Checker>,
    report: Report,
}

impl Device {
    /// Creates the allocator of a device. Plays the saved plan, if there is one that can be read and fits the device.
    ///
    /// # Errors
    /// Returns the driver's error if addresses cannot be reserved.
    pub fn new(index: usize, pages: Box<dyn Pages>, options: Options) -> Result<Self, PagesError> {
        let mut device = Self {
            heap: Heap::new(pages)?,
            living: HashMap::default(),
            limbo: Vec::new(),
            player: None,
            planning: None,
            saving: None,
            saved_remark: None,
            refused: Arc::default(),
            recording: Iteration::default(),
            requests: 0,
            run: 0,
            predicted: false,
            first_calls: 0,
            previous: Arc::default(),
            history: Vec::new(),
            checker: options.check.then(Checker::default),
            report: Report { device: index, ..Report::default() },
            options,
        };
        if let Some(path) = device.options.saved_plan.as_ref().filter(|path| path.exists()) {
            match saved::read(path) {
                Ok(script) => drop(device.play(script)),
                Err(error) => {
                    device.saved_remark = Some(error.to_string());
                    if !error.is_plan() {
                        device.options.saved_plan = None;
                    }
                }
            }
        }
        Ok(device)
    }

    /// The range of addresses in which all requests lie.
    pub fn addresses(&self) -> Range<u64> {
        self.heap.addresses()
    }

    /// Serves a request of any size, and returns its address, a multiple of 512.
    ///
    /// # Errors
    /// Returns [`OutOfMemory`] after everything was tried: the work of other streams was waited for, idle pages were
    /// moved, and a plan was given up.
    pub fn allocate(&mut self, bytes: u64, stream: StreamHandle) -> Result<u64, OutOfMemory> {
        let stream = self.heap.stream(stream);
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX - (ALIGNMENT - 1));
        if bytes > isize::MAX as u64 {
            return Err(self.out_of_memory(bytes, PagesError::OutOfMemory));
        }
        if !self.limbo.is_empty() {
            self.release_limbo(false);
        }
        let (address, planned) = match self.planned(bytes, stream) {
            Some((address, request)) => (address, Some(request)),
            None => (self.online(bytes, stream).map_err(|cause| self.out_of_memory(bytes, cause))?, None),
        };
        self.recording.events.push(Event::Allocate { bytes, stream });
        let index = self.requests;
        self.requests += 1;
        self.run += 1;
        let block = Block { bytes, stream, iteration: self.report.iterations, index, planned, uses: Vec::new() };
        self.report.requests += 1;
        self.report.alive += bytes;
        self.report.most_requested = self.report.most_requested.max(self.report.alive);
        match planned {
            Some(_) => self.report.planned_requests += 1,
            None => self.report.online += bytes,
        }
        self.living.insert(address, block);
        if let Some(checker) = &mut self.checker {
            checker.allocated(address, bytes).expect("living requests share no byte");
        }
        Ok(address)
    }

    /// Frees a request. Returns false if nothing lives at the address.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(key) = self.living.get(&address).map(|block| self.key(block)) else { return false };
        let event = Event::Free(key);
        self.run = 0;
        self.recording.events.push(event);
        let exact = self.follow(event);
        let Some(Block { bytes, stream, planned, uses, .. }) = self.living.remove(&address) else { return false };
        if let Some(checker) = &mut self.checker {
            checker.freed(address, bytes).expect("a free has its request's size");
        }
        self.report.alive -= bytes;
        if planned.is_none() {
            self.report.online -= bytes;
        }
        if !uses.is_empty() {
            // Play is not exact: the plan has no request with several streams, and `record_use` ends exact play for one
            // that lies in the region. So the region does not withhold these bytes from the heap.
            let events = uses.iter().map(|&stream| self.heap.record(stream)).collect();
            self.limbo.push(Limbo { address, bytes, stream, events });
        } else if !(exact && planned.is_some()) {
            self.heap.give(address, bytes, stream);
        }
        true
    }

    /// Notes that another stream uses a request's memory, so that a free waits for its work.
    pub fn record_use(&mut self, address: u64, stream: StreamHandle) {
        let Some(key) = self.living.get(&address).map(|block| self.key(block)) else { return };
        let stream = self.heap.stream(stream);
        let Some(block) = self.living.get_mut(&address) else { return };
        if block.stream == stream || block.uses.contains(&stream) {
            return;
        }
        block.uses.push(stream);
        let planned = block.planned.is_some();
        let event = Event::Use { key, stream };
        self.recording.events.push(event);
        // The event can be the script's next although it is another request's: when the last iteration is repeated,
        // an age of two or more refers to iterations before it.
        match planned {
            true => self.deviate(),
            false => drop(self.follow(event)),
        }
    }

    /// The number of other streams that use a request.
    #[cfg(test)]
    pub(crate) fn streams_in_use(&self, address: u64) -> usize {
        self.living.get(&address).map_or(0, |block| block.uses.len())
    }

    /// Ends an iteration: plans it if it is the first, or repeats the one before and no plan has it, and takes up a plan
    /// that is ready.
    pub fn step(&mut self) {
        self.report.iterations += 1;
        self.requests = 0;
        let capacity = self.recording.events.len();
        let recorded = std::mem::replace(&mut self.recording, Iteration { events: Vec::with_capacity(capacity) });
        let complete = self.player.as_ref().is_none_or(|player| !player.exact || player.is_complete());
        if !complete {
            self.deviate();
        }
        let exact = self.player.as_ref().is_some_and(|player| player.exact);
        self.report.exact_iterations += u64::from(exact);
        let predicted = std::mem::take(&mut self.predicted);
        if predicted && !exact {
            self.give_up_plan();
        }
        self.return_to_plan();
        match exact {
            true => {
                self.previous = Arc::default();
                self.extend_history(Arc::new(recorded), !predicted);
                if predicted {
                    self.save();
                }
            }
            false if self.report.iterations == 1 && self.player.is_none() => self.predict(recorded),
            false => self.plan_if_it_repeats(recorded),
        }
        // The first plan is waited for, because the second iteration is the first one with everything that stays.
        let is_ready = |planning: &Planning| planning.predicted || planning.thread.is_finished();
        let ready = self.options.wait_for_plan || self.planning.as_ref().is_some_and(is_ready);
        if ready && let Some(planning) = self.planning.take() {
            self.take_up(planning);
        }
        if self.report.iterations == 1 {
            self.first_calls = self.heap.device_calls();
        }
        self.heap.reserve = match self.player {
            None if self.report.iterations >= RESERVE_FROM => {
                self.report.most_requested + self.report.most_requested / RESERVE_SHARE
            }
            _ => 0,
        };
        let written = self.options.wait_for_plan || self.saving.as_ref().is_some_and(JoinHandle::is_finished);
        if written && let Some(thread) = self.saving.take() {
            let result = thread.join().unwrap_or_else(|_| Err("the thread that saves the plan panicked".into()));
            self.saved_remark = result.err();
        }
    }

    /// Returns idle pages to the device. While play is exact, the plan's pages stay; otherwise its idle pages are
    /// returned as well, and mapped again when play becomes exact.
    pub fn empty_cache(&mut self) {
        self.release_limbo(false);
        self.heap.trim();
    }

    /// The figures so far.
    pub fn report(&self) -> Report {
        let script = self.player.as_ref().map(|player| &player.script);
        Report {
            reserved: self.heap.mapped(),
            most_reserved: self.heap.most_mapped(),
            device_calls: self.heap.device_calls(),
            later_device_calls: match self.report.iterations {
                0 => 0,
                _ => self.heap.device_calls() - self.first_calls,
            },
            planned: script.map_or(0, |script| script.height),
            lower_bound: script.map_or(0, |script| script.lower_bound),
            remark: match (&self.report.remark, &self.saved_remark) {
                (Some(remark), Some(saved)) => Some(format!("{remark}; {saved}")),
                (remark, saved) => remark.clone().or(saved.clone()),
            },
            ..self.report.clone()
        }
    }

    /// Lifetimes and bytes of the requests that an iteration makes and frees: of the iteration that the script repeats,
    /// with the planned offsets, or else of the last recorded one.
    pub fn table(&self) -> (Vec<Buffer>, Option<Vec<u64>>) {
        match &self.player {
            Some(player) => {
                let (rows, offsets) = player.script.table();
                (rows, Some(offsets))
            }
            None => (script::temporaries(&self.previous), None),
        }
    }

    /// The request as the recording names it.
    fn key(&self, block: &Block) -> Key {
        Key { age: (self.report.iterations - block.iteration) as u32, index: block.index }
    }

    /// The planned address of a request, if the plan has one that is idle.
    fn planned(&mut self, bytes: u64, stream: Stream) -> Option<(u64, (usize, usize))> {
        let player = self.player.as_mut()?;
        // A script is cut off only before its first request is played. Loose play has positions in the whole script.
        if self.predicted && player.exact && self.recording.events.is_empty() {
            self.leave_out_setup(Event::Allocate { bytes, stream });
        }
        let player = self.player.as_mut()?;
        if player.exact {
            let index = player.position();
            if player.expects(Event::Allocate { bytes, stream }) {
                let iteration = player.iteration();
                return player.next().map(|address| (address, (iteration, index)));
            }
            self.deviate();
        }
        let player = self.player.as_mut()?;
        let heap = &mut self.heap;
        let found = player.candidates(bytes, stream).find(|&(_, address)| heap.take_at(address, bytes, stream));
        let Some((index, address)) = found else {
            self.report.deviations += 1;
            return None;
        };
        player.play(index);
        Some((address, (player.iteration(), index)))
    }

    /// Leaves out what the predicted script has before its iteration, which begins with the request `first`. The region's
    /// bytes above the rest of the script are returned to the device.
    fn leave_out_setup(&mut self, first: Event) {
        let Some(player) = &mut self.player else { return };
        let begin = Instant::now();
        let Some(script) = player.script.beginning_with(first) else { return };
        self.report.planning_ms += begin.elapsed().as_millis() as u64;
        let (start, end) = (player.base + script.height, player.base + player.script.height);
        let stream = player.script.streams[0].0;
        player.script = Arc::new(script);
        if start < end {
            self.heap.give(start, end - start, stream);
            self.heap.trim();
        }
    }

    /// Serves a request without a plan.
    fn online(&mut self, bytes: u64, stream: Stream) -> Result<u64, PagesError> {
        let stays = self.player.is_none() && self.report.iterations == 0 && self.run >= RUN_THAT_STAYS;
        let idle = match stays {
            true => self.heap.take_beside_last(bytes, stream),
            false => self.heap.take(bytes, stream),
        };
        if let Some(address) = idle {
            return Ok(address);
        }
        if let Some(address) = self.heap.take_from_others(bytes, stream, false) {
            return Ok(address);
        }
        let error = match self.heap.grow(bytes, stream) {
            Ok(address) => return Ok(address),
            Err(error) => error,
        };
        // The device is full. First the work of other streams is waited for, then the plan's idle bytes are used.
        self.release_limbo(true);
        if let Some(address) = self.heap.take_from_others(bytes, stream, true) {
            return Ok(address);
        }
        if self.player.as_ref().is_some_and(|player| player.exact) {
            self.deviate();
            if let Some(address) = self.heap.take(bytes, stream) {
                return Ok(address);
            }
        }
        self.heap.grow(bytes, stream).map_err(|_| error)
    }

    /// Plays an event that is not a request. Returns true if it is the script's next.
    fn follow(&mut self, event: Event) -> bool {
        let Some(player) = self.player.as_mut().filter(|player| player.exact) else { return false };
        if player.expects(event) {
            return true;
        }
        self.deviate();
        false
    }

    /// Ends exact play: the region's idle bytes become the heap's.
    fn deviate(&mut self) {
        let Some(player) = self.player.as_mut().filter(|player| player.exact) else { return };
        player.loosen();
        self.report.deviations += 1;
        for (start, bytes, stream) in self.gaps() {
            self.heap.give(start, bytes, stream);
        }
    }

    /// The ranges of the region in which nothing lives, each with the stream of its part.
    fn gaps(&self) -> Vec<(u64, u64, Stream)> {
        let Some(player) = &self.player else { return Vec::new() };
        let mut used: Vec<(u64, u64)> = (self.living.iter())
            .filter(|&(&address, _)| player.holds(address))
            .map(|(&address, block)| (address, address + block.bytes))
            .collect();
        used.sort_unstable();
        let mut gaps = Vec::new();
        for (stream, start, end) in player.parts() {
            let mut floor = start;
            for &(first, last) in used.iter().filter(|&&(first, _)| (start..end).contains(&first)) {
                gaps.push((floor, first - floor, stream));
                floor = last;
            }
            gaps.push((floor, end - floor, stream));
        }
        gaps.retain(|&(_, bytes, _)| bytes > 0);
        gaps
    }

    /// Begins the script's next iteration. Play is exact again if everything in the region lies where the script has it,
    /// and the iteration that repeats has ended.
    ///
    /// Iterations before it have requests that a later one frees by iteration and index. A deviation may have given these
    /// another order, so that the free of one would count as that of another. What stays once the repeated iteration has
    /// ended is never freed by the script.
    fn return_to_plan(&mut self) {
        let Some(player) = &self.player else { return };
        if !player.exact && player.iteration() == player.script.last() {
            let stays = |block: &Block| {
                block.uses.is_empty()
                    && block.planned.is_some_and(|(iteration, index)| player.outlives(iteration, index))
            };
            let clean = self.living.iter().all(|(&address, block)| !player.holds(address) || stays(block))
                && !self.limbo.iter().any(|limbo| player.holds(limbo.address));
            if clean && self.claim_region() {
                self.player.as_mut().expect("a script is played").exact = true;
                // What the deviations needed beside the plan is given back.
                self.heap.trim();
            }
        }
        self.player.as_mut().expect("a script is played").advance();
    }

    /// Withholds the region's idle bytes from the heap. Takes nothing if it returns false.
    fn claim_region(&mut self) -> bool {
        let Some((base, height)) = self.player.as_ref().map(|player| (player.base, player.script.height)) else {
            return false;
        };
        if self.heap.refill(base, base + height).is_err() {
            return false;
        }
        let mut claimed = Vec::new();
        for (start, bytes, stream) in self.gaps() {
            if !self.heap.claim_at(start, bytes, stream) {
                for (start, bytes, stream) in claimed {
                    self.heap.give(start, bytes, stream);
                }
                return false;
            }
            claimed.push((start, bytes, stream));
        }
        true
    }

    /// Starts a plan for the second iteration, which is expected to ask for what the first one asks for, but for what stays.
    fn predict(&mut self, recorded: Iteration) {
        let iteration = Arc::new(recorded.without_what_stays());
        self.previous = Arc::new(recorded);
        self.extend_history(self.previous.clone(), false);
        if !iteration.events.is_empty() {
            self.start_planning(iteration, true);
        }
    }

    /// Starts a plan if the iteration is equal to the one before it and the script that is played does not end with it.
    fn plan_if_it_repeats(&mut self, recorded: Iteration) {
        let repeats = recorded == *self.previous && !recorded.events.is_empty();
        self.previous = Arc::new(recorded);
        self.extend_history(self.previous.clone(), false);
        // Play does not return to a region in which another tensor stays. Then the plan gets another region.
        let is_played = self.player.as_ref().is_some_and(|player| {
            player.exact && player.script.iterations[player.script.last()].events == self.previous.events
        });
        if repeats && !is_played && self.planning.is_none() && self.refused != self.previous {
            self.start_planning(self.previous.clone(), false);
            self.save();
        }
    }

    fn start_planning(&mut self, iteration: Arc<Iteration>, predicted: bool) {
        let planned = iteration.clone();
        let thread = std::thread::spawn(move || Script::plan(&[&planned]));
        self.planning = Some(Planning { thread, iteration, predicted, start: Instant::now() });
    }

    /// Plans all iterations so far for the next run, and writes that plan.
    fn save(&mut self) {
        let Some(path) = self.options.saved_plan.clone() else { return };
        if self.history.len() as u64 != self.report.iterations || self.saving.is_some() {
            return;
        }
        let mut history = std::mem::take(&mut self.history);
        // The last iteration repeats, so it is needed once.
        if let [.., before, last] = &history[..]
            && before == last
        {
            history.pop();
        }
        let save = move || {
            let iterations: Vec<&Iteration> = history.iter().map(|iteration| &**iteration).collect();
            let script = Script::plan(&iterations).map_err(|error| error.to_string())?;
            saved::write(&path, &script).map_err(|error| error.to_string())
        };
        self.saving = Some(std::thread::spawn(save));
    }

    /// Keeps an iteration for the next run's plan, if all before it were kept. Nothing more is kept once the iteration that
    /// a saved plan repeats was played twice: the plan is up to date.
    fn extend_history(&mut self, iteration: Arc<Iteration>, exact: bool) {
        if self.options.saved_plan.is_none() || self.history.len() as u64 + 1 != self.report.iterations {
            return;
        }
        let planned = self.player.as_ref().map_or(0, |player| player.script.iterations.len());
        match (exact && planned <= self.history.len()) || self.history.len() == MOST_SAVED {
            true => self.history = Vec::new(),
            false => self.history.push(iteration),
        }
    }

    /// Plays a plan that a thread has made.
    fn take_up(&mut self, planning: Planning) {
        let planned = planning.thread.join();
        self.report.planning_ms = planning.start.elapsed().as_millis() as u64;
        let is_played = match planned {
            Ok(Ok(script)) => self.play(script),
            Ok(Err(error)) => {
                self.report.remark = Some(error.to_string());
                false
            }
            Err(_) => {
                self.report.remark = Some("the planner's thread panicked".into());
                false
            }
        };
        match is_played {
            true => self.predicted = planning.predicted,
            false => self.refused = planning.iteration,
        }
    }

    /// Maps a region for a script, plays it from now on, and returns idle pages to the device. Returns false if the script
    /// cannot be played; the remark then says why. A script that has no memory leaves the earlier one in play.
    fn play(&mut self, script: Script) -> bool {
        self.report.remark = None;
        if script.height == 0 {
            self.give_up_plan();
            self.report.remark = Some("an iteration frees nothing that it requests, so nothing is planned".into());
            return false;
        }
        // The idle bytes of the earlier region serve the new one.
        self.deviate();
        match self.heap.map_region(script.height, script.streams[0].0) {
            Ok(base) => {
                self.give_up_plan();
                for (stream, _) in &script.streams {
                    self.heap.expect_stream(*stream);
                }
                self.player = Some(Player::new(Arc::new(script), base));
                self.report.plans += 1;
                self.heap.trim();
                true
            }
            Err(error) => {
                self.report.remark = Some(format!("the plan has no memory: {error}"));
                false
            }
        }
    }

    /// Plays no plan from now on. The region's idle bytes become the heap's.
    fn give_up_plan(&mut self) {
        self.deviate();
        for block in self.living.values_mut() {
            if block.planned.take().is_some() {
                self.report.online += block.bytes;
            }
        }
        self.player = None;
    }

    /// Makes memory idle whose other streams are done; with `wait`, waits for them.
    fn release_limbo(&mut self, wait: bool) {
        let heap = &mut self.heap;
        self.limbo.retain_mut(|limbo| {
            limbo.events.retain(|&event| {
                if wait {
                    heap.pages.wait(event);
                }
                !wait && !heap.pages.is_done(event)
            });
            if limbo.events.is_empty() {
                heap.give(limbo.address, limbo.bytes, limbo.stream);
            }
            !limbo.events.is_empty()
        });
    }

    fn out_of_memory(&self, requested: u64, cause: PagesError) -> OutOfMemory {
        let (free, total) = self.heap.pages.memory();
        let Report { device, alive, reserved, planned, .. } = self.report();
        OutOfMemory { device, requested, alive, reserved, idle: self.heap.idle(), planned, free, total, cause }
    }
}

/// A hash of addresses, which differ in their middle bits.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte) ^ self.0);
        }
    }

    fn write_u64(&mut self, address: u64) {
        let product = (address >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}
