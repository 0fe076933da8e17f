//! Optimizers. The update of a step is recorded as graph nodes, like the forward and the backward.

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

/// Number of per-step scalars (learning rate, bias corrections, …). The update reads them from one input tensor.
pub const SCALARS: usize = 8;

/// The information about a parameter that an optimizer gets before the parameter's update is recorded.
#[derive(Debug, Clone, Copy)]
pub struct ParameterInfo<'a> {
    /// Full name of the parameter.
    pub name: &'a str,
    /// Shape of the whole parameter, even if this rank updates only a part. The number of dimensions decides on weight
    /// decay, which usually applies to matrices and not to vectors.
    pub dims: &'a [usize],
    /// Type in which the parameter is stored.
    pub dtype: DType,
    /// True if the parameter is a table whose rows are looked up by ids, such as a token embedding. In one step, only
    /// the rows that were looked up have gradients.
    pub looked_up: bool,
    /// True if the parameter is the weight of the output head, on which the model calls
    /// [`Linear::cross_entropy`](crate::nn::Linear::cross_entropy).
    pub head: bool,
    /// True if the parameter is a list of vectors, such as one bias for each expert. Its rows are then treated like
    /// vectors, and not as a matrix.
    pub vectors: bool,
    /// True for mixed precision (Micikevicius et al., arXiv 1710.03740, section 3.1). If true, optimizer states and the
    /// sums of gradients are f32, and there is an f32 master copy of a parameter that is stored in a smaller type. If
    /// false, states and sums have the parameter's type, as after PyTorch's `model.to(torch.bfloat16)`.
    pub masters: bool,
}

impl ParameterInfo<'_> {
    /// Returns the type of the parameter's optimizer states.
    pub fn state_dtype(&self) -> DType {
        if self.masters { DType::F32 } else { self.dtype }
    }

    /// True if weight decay usually applies: the parameter has matrices, and not vectors.
    pub fn has_matrices(&self) -> bool {
        self.dims.len() >= 2 && !self.vectors
    }

    /// Number of elements of the whole parameter.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }
}

/// A tensor that an optimizer keeps for a parameter.
#[derive(Debug, Clone)]
pub struct State {
    /// Name of the state. The state's full name is this name followed by the parameter's name.
    pub name: &'static str,
    /// Shape and type of the state of the whole parameter. The type is the parameter's own, f32 or u8.
    pub spec: Spec,
    /// Value of the state before the first step.
    pub init: StateInit,
}

/// The value of a state before the first step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StateInit {
    /// Values from a distribution, such as zeros.
    Init(Init),
    /// The parameter's value, converted to the state's type. The state must have as many elements as the parameter. If
    /// the host overwrites the parameter (`Trainer::set_tensor`), the state is overwritten too.
    Parameter,
}

impl From<Init> for StateInit {
    fn from(init: Init) -> Self {
        Self::Init(init)
    }
}

/// The operands of the update of one parameter. On data ranks, `parameter` may be a contiguous part of the flattened
/// parameter.
#[derive(Debug)]
pub struct ParameterUpdate<'a> {
    /// The parameter, which the update overwrites.
    pub parameter: &'a Tensor,
    /// Description of the whole parameter.
    pub info: ParameterInfo<'a>,
    /// Index of `parameter` among the equal parts of the flattened whole parameter; 0 if it is the whole, `None` if it is
    /// another part.
    pub part: Option<usize>,
    /// Gradient of the parameter, summed over the micro-batches of the step.
    pub gradient: &'a Tensor,
    /// States of the parameter, in the order of [`Optimizer::states`]. If `parameter` is a part of the parameter, each
    /// state is the corresponding part of the whole state.
    pub states: &'a [Tensor],
    /// Global norm of all gradients: a scalar.
    pub norm: &'a Tensor,
    /// The scalars that [`Optimizer::scalars`] returned for this step: \[[`SCALARS`]\].
    pub scalars: &'a Tensor,
}

/// An optimizer. The update is recorded once, as graph nodes, and compiled with the rest of the step. Implementations
/// outside this crate can do everything that the built-in ones do.
pub trait Optimizer: std::fmt::Debug + Send + Sync {
    /// Checks the settings of the optimizer.
    ///
    /// # Errors
    /// Returns an error, usually [`Error::Config`](crate::Error::Config), if a setting is out of range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// True if the update reads the global norm. The update then cannot start before all gradients are complete.
    fn needs_norm(&self) -> bool {
        true
    }

    /// Returns the tensors that the optimizer keeps for a parameter from step to step.
    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State>;

    /// Returns the type in which a parameter's gradient is summed over micro-batches. The default is the type in which
    /// the parameter is stored.
    fn sum_dtype(&self, parameter: &ParameterInfo<'_>) -> DType {
        parameter.dtype
    }

    /// Returns the granularity at which data ranks may split a parameter, or `None` if each rank must update the whole
    /// parameter.
    ///
    /// With `Some(n)`, a data rank may update a contiguous part of the flattened parameter. The number of elements of
    /// the part is a multiple of `n`. The rank also gets the corresponding parts of the gradient and of every state. So
    /// every state must divide into as many equal parts as the parameter.
    fn shard_granularity(&self, _of: &ParameterInfo<'_>) -> Option<usize> {
        Some(1)
    }

    /// Returns the scalars that the update reads in step `step`, counted from 0, if `lr` is the learning rate.
    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS];

    /// Records the update of one parameter and returns its new value.
    ///
    /// # Errors
    /// Returns the errors of recording graph nodes.
    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor>;
}

/// Converts the built-in optimizers into `Arc<dyn Optimizer>`. For an optimizer of your own, write `Arc::new(rule)`.
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
