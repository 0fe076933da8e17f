//! The division of a step's tensors among tensor ranks.

use std::collections::BTreeMap;

use gapless_graph::shard::{Request, Sharded, Sharing, shard};
use gapless_graph::{LossPart, ValueId, Window};
use gapless_parallel::Axes;

use super::record::Trace;
use super::{LOSS_PARTS, RankPlan, StepOptions};
use crate::error::Result;

impl RankPlan {
    /// Returns how this rank shares tensors with others, or `None` if it shares none.
    pub(super) fn sharing(&self, options: &StepOptions) -> Option<Sharing> {
        let axes = Axes::TENSOR;
        let (ranks, rank) = (self.mesh.size(axes), self.mesh.index(self.at, axes));
        (ranks > 1).then_some(Sharing { axes, ranks, rank, sequence: options.sequence_parallel })
    }
}

impl Trace {
    /// Replaces the graph by that of one rank. Handles of values that are not among `outputs` or `gradients`, and that a
    /// node produces, are not valid afterwards.
    pub fn shard(
        &mut self,
        sharing: &Sharing,
        outputs: &[ValueId],
        gradients: &[(ValueId, ValueId)],
        windows: Option<&BTreeMap<String, Window>>,
    ) -> Result<Sharded> {
        let _span = tracing::info_span!("shard").entered();
        let request = Request { tokens: self.tokens.id(), outputs, gradients, windows };
        let mut sharded = shard(&self.lock(), sharing, &request)?;
        for name in &sharded.gathered {
            tracing::warn!(operation = %name, "ranks gather its inputs, because it has no rule: see Op::rule");
        }
        *self.lock() = std::mem::take(&mut sharded.graph);
        self.tokens = self.tensor(sharded.value(request.tokens));
        Ok(sharded)
    }

    /// Returns the values besides the loss that every rank reports.
    pub fn reported(&self, loss: ValueId) -> Vec<ValueId> {
        let graph = self.lock();
        let parts = LOSS_PARTS.iter().flat_map(|&(part, _): &(LossPart, _)| graph.parts_of_loss(loss, part));
        let watched = graph.watched().iter().map(|&(_, id)| id);
        parts.chain(watched).collect()
    }
}
