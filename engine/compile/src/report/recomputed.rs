//! Lists the operations that a program recomputes, by layer.

use gapless_parallel::Kind;
use serde::Serialize;

use crate::recompute::policy::block_of;
use crate::{InstrKind, Program};

/// The recomputation in one layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RecomputedLayer {
    /// Name of the layer, e.g. `h.3`, or of a module that is not part of a numbered layer.
    pub layer: String,
    /// Operations that a micro-batch recomputes, in order.
    pub ops: Vec<&'static str>,
    /// Operations that are recomputed only for the weight gradients of a split backward. If such an operation was also
    /// recomputed for the input gradients, this is its third run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ops_for_weights: Vec<&'static str>,
}

/// Returns the number of operations that each micro-batch recomputes.
pub fn recomputed_per_micro_batch(program: &Program) -> Vec<usize> {
    let mut counts = Vec::new();
    for instr in &program.instrs {
        let micro_batch = instr.micro_batch as usize;
        counts.resize(counts.len().max(micro_batch + 1), 0);
        // Parameters that are gathered again are not recomputed.
        let is_computed = matches!(instr.kind, InstrKind::Compute(_));
        counts[micro_batch] += usize::from(instr.rematerialized && is_computed);
    }
    counts
}

/// Returns the layers of a program in the order in which they run, with the operations that each recomputes. The
/// operations are those of the micro-batch that recomputes most.
pub fn recomputed_layers(program: &Program) -> Vec<RecomputedLayer> {
    let counts = recomputed_per_micro_batch(program);
    let most = counts.iter().max().copied().unwrap_or(0);
    let micro_batch = counts.iter().position(|&count| count == most).unwrap_or(0);
    let mut layers: Vec<RecomputedLayer> = Vec::new();
    for part in &program.parts {
        let is_for_weights = part.action.is_some_and(|action| action.kind == Kind::BackwardWeight);
        for instr in &program.instrs[part.instrs.clone()] {
            let InstrKind::Compute(op) = &instr.kind else { continue };
            let numbered = block_of(&instr.layer);
            let layer = numbered.unwrap_or(&instr.layer);
            let known = layers.iter().position(|known| known.layer == layer);
            if known.is_none() && (numbered.is_some() || instr.rematerialized) {
                layers.push(RecomputedLayer { layer: layer.to_owned(), ..RecomputedLayer::default() });
            }
            if instr.rematerialized && instr.micro_batch as usize == micro_batch {
                let index = known.unwrap_or(layers.len() - 1);
                let RecomputedLayer { ops, ops_for_weights, .. } = &mut layers[index];
                let ops = if is_for_weights { ops_for_weights } else { ops };
                ops.push(op.name());
            }
        }
    }
    layers
}
