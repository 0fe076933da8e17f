//! Models in the style of candle-transformers, which are ported by changing imports. Each source here is compiled
//! twice, with candle's tensors and with gapless's. Both must give the same logits, losses and gradients from the
//! same weights. candle computes in f64.
//!
//! The candle versions use candle's differentiable norms, because its fused ones have no backward.

use candle_core::{DType, Device, Var};
use candle_nn::VarMap;
use gapless::{DeviceChoice, Model, Result, StepOptions, Tensor, TrainOptions, Trainer};

mod on_candle {
    pub mod llama {
        use super::differentiable::{RmsNorm, rms_norm};
        use candle_core::{D, DType, Device, Result, Tensor};
        use candle_nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};

        include!("llama.rs");
    }

    pub mod bert {
        use super::differentiable::{LayerNorm, layer_norm};
        use candle_core::{D, DType, Result, Tensor};
        use candle_nn::{
            Activation, Dropout, Embedding, Linear, Module, Sequential, VarBuilder, embedding, linear, seq,
        };

        include!("bert.rs");
    }

    pub mod vit {
        use super::differentiable::{LayerNorm, layer_norm};
        use candle_core::{D, DType, IndexOp, Result, Tensor};
        use candle_nn::{Activation, Conv2d, Linear, Module, VarBuilder, conv2d, linear};

        include!("vit.rs");
    }

    mod differentiable {
        use candle_core::{Module, Result, Tensor};
        use candle_nn::{Init, VarBuilder};

        pub struct LayerNorm(Tensor, Tensor, f64);

        pub fn layer_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
            let weight = vb.get_with_hints(size, "weight", Init::Const(1.0))?;
            Ok(LayerNorm(weight, vb.get_with_hints(size, "bias", Init::Const(0.0))?, eps))
        }

        impl Module for LayerNorm {
            fn forward(&self, xs: &Tensor) -> Result<Tensor> {
                candle_nn::ops::layer_norm_slow(xs, &self.0, &self.1, self.2 as f32)
            }
        }

        pub struct RmsNorm(candle_nn::RmsNorm);

        pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
            candle_nn::rms_norm(size, eps, vb).map(RmsNorm)
        }

        impl Module for RmsNorm {
            fn forward(&self, xs: &Tensor) -> Result<Tensor> {
                self.0.forward_diff(xs)
            }
        }
    }
}

mod on_gapless {
    pub mod llama {
        use gapless::nn::{self as candle_nn, RmsNorm, rms_norm};
        use gapless::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};
        use gapless::{D, DType, Device, Result, Tensor};

        include!("llama.rs");
    }

    pub mod bert {
        use gapless::nn::{self as candle_nn, LayerNorm, layer_norm};
        use gapless::nn::{
            Activation, Dropout, Embedding, Linear, Module, Sequential, VarBuilder, embedding, linear, seq,
        };
        use gapless::{D, DType, Result, Tensor};

        include!("bert.rs");
    }

    pub mod vit {
        use gapless::nn::{self as candle_nn, LayerNorm, layer_norm};
        use gapless::nn::{Activation, Conv2d, Linear, Module, VarBuilder, conv2d, linear};
        use gapless::{D, DType, IndexOp, Result, Tensor};

        include!("vit.rs");
    }
}

/// The allowed error relative to a tensor's norm. Sums of some thousand f32 products have errors of about 1e-6 of the
/// norm. A wrong term causes errors that are orders of magnitude larger.
const TOLERANCE: f64 = 1e-5;

/// The minimum norm relative to which an error is measured. The gradient of the keys' bias cancels under the softmax,
/// except for rounding, so its error is compared with this value. The norms of other gradients are at least ten times
/// as large.
const LEAST: f64 = 1e-3;

/// Sequences per step.
const BATCH: usize = 3;

/// A model as a function of ids [batch, tokens] that returns logits per token or per sequence.
struct Ported<F> {
    forward: F,
    by_sequence: bool,
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Model for Ported<F> {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        (self.forward)(tokens)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let targets = if self.by_sequence { targets.narrow(1, 0, 1)?.squeeze(1)? } else { targets.clone() };
        self.forward(tokens, train)?.cross_entropy(&targets)?.mean_all()
    }
}

type Checked<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Ids without a pattern.
fn ids(count: usize, below: u32, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 12) % below).collect()
}

fn distance(got: &candle_core::Tensor, expected: &candle_core::Tensor) -> Checked<f64> {
    let norm = |x: &candle_core::Tensor| -> Checked<f64> { Ok(x.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()) };
    let difference = norm(&(got.to_dtype(DType::F64)?.reshape(expected.shape())? - expected)?)?;
    Ok(difference / norm(expected)?.max(LEAST))
}

/// Trains a model for two steps, and compares logits, loss and gradients of the next step with candle's.
fn compare<M, F: Fn(&candle_core::Tensor) -> candle_core::Result<candle_core::Tensor>>(
    sequence: usize,
    ids_below: u32,
    by_sequence: bool,
    build: impl Fn(gapless::nn::VarBuilder) -> Result<Ported<M>>,
    build_on_candle: impl Fn(candle_nn::VarBuilder) -> candle_core::Result<F>,
) -> Checked
where
    M: Fn(&Tensor) -> Result<Tensor>,
{
    let mut options = TrainOptions {
        step: StepOptions { batch: BATCH, sequence, ..StepOptions::default() },
        poison: true,
        ..TrainOptions::default()
    };
    (options.step.keep_gradients, options.device, options.learning_rate.peak) = (true, DeviceChoice::Cpu, 1e-2);
    let mut trainer = Trainer::new(build, options)?;
    let batch = |step: u32| (ids(BATCH * sequence, ids_below, step), ids(BATCH * sequence, ids_below, step + 99));
    for step in 0..2 {
        let (tokens, targets) = batch(step);
        trainer.step(&tokens, &targets)?;
    }

    // The same weights, as eager tensors in f64.
    let variables = VarMap::new();
    for name in trainer.parameter_names() {
        let value = trainer.tensor(name)?.copy()?.to_dtype(DType::F64)?;
        variables.data().lock().unwrap().insert(name.to_owned(), Var::from_tensor(&value)?);
    }
    let declared = variables.all_vars().len();
    let model = build_on_candle(candle_nn::VarBuilder::from_varmap(&variables, DType::F64, &Device::Cpu))?;
    assert_eq!(variables.all_vars().len(), declared, "both declare the same parameters");
    let (tokens, targets) = batch(2);
    let on_candle = |ids: &[u32]| candle_core::Tensor::from_slice(ids, (ids.len() / sequence, sequence), &Device::Cpu);

    let expected = model(&on_candle(&tokens[..sequence])?)?;
    let error = distance(&trainer.logits(&tokens[..sequence])?, &expected)?;
    assert!(error <= TOLERANCE, "logits: {error:e}");

    let (logits, labels) = (model(&on_candle(&tokens)?)?, on_candle(&targets)?);
    let labels = if by_sequence { labels.narrow(1, 0, 1)? } else { labels }.flatten_all()?;
    let classes = logits.dim(candle_core::D::Minus1)?;
    let loss = candle_nn::loss::cross_entropy(&logits.reshape(((), classes))?, &labels)?;
    let gradients = loss.backward()?;
    let report = trainer.step(&tokens, &targets)?;
    assert!((f64::from(report.loss) - loss.to_scalar::<f64>()?).abs() <= TOLERANCE, "loss {}", report.loss);
    for (name, variable) in variables.data().lock().unwrap().iter() {
        let expected = gradients.get(variable).unwrap_or_else(|| panic!("candle has no gradient of {name}"));
        let error = distance(&trainer.gradient(name)?, expected)?;
        assert!(error <= TOLERANCE, "gradient of {name}: {error:e}");
    }
    Ok(())
}

#[test]
fn a_llama() -> Checked {
    compare(
        17,
        61,
        false,
        |vb| {
            let model = on_gapless::llama::Model::new(&on_gapless::llama::Config::small(), vb)?;
            Ok(Ported { forward: move |ids: &Tensor| model.forward(ids), by_sequence: false })
        },
        |vb| {
            let model = on_candle::llama::Model::new(&on_candle::llama::Config::small(), vb)?;
            Ok(move |ids: &candle_core::Tensor| model.forward(ids))
        },
    )
}

#[test]
fn a_bert() -> Checked {
    compare(
        13,
        37,
        false,
        |vb| {
            let model = on_gapless::bert::Model::new(&on_gapless::bert::Config::small(), vb)?;
            Ok(Ported { forward: move |ids: &Tensor| model.forward(ids), by_sequence: false })
        },
        |vb| {
            let model = on_candle::bert::Model::new(&on_candle::bert::Config::small(), vb)?;
            Ok(move |ids: &candle_core::Tensor| model.forward(ids))
        },
    )
}

#[test]
fn a_vision_transformer() -> Checked {
    compare(
        128,
        16,
        true,
        |vb| {
            let model = on_gapless::vit::Model::new(&on_gapless::vit::Config::small(), vb)?;
            Ok(Ported { forward: move |ids: &Tensor| model.forward(ids), by_sequence: true })
        },
        |vb| {
            let model = on_candle::vit::Model::new(&on_candle::vit::Config::small(), vb)?;
            Ok(move |ids: &candle_core::Tensor| model.forward(ids))
        },
    )
}
