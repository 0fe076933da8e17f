//! Tests of the kernels for candle's tensor functions: powers, masks, ids, and gather.cu.

use candle_core::DType;

use super::judge::{check, check_in};
use crate::Tensor;

/// Lengths around the sizes of packs and blocks.
const SHAPES: [[usize; 2]; 3] = [[1, 7], [3, 85], [2, 1033]];

#[test]
fn powers() {
    for shape in SHAPES {
        check(&["powf"], &[&shape], &[], |x, _| (x[0].sqr()? + 0.5)?.powf(1.5));
    }
}

#[test]
fn masks_of_every_comparison() {
    type Compare = fn(&Tensor, &Tensor) -> crate::Result<Tensor>;
    let comparisons: [(&str, Compare); 6] = [
        ("eq", |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b)),
        ("le", |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b)),
    ];
    for (index, (name, compare)) in comparisons.into_iter().enumerate() {
        let dtype = [DType::F32, DType::BF16][index % 2];
        for shape in SHAPES {
            check_in(dtype, &[name, "where_cond"], &[&shape, &shape], &[], |x, _| {
                compare(&x[0], &x[1])?.where_cond(&x[0], &x[1])
            });
        }
    }
    // The operands have strides. Masks are copied, compared and converted to floats. There are also ids.
    check(&["ge", "contiguous", "eq", "to_dtype"], &[&[5, 6], &[6, 5]], &[], |x, _| {
        let mask = x[0].t()?.ge(&x[1])?.t()?.contiguous()?.eq(1u8)?;
        mask.to_dtype(x[0].dtype())? * &x[0]
    });
    check(&["lt", "contiguous", "to_dtype"], &[&[2, 3]], &[(&[3, 2], &[1, 5, 3, 2, 0, 4])], |x, ids| {
        let ids = ids[0].t()?.contiguous()?;
        ids.lt(3u32)?.where_cond(&x[0], &ids.to_dtype(x[0].dtype())?)
    });
}

#[test]
fn elements_that_ids_name() {
    let ids: &[(&[usize], &[u32])] = &[(&[2, 3, 2], &[1, 3, 0, 0, 3, 3, 2, 1, 0, 1, 1, 1])];
    check(&["gather", "scatter_add"], &[&[2, 4, 2]], ids, |x, ids| x[0].gather(&ids[0], 1));
    check(&["gather", "scatter_add"], &[&[2, 4, 2], &[2, 3, 2]], ids, |x, ids| {
        x[0].scatter_add(&ids[0], &x[1], 1)?.sqr()
    });
    let ids: &[(&[usize], &[u32])] = &[(&[3, 5], &[4, 1, 0, 2, 2, 1, 1, 1, 1, 3, 0, 1, 2, 3, 4])];
    check(&["gather", "scatter_add"], &[&[3, 5]], ids, |x, ids| x[0].gather(&ids[0], 1));
    check(&["embedding", "embedding_grad"], &[&[3, 4]], &[(&[4], &[3, 0, 0, 2])], |x, ids| {
        x[0].index_select(&ids[0], 1)
    });
}

#[test]
fn the_greatest_of_rows() {
    for shape in SHAPES {
        check(&["max", "top_k_grad"], &[&shape], &[], |x, _| x[0].max(1)?.sqr());
        check(&["max", "top_k_grad"], &[&shape], &[], |x, _| x[0].min(0));
    }
    // If elements are equal, the first one is the maximum.
    check(&["max", "gather"], &[&[4, 40]], &[], |x, _| x[0].gather(&x[0].relu()?.neg()?.argmax_keepdim(1)?, 1));
}
