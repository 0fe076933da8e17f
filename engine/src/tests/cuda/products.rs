//! Matrix products: checks the matrices that are passed to cuBLASLt, and the tensors that results are added to.
//! Simple loops compute the products themselves.

use std::collections::HashMap;

use candle_core::{DType, Layout};
use gapless_graph::{Numbers, Stream};

use gapless_testing::few;

use super::super::vocabulary_parts;
use super::host;
use super::judge::{Stored, check, check_forward, judge, without_kernels};
use super::memory::{from_bf16, to_bf16};
use crate::cuda::Product;
use crate::cuda::launch::{Epilogue, Matrix, is_matrix};
use crate::graph::Spec;
use crate::kernels::LossTerms;
use crate::ops::{Linear, LinearCrossEntropy, MatMul};
use crate::{Op, Tensor};

/// Computes a product in place of cuBLASLt.
///
/// # Safety
/// The addresses must point to memory as large as the product says. No other code may access the memory during the
/// call.
pub unsafe fn compute(product: &Product) {
    let &Product { m, n, k, a, b, c, bias, epilogue, onto, batch, tf32, .. } = product;
    let rounded = |x: f64| if tf32 { to_tf32(x) } else { x };
    for index in 0..batch.count {
        let [a, b, c] = [(a, 0), (b, 1), (c, 2)].map(|(matrix, i)| (matrix, index * batch.distances[i]));
        // All sums are computed before any is written, because cuBLASLt does not specify the order of its writes.
        let mut sums = HashMap::new();
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            // SAFETY: the caller guarantees it.
            let products = (0..k).map(|i| unsafe { rounded(read(at(a, row, i))) * rounded(read(at(b, i, column))) });
            let sum: f64 = products.sum();
            let bias = bias.map_or(0.0, |bias| {
                let address = bias + column * c.0.dtype.size_in_bytes() as u64;
                // SAFETY: as above.
                unsafe { read((address, c.0.dtype)) }
            });
            let onto = onto.map(|address| at((Matrix { address, ..c.0 }, c.1), row, column));
            // SAFETY: as above.
            let before = onto.map_or(0.0, |onto| unsafe { read(onto) });
            sums.insert((row, column), sum + bias + before);
        }
        for ((row, column), sum) in sums {
            let beside = |address| at((Matrix::dense(address, c.0.dtype, n), 0), row, column);
            let made = match epilogue {
                Epilogue::None => sum,
                Epilogue::Gelu { kept } => {
                    // SAFETY: as above.
                    kept.into_iter().for_each(|kept| unsafe { write(beside(kept), sum) });
                    gelu(sum).0
                }
                // SAFETY: as above.
                Epilogue::GeluGrad { of } => sum * gelu(unsafe { read(beside(of)) }).1,
            };
            // SAFETY: as above.
            unsafe { write(at(c, row, column), made) };
        }
    }
}

/// Rounds an f32 value to TF32: to nearest with 10 bits of mantissa, ties to even.
pub fn to_tf32(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    f64::from(f32::from_bits(bits.wrapping_add(0xfff + (bits >> 13 & 1)) & !0x1fff))
}

/// Returns GELU in its tanh approximation, and its derivative (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
pub fn gelu(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    let t = (scale * (x + 0.044715 * x.powi(3))).tanh();
    let slope = scale * (1.0 + 3.0 * 0.044715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
}

/// Returns the address and type of an element.
fn at((matrix, skip): (Matrix, u64), row: u64, column: u64) -> (u64, DType) {
    let (outer, inner) = if matrix.is_transposed { (column, row) } else { (row, column) };
    assert!(inner < matrix.pitch, "rows that overlap");
    let element = skip + outer * matrix.pitch + inner;
    (matrix.address + element * matrix.dtype.size_in_bytes() as u64, matrix.dtype)
}

/// # Safety
/// The element must exist.
unsafe fn read((address, dtype): (u64, DType)) -> f64 {
    let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the caller guarantees it.
    unsafe {
        match dtype {
            DType::F32 => f64::from(pointer.cast::<f32>().read()),
            DType::BF16 => f64::from(from_bf16(pointer.cast::<u16>().read())),
            dtype => panic!("no product takes {dtype:?}"),
        }
    }
}

/// # Safety
/// The element must exist, and no other code may access it during the call.
unsafe fn write((address, dtype): (u64, DType), number: f64) {
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the caller guarantees it.
    unsafe {
        match dtype {
            DType::F32 => pointer.cast::<f32>().write(number as f32),
            DType::BF16 => pointer.cast::<u16>().write(to_bf16(number as f32)),
            dtype => panic!("no product gives {dtype:?}"),
        }
    }
}

#[test]
fn linear_layers() {
    let names = ["linear", "linear_grad_weight", "linear_grad_input"];
    for x in [&[2, 3, 5][..], &[4, 96], &[7], &[2, 70, 3]] {
        let width = *x.last().unwrap();
        check(&names, &[x, &[6, width], &[6]], &[], |x, _| {
            Tensor::apply_op::<1>(Linear { has_bias: true }, &[&x[0], &x[1], &x[2]]).map(|[y]| y)
        });
        check(&names, &[x, &[6, width]], &[], |x, _| {
            Tensor::apply_op::<1>(Linear { has_bias: false }, &[&x[0], &x[1]]).map(|[y]| y)
        });
    }
}

/// Plain and transposed operands, leading dimensions whose order in memory is different, and single rows or columns.
#[test]
fn matrix_products() {
    let product = |a: &Tensor, b: &Tensor| Tensor::apply_op::<1>(MatMul, &[a, b]).map(|[c]| c);
    for (a, b) in [
        (&[3, 5][..], &[5, 4][..]),
        (&[2, 3, 5], &[2, 5, 4]),
        (&[2, 3, 1, 5], &[2, 3, 5, 4]),
        (&[2, 3, 4, 1], &[2, 3, 1, 4]),
    ] {
        check(&["matmul"], &[a, b], &[], |x, _| product(&x[0], &x[1]));
    }
    check(&["matmul"], &[&[4, 5], &[4, 3]], &[], |x, _| product(&x[0].t()?, &x[1]));
    // [batch, tokens, heads, size] viewed as [batch, heads, tokens, size] has two leading dimensions that cannot be
    // merged.
    check(&["matmul"], &[&[2, 4, 3, 5], &[2, 6, 3, 5]], &[], |x, _| {
        product(&x[0].transpose(1, 2)?, &x[1].transpose(1, 2)?.t()?)
    });
}

/// Broadcast elements, broadcast rows, and gaps between elements are layouts that cuBLASLt cannot read as matrices.
#[test]
fn factors_that_are_no_matrices() {
    let is_matrix = |dims: &[usize], strides: &[usize]| is_matrix(&Layout::new(dims.into(), strides.to_vec(), 0));
    for strides in [[5, 1], [9, 1], [1, 4], [1, 7]] {
        assert!(is_matrix(&[4, 5], &strides), "{strides:?}");
    }
    assert!(is_matrix(&[1, 5], &[0, 1]) && is_matrix(&[4, 1], &[3, 1]) && is_matrix(&[4, 1], &[1, 7]));
    assert!(!is_matrix(&[4, 1], &[0, 0]) && !is_matrix(&[1, 5], &[0, 0]));
    if !host::is_there() {
        return;
    }
    let numbers = Numbers::from_seed(5);
    for (dtype, strides) in
        [[0, 1], [1, 0], [0, 0], [5, 2]].into_iter().flat_map(|s| [(DType::F32, s), (DType::BF16, s)])
    {
        assert!(!is_matrix(&[4, 5], &strides), "{strides:?}");
        let stored = |dims: [usize; 3], strides: [usize; 3]| {
            let layout = Layout::new(dims.to_vec().into(), strides.to_vec(), 0);
            let span: usize = 1 + dims.iter().zip(strides).map(|(dim, stride)| (dim - 1) * stride).sum::<usize>();
            Stored { data: (0..span).map(|i| numbers.normal(i)).collect(), layout, dtype }.rounded()
        };
        // The left operand, the right operand, or both have such a layout.
        let [row, column] = strides;
        let (odd, dense) = (stored([2, 4, 5], [0, row, column]), stored([2, 4, 5], [20, 5, 1]));
        let turn = |x: &Stored| Stored { layout: x.layout.transpose(1, 2).unwrap(), ..x.clone() };
        for inputs in [[odd.clone(), turn(&dense)], [dense, turn(&odd)], [odd.clone(), turn(&odd)]] {
            let specs = inputs.each_ref().map(|x| Spec { shape: x.layout.shape().clone(), dtype });
            let outputs = MatMul.infer(&specs).unwrap();
            assert!(judge(&MatMul, &inputs, &specs, &outputs, Stream::new(1, 1, 0)));
        }
    }
    // The gradient of a sum is a broadcast scalar.
    for dtype in [DType::F32, DType::BF16] {
        let without = without_kernels(dtype, &[&[2, 4, 5], &[2, 5, 3]], &[], |x, _| {
            Tensor::apply_op::<1>(MatMul, &[&x[0], &x[1]]).and_then(|[c]| c.sum_all())
        });
        assert!(without.is_empty(), "{without:?} have no kernels for {dtype:?}");
    }
}

/// A head with two chunks, and a vocabulary whose last five entries have products of their own. The gradient is
/// computed in the forward or, with a gradient per row, in the backward.
#[test]
fn heads_with_an_odd_vocabulary() {
    let (x, vocabulary) = ([1, 3100, 8], 21);
    let targets: Vec<u32> = (0..3100).map(|row| row * 5 % vocabulary).collect();
    for &(gradient, cap) in few(&[(Some(0.25), None), (None, Some(0.7))], 1) {
        check(&["linear_cross_entropy"], &[&x, &[vocabulary as usize, 8]], &[(&x[..2], &targets)], |x, ids| {
            let head = LinearCrossEntropy::new(gradient).with_cap(cap);
            let inputs = [&x[0], &x[1], &ids[0]];
            let losses = match gradient {
                None => Tensor::apply_op::<1>(head, &inputs)?[0].clone(),
                Some(_) => Tensor::apply_op::<3>(head, &inputs)?[0].clone(),
            };
            losses.to_dtype(x[0].dtype())
        });
    }
}

/// A head with one chunk. The gradient is computed in the forward or in the backward.
#[test]
fn heads_with_their_loss() {
    for &(x, vocabulary) in few(&[([3, 100, 4], 9), ([1, 300, 4], 9), ([2, 3, 5], 7)], 1) {
        let rows: usize = x[..2].iter().product();
        let targets: Vec<u32> = (0..rows).map(|row| (row * 5 % vocabulary) as u32).collect();
        let smooth = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };
        let ways = [
            (None, LossTerms::NONE, None),
            (None, smooth, Some(0.7)),
            (Some(0.25), LossTerms::NONE, None),
            (Some(0.25), smooth, None),
            (Some(0.25), LossTerms::NONE, Some(0.7)),
        ];
        for &(gradient, terms, cap) in few(&ways, 3) {
            let given = [&x[..], &[vocabulary, x[2]]];
            let ids = [(&x[..2], &targets[..])];
            check(&["linear_cross_entropy"], &given, &ids, |x, ids| {
                let head = LinearCrossEntropy::new(gradient).with_terms(terms).with_cap(cap);
                let inputs = [&x[0], &x[1], &ids[0]];
                let losses = match gradient {
                    None => Tensor::apply_op::<1>(head, &inputs)?[0].clone(),
                    Some(_) => Tensor::apply_op::<3>(head, &inputs)?[0].clone(),
                };
                losses.to_dtype(x[0].dtype())
            });
        }
        // Weighted losses.
        let given = [&x[..], &[vocabulary, x[2]]];
        let weights: Vec<u32> = (0..rows).map(|row| (row % 3) as u32).collect();
        let ids = [(&x[..2], &targets[..]), (&x[..2], &weights[..])];
        check(&["linear_cross_entropy"], &given, &ids, |x, ids| {
            let weights = ids[1].to_dtype(DType::F32)?;
            let inputs = [&x[0], &x[1], &ids[0], &weights];
            let smooth = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };
            let head = LinearCrossEntropy::new(Some(0.25)).with_terms(smooth).with_likelihoods();
            Tensor::apply_op::<4>(head, &inputs)?[0].to_dtype(x[0].dtype())
        });
        check(&["linear_cross_entropy"], &given, &ids, |x, ids| {
            let weights = ids[1].to_dtype(DType::F32)?;
            let inputs = [&x[0], &x[1], &ids[0], &weights];
            Tensor::apply_op::<3>(LinearCrossEntropy::new(Some(0.25)), &inputs)?[0].to_dtype(x[0].dtype())
        });
    }
}

/// A head on parts of a vocabulary, with the statistics of all parts.
#[test]
fn heads_on_parts_of_a_vocabulary() {
    if !host::is_there() {
        return;
    }
    for (head, ids) in vocabulary_parts::heads() {
        check_forward(&vocabulary_parts::SHAPES, ids, |x, ids| vocabulary_parts::head_on_parts(&*head, x, ids));
    }
}
