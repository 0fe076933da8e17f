//! ZB-H2 (Qi et al., arXiv 2401.10241, section 3.2): no bubble within a rank's own span, at twice the memory.

use super::rank_order::RankOrder;
use super::{Schedule, Shape};
use crate::{Action, Error};

/// The ZB-H2 schedule: a warm-up of min(M, 2(P−1−r)+1) forwards; then per micro-batch I, from the 2r-th on W, and F
/// while any is left. Peak: min(M, 2P−1) micro-batches.
///
/// This schedule pays only if the optimizer does not wait for all ranks. With a synchronous optimizer, ZB-H1 is as fast
/// with half the memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct ZbH2;

impl Schedule for ZbH2 {
    fn name(&self) -> &'static str {
        "zb-h2"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 1)?;
        let rank = |r: u32| {
            let mut order = RankOrder::default();
            let warm_up = shape.micro_batches.min(2 * (shape.ranks - 1 - r) + 1);
            for _ in 0..warm_up {
                order.forward(r);
            }
            for j in 0..shape.micro_batches {
                order.backward_input(r);
                if j >= 2 * r {
                    order.backward_weight();
                }
                if order.forwards_of(r) < shape.micro_batches {
                    order.forward(r);
                }
            }
            order.flush()
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}
