//! Sums of gradients over micro-batches, in models that use their weights in unusual ways.

use gapless::Error as GraphError;
use gapless::nn::{Embedding, Module, VarBuilder, embedding};
use gapless::{Model, Result, StepOptions, Tensor, TrainError, TrainOptions, Trainer};

use crate::common::on_cpu;

/// A model with unusual weights. One weight is transformed before it is used, while the bias next to it is used as it
/// is. Another weight is read by the loss directly, another is used twice, and another is broadcast.
struct Unusual {
    embed: Embedding,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor,
    delta: Tensor,
    bias: Tensor,
    direct: Tensor,
    per_token: Tensor,
}

impl Unusual {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            embed: embedding(11, 8, vb.pp("embed"))?,
            scale: vb.get(8, "scale")?,
            shift: vb.get(8, "shift")?,
            weight: vb.get((11, 8), "weight")?,
            delta: vb.get((11, 8), "delta")?,
            bias: vb.get(11, "bias")?,
            direct: vb.get((3, 2), "direct")?,
            per_token: vb.get((6, 1), "per_token")?,
        })
    }
}

impl Unusual {
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = self.embed.forward(tokens)?.broadcast_add(&self.per_token)?;
        x.layer_norm(&self.scale.affine(1.0, 1.0)?, &self.shift, 1e-5)
    }

    fn head(&self) -> Result<Tensor> {
        self.weight.add(&self.delta)?.add(self.embed.embeddings())
    }
}

impl Model for Unusual {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.hidden(tokens)?.linear(&self.head()?, Some(&self.bias))
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let loss = self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()?;
        loss.add(&self.direct.sum(0)?.narrow(0, 1, 1)?.reshape(())?)
    }
}

/// The model [`Unusual`] with a head without bias. The head's weight is a sum that contains the embedding table. If
/// `fused` is true, the loss is computed by `linear_cross_entropy`, which fuses the head with the cross-entropy.
struct Headed {
    model: Unusual,
    fused: bool,
}

impl Model for Headed {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.model.hidden(tokens)?.linear(&self.model.head()?, None)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        match self.fused {
            false => self.forward(tokens, train)?.cross_entropy(targets)?.mean_all(),
            true => self.model.hidden(tokens)?.linear_cross_entropy(&self.model.head()?, targets)?.mean_all(),
        }
    }
}

/// The gradients of all parameters after one step.
fn gradients<M: Model>(build: impl Fn(VarBuilder) -> Result<M>, micro_batches: usize) -> Vec<(String, Vec<f32>)> {
    let options = TrainOptions {
        step: StepOptions { batch: 4, sequence: 6, micro_batches, keep_gradients: true, ..on_cpu().step },
        poison: true,
        ..on_cpu()
    };
    let mut trainer = Trainer::new(build, options).unwrap();
    let squares = |range: std::ops::Range<u32>| {
        let ids: Vec<u32> = range.map(|i| i * i % 11).collect();
        candle_core::Tensor::from_vec(ids, (4, 6), &candle_core::Device::Cpu).unwrap()
    };
    trainer.step_on(&squares(0..24), &squares(1..25)).unwrap();
    let read = |name: &str| trainer.gradient(name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    trainer.parameter_names().map(|name| (name.to_owned(), read(name))).collect()
}

/// Checks that results only differ by rounding in another order of summation: at most a few roundings of the largest
/// element, or of `least` if that is larger.
fn expect_close(what: &str, least: f32, whole: &[(String, Vec<f32>)], other: Vec<(String, Vec<f32>)>) {
    assert_eq!(whole.len(), other.len());
    for ((name, a), (_, b)) in whole.iter().zip(other) {
        let scale = a.iter().fold(least, |max, x| max.max(x.abs()));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * scale;
        assert!(a.iter().zip(&b).all(close), "{name}, {what}: {a:?} and {b:?}");
    }
}

#[test]
fn any_cut_of_the_batch_gives_the_same_gradients() {
    let whole = gradients(Unusual::new, 1);
    assert_eq!(whole.iter().find(|g| g.0 == "direct").unwrap().1, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    for micro_batches in [2, 4] {
        expect_close(&format!("{micro_batches} micro-batches"), 1e-3, &whole, gradients(Unusual::new, micro_batches));
    }
}

#[test]
fn a_head_fused_with_its_loss_gives_the_gradients_of_the_pair() {
    let headed = |fused| move |vb: VarBuilder| Ok(Headed { model: Unusual::new(vb)?, fused });
    let pair = gradients(headed(false), 1);
    for micro_batches in [1, 2, 4] {
        let name = format!("fused, {micro_batches} micro-batches");
        // The norm removes a shift of a whole token. So this gradient only consists of the rounding errors of a sum of
        // values of size 1.
        expect_close(&name, 1.0, &pair, gradients(headed(true), micro_batches));
    }
}

#[test]
fn a_loss_of_an_output_without_a_gradient_is_refused() {
    struct OfLogSumExp(Unusual);

    impl Model for OfLogSumExp {
        fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
            self.0.forward(tokens, train)
        }

        fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
            let logits = self.forward(tokens, train)?;
            let [loss, lse] = Tensor::apply_op(gapless::engine::ops::CrossEntropy::default(), &[&logits, targets])?;
            loss.add(&lse.sqr()?)?.mean_all()
        }
    }

    let options = TrainOptions { step: StepOptions { batch: 4, sequence: 6, ..on_cpu().step }, ..on_cpu() };
    let error = Trainer::new(|vb| Ok(OfLogSumExp(Unusual::new(vb)?)), options).unwrap_err();
    assert!(matches!(error, TrainError::Graph(GraphError::NoOutputGradient { output: 1, .. })), "{error}");
}
