//! Training on preferences. Compares 20 steps with those of TRL, and the terms of a step with the formulas.

use std::path::Path;

use gapless::models::hf::{Adapter, Folder};
use gapless::nn::{Answer, PairLoss, Preference, Rewards};
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
        let pairs = serde_json::from_value(about["pairs"].clone()).unwrap();
        Self::of_pairs(about, pairs)
    }

    /// Answers with labels, of which every second one is desirable, and the answer to the prompt before in the batch.
    fn with_labels() -> Self {
        let Self { about, .. } = Self::open();
        let pairs: Vec<[Vec<u32>; 3]> = serde_json::from_value(about["pairs"].clone()).unwrap();
        let answer = |index: usize| pairs[index][1 + index % 2].clone();
        let before = |index: usize| index / PAIRS * PAIRS + (index + PAIRS - 1) % PAIRS;
        let with_other = |index: usize| [pairs[index][0].clone(), answer(index), answer(before(index))];
        let labelled = (0..pairs.len()).map(with_other).collect();
        Self::of_pairs(about, labelled)
    }

    fn of_pairs(about: Value, pairs: Vec<[Vec<u32>; 3]>) -> Self {
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

/// The labels of a batch of [`Recorded::with_labels`].
fn labels(loss: PairLoss) -> Vec<f32> {
    let label = |sequence: usize| if (sequence / 2).is_multiple_of(2) { 1.0 } else { 0.0 };
    if loss == PairLoss::Kto { (0..2 * PAIRS).map(label).collect() } else { Vec::new() }
}

/// Losses, rewards and gradient norms of 20 steps are those of TRL, of all weights and of adapters. The reference's
/// log-likelihoods are measured before the first step.
#[test]
fn what_trl_computes() {
    for (name, loss, is_lora) in [
        ("dpo", PairLoss::Dpo, false),
        ("dpo_lora", PairLoss::Dpo, true),
        ("ipo", PairLoss::Ipo, false),
        ("ipo_lora", PairLoss::Ipo, true),
        ("kto", PairLoss::Kto, false),
        ("kto_lora", PairLoss::Kto, true),
    ] {
        let has_labels = loss == PairLoss::Kto;
        let recorded = if has_labels { Recorded::with_labels() } else { Recorded::open() };
        let undesirable_weight = if has_labels { 1.5 } else { 1.0 };
        let mut trainer = trainer(Preference { loss, undesirable_weight, ..Preference::default() }, is_lora);
        let reference: Vec<Vec<f32>> =
            (0..recorded.batches.len()).map(|index| trainer.log_likelihoods(&recorded.batch(index)).unwrap()).collect();
        let steps: Vec<Vec<f64>> = serde_json::from_value(recorded.about[name].clone()).unwrap();
        let mut worst = [0.0f64; 3];
        for (step, expected) in steps.iter().enumerate() {
            let known = &reference[step % reference.len()];
            let report = trainer.step_answers(&recorded.batch(step), known, &labels(loss)).unwrap();
            let rewards = report.rewards.unwrap();
            let mut found = vec![
                (0, report.loss),
                (1, rewards.chosen),
                (1, rewards.rejected),
                (1, rewards.margin),
                (2, report.gradient_norm),
            ];
            // TRL has no accuracy of answers with labels.
            if !has_labels {
                assert_eq!(f64::from(rewards.accuracy), expected[4], "{name}, step {step}");
                found.insert(4, (1, rewards.accuracy));
            }
            assert_eq!(found.len(), expected.len());
            for ((kind, found), expected) in found.into_iter().zip(expected) {
                let off = (f64::from(found) - expected).abs() / expected.abs().max(1.0);
                worst[kind] = worst[kind].max(off);
            }
        }
        println!("{name:<9} 20 steps: loss {:.1e} rewards {:.1e} norm {:.1e}", worst[0], worst[1], worst[2]);
        // Log-likelihoods of some 50 are exact up to 4e-6 in f32. IPO squares the differences, and its gradients of norm
        // 110 are clipped to 1: its measured error is up to 1.1e-4.
        let limit = if loss == PairLoss::Ipo { 3e-4 } else { 1e-5 };
        assert!(worst.iter().all(|&off| off <= limit), "{name}: {worst:?}");
    }
}

/// The loss and the rewards of a step are the formulas, applied to the log-likelihoods of its answers. With several
/// micro-batches and ranks, they are the same, except that each micro-batch of answers with labels has its own reference
/// point.
#[test]
fn a_step_has_the_loss_of_its_answers() {
    for loss in [PairLoss::Dpo, PairLoss::Ipo, PairLoss::Orpo, PairLoss::Kto] {
        let has_labels = loss == PairLoss::Kto;
        let recorded = if has_labels { Recorded::with_labels() } else { Recorded::open() };
        let tokens = |sequence: usize| {
            let targets = &recorded.batches[0].1[sequence * SEQUENCE..(sequence + 1) * SEQUENCE];
            targets.iter().filter(|&&target| target != IGNORED).count()
        };
        let labels = labels(loss);
        for has_reference in [true, false] {
            let preference = Preference { loss, beta: 0.3, reference: has_reference, ..Preference::default() };
            let mut one = trainer(preference, false);
            let known: Vec<f32> = (0..2 * PAIRS).map(|index| -20.0 - 3.0 * index as f32).collect();
            let known = if preference.needs_reference() { &known[..] } else { &[] };
            let sums = one.log_likelihoods(&recorded.batch(0)).unwrap();
            let answer = |sequence: usize| Answer {
                log_likelihood: f64::from(sums[sequence]),
                reference: known.get(sequence).map_or(0.0, |known| f64::from(*known)),
                tokens: tokens(sequence),
                is_desirable: labels.get(sequence) == Some(&1.0),
            };
            let pairs: Vec<_> = (0..PAIRS).map(|pair| [answer(2 * pair), answer(2 * pair + 1)]).collect();
            let check = |trainer: &mut Trainer, what: &str| {
                let micro_batches = pairs.chunks(trainer.options().step.evaluation_batch() / 2);
                let parts: Vec<_> = micro_batches.map(|pairs| preference.of_pairs(pairs)).collect();
                let mean = |of: fn(&(f64, Rewards)) -> f64| parts.iter().map(of).sum::<f64>() / parts.len() as f64;
                let expected = [
                    mean(|(loss, _)| *loss),
                    mean(|(_, rewards)| f64::from(rewards.chosen)),
                    mean(|(_, rewards)| f64::from(rewards.rejected)),
                    mean(|(_, rewards)| f64::from(rewards.accuracy)),
                ];
                let report = trainer.step_answers(&recorded.batch(0), known, &labels).unwrap();
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
                if has_reference != matches!(loss, PairLoss::Dpo | PairLoss::Kto) {
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
                let norms = norms.unwrap();
                assert!(has_labels || norms.iter().all(is_close), "{preference:?} {mesh:?}");
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
        (
            refused(&|step| {
                step.preference = Some(Preference { desirable_weight: 2.0, ..Preference::default() });
            }),
            "only the loss kto has these weights",
        ),
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
