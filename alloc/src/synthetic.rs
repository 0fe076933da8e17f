//! Problems that resemble training steps, for tests and benches.
//!
//! A [`SyntheticStep`] is one stage of a pipeline. Per layer and micro-batch, a forward part leaves saved activations for its
//! backward part. Both parts also use transients that die a few ticks later. Schedules differ in the order of these
//! parts, and so in how the lifetimes of saved activations nest.

use crate::{Buffer, Error, Problem};

/// The order in which the parts of a step run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Each micro-batch's backward right after its forward.
    Accumulation,
    /// As many forwards as there are stages; after that, backwards and forwards alternate.
    OneForwardOneBackward,
    /// Like `OneForwardOneBackward`, with two chunks of layers per rank that take turns.
    Interleaved,
    /// Like `OneForwardOneBackward`, with one more forward ahead. The operations of a forward and of a backward
    /// alternate, so that the communication of one overlaps with the computation of the other.
    Overlapped,
}

/// A pipeline stage's part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticStep {
    /// The order of the step's parts.
    pub order: Order,
    /// Layers on this rank.
    pub layers: u64,
    /// Micro-batches of the step.
    pub micro_batches: u64,
    /// Number of pipeline stages, which decides how many forwards run ahead.
    pub stages: u64,
    /// Tokens of each micro-batch. If there are more micro-batches than entries, the list repeats from the start.
    pub tokens: &'static [u64],
    /// Whether parameters, gradients and optimizer states are included.
    pub persistent: bool,
}

impl Default for SyntheticStep {
    fn default() -> Self {
        Self {
            order: Order::OneForwardOneBackward,
            layers: 4,
            micro_batches: 8,
            stages: 4,
            tokens: &[1024],
            persistent: false,
        }
    }
}

/// Bytes per token that a layer saves for its backward part.
const SAVED: [u64; 6] = [2048, 6144, 2048, 64, 2048, 8192];

/// Bytes per token of a layer's transients.
const TRANSIENT: [u64; 5] = [2048, 4096, 8192, 2048, 16384];

/// Bytes of a layer's parameters; all are multiples of 64.
const PARAMETERS: [u64; 4] = [12 << 20, 4 << 20, 32 << 20, 8192];

impl SyntheticStep {
    /// Creates the buffers of the step. Sizes are multiples of 64, and the alignment is 64.
    ///
    /// # Errors
    /// Returns an error only if sizes exceed `u64`, as [`Problem::new`] does.
    pub fn problem(&self) -> Result<Problem, Error> {
        let mut buffers = Vec::new();
        let mut saved: Vec<Vec<(u64, u64)>> = vec![Vec::new(); (self.micro_batches * self.chunks()) as usize];
        let mut end = 0;
        for Timed { part: (is_forward, micro_batch, chunk), mut start, stride } in self.timetable() {
            let tick = |start: u64, step: usize, offset: u64| start + stride * (2 * step as u64 + offset);
            let tokens = self.tokens[micro_batch as usize % self.tokens.len()];
            let kept = &mut saved[(micro_batch * self.chunks() + chunk) as usize];
            for _ in 0..self.layers.div_ceil(self.chunks()) {
                if is_forward {
                    for (step, bytes) in SAVED.iter().enumerate() {
                        kept.push((tick(start, step, 1), bytes * tokens));
                    }
                }
                for (step, bytes) in TRANSIENT.iter().enumerate() {
                    let born = tick(start, step, 1);
                    buffers.push(Buffer::new(born..born + 2 + step as u64 % 3, bytes * tokens).aligned(64));
                }
                if !is_forward {
                    let of_layer = kept.split_off(kept.len() - SAVED.len());
                    for (step, &(born, bytes)) in of_layer.iter().rev().enumerate() {
                        buffers.push(Buffer::new(born..tick(start, step, 2), bytes).aligned(64));
                    }
                }
                start = tick(start, SAVED.len(), 0);
            }
            end = end.max(start);
        }
        if self.persistent {
            // Weights and two moments live throughout, gradients from the first backward part on.
            for bytes in PARAMETERS.iter().flat_map(|&bytes| (0..self.layers).map(move |_| bytes)) {
                buffers.extend([0, 0, 0].map(|start| Buffer::new(start..end, bytes).aligned(64)));
                buffers.push(Buffer::new(self.stages.min(self.micro_batches)..end, bytes).aligned(64));
            }
        }
        Problem::new(buffers)
    }

    fn chunks(&self) -> u64 {
        if self.order == Order::Interleaved { 2 } else { 1 }
    }

    /// The parts of the step with their ticks.
    fn timetable(&self) -> Vec<Timed> {
        let parts = self.parts();
        let ticks = self.layers.div_ceil(self.chunks()) * 2 * SAVED.len() as u64;
        // True for a forward that is followed by the backward of another micro-batch.
        let turns = |pair: &[(bool, u64, u64)]| pair[0].0 && !pair[1].0 && pair[0].1 != pair[1].1;
        let mut timetable: Vec<Timed> = Vec::new();
        let mut free = 0;
        while let Some(&part) = parts.get(timetable.len()) {
            match parts.get(timetable.len()..timetable.len() + 2) {
                Some(pair) if self.order == Order::Overlapped && turns(pair) => {
                    timetable.extend([0, 1].map(|k| Timed { part: pair[k], start: free + k as u64, stride: 2 }));
                    free += 2 * ticks + 1;
                }
                _ => {
                    timetable.push(Timed { part, start: free, stride: 1 });
                    free += ticks;
                }
            }
        }
        timetable
    }

    /// The parts as `(is forward, micro-batch, chunk)`, in the order in which they run.
    fn parts(&self) -> Vec<(bool, u64, u64)> {
        let units: Vec<(u64, u64)> = match self.order {
            // Groups of `stages` micro-batches pass through one chunk, then through the next.
            Order::Interleaved => (0..self.micro_batches)
                .step_by(self.stages.max(1) as usize)
                .flat_map(|first| {
                    let group = first..(first + self.stages.max(1)).min(self.micro_batches);
                    (0..2).flat_map(move |chunk| group.clone().map(move |m| (m, chunk)))
                })
                .collect(),
            _ => (0..self.micro_batches).map(|m| (m, 0)).collect(),
        };
        let ahead = match self.order {
            Order::Accumulation => 1,
            Order::OneForwardOneBackward => self.stages.max(1),
            // A micro-batch's backward never overlaps with its own forward, so one more forward runs ahead.
            Order::Overlapped => self.stages.max(1) + 1,
            // The backward runs through the chunks in reverse, so a whole group of micro-batches must have run forward
            // first.
            Order::Interleaved => 2 * self.stages.max(1) + 1,
        };
        let backward = |&(m, chunk): &(u64, u64)| (false, m, self.chunks() - 1 - chunk);
        let mut parts: Vec<(bool, u64, u64)> = Vec::new();
        for (index, &(m, chunk)) in units.iter().enumerate() {
            parts.push((true, m, chunk));
            if let Some(done) = (index + 1).checked_sub(ahead as usize) {
                parts.push(backward(&units[done]));
            }
        }
        let left = units.len().saturating_sub(ahead as usize - 1);
        parts.extend(units[left.min(units.len())..].iter().map(backward));
        parts
    }
}

/// A part `(is forward, micro-batch, chunk)`, its first tick, and the distance between its ticks.
struct Timed {
    part: (bool, u64, u64),
    start: u64,
    stride: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower_bound;

    #[test]
    fn every_saved_activation_meets_its_backward_part() {
        for order in [Order::Accumulation, Order::OneForwardOneBackward, Order::Interleaved, Order::Overlapped] {
            for micro_batches in [1, 3, 8] {
                let step = SyntheticStep { order, micro_batches, ..SyntheticStep::default() };
                let problem = step.problem().unwrap();
                let parts = 2 * micro_batches * step.layers;
                assert_eq!(problem.len() as u64, parts * TRANSIENT.len() as u64 + parts / 2 * SAVED.len() as u64);
            }
        }
    }

    #[test]
    fn pipelining_holds_more_than_accumulation() {
        let bound = |order| lower_bound(&SyntheticStep { order, ..SyntheticStep::default() }.problem().unwrap());
        assert!(bound(Order::Accumulation) < bound(Order::OneForwardOneBackward));
    }
}
