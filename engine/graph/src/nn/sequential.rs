//! Sequences of layers.

use super::Module;
use crate::error::Result;
use crate::tensor::Tensor;

/// Layers that are applied one after another.
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module>>,
}

/// Creates an empty sequence.
pub fn seq() -> Sequential {
    Sequential::default()
}

impl Sequential {
    /// Number of layers.
    pub fn len(&self) -> i64 {
        self.layers.len() as i64
    }

    /// True if there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Appends a layer. A function of a tensor is a layer too.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "candle's name")]
    pub fn add<M: Module + 'static>(mut self, layer: M) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Appends a function as a layer.
    #[must_use]
    pub fn add_fn<F: Fn(&Tensor) -> Result<Tensor> + 'static>(self, f: F) -> Self {
        self.add(f)
    }
}

impl Module for Sequential {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(xs.clone(), |xs, layer| layer.forward(&xs))
    }
}
