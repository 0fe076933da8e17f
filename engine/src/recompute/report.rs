//! What a program computes again, layer by layer.

use serde::Serialize;

use super::policy::block_of;
use crate::compile::{Program, Work};

/// What is computed again in a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerAgain {
    /// Name of the layer, e.g. `h.3`; or of what stands outside of layers.
    pub layer: String,
    /// Operations that run a second time in a micro-batch, in order.
    pub ops: Vec<&'static str>,
}

/// The layers of a program in the order in which they run, with what the first micro-batch computes again.
pub fn layers_again(program: &Program) -> Vec<LayerAgain> {
    let mut layers: Vec<LayerAgain> = Vec::new();
    for step in &program.steps {
        let Work::Compute(op) = &step.work else { continue };
        let numbered = block_of(&step.layer);
        let layer = numbered.unwrap_or(&step.layer);
        let known = layers.iter().position(|known| known.layer == layer);
        if known.is_none() && (numbered.is_some() || step.again) {
            layers.push(LayerAgain { layer: layer.to_owned(), ops: Vec::new() });
        }
        if step.again && step.micro_batch == 0 {
            let index = known.unwrap_or(layers.len() - 1);
            layers[index].ops.push(op.name());
        }
    }
    layers
}
