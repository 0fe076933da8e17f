//! Rebuilding a graph: what it says about its values holds for their counterparts in the new graph.

use std::sync::Arc;

use super::{Graph, ReportedLoss, SequenceLoss, Sequences, ValueId};

impl Graph {
    /// Takes over everything that `old` says about its values and has not been said by recording nodes, and the phase and
    /// the place of new nodes. `new` returns the counterpart of a value of `old`.
    pub(crate) fn carry_over(&mut self, old: &Self, new: &dyn Fn(ValueId) -> ValueId) {
        (self.phase, self.place) = (old.phase, old.place);
        self.random_places = old.random_places;
        self.rules = old.rules.iter().map(|(&id, rule)| (new(id), Arc::clone(rule))).collect();
        self.frozen = old.frozen.iter().map(|&id| new(id)).collect();
        self.packed = old.packed.iter().map(|(&id, &elements)| (new(id), elements)).collect();
        self.heads = old.heads.iter().map(|&id| new(id)).collect();
        self.vectors = old.vectors.iter().map(|&id| new(id)).collect();
        self.linear_layers.clone_from(&old.linear_layers);
        self.watched = old.watched.iter().map(|(name, id)| (name.clone(), new(*id))).collect();
        let reported =
            |loss: &ReportedLoss| ReportedLoss { depends_on: new(loss.depends_on), scalar: new(loss.scalar), ..*loss };
        self.loss_parts = old.loss_parts.iter().map(reported).collect();
        self.sequences = match old.sequences {
            Sequences::Whole => Sequences::Whole,
            Sequences::Placed { positions } => Sequences::Placed { positions: new(positions) },
            Sequences::Continued { positions, window } => Sequences::Continued { positions: new(positions), window },
            Sequences::Packed { document_starts, positions, weights, routed } => Sequences::Packed {
                document_starts: new(document_starts),
                positions: new(positions),
                weights: new(weights),
                routed: new(routed),
            },
        };
        self.loss_terms = old.loss_terms;
        self.sequence_loss = old.sequence_loss.map(|loss| match loss {
            SequenceLoss::LogLikelihoods => loss,
            SequenceLoss::Pairs { preference, reference, desirable } => {
                SequenceLoss::Pairs { preference, reference: reference.map(&new), desirable: desirable.map(&new) }
            }
        });
        self.log_likelihoods = old.log_likelihoods.map(new);
    }
}
