//! Mixtures of experts as PyTorch programs run them. The program depends on whether ranks share the experts:
//!
//! | experts | program |
//! |---|---|
//! | all on one rank | `transformers`' loop over experts (`MixtralSparseMoeBlock`): each expert gathers its tokens' rows and adds its results to the output in place |
//! | shared by ranks | rows are exchanged by `all_to_all` and sorted by expert; experts run one by one; their results are sorted back and returned, put into the order of the tokens, weighted and summed |
//!
//! In both programs, each expert has its own parameters, and an expert that gets no row is skipped. The module `rules`
//! describes how to read the functions.

use std::collections::BTreeMap;

use gapless_engine::graph::{Graph, NodeId, Phase, ValueId};

use super::autograd::{Autograd, Var};
use super::rules::sort_workspace;
use super::tape::{INT64, Tape, Tensor};

/// Returns the number of rows of each expert of a rank, given the micro-batch and the name of the experts' layer.
pub type ExpertRows<'a> = dyn Fn(usize, &str) -> Vec<u64> + 'a;

/// The mixture of experts of a layer, given by nodes and values of the graph.
#[derive(Debug)]
pub struct Mixture {
    /// The first of the layer's nodes; the whole program runs in its place.
    pub dispatch: NodeId,
    /// Weights of each token's choices.
    pub weights: ValueId,
    /// Weights of the experts' projections: gate, up and down.
    pub projections: [ValueId; 3],
    /// Output of the experts for each token.
    pub output: ValueId,
}

impl Mixture {
    /// Finds the mixtures of experts of a graph, by layer. Layers whose experts choose tokens are left out.
    pub fn find(graph: &Graph) -> BTreeMap<String, Self> {
        let mut layers: BTreeMap<String, Vec<NodeId>> = BTreeMap::new();
        for id in graph.node_ids().filter(|&id| graph.node(id).phase == Phase::Forward) {
            layers.entry(graph.node(id).layer.to_string()).or_default().push(id);
        }
        let of_layer = |(layer, nodes): (String, Vec<NodeId>)| Some((layer, Self::of_nodes(graph, &nodes)?));
        layers.into_iter().filter_map(of_layer).collect()
    }

    fn of_nodes(graph: &Graph, nodes: &[NodeId]) -> Option<Self> {
        let named = |name: &'static str| nodes.iter().copied().filter(move |&id| graph.node(id).op.name() == name);
        let input = |id: NodeId, index: usize| graph.node(id).inputs[index];
        let dispatch = named("dispatch").next()?;
        let weights = input(named("slot_weights").next()?, 0);
        let elements = |id: ValueId| graph.value(id).spec.elements();
        if elements(weights) != elements(input(dispatch, 2)) {
            return None;
        }
        let projections: Vec<ValueId> = named("grouped_linear").map(|id| input(id, 1)).collect();
        let output = graph.node(named("combine").next()?).outputs[0];
        Some(Self { dispatch, weights, projections: projections.try_into().ok()?, output })
    }
}

/// Computes one of this rank's experts on its rows.
type Expert<'a> = &'a dyn Fn(usize, &Var) -> Var;

impl Autograd {
    /// The program for experts that are all on this rank.
    pub fn looped_experts(&self, x: &Var, weights: &Var, rows: &[u64], expert: Expert<'_>) -> Var {
        let mut sum = Var { data: self.tape.like(&x.data), edge: None };
        // The loop variables of the Python program. Each variable keeps its tensor until the next expert's tensor is
        // assigned to it.
        let (mut _made, mut _state): (Option<Var>, Option<Var>) = (None, None);
        let (mut _tokens, mut _choices): (Option<Tensor>, Option<Tensor>) = (None, None);
        for (index, &count) in rows.iter().enumerate().filter(|(_, count)| **count > 0) {
            let choices = self.tape.new_tensor(count, 1, INT64);
            _choices = Some(choices.clone());
            let tokens = self.tape.new_tensor(count, 1, INT64);
            _tokens = Some(tokens.clone());
            let state = self.index_select(x, &tokens, count);
            _state = Some(state.clone());
            let weighted = {
                let y = expert(index, &state);
                let weight = self.index(weights, [&tokens, &choices]);
                let product = self.mul(&y, &weight);
                drop(y);
                product
            };
            _made = Some(weighted.clone());
            sum = self.index_add(&sum, &tokens, &self.cast(&weighted, x.data.dtype));
        }
        sum
    }

    /// Runs the program for experts that several ranks share: this rank's experts get rows of all ranks' tokens.
    pub fn experts_over_ranks(&self, x: &Var, weights: &Var, rows: &[u64], expert: Expert<'_>) -> Var {
        let (sent, received) = (weights.data.elements, rows.iter().sum());
        let [places, tokens] = [(); 2].map(|()| self.tape.new_tensor(sent, 1, INT64));
        let by_rank = self.index_select(x, &tokens, sent);
        let (arrived, by_expert) = (self.all_to_all(&by_rank, received), self.tape.new_tensor(received, 1, INT64));
        let states = self.index_select(&arrived, &by_expert, received);
        drop(arrived);
        let parts = self.split_rows(&states, rows);
        let mut made: Vec<Var> = parts
            .iter()
            .enumerate()
            .filter(|(_, part)| part.data.elements > 0)
            .map(|(index, part)| expert(index, part))
            .collect();
        let all = self.cat_rows(&made, x);
        let sorted = self.index_select(&all, &by_expert, received);
        drop(all);
        let returned = self.all_to_all(&sorted, sent);
        let in_order = self.index_copy(&returned, &places);
        let output = self.sum(&self.mul(&in_order, weights), x.data.elements, x.data.width);
        drop(by_rank);
        // CPython frees the elements of a list from the last to the first.
        made.reverse();
        drop(made);
        output
    }

    /// `softmax`; saves its output.
    pub fn softmax(&self, x: &Var) -> Var {
        let mut op = self.record(&[x]);
        let y = self.tape.like(&x.data);
        op.save(&y);
        op.output(y, |t, g| {
            let gradient = t.like(g);
            let _products = t.like(g);
            vec![Some(gradient)]
        })
    }

    /// `sigmoid`; saves its output.
    pub fn sigmoid(&self, x: &Var) -> Var {
        let mut op = self.record(&[x]);
        let y = self.tape.like(&x.data);
        op.save(&y);
        op.output(y, |t, g| vec![Some(t.like(g))])
    }

    /// `topk` over the last dimension: values and indices.
    pub fn top_k(&self, x: &Var, k: u64) -> [Var; 2] {
        let mut op = self.record(&[x]);
        let [values, places] = [x.data.dtype, INT64].map(|dtype| self.tape.new_tensor(x.data.rows() * k, k, dtype));
        op.save(&places);
        let (elements, width) = (x.data.elements, x.data.width);
        let values = op.output(values, move |t, g| vec![Some(t.new_tensor(elements, width, g.dtype))]);
        [values, Var { data: places, edge: None }]
    }

    /// `sum` over a dimension. Its gradient is an expanded view, so it allocates nothing.
    pub fn sum(&self, x: &Var, elements: u64, width: u64) -> Var {
        let y = self.tape.new_tensor(elements, width, x.data.dtype);
        let (elements, width) = (x.data.elements, x.data.width);
        self.record(&[x]).output(y, move |_, g| vec![Some(Tensor { elements, width, ..g.view() })])
    }

    /// `div` by a tensor with at most as many elements. The gradient of the divisor, −g·((a ÷ b) ÷ b), is computed
    /// before that of the dividend.
    pub fn div(&self, a: &Var, b: &Var) -> Var {
        let mut op = self.record(&[a, b]);
        op.save(&b.data);
        op.save(&a.data);
        let (elements, width) = (b.data.elements, b.data.width);
        op.output(self.tape.like(&a.data), move |t, g| {
            let of_b = {
                let [_negated, _quotient, _again] = [(); 3].map(|()| t.like(g));
                t.like(g)
            };
            let of_a = t.like(g);
            let of_b = if elements < g.elements { t.new_tensor(elements, width, g.dtype) } else { of_b };
            vec![Some(of_a), Some(of_b)]
        })
    }

    /// `index_select` of rows; its backward is an `index_add_` into zeros.
    fn index_select(&self, x: &Var, index: &Tensor, rows: u64) -> Var {
        let mut op = self.record(&[x]);
        op.save(index);
        let (elements, width) = (x.data.elements, x.data.width);
        op.output(self.tape.new_tensor(rows * width, width, x.data.dtype), move |t, g| {
            vec![Some(t.new_tensor(elements, width, g.dtype))]
        })
    }

    /// `x[i, j]`; its backward is an `index_put_` into zeros, which sorts by index
    /// (`aten/src/ATen/native/cuda/Indexing.cu`).
    fn index(&self, x: &Var, [i, j]: [&Tensor; 2]) -> Var {
        let mut op = self.record(&[x]);
        op.save(j);
        op.save(i);
        let (elements, width, count) = (x.data.elements, x.data.width, i.elements);
        op.output(self.tape.new_tensor(count, 1, x.data.dtype), move |t, g| {
            let gradient = t.new_tensor(elements, width, g.dtype);
            let places = || t.new_tensor(count, 1, INT64);
            let first = places();
            let _linear = places();
            drop(first);
            drop([places(), places()]);
            let [_sorted, _order, _range] = [(); 3].map(|()| places());
            drop(t.bytes(sort_workspace(count)));
            // In the recordings, the autograd engine does not accumulate into this gradient in place.
            vec![Some(gradient.view())]
        })
    }

    /// `index_add_` of rows to a sum. It allocates nothing, but the added rows are saved, because the backward needs
    /// their shape.
    fn index_add(&self, sum: &Var, index: &Tensor, rows: &Var) -> Var {
        let mut op = self.record(&[sum, rows]);
        op.save(index);
        op.save(&rows.data);
        let (elements, width) = (rows.data.elements, rows.data.width);
        op.output(sum.data.clone(), move |t, g| {
            let of_rows = t.new_tensor(elements, width, g.dtype);
            vec![Some(g.clone()), Some(of_rows)]
        })
    }

    /// `index_copy` of rows into a copy of zeros. The rows are saved, because the backward needs their shape.
    fn index_copy(&self, rows: &Var, index: &Tensor) -> Var {
        let mut op = self.record(&[rows]);
        op.save(index);
        op.save(&rows.data);
        let _zeros = self.tape.like(&rows.data);
        op.output(self.tape.like(&rows.data), |t, g| vec![Some(t.like(g))])
    }

    /// `all_to_all_single` into `rows` rows, as an autograd function.
    fn all_to_all(&self, x: &Var, rows: u64) -> Var {
        let (elements, width) = (x.data.elements, x.data.width);
        self.record(&[x]).output(self.tape.new_tensor(rows * width, width, x.data.dtype), move |t, g| {
            vec![Some(t.new_tensor(elements, width, g.dtype))]
        })
    }

    /// `split` of rows; the gradients of all parts are written into one tensor.
    fn split_rows(&self, x: &Var, rows: &[u64]) -> Vec<Var> {
        let (elements, width, dtype) = (x.data.elements, x.data.width, x.data.dtype);
        let part = |count: &u64| Tensor { elements: count * width, ..x.data.view() };
        let whole = move |t: &Tape, _: &[Option<Tensor>]| vec![Some(t.new_tensor(elements, width, dtype))];
        self.record(&[x]).outputs(rows.iter().map(part).collect(), whole)
    }

    /// `cat` of rows with the width of `like`; its gradients are views.
    fn cat_rows(&self, parts: &[Var], like: &Var) -> Var {
        let counts: Vec<u64> = parts.iter().map(|part| part.data.elements).collect();
        let dtype = parts.first().unwrap_or(like).data.dtype;
        let y = self.tape.new_tensor(counts.iter().sum(), like.data.width, dtype);
        let op = self.record(&parts.iter().collect::<Vec<_>>());
        op.output(y, move |_, g| counts.iter().map(|&elements| Some(Tensor { elements, ..g.view() })).collect())
    }
}
