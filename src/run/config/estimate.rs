//! `[estimate]`: settings of the commands that plan a step or estimate its time without running it.

use gapless_engine::compile::step::text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ExpertLoad;

/// The table `[estimate]` of a run file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EstimateConfig {
    /// The device that plans and time estimates are for: `t4`, `v100-16`, `a10`, `l4`, `rtx3090`, `rtx4090`, `a100-40`,
    /// `a6000`, `l40s`, `a100-80`, `h100`, `h200`, `b200`, a TOML file with a profile, or `this-machine`, which is
    /// measured. `plan` then says whether the step fits into the device's memory. Without this key, times are those of
    /// an `h100`, and no memory is assumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The memory of the device, in place of the value of the profile.
    #[serde(skip_serializing_if = "Option::is_none", with = "text::size")]
    #[schemars(with = "Option<String>")]
    pub memory: Option<u64>,
    /// The speed of matrix products in TFLOP/s, in place of the value of the profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// The memory bandwidth in TB/s, in place of the value of the profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terabytes: Option<f64>,
    /// The source of the tensor lifetimes.
    pub lowering: Lowering,
    /// Settings of `lowering = "megatron"`.
    pub megatron: MegatronConfig,
    /// Settings of `lowering = "fsdp2"`.
    pub fsdp2: Fsdp2Config,
    /// The distribution of tokens over the experts of each layer: `even` gives every expert the same chance; in
    /// `skewed:A`, the n-th most popular expert is chosen n^−A times as often as the first; `worst` sends as many rows
    /// to one expert rank as any routing can; `recorded:FILE.csv` has the loads of a training
    /// (columns `step,layer,expert,tokens`). Comparisons and sweeps show the expert rank that receives most rows. The
    /// arena does not depend on it (`memory.routing`).
    #[serde(with = "text")]
    #[schemars(with = "String")]
    pub expert_load: ExpertLoad,
    /// The pipeline ranks that `plan` and `compare` show: numbers separated by commas, or `all`. Data and expert ranks
    /// have the same plan as the first rank of their stage.
    #[serde(deserialize_with = "text::number_or_text")]
    pub rank: String,
}

/// The source of the tensor lifetimes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Lowering {
    /// The compiler of this engine.
    #[default]
    Gapless,
    /// An eager framework (PyTorch 2) in the precision of the step. With f32 masters, the masters and the sums of
    /// gradients are allocated before the step, as in Megatron.
    Eager,
    /// An eager framework with f32 parameters and autocast, which casts them to bf16 once per micro-batch.
    EagerAmp,
    /// Megatron-LM: layers on tensor ranks as its modules compute them, a cross-entropy over a divided vocabulary, and
    /// contiguous gradient buffers. The vocabulary is padded to a multiple of 128 × tensor ranks.
    Megatron,
    /// torchtitan with FSDP2: f32 shards of parameters on `mesh.shard` ranks, which are gathered in bf16 block by block.
    /// `step.zero_stage` 3 frees them after a block's forward, and 2 keeps them until its backward.
    Fsdp2,
}

/// Settings of torchtitan that a step of gapless does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp2Config {
    /// Whether gradients are reduced in bf16 in place of f32.
    pub reduce_bf16: bool,
    /// Whether recomputed layers keep the results of every second matrix product and of attention (selective activation
    /// checkpointing by operation).
    pub selective: bool,
    /// Whether layers are compiled. Norms, rotations and gates are then one kernel each, and a selected result is kept only
    /// if the backward reads it.
    pub compiled: bool,
    /// Whether products over tensor ranks gather and scatter their operands piece by piece (asynchronous tensor parallelism).
    pub async_tensor: bool,
}

/// Settings of Megatron-LM that a step of gapless does not have.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MegatronConfig {
    /// Whether the step is in fp16. Gradients are then stored in fp16, and masters, moments and a copy of the gradients
    /// for the update in f32. Without it, the step is in bf16, and gradients are stored in f32.
    pub fp16: bool,
    /// The number of ranks that share the optimizer's states, with 1 for a run without the distributed optimizer. The
    /// default is the number of data ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer_ranks: Option<usize>,
    /// Whether attention is computed by separate operations, so that the probabilities are kept for the backward.
    /// Without it, attention is a flash kernel.
    pub unfused_attention: bool,
    /// Whether norms, gates and rotary positions are computed by separate operations of PyTorch, which save more for the
    /// backward. Without it, each is one kernel.
    pub unfused_layers: bool,
    /// Whether context ranks pass keys and values around, so that each rank keeps a copy of its own for the backward.
    /// `step.sequence` has the tokens of one context rank, and `mesh.data` the data ranks × context ranks.
    pub ring_attention: bool,
    /// Whether layers are Megatron's own, without Transformer Engine and its workspace. Their products gather divided tokens
    /// into one buffer that lives through the step.
    pub local_layers: bool,
    /// Whether the run is deterministic, which sets the size of cuBLAS's workspaces.
    pub deterministic: bool,
}

#[cfg(feature = "sweep")]
impl EstimateConfig {
    /// The name of the device whose speed time estimates assume.
    pub(crate) fn profile_name(&self) -> &str {
        self.profile.as_deref().unwrap_or("h100")
    }
}

impl Default for EstimateConfig {
    fn default() -> Self {
        Self {
            profile: None,
            memory: None,
            tflops: None,
            terabytes: None,
            lowering: Lowering::Gapless,
            megatron: MegatronConfig::default(),
            fsdp2: Fsdp2Config::default(),
            expert_load: ExpertLoad::EVEN,
            rank: "0".into(),
        }
    }
}
