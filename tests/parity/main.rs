//! Compares the engine with candle's autograd, for every model, with the same weights and the same batch.
//!
//! The reference computes in f64, so only the engine's rounding is measured. A gradient is a sum of 10² to 10⁴
//! products of values that went through 2 to 3 blocks in f32 (ε = 6e-8). Errors of a few ε each add up like a random
//! walk, to about 1e-6 of the norm. The tolerance is 1e-5 of the norm for every parameter. The error of a wrong term
//! would be orders of magnitude larger.

#[path = "../candle/mod.rs"]
mod candle;
mod mixtures;
mod verdict;

use candle::{Reference, ids, variables_of};
use candle_core::DType;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use gapless::engine::optim::AdamW as Rule;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig};
use gapless::{DeviceChoice, StepOptions, StepReport, TrainOptions, Trainer};
use gapless_testing::few;
use mixtures::{LOAD_BIAS, balance, decided_choices, expect_choices, gates};
use verdict::{TOLERANCE, Verdict, norm, relative_error};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sequences per step.
const BATCH: usize = 3;

#[derive(Debug, Clone)]
enum Config {
    Gpt(GptConfig),
    Llama(LlamaConfig),
    Moe(Box<MoeConfig>),
}

/// Returns the models. Each comes with the number of tokens per sequence for its training.
fn models() -> Vec<(Config, usize)> {
    let gpt = |vocabulary, sequence, layers, heads, width| {
        Config::Gpt(GptConfig { vocabulary, sequence, layers, heads, width, dropout: 0.0, ..GptConfig::default() })
    };
    let llama = |vocabulary, layers, heads, kv_heads, width, hidden| {
        let (rope_theta, rms_norm_eps) = (10_000.0, 1e-5);
        Config::Llama(LlamaConfig {
            vocabulary,
            layers,
            heads,
            kv_heads,
            width,
            hidden,
            rope_theta,
            rms_norm_eps,
            ..Default::default()
        })
    };
    let mut models = vec![
        (gpt(256, 33, 3, 4, 64), 33),
        (gpt(61, 40, 2, 3, 48), 17), // trained on fewer positions than it has
        (gpt(11, 5, 1, 3, 21), 5),   // nothing is a multiple of anything
        (llama(256, 2, 4, 2, 64, 97), 33),
        (llama(61, 3, 6, 1, 48, 128), 17), // all heads share one key
        (llama(13, 1, 3, 3, 30, 37), 19),
    ];
    models.extend(mixtures::all().into_iter().map(|config| (Config::Moe(Box::new(config)), 13)));
    models
}

impl Config {
    fn trainer(&self, options: TrainOptions) -> Result<Trainer> {
        Ok(match self {
            Self::Gpt(config) => Trainer::new(|vb| Gpt::new(config, vb), options)?,
            Self::Llama(config) => Trainer::new(|vb| Llama::new(config, vb), options)?,
            Self::Moe(config) => {
                // If the scores of two experts were almost equal, rounding would decide which of them a router chooses.
                // So the routers' weights are multiplied by 10, which separates the scores. The seed is one for which
                // all choices are clear enough (`decided_choices`).
                let mut trainer = Trainer::new(|vb| Moe::new(&**config, vb), TrainOptions { seed: 4, ..options })?;
                for gate in gates(&trainer) {
                    let name = format!("{gate}.weight");
                    let decided = trainer.tensor(&name)?.affine(10.0, 0.0)?;
                    trainer.set_tensor(&name, &decided)?;
                }
                trainer
            }
        })
    }

    /// Creates the reference implementation with the trainer's current parameters.
    fn twin(&self, trainer: &Trainer) -> Result<Reference> {
        let variables = variables_of(trainer, DType::F64)?;
        Ok(match self {
            Self::Gpt(config) => Reference::gpt(config, variables, DType::F64)?,
            Self::Llama(config) => Reference::llama(config, variables, DType::F64)?,
            Self::Moe(config) => Reference::moe(config, variables, DType::F64)?,
        })
    }

    fn bias_rate(&self) -> f64 {
        match self {
            Self::Gpt(_) | Self::Llama(_) => 0.0,
            Self::Moe(config) => config.router.bias_rate,
        }
    }

    fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
            Self::Moe(config) => config.llama.vocabulary,
        }
    }

    /// Returns ids without a pattern, which are different for each step.
    fn batch(&self, sequence: usize, step: u32) -> (Vec<u32>, Vec<u32>) {
        let id = |i: u32| (i.wrapping_mul(2_654_435_761) >> 12) % self.vocabulary() as u32;
        let count = (BATCH * sequence) as u32;
        let start = step * (count + 1);
        ((start..start + count).map(id).collect(), (start + 1..=start + count).map(id).collect())
    }
}

fn options(sequence: usize, micro_batches: usize) -> TrainOptions {
    // Dead memory is filled with NaN, so that a plan that reuses bytes too early is detected.
    let mut options = TrainOptions {
        step: StepOptions { batch: BATCH, sequence, micro_batches, ..StepOptions::default() },
        poison: true,
        device: DeviceChoice::Cpu,
        ..TrainOptions::default()
    };
    options.step.keep_gradients = true;
    options.learning_rate.peak = 1e-2;
    options
}

#[test]
fn gradients_of_every_parameter_are_those_of_candle() -> Result {
    let mut verdict = Verdict::default();
    for (config, sequence) in models() {
        for micro_batches in [1, 3] {
            let mut trainer = config.trainer(options(sequence, micro_batches))?;
            // At step 0, biases are zero and scales are one, so a gradient that omits them would still be correct.
            // Gradients are therefore compared again at step 3, after the optimizer has changed all parameters.
            for step in 0..4 {
                let twin = config.twin(&trainer)?;
                let (tokens, targets) = config.batch(sequence, step);
                let report = trainer.step(&tokens, &targets)?;
                if step % 3 != 0 {
                    continue;
                }
                let place = format!("{config:?}, {micro_batches} micro-batches, step {step}");
                verdict.expect_step(&trainer, report, &twin, (&tokens, &targets), &place)?;
            }
        }
    }
    verdict.finish("gradients");
    Ok(())
}

#[test]
fn logits_are_those_of_candle() -> Result {
    let mut verdict = Verdict::default();
    for (config, sequence) in models() {
        let mut trainer = config.trainer(options(sequence, 1))?;
        for step in 0..3 {
            let (tokens, targets) = config.batch(sequence, step);
            trainer.step(&tokens, &targets)?;
        }
        let twin = config.twin(&trainer)?;
        let (tokens, targets) = config.batch(sequence, 3);
        decided_choices(&twin, &ids(&tokens, BATCH)?, &format!("{config:?}"))?;
        let sequence = &tokens[..sequence];
        let expected = twin.logits(&ids(sequence, 1)?)?;
        let error = relative_error(&trainer.logits(sequence)?, &expected)?;
        verdict.expect(error, TOLERANCE, format!("logits of {config:?}"));
        let loss = twin.loss(&ids(&tokens, BATCH)?, &ids(&targets, BATCH)?)?.to_scalar::<f64>()?;
        let error = (f64::from(trainer.evaluate(&tokens, &targets)?) - loss).abs() / loss;
        verdict.expect(error, 1e-6, format!("evaluation of {config:?}"));
    }
    verdict.finish("logits");
    Ok(())
}

/// Compares whole steps. The reference is candle-nn's AdamW with candle's gradients, which are clipped by a few lines
/// here.
///
/// Adam divides a gradient by its own magnitude. With the usual ε of 1e-8, rounding noise turns into full steps
/// wherever the exact gradient is zero, as for the bias of attention's keys. The same happens for the few elements that
/// are near zero by chance. So with an ε of 1e-8, the comparison is loose. With an ε above the noise, the comparison is
/// as strict as that of gradients.
#[test]
fn training_steps_are_those_of_candle() -> Result {
    const STEPS: u32 = 3;
    let mut verdict = Verdict::default();
    for (config, sequence) in models() {
        let all = [
            (3, 0.05, 0.3, 1e-3, TOLERANCE),
            (1, f64::INFINITY, 0.3, 1e-8, 1e-2),
            (1, f64::INFINITY, 0.0, 1e-3, TOLERANCE),
            (1, 0.05, 0.0, 1e-3, TOLERANCE),
            (1, f64::INFINITY, 0.3, 1e-3, TOLERANCE),
        ];
        for &(micro_batches, max_norm, weight_decay, eps, tolerance) in few(&all, 2) {
            if matches!(config, Config::Moe(_)) && eps < 1e-3 {
                continue; // parameters that differ by 1e-2 of a step choose differently
            }
            let mut options = options(sequence, micro_batches);
            let rule = Rule { max_norm, weight_decay, eps, ..Rule::default() };
            options.step.optimizer = rule.into();
            let mut trainer = config.trainer(options)?;
            let twin = config.twin(&trainer)?;
            let start = config.twin(&trainer)?.variables();
            let mut optimizers = optimizers(&twin, rule, trainer.options().learning_rate.peak)?;
            let place = format!(
                "{config:?}, {micro_batches} micro-batches, norm ≤ {max_norm}, decay {weight_decay}, ε {eps:e}"
            );
            for step in 0..STEPS {
                let (tokens, targets) = config.batch(sequence, step);
                let StepReport { loss, gradient_norm, .. } = trainer.step(&tokens, &targets)?;
                assert!(max_norm.is_infinite() || f64::from(gradient_norm) > max_norm, "nothing to clip in {place}");
                let (tokens, targets) = (ids(&tokens, BATCH)?, ids(&targets, BATCH)?);
                let choices = expect_choices(&twin, &trainer, &tokens, &format!("step {step} of {place}"))?;
                let (expected, mut gradients) = twin.backward(&tokens, &targets)?;
                let expected = expected.to_scalar::<f64>()?;
                verdict.expect((f64::from(loss) - expected).abs() / expected, 1e-5, format!("loss {step} of {place}"));
                clip(&twin, &mut gradients, max_norm)?;
                for optimizer in &mut optimizers {
                    optimizer.step(&gradients)?;
                }
                balance(&twin, &choices, config.bias_rate())?;
            }
            let start: std::collections::HashMap<_, _> = start.into_iter().collect();
            for (name, expected) in twin.variables() {
                // The comparison uses the distance that a parameter has moved, since both sides start at the same
                // value. Each of the engine's steps rounds this distance to f32.
                let rounding = f64::from(STEPS) * f64::from(f32::EPSILON) / 2.0 * norm(&expected)?;
                let expected = (expected.as_tensor() - start[&name].as_tensor())?;
                let change = (trainer.tensor(&name)?.to_dtype(DType::F64)? - start[&name].as_tensor())?;
                let allowed = tolerance + rounding / norm(&expected)?;
                verdict.expect(relative_error(&change, &expected)?, allowed, format!("change of {name} of {place}"));
            }
        }
    }
    verdict.finish("training steps");
    Ok(())
}

/// Returns two optimizers, as in the engine's rule: one for matrices, and one without weight decay for vectors.
fn optimizers(twin: &Reference, rule: Rule, lr: f64) -> Result<[AdamW; 2]> {
    let (matrices, vectors): (Vec<_>, Vec<_>) =
        twin.variables().into_iter().map(|(_, variable)| variable).partition(|variable| variable.rank() >= 2);
    let decayed =
        ParamsAdamW { lr, beta1: rule.beta1, beta2: rule.beta2, eps: rule.eps, weight_decay: rule.weight_decay };
    let plain = ParamsAdamW { weight_decay: 0.0, ..decayed.clone() };
    Ok([AdamW::new(matrices, decayed)?, AdamW::new(vectors, plain)?])
}

/// Scales all gradients down so that their global norm is at most `max_norm`.
fn clip(twin: &Reference, gradients: &mut candle_core::backprop::GradStore, max_norm: f64) -> Result {
    let mut variables = twin.variables();
    variables.retain(|(name, _)| !name.ends_with(LOAD_BIAS));
    let mut squares = 0.0;
    for (_, variable) in &variables {
        let gradient = gradients.get(variable).expect("every variable has a gradient");
        squares += norm(gradient)?.powi(2);
    }
    let scale = (max_norm / (squares.sqrt() + 1e-6)).min(1.0);
    for (_, variable) in &variables {
        let clipped = (gradients.get(variable).expect("every variable has a gradient") * scale)?;
        gradients.insert(variable, clipped);
    }
    Ok(())
}
