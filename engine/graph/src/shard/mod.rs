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

mod analysis;
mod dims;
mod fully;
mod rule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gapless_kernels::Window;
use gapless_parallel::Axes;

use self::analysis::Analysis;
use self::dims::{Dim, Parts};
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Phase, Place, Source, ValueId};
use crate::op::Op;
use crate::ops::{Binary, BinaryKind, BroadcastAs, Cat, Collective, Contiguous, Narrow, Reshape, Widen};

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
    /// Whether ranks divide the tokens between operations on split dimensions (sequence parallelism).
    pub sequence: bool,
}

/// The facts about a graph that the pass needs.
#[derive(Debug)]
pub struct Request<'a> {
    /// The input of tokens, u32 [batch, tokens].
    pub tokens: ValueId,
    /// Values that every rank needs whole.
    pub outputs: &'a [ValueId],
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
}

struct Pass<'a> {
    old: &'a Graph,
    new: Graph,
    sharing: Sharing,
    analysis: Analysis,
    /// The leaves that are split together. Each chosen leaf is a cut.
    cuts: Vec<Parts>,
    /// The cut of tokens into rows, if ranks divide them.
    rows: Option<usize>,
    states: HashMap<ValueId, State>,
    /// The first form of each value.
    first: HashMap<ValueId, ValueId>,
    /// Nodes that read each value.
    readers: HashMap<ValueId, Vec<NodeId>>,
    /// Values of the new graph that a node has read.
    used: HashSet<ValueId>,
    /// Whole and sliced forms of values, by phase and place.
    moved: HashMap<(ValueId, Option<usize>, Phase, Place), ValueId>,
    windows: BTreeMap<String, Window>,
    gathered: BTreeSet<String>,
}

impl<'a> Pass<'a> {
    fn new(old: &'a Graph, sharing: &Sharing, request: &Request<'_>) -> Result<Self> {
        let analysis = Analysis::new(old, request.gradients);
        let part = (sharing.ranks, sharing.rank);
        let chosen = match request.windows {
            None => analysis.choose(old, sharing.ranks),
            Some(windows) => analysis.choose_as(old, part, windows).map_err(|name| {
                let why = format!("{name:?} is split in the training step in a way that this program cannot read");
                Error::config("tensor ranks", why, "use one tensor rank")
            })?,
        };
        let mut cuts: Vec<Parts> = chosen.into_iter().map(|leaf| Parts::from([(leaf, part)])).collect();
        let rows = sharing.sequence.then(|| rows(&analysis, request.tokens, sharing)).transpose()?;
        let rows = rows.map(|rows| {
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
            states: HashMap::new(),
            first: HashMap::new(),
            readers,
            used: HashSet::new(),
            moved: HashMap::new(),
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
                    let cut = self.chosen().find(|&cut| self.has(cut, id));
                    let window = self.window(id, cut);
                    let spec = value.spec.in_shape(window.dims());
                    self.windows.insert(name.clone(), window.clone());
                    (self.new.add_filled(name, spec, fill.part(&window)?)?, cut)
                }
                Source::Input { name } => (self.new.add_input(name, value.spec.clone())?, None),
                Source::Cache { .. } => {
                    let why = "tensor ranks do not continue sequences with caches".to_owned();
                    return Err(Error::config("caches", why, "sample without caches, or with one tensor rank"));
                }
                Source::Constant(number) => (self.new.add_constant(*number, value.spec.clone())?, None),
                Source::Data { elements, .. } => (self.new.add_data(elements.to_vec(), value.spec.clone()), None),
            };
            self.set(id, State { id: new, cut, is_summand: false });
        }
        Ok(())
    }

    /// The cuts of chosen leaves.
    fn chosen(&self) -> impl Iterator<Item = usize> + use<> {
        let rows = self.rows;
        (0..self.cuts.len()).filter(move |&cut| Some(cut) != rows)
    }

    /// The leaves of a cut that are really divided.
    fn leaves(&self, cut: usize) -> impl Iterator<Item = Dim> + '_ {
        self.cuts[cut].iter().filter(|(_, (parts, _))| *parts > 1).map(|(&leaf, _)| leaf)
    }

    /// True if a cut divides a value.
    fn has(&self, cut: usize, id: ValueId) -> bool {
        self.leaves(cut).any(|leaf| self.analysis.leaves[id.index()].contains(&leaf))
    }

    /// True if a value has all leaves of a cut.
    fn has_all(&self, cut: usize, id: ValueId) -> bool {
        self.leaves(cut).all(|leaf| self.analysis.leaves[id.index()].contains(&leaf))
    }

    fn window(&self, id: ValueId, cut: Option<usize>) -> Window {
        self.analysis.window(id, cut.map_or(&Parts::new(), |cut| &self.cuts[cut]))
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
        let is_sum = node.op.is_linear() && node.inputs.iter().all(|input| self.states[input].is_summand);
        if is_sum {
            let inputs: Vec<ValueId> = node.inputs.iter().map(|input| self.states[input].id).collect();
            let outputs = self.apply(node, node.op.clone(), &inputs)?;
            for (&output, id) in node.outputs.iter().zip(outputs) {
                self.set(output, State { id, cut: None, is_summand: true });
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
        let sums: Vec<bool> =
            (0..node.outputs.len()).map(|output| cut.is_some_and(|cut| self.sums(id, output, cut))).collect();
        let mut inputs = Vec::new();
        for &input in &node.inputs {
            inputs.push(self.bring(input, cut, node)?);
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
            self.set(output, State { id: product, cut: None, is_summand: true });
            self.bring_together(output, node)?;
            let State { id: sum, cut, .. } = self.states[&output];
            let shape = self.new.value(sum).spec.shape.clone();
            let rows = self.apply(node, Arc::new(BroadcastAs { shape }), &[added])?[0];
            let id = self.apply(node, Arc::new(Binary { kind: BinaryKind::Add }), &[sum, rows])?[0];
            self.states.insert(output, State { id, cut, is_summand: false });
            return Ok(());
        }
        let outputs = self.apply(node, op, &inputs)?;
        for ((&output, id), is_summand) in node.outputs.iter().zip(outputs).zip(sums) {
            let cut = cut.filter(|&cut| self.has(cut, output));
            self.set(output, State { id, cut, is_summand });
        }
        self.resolve(node)
    }

    /// Returns the cut along which a node runs.
    fn cut_of(&self, id: NodeId) -> Option<usize> {
        let (node, dims) = (self.old.node(id), self.analysis.node(id));
        if !dims.is_ruled {
            return None;
        }
        let splits =
            |&cut: &usize| self.leaves(cut).all(|leaf| dims.leaves.contains(&leaf) && !dims.whole.contains(&leaf));
        let on_rows = |&cut: &usize| {
            let has_all = |&output: &ValueId| self.has_all(cut, output);
            let all_or_none = |&output: &ValueId| self.has_all(cut, output) || !self.has(cut, output);
            let lies = |input: &ValueId| self.states[input].cut == Some(cut);
            self.leaves(cut).all(|leaf| !dims.whole.contains(&leaf))
                && node.outputs.iter().all(all_or_none)
                && (node.outputs.iter().any(has_all) || node.inputs.iter().any(lies))
        };
        let runs = |&cut: &usize| node.op.runs_on(&self.windows_of(&node.inputs, Some(cut)));
        self.chosen().find(splits).or_else(|| self.rows.filter(on_rows)).filter(runs)
    }

    /// True if an output of a node that runs along a cut is a sum over the ranks.
    fn sums(&self, id: NodeId, output: usize, cut: usize) -> bool {
        let (node, dims) = (self.old.node(id), self.analysis.node(id));
        let reads = dims.reads.get(output).and_then(Option::as_ref);
        let is_read = |index: usize| reads.is_none_or(|reads| reads.contains(&index));
        let mut inputs = node.inputs.iter().enumerate().filter(|&(index, _)| is_read(index));
        !self.has(cut, node.outputs[output]) && inputs.any(|(_, &input)| self.has(cut, input))
    }

    /// Adds a node to the new graph, in the phase, the place and the layer of a node of the old graph.
    fn apply(&mut self, like: &Node, op: Arc<dyn Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        self.new.set_phase(like.phase);
        self.new.set_place(like.place);
        self.new.enter_layer(like.layer.clone());
        self.used.extend(inputs);
        let applied = self.new.apply(op, inputs);
        self.new.leave_layer();
        applied
    }

    /// Brings the summands among a node's outputs together, unless all their readers take summands.
    fn resolve(&mut self, node: &Node) -> Result<()> {
        for &output in &node.outputs {
            let takes = |reader: &NodeId| {
                let reader = self.old.node(*reader);
                let is_near = reader.place == node.place && reader.phase == node.phase;
                reader.op.is_linear() && is_near || reader.phase == Phase::Update
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
        match self.rows.filter(|&rows| self.has_all(rows, id) && like.phase != Phase::Update) {
            Some(rows) => self.scatter(id, rows, like),
            None => self.all_reduce(id, like),
        }
    }

    /// Returns the part of a value that a node which runs along a cut reads.
    fn bring(&mut self, id: ValueId, cut: Option<usize>, like: &Node) -> Result<ValueId> {
        let cut = cut.filter(|&cut| self.has(cut, id));
        if let Source::Constant(number) = self.old.value(id).source {
            let dims = self.window(id, cut).dims();
            return Ok(self.new.constant_like(number, self.old.value(id).spec.in_shape(dims)));
        }
        let state = self.states[&id];
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
        let part = self.slice(whole, &self.window(id, Some(cut)), like)?;
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
        let whole = self.gather(id, part, cut, like)?;
        self.moved.insert(key, whole);
        Ok(whole)
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
        self.states.insert(id, State { id: sum, cut: None, is_summand: false });
        Ok(())
    }

    fn sum(&mut self, own: ValueId, like: &Node) -> Result<ValueId> {
        let sum = Collective::AllReduce { axes: self.sharing.axes };
        Ok(self.apply(like, Arc::new(sum), &[own])?[0])
    }

    /// Replaces a summand by this rank's rows of the sum.
    fn scatter(&mut self, id: ValueId, rows: usize, like: &Node) -> Result<()> {
        let window = self.window(id, Some(rows));
        if !self.is_run(&window) {
            self.all_reduce(id, like)?;
            let whole = self.states[&id].id;
            let part = self.slice(whole, &window, like)?;
            self.states.insert(id, State { id: part, cut: Some(rows), is_summand: false });
            return Ok(());
        }
        let Sharing { axes, ranks, .. } = self.sharing;
        let summand = self.states[&id].id;
        let part = self.apply(like, Arc::new(Collective::ReduceScatter { axes, ranks }), &[summand])?;
        let part = self.apply(like, Arc::new(Reshape { shape: window.dims().into() }), &part)?[0];
        self.states.insert(id, State { id: part, cut: Some(rows), is_summand: false });
        Ok(())
    }

    /// True if the ranks' parts of a value are equal runs of its elements, in the order of the ranks.
    fn is_run(&self, window: &Window) -> bool {
        let Sharing { ranks, rank, .. } = self.sharing;
        let elements = window.elements();
        let all: usize = window.whole_dims().iter().product();
        elements * ranks == all && window.runs().eq([rank * elements..(rank + 1) * elements])
    }

    /// Returns a part of a whole value.
    fn slice(&mut self, mut value: ValueId, window: &Window, like: &Node) -> Result<ValueId> {
        for (dim, &extent) in window.whole_dims().iter().enumerate() {
            let held = &window.held()[dim];
            if *held == [0..extent] {
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
        let window = self.window(id, Some(cut));
        let shape = window.whole_dims();
        if self.is_run(&window) {
            return self.all_gather(part, shape, like);
        }
        // Every rank puts its part among zeros, and all are added up. What every rank has is the first rank's.
        let first: Parts = self.cuts[cut].iter().map(|(&leaf, &(parts, _))| (leaf, (parts, 0))).collect();
        let mut value = part;
        for (dim, &extent) in shape.iter().enumerate() {
            let held_with = |parts: &Parts| self.analysis.dims.held(self.analysis.shapes[id.index()][dim], parts);
            let (held, of_first) = (held_with(&self.cuts[cut]), held_with(&first));
            if held.iter().map(ExactSizeIterator::len).sum::<usize>() == extent {
                continue;
            }
            let (mut wide, mut start) = (None, 0);
            for (range, of_first) in held.into_iter().zip(of_first) {
                let narrow = Narrow { dim, start, len: range.len() };
                start += range.len();
                let mut piece = self.apply(like, Arc::new(narrow), &[value])?[0];
                if Some(cut) != self.rows && range == of_first && self.sharing.rank > 0 {
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
        self.sum(value, like)
    }

    /// Brings outputs and gradients together, and carries over what the graph says about its values.
    fn finish(mut self, request: &Request<'_>) -> Result<Sharded> {
        let old = self.old;
        let like = |id: ValueId, phase: Option<Phase>| {
            let made = old.producer(id).cloned();
            let made = made.ok_or_else(|| Error::config("tensor ranks", "an output is not computed", "compute it"))?;
            Ok::<Node, Error>(Node { phase: phase.unwrap_or(made.phase), ..made })
        };
        let mut values: HashMap<ValueId, ValueId> = HashMap::new();
        for id in old.value_ids().filter(|&id| !matches!(old.value(id).source, Source::Node { .. })) {
            values.insert(id, self.states[&id].id);
        }
        for &output in request.outputs {
            let whole = self.bring(output, None, &like(output, None)?)?;
            values.insert(output, whole);
        }
        for &(parameter, gradient) in request.gradients {
            let cut = self.states[&parameter].cut;
            let part = self.bring(gradient, cut, &like(gradient, Some(Phase::Update))?)?;
            values.insert(gradient, part);
        }
        let first = std::mem::take(&mut self.first);
        self.new.carry_over(old, &|id| {
            values.get(&id).or_else(|| first.get(&id)).copied().expect("every value has a form")
        });
        let Self { new: graph, windows, gathered, .. } = self;
        Ok(Sharded { graph, windows, gathered, values })
    }
}

/// Returns the division of tokens among the ranks: of whole sequences as far as their number allows it, then of the
/// tokens of each.
fn rows(analysis: &Analysis, tokens: ValueId, sharing: &Sharing) -> Result<Parts> {
    let fail = |why: String| Error::config("sequence_parallel", why, "set sequence_parallel = false");
    let &[batch, sequence] = &analysis.shapes[tokens.index()][..] else {
        return Err(fail("the tokens must be [batch, tokens]".into()));
    };
    let Sharing { ranks, rank, .. } = *sharing;
    let of_batch = gcd(analysis.dims.extent(batch), ranks);
    let of_sequence = ranks / of_batch;
    let mut parts = Parts::new();
    let cuts = [(batch, of_batch, rank / of_sequence), (sequence, of_sequence, rank % of_sequence)];
    for (dim, parts_of, index) in cuts.into_iter().filter(|(_, parts, _)| *parts > 1) {
        let leaves = analysis.dims.leaves(dim);
        let leaf = leaves.into_iter().next().filter(|&leaf| analysis.dims.extent(leaf) == analysis.dims.extent(dim));
        let Some(leaf) = leaf.filter(|&leaf| !analysis.dims.is_whole(leaf)) else {
            return Err(fail("an operation of the model needs all tokens in one tensor".into()));
        };
        let extent = analysis.dims.extent(leaf);
        if !extent.is_multiple_of(parts_of) {
            let why = format!("{ranks} tensor ranks cannot divide sequences of {extent} tokens");
            let remedy = "let them divide the tokens, or set sequence_parallel = false";
            return Err(Error::config("sequence_parallel", why, remedy));
        }
        parts.insert(leaf, (parts_of, index));
    }
    Ok(parts)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
