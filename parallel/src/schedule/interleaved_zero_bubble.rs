//! Interleaved 1F1B with split backwards (Qi et al., arXiv 2401.10241; PyTorch's `ScheduleInterleavedZeroBubble`).

use super::interleaved::{chunk_turns, round_size, warm_up};
use super::rank_order::RankOrder;
use super::{Schedule, Shape};
use crate::{Action, Error};

/// Interleaved 1F1B with a shorter warm-up, in which P−1−r replaces 2(P−1−r). Its backwards are input gradients only.
/// From the r-th on, each is followed by the oldest weight gradient. Peak: min(M, P) micro-batches on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct InterleavedZeroBubble;

impl Schedule for InterleavedZeroBubble {
    fn name(&self) -> &'static str {
        "interleaved-zb"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        table(shape, round_size(self.name(), shape)?)
    }
}

/// Returns every rank's order, for rounds of `group` micro-batches.
pub(super) fn table(shape: &Shape, group: u32) -> Result<Vec<Vec<Action>>, Error> {
    let chunks = chunk_turns(shape, group);
    let rank = |r: u32| {
        let mut order = RankOrder::default();
        let warm_up = warm_up(shape, group, shape.ranks - 1 - r);
        for turn in 0..chunks.len() + warm_up {
            if turn < chunks.len() {
                order.forward(chunks[turn] * shape.ranks + r);
            }
            if let Some(j) = turn.checked_sub(warm_up) {
                order.backward_input((shape.chunks - 1 - chunks[j]) * shape.ranks + r);
                if j >= r as usize {
                    order.backward_weight();
                }
            }
        }
        order.flush()
    };
    Ok((0..shape.ranks).map(rank).collect())
}
