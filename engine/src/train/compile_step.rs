//! One executable of everything a trainer runs: training step, evaluation, logits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::DType;
use gapless_alloc::Role;
use gapless_parallel::{Action, Kind, OneForwardOneBackward, Schedule, Shape};

use super::{Model, TrainOptions};
use crate::autodiff::differentiate;
use crate::compile::{CompileOptions, Executable, Lowering, Program, compile, lower};
use crate::error::Result;
use crate::graph::{Graph, Phase, Spec, Tensor, ValueId, lock};
use crate::nn::VarBuilder;
use crate::optim::{GlobalNorm, Optimizer, ParameterUpdate, SCALARS};

/// The input that carries the optimizer's numbers of a step.
pub(super) const SCALARS_INPUT: &str = "step.scalars";

pub(super) struct CompiledStep {
    pub executable: Executable,
    /// Trained numbers.
    pub parameters: u64,
    pub vocabulary: usize,
}

/// The name under which a gradient can be read.
pub(super) fn gradient_output(parameter: &str) -> String {
    format!("gradient of {parameter}")
}

pub(super) fn compile_step<M: Model>(
    build: &impl Fn(VarBuilder) -> Result<M>,
    options: &TrainOptions,
    threads: usize,
) -> Result<CompiledStep> {
    let forward = [Action::new(Kind::Forward, 0, 0)];
    let (train, parameters) = train_program(build, options, threads)?;

    let trace = Trace::new(build, options.evaluation_batch(), options.sequence)?;
    let loss = trace.model.loss(&trace.tokens, &trace.targets()?, false)?;
    let evaluate = trace.lower("evaluate", &forward, &[("loss".into(), loss.id())], &HashMap::new(), threads)?;

    let trace = Trace::new(build, 1, options.sequence)?;
    let logits = trace.model.forward(&trace.tokens, false)?;
    let vocabulary = logits.dim(candle_core::D::Minus1)?.min(trace.smallest_table());
    let logits = logits.contiguous()?;
    let logits = trace.lower("logits", &forward, &[("logits".into(), logits.id())], &HashMap::new(), threads)?;

    let executable = compile(&[train, evaluate, logits], &CompileOptions::default())?;
    Ok(CompiledStep { executable, parameters, vocabulary })
}

/// The training step, and the number of trained numbers.
pub(super) fn train_program<M: Model>(
    build: &impl Fn(VarBuilder) -> Result<M>,
    options: &TrainOptions,
    threads: usize,
) -> Result<(Program, u64)> {
    let micro_batches = options.micro_batches;
    let share = 1.0 / micro_batches as f64;
    let trace = Trace::new(build, options.batch / micro_batches, options.sequence)?;
    let loss = {
        let _span = tracing::info_span!("forward").entered();
        trace.model.loss(&trace.tokens, &trace.targets()?, true)?
    };
    let gradients = {
        let _span = tracing::info_span!("autodiff").entered();
        differentiate(&trace.graph, &loss, share)?
    };
    loss.set_phase(Phase::Update);
    let mut parameters = Vec::new();
    for gradient in gradients {
        let parameter = Tensor::new(&trace.graph, gradient.parameter);
        let summands = gradient.summands.iter().map(|&id| Tensor::new(&trace.graph, id));
        let total = summands.map(Ok).reduce(|a, b| a?.add(&b?)).expect("a gradient has a summand")?;
        let total = total.reshape(parameter.dims().to_vec())?;
        parameters.push((trace.name(gradient.parameter), parameter, total));
    }
    let mean_loss = loss.affine(share, 0.0)?;
    let totals: Vec<&Tensor> = parameters.iter().map(|p| &p.2).collect();
    let [norm] = Tensor::apply_op(GlobalNorm, &totals)?;
    // A loss that is not finite makes the norm not finite, and the update then leaves the model alone.
    let norm = norm.add(&mean_loss.affine(0.0, 0.0)?)?;
    let scalars = trace.input(SCALARS_INPUT, Spec::f32(SCALARS))?;
    let mut roles = HashMap::new();
    for (name, parameter, gradient) in &parameters {
        let mut states = Vec::new();
        for (state, init) in options.optimizer.states() {
            let shape = parameter.shape().clone();
            let id = trace.lock().add_persistent(&format!("{state}/{name}"), shape, init)?;
            roles.insert(id, Role::OptimizerState);
            states.push(Tensor::new(&trace.graph, id));
        }
        options.optimizer.update(ParameterUpdate {
            parameter,
            gradient,
            states: &states,
            norm: &norm,
            scalars: &scalars,
        })?;
    }
    let mut outputs = vec![("loss".into(), mean_loss.id()), ("gradient_norm".into(), norm.id())];
    if options.keep_gradients {
        outputs.extend(parameters.iter().map(|(name, _, gradient)| (gradient_output(name), gradient.id())));
    }
    let shape = Shape { ranks: 1, chunks: 1, micro_batches: micro_batches as u32 };
    let actions = OneForwardOneBackward.actions(&shape)?.remove(0);
    let program = trace.lower("train", &actions, &outputs, &roles, threads)?;
    let count = parameters.iter().map(|p| p.1.elem_count() as u64).sum();
    Ok((program, count))
}

/// A model applied to tokens, as a graph.
struct Trace<M> {
    graph: Arc<Mutex<Graph>>,
    model: M,
    tokens: Tensor,
}

impl<M: Model> Trace<M> {
    fn new(build: &impl Fn(VarBuilder) -> Result<M>, batch: usize, sequence: usize) -> Result<Self> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let model = build(VarBuilder::new(&graph))?;
        let id = lock(&graph).add_input("tokens", Spec { shape: (batch, sequence).into(), dtype: DType::U32 })?;
        let tokens = Tensor::new(&graph, id);
        Ok(Self { graph, model, tokens })
    }

    /// Rows of the smallest table that tokens are looked up in.
    fn smallest_table(&self) -> usize {
        let graph = self.lock();
        let lookups = graph.nodes().iter().filter(|n| n.op.name() == "embedding" && n.inputs[1] == self.tokens.id());
        lookups.map(|n| graph.value(n.inputs[0]).spec.dims()[0]).min().unwrap_or(usize::MAX)
    }

    fn targets(&self) -> Result<Tensor> {
        self.input("targets", Spec { shape: self.tokens.shape().clone(), dtype: DType::U32 })
    }

    fn input(&self, name: &str, spec: Spec) -> Result<Tensor> {
        let id = self.lock().add_input(name, spec)?;
        Ok(Tensor::new(&self.graph, id))
    }

    fn lock(&self) -> MutexGuard<'_, Graph> {
        lock(&self.graph)
    }

    fn name(&self, id: ValueId) -> String {
        let graph = self.lock();
        graph.persistent().find(|p| p.0 == id).map(|p| p.1.to_owned()).expect("parameters have names")
    }

    fn lower(
        &self,
        name: &str,
        actions: &[Action],
        outputs: &[(String, ValueId)],
        roles: &HashMap<ValueId, Role>,
        threads: usize,
    ) -> Result<Program> {
        let _span = tracing::info_span!("lower", name).entered();
        lower(&Lowering { name, graph: &self.lock(), actions, outputs, roles, threads })
    }
}
