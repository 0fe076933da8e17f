//! ZB-H1 (Qi et al., arXiv 2401.10241, section 3.1): 1F1B's memory, a third of its bubble.

use super::{Schedule, Shape, interleaved_zero_bubble};
use crate::{Action, Error};

/// The ZB-H1 schedule: the interleaved zero-bubble order with one chunk per rank. Bubble: (P−1)(f+b−w). Peak: min(M, P)
/// micro-batches on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct ZbH1;

impl Schedule for ZbH1 {
    fn name(&self) -> &'static str {
        "zb-h1"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 1)?;
        // With one chunk the size of a round has no effect, so any number of micro-batches works.
        interleaved_zero_bubble::table(shape, shape.micro_batches)
    }
}
