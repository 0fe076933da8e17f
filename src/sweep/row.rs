//! What is known of one configuration.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use toml::Value;

use super::Sweep;

/// Whether a configuration can be run on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Its time and sure bytes are known, and nothing else yet.
    Sketched,
    /// Its plan fits.
    Fits,
    /// It was not planned, for something that is as fast takes no more bytes than it has alive.
    Dominated,
    /// It fits nowhere: more bytes are alive at once than the device has, or its plan is larger.
    TooLarge,
    /// No recomputation makes it fit its budget.
    OverBudget,
    /// Its extents do not fit together, or its schedule has no such shape.
    Invalid,
}

/// A configuration's row. Bytes and times are of the rank that has most of them, and of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// A digest of all that decides it.
    pub key: String,
    /// Its values of what varies.
    pub configuration: BTreeMap<String, Value>,
    /// Whether it fits.
    pub status: Status,
    /// Why there is no more to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What is known of it, if it can be compiled.
    #[serde(flatten)]
    pub figures: Option<Figures>,
}

/// The figures of a step that can be compiled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Trained numbers, of all ranks together.
    pub parameters: u64,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Bytes that are surely alive at once on each rank, from two of its micro-batches.
    pub at_least: Vec<u64>,
    /// Each rank's most bytes alive at once: no allocator needs less. None where the step was not compiled.
    pub live_bytes: Vec<u64>,
    /// Each rank's arena; none where it was not planned.
    pub arena_bytes: Vec<u64>,
    /// Each rank's plan.
    pub plans: Vec<String>,
    /// Bytes at the fullest rank's peak, by role.
    pub roles: BTreeMap<String, u64>,
    /// The most bytes alive in the tables that were replayed: [`Self::live`], or that of an eager framework's lifetimes.
    pub allocated: u64,
    /// What each allocator reserves, on a device without end; of those that it was replayed through.
    pub reserved: BTreeMap<String, u64>,
    /// Time of the step.
    pub nanoseconds: u64,
    /// The part of the ranks' time in which they wait.
    pub bubble: f64,
    /// Time of what is computed again, as a part of that of the rest.
    pub overhead: f64,
    /// Tokens per second, of all ranks together.
    pub tokens_per_second: f64,
    /// What 18 bytes per parameter come to (of that type of numbers).
    pub formula_bytes: u64,
    /// What Megatron's estimator comes to.
    pub megatron_bytes: u64,
    /// Of each stage: nanoseconds of F, of I or B, of W, of a message.
    pub stages: Vec<[u64; 4]>,
    /// Of each rank: nanoseconds of what is done once per step.
    pub updates: Vec<u64>,
}

impl Row {
    /// Whether no more will be known of it.
    pub fn is_final(&self) -> bool {
        self.status != Status::Sketched
    }
}

impl Figures {
    /// The most bytes alive at once on a rank, or as many as are sure.
    pub fn live(&self) -> u64 {
        self.live_bytes.iter().chain(&self.at_least).copied().max().unwrap_or(0)
    }

    /// The largest arena, if there are plans.
    pub fn arena(&self) -> Option<u64> {
        self.arena_bytes.iter().copied().max()
    }
}

/// The rows as a table.
pub(super) fn csv(sweep: &Sweep, rows: &[Row]) -> String {
    let mut head: Vec<String> = sweep.varied.clone();
    head.extend(["status", "micro_batch", "sure_bytes", "live_bytes", "arena_bytes"].map(str::to_owned));
    head.extend(sweep.allocators.iter().map(|kind| format!("{kind}_bytes")));
    head.extend(sweep.allocators.iter().map(|kind| format!("{kind}_reduction")));
    let last = ["formula_bytes", "megatron_bytes", "step_ms", "bubble", "overhead", "tokens_per_second", "key", "why"];
    head.extend(last.map(str::to_owned));
    let mut text = head.join(",") + "\n";
    for row in rows {
        let mut fields: Vec<String> =
            sweep.varied.iter().map(|key| row.configuration.get(key).map_or_else(String::new, plain)).collect();
        fields.push(
            serde_json::to_value(row.status).ok().and_then(|s| s.as_str().map(str::to_owned)).unwrap_or_default(),
        );
        let figures = row.figures.as_ref();
        let number = |of: Option<u64>| of.map_or_else(String::new, |n| n.to_string());
        fields.push(number(figures.map(|of| of.micro_batch as u64)));
        fields.push(number(figures.and_then(|of| of.at_least.iter().max().copied())));
        fields.push(number(figures.and_then(|of| of.live_bytes.iter().max().copied())));
        fields.push(number(figures.and_then(Figures::arena)));
        fields.extend(
            sweep.allocators.iter().map(|kind| number(figures.and_then(|of| of.reserved.get(kind.name()).copied()))),
        );
        let real = |of: Option<f64>, digits: usize| of.map_or_else(String::new, |x| format!("{x:.digits$}"));
        fields.extend(sweep.allocators.iter().map(|&kind| real(figures.and_then(|of| of.reduction(kind)), 4)));
        fields.push(number(figures.map(|of| of.formula_bytes)));
        fields.push(number(figures.map(|of| of.megatron_bytes)));
        fields.push(real(figures.map(|of| of.nanoseconds as f64 / 1e6), 3));
        fields.push(real(figures.map(|of| of.bubble), 6));
        fields.push(real(figures.map(|of| of.overhead), 6));
        fields.push(real(figures.map(|of| of.tokens_per_second), 1));
        fields.push(row.key.clone());
        fields.push(row.why.clone().unwrap_or_default());
        text += &(fields.iter().map(|field| quoted(field)).collect::<Vec<_>>().join(",") + "\n");
    }
    text
}

/// A value as a user writes it.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string().trim().to_owned(),
    }
}

/// A field of a CSV file (RFC 4180).
fn quoted(field: &str) -> String {
    match field.contains([',', '"', '\n']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}
