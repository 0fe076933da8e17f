//! 1F1B (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2).

use super::{Schedule, Shape};
use crate::{Action, Error, Kind};

/// The 1F1B schedule: a warm-up of min(P−1−r, M) forwards, then one forward and one backward in turn. Peak: min(M, P−r)
/// micro-batches. On one rank this is plain gradient accumulation.
#[derive(Debug, Clone, Copy, Default)]
pub struct OneForwardOneBackward;

impl Schedule for OneForwardOneBackward {
    fn name(&self) -> &'static str {
        "1f1b"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 1)?;
        let micro_batches = shape.micro_batches;
        let rank = |stage: u32| {
            let warm_up = (shape.ranks - 1 - stage).min(micro_batches);
            let forward = |m| Action::new(Kind::Forward, stage, m);
            let backward = |m| Action::new(Kind::Backward, stage, m);
            let mut actions: Vec<Action> = (0..warm_up).map(forward).collect();
            for m in 0..micro_batches - warm_up {
                actions.extend([forward(warm_up + m), backward(m)]);
            }
            actions.extend((micro_batches - warm_up..micro_batches).map(backward));
            actions
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}
