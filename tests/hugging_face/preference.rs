//! Training on preferences. Compares 20 steps with those of TRL, and the terms of a step with the formulas.

use std::path::Path;

use gapless::models::hf::{Adapter, Folder};
use gapless::nn::{Answer, PairLoss, Preference};
use gapless::{AdamW, Batch, IGNORED, Mesh, StepOptions, TrainOptions, Trainable, Trainer, communicator};
use serde_json::Value;

use crate::case::options;

const SEQUENCE: usize = 14;
/// Pairs in a batch.
const PAIRS: usize = 4;

/// Pairs of answers to a prompt, with what TRL computes from them.
struct Recorded {
    about: Value,
    /// The tokens and targets of each batch.
    batches: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Recorded {
    fn open() -> Self {
        let path = root().join("preference/llama.json");
        let about: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let pairs: Vec<[Vec<u32>; 3]> = serde_json::from_value(about["pairs"].clone()).unwrap();
        let batch = |pairs: &[[Vec<u32>; 3]]| {
            let (mut tokens, mut targets) = (Vec::new(), Vec::new());
            for [prompt, chosen, rejected] in pairs {
                for answer in [chosen, rejected] {
                    let ids = [&prompt[..], &answer[..]].concat();
                    let padding = SEQUENCE + 1 - ids.len();
                    tokens.extend(ids[..ids.len() - 1].iter().copied().chain(vec![0; padding]));
                    targets.extend(vec![IGNORED; prompt.len() - 1]);
                    targets.extend(answer.iter().copied().chain(vec![IGNORED; padding]));
                }
            }
            (tokens, targets)
        };
        Self { batches: pairs.chunks_exact(PAIRS).map(batch).collect(), about }
    }

    fn batch(&self, step: usize) -> Batch<'_> {
        let (tokens, targets) = &self.batches[step % self.batches.len()];
        Batch { tokens, targets, starts: &[] }
    }
}

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf")
}

/// The options of TRL's steps.
fn settings(preference: Preference, trainable: Trainable) -> TrainOptions {
    let optimizer = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, max_norm: 1.0, ..AdamW::default() };
    let step = StepOptions {
        batch: 2 * PAIRS,
        documents: true,
        preference: Some(preference),
        trainable,
        optimizer: optimizer.into(),
        keep_gradients: false,
        ..options(SEQUENCE).step
    };
    TrainOptions { step, threads: 1, ..options(SEQUENCE) }
}

/// Creates a trainer of the tiny Llama. With an adapter, B is zero, as at the start of a run.
fn trainer(preference: Preference, is_lora: bool) -> Trainer {
    let adapter = Adapter::open(root().join("lora/llama_qv/adapter")).unwrap();
    let base = Folder::open(adapter.base().unwrap()).unwrap();
    let trainable = if is_lora { adapter.trainable() } else { Trainable::All };
    let mut trainer = Trainer::new(|vb| base.model(vb), settings(preference, trainable)).unwrap();
    base.load(&mut trainer).unwrap();
    if is_lora {
        adapter.load(&base, &mut trainer).unwrap();
        let names: Vec<String> =
            trainer.parameter_names().filter(|name| name.contains("lora_B")).map(Into::into).collect();
        for name in names {
            let zeros = trainer.tensor(&name).unwrap().zeros_like().unwrap();
            trainer.set_tensor(&name, &zeros).unwrap();
        }
    }
    trainer
}

/// Losses, rewards and gradient norms of 20 steps are those of TRL, of all weights and of adapters. The reference's
/// log-likelihoods are measured before the first step.
#[test]
fn what_trl_computes() {
    let recorded = Recorded::open();
    for (name, loss, is_lora) in [
        ("dpo", PairLoss::Dpo, false),
        ("dpo_lora", PairLoss::Dpo, true),
        ("ipo", PairLoss::Ipo, false),
        ("ipo_lora", PairLoss::Ipo, true),
    ] {
        let mut trainer = trainer(Preference { loss, ..Preference::default() }, is_lora);
        let reference: Vec<Vec<f32>> =
            (0..recorded.batches.len()).map(|index| trainer.log_likelihoods(&recorded.batch(index)).unwrap()).collect();
        let steps: Vec<[f64; 6]> = serde_json::from_value(recorded.about[name].clone()).unwrap();
        let mut worst = [0.0f64; 3];
        for (step, expected) in steps.iter().enumerate() {
            let report = trainer.step_pairs(&recorded.batch(step), &reference[step % reference.len()]).unwrap();
            let rewards = report.rewards.unwrap();
            let found =
                [report.loss, rewards.chosen, rewards.rejected, rewards.margin, rewards.accuracy, report.gradient_norm];
            assert_eq!(f64::from(rewards.accuracy), expected[4], "{name}, step {step}");
            for (index, (found, expected)) in found.into_iter().map(f64::from).zip(*expected).enumerate() {
                let off = (found - expected).abs() / expected.abs().max(1.0);
                let kind = [0, 1, 1, 1, 1, 2][index];
                worst[kind] = worst[kind].max(off);
            }
        }
        println!("{name:<9} 20 steps: loss {:.1e} rewards {:.1e} norm {:.1e}", worst[0], worst[1], worst[2]);
        // Log-likelihoods of some 50 are exact up to 4e-6 in f32. IPO squares the differences, and its gradients of norm
        // 110 are clipped to 1: its measured error is up to 1.1e-4.
        let limit = if loss == PairLoss::Dpo { 1e-5 } else { 3e-4 };
        assert!(worst.iter().all(|&off| off <= limit), "{name}: {worst:?}");
    }
}

/// The loss and the rewards of a step are the formulas, applied to the log-likelihoods of its answers. With several
/// micro-batches and ranks, they are the same.
#[test]
fn a_step_has_the_loss_of_its_answers() {
    let recorded = Recorded::open();
    let tokens = |sequence: usize| {
        let targets = &recorded.batches[0].1[sequence * SEQUENCE..(sequence + 1) * SEQUENCE];
        targets.iter().filter(|&&target| target != IGNORED).count()
    };
    for loss in [PairLoss::Dpo, PairLoss::Ipo, PairLoss::Orpo] {
        for has_reference in [true, false] {
            let preference = Preference { loss, beta: 0.3, reference: has_reference };
            let mut one = trainer(preference, false);
            let known: Vec<f32> = (0..2 * PAIRS).map(|index| -20.0 - 3.0 * index as f32).collect();
            let known = if preference.needs_reference() { &known[..] } else { &[] };
            let sums = one.log_likelihoods(&recorded.batch(0)).unwrap();
            let answer = |sequence: usize| Answer {
                log_likelihood: f64::from(sums[sequence]),
                reference: known.get(sequence).map_or(0.0, |known| f64::from(*known)),
                tokens: tokens(sequence),
            };
            let pairs: Vec<_> =
                (0..PAIRS).map(|pair| preference.of_pair([answer(2 * pair), answer(2 * pair + 1)])).collect();
            let mean = |of: &dyn Fn(usize) -> f64| (0..PAIRS).map(of).sum::<f64>() / PAIRS as f64;
            let expected = [
                mean(&|pair| pairs[pair].0),
                mean(&|pair| f64::from(pairs[pair].1.chosen)),
                mean(&|pair| f64::from(pairs[pair].1.rejected)),
                mean(&|pair| f64::from(pairs[pair].1.accuracy)),
            ];
            let check = |trainer: &mut Trainer, what: &str| {
                let report = trainer.step_pairs(&recorded.batch(0), known).unwrap();
                let rewards = report.rewards.unwrap();
                let found = [report.loss, rewards.chosen, rewards.rejected, rewards.accuracy].map(f64::from);
                let is_close =
                    |(found, expected): (f64, f64)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
                assert!(
                    found.into_iter().zip(expected).all(is_close),
                    "{preference:?}, {what}: {found:?} {expected:?}"
                );
                report.gradient_norm
            };
            let norm = check(&mut one, "one rank");
            // The other ways run for one of the settings of each loss.
            for mesh in [Mesh::default(), Mesh { data: 2, ..Mesh::default() }, Mesh::pipeline(2)] {
                if has_reference != (loss == PairLoss::Dpo) {
                    continue;
                }
                let mut settings = settings(preference, Trainable::All);
                (settings.step.mesh, settings.step.micro_batches) = (mesh, 2);
                let norms = communicator::on_threads(mesh.ranks().unwrap(), |world| {
                    let base = Folder::open(root().join("lora/llama_qv/base")).unwrap();
                    let mut trainer =
                        Trainer::builder(|vb| base.model(vb), settings.clone()).distributed(world).build()?;
                    base.load(&mut trainer).unwrap();
                    // The batch of an evaluation is that of a micro-batch.
                    let size = settings.step.evaluation_batch();
                    let (ids, targets) = &recorded.batches[0];
                    let first =
                        Batch { tokens: &ids[..size * SEQUENCE], targets: &targets[..size * SEQUENCE], starts: &[] };
                    let few = trainer.log_likelihoods(&first)?;
                    assert!(few.iter().zip(&sums).all(|(a, b)| (a - b).abs() <= 1e-4), "{few:?} {sums:?}");
                    Ok(check(&mut trainer, &format!("{mesh:?}")))
                });
                let is_close = |other: &f32| (other - norm).abs() <= 1e-4 * norm;
                assert!(norms.unwrap().iter().all(is_close), "{preference:?} {mesh:?}");
            }
        }
    }
}

#[test]
fn steps_without_pairs_or_a_reference_are_refused() {
    let recorded = Recorded::open();
    let mut trainer = trainer(Preference::default(), false);
    let error = trainer.step_batch(&recorded.batch(0)).unwrap_err().to_string();
    assert!(error.contains("reference"), "{error}");
    let (tokens, mut targets) = recorded.batches[0].clone();
    targets[SEQUENCE..2 * SEQUENCE].fill(IGNORED);
    let batch = Batch { tokens: &tokens, targets: &targets, starts: &[] };
    let error = trainer.step_pairs(&batch, &[0.0; 2 * PAIRS]).unwrap_err().to_string();
    assert!(error.contains("sequence 1 of the batch has no answer"), "{error}");

    let base = Folder::open(root().join("lora/llama_qv/base")).unwrap();
    let refused = |change: &dyn Fn(&mut StepOptions)| {
        let mut settings = settings(Preference::default(), Trainable::All);
        change(&mut settings.step);
        Trainer::new(|vb| base.model(vb), settings).unwrap_err().to_string()
    };
    for (error, expected) in [
        (refused(&|step| step.documents = false), "data.format"),
        (refused(&|step| (step.batch, step.micro_batches) = (6, 2)), "2 × step.micro_batches"),
        (refused(&|step| step.loss.z_loss = 1e-4), "no further terms"),
        (refused(&|step| step.preference = Some(Preference { beta: 0.0, ..Preference::default() })), "preference.beta"),
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let error = {
        let mut settings = settings(Preference::default(), Trainable::All);
        settings.step.preference = None;
        let mut plain = Trainer::new(|vb| base.model(vb), settings).unwrap();
        plain.log_likelihoods(&recorded.batch(0)).unwrap_err().to_string()
    };
    assert!(error.contains("StepOptions::preference"), "{error}");
}
