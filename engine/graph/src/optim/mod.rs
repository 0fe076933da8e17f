//! From gradients to new parameters: the update part of the step, as graph like everything else.

mod adafactor;
mod adamw;
mod adamw8bit;
mod average;
mod eight_bit;
mod galore;
mod global_norm;
mod lion;
mod load_bias;
mod momentum;
mod muon;
mod subspace;

pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use adamw8bit::AdamW8bit;
pub use average::WeightAverage;
pub use galore::GaLore;
pub use global_norm::{GlobalNorm, SquaredNorms};
pub use lion::Lion;
pub use load_bias::LoadBias;
pub use muon::Muon;

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::Spec;

use crate::error::Result;
use crate::nn::Init;
use crate::tensor::Tensor;

/// Numbers that change from step to step and reach the update as one input.
pub const SCALARS: usize = 8;

/// What there is to know of a parameter before its update is recorded.
#[derive(Debug, Clone, Copy)]
pub struct ParameterInfo<'a> {
    /// Its full name.
    pub name: &'a str,
    /// Extents of the whole parameter: matrices usually decay, vectors do not.
    pub dims: &'a [usize],
    /// Its type.
    pub dtype: DType,
    /// Whether its rows are looked up by ids, as those of token embeddings: only some of them have gradients in a step.
    pub looked_up: bool,
    /// Whether what a rule keeps is in f32 where the parameter is stored in less, a master of the parameter included, and so are sums
    /// of its gradients (mixed precision: Micikevicius et al., arXiv 1710.03740, section 3.1). Else all of it is of the parameter's
    /// type, as of PyTorch's `model.to(torch.bfloat16)`.
    pub masters: bool,
}

impl ParameterInfo<'_> {
    /// The type of what a rule keeps of it.
    pub fn kept_dtype(&self) -> DType {
        if self.masters { DType::F32 } else { self.dtype }
    }

    /// Elements of the whole parameter.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }
}

/// A tensor that an optimizer keeps for a parameter.
#[derive(Debug, Clone)]
pub struct State {
    /// Its name, in front of the parameter's.
    pub name: &'static str,
    /// Shape and type for the whole parameter: the parameter's type, f32 or u8.
    pub spec: Spec,
    /// What it holds before the first step.
    pub init: StateInit,
}

/// What a state holds before the first step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StateInit {
    /// Numbers of its own.
    Filled(Init),
    /// What the parameter holds, as its own type has it. It has as many elements, and is written with the parameter
    /// (`Trainer::set_tensor`).
    Parameter,
}

impl From<Init> for StateInit {
    fn from(init: Init) -> Self {
        Self::Filled(init)
    }
}

/// One parameter, or a flat part of one, on its way through an update.
#[derive(Debug)]
pub struct ParameterUpdate<'a> {
    /// The parameter, which the update overwrites.
    pub parameter: &'a Tensor,
    /// What the whole parameter is.
    pub of: ParameterInfo<'a>,
    /// Its gradient, summed over the step.
    pub gradient: &'a Tensor,
    /// Its states, in the order of [`Optimizer::states`]; of a flat part, flat parts.
    pub states: &'a [Tensor],
    /// The norm of all gradients together: a scalar.
    pub norm: &'a Tensor,
    /// What [`Optimizer::scalars`] said: [[`SCALARS`]].
    pub scalars: &'a Tensor,
}

/// A rule that changes parameters. It is recorded once, as graph, and compiled with the rest of the step; one of your own is
/// as good as those that are here.
pub trait Optimizer: std::fmt::Debug + Send + Sync {
    /// Refuses settings that make no sense.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config), usually.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Whether its updates depend on the norm of all gradients together, and so wait for all of them.
    fn needs_norm(&self) -> bool {
        true
    }

    /// The tensors that it keeps for a parameter.
    fn states(&self, of: &ParameterInfo<'_>) -> Vec<State>;

    /// The type in which a parameter's gradient is summed up over micro-batches; by default its own.
    fn sum_dtype(&self, of: &ParameterInfo<'_>) -> DType {
        of.dtype
    }

    /// Data ranks may each update a flat part of a parameter, with the same part of its gradient and of all its states
    /// (`Trainer::on`): parts of any multiple of this many elements, or none at all. Every state has to
    /// divide into as many parts as the parameter does.
    fn shard_granularity(&self, _of: &ParameterInfo<'_>) -> Option<usize> {
        Some(1)
    }

    /// The numbers of a step (counted from 0) at a learning rate.
    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS];

    /// Records the update of one parameter, and returns its new value.
    ///
    /// # Errors
    /// What building the graph returns.
    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor>;
}

/// The rules that are here; one of your own is `Arc::new(rule)`.
macro_rules! into_shared {
    ($($rule:ty),+) => {
        $(impl From<$rule> for Arc<dyn Optimizer> {
            fn from(rule: $rule) -> Self {
                Arc::new(rule)
            }
        })+
    };
}
into_shared!(Adafactor, AdamW, AdamW8bit, GaLore, Lion, LoadBias, Muon);
