//! Lowers a step as an eager framework runs it: the allocations and frees that PyTorch 2 would make, in order.
//!
//! In: the forward of a recorded graph. Out: a table of lifetimes with one tick per allocation and per free, as in
//! recordings of PyTorch itself. The model includes operations that run one by one, the tensors that autograd saves,
//! temporaries and workspaces, gradient accumulation, and frees when the last reference is dropped. No kernel runs and
//! no value is computed.
//!
//! The table is of a steady step. [`Step::eager_run`] computes the table of the first steps of a run, in which the
//! optimizer's states appear with the first update.
//!
//! - `rules` has the allocations of each operation, `experts` those of mixtures of experts, `megatron` those of
//!   Megatron-LM's modules, and `fsdp` those of FSDP2.
//! - `tape` counts references; `autograd` runs backwards.
//! - `stage` selects the part of the graph that a rank runs, and `run` walks through it.

mod autograd;
mod experts;
mod fsdp;
mod megatron;
mod rules;
mod run;
mod stage;
mod tape;

use gapless_alloc::{Buffer, Problem, lower_bound};
use gapless_engine::compile::step::StepGraph;
use gapless_engine::recompute::{Layers, Recompute};
use gapless_models::hf::Architecture;
use gapless_parallel::Kind;
use serde::Serialize;

pub use self::experts::ExpertRows;
pub(super) use self::fsdp::Fsdp;
use self::megatron::Megatron;
use self::run::{Run, Style};
use self::tape::{BF16, F32};
use super::{Lowering, Precision, Step};

/// The reason why the lifetimes of a step under an eager framework cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum EagerError {
    /// An operation has no rule.
    #[error("{layer}: what {op} allocates in an eager framework is unknown; use --lowering gapless")]
    Op {
        /// Name of the operation.
        op: String,
        /// Layer of the operation.
        layer: String,
    },
    /// The step has a recompute policy, a schedule or a mesh that eager frameworks do not have.
    #[error("{0} is not supported for eager frameworks; use --lowering gapless")]
    Unknown(String),
    /// The schedule does not exist for the step's shape.
    #[error(transparent)]
    Schedule(#[from] gapless_parallel::Error),
    /// The table is too large.
    #[error(transparent)]
    Table(#[from] gapless_alloc::Error),
}

/// The first steps of a run under an eager framework.
#[derive(Debug, Clone)]
pub struct EagerRun {
    /// The lifetimes of the steps. Buffers that outlive the last step are alive until the end.
    pub table: Problem,
    /// The share of what the start allocates for the whole run.
    pub start_up: StartUp,
    /// The most bytes alive in each step.
    pub peaks: Vec<u64>,
}

/// The bytes of a rank in a steady step under an eager framework.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EagerBytes {
    /// Bytes of parameters, sums of gradients that outlive the step, masters and moments.
    pub states: u64,
    /// The most bytes alive.
    pub peak: u64,
}

/// The bytes that are alive in all steps after the first one, by the time of their allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StartUp {
    /// Bytes before the first step: parameters, rotary tables, and with f32 masters the sums of gradients and the
    /// masters.
    pub before_bytes: u64,
    /// Bytes of optimizer states, which the first update allocates.
    pub states_bytes: u64,
}

/// Steps as an eager framework ran them.
struct Steps {
    buffers: Vec<Buffer>,
    /// For each buffer: whether it is allocated on a stream of collectives.
    are_beside: Vec<bool>,
    /// The ticks before the first step and after each step.
    ends: Vec<u64>,
    /// Bytes of the model's states.
    states: u64,
}

impl Step {
    /// Returns the lifetimes of a pipeline rank under an eager framework. If the step's key `lowering` is `eager-amp`,
    /// autocast is modelled; other values have no effect. Experts get the rows of [`Step::routed_rows`].
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager(&self, graph: &StepGraph, rank: usize) -> Result<Problem, EagerError> {
        match self.routed_rows(graph, rank) {
            Some(rows) => {
                self.eager_routed(graph, rank, &|micro_batch, layer| rows.of_experts(micro_batch, layer).to_vec())
            }
            // Without experts that are chosen, there is nothing to route.
            None => self.eager_routed(graph, rank, &|_, _| Vec::new()),
        }
    }

    /// Returns the lifetimes of the first `steps` steps of a run under an eager framework, at least one. Parameters, and
    /// with f32 masters also the sums of gradients and the masters, exist before the first step. The states of the
    /// optimizer are allocated in the first update. Experts get other rows in each step.
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager_run(&self, graph: &StepGraph, rank: usize, steps: usize) -> Result<EagerRun, EagerError> {
        let steps = steps.max(1);
        let rows = self.rows_of_steps(graph, rank, steps);
        let rows = |micro_batch: usize, layer: &str| {
            rows.as_ref().map_or_else(Vec::new, |rows| rows.of_experts(micro_batch, layer).to_vec())
        };
        let Steps { buffers, ends, .. } = self.eager_steps(graph, rank, &rows, Some(steps))?;
        let table = Problem::new(buffers)?;
        let before = ends[0];
        let lasts = |buffer: &&Buffer| buffer.lifetime.end == table.end();
        let lasting = |is_before: bool| {
            let buffers = table.buffers().iter().filter(lasts);
            buffers.filter(|buffer| (buffer.lifetime.start < before) == is_before).map(|buffer| buffer.bytes).sum()
        };
        let start_up = StartUp { before_bytes: lasting(true), states_bytes: lasting(false) };
        let peak = |span: &[u64]| {
            let inside = |buffer: &Buffer| {
                let (start, end) = (buffer.lifetime.start.max(span[0]), buffer.lifetime.end.min(span[1]));
                (start < end).then(|| Buffer::new(start..end, buffer.bytes))
            };
            Ok(lower_bound(&Problem::new(table.buffers().iter().filter_map(inside).collect())?))
        };
        let peaks = ends.windows(2).map(peak).collect::<Result<_, EagerError>>()?;
        Ok(EagerRun { table, start_up, peaks })
    }

    /// Like [`Self::eager`], but `rows` gives the number of rows of each expert. `rows` must be a pure function,
    /// because it is called again when a layer is recomputed.
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager_routed(&self, graph: &StepGraph, rank: usize, rows: &ExpertRows<'_>) -> Result<Problem, EagerError> {
        Ok(Problem::new(self.eager_steps(graph, rank, rows, None)?.buffers)?)
    }

    /// Returns the bytes of a pipeline rank of a model without experts in a steady step.
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager_bytes(&self, graph: &StepGraph, rank: usize) -> Result<EagerBytes, EagerError> {
        let Steps { buffers, states, .. } = self.eager_steps(graph, rank, &|_, _| Vec::new(), None)?;
        Ok(EagerBytes { states, peak: lower_bound(&Problem::new(buffers)?) })
    }

    /// Returns the lifetimes of a pipeline rank of a model without experts in a steady step: those of the stream of computation,
    /// and those of streams of collectives. PyTorch's allocator has separate memory for these. The second table is empty
    /// except for `lowering = "fsdp2"`.
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager_streams(&self, graph: &StepGraph, rank: usize) -> Result<[Problem; 2], EagerError> {
        let Steps { buffers, are_beside, .. } = self.eager_steps(graph, rank, &|_, _| Vec::new(), None)?;
        let of_stream = |is_beside: bool| {
            let own = buffers.iter().zip(&are_beside).filter(|(_, beside)| **beside == is_beside);
            Problem::new(own.map(|(buffer, _)| buffer.clone()).collect())
        };
        Ok([of_stream(false)?, of_stream(true)?])
    }

    /// Runs the first steps of a run, or a steady step if their number is `None`.
    fn eager_steps(
        &self,
        graph: &StepGraph,
        rank: usize,
        rows: &ExpertRows<'_>,
        first_steps: Option<usize>,
    ) -> Result<Steps, EagerError> {
        if self.options.mesh.shard > 1 {
            return Err(EagerError::Unknown("a mesh with shard ranks".to_owned()));
        }
        if self.options.mesh.context > 1 {
            return Err(EagerError::Unknown("a mesh with context ranks".to_owned()));
        }
        let table = self.options.pipeline.schedule.actions(&self.shape())?;
        let row = table.get(rank).ok_or_else(|| EagerError::Unknown(format!("rank {rank}")))?;
        if row.iter().any(|action| !matches!(action.kind, Kind::Forward | Kind::Backward)) {
            return Err(EagerError::Unknown(format!(
                "{}, which splits the backward,",
                self.options.pipeline.schedule.name()
            )));
        }
        let graph = graph.graph();
        let mut run = Run::new(&graph, self.style(), row, rows, first_steps.is_some());
        run.checkpoint(self.checkpoints(run.blocks())?);
        let mut ends = vec![run.now()];
        for _ in 0..first_steps.unwrap_or(1) {
            row.iter().enumerate().try_for_each(|(at, &action)| run.run_action(action, row.get(at + 1)))?;
            run.update();
            ends.push(run.now());
        }
        let (states, are_beside) = (run.states(), run.are_beside());
        Ok(Steps { buffers: run.into_buffers(first_steps.is_none()), are_beside, ends, states })
    }

    fn style(&self) -> Style {
        let is_amp = self.lowering == Lowering::EagerAmp;
        let megatron =
            (self.lowering == Lowering::Megatron).then(|| Megatron::new(&self.megatron, &self.options, &self.device));
        let (parameter, is_mixed) = match self.precision() {
            Precision::Bf16 => (if is_amp { F32 } else { BF16 }, !is_amp && self.fsdp.is_none()),
            Precision::PureBf16 => (BF16, false),
            Precision::F32 => (F32, false),
        };
        Style {
            parameter,
            is_amp,
            is_mixed,
            is_transformers: megatron.is_none() && !matches!(self.architecture(), Architecture::Gpt(_)),
            megatron,
            fsdp: self.fsdp,
            tensor_ranks: self.options.mesh.tensor as u64,
            micro_batches: self.options.micro_batches,
            stages: self.options.mesh.pipeline * self.options.pipeline.chunks,
            data_ranks: self.options.mesh.data as u64,
            expert_ranks: self.options.expert_ranks() as u64,
        }
    }

    /// Returns the blocks that are checkpointed, of which only the inputs are saved.
    fn checkpoints(&self, blocks: &[String]) -> Result<Vec<String>, EagerError> {
        let layers = match &self.options.memory.recompute {
            _ if self.options.memory.budget.is_some() => return Err(EagerError::Unknown("a budget".to_owned())),
            Recompute::None => return Ok(Vec::new()),
            Recompute::Layers(layers) => layers,
            _ => return Err(EagerError::Unknown("recomputation of anything but layers".to_owned())),
        };
        Ok(match layers {
            Layers::All => blocks.to_vec(),
            Layers::First(count) => blocks.iter().take(*count).cloned().collect(),
            Layers::Named(names) => names.clone(),
        })
    }
}

/// Asserts that the run of a text with these keys is refused, and that the error has these words.
#[cfg(test)]
fn assert_refused(text: &str, keys: &[&str], words: &str) {
    let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
    let run = crate::run::RunConfig::parse(text, &keys);
    let error = run.and_then(|run| Step::new(&run).map(drop)).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}
