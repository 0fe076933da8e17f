//! What decides a step's programs and their memory.

use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::arena::Reserve;
use gapless_graph::nn::Trainable;
use gapless_graph::nn::names;
use gapless_graph::optim::{AdamW, Optimizer};
use gapless_kernels::LossTerms;
use gapless_parallel::Mesh;

use super::{Generation, Overflow, Pipeline, SCALARS_INPUT};
use crate::error::{Error, Result};
use crate::executable::CompileOptions;
use crate::recompute::{Recompute, Stashing};

/// What an update does beside its rule.
#[derive(Debug, Clone, Default)]
pub struct UpdateOptions {
    /// Parameters with a rule or a learning rate of their own; of several that name one, the first counts.
    pub groups: Vec<ParameterGroup>,
    /// How far an element of a gradient may be from 0: what is farther is cut off, before the norm is taken.
    pub max_value: Option<f64>,
    /// Whether a step whose loss or norm is above its limits, or not finite, is left out: it changes no parameter and no state.
    pub guarded: bool,
    /// Keep an exponential moving average of every trained parameter, `average/NAME`, in f32: what stays of it in a step, 0.999 or more.
    pub average: Option<f64>,
}

/// Parameters that are not updated as the others are.
#[derive(Debug, Clone)]
pub struct ParameterGroup {
    /// Their names, or those of modules that they are in; `*` stands for any text.
    pub names: Vec<String>,
    /// Their rule.
    pub optimizer: Arc<dyn Optimizer>,
    /// What the learning rate is multiplied by.
    pub learning_rate: f64,
}

impl UpdateOptions {
    /// Groups of one update, at most: every parameter is compared with each, and each has an input of its own.
    pub const MAX_GROUPS: usize = 256;

    /// The number of a parameter's group, counted from 1; 0 for the rest.
    pub fn group_of(&self, parameter: &str) -> usize {
        let is_in = |group: &ParameterGroup| group.names.iter().any(|pattern| names(pattern, parameter));
        self.groups.iter().position(is_in).map_or(0, |group| group + 1)
    }

    /// The rules that parameters are updated by, in the order of their groups, each with what its learning rate is multiplied by.
    pub fn rules<'a>(
        &'a self,
        rest: &'a Arc<dyn Optimizer>,
    ) -> impl Iterator<Item = (&'a Arc<dyn Optimizer>, f64)> + 'a {
        let groups = self.groups.iter().map(|group| (&group.optimizer, group.learning_rate));
        std::iter::once((rest, 1.0)).chain(groups)
    }

    /// The inputs that carry their numbers of a step, in the same order.
    pub fn scalars_inputs(&self) -> Vec<String> {
        let of_group = |group: usize| format!("{SCALARS_INPUT}.{group}");
        std::iter::once(SCALARS_INPUT.to_owned()).chain((1..=self.groups.len()).map(of_group)).collect()
    }

    /// Refuses numbers that make no sense.
    ///
    /// # Errors
    /// [`Error::Config`], and those of [`Optimizer::check`].
    pub fn check(&self) -> Result<()> {
        let fail = |what, why: String, remedy| Err(Error::Config { what, why, remedy });
        if let Some(value) = self.max_value.filter(|value| value.is_nan() || *value <= 0.0) {
            return fail("max_value", format!("is {value}"), "it is above 0");
        }
        if let Some(decay) = self.average.filter(|decay| !(0.0..1.0).contains(decay)) {
            return fail("average", format!("a decay of {decay}"), "it is in [0, 1); 0.999 is usual");
        }
        if self.groups.len() > Self::MAX_GROUPS {
            let why = format!("{} are more than {}", self.groups.len(), Self::MAX_GROUPS);
            return fail("groups", why, "put parameters that are updated alike into one group");
        }
        for ParameterGroup { names, optimizer, learning_rate } in &self.groups {
            if names.is_empty() {
                return fail("groups", "one of them names nothing".into(), "name parameters or modules");
            }
            if !(*learning_rate >= 0.0 && learning_rate.is_finite()) {
                return fail("groups", format!("a learning rate times {learning_rate}"), "it is at least 0");
            }
            optimizer.check()?;
        }
        Ok(())
    }
}

/// What decides a step's programs and their memory: of a trainer's options those that are neither data, nor time, nor device.
#[derive(Debug, Clone)]
pub struct StepOptions {
    /// Sequences per step, of all ranks together.
    pub batch: usize,
    /// Parts into which a data rank's share of the batch is cut.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// Whether sequences hold several documents, which do not see each other ([`DOCUMENT_INPUTS`](super::DOCUMENT_INPUTS)).
    pub documents: bool,
    /// Type of parameters, activations and gradients.
    pub dtype: DType,
    /// Which part of the model is trained.
    pub trainable: Trainable,
    /// What the training loss counts beside the likelihood of its targets.
    pub loss: LossTerms,
    /// The update rule.
    pub optimizer: Arc<dyn Optimizer>,
    /// What the update does beside that.
    pub update: UpdateOptions,
    /// The most work that planning the arena may be.
    pub planning: u64,
    /// How many ranks there are.
    pub mesh: Mesh,
    /// How the ranks of a pipeline work together.
    pub pipeline: Pipeline,
    /// What is computed again in the backward.
    pub recompute: Recompute,
    /// Operations whose results wait for the backward in eight bits.
    pub compress: Vec<String>,
    /// Operations whose results wait for the backward in a file.
    pub offload: Vec<String>,
    /// Room for the rows that expert ranks receive.
    pub routing: Reserve,
    /// What becomes of a step that runs out of that room.
    pub overflow: Overflow,
    /// Update each parameter as soon as its gradient is complete.
    pub release_gradients: bool,
    /// Hold every gradient until the next step.
    pub keep_gradients: bool,
    /// The programs that continue sequences, if there are to be any.
    pub generation: Option<Generation>,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            micro_batches: 1,
            sequence: 256,
            documents: false,
            dtype: DType::F32,
            trainable: Trainable::All,
            loss: LossTerms::NONE,
            optimizer: AdamW::default().into(),
            update: UpdateOptions::default(),
            planning: CompileOptions::default().planner.work,
            mesh: Mesh::default(),
            pipeline: Pipeline::default(),
            recompute: Recompute::None,
            compress: Vec::new(),
            offload: Vec::new(),
            routing: Reserve::Worst,
            overflow: Overflow::Error,
            release_gradients: false,
            keep_gradients: false,
            generation: None,
        }
    }
}

impl StepOptions {
    /// Parts into which the batch is cut: micro-batches of all ranks that share it.
    pub fn parts(&self) -> usize {
        self.micro_batches.saturating_mul(self.mesh.data).saturating_mul(self.mesh.expert)
    }

    /// The rule that a parameter is updated by, if the model says nothing else.
    pub fn rule_of(&self, parameter: &str) -> &Arc<dyn Optimizer> {
        match self.update.group_of(parameter) {
            0 => &self.optimizer,
            group => &self.update.groups[group - 1].optimizer,
        }
    }

    /// Sequences per evaluation: as many as a micro-batch has.
    pub fn evaluation_batch(&self) -> usize {
        self.batch / self.parts().max(1)
    }

    /// What is kept otherwise than as it is.
    pub fn stashing(&self) -> Stashing<'_> {
        Stashing { compress: &self.compress, offload: &self.offload }
    }

    /// How an arena is planned that must fit so many bytes, if any.
    pub fn planning_within(&self, capacity: Option<u64>) -> CompileOptions {
        CompileOptions::within(capacity, self.planning, self.routing)
    }
}
