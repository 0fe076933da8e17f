//! Serves requests from a [`Script`] in a mapped region.
//!
//! **Exact.** While every event is the script's next, the script itself proves that the planned bytes are idle: they were
//! checked when it was made, and the region holds nothing else. So a request costs a comparison. The whole region is
//! withheld from the heap.
//!
//! **Loose.** After the first other event, the region's idle bytes belong to the heap, whose table of idle ranges says
//! for each request whether its planned bytes are idle. Others may use them too. When the iteration that repeats has ended
//! and everything in the region lies where the script has it, play is exact again.

use std::sync::Arc;

use crate::pages::Stream;
use crate::recording::Event;
use crate::script::{Planned, Script};

/// The number of requests before and after the next one among which a request is looked for when play is loose.
const WINDOW: usize = 256;

/// A script at an address, and the position in it.
pub(crate) struct Player {
    pub script: Arc<Script>,
    /// First address of the region.
    pub base: u64,
    pub exact: bool,
    iteration: usize,
    /// Events of this iteration that have been played.
    event: usize,
    /// Index of the next request.
    request: usize,
    /// When play is loose: the requests that have been played.
    taken: Vec<bool>,
}

impl Player {
    pub fn new(script: Arc<Script>, base: u64) -> Self {
        let mut player = Self { script, base, exact: true, iteration: 0, event: 0, request: 0, taken: Vec::new() };
        player.begin(0);
        player
    }

    /// The iteration of the script that is played.
    pub fn iteration(&self) -> usize {
        self.iteration
    }

    /// Index of the next request.
    pub fn position(&self) -> usize {
        self.request
    }

    fn planned(&self) -> &Planned {
        &self.script.iterations[self.iteration]
    }

    /// True if the event is the script's next, which is then played. `Some` only while play is exact.
    pub fn expects(&mut self, event: Event) -> bool {
        let next = self.planned().events.get(self.event) == Some(&event);
        self.event += usize::from(next);
        next
    }

    /// The address of the next request, after [`expects`](Self::expects) said that it is the next. `None` if it is
    /// served without a plan.
    pub fn next(&mut self) -> Option<u64> {
        let offset = self.planned().offsets[self.request];
        self.request += 1;
        offset.map(|offset| self.base + offset)
    }

    /// Makes play loose until the next iteration.
    pub fn loosen(&mut self) {
        self.exact = false;
        let (played, all) = (self.request, self.planned().offsets.len());
        self.taken = (0..all).map(|index| index < played).collect();
    }

    /// When play is loose: the planned addresses of unplayed requests with this size and stream, the nearest to its
    /// turn first.
    pub fn candidates(&self, bytes: u64, stream: Stream) -> impl Iterator<Item = (usize, u64)> + '_ {
        let planned = self.planned();
        let after = self.request..(self.request + WINDOW).min(self.taken.len());
        let before = (self.request.saturating_sub(WINDOW)..self.request.min(self.taken.len())).rev();
        let fits = move |&index: &usize| {
            let request = planned.requests[index];
            !self.taken[index] && request.bytes == bytes && request.stream == stream
        };
        after.chain(before).filter(fits).filter_map(move |i| Some((i, self.base + planned.offsets[i]?)))
    }

    /// Marks a candidate as played.
    pub fn play(&mut self, index: usize) {
        self.taken[index] = true;
        self.request = self.request.max(index + 1);
    }

    /// True if all events of the iteration have been played.
    pub fn is_complete(&self) -> bool {
        self.event == self.planned().events.len()
    }

    /// Goes to the next iteration.
    pub fn advance(&mut self) {
        self.begin((self.iteration + 1).min(self.script.last()));
    }

    fn begin(&mut self, iteration: usize) {
        (self.iteration, self.event, self.request) = (iteration, 0, 0);
        if !self.exact {
            self.loosen();
        }
    }

    /// True if the script has this request, made in one of its iterations, alive when the next iteration begins.
    pub fn outlives(&self, iteration: usize, index: usize) -> bool {
        let outlives = self.script.iterations[iteration].requests[index].outlives as usize;
        iteration + outlives > self.iteration
    }

    /// True if the address lies in the region.
    pub fn holds(&self, address: u64) -> bool {
        (self.base..self.base + self.script.height).contains(&address)
    }

    /// The stream whose part of the region has these bytes.
    pub fn parts(&self) -> impl Iterator<Item = (Stream, u64, u64)> + '_ {
        self.script.streams.iter().map(|(stream, part)| (*stream, self.base + part.start, self.base + part.end))
    }
}
