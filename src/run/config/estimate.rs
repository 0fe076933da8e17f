//! `[estimate]`: what a step is counted with before it runs.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// `[estimate]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EstimateConfig {
    /// The device that time is estimated for: `a100-80`, `h100`, `h200`, `b200`, `this-machine`, which is measured, or a TOML file of one.
    pub profile: String,
    /// TFLOP/s of matrix products, where they are not the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// TB/s of memory, where they are not the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terabytes: Option<f64>,
    /// Who turns the step into lifetimes.
    pub lowering: Lowering,
    /// The ranks of the pipeline that are asked about: numbers with commas between them, or `all`. Ranks that share the batch or the
    /// experts with them have the same plans.
    #[serde(deserialize_with = "number_or_text")]
    pub rank: String,
}

fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NumberOrText {
        Number(u64),
        Text(String),
    }
    Ok(match NumberOrText::deserialize(from)? {
        NumberOrText::Number(number) => number.to_string(),
        NumberOrText::Text(text) => text,
    })
}

/// Who turns a step into a table of lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Lowering {
    /// This engine's compiler.
    #[default]
    Gapless,
    /// An eager framework, all numbers in the step's type; with masters, they and sums of gradients are allocated before the step, as
    /// Megatron does.
    Eager,
    /// An eager framework, parameters in float32, which autocast casts to bfloat16 once per micro-batch.
    EagerAmp,
}

impl Default for EstimateConfig {
    fn default() -> Self {
        Self { profile: "h100".into(), tflops: None, terabytes: None, lowering: Lowering::Gapless, rank: "0".into() }
    }
}
