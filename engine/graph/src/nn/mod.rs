//! Layers and the names of their parameters, as in `candle_nn`.

mod init;
mod layers;
mod model;
mod moe;
mod var_builder;

pub use init::{Init, Initializer};
pub use layers::{Embedding, LayerNorm, Linear, RmsNorm, embedding, layer_norm, linear, linear_no_bias, rms_norm};
pub use model::Model;
pub use moe::{Capacity, Choice, Exchange, Experts, Router, RouterConfig, Routing, Score};
pub use var_builder::VarBuilder;

use crate::error::Result;
use crate::tensor::Tensor;

/// A layer with one input and one output.
pub trait Module {
    /// Records the layer.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, xs: &Tensor) -> Result<Tensor>;
}
