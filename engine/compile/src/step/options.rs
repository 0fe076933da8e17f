//! The description of a training step: everything that decides its programs and their memory. Run files, command-line
//! flags and the options of a trainer are all built from these types. So each setting has its documentation, its
//! default and its check in this one place.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::arena::Reserve;
use gapless_graph::nn::{Preference, Trainable, names};
use gapless_graph::optim::{AdamW, Optimizer, ParameterInfo};
use gapless_kernels::{Fold, LossTerms};
use gapless_parallel::{Axis, Mesh, Rates};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Generation, Overflow, Pipeline, SCALARS_INPUT, text};
use crate::error::{Error, Result};
use crate::executable::CompileOptions;
use crate::lowering::Overlap;
use crate::recompute::{Recompute, StorageOptions};

/// A training step: everything that decides its programs and their memory. In a run file, the table `[step]` has the
/// sizes and the precision, and other tables have the other fields.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StepOptions {
    /// The number of sequences per step, over all ranks together.
    pub batch: usize,
    /// The number of parts into which each data rank's share of the batch is split. A larger number needs less memory
    /// and more time.
    pub micro_batches: usize,
    /// The number of tokens per sequence.
    pub sequence: usize,
    /// The number format of parameters, activations, gradients and optimizer states.
    pub precision: Precision,
    /// Whether tensor ranks divide the tokens between operations on split tensors (sequence parallelism): norms, residuals
    /// and dropout then hold 1/t of the tokens on each of t ranks. More is sent, in parts that take the same time.
    pub sequence_parallel: bool,
    /// The stage of ZeRO on shard ranks (`mesh.shard`): in stage 2, they divide gradients and optimizer states, and in stage
    /// 3 parameters too. In stage 3, each parameter is gathered before the operations that read it, in the forward and again in the
    /// backward. Both stages compute the same bits.
    pub zero_stage: usize,
    /// The number of gathered parameters that may be under way or waiting beside the one that is read. More hide the time
    /// of the gathers behind computation, and take the memory of these parameters.
    pub prefetch: usize,
    /// The number of sums of gradients over shard ranks that may be under way. With 0, each is waited for at once. Each takes
    /// the memory of a whole gradient.
    pub reductions: usize,
    /// The number of ranks along each axis of parallelism.
    #[serde(skip)]
    pub mesh: Mesh,
    /// The pipeline schedule.
    #[serde(skip)]
    pub pipeline: Pipeline,
    /// Settings that trade memory for time, and the limits of the arena.
    #[serde(skip)]
    pub memory: MemoryOptions,
    /// The parameters that are trained. Frozen parameters are stored in the type of [`Self::precision`], without
    /// gradients, optimizer states or f32 masters. The forward saves only the activations that gradients of trained
    /// parameters need.
    #[serde(skip)]
    pub trainable: Trainable,
    /// Terms of the training loss in addition to the likelihood of the targets. The evaluation loss is the likelihood
    /// alone.
    #[serde(skip)]
    pub loss: LossTerms,
    /// The loss of pairs of answers, in place of the loss of tokens. Sequence 2i of a batch has the chosen answer of
    /// pair i, and sequence 2i + 1 the rejected one. This requires [`Self::documents`], and whole pairs in each
    /// micro-batch. [`Self::loss`] must have no terms.
    #[serde(skip)]
    pub preference: Option<Preference>,
    /// The update rule: `AdamW { .. }.into()`, another rule of [`optim`](gapless_graph::optim), or your own.
    #[serde(skip, default = "adamw")]
    pub optimizer: Arc<dyn Optimizer>,
    /// Settings of the update that apply to any rule: parameter groups, gradient clamping, skipped steps, averages.
    #[serde(skip)]
    pub update: UpdateOptions,
    /// Whether a sequence may hold several documents, and targets that are ignored. Documents do not attend to each
    /// other, and each has positions of its own ([`DOCUMENT_INPUTS`](super::DOCUMENT_INPUTS)). The loss is the mean
    /// over the targets that are not ignored. Auxiliary losses, such as those of routers, cover all tokens except
    /// padding. This requires a model with causal attention, and the CPU.
    #[serde(skip)]
    pub documents: bool,
    /// Whether gradients are kept until the next step, so that they can be read. This takes additional memory of the
    /// size of the gradients.
    #[serde(skip)]
    pub keep_gradients: bool,
    /// The caches with which sequences are continued. The caches share memory with the training step. Without caches,
    /// each new token takes a forward pass over the token's whole window. Caches are not used on GPUs, nor with several
    /// pipeline or expert ranks. Tensor ranks divide them by heads.
    #[serde(skip)]
    pub generation: Option<Generation>,
}

/// The number formats of a training step. Kernels always compute in f32: the CPU converts elements when it loads them,
/// or keeps an f32 copy in scratch. The statistics of norms, log-sum-exps, losses and the gradient norm are f32 in
/// every precision. f16 is not offered, because without loss scaling, gradients leave its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Everything is stored in 32 bits.
    #[default]
    F32,
    /// Mixed precision: parameters, activations and gradients are stored in bfloat16. The optimizer keeps f32 masters
    /// and moments, and gradients of several micro-batches are summed in f32.
    #[serde(alias = "mixed")]
    Bf16,
    /// Everything is stored in bfloat16, optimizer states included, as with `model.to(torch.bfloat16)` in PyTorch.
    /// Small updates are lost to rounding.
    PureBf16,
}

impl Precision {
    /// Returns the type of parameters, activations and gradients.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 | Self::PureBf16 => DType::BF16,
        }
    }

    /// True if parameters that are stored in 16 bits have f32 master copies.
    pub fn has_masters(self) -> bool {
        self != Self::PureBf16
    }
}

/// Parses the name that a run file uses.
impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" | "mixed" => Ok(Self::Bf16),
            "pure_bf16" => Ok(Self::PureBf16),
            _ => Err(Error::config(
                "step.precision",
                format!("{text:?} is not a precision"),
                "use f32, bf16 or pure_bf16",
            )),
        }
    }
}

/// Returns the precision whose stored type is `dtype`; for bf16, the one with f32 masters.
impl TryFrom<DType> for Precision {
    type Error = Error;

    fn try_from(dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::BF16 => Ok(Self::Bf16),
            other => Err(Error::config("step.precision", format!("{other:?} is not a precision"), "use f32 or bf16")),
        }
    }
}

/// Settings that trade memory for time, and the limits of the arena: `[memory]` of a run file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryOptions {
    /// The activations that the backward recomputes instead of reading saved ones: `none`, `layers`, `first:3`,
    /// `layers:h.0,h.2` or `ops:layer_norm,gelu`. Recomputation does not change the results.
    #[serde(with = "text")]
    #[schemars(with = "String")]
    pub recompute: Recompute,
    /// The maximum size of the arena of a rank, in bytes or as a string (`"600MiB"`). The engine then chooses the
    /// recomputation that fits and costs the least time.
    #[serde(with = "text::size", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "text::size::schema")]
    pub budget: Option<u64>,
    /// The speed of the device, by which a budget chooses the values to recompute. Only the ratio of the two values
    /// matters. The default has the ratio of a CPU. The values of an H100 are `{ flops = 770e12, bytes = 3e12 }`.
    #[serde(default = "cpu_rates")]
    pub rates: Rates,
    /// Operations whose saved results are stored in 8 bits per element. Operations have the names that profiles and
    /// memory maps show. The forward does not change; gradients are computed from the rounded activations.
    pub compress: Vec<String>,
    /// Operations whose saved results are stored in a file, or in the host memory of a GPU, between forward and backward.
    /// On a CPU, offloading does not change the results. On a GPU, results can differ by rounding, because operations are
    /// not fused around a copy.
    pub offload: Vec<String>,
    /// The folder of the offload file. It should be on a disk, because a folder in memory saves nothing. Each rank has
    /// a file of its own, which is deleted when the process ends. If it is missing, a CPU keeps the file in the working
    /// directory, and a GPU keeps activations in pinned host memory instead of a file.
    pub offload_to: Option<PathBuf>,
    /// The reserve on expert ranks for routed rows, whose number depends on the data. The reserve `"worst"` always
    /// suffices, and only the pages that a step uses take memory. A number, such as 1.25, is a multiple of the rows of
    /// balanced routing. Another string, such as `"64MiB"`, is a size.
    #[serde(with = "text::reserve")]
    #[schemars(schema_with = "text::reserve::schema")]
    pub routing: Reserve,
    /// The behaviour of a step whose routed rows exceed the reserve. No choice changes the results of a step that
    /// succeeds.
    pub overflow: Overflow,
    /// Whether each parameter is updated as soon as its gradient is complete, after which the gradient is freed. With
    /// one micro-batch, not all gradients then exist at the same time. This requires `optimizer.max_norm = inf`,
    /// because the norm is known only after the last gradient. A step with a non-finite gradient is still reported, but
    /// it has already changed the model.
    pub release_gradients: bool,
    /// The maximum work of the planner, in examined rectangles. The default corresponds to one or two seconds, and
    /// planning ends earlier if the lower bound is reached. With less work, a plan may end slightly above the bound.
    pub planning: u64,
}

fn cpu_rates() -> Rates {
    Rates { flops: 1e11, bytes: 1e10 }
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self {
            recompute: Recompute::None,
            budget: None,
            rates: cpu_rates(),
            compress: Vec::new(),
            offload: Vec::new(),
            offload_to: None,
            routing: Reserve::Worst,
            overflow: Overflow::Error,
            release_gradients: false,
            planning: CompileOptions::default().planner.work,
        }
    }
}

/// Settings of the update that apply to any rule.
#[derive(Debug, Clone, Default)]
pub struct UpdateOptions {
    /// Groups of parameters with their own update rule or learning rate. If several groups match a parameter, the first
    /// applies.
    pub groups: Vec<ParameterGroup>,
    /// The absolute value to which gradient elements are clamped, before the norm is computed.
    pub max_value: Option<f64>,
    /// Whether a step is skipped, without changing parameters or states, if its loss or norm is not finite or exceeds
    /// the limits.
    pub guarded: bool,
    /// Decay rate of an exponential moving average of every trained parameter. With `None`, no averages are kept. An
    /// average is f32 and stored as `average/NAME`. Usual rates are 0.999 or more.
    pub average: Option<f64>,
}

/// A group of parameters with its own update settings.
#[derive(Debug, Clone)]
pub struct ParameterGroup {
    /// The names of parameters or modules; `*` stands for any text.
    pub names: Vec<String>,
    /// The update rule of the group.
    pub optimizer: Arc<dyn Optimizer>,
    /// The factor by which the step's learning rate is multiplied for this group.
    pub learning_rate: f64,
}

impl UpdateOptions {
    /// Maximum number of groups. Every parameter is compared with each group, and each group has an input of its own.
    pub const MAX_GROUPS: usize = 256;

    /// Returns the index of a parameter's group, counted from 1, or 0 if no group matches.
    pub fn group_of(&self, parameter: &str) -> usize {
        let is_in = |group: &ParameterGroup| group.names.iter().any(|pattern| names(pattern, parameter));
        self.groups.iter().position(is_in).map_or(0, |group| group + 1)
    }

    /// Returns the update rules, each with the factor of its learning rate. The first rule is `rest`, which applies to
    /// parameters without a group. The rules of the groups follow in order.
    pub fn rules<'a>(
        &'a self,
        rest: &'a Arc<dyn Optimizer>,
    ) -> impl Iterator<Item = (&'a Arc<dyn Optimizer>, f64)> + 'a {
        let groups = self.groups.iter().map(|group| (&group.optimizer, group.learning_rate));
        std::iter::once((rest, 1.0)).chain(groups)
    }

    /// Returns the names of the inputs that hold the scalars of each rule, in the order of [`Self::rules`].
    pub fn scalars_inputs(&self) -> Vec<String> {
        let of_group = |group: usize| format!("{SCALARS_INPUT}.{group}");
        std::iter::once(SCALARS_INPUT.to_owned()).chain((1..=self.groups.len()).map(of_group)).collect()
    }

    /// Checks that each value is in range.
    fn check(&self) -> Result<()> {
        if let Some(value) = self.max_value.filter(|value| value.is_nan() || *value <= 0.0) {
            return Err(Error::config("optimizer.max_value", format!("is {value}"), "set it above 0"));
        }
        if let Some(decay) = self.average.filter(|decay| !(0.0..1.0).contains(decay)) {
            return Err(Error::config("optimizer.average", format!("is {decay}"), "set it to at least 0 and below 1"));
        }
        if self.groups.len() > Self::MAX_GROUPS {
            let why = format!("{} are more than the maximum of {}", self.groups.len(), Self::MAX_GROUPS);
            return Err(Error::config("optimizer.groups", why, "put parameters that are updated alike into one group"));
        }
        for ParameterGroup { names, optimizer, learning_rate } in &self.groups {
            if names.is_empty() {
                let why = "a group has no names";
                return Err(Error::config("optimizer.groups", why, "name parameters or modules"));
            }
            if !(*learning_rate >= 0.0 && learning_rate.is_finite()) {
                let why = format!("a group's learning_rate is {learning_rate}");
                return Err(Error::config(
                    "optimizer.groups",
                    why,
                    "set it to at least 0; it multiplies the run's learning rate",
                ));
            }
            optimizer.check()?;
        }
        Ok(())
    }
}

fn adamw() -> Arc<dyn Optimizer> {
    AdamW::default().into()
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            micro_batches: 1,
            sequence: 256,
            precision: Precision::default(),
            sequence_parallel: false,
            zero_stage: 3,
            prefetch: 1,
            reductions: 1,
            mesh: Mesh::default(),
            pipeline: Pipeline::default(),
            memory: MemoryOptions::default(),
            trainable: Trainable::All,
            loss: LossTerms::NONE,
            preference: None,
            optimizer: adamw(),
            update: UpdateOptions::default(),
            documents: false,
            keep_gradients: false,
            generation: None,
        }
    }
}

impl StepOptions {
    /// Maximum number of tokens per step.
    const MAX_TOKENS: usize = 1 << 28;
    /// Maximum number of micro-batches, of ranks along one axis, and of stages per rank.
    const MAX_EXTENT: usize = 1 << 16;

    /// Returns the number of parts into which the batch is split: the micro-batches of all ranks that share the batch.
    pub fn parts(&self) -> usize {
        let Mesh { data, shard, expert, .. } = self.mesh;
        [data, shard, expert].into_iter().fold(self.micro_batches, usize::saturating_mul)
    }

    /// Returns the number of ranks that divide the experts of a layer.
    pub fn expert_ranks(&self) -> usize {
        self.mesh.size(self.mesh.experts())
    }

    /// Returns the update rule of a parameter. If the model itself sets a rule for the parameter, that rule takes
    /// precedence.
    pub fn rule_of(&self, parameter: &str) -> &Arc<dyn Optimizer> {
        match self.update.group_of(parameter) {
            0 => &self.optimizer,
            group => &self.update.groups[group - 1].optimizer,
        }
    }

    /// Returns the changes of settings that would lower the memory of this step, with the keys of the settings. Changes
    /// that the step already has, or that hardly matter to it, are left out.
    pub fn remedies(&self) -> Vec<&'static str> {
        // Adapters have hardly any optimizer states. All other trained parameters have those of the update rule.
        let has_states = !matches!(self.trainable, Trainable::Lora(_));
        let info = ParameterInfo {
            name: "",
            dims: &[256, 256],
            dtype: DType::F32,
            looked_up: false,
            head: false,
            vectors: false,
            masters: false,
        };
        let state_bytes: u64 = self.optimizer.states(&info).iter().map(|state| state.spec.bytes()).sum();
        let has_large_states = has_states && state_bytes > (info.elements() * size_of::<f32>()) as u64;
        let sequences = self.evaluation_batch();
        let all = [
            (self.precision == Precision::F32 && !has_states, "bf16 (step.precision)"),
            // The masters take more than the halved parameters save.
            (
                self.precision == Precision::F32 && has_states,
                "bf16 (step.precision), if activations take most of the memory",
            ),
            (
                self.precision != Precision::PureBf16 && has_states,
                "bf16 without f32 masters (step.precision = \"pure_bf16\")",
            ),
            (has_large_states, "an optimizer with smaller states (optimizer.name = \"adamw8bit\" or \"lion\")"),
            (
                self.expert_ranks() > 1 && matches!(self.memory.routing, Reserve::Worst),
                "a smaller reserve for the rows that expert ranks receive (memory.routing = 1.25)",
            ),
            (
                self.trainable == Trainable::All,
                "adapters (trainable.lora) or fewer trained parameters (trainable.only)",
            ),
            (true, "more pipeline ranks (mesh.pipeline), which share the layers"),
            (has_states, "more data ranks (mesh.data), which share the optimizer states"),
            (true, "more shard ranks (mesh.shard), which share parameters, gradients and optimizer states"),
            (sequences > 1, "more micro-batches (step.micro_batches), if activations take most of the memory"),
            (sequences <= 1, "shorter sequences (step.sequence), if activations take most of the memory"),
        ];
        all.into_iter().filter_map(|(helps, remedy)| helps.then_some(remedy)).collect()
    }

    /// Returns the number of sequences per evaluation, which is the number of sequences per micro-batch.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.parts().max(1)
    }

    /// Returns the number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.mesh.pipeline.saturating_mul(self.pipeline.chunks)
    }

    /// Returns the caches for generation. Returns `None` if no caches are set, or if the mesh has several pipeline,
    /// context or expert ranks, or folds experts.
    pub fn caches(&self) -> Option<&Generation> {
        let is_supported = self.mesh.context == 1 && self.mesh.pipeline == 1 && self.expert_ranks() == 1;
        self.generation.as_ref().filter(|_| is_supported)
    }

    /// Returns the collectives of shard ranks that may be under way.
    pub fn overlap(&self) -> Overlap {
        Overlap { prefetch: self.prefetch, reductions: self.reductions }
    }

    /// Returns the number of rounds in which context ranks divide a sequence. One round gives all ranks equal work in sequences
    /// of one text. If sequences hold documents of several lengths, there are as many rounds as leave chunks of 32 tokens, so
    /// that every rank has some of each document.
    pub fn context_rounds(&self) -> usize {
        const TOKENS: usize = 32;
        let chunks = |rounds: usize| rounds.saturating_mul(2).saturating_mul(self.mesh.context);
        let is_fine =
            |&rounds: &usize| self.sequence.is_multiple_of(chunks(rounds)) && self.sequence / chunks(rounds) >= TOKENS;
        let rounds = (0..usize::BITS).map(|power| 1 << power).take_while(|rounds| self.documents && is_fine(rounds));
        rounds.last().unwrap_or(1)
    }

    /// Returns the tokens of each sequence that a context rank has, or `None` if the ranks cannot divide a sequence.
    pub fn fold(&self, rank: usize) -> Option<Fold> {
        Fold::new(self.sequence, (self.mesh.context, rank), self.context_rounds())
    }

    /// Returns the work of the fullest context rank over the mean of all, in scores that causal attention computes, for
    /// sequences one after another. `starts` has for each token the place at which its document begins. Returns `None` if
    /// the ranks cannot divide a sequence.
    pub fn context_balance(&self, starts: &[u32]) -> Option<f64> {
        let ranks = 0..self.mesh.context;
        let work = ranks.map(|rank| {
            let fold = self.fold(rank)?;
            let of_sequence =
                |starts: &[u32]| fold.ranges().flatten().map(|at| at as u64 + 1 - u64::from(starts[at])).sum::<u64>();
            Some(starts.chunks_exact(self.sequence).map(of_sequence).sum())
        });
        let work = work.collect::<Option<Vec<u64>>>()?;
        let (most, all) = (work.iter().max()?, work.iter().sum::<u64>());
        (all > 0).then(|| *most as f64 * work.len() as f64 / all as f64)
    }

    /// Returns the operations whose saved results are compressed or offloaded.
    pub fn stashing(&self) -> StorageOptions<'_> {
        StorageOptions { compress: &self.memory.compress, offload: &self.memory.offload }
    }

    /// Returns the planner options for this step.
    pub fn planning(&self) -> CompileOptions {
        self.planning_within(self.memory.budget)
    }

    /// Returns the planner options for an arena of at most this many bytes.
    pub fn planning_within(&self, capacity: Option<u64>) -> CompileOptions {
        CompileOptions::within(capacity, self.memory.planning, self.memory.routing)
    }

    /// Checks all settings. An error names the key that the setting has in a run file.
    ///
    /// # Errors
    /// Returns an error for the first setting that is refused, and the errors of [`Optimizer::check`].
    pub fn check(&self) -> Result<()> {
        self.check_values()?;
        let Self { batch, micro_batches, sequence, mesh, memory, .. } = self;
        if mesh.context > 1 && self.fold(0).is_none() {
            let why =
                format!("is {}, but twice as many ranks do not divide sequences of {sequence} tokens", mesh.context);
            return Err(Error::config(
                "mesh.context",
                why,
                "choose a sequence that is a multiple of twice the context ranks",
            ));
        }
        if self.sequence_parallel && mesh.tensor == 1 {
            let why = "there is one tensor rank";
            return Err(Error::config("step.sequence_parallel", why, "set mesh.tensor, or leave it out"));
        }
        if !batch.is_multiple_of(self.parts()) {
            let ranks = match self.parts() / micro_batches {
                1 => String::new(),
                ranks => format!(" for each of {ranks} ranks that share the batch"),
            };
            let why = format!("{batch} sequences do not divide into {micro_batches} micro-batches{ranks}");
            return Err(Error::config(
                "step.micro_batches",
                why,
                "make step.batch a multiple of step.micro_batches × mesh.data × mesh.shard × mesh.expert",
            ));
        }
        if self.keep_gradients && self.shares_batch() {
            let why = "ranks that share the batch have only parts of the gradients";
            return Err(Error::config(
                "keep_gradients",
                why,
                "keep them with one data, shard, expert and context rank",
            ));
        }
        if memory.budget.is_some() && memory.recompute != Recompute::None {
            let why = "a budget chooses what is recomputed";
            return Err(Error::config("memory.budget", why, "leave memory.recompute or memory.budget out"));
        }
        if memory.overflow == Overflow::Recompute && matches!(memory.routing, Reserve::Bytes(_)) {
            let why = "a reserve in bytes promises no room for recomputed rows";
            return Err(Error::config("memory.overflow", why, "give memory.routing a factor (Reserve::Balanced)"));
        }
        if memory.overflow == Overflow::Recompute && !memory.compress.is_empty() {
            let why = "rows recomputed from compressed activations would differ from the forward's";
            return Err(Error::config("memory.overflow", why, "leave memory.compress out, or choose another policy"));
        }
        if memory.overflow == Overflow::Recompute && self.mesh.shard > 1 && self.zero_stage == 3 {
            let why = "ranks that gather parameters for recomputed rows would have to agree on these rows";
            return Err(Error::config("memory.overflow", why, "set step.zero_stage to 2, or choose another policy"));
        }
        self.check_preference()?;
        if memory.release_gradients { self.check_release() } else { Ok(()) }
    }

    /// Checks the value of each setting on its own. Combinations of settings are not checked.
    ///
    /// # Errors
    /// Returns an error for the first setting that is refused.
    pub fn check_values(&self) -> Result<()> {
        let Self { batch, sequence, mesh, memory, .. } = self;
        let extents = [
            ("step.batch", *batch, Self::MAX_TOKENS),
            ("step.sequence", *sequence, Self::MAX_TOKENS),
            ("step.micro_batches", self.micro_batches, Self::MAX_EXTENT),
            ("mesh.data", mesh.data, Self::MAX_EXTENT),
            ("mesh.pipeline", mesh.pipeline, Self::MAX_EXTENT),
            ("mesh.shard", mesh.shard, Self::MAX_EXTENT),
            ("mesh.expert", mesh.expert, Self::MAX_EXTENT),
            ("mesh.context", mesh.context, Self::MAX_EXTENT),
            ("mesh.tensor", mesh.tensor, Self::MAX_EXTENT),
            ("pipeline.chunks", self.pipeline.chunks, Self::MAX_EXTENT),
        ];
        if let Some((key, extent, most)) = extents.into_iter().find(|(_, extent, most)| !(1..=*most).contains(extent)) {
            return Err(match extent {
                0 => Error::config(key, "is 0", "set it to at least 1"),
                _ => Error::config(key, format!("is {extent}, above the maximum of {most}"), "choose a smaller value"),
            });
        }
        if mesh.fold.contains(Axis::Pipeline) {
            let why = "pipeline ranks have different layers";
            return Err(Error::config("mesh.fold", why, "name data, shard, context or tensor"));
        }
        if ![2, 3].contains(&self.zero_stage) {
            let why = format!("is {}", self.zero_stage);
            return Err(Error::config("step.zero_stage", why, "set it to 2 or 3; data ranks (mesh.data) are stage 1"));
        }
        if batch.saturating_mul(*sequence) > Self::MAX_TOKENS {
            let why = format!(
                "{batch} sequences of {sequence} tokens are more than the maximum of {} tokens",
                Self::MAX_TOKENS
            );
            return Err(Error::config("step.batch", why, "choose a smaller step.batch or step.sequence"));
        }
        mesh.ranks()?;
        let Rates { flops, bytes } = memory.rates;
        if !memory.rates.are_sound() {
            let why = format!("{flops} FLOP/s and {bytes} bytes/s are not valid rates");
            return Err(Error::config("memory.rates", why, "set both above 0"));
        }
        if let Reserve::Balanced { factor } = memory.routing
            && !(factor.is_finite() && factor >= 0.0)
        {
            return Err(Error::config("memory.routing", format!("is {factor}"), "set it to at least 0; 1.25 is usual"));
        }
        let LossTerms { label_smoothing, z_loss } = self.loss;
        if !(0.0..1.0).contains(&label_smoothing) {
            let remedy = "set it to at least 0 and below 1";
            return Err(Error::config("loss.label_smoothing", format!("is {label_smoothing}"), remedy));
        }
        if !(z_loss >= 0.0 && z_loss.is_finite()) {
            return Err(Error::config("loss.z_loss", format!("is {z_loss}"), "set it to at least 0"));
        }
        self.update.check()?;
        self.trainable.check()?;
        Ok(self.optimizer.check()?)
    }

    fn shares_batch(&self) -> bool {
        let Mesh { data, shard, expert, context, .. } = self.mesh;
        [data, shard, expert, context].iter().any(|&ranks| ranks > 1)
    }

    fn check_preference(&self) -> Result<()> {
        let Some(preference) = &self.preference else { return Ok(()) };
        preference.check()?;
        let fail = |key, why: &str, remedy| Err(Error::config(key, why, remedy));
        if !self.documents {
            let why = "the tokens of a prompt would count in the likelihoods of answers";
            return fail("preference", why, "set data.format = \"preference\" (StepOptions::documents)");
        }
        if !self.evaluation_batch().is_multiple_of(2) {
            let why = "the two answers of a pair would be in different micro-batches";
            return fail(
                "step.batch",
                why,
                "make it a multiple of 2 × step.micro_batches × mesh.data × mesh.shard × mesh.expert",
            );
        }
        if self.loss != LossTerms::NONE {
            return fail("loss", "the losses of preferences have no further terms", "leave loss or preference out");
        }
        Ok(())
    }

    /// Checks that no setting needs all gradients at once, for `release_gradients`.
    fn check_release(&self) -> Result<()> {
        let fail = |why: &str, remedy| Err(Error::config("memory.release_gradients", why, remedy));
        if self.update.rules(&self.optimizer).any(|(rule, _)| rule.needs_norm()) {
            return fail(
                "gradients are clipped by their global norm",
                "set the optimizer's max_norm to infinity (inf)",
            );
        }
        if self.update.guarded {
            return fail("the guard needs the loss and the norm before it allows an update", "leave the guard out");
        }
        if self.keep_gradients {
            return fail("keep_gradients keeps all gradients", "choose one of the two");
        }
        if self.shares_batch() {
            return fail("gradients are summed over ranks", "use one data, one shard and one expert rank");
        }
        Ok(())
    }
}
