//! `[optimizer]`: the update rule, and the parameters that have another one.

use std::sync::Arc;

use gapless_engine::optim::{Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer};
use gapless_engine::{ParameterGroup, UpdateOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[optimizer]`: `name`, and the keys of that rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The rule.
    pub name: Rule,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// The global norm to which larger gradients are scaled.
    pub max_norm: f64,
    /// Directions that GaLore keeps of each weight.
    pub rank: usize,
    /// What GaLore scales its steps by.
    pub alpha: f64,
    /// Decay of Muon's moment.
    pub momentum: f64,
    /// How far an element of a gradient may be from 0: what is farther is cut off, before the norm is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_value: Option<f64>,
    /// Keeps an exponential moving average of every trained parameter in f32: what stays of it in a step, 0.999 or more.
    /// `gapless sample --average` uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<f64>,
    /// Parameters that are updated otherwise; of several that name one, the first counts. At most 256.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
}

/// `[[optimizer.groups]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Names of parameters, or of modules that they are in; `*` stands for any text: `"*.bias"`, `"h.0"`.
    pub names: Vec<String>,
    /// What their learning rate is multiplied by.
    #[serde(default = "one")]
    pub learning_rate: f64,
    /// Their weight decay; without, that of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Their rule; without, that of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Rule>,
}

/// Update rules; docs/optimizers.md compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// AdamW.
    AdamW,
    /// AdamW with moments in eight bits.
    AdamW8bit,
    /// AdamW in a subspace.
    GaLore,
    /// The sign of a moment.
    Lion,
    /// Orthogonal steps of matrices.
    Muon,
    /// Means of rows and columns in place of second moments.
    Adafactor,
}

fn one() -> f64 {
    1.0
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        let (AdamW { beta1, beta2, weight_decay, max_norm, .. }, galore) = (AdamW::default(), GaLore::default());
        let (name, rank, alpha, momentum) = (Rule::AdamW, galore.rank, galore.alpha, Muon::default().momentum);
        let (max_value, average, groups) = (None, None, Vec::new());
        Self { name, beta1, beta2, weight_decay, max_norm, rank, alpha, momentum, max_value, average, groups }
    }
}

impl OptimizerConfig {
    /// The rule.
    pub fn optimizer(&self) -> Arc<dyn Optimizer> {
        let &Self { name, beta1, beta2, weight_decay, max_norm, rank, alpha, momentum, .. } = self;
        let adamw = AdamW { beta1, beta2, weight_decay, max_norm, ..AdamW::default() };
        match name {
            Rule::AdamW => adamw.into(),
            Rule::AdamW8bit => AdamW8bit { rule: adamw, ..AdamW8bit::default() }.into(),
            Rule::GaLore => GaLore { rule: adamw, rank, alpha, ..GaLore::default() }.into(),
            Rule::Lion => Lion { beta1, beta2, weight_decay, max_norm }.into(),
            Rule::Muon => Muon { rule: adamw, momentum, ..Muon::default() }.into(),
            Rule::Adafactor => Adafactor { weight_decay, max_norm, ..Adafactor::default() }.into(),
        }
    }

    /// What the update does beside that; `guarded` says whether steps may be left out.
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
