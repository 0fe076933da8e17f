//! Compares the operations of candle's API with their references: gradients with finite differences in f64, kernels
//! with the f64 reference, and values with candle's own eager tensors.

use candle_core::{D, DType, Device as Host};
use gapless_engine::graph::{IndexOp, TensorIndexer, Window};
use gapless_engine::nn::{self, Activation, Module, loss, ops, rotary_emb};
use gapless_engine::ops::{Dropout, Jitter};
use gapless_engine::{Error, Result, Tensor, gradient_check};

/// The tolerance of gradients: central differences in f64 have errors of about 1e-9. The errors of f32 kernels are a
/// multiple of 2⁻²⁴ = 6e-8.
const FINITE_DIFFERENCE: f64 = 1e-6;
const KERNEL: f64 = 1e-5;

fn check(shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let error = gradient_check(shapes, &[], |x, _| f(x)).unwrap();
    assert!(error.finite_difference <= FINITE_DIFFERENCE, "{error:?}");
    assert!(error.kernel <= KERNEL, "{error:?}");
    assert!(error.bf16.is_none_or(|error| error <= 1.0), "{error:?}");
}

/// Returns the error with which recording a function fails.
fn refused(shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> String {
    gradient_check(shapes, &[], |x, _| f(x)).unwrap_err().to_string()
}

#[test]
fn operators() {
    check(&[&[2, 3], &[2, 3]], |x| (&x[0] * 2.0)? + (&x[1] - 1.0)?);
    check(&[&[2, 3]], |x| &x[0] + x[0].relu());
    check(&[&[2, 3]], |x| x[0].relu() * &x[0]);
    check(&[&[2, 3]], |x| (x[0].clone() * x[0].clone())? - x[0].clone());
    check(&[&[2, 3], &[2, 3]], |x| &x[0] / (x[1].sqr()? + 0.5)?);
    check(&[&[2, 3]], |x| 1.0 / (2.0 + x[0].sqr()?)?);
    check(&[&[2, 3]], |x| 3.0 * (1.0 - &x[0])?);
    check(&[&[2, 3]], |x| (x[0].clone() / 4.0)? + x[0].tanh());
}

#[test]
fn functions_of_one_element() {
    let x: &[&[usize]] = &[&[3, 7]];
    check(x, |x| x[0].abs());
    check(x, |x| x[0].sin());
    check(x, |x| x[0].cos());
    check(x, |x| x[0].erf());
    check(x, |x| x[0].elu(0.7));
    check(x, |x| x[0].powf(3.0));
    check(x, |x| (x[0].sqr()? + 0.5)?.powf(-1.5));
    check(x, |x| x[0].powf(2.0)? + x[0].powf(1.0)? + x[0].powf(0.0)?);
    check(x, |x| x[0].clamp(-0.5, 0.7));
    check(x, |x| x[0].maximum(0.1)? + x[0].minimum(-0.2)?);
    for activation in [
        Activation::Gelu,
        Activation::NewGelu,
        Activation::Relu2,
        Activation::Relu6,
        Activation::Swish,
        Activation::Sigmoid,
        Activation::HardSigmoid,
        Activation::Mish,
        Activation::HardSwish,
        Activation::LeakyRelu(0.1),
    ] {
        check(x, |x| x[0].apply(&activation));
    }
    check(&[&[3, 8]], |x| x[0].apply(&Activation::Swiglu));
}

#[test]
fn functions_of_two_elements() {
    let pair: &[&[usize]] = &[&[3, 4], &[3, 4]];
    check(pair, |x| x[0].maximum(&x[1]));
    check(pair, |x| x[0].minimum(&x[1])?.sqr());
    check(pair, |x| (x[0].sqr()? + 0.5)?.pow(&x[1]));
    check(&[&[2, 3, 4], &[4]], |x| x[0].broadcast_maximum(&x[1])? + x[0].broadcast_minimum(&x[1])?);
}

#[test]
fn masks() {
    let pair: &[&[usize]] = &[&[3, 4], &[3, 4]];
    check(pair, |x| x[0].gt(&x[1])?.where_cond(&x[0].sqr()?, &x[1]));
    check(pair, |x| x[0].le(0.3)?.where_cond(&x[0], &x[1].exp()?));
    check(&[&[2, 3, 4], &[3, 1]], |x| x[0].broadcast_lt(&x[1])?.where_cond(&x[0].exp()?, &x[0].zeros_like()?));
    check(&[&[5, 5]], |x| x[0].masked_fill(&Tensor::triu2(5, DType::U8, x[0].device())?, 0.5));
    // Masked elements do not contribute to gradients.
    check(&[&[2, 5, 5]], |x| {
        let hidden = Tensor::tril2(5, DType::U8, x[0].device())?.eq(0u8)?;
        x[0].masked_fill(&hidden, f32::NEG_INFINITY)?.softmax_last_dim()
    });
    // Masks are cast to f32 and read through strides, and masks are compared to give other masks.
    check(&[&[3, 4], &[4, 3]], |x| x[0].ge(&x[1].t()?)?.to_dtype(DType::F32)? * &x[0]);
    check(&[&[3, 4]], |x| x[0].ne(0.0)?.t()?.contiguous()?.eq(1u8)?.to_dtype(DType::F32)?.t()? * &x[0]);
}

#[test]
fn indices() {
    check(&[&[3, 4]], |x| x[0].gather(&Tensor::new(&[[0u32, 3], [1, 1], [2, 0]], x[0].device())?, 1));
    check(&[&[3, 2, 2]], |x| {
        let ids = Tensor::from_vec(vec![2u32, 0, 1, 1, 2, 2, 0, 1], (2, 2, 2), x[0].device())?;
        x[0].gather(&ids, 0)?.sqr()
    });
    check(&[&[3, 4], &[3, 2]], |x| {
        let ids = Tensor::new(&[[0u32, 3], [1, 1], [2, 0]], x[0].device())?;
        x[0].scatter_add(&ids, &x[1], 1)?.sqr()
    });
    for dim in 0..3 {
        check(&[&[3, 4, 5]], |x| x[0].index_select(&Tensor::new(&[2u32, 0, 2], x[0].device())?, dim)?.sqr());
    }
    check(&[&[2, 4], &[2, 3]], |x| x[0].index_add(&Tensor::new(&[1u32, 3, 1], x[0].device())?, &x[1], 1)?.sqr());
    check(&[&[4, 5, 6]], |x| x[0].i((1..3, .., 4))?.sqr());
    check(&[&[4, 5, 6]], |x| x[0].i(2)? * x[0].i((.., 0..=4, ..))?.get(1)?);
    check(&[&[4, 5]], |x| x[0].i((.., TensorIndexer::from(&Tensor::new(&[1u32, 1], x[0].device())?))));

    let outside = |x: &Tensor| Tensor::new(&[4u32], x.device());
    assert!(refused(&[&[4, 2]], |x| x[0].index_select(&outside(&x[0])?, 0)).contains("id 4 is outside"));
    assert!(refused(&[&[4, 2]], |x| x[0].embedding(&outside(&x[0])?)).contains("id 4 is outside"));
}

#[test]
fn views_and_copies() {
    check(&[&[2, 3, 4]], |x| x[0].permute((2, 0, 1))?.contiguous());
    check(&[&[2, 3, 4, 2]], |x| x[0].permute([3, 1, 0, 2])?.flatten(1, 2)?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].flatten_from(1)?.flatten_to(0)?.flatten_all());
    check(&[&[2, 3]], |x| x[0].repeat((2, 1, 3))?.sqr());
    check(&[&[2, 1]], |x| x[0].expand((3, 2, 4))? * x[0].broadcast_left(3)?.expand((3, 2, 4))?);
    check(&[&[2, 3], &[2, 3]], |x| Tensor::stack(&[&x[0], &x[1], &x[0]], 1));
    check(&[&[2, 3], &[2, 3]], |x| Tensor::stack(&[x[0].clone(), x[1].clone()], D::Minus1));
    check(&[&[2, 7]], |x| {
        let parts = x[0].chunk(3, 1)?;
        assert_eq!(parts.iter().map(|part| part.dims()[1]).collect::<Vec<_>>(), [3, 2, 2]);
        (parts[0].narrow(1, 0, 2)? * &parts[1])? + &parts[2]
    });
    check(&[&[2, 7]], |x| x[0].split(&[2, 4, 1], 1)?[1].sqr());
    check(&[&[2, 3]], |x| x[0].pad_with_zeros(1, 1, 2)?.roll(2, 1)?.sqr());
    check(&[&[2, 3]], |x| x[0].squeeze(1)?.unsqueeze(2)?.squeeze(D::Minus1));
}

/// If x is multiplied by a detached x, the gradient is half of the gradient of x². The same holds for a detached view
/// of x.
#[test]
fn detached_tensors_are_constants() {
    let error_of = |f: fn(&Tensor) -> Result<Tensor>| gradient_check(&[&[2, 3]], &[], |x, _| f(&x[0])).unwrap();
    for error in [error_of(|x| x * x.detach()), error_of(|x| x * (x.detach().t()?.exp()?.log()?.t())?)] {
        assert!((error.finite_difference - 0.5).abs() <= 1e-6 && error.kernel <= KERNEL, "{error:?}");
    }
    check(&[&[2, 3], &[2, 3]], |x| &x[0] * x[1].detach());
    let error = refused(&[&[2, 3]], |x| x[0].detach().sqr());
    assert_eq!(error, Error::NothingToTrain.to_string());
}

#[test]
fn reductions() {
    check(&[&[2, 3, 4]], |x| x[0].sum((0, 2))?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].mean((2, 1))?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].mean_keepdim(D::Minus1)?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].var(1));
    check(&[&[2, 3, 4]], |x| x[0].var_keepdim(2)?.sqrt());
    check(&[&[2, 3, 4]], |x| x[0].norm());
    check(&[&[2, 3, 4]], |x| x[0].max(1)?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].min_keepdim(D::Minus1)?.sqr());
    check(&[&[3, 4]], |x| x[0].max_all()? * x[0].min_all()?);
    check(&[&[2, 3, 4]], |x| x[0].log_sum_exp((1, 2)));
    check(&[&[2, 3, 4]], |x| x[0].log_sum_exp(0));
    check(&[&[2, 3, 4]], |x| x[0].cumsum(1)?.sqr());
    check(&[&[5]], |x| x[0].cumsum(0)?.sqr());
    // An index has no gradient, but it can select elements that have gradients.
    check(&[&[3, 5]], |x| x[0].gather(&x[0].argmin_keepdim(1)?, 1));
    check(&[&[3, 5]], |x| x[0].index_select(&x[0].argmax(0)?, 0)?.sqr());
}

#[test]
fn functions_of_rows() {
    check(&[&[2, 3, 4]], |x| ops::softmax(&x[0], 1));
    check(&[&[2, 3, 4]], |x| ops::log_softmax(&x[0], D::Minus1));
    check(&[&[2, 3, 4]], |x| ops::log_softmax(&x[0], 0));
    check(&[&[4, 5]], |x| loss::nll(&ops::log_softmax(&x[0], 1)?, &Tensor::new(&[1u32, 0, 4, 4], x[0].device())?));
    check(&[&[4, 5]], |x| loss::cross_entropy(&x[0], &Tensor::new(&[1u32, 0, 4, 4], x[0].device())?));
    check(&[&[4, 5], &[4, 5]], |x| loss::mse(&x[0], &x[1]));
    check(&[&[4, 5], &[4, 5]], |x| loss::huber(&x[0], &x[1], 0.7));
    check(&[&[4, 5], &[4, 5]], |x| loss::binary_cross_entropy_with_logit(&x[0], &x[1].sigmoid()?));
}

#[test]
fn layers() {
    check(&[&[2, 6, 5], &[6], &[6]], |x| nn::GroupNorm::new(x[1].clone(), x[2].clone(), 6, 3, 1e-5)?.forward(&x[0]));
    check(&[&[2, 3], &[4, 3]], |x| {
        let layer = nn::Linear::new(x[1].clone(), None, "proj");
        nn::seq().add(layer).add(Activation::Silu).add(|x: &Tensor| x.sqr()).forward(&x[0])
    });
    check(&[&[8, 4]], |x| x[0].apply_t(&nn::Dropout::new(0.3), true)?.apply_t(&nn::Dropout::new(0.3), false));
    // More elements than a kernel's block has, in runs that do not divide it.
    let part = Window::of(&[40, 300], vec![vec![3..40], vec![100..233]]).spread();
    check(&[&[37, 133]], |x| Tensor::apply_op::<1>(Dropout { p: 0.3, key: 1, part }, &[&x[0]]).map(|[y]| y));
    check(&[&[37, 133]], |x| Tensor::apply_op::<1>(Jitter { amount: 0.3, key: 1, part }, &[&x[0]]).map(|[y]| y));
    check(&[&[3, 4], &[5, 2]], |x| x[0].broadcast_matmul(&x[1].reshape((5, 1, 2))?.broadcast_as((5, 4, 2))?));
    check(&[&[2, 3, 4], &[4, 2]], |x| x[0].broadcast_matmul(&x[1]));
}

#[test]
fn convolutions() {
    // (length, kernel, padding, stride, dilation, groups)
    for (length, kernel, padding, stride, dilation, groups) in
        [(7, 3, 1, 1, 1, 1), (8, 2, 0, 2, 1, 1), (9, 3, 2, 2, 2, 2), (6, 3, 1, 2, 1, 4), (5, 1, 0, 3, 1, 1)]
    {
        check(&[&[2, 4, length], &[4, 4 / groups, kernel], &[4]], |x| {
            let config = nn::Conv1dConfig { padding, stride, dilation, groups };
            nn::Conv1d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        });
    }
    for (size, padding, stride, groups) in [(2, 0, 2, 1), (3, 1, 1, 1), (3, 1, 2, 2)] {
        check(&[&[2, 2, 6, 4], &[4, 2 / groups, size, size]], |x| x[0].conv2d(&x[1], padding, stride, 1, groups));
    }
}

#[test]
fn attention_of_every_kind() {
    let heads: &[&[usize]] = &[&[2, 4, 5, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]];
    check(heads, |x| x[0].attention(&x[1], &x[2], 0.3));
    check(heads, |x| x[0].sliding_attention(&x[1], &x[2], 2, 0.3));
    check(heads, |x| x[0].sliding_attention(&x[1], &x[2], 9, 0.3));
    check(heads, |x| {
        let mask = Tensor::new(&[[1u8, 1, 0, 1, 0], [1, 0, 0, 0, 0]], x[0].device())?.reshape((2, 1, 1, 5))?;
        x[0].masked_attention(&x[1], &x[2], &mask, 0.3)
    });
    check(&[&[2, 4, 5, 8], &[2, 2, 5, 8], &[4, 5, 5]], |x| {
        ops::sdpa(&x[0], &x[1], &x[1], Some(&x[2]), false, 0.3, 1.0)
    });
    check(heads, |x| ops::sdpa(&x[0], &x[1], &x[2], None, true, 0.3, 1.0));
}

#[test]
fn rotations_by_tables() {
    let tables = |x: &Tensor| -> Result<_> {
        let angles = Tensor::arange(0f32, 20.0, x.device())?.reshape((5, 4))?;
        Ok((angles.cos()?, angles.sin()?))
    };
    for rotate in [rotary_emb::rope, rotary_emb::rope_i] {
        check(&[&[2, 3, 4, 8]], |x| {
            let (cos, sin) = tables(&x[0])?;
            rotate(&x[0], &cos, &sin)
        });
    }
}

/// A mask or an index is a constant for everything that is computed from it, as in candle.
#[test]
fn gradients_end_at_masks_and_indices() {
    check(&[&[3, 4]], |x| x[0].gt(0.0)?.to_dtype(DType::F32)? * &x[0]);
    check(&[&[3, 4]], |x| x[0].argmax_keepdim(1)?.to_dtype(DType::F32)?.broadcast_as((3, 4))? * &x[0]);
}

/// Constants have no gradient to check. The same expression gives the same values here and in candle.
#[test]
fn constants_are_those_of_candle() {
    use std::sync::{Arc, Mutex};

    let graph = Arc::new(Mutex::new(gapless_engine::graph::Graph::default()));
    let vb = nn::VarBuilder::new(&graph, DType::F32);
    let data = |x: Tensor| gapless_engine::graph::lock(&graph).data(x.id()).expect("it is constant");
    let theirs =
        |x: candle_core::Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    macro_rules! same {
        ($($made:ident($($argument:expr),*)),*) => {
            $(assert_eq!(
                data(Tensor::$made($($argument,)* vb.device()).unwrap()),
                theirs(candle_core::Tensor::$made($($argument,)* &Host::Cpu).unwrap()),
            );)*
        };
    }
    same!(
        arange(2u32, 7u32),
        arange_step(1f32, 2.0, 0.25),
        eye(3, DType::F32),
        tril2(4, DType::F32),
        triu2(4, DType::U8)
    );
    same!(zeros((2, 3), DType::F32), ones((2, 3), DType::F32), full(0.5f32, (2, 2)), new(&[[1f32, 2.0], [3.0, 4.0]]));
    assert!(Tensor::new(&[-1i64], vb.device()).is_err());
    assert!(matches!(vb.get((2, 3), "x").unwrap().dims3(), Err(Error::Shape { .. })));
}
