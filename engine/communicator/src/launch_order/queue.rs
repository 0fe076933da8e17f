//! One run of a program, which decides which of its starts can be launched.

use std::sync::Arc;

use super::{Launch, LaunchOrder, Start};
use crate::{CommunicatorError, Result};

/// The starts and launches of a run so far. It also checks that the run follows the agreed program.
#[derive(Debug)]
pub struct LaunchQueue {
    order: Arc<LaunchOrder>,
    started: usize,
    launched: usize,
}

impl LaunchQueue {
    /// Begins a run of the program for which the order was determined.
    pub fn new(order: &Arc<LaunchOrder>) -> Self {
        Self { order: order.clone(), started: 0, launched: 0 }
    }

    /// Records a start and returns its index in the run.
    ///
    /// # Errors
    /// Returns an error if the agreed program has another start at this index, or has ended.
    pub fn start(&mut self, rank: usize, start: Start) -> Result<usize> {
        let number = self.started;
        match self.order.starts.get(number) {
            Some(expected) if *expected == start => {
                self.started += 1;
                Ok(number)
            }
            expected => Err(CommunicatorError::NotAsAgreed {
                rank,
                number,
                started: start.to_string(),
                expected: expected.map_or_else(|| "no further operation".into(), ToString::to_string),
            }),
        }
    }

    /// Returns the next launch and counts it as launched. Returns `None` if a start of the next launch has not been
    /// recorded yet, or if everything was launched. After each recorded start, call this repeatedly until it returns
    /// `None`.
    pub fn launch(&mut self) -> Option<Launch> {
        let launch = *self.order.launches.get(self.launched)?;
        let last = match launch {
            Launch::One(start) => start,
            Launch::Oneself { send, receive } => send.max(receive),
        };
        (last < self.started).then(|| {
            self.launched += 1;
            launch
        })
    }

    /// Returns the start that the next launch still lacks, or `None` if everything was launched.
    pub fn held_back_by(&self) -> Option<&Start> {
        self.order.launches.get(self.launched).and_then(|launch| match *launch {
            Launch::One(start) => self.order.starts.get(start),
            Launch::Oneself { send, receive } => self.order.starts.get(send.max(receive)),
        })
    }

    /// True if all starts of the program were recorded, and therefore also launched.
    pub fn is_over(&self) -> bool {
        self.started == self.order.starts.len()
    }
}
