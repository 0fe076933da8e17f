//! V-Half (Qi et al., arXiv 2405.15362, section 3.3): half of 1F1B's memory for half of its bubble.

use super::v_pattern::{self, Pattern};
use super::{Placement, Schedule, Shape};
use crate::{Action, Error};

/// The V-Half schedule: each micro-batch goes down the ranks at half speed and up at full speed, in the forward and in
/// the backward direction. Peak: about half of 1F1B's, on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct VHalf;

impl Schedule for VHalf {
    fn name(&self) -> &'static str {
        "v-half"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        Ok(v_pattern::unroll(shape, pattern))
    }
}

/// Returns the slots of micro-batch 0 on rank `r`. If the number of ranks is even, the micro-batch waits for three
/// slots on rank 0, between the forward and the backward of the last stage. Without this wait, two of the pattern's
/// slots would coincide modulo six.
fn pattern(ranks: u32, r: u32) -> Pattern {
    let turn = if ranks.is_multiple_of(2) { 3 } else { 0 };
    [2 * r, 3 * ranks - r - 2, 3 * ranks + turn + 2 * r - 1, 6 * ranks + turn - r - 2]
}
