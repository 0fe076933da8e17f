//! ZBV (Qi et al., arXiv 2401.10241, section 6): two chunks per rank in the shape of a V, no bubble at 1F1B's memory.

use super::rank_order::RankOrder;
use super::{Placement, Schedule, Shape};
use crate::{Action, Error};

/// The ZBV schedule. Peak: P micro-batches on every rank if M ≥ 2P−1, otherwise min(2P, 2M, M+r+1)/2. There is no
/// bubble within a rank's own span if F, I and W take the same time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Zbv;

impl Schedule for Zbv {
    fn name(&self) -> &'static str {
        "zbv"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        // The warm-up alone takes 2P − 1 micro-batches. A smaller batch leaves gaps in place of the micro-batches that
        // it lacks.
        let micro_batches = shape.micro_batches.max(2 * shape.ranks - 1);
        let rank = |r: u32| {
            let mut actions = rank_actions(shape.ranks, r, micro_batches);
            actions.retain(|action| action.micro_batch.0 < shape.micro_batches);
            actions
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}

fn rank_actions(ranks: u32, r: u32, micro_batches: u32) -> Vec<Action> {
    let (down, up) = (Placement::V.stage(ranks, r, 0), Placement::V.stage(ranks, r, 1));
    let mut order = RankOrder::default();
    for _ in 0..2 * (ranks - r) - 1 {
        order.forward(down);
    }
    for _ in 0..r {
        order.forward(up);
        order.forward(down);
    }
    for _ in r..ranks {
        order.forward(up);
        order.backward_input(up);
        order.backward_weight_of(up);
    }
    while order.forwards_of(up) < order.forwards_of(down) || order.forwards_of(down) < micro_batches {
        if order.forwards_of(down) < micro_batches {
            order.forward(down);
        }
        order.backward_input(down);
        order.backward_weight_of(down);
        order.forward(up);
        order.backward_input(up);
        order.backward_weight_of(up);
    }
    for _ in 0..r {
        order.backward_input(down);
        order.backward_input(up);
    }
    for _ in r..ranks {
        order.backward_input(down);
        order.backward_weight_of(down);
    }
    for stage in [up, down] {
        for _ in 0..r {
            order.backward_weight_of(stage);
        }
    }
    order.flush()
}
