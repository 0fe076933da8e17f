//! attention.cu, and with bf16 attention_tensor_cores.cu.

use super::judge::check;
use crate::Tensor;
use crate::ops::Attention;

/// Tokens below, at and above those of tiles; heads of all forms and of odd sizes; heads that share keys; more keys than
/// queries.
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
        // More than a block of tensor cores has, and sizes that can be moved 16 bytes at a time.
        (1, 2, 1, 140, 140, 16),
        (1, 1, 1, 66, 130, 104),
        (1, 1, 1, 70, 70, 256),
    ];
    for (batch, heads, kv_heads, queries, keys, size) in shapes {
        for causal in [false, true] {
            let attention = Attention { scale: 1.0 / (size as f64).sqrt(), causal };
            // Tokens in front of heads, in memory, as projections leave them.
            let (q, kv) = ([batch, queries, heads, size], [batch, keys, kv_heads, size]);
            check(&["attention", "attention_grad"], &[&q, &kv, &kv], &[], |x, _| {
                let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
                let [out, _] = Tensor::apply_op(attention, &[&q, &k, &v])?;
                Ok(out)
            });
        }
    }
}
