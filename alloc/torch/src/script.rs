//! A plan for iterations: where each request lies, relative to the start of a region.
//!
//! - In: recorded iterations, the last of which repeats.
//! - Out: a checked [`Script`], or the reason why there is none.
//! - Never: an address of the device.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use gapless_alloc::{Buffer, Options, Problem, check, lower_bound, plan};
use serde::{Deserialize, Serialize};

use crate::pages::Stream;
use crate::recording::{Event, Iteration, Key};

/// The alignment of all addresses, in bytes: PyTorch's kernels rely on it.
pub const ALIGNMENT: u64 = 512;

/// The number of streams that a saved plan may have. The allocator has an entry for each number up to the greatest.
const MOST_STREAMS: Stream = 4096;

/// Planned iterations. The last one repeats.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Script {
    /// The iterations in order.
    pub iterations: Vec<Planned>,
    /// Bytes of the region.
    pub height: u64,
    /// The most planned bytes that are alive at once. No plan is lower.
    pub lower_bound: u64,
    /// For each stream, its part of the region. Streams share no bytes, so that a plan needs no events.
    pub streams: Vec<(Stream, Range<u64>)>,
}

/// A planned iteration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Planned {
    /// The iteration's events in order.
    pub events: Vec<Event>,
    /// The offset of each request; `None` if the request is served without a plan.
    pub offsets: Vec<Option<u64>>,
    /// Each request.
    pub requests: Vec<Request>,
}

/// A planned request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Bytes, rounded up to 512.
    pub bytes: u64,
    /// The stream that uses the memory first.
    pub stream: Stream,
    /// Number of iterations that begin before the request is freed; `u32::MAX` if it is not freed.
    pub outlives: u32,
}

/// The reason why iterations have no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    /// The table of requests is not a problem that the planner takes.
    #[error("the requests cannot be planned: {0}")]
    Problem(String),
    /// A plan failed the check.
    #[error("the plan failed its check: {0}")]
    Check(String),
}

/// A request while its lifetime is read.
struct Life {
    iteration: usize,
    index: usize,
    request: Request,
    ticks: Range<u64>,
    planned: bool,
}

impl Script {
    /// Plans iterations, the last of which repeats. A request is served without a plan if the last iteration makes it
    /// and does not free it, or if several streams use it.
    ///
    /// # Errors
    /// Returns the planner's error, or the first violation that the check finds.
    pub fn plan(iterations: &[&Iteration]) -> Result<Self, NoPlan> {
        let lives = lives(iterations);
        let by_stream = by_stream(&lives);
        // Streams are planned one after another, and share the time that one plan may take.
        let work = Options::DEFAULT_WORK / by_stream.len().max(1) as u64;
        let mut offsets = vec![None; lives.len()];
        let (mut height, mut bound, mut streams) = (0, 0, Vec::new());
        for (stream, ids) in by_stream {
            let problem = problem(&lives, &ids)?;
            let solution = plan(&problem, &Options { threads: Some(1), work, ..Options::default() });
            check(&problem, &solution.offsets, Some(solution.height)).map_err(|v| NoPlan::Check(v[0].to_string()))?;
            for (&id, offset) in ids.iter().zip(solution.offsets) {
                offsets[id] = Some(height + offset);
            }
            let end = height + solution.height.next_multiple_of(ALIGNMENT);
            streams.push((stream, height..end));
            (height, bound) = (end, bound + solution.lower_bound);
        }
        let mut planned: Vec<Planned> = (iterations.iter())
            .map(|i| Planned { events: i.events.clone(), offsets: Vec::new(), requests: Vec::new() })
            .collect();
        for (life, offset) in lives.iter().zip(offsets) {
            planned[life.iteration].offsets.push(offset);
            planned[life.iteration].requests.push(life.request);
        }
        Ok(Self { iterations: planned, height, lower_bound: bound, streams })
    }

    /// Checks a script that comes from a file: planned requests that are alive at once share no byte and lie in the part
    /// of their stream, the requests are those of the events, and every free and use is of a living request.
    ///
    /// # Errors
    /// Returns the first violation.
    pub fn check(&self) -> Result<(), NoPlan> {
        let wrong = |what: &str| NoPlan::Check(what.into());
        if self.iterations.is_empty() {
            return Err(wrong("it has no iterations"));
        }
        let recorded: Vec<Iteration> =
            self.iterations.iter().map(|planned| Iteration { events: planned.events.clone() }).collect();
        check_keys(&recorded)?;
        let lives = lives(&recorded.iter().collect::<Vec<_>>());
        let mut end = 0;
        for &(stream, ref part) in &self.streams {
            if part.start != end || part.end <= part.start || !part.end.is_multiple_of(ALIGNMENT) {
                return Err(wrong("the parts of streams do not follow one another"));
            }
            if stream >= MOST_STREAMS {
                return Err(NoPlan::Check(format!("stream {stream} is not below {MOST_STREAMS}")));
            }
            end = part.end;
        }
        if self.height != end {
            return Err(NoPlan::Check(format!("its height is {} bytes, but its parts end at {end}", self.height)));
        }
        if isize::try_from(end).is_err() {
            return Err(NoPlan::Check(format!("its height of {end} bytes is more than any device has")));
        }
        for (planned, recorded) in self.iterations.iter().zip(&recorded) {
            let requests = recorded.requests();
            if planned.offsets.len() != requests || planned.requests.len() != requests {
                return Err(wrong("the number of offsets is not that of requests"));
            }
        }
        let mut pinned = Vec::new();
        for life in &lives {
            if life.request.bytes == 0 || !life.request.bytes.is_multiple_of(ALIGNMENT) {
                return Err(NoPlan::Check(format!(
                    "a request of {} bytes is not rounded to {ALIGNMENT}",
                    life.request.bytes
                )));
            }
            if self.iterations[life.iteration].requests[life.index] != life.request {
                return Err(wrong("a request is not that of its events"));
            }
            let Some(offset) = self.iterations[life.iteration].offsets[life.index] else { continue };
            let inside = |(stream, part): &(Stream, Range<u64>)| {
                *stream == life.request.stream
                    && part.start <= offset
                    && offset.checked_add(life.request.bytes).is_some_and(|end| end <= part.end)
            };
            if !life.planned || !self.streams.iter().any(inside) {
                return Err(wrong("a request does not lie in the part of its stream"));
            }
            pinned.push(Buffer::new(life.ticks.clone(), life.request.bytes).aligned(ALIGNMENT).at(offset));
        }
        Problem::new(pinned).map(drop).map_err(|e| NoPlan::Check(e.to_string()))
    }

    /// The script of one iteration from the request `first` on. `None` if the iteration seems to begin otherwise.
    ///
    /// The first iteration is recorded from the start of the process, so its script has the requests of the job's setup
    /// before those of its iteration. Nothing planned is alive between the two. The longest part in which something
    /// always is alive belongs to the iteration: gradients of one micro-batch stay until the last.
    ///
    /// If the setup is what needed the most bytes, the rest is planned again, so that no bytes are kept for the setup.
    pub(crate) fn beginning_with(&self, first: Event) -> Option<Self> {
        let Planned { events, offsets, requests } = &self.iterations[0];
        let (mut alive, mut start, mut longest, mut starts) = (0, 0, 0..0, Vec::new());
        for (position, event) in events.iter().enumerate() {
            match event {
                Event::Allocate { .. } => {
                    if alive == 0 {
                        start = position;
                        starts.extend((*event == first).then_some(position));
                    }
                    alive += 1;
                }
                Event::Free(_) => {
                    alive -= 1;
                    if alive == 0 && position - start > longest.len() {
                        longest = start..position;
                    }
                }
                Event::Use { .. } => {}
            }
        }
        let start = *starts.iter().rfind(|&&start| start <= longest.start)?;
        let before = events[..start].iter().filter(|event| matches!(event, Event::Allocate { .. })).count();
        let renumber = |key: Key| Key { index: key.index - before as u32, ..key };
        let events = events[start..].iter().map(|&event| match event {
            Event::Allocate { .. } => event,
            Event::Free(key) => Event::Free(renumber(key)),
            Event::Use { key, stream } => Event::Use { key: renumber(key), stream },
        });
        let rest = Iteration { events: events.collect() };
        if bound(&rest).is_ok_and(|bound| bound < self.lower_bound)
            && let Ok(script) = Self::plan(&[&rest])
            && script.height < self.height
        {
            return Some(script);
        }
        let planned =
            Planned { events: rest.events, offsets: offsets[before..].to_vec(), requests: requests[before..].to_vec() };
        Some(Self { iterations: vec![planned], streams: self.streams.clone(), ..*self })
    }

    /// Lifetimes, bytes and offsets of what the repeated iteration makes and frees.
    pub fn table(&self) -> (Vec<Buffer>, Vec<u64>) {
        let planned = &self.iterations[self.last()];
        let recorded = Iteration { events: planned.events.clone() };
        let rows = lives(&[&recorded]).into_iter().zip(&planned.offsets);
        rows.filter_map(|(life, offset)| Some((Buffer::new(life.ticks, life.request.bytes), (*offset)?))).unzip()
    }

    /// Index of the iteration that repeats.
    pub fn last(&self) -> usize {
        self.iterations.len() - 1
    }
}

/// Lifetimes and bytes of what an iteration makes and frees.
pub(crate) fn temporaries(iteration: &Iteration) -> Vec<Buffer> {
    let lives = lives(&[iteration]).into_iter().filter(|life| life.planned);
    lives.map(|life| Buffer::new(life.ticks, life.request.bytes)).collect()
}

/// The planned requests of each stream, as indices into `lives`.
fn by_stream(lives: &[Life]) -> BTreeMap<Stream, Vec<usize>> {
    let mut by_stream: BTreeMap<Stream, Vec<usize>> = BTreeMap::new();
    for (id, life) in lives.iter().enumerate().filter(|(_, life)| life.planned) {
        by_stream.entry(life.request.stream).or_default().push(id);
    }
    by_stream
}

/// The problem of one stream.
fn problem(lives: &[Life], ids: &[usize]) -> Result<Problem, NoPlan> {
    let buffer = |&id: &usize| Buffer::new(lives[id].ticks.clone(), lives[id].request.bytes).aligned(ALIGNMENT);
    Problem::new(ids.iter().map(buffer).collect()).map_err(|e| NoPlan::Problem(e.to_string()))
}

/// The lower bound of an iteration's plan.
fn bound(iteration: &Iteration) -> Result<u64, NoPlan> {
    let lives = lives(&[iteration]);
    by_stream(&lives).values().map(|ids| problem(&lives, ids).map(|problem| lower_bound(&problem))).sum()
}

/// Checks that every free and use is of a request that was made before and is alive.
fn check_keys(iterations: &[Iteration]) -> Result<(), NoPlan> {
    // For each iteration, whether its requests are alive.
    let mut alive: Vec<Vec<bool>> = Vec::new();
    for (number, iteration) in iterations.iter().enumerate() {
        alive.push(Vec::new());
        for event in &iteration.events {
            let (key, freed) = match *event {
                Event::Allocate { .. } => {
                    alive[number].push(true);
                    continue;
                }
                Event::Free(key) => (key, true),
                Event::Use { key, .. } => (key, false),
            };
            let request = number.checked_sub(key.age as usize).and_then(|made| alive[made].get_mut(key.index as usize));
            let Some(living) = request.filter(|living| **living) else {
                return Err(NoPlan::Check(format!("iteration {number} frees or uses a request that is not alive")));
            };
            *living = !freed;
        }
    }
    Ok(())
}

/// Reads the lifetime of every request, in the order of requests. A tick is an event.
fn lives(iterations: &[&Iteration]) -> Vec<Life> {
    let end: u64 = iterations.iter().map(|i| i.events.len() as u64).sum();
    let mut lives: Vec<Life> = Vec::new();
    let mut first = Vec::new();
    let mut freed = HashSet::new();
    let mut tick = 0;
    for (iteration, recorded) in iterations.iter().enumerate() {
        first.push(lives.len());
        let mut index = 0;
        for event in &recorded.events {
            let id = |key: Key| {
                let born = iteration.checked_sub(key.age as usize)?;
                Some(first[born] + key.index as usize)
            };
            match *event {
                Event::Allocate { bytes, stream } => {
                    let request = Request { bytes, stream, outlives: u32::MAX };
                    lives.push(Life { iteration, index, request, ticks: tick..end, planned: true });
                    index += 1;
                }
                Event::Free(key) => {
                    let id = id(key).filter(|&id| freed.insert(id));
                    if let Some(life) = id.and_then(|id| lives.get_mut(id)) {
                        life.ticks.end = tick;
                        life.request.outlives = key.age;
                    }
                }
                Event::Use { key, .. } => {
                    if let Some(life) = id(key).and_then(|id| lives.get_mut(id)) {
                        life.planned = false;
                    }
                }
            }
            tick += 1;
        }
    }
    // What the last iteration leaves alive meets itself when the iteration repeats.
    let loop_starts = first.last().copied().unwrap_or(0);
    for (id, life) in lives.iter_mut().enumerate().skip(loop_starts) {
        life.planned &= freed.contains(&id);
    }
    lives
}
