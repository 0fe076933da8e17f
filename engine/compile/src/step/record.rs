//! Records the graph of a training step in stages: forward, partition, autodiff, update.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::DType;
use gapless_alloc::Role;
use gapless_graph::autodiff::differentiate_in;
use gapless_graph::nn::{PairLoss, VarBuilder};
use gapless_graph::optim::ParameterInfo;
use gapless_graph::{Graph, Model, Phase, Place, SequenceLoss, Sequences, Spec, Tensor, ValueId, Window, lock};
use gapless_parallel::{Axes, StageId};

use super::update::{CheckpointLayout, Parameter, Recorded, Update};
use super::{
    Build, DOCUMENT_INPUTS, LABELS_INPUT, LOSS_PARTS, Overflow, REFERENCE_INPUT, RankPlan, StepOptions,
    gradient_output, watched_output,
};
use crate::error::{Error, Result};
use crate::lower::lower;
use crate::lowering::{Lowering, Output, Target};
use crate::partition::{ParameterStages, parameter_stages, partition};
use crate::program::Program;
use crate::recompute::RematPlan;

/// The parts of the model that ranks hold.
#[derive(Debug, Clone, Default)]
pub(super) struct Held {
    /// The stages that read each parameter.
    pub stages: ParameterStages,
    /// The part of each persistent tensor of the forward that this rank has before shard ranks divide it, if tensor ranks
    /// divide tensors.
    pub windows: BTreeMap<String, Window>,
    /// For each persistent tensor of the forward, the axes of the mesh along which each rank holds another part.
    axes: BTreeMap<String, Axes>,
    /// The parameters of experts, of which each expert rank holds a share.
    shares: BTreeSet<String>,
    /// The tensors whose gradients, and in stage 3 also whose elements, shard ranks divide.
    pub divided: BTreeSet<String>,
}

impl Held {
    /// Returns the axes of the mesh along which each rank holds another part of a persistent tensor.
    pub fn axes(&self, name: &str) -> Axes {
        self.axes.get(name).copied().unwrap_or(Axes::NONE)
    }

    /// True if `ranks` tensor ranks hold parts of equal size of every persistent tensor. All of them come to the same answer.
    pub fn is_even(&self, ranks: usize) -> bool {
        let mut divided = self.windows.values().filter(|window| !window.is_whole());
        divided.all(|window| window.elements() * ranks == window.whole_dims().iter().product::<usize>())
    }

    /// Returns whether a persistent tensor is an expert rank's share.
    pub fn is_share(&self, name: &str) -> bool {
        self.shares.contains(name)
    }

    /// Determines the axes along which ranks hold parts of the persistent tensors of a graph, before shard ranks divide
    /// them. Along `experts`, ranks divide the experts of a layer.
    fn find_axes(&mut self, graph: &Graph, experts: Axes) {
        let axes = |(id, name): (ValueId, &str)| {
            let (window, local) = (graph.window(id), self.windows.get(name));
            let of_tensor = if local.is_some_and(|local| !local.is_whole()) { Axes::TENSOR } else { Axes::NONE };
            // The tensor that tensor ranks divide is an expert rank's share.
            let share = local.map_or(window.dims(), |local| local.whole_dims().to_vec());
            let is_share = share != window.whole_dims();
            (name.to_owned(), of_tensor | if is_share { experts } else { Axes::NONE }, is_share)
        };
        for (name, axes, is_share) in graph.persistent().map(axes) {
            if is_share {
                self.shares.insert(name.clone());
            }
            self.axes.insert(name, axes);
        }
    }
}

/// The graph of a training step. It is recorded in stages, each of which builds on the earlier ones.
#[derive(Debug, Clone)]
pub(super) struct TrainStep {
    trace: Trace,
    /// The loss of a micro-batch.
    loss: Tensor,
    /// The weight of a micro-batch's loss in the loss of the whole batch.
    loss_weight: f64,
    gradients: Vec<Parameter>,
    outputs: Vec<Output>,
    roles: HashMap<ValueId, Role>,
    /// Number of trained parameters over all ranks.
    pub parameters: u64,
    /// The parts of the model that ranks hold.
    pub held: Held,
    /// The tensors that ranks keep between steps.
    pub layout: CheckpointLayout,
    /// Names of the watched values that the step outputs.
    pub watched: Vec<String>,
    /// A digest of the graph before its gradients are added.
    pub model: String,
    /// Whether received rows may be evicted before their backward.
    evicts: bool,
}

impl TrainStep {
    /// Records the forward of a micro-batch.
    pub fn forward(build: &Build<'_>, options: &StepOptions, ranks: &RankPlan) -> Result<Self> {
        let _span = tracing::info_span!("forward").entered();
        let parts = options.parts();
        let (trace, model) = Trace::new(build, options, ranks, (options.batch / parts, options.sequence), true)?;
        trace.lock().set_loss_terms(options.loss);
        if let Some(preference) = options.preference {
            let spec = Spec { shape: (options.batch / parts).into(), dtype: DType::F32 };
            let input = |is_needed: bool, name| -> Result<Option<ValueId>> {
                is_needed.then(|| Ok(trace.input(name, spec.clone())?.id())).transpose()
            };
            let reference = input(preference.needs_reference(), REFERENCE_INPUT)?;
            let desirable = input(preference.loss == PairLoss::Kto, LABELS_INPUT)?;
            trace.lock().set_sequence_loss(SequenceLoss::Pairs { preference, reference, desirable });
        }
        let loss = trace.loss(&*model, options.documents, true)?;
        Ok(Self {
            trace,
            loss,
            loss_weight: 1.0 / parts as f64,
            gradients: Vec::new(),
            outputs: Vec::new(),
            roles: HashMap::new(),
            parameters: 0,
            held: Held::default(),
            layout: CheckpointLayout::default(),
            watched: Vec::new(),
            model: String::new(),
            evicts: options.memory.overflow == Overflow::Recompute,
        })
    }

    /// Assigns each forward node to a stage.
    pub fn partition(&mut self, options: &StepOptions, ranks: &RankPlan) -> Result<()> {
        partition(&mut self.trace.lock(), ranks.stages, &options.pipeline.cut)?;
        self.held.stages = parameter_stages(&self.trace.lock());
        Ok(())
    }

    /// Records the gradient of every parameter, on the rank that updates it.
    pub fn differentiate(&mut self, options: &StepOptions) -> Result<()> {
        let _span = tracing::info_span!("autodiff").entered();
        let Self { trace, held: Held { stages, .. }, .. } = self;
        // A sum over several micro-batches loses more to rounding, so the optimizer may choose a wider type for the
        // sum.
        let several = options.micro_batches > 1;
        let looked_up = trace.looked_up();
        let gradients = differentiate_in(&trace.graph, &self.loss, self.loss_weight, &|parameter| {
            let (name, is_looked_up) = (&trace.name(parameter.id()), looked_up.contains(&parameter.id()));
            let info = trace.info(parameter, (name, parameter.dims()), is_looked_up, options);
            let rule = trace.lock().optimizer_of(parameter.id()).cloned();
            if several { rule.as_ref().unwrap_or(options.rule_of(name)).sum_dtype(&info) } else { info.dtype }
        })?;
        self.loss.set_phase(Phase::Update);
        for gradient in gradients {
            let parameter = trace.tensor(gradient.parameter);
            let name = trace.name(gradient.parameter);
            // The first stage that reads a parameter owns it. The other stages that read the parameter receive its new
            // value.
            let owner = stages.get(&name).and_then(|stages| stages.first()).copied().unwrap_or(StageId(0));
            trace.lock().set_place(Place::Stage(owner));
            let summands = gradient.summands.iter().map(|&id| trace.tensor(id));
            let total = summands.map(Ok).reduce(|a, b| a?.add(&b?)).expect("a gradient has a summand")?;
            let gradient = total.reshape(parameter.dims().to_vec())?;
            let dims = trace.lock().window(parameter.id()).whole_dims().to_vec();
            let looked_up = looked_up.contains(&parameter.id());
            self.gradients.push(Parameter { name, tensor: parameter, dims, looked_up, gradient, owner });
        }
        Ok(())
    }

    /// Replaces the graph by that of this rank, if ranks divide tensors.
    pub fn shard(&mut self, options: &StepOptions, ranks: &RankPlan) -> Result<()> {
        for sharing in ranks.sharings(options) {
            let outputs: Vec<ValueId> = [vec![self.loss.id()], self.trace.reported(self.loss.id())].concat();
            let sharded = self.trace.shard(&sharing, &outputs, &self.pairs(), None)?;
            self.replace(|id| sharded.value(id));
            self.held.windows = sharded.windows;
        }
        self.held.find_axes(&self.trace.lock(), ranks.mesh.experts());
        if let Some(sharing) = ranks.full_sharing(options) {
            self.held.divided = self.divided(options, ranks, sharing.ranks);
            let sharded = self.trace.fully_shard(&sharing, &self.held.divided, &self.pairs())?;
            self.replace(|id| sharded.value(id));
            let Held { axes, divided, .. } = &mut self.held;
            for (_, axes) in axes.iter_mut().filter(|(name, _)| sharing.parameters && divided.contains(*name)) {
                *axes = *axes | sharing.axes;
            }
        }
        Ok(())
    }

    /// Returns the names of the tensors that `ranks` ranks divide: those that their update rules allow, and frozen ones.
    fn divided(&self, options: &StepOptions, plan: &RankPlan, ranks: usize) -> BTreeSet<String> {
        let Self { trace, held, gradients, .. } = self;
        let grains: HashMap<&str, Option<usize>> = gradients
            .iter()
            .map(|Parameter { name, tensor, dims, looked_up, .. }| {
                let own = trace.lock().optimizer_of(tensor.id()).cloned();
                let rule = own.as_ref().unwrap_or(options.rule_of(name));
                (name.as_str(), rule.shard_granularity(&trace.info(tensor, (name, dims), *looked_up, options)))
            })
            .collect();
        let is_read = |name: &str| held.stages.contains_key(name);
        let grain = |name: &str| grains.get(name).copied().unwrap_or(is_read(name).then_some(1));
        // Shard ranks that hold different experts have nothing to gather.
        let grain = |name: &str| grain(name).filter(|_| held.axes(name) & Axes::SHARD == Axes::NONE);
        trace.divisible(ranks, |name| plan.mesh.size(held.axes(name)), grain)
    }

    /// The parameters with their gradients.
    fn pairs(&self) -> Vec<(ValueId, ValueId)> {
        self.gradients.iter().map(|p| (p.tensor.id(), p.gradient.id())).collect()
    }

    /// Replaces the loss, the parameters and the gradients by those of another graph.
    fn replace(&mut self, new: impl Fn(ValueId) -> ValueId) {
        let Self { trace, loss, gradients, .. } = self;
        let replace = |tensor: &mut Tensor| *tensor = trace.tensor(new(tensor.id()));
        replace(loss);
        gradients.iter_mut().flat_map(|p| [&mut p.tensor, &mut p.gradient]).for_each(replace);
    }

    /// Records the loss, the norm, the update of every parameter, and the outputs that the host reads.
    pub fn update(&mut self, options: &StepOptions, ranks: &RankPlan) -> Result<()> {
        let Self { trace, gradients, held, .. } = &*self;
        let trained = |p: &&Parameter| trace.lock().optimizer_of(p.tensor.id()).is_none();
        let count = gradients.iter().filter(trained).map(|p| p.dims.iter().product::<usize>() as u64).sum();
        let update = Update { trace, plan: ranks, options, held };
        let mean_loss = update.mean_loss(&self.loss, self.loss_weight)?;
        let mut outputs = vec![Output::everywhere("loss", mean_loss.id())];
        for (part, name) in LOSS_PARTS {
            outputs.extend(
                update
                    .mean_loss_part(part, &self.loss, self.loss_weight)?
                    .map(|mean| Output::everywhere(name, mean.id())),
            );
        }
        let watched = trace.lock().watched().to_vec();
        for (name, id) in &watched {
            outputs.push(Output::everywhere(watched_output(name), update.total(&trace.tensor(*id))?.id()));
        }
        if options.keep_gradients {
            outputs.extend(gradients.iter().map(|p| Output::local(gradient_output(&p.name), p.gradient.id())));
        }
        let Recorded { norm, roles, mut layout } = update.record(gradients, &mean_loss)?;
        outputs.push(Output::everywhere("gradient_norm", norm.id()));
        self.keep_frozen(&update, &mut layout);
        self.watched = watched.into_iter().map(|(name, _)| name).collect();
        (self.parameters, self.outputs, self.roles, self.layout) = (count, outputs, roles, layout);
        Ok(())
    }

    /// Adds to the layout the persistent tensors that the forward reads and that no update changes.
    fn keep_frozen(&self, update: &Update<'_>, layout: &mut CheckpointLayout) {
        let graph = self.trace.lock();
        for (id, name) in graph.persistent().filter(|(_, name)| self.held.stages.contains_key(*name)) {
            if !layout.shapes.contains_key(name) {
                let window = graph.window(id);
                layout.shapes.insert(name.to_owned(), window.whole_dims().to_vec());
                layout.frozen.insert(name.to_owned(), graph.weight_elements(id) as u64);
                if !window.is_whole() {
                    let axes = self.held.axes(name);
                    layout.parts.insert(name.to_owned(), update.kept_part(axes, window));
                }
            }
        }
    }

    /// Lowers the graph to the program of one rank.
    pub fn lower(
        &self,
        options: &StepOptions,
        ranks: &RankPlan,
        target: Target,
        recomputation: &RematPlan,
    ) -> Result<Program> {
        self.lower_graph(&self.graph(), options, ranks, target, recomputation)
    }

    /// Like [`Self::lower`], for a graph that the caller has locked.
    pub fn lower_graph(
        &self,
        graph: &Graph,
        options: &StepOptions,
        ranks: &RankPlan,
        target: Target,
        recomputation: &RematPlan,
    ) -> Result<Program> {
        lower(&self.lowering(graph, options, ranks, target, recomputation))
    }

    /// Returns the input of lowering for one rank. `graph` is the graph of this step, which the caller has locked.
    pub fn lowering<'a>(
        &'a self,
        graph: &'a Graph,
        options: &StepOptions,
        ranks: &'a RankPlan,
        target: Target,
        recomputation: &'a RematPlan,
    ) -> Lowering<'a> {
        Lowering {
            name: "train",
            graph,
            table: &ranks.table,
            rank: ranks.at.pipeline,
            outputs: &self.outputs,
            roles: &self.roles,
            recomputation,
            evicts: self.evicts,
            overlap: options.overlap(),
            target,
        }
    }

    pub fn graph(&self) -> MutexGuard<'_, Graph> {
        self.trace.lock()
    }

    pub fn outputs(&self) -> &[Output] {
        &self.outputs
    }
}

/// A graph whose forward reads an input of tokens. Clones share the graph.
#[derive(Debug, Clone)]
pub(super) struct Trace {
    pub(super) graph: Arc<Mutex<Graph>>,
    pub tokens: Tensor,
}

impl Trace {
    /// Creates a graph with an input `tokens` of the given extents (sequences, tokens), and builds the model to apply
    /// to it.
    pub fn new<'a>(
        build: &Build<'a>,
        options: &StepOptions,
        plan: &RankPlan,
        extents: (usize, usize),
        is_training: bool,
    ) -> Result<(Self, Box<dyn Model + 'a>)> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, options.precision.dtype()).with_expert_ranks(plan.expert_ranks());
        let model = build(vb.with_trainable(&options.trainable).with_training(is_training))?;
        options.trainable.check_model(&lock(&graph))?;
        let spec = Spec { shape: extents.into(), dtype: DType::U32 };
        let id = lock(&graph).add_input("tokens", spec)?;
        let tokens = Tensor::of(&graph, id);
        if plan.mesh.context > 1 {
            let mut graph = lock(&graph);
            let places = (0..extents.0).flat_map(|_| 0..extents.1).map(|place| place as f64);
            let positions = graph.add_data(places.collect(), tokens.spec().clone());
            graph.set_sequences(Sequences::Placed { positions });
        }
        Ok((Self { graph, tokens }, model))
    }

    /// Returns the tables whose rows are looked up by ids, whether or not these are ids of tokens.
    fn looked_up(&self) -> HashSet<ValueId> {
        let graph = self.lock();
        let lookups = graph.nodes().iter().filter(|node| node.op.name() == "embedding");
        lookups.map(|node| graph.value(node.inputs[0]).root).collect()
    }

    /// Returns whether a parameter is the weight of an output head, and whether it is a list of vectors.
    fn marks(&self, parameter: ValueId) -> [bool; 2] {
        let graph = self.lock();
        [graph.is_head(parameter), graph.has_vectors(parameter)]
    }

    /// Returns what update rules know about a parameter, of which `tensor` is this rank's part.
    pub fn info<'a>(
        &self,
        tensor: &Tensor,
        (name, dims): (&'a str, &'a [usize]),
        looked_up: bool,
        options: &StepOptions,
    ) -> ParameterInfo<'a> {
        let [head, vectors] = self.marks(tensor.id());
        let (dtype, masters) = (tensor.dtype(), options.precision.has_masters());
        ParameterInfo { name, dims, dtype, looked_up, head, vectors, masters }
    }

    /// Returns the number of rows of the smallest table in which tokens are looked up.
    pub fn smallest_table(&self) -> usize {
        let graph = self.lock();
        let lookups = graph.nodes().iter().filter(|n| n.op.name() == "embedding" && n.inputs[1] == self.tokens.id());
        lookups.map(|n| graph.value(n.inputs[0]).spec.dims()[0]).min().unwrap_or(usize::MAX)
    }

    /// Records the model's loss of the tokens. If `documents` is true, sequences may hold several documents.
    ///
    /// # Errors
    /// Returns the model's own errors, and an error if the loss ignores the tokens' weights.
    pub fn loss(&self, model: &dyn Model, documents: bool, train: bool) -> Result<Tensor> {
        let input = |name, dtype| self.input(name, Spec { shape: self.tokens.shape().clone(), dtype });
        let targets = input("targets", DType::U32)?;
        if !documents {
            return Ok(model.loss(&self.tokens, &targets, train)?);
        }
        let [starts, positions, weights, routed] = DOCUMENT_INPUTS;
        let (document_starts, positions) = (input(starts, DType::U32)?.id(), input(positions, DType::U32)?.id());
        let (weights, routed) = (input(weights, DType::F32)?.id(), input(routed, DType::F32)?.id());
        self.lock().set_sequences(Sequences::Packed { document_starts, positions, weights, routed });
        let loss = model.loss(&self.tokens, &targets, train)?;
        let is_weighted = self.lock().nodes().iter().any(|node| node.inputs.contains(&weights));
        if !is_weighted {
            let why = "the model's loss ignores the weights of tokens";
            let remedy = "compute it with Tensor::cross_entropy or Tensor::linear_cross_entropy";
            return Err(Error::config("documents", why, remedy));
        }
        Ok(loss)
    }

    pub fn input(&self, name: &str, spec: Spec) -> gapless_graph::Result<Tensor> {
        let id = self.lock().add_input(name, spec)?;
        Ok(Tensor::of(&self.graph, id))
    }

    pub fn tensor(&self, id: ValueId) -> Tensor {
        Tensor::of(&self.graph, id)
    }

    pub fn lock(&self) -> MutexGuard<'_, Graph> {
        lock(&self.graph)
    }

    fn name(&self, id: ValueId) -> String {
        let graph = self.lock();
        graph.persistent().find(|p| p.0 == id).map(|p| p.1.to_owned()).expect("parameters have names")
    }
}
