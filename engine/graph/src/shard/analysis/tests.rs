//! The dimensions of parameters that are split in recorded models.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_kernels::Spec;

use super::*;
use crate::autodiff::differentiate;
use crate::graph::lock;
use crate::nn::{Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias, rms_norm};
use crate::ops::Attention;
use crate::{Result, Tensor};

const WIDTH: usize = 12;

/// Checks the indices of each dimension of each parameter that the second of two ranks holds.
fn check(expected: &[&str], model: impl Fn(&Tensor, &VarBuilder) -> Result<Tensor>) {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let input = |name| {
        let id = lock(&graph).add_input(name, Spec { shape: (2, 5).into(), dtype: DType::U32 }).unwrap();
        Tensor::of(&graph, id)
    };
    let x = model(&input("tokens"), &VarBuilder::new(&graph, DType::F32)).unwrap();
    let head = linear_no_bias(WIDTH, 7, VarBuilder::new(&graph, DType::F32).pp("head")).unwrap();
    let loss = head.cross_entropy(&x, &input("targets")).unwrap().mean_all().unwrap();
    let gradients = differentiate(&graph, &loss, 1.0).unwrap();
    let graph = lock(&graph);
    let pairs: Vec<(ValueId, ValueId)> =
        gradients.iter().flat_map(|g| g.summands.iter().map(|&summand| (g.parameter, summand))).collect();
    let analysis = Analysis::new(&graph, &pairs);
    let chosen = analysis.choose(&graph, 2, false);
    let parts: Parts = chosen.iter().flat_map(|split| split.parts(1)).collect();
    let mut found = Vec::new();
    for (id, name) in graph.persistent() {
        let window = analysis.window(id, &parts);
        if !window.is_whole() {
            let mut line = name.to_owned();
            for &dim in &analysis.shapes[id.index()] {
                write!(line, " {:?}", analysis.dims.held(dim, &parts)).unwrap();
            }
            found.push(line);
        }
    }
    assert_eq!(found, expected);
}

#[test]
fn heads_and_feed_forward_of_llama_are_split() {
    // Four query heads in two groups, of size 2. Norms and what adds to the residual stay whole
    // along the width.
    check(
        &[
            "embed.weight [4..8] [0..12]",
            "q.weight [4..8] [0..12]",
            "k.weight [2..4] [0..12]",
            "v.weight [2..4] [0..12]",
            "o.weight [0..12] [4..8]",
            "gate.weight [5..10] [0..12]",
            "up.weight [5..10] [0..12]",
            "down.weight [0..12] [5..10]",
            "head.weight [3..7] [0..12]",
        ],
        |tokens, vb| {
            let x = embedding(8, WIDTH, vb.pp("embed"))?.forward(tokens)?;
            let y = rms_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&x)?;
            let heads = |name: &str, heads: usize| {
                linear_no_bias(WIDTH, heads * 2, vb.pp(name))?.forward(&y)?.reshape((2, 5, heads, 2))
            };
            let (q, k) = (heads("q", 4)?.transpose(1, 2)?.rope(100.0)?, heads("k", 2)?.transpose(1, 2)?.rope(100.0)?);
            let v = heads("v", 2)?.transpose(1, 2)?;
            let y = q.causal_attention(&k, &v, 0.3)?.transpose(1, 2)?.reshape((2, 5, 8))?;
            let x = x.add(&linear_no_bias(8, WIDTH, vb.pp("o"))?.forward(&y)?)?;
            let y = rms_norm(WIDTH, 1e-5, vb.pp("norm2"))?.forward(&x)?;
            let gate = linear_no_bias(WIDTH, 10, vb.pp("gate"))?.forward(&y)?;
            let y = gate.swiglu(&linear_no_bias(WIDTH, 10, vb.pp("up"))?.forward(&y)?)?;
            x.add(&linear_no_bias(10, WIDTH, vb.pp("down"))?.forward(&y)?)
        },
    );
}

#[test]
fn the_fused_projection_of_gpt_is_split_by_heads() {
    check(
        &[
            "embed.weight [4..8] [0..12]",
            "qkv.weight [6..12, 18..24, 30..36] [0..12]",
            "qkv.bias [6..12, 18..24, 30..36]",
            "proj.weight [0..12] [6..12]",
            "fc.weight [10..20] [0..12]",
            "fc.bias [10..20]",
            "out.weight [0..12] [10..20]",
            "head.weight [3..7] [0..12]",
        ],
        |tokens, vb| {
            let positions = vb.get((5, WIDTH), "positions")?;
            let x = embedding(8, WIDTH, vb.pp("embed"))?.forward(tokens)?.broadcast_add(&positions)?;
            let y = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&x)?;
            let qkv = linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?.forward(&y)?;
            let heads = |i: usize| qkv.narrow(2, i * WIDTH, WIDTH)?.reshape((2, 5, 4, 3))?.transpose(1, 2);
            let y = heads(0)?.attend(&heads(1)?, &heads(2)?, Attention::causal(0.3))?;
            let y = y.transpose(1, 2)?.reshape((2, 5, WIDTH))?;
            let x = x.add(&linear(WIDTH, WIDTH, vb.pp("proj"))?.forward(&y)?)?;
            let y = layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?.forward(&x)?;
            let y = linear(WIDTH, 20, vb.pp("fc"))?.forward(&y)?.gelu()?;
            x.add(&linear(20, WIDTH, vb.pp("out"))?.forward(&y)?)
        },
    );
}
