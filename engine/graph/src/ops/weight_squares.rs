//! The squared norms of the rows of an adapted weight, for DoRA.

use std::sync::Arc;

use gapless_kernels::cpu::gemm::{Epilogue, Gemm, Mode, Strides};
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, reduce, scratch, vectorize, with_float};
use gapless_kernels::{Spec, Window};

use super::QuantizedWeight;
use crate::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// Number of rows of the weight that are computed at once.
const TILE: usize = 128;

/// ‖W + scale·B·A‖² for each row, from A [rank, in], B [out, rank] and W [out, in] to f32 `[out]`. The norms count as
/// constants in the backward (DoRA, arXiv 2402.09353, section 4.3). Squares, because ranks that divide the columns of W can
/// add them.
#[derive(Debug, Clone, Copy)]
pub struct WeightSquares {
    /// The factor of B·A.
    pub scale: f64,
    /// The storage of W if it is quantized. Its tensors then take the place of W among the inputs.
    pub quantized: Option<QuantizedWeight>,
}

/// Index of the first input that holds W.
const WEIGHT: usize = 2;

impl WeightSquares {
    /// Returns the product that adds `rows` rows of scale·B·A.
    fn gemm(rows: usize, rank: usize, width: usize) -> Gemm {
        Gemm::new(rows, width, rank, Strides::row_major(rank), Strides::row_major(width))
    }
}

impl Op for WeightSquares {
    fn name(&self) -> &'static str {
        "weight_squares"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        match &self.quantized {
            None => Some(Rule::labels("R i, o R, o i -> o")),
            Some(weight) => {
                weight.labels().map(|(i, stored)| Rule::Labels(format!("R {i}, o R, {stored} -> o").into()))
            }
        }
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.quantized.is_none_or(|weight| weight.runs_on(inputs, WEIGHT))
    }

    fn on_parts(&self, inputs: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        let weight = self.quantized?.on_parts(&outputs[0], &inputs[0], &inputs[WEIGHT..]);
        Some(Arc::new(Self { quantized: Some(weight), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..WEIGHT])?;
        let (&[rank, width], &[outputs, of_b]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("A must be [rank, in] and B [out, rank]".into());
        };
        match &self.quantized {
            Some(weight) => weight.check(inputs, WEIGHT)?,
            None => super::expect_float(&inputs[WEIGHT..])?,
        }
        let weight =
            self.quantized.map_or(inputs[WEIGHT].dims().to_vec(), |weight| vec![weight.outputs, weight.inputs]);
        if rank != of_b || weight != [outputs, width] {
            return Err(format!("A [{rank}, {width}] and B [{outputs}, {of_b}] do not fit a weight {weight:?}"));
        }
        Ok(vec![Spec::f32(outputs)])
    }

    fn stops_gradients(&self) -> bool {
        true
    }

    fn flops(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        2 * outputs[0].elements() as u64 * (inputs[0].elements() + super::width(inputs[0].dims())) as u64
    }

    fn workspace(&self, inputs: &[Spec], outputs: &[Spec], threads: usize) -> Vec<u64> {
        let &[rank, width] = inputs[0].dims() else { unreachable!("rank 2 by the shape rule") };
        let rows = outputs[0].elements();
        let (whole, last) = (rows.min(TILE), rows % TILE);
        let floats = |count: usize| (count * size_of::<f32>()) as u64;
        let tiles = [whole, last].into_iter().filter(|&rows| rows > 0);
        let products = tiles.map(|rows| Self::gemm(rows, rank, width).scratch(threads));
        [vec![floats(whole * width), floats(whole * rank)], scratch::for_each_of(products)].concat()
    }

    /// The kernel converts a weight in bf16 one tile after another.
    fn reads_bf16(&self, index: usize) -> bool {
        index == WEIGHT && self.quantized.is_none()
    }

    fn run(&self, args: &mut Args<'_>) {
        let (squares, mut scratch) = (args.output::<f32>(0), args.workspace());
        let (a, b) = (args.input::<f32>(0), args.input::<f32>(1));
        let &[rank, width] = args.input_dims(0) else { unreachable!("rank 2 by the shape rule") };
        let (tile, scaled) = (scratch.take::<f32>(), scratch.take::<f32>());
        for first in (0..squares.len()).step_by(TILE) {
            let rows = first..squares.len().min(first + TILE);
            let (tile, scaled) = (&mut tile[..rows.len() * width], &mut scaled[..rows.len() * rank]);
            match &self.quantized {
                Some(weight) => weight.of(args, WEIGHT).dequantize(rows.clone(), 0..width, tile),
                None => with_float!(args.input_dtype(WEIGHT), T => {
                    let weight = &args.input::<T>(WEIGHT)[rows.start * width..rows.end * width];
                    tile.pieces_mut(width).zip(weight.pieces(width)).for_each(|(to, from)| {
                        vectorize!(to.iter_mut().zip(from).for_each(|(to, from)| *to = from.load()));
                    });
                }),
            }
            let b = &b[rows.start * rank..rows.end * rank];
            scaled.iter_mut().zip(b).for_each(|(scaled, b)| *scaled = b * self.scale as f32);
            Self::gemm(rows.len(), rank, width)
                .run(scaled, a, tile, Mode::Accumulate, Epilogue::default(), &mut scratch)
                .expect("extents by the shape rule");
            squares[rows].pieces_mut(1).zip(tile.pieces(width)).for_each(|(square, row)| {
                square[0] = vectorize!(reduce::sum(row, |x| x * x));
            });
        }
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let quantized = self.quantized.map(|weight| weight.on_device());
        gapless_kernels::cuda::launch::weight_squares(self.scale as f32, quantized, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (a, b) = (args.input(0), args.input(1));
        let weight = self.quantized.map_or_else(|| args.input(WEIGHT).clone(), |weight| weight.reference(args, WEIGHT));
        let square = |(row, b): (&[f64], &[f64])| {
            let added = |i: usize| self.scale * b.iter().zip(a.rows()).map(|(b, a)| b * a[i]).sum::<f64>();
            row.iter().enumerate().map(|(i, w)| (w + added(i)).powi(2)).sum::<f64>()
        };
        let squares: Vec<f64> = weight.rows().zip(b.rows()).map(square).collect();
        vec![Array::new(&[squares.len()], squares)]
    }
}
