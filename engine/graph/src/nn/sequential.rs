//! Layers one after another.

use super::Module;
use crate::error::Result;
use crate::tensor::Tensor;

/// Layers one after another.
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module>>,
}

/// No layers yet.
pub fn seq() -> Sequential {
    Sequential::default()
}

impl Sequential {
    /// Number of layers.
    pub fn len(&self) -> i64 {
        self.layers.len() as i64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// With another layer behind the others; a function of a tensor is one, too.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "candle's name")]
    pub fn add<M: Module + 'static>(mut self, layer: M) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// [`Self::add`] of a function.
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
