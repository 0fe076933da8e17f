//! GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards.

use super::{Schedule, Shape};
use crate::{Action, Error, Kind};

/// The GPipe schedule: F0..F(M−1), then B0..B(M−1). Peak: M micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct GPipe;

impl Schedule for GPipe {
    fn name(&self) -> &'static str {
        "gpipe"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 1)?;
        let rank = |stage| {
            let part = |kind| (0..shape.micro_batches).map(move |m| Action::new(kind, stage, m));
            part(Kind::Forward).chain(part(Kind::Backward)).collect()
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}
