//! Looped breadth-first (Lamy-Poirier, arXiv 2211.05953): every micro-batch passes a stage before the next stage starts.

use super::{Schedule, Shape};
use crate::{Action, Error, Kind};

/// The looped breadth-first schedule. Forwards run stage by stage; backwards run in the reverse order of stages and of
/// micro-batches. Each stage's weights are needed for one stretch of time per direction. Peak: M micro-batches.
///
/// In this schedule, and in the two built on it, a stage's weight gradients are summed from the last micro-batch to the
/// first. In all other schedules, they are summed from the first to the last.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoopedBreadthFirst;

impl Schedule for LoopedBreadthFirst {
    fn name(&self) -> &'static str {
        "looped-bfs"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        let rank = |r: u32| {
            let stages = (0..shape.chunks).map(|chunk| chunk * shape.ranks + r);
            let forwards =
                stages.flat_map(|stage| (0..shape.micro_batches).map(move |m| Action::new(Kind::Forward, stage, m)));
            let mut actions: Vec<Action> = forwards.collect();
            let backwards = actions.iter().rev().map(|forward| Action { kind: Kind::Backward, ..*forward });
            actions.extend(backwards.collect::<Vec<_>>());
            actions
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}
