//! AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101).

use rayon::prelude::*;

use super::{Optimizer, ParameterUpdate, SCALARS};
use crate::cpu::{Args, BLOCK, vectorize};
use crate::error::Result;
use crate::graph::{Spec, Tensor};
use crate::nn::Init;
use crate::op::Op;
use crate::reference::{Array, Reference};

/// AdamW. Matrices decay, vectors (biases, norms) do not. Gradients are clipped by their global norm.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// The global norm to which larger gradients are scaled; infinite for no clipping.
    pub max_norm: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, max_norm: 1.0 }
    }
}

impl Optimizer for AdamW {
    fn states(&self) -> Vec<(&'static str, Init)> {
        vec![("exp_avg", Init::Const(0.0)), ("exp_avg_sq", Init::Const(0.0))]
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        // 1 − βᵗ, in f64: t may be large. Past i32::MAX steps both are 1 to the last bit.
        let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
        let mut scalars = [0.0; SCALARS];
        scalars[0] = lr as f32;
        scalars[1] = (1.0 - self.beta1.powi(power)) as f32;
        scalars[2] = (1.0 - self.beta2.powi(power)) as f32;
        scalars
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let decay = if update.rank >= 2 { self.weight_decay } else { 0.0 };
        let op = AdamWUpdate { rule: *self, decay };
        let [m, v] = update.states else { unreachable!("two states were asked for") };
        let inputs = [update.parameter, update.gradient, m, v, update.norm, update.scalars];
        let [parameter, ..] = Tensor::apply_op::<3>(op, &inputs)?;
        Ok(parameter)
    }
}

/// (parameter, m, v) changed in place, from (parameter, gradient, m, v, norm, scalars). Does nothing when the norm is not
/// finite, so that a broken step leaves the model as it was.
#[derive(Debug, Clone, Copy)]
struct AdamWUpdate {
    rule: AdamW,
    decay: f64,
}

impl Op for AdamWUpdate {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_equal(&inputs[..4])?;
        Ok(vec![inputs[0].clone(), inputs[2].clone(), inputs[3].clone()])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        15 * inputs[0].elements() as u64
    }

    fn must_overwrite(&self) -> &[(usize, usize)] {
        &[(0, 0), (2, 1), (3, 2)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let (p, m, v) = (args.output::<f32>(0), args.output::<f32>(1), args.output::<f32>(2));
        let (gradient, norm, scalars) = (args.input::<f32>(1), args.input::<f32>(4)[0], args.input::<f32>(5));
        if !norm.is_finite() {
            return;
        }
        let rule = &self.rule;
        let clip = (rule.max_norm as f32 / (norm + 1e-6)).min(1.0);
        let (beta1, beta2, eps) = (rule.beta1 as f32, rule.beta2 as f32, rule.eps as f32);
        let lr = scalars[0];
        let keep = 1.0 - lr * self.decay as f32;
        let step = lr / scalars[1];
        let root_correction = 1.0 / scalars[2].sqrt();
        let moments = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
        p.par_chunks_mut(BLOCK).zip(gradient.par_chunks(BLOCK)).zip(moments).for_each(|((p, g), (m, v))| {
            vectorize!({
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
                    let g = g * clip;
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    *p = *p * keep - step * *m / (v.sqrt() * root_correction + eps);
                }
            });
        });
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (p, gradient, m, v) = (args.input(0), args.input(1), args.input(2), args.input(3));
        let (norm, scalars) = (args.input(4).data[0], &args.input(5).data);
        let rule = &self.rule;
        let clip = (rule.max_norm / (norm + 1e-6)).min(1.0);
        let m = m.zip(gradient, |m, g| rule.beta1 * m + (1.0 - rule.beta1) * g * clip);
        let v = v.zip(gradient, |v, g| rule.beta2 * v + (1.0 - rule.beta2) * (g * clip).powi(2));
        let change = m.zip(&v, |m, v| m / scalars[1] / ((v / scalars[2]).sqrt() + rule.eps));
        let p = p.zip(&change, |p, change| p * (1.0 - scalars[0] * self.decay) - scalars[0] * change);
        vec![p, m, v]
    }
}
