//! Routing statistics of a mixture of experts, for the rows of metrics.jsonl.

use gapless_engine::{TrainError, Trainer};
use serde::Serialize;

use super::Event;

/// The row of a step in metrics.jsonl.
#[derive(Serialize)]
pub(super) struct StepRow<'a> {
    #[serde(flatten)]
    event: &'a Event,
    #[serde(flatten)]
    routing: Option<Routing>,
}

/// Statistics by layer. They cover only the layers and tokens of this rank.
#[derive(Serialize)]
struct Routing {
    /// For each layer, the load of the busiest expert divided by the mean load. Empty if experts choose tokens, because
    /// the load is then always even.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expert_load: Vec<f32>,
    /// For each layer, the number of choices that exceeded the experts' capacity. If experts choose tokens, the number
    /// of tokens that no expert chose. Empty if the experts have no capacity.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expert_dropped: Vec<f32>,
}

impl<'a> StepRow<'a> {
    /// Creates the row of the step that the trainer has just done.
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
