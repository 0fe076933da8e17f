//! Every operation of a model's step has kernels.

use candle_core::DType;

use super::host;
use super::judge::without_kernels;

/// A block of each kind of model, with its loss.
#[test]
fn all_of_a_models_step_has_kernels() {
    if !host::is_there() {
        return;
    }
    let (batch, tokens, heads, size, vocabulary) = (2, 5, 2, 4, 11);
    let width = heads * size;
    let ids: Vec<u32> = (0..(batch * tokens) as u32).map(|i| i * 7 % vocabulary as u32).collect();
    let targets: Vec<u32> = ids.iter().map(|id| (id + 3) % vocabulary as u32).collect();
    let shapes: [&[usize]; 7] = [
        &[vocabulary, width],
        &[width],
        &[width],
        &[3 * width, width],
        &[3 * width],
        &[4 * width, width],
        &[width, 4 * width],
    ];
    let dims = [batch, tokens];
    for dtype in [DType::F32, DType::BF16] {
        let without = without_kernels(dtype, &shapes, &[(&dims, &ids), (&dims, &targets)], |x, ids| {
            let hidden = x[0].embedding(&ids[0])?.dropout(0.1)?;
            let qkv = hidden.layer_norm(&x[1], &x[2], 1e-5)?.linear(&x[3], Some(&x[4]))?;
            let heads_of = |part: usize| qkv.narrow(2, part * width, width)?.reshape((batch, tokens, heads, size));
            let (q, k) = (heads_of(0)?.rope(1e4)?.transpose(1, 2)?, heads_of(1)?.rope(1e4)?.transpose(1, 2)?);
            let attended = q.causal_attention(&k, &heads_of(2)?.transpose(1, 2)?, 0.5)?;
            let hidden = hidden.add(&attended.reshape((batch, tokens, width))?)?;
            let wide = hidden.rms_norm(&x[1], 1e-5)?.linear(&x[5], None)?;
            let hidden = hidden.add(&wide.gelu()?.swiglu(&wide)?.linear(&x[6], None)?)?;
            let fused = hidden.linear_cross_entropy(&x[0], &ids[1])?.mean_all()?;
            let plain = hidden.linear(&x[0], None)?.cross_entropy(&ids[1])?.mean_all()?;
            fused.add(&plain)?.to_dtype(dtype)
        });
        assert!(without.is_empty(), "{without:?} have no kernels for {dtype:?}");
    }
}
