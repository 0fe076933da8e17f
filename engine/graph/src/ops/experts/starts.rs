//! Conversions between the offsets and the lengths of runs of rows. Ranks exchange the lengths before they exchange the
//! rows themselves.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use crate::reference::{Array, Reference};
use crate::{Gradient, Op};

/// Converts offsets [runs + 1] to lengths \[runs\], both u32.
#[derive(Debug, Clone, Copy)]
pub struct RunLengths;

/// Converts lengths \[runs\] to offsets [runs + 1], both u32. The last offset is the total.
#[derive(Debug, Clone, Copy)]
pub struct RunStarts;

fn u32s(count: usize) -> Vec<Spec> {
    vec![Spec { shape: count.into(), dtype: DType::U32 }]
}

impl Op for RunLengths {
    fn name(&self) -> &'static str {
        "run_lengths"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("starts", &inputs[0])?;
        Ok(u32s(inputs[0].elements() - 1))
    }

    fn gradient(&self, _: &mut Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let lengths = args.output::<u32>(0);
        let pairs = args.input::<u32>(0).windows(2);
        lengths.iter_mut().zip(pairs).for_each(|(length, pair)| *length = pair[1] - pair[0]);
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::run_lengths(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let lengths: Vec<f64> = args.input(0).data.windows(2).map(|pair| pair[1] - pair[0]).collect();
        vec![Array::new(&[lengths.len()], lengths)]
    }
}

impl Op for RunStarts {
    fn name(&self) -> &'static str {
        "run_starts"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("lengths", &inputs[0])?;
        Ok(u32s(inputs[0].elements() + 1))
    }

    fn gradient(&self, _: &mut Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let offsets = args.output::<u32>(0);
        let lengths = args.input::<u32>(0);
        let mut end = 0;
        offsets[0] = 0;
        for (start, &length) in offsets[1..].iter_mut().zip(lengths) {
            end += length;
            *start = end;
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::run_starts(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let lengths = args.input(0);
        let offsets: Vec<f64> = (0..=lengths.data.len()).map(|run| lengths.data[..run].iter().sum()).collect();
        vec![Array::new(&[offsets.len()], offsets)]
    }
}
