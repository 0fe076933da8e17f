//! Copying tokens to their experts' rows, and adding rows back to their tokens. Each of the two operations is the
//! gradient of the other.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, rows_per_task, vectorize, with_float};

use super::NONE;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Copies to every row the token that it belongs to: from x [.., width], places [.., k] and slots \[rows\] to [rows,
/// width]. Rows without a slot are zeros.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch;

impl Op for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let tokens = tokens(&inputs[0]);
        Some(Rule::Labels(format!("{tokens} w, {tokens} K, R -> R w").into()))
    }

    fn linear_inputs(&self) -> usize {
        1
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(&inputs[..1])?;
        crate::ops::expect_rank(&inputs[0], 1)?;
        super::expect_places(&inputs[1], &inputs[2])?;
        let (&width, tokens) = inputs[0].dims().split_last().expect("rank was checked");
        let places = inputs[1].dims();
        if tokens != &places[..places.len() - 1] {
            return Err("x must be [.., width] and places [.., k] of the same tokens".into());
        }
        Ok(vec![inputs[0].in_shape((inputs[2].elements(), width))])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(Combine, &[&g.grad(0), &g.input(1), &g.input(2)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => dispatch::<T>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::dispatch(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, places, slots) = (args.input(0), args.input(1), args.input(2));
        let (width, k) = (gapless_kernels::width(&x.dims), gapless_kernels::width(&places.dims));
        let mut out = Array::zeros(&[slots.data.len(), width]);
        for (row, &slot) in slots.data.iter().enumerate().filter(|(_, slot)| **slot != f64::from(NONE)) {
            let token = slot as usize / k;
            out.data[row * width..][..width].copy_from_slice(&x.data[token * width..][..width]);
        }
        vec![out]
    }
}

/// Adds up the rows of every token in the order of the token's choices: from [rows, width], places [.., k] and slots
/// \[rows\] to [.., width]. Tokens without a row are zeros.
#[derive(Debug, Clone, Copy)]
pub struct Combine;

impl Op for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn rule(&self, _: &[Spec], outputs: &[Spec]) -> Option<Rule> {
        let tokens = tokens(&outputs[0]);
        Some(Rule::Labels(format!("R w, {tokens} K, R -> {tokens} w").into()))
    }

    fn linear_inputs(&self) -> usize {
        1
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(&inputs[..1])?;
        super::expect_places(&inputs[1], &inputs[2])?;
        let &[rows, width] = inputs[0].dims() else { return Err("the rows must be [rows, width]".into()) };
        if rows != inputs[2].elements() {
            return Err(format!("{rows} rows, but {} slots", inputs[2].elements()));
        }
        let places = inputs[1].dims();
        Ok(vec![inputs[0].in_shape([&places[..places.len() - 1], &[width]].concat())])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [d_rows] = Tensor::apply_op(Dispatch, &[&g.grad(0), &g.input(1), &g.input(2)])?;
        g.accumulate(0, d_rows);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), T => combine::<T>(args));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::combine(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (rows, places) = (args.input(0), args.input(1));
        let width = gapless_kernels::width(&rows.dims);
        let mut dims = places.dims.clone();
        *dims.last_mut().expect("rank was checked") = width;
        let mut out = Array::zeros(&dims);
        for (token, places) in places.rows().enumerate() {
            for &place in places.iter().filter(|&&place| place != f64::from(NONE)) {
                for i in 0..width {
                    out.data[token * width + i] += rows.data[place as usize * width + i];
                }
            }
        }
        vec![out]
    }
}

fn dispatch<T: Float>(args: &mut Args<'_>) {
    let out = args.output::<T>(0);
    let (x, slots) = (args.input::<T>(0), args.input::<u32>(2));
    let k = gapless_kernels::width(args.input_dims(1));
    let width = gapless_kernels::width(args.output_dims(0));
    let rows = rows_per_task(width);
    out.pieces_mut(rows * width).zip(slots.pieces(rows)).for_each(|(out, slots)| {
        for (out, &slot) in out.chunks_exact_mut(width).zip(slots) {
            match slot {
                NONE => out.fill(T::store(0.0)),
                slot => out.copy_from_slice(&x[slot as usize / k * width..][..width]),
            }
        }
    });
}

fn combine<T: Float>(args: &mut Args<'_>) {
    /// Number of columns that are added up at a time, in f32.
    const COLUMNS: usize = 256;

    let out = args.output::<T>(0);
    let (rows, places) = (args.input::<T>(0), args.input::<u32>(1));
    let k = gapless_kernels::width(args.input_dims(1));
    let width = gapless_kernels::width(args.output_dims(0));
    let tokens = rows_per_task(width);
    out.pieces_mut(tokens * width).zip(places.pieces(tokens * k)).for_each(|(out, places)| {
        vectorize!({
            for (out, places) in out.chunks_exact_mut(width).zip(places.chunks_exact(k)) {
                // A sum of no rows is 0. Other sums start at −0, which changes no summand.
                let start = if places.iter().all(|&place| place == NONE) { 0.0 } else { -0.0 };
                for (column, out) in (0..).step_by(COLUMNS).zip(out.chunks_mut(COLUMNS)) {
                    let mut sums = [start; COLUMNS];
                    let sums = &mut sums[..out.len()];
                    for &place in places.iter().filter(|&&place| place != NONE) {
                        let row = &rows[place as usize * width + column..][..out.len()];
                        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.load());
                    }
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::store(*sum));
                }
            }
        });
    });
}

/// Returns labels for the dimensions of x besides its width. Places and slots count tokens, so no rank may hold a part of
/// them.
fn tokens(x: &Spec) -> String {
    ('A'..='J').take(x.dims().len() - 1).collect()
}
