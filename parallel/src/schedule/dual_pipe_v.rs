//! DualPipeV, the "cut-in-half" of DeepSeek-AI's DualPipe (arXiv 2412.19437, section 3.2.1). It has ZBV's placement.
//! The forward of one chunk runs at the same time as the backward of another chunk. So the computation of each pass
//! hides the communication of the other pass.

use super::rank_order::RankOrder;
use super::{Placement, Schedule, Shape};
use crate::{Action, Cell, Error};

/// The DualPipeV schedule. It needs M ≥ 2P. Peak: (2P+1)/2 micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct DualPipeV;

impl Schedule for DualPipeV {
    fn name(&self) -> &'static str {
        "dualpipev"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        Ok(self.table(shape)?.into_iter().map(|row| row.iter().flat_map(Cell::actions).collect()).collect())
    }

    fn table(&self, shape: &Shape) -> Result<Vec<Vec<Cell>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        let &Shape { ranks, micro_batches, .. } = shape;
        if micro_batches < 2 * ranks {
            return Err(Error::MicroBatches { schedule: self.name(), needed: 2 * ranks, micro_batches });
        }
        Ok((0..ranks).map(|r| rank_cells(ranks, r, micro_batches)).collect())
    }
}

fn rank_cells(ranks: u32, r: u32, micro_batches: u32) -> Vec<Cell> {
    let (down, up) = (Placement::V.stage(ranks, r, 0), Placement::V.stage(ranks, r, 1));
    let to_last = ranks - 1 - r;
    let mut order = RankOrder::default();
    let mut overlapped = Vec::new();

    for _ in 0..2 * to_last {
        order.forward(down);
    }
    for _ in 0..=r {
        order.forward(down);
        order.forward(up);
    }
    for _ in 0..to_last {
        order.backward_input(up);
        order.backward_weight();
        order.forward(up);
    }
    for i in 0..micro_batches + r + 1 - 2 * ranks {
        // The last rank's first backward depends on the forward just before it, so nothing can overlap yet.
        let first = order.forward(down);
        order.backward(up);
        if i > 0 || to_last > 0 {
            overlapped.push(first);
        }
        overlapped.push(order.forward(up));
        order.backward(down);
    }
    for _ in 0..to_last {
        order.backward(up);
        overlapped.push(order.forward(up));
        order.backward(down);
    }
    // From half-way through the drain, backwards are split, and their weight gradients fill the bubble at the end.
    let switch = r.div_ceil(2);
    for i in 0..=r {
        let (up_whole, down_whole) = if r % 2 == 1 { (i < switch, i < switch) } else { (i <= switch, i < switch) };
        for (stage, whole) in [(up, up_whole), (down, down_whole)] {
            if whole {
                order.backward(stage);
            } else {
                order.backward_input(stage);
            }
        }
    }
    for _ in 0..to_last {
        order.backward_weight();
        order.backward_input(down);
    }

    let mut cells = Vec::new();
    let mut actions = order.flush().into_iter();
    let mut overlapped = overlapped.into_iter().peekable();
    while let Some(action) = actions.next() {
        match overlapped.next_if_eq(&action) {
            Some(forward) => {
                let backward = actions.next().expect("each overlapped forward was followed by its backward");
                cells.push(Cell::Overlap(forward, backward));
            }
            None => cells.push(Cell::One(action)),
        }
    }
    cells
}
