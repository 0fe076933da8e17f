//! The requests of an iteration, in order.

use serde::{Deserialize, Serialize};

use crate::pages::Stream;

/// A request or a free. Two iterations with equal events can be served from the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// A request, whose index is the number of requests before it in the iteration.
    Allocate {
        /// Bytes, rounded up to 512.
        bytes: u64,
        /// The stream that uses the memory first.
        stream: Stream,
    },
    /// The free of an earlier request.
    Free(Key),
    /// The use of an earlier request on another stream, from `record_stream`.
    Use {
        /// The request.
        key: Key,
        /// The other stream.
        stream: Stream,
    },
}

/// A request of this iteration or of an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Number of iterations since the request: 0 for one of the same iteration.
    pub age: u32,
    /// Number of requests before it in its iteration.
    pub index: u32,
}

/// All events of an iteration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iteration {
    /// The events in order.
    pub events: Vec<Event>,
}

impl Iteration {
    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Allocate { .. })).count()
    }
}
