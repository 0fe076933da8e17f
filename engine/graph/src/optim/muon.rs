//! Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), with the step scale and the
//! weight decay of Liu et al. (arXiv 2502.16982, sections 2.1 and 2.2).

use candle_core::DType;
use gapless_kernels::Spec;

use super::momentum::{Direction, MomentumUpdate};
use super::{AdamW, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::{Error, Result};
use crate::nn::Init;
use crate::tensor::Tensor;

/// Coefficients (a, b, c) of X ← aX + (bA + cA²)X with A = XXᵀ (Jordan). The polynomial is steep at 0, so few
/// iterations suffice.
const NEWTON_SCHULZ: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);

/// Root mean square of the step of a matrix before it is multiplied by the learning rate. This value is the usual root
/// mean square of AdamW's steps (Liu et al., equation 4), so AdamW's learning rate and weight decay suit Muon as well.
const ROOT_MEAN_SQUARE: f64 = 0.2;

/// Muon. The step of a hidden matrix is the matrix's moment, made nearly orthogonal by Newton–Schulz iterations. The
/// matrix products of these iterations are operations of the graph, which are planned and run like those of the model.
/// Muon keeps one moment, while AdamW keeps two.
///
/// In a tensor of several experts, the weight of each expert is a matrix of its own, and the bias of each expert a
/// vector. Vectors, embeddings and the output head are updated by AdamW with the same learning rate. The head is the
/// layer on which the model calls [`Linear::cross_entropy`](crate::nn::Linear::cross_entropy), or that is named
/// `lm_head`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Muon {
    /// Settings of AdamW for all parameters that are not hidden matrices. Weight decay, clipping and master copies
    /// apply to hidden matrices too.
    pub rule: AdamW,
    /// Decay of the moment. The step uses Nesterov momentum.
    pub momentum: f64,
    /// Number of Newton–Schulz iterations.
    pub iterations: usize,
}

impl Default for Muon {
    fn default() -> Self {
        Self { rule: AdamW::default(), momentum: 0.95, iterations: 5 }
    }
}

impl Muon {
    fn is_hidden_matrix(parameter: &ParameterInfo<'_>) -> bool {
        let [.., rows, columns] = parameter.dims else { return false };
        parameter.dims.len() <= 3
            && parameter.has_matrices()
            && !parameter.looked_up
            && !parameter.head
            && *rows > 1
            && *columns > 1
            && !parameter.name.contains("lm_head")
    }

    /// Returns an approximation of the orthogonal matrix nearest to x. The singular values of the approximation lie
    /// between 0.7 and 1.2 (Jordan).
    fn orthogonal(&self, x: &Tensor) -> Result<Tensor> {
        let rank = x.rank();
        let (rows, columns) = (x.dim(rank - 2)?, x.dim(rank - 1)?);
        // Tall matrices are transposed, so that XXᵀ has the extent of the shorter side.
        let x = if rows > columns { x.transpose(rank - 2, rank - 1)? } else { x.clone() };
        let norm = x.sqr()?.sum_keepdim(rank - 1)?.sum_keepdim(rank - 2)?.sqrt()?;
        let mut x = x.broadcast_div(&(norm + 1e-7)?)?;
        let (a, b, c) = NEWTON_SCHULZ;
        for _ in 0..self.iterations {
            let gram = x.matmul(&x.transpose(rank - 2, rank - 1)?)?;
            let factor = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
            x = ((&x * a)? + factor.matmul(&x)?)?;
        }
        if rows > columns { x.transpose(rank - 2, rank - 1)?.contiguous() } else { Ok(x) }
    }
}

impl Optimizer for Muon {
    fn check(&self) -> Result<()> {
        self.rule.check_within()?;
        let fail = |why: &str, remedy| Err(Error::config("optimizer", why, remedy));
        if !(0.0..1.0).contains(&self.momentum) {
            return fail("the momentum is outside [0, 1)", "set it to at least 0 and below 1; 0.95 is usual");
        }
        if self.iterations == 0 {
            return fail("Muon has 0 iterations", "set them to at least 1; 5 are usual");
        }
        Ok(())
    }

    fn needs_norm(&self) -> bool {
        self.rule.needs_norm()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let mut states = self.rule.states(parameter);
        if Self::is_hidden_matrix(parameter) {
            states.retain(|state| state.name == "master");
            let spec = Spec { shape: parameter.dims.into(), dtype: self.sum_dtype(parameter) };
            states.insert(0, State { name: "momentum", spec, init: Init::Const(0.0).into() });
        }
        states
    }

    fn sum_dtype(&self, parameter: &ParameterInfo<'_>) -> DType {
        parameter.state_dtype()
    }

    /// A hidden matrix is not split over data ranks, because it is orthogonalized as a whole.
    fn shard_granularity(&self, parameter: &ParameterInfo<'_>) -> Option<usize> {
        if Self::is_hidden_matrix(parameter) { None } else { self.rule.shard_granularity(parameter) }
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        self.rule.scalars(step, lr)
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        if !Self::is_hidden_matrix(&update.info) {
            return self.rule.update(update);
        }
        let ParameterUpdate { info, gradient, states, norm, .. } = &update;
        let moment = states[0].to_dtype(gradient.dtype())?;
        // The moment accumulates clipped gradients.
        let gradient = match self.rule.max_norm.is_finite() {
            false => (*gradient).clone(),
            true => {
                let clip = ((*norm + 1e-6)?.recip()? * self.rule.max_norm)?.minimum(1.0)?;
                gradient.broadcast_mul(&clip.to_dtype(gradient.dtype())?)?
            }
        };
        // β(βm + g) + g: the Nesterov step, where βm + g is the moment that the update stores.
        let ahead = ((moment * self.momentum.powi(2))? + (gradient * (1.0 + self.momentum))?)?;
        let direction = self.orthogonal(&ahead)?;
        let longer = info.dims[info.dims.len() - 2..].iter().copied().max().unwrap_or(1);
        let op = MomentumUpdate {
            name: "muon",
            direction: Direction::Given { scale: ROOT_MEAN_SQUARE * (longer as f64).sqrt() },
            moment_factor: self.momentum,
            gradient_factor: 1.0,
            decay: self.rule.decay(info),
            max_norm: self.rule.max_norm,
            has_master: states.len() > 1,
        };
        op.record(&update, Some(&direction))
    }
}
