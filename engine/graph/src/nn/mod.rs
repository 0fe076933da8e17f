//! Layers and the names of their parameters, following `candle_nn`.

mod activation;
mod adapter;
mod conv;
mod group_norm;
mod init;
mod layers;
pub mod loss;
mod model;
mod moe;
pub mod ops;
mod preference;
mod quantize;
pub mod rotary_emb;
mod sequential;
mod trainable;
mod var_builder;

pub use crate::ops::LimitedActivation;
pub use activation::Activation;
pub use conv::{
    Conv, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvConfig, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use group_norm::{GroupNorm, group_norm};
pub use init::{Init, Initializer};
pub use layers::{
    Embedding, LayerNorm, Linear, RmsNorm, embedding, layer_norm, layer_norm_no_bias, linear, linear_b, linear_no_bias,
    linear_with_hints, rms_norm, rms_norm_offset,
};
pub use model::Model;
pub use moe::{Capacity, Choice, Exchange, Experts, Router, RouterConfig, Routing, Score};
pub use ops::Dropout;
pub use preference::{Answer, PairLoss, Preference, Rewards};
pub use quantize::{Quantize, QuantizedFormat, QuantizedRounding};
pub use sequential::{Sequential, seq};
pub use trainable::{Lora, LoraInit, Trainable, names};
pub use var_builder::{ExpertRanks, VarBuilder};

use crate::error::Result;
use crate::tensor::Tensor;

/// A layer that may behave differently while training.
pub trait ModuleT {
    /// Records the layer.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor>;
}

impl<M: Module> ModuleT for M {
    fn forward_t(&self, xs: &Tensor, _: bool) -> Result<Tensor> {
        self.forward(xs)
    }
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Module for F {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self(xs)
    }
}

impl<M: Module> Module for Option<&M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.map_or_else(|| Ok(xs.clone()), |layer| layer.forward(xs))
    }
}

/// A layer with one input and one output.
pub trait Module {
    /// Records the layer.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    fn forward(&self, xs: &Tensor) -> Result<Tensor>;
}
