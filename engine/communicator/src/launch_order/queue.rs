//! One run of a program: which of its starts may be launched by now.

use std::sync::Arc;

use super::{Launch, LaunchOrder, Start};
use crate::{CommunicatorError, Result};

/// What a run has started and launched so far, and the check that it runs the program that was agreed on.
#[derive(Debug)]
pub struct LaunchQueue {
    order: Arc<LaunchOrder>,
    started: usize,
    launched: usize,
}

impl LaunchQueue {
    /// A run of the program that an order was made for.
    pub fn new(order: &Arc<LaunchOrder>) -> Self {
        Self { order: order.clone(), started: 0, launched: 0 }
    }

    /// Takes note of a start. Returns its number in the run.
    ///
    /// # Errors
    /// When the agreed program starts something else here.
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

    /// The next launch, if all that belongs to it has been started. To be called until there is none.
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

    /// What has to be started before anything more can be launched.
    pub fn held_back_by(&self) -> Option<&Start> {
        self.order.launches.get(self.launched).and_then(|launch| match *launch {
            Launch::One(start) => self.order.starts.get(start),
            Launch::Oneself { send, receive } => self.order.starts.get(send.max(receive)),
        })
    }

    /// Whether everything was started. Then everything was launched, too.
    pub fn is_over(&self) -> bool {
        self.started == self.order.starts.len()
    }
}
