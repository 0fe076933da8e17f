//! The trainer: report, step, evaluate, generate. Trainers are built in `make`.

mod device;
mod documents;
mod generate;
mod loss_parts;
mod make;
mod options;
mod ranks;
mod sampling;
mod save;
mod saved_parts;
mod tensors;

use candle_core::DType;
use gapless_alloc::arena::ArenaReport;
use gapless_alloc::draw::MemoryMap;
use gapless_compile::step::{
    CheckpointLayout, DOCUMENT_INPUTS, LABELS_INPUT, LIMITS_INPUT, LOG_LIKELIHOODS, REFERENCE_INPUT, Share,
};
use gapless_kernels::Element;
use gapless_parallel::Coordinate;
use gapless_runtime::{Session, Times};

pub use device::{DeviceChoice, DeviceInfo};
pub use documents::{Batch, IGNORED};
pub use gapless_compile::step::Generation;
pub use generate::{GenerateOptions, NextToken};
pub use loss_parts::LossParts;
pub use make::TrainerBuilder;
pub use options::TrainOptions;
pub use sampling::Sampling;

use self::documents::DocumentInputs;
use self::ranks::BatchCheck;
use crate::communicator::Communicator;
use crate::error::{Result, TrainError};
use crate::learning_rate::Schedule;
use gapless_compile::ProgramId;
use gapless_compile::report::{self, Report};
use gapless_compile::step::StepOptions;
use gapless_graph::nn::{PairLoss, Rewards};
use gapless_graph::optim::SCALARS;
use gapless_graph::{Causality, Culprit, LossPart};
use gapless_runtime::RunOptions;
#[cfg(feature = "cuda")]
use gapless_runtime::cuda;

/// The result of a training step.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct StepReport {
    /// Number of steps done, including this one. The first step is step 1, and a checkpoint after it is that of step 1.
    pub step: u64,
    /// Mean loss over the batch, with the parameters from before the update. It includes all terms that are minimized.
    pub loss: f32,
    /// The terms of the loss; `None` if the likelihood is the only term.
    #[serde(flatten)]
    pub loss_parts: Option<LossParts>,
    /// The mean rewards of the pairs; `None` if the step does not train on preferences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Rewards>,
    /// Norm over the elements of all gradients, before clipping.
    pub gradient_norm: f32,
    /// Learning rate of the update.
    pub lr: f64,
    /// Whether the step was skipped, because the loss or the gradient norm exceeded its limit in [`SkipThresholds`] or was
    /// not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
}

/// The thresholds above which a guarded step is skipped
/// ([`UpdateOptions::guarded`](gapless_compile::step::UpdateOptions::guarded)).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SkipThresholds {
    /// Maximum loss.
    pub loss: f32,
    /// Maximum norm over the elements of all gradients, before clipping.
    pub gradient_norm: f32,
}

impl Default for SkipThresholds {
    fn default() -> Self {
        Self { loss: f32::INFINITY, gradient_norm: f32::INFINITY }
    }
}

impl SkipThresholds {
    /// True if a step with this loss and gradient norm is not skipped.
    fn allow(self, loss: f32, gradient_norm: f32) -> bool {
        let is_within = |x: f32, limit: f32| x.is_finite() && x <= limit;
        is_within(loss, self.loss) && is_within(gradient_norm, self.gradient_norm)
    }
}

/// A model and its optimizer, with all memory that they use.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) session: Box<Session>,
    device: DeviceInfo,
    options: TrainOptions,
    schedule: Schedule,
    programs: Programs,
    parameters: u64,
    vocabulary: usize,
    /// The tensors that a checkpoint of this rank contains, and their division among ranks.
    layout: CheckpointLayout,
    /// Names of the watched values that a step outputs.
    watched: Vec<String>,
    /// The coordinate of this rank.
    at: Coordinate,
    /// This rank's share of a training batch.
    share: Share,
    step: u64,
    limits: SkipThresholds,
    /// The terms of the loss that the training step outputs, with the names of the outputs.
    loss_parts: Vec<(LossPart, &'static str)>,
    /// Names of the inputs that hold the scalars of the update rules, one per parameter group.
    scalars_inputs: Vec<String>,
    /// A digest of the model's graph, which must be equal on all ranks.
    model: String,
    causality: Causality,
    /// The communicator to all ranks; `None` if there is only one.
    world: Option<Box<dyn Communicator>>,
    batch_check: Option<BatchCheck>,
    documents: DocumentInputs,
}

#[derive(Debug, Clone, Copy)]
struct Programs {
    /// `None` if the model is not trained.
    train: Option<ProgramId>,
    evaluate: ProgramId,
    /// `None` if the model is built for inference with caches.
    logits: Option<ProgramId>,
    /// The programs `prefill` and `decode`, if there are caches.
    generation: Option<(ProgramId, ProgramId)>,
}

/// The remedy for a model that is not causal.
const CAUSAL_REMEDY: &str = "let each token read only itself and earlier ones, such as by causal_attention";

/// Says that tokens depend on later tokens through this operation.
fn not_causal(culprit: &Culprit) -> String {
    format!("through {culprit}, tokens depend on later tokens, which are unknown when a text is continued")
}

impl Trainer {
    /// The options that the trainer was built with.
    pub fn options(&self) -> &TrainOptions {
        &self.options
    }

    /// Number of steps taken so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Whether the logits of a token depend on later tokens. Next-token prediction requires [`Causality::Causal`].
    pub fn causality(&self) -> &Causality {
        &self.causality
    }

    /// Checks that no token is known to depend on later tokens.
    ///
    /// # Errors
    /// Returns an error that names the operation through which a token depends on later ones.
    pub fn expect_causal(&self) -> Result<()> {
        let Causality::NotCausal(culprit) = &self.causality else { return Ok(()) };
        Err(TrainError::config("model", not_causal(culprit), CAUSAL_REMEDY))
    }

    /// The device that the trainer runs on.
    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }

    /// Returns the bytes of GPU memory that are in use, by purpose. Returns `None` if the trainer runs on the CPU.
    ///
    /// # Errors
    /// Returns `RuntimeError::Device` if the driver fails.
    #[cfg(feature = "cuda")]
    pub fn device_memory(&self) -> Result<Option<cuda::DeviceMemory>> {
        Ok(self.session.device_memory()?)
    }

    /// Number of worker threads.
    pub fn threads(&self) -> usize {
        self.session.threads()
    }

    /// The memory report of the plan.
    pub fn report(&self) -> Report {
        Report::of(self.session.executable(), self.parameters, self.layout.frozen_elements())
    }

    /// Writes the plan as a table ([`Executable::write_plan`](gapless_compile::Executable::write_plan)).
    ///
    /// # Errors
    /// Returns the errors of the writer.
    pub fn write_plan(&self, out: impl std::io::Write) -> std::result::Result<(), gapless_alloc::Error> {
        self.session.executable().write_plan(out)
    }

    /// Returns the plan as a memory map, which can be drawn.
    pub fn memory_map(&self) -> MemoryMap<'_> {
        report::memory_map(self.session.executable())
    }

    /// Trains one step on a batch of token ids and their targets, both [batch × sequence]. Allocates no memory.
    ///
    /// # Errors
    /// - Returns [`TrainError::NonFinite`] if the loss or a gradient is not finite. This leaves the model unchanged,
    ///   unless [`MemoryOptions::release_gradients`](gapless_compile::step::MemoryOptions::release_gradients) is set.
    /// - Returns an error if an id is outside the vocabulary, or if the batch has the wrong size.
    /// - Returns [`RuntimeError::Communicator`](gapless_runtime::Error::Communicator) if another rank fails.
    /// - Returns [`RuntimeError::Routing`](gapless_runtime::Error::Routing) or
    ///   [`RuntimeError::Growth`](gapless_runtime::Error::Growth) if there is no room for the rows that experts
    ///   receive.
    /// - Returns [`RuntimeError::Offload`](gapless_runtime::Error::Offload) if the offload file cannot be written or
    ///   read. A GPU reports the error before the update, so the model does not change, unless gradients are released.
    pub fn step(&mut self, tokens: &[u32], targets: &[u32]) -> Result<StepReport> {
        self.step_batch(&Batch { tokens, targets, starts: &[] })
    }

    /// Like [`Self::step`], but sequences may hold several documents each, and targets may be excluded from the loss.
    /// Requires [`StepOptions::documents`](gapless_compile::step::StepOptions::documents). The loss is the mean over
    /// the targets that count.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step`], and an error if a document is not contiguous or if no target counts.
    pub fn step_batch(&mut self, batch: &Batch<'_>) -> Result<StepReport> {
        self.step_pairs(batch, &[])
    }

    /// Like [`Self::step_batch`], for training on preferences
    /// ([`StepOptions::preference`](gapless_compile::step::StepOptions::preference)). Sequence 2i of the batch has the
    /// prompt and the chosen answer of pair i, and sequence 2i + 1 the same prompt and the rejected answer. Targets that
    /// are not [`IGNORED`] are the tokens of the answers. `reference` has the log-likelihood of each sequence under the
    /// reference model ([`Self::log_likelihoods`]); it is empty if the loss has no reference.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step_batch`], and an error if a sequence has no answer, if `reference` does not
    /// have one element per sequence, or if the loss needs labels ([`Self::step_answers`]).
    pub fn step_pairs(&mut self, batch: &Batch<'_>, reference: &[f32]) -> Result<StepReport> {
        self.step_answers(batch, reference, &[])
    }

    /// Like [`Self::step_pairs`], for answers with labels ([`PairLoss::Kto`](gapless_graph::nn::PairLoss::Kto)). Sequence
    /// 2i of the batch has a prompt and its answer, and sequence 2i + 1 the same prompt and the answer to another prompt.
    /// `labels` has 1 for each sequence whose answer is desirable and 0 for each other one; those of sequences 2i + 1 have
    /// no effect. It is empty for a loss of pairs.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step_pairs`], and an error if `labels` does not have one element per sequence, each 0
    /// or 1.
    pub fn step_answers(&mut self, batch: &Batch<'_>, reference: &[f32], labels: &[f32]) -> Result<StepReport> {
        let lr = self.schedule.at(self.step);
        let program = self.training()?;
        self.check_pairs(batch, reference, labels)?;
        if let (Some(world), Some(check)) = (&mut self.world, &mut self.batch_check) {
            check.run(&mut **world, self.step, batch)?;
        }
        self.write_step(batch, [reference, labels], lr)?;
        self.run(program, false)?;
        let loss = self.session.scalar(program, "loss")?;
        let gradient_norm = self.session.scalar(program, "gradient_norm")?;
        let skipped = self.options.step.update.guarded && !self.limits.allow(loss, gradient_norm);
        if !skipped && (!loss.is_finite() || !gradient_norm.is_finite()) {
            if self.options.step.memory.release_gradients {
                let culprit =
                    "an unknown instruction, as the gradients were released; the model has changed: go back to a checkpoint".into();
                return Err(TrainError::NonFinite { step: self.step + 1, loss, culprit });
            }
            // The first run may have overwritten the step's inputs, so they are written again.
            self.write_step(batch, [reference, labels], lr)?;
            let culprit = self.run(program, true)?;
            let culprit = culprit.unwrap_or_else(|| match self.world {
                Some(_) => "another rank".into(),
                None => "no instruction when the step was repeated".into(),
            });
            return Err(TrainError::NonFinite { step: self.step + 1, loss, culprit });
        }
        let (loss_parts, rewards) = LossParts::read(&self.session, program, &self.loss_parts, loss)?;
        self.step += 1;
        let report = StepReport { step: self.step, loss, loss_parts, rewards, gradient_norm, lr, skipped };
        self.session.grow(self.options.most_bytes())?;
        Ok(report)
    }

    /// Sets the thresholds above which later guarded steps are skipped
    /// ([`UpdateOptions::guarded`](gapless_compile::step::UpdateOptions::guarded)). By default, a guarded step is
    /// only skipped if its loss or gradient norm is not finite. All ranks must set the same thresholds.
    pub fn set_limits(&mut self, limits: SkipThresholds) {
        self.limits = limits;
    }

    /// Returns the time that the last step or evaluation spent on each activity. Returns `None` on a GPU, where a step
    /// is a single graph whose parts are not timed.
    pub fn times(&self) -> Option<Times> {
        self.session.times()
    }

    /// Trains one step on a GPU like [`Self::step`], and returns the time of each instruction.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step`] except [`TrainError::NonFinite`]. Also returns an error on the CPU, where
    /// `tracing` spans report the times instead.
    #[cfg(feature = "cuda")]
    pub fn profile(&mut self, tokens: &[u32], targets: &[u32]) -> Result<Vec<cuda::Timed>> {
        self.write_step(&Batch { tokens, targets, starts: &[] }, [&[], &[]], self.schedule.at(self.step))?;
        let (program, options) = (self.training()?, self.run_options());
        let Some(timed) = self.session.profile(program, options)? else {
            let why = "only GPUs time single instructions";
            return Err(TrainError::config("profile", why, "on the CPU, subscribe to the engine's tracing spans"));
        };
        self.step += 1;
        Ok(timed)
    }

    /// Like [`Self::step`], with token ids and targets as candle tensors [batch, sequence] of u32.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step`].
    pub fn step_on(&mut self, tokens: &candle_core::Tensor, targets: &candle_core::Tensor) -> Result<StepReport> {
        let flat = |t: &candle_core::Tensor| t.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>();
        self.step(&flat(tokens)?, &flat(targets)?)
    }

    /// Returns the mean loss over a batch of `evaluation_batch` sequences. Dropout is off, and the model is not
    /// changed.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step`] except [`TrainError::NonFinite`].
    pub fn evaluate(&mut self, tokens: &[u32], targets: &[u32]) -> Result<f32> {
        self.evaluate_batch(&Batch { tokens, targets, starts: &[] })
    }

    /// Like [`Self::evaluate`], but sequences may hold several documents each, and targets may be excluded from the
    /// loss.
    ///
    /// # Errors
    /// Returns the errors of [`Self::step_batch`] except [`TrainError::NonFinite`].
    pub fn evaluate_batch(&mut self, batch: &Batch<'_>) -> Result<f32> {
        let program = self.programs.evaluate;
        let whole = Share { parts: 1, first: 0, stride: 1, count: 1 };
        self.write_batch(program, whole, self.options.step.evaluation_batch(), batch, None)?;
        self.run(program, false)?;
        self.session.grow(self.options.most_bytes())?;
        Ok(self.session.scalar(program, "loss")?)
    }

    /// Returns the log-likelihood of each sequence of a batch of `evaluation_batch` sequences: the sum of log p over its
    /// targets that are not [`IGNORED`]. Dropout is off, and the model is not changed. Before the first step, these are
    /// the log-likelihoods under the reference model. Requires
    /// [`StepOptions::preference`](gapless_compile::step::StepOptions::preference).
    ///
    /// # Errors
    /// Returns the errors of [`Self::evaluate_batch`], and an error if the trainer does not train on preferences.
    pub fn log_likelihoods(&mut self, batch: &Batch<'_>) -> Result<Vec<f32>> {
        let program = self.programs.evaluate;
        if self.options.step.preference.is_none() {
            let why = "only a trainer for preferences has the log-likelihoods of sequences";
            return Err(TrainError::config("preference", why, "set StepOptions::preference"));
        }
        let whole = Share { parts: 1, first: 0, stride: 1, count: 1 };
        self.write_batch(program, whole, self.options.step.evaluation_batch(), batch, Some(1.0))?;
        self.run(program, false)?;
        self.session.grow(self.options.most_bytes())?;
        Ok(self.session.with_output(program, LOG_LIKELIHOODS, <[f32]>::to_vec)?)
    }

    /// Returns the logits [1, sequence, vocabulary] of one sequence, in f32. On the CPU, the candle tensor is a view
    /// of the arena, valid until the next call that runs a program.
    ///
    /// # Errors
    /// Returns the errors of [`Self::evaluate`], and an error if the model was built for inference with caches.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<candle_core::Tensor> {
        let Some(program) = self.programs.logits else {
            let why = "a model made for inference has the logits of the next token only";
            return Err(TrainError::config("logits", why, "build it with Trainer::new"));
        };
        let expected = self.options.step.sequence;
        if tokens.len() != expected {
            return Err(TrainError::ElementCount { name: "tokens".into(), expected, given: tokens.len() });
        }
        self.check_ids(tokens)?;
        if self.session.has_input(program, "tokens") {
            let whole = Share { parts: 1, first: 0, stride: 1, count: 1 };
            self.write_inputs(program, whole, &[("tokens", tokens)])?;
        }
        self.run(program, false)?;
        self.session.grow(self.options.most_bytes())?;
        Ok(self.session.output(program, "logits")?.to_dtype(DType::F32)?)
    }

    /// Returns statistics over all runs so far of the arena for the rows that experts receive
    /// ([`MemoryOptions::routing`](gapless_compile::step::MemoryOptions::routing)). Returns `None` if no buffer's size
    /// depends on data.
    pub fn routing(&self) -> Option<ArenaReport> {
        self.session.routing()
    }

    /// Checks that no two buffers overlap that were alive at the same time in the last run. This covers planned buffers
    /// and buffers placed at run time. Returns the number of buffers placed at run time.
    ///
    /// # Errors
    /// Returns [`RuntimeError::BadRun`](gapless_runtime::Error::BadRun) with all overlaps.
    pub fn check_run(&self) -> Result<usize> {
        Ok(self.session.check_run()?)
    }

    /// The program of the training step.
    fn training(&self) -> Result<ProgramId> {
        self.programs.train.ok_or_else(|| {
            let why = "the model was made for inference only";
            TrainError::config("training", why, "build it with Trainer::new")
        })
    }

    fn run(&mut self, program: ProgramId, watch: bool) -> Result<Option<String>> {
        let options = RunOptions { watch, ..self.run_options() };
        Ok(self.session.run(program, options)?)
    }

    fn run_options(&self) -> RunOptions {
        let Share { first, stride, .. } = self.share;
        let (first_micro_batch, micro_batch_stride) = (first as u64, stride as u64);
        let TrainOptions { seed, poison, .. } = self.options;
        RunOptions { seed, step: self.step, poison, watch: false, first_micro_batch, micro_batch_stride }
    }

    /// Checks that a batch has what the loss of pairs needs.
    fn check_pairs(&self, batch: &Batch<'_>, reference: &[f32], labels: &[f32]) -> Result<()> {
        let StepOptions { batch: sequences, sequence, preference, .. } = &self.options.step;
        let needs_reference = preference.is_some_and(|preference| preference.needs_reference());
        let needs_labels = preference.is_some_and(|preference| preference.loss == PairLoss::Kto);
        for (name, given, is_needed) in
            [(REFERENCE_INPUT, reference, needs_reference), (LABELS_INPUT, labels, needs_labels)]
        {
            let (expected, given) = (if is_needed { *sequences } else { 0 }, given.len());
            if given != expected {
                return Err(TrainError::ElementCount { name: name.into(), expected, given });
            }
        }
        if let Some(label) = labels.iter().find(|label| ![0.0, 1.0].contains(*label)) {
            let why = format!("an answer has the label {label}");
            return Err(TrainError::config("preference", why, "give labels of 0 or 1"));
        }
        let has_answer = |targets: &[u32]| targets.iter().any(|&target| target != IGNORED);
        let unanswered = || batch.targets.chunks_exact(*sequence).position(|targets| !has_answer(targets));
        match preference.and_then(|_| unanswered()) {
            Some(at) => {
                let why = format!("sequence {at} of the batch has no answer: all its targets are ignored");
                Err(TrainError::config("preference", why, "give pairs of which both answers have a target"))
            }
            None => Ok(()),
        }
    }

    fn write_step(&mut self, batch: &Batch<'_>, [reference, labels]: [&[f32]; 2], lr: f64) -> Result<()> {
        let program = self.training()?;
        let weight = self.options.step.preference.map(|_| 1.0);
        self.write_batch(program, self.share, self.options.step.batch, batch, weight)?;
        for (name, values) in [(REFERENCE_INPUT, reference), (LABELS_INPUT, labels)] {
            if !values.is_empty() {
                self.write_inputs(program, self.share, &[(name, values)])?;
            }
        }
        let rules = self.options.step.update.rules(&self.options.step.optimizer);
        for (input, (rule, factor)) in self.scalars_inputs.iter().zip(rules) {
            if self.session.has_input(program, input) {
                let scalars: [f32; SCALARS] = rule.scalars(self.step, lr * factor);
                self.session.write_input(program, input, 0, &scalars)?;
            }
        }
        if self.session.has_input(program, LIMITS_INPUT) {
            let SkipThresholds { loss, gradient_norm } = self.limits;
            self.session.write_input(program, LIMITS_INPUT, 0, &[loss, gradient_norm])?;
        }
        Ok(())
    }

    /// Writes this rank's share of a batch of `sequences` sequences to the inputs of a program. `weight` is the weight
    /// of each target that counts; if it is `None`, the loss is the mean over these targets.
    fn write_batch(
        &mut self,
        program: ProgramId,
        share: Share,
        sequences: usize,
        batch: &Batch<'_>,
        weight: Option<f32>,
    ) -> Result<()> {
        let expected = sequences * self.options.step.sequence;
        let given = [("tokens", batch.tokens), ("targets", batch.targets), ("starts", batch.starts)];
        let is_whole = |name: &str, ids: &[u32]| ids.len() == expected || name == "starts" && ids.is_empty();
        if let Some((name, ids)) = given.into_iter().find(|(name, ids)| !is_whole(name, ids)) {
            return Err(TrainError::ElementCount { name: name.into(), expected, given: ids.len() });
        }
        self.check_ids(batch.tokens)?;
        if !self.options.step.documents {
            batch.expect_no_documents()?;
            self.check_ids(batch.targets)?;
            return self.write_inputs(program, share, &[("tokens", batch.tokens), ("targets", batch.targets)]);
        }
        let mut documents = std::mem::take(&mut self.documents);
        let written = documents.fill(batch, self.options.step.sequence, weight).and_then(|()| {
            let DocumentInputs { starts, positions, targets, weights, routed } = &documents;
            self.check_ids(targets)?;
            let [of_starts, of_positions, of_weights, of_routed] = DOCUMENT_INPUTS;
            let ids =
                [("tokens", batch.tokens), ("targets", &**targets), (of_starts, starts), (of_positions, positions)];
            self.write_inputs(program, share, &ids)?;
            self.write_inputs(program, share, &[(of_weights, &**weights), (of_routed, routed)])
        });
        self.documents = documents;
        written
    }

    /// Writes this rank's share of inputs that have one element per token or per sequence of the batch. A context rank gets
    /// its own tokens of each sequence.
    fn write_inputs<T: Element>(&mut self, program: ProgramId, share: Share, inputs: &[(&str, &[T])]) -> Result<()> {
        // The program of a rank only has the inputs that the rank's stages read.
        for (name, data) in inputs {
            if !self.session.has_input(program, name) {
                continue;
            }
            let parts = data.chunks_exact(data.len() / share.parts).skip(share.first).step_by(share.stride);
            for (micro_batch, part) in parts.take(share.count).enumerate() {
                let micro_batch = micro_batch as u32;
                match self
                    .options
                    .step
                    .fold(self.at.context)
                    .filter(|_| ![REFERENCE_INPUT, LABELS_INPUT].contains(name))
                {
                    Some(fold) if self.options.step.mesh.context > 1 => {
                        let sequences = part.chunks_exact(self.options.step.sequence);
                        let pieces = sequences.flat_map(|tokens| fold.ranges().map(|range| &tokens[range]));
                        self.session.write_input_pieces(program, name, micro_batch, pieces)?;
                    }
                    _ => self.session.write_input(program, name, micro_batch, part)?,
                }
            }
        }
        Ok(())
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            Some(&id) => Err(TrainError::TokenOutOfRange { id, vocabulary: self.vocabulary }),
            None => Ok(()),
        }
    }
}
