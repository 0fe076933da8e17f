//! Selection between two tensors, element by element.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Element, copy_row, each_row, row_of};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::{Gradient, Op};

/// Selects from (mask, a, b): the element of a where the mask (u8 or u32) is not 0, and the element of b elsewhere. An
/// element that is not selected does not affect the result, even if it is NaN.
#[derive(Debug, Clone, Copy)]
pub struct Where;

impl Where {
    fn run_on<T: Element + PartialEq + Default + 'static>(args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let ((mask, mask_layout), (a, a_layout)) = (args.strided::<T>(0), args.strided::<f32>(1));
        let b = (!args.is_overwritten(2)).then(|| args.strided::<f32>(2));
        each_row(out, mask_layout, |row, out| {
            if let Some((b, layout)) = b {
                copy_row(b, layout, row, out);
            }
            let ((mask, mask_step), (a, a_step)) = (row_of(mask, mask_layout, row), row_of(a, a_layout, row));
            for (i, out) in out.iter_mut().enumerate() {
                if mask[i * mask_step] != T::default() {
                    *out = a[i * a_step];
                }
            }
        });
    }
}

impl Op for Where {
    fn name(&self) -> &'static str {
        "where_cond"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_mask(&inputs[0])?;
        super::expect_equal(&inputs[1..])?;
        if inputs[0].dims() != inputs[1].dims() {
            return Err("the mask must have the shape of the values".into());
        }
        Ok(vec![inputs[1].clone()])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (mask, dy) = (g.input(0), g.grad(0));
        let zeros = dy.zeros_like()?;
        if g.wants(1) {
            let da = mask.where_cond(&dy, &zeros)?;
            g.accumulate(1, da);
        }
        if g.wants(2) {
            let db = mask.where_cond(&zeros, &dy)?;
            g.accumulate(2, db);
        }
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(2, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        match args.input_dtype(0) {
            DType::U8 => Self::run_on::<u8>(args),
            _ => Self::run_on::<u32>(args),
        }
    }

    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each("$0 != 0.0f ? $1 : $2"))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (mask, a, b) = (args.input(0), args.input(1), args.input(2));
        let chosen = (0..a.data.len()).map(|i| if mask.data[i] == 0.0 { b.data[i] } else { a.data[i] });
        vec![Array::new(&a.dims, chosen.collect())]
    }
}
