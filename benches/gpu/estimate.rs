//! Estimates the time of a step on an H200, launch by launch, from the rates that were measured for each kind of launch:
//! on 2026-11-26, and on 2026-11-27 after the slow kernels had been rewritten.
//!
//! Both measurements were of GPT-2 124M, 16 × 1024 ids in bf16, and the second one also of a mixture (docs/gpu.md,
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
    /// Launches that are not timed separately. The time of the operation's products includes them.
    InProducts,
}

use Rate::{Bytes, Flops, InProducts};

/// A kind of launch: name, first rate, second rate.
type Kind = (&'static str, Rate, Rate);

const HEAD: Kind = ("head, products", Flops(129e12), Flops(739e12));
const HEAD_LOSSES: Kind = ("head, losses and gradients of logits", InProducts, Bytes(4.89e12));
const GRAD_WEIGHT: Kind = ("linear_grad_weight, products", Flops(466e12), Flops(663e12));
const GRAD_BIAS: Kind = ("linear_grad_weight, sums for biases", InProducts, Bytes(2.06e12));
const GRAD_INPUT: Kind = ("linear_grad_input", Flops(703e12), Flops(711e12));
const LINEAR: Kind = ("linear", Flops(629e12), Flops(620e12));
const EPILOGUE: Kind = ("products with an epilogue", Flops(540e12), Flops(521e12));
/// Only measured with a mixture, on 2026-11-27.
const EXPERTS: Kind = ("experts' products", Flops(210e12), Flops(210e12));
const NORM_GRAD: Kind = ("norms' gradients", Bytes(644e9), Bytes(2.13e12));
const NORM: Kind = ("norms", Bytes(1653e9), Bytes(2.42e12));
const ATTENTION: Kind = ("attention", Flops(162e12), Flops(198e12));
const ATTENTION_GRAD: Kind = ("attention_grad", Flops(117e12), Flops(187e12));
const UPDATE: Kind = ("adamw", Bytes(4063e9), Bytes(4358e9));
const OTHER: Kind = ("others", Bytes(2.0e12), Bytes(2.0e12));

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
    first_ms: f64,
    second_ms: f64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let step = arguments.shape.step(arguments.micro_batch);
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for work in CudaBackend::work(&step.compiled(step.program()?)?)?.into_iter().flatten() {
        for launch in &work.launches {
            let (name, first, second) = kind(work.operation, launch);
            let ms = |rate| match rate {
                Flops(rate) => 1e3 * (launch.flops as f64 / rate).max(LAUNCH),
                Bytes(rate) => 1e3 * (launch.bytes as f64 / rate).max(LAUNCH),
                InProducts => 0.0,
            };
            let row = rows.entry(name).or_default();
            row.launches += 1;
            row.gflop += launch.flops as f64 / 1e9;
            row.mb += launch.bytes as f64 / 1e6;
            row.first_ms += ms(first);
            row.second_ms += ms(second);
        }
    }
    let sum = |of: fn(&Row) -> f64| rows.values().map(of).sum::<f64>();
    let (first, second) = (sum(|row| row.first_ms), sum(|row| row.second_ms));
    let mut text = format!(
        "{} × {} in {}, an H200: {first:.2} ms by the rates of 2026-11-26, {second:.2} ms by those of 2026-11-27\n{:40} {:>8} {:>10} {:>10} {:>12} {:>12}",
        step.micro_batch, step.sequence, step.dtype, "launch", "launches", "GFLOP", "MB", "2026-11-26", "2026-11-27"
    );
    let mut sorted: Vec<_> = rows.iter().collect();
    sorted.sort_by(|a, b| b.1.first_ms.total_cmp(&a.1.first_ms));
    for (name, Row { launches, gflop, mb, first_ms, second_ms }) in sorted {
        text += &format!("\n{name:40} {launches:8} {gflop:10.1} {mb:10.1} {first_ms:12.3} {second_ms:12.3}");
    }
    Found::new(true, text, &rows)
}

#[cfg(test)]
mod tests {
    use super::super::step::{Float, Model};
    use super::*;

    #[test]
    fn a_step_of_gpt2_takes_what_was_measured() {
        let shape = Shape { model: Model::Gpt2, sequence: 1024, dtype: Float::Bf16, seed: 0, budget: None };
        let found = run(&Arguments { shape, micro_batch: 16 }).unwrap();
        println!("{}", found.text);
        let sum = |column: &str| {
            found.json.as_object().unwrap().values().map(|row| row[column].as_f64().unwrap()).sum::<f64>()
        };
        // The step took 59.06 ms, and then 30.04 ms.
        assert!((55.0..63.0).contains(&sum("first_ms")), "{}", found.text);
        assert!((28.5..31.0).contains(&sum("second_ms")), "{}", found.text);
    }
}
