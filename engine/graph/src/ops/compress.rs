//! Eight-bit compression of activations that are kept from the forward to the backward.
//!
//! [`Compress`] stores an 8-bit code per element, and a range per group of [`GROUP`] neighbours. [`Expand`] restores
//! the tensor. The method is that of Mesa (Pan et al., arXiv 2111.11124, section 3), but with the exact range of each
//! group instead of running estimates per head. A group's codes stand for 256 evenly spaced values from its smallest to
//! its greatest element, so the error is at most 1/510 of the group's range. Elements are rounded to the nearest code,
//! not at random, so repeating a step gives the same bits.
//!
//! A group never spans two entries of the first dimension, so the result does not depend on how a batch is divided into
//! micro-batches.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, reduce, rows_per_task, vectorize};

use crate::graph::FLOATS;
use crate::op::Op;
use crate::reference::{Array, Reference};

/// The greatest number of elements that share a range.
pub const GROUP: usize = 256;

/// The greatest code.
const GREATEST: f32 = 255.0;

/// Steps (range ÷ 255) smaller than this are replaced by zero, so that the reciprocal of every other step is finite.
const LEAST_STEP: f32 = 1e-37;

/// The division of a tensor into rows, and of rows into groups. No row spans two entries of the first dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Grouping {
    row: usize,
}

impl Grouping {
    fn of(dims: &[usize]) -> Self {
        let entry: usize = dims.iter().skip(1).product();
        let width = dims.last().copied().unwrap_or(1).max(1);
        Self { row: if entry > 0 && entry.is_multiple_of(GROUP) { GROUP } else { width } }
    }

    fn groups_of_row(self) -> usize {
        self.row.div_ceil(GROUP)
    }

    fn groups(self, elements: usize) -> usize {
        elements / self.row * self.groups_of_row()
    }
}

/// Returns the shapes and types of a tensor's codes and of the ranges of its groups.
pub fn packed(spec: &Spec) -> [Spec; 2] {
    let codes = Spec { shape: spec.shape.clone(), dtype: DType::U8 };
    [codes, Spec::f32((Grouping::of(spec.dims()).groups(spec.elements()), 2))]
}

/// Compresses x. Outputs: the codes, and the smallest element and the step of each group.
#[derive(Debug, Clone, Copy)]
pub struct Compress;

impl Op for Compress {
    fn name(&self) -> &'static str {
        "compress"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(inputs)?;
        Ok(packed(&inputs[0]).into())
    }

    fn run(&self, args: &mut Args<'_>) {
        let (codes, ranges) = (args.output::<u8>(0), args.output::<f32>(1));
        let (x, cut) = (args.input::<f32>(0), Grouping::of(args.input_dims(0)));
        let (rows, groups) = (rows_per_task(cut.row), cut.groups_of_row());
        let task = rows * cut.row;
        let tasks = codes.pieces_mut(task).zip(x.pieces(task)).zip(ranges.pieces_mut(2 * rows * groups));
        tasks.for_each(|((codes, x), ranges)| {
            let rows = codes.chunks_exact_mut(cut.row).zip(x.chunks_exact(cut.row));
            for ((codes, x), ranges) in rows.zip(ranges.chunks_exact_mut(2 * groups)) {
                let groups = codes.chunks_mut(GROUP).zip(x.chunks(GROUP)).zip(ranges.chunks_exact_mut(2));
                vectorize!({
                    for ((codes, x), range) in groups {
                        (range[0], range[1]) = compress(x, codes);
                    }
                });
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let row = Grouping::of(operands.inputs.first()?.dims()).row as u64;
        gapless_kernels::cuda::launch::compress(row, GROUP as u64, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let (mut codes, mut ranges) = (Vec::new(), Vec::new());
        for group in x.data.chunks(Grouping::of(&x.dims).row).flat_map(|row| row.chunks(GROUP)) {
            let least = group.iter().copied().fold(f64::INFINITY, f64::min);
            let greatest = group.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let step = (greatest - least) / 255.0;
            let step = if step >= f64::from(LEAST_STEP) { step } else { 0.0 };
            codes.extend(group.iter().map(|x| if step > 0.0 { ((x - least) / step).round() } else { 0.0 }));
            ranges.extend([least, step]);
        }
        vec![Array::new(&x.dims, codes), Array::new(&[ranges.len() / 2, 2], ranges)]
    }
}

/// Writes the codes of a group, and returns the group's smallest element and its step.
#[inline(always)]
fn compress(x: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let least = reduce::min(x);
    let step = (reduce::max(x) - least) / GREATEST;
    let step = if step >= LEAST_STEP { step } else { 0.0 };
    let per_step = if step > 0.0 { 1.0 / step } else { 0.0 };
    for (code, &x) in codes.iter_mut().zip(x) {
        // The sum is at most 255.5, apart from rounding.
        *code = ((x - least) * per_step + 0.5) as i32 as u8;
    }
    (least, step)
}

/// Restores a tensor of this shape and type from the outputs of [`Compress`].
#[derive(Debug, Clone)]
pub struct Expand(pub Spec);

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        if inputs != packed(&self.0) || !FLOATS.contains(&self.0.dtype) {
            return Err(format!("the inputs are not the codes and ranges of {:?}", self.0));
        }
        Ok(vec![self.0.clone()])
    }

    fn run(&self, args: &mut Args<'_>) {
        let x = args.output::<f32>(0);
        let (codes, ranges, cut) = (args.input::<u8>(0), args.input::<f32>(1), Grouping::of(self.0.dims()));
        let (rows, groups) = (rows_per_task(cut.row), cut.groups_of_row());
        let task = rows * cut.row;
        let tasks = x.pieces_mut(task).zip(codes.pieces(task)).zip(ranges.pieces(2 * rows * groups));
        tasks.for_each(|((x, codes), ranges)| {
            let rows = x.chunks_exact_mut(cut.row).zip(codes.chunks_exact(cut.row));
            for ((x, codes), ranges) in rows.zip(ranges.chunks_exact(2 * groups)) {
                let groups = x.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(ranges.chunks_exact(2));
                vectorize!({
                    for ((x, codes), range) in groups {
                        let (least, step) = (range[0], range[1]);
                        x.iter_mut().zip(codes).for_each(|(x, &code)| *x = f32::from(code) * step + least);
                    }
                });
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let row = Grouping::of(self.0.dims()).row as u64;
        gapless_kernels::cuda::launch::expand(row, GROUP as u64, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (codes, ranges) = (args.input(0), args.input(1));
        let mut x = Vec::new();
        let groups = codes.data.chunks(Grouping::of(self.0.dims()).row).flat_map(|row| row.chunks(GROUP));
        for (codes, range) in groups.zip(ranges.rows()) {
            x.extend(codes.iter().map(|code| code * range[1] + range[0]));
        }
        vec![Array::new(self.0.dims(), x)]
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    fn numbers() -> impl Strategy<Value = Vec<f32>> {
        let number = prop_oneof![
            8 => (-60i32..20, -1.0f32..1.0).prop_map(|(exponent, x)| x * 2f32.powi(exponent)),
            1 => Just(0.0f32),
            1 => Just(f32::MIN_POSITIVE),
        ];
        prop::collection::vec(number, 1..=GROUP)
    }

    generated! {
        /// The allowed error is half a step, plus f32 roundings of at most 2⁻²⁴ each. Six roundings while the code is
        /// computed and three while the code is expanded are relative to the range. The rounding of the final sum is
        /// relative to the sum.
        #[test]
        fn a_number_comes_back_within_half_a_step(x in numbers()) {
            let mut codes = vec![0; x.len()];
            let (least, step) = compress(&x, &mut codes);
            let greatest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let size = f64::from(greatest.abs().max(least.abs()));
            let (range, rounding) = (f64::from(greatest) - f64::from(least), 1.0 / (1 << 24) as f64);
            // The last term allows for a range that is too small to be divided into steps.
            let allowed = range / 510.0 + (9.0 * range + size) * rounding + 3e-35;
            for (&x, &code) in x.iter().zip(&codes) {
                let back = f64::from(f32::from(code) * step + least);
                prop_assert!((back - f64::from(x)).abs() <= allowed, "{x:e} came back as {back:e}, {least:e} {step:e}");
            }
        }
    }

    #[test]
    fn groups_do_not_reach_over_two_entries_of_the_batch() {
        for (dims, row, groups) in [
            (vec![4, 128, 96], GROUP, 4 * 48),
            (vec![4, 3, 96], 96, 12),
            (vec![2, 3, 300], 300, 12),
            (vec![8, 24, 48], 48, 8 * 24),
            (vec![512], 512, 2),
        ] {
            let cut = Grouping::of(&dims);
            assert_eq!((cut.row, cut.groups(dims.iter().product())), (row, groups), "{dims:?}");
            assert!(dims.len() == 1 || dims[1..].iter().product::<usize>() % cut.row == 0);
        }
    }

    /// An infinite element must not silently become finite.
    #[test]
    fn infinite_numbers_do_not_come_back_finite() {
        let mut codes = [0; 3];
        let (least, step) = compress(&[1.0, f32::INFINITY, 2.0], &mut codes);
        assert!(codes.iter().all(|&code| !(f32::from(code) * step + least).is_finite()));
    }
}
