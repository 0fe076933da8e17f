//! Activation functions by name, as configurations have them.

use serde::{Deserialize, Serialize};

use super::{Module, ops};
use crate::error::Result;
use crate::tensor::Tensor;

/// Which function; named in configurations as in candle's.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "they say it themselves")]
pub enum Activation {
    /// With the exact error function.
    #[default]
    Gelu,
    /// In its tanh form.
    #[serde(alias = "gelu_new")]
    NewGelu,
    Relu,
    /// relu(x)².
    Relu2,
    /// relu(x), at most 6.
    Relu6,
    Silu,
    Sigmoid,
    HardSigmoid,
    /// Of both halves of the last dimension.
    Swiglu,
    /// Another name of silu.
    Swish,
    Mish,
    HardSwish,
    Elu(f64),
    LeakyRelu(f64),
    /// In its tanh form.
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
