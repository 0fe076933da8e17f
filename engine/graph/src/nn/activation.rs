//! Activation functions, selected by name in configurations.

use serde::{Deserialize, Serialize};

use super::{Module, ops};
use crate::error::Result;
use crate::tensor::Tensor;

/// An activation function, with the same names in configurations as in candle.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "they say it themselves")]
pub enum Activation {
    /// GELU with the exact error function.
    #[default]
    Gelu,
    /// GELU in its tanh form.
    #[serde(alias = "gelu_new")]
    NewGelu,
    Relu,
    /// relu(x)².
    Relu2,
    /// relu(x), limited to 6.
    Relu6,
    Silu,
    Sigmoid,
    HardSigmoid,
    /// silu of the first half of the last dimension, times the second half.
    Swiglu,
    /// Another name of silu.
    Swish,
    Mish,
    HardSwish,
    Elu(f64),
    LeakyRelu(f64),
    /// GELU in its tanh form.
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match *self {
            Self::Gelu => xs.gelu_erf(),
            Self::NewGelu | Self::GeluPytorchTanh => xs.gelu(),
            Self::Relu => xs.relu(),
            Self::Relu2 => xs.relu()?.sqr(),
            Self::Relu6 => xs.clamp(0.0, 6.0),
            Self::Silu | Self::Swish => xs.silu(),
            Self::Sigmoid => xs.sigmoid(),
            Self::HardSigmoid => ops::hard_sigmoid(xs),
            Self::Swiglu => ops::swiglu(xs),
            Self::Mish => ops::mish(xs),
            Self::HardSwish => xs * ops::hard_sigmoid(xs)?,
            Self::Elu(alpha) => xs.elu(alpha),
            Self::LeakyRelu(slope) => ops::leaky_relu(xs, slope),
        }
    }
}
