//! Documents that are packed into one sequence are trained as if each were in a sequence of its own.

use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::nn::{self, Embedding, Module, VarBuilder, embedding};
use gapless::parallel::{self, Schedule};
use gapless::{
    Batch, DType, IGNORED, MemoryOptions, Mesh, Model, Pipeline, Precision, StepOptions, Tensor, TrainOptions, Trainer,
};
use std::collections::BTreeMap;

use gapless::{Layers, Recompute};

use crate::common::{Kind, PLANNING, TinyRun, VOCABULARY, on_cpu};

/// Lengths of the documents in each sequence, in tokens.
const LENGTHS: [&[usize]; 2] = [&[5, 1, 10], &[9, 7]];
const SEQUENCE: usize = 16;

/// Two sequences of packed documents.
struct Packed {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    starts: Vec<u32>,
}

impl Packed {
    fn new() -> Self {
        let tokens: Vec<u32> = (0..2 * SEQUENCE as u32).map(|i| (i * i * 7 + i / 3) % VOCABULARY).collect();
        let (mut targets, mut starts) = (tokens[1..].to_vec(), Vec::new());
        targets.push(0);
        for (sequence, lengths) in LENGTHS.iter().enumerate() {
            let mut at = 0;
            for &length in *lengths {
                starts.extend(vec![at as u32; length]);
                at += length;
                targets[sequence * SEQUENCE + at - 1] = IGNORED;
            }
        }
        Self { tokens, targets, starts }
    }

    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, targets: &self.targets, starts: &self.starts }
    }

    /// Returns the tokens of each document that has a target.
    fn alone(&self) -> impl Iterator<Item = &[u32]> {
        let mut rest = &self.tokens[..];
        let all = LENGTHS.concat().into_iter().map(move |length| {
            let (document, behind) = rest.split_at(length);
            rest = behind;
            document
        });
        all.filter(|document| document.len() > 1)
    }
}

fn options(batch: usize, sequence: usize, documents: bool) -> TrainOptions {
    TrainOptions {
        step: StepOptions {
            batch,
            sequence,
            documents,
            keep_gradients: true,
            memory: MemoryOptions { planning: PLANNING, ..on_cpu().step.memory },
            ..on_cpu().step
        },
        seed: 3,
        ..on_cpu()
    }
}

fn trainer(kind: Kind, options: TrainOptions) -> Trainer {
    let vocabulary = VOCABULARY as usize;
    let gpt = GptConfig {
        vocabulary,
        sequence: SEQUENCE,
        layers: 2,
        heads: 3,
        width: 48,
        dropout: 0.0,
        ..GptConfig::default()
    };
    let llama =
        LlamaConfig { vocabulary, layers: 2, heads: 4, kv_heads: 2, width: 48, hidden: 80, ..LlamaConfig::default() };
    match kind {
        Kind::Gpt => Trainer::new(|vb| Gpt::new(&gpt, vb), options),
        _ => Trainer::new(|vb| Llama::new(&llama, vb), options),
    }
    .unwrap()
}

/// Returns the names and elements of the last step's gradients, with −0 replaced by 0.
fn gradients(trainer: &Trainer) -> Vec<(String, Vec<f32>)> {
    let elements = |name: &str| {
        let gradient = trainer.gradient(name).unwrap().to_dtype(DType::F32).unwrap();
        gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(|x| x + 0.0).collect()
    };
    trainer.parameter_names().map(|name| (name.to_owned(), elements(name))).collect()
}

#[test]
fn the_loss_and_its_gradients_are_the_mean_of_the_documents_alone() {
    for kind in [Kind::Gpt, Kind::Llama] {
        let packed = Packed::new();
        // Trains on each document alone, with a trainer that has no support for documents.
        let (mut count, mut loss, mut sums) = (0.0, 0.0, BTreeMap::new());
        for document in packed.alone() {
            let (tokens, targets) = (&document[..document.len() - 1], &document[1..]);
            let mut alone = trainer(kind, options(1, tokens.len(), false));
            let weight = tokens.len() as f64;
            loss += weight * f64::from(alone.step(tokens, targets).unwrap().loss);
            count += weight;
            for (name, gradient) in gradients(&alone) {
                let sum = sums.entry(name).or_insert_with(|| vec![0.0; gradient.len()]);
                sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += weight * f64::from(x));
            }
        }
        // All documents in two sequences.
        let mut together = trainer(kind, options(2, SEQUENCE, true));
        let evaluated = together.evaluate_batch(&packed.batch()).unwrap();
        let report = together.step_batch(&packed.batch()).unwrap();
        assert_eq!(evaluated.to_bits(), report.loss.to_bits(), "{kind:?}");
        // The values are sums of some hundreds of f32 terms, in another order.
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
        assert!(close(f64::from(report.loss), loss / count), "{kind:?}: {} is not {}", report.loss, loss / count);
        for (name, gradient) in gradients(&together) {
            let sum = &sums[&name];
            let norm = sum.iter().map(|x| (x / count).powi(2)).sum::<f64>().sqrt();
            let error = gradient.iter().zip(sum).map(|(a, b)| (f64::from(*a) - b / count).powi(2)).sum::<f64>().sqrt();
            assert!(error <= 1e-5 * norm, "{kind:?}, gradient of {name}: {error} of {norm}");
        }
    }
}

#[test]
fn a_document_changes_no_bit_of_others() {
    let (f32, bf16) = (Precision::F32, Precision::Bf16);
    for (kind, precision) in [(Kind::Gpt, f32), (Kind::Llama, f32), (Kind::Llama, bf16)] {
        let options = TrainOptions {
            step: StepOptions { precision, ..options(2, SEQUENCE, true).step },
            poison: true,
            ..options(2, SEQUENCE, true)
        };
        let outcome = |change: u32| {
            let mut packed = Packed::new();
            // Changes the last document of the first sequence, whose own loss is not counted.
            for index in 6..SEQUENCE {
                packed.tokens[index] = (packed.tokens[index] + change) % VOCABULARY;
                packed.targets[index] = IGNORED;
            }
            let mut trainer = trainer(kind, options.clone());
            let loss = trainer.step_batch(&packed.batch()).unwrap().loss.to_bits();
            (loss, gradients(&trainer))
        };
        let (loss, gradients) = outcome(0);
        let (changed_loss, changed) = outcome(1);
        assert_eq!(changed_loss, loss, "{kind:?} in {precision:?}");
        for ((name, a), (_, b)) in gradients.iter().zip(&changed) {
            assert!(a == b, "{kind:?} in {precision:?}: the gradient of {name} has changed");
        }
    }
}

fn run(kind: Kind) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.step.documents = true;
    run
}

#[test]
fn the_bits_do_not_depend_on_micro_batches_ranks_recomputation_or_idle_bytes() {
    for kind in [Kind::Gpt, Kind::Llama] {
        let plain = run(kind).steps(2);
        let mut other = run(kind);
        (other.options.step.micro_batches, other.options.threads, other.options.poison) = (4, 1, true);
        assert_eq!(other.steps(2), plain, "{kind:?} in micro-batches");
        other.options.step.memory.recompute = Recompute::Layers(Layers::All);
        assert_eq!(other.steps(2), plain, "{kind:?}, computed again");
        let mut ranks = run(kind);
        (ranks.options.step.micro_batches, ranks.options.threads, ranks.options.step.mesh) = (4, 1, Mesh::pipeline(2));
        let schedule: Box<dyn Schedule + Send + Sync> = parallel::by_name("zb-h1").unwrap();
        ranks.options.step.pipeline = Pipeline { schedule: schedule.into(), ..Pipeline::default() };
        assert_eq!(ranks.steps_on_ranks(2), plain, "{kind:?} in a pipeline");
        // Each of two data ranks weights its loss by its share of all targets. Gradients are summed in another order
        // than on one rank.
        (ranks.options.step.micro_batches, ranks.options.step.mesh) = (2, Mesh { data: 2, ..Mesh::default() });
        ranks.options.step.pipeline = Pipeline::default();
        let found = ranks.steps_on_ranks(2);
        for (a, b) in
            (found.losses.iter().chain(&found.gradient_norms)).zip(plain.losses.iter().chain(&plain.gradient_norms))
        {
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            assert!((a - b).abs() <= 1e-5 * b, "{kind:?} on two data ranks: {a} is not {b}");
        }
    }
}

/// The weights of tokens are known before the step. So the head still computes its gradients in the forward, and
/// whole logits are never stored.
#[test]
fn the_head_is_differentiated_in_the_forward() {
    let config = LlamaConfig { vocabulary: 4096, ..LlamaConfig::default() };
    let program =
        gapless::plan::program(|vb| Llama::new(&config, vb), &options(2, SEQUENCE, true), 0).unwrap().to_string();
    assert!(program.contains("linear_cross_entropy") && !program.contains("linear_cross_entropy_grad"), "{program}");
}

#[test]
fn batches_that_make_no_sense_are_refused() {
    let mut packing = trainer(Kind::Gpt, options(2, SEQUENCE, true));
    let mut plain = trainer(Kind::Gpt, options(2, SEQUENCE, false));
    let refused = |trainer: &mut Trainer, change: &dyn Fn(&mut Packed), expected: &str| {
        let mut packed = Packed::new();
        change(&mut packed);
        let error = trainer.step_batch(&packed.batch()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(trainer.steps(), 0);
    };
    refused(&mut packing, &|packed| packed.starts[2] = 3, "token 2 of sequence 0");
    refused(&mut packing, &|packed| packed.starts[8] = 0, "token 8 of sequence 0");
    refused(&mut packing, &|packed| packed.starts[SEQUENCE] = 1, "token 0 of sequence 1");
    refused(&mut packing, &|packed| packed.targets.fill(IGNORED), "all targets are ignored");
    refused(&mut packing, &|packed| packed.targets[0] = VOCABULARY, "50");
    refused(&mut packing, &|packed| packed.starts.truncate(5), "starts");
    refused(&mut plain, &|_| (), "set TrainOptions::documents");
    refused(&mut plain, &|packed| packed.starts.clear(), "has ignored targets");
}

/// A model with its own loss function.
struct Unweighted(Embedding);

impl Model for Unweighted {
    fn forward(&self, tokens: &Tensor, _: bool) -> gapless::Result<Tensor> {
        self.0.forward(tokens)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> gapless::Result<Tensor> {
        let log_probabilities = nn::ops::log_softmax(&self.forward(tokens, train)?, 2)?;
        log_probabilities.gather(&targets.unsqueeze(2)?, 2)?.mean_all()?.neg()
    }
}

#[test]
fn a_loss_that_weighs_no_token_is_refused() {
    let size = VOCABULARY as usize;
    let build = |vb: VarBuilder| Ok(Unweighted(embedding(size, size, vb)?));
    let error = Trainer::new(build, options(2, SEQUENCE, true)).unwrap_err().to_string();
    assert!(error.contains("ignores the weights of tokens"), "{error}");
}
