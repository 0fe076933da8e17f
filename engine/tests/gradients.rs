//! Every operation compared with its references: gradients with finite differences in f64, kernels with the f64
//! reference.

use gapless_engine::LossTerms;
use gapless_engine::kernels::cpu::quantized::{Format, OwnedScales, Rounding, quantize};
use gapless_engine::ops::{
    Attention, CrossEntropy, LinearCrossEntropy, QuantizedWeight, Rope, RopeScaling, WeightSquares,
};
use gapless_engine::{DType, Result, Tensor, gradient_check};

/// The tolerance of gradients: central differences in f64 have errors of about 1e-9. The errors of f32 kernels are a
/// multiple of 2⁻²⁴ = 6e-8.
const FINITE_DIFFERENCE: f64 = 1e-6;
const KERNEL: f64 = 1e-5;

fn check(shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    check_ids(shapes, &[], |x, _| f(x));
}

fn check_ids(shapes: &[&[usize]], ids: &[(&[usize], &[u32])], f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>) {
    let error = gradient_check(shapes, ids, f).unwrap();
    assert!(error.finite_difference <= FINITE_DIFFERENCE, "{error:?}");
    assert!(error.kernel <= KERNEL, "{error:?}");
    assert!(error.bf16.is_some_and(|error| error <= 1.0), "{error:?}");
}

#[test]
fn functions_of_one_element() {
    let x: &[&[usize]] = &[&[3, 7]];
    check(x, |x| x[0].exp());
    check(x, |x| x[0].sqr()?.affine(1.0, 0.5)?.log());
    check(x, |x| x[0].sqr()?.affine(1.0, 0.5)?.sqrt());
    check(x, |x| x[0].sqr()?.affine(1.0, 0.5)?.recip());
    check(x, |x| x[0].tanh());
    check(x, |x| x[0].sigmoid());
    check(x, |x| x[0].relu());
    check(x, |x| x[0].silu());
    check(x, |x| x[0].gelu());
    check(x, |x| x[0].gelu_erf());
    check(x, |x| x[0].neg()?.affine(3.0, -2.0));
}

#[test]
fn functions_of_two_elements() {
    let pair: &[&[usize]] = &[&[3, 4], &[3, 4]];
    check(pair, |x| x[0].add(&x[1]));
    check(pair, |x| x[0].sub(&x[1]));
    check(pair, |x| x[0].mul(&x[1]));
    check(pair, |x| x[0].div(&x[1].sqr()?.affine(1.0, 0.5)?));
    check(pair, |x| x[0].swiglu(&x[1]));
    check(&[&[5]], |x| x[0].mul(&x[0])?.add(&x[0]));
}

#[test]
fn broadcasting() {
    check(&[&[2, 3, 4], &[4]], |x| x[0].broadcast_add(&x[1]));
    check(&[&[2, 3, 4], &[3, 1]], |x| x[0].broadcast_mul(&x[1]));
    check(&[&[2, 1, 4], &[3, 1]], |x| x[0].broadcast_sub(&x[1]));
    check(&[&[1], &[2, 3]], |x| x[1].broadcast_div(&x[0].sqr()?.affine(1.0, 0.5)?));
}

/// The tensors in which a weight is stored, as constants of the graph of `x`.
fn stored(weight: &QuantizedWeight, x: &Tensor) -> Result<Vec<Tensor>> {
    let elements: Vec<f32> = (0..weight.outputs * weight.inputs).map(|i| (i as f32 * 0.7).sin()).collect();
    let quantized = quantize(weight.format, &elements, weight.inputs);
    let host = &candle_core::Device::Cpu;
    let tensor = |data: candle_core::Tensor| Tensor::from_candle(&data, x.device());
    let bytes = |data: &[u8]| candle_core::Tensor::from_slice(data, data.len(), host);
    let floats = |data: &[f32]| candle_core::Tensor::from_slice(data, data.len(), host);
    let mut all = vec![bytes(&quantized.codes)];
    match &quantized.scales {
        OwnedScales::Plain(scales) => all.push(floats(scales)),
        OwnedScales::Double { codes, nested, offset } => all.extend([bytes(codes), floats(nested), floats(&[*offset])]),
    }
    all.into_iter().map(|data| tensor(data.unwrap())).collect()
}

#[test]
fn quantized_weights() {
    for (outputs, inputs) in [(5, 24), (7, 9), (300, 8)] {
        for format in [Format::Int8, Format::Nf4 { is_double: false }, Format::Nf4 { is_double: true }] {
            let weight = QuantizedWeight { outputs, inputs, format, rounding: Rounding::None, blocks: None };
            check(&[&[2, 3, inputs]], |x| x[0].quantized_linear(weight, &stored(&weight, &x[0])?, None));
            check(&[&[2, inputs], &[outputs, 2], &[3, outputs]], |x| {
                let stored = stored(&weight, &x[0])?;
                let inputs: Vec<&Tensor> = x[..2].iter().chain(&stored).collect();
                let [squares] = Tensor::apply_op(WeightSquares { scale: 0.5, quantized: Some(weight) }, &inputs)?;
                x[2].broadcast_mul(&squares.sqrt()?.to_dtype(x[0].dtype())?)
            });
        }
        check(&[&[2, inputs], &[outputs, 2], &[outputs, inputs], &[3, outputs]], |x| {
            let [squares] = Tensor::apply_op(WeightSquares { scale: 0.5, quantized: None }, &[&x[0], &x[1], &x[2]])?;
            x[3].broadcast_mul(&squares.sqrt()?.to_dtype(x[0].dtype())?)
        });
    }
}

#[test]
fn views() {
    check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2)?.reshape((4, 6)));
    check(&[&[2, 6]], |x| x[0].narrow(1, 2, 3)?.mul(&x[0].narrow(1, 0, 3)?));
    check(&[&[2, 9]], |x| {
        let parts = x[0].chunk(3, 1)?;
        parts[0].mul(&parts[1])?.add(&parts[2])
    });
    check(&[&[2, 6]], |x| x[0].reshape((2, 2, 3))?.transpose(1, 2)?.contiguous());
    check(&[&[2, 3]], |x| x[0].unsqueeze(1)?.broadcast_as((2, 4, 3)));
    check(&[&[2, 3], &[2, 5]], |x| Tensor::cat(&[&x[0], &x[1], &x[0]], 1));
    check(&[&[3, 4], &[4, 2]], |x| Tensor::cat(&[&x[0].t()?, &x[1]], 1));
}

#[test]
fn reductions() {
    check(&[&[2, 3, 4]], |x| x[0].sum(0));
    check(&[&[2, 3, 4]], |x| x[0].sum_keepdim(1)?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].mean_keepdim(2)?.sqr());
    check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2)?.sum(1)?.sqr());
    check(&[&[2, 3]], |x| x[0].sum_all()?.sqr());
    check(&[&[4, 3]], |x| x[0].sqr()?.mean_all());
    check(&[&[3, 5]], |x| x[0].softmax_last_dim());
}

#[test]
fn normalisation() {
    check(&[&[2, 3, 20], &[20], &[20]], |x| x[0].layer_norm(&x[1], &x[2], 1e-5));
    check(&[&[2, 3, 20], &[20]], |x| x[0].rms_norm(&x[1], 1e-5));
}

#[test]
fn products() {
    check(&[&[3, 4], &[4, 5]], |x| x[0].matmul(&x[1]));
    check(&[&[2, 3, 4], &[2, 5, 4]], |x| x[0].matmul(&x[1].t()?));
    check(&[&[2, 3, 2, 4], &[2, 3, 4, 5]], |x| x[0].matmul(&x[1]));
    check(&[&[2, 4, 3, 5], &[2, 3, 5, 4]], |x| x[0].transpose(1, 2)?.matmul(&x[1])?.sqr());
    check(&[&[2, 3, 4], &[5, 4]], |x| x[0].linear(&x[1], None));
    check(&[&[2, 3, 4], &[5, 4], &[5]], |x| x[0].linear(&x[1], Some(&x[2])));
    check(&[&[3, 4], &[5, 4], &[5]], |x| x[0].linear(&x[1], Some(&x[2]))?.linear(&x[1].t()?.contiguous()?, None));
}

#[test]
fn rotation() {
    check(&[&[2, 2, 3, 8]], |x| x[0].rope(100.0));
    check(&[&[2, 3, 2, 8]], |x| x[0].transpose(1, 2)?.rope(100.0)?.sqr());
    let yarn = RopeScaling::yarn(4.0, (32.0, 1.0), 16.0, 100.0, 8, true);
    for scaling in [RopeScaling::Linear { factor: 3.0 }, yarn] {
        check(&[&[2, 2, 5, 8]], |x| x[0].rope_scaled(100.0, scaling));
        check(&[&[2, 2, 5, 8]], |x| x[0].rope_i_scaled(100.0, scaling));
    }
    // At given positions.
    let op = Rope { frequencies: RopeScaling::None.frequencies(100.0), neighbours: false, inverse: false };
    check_ids(&[&[2, 3, 2, 8]], &[(&[2, 3], &[0, 1, 0, 7, 8, 0])], |x, ids| {
        Tensor::apply_op(op, &[&x[0], &ids[0]]).map(|[rotated]| rotated)
    });
}

#[test]
fn attention() {
    // Equal heads, grouped heads, and a packed qkv read through strides.
    check(&[&[2, 2, 5, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]], |x| x[0].causal_attention(&x[1], &x[2], 0.3));
    check(&[&[1, 4, 3, 8], &[1, 2, 3, 8], &[1, 2, 3, 8]], |x| x[0].causal_attention(&x[1], &x[2], 0.3));
    // Documents are packed into a sequence. A start after a token's own position counts as that position.
    let shapes: &[&[usize]] = &[&[2, 4, 5, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]];
    let starts: (&[usize], &[u32]) = (&[2, 5], &[0, 0, 2, 2, 4, 0, 1, 1, 1, 9]);
    check_ids(shapes, &[starts], |x, ids| x[0].document_attention(&x[1], &x[2], &ids[0], 0.3));
    // There are windows, capped scores, and values of another size than keys. All of them are also tested with packed
    // documents.
    let how = Attention { window: Some(2), cap: Some(0.5), ..Attention::causal(0.3) };
    let of_another_size: &[&[usize]] = &[&[2, 4, 5, 8], &[2, 2, 5, 8], &[2, 2, 5, 3]];
    for how in [
        Attention { window: None, ..how },
        Attention { cap: None, ..how },
        how,
        Attention { window: None, causal: false, ..how },
    ] {
        check(of_another_size, |x| x[0].attend(&x[1], &x[2], how));
    }
    check_ids(of_another_size, &[starts], |x, ids| {
        Tensor::apply_op::<2>(how, &[&x[0], &x[1], &x[2], &ids[0]]).map(|[out, _]| out)
    });
    // Heads whose elements are strided are copied first.
    check(&[&[1, 2, 8, 5], &[1, 2, 5, 8]], |x| x[0].transpose(2, 3)?.causal_attention(&x[1], &x[1], 0.3));
    check(&[&[2, 5, 48]], |x| {
        let heads = |i: usize| x[0].narrow(2, 16 * i, 16)?.reshape((2, 5, 2, 8))?.transpose(1, 2);
        heads(0)?.causal_attention(&heads(1)?, &heads(2)?, 0.3)?.transpose(1, 2)?.reshape((2, 5, 16))
    });
    // A sink for each head.
    let with_sinks: &[&[usize]] = &[&[2, 4, 3, 6], &[2, 2, 3, 6], &[2, 2, 3, 4], &[4]];
    for how in [Attention { window: Some(2), ..Attention::causal(0.3) }, Attention::causal(0.3)] {
        check(with_sinks, |x| x[0].attend_with_sinks(&x[1], &x[2], &x[3], how));
    }
}

#[test]
fn lookups_and_losses() {
    check_ids(&[&[7, 4]], &[(&[2, 3], &[1, 0, 6, 1, 1, 3])], |x, ids| x[0].embedding(&ids[0]));
    check_ids(&[&[2, 3, 7]], &[(&[2, 3], &[1, 0, 6, 1, 2, 3])], |x, ids| x[0].cross_entropy(&ids[0]));
    check_ids(&[&[2, 3, 7]], &[(&[2, 3], &[1, 0, 6, 1, 2, 3])], |x, ids| x[0].cross_entropy(&ids[0])?.mean_all());
}

#[test]
fn a_head_fused_with_its_loss() {
    let ids: &[(&[usize], &[u32])] = &[(&[2, 3], &[1, 0, 6, 1, 2, 3])];
    // If each loss has its own gradient, the head's gradient is computed in the backward. If all losses have the same
    // gradient, it is computed in the forward.
    check_ids(&[&[2, 3, 5], &[7, 5]], ids, |x, ids| x[0].linear_cross_entropy(&x[1], &ids[0]));
    check_ids(&[&[2, 3, 5], &[7, 5]], ids, |x, ids| x[0].linear_cross_entropy(&x[1], &ids[0])?.mean_all());
    check_ids(&[&[2, 3, 5], &[7, 5]], ids, |x, ids| {
        x[0].linear_cross_entropy(&x[1], &ids[0])?.affine(-3.0, 1.0)?.sum(1)?.mean_all()
    });
    // A head that is tied to an embedding, and a head that is read through a view. x is an activation or, in the last
    // case, the row of one token.
    check_ids(&[&[7, 4]], ids, |x, ids| {
        x[0].embedding(&ids[0])?.gelu()?.linear_cross_entropy(&x[0], &ids[0])?.mean_all()
    });
    check_ids(&[&[2, 3, 5], &[5, 7]], ids, |x, ids| x[0].sqr()?.linear_cross_entropy(&x[1].t()?, &ids[0])?.mean_all());
    check_ids(&[&[5], &[7, 5]], &[(&[], &[2])], |x, ids| x[0].linear_cross_entropy(&x[1], &ids[0]));
    // The losses have weights, and one weight is zero. The second case takes the mean of the weighted losses.
    let weighed: &[(&[usize], &[u32])] = &[ids[0], (&[2, 3], &[1, 0, 2, 1, 3, 1])];
    let weighted = |x: &[Tensor], ids: &[Tensor]| {
        let weights = ids[1].to_dtype(DType::F32)?;
        Tensor::apply_op(LinearCrossEntropy::new(None), &[&x[0], &x[1], &ids[0], &weights]).map(|[losses]| losses)
    };
    check_ids(&[&[2, 3, 5], &[7, 5]], weighed, weighted);
    check_ids(&[&[2, 3, 5], &[7, 5]], weighed, |x, ids| weighted(x, ids)?.mean_all());
}

#[test]
fn smoothed_labels_the_z_loss_and_capped_logits() {
    let ids: &[(&[usize], &[u32])] = &[(&[2, 3], &[1, 0, 6, 1, 2, 3])];
    for terms in [LossTerms { label_smoothing: 0.2, z_loss: 0.0 }, LossTerms { label_smoothing: 0.1, z_loss: 0.3 }] {
        check_ids(&[&[2, 3, 7]], ids, |x, ids| {
            let [losses, _] = Tensor::apply_op(CrossEntropy { terms }, &[&x[0], &ids[0]])?;
            losses.mean_all()
        });
        for cap in [None, Some(0.5)] {
            let head = |x: &[Tensor], ids: &[Tensor]| {
                let head = LinearCrossEntropy::new(None).with_terms(terms).with_cap(cap);
                Tensor::apply_op(head, &[&x[0], &x[1], &ids[0]]).map(|[losses]| losses)
            };
            check_ids(&[&[2, 3, 5], &[7, 5]], ids, head);
            check_ids(&[&[2, 3, 5], &[7, 5]], ids, |x, ids| head(x, ids)?.mean_all());
            // The likelihoods are a separate output.
            let apart = |x: &[Tensor], ids: &[Tensor]| {
                let head = LinearCrossEntropy::new(None).with_terms(terms).with_cap(cap).with_likelihoods();
                Tensor::apply_op(head, &[&x[0], &x[1], &ids[0]]).map(|[losses, _]| losses)
            };
            check_ids(&[&[2, 3, 5], &[7, 5]], ids, apart);
            check_ids(&[&[2, 3, 5], &[7, 5]], ids, |x, ids| apart(x, ids)?.mean_all());
        }
    }
}

#[test]
fn dropout() {
    check(&[&[8, 16]], |x| x[0].dropout(0.3)?.sqr()?.dropout(0.5));
}

#[test]
fn tied_weights_sum_their_uses() {
    check_ids(&[&[7, 4]], &[(&[2, 3], &[1, 0, 6, 1, 1, 3])], |x, ids| {
        x[0].embedding(&ids[0])?.gelu()?.linear(&x[0], None)
    });
}
