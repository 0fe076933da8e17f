//! Layered gradient accumulation and its modular pipeline (Lamy-Poirier, arXiv 2106.02679, sections 3 and 4).
//!
//! Both are the breadth-first order with one layer per stage. In that order, each layer's weights are fetched once per
//! direction, and its gradients are reduced once per step while the next layer computes.

use super::{LoopedBreadthFirst, Schedule, Shape};
use crate::{Action, Error};

/// Gradient accumulation in layer-major order on a single rank. Chunks are layers.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayeredAccumulation;

impl Schedule for LayeredAccumulation {
    fn name(&self) -> &'static str {
        "layered-accumulation"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        if shape.ranks != 1 {
            return Err(Error::Ranks { schedule: self.name(), needed: 1, ranks: shape.ranks });
        }
        LoopedBreadthFirst.actions(shape)
    }
}

/// Layer-major order over several ranks, with layers assigned to the ranks in turn. The number of chunks is layers /
/// ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModularPipeline;

impl Schedule for ModularPipeline {
    fn name(&self) -> &'static str {
        "modular-pipeline"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        LoopedBreadthFirst.actions(shape)
    }
}
