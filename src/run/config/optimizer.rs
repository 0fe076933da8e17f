//! `[optimizer]`: the update rule, and groups of parameters with another one.

use std::sync::Arc;

use gapless_engine::optim::{Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer};
use gapless_engine::{ParameterGroup, UpdateOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The table `[optimizer]` of a run file: `name`, and the keys of that rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The update rule. docs/optimizers.md compares them.
    pub name: Rule,
    /// The decay rate of the first moment.
    pub beta1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// The decoupled weight decay, which applies to matrices only.
    pub weight_decay: f64,
    /// Gradients with a larger global norm are scaled down to this norm; `inf` turns clipping off.
    pub max_norm: f64,
    /// AdamW: whether parameters and moments in `step.precision = "pure_bf16"` are rounded up or down at random, so that the
    /// expectation of the rounded value is the exact one. Otherwise changes of less than half the distance to the next bf16
    /// value are lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stochastic_rounding: bool,
    /// GaLore: the number of directions that are kept of each weight.
    pub rank: usize,
    /// GaLore: the factor of its updates.
    pub alpha: f64,
    /// Muon: the decay rate of the moment.
    pub momentum: f64,
    /// Elements of gradients are clamped to this absolute value before the norm is computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_value: Option<f64>,
    /// The decay rate of an exponential moving average of the trained parameters in f32; 0.999 or more is usual.
    /// `gapless sample --average` uses the average. Without this key, no average is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<f64>,
    /// Groups of parameters with their own settings. The first group that matches a parameter applies. There can be at
    /// most 256.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
}

/// An entry of `[[optimizer.groups]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// The names of parameters or modules; `*` stands for any text: `"*.bias"`, `"h.0"`.
    pub names: Vec<String>,
    /// The factor of the learning rate of this group.
    #[serde(default = "one")]
    pub learning_rate: f64,
    /// The weight decay of this group. The default is that of the optimizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The update rule of this group. The default is that of the optimizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Rule>,
}

/// Update rules; docs/optimizers.md compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// AdamW.
    AdamW,
    /// AdamW with 8-bit moments.
    AdamW8bit,
    /// AdamW on gradients projected to a low rank.
    GaLore,
    /// Lion: the sign of a momentum.
    Lion,
    /// Muon: orthogonalized updates of matrices; AdamW for all other parameters.
    Muon,
    /// Adafactor: factored second moments.
    Adafactor,
}

fn one() -> f64 {
    1.0
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        let (AdamW { beta1, beta2, weight_decay, max_norm, .. }, galore) = (AdamW::default(), GaLore::default());
        let (name, rank, alpha, momentum) = (Rule::AdamW, galore.rank, galore.alpha, Muon::default().momentum);
        let (stochastic_rounding, max_value, average, groups) = (false, None, None, Vec::new());
        Self {
            name,
            beta1,
            beta2,
            weight_decay,
            max_norm,
            stochastic_rounding,
            rank,
            alpha,
            momentum,
            max_value,
            average,
            groups,
        }
    }
}

impl OptimizerConfig {
    /// The update rule.
    pub fn optimizer(&self) -> Arc<dyn Optimizer> {
        let &Self { name, beta1, beta2, weight_decay, max_norm, rank, alpha, momentum, .. } = self;
        // Groups with another rule round to the nearest value.
        let stochastic_rounding = self.stochastic_rounding && name == Rule::AdamW;
        let adamw = AdamW { beta1, beta2, weight_decay, max_norm, stochastic_rounding, ..AdamW::default() };
        match name {
            Rule::AdamW => adamw.into(),
            Rule::AdamW8bit => AdamW8bit { rule: adamw, ..AdamW8bit::default() }.into(),
            Rule::GaLore => GaLore { rule: adamw, rank, alpha, ..GaLore::default() }.into(),
            Rule::Lion => Lion { beta1, beta2, weight_decay, max_norm }.into(),
            Rule::Muon => Muon { rule: adamw, momentum, ..Muon::default() }.into(),
            Rule::Adafactor => Adafactor { weight_decay, max_norm, ..Adafactor::default() }.into(),
        }
    }

    /// Returns the settings of the update that apply to all rules. `guarded` is true if steps may be skipped.
    pub fn update(&self, guarded: bool) -> UpdateOptions {
        let group = |group: &GroupConfig| {
            let name = group.name.unwrap_or(self.name);
            let rule = Self {
                name,
                weight_decay: group.weight_decay.unwrap_or(self.weight_decay),
                groups: Vec::new(),
                ..self.clone()
            };
            ParameterGroup {
                names: group.names.clone(),
                optimizer: rule.optimizer(),
                learning_rate: group.learning_rate,
            }
        };
        let (max_value, average) = (self.max_value, self.average);
        UpdateOptions { groups: self.groups.iter().map(group).collect(), max_value, guarded, average }
    }
}
