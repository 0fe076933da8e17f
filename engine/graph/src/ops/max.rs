//! Maximum of each row.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, rows_per_task};

use super::TopKGrad;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The maximum over the last dimension, which is kept with extent 1, and the index (u32) of the maximum. If several
/// elements are equal, the first is chosen. NaN is never chosen: a row of NaN gives minus infinity and index 0.
#[derive(Debug, Clone, Copy)]
pub struct Max;

impl Op for Max {
    fn name(&self) -> &'static str {
        "max"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* W -> * _, * _"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        super::expect_rank(&inputs[0], 1)?;
        let mut dims = inputs[0].dims().to_vec();
        if dims.pop() == Some(0) {
            return Err("the maximum of no elements is undefined".into());
        }
        dims.push(1);
        Ok(vec![inputs[0].in_shape(dims.clone()), Spec { shape: dims.into(), dtype: DType::U32 }])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let experts = gapless_kernels::width(g.input(0).dims());
        let [dx] = Tensor::apply_op(TopKGrad { experts }, &[&g.output(1), &g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (values, ids) = (args.output::<f32>(0), args.output::<u32>(1));
        let width = gapless_kernels::width(args.input_dims(0));
        let rows = rows_per_task(width);
        let x = args.input::<f32>(0).pieces(rows * width);
        values.pieces_mut(rows).zip(ids.pieces_mut(rows).zip(x)).for_each(|(values, (ids, x))| {
            for ((value, id), row) in values.iter_mut().zip(ids).zip(x.chunks_exact(width)) {
                (*value, *id) = (f32::NEG_INFINITY, 0);
                for (i, &x) in row.iter().enumerate() {
                    if x > *value {
                        (*value, *id) = (x, i as u32);
                    }
                }
            }
        });
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::row_max(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let mut dims = x.dims.clone();
        *dims.last_mut().expect("rank was checked") = 1;
        let greatest = |row: &[f64]| row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let values: Vec<f64> = x.rows().map(greatest).collect();
        let first = |(row, max): (&[f64], &f64)| row.iter().position(|x| x == max).unwrap_or(0) as f64;
        let ids = x.rows().zip(&values).map(first).collect();
        vec![Array::new(&dims, values), Array::new(&dims, ids)]
    }
}
