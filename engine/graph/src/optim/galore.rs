//! GaLore: Adam on a projection of the gradient (Zhao et al., arXiv 2403.03507).

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, InPieces, Pieces, vectorize};
use gapless_kernels::cuda::launch::{self, GaLoreRule};

use super::subspace::{ITERATIONS, Projection, exact, start};
use super::{AdamW, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::{Error, Result};
use crate::nn::Init;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// GaLore keeps Adam's moments for a projection of the gradient, not for the gradient itself.
///
/// Over a number of steps, the gradients G of a weight [m, n] with m ≤ n lie approximately in a space of few
/// directions. GaLore uses a matrix P [rank, m], whose rows are orthonormal and span the strongest directions of a
/// recent gradient. P is recomputed every [`Self::refresh_steps`] steps. Moments are kept for R = P·G [rank, n], and
/// the weight changes by `alpha`·Pᵀ·(Adam's step for R). P and the moments take rank·(m + 2n) elements instead of 2mn.
/// If m > n, the other side of the weight is projected.
///
/// Projection is meant for the weights of linear layers. Vectors, embedding tables, and matrices with no side longer
/// than the rank are updated by plain [`AdamW`]. When P is recomputed, the moments are kept unchanged, as in the paper.
/// Gradient clipping and weight decay are those of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GaLore {
    /// Settings of the AdamW step, both in the projected space and for parameters that are not projected.
    pub rule: AdamW,
    /// Number of directions onto which each gradient is projected.
    pub rank: usize,
    /// Number of steps after which a projection is recomputed.
    pub refresh_steps: u64,
    /// Multiplier of the steps of projected weights.
    pub alpha: f64,
}

impl Default for GaLore {
    fn default() -> Self {
        Self { rule: AdamW::default(), rank: 128, refresh_steps: 200, alpha: 0.25 }
    }
}

/// Index of the per-step scalar that is 1 in steps that recompute P, and 0 in others.
const REFRESH: usize = 3;

impl GaLore {
    fn projection(&self, parameter: &ParameterInfo<'_>) -> Option<Projection> {
        let &[rows, columns] = parameter.dims else { return None };
        let applies = parameter.has_matrices() && !parameter.looked_up && rows.min(columns) > self.rank;
        applies.then_some(Projection { rows, columns, rank: self.rank })
    }
}

impl Optimizer for GaLore {
    fn check(&self) -> Result<()> {
        self.rule.check_within()?;
        let &Self { rank, refresh_steps, alpha, .. } = self;
        if rank == 0 || refresh_steps == 0 || !(alpha > 0.0 && alpha.is_finite()) {
            let why = format!("rank {rank}, refresh_steps {refresh_steps}, alpha {alpha}");
            let remedy = "set each above 0; a quarter of the width, 200 and 0.25 are usual";
            return Err(Error::config("optimizer", why, remedy));
        }
        Ok(())
    }

    fn needs_norm(&self) -> bool {
        self.rule.needs_norm()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let Some(projection) = self.projection(parameter) else { return self.rule.states(parameter) };
        let state =
            |name, columns| State { name, spec: Spec::f32((self.rank, columns)), init: Init::Const(0.0).into() };
        let (shorter, longer) = (projection.shorter(), projection.longer());
        vec![state("projection", shorter), state("projected_exp_avg", longer), state("projected_exp_avg_sq", longer)]
    }

    /// A projected weight is not split over data ranks. The projection reads the whole gradient, so every data rank
    /// computes the whole update.
    fn shard_granularity(&self, parameter: &ParameterInfo<'_>) -> Option<usize> {
        if self.projection(parameter).is_some() { None } else { self.rule.shard_granularity(parameter) }
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        let mut scalars = self.rule.scalars(step, lr);
        scalars[REFRESH] = if step.is_multiple_of(self.refresh_steps) { 1.0 } else { 0.0 };
        scalars
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let Some(projection) = self.projection(&update.info) else { return self.rule.update(update) };
        let op = GaLoreUpdate { rule: *self, decay: self.rule.decay(&update.info), projection };
        let [p, m, v] = update.states else { unreachable!("three states were asked for") };
        let inputs = [update.parameter, update.gradient, p, m, v, update.norm, update.scalars];
        let [parameter, ..] = Tensor::apply_op::<4>(op, &inputs)?;
        Ok(parameter)
    }
}

/// Updates (parameter, P, m, v) in place, from (parameter, gradient, P, m, v, norm, scalars). If the norm is not
/// finite, nothing is updated.
#[derive(Debug, Clone, Copy)]
struct GaLoreUpdate {
    rule: GaLore,
    decay: f64,
    projection: Projection,
}

impl GaLoreUpdate {
    /// Number of elements of the projected gradient R.
    fn projected_len(&self) -> usize {
        self.projection.rank * self.projection.longer()
    }

    /// Returns the settings in the form that the CUDA kernels take.
    fn on_device(&self) -> GaLoreRule {
        let Projection { rows, columns, rank } = self.projection;
        GaLoreRule {
            adamw: self.rule.rule.on_device(),
            alpha: self.rule.alpha as f32,
            decay: self.decay as f32,
            rows,
            columns,
            rank,
            iterations: ITERATIONS,
            key: start().key(),
            refresh: REFRESH,
        }
    }
}

impl Op for GaLoreUpdate {
    fn name(&self) -> &'static str {
        "galore"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let Projection { rows, columns, rank } = self.projection;
        let (shorter, longer) = (self.projection.shorter(), self.projection.longer());
        let expected =
            [(rows, columns), (rows, columns), (rank, shorter), (rank, longer), (rank, longer)].map(Spec::f32);
        if inputs[..5] != expected {
            let dims: Vec<&[usize]> = expected.iter().map(Spec::dims).collect();
            return Err(format!("parameter, gradient and states must be f32 of {dims:?}"));
        }
        Ok([0, 2, 3, 4].map(|input| inputs[input].clone()).into())
    }

    /// Does not count the recomputation of P, which runs only every [`GaLore::refresh_steps`] steps.
    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        4 * (inputs[0].elements() * self.projection.rank) as u64 + 15 * self.projected_len() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0), (2, 1), (3, 2), (4, 3)]
    }

    fn workspace(&self, _: &[Spec], _: &[Spec], threads: usize) -> Vec<u64> {
        let numbers = [self.projected_len(), self.projection.rank].map(|len| 4 * len as u64);
        [&numbers[..], &self.projection.scratch(threads)].concat()
    }

    fn run(&self, args: &mut Args<'_>) {
        let (weight, p) = (args.output::<f32>(0), args.output::<f32>(1));
        let (m, v) = (args.output::<f32>(2), args.output::<f32>(3));
        let mut scratch = args.workspace();
        let (r, coefficients) = (scratch.take::<f32>(), scratch.take::<f32>());
        let (gradient, norm, scalars) = (args.input::<f32>(1), args.input::<f32>(5)[0], args.input::<f32>(6));
        let Some(step) = self.rule.rule.step_factors(self.decay, norm, scalars) else { return };
        if scalars[REFRESH] == 0.0 {
            self.projection.apply(p, gradient, r, &mut scratch);
        } else {
            self.projection.recompute(gradient, p, r, coefficients, &mut scratch);
        }
        let alpha = self.rule.alpha as f32;
        let moments = m.pieces_mut(BLOCK).zip(v.pieces_mut(BLOCK));
        r.pieces_mut(BLOCK).zip(moments).for_each(|(r, (m, v))| {
            vectorize!({
                for (r, (m, v)) in r.iter_mut().zip(m.iter_mut().zip(v)) {
                    (*m, *v) = step.moments(*r, *m, *v);
                    *r = -alpha * step.change(*m, *v);
                }
            });
        });
        if step.keep != 1.0 {
            weight.pieces_mut(BLOCK).for_each(|w| vectorize!(w.iter_mut().for_each(|w| *w *= step.keep)));
        }
        self.projection.add(p, r, weight, &mut scratch);
    }

    fn cuda_workspace(&self, _: &[Spec], _: &[Spec]) -> Vec<u64> {
        launch::galore_workspace(&self.on_device())
    }

    /// Weight decay reads and writes the weight, as the product does that adds the step. The start of a projection is
    /// written, and the projected gradient read and written.
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let decayed = if self.decay == 0.0 { 0 } else { 2 * inputs[0].bytes() };
        decayed + 3 * inputs[3].bytes()
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        launch::galore(&self.on_device(), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let turn = |x: &Array| if self.projection.is_transposed() { exact::transposed(x) } else { x.clone() };
        let (weight, gradient, scalars) = (args.input(0), turn(args.input(1)), args.input(6));
        let p = if scalars.data[REFRESH] == 0.0 {
            args.input(2).clone()
        } else {
            exact::follow(&gradient, self.projection.rank)
        };
        let (r, nothing) = (exact::product(&p, &gradient), Array::zeros(&args.input(3).dims));
        // Adam's step for R is computed as an update of zeros without weight decay.
        let inputs = vec![&nothing, &r, args.input(3), args.input(4), args.input(5), scalars];
        let plain = self.rule.rule.exact(0.0, &nothing, &Reference { inputs, ..*args });
        let [change, m, v] = <[Array; 3]>::try_from(plain).expect("AdamW changes three tensors");
        let change = turn(&exact::product(&exact::transposed(&p), &change));
        let keep = 1.0 - scalars.data[0] * self.decay;
        vec![weight.zip(&change, |w, change| w * keep + self.rule.alpha * change), p, m, v]
    }
}
