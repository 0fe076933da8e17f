//! One executable of everything a trainer runs: training step, evaluation, logits.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::DType;
use gapless_alloc::Role;
use gapless_parallel::StageId;

#[cfg(test)]
mod budget_reference;
mod options;
mod overflow;
mod ranks;
mod update;

pub use options::StepOptions;
pub use overflow::Overflow;
pub use ranks::{Pipeline, RankPlan, Share};
pub use update::{Kept, KeptPart};

use gapless_graph::autodiff::differentiate_in;
use gapless_graph::nn::VarBuilder;
use gapless_graph::optim::Updated;
use gapless_graph::{Graph, Model, Phase, Place, Spec, Tensor, ValueId, lock};

use self::update::{Parameter, Recorded, Update};
use crate::error::{Error, Result};
use crate::executable::{compile, height};
use crate::lower::alive_nodes;
use crate::partition::{ParameterStages, cut, cut_like, parameter_stages};
use crate::recompute::{Recomputation, Resolving};
use crate::{Executable, Held, Lowering, Output, Program, Target, lower};

/// What makes a model, whichever it is: so what records and compiles steps is compiled once, and not for every model anew.
pub type Build<'a> = dyn Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a;

/// The same for any model.
pub fn of_any<'a, M: Model + 'a>(
    build: impl Fn(VarBuilder) -> gapless_graph::Result<M> + 'a,
) -> impl Fn(VarBuilder) -> gapless_graph::Result<Box<dyn Model + 'a>> + 'a {
    move |vb| Ok(Box::new(build(vb)?))
}

/// The input that carries the optimizer's numbers of a step.
pub const SCALARS_INPUT: &str = "step.scalars";

/// What there is to know of a trainer's programs beside the executable.
pub struct CompiledStep {
    /// Trained numbers.
    pub parameters: u64,
    pub vocabulary: usize,
    pub kept: Kept,
    /// Names of what the step shows beside the loss.
    pub watched: Vec<String>,
}

/// The name under which a gradient can be read.
pub fn gradient_output(parameter: &str) -> String {
    format!("gradient of {parameter}")
}

/// The name under which a watched value can be read.
pub fn watched_output(name: &str) -> String {
    format!("watched {name}")
}

/// The program of a rank's training step, before anything has an address.
///
/// # Errors
/// When the options or the model's shapes do not fit together, or there is no such rank.
pub fn program(build: &Build<'_>, options: &StepOptions, rank: usize, target: Target) -> Result<Program> {
    let plan = RankPlan::new(options.mesh, rank, &options.pipeline, options.micro_batches)?;
    TrainStep::record(build, options, &plan)?.program(options, &plan, target, &[])
}

/// Compiles the training step, the evaluation and the logits of one sequence into one arena.
///
/// # Errors
/// When the options or the model's shapes do not fit together; [`Error::OverBudget`].
pub fn compile_step(
    build: &Build<'_>,
    options: &StepOptions,
    plan: &RankPlan,
    target: Target,
) -> Result<(Executable, CompiledStep)> {
    let step = TrainStep::record(build, options, plan)?;

    let (trace, model) = Trace::new(build, options, plan, options.evaluation_batch())?;
    let loss = model.loss(&trace.tokens, &trace.targets()?, false)?;
    let evaluate =
        trace.lower_forward("evaluate", Output::everywhere("loss", loss.id()), plan, &step.stages, target)?;

    let (trace, model) = Trace::new(build, options, plan, 1)?;
    let logits = model.forward(&trace.tokens, false)?;
    let vocabulary = logits.dim(candle_core::D::Minus1)?.min(trace.smallest_table());
    let logits = logits.contiguous()?;
    let logits =
        trace.lower_forward("logits", Output::everywhere("logits", logits.id()), plan, &step.stages, target)?;

    let train = step.program(options, plan, target, &[&evaluate, &logits])?;
    let programs = [train, evaluate, logits];
    if plan.mesh.pipeline > 1 || plan.mesh.expert > 1 {
        expect_same_parameters(&programs)?;
    }
    let executable = compile(&programs, &options.planning_within(options.recompute.capacity()))?;
    let TrainStep { parameters, kept, watched, .. } = step;
    Ok((executable, CompiledStep { parameters, vocabulary, kept, watched }))
}

/// What only a later program reads would not follow the training.
fn expect_same_parameters(programs: &[Program]) -> Result<()> {
    let held = |program: &Program| -> BTreeSet<String> {
        let always = program.buffers.iter().filter(|b| matches!(b.held, Held::Always { .. }));
        always.filter(|b| b.label.role == Role::Parameter).map(|b| b.label.tensor.clone()).collect()
    };
    let trained = held(&programs[0]);
    for program in &programs[1..] {
        if let Some(name) = held(program).difference(&trained).next() {
            let why = format!("{:?} reads {name:?}, which the training step does not", program.name);
            let remedy = "read it in the loss too, or use one rank per copy of the model";
            return Err(Error::Config { what: "a model for several ranks", why, remedy });
        }
    }
    Ok(())
}

/// The graph of a training step.
pub struct TrainStep {
    trace: Trace,
    outputs: Vec<Output>,
    roles: HashMap<ValueId, Role>,
    /// Trained numbers, of all ranks together.
    pub parameters: u64,
    /// Which stages read each parameter.
    pub stages: ParameterStages,
    pub kept: Kept,
    /// Names of what it shows beside the loss.
    pub watched: Vec<String>,
    /// Whether rows that are received need not wait for their backward.
    lets_go: bool,
}

impl TrainStep {
    pub fn record(build: &Build<'_>, options: &StepOptions, plan: &RankPlan) -> Result<Self> {
        let parts = options.micro_batches * plan.batch_ranks();
        let share = 1.0 / parts as f64;
        let (trace, model) = Trace::new(build, options, plan, options.batch / parts)?;
        let loss = {
            let _span = tracing::info_span!("forward").entered();
            model.loss(&trace.tokens, &trace.targets()?, true)?
        };
        cut(&mut trace.lock(), plan.stages, &options.pipeline.cut)?;
        let stages = parameter_stages(&trace.lock());
        let gradients = {
            let _span = tracing::info_span!("autodiff").entered();
            // What is summed up over micro-batches loses more than what isn't.
            let several = options.micro_batches > 1;
            let looked_up = trace.looked_up();
            differentiate_in(&trace.graph, &loss, share, &|parameter| {
                let (name, dims, dtype) = (&trace.name(parameter.id()), parameter.dims(), parameter.dtype());
                let of = Updated { name, dims, dtype, looked_up: looked_up.contains(&parameter.id()) };
                let rule = trace.lock().rule(parameter.id()).cloned();
                if several { rule.as_deref().unwrap_or(&*options.optimizer).sum_dtype(&of) } else { dtype }
            })?
        };
        loss.set_phase(Phase::Update);
        let mut parameters = Vec::new();
        for gradient in gradients {
            let parameter = Tensor::new(&trace.graph, gradient.parameter);
            let name = trace.name(gradient.parameter);
            // The first stage that reads a parameter owns it; others are brought its new value.
            let owner = stages.get(&name).and_then(|stages| stages.first()).copied().unwrap_or(StageId(0));
            trace.lock().set_place(Place::Stage(owner));
            let summands = gradient.summands.iter().map(|&id| Tensor::new(&trace.graph, id));
            let total = summands.map(Ok).reduce(|a, b| a?.add(&b?)).expect("a gradient has a summand")?;
            let gradient = total.reshape(parameter.dims().to_vec())?;
            let shared = trace.lock().shared(parameter.id()).cloned();
            let dims = shared.as_ref().unwrap_or(parameter.shape()).dims().to_vec();
            parameters.push(Parameter { name, tensor: parameter, dims, shared: shared.is_some(), gradient, owner });
        }
        let trained = |p: &&Parameter| trace.lock().rule(p.tensor.id()).is_none();
        let count = parameters.iter().filter(trained).map(|p| p.dims.iter().product::<usize>() as u64).sum();

        let update = Update { trace: &trace, plan, release: options.release_gradients };
        let mean_loss = update.mean_loss(&loss, share)?;
        let mut outputs = vec![Output::everywhere("loss", mean_loss.id())];
        let watched = trace.lock().watched().to_vec();
        for (name, id) in &watched {
            outputs.push(Output::everywhere(watched_output(name), update.total(&trace.tensor(*id))?.id()));
        }
        if options.keep_gradients {
            outputs.extend(parameters.iter().map(|p| Output::local(gradient_output(&p.name), p.gradient.id())));
        }
        let Recorded { norm, roles, mut kept } = update.record(&parameters, &mean_loss, &*options.optimizer)?;
        outputs.push(Output::everywhere("gradient_norm", norm.id()));
        {
            let graph = trace.lock();
            for (id, name) in graph.persistent().filter(|(_, name)| stages.contains_key(*name)) {
                if !kept.shapes.contains_key(name) {
                    let here = &graph.value(id).spec;
                    let whole = graph.shared(id).unwrap_or(&here.shape);
                    kept.shapes.insert(name.to_owned(), whole.dims().to_vec());
                    kept.frozen.insert(name.to_owned());
                    if graph.shared(id).is_some() {
                        kept.parts.insert(name.to_owned(), update.share(here.elements()));
                    }
                }
            }
        }
        let watched = watched.into_iter().map(|(name, _)| name).collect();
        let lets_go = options.overflow == Overflow::Recompute;
        Ok(Self { trace, outputs, roles, parameters: count, stages, kept, watched, lets_go })
    }

    /// The program of one rank. A budget is for it and `others` in one arena.
    pub fn program(
        &self,
        options: &StepOptions,
        plan: &RankPlan,
        target: Target,
        others: &[&Program],
    ) -> Result<Program> {
        let _span = tracing::info_span!("recompute").entered();
        let graph = self.trace.lock();
        let (alive, row) = (alive_nodes(&graph, &self.outputs), &plan.table[plan.at.pipeline]);
        let resolving = Resolving { graph: &graph, alive: &alive, row, stashing: options.stashing() };
        let recomputation = resolving.resolve(&options.recompute, |recomputation, capacity| {
            let train = self.lower(&graph, plan, target, recomputation)?;
            let programs: Vec<&Program> = [&train].into_iter().chain(others.iter().copied()).collect();
            height(&programs, options.planning_within(capacity))
        })?;
        self.lower(&graph, plan, target, &recomputation)
    }

    fn lower(&self, graph: &Graph, plan: &RankPlan, target: Target, recomputation: &Recomputation) -> Result<Program> {
        lower(&Lowering {
            name: "train",
            graph,
            table: &plan.table,
            rank: plan.at.pipeline,
            outputs: &self.outputs,
            roles: &self.roles,
            recomputation,
            lets_go: self.lets_go,
            target,
        })
    }
}

/// What a judge needs to go through all ways by itself.
#[cfg(test)]
impl TrainStep {
    pub fn graph(&self) -> MutexGuard<'_, Graph> {
        self.trace.lock()
    }

    pub fn outputs(&self) -> &[Output] {
        &self.outputs
    }

    /// The program whose first micro-batch drops some values, and the others others.
    pub fn dropping(
        &self,
        plan: &RankPlan,
        target: Target,
        first: Vec<ValueId>,
        rest: Vec<ValueId>,
    ) -> Result<Program> {
        let graph = self.trace.lock();
        let saved = crate::recompute::Saved::new(&graph, &alive_nodes(&graph, &self.outputs));
        let recomputation = Recomputation::uniform(saved.dropping(rest)).but_for(0, saved.dropping(first));
        self.lower(&graph, plan, target, &recomputation)
    }
}

/// A graph over tokens.
pub struct Trace {
    graph: Arc<Mutex<Graph>>,
    tokens: Tensor,
}

impl Trace {
    /// A graph with the model that is to be applied to its tokens.
    fn new<'a>(
        build: &Build<'a>,
        options: &StepOptions,
        plan: &RankPlan,
        batch: usize,
    ) -> Result<(Self, Box<dyn Model + 'a>)> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, options.dtype).with_expert_ranks(plan.mesh.expert, plan.at.expert);
        let model = build(vb)?;
        let spec = Spec { shape: (batch, options.sequence).into(), dtype: DType::U32 };
        let id = lock(&graph).add_input("tokens", spec)?;
        let tokens = Tensor::new(&graph, id);
        Ok((Self { graph, tokens }, model))
    }

    /// A program of the forward pass alone, cut where the training step is.
    fn lower_forward(
        &self,
        name: &str,
        output: Output,
        plan: &RankPlan,
        stages: &ParameterStages,
        target: Target,
    ) -> Result<Program> {
        cut_like(&mut self.lock(), stages);
        lower(&Lowering {
            name,
            graph: &self.lock(),
            table: &plan.forward_table(),
            rank: plan.at.pipeline,
            outputs: &[output],
            roles: &HashMap::new(),
            recomputation: &Recomputation::default(),
            lets_go: false,
            target,
        })
    }

    /// The tables whose rows are looked up, by tokens or anything else.
    pub fn looked_up(&self) -> HashSet<ValueId> {
        let graph = self.lock();
        let lookups = graph.nodes().iter().filter(|node| node.op.name() == "embedding");
        lookups.map(|node| graph.value(node.inputs[0]).root).collect()
    }

    /// Rows of the smallest table that tokens are looked up in.
    fn smallest_table(&self) -> usize {
        let graph = self.lock();
        let lookups = graph.nodes().iter().filter(|n| n.op.name() == "embedding" && n.inputs[1] == self.tokens.id());
        lookups.map(|n| graph.value(n.inputs[0]).spec.dims()[0]).min().unwrap_or(usize::MAX)
    }

    fn targets(&self) -> gapless_graph::Result<Tensor> {
        self.input("targets", Spec { shape: self.tokens.shape().clone(), dtype: DType::U32 })
    }

    pub fn input(&self, name: &str, spec: Spec) -> gapless_graph::Result<Tensor> {
        let id = self.lock().add_input(name, spec)?;
        Ok(Tensor::new(&self.graph, id))
    }

    pub fn tensor(&self, id: ValueId) -> Tensor {
        Tensor::new(&self.graph, id)
    }

    pub fn lock(&self) -> MutexGuard<'_, Graph> {
        lock(&self.graph)
    }

    fn name(&self, id: ValueId) -> String {
        let graph = self.lock();
        graph.persistent().find(|p| p.0 == id).map(|p| p.1.to_owned()).expect("parameters have names")
    }
}
