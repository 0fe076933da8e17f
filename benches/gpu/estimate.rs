//! Estimates the time of a step on an H200, launch by launch, from the rate that was measured for each kind of launch: with
//! GPT-2 124M, 16 × 1024 ids in bf16, on 2026-11-27, and the experts' products with a mixture on 2026-11-28 (docs/gpu.md,
//! `benches/gpu/*.json`).

use std::collections::BTreeMap;

use gapless::engine::cuda::{CudaBackend, LaunchWork};
use serde::Serialize;

use super::plan::Shape;
use super::record::Found;

#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    #[arg(long, default_value_t = 16)]
    micro_batch: usize,
}

/// The resource that limits a kind of launch, and the rate of this resource.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rate {
    /// Floating-point operations per second.
    Flops(f64),
    /// Bytes per second.
    Bytes(f64),
}

use Rate::{Bytes, Flops};

/// A kind of launch: its name, and its rate.
type Kind = (&'static str, Rate);

const HEAD: Kind = ("head, products", Flops(739e12));
const HEAD_LOSSES: Kind = ("head, losses and gradients of logits", Bytes(4.89e12));
const GRAD_WEIGHT: Kind = ("linear_grad_weight, products", Flops(663e12));
const GRAD_BIAS: Kind = ("linear_grad_weight, sums for biases", Bytes(2.06e12));
const GRAD_INPUT: Kind = ("linear_grad_input", Flops(711e12));
const LINEAR: Kind = ("linear", Flops(620e12));
const EPILOGUE: Kind = ("products with an epilogue", Flops(521e12));
const EXPERTS: Kind = ("experts' products", Flops(500e12));
const NORM_GRAD: Kind = ("norms' gradients", Bytes(2.13e12));
const NORM: Kind = ("norms", Bytes(2.42e12));
const ATTENTION: Kind = ("attention", Flops(198e12));
const ATTENTION_GRAD: Kind = ("attention_grad", Flops(187e12));
const UPDATE: Kind = ("adamw", Bytes(4358e9));
const OTHER: Kind = ("others", Bytes(2.0e12));

/// The minimum time of a launch, in seconds.
const LAUNCH: f64 = 2e-6;

fn kind(operation: &str, launch: &LaunchWork) -> Kind {
    match (operation, launch.is_product) {
        ("linear_cross_entropy" | "linear_cross_entropy_grad", true) => HEAD,
        ("linear_cross_entropy" | "linear_cross_entropy_grad", false) => HEAD_LOSSES,
        ("linear_grad_weight", true) => GRAD_WEIGHT,
        ("linear_grad_weight", false) => GRAD_BIAS,
        ("linear_grad_input", true) => GRAD_INPUT,
        ("linear" | "matmul", true) => LINEAR,
        (_, true) => EPILOGUE,
        ("attention", false) => ATTENTION,
        ("attention_grad", false) => ATTENTION_GRAD,
        ("adamw", false) => UPDATE,
        ("grouped_linear" | "grouped_linear_grad_input" | "grouped_linear_grad_weight", false) => EXPERTS,
        _ if launch.name.contains("norm_grad") => NORM_GRAD,
        _ if launch.name.contains("layer_norm") || launch.name.contains("rms_norm") => NORM,
        _ => OTHER,
    }
}

/// All launches of one kind in a step.
#[derive(Debug, Default, Serialize)]
struct Row {
    launches: usize,
    gflop: f64,
    mb: f64,
    ms: f64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let step = arguments.shape.step(arguments.micro_batch);
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for work in CudaBackend::work(&step.compiled(step.program()?)?)?.into_iter().flatten() {
        for launch in &work.launches {
            let (name, rate) = kind(work.operation, launch);
            let ms = match rate {
                Flops(rate) => 1e3 * (launch.flops as f64 / rate).max(LAUNCH),
                Bytes(rate) => 1e3 * (launch.bytes as f64 / rate).max(LAUNCH),
            };
            let row = rows.entry(name).or_default();
            row.launches += 1;
            row.gflop += launch.flops as f64 / 1e9;
            row.mb += launch.bytes as f64 / 1e6;
            row.ms += ms;
        }
    }
    let ms: f64 = rows.values().map(|row| row.ms).sum();
    let mut text = format!(
        "{} × {} in {}, an H200: {ms:.2} ms\n{:40} {:>8} {:>10} {:>10} {:>10}",
        step.micro_batch, step.sequence, step.dtype, "launch", "launches", "GFLOP", "MB", "ms"
    );
    let mut sorted: Vec<_> = rows.iter().collect();
    sorted.sort_by(|a, b| b.1.ms.total_cmp(&a.1.ms));
    for (name, Row { launches, gflop, mb, ms }) in sorted {
        text += &format!("\n{name:40} {launches:8} {gflop:10.1} {mb:10.1} {ms:10.3}");
    }
    Found::new(true, text, &rows)
}

#[cfg(test)]
mod tests {
    use super::super::step::{Float, Model};
    use super::*;

    #[test]
    fn steps_take_what_was_measured() {
        for (model, measured) in [(Model::Gpt2, 30.0), (Model::Mixture, 57.5)] {
            let shape = Shape { model, sequence: 1024, dtype: Float::Bf16, seed: 0, budget: None };
            let found = run(&Arguments { shape, micro_batch: 16 }).unwrap();
            println!("{}", found.text);
            let ms: f64 = found.json.as_object().unwrap().values().map(|row| row["ms"].as_f64().unwrap()).sum();
            assert!((ms / measured - 1.0).abs() < 0.05, "{}", found.text);
        }
    }
}
