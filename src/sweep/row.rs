//! The results of one configuration.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use toml::Value;

use super::Sweep;
use crate::step::Origin;

/// The outcome of a configuration, or the stage of evaluation that it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Only the time and the sure bytes have been computed so far.
    Sketched,
    /// The step was planned, and its plan fits the device.
    Fits,
    /// The step was not planned, because it cannot be on a Pareto front: other configurations that are at least as fast
    /// take no more bytes than its lower bound.
    Dominated,
    /// More bytes are alive at once than the device has, or the plan is larger than the device.
    TooLarge,
    /// The step does not fit its budget with any recomputation.
    OverBudget,
    /// The step does not exist, because its sizes do not fit together, or because its schedule does not exist for this
    /// shape.
    Invalid,
}

/// The results of one configuration. A field with a single number of bytes is about the rank with the most bytes. Times
/// are those of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Digest of all inputs that determine the row.
    pub key: String,
    /// The version and commit of gapless that computed the row, and the digest of the step; the step is `None` if the
    /// configuration is not a step.
    #[serde(flatten)]
    pub origin: Origin,
    /// The configuration's values of the keys that vary.
    pub configuration: BTreeMap<String, Value>,
    /// The outcome, or the stage of evaluation that the configuration is in.
    pub status: Status,
    /// The reason, if the step is invalid or over its budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The sizes and times of the step, if it can be compiled.
    #[serde(flatten)]
    pub figures: Option<Figures>,
}

/// The sizes and times of a step that can be compiled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Number of trained parameters, over all ranks.
    pub parameters: u64,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Sure bytes, by rank: a lower bound of the bytes alive at once, computed from programs of two micro-batches.
    pub at_least: Vec<u64>,
    /// Peak of the live bytes of gapless's own step, by rank, with the rows of `estimate.expert_load`. Empty if the step
    /// was not compiled.
    pub live_bytes: Vec<u64>,
    /// Arena bytes, by rank. Empty if the step was not planned. On expert ranks, the arena includes the reserve for
    /// routed rows, which grows if the rows of `estimate.expert_load` do not fit.
    pub arena_bytes: Vec<u64>,
    /// Bytes of the arena that the step uses with the rows of `estimate.expert_load`, by rank. The rest of the arena is
    /// reserved for other rows. Equal to the arena unless expert ranks share the experts.
    pub served_bytes: Vec<u64>,
    /// If the reserve of the step is too small for the rows, the factor of a reserve that is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve_grown_to: Option<f64>,
    /// Plan hashes, by rank.
    pub plans: Vec<String>,
    /// Bytes at the peak of the fullest rank, by role.
    pub roles: BTreeMap<String, u64>,
    /// A coarse memory map of the fullest rank's plan, over the ticks of the step and the bytes of the arena. Empty if the
    /// step was not planned.
    #[serde(default)]
    pub map: Vec<String>,
    /// Bytes of the arena that the map shows. It is not the largest arena if the plan of another rank is larger.
    #[serde(default)]
    pub map_bytes: u64,
    /// Peak of the live bytes in the tables that were replayed through allocators. If `lowering` selects an eager
    /// framework, these tables have the framework's lifetimes.
    pub allocated: u64,
    /// For each allocator through which the step was replayed, the reserved bytes on a device without a limit.
    pub reserved: BTreeMap<String, u64>,
    /// Time of the step in nanoseconds, as its sketch estimates it. It stays the same when the step is planned, because
    /// the order in which configurations are planned follows from it. [`Step::timing`](crate::step::Step::timing) has
    /// the time of the compiled step.
    pub nanoseconds: u64,
    /// Fraction of the time of all ranks that is spent waiting.
    pub bubble: f64,
    /// Recomputation time divided by the time of everything else.
    pub overhead: f64,
    /// Tokens per second, of all ranks together.
    pub tokens_per_second: f64,
    /// Estimate by a rule of thumb: 18 bytes per parameter in bf16 with f32 masters, 16 in f32, 8 in pure bf16.
    pub formula_bytes: u64,
    /// Estimate by Megatron-LM's formulas.
    pub megatron_bytes: u64,
    /// For each stage, the nanoseconds of four actions: a forward; a whole backward, or the input-gradient half of a
    /// split one; a weight-gradient half; and a message.
    pub stages: Vec<[u64; 4]>,
    /// By rank, the nanoseconds of the work that the rank does once per step.
    pub updates: Vec<u64>,
}

impl Row {
    /// True unless the row will still be planned.
    pub fn is_final(&self) -> bool {
        self.status != Status::Sketched
    }
}

impl Figures {
    /// Returns the live bytes at the peak of the fullest rank. If the step was not compiled, returns the sure bytes
    /// instead.
    pub fn live(&self) -> u64 {
        self.live_bytes.iter().chain(&self.at_least).copied().max().unwrap_or(0)
    }

    /// Returns the largest arena of a rank, or `None` if the step was not planned.
    pub fn arena(&self) -> Option<u64> {
        self.arena_bytes.iter().copied().max()
    }

    /// Returns the most bytes of its arena that a rank uses, or `None` if the step was not planned.
    pub fn served(&self) -> Option<u64> {
        self.served_bytes.iter().copied().max()
    }
}

/// Returns the contents of `results.csv`.
pub(super) fn csv(sweep: &Sweep, rows: &[Row]) -> String {
    let mut head: Vec<String> = sweep.varied.clone();
    head.extend(
        ["status", "micro_batch", "sure_bytes", "live_bytes", "arena_bytes", "served_bytes", "reserve_grown_to"]
            .map(str::to_owned),
    );
    head.push("replayed_live_bytes".to_owned());
    head.extend(sweep.allocators.iter().map(|kind| format!("{kind}_bytes")));
    head.extend(sweep.allocators.iter().map(|kind| format!("{kind}_reduction")));
    let last = ["formula_bytes", "megatron_bytes", "step_ms", "bubble", "overhead", "tokens_per_second", "key", "why"];
    head.extend(last.map(str::to_owned));
    head.extend(["version", "commit", "step", "plan_hashes"].map(str::to_owned));
    let mut text = head.join(",") + "\n";
    for row in rows {
        let mut fields: Vec<String> =
            sweep.varied.iter().map(|key| row.configuration.get(key).map_or_else(String::new, plain)).collect();
        fields.push(
            serde_json::to_value(row.status).ok().and_then(|s| s.as_str().map(str::to_owned)).unwrap_or_default(),
        );
        let figures = row.figures.as_ref();
        let number = |value: Option<u64>| value.map_or_else(String::new, |n| n.to_string());
        fields.push(number(figures.map(|figures| figures.micro_batch as u64)));
        fields.push(number(figures.and_then(|figures| figures.at_least.iter().max().copied())));
        fields.push(number(figures.and_then(|figures| figures.live_bytes.iter().max().copied())));
        fields.push(number(figures.and_then(Figures::arena)));
        fields.push(number(figures.and_then(Figures::served)));
        let grown_to = figures.and_then(|figures| figures.reserve_grown_to);
        fields.push(grown_to.map_or_else(String::new, |factor| factor.to_string()));
        fields.push(number(figures.map(|figures| figures.allocated).filter(|&bytes| bytes > 0)));
        fields.extend(
            sweep
                .allocators
                .iter()
                .map(|kind| number(figures.and_then(|figures| figures.reserved.get(kind.name()).copied()))),
        );
        let real = |value: Option<f64>, digits: usize| value.map_or_else(String::new, |x| format!("{x:.digits$}"));
        fields
            .extend(sweep.allocators.iter().map(|&kind| real(figures.and_then(|figures| figures.reduction(kind)), 4)));
        fields.push(number(figures.map(|figures| figures.formula_bytes)));
        fields.push(number(figures.map(|figures| figures.megatron_bytes)));
        fields.push(real(figures.map(|figures| figures.nanoseconds as f64 / 1e6), 3));
        fields.push(real(figures.map(|figures| figures.bubble), 6));
        fields.push(real(figures.map(|figures| figures.overhead), 6));
        fields.push(real(figures.map(|figures| figures.tokens_per_second), 1));
        fields.push(row.key.clone());
        fields.push(row.why.clone().unwrap_or_default());
        let Origin { version, commit, step } = &row.origin;
        fields.extend([version.clone(), commit.clone().unwrap_or_default(), step.clone().unwrap_or_default()]);
        fields.push(figures.map_or_else(String::new, |figures| figures.plans.join(";")));
        text += &(fields.iter().map(|field| quoted(field)).collect::<Vec<_>>().join(",") + "\n");
    }
    text
}

/// Returns a value as a user writes it, without quotes.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string().trim().to_owned(),
    }
}

/// Returns a text as a field of a CSV file (RFC 4180), with quotes if necessary.
fn quoted(field: &str) -> String {
    match field.contains([',', '"', '\n']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}
