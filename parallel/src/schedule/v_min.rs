//! V-Min (Qi et al., arXiv 2405.15362, section 3.3): the least memory of the V family, a third of 1F1B's.

use super::v_pattern::{self, Pattern};
use super::{Placement, Schedule, Shape};
use crate::{Action, Error};

/// The V-Min schedule: each micro-batch goes down and up the ranks at full speed. Peak: about a third of 1F1B's, on
/// every rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct VMin;

impl Schedule for VMin {
    fn name(&self) -> &'static str {
        "v-min"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        Ok(v_pattern::unroll(shape, pattern))
    }
}

/// Returns the slots of micro-batch 0 on rank `r`. If the number of ranks is divisible by three, the turn at the last
/// rank needs two idle slots; without them, two of the pattern's slots would coincide modulo six.
fn pattern(ranks: u32, r: u32) -> Pattern {
    let turn = if ranks.is_multiple_of(3) { 2 } else { 0 };
    [r, 2 * ranks - r - 1, 2 * ranks + turn + r, 4 * ranks + turn - r - 1]
}
