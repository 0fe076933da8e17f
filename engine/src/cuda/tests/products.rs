//! Products of matrices: which matrices cuBLASLt is given, and what is summed onto what. The products themselves are computed by
//! the plainest of loops.

use std::collections::HashMap;

use candle_core::{DType, Layout};

use super::judge::check;
use super::memory::{from_bf16, to_bf16};
use crate::Tensor;
use crate::cuda::launch::Matrix;
use crate::cuda::{Operand, Product};
use crate::ops::{Linear, LinearCrossEntropy, MatMul};

/// Computes products where they lie.
///
/// # Safety
/// The addresses are those of memory that is as large as the product says, and nobody else touches it.
pub unsafe fn compute(product: &Product) {
    let &Product { m, n, k, a, b, c, bias, accumulate, batch, .. } = product;
    for index in 0..batch.count {
        let [a, b, c] = [(a, 0), (b, 1), (c, 2)].map(|(matrix, i)| (matrix, index * batch.distances[i]));
        // All of it first, as nobody says in which order a library writes.
        let mut sums = HashMap::new();
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            // SAFETY: by this function's contract.
            let products = (0..k).map(|i| unsafe { read(at(a, row, i)) * read(at(b, i, column)) });
            let sum: f64 = products.sum();
            let bias = bias.map_or(0.0, |bias| {
                let address = bias + column * c.0.dtype.size_in_bytes() as u64;
                // SAFETY: as above.
                unsafe { read((address, c.0.dtype)) }
            });
            // SAFETY: as above.
            let before = if accumulate { unsafe { read(at(c, row, column)) } } else { 0.0 };
            sums.insert((row, column), sum + bias + before);
        }
        for ((row, column), sum) in sums {
            // SAFETY: as above.
            unsafe { write(at(c, row, column), sum) };
        }
    }
}

/// Address and type of an element.
fn at((matrix, skip): (Matrix, u64), row: u64, column: u64) -> (u64, DType) {
    let (outer, inner) = if matrix.is_transposed { (column, row) } else { (row, column) };
    assert!(inner < matrix.pitch, "rows that reach into each other");
    let element = skip + outer * matrix.pitch + inner;
    (matrix.address + element * matrix.dtype.size_in_bytes() as u64, matrix.dtype)
}

/// # Safety
/// There is such an element.
unsafe fn read((address, dtype): (u64, DType)) -> f64 {
    let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: by this function's contract.
    unsafe {
        match dtype {
            DType::F32 => f64::from(pointer.cast::<f32>().read()),
            DType::BF16 => f64::from(from_bf16(pointer.cast::<u16>().read())),
            dtype => panic!("no product takes {dtype:?}"),
        }
    }
}

/// # Safety
/// There is such an element, and nobody else touches it.
unsafe fn write((address, dtype): (u64, DType), number: f64) {
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: by this function's contract.
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

/// As they are, transposed, with leading dimensions in another order than in memory, and a single row or column.
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
    // [batch, tokens, heads, size] as [batch, heads, tokens, size]: two leading dimensions that don't merge.
    check(&["matmul"], &[&[2, 4, 3, 5], &[2, 6, 3, 5]], &[], |x, _| {
        product(&x[0].transpose(1, 2)?, &x[1].transpose(1, 2)?.t()?)
    });
}

/// A number that stands for many is not a matrix that cuBLASLt can read.
#[test]
fn matrices_whose_rows_reach_into_each_other_are_refused() {
    let read = |dims: &[usize], strides: &[usize]| {
        let layout = Layout::new(dims.into(), strides.to_vec(), 0);
        Matrix::of(&Operand { address: 64, layout, dtype: DType::F32 }).map(|m| (m.is_transposed, m.pitch))
    };
    assert_eq!(read(&[4, 5], &[5, 1]), Some((false, 5)));
    assert_eq!(read(&[4, 5], &[9, 1]), Some((false, 9)));
    assert_eq!(read(&[4, 5], &[1, 4]), Some((true, 4)));
    assert_eq!(read(&[1, 5], &[0, 1]), Some((false, 5)));
    assert_eq!(read(&[4, 1], &[3, 1]), Some((false, 3)));
    assert_eq!(read(&[4, 1], &[1, 7]), Some((false, 1)));
    for strides in [[0, 1], [1, 0], [0, 0], [5, 2]] {
        assert_eq!(read(&[4, 5], &strides), None, "{strides:?}");
    }
    assert_eq!(read(&[4, 1], &[0, 0]), None);
    assert_eq!(read(&[1, 5], &[0, 0]), None);
}

/// One chunk, and several: whole sequences together, and pieces of one. With the gradient made in the forward, and after it.
#[test]
fn heads_with_their_loss() {
    for (x, vocabulary) in [([2, 3, 5], 7), ([3, 200, 4], 9), ([1, 600, 4], 9)] {
        let rows: usize = x[..2].iter().product();
        let targets: Vec<u32> = (0..rows).map(|row| (row * 5 % vocabulary) as u32).collect();
        for gradient in [None, Some(0.25)] {
            let given = [&x[..], &[vocabulary, x[2]]];
            let ids = [(&x[..2], &targets[..])];
            check(&["linear_cross_entropy"], &given, &ids, |x, ids| {
                let head = LinearCrossEntropy { gradient };
                let inputs = [&x[0], &x[1], &ids[0]];
                let losses = match gradient {
                    None => Tensor::apply_op::<1>(head, &inputs)?[0].clone(),
                    Some(_) => Tensor::apply_op::<3>(head, &inputs)?[0].clone(),
                };
                losses.to_dtype(x[0].dtype())
            });
        }
    }
}
