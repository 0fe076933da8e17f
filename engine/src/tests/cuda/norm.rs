//! Tests the kernels of norm.cu.

use super::judge::check;
use crate::Tensor;
use crate::ops::{LayerNorm, RmsNorm};

/// Rows have fewer elements than a warp has lanes, enough for several warps, or more than a block has threads.
/// Sequences have one piece, several pieces, or several runs of pieces.
const SHAPES: [[usize; 3]; 6] = [[2, 3, 5], [1, 1, 33], [2, 70, 96], [1, 2, 2504], [2, 1030, 3], [1, 2, 16648]];

#[test]
fn layer_norm() {
    for shape in SHAPES {
        let width = [shape[2]];
        check(&["layer_norm", "norm_grad_input", "norm_grad_weight"], &[&shape, &width, &width], &[], |x, _| {
            let [y, _] = Tensor::apply_op(LayerNorm { eps: 1e-5 }, &[&x[0], &x[1], &x[2]])?;
            Ok(y)
        });
    }
}

#[test]
fn rms_norm() {
    for shape in SHAPES {
        check(&["rms_norm", "norm_grad_input", "norm_grad_weight"], &[&shape, &[shape[2]]], &[], |x, _| {
            let [y, _] = Tensor::apply_op(RmsNorm { eps: 1e-5 }, &[&x[0], &x[1]])?;
            Ok(y)
        });
    }
}
