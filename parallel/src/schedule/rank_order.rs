//! The order of one rank while a generator writes it. Micro-batches are counted per stage, so a rule only adds "a
//! forward of this stage" and never names the micro-batch.

use std::collections::{BTreeMap, VecDeque};

use crate::{Action, Kind, StageId};

/// The order of one rank under construction. Each stage runs its micro-batches in ascending order, for each kind of
/// action.
#[derive(Debug, Default)]
pub(super) struct RankOrder {
    actions: Vec<Action>,
    forwards: BTreeMap<StageId, u32>,
    backwards: BTreeMap<StageId, u32>,
    /// Input gradients whose weight gradients have not been added yet, oldest first.
    pending: VecDeque<Action>,
}

impl RankOrder {
    /// Adds F of the next micro-batch of `stage`.
    pub fn forward(&mut self, stage: u32) -> Action {
        let next = self.forwards.entry(StageId(stage)).or_default();
        let action = Action::new(Kind::Forward, stage, *next);
        *next += 1;
        self.push(action)
    }

    /// Adds B of the next micro-batch of `stage`.
    pub fn backward(&mut self, stage: u32) -> Action {
        let action = self.next_backward(Kind::Backward, stage);
        self.push(action)
    }

    /// Adds I of the next micro-batch of `stage`.
    pub fn backward_input(&mut self, stage: u32) -> Action {
        let action = self.next_backward(Kind::BackwardInput, stage);
        self.pending.push_back(action);
        self.push(action)
    }

    /// Adds the W of the oldest I that still lacks its W, if there is one.
    pub fn backward_weight(&mut self) {
        if let Some(input) = self.pending.pop_front() {
            self.push(Action { kind: Kind::BackwardWeight, ..input });
        }
    }

    /// Adds the W of the oldest I of `stage` that still lacks its W, if there is one.
    pub fn backward_weight_of(&mut self, stage: u32) {
        if let Some(at) = self.pending.iter().position(|input| input.stage.0 == stage) {
            self.pending.rotate_left(at);
            let input = self.pending.pop_front().expect("position found it");
            self.pending.rotate_right(at);
            self.push(Action { kind: Kind::BackwardWeight, ..input });
        }
    }

    /// Returns the number of forwards of `stage` so far.
    pub fn forwards_of(&self, stage: u32) -> u32 {
        self.forwards.get(&StageId(stage)).copied().unwrap_or_default()
    }

    /// Adds every missing W, oldest first, and returns the complete order.
    pub fn flush(mut self) -> Vec<Action> {
        while !self.pending.is_empty() {
            self.backward_weight();
        }
        self.actions
    }

    fn next_backward(&mut self, kind: Kind, stage: u32) -> Action {
        let next = self.backwards.entry(StageId(stage)).or_default();
        let action = Action::new(kind, stage, *next);
        *next += 1;
        action
    }

    fn push(&mut self, action: Action) -> Action {
        self.actions.push(action);
        action
    }
}
