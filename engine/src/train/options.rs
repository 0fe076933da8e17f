//! How to train.

use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::arena::Reserve;
use gapless_compile::CompileOptions;
use gapless_compile::recompute::{Offload, Recompute};
use gapless_compile::step::{Overflow, Pipeline, StepOptions, UpdateOptions};
use gapless_graph::FLOATS;
use gapless_graph::nn::Trainable;
use gapless_graph::optim::{AdamW, Optimizer};
use gapless_kernels::LossTerms;
use gapless_parallel::Mesh;
use gapless_runtime::cpu::MOST_THREADS;

use super::{DeviceChoice, Generation};
use crate::error::{Result, TrainError};
use crate::learning_rate::{LearningRate, Shape};

/// Everything but the model and the data.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Sequences per step, of all ranks together.
    pub batch: usize,
    /// Parts into which a data rank's share of the batch is cut; more of them need less memory and more time.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// Whether a sequence may hold several documents, which then neither see each other nor share their places, and targets that
    /// don't count ([`Trainer::step_batch`](super::Trainer::step_batch)). The loss is the mean over those that count; what a model adds
    /// to it, as routers do, is of all tokens. For models of causal attention, on the CPU.
    pub documents: bool,
    /// What runs it. A plan that is made before there is a device is the CPU's, unless a GPU is named.
    pub device: DeviceChoice,
    /// The type of parameters, activations and gradients. In [`DType::BF16`] [`AdamW`] keeps masters and moments in f32, and sums
    /// gradients of several micro-batches in f32 ([`AdamW::masters`]). The statistics of norms, log-sum-exps, losses and the
    /// gradients' norm are f32 in any case. All arithmetic is in f32: on the CPU, what a kernel does not widen as it loads it has a
    /// copy in f32 in scratch while the kernel runs. f16 is refused: without a scaled loss, gradients leave its range.
    pub dtype: DType,
    /// Which part of the model is trained. Frozen parameters are there in [`Self::dtype`] alone, without gradients, states or
    /// masters, and the forward keeps what the trained part needs.
    pub trainable: Trainable,
    /// What the training loss counts beside the likelihood of its targets; an evaluation's is the likelihood alone.
    pub loss: LossTerms,
    /// The update rule: `AdamW { .. }.into()`, another one of [`optim`](crate::optim), or one of your own.
    pub optimizer: Arc<dyn Optimizer>,
    /// What the update does beside that: parameters with a rule of their own, cut gradients, steps that are left out, averages.
    pub update: UpdateOptions,
    /// Step → learning rate.
    pub learning_rate: LearningRate,
    /// Seed of the initial parameters and of dropout.
    pub seed: u64,
    /// Worker threads of each rank; 0 for all cores, which is too many where ranks are threads of one machine. The bits of
    /// the results do not depend on it.
    pub threads: usize,
    /// The most work that planning the arena may be: a second or two, spent only where the lower bound is not met before
    /// ([`CompileOptions`]). With less, a plan may end a little above it.
    pub planning: u64,
    /// How many ranks there are, and what each is. More than one need [`Trainer::on`](super::Trainer::on).
    pub mesh: Mesh,
    /// How the ranks of a pipeline work together.
    pub pipeline: Pipeline,
    /// What is computed again in the backward instead of being kept. The bits of the results do not depend on it.
    pub recompute: Recompute,
    /// Operations whose results wait for the backward in eight bits per number, where they are kept, by the names that profiles and
    /// memory maps use. The forward has the same bits; gradients are of rounded activations.
    pub compress: Vec<String>,
    /// What waits for the backward in a file, where it is kept. The bits of the results do not depend on it.
    pub offload: Option<Offload>,
    /// How much room there is for the rows that expert ranks receive, which the routing decides, beside what the plan leaves idle.
    /// [`Reserve::Worst`] never runs out, and takes only the pages that it uses; with a [`Reserve::Balanced`] a step whose
    /// routing is more uneven than its factor may run out.
    pub routing: Reserve,
    /// What becomes of a step that runs out of that room. The bits of the results do not depend on it.
    pub overflow: Overflow,
    /// Update each parameter as soon as its gradient is complete, and let go of the gradient: with one micro-batch the gradients
    /// are never there together. Needs `max_norm` to be infinite, for a norm is known only in the end. For the same reason a
    /// step that is not finite is reported, but has changed the model.
    pub release_gradients: bool,
    /// Hold every gradient until the next step, so that it can be read; costs their bytes.
    pub keep_gradients: bool,
    /// Caches for [`Trainer::generate`](super::Trainer::generate), whose bytes the training step uses too. Without them, and
    /// on GPUs and over several ranks, each token takes a forward pass over its whole window.
    pub generation: Option<Generation>,
    /// Fill every dead range of the arena with NaN between instructions (for tests; results must not change).
    pub poison: bool,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            micro_batches: 1,
            sequence: 256,
            documents: false,
            device: DeviceChoice::default(),
            dtype: DType::F32,
            trainable: Trainable::All,
            loss: LossTerms::NONE,
            optimizer: AdamW::default().into(),
            update: UpdateOptions::default(),
            learning_rate: LearningRate { peak: 3e-4, floor: 3e-4, warmup_steps: 0, steps: 0, shape: Shape::Constant },
            seed: 0,
            threads: 0,
            planning: CompileOptions::default().planner.work,
            mesh: Mesh::default(),
            pipeline: Pipeline::default(),
            recompute: Recompute::None,
            compress: Vec::new(),
            offload: None,
            routing: Reserve::Worst,
            overflow: Overflow::Error,
            release_gradients: false,
            keep_gradients: false,
            generation: None,
            poison: false,
        }
    }
}

impl TrainOptions {
    /// Sequences per evaluation: as many as a micro-batch has.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.parts().max(1)
    }

    /// Parts into which the batch is cut: micro-batches of all ranks that share it.
    pub(super) fn parts(&self) -> usize {
        self.micro_batches.saturating_mul(self.mesh.data).saturating_mul(self.mesh.expert)
    }

    /// What of them decides the step's programs and their memory.
    pub(super) fn step(&self) -> StepOptions {
        let Self { batch, micro_batches, sequence, documents, dtype, planning, mesh, routing, overflow, .. } = *self;
        let Self { release_gradients, keep_gradients, loss, .. } = *self;
        StepOptions {
            batch,
            micro_batches,
            sequence,
            documents,
            dtype,
            trainable: self.trainable.clone(),
            loss,
            optimizer: self.optimizer.clone(),
            update: self.update.clone(),
            planning,
            mesh,
            pipeline: self.pipeline.clone(),
            recompute: self.recompute.clone(),
            compress: self.compress.clone(),
            offload: self.offload.as_ref().map(|offload| offload.ops.clone()).unwrap_or_default(),
            routing,
            overflow,
            release_gradients,
            keep_gradients,
            generation: self.generation.filter(|_| mesh.pipeline == 1 && mesh.expert == 1),
        }
    }

    /// What must be the same on all ranks of a mesh, by name, in words.
    pub(super) fn shared_by_ranks(&self) -> Vec<(&'static str, String)> {
        // What each rank may choose for itself: the machine, the plan, and aids for finding mistakes.
        let Self { device: _, threads: _, planning: _, poison: _, .. } = self;
        let Self { batch, micro_batches, sequence, documents, dtype, optimizer, learning_rate, seed, .. } = self;
        let Self {
            loss,
            update,
            mesh,
            pipeline,
            trainable,
            generation,
            recompute,
            compress,
            offload,
            routing,
            overflow,
            release_gradients,
            keep_gradients,
            ..
        } = self;
        vec![
            ("mesh", format!("{mesh:?}")),
            ("pipeline schedule", format!("{pipeline:?}")),
            ("batch size", batch.to_string()),
            ("number of micro-batches", micro_batches.to_string()),
            ("sequence length", sequence.to_string()),
            ("packing of documents", documents.to_string()),
            ("dtype", format!("{dtype:?}")),
            ("trainable part", format!("{trainable:?}")),
            ("loss", format!("{loss:?}")),
            ("optimizer", format!("{optimizer:?}")),
            ("update", format!("{update:?}")),
            ("learning rate", format!("{learning_rate:?}")),
            ("seed", seed.to_string()),
            ("recompute policy", format!("{recompute:?}")),
            ("set of compressed operations", format!("{compress:?}")),
            ("set of offloaded operations", format!("{:?}", offload.as_ref().map(|offload| &offload.ops))),
            ("reserve for routed rows", format!("{routing:?}")),
            ("overflow policy", format!("{overflow:?}")),
            ("release_gradients", release_gradients.to_string()),
            ("keep_gradients", keep_gradients.to_string()),
            ("generation", format!("{generation:?}")),
        ]
    }

    /// What the arena may take at most.
    pub(super) fn most_bytes(&self) -> u64 {
        self.recompute.capacity().unwrap_or(u64::MAX)
    }

    /// How an arena is planned that must fit so many bytes, if any.
    pub(super) fn planning_within(&self, capacity: Option<u64>) -> CompileOptions {
        CompileOptions::within(capacity, self.planning, self.routing)
    }

    pub(super) fn check(&self) -> Result<()> {
        let fail = |what, why: String, remedy| Err(TrainError::Config { what, why, remedy });
        if self.batch == 0 || self.sequence == 0 || self.micro_batches == 0 {
            return fail("batch, sequence and micro_batches", "one of them is 0".into(), "each is at least 1");
        }
        if !FLOATS.contains(&self.dtype) {
            return fail(
                "dtype",
                format!("{:?}", self.dtype),
                "train in f32 or bf16: gradients leave the range of f16 without a scaled loss, and no kernel computes in f64; a Hugging Face folder in f16 is read all the same",
            );
        }
        if self.threads > MOST_THREADS {
            let why = format!("{} are more than {MOST_THREADS}", self.threads);
            return fail("threads", why, "use as many as the machine has cores, or 0 for all of them");
        }
        self.mesh.ranks()?;
        let parts = self.parts();
        if !self.batch.is_multiple_of(parts) {
            let why = format!("{} sequences do not divide into {parts}", self.batch);
            return fail(
                "micro_batches",
                why,
                "micro-batches × data ranks × expert ranks must be a divisor of the batch",
            );
        }
        if self.pipeline.chunks == 0 {
            return fail("pipeline", "0 chunks per rank".into(), "at least 1");
        }
        let shared = self.mesh.data > 1 || self.mesh.expert > 1;
        if self.keep_gradients && shared {
            let why = "ranks that share the batch have only parts of the gradients".to_owned();
            return fail("keep_gradients", why, "keep them with one data rank and one expert rank");
        }
        if self.release_gradients {
            self.check_release()?;
        }
        if let Reserve::Balanced { factor } = self.routing
            && !(factor.is_finite() && factor >= 0.0)
        {
            return fail("routing", format!("a factor of {factor}"), "1.25 is usual");
        }
        if self.overflow == Overflow::Recompute && matches!(self.routing, Reserve::Bytes(_)) {
            let why = "a number of bytes promises no room to what is computed again".to_owned();
            return fail("overflow", why, "use Reserve::Balanced");
        }
        if self.overflow == Overflow::Recompute && !self.compress.is_empty() {
            let why = "rows that are made again of what was rounded are others than the forward's".to_owned();
            return fail("overflow", why, "compress nothing, or choose another policy");
        }
        let LossTerms { label_smoothing, z_loss } = self.loss;
        if !((0.0..1.0).contains(&label_smoothing) && z_loss >= 0.0 && z_loss.is_finite()) {
            let why = format!("label_smoothing {label_smoothing}, z_loss {z_loss}");
            return fail("loss", why, "the first is in [0, 1), the second at least 0");
        }
        self.update.check()?;
        self.learning_rate.check()?;
        self.trainable.check()?;
        Ok(self.optimizer.check()?)
    }

    /// What waits for all gradients keeps them.
    fn check_release(&self) -> Result<()> {
        let fail = |why: &str, remedy| Err(TrainError::Config { what: "release_gradients", why: why.into(), remedy });
        if self.update.rules(&self.optimizer).any(|(rule, _)| rule.needs_norm()) {
            return fail("gradients are clipped by their common norm", "set the optimizer's max_norm to infinity");
        }
        if self.update.guarded {
            return fail("a step that may be left out waits for the loss and the norm", "set update.guarded to false");
        }
        if self.keep_gradients {
            return fail("gradients are kept", "choose one of the two");
        }
        if self.mesh.data > 1 || self.mesh.expert > 1 {
            return fail("gradients are summed over ranks", "use one data rank and one expert rank");
        }
        Ok(())
    }
}
