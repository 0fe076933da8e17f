//! Estimates the time of a step on an H200, launch by launch. The rates of the launches are measured or, for kernels
//! that were rewritten since, expected.
//!
//! The measurement was GPT-2 124M, 16 × 1024 ids in bf16, on 2026-11-26 (docs/gpu.md). The expected rates are not
//! measured. The reason for each expected rate is given here, so that the next measurement can confirm or refute it.

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

/// A kind of launch: name, measured rate, expected rate.
type Kind = (&'static str, Rate, Rate);

/// The three products over the vocabulary. With aligned extents, they are expected to be as fast as the largest
/// product of a layer, for which 703 TFLOP/s were measured.
const HEAD: Kind = ("head, products", Flops(129e12), Flops(700e12));
/// The kernel makes three passes over the logits, which are expected to run at the rate of a copy.
const HEAD_LOSSES: Kind = ("head, losses and gradients of logits", InProducts, Bytes(4.1e12));
/// These products are expected to be as fast as others once their algorithm is selected by timing.
const GRAD_WEIGHT: Kind = ("linear_grad_weight, products", Flops(466e12), Flops(700e12));
const GRAD_BIAS: Kind = ("linear_grad_weight, sums for biases", InProducts, Bytes(2.6e12));
const GRAD_INPUT: Kind = ("linear_grad_input", Flops(703e12), Flops(703e12));
const LINEAR: Kind = ("linear", Flops(629e12), Flops(629e12));
/// A product that is added to a residual was measured at 564 TFLOP/s, and a product with GELU at 504.
const EPILOGUE: Kind = ("products with an epilogue", Flops(540e12), Flops(600e12));
/// A multiprocessor has 25 KB in flight. By Little's law, 4 TB/s at a latency of 600 ns only needs 19 KB.
const NORM_GRAD: Kind = ("norms' gradients", Bytes(644e9), Bytes(2.6e12));
const NORM: Kind = ("norms", Bytes(1653e9), Bytes(3.0e12));
/// For the causal forward with heads of 64 and 1,024 tokens, FlashAttention-3 reports 265 TFLOP/s. cuDNN reaches 288.
const ATTENTION: Kind = ("attention", Flops(162e12), Flops(265e12));
const ATTENTION_GRAD: Kind = ("attention_grad", Flops(117e12), Flops(200e12));
const UPDATE: Kind = ("adamw", Bytes(4063e9), Bytes(4063e9));
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
    measured_ms: f64,
    expected_ms: f64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let step = arguments.shape.step(arguments.micro_batch);
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for work in CudaBackend::work(&step.compiled(step.program()?)?)?.into_iter().flatten() {
        for launch in &work.launches {
            let (name, measured, expected) = kind(work.operation, launch);
            let ms = |rate| match rate {
                Flops(rate) => 1e3 * (launch.flops as f64 / rate).max(LAUNCH),
                Bytes(rate) => 1e3 * (launch.bytes as f64 / rate).max(LAUNCH),
                InProducts => 0.0,
            };
            let row = rows.entry(name).or_default();
            row.launches += 1;
            row.gflop += launch.flops as f64 / 1e9;
            row.mb += launch.bytes as f64 / 1e6;
            row.measured_ms += ms(measured);
            row.expected_ms += ms(expected);
        }
    }
    let sum = |of: fn(&Row) -> f64| rows.values().map(of).sum::<f64>();
    let (measured, expected) = (sum(|row| row.measured_ms), sum(|row| row.expected_ms));
    let mut text = format!(
        "{} × {} in {}, an H200: {measured:.2} ms by the first contact's rates, {expected:.2} ms by those that are expected (not measured)\n{:40} {:>8} {:>10} {:>10} {:>12} {:>12}",
        step.micro_batch, step.sequence, step.dtype, "launch", "launches", "GFLOP", "MB", "measured ms", "expected ms"
    );
    let mut sorted: Vec<_> = rows.iter().collect();
    sorted.sort_by(|a, b| b.1.measured_ms.total_cmp(&a.1.measured_ms));
    for (name, Row { launches, gflop, mb, measured_ms, expected_ms }) in sorted {
        text += &format!("\n{name:40} {launches:8} {gflop:10.1} {mb:10.1} {measured_ms:12.3} {expected_ms:12.3}");
    }
    Found::new(true, text, &rows)
}

#[cfg(test)]
mod tests {
    use super::super::step::{Float, Model};
    use super::*;

    #[test]
    fn a_step_of_gpt2_took_what_was_measured_and_is_expected_to_take_half() {
        let shape = Shape { model: Model::Gpt2, sequence: 1024, dtype: Float::Bf16, seed: 0, budget: None };
        let found = run(&Arguments { shape, micro_batch: 16 }).unwrap();
        println!("{}", found.text);
        let sum = |column: &str| {
            found.json.as_object().unwrap().values().map(|row| row[column].as_f64().unwrap()).sum::<f64>()
        };
        // The measured step took 59.06 ms.
        assert!((55.0..63.0).contains(&sum("measured_ms")), "{}", found.text);
        assert!(sum("expected_ms") <= 30.0, "{}", found.text);
    }
}
