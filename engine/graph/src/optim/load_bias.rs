//! Load balancing of experts without an auxiliary loss.

use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::Result;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// Updates a router's bias: bias += rate · sign(mean load − load) (Wang et al., arXiv 2408.15664, algorithm 1). The
/// update gets the load of every expert in place of a gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadBias {
    /// The amount by which each element of the bias changes in a step.
    pub rate: f64,
}

impl Optimizer for LoadBias {
    fn needs_norm(&self) -> bool {
        false
    }

    fn states(&self, _: &ParameterInfo<'_>) -> Vec<State> {
        Vec::new()
    }

    /// A bias is not split over data ranks, because the mean load is taken over all experts.
    fn shard_granularity(&self, _: &ParameterInfo<'_>) -> Option<usize> {
        None
    }

    fn scalars(&self, _: u64, _: f64) -> [f32; SCALARS] {
        [0.0; SCALARS]
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let [bias] =
            Tensor::apply_op(LoadBiasUpdate { rate: self.rate }, &[update.parameter, update.gradient, update.norm])?;
        Ok(bias)
    }
}

/// Computes the new bias from (bias, load, norm). The bias keeps its value if the norm is not finite.
#[derive(Debug, Clone, Copy)]
struct LoadBiasUpdate {
    rate: f64,
}

impl Op for LoadBiasUpdate {
    fn name(&self) -> &'static str {
        "load_bias"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let bias = args.output::<f32>(0);
        let (load, norm) = (args.input::<f32>(1), args.input::<f32>(2)[0]);
        if !norm.is_finite() {
            return;
        }
        // Loads are integers, so their sum does not depend on the order.
        let mean = load.iter().sum::<f32>() / load.len() as f32;
        let step = |load: f32| if load == mean { 0.0 } else { (self.rate as f32).copysign(mean - load) };
        bias.iter_mut().zip(load).for_each(|(bias, &load)| *bias += step(load));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::load_bias(self.rate, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (bias, load, norm) = (args.input(0), args.input(1), args.input(2).data[0]);
        let rate = if norm.is_finite() { self.rate } else { 0.0 };
        let mean = load.data.iter().sum::<f64>() / load.data.len() as f64;
        let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
        vec![bias.zip(load, |bias, load| bias + rate * sign(mean - load))]
    }
}
