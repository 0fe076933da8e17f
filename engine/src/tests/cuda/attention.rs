//! Tests of attention.cu and, for bf16, of attention_tensor_cores.cu.

use candle_core::{DType, Layout};
use gapless_testing::{every_other, few};

use super::judge::check;
use crate::Tensor;
use crate::cuda::launch::{Scores, attention, attention_grad};
use crate::cuda::{Features, Launch, Operand, Operands, Random};
use crate::graph::{Sequences, lock};
use crate::ops::Attention;
use gapless_kernels::Fold;

/// Names of the kernels for 2 × 3 heads, forward and backward, with their blocks and shared memory. Operands begin `behind` bytes after
/// a pack.
fn kernels(
    tokens: usize,
    size: usize,
    dtype: DType,
    warpgroups: bool,
    behind: u64,
) -> Vec<(String, [u32; 3], u32, u32)> {
    let at = |index: u64, dims: &[usize]| {
        let address = (index << 20) + behind;
        Operand { address, layout: Layout::contiguous(dims), dtype }
    };
    let (heads, statistics) = ([2, 3, tokens, size], [2, 3, tokens]);
    let inputs: Vec<Operand> = (1..7).map(|index| at(index, if index == 5 { &statistics } else { &heads })).collect();
    // By tokens, then heads, as all outputs of heads.
    let outputs: Vec<Operand> = (7..10).map(|index| at(index, &[2, tokens, 3, size])).collect();
    let operands = Operands {
        inputs: &inputs[..3],
        outputs: &[outputs[0].clone(), at(10, &statistics)],
        workspace: &[],
        accumulate: 0,
        tickets: 0,
        random: Random { key: 0, micro_batch: 0 },
        features: Features { warpgroups, tf32: false },
    };
    let scores = Scores { scale: 1.0, cap: 0.0, is_causal: true, window: None, chunk: None, places: None };
    let forward = attention(scores, &operands).unwrap();
    let operands = Operands { inputs: &inputs, outputs: &outputs, workspace: &[11 << 20], ..operands };
    let launches = forward.into_iter().chain(attention_grad(scores, &operands).unwrap());
    let kernel = |launch| match launch {
        Launch::Kernel(kernel) => (kernel.name, kernel.grid, kernel.block, kernel.shared_bytes),
        other => panic!("{other:?}"),
    };
    launches.map(kernel).collect()
}

/// Devices with `wgmma` use it if rows consist of packs and there are enough registers.
#[test]
fn kernels_are_those_of_the_device() {
    let of = |size, warpgroups, behind| kernels(1024, size, DType::BF16, warpgroups, behind);
    let names = |all: Vec<(String, [u32; 3], u32, u32)>| all.into_iter().map(|kernel| kernel.0).collect::<Vec<_>>();
    let warpgroups = [
        ("attention_wg_64".to_owned(), [3, 2, 8], 256, 50176),
        ("attention_wg_grad_q_64".to_owned(), [3, 2, 8], 256, 82944),
        ("attention_wg_grad_kv_64".to_owned(), [3, 2, 8], 256, 86016),
    ];
    assert_eq!(of(64, true, 0), warpgroups);
    // With many blocks, those of a sequence follow each other in the kernel of dk and dv.
    let grids = kernels(64 * 1024, 64, DType::BF16, true, 0).into_iter().map(|kernel| kernel.1);
    assert!(grids.eq([[3, 2, 512], [3, 2, 512], [3, 512, 2]]));
    let of_all = ["attention_tc_64", "attention_tc_grad_q_64", "attention_tc_grad_kv_64"];
    assert_eq!(of(64, false, 0)[0], (of_all[0].to_owned(), [8, 3, 2], 128, 55296));
    assert_eq!(names(of(64, false, 0)), of_all);
    assert_eq!(names(of(64, true, 2)), of_all);
    assert_eq!(names(of(36, true, 0)), of_all);
    assert_eq!(
        names(of(256, true, 0)),
        ["attention_wg_256", "attention_tc_grad_q_256", "attention_tc_grad_v_256", "attention_tc_grad_k_256"]
    );
    assert_eq!(names(kernels(9, 128, DType::BF16, true, 0))[2], "attention_wg_grad_kv_128");
    assert_eq!(names(kernels(9, 64, DType::F32, true, 0))[0], "attention_64_f32");
    // The shared memory that a block of an H100 may have.
    for size in [64, 128, 256] {
        assert!(of(size, true, 0).iter().all(|kernel| kernel.3 <= 227 << 10));
    }
}

/// Token counts below, at and above the tile size; all tile forms and odd head sizes; shared key heads; more keys than
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
        // Several blocks of warpgroups, all stages of tiles, the last of each in part.
        (1, 2, 1, 140, 200, 64),
        (1, 2, 2, 18, 33, 130),
        // These have more tokens than a block of the tensor-core kernels, and sizes that are moved 16 bytes at a
        // time.
        (1, 2, 1, 140, 140, 16),
        (1, 1, 1, 66, 130, 104),
        (1, 1, 1, 70, 70, 256),
        // Whole tiles and blocks.
        (1, 2, 1, 256, 256, 64),
        (1, 1, 1, 200, 200, 128),
        (1, 1, 1, 1, 400, 32),
        (1, 1, 1, 200, 200, 192),
    ];
    for (turn, &(batch, heads, kv_heads, queries, keys, size)) in few(&shapes, 6).iter().enumerate() {
        for causal in every_other(&[false, true], turn) {
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

/// Sinks, with whole sequences and with packed documents, over strided heads and values of another size.
#[test]
fn sinks_take_part_in_the_softmax() {
    for (is_packed, of_v) in [(false, 8), (true, 6)] {
        let starts: &[(&[usize], &[u32])] = &[(&[2, 9], &[0, 0, 0, 3, 3, 3, 3, 7, 7, 0, 0, 2, 2, 2, 2, 2, 2, 8])];
        let ids = if is_packed { starts } else { &[] };
        let shapes: [&[usize]; 4] = [&[2, 9, 4, 8], &[2, 9, 2, 8], &[2, 9, 2, of_v], &[4]];
        check(&["attention", "sink_attention", "attention_grad"], &shapes, ids, |x, ids| {
            let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
            if is_packed {
                let id = ids[0].id();
                // Attention reads only the starts.
                let sequences = Sequences::Packed { document_starts: id, positions: id, weights: id, routed: id };
                lock(x[0].graph()).set_sequences(sequences);
            }
            q.attend_with_sinks(&k, &v, &x[3], Attention::causal(0.3))
        });
    }
}

/// Windows, packed documents, capped scores and a different value size, over several tiles of keys and queries.
#[test]
fn windows_documents_caps_and_value_sizes_match_the_reference() {
    let causal = Attention::causal(0.3);
    let window = |window| Attention { window: Some(window), ..causal };
    let chunk = |chunk| Attention { chunk: Some(chunk), ..causal };
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
        (causal, 40, 70, 24, 120, None),
        (chunk(40), 150, 150, 16, 16, None),
        (chunk(90), 200, 230, 64, 64, None),
        (cap(chunk(7)), 150, 150, 72, 64, Some(starts(150))),
        (window(70), 200, 230, 64, 64, None),
        (causal, 200, 200, 64, 48, Some(starts(200))),
        (cap(window(90)), 200, 200, 128, 128, Some(starts(200))),
        (Attention::full(0.2), 140, 200, 100, 64, None),
        // Maxima grow by more than exponents have room for.
        (Attention::causal(1.5), 200, 200, 64, 64, None),
    ];
    for &(how, queries, keys, size, of_v, ref starts) in few(&cases, 3) {
        // Large cases have one sequence and one key head, to save time.
        let count = if queries * size > 8_000 { 1 } else { 2 };
        let (q, k, v) = ([count, queries, 2 * count, size], [count, keys, count, size], [count, keys, count, of_v]);
        let tokens = [count, queries];
        let starts = starts.as_ref().map(|starts| &starts[..count * queries]);
        let ids: Vec<(&[usize], &[u32])> = starts.iter().map(|starts| (&tokens[..], *starts)).collect();
        check(&["attention", "attention_grad"], &[&q, &k, &v], &ids, |x, ids| {
            let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
            let inputs: Vec<&Tensor> = [&q, &k, &v].into_iter().chain(ids).collect();
            let [out, _] = Tensor::apply_op(how, &inputs)?;
            Ok(out)
        });
    }
}

/// Queries that are a rank's chunks of the keys' sequence: chunks that end within tiles and at their ends, and that span
/// several blocks; the first and the last rank, whose chunks touch; windows and documents.
#[test]
fn chunks_see_the_keys_up_to_their_places() {
    // (tokens, (ranks, rank), rounds, head size, window, whether there are documents)
    let cases = [
        (48, (2, 1), 3, 8, None, false),
        // No query sees the keys of some blocks.
        (512, (4, 0), 1, 16, Some(33), true),
        (320, (2, 0), 1, 64, None, true),
        (192, (4, 2), 2, 80, Some(50), false),
        (12, (3, 2), 1, 16, None, true),
        (320, (4, 1), 2, 80, Some(50), true),
        (640, (2, 0), 5, 128, Some(33), false),
        (272, (2, 1), 1, 256, None, true),
        (1024, (4, 0), 1, 64, Some(200), true),
    ];
    for &(tokens, part, rounds, size, window, has_documents) in few(&cases, 4) {
        let fold = Fold::new(tokens, part, rounds).unwrap();
        let queries = tokens / part.0;
        let attention = Attention { window, places: Some(fold), ..Attention::causal(0.3) };
        let starts: Vec<u32> = (0..queries).map(|query| (fold.place(query) / 37 * 37) as u32).collect();
        let shape = [1, queries];
        let ids: Vec<(&[usize], &[u32])> = has_documents.then_some((&shape[..], &starts[..])).into_iter().collect();
        check(
            &["attention", "attention_grad"],
            &[&[1, queries, 2, size], &[1, tokens, 1, size], &[1, tokens, 1, size]],
            &ids,
            |x, ids| {
                let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
                let inputs: Vec<&Tensor> = [&q, &k, &v].into_iter().chain(ids).collect();
                let [out, _] = Tensor::apply_op(attention, &inputs)?;
                Ok(out)
            },
        );
    }
}
