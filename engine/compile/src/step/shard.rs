//! The division of a step's tensors among context and tensor ranks, and of its parameters and gradients among shard ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use gapless_graph::shard::{
    FullSharing, FullySharded, Request, Sharded, Shares, Sharing, can_be_gathered, fully_shard, shard,
};
use gapless_graph::{LossPart, ValueId, Window};
use gapless_parallel::Axes;

use super::record::Trace;
use super::update::SMALLEST_PART;
use super::{LOSS_PARTS, RankPlan, StepOptions};
use crate::error::Result;

impl RankPlan {
    /// Returns how this rank shares tensors with others: first the tokens of sequences, then parameters.
    pub(super) fn sharings(&self, options: &StepOptions) -> impl Iterator<Item = Sharing> {
        let shares = [
            (Axes::CONTEXT, Shares::Tokens { rounds: options.context_rounds() }),
            (Axes::TENSOR, Shares::Parameters { sequence: options.sequence_parallel }),
        ];
        let sharing = |(axes, shares)| Sharing {
            axes,
            ranks: self.mesh.size(axes),
            rank: self.mesh.index(self.at, axes),
            shares,
            folds: axes & self.mesh.fold == axes,
        };
        shares.map(sharing).into_iter().filter(|sharing| sharing.ranks > 1)
    }

    /// Returns how this rank divides parameters and gradients with ranks that share the batch, or `None` if it does not.
    pub(super) fn full_sharing(&self, options: &StepOptions) -> Option<FullSharing> {
        let axes = Axes::SHARD;
        let (ranks, rank) = (self.mesh.size(axes), self.mesh.index(self.at, axes));
        (ranks > 1).then_some(FullSharing { axes, ranks, rank, parameters: options.zero_stage == 3 })
    }
}

impl Trace {
    /// Replaces the graph by that of one rank. Clones keep the old graph. Handles of values that are not among `outputs` or
    /// `gradients`, and that a node produces, are not valid afterwards.
    pub fn shard(
        &mut self,
        sharing: &Sharing,
        outputs: &[ValueId],
        gradients: &[(ValueId, ValueId)],
        windows: Option<&BTreeMap<String, Window>>,
    ) -> Result<Sharded> {
        let _span = tracing::info_span!("shard").entered();
        // The update adds up what context ranks have, as it does for all ranks that share the batch.
        let is_summed = matches!(sharing.shares, Shares::Tokens { .. }) && windows.is_none();
        let request = Request { tokens: self.tokens.id(), outputs, gradients, is_summed, windows };
        let mut sharded = shard(&self.lock(), sharing, &request)?;
        for name in &sharded.gathered {
            tracing::warn!(operation = %name, "ranks gather its inputs, because it has no rule: see Op::rule");
        }
        self.graph = Arc::new(Mutex::new(std::mem::take(&mut sharded.graph)));
        self.tokens = self.tensor(sharded.value(request.tokens));
        Ok(sharded)
    }

    /// Replaces the graph by one in which ranks divide some parameters and their gradients. Clones keep the old graph. Handles
    /// of values that are neither `gradients` nor needed without them are not valid afterwards.
    pub fn fully_shard(
        &mut self,
        sharing: &FullSharing,
        divided: &BTreeSet<String>,
        gradients: &[(ValueId, ValueId)],
    ) -> Result<FullySharded> {
        let _span = tracing::info_span!("fully_shard").entered();
        let mut sharded = fully_shard(&self.lock(), sharing, divided, gradients)?;
        self.graph = Arc::new(Mutex::new(std::mem::take(&mut sharded.graph)));
        self.tokens = self.tensor(sharded.value(self.tokens.id()));
        Ok(sharded)
    }

    /// Returns the names of the persistent tensors that ranks can divide into equal parts and gather where they are read.
    /// `held` gives the number of ranks that hold other parts of a tensor already, and `grain` the number of elements of
    /// which a part must be a multiple, or `None` if the tensor must stay whole. All ranks return the same names.
    pub fn divisible(
        &self,
        ranks: usize,
        held: impl Fn(&str) -> usize,
        grain: impl Fn(&str) -> Option<usize>,
    ) -> BTreeSet<String> {
        let graph = self.lock();
        let is_divisible = |&(id, name): &(ValueId, &str)| {
            let (window, Some(grain)) = (graph.window(id), grain(name)) else { return false };
            // Ranks that hold other parts must come to the same answer.
            let is_even = window.elements() * held(name) == window.whole_dims().iter().product::<usize>();
            let divides = window.elements().is_multiple_of(ranks.saturating_mul(grain));
            is_even && divides && window.elements() / ranks >= SMALLEST_PART && can_be_gathered(&graph, id)
        };
        graph.persistent().filter(is_divisible).map(|(_, name)| name.to_owned()).collect()
    }

    /// Returns the values besides the loss that every rank reports.
    pub fn reported(&self, loss: ValueId) -> Vec<ValueId> {
        let graph = self.lock();
        let parts = LOSS_PARTS.iter().flat_map(|&(part, _): &(LossPart, _)| graph.parts_of_loss(loss, part));
        let watched = graph.watched().iter().map(|&(_, id)| id);
        parts.chain(watched).collect()
    }
}
