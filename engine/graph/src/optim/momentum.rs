//! In-place update of a parameter and its first moment, shared by Lion and Muon.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, BLOCK, Float, InPieces, Pieces, vectorize, with_float};
use gapless_kernels::cuda::launch::{number, update};
use gapless_kernels::cuda::{Constant, Fusible, Launch, Operands};

use super::ParameterUpdate;
use crate::error::Result;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// The direction that the update subtracts from a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Direction {
    /// The signs of βm + (1 − β)g.
    Sign {
        /// β, the weight of the moment.
        beta: f64,
    },
    /// A tensor that is an input of the update, multiplied by a constant.
    Given {
        /// The constant.
        scale: f64,
    },
}

/// Updates (parameter, m) in place from (parameter, gradient, m, norm, scalars). Two more inputs are optional: the
/// direction for [`Direction::Given`], then an f32 master copy. If there is a master, the parameter becomes the rounded
/// master.
///
/// ```text
/// g ← clipped gradient
/// p ← p · (1 − rate · decay) − rate · direction
/// m ← keep · m + add · g
/// ```
///
/// If the norm is not finite, nothing is updated, so a failed step leaves the model unchanged.
#[derive(Debug, Clone, Copy)]
pub(super) struct MomentumUpdate {
    /// Name of the operation.
    pub name: &'static str,
    pub direction: Direction,
    /// Weight of the old moment in the new one.
    pub moment_factor: f64,
    /// Weight of the gradient in the new moment.
    pub gradient_factor: f64,
    pub decay: f64,
    /// The maximum global norm of the gradients. Gradients with a larger norm are scaled down to this norm.
    pub max_norm: f64,
    pub has_master: bool,
}

impl MomentumUpdate {
    /// Records the update of a parameter whose states are m and, optionally, a master. `given` is the direction for
    /// [`Direction::Given`].
    pub(super) fn record(self, update: &ParameterUpdate<'_>, given: Option<&Tensor>) -> Result<Tensor> {
        let ParameterUpdate { parameter, gradient, states, norm, scalars, .. } = update;
        let mut inputs = vec![*parameter, *gradient, &states[0], *norm, *scalars];
        inputs.extend(given);
        inputs.extend(states.get(1));
        match self.has_master {
            false => Tensor::apply_op::<2>(self, &inputs).map(|[parameter, ..]| parameter),
            true => Tensor::apply_op::<3>(self, &inputs).map(|[parameter, ..]| parameter),
        }
    }

    /// Returns the number of inputs of an update that has no master.
    fn least_inputs(&self) -> usize {
        match self.direction {
            Direction::Sign { .. } => 5,
            Direction::Given { .. } => 6,
        }
    }

    /// Runs the kernel for parameters, moments and gradients stored in these types.
    fn run_on<P: Float, M: Float, G: Float>(&self, args: &mut Args<'_>) {
        let (p, m) = (args.output::<P>(0), args.output::<M>(1));
        let (gradient, norm, rate) = (args.input::<G>(1), args.input::<f32>(3)[0], args.input::<f32>(4)[0]);
        if !norm.is_finite() {
            return;
        }
        // [`Direction::Sign`] has no direction input. The loop then gets the gradient in place of a direction, and does
        // not use it.
        let (beta, scale, given) = match self.direction {
            Direction::Sign { beta } => (Some(beta as f32), 1.0, gradient),
            Direction::Given { scale } => (None, scale as f32, args.input::<G>(5)),
        };
        let clip = (self.max_norm as f32 / (norm + 1e-6)).min(1.0);
        let (keep, add) = (self.moment_factor as f32, self.gradient_factor as f32);
        let (left, far) = (1.0 - rate * self.decay as f32, rate * scale);
        let step = |p: f32, m: f32, g: f32, given: f32| {
            let g = g * clip;
            let direction = beta.map_or(given, |beta| sign(beta * m + (1.0 - beta) * g));
            (p * left - far * direction, keep * m + add * g)
        };
        let sources = gradient.pieces(BLOCK).zip(given.pieces(BLOCK)).zip(m.pieces_mut(BLOCK));
        if self.has_master {
            let masters = args.output::<M>(2).pieces_mut(BLOCK).zip(p.pieces_mut(BLOCK));
            masters.zip(sources).for_each(|((master, p), ((g, given), m))| {
                vectorize!({
                    for ((master, p), ((g, given), m)) in master.iter_mut().zip(p).zip(g.iter().zip(given).zip(m)) {
                        let (next, moment) = step(master.load(), m.load(), g.load(), given.load());
                        (*master, *m) = (M::store(next), M::store(moment));
                        *p = P::store(master.load());
                    }
                });
            });
            return;
        }
        p.pieces_mut(BLOCK).zip(sources).for_each(|(p, ((g, given), m))| {
            vectorize!({
                for (p, ((g, given), m)) in p.iter_mut().zip(g.iter().zip(given).zip(m)) {
                    let (next, moment) = step(p.load(), m.load(), g.load(), given.load());
                    (*p, *m) = (P::store(next), M::store(moment));
                }
            });
        });
    }
}

/// Returns −1, 0 or 1.
#[inline(always)]
fn sign(x: f32) -> f32 {
    f32::from(x > 0.0) - f32::from(x < 0.0)
}

impl Op for MomentumUpdate {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let count = self.least_inputs() + usize::from(self.has_master);
        if inputs.len() != count {
            return Err(format!("it must have {count} inputs"));
        }
        let (parameter, gradient, m) = (&inputs[0], &inputs[1], &inputs[2]);
        if ![parameter.dtype, m.dtype].contains(&gradient.dtype) {
            return Err(format!(
                "the gradient is {:?}; it must have the type of the parameter or of the moment",
                gradient.dtype
            ));
        }
        let as_moment = |spec: &Spec| Spec { dtype: m.dtype, ..spec.clone() };
        crate::ops::expect_equal(&[as_moment(parameter), as_moment(gradient), m.clone()])?;
        if let Direction::Given { .. } = self.direction {
            crate::ops::expect_equal(&[gradient.clone(), inputs[5].clone()])?;
        }
        let master = &inputs[self.least_inputs()..];
        crate::ops::expect_equal(&[std::slice::from_ref(m), master].concat())?;
        Ok([parameter, m].into_iter().chain(master).cloned().collect())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        10 * inputs[0].elements() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        let all: &[(usize, usize)] = match self.direction {
            Direction::Sign { .. } => &[(0, 0), (2, 1), (5, 2)],
            Direction::Given { .. } => &[(0, 0), (2, 1), (6, 2)],
        };
        &all[..2 + usize::from(self.has_master)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), P => with_float!(args.output_dtype(1), M => {
            with_float!(args.input_dtype(1), G => self.run_on::<P, M, G>(args))
        }));
    }

    fn cuda(&self, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        let ([parameter, gradient, m, norm, scalars, others @ ..], true) =
            (operands.inputs, operands.inputs.len() >= self.least_inputs())
        else {
            return None;
        };
        let (given, master) = others.split_at(self.least_inputs() - 5);
        let mut tensors = vec![master.first().unwrap_or(parameter), gradient, m];
        tensors.extend(given);
        let g = "($3 * fminf(%0 / ($0 + 1e-6f), 1.0f))";
        let (direction, constant) = match self.direction {
            Direction::Sign { beta } => {
                let mean = format!("(%4 * $4 + (1.0f - %4) * {g})");
                (format!("(f32({mean} > 0.0f) - f32({mean} < 0.0f))"), beta)
            }
            Direction::Given { scale } => ("(%4 * $5)".to_owned(), scale),
        };
        let if_finite = |then: String, otherwise: &str| format!("$0 - $0 == 0.0f ? {then} : {otherwise}");
        let next = if_finite(format!("$2 * (1.0f - $1 * %3) - $1 * {direction}"), "$2");
        let moment = if_finite(format!("%1 * $4 + %2 * {g}"), "$4");
        let constants = [self.max_norm, self.moment_factor, self.gradient_factor, self.decay, constant];
        let function = Fusible::Each {
            outputs: [next.clone(), moment].into_iter().chain(master.iter().map(|_| next.clone())).collect(),
            constants: constants.map(|constant| Constant::Number(constant as f32)).into(),
        };
        update(self.name, function, &[number(norm, 0), number(scalars, 0)], &tensors, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (norm, rate) = (args.input(3).data[0], args.input(4).data[0]);
        let clip = (self.max_norm / (norm + 1e-6)).min(1.0);
        let (gradient, before) = (args.input(1).map(|g| g * clip), args.input(2));
        let direction = match self.direction {
            Direction::Sign { beta } => before.zip(&gradient, |m, g| {
                let x = beta * m + (1.0 - beta) * g;
                if x == 0.0 { 0.0 } else { x.signum() }
            }),
            Direction::Given { scale } => args.input(5).map(|x| scale * x),
        };
        let master = self.has_master.then(|| args.input(self.least_inputs()));
        let from = master.unwrap_or(args.input(0));
        let next = from.zip(&direction, |p, x| p * (1.0 - rate * self.decay) - rate * x);
        let moment = before.zip(&gradient, |m, g| self.moment_factor * m + self.gradient_factor * g);
        let copy = master.map(|_| next.clone());
        [next, moment].into_iter().chain(copy).collect()
    }
}
