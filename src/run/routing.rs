//! Where the tokens of a mixture of experts went, as rows of metrics say it.

use gapless_engine::{TrainError, Trainer};
use serde::Serialize;

use super::Event;

/// A step's row of metrics.jsonl.
#[derive(Serialize)]
pub(super) struct StepRow<'a> {
    #[serde(flatten)]
    event: &'a Event,
    #[serde(flatten)]
    routing: Option<Routing>,
}

/// Layer by layer, of those that this rank has, and of the tokens that it saw.
#[derive(Serialize)]
struct Routing {
    /// The most that an expert had to do, as a multiple of the mean; empty where experts choose, for it is even.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expert_load: Vec<f32>,
    /// Choices that found no room; where experts choose, tokens that none took. Empty without a capacity.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expert_dropped: Vec<f32>,
}

impl<'a> StepRow<'a> {
    /// Of the step that the trainer has just done.
    pub(super) fn new(event: &'a Event, trainer: &Trainer) -> Result<Self, TrainError> {
        let mut routing = Routing { expert_load: Vec::new(), expert_dropped: Vec::new() };
        for name in trainer.watched_names() {
            let numbers = || -> Result<Vec<f32>, TrainError> { Ok(trainer.watched(name)?.flatten_all()?.to_vec1()?) };
            if name.ends_with(".load") {
                let load = numbers()?;
                let (most, sum) = (load.iter().copied().fold(0.0, f32::max), load.iter().sum::<f32>());
                routing.expert_load.push(most * load.len() as f32 / sum.max(1.0));
            } else if name.ends_with(".dropped") {
                routing.expert_dropped.push(numbers()?.iter().sum());
            }
        }
        let is_mixture = !routing.expert_load.is_empty() || !routing.expert_dropped.is_empty();
        Ok(Self { event, routing: is_mixture.then_some(routing) })
    }
}
