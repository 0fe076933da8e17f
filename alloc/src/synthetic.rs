//! Problems that look like training steps, for tests and benches, and small ones that look like nothing at all.
//!
//! A [`Step`] is a stage of a pipeline: per layer and micro-batch, a forward part leaves saved activations for its
//! backward part, and both use transients that die a few ticks later. What the schedules change is the order of parts,
//! and with it how the lifetimes of saved activations nest.

use crate::{Buffer, Error, Problem};

/// In which order the parts of a step run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Every micro-batch's backward right after its forward.
    Accumulation,
    /// One forward, one backward, after as many forwards as there are stages.
    OneForwardOneBackward,
    /// The same with two chunks of layers per rank, taking turns.
    Interleaved,
}

/// A pipeline stage's part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The order of its parts.
    pub order: Order,
    /// Layers on this rank.
    pub layers: u64,
    /// Micro-batches of the step.
    pub micro_batches: u64,
    /// Pipeline stages: how many forwards run ahead.
    pub stages: u64,
    /// Tokens of each micro-batch, which repeat from the start.
    pub tokens: &'static [u64],
    /// Whether parameters, gradients and optimizer states are part of it.
    pub persistent: bool,
}

impl Default for Step {
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

/// Bytes per token of what a layer saves for its backward part.
const SAVED: [u64; 6] = [2048, 6144, 2048, 64, 2048, 8192];

/// Bytes per token of a layer's transients.
const TRANSIENT: [u64; 5] = [2048, 4096, 8192, 2048, 16384];

/// Bytes of a layer's parameters; all are multiples of 64.
const PARAMETERS: [u64; 4] = [12 << 20, 4 << 20, 32 << 20, 8192];

impl Step {
    /// The step's buffers: sizes are multiples of 64, alignment 64.
    ///
    /// # Errors
    /// Only what [`Problem::new`] says of sizes past `u64`.
    pub fn problem(&self) -> Result<Problem, Error> {
        let mut buffers = Vec::new();
        let mut saved: Vec<Vec<(u64, u64)>> = vec![Vec::new(); (self.micro_batches * self.chunks()) as usize];
        let mut tick = 0;
        for (is_forward, micro_batch, chunk) in self.parts() {
            let tokens = self.tokens[micro_batch as usize % self.tokens.len()];
            let kept = &mut saved[(micro_batch * self.chunks() + chunk) as usize];
            for _ in 0..self.layers.div_ceil(self.chunks()) {
                if is_forward {
                    for (step, bytes) in SAVED.iter().enumerate() {
                        kept.push((tick + 2 * step as u64 + 1, bytes * tokens));
                    }
                }
                for (step, bytes) in TRANSIENT.iter().enumerate() {
                    let start = tick + 2 * step as u64 + 1;
                    buffers.push(Buffer::new(start..start + 2 + step as u64 % 3, bytes * tokens).aligned(64));
                }
                if !is_forward {
                    let of_layer = kept.split_off(kept.len() - SAVED.len());
                    for (step, &(start, bytes)) in of_layer.iter().rev().enumerate() {
                        buffers.push(Buffer::new(start..tick + 2 * step as u64 + 2, bytes).aligned(64));
                    }
                }
                tick += 2 * SAVED.len() as u64;
            }
        }
        if self.persistent {
            // Weights and two moments in full, gradients from the first backward part on.
            for bytes in PARAMETERS.iter().flat_map(|&bytes| (0..self.layers).map(move |_| bytes)) {
                buffers.extend([0, 0, 0].map(|start| Buffer::new(start..tick, bytes).aligned(64)));
                buffers.push(Buffer::new(self.stages.min(self.micro_batches)..tick, bytes).aligned(64));
            }
        }
        Problem::new(buffers)
    }

    fn chunks(&self) -> u64 {
        if self.order == Order::Interleaved { 2 } else { 1 }
    }

    /// `(is forward, micro-batch, chunk)` in the order they run.
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
            // Backward runs through the chunks the other way round, so that a whole group must be there.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower_bound;

    #[test]
    fn every_saved_activation_meets_its_backward_part() {
        for order in [Order::Accumulation, Order::OneForwardOneBackward, Order::Interleaved] {
            for micro_batches in [1, 3, 8] {
                let step = Step { order, micro_batches, ..Step::default() };
                let problem = step.problem().unwrap();
                let parts = 2 * micro_batches * step.layers;
                assert_eq!(problem.len() as u64, parts * TRANSIENT.len() as u64 + parts / 2 * SAVED.len() as u64);
            }
        }
    }

    #[test]
    fn pipelining_holds_more_than_accumulation() {
        let bound = |order| lower_bound(&Step { order, ..Step::default() }.problem().unwrap());
        assert!(bound(Order::Accumulation) < bound(Order::OneForwardOneBackward));
    }
}
