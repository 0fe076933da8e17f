//! Tests of the generated kernels of single operations, and of reduce.cu.

use candle_core::DType;
use gapless_testing::{few, in_turn};

use super::judge::{check, check_in};
use crate::Tensor;
use crate::ops::{Affine, Binary, BinaryKind, ScaledSum, Sum, SwiGlu, Unary, UnaryKind};

/// Lengths around the sizes of packs and blocks.
const SHAPES: [&[usize]; 4] = [&[1], &[7], &[3, 5, 17], &[2, 1033]];

/// Each function is checked in one element type only. Generated kernels have the same form for both types, and each
/// kernel has to be compiled.
#[test]
fn functions_of_one_element() {
    use UnaryKind::{Abs, Cos, Erf, Exp, Gelu, GeluErf, Log, Recip, Relu, Sigmoid, Silu, Sin, Sqr, Sqrt, Tanh};
    for (index, (kind, name, gradient)) in [
        (Exp, "exp", "exp_grad"),
        (Sqr, "sqr", "sqr_grad"),
        (Recip, "recip", "recip_grad"),
        (Abs, "abs", "abs_grad"),
        (Sin, "sin", "sin_grad"),
        (Cos, "cos", "cos_grad"),
        (Erf, "erf", "erf_grad"),
        (Tanh, "tanh", "tanh_grad"),
        (Sigmoid, "sigmoid", "sigmoid_grad"),
        (Relu, "relu", "relu_grad"),
        (Silu, "silu", "silu_grad"),
        (Gelu, "gelu", "gelu_grad"),
        (GeluErf, "gelu_erf", "gelu_erf_grad"),
    ]
    .into_iter()
    .enumerate()
    {
        let dtype = [DType::F32, DType::BF16][index % 2];
        for &shape in in_turn(&SHAPES, 2 + index / 2 % 2) {
            check_in(dtype, &[name, gradient], &[shape], &[], |x, _| {
                Tensor::apply_op::<1>(Unary { kind }, &[&x[0]]).map(|[y]| y)
            });
        }
    }
    // Functions of positive arguments.
    for (turn, (kind, name, gradient)) in
        [(Log, "log", "log_grad"), (Sqrt, "sqrt", "sqrt_grad")].into_iter().enumerate()
    {
        for &shape in in_turn(&SHAPES, 2 + turn % 2) {
            check(&[name, gradient, "affine"], &[shape], &[], |x, _| {
                let [positive] = Tensor::apply_op(Affine { scale: 1.0, shift: 0.5 }, &[&x[0].sqr()?])?;
                Tensor::apply_op::<1>(Unary { kind }, &[&positive]).map(|[y]| y)
            });
        }
    }
}

#[test]
fn functions_of_two_elements_with_every_kind_of_strides() {
    use BinaryKind::{Add, Div, Maximum, Minimum, Mul, Sub};
    let apply = |kind, a: &Tensor, b: &Tensor| Tensor::apply_op::<1>(Binary { kind }, &[a, b]).map(|[y]| y);
    let kinds = [(Div, "div"), (Sub, "sub"), (Add, "add"), (Mul, "mul"), (Maximum, "maximum"), (Minimum, "minimum")];
    for (turn, (kind, name)) in kinds.into_iter().enumerate() {
        for &shape in in_turn(&SHAPES, 2 + turn % 2) {
            check(&[name], &[shape, shape], &[], |x, _| apply(kind, &x[0], &x[1].sqr()?.affine(1.0, 1.0)?));
        }
    }
    // Two functions suffice, because strides are generated in the same way for all of them.
    for &(kind, name) in few(&kinds, 2) {
        // Broadcast rows and columns, and a transposed operand.
        let shape = [3, 4, 10];
        check(&[name, "sum"], &[&shape, &[10], &[4, 1]], &[], |x, _| {
            let rows = apply(kind, &x[0], &x[1].sqr()?.affine(1.0, 1.0)?.broadcast_as(shape.to_vec())?)?;
            apply(kind, &rows, &x[2].sqr()?.affine(1.0, 1.0)?.broadcast_as(shape.to_vec())?)
        });
        check(&[name], &[&[5, 6], &[6, 5]], &[], |x, _| {
            apply(kind, &x[0].transpose(0, 1)?, &x[1].sqr()?.affine(1.0, 1.0)?)
        });
    }
}

#[test]
fn gated_units() {
    for shape in SHAPES {
        check(&["swiglu", "swiglu_grad"], &[shape, shape], &[], |x, _| {
            Tensor::apply_op::<1>(SwiGlu, &[&x[0], &x[1]]).map(|[y]| y)
        });
    }
}

#[test]
fn sums_over_leading_inner_and_all_dimensions() {
    for dims in [vec![0], vec![0, 1], vec![1], vec![2], vec![0, 2], vec![0, 1, 2]] {
        // In 130 rows, a sequence consists of two full pieces and a partial one.
        for shape in [[2, 130, 3], [3, 5, 140]] {
            check(&["sum"], &[&shape], &[], |x, _| {
                Tensor::apply_op::<1>(Sum { dims: dims.clone() }, &[&x[0]]).map(|[y]| y)
            });
        }
        check(&["sum"], &[&[4, 5, 6]], &[], |x, _| {
            Tensor::apply_op::<1>(Sum { dims: dims.clone() }, &[&x[0].transpose(0, 2)?]).map(|[y]| y)
        });
    }
    for shape in SHAPES {
        check(&["scaled_sum"], &[shape], &[], |x, _| {
            Tensor::apply_op::<1>(ScaledSum { scale: 0.25 }, &[&x[0]]).map(|[y]| y)
        });
    }
}
