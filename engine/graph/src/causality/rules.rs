//! The rules by which the flows of an operation's outputs follow from those of its inputs.

use std::any::Any;
use std::collections::HashMap;
use std::rc::Rc;

use gapless_kernels::Stream;

use super::flow::{Along, Flow, Seen, Span};
use crate::graph::{Graph, Node, NodeId, Sequences, Source, ValueId};
use crate::ops::{
    Affine, Attention, Binary, BinaryKind, BroadcastAs, CacheWrite, CachedAttention, Cast, Cat, Collective, Combine,
    Contiguous, Detach, Dispatch, Dropout, Embedding, Gather, GroupedLinear, LayerNorm, Linear, LogSumExp, MatMul, Max,
    Narrow, QuantizedLinear, Reshape, RmsNorm, Rope, Route, RoutedSwiGlu, ScaledSum, SinkAttention, SlotWeights,
    Softmax, Sum, TopK, Transpose, Unary, UnaryKind, Where, Widen,
};
use crate::reference::{Array, Reference};

/// Maximum number of elements of a constant that is computed.
const MAX_CONSTANT: usize = 1 << 24;

/// Numbers up to this one in a mask of scores hide a key.
const HIDDEN: f64 = -1e4;

/// Whether an element of a mask keeps the elements that it masks.
type Keeps = fn(f64) -> bool;

/// The reading of past tokens by causal attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attend {
    /// A token depends on the keys and values of past tokens.
    Past,
    /// Keys and values of past tokens come from caches, and do not count.
    Caches,
}

/// The flows of values, derived node by node.
pub(super) struct Rules<'a> {
    graph: &'a Graph,
    tokens: usize,
    attend: Attend,
    flows: HashMap<ValueId, Flow>,
    /// The elements of constants, if they are known.
    constants: HashMap<ValueId, Option<Rc<Array>>>,
    /// The first operation that caches keys or values that depend on other tokens than their own.
    pub caches_others: Option<NodeId>,
    /// The first operation that combines continued tokens with elements that differ by index.
    pub misplaced: Option<NodeId>,
}

impl<'a> Rules<'a> {
    pub fn new(graph: &'a Graph, tokens: usize, attend: Attend) -> Self {
        let flow = |id: ValueId| {
            let value = graph.value(id);
            let dims = value.spec.dims();
            match value.source {
                Source::Node { .. } => None,
                Source::Constant(_) => Some(Flow::new(vec![Along::Same; dims.len()])),
                // An input has an element for each token.
                Source::Input { .. } => {
                    let along = |&extent: &usize| match extent == tokens && tokens > 1 {
                        true => Along::Tokens((0..tokens).map(Span::of).collect()),
                        false => Along::free(extent),
                    };
                    Some(Flow::new(dims.iter().map(along).collect()))
                }
                Source::Persistent { .. } | Source::Cache { .. } | Source::Data { .. } => Some(Flow::fixed(dims)),
            }
        };
        let flows = graph.value_ids().filter_map(|id| Some((id, flow(id)?))).collect();
        Self { graph, tokens, attend, flows, constants: HashMap::new(), caches_others: None, misplaced: None }
    }

    /// Returns the flow of a value whose node's rule was applied.
    pub fn flow(&self, id: ValueId) -> &Flow {
        &self.flows[&id]
    }

    /// Derives the flows of a node's outputs.
    pub fn apply(&mut self, id: NodeId) {
        let graph = self.graph;
        let node = graph.node(id);
        let op = node.op.as_ref() as &dyn Any;
        let keeps_equal = op.is::<Transpose>() || op.is::<Reshape>() || op.is::<Contiguous>() || op.is::<Cast>();
        let mut outputs = match node.inputs.iter().any(|input| self.flows[input].depends()) || keeps_equal {
            true => self.outputs(id, node),
            false => node.outputs.iter().map(|&output| Flow::fixed(self.dims(output))).collect(),
        };
        outputs.iter_mut().zip(&node.outputs).for_each(|(flow, &output)| flow.normalize(self.dims(output)));
        self.flows.extend(node.outputs.iter().copied().zip(outputs));
        // A view of equal elements has equal elements.
        if let [output] = node.outputs[..]
            && graph.is_view(output)
        {
            let flow = self.flows.get_mut(&output).expect("it was just added");
            let strides = graph.value(output).layout.stride();
            for (along, _) in flow.dims.iter_mut().zip(strides).filter(|(_, stride)| **stride == 0) {
                if matches!(along, Along::Free) {
                    *along = Along::Same;
                }
            }
        }
    }

    fn dims(&self, id: ValueId) -> &'a [usize] {
        self.graph.value(id).spec.dims()
    }

    /// Applies the rule of an operation of which an input depends on tokens.
    fn outputs(&mut self, id: NodeId, node: &Node) -> Vec<Flow> {
        let op = node.op.as_ref() as &dyn Any;
        let inputs: Vec<Flow> = node.inputs.iter().map(|input| self.flows[input].clone()).collect();
        let (x, dims, to) = (&inputs[0], self.dims(node.inputs[0]), self.dims(node.outputs[0]));
        if let Some(&Transpose { dim1, dim2 }) = op.downcast_ref() {
            let swapped = |dim: usize| match dim {
                _ if dim == dim1 => dim2,
                _ if dim == dim2 => dim1,
                _ => dim,
            };
            let mut out = x.clone();
            out.dims.swap(dim1, dim2);
            out.seen = out.seen.map(|seen| Seen { rows: swapped(seen.rows), keys: swapped(seen.keys), ..seen });
            vec![out]
        } else if op.is::<Reshape>() {
            vec![x.reshape(dims, to)]
        } else if let Some(&Narrow { dim, start, len }) = op.downcast_ref() {
            vec![self.narrowed(x.clone(), dim, start, len)]
        } else if op.is::<BroadcastAs>() {
            let added = to.len() - dims.len();
            let mut out = x.clone();
            out.dims.splice(0..0, vec![Along::Same; added]);
            out.seen = out.seen.map(|seen| Seen { rows: seen.rows + added, keys: seen.keys + added, ..seen });
            vec![out]
        } else if let Some(&Widen { dim, start, extent }) = op.downcast_ref() {
            let mut out = x.clone();
            let mut wide = vec![Span::NONE; extent];
            match x.dims[dim].table() {
                Some(table) => wide[start..start + table.len()].copy_from_slice(table),
                None if x.token_dims().next().is_none() => {
                    wide[start..start + dims[dim]].fill(std::mem::replace(&mut out.all, Span::NONE));
                }
                None => {}
            }
            let is_fixed = wide.iter().all(|span| span.is_none());
            out.dims[dim] = if is_fixed { Along::free(extent) } else { Along::Tokens(wide.into()) };
            out.is_guess |= out.seen.take().is_some();
            vec![out]
        } else if let Some(&Cat { dim }) = op.downcast_ref() {
            vec![self.joined(node, &inputs, dim)]
        } else if op.is::<Contiguous>() || op.is::<Cast>() || op.is::<Detach>() || op.is::<SinkAttention>() {
            vec![x.clone()]
        } else if op.is::<Rope>() {
            let mut out = x.clone();
            out.fold(dims.len() - 1, dims[dims.len() - 1]);
            out.is_guess |= out.seen.take().is_some();
            vec![out]
        } else if node.op.is_elementwise() {
            let out = self.elementwise(id, node, &inputs);
            vec![out; node.outputs.len()]
        } else if op.is::<Softmax>() {
            let last = dims.len() - 1;
            let mut out = x.clone();
            if let Some(seen) = out.seen.as_mut().filter(|seen| seen.spans.iter().any(|span| span.is_none())) {
                // If all scores of a row are hidden, none is. The exception is a softmax that gives zeros then.
                let all = Span::all(dims[seen.keys]);
                seen.spans = seen.spans.iter().map(|&span| if span.is_none() { all } else { span }).collect();
                let mut visible = x.clone();
                visible.fold(last, dims[last]);
                out.is_guess |= !visible.is_ahead();
            }
            let seen = out.seen.clone().filter(|seen| seen.keys == last && !seen.is_zero);
            out.fold(last, dims[last]);
            out.seen = seen.map(|seen| Seen { is_zero: true, ..seen });
            vec![out]
        } else if op.is::<LayerNorm>() || op.is::<RmsNorm>() || op.is::<LogSumExp>() || op.is::<Max>() {
            self.rows(node, x)
        } else if op.is::<TopK>() || op.is::<Route>() {
            let mut outputs = self.rows(node, x);
            // The order of rows by expert does not count as a dependence.
            outputs
                .iter_mut()
                .zip(&node.outputs)
                .filter(|(out, _)| out.dims.len() != dims.len())
                .for_each(|(out, &output)| *out = Flow::fixed(self.dims(output)));
            outputs
        } else if let Some(Sum { dims: summed }) = op.downcast_ref() {
            let mut out = x.clone();
            summed.iter().for_each(|&dim| out.fold(dim, 1));
            summed.iter().for_each(|&dim| out.dims[dim] = Along::Same);
            out.seen = out.seen.filter(|seen| !summed.contains(&seen.rows) && !summed.contains(&seen.keys));
            vec![out]
        } else if op.is::<ScaledSum>() {
            let mut out = x.clone();
            (0..dims.len()).for_each(|dim| out.fold(dim, 1));
            out.dims.clear();
            vec![Flow { seen: None, ..out }]
        } else if op.is::<Linear>() {
            vec![self.product(node, (dims.len() - 1, &[]), (1, 0))]
        } else if op.is::<QuantizedLinear>() {
            // The weight depends on no token.
            let (mut out, last) = (x.clone(), dims.len() - 1);
            out.fold(last, dims[last]);
            out.dims[last] = Along::free(to[last]);
            vec![Flow { seen: None, ..out }]
        } else if op.is::<MatMul>() {
            let rank = dims.len();
            let batch: Vec<usize> = (0..rank - 2).collect();
            vec![self.product(node, (rank - 1, &batch), (rank - 2, rank - 1))]
        } else if let Some(attention) = op.downcast_ref() {
            self.attention(id, attention, &inputs)
        } else if op.is::<CachedAttention>() {
            let mut q = x.clone();
            q.fold(3, dims[3]);
            let [batch, heads, tokens, _] = <[Along; 4]>::try_from(q.dims).expect("rank 4 by the shape rule");
            vec![Flow { dims: vec![batch, tokens, heads, Along::Free], seen: None, ..q }]
        } else if op.is::<CacheWrite>() {
            if !self.is_cacheable(&inputs[1]) {
                self.caches_others.get_or_insert(id);
            }
            vec![Flow::fixed(to)]
        } else if op.is::<Embedding>() {
            vec![self.lookup(node, &inputs)]
        } else if let Some(&Gather { dim }) = op.downcast_ref() {
            vec![self.gathered(node, &inputs, dim)]
        } else if op.is::<Dispatch>() || op.is::<SlotWeights>() {
            let mut x = x.clone();
            x.fold(dims.len() - 1, dims[dims.len() - 1]);
            x.dims.pop();
            let mut rows = Flow::fixed(to);
            rows.routed = Some(x.dims);
            rows.all = inputs[1..].iter().fold(x.all, |all, input| all.join(input.all));
            rows.is_guess = inputs[1..].iter().fold(x.is_guess, |is_guess, input| is_guess || input.is_guess);
            vec![rows]
        } else if op.is::<Combine>() {
            let mut out = Flow::fixed(to);
            for input in &inputs {
                (out.all, out.is_guess) = (out.all.join(input.all), out.is_guess || input.is_guess);
            }
            for (along, of_token) in out.dims.iter_mut().zip(x.routed.iter().flatten()) {
                *along = along.join(of_token);
            }
            for (along, place) in out.dims.iter_mut().zip(&inputs[1].dims[..to.len() - 1]) {
                *along = along.join(place);
            }
            vec![out]
        } else if (op.is::<GroupedLinear>() || op.is::<RoutedSwiGlu>() || op.is::<Collective>())
            && inputs.iter().all(|input| !input.depends() || input.routed.is_some())
        {
            let mut rows = Flow::fixed(to);
            inputs.iter().filter(|input| input.routed.is_some()).for_each(|input| rows.absorb(input));
            vec![rows]
        } else {
            // The operation may combine all elements of its inputs.
            let unknown = |&output: &ValueId| Flow {
                all: Span::all(self.tokens),
                is_guess: true,
                ..Flow::fixed(self.dims(output))
            };
            node.outputs.iter().map(unknown).collect()
        }
    }

    fn narrowed(&self, mut x: Flow, dim: usize, start: usize, len: usize) -> Flow {
        if let Some(seen) = x.seen.take_if(|seen| seen.rows == dim || seen.keys == dim) {
            // The rows that are left still see what they saw.
            match seen.rows == dim && len > 1 {
                true => x.seen = Some(Seen { spans: seen.spans[start..start + len].into(), ..seen }),
                false => x.is_guess = true,
            }
        }
        x.dims[dim] = match &x.dims[dim] {
            Along::Tokens(table) if len == 1 => {
                x.all = x.all.join(table[start]);
                Along::Same
            }
            Along::Tokens(table) => Along::Tokens(table[start..start + len].into()),
            Along::Free => Along::free(len),
            Along::Same => Along::Same,
        };
        x
    }

    /// Concatenation along a dimension.
    fn joined(&self, node: &Node, inputs: &[Flow], dim: usize) -> Flow {
        let mut out = Flow::new(inputs[0].dims.clone());
        let mut table: Vec<Span> = Vec::new();
        // If only the indices of this dimension select tokens, each index of the output has the tokens of its part.
        let are_slices = inputs.iter().all(|input| input.token_dims().all(|along| along == dim));
        for (input, &id) in inputs.iter().zip(&node.inputs) {
            let of_part = if are_slices { input.all } else { Span::NONE };
            out.absorb(&Flow { all: if are_slices { Span::NONE } else { input.all }, ..input.clone() });
            out.is_guess |= input.seen.is_some();
            for (_, (along, other)) in out.dims.iter_mut().zip(&input.dims).enumerate().filter(|(at, _)| *at != dim) {
                *along = along.join(other);
            }
            match input.dims[dim].table() {
                Some(part) => table.extend(part.iter().map(|span| span.join(of_part))),
                None => table.resize(table.len() + self.dims(id)[dim], of_part),
            }
        }
        let is_fixed = table.iter().all(|span| span.is_none());
        out.dims[dim] = if is_fixed { Along::Free } else { Along::Tokens(table.into()) };
        out
    }

    fn elementwise(&mut self, id: NodeId, node: &Node, inputs: &[Flow]) -> Flow {
        let dims = self.dims(node.outputs[0]);
        let mut out = Flow::new(vec![Along::Same; dims.len()]);
        for (index, &value) in node.inputs.iter().enumerate() {
            let input = &self.selected(node, inputs, index);
            out.absorb(input);
            if self.dims(value) == dims {
                out.dims.iter_mut().zip(&input.dims).for_each(|(along, other)| *along = along.join(other));
            } else if input.depends() {
                out.all = Span::all(self.tokens);
                out.is_guess = true;
            }
        }
        let combines = |dim: usize| inputs.iter().any(|input| matches!(input.dims.get(dim), Some(Along::Free)));
        if matches!(self.graph.sequences(), Sequences::Continued { .. }) && out.token_dims().any(combines) {
            self.misplaced.get_or_insert(id);
        }
        self.mask(node, inputs, &mut out);
        out
    }

    /// Returns an input of an elementwise operation without the tokens of indices whose elements the operation ignores:
    /// those that a known condition does not choose, and those that are multiplied by zeros.
    fn selected(&mut self, node: &Node, inputs: &[Flow], index: usize) -> Flow {
        let op = node.op.as_ref() as &dyn Any;
        let mut input = inputs[index].clone();
        let is_product = op.downcast_ref().is_some_and(|binary: &Binary| binary.kind == BinaryKind::Mul);
        let (mask, keeps): (usize, Keeps) = match index {
            1 if op.is::<Where>() => (0, |x| x != 0.0),
            2 if op.is::<Where>() => (0, |x| x == 0.0),
            _ if is_product => (1 - index, |x| x != 0.0),
            _ => return input,
        };
        for dim in input.token_dims().collect::<Vec<usize>>() {
            if matches!(inputs[mask].dims.get(dim), None | Some(Along::Same)) {
                continue;
            }
            let known = if inputs[mask].depends() { None } else { self.nonzero(node.inputs[mask], dim, dim, keeps) };
            match (known, input.dims[dim].table()) {
                (Some(kept), Some(table)) => {
                    let left =
                        table.iter().zip(&*kept).map(|(span, kept)| if kept.is_none() { Span::NONE } else { *span });
                    input.dims[dim] = Along::Tokens(left.collect());
                }
                _ => input.is_guess |= op.is::<Where>(),
            }
        }
        input
    }

    /// Sets which scores an elementwise operation excludes, if `out` are scores with rows and keys.
    fn mask(&mut self, node: &Node, inputs: &[Flow], out: &mut Flow) {
        let op = node.op.as_ref() as &dyn Any;
        let kind = op.downcast_ref().map(|binary: &Binary| binary.kind);
        if let Some(at) = inputs.iter().position(|input| input.seen.is_some()) {
            let seen = inputs[at].seen.clone().expect("it was found");
            let is_exp = op.downcast_ref().is_some_and(|unary: &Unary| unary.kind == UnaryKind::Exp);
            let is_alone = inputs.iter().enumerate().all(|(index, input)| index == at || !input.depends());
            // A factor that may be negative makes the lowest scores the highest.
            let scales = seen.is_zero || is_alone && node.inputs.len() == 2 && self.is_positive(node.inputs[1 - at]);
            let stays = match kind {
                Some(BinaryKind::Add) => !seen.is_zero,
                Some(BinaryKind::Sub) => !seen.is_zero && at == 0,
                Some(BinaryKind::Mul) => scales,
                Some(BinaryKind::Div) => at == 0 && scales,
                _ => match op.downcast_ref() {
                    Some(&Affine { shift, .. }) if seen.is_zero => shift == 0.0,
                    Some(&Affine { scale, .. }) => scale > 0.0,
                    // Dropout makes scores zeros. The exponential of a score that is zero is not.
                    None => op.is::<Dropout>() && seen.is_zero || is_exp && !seen.is_zero,
                },
            };
            match stays {
                true => out.seen = Some(Seen { is_zero: seen.is_zero || is_exp, ..seen }),
                false => out.is_guess = true,
            }
            return;
        }
        let &[rows, keys] = &out.token_dims().collect::<Vec<usize>>()[..] else { return };
        // An operand other than the scores that differs by row and by key may be a mask.
        let is_mask = |flow: &Flow| {
            let differs = |dim: usize| !matches!(flow.dims.get(dim), None | Some(Along::Same));
            flow.token_dims().count() < 2 && differs(rows) && differs(keys)
        };
        let Some(at) = inputs.iter().position(is_mask) else { return };
        // The numbers of the mask that keep a score, and whether other scores become zeros.
        let number = |index: usize| self.graph.number(node.inputs[index]);
        let meaning: Option<(Keeps, bool)> = match kind {
            Some(BinaryKind::Add) => Some((|x| x > HIDDEN, false)),
            Some(BinaryKind::Sub) if at == 1 => Some((|x| x < -HIDDEN, false)),
            Some(BinaryKind::Mul) => Some((|x| x != 0.0, true)),
            None if op.is::<Where>() && at == 0 => match (number(1), number(2)) {
                (Some(x), None) if x == 0.0 || x <= HIDDEN => Some((|x| x == 0.0, x == 0.0)),
                (None, Some(x)) if x == 0.0 || x <= HIDDEN => Some((|x| x != 0.0, x == 0.0)),
                _ => None,
            },
            _ => None,
        };
        let is_only = inputs.iter().filter(|input| is_mask(input)).count() == 1;
        let decided = meaning.filter(|_| is_only && !inputs[at].depends());
        match decided.and_then(|(keeps, is_zero)| Some((self.nonzero(node.inputs[at], rows, keys, keeps)?, is_zero))) {
            Some((spans, is_zero)) => out.seen = Some(Seen { rows, keys, spans, is_zero }),
            None => out.is_guess = true,
        }
    }

    /// Rows of which every element reads all elements of a row of `x`. The outputs have the leading dimensions of `x`.
    fn rows(&self, node: &Node, x: &Flow) -> Vec<Flow> {
        let last = x.dims.len() - 1;
        let of_output = |&output: &ValueId| {
            let mut out = x.clone();
            out.fold(last, 2);
            out.dims.truncate(last);
            out.dims.extend(self.dims(output).iter().skip(last).map(|&extent| Along::free(extent)));
            Flow { seen: None, ..out }
        };
        node.outputs.iter().map(of_output).collect()
    }

    /// A matrix product. Dimension `k` of the first input is summed with dimension `l` of the second. The output has
    /// dimension `n` of the second in the place of `k`. The dimensions `batch` correspond to each other.
    fn product(&mut self, node: &Node, (k, batch): (usize, &[usize]), (l, n): (usize, usize)) -> Flow {
        let [first, second] = [node.inputs[0], node.inputs[1]];
        let (mut a, mut b) = (self.flows[&first].clone(), self.flows[&second].clone());
        let (summed, width) = (self.dims(first)[k], self.dims(node.outputs[0])[k]);
        // If one factor is a known matrix, the sum has only the elements where it is not zero.
        let rows = k.checked_sub(1);
        let (mut of_columns, mut of_rows, mut is_guess) = (Along::Same, None, false);
        if let Some(table) = a.dims[k].table().cloned() {
            let spans = match &b.seen {
                Some(seen) if seen.is_zero && seen.keys == l && seen.rows == n => Some(seen.spans.clone()),
                None if !b.depends() => self.nonzero(second, n, l, |x| x != 0.0),
                _ => None,
            };
            if let Some(spans) = spans {
                of_columns = Along::Tokens(spans.iter().map(|span| span.of_table(&table)).collect());
                a.dims[k] = Along::Free;
            } else {
                is_guess = !b.depends() && self.is_computed(second);
            }
        }
        if let (Some(table), Some(rows)) = (b.dims[l].table().cloned(), rows) {
            let spans = match &a.seen {
                Some(seen) if seen.is_zero && seen.keys == k && seen.rows == rows => Some(seen.spans.clone()),
                None if !a.depends() => self.nonzero(first, rows, k, |x| x != 0.0),
                _ => None,
            };
            if let Some(spans) = spans {
                of_rows = Some(Along::Tokens(spans.iter().map(|span| span.of_table(&table)).collect()));
                b.dims[l] = Along::Free;
            } else {
                is_guess |= !a.depends() && self.is_computed(first);
            }
        }
        a.fold(k, summed);
        b.fold(l, summed);
        let mut out = Flow { seen: None, is_guess: a.is_guess || is_guess, ..a };
        out.absorb(&b);
        if let (Some(of_rows), Some(rows)) = (of_rows, rows) {
            out.dims[rows] = out.dims[rows].join(&of_rows);
        }
        batch.iter().for_each(|&dim| out.dims[dim] = out.dims[dim].join(&b.dims[dim]));
        out.dims[k] = of_columns.join(&b.dims[n]).join(&Along::free(width));
        out
    }

    /// True if the keys or values of each token depend on this token only, so that a cache can keep them.
    fn is_cacheable(&self, x: &Flow) -> bool {
        x.is_own(self.tokens) && x.token_dims().all(|dim| dim == 2)
    }

    fn attention(&mut self, id: NodeId, attention: &Attention, inputs: &[Flow]) -> Vec<Flow> {
        let [mut q, mut k, v] = [0, 1, 2].map(|index| inputs[index].clone());
        let [q_dims, k_dims, v_dims] = [0, 1, 2].map(|index| self.dims(self.graph.node(id).inputs[index]));
        // Every score is a sum over the head size.
        q.fold(3, q_dims[3]);
        k.fold(3, k_dims[3]);
        let of_values = v.dims[3].join(&Along::free(v_dims[3]));
        let mut out = Flow { seen: None, is_guess: q.is_guess || q.seen.is_some(), ..q };
        let uses_caches = attention.causal && self.attend == Attend::Caches;
        for (read, dims) in [(k, k_dims), (v, v_dims)] {
            if uses_caches {
                if !self.is_cacheable(&read) {
                    self.caches_others.get_or_insert(id);
                }
                continue;
            }
            out.absorb(&read);
            out.is_guess |= read.seen.is_some();
            // Groups of heads may read the same keys.
            for dim in 0..2 {
                match read.dims[dim].table() {
                    Some(table) if dims[dim] != q_dims[dim] => out.all = out.all.join(Span::join_all(table)),
                    Some(_) => out.dims[dim] = out.dims[dim].join(&read.dims[dim]),
                    None => out.dims[dim] = out.dims[dim].join(&Along::free(dims[dim])),
                }
            }
            match read.dims[2].table() {
                Some(table) if attention.causal && dims[2] == q_dims[2] => {
                    let mut past = Span::NONE;
                    let pasts = table.iter().map(|span| {
                        past = past.join(*span);
                        past
                    });
                    out.dims[2] = out.dims[2].join(&Along::Tokens(pasts.collect()));
                }
                Some(table) => out.all = out.all.join(Span::join_all(table)),
                None => out.dims[2] = out.dims[2].join(&Along::free(q_dims[2])),
            }
        }
        let [batch, heads, tokens, _] = <[Along; 4]>::try_from(out.dims.clone()).expect("rank 4 by the shape rule");
        let log_sums = Flow { dims: vec![batch.clone(), heads.clone(), tokens.clone()], ..out.clone() };
        vec![Flow { dims: vec![batch, tokens, heads, of_values], ..out }, log_sums]
    }

    /// Rows of a table, selected by ids.
    fn lookup(&mut self, node: &Node, inputs: &[Flow]) -> Flow {
        let (mut table, ids) = (inputs[0].clone(), &inputs[1]);
        let mut out = Flow { seen: None, ..ids.clone() };
        if let (Some(rows), true) = (table.dims[0].table().cloned(), ids.dims.len() == 1)
            && let Some(known) = self.elements(node.inputs[1])
        {
            let selected = known.data.iter().map(|&id| rows.get(id as usize).copied().unwrap_or(Span::NONE));
            out.dims[0] = Along::Tokens(selected.collect());
            table.dims[0] = Along::Free;
        }
        table.fold(0, 1);
        out.absorb(&table);
        out.dims.push(table.dims[1].clone());
        out
    }

    /// Elements selected by ids along a dimension.
    fn gathered(&mut self, node: &Node, inputs: &[Flow], dim: usize) -> Flow {
        let (mut x, ids) = (inputs[0].clone(), &inputs[1]);
        let extents = self.dims(node.inputs[1]);
        let mut selected = Along::free(extents[dim]);
        if let Some(table) = x.dims[dim].table().cloned()
            && let Some(known) = self.elements(node.inputs[1])
        {
            let inner: usize = extents[dim + 1..].iter().product();
            let mut spans = vec![Span::NONE; extents[dim]];
            for (index, &id) in known.data.iter().enumerate() {
                let span = &mut spans[index / inner % extents[dim]];
                *span = span.join(table.get(id as usize).copied().unwrap_or(Span::NONE));
            }
            selected = Along::Tokens(spans.into());
            x.dims[dim] = Along::Free;
        }
        x.fold(dim, 2);
        x.dims[dim] = selected;
        let mut out = Flow { seen: None, ..ids.clone() };
        out.absorb(&x);
        out.dims.iter_mut().zip(&x.dims).for_each(|(along, other)| *along = along.join(other));
        out
    }

    /// Returns, for each index of dimension `rows` of a constant, the range of the indices of dimension `columns` at
    /// which an element satisfies `keeps`. If both are the same dimension, the range is 0 if any element does.
    /// Unknown elements are assumed to satisfy it. Returns `None` if no element is known.
    fn nonzero(&mut self, id: ValueId, rows: usize, columns: usize, keeps: Keeps) -> Option<Rc<[Span]>> {
        let value = self.graph.value(id);
        let root = self.stored(value.root)?;
        let (dims, strides) = (value.layout.dims(), value.layout.stride());
        // Indices with stride 0 have equal elements.
        let extents: Vec<usize> = (0..dims.len())
            .map(|dim| if strides[dim] == 0 && dim != rows && dim != columns { 1 } else { dims[dim] })
            .collect();
        let count: usize = extents.iter().product();
        let mut spans = vec![Span::NONE; dims[rows]];
        for mut flat in (0..count).take(MAX_CONSTANT) {
            let (mut at, mut row, mut column) = (value.layout.start_offset(), 0, 0);
            for dim in (0..dims.len()).rev() {
                let index = flat % extents[dim];
                flat /= extents[dim];
                at += index * strides[dim];
                if dim == rows {
                    row = index;
                } else if dim == columns {
                    column = index;
                }
            }
            if root.data[at].is_nan() || keeps(root.data[at]) {
                spans[row] = spans[row].join(Span::of(column));
            }
        }
        (count <= MAX_CONSTANT).then(|| spans.into())
    }

    /// Returns true if a value is computed from other values than its own elements in another type.
    fn is_computed(&self, mut id: ValueId) -> bool {
        loop {
            let Source::Node { node, .. } = self.graph.value(self.graph.value(id).root).source else { return false };
            let node = self.graph.node(node);
            let op = node.op.as_ref() as &dyn Any;
            if !op.is::<Cast>() && !op.is::<Contiguous>() && !op.is::<Detach>() {
                return true;
            }
            id = node.inputs[0];
        }
    }

    /// Returns true if all elements of a value are known to be positive.
    fn is_positive(&mut self, id: ValueId) -> bool {
        match self.graph.number(id) {
            Some(number) => number > 0.0,
            None => self.elements(id).is_some_and(|known| known.data.iter().all(|&x| x > 0.0)),
        }
    }

    /// Returns the elements of a value if all are known when the model is recorded.
    fn elements(&mut self, id: ValueId) -> Option<Array> {
        self.partial(id).filter(is_known)
    }

    /// Returns the elements of a value of which some are known when the model is recorded. The others are NaN.
    fn partial(&mut self, id: ValueId) -> Option<Array> {
        let value = self.graph.value(id);
        let root = self.stored(value.root)?;
        (value.spec.elements() <= MAX_CONSTANT).then(|| root.view(&value.layout))
    }

    /// Returns the stored elements of a value that is not a view, if some are known when the model is recorded. The
    /// others are NaN.
    fn stored(&mut self, root: ValueId) -> Option<Rc<Array>> {
        if let Some(known) = self.constants.get(&root) {
            return known.clone();
        }
        let value = self.graph.value(root);
        let known = match &value.source {
            // A constant stores one element.
            Source::Constant(number) => Some(Array::new(&[], vec![*number])),
            _ if value.spec.elements() > MAX_CONSTANT => None,
            Source::Data { elements, .. } => Some(Array::new(value.spec.dims(), elements.to_vec())),
            Source::Node { node, output } => self.computed(self.graph.node(*node), *output),
            Source::Persistent { .. } | Source::Input { .. } | Source::Cache { .. } => None,
        };
        let known = known.map(Rc::new);
        self.constants.insert(root, known.clone());
        known
    }

    fn computed(&mut self, node: &Node, output: usize) -> Option<Array> {
        let op = node.op.as_ref() as &dyn Any;
        let kind = op.downcast_ref().map(|binary: &Binary| binary.kind);
        let is_arithmetic = matches!(kind, Some(BinaryKind::Add | BinaryKind::Mul | BinaryKind::Div));
        if !is_arithmetic && !op.is::<Where>() && !op.is::<Softmax>() {
            let inputs = node.inputs.iter().map(|&input| self.elements(input)).collect::<Option<Vec<Array>>>()?;
            let reference = Reference { inputs: inputs.iter().collect(), stream: Stream::new(0, 0, 0) };
            return node.op.reference(&reference).into_iter().nth(output);
        }
        // Elements may be known although some of the operands are not.
        let inputs: Vec<Option<Array>> = node.inputs.iter().map(|&input| self.partial(input)).collect();
        if inputs.iter().all(Option::is_none) {
            return None;
        }
        let dims = self.dims(node.outputs[output]);
        let unknown = || Array::new(dims, vec![f64::NAN; dims.iter().product()]);
        let inputs: Vec<Array> = inputs.into_iter().map(|input| input.unwrap_or_else(unknown)).collect();
        if inputs.iter().all(is_known) {
            let reference = Reference { inputs: inputs.iter().collect(), stream: Stream::new(0, 0, 0) };
            return node.op.reference(&reference).into_iter().nth(output);
        }
        if inputs.iter().any(|input| input.dims != dims) {
            return None;
        }
        let known = match (kind, &inputs[..]) {
            (Some(BinaryKind::Mul), [a, b]) => a.zip(b, |a, b| if a == 0.0 || b == 0.0 { 0.0 } else { a * b }),
            (Some(BinaryKind::Div), [a, b]) => a.zip(b, |a, b| if a == 0.0 { 0.0 } else { a / b }),
            // A number that hides a score does so whatever the score is.
            (Some(BinaryKind::Add), [a, b]) => a.zip(b, |a, b| match (a <= HIDDEN, b <= HIDDEN) {
                (true, _) if b.is_nan() => a,
                (_, true) if a.is_nan() => b,
                _ => a + b,
            }),
            (None, [mask, a, b]) => {
                let chosen = mask.data.iter().zip(a.data.iter().zip(&b.data)).map(|(&mask, (&a, &b))| match mask {
                    _ if mask.is_nan() => f64::NAN,
                    0.0 => b,
                    _ => a,
                });
                Array::new(dims, chosen.collect())
            }
            // A softmax makes hidden scores zeros, except in rows where all are hidden.
            (None, [x]) => {
                let is_hidden = |x: &f64| *x <= HIDDEN;
                let of_row = |row: &[f64]| {
                    let any = !row.iter().all(is_hidden);
                    row.iter().map(|x| if any && is_hidden(x) { 0.0 } else { f64::NAN }).collect::<Vec<f64>>()
                };
                Array::new(dims, x.rows().flat_map(of_row).collect())
            }
            _ => return None,
        };
        known.data.iter().any(|x| !x.is_nan()).then_some(known)
    }
}

/// True if no element is NaN, which stands for unknown elements.
fn is_known(elements: &Array) -> bool {
    elements.data.iter().all(|x| !x.is_nan())
}
