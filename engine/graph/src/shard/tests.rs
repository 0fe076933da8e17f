//! All ranks' graphs, evaluated side by side in f64, give the whole graph's losses and gradients.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_kernels::{Fold, Numbers, Spec, Stream, Window};
use gapless_parallel::Axes;

use super::{Request, Sharded, Shares, Sharing, shard};
use crate::autodiff::differentiate;
use crate::graph::{Graph, Phase, Sequences, Source, ValueId, lock};
use crate::nn::{Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias, rms_norm};
use crate::ops::{Attention, Collective};
use crate::reference::{Array, Reference, evaluate, stored};
use crate::{Result, Tensor};

const BATCH: usize = 2;
pub(super) const TOKENS: usize = 8;
pub(super) const VOCABULARY: usize = 11;
pub(super) const WIDTH: usize = 12;

/// Evaluates the graphs of all ranks node by node. Returns the values of each rank.
pub(super) fn evaluate_together(
    graphs: &[&Graph],
    given: &[HashMap<String, Array>],
    stream: Stream,
) -> Vec<Vec<Array>> {
    let mut values: Vec<Vec<Option<Array>>> = graphs
        .iter()
        .zip(given)
        .map(|(graph, given)| {
            graph.value_ids().map(|id| if graph.is_view(id) { None } else { stored(graph, given, id) }).collect()
        })
        .collect();
    let read = |graph: &Graph, values: &[Option<Array>], id: ValueId| {
        let value = graph.value(id);
        values[value.root.index()].as_ref().expect("made before it is used").view(&value.layout)
    };
    let collective_of = |graph: &Graph, index: usize| {
        graph.nodes().get(index).and_then(|node| (&*node.op as &dyn Any).downcast_ref::<Collective>()).copied()
    };
    let put = |graph: &Graph, values: &mut [Option<Array>], index: usize, outputs: Vec<Array>| {
        let node = &graph.nodes()[index];
        for (&id, output) in node.outputs.iter().zip(outputs) {
            assert_eq!(output.dims, graph.value(id).spec.dims(), "the shape of {}", node.op.name());
            // What is changed in place is changed for all that read it later.
            for &(input, _) in node.op.mutates() {
                values[graph.value(node.inputs[input]).root.index()] = Some(output.clone());
            }
            values[id.index()] = Some(output);
        }
    };
    let mut at = vec![0; graphs.len()];
    loop {
        // Each rank runs up to its next collective.
        for ((graph, values), at) in graphs.iter().zip(&mut values).zip(&mut at) {
            while *at < graph.nodes().len() && collective_of(graph, *at).is_none() {
                let node = &graph.nodes()[*at];
                if !graph.is_view(node.outputs[0]) {
                    let inputs: Vec<Array> = node.inputs.iter().map(|&id| read(graph, values, id)).collect();
                    let outputs = node.op.reference(&Reference { inputs: inputs.iter().collect(), stream });
                    put(graph, values, *at, outputs);
                }
                *at += 1;
            }
        }
        let Some(collective) = collective_of(graphs[0], at[0]) else { break };
        let mut inputs = Vec::new();
        for ((graph, values), &at) in graphs.iter().zip(&values).zip(&at) {
            assert_eq!(collective_of(graph, at), Some(collective), "all ranks have the same collectives");
            inputs.push(read(graph, values, graph.nodes()[at].inputs[0]));
        }
        let sum = || inputs[1..].iter().fold(inputs[0].clone(), |sum, part| sum.zip(part, |a, b| a + b));
        let ranks = graphs.len();
        let outputs: Vec<Array> = match collective {
            Collective::AllReduce { .. } => vec![sum(); ranks],
            Collective::ReduceScatter { .. } => {
                let sum = sum();
                let part = sum.data.len() / ranks;
                let dims = if sum.dims.first() == Some(&ranks) { &sum.dims[1..] } else { &[part][..] };
                sum.data.chunks(part).map(|part| Array::new(dims, part.to_vec())).collect()
            }
            Collective::AllGather { .. } => {
                let all: Vec<f64> = inputs.iter().flat_map(|input| input.data.clone()).collect();
                vec![Array::new(&[&[ranks], &inputs[0].dims[..]].concat(), all); ranks]
            }
            other => panic!("{other:?} is not used"),
        };
        for (((graph, values), at), output) in graphs.iter().zip(&mut values).zip(&mut at).zip(outputs) {
            put(graph, values, *at, vec![output]);
            *at += 1;
        }
    }
    assert!(graphs.iter().zip(&at).all(|(graph, &at)| at == graph.nodes().len()), "all ranks reach the end");
    graphs
        .iter()
        .zip(&values)
        .map(|(graph, values)| graph.value_ids().map(|id| read(graph, values, id)).collect())
        .collect()
}

/// A model's graph with its gradients.
pub(super) struct Recorded {
    pub graph: Arc<Mutex<Graph>>,
    tokens: ValueId,
    pub loss: ValueId,
    /// Names of parameters with their ids and gradients.
    pub gradients: Vec<(String, ValueId, ValueId)>,
    pub given: HashMap<String, Array>,
}

pub(super) fn record(model: impl Fn(&VarBuilder, &Tensor, &Tensor) -> Result<Tensor>) -> Result<Recorded> {
    record_in(Arc::new(Mutex::new(Graph::default())), model)
}

/// Records a model that reads the places of tokens from a value.
fn record_placed(model: impl Fn(&VarBuilder, &Tensor, &Tensor) -> Result<Tensor>) -> Result<Recorded> {
    let mut graph = Graph::default();
    let places = [0..TOKENS, 0..TOKENS].into_iter().flatten().map(|place| place as f64);
    let positions = graph.add_data(places.collect(), Spec { shape: (BATCH, TOKENS).into(), dtype: DType::U32 });
    graph.set_sequences(Sequences::Placed { positions });
    record_in(Arc::new(Mutex::new(graph)), model)
}

fn record_in(
    graph: Arc<Mutex<Graph>>,
    model: impl Fn(&VarBuilder, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Recorded> {
    let vb = VarBuilder::new(&graph, DType::F32);
    let input = |name| {
        let id = lock(&graph).add_input(name, Spec { shape: (BATCH, TOKENS).into(), dtype: DType::U32 })?;
        Ok::<Tensor, crate::Error>(Tensor::of(&graph, id))
    };
    let (tokens, targets) = (input("tokens")?, input("targets")?);
    let loss = model(&vb, &tokens, &targets)?;
    let mut gradients = Vec::new();
    let made = differentiate(&graph, &loss, 1.0)?;
    loss.set_phase(Phase::Update);
    for gradient in made {
        let summands = gradient.summands.iter().map(|&id| Ok(Tensor::of(&graph, id)));
        let sum = summands.reduce(|a: Result<Tensor>, b| a?.add(&b?)).expect("a gradient has a summand")?;
        let parameter = Tensor::of(&graph, gradient.parameter);
        gradients.push((parameter.id(), sum.reshape(parameter.dims().to_vec())?.id()));
    }
    let guard = lock(&graph);
    let name = |id: ValueId| guard.persistent().find(|p| p.0 == id).expect("parameters have names").1.to_owned();
    let gradients = gradients.into_iter().map(|(id, gradient)| (name(id), id, gradient)).collect();
    let mut given = HashMap::new();
    for (index, (id, name)) in guard.persistent().enumerate() {
        let (numbers, dims) = (Numbers::from_seed(index as u64), guard.value(id).spec.dims());
        let count = dims.iter().product();
        given.insert(name.to_owned(), Array::new(dims, (0..count).map(|i| 0.5 * numbers.normal(i)).collect()));
    }
    for (name, seed) in [("tokens", 101), ("targets", 102)] {
        let numbers = Numbers::from_seed(seed);
        let ids = (0..BATCH * TOKENS).map(|i| (f64::from(numbers.uniform(i)) * VOCABULARY as f64).floor());
        given.insert(name.to_owned(), Array::new(&[BATCH, TOKENS], ids.collect()));
    }
    let (tokens, loss) = (tokens.id(), loss.id());
    drop(guard);
    Ok(Recorded { graph, tokens, loss, gradients, given })
}

/// Checks the graphs of some ranks. Returns the parameters that they divide, and the collectives of the first rank.
fn check(recorded: &Recorded, ranks: usize, shares: Shares) -> (Vec<String>, Vec<&'static str>) {
    let Recorded { graph, tokens, loss, gradients, given } = recorded;
    let graph = lock(graph);
    let stream = Stream::new(7, 0, 0);
    let whole = evaluate(&graph, given, stream);
    let pairs: Vec<(ValueId, ValueId)> =
        gradients.iter().map(|&(_, parameter, gradient)| (parameter, gradient)).collect();
    let is_summed = matches!(shares, Shares::Tokens { .. });
    let request = Request { tokens: *tokens, outputs: &[*loss], gradients: &pairs, is_summed, windows: None };
    let of_rank =
        |rank| shard(&graph, &Sharing { axes: Axes::TENSOR, ranks, rank, shares, folds: false }, &request).unwrap();
    let sharded: Vec<Sharded> = (0..ranks).map(of_rank).collect();
    assert!(sharded[0].gathered.is_empty(), "{:?} have no rule", sharded[0].gathered);
    let part =
        |array: &Array, window: &Window| window.runs().flatten().map(|index| array.data[index]).collect::<Vec<_>>();
    // Context ranks read their own tokens.
    let tokens_of = |rank| match shares {
        Shares::Tokens { rounds } => Fold::new(TOKENS, (ranks, rank), rounds).unwrap().ranges().collect(),
        Shares::Parameters { .. } => vec![0..TOKENS],
    };
    let given_to = |(rank, sharded): (usize, &Sharded)| -> HashMap<String, Array> {
        let of_tokens = Window::of(&[BATCH, TOKENS], vec![vec![0..BATCH], tokens_of(rank)]);
        let of_rank = |(name, array): (&String, &Array)| {
            let window = sharded.windows.get(name).unwrap_or(&of_tokens);
            (name.clone(), Array::new(&window.dims(), part(array, window)))
        };
        given.iter().map(of_rank).collect()
    };
    let parts: Vec<HashMap<String, Array>> = sharded.iter().enumerate().map(given_to).collect();
    let graphs: Vec<&Graph> = sharded.iter().map(|sharded| &sharded.graph).collect();
    let values = evaluate_together(&graphs, &parts, stream);
    let what = format!("{ranks} ranks, {shares:?}");
    let expect = |made: &[f64], exact: &[f64], name: &str| {
        assert_eq!(made.len(), exact.len(), "{what}: {name}");
        let norm = exact.iter().map(|x| x * x).sum::<f64>().sqrt();
        let distance = made.iter().zip(exact).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        assert!(distance <= 1e-10 * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    };
    if is_summed {
        let sum = |of: &dyn Fn(&Sharded) -> ValueId| {
            let summands = sharded.iter().zip(&values).map(|(sharded, values)| values[of(sharded).index()].clone());
            summands.reduce(|a, b| a.zip(&b, |a, b| a + b)).expect("there are ranks").data
        };
        expect(&sum(&|sharded| sharded.value(*loss)), &whole[loss.index()].data, "the loss");
        for (name, _, gradient) in gradients {
            let made = sum(&|sharded| sharded.value(*gradient));
            expect(&made, &whole[gradient.index()].data, &format!("the gradient of {name}"));
        }
    }
    for (sharded, values) in sharded.iter().zip(&values).filter(|_| !is_summed) {
        expect(&values[sharded.value(*loss).index()].data, &whole[loss.index()].data, "the loss");
        for (name, _, gradient) in gradients {
            let exact = part(&whole[gradient.index()], &sharded.windows[name]);
            expect(&values[sharded.value(*gradient).index()].data, &exact, &format!("the gradient of {name}"));
        }
    }
    let split = sharded[0].windows.iter().filter(|(_, window)| !window.is_whole()).map(|(name, _)| name.clone());
    let collectives = sharded[0].graph.nodes().iter().filter(|node| (&*node.op as &dyn Any).is::<Collective>());
    (split.collect(), collectives.map(|node| node.op.name()).collect())
}

/// A block of GPT with a fused projection of `heads` heads, and a feed-forward layer.
pub(super) fn gpt(vb: &VarBuilder, x: &Tensor, heads: usize) -> Result<Tensor> {
    let size = WIDTH / heads;
    let h = layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?.forward(x)?;
    let qkv = linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?.forward(&h)?;
    let head = |i: usize| qkv.narrow(2, i * WIDTH, WIDTH)?.reshape((BATCH, TOKENS, heads, size))?.transpose(1, 2);
    let y = head(0)?.causal_attention(&head(1)?, &head(2)?, 0.5)?.transpose(1, 2)?.reshape((BATCH, TOKENS, WIDTH))?;
    let x = x.add(&linear(WIDTH, WIDTH, vb.pp("proj"))?.forward(&y)?.dropout(0.1)?)?;
    let h = layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?.forward(&x)?;
    let h = linear(WIDTH, 4 * WIDTH, vb.pp("fc"))?.forward(&h)?.gelu()?;
    x.add(&linear(4 * WIDTH, WIDTH, vb.pp("out"))?.forward(&h)?)
}

/// A block of Llama with grouped heads.
fn llama(vb: &VarBuilder, x: &Tensor, (heads, kv_heads): (usize, usize)) -> Result<Tensor> {
    let size = 6;
    let h = rms_norm(WIDTH, 1e-5, vb.pp("norm1"))?.forward(x)?;
    let project = |name: &str, heads: usize| {
        let y = linear_no_bias(WIDTH, heads * size, vb.pp(name))?.forward(&h)?;
        y.reshape((BATCH, TOKENS, heads, size))?.transpose(1, 2)
    };
    let (q, k) = (project("q", heads)?.rope(100.0)?, project("k", kv_heads)?.rope(100.0)?);
    let y = q.causal_attention(&k, &project("v", kv_heads)?, 0.5)?.transpose(1, 2)?;
    let y = y.reshape((BATCH, TOKENS, heads * size))?;
    let x = x.add(&linear_no_bias(heads * size, WIDTH, vb.pp("o"))?.forward(&y)?)?;
    let h = rms_norm(WIDTH, 1e-5, vb.pp("norm2"))?.forward(&x)?;
    let gate = linear_no_bias(WIDTH, 20, vb.pp("gate"))?.forward(&h)?.silu()?;
    let h = gate.mul(&linear_no_bias(WIDTH, 20, vb.pp("up"))?.forward(&h)?)?;
    x.add(&linear_no_bias(20, WIDTH, vb.pp("down"))?.forward(&h)?)
}

fn tied_gpt(vb: &VarBuilder, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let table = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?;
    let positions = vb.pp("wpe").get((TOKENS, WIDTH), "weight")?.rows_of_positions(TOKENS)?;
    let x = table.forward(tokens)?.broadcast_add(&positions)?.dropout(0.1)?;
    let x = gpt(&vb.pp("h.1"), &gpt(&vb.pp("h.0"), &x, 6)?, 6)?;
    let x = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&x)?;
    x.linear_cross_entropy(table.embeddings(), targets)?.mean_all()
}

fn two_layers_of_llama(vb: &VarBuilder, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
    let x = llama(&vb.pp("h.1"), &llama(&vb.pp("h.0"), &x, (8, 2))?, (8, 4))?;
    let x = rms_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&x)?;
    let logits = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?.forward(&x)?;
    logits.flatten(0, 1)?.cross_entropy(&targets.flatten_all()?)?.mean_all()
}

#[test]
fn ranks_of_gpt_and_llama_give_the_whole_gradients() {
    let tied_gpt = record(tied_gpt).unwrap();
    let llama = record(two_layers_of_llama).unwrap();
    for sequence in [false, true] {
        for ranks in [2, 3, 4, 8] {
            for (name, model) in [("GPT", &tied_gpt), ("Llama", &llama)] {
                if sequence && !TOKENS.is_multiple_of(ranks) {
                    continue;
                }
                let (split, collectives) = check(model, ranks, Shares::Parameters { sequence });
                assert!(!split.is_empty() && !collectives.is_empty(), "{name}: {split:?}, {collectives:?}");
            }
        }
    }
}

/// Fewer key heads than ranks, and fewer queries of each: ranks divide the queries of all key heads, and each attends to the
/// key head of its queries. The projections of keys and values stay whole, and their gradients are added up.
#[test]
fn queries_of_few_key_heads_are_divided() {
    let model = |vb: &VarBuilder, tokens: &Tensor, targets: &Tensor| {
        let x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
        let x = llama(&vb.pp("h.1"), &llama(&vb.pp("h.0"), &x, (8, 2))?, (8, 4))?;
        let head = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?;
        head.forward(&x)?.flatten(0, 1)?.cross_entropy(&targets.flatten_all()?)?.mean_all()
    };
    let recorded = record(model).unwrap();
    for (ranks, sequence) in [(6, false), (8, false), (8, true)] {
        let (split, collectives) = check(&recorded, ranks, Shares::Parameters { sequence });
        let is_split = |layer: usize, name: &str| split.contains(&format!("h.{layer}.{name}.weight"));
        // Two groups of three of 6 ranks divide the queries of two key heads. Four key heads do not divide by six.
        let layers = if ranks == 6 { vec![0] } else { vec![0, 1] };
        for layer in layers {
            let held = ["q", "k", "v", "o"].map(|name| is_split(layer, name));
            assert_eq!(held, [true, false, false, true], "layer {layer} on {ranks} ranks");
        }
        let count = |name| collectives.iter().filter(|&&other| other == name).count();
        // No rank gathers heads: without sequence parallelism, all collectives are sums.
        assert!(sequence || count("all_reduce") == collectives.len(), "{collectives:?}");
    }
}

/// Only keys and values are gathered, in the forward and again in the backward, and the sums of their gradients divided.
#[test]
fn context_ranks_give_the_whole_gradients() {
    let gpt = record_placed(tied_gpt).unwrap();
    let llama = record_placed(two_layers_of_llama).unwrap();
    for (ranks, rounds) in [(2, 1), (2, 2), (4, 1)] {
        for model in [&gpt, &llama] {
            let (split, collectives) = check(model, ranks, Shares::Tokens { rounds });
            assert!(split.is_empty(), "{split:?}");
            let count = |name| collectives.iter().filter(|&&other| other == name).count();
            assert_eq!(
                (count("all_gather"), count("reduce_scatter"), collectives.len()),
                (8, 4, 12),
                "{collectives:?}"
            );
        }
    }
}

/// Attention of which each head rotates a part of its queries and keys, and joins it with the rest. `kv_heads` heads have
/// keys and values of their own; the rotated part of the key of latent attention is one for all.
fn joined(vb: &VarBuilder, x: &Tensor, (heads, kv_heads, is_latent): (usize, usize, bool)) -> Result<Tensor> {
    let (plain, rotated) = (2, 4);
    let size = plain + rotated;
    let h = rms_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(x)?;
    let project = |name: &str, heads: usize, size: usize| {
        let y = linear_no_bias(WIDTH, heads * size, vb.pp(name))?.forward(&h)?;
        y.reshape((BATCH, TOKENS, heads, size))?.transpose(1, 2)
    };
    let join = |x: &Tensor, rotated: &Tensor| Tensor::cat(&[&x.narrow(3, 0, plain)?, &rotated.rope(100.0)?], 3);
    let q = project("q", heads, size)?;
    let q = join(&q, &q.narrow(3, plain, rotated)?)?;
    let k = project("k", kv_heads, size)?;
    let k = match is_latent {
        true => {
            let shared = project("shared", 1, rotated)?.broadcast_as((BATCH, kv_heads, TOKENS, rotated))?;
            join(&k, &shared)?
        }
        false => join(&k, &k.narrow(3, plain, rotated)?)?,
    };
    let y = q.causal_attention(&k, &project("v", kv_heads, size)?, 0.5)?.transpose(1, 2)?;
    x.add(&linear_no_bias(heads * size, WIDTH, vb.pp("o"))?.forward(&y.reshape((BATCH, TOKENS, heads * size))?)?)
}

/// Context ranks gather the keys of each tensor rank's heads, also where keys are concatenated: no tensor rank needs all
/// heads.
#[test]
fn attention_with_concatenated_keys_is_divided_by_heads_and_tokens() {
    for is_latent in [false, true] {
        let recorded = record_placed(|vb, tokens, targets| {
            let x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
            let x = joined(&vb.pp("attention"), &x, (4, if is_latent { 4 } else { 2 }, is_latent))?;
            x.linear_cross_entropy(&vb.pp("head").get((VOCABULARY, WIDTH), "weight")?, targets)?.mean_all()
        })
        .unwrap();
        check(&recorded, 2, Shares::Tokens { rounds: 1 });
        let graph = lock(&recorded.graph);
        let pairs: Vec<(ValueId, ValueId)> = recorded.gradients.iter().map(|&(_, a, b)| (a, b)).collect();
        let (axes, ranks, rank) = (Axes::CONTEXT, 2, 0);
        let shares = Shares::Tokens { rounds: 1 };
        let request = Request {
            tokens: recorded.tokens,
            outputs: &[recorded.loss],
            gradients: &pairs,
            is_summed: true,
            windows: None,
        };
        let context = shard(&graph, &Sharing { axes, ranks, rank, shares, folds: false }, &request).unwrap();
        let pairs: Vec<(ValueId, ValueId)> = pairs.iter().map(|&(a, b)| (context.value(a), context.value(b))).collect();
        let (axes, shares) = (Axes::TENSOR, Shares::Parameters { sequence: false });
        let request = Request {
            tokens: context.value(recorded.tokens),
            outputs: &[context.value(recorded.loss)],
            gradients: &pairs,
            is_summed: false,
            windows: None,
        };
        let tensor = shard(&context.graph, &Sharing { axes, ranks, rank, shares, folds: false }, &request).unwrap();
        for name in ["q", "k", "v", "o"] {
            assert!(!tensor.windows[&format!("attention.{name}.weight")].is_whole(), "{name}, latent: {is_latent}");
        }
        let of_axes = |wanted: Axes| -> Vec<&'static str> {
            let collectives = tensor.graph.nodes().iter().filter_map(|node| {
                let collective = (&*node.op as &dyn Any).downcast_ref::<Collective>()?;
                (collective.axes() == wanted).then(|| node.op.name())
            });
            collectives.collect()
        };
        // Keys and values in the forward and in the backward, and the gradients of values and of both parts of keys.
        let sent = [["all_gather"; 4].as_slice(), &["reduce_scatter"; 3]].concat();
        assert_eq!(of_axes(Axes::CONTEXT), sent, "latent: {is_latent}");
        // Tensor ranks gather the statistics of the head, and add up the rest.
        let gathers = of_axes(Axes::TENSOR).into_iter().filter(|&name| name != "all_reduce");
        assert_eq!(gathers.collect::<Vec<_>>(), ["all_gather"], "latent: {is_latent}");
    }
}

/// Tokens in front of the sequence, which all ranks hold, and a matrix of which both dimensions are tokens.
#[test]
fn context_ranks_count_what_all_of_them_hold_once() {
    let head = |vb: &VarBuilder, x: &Tensor, targets: &Tensor| {
        let logits = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?.forward(x)?;
        logits.flatten(0, 1)?.cross_entropy(&targets.flatten_all()?)?.mean_all()
    };
    let prompted = record_placed(|vb, tokens, targets| {
        let x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
        let x = Tensor::cat(&[&vb.get((BATCH, 2, WIDTH), "prompt")?, &x], 1)?;
        let x = linear(WIDTH, WIDTH, vb.pp("mix"))?.forward(&x)?.gelu()?;
        head(vb, &x.narrow(1, 2, TOKENS)?, targets)
    })
    .unwrap();
    let biased = record_placed(|vb, tokens, targets| {
        let x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
        let scores = x.matmul(&x.transpose(1, 2)?)?.broadcast_add(&vb.get((TOKENS, TOKENS), "bias")?)?;
        head(vb, &scores.softmax_last_dim()?.matmul(&x)?, targets)
    })
    .unwrap();
    for model in [&prompted, &biased] {
        check(model, 2, Shares::Tokens { rounds: 1 });
    }
}

/// Ranks that divide heads need not divide tokens.
#[test]
fn attention_to_an_odd_number_of_tokens_is_divided_by_heads() {
    let heads = Window::of(&[2, 4, 7, 6], vec![vec![0..2], vec![2..4], vec![0..7], vec![0..6]]);
    assert!(Attention::causal(0.5).runs_on(&heads));
}

/// The collectives of each phase: operation and elements of the whole tensor, in order.
fn sent(sharded: &Sharded, ranks: usize) -> BTreeMap<Phase, Vec<(&'static str, usize)>> {
    let graph = &sharded.graph;
    let mut sent: BTreeMap<Phase, Vec<(&'static str, usize)>> = BTreeMap::new();
    for node in graph.nodes() {
        let Some(collective) = (&*node.op as &dyn Any).downcast_ref::<Collective>() else { continue };
        let parts = if let Collective::AllGather { .. } = collective { ranks } else { 1 };
        let elements = graph.value(node.inputs[0]).spec.elements() * parts;
        sent.entry(node.phase).or_default().push((node.op.name(), elements));
    }
    sent
}

/// A layer sends what Megatron-LM sends (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2).
#[test]
fn layers_send_what_megatron_sends() {
    let layers = 2;
    let recorded = record(|vb, tokens, targets| {
        let mut x = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?.forward(tokens)?;
        for layer in 0..layers {
            x = llama(&vb.pp("h").pp(layer), &x, (4, 2))?;
        }
        let x = rms_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&x)?;
        x.linear_cross_entropy(&vb.pp("head").get((VOCABULARY, WIDTH), "weight")?, targets)?.mean_all()
    })
    .unwrap();
    let graph = lock(&recorded.graph);
    let pairs: Vec<(ValueId, ValueId)> = recorded.gradients.iter().map(|&(_, a, b)| (a, b)).collect();
    let request = Request {
        tokens: recorded.tokens,
        outputs: &[recorded.loss],
        gradients: &pairs,
        is_summed: false,
        windows: None,
    };
    let (ranks, x) = (2, BATCH * TOKENS * WIDTH);
    let of = |sequence| {
        shard(
            &graph,
            &Sharing { axes: Axes::TENSOR, ranks, rank: 0, shares: Shares::Parameters { sequence }, folds: false },
            &request,
        )
        .unwrap()
    };
    let statistics = ("all_gather", ranks * BATCH * TOKENS * 4);
    let plain = sent(&of(false), ranks);
    // The embedding, two sums per layer, the head's statistics, and dx of the head, which the forward computes.
    let sums = vec![("all_reduce", x); 1 + 2 * layers];
    assert_eq!(plain[&Phase::Forward], [sums.clone(), vec![statistics, ("all_reduce", x)]].concat());
    assert_eq!(plain[&Phase::BackwardInput], vec![("all_reduce", x); 2 * layers]);
    assert!(!plain.contains_key(&Phase::BackwardWeight) && !plain.contains_key(&Phase::Update));
    let split = sent(&of(true), ranks);
    let (gather, scatter) = (("all_gather", x), ("reduce_scatter", x));
    let forward = [vec![scatter], [gather, scatter].repeat(2 * layers), vec![gather, statistics, scatter]].concat();
    assert_eq!(split[&Phase::Forward], forward);
    // A gather of dy before each row-split product, and a reduce-scatter of dx behind each column-split one; in the end,
    // the table's dy is gathered.
    let backward = [[gather, scatter].repeat(2 * layers), vec![gather]].concat();
    let of_phase = |phase| split.get(&phase).cloned().unwrap_or_default();
    let (inputs, weights) = (of_phase(Phase::BackwardInput), of_phase(Phase::BackwardWeight));
    let both = |list: &[(&'static str, usize)], one| list.iter().filter(|&&sent| sent == one).count();
    assert_eq!(both(&inputs, scatter) + both(&weights, scatter), both(&backward, scatter), "{inputs:?} {weights:?}");
    // The inputs of column-split products are gathered again for the gradients of their weights.
    let gathers = both(&inputs, gather) + both(&weights, gather);
    assert_eq!(gathers, both(&backward, gather) + 2 * layers, "{inputs:?} {weights:?}");
    // The gradients of norms are summed once per step.
    assert_eq!(of_phase(Phase::Update), vec![("all_reduce", WIDTH); 2 * layers + 1]);
}

/// Logits, whose last dimension ranks divide, are gathered without a list of all elements.
#[test]
fn no_list_has_a_place_for_each_logit() {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let vb = VarBuilder::new(&graph, DType::F32);
    let id = lock(&graph).add_input("tokens", Spec { shape: (BATCH, TOKENS).into(), dtype: DType::U32 }).unwrap();
    let x = embedding(VOCABULARY, WIDTH, vb.pp("wte")).unwrap().forward(&Tensor::of(&graph, id)).unwrap();
    let logits = linear_no_bias(WIDTH, 16, vb.pp("head")).unwrap().forward(&x).unwrap().id();
    let graph = lock(&graph);
    for sequence in [false, true] {
        let shares = Shares::Parameters { sequence };
        let rows = Window::of(&[16, WIDTH], vec![vec![4..8], vec![0..WIDTH]]);
        let table = Window::of(&[VOCABULARY, WIDTH], vec![vec![0..VOCABULARY], vec![0..WIDTH]]);
        let windows = [("head.weight".to_owned(), rows), ("wte.weight".to_owned(), table)].into();
        let request =
            Request { tokens: id, outputs: &[logits], gradients: &[], is_summed: false, windows: Some(&windows) };
        let sharing = Sharing { axes: Axes::TENSOR, ranks: 4, rank: 1, shares, folds: false };
        let sharded = shard(&graph, &sharing, &request).unwrap();
        assert_eq!(sharded.windows["head.weight"].dims(), [4, WIDTH]);
        assert_eq!(sharded.graph.value(sharded.value(logits)).spec.dims(), [BATCH, TOKENS, 16]);
        let listed = sharded.graph.values().iter().filter_map(|value| match &value.source {
            Source::Data { elements, .. } => Some(elements.len()),
            _ => None,
        });
        assert!(listed.sum::<usize>() <= 2 * BATCH * TOKENS, "{}", sharded.graph);
    }
}
