//! The gated unit of experts, weighted by the router.

use std::sync::Arc;

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, math, reduce, rows_per_task, vectorize, with_float};
use gapless_kernels::cuda::launch::GatedUnit;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::used_rows;
use crate::error::Result;
use crate::ops::unary::silu_derivative;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op, RowUse};

/// The activation (u + 1)·g·sigmoid(alpha·g) of experts with biases, where g is the gate limited to at most `limit`, and u
/// is up limited to −`limit` to `limit` (gpt-oss).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitedActivation {
    /// The factor of the gate in its sigmoid.
    pub alpha: f64,
    /// The limit of gate and up.
    pub limit: f64,
}

/// y = w·silu(gate)·up, or w·[activation](LimitedActivation)(gate, up), for each row, from gate and up [rows, width], weights w [rows, 1] and `starts` (see
/// [`Route`](super::Route)). The weight is applied to the input of the expert's last product. If it were applied to the
/// output, the gradient of the weight would need that output, which would have to be kept. Rows after the last used one
/// are zeros.
#[derive(Debug, Clone, Copy)]
pub struct RoutedSwiGlu {
    /// The number of rows under balanced routing ([`RowUse::DynamicOutputs`](crate::RowUse::DynamicOutputs)), or `None`
    /// if the number of rows is fixed.
    pub balanced: Option<usize>,
    /// The activation, if it is not SwiGLU.
    pub limited: Option<LimitedActivation>,
}

/// The index of the weights among the inputs of both operations.
const WEIGHTS: usize = 2;

/// Returns the gated unit of an activation: (u + shift)·g·sigmoid(alpha·g) of the limited gate and up.
fn unit(limited: Option<LimitedActivation>) -> GatedUnit {
    match limited {
        None => GatedUnit { alpha: 1.0, limit: f32::INFINITY, shift: 0.0 },
        Some(LimitedActivation { alpha, limit }) => GatedUnit { alpha: alpha as f32, limit: limit as f32, shift: 1.0 },
    }
}

impl Op for RoutedSwiGlu {
    fn name(&self) -> &'static str {
        "routed_swiglu"
    }

    fn rows(&self) -> RowUse {
        super::rows(3, self.balanced)
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("R w, R w, R _, S -> R w"))
    }

    fn on_rows_of(&self, ranks: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { balanced: super::balanced_on(ranks, self.balanced), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        if let Some(LimitedActivation { alpha, limit }) = self.limited
            && ![alpha, limit].into_iter().all(crate::ops::is_positive_f32)
        {
            return Err(format!("alpha {alpha} or the limit {limit} is not a positive number in f32"));
        }
        crate::ops::expect_equal(&inputs[..2])?;
        crate::ops::expect_float(&inputs[1..3])?;
        crate::ops::expect_ids("starts", &inputs[3])?;
        let &[rows, _] = inputs[0].dims() else { return Err("gate and up must be [rows, width]".into()) };
        if inputs[2].dims() != [rows, 1] {
            return Err(format!("the weights must be [{rows}, 1]"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let inputs = [g.input(0), g.input(1), g.input(2), g.input(3), g.grad(0)];
        let [d_gate, d_up, d_weights] = Tensor::apply_op(RoutedSwiGluGrad(*self), &inputs.each_ref())?;
        for (index, gradient) in [d_gate, d_up, d_weights].into_iter().enumerate() {
            if g.wants(index) {
                g.accumulate(index, gradient);
            }
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        6 * elements(&inputs[0], self.balanced)
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(1, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    /// The few weights are converted.
    fn reads_bf16(&self, index: usize) -> bool {
        index != WEIGHTS
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => self.run_in::<T>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::routed_gated(unit(self.limited), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (gate, up, weights) = (args.input(0), args.input(1), args.input(2));
        let width = gapless_kernels::width(&gate.dims);
        let used = args.input(3).data.last().copied().unwrap_or(0.0) as usize * width;
        let y = |(i, (&g, &u)): (usize, (&f64, &f64))| match i < used {
            true => weights.data[i / width] * self.value(g, u)[0],
            false => 0.0,
        };
        vec![Array::new(&gate.dims, gate.data.iter().zip(&up.data).enumerate().map(y).collect())]
    }
}

/// Returns the lesser of x and a limit. NaN stays NaN.
#[inline(always)]
fn below(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// Returns x, limited to −`limit` to `limit`. NaN stays NaN. `f32::clamp` would keep the compiler from using vectors,
/// because it panics if its limits are not in order.
#[inline(always)]
fn within(x: f32, limit: f32) -> f32 {
    let x = below(x, limit);
    if x < -limit { -limit } else { x }
}

impl RoutedSwiGlu {
    fn run_in<T: Float>(&self, args: &mut Args<'_>) {
        let out = args.output::<T>(0);
        if !args.is_overwritten(1) {
            out.copy_from_slice(args.input(1));
        }
        let (gate, weights) = (args.input::<T>(0), args.input::<f32>(WEIGHTS));
        let width = gapless_kernels::width(args.output_dims(0));
        let (out, unused) = out.split_at_mut(used_rows(args.input(3)) * width);
        unused.fill(T::store(0.0));
        let GatedUnit { alpha, limit, shift } = unit(self.limited);
        let rows = rows_per_task(width);
        let tasks = out.pieces_mut(rows * width).zip(gate.pieces(rows * width)).zip(weights.pieces(rows));
        tasks.for_each(|((out, gate), weights)| {
            for ((out, gate), &weight) in out.chunks_exact_mut(width).zip(gate.chunks_exact(width)).zip(weights) {
                vectorize!(out.iter_mut().zip(gate).for_each(|(y, g)| {
                    let g = below(g.load(), limit);
                    let up = within(y.load(), limit) + shift;
                    *y = T::store(up * (weight * g * math::sigmoid(alpha * g)));
                }));
            }
        });
    }

    fn gradients<T: Float, W: Float>(&self, args: &mut Args<'_>) {
        let (d_gate, d_up, d_weights) = (args.output::<T>(0), args.output::<T>(1), args.output::<W>(2));
        if !args.is_overwritten(0) {
            d_gate.copy_from_slice(args.input(0));
        }
        if !args.is_overwritten(1) {
            d_up.copy_from_slice(args.input(1));
        }
        let (weights, dy) = (args.input::<f32>(WEIGHTS), args.input::<T>(4));
        let width = gapless_kernels::width(args.output_dims(0));
        let used = used_rows(args.input(3));
        let (d_gate, no_gate) = d_gate.split_at_mut(used * width);
        let (d_up, no_up) = d_up.split_at_mut(used * width);
        let (d_weights, no_weights) = d_weights.split_at_mut(used);
        [no_gate, no_up].into_iter().for_each(|unused| unused.fill(T::store(0.0)));
        no_weights.fill(W::store(0.0));
        let GatedUnit { alpha, limit, shift } = unit(self.limited);
        let rows = rows_per_task(width);
        let tasks = d_gate.pieces_mut(rows * width).zip(d_up.pieces_mut(rows * width));
        let of_rows = weights.pieces(rows).zip(d_weights.pieces_mut(rows));
        tasks.zip(dy.pieces(rows * width)).zip(of_rows).for_each(|(((d_gate, d_up), dy), (weights, d_weights))| {
            let rows = d_gate.chunks_exact_mut(width).zip(d_up.chunks_exact_mut(width)).zip(dy.chunks_exact(width));
            for (((gate, up), dy), (&weight, d_weight)) in rows.zip(weights.iter().zip(d_weights)) {
                vectorize!({
                    let [sum] = reduce::sums3(gate, up, dy, |g, u, dy| {
                        let g = below(g, limit);
                        [dy * g * math::sigmoid(alpha * g) * (within(u, limit) + shift)]
                    });
                    *d_weight = W::store(sum);
                    for ((gate, up), dy) in gate.iter_mut().zip(up.iter_mut()).zip(dy) {
                        let (unlimited, dy) = ([gate.load(), up.load()], dy.load());
                        let (g, u) = (below(unlimited[0], limit), within(unlimited[1], limit));
                        let by_gate = weight * dy * (u + shift) * silu_derivative(alpha * g);
                        let by_up = weight * dy * g * math::sigmoid(alpha * g);
                        // A limited element has no gradient.
                        *gate = T::store(if unlimited[0] > limit { 0.0 } else { by_gate });
                        *up = T::store(if unlimited[1].abs() > limit { 0.0 } else { by_up });
                    }
                });
            }
        });
    }

    /// Returns the activation of a gate and up, in f64, and its derivatives by both.
    fn value(&self, gate: f64, up: f64) -> [f64; 3] {
        let LimitedActivation { alpha, limit } =
            self.limited.unwrap_or(LimitedActivation { alpha: 1.0, limit: f64::INFINITY });
        let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
        let (s, factor) = (1.0 / (1.0 + (-alpha * g).exp()), if self.limited.is_some() { u + 1.0 } else { u });
        let by_gate = if gate > limit { 0.0 } else { factor * s * (1.0 + alpha * g * (1.0 - s)) };
        let by_up = if up.abs() > limit { 0.0 } else { g * s };
        [factor * g * s, by_gate, by_up]
    }
}

/// Returns the number of elements under balanced routing if `balanced` is given, and in all rows if not.
fn elements(rows: &Spec, balanced: Option<usize>) -> u64 {
    (balanced.unwrap_or(rows.dims()[0]) * gapless_kernels::width(rows.dims())) as u64
}

/// The gradients (d_gate, d_up, d_weights) of [`RoutedSwiGlu`], from (gate, up, weights, starts, dy). d_gate and d_up
/// may overwrite gate and up.
#[derive(Debug, Clone, Copy)]
struct RoutedSwiGluGrad(RoutedSwiGlu);

impl Op for RoutedSwiGluGrad {
    fn name(&self) -> &'static str {
        "routed_swiglu_grad"
    }

    fn rows(&self) -> RowUse {
        super::rows(3, self.0.balanced)
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("R w, R w, R _, S, R w -> R w, R w, R _"))
    }

    fn on_rows_of(&self, ranks: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self(RoutedSwiGlu { balanced: super::balanced_on(ranks, self.0.balanced), ..self.0 })))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(inputs[..3].to_vec())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0), (1, 1)]
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        12 * elements(&inputs[0], self.0.balanced)
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn reads_bf16(&self, index: usize) -> bool {
        index != WEIGHTS
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => {
            with_float!(args.output_dtype(2), W => self.0.gradients::<T, W>(args));
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::routed_gated_grad(unit(self.0.limited), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (gate, up, weights, dy) = (args.input(0), args.input(1), args.input(2), args.input(4));
        let width = gapless_kernels::width(&gate.dims);
        let (mut d_gate, mut d_up) = (Array::zeros(&gate.dims), Array::zeros(&gate.dims));
        let mut d_weights = Array::zeros(&weights.dims);
        for row in 0..args.input(3).data.last().copied().unwrap_or(0.0) as usize {
            let w = weights.data[row];
            for i in row * width..(row + 1) * width {
                let (g, u, dy) = (gate.data[i], up.data[i], dy.data[i]);
                let [value, by_gate, by_up] = self.0.value(g, u);
                d_gate.data[i] = w * dy * by_gate;
                d_up.data[i] = w * dy * by_up;
                d_weights.data[row] += dy * value;
            }
        }
        vec![d_gate, d_up, d_weights]
    }
}
