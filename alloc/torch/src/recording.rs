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

    /// The iteration without the requests that it does not free, and without events of earlier iterations' requests.
    pub fn without_what_stays(&self) -> Self {
        let mut is_freed = vec![false; self.requests()];
        for event in &self.events {
            if let Event::Free(Key { age: 0, index }) = *event {
                is_freed[index as usize] = true;
            }
        }
        // For each request, its index among those that are freed.
        let numbers: Vec<u32> =
            (is_freed.iter()).scan(0, |next, &freed| Some(std::mem::replace(next, *next + u32::from(freed)))).collect();
        let renumber = |key: Key| {
            (key.age == 0 && is_freed[key.index as usize]).then(|| Key { index: numbers[key.index as usize], ..key })
        };
        let mut request = 0;
        let events = self.events.iter().filter_map(|&event| match event {
            Event::Allocate { .. } => {
                request += 1;
                is_freed[request - 1].then_some(event)
            }
            Event::Free(key) => renumber(key).map(Event::Free),
            Event::Use { key, stream } => renumber(key).map(|key| Event::Use { key, stream }),
        });
        Self { events: events.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that are freed keep their order and get new numbers; frees of earlier iterations' requests are left out.
    #[test]
    fn what_stays_is_left_out() {
        let allocate = |bytes| Event::Allocate { bytes, stream: 0 };
        let key = |age, index| Key { age, index };
        let iteration = |events: &[Event]| Iteration { events: events.to_vec() };
        let recorded = iteration(&[
            allocate(1024),
            allocate(512),
            Event::Free(key(1, 7)),
            allocate(2048),
            Event::Use { key: key(0, 0), stream: 1 },
            Event::Use { key: key(0, 2), stream: 1 },
            Event::Free(key(0, 2)),
            Event::Free(key(0, 1)),
        ]);
        let expected = iteration(&[
            allocate(512),
            allocate(2048),
            Event::Use { key: key(0, 1), stream: 1 },
            Event::Free(key(0, 1)),
            Event::Free(key(0, 0)),
        ]);
        assert_eq!(recorded.without_what_stays(), expected);
    }
}
