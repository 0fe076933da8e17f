//! Values that a model watches in each step, with any mesh and any recomputation.

use gapless::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};
use gapless::{
    Layers, MemoryOptions, Mesh, Model, Recompute, Result, StepOptions, Tensor, TrainOptions, Trainer, communicator,
};

use crate::common::on_cpu;

/// A model that watches an activation that the backward reads, a view of it, a sum, and the loss itself.
struct Shown {
    embed: Embedding,
    up: Linear,
    head: Linear,
}

impl Shown {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            embed: embedding(11, 8, vb.pp("embed"))?,
            up: linear_no_bias(8, 8, vb.pp("up"))?,
            head: linear_no_bias(8, 11, vb.pp("head"))?,
        })
    }
}

impl Model for Shown {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.embed.forward(tokens)?;
        let _layer = x.enter("blocks.0");
        let hidden = self.up.forward(&x)?.gelu()?.sqr()?;
        if train {
            hidden.watch("hidden");
            hidden.narrow(2, 0, 1)?.watch("first");
            hidden.sum_all()?.watch("sum");
        }
        self.head.forward(&hidden)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let loss = self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()?;
        loss.watch("loss");
        Ok(loss)
    }
}

/// Returns the sum over the elements of each watched value after two steps, by name.
fn shown(options: &TrainOptions) -> Vec<Vec<(String, f32)>> {
    let tokens: Vec<u32> = (0..24).map(|i| i * i % 11).collect();
    let go = |trainer: &mut Trainer| {
        trainer.step(&tokens, &tokens).unwrap();
        let report = trainer.step(&tokens, &tokens).unwrap();
        let sum = |name: &str| trainer.watched(name).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        let mut sums: Vec<_> = trainer.watched_names().map(|name| (name.to_owned(), sum(name))).collect();
        // Watched values are summed over micro-batches, while the report has the mean.
        let parts = (options.step.micro_batches * options.step.mesh.data) as f32;
        sums.iter_mut().filter(|(name, _)| name == "loss").for_each(|(_, loss)| *loss /= parts);
        sums.push(("reported".into(), report.loss));
        sums
    };
    let ranks = options.step.mesh.ranks().unwrap();
    communicator::on_threads(ranks, |world| {
        Ok(go(&mut Trainer::builder(Shown::new, options.clone()).distributed(world).build()?))
    })
    .unwrap()
}

#[test]
fn what_is_shown_is_summed_once_over_micro_batches_and_ranks() {
    let plain = TrainOptions {
        step: StepOptions { batch: 4, sequence: 6, ..on_cpu().step },
        threads: 1,
        poison: true,
        ..on_cpu()
    };
    let expected = shown(&plain).remove(0);
    assert_eq!(expected.len(), 5);
    let value = |values: &[(String, f32)], name: &str| values.iter().find(|(other, _)| other == name).unwrap().1;
    for (data, pipeline, micro_batches) in [(1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 4), (2, 2, 2)] {
        for recompute in [Recompute::None, Recompute::Layers(Layers::All)] {
            let mesh = Mesh { data, pipeline, ..Mesh::default() };
            let options = TrainOptions {
                step: StepOptions {
                    micro_batches,
                    mesh,
                    memory: MemoryOptions { recompute: recompute.clone(), ..plain.step.memory.clone() },
                    ..plain.step.clone()
                },
                ..plain.clone()
            };
            for rank in shown(&options) {
                for name in ["hidden", "first", "sum", "loss", "reported"] {
                    let (a, b) = (value(&rank, name), value(&expected, name));
                    // The values are sums of a hundred terms in another order.
                    let close = (a - b).abs() <= 1e-5 * b.abs();
                    assert!(close, "{name}: {a}, not {b}; {mesh:?}, {micro_batches} micro-batches, {recompute:?}");
                }
            }
        }
    }
}
