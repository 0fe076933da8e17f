//! From gradients to new parameters: the update part of the step, as graph like everything else.

mod adamw;
mod global_norm;

pub use adamw::AdamW;
pub use global_norm::{GlobalNorm, SquaredNorms};

use crate::error::Result;
use crate::graph::Tensor;
use crate::nn::Init;

/// Numbers that change from step to step and reach the update as one input.
pub const SCALARS: usize = 8;

/// One parameter, or a flat part of one, on its way through an update.
#[derive(Debug)]
pub struct ParameterUpdate<'a> {
    /// The parameter, which the update overwrites.
    pub parameter: &'a Tensor,
    /// Dimensions of the whole parameter: matrices usually decay, vectors do not.
    pub rank: usize,
    /// Its gradient, summed over the step.
    pub gradient: &'a Tensor,
    /// Its states, in the order of [`Optimizer::states`].
    pub states: &'a [Tensor],
    /// The norm of all gradients together: a scalar.
    pub norm: &'a Tensor,
    /// What [`Optimizer::scalars`] said: [[`SCALARS`]].
    pub scalars: &'a Tensor,
}

/// A rule that changes parameters.
pub trait Optimizer: std::fmt::Debug + Send + Sync {
    /// Names and initial values of the tensors that it keeps for each parameter, of the parameter's shape.
    fn states(&self) -> Vec<(&'static str, Init)>;

    /// The numbers of a step (counted from 0) at a learning rate.
    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS];

    /// Records the update of one parameter, and returns its new value.
    ///
    /// # Errors
    /// What building the graph returns.
    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor>;
}
