//! Lowers a step as an eager framework runs it: the allocations and frees that PyTorch 2 would make, in order.
//!
//! In: the forward of a recorded graph. Out: a table of lifetimes with one tick per allocation and per free, as in
//! recordings of PyTorch itself. The model includes operations that run one by one, the tensors that autograd saves,
//! temporaries and workspaces, gradient accumulation, and frees when the last reference is dropped. No kernel runs and
//! no value is computed.
//!
//! - `rules` has the allocations of each operation, `experts` those of mixtures of experts.
//! - `tape` counts references; `autograd` runs backwards.
//! - `stage` selects the part of the graph that a rank runs, and `run` walks through it.

mod autograd;
mod experts;
mod rules;
mod run;
mod stage;
mod tape;

use gapless_alloc::Problem;
use gapless_engine::compile::step::StepGraph;
use gapless_engine::recompute::{Layers, Recompute};
use gapless_models::hf::Architecture;
use gapless_parallel::Kind;

pub use self::experts::ExpertRows;
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
    /// The step has a recompute policy or a schedule that eager frameworks do not have.
    #[error("{0} is not supported for eager frameworks; use --lowering gapless")]
    Unknown(String),
    /// The schedule does not exist for the step's shape.
    #[error(transparent)]
    Schedule(#[from] gapless_parallel::Error),
    /// The table is too large.
    #[error(transparent)]
    Table(#[from] gapless_alloc::Error),
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

    /// Like [`Self::eager`], but `rows` gives the number of rows of each expert. `rows` must be a pure function,
    /// because it is called again when a layer is recomputed.
    ///
    /// # Errors
    /// Returns an [`EagerError`] if the step has a part that is not modelled.
    pub fn eager_routed(&self, graph: &StepGraph, rank: usize, rows: &ExpertRows<'_>) -> Result<Problem, EagerError> {
        let table = self.options.pipeline.schedule.actions(&self.shape())?;
        let row = table.get(rank).ok_or_else(|| EagerError::Unknown(format!("rank {rank}")))?;
        if row.iter().any(|action| !matches!(action.kind, Kind::Forward | Kind::Backward)) {
            return Err(EagerError::Unknown(format!(
                "{}, which splits the backward,",
                self.options.pipeline.schedule.name()
            )));
        }
        let graph = graph.graph();
        let mut run = Run::new(&graph, self.style(), row, rows);
        run.checkpoint(self.checkpoints(run.blocks())?);
        row.iter().enumerate().try_for_each(|(at, &action)| run.run_action(action, row.get(at + 1)))?;
        run.update();
        Ok(Problem::new(run.into_buffers())?)
    }

    fn style(&self) -> Style {
        let is_amp = self.lowering == Lowering::EagerAmp;
        let (parameter, is_mixed) = match self.precision() {
            Precision::Bf16 => (if is_amp { F32 } else { BF16 }, !is_amp),
            Precision::PureBf16 => (BF16, false),
            Precision::F32 => (F32, false),
        };
        Style {
            parameter,
            is_amp,
            is_mixed,
            is_transformers: !matches!(self.architecture(), Architecture::Gpt(_)),
            micro_batches: self.options.micro_batches,
            stages: self.options.mesh.pipeline * self.options.pipeline.chunks,
            data_ranks: self.options.mesh.data as u64,
            expert_ranks: self.options.mesh.expert as u64,
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
