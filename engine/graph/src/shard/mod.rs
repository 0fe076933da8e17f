//! The sharding pass: turns the graph of a whole step into that of one rank, with collectives.
//!
//! In: a graph, differentiated or not, in which every tensor is whole. Out: the same graph on the parts of the tensors
//! that one rank holds. Never: a model or an operation that knows of ranks.
//!
//! A dimension of parameters that no operation needs whole (heads, the width of a feed-forward layer) is split wherever
//! it occurs (`analysis.rs`). So the only values that ranks have to bring together are sums over such a
//! dimension: every rank has a *summand*. Forward and backward are the same to the pass; this gives the collectives of
//! Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).
//!
//! With sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2), summands are added up into *rows*:
//! each rank gets some of the tokens. Operations that treat each token on its own continue on rows, and what other
//! operations read is gathered, once in each phase.
//!
//! Context ranks hold whole parameters and have rows of everything. Attention runs on a rank's queries and on all keys,
//! which are gathered (Llama 3, arXiv 2407.21783, section 3.3.2). The gradients of parameters stay summands, because the
//! ranks that share the batch are added up in any case.
//!
//! Experts get the rows of a rank's *own* tokens, if context ranks divide tokens, or if ranks that divide tensors also
//! divide the experts. How many rows these are is known only when the step runs, and rows of several ranks are no parts of
//! one tensor. So own values never move: an operation that reads one runs on it, until rows become tokens again, or a sum
//! (`own.rs`).

mod analysis;
mod dims;
mod fully;
mod own;
mod rule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::{Fold, Spec, Window};
use gapless_parallel::Axes;

use self::analysis::{Analysis, Split};
use self::dims::{Dim, Part, Parts};
use crate::error::{Error, Result};
use crate::graph::{FLOATS, Graph, Node, NodeId, Phase, Place, Source, ValueId};
use crate::op::{Keys, Op};
use crate::ops::{
    Affine, Binary, BinaryKind, BroadcastAs, Cat, Collective, Contiguous, Embedding, Narrow, Reshape, Transpose, Widen,
};

pub use self::fully::{FullSharing, FullySharded, can_be_gathered, fully_shard};
pub use crate::rule::Rule;

/// The ranks that divide tensors, and one of them.
#[derive(Debug, Clone, Copy)]
pub struct Sharing {
    /// The axes of the mesh along which these ranks lie.
    pub axes: Axes,
    /// Number of ranks.
    pub ranks: usize,
    /// Index of this rank.
    pub rank: usize,
    /// The tensors that they divide.
    pub shares: Shares,
    /// Whether each of these ranks has other experts ([`Mesh::fold`](gapless_parallel::Mesh::fold)).
    pub folds: bool,
}

impl Sharing {
    fn divides_tokens(&self) -> bool {
        matches!(self.shares, Shares::Tokens { .. })
    }
}

/// The tensors that ranks divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shares {
    /// Parameters, and what is computed with them.
    Parameters {
        /// Whether ranks divide the tokens between operations on split dimensions (sequence parallelism).
        sequence: bool,
    },
    /// The tokens of each sequence.
    Tokens {
        /// The number of rounds of a [`Fold`].
        rounds: usize,
    },
}

/// The facts about a graph that the pass needs.
#[derive(Debug)]
pub struct Request<'a> {
    /// The input of tokens, u32 [batch, tokens].
    pub tokens: ValueId,
    /// Values that every rank needs whole.
    pub outputs: &'a [ValueId],
    /// Whether these ranks add up outputs and gradients later: each of them then needs a summand.
    pub is_summed: bool,
    /// Parameters and their gradients.
    pub gradients: &'a [(ValueId, ValueId)],
    /// The parts of parameters that ranks hold, if another graph has determined them.
    pub windows: Option<&'a BTreeMap<String, Window>>,
}

/// The graph of one rank.
#[derive(Debug)]
pub struct Sharded {
    /// The graph.
    pub graph: Graph,
    /// The part of each persistent tensor that the rank holds.
    pub windows: BTreeMap<String, Window>,
    /// Names of the operations without a rule that made ranks gather their inputs.
    pub gathered: BTreeSet<String>,
    values: HashMap<ValueId, ValueId>,
}

impl Sharded {
    /// Returns the value of this graph for a value of the whole graph: for outputs the whole value, for gradients the
    /// gradient of the part that the rank holds.
    ///
    /// # Panics
    /// Panics if the value is neither an output, nor a gradient, nor a tensor that no node produces.
    pub fn value(&self, id: ValueId) -> ValueId {
        self.values[&id]
    }
}

/// Returns one rank's graph.
///
/// # Errors
/// Returns an error if the ranks cannot divide the tokens as sequence parallelism needs it, if a parameter cannot be
/// held as `request.windows` says, or the errors of recording graph nodes.
pub fn shard(graph: &Graph, sharing: &Sharing, request: &Request<'_>) -> Result<Sharded> {
    let mut pass = Pass::new(graph, sharing, request)?;
    pass.sources()?;
    for id in graph.node_ids() {
        pass.node(id)?;
    }
    pass.finish(request)
}

/// The form in which a rank holds a value.
#[derive(Debug, Clone, Copy)]
struct State {
    id: ValueId,
    /// The cut of which the rank holds a part, as an index in [`Pass::cuts`]; `None` if it holds all.
    cut: Option<usize>,
    /// Whether the value is the sum over the ranks.
    is_summand: bool,
    /// Whether the value is made of rows of the rank's own tokens, or belongs to the rank's own experts.
    is_own: bool,
}

impl State {
    fn part(id: ValueId, cut: Option<usize>) -> Self {
        Self { id, cut, is_summand: false, is_own: false }
    }

    fn summand(id: ValueId) -> Self {
        Self { is_summand: true, ..Self::part(id, None) }
    }

    fn own(id: ValueId) -> Self {
        Self { is_own: true, ..Self::part(id, None) }
    }
}

struct Pass<'a> {
    old: &'a Graph,
    new: Graph,
    sharing: Sharing,
    analysis: Analysis,
    /// The leaves that are split together, and the parts of each rank. Each chosen split is a cut.
    cuts: Vec<Vec<Parts>>,
    /// The cut of tokens into rows, if ranks divide them.
    rows: Option<usize>,
    /// Whether operations that treat each token on its own run on rows. If not, only experts do.
    is_sequence: bool,
    /// Each rank's parts of the dimensions that count rows of experts.
    own: Vec<Parts>,
    /// The maximum number of rows of the rank's own tokens, by the offsets of their runs.
    sent: HashMap<ValueId, usize>,
    states: HashMap<ValueId, State>,
    /// The first form of each value.
    first: HashMap<ValueId, ValueId>,
    /// Nodes that read each value.
    readers: HashMap<ValueId, Vec<NodeId>>,
    /// Values of the new graph that a node has read.
    used: HashSet<ValueId>,
    /// Whole and sliced forms of values, by phase and place.
    moved: HashMap<(ValueId, Option<usize>, Phase, Place), ValueId>,
    /// The few lists of rows that are picked, with their values. Each layer picks the same ones.
    picked: Vec<(Vec<usize>, ValueId)>,
    windows: BTreeMap<String, Window>,
    gathered: BTreeSet<String>,
}

impl<'a> Pass<'a> {
    fn new(old: &'a Graph, sharing: &Sharing, request: &Request<'_>) -> Result<Self> {
        let Sharing { ranks, shares, .. } = *sharing;
        let mut pairs = request.gradients.to_vec();
        if sharing.divides_tokens() {
            // Ranks divide all inputs that have an element for each token.
            let dims = old.value(request.tokens).spec.dims();
            let is_input = |id: &ValueId| matches!(old.value(*id).source, Source::Input { .. });
            let inputs = old.value_ids().filter(|id| is_input(id) && old.value(*id).spec.dims() == dims);
            pairs.extend(inputs.map(|id| (request.tokens, id)));
        }
        let mut analysis = Analysis::new(old, &pairs);
        let chosen = match request.windows {
            _ if sharing.divides_tokens() => Vec::new(),
            None => analysis.choose(old, ranks, sharing.folds),
            Some(windows) => analysis.choose_as(old, (ranks, sharing.rank), windows).map_err(|name| {
                let why = format!("{name:?} is split in the training step in a way that this program cannot read");
                Error::config("tensor ranks", why, "use one tensor rank")
            })?,
        };
        let of_split = |split: &Split| (0..ranks).map(|rank| split.parts(rank)).collect();
        let mut cuts: Vec<Vec<Parts>> = chosen.iter().map(of_split).collect();
        let is_sequence = shares != Shares::Parameters { sequence: false };
        let has_rows = is_sequence || sharing.folds && old.nodes().iter().any(|node| own::routes(&*node.op));
        let rows =
            has_rows.then(|| (0..ranks).map(|rank| rows(&analysis, request.tokens, ranks, rank, shares)).collect());
        let rows = rows.transpose()?.map(|rows| {
            cuts.push(rows);
            cuts.len() - 1
        });
        let mut readers: HashMap<ValueId, Vec<NodeId>> = HashMap::new();
        for id in old.node_ids() {
            old.node(id).inputs.iter().for_each(|&input| readers.entry(input).or_default().push(id));
        }
        Ok(Self {
            old,
            new: Graph::default(),
            sharing: *sharing,
            analysis,
            cuts,
            rows,
            is_sequence,
            own: vec![Parts::new(); ranks],
            sent: HashMap::new(),
            states: HashMap::new(),
            first: HashMap::new(),
            readers,
            used: HashSet::new(),
            moved: HashMap::new(),
            picked: Vec::new(),
            windows: BTreeMap::new(),
            gathered: BTreeSet::new(),
        })
    }

    /// Declares the values that no node produces.
    fn sources(&mut self) -> Result<()> {
        let old = self.old;
        for id in old.value_ids() {
            let value = old.value(id);
            let (new, cut) = match &value.source {
                Source::Node { .. } => continue,
                Source::Persistent { name, fill } => {
                    let cut = self.chosen().find(|&cut| self.has_all(cut, id));
                    let window = self.window(id, cut);
                    let spec = value.spec.in_shape(window.dims());
                    self.windows.insert(name.clone(), window.clone());
                    (self.new.add_filled(name, spec, fill.part(&window))?, cut)
                }
                Source::Input { name } => {
                    let cut = self.rows_of_source(id);
                    let spec = value.spec.in_shape(self.window(id, cut).dims());
                    (self.new.add_input(name, spec)?, cut)
                }
                Source::Cache { .. } if self.rows_of_source(id).is_some() => {
                    let why = "context ranks do not continue sequences with caches".to_owned();
                    return Err(Error::config("caches", why, "sample without caches, or with one context rank"));
                }
                Source::Cache { name } => {
                    let cut = self.chosen().find(|&cut| self.has_all(cut, id));
                    let spec = value.spec.in_shape(self.window(id, cut).dims());
                    (self.new.add_named_cache(name.clone(), spec)?, cut)
                }
                Source::Constant(number) => (self.new.add_constant(*number, value.spec.clone())?, None),
                Source::Data { elements, .. } => {
                    let cut = self.rows_of_source(id);
                    let window = self.window(id, cut);
                    let own = window.runs().flatten().map(|index| elements[index]).collect();
                    (self.new.add_data(own, value.spec.in_shape(window.dims())), cut)
                }
            };
            self.set(id, State::part(new, cut));
        }
        Ok(())
    }

    /// The cut of a source of tokens of which context ranks get their own tokens.
    fn rows_of_source(&self, id: ValueId) -> Option<usize> {
        self.rows.filter(|&rows| self.sharing.divides_tokens() && self.has_all(rows, id))
    }

    /// The cut along which operations run that treat each token on its own.
    fn scattered(&self) -> Option<usize> {
        self.rows.filter(|_| self.is_sequence)
    }

    /// The cuts of chosen splits.
    fn chosen(&self) -> impl Iterator<Item = usize> + use<> {
        let rows = self.rows;
        (0..self.cuts.len()).filter(move |&cut| Some(cut) != rows)
    }

    /// The leaves of a cut that are really divided.
    fn leaves(&self, cut: usize) -> impl Iterator<Item = Dim> + '_ {
        self.cuts[cut][0].keys().copied()
    }

    /// True if a cut divides a value.
    fn has(&self, cut: usize, id: ValueId) -> bool {
        self.leaves(cut).any(|leaf| self.analysis.leaves[id.index()].contains(&leaf))
    }

    /// True if a value has all leaves of a cut, each in one dimension.
    fn has_all(&self, cut: usize, id: ValueId) -> bool {
        let has = |dim: &&Dim, leaf| self.analysis.dims.leaves(**dim).contains(&leaf);
        self.leaves(cut).all(|leaf| self.analysis.shapes[id.index()].iter().filter(|dim| has(dim, leaf)).count() == 1)
    }

    fn window(&self, id: ValueId, cut: Option<usize>) -> Window {
        self.window_of(id, cut, self.sharing.rank)
    }

    fn window_of(&self, id: ValueId, cut: Option<usize>, rank: usize) -> Window {
        let mut parts = cut.map_or(Parts::new(), |cut| self.cuts[cut][rank].clone());
        if cut == self.rows {
            parts.extend(&self.own[rank]);
        }
        self.analysis.window(id, &parts)
    }

    /// Returns every rank's part of a value. A choice between collectives, or between operations that a later division
    /// treats in different ways, depends on all of them: all ranks must make the same.
    fn windows_of_ranks(&self, id: ValueId, cut: usize) -> impl Iterator<Item = Window> + '_ {
        (0..self.sharing.ranks).map(move |rank| self.window_of(id, Some(cut), rank))
    }

    fn windows_of(&self, ids: &[ValueId], cut: Option<usize>) -> Vec<Window> {
        ids.iter().map(|&id| self.window(id, cut)).collect()
    }

    fn set(&mut self, id: ValueId, state: State) {
        self.states.insert(id, state);
        self.first.entry(id).or_insert(state.id);
    }

    /// Rebuilds a node on this rank's parts.
    fn node(&mut self, id: NodeId) -> Result<()> {
        let old = self.old;
        let node = old.node(id);
        if self.is_own(id) {
            return self.own_node(id);
        }
        let (summed, others) = node.inputs.split_at(node.op.linear_inputs().min(node.inputs.len()));
        if !summed.is_empty() && summed.iter().all(|input| self.states[input].is_summand) {
            let mut inputs: Vec<ValueId> = summed.iter().map(|input| self.states[input].id).collect();
            for &other in others {
                inputs.push(self.bring(other, None, node)?);
            }
            let outputs = self.apply(node, node.op.clone(), &inputs)?;
            for (&output, id) in node.outputs.iter().zip(outputs) {
                self.set(output, State::summand(id));
            }
            return self.resolve(node);
        }
        let cut = self.cut_of(id);
        if cut.is_none() && !self.analysis.node(id).is_ruled {
            let is_split = |input: &ValueId| self.states[input].cut.is_some();
            if node.inputs.iter().any(is_split) {
                self.gathered.insert(node.op.name().to_owned());
            }
        }
        let keys = cut.and_then(|cut| self.keys(id, cut)).unwrap_or(Keys { inputs: &[], outputs: &[] });
        let sums: Vec<bool> = (0..node.outputs.len())
            .map(|output| keys.outputs.contains(&output) || cut.is_some_and(|cut| self.sums(id, output, cut)))
            .collect();
        let mut inputs = Vec::new();
        for (index, &input) in node.inputs.iter().enumerate() {
            inputs.push(self.bring(input, cut.filter(|_| !keys.inputs.contains(&index)), node)?);
        }
        let (of_inputs, of_outputs) = (self.windows_of(&node.inputs, cut), self.windows_of(&node.outputs, cut));
        let on_parts = cut.and_then(|_| node.op.on_parts(&of_inputs, &of_outputs));
        if let Some((statistics, count)) = node.op.statistics().filter(|_| on_parts.is_some()) {
            let statistics = statistics.on_parts(&of_inputs, &[]).unwrap_or(statistics);
            let own = self.apply(node, statistics, &inputs[..count])?[0];
            let dims = [&[self.sharing.ranks], self.new.value(own).spec.dims()].concat();
            inputs.push(self.all_gather(own, &dims, node)?);
        }
        let op = on_parts.unwrap_or_else(|| node.op.clone());
        if let Some((bias, without)) = op.without_bias().filter(|_| sums.contains(&true)) {
            let added = inputs.remove(bias);
            let product = self.apply(node, without, &inputs)?[0];
            let output = node.outputs[0];
            self.set(output, State::summand(product));
            self.bring_together(output, node)?;
            let State { id: sum, cut, .. } = self.states[&output];
            let shape = self.new.value(sum).spec.shape.clone();
            let rows = self.apply(node, Arc::new(BroadcastAs { shape }), &[added])?[0];
            let id = self.apply(node, Arc::new(Binary { kind: BinaryKind::Add }), &[sum, rows])?[0];
            self.states.insert(output, State::part(id, cut));
            return Ok(());
        }
        let outputs = self.apply(node, op, &inputs)?;
        for ((&output, mut id), is_summand) in node.outputs.iter().zip(outputs).zip(sums) {
            // The sum over some of the leaves still has the others: each rank has a summand of a part. An example is the
            // gradient of a key head whose queries are split.
            if let Some(cut) = cut.filter(|&cut| is_summand && self.has(cut, output) && !self.has_all(cut, output)) {
                id = self.among_zeros(output, id, cut, node)?;
            }
            let cut = cut.filter(|&cut| self.has(cut, output) && !is_summand);
            self.set(output, State { is_summand, ..State::part(id, cut) });
        }
        self.resolve(node)
    }

    /// Returns the cut along which a node runs.
    fn cut_of(&self, id: NodeId) -> Option<usize> {
        let (node, dims) = (self.old.node(id), self.analysis.node(id));
        if !dims.is_ruled {
            return None;
        }
        let splits = |&cut: &usize| {
            let is_part = |output| self.has_all(cut, output) || !self.has(cut, output);
            self.leaves(cut).all(|leaf| dims.leaves.contains(&leaf) && !dims.whole.contains(&leaf))
                && node.outputs.iter().enumerate().all(|(index, &output)| is_part(output) || self.sums(id, index, cut))
        };
        let on_rows = |&cut: &usize| {
            let has_all = |&output: &ValueId| self.has_all(cut, output);
            let all_or_none = |&output: &ValueId| self.has_all(cut, output) || !self.has(cut, output);
            let lies = |input: &ValueId| self.states[input].cut == Some(cut);
            self.leaves(cut).all(|leaf| !dims.whole.contains(&leaf))
                && node.outputs.iter().all(all_or_none)
                && (node.outputs.iter().any(has_all) || node.inputs.iter().any(lies))
        };
        // All ranks must come to the same answer.
        let runs = |&cut: &usize| {
            let windows = |rank| -> Vec<Window> {
                node.inputs.iter().map(|&input| self.window_of(input, Some(cut), rank)).collect()
            };
            (0..self.sharing.ranks).all(|rank| node.op.runs_on(&windows(rank)))
        };
        let on_queries = |&cut: &usize| on_rows(&cut) || self.keys(id, cut).is_some();
        let rows = || self.scattered().filter(on_queries).filter(|&cut| self.counts_once(id, cut));
        self.chosen().find(splits).or_else(rows).filter(runs)
    }

    /// Returns the operands with a token for each key, if the node runs on the queries that ranks divide along a cut.
    fn keys(&self, id: NodeId, cut: usize) -> Option<Keys> {
        let (node, dims) = (self.old.node(id), self.analysis.node(id));
        // Only the dimensions of queries and keys have two meanings.
        let are_queries =
            || self.leaves(cut).all(|leaf| dims.whole.contains(&leaf)) && self.has_all(cut, node.inputs[0]);
        node.op.keys().filter(|_| self.sharing.divides_tokens() && are_queries())
    }

    /// False if a sum over the ranks would count elements several times, because all ranks hold them: those of tokens in front
    /// of the sequence, for example.
    fn counts_once(&self, id: NodeId, cut: usize) -> bool {
        let node = self.old.node(id);
        let sums_up = (0..node.outputs.len()).any(|output| self.sums(id, output, cut)) || self.keys(id, cut).is_some();
        let is_divided = |&input: &ValueId| {
            let of_ranks = self.windows_of_ranks(input, cut).map(|window| window.elements());
            !self.has(cut, input) || of_ranks.sum::<usize>() == self.old.value(input).spec.elements()
        };
        !sums_up || node.inputs.iter().all(is_divided)
    }

    /// True if an output of a node that runs along a cut is a sum over the ranks.
    fn sums(&self, id: NodeId, output: usize, cut: usize) -> bool {
        let (node, dims) = (self.old.node(id), self.analysis.node(id));
        let reads = dims.reads.get(output).and_then(Option::as_ref);
        let is_read = |index: usize| reads.is_none_or(|reads| reads.contains(&index));
        let has = |leaf: Dim, id: ValueId| self.analysis.leaves[id.index()].contains(&leaf);
        let is_summed = |leaf: Dim| {
            let mut inputs = node.inputs.iter().enumerate().filter(|&(index, _)| is_read(index));
            !has(leaf, node.outputs[output]) && inputs.any(|(_, &input)| has(leaf, input))
        };
        self.leaves(cut).any(is_summed)
    }

    /// Adds a node to the new graph, in the phase, the place and the layer of a node of the old graph.
    fn apply(&mut self, like: &Node, op: Arc<dyn Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        self.used.extend(inputs);
        self.new.apply_like(like, op, inputs)
    }

    /// Brings the summands among a node's outputs together, unless all their readers take summands.
    fn resolve(&mut self, node: &Node) -> Result<()> {
        for &output in &node.outputs {
            let takes = |reader: &NodeId| {
                let reader = self.old.node(*reader);
                let is_near = reader.place == node.place && reader.phase == node.phase;
                let (summed, others) = reader.inputs.split_at(reader.op.linear_inputs().min(reader.inputs.len()));
                summed.contains(&output) && !others.contains(&output) && is_near || reader.phase == Phase::Update
            };
            let waits = self.readers.get(&output).is_none_or(|readers| readers.iter().all(takes));
            if self.states[&output].is_summand && !waits {
                self.bring_together(output, node)?;
            }
        }
        Ok(())
    }

    /// Adds up the summands of a value: into rows if ranks divide its tokens, otherwise into a whole on every rank.
    fn bring_together(&mut self, id: ValueId, like: &Node) -> Result<()> {
        match self.scattered().filter(|&rows| self.has_all(rows, id) && like.phase != Phase::Update) {
            Some(rows) => self.scatter(id, rows, like),
            None => self.all_reduce(id, like),
        }
    }

    /// Returns the part of a value that a node which runs along a cut reads.
    fn bring(&mut self, id: ValueId, cut: Option<usize>, like: &Node) -> Result<ValueId> {
        if let Source::Constant(number) = self.old.value(id).source {
            let dims = self.window(id, cut).dims();
            return Ok(self.new.constant_like(number, self.old.value(id).spec.in_shape(dims)));
        }
        let cut = cut.filter(|&cut| self.has(cut, id));
        let state = self.states[&id];
        if state.is_own {
            return Ok(state.id);
        }
        if state.is_summand {
            match cut.filter(|&cut| Some(cut) == self.rows && self.has_all(cut, id)) {
                Some(rows) => self.scatter(id, rows, like)?,
                None => self.all_reduce(id, like)?,
            }
        }
        let state = self.states[&id];
        if state.cut == cut {
            return Ok(state.id);
        }
        let whole = self.whole(id, like)?;
        let Some(cut) = cut else { return Ok(whole) };
        let key = (id, Some(cut), like.phase, like.place);
        if let Some(&part) = self.moved.get(&key) {
            return Ok(part);
        }
        let part = self.slice(whole, id, cut, like)?;
        self.moved.insert(key, part);
        Ok(part)
    }

    /// Returns all of a value that is not a summand.
    fn whole(&mut self, id: ValueId, like: &Node) -> Result<ValueId> {
        let State { id: part, cut: Some(cut), .. } = self.states[&id] else { return Ok(self.states[&id].id) };
        // What a backward node has made is gathered for all backward nodes that read it. What the forward has made is
        // gathered again for each phase.
        let made = self.old.producer(id).map_or(Phase::Forward, |node| node.phase);
        let phase = if made == Phase::Forward { like.phase } else { made };
        let key = (id, None, phase, like.place);
        if let Some(&whole) = self.moved.get(&key) {
            return Ok(whole);
        }
        let like = &Node { phase, ..like.clone() };
        let whole = match self.viewed(id, cut) {
            Some((input, op)) => {
                let input = self.whole(input, like)?;
                self.apply(like, op, &[input])?[0]
            }
            None => self.gather(id, part, cut, like)?,
        };
        self.moved.insert(key, whole);
        Ok(whole)
    }

    /// Returns the operation of which a value is a view of all elements, and its input, if both are divided along a cut.
    /// Other views of the input can then share what is gathered.
    fn viewed(&self, id: ValueId, cut: usize) -> Option<(ValueId, Arc<dyn Op>)> {
        let node = self.old.node(self.old.maker(id).filter(|_| self.old.is_view(id))?);
        let &[input] = &node.inputs[..] else { return None };
        let State { cut: of_input, is_summand, .. } = self.states[&input];
        let is_all = self.old.value(input).spec.elements() == self.old.value(id).spec.elements();
        (of_input == Some(cut) && !is_summand && is_all).then(|| (input, node.op.clone()))
    }

    /// Replaces a summand by the sum.
    fn all_reduce(&mut self, id: ValueId, like: &Node) -> Result<()> {
        let summand = self.states[&id].id;
        // The sum is in place, so it needs a tensor of its own.
        let own = match self.new.is_view(summand) || self.used.contains(&summand) {
            true => self.apply(like, Arc::new(Contiguous), &[summand])?[0],
            false => summand,
        };
        let sum = self.sum(own, like)?;
        self.states.insert(id, State::part(sum, None));
        Ok(())
    }

    fn sum(&mut self, own: ValueId, like: &Node) -> Result<ValueId> {
        let sum = Collective::AllReduce { axes: self.sharing.axes };
        Ok(self.apply(like, Arc::new(sum), &[own])?[0])
    }

    /// Replaces a summand by this rank's rows of the sum.
    fn scatter(&mut self, id: ValueId, rows: usize, like: &Node) -> Result<()> {
        let window = self.window(id, Some(rows));
        let summand = self.states[&id].id;
        let (summand, dim) = match (self.are_runs(id, rows), self.places(id, rows)) {
            (true, _) => (summand, 0),
            (false, Some(places)) => {
                let dim = places.dim;
                let forward = self.swap_forward(summand, dim, like)?;
                (self.in_order_of_ranks(forward, &places.swapped(self.forward(dim, window.dims().len())), like)?, dim)
            }
            (false, None) => {
                self.all_reduce(id, like)?;
                let whole = self.states[&id].id;
                let part = self.slice(whole, id, rows, like)?;
                self.states.insert(id, State::part(part, Some(rows)));
                return Ok(());
            }
        };
        let Sharing { axes, ranks, .. } = self.sharing;
        let part = self.apply(like, Arc::new(Collective::ReduceScatter { axes, ranks }), &[summand])?;
        let mut dims = window.dims();
        let to = self.forward(dim, dims.len());
        dims.swap(dim, to);
        let part = self.apply(like, Arc::new(Reshape { shape: dims.into() }), &part)?[0];
        let part = self.swap_forward(part, dim, like)?;
        self.states.insert(id, State::part(part, Some(rows)));
        Ok(())
    }

    /// Returns the places of all ranks' parts of a value, if the ranks divide the indices of one dimension equally.
    fn places(&self, id: ValueId, cut: usize) -> Option<Places> {
        let spec = &self.old.value(id).spec;
        let windows: Vec<Window> = self.windows_of_ranks(id, cut).collect();
        let first = windows[0].dims();
        let mut divided = (0..first.len()).filter(|&dim| first[dim] < spec.dims()[dim]);
        let (dim, None) = (divided.next()?, divided.next()) else { return None };
        let is_even = windows.iter().all(|window| window.dims() == first);
        let held = windows.iter().map(|window| window.held()[dim].iter().cloned().flatten().collect());
        is_even.then(|| Places { dims: spec.dims().to_vec(), dim, held: held.collect() })
    }

    /// Returns the parts of all ranks of a whole value, one after another.
    fn in_order_of_ranks(&mut self, whole: ValueId, places: &Places, like: &Node) -> Result<ValueId> {
        let Places { dims, dim, held } = places;
        let (outer, extent) = (dims[..*dim].iter().product::<usize>(), dims[*dim]);
        let rows: Vec<usize> = held.iter().flat_map(|held| rows_at(outer, extent, held)).collect();
        let shape = [&[held.len()], &dims[..*dim], &[held[0].len()], &dims[dim + 1..]].concat();
        self.pick(whole, rows, shape, places.width(), like)
    }

    /// Returns the whole value of which the parts of all ranks are given one after another: the inverse of
    /// [`Self::in_order_of_ranks`].
    fn in_order_of_indices(&mut self, parts: ValueId, places: &Places, like: &Node) -> Result<ValueId> {
        let Places { dims, dim, held } = places;
        let outer: usize = dims[..*dim].iter().product();
        let len = held[0].len();
        let mut holders = vec![(0, 0); dims[*dim]];
        for (rank, held) in held.iter().enumerate().rev() {
            held.iter().enumerate().for_each(|(at, &index)| holders[index] = (rank, at));
        }
        let row = |o: usize, (rank, at): (usize, usize)| (rank * outer + o) * len + at;
        let rows = (0..outer).flat_map(|o| holders.iter().map(move |&holder| row(o, holder))).collect();
        self.pick(parts, rows, dims.clone(), places.width(), like)
    }

    /// Returns a value with this dimension in the second place, behind the batch, if tokens lie along it. A second call moves it
    /// back. The rows of [`Self::pick`] then consist of all dimensions but the batch, and tensor ranks can still divide them:
    /// the heads of keys [batch, heads, tokens, size], for example. If tensor ranks divide the last dimension, as that of
    /// logits, it is moved to the front, because rows would be single elements.
    fn swap_forward(&mut self, value: ValueId, dim: usize, like: &Node) -> Result<ValueId> {
        let to = self.forward(dim, self.new.value(value).spec.dims().len());
        if dim == to {
            return Ok(value);
        }
        Ok(self.apply(like, Arc::new(Transpose { dim1: to, dim2: dim }), &[value])?[0])
    }

    /// The dimension to which [`Self::swap_forward`] moves one.
    fn forward(&self, dim: usize, dims: usize) -> usize {
        match self.sharing.divides_tokens() {
            true => dim.min(1),
            false if dim + 1 == dims => 0,
            false => dim,
        }
    }

    /// Returns these rows of `width` elements of a value, as a tensor of extents `dims`.
    fn pick(
        &mut self,
        value: ValueId,
        rows: Vec<usize>,
        dims: Vec<usize>,
        width: usize,
        like: &Node,
    ) -> Result<ValueId> {
        let all = self.new.value(value).spec.elements() / width;
        if rows.iter().copied().eq(0..all) {
            return Ok(self.apply(like, Arc::new(Reshape { shape: dims.into() }), &[value])?[0]);
        }
        let table = self.apply(like, Arc::new(Reshape { shape: (all, width).into() }), &[value])?[0];
        let ids = match self.picked.iter().find(|(known, _)| *known == rows) {
            Some(&(_, ids)) => ids,
            None => {
                let spec = Spec { shape: rows.len().into(), dtype: DType::U32 };
                let ids = self.new.add_data(rows.iter().map(|&row| row as f64).collect(), spec);
                self.picked.push((rows, ids));
                ids
            }
        };
        let picked = self.apply(like, Arc::new(Embedding::default()), &[table, ids])?;
        Ok(self.apply(like, Arc::new(Reshape { shape: dims.into() }), &picked)?[0])
    }

    /// Returns these indices of a dimension of a value, and zeros for `None`.
    fn take(&mut self, value: ValueId, dim: usize, indices: &[Option<usize>], like: &Node) -> Result<ValueId> {
        let forward = self.swap_forward(value, dim, like)?;
        let mut dims = self.new.value(forward).spec.dims().to_vec();
        let at = self.forward(dim, dims.len());
        let (outer, extent, width) = (dims[..at].iter().product(), dims[at], dims[at + 1..].iter().product());
        // A lookup gives zeros for a row that the table does not have.
        let row = |o: usize, index: &Option<usize>| index.map_or(outer * extent, |index| o * extent + index);
        let rows = (0..outer).flat_map(|o| indices.iter().map(move |index| row(o, index))).collect();
        dims[at] = indices.len();
        let taken = self.pick(forward, rows, dims, width, like)?;
        self.swap_forward(taken, dim, like)
    }

    /// True if the ranks' parts of a value are equal runs of its elements, in the order of the ranks. All ranks come to the
    /// same answer.
    fn are_runs(&self, id: ValueId, cut: usize) -> bool {
        let (ranks, all) = (self.sharing.ranks, self.old.value(id).spec.elements());
        let elements = all / ranks;
        let is_run = |(rank, window): (usize, Window)| window.runs().eq([rank * elements..(rank + 1) * elements]);
        all.is_multiple_of(ranks) && self.windows_of_ranks(id, cut).enumerate().all(is_run)
    }

    /// Returns this rank's part of a whole value, with the same operations on all ranks. Ranges of a rank that touch are one
    /// range, so ranks whose tokens are divided look rows up even if their own lie side by side.
    fn slice(&mut self, mut value: ValueId, id: ValueId, cut: usize, like: &Node) -> Result<ValueId> {
        let window = self.window(id, Some(cut));
        for (dim, &extent) in window.whole_dims().iter().enumerate() {
            let held = &window.held()[dim];
            if *held == [0..extent] {
                continue;
            }
            let is_float = FLOATS.contains(&self.new.value(value).spec.dtype);
            let is_one_range = || self.windows_of_ranks(id, cut).all(|window| window.held()[dim].len() == 1);
            if (self.sharing.divides_tokens() || !is_float) && !is_one_range() {
                let indices: Vec<Option<usize>> = held.iter().cloned().flatten().map(Some).collect();
                value = self.take(value, dim, &indices, like)?;
                continue;
            }
            let mut ranges = Vec::new();
            for range in held {
                let narrow = Narrow { dim, start: range.start, len: range.len() };
                ranges.push(self.apply(like, Arc::new(narrow), &[value])?[0]);
            }
            value = match ranges[..] {
                [range] => range,
                _ => self.apply(like, Arc::new(Cat { dim }), &ranges)?[0],
            };
        }
        Ok(value)
    }

    /// Returns the elements of all ranks, in the order of the ranks, as a tensor of extents `dims`.
    fn all_gather(&mut self, own: ValueId, dims: &[usize], like: &Node) -> Result<ValueId> {
        let Sharing { axes, ranks, .. } = self.sharing;
        let all = self.apply(like, Arc::new(Collective::AllGather { axes, ranks }), &[own])?;
        Ok(self.apply(like, Arc::new(Reshape { shape: dims.into() }), &all)?[0])
    }

    /// Returns all of a value of which every rank has the part of a cut.
    fn gather(&mut self, id: ValueId, part: ValueId, cut: usize, like: &Node) -> Result<ValueId> {
        if self.are_runs(id, cut) {
            return self.all_gather(part, self.old.value(id).spec.dims(), like);
        }
        if let Some(places) = self.places(id, cut) {
            let dim = places.dim;
            let part = self.swap_forward(part, dim, like)?;
            let dims = [&[self.sharing.ranks], self.new.value(part).spec.dims()].concat();
            let parts = self.all_gather(part, &dims, like)?;
            let to = self.forward(dim, places.dims.len());
            let whole = self.in_order_of_indices(parts, &places.swapped(to), like)?;
            return self.swap_forward(whole, dim, like);
        }
        let own = self.among_zeros(id, part, cut, like)?;
        self.sum(own, like)
    }

    /// Returns a summand of the whole of a value: this rank's part among zeros.
    fn among_zeros(&mut self, id: ValueId, part: ValueId, cut: usize, like: &Node) -> Result<ValueId> {
        let shape = self.old.value(id).spec.dims().to_vec();
        // The first rank alone contributes elements that all ranks hold. Cuts of two dimensions, or of two factors of one, are
        // only made where there are none.
        let first = &self.cuts[cut][0].clone();
        let divides_one = self.cuts[cut][0].len() == 1;
        let mut value = part;
        for (dim, &extent) in shape.iter().enumerate() {
            let held_with = |parts: &Parts| self.analysis.dims.held(self.analysis.shapes[id.index()][dim], parts);
            let (held, of_first) = (held_with(&self.cuts[cut][self.sharing.rank]), held_with(first));
            if held.iter().map(ExactSizeIterator::len).sum::<usize>() == extent {
                continue;
            }
            // Each range, the place of its first element in the part, and whether this rank contributes it.
            let mut start = 0;
            let placed: Vec<(Range<usize>, usize, bool)> = held
                .into_iter()
                .zip(of_first)
                .map(|(range, of_first)| {
                    let at = start;
                    start += range.len();
                    let is_own = !divides_one || range != of_first || self.sharing.rank == 0;
                    (range, at, is_own)
                })
                .collect();
            if self.sharing.divides_tokens() {
                let mut indices = vec![None; extent];
                for (range, at, _) in placed.into_iter().filter(|&(.., is_own)| is_own) {
                    range.enumerate().for_each(|(index, place)| indices[place] = Some(at + index));
                }
                value = self.take(value, dim, &indices, like)?;
                continue;
            }
            let mut wide = None;
            for (range, at, is_own) in placed {
                let mut piece = self.apply(like, Arc::new(Narrow { dim, start: at, len: range.len() }), &[value])?[0];
                if !is_own {
                    let spec = self.new.value(piece).spec.clone();
                    piece = self.new.constant_like(0.0, spec);
                }
                let placed = self.apply(like, Arc::new(Widen { dim, start: range.start, extent }), &[piece])?[0];
                wide = Some(match wide {
                    None => placed,
                    Some(sum) => self.apply(like, Arc::new(Binary { kind: BinaryKind::Add }), &[sum, placed])?[0],
                });
            }
            value = wide.unwrap_or(value);
        }
        Ok(value)
    }

    /// Brings outputs and gradients together, and carries over what the graph says about its values.
    fn finish(mut self, request: &Request<'_>) -> Result<Sharded> {
        let old = self.old;
        let like = |id: ValueId, phase: Option<Phase>| {
            // A view of a gradient may belong to a later phase than its elements.
            let made = old.maker(id).map(|maker| old.node(maker).clone());
            let made = made.ok_or_else(|| Error::config("tensor ranks", "an output is not computed", "compute it"))?;
            Ok::<Node, Error>(Node { phase: phase.unwrap_or(made.phase), ..made })
        };
        let mut values: HashMap<ValueId, ValueId> = HashMap::new();
        for id in old.value_ids().filter(|&id| !matches!(old.value(id).source, Source::Node { .. })) {
            values.insert(id, self.states[&id].id);
        }
        for &output in request.outputs {
            let like = like(output, None)?;
            let new = match request.is_summed {
                true => self.summand(output, &like)?,
                false => self.bring(output, None, &like)?,
            };
            // The host reads outputs.
            let new = match self.new.value(new).layout.is_contiguous() {
                true => new,
                false => self.apply(&like, Arc::new(Contiguous), &[new])?[0],
            };
            values.insert(output, new);
        }
        for &(parameter, gradient) in request.gradients {
            let cut = self.states[&parameter].cut;
            let new = match request.is_summed {
                true => self.summand(gradient, &like(gradient, None)?)?,
                false => self.bring(gradient, cut, &like(gradient, Some(Phase::Update))?)?,
            };
            values.insert(gradient, new);
        }
        let first = std::mem::take(&mut self.first);
        self.new.carry_over(old, &|id| {
            values.get(&id).or_else(|| first.get(&id)).copied().expect("every value has a form")
        });
        let Self { new: graph, windows, gathered, .. } = self;
        Ok(Sharded { graph, windows, gathered, values })
    }

    /// Returns a value of which the sum over the ranks is the whole of a value.
    fn summand(&mut self, id: ValueId, like: &Node) -> Result<ValueId> {
        match self.states[&id] {
            State { id, is_summand: true, .. } | State { id, is_own: true, .. } => Ok(id),
            State { id: part, cut: Some(cut), .. } => self.among_zeros(id, part, cut, like),
            State { id: whole, cut: None, .. } => {
                let share = Affine { scale: 1.0 / self.sharing.ranks as f64, shift: 0.0 };
                Ok(self.apply(like, Arc::new(share), &[whole])?[0])
            }
        }
    }
}

/// The places of all ranks' parts of a value of which they divide one dimension equally.
struct Places {
    /// The extents of the whole value.
    dims: Vec<usize>,
    /// The divided dimension.
    dim: usize,
    /// The indices of that dimension that each rank has, in ascending order.
    held: Vec<Vec<usize>>,
}

impl Places {
    /// The places in the value whose divided dimension is swapped with another.
    fn swapped(mut self, dim: usize) -> Self {
        self.dims.swap(self.dim, dim);
        Self { dim, ..self }
    }

    /// The number of elements at each index of the divided dimension.
    fn width(&self) -> usize {
        self.dims[self.dim + 1..].iter().product()
    }
}

/// Returns the rows at these indices of a dimension of `extent` indices, with `outer` elements in front of it.
fn rows_at(outer: usize, extent: usize, indices: &[usize]) -> Vec<usize> {
    (0..outer).flat_map(|o| indices.iter().map(move |&index| o * extent + index)).collect()
}

/// Returns a rank's part of the tokens. With sequence parallelism, ranks divide whole sequences as far as their number allows
/// it, then the tokens of each. Context ranks divide the tokens of each sequence.
fn rows(analysis: &Analysis, tokens: ValueId, ranks: usize, rank: usize, shares: Shares) -> Result<Parts> {
    let (option, remedy) = match shares {
        Shares::Parameters { sequence: true } => {
            ("sequence_parallel", "let the ranks divide the tokens, or set sequence_parallel = false")
        }
        Shares::Parameters { sequence: false } => {
            ("mesh.fold", "let the tensor ranks divide the tokens, or leave \"tensor\" out")
        }
        Shares::Tokens { .. } => ("mesh.context", "let twice the ranks divide the tokens, or use one context rank"),
    };
    let fail = |why: String| Error::config(option, why, remedy);
    let &[batch, sequence] = &analysis.shapes[tokens.index()][..] else {
        return Err(fail("the tokens must be [batch, tokens]".into()));
    };
    let leaf_of = |dim: Dim| {
        let leaf = analysis.dims.leaves(dim).into_iter().next()?;
        let is_free = analysis.dims.extent(leaf) == analysis.dims.extent(dim) && !analysis.dims.is_whole(leaf);
        is_free.then_some(leaf)
    };
    let of_batch = match shares {
        Shares::Parameters { .. } => leaf_of(batch).map_or(1, |leaf| gcd(analysis.dims.extent(leaf), ranks)),
        Shares::Tokens { .. } => 1,
    };
    let of_sequence = ranks / of_batch;
    let range = |of, index| Part::Range { of, index };
    let extent = analysis.dims.extent(sequence);
    let part_of_sequence = match shares {
        Shares::Parameters { .. } => extent.is_multiple_of(of_sequence).then(|| range(of_sequence, rank % of_sequence)),
        Shares::Tokens { rounds } => Fold::new(extent, (ranks, rank), rounds).map(Part::Fold),
    };
    let Some(part_of_sequence) = part_of_sequence else {
        return Err(fail(format!("{ranks} ranks cannot divide sequences of {extent} tokens equally")));
    };
    let mut parts = Parts::new();
    let cuts = [(batch, of_batch, range(of_batch, rank / of_sequence)), (sequence, of_sequence, part_of_sequence)];
    for (dim, _, part) in cuts.into_iter().filter(|(_, of, _)| *of > 1) {
        let Some(leaf) = leaf_of(dim) else {
            return Err(fail("an operation of the model needs all tokens in one tensor".into()));
        };
        parts.insert(leaf, part);
    }
    Ok(parts)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
