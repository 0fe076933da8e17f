//! Compares logits, losses, gradients, and parameters after three steps with those of transformers in f32.
//!
//! The README of the cases states the tolerances. They are five to ten times the worst error of f32 itself, and at
//! most a tenth of the change that the smallest wrong option causes. If the noise of a case is larger, its tolerance
//! is five times that noise.

use candle_core::{DType, Tensor};
use gapless::Trainer;

use crate::case::{Case, on_disk, unsupported};

pub const LOGITS: f64 = 1e-5;
pub const LOSS: f64 = 2e-5;
pub const GRADIENT: f64 = 1e-4;
/// Tolerance of the root mean square error of parameters. With Adam, a single element may move in either direction if
/// its gradient is near zero.
pub const PARAMETERS: f64 = 5e-5;

pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Returns the largest difference, divided by the largest expected element.
pub fn relative(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().all(|x| x.is_finite()));
    let most = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let difference = found.iter().zip(expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    difference / most.max(1e-30)
}

pub fn root_mean_square(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    (squares / found.len() as f64).sqrt()
}

/// Returns the dot product of each row with the vector (j + 1)/width.
fn row_dots(tensor: &Tensor) -> Vec<f64> {
    let width = tensor.dims()[1];
    let dot = |row: &[f64]| row.iter().enumerate().map(|(j, x)| x * (j + 1) as f64 / width as f64).sum();
    values(tensor).chunks_exact(width).map(dot).collect()
}

fn norm(tensor: &Tensor) -> f64 {
    values(tensor).iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The largest errors of a case.
#[derive(Default)]
struct Worst {
    logits: f64,
    losses: f64,
    gradients: f64,
    parameters: f64,
}

#[test]
fn what_transformers_computes() {
    let mut checked = Vec::new();
    for case in Case::all() {
        match case.trainer(case.ids()[0].len() - 1) {
            Ok((_, trainer)) => {
                let mut worst = Worst { logits: logits(&case), ..Worst::default() };
                train(&case, trainer, &mut worst);
                let Worst { logits, losses, gradients, parameters } = worst;
                println!(
                    "{:<24} logits {logits:.1e} losses {losses:.1e} gradients {gradients:.1e} parameters {parameters:.1e}",
                    case.name
                );
                checked.push(case.name);
            }
            Err(error) => {
                let why = unsupported(&error).unwrap_or_else(|| panic!("{}: {error}", case.name));
                println!("{:<24} refused: {why}", case.name);
            }
        }
    }
    for name in ["mixtral_bf16", "gemma2_bf16", "deepseek_v3_bf16"] {
        assert!(checked.iter().any(|checked| checked == name), "{name} is not among {checked:?}");
    }
}

/// Compares logits of a longer window. The end of the window must not affect earlier positions.
fn logits(case: &Case) -> f64 {
    let length = case.ids()[0].len();
    let window = length + 3;
    let (_, mut trainer) = case.trainer(window).unwrap();
    let mut rows = |ids: &[u32]| {
        let mut padded = ids.to_vec();
        padded.resize(window, 0);
        trainer.logits(&padded).unwrap().squeeze(0).unwrap().copy().unwrap()
    };
    let mut found = Vec::new();
    for ids in case.ids() {
        found.extend(values(&rows(&ids).narrow(0, 0, length).unwrap()));
    }
    let worst = relative(&found, &values(&case.expected["logits"]));
    assert!(worst <= LOGITS.max(5.0 * case.noise("logits")), "{}: logits differ by {worst:e}", case.name);
    worst
}

fn train(case: &Case, mut trainer: Trainer, worst: &mut Worst) {
    let ids = case.ids();
    let tokens: Vec<u32> = ids.iter().flat_map(|ids| &ids[..ids.len() - 1]).copied().collect();
    let targets: Vec<u32> = ids.iter().flat_map(|ids| &ids[1..]).copied().collect();
    let mut losses = Vec::new();
    for step in 0..3 {
        losses.push(f64::from(trainer.step(&tokens, &targets).unwrap().loss));
        if step == 0 {
            let limit = GRADIENT.max(5.0 * case.noise("grad"));
            worst.gradients = check(case, ["grad.", "grad_row_dot.", "grad_norm"], limit, relative, |name| {
                on_disk(name, |parameter| trainer.gradient(parameter))
            });
        }
    }
    worst.parameters = check(
        case,
        ["param_after.", "param_row_dot_after.", "param_norm_after"],
        PARAMETERS,
        root_mean_square,
        |name| on_disk(name, |parameter| trainer.tensor(parameter)),
    );
    losses.push(f64::from(trainer.evaluate(&tokens, &targets).unwrap()));
    for (found, expected) in losses.iter().zip(values(&case.expected["losses"])) {
        worst.losses = worst.losses.max((found - expected).abs());
    }
    assert!(worst.losses <= LOSS, "{}: losses {losses:?}", case.name);
}

/// Compares whole tensors, rows of large tensors, and the norms of all tensors.
fn check(
    case: &Case,
    [whole, rows, norms]: [&str; 3],
    limit: f64,
    measure: fn(&[f64], &[f64]) -> f64,
    found: impl Fn(&str) -> Tensor,
) -> f64 {
    let mut worst: f64 = 0.0;
    let mut judged = 0;
    for (key, expected) in &case.expected {
        // The error of a row's sum may be larger than the errors of the row's elements.
        let (off, limit) = if let Some(name) = key.strip_prefix(whole) {
            let found = found(name);
            assert_eq!(found.dims(), expected.dims(), "{}: {name}", case.name);
            match name.ends_with("c_attn.bias") {
                // The middle third belongs to the keys. Its gradient is zero except for noise, so it is excluded.
                true => (without_keys(&found, expected, measure), limit),
                false => (measure(&values(&found), &values(expected)), limit),
            }
        } else if let Some(name) = key.strip_prefix(rows) {
            (measure(&row_dots(&found(name)), &values(expected)), 4.0 * limit)
        } else {
            continue;
        };
        assert!(off <= limit, "{}: {key} differs by {off:e}", case.name);
        (worst, judged) = (worst.max(off), judged + 1);
    }
    assert!(judged > 0, "{}: nothing of {whole}", case.name);
    let names = case.about["norm_names"].as_array().unwrap();
    for (name, expected) in names.iter().zip(values(&case.expected[norms])) {
        let name = name.as_str().unwrap();
        if !name.ends_with("c_attn.bias") {
            let off = (norm(&found(name)) - expected).abs() / (expected.abs() + 1e-12);
            assert!(off <= GRADIENT, "{}: the norm of {name} differs by {off:e}", case.name);
        }
    }
    worst
}

fn without_keys(found: &Tensor, expected: &Tensor, measure: fn(&[f64], &[f64]) -> f64) -> f64 {
    let part = |tensor: &Tensor| {
        let all = values(tensor);
        let third = all.len() / 3;
        [&all[..third], &all[2 * third..]].concat()
    };
    measure(&part(found), &part(expected))
}
