//! Tests of attention.cu and, for bf16, of attention_tensor_cores.cu.

use gapless_testing::few;

use super::judge::check;
use crate::Tensor;
use crate::ops::Attention;

/// The shapes cover token counts below, at and above the tile size, all tile forms, odd head sizes, shared key heads,
/// and more keys than queries.
#[test]
fn forward_and_backward() {
    // (batch, heads, key heads, queries, keys, head size)
    let shapes = [
        (1, 1, 1, 1, 1, 3),
        (2, 2, 2, 33, 33, 8),
        (1, 4, 2, 40, 71, 5),
        (1, 3, 1, 20, 20, 64),
        (1, 2, 1, 35, 35, 80),
        (1, 2, 2, 18, 33, 130),
        // These have more tokens than a block of the tensor-core kernels, and sizes that are moved 16 bytes at a
        // time.
        (1, 2, 1, 140, 140, 16),
        (1, 1, 1, 66, 130, 104),
        (1, 1, 1, 70, 70, 256),
    ];
    for &(batch, heads, kv_heads, queries, keys, size) in few(&shapes, 5) {
        for causal in [false, true] {
            let attention = Attention { causal, ..Attention::full(1.0 / (size as f64).sqrt()) };
            // In memory, the token dimension comes before the head dimension, as in the results of projections.
            let (q, kv) = ([batch, queries, heads, size], [batch, keys, kv_heads, size]);
            check(&["attention", "attention_grad"], &[&q, &kv, &kv], &[], |x, _| {
                let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
                let [out, _] = Tensor::apply_op(attention, &[&q, &k, &v])?;
                Ok(out)
            });
        }
    }
}

/// Windows, packed documents, capped scores and a different value size, over several tiles of keys and queries.
#[test]
fn windows_documents_caps_and_value_sizes_match_the_reference() {
    let causal = Attention::causal(0.3);
    let window = |window| Attention { window: Some(window), ..causal };
    let cap = |of: Attention| Attention { cap: Some(0.8), ..of };
    // (attention, queries, keys, head size, value size, document starts)
    let starts = |tokens: u32| (0..2 * tokens).map(|i| i % tokens / 37 * 37).collect::<Vec<u32>>();
    let cases = [
        (window(1), 20, 20, 8, 8, None),
        (window(50), 150, 150, 16, 16, None),
        (window(40), 70, 130, 80, 80, None),
        (cap(Attention::full(0.3)), 40, 70, 16, 16, None),
        (cap(causal), 140, 140, 16, 16, None),
        (causal, 40, 70, 20, 10, None),
        (causal, 70, 70, 16, 200, None),
        (cap(window(33)), 150, 150, 72, 64, None),
        (causal, 150, 150, 16, 16, Some(starts(150))),
        (cap(window(20)), 80, 80, 130, 24, Some(starts(80))),
    ];
    for &(how, queries, keys, size, of_v, ref starts) in few(&cases, 3) {
        let (q, k, v) = ([2, queries, 4, size], [2, keys, 2, size], [2, keys, 2, of_v]);
        let tokens = [2, queries];
        let ids: Vec<(&[usize], &[u32])> = starts.iter().map(|starts| (&tokens[..], &starts[..])).collect();
        check(&["attention", "attention_grad"], &[&q, &k, &v], &ids, |x, ids| {
            let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
            let inputs: Vec<&Tensor> = [&q, &k, &v].into_iter().chain(ids).collect();
            let [out, _] = Tensor::apply_op(how, &inputs)?;
            Ok(out)
        });
    }
}
