//! The terms of a step's loss are reported separately.

use gapless::models::{Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::nn::{Embedding, Experts, Linear, Module, Router, RouterConfig, VarBuilder, embedding, linear_no_bias};
use gapless::{LossParts, LossTerms, Mesh, Model, StepOptions, Tensor, TrainOptions, Trainer, communicator};

use crate::common::{Kind, TinyRun, VOCABULARY, moe};

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 2e-5 * b.abs().max(1.0)
}

/// A mixture with both auxiliary losses of routers. Its head has label smoothing and a z-loss.
fn mixture() -> MoeConfig {
    let mut config = moe(MoeStyle::Mixtral);
    (config.router.balance_loss, config.router.z_loss) = (0.3, 0.02);
    config
}

fn options(loss: LossTerms) -> TrainOptions {
    TrainOptions {
        step: StepOptions { loss, ..TinyRun { kind: Kind::Llama, ..TinyRun::default() }.options.step },
        ..TinyRun { kind: Kind::Llama, ..TinyRun::default() }.options
    }
}

const SMOOTH: LossTerms = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };

/// Returns the losses of two steps, and the terms of each loss.
fn parts(options: &TrainOptions, config: &MoeConfig) -> Vec<(f32, Option<LossParts>)> {
    let run = TinyRun { options: options.clone(), ..TinyRun::default() };
    let steps = |world| {
        let mut trainer = Trainer::builder(|vb| Moe::new(config, vb), options.clone()).distributed(world).build()?;
        Ok([0, 1].map(|_| run.step(&mut trainer)).map(|report| (report.loss, report.loss_parts)))
    };
    let ranks = communicator::on_threads(options.step.mesh.ranks().unwrap(), steps).unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "all ranks report the same");
    ranks[0].to_vec()
}

#[test]
fn the_parts_of_a_loss_add_up_on_any_ranks_and_micro_batches() {
    let plain = options(SMOOTH);
    let expected = parts(&plain, &mixture());
    for (loss, parts) in &expected {
        let LossParts { likelihood, balance, router_z, regularization } = parts.unwrap();
        let all = [balance, router_z, regularization].map(Option::unwrap);
        assert!(all.iter().all(|part| *part > 0.0), "{parts:?}");
        assert!(close(likelihood + all.iter().sum::<f32>(), *loss), "{parts:?} of {loss}");
    }
    // The first step reports the likelihood of the initial weights. An evaluation of these weights reports the same
    // value, because the evaluation loss is the likelihood alone.
    let mut trainer = Trainer::new(|vb| Moe::new(&mixture(), vb), plain.clone()).unwrap();
    let (tokens, targets) = TinyRun { options: plain.clone(), ..TinyRun::default() }.batch(0);
    assert!(close(trainer.evaluate(&tokens, &targets).unwrap(), expected[0].1.unwrap().likelihood));

    let meshes = [
        Mesh::default(),
        Mesh::pipeline(2),
        Mesh { data: 2, ..Mesh::default() },
        Mesh { expert: 2, ..Mesh::default() },
    ];
    for mesh in meshes {
        let seen = parts(
            &TrainOptions { step: StepOptions { mesh, micro_batches: 2, ..plain.step.clone() }, ..plain.clone() },
            &mixture(),
        );
        for ((_, seen), (_, expected)) in seen.iter().zip(&expected) {
            let all = |parts: LossParts| {
                let LossParts { likelihood, balance, router_z, regularization } = parts;
                [Some(likelihood), balance, router_z, regularization].map(Option::unwrap)
            };
            let pairs = all(seen.unwrap()).into_iter().zip(all(expected.unwrap()));
            assert!(pairs.clone().all(|(a, b)| close(a, b)), "{mesh:?}: {seen:?} is not {expected:?}");
        }
    }
}

#[test]
fn a_part_that_a_loss_has_not_is_not_reported() {
    let parts_of = |loss, balance_loss, z_loss| {
        let mut config = mixture();
        (config.router.balance_loss, config.router.z_loss) = (balance_loss, z_loss);
        parts(&options(loss), &config)[0]
            .1
            .map(|parts| [parts.balance.is_some(), parts.router_z.is_some(), parts.regularization.is_some()])
    };
    assert_eq!(parts_of(LossTerms::NONE, 0.0, 0.0), None);
    assert_eq!(parts_of(LossTerms::NONE, 0.1, 0.0), Some([true, false, false]));
    assert_eq!(parts_of(LossTerms::NONE, 0.0, 0.1), Some([false, true, false]));
    assert_eq!(parts_of(SMOOTH, 0.0, 0.0), Some([false, false, true]));
}

/// A model with a head that computes whole logits.
struct Whole(Embedding, Linear);

impl Model for Whole {
    fn forward(&self, tokens: &Tensor, _: bool) -> gapless::Result<Tensor> {
        self.1.forward(&self.0.forward(tokens)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> gapless::Result<Tensor> {
        self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()
    }
}

#[test]
fn heads_report_the_likelihood_that_an_evaluation_measures() {
    let size = VOCABULARY as usize;
    let llama = LlamaConfig {
        vocabulary: size,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        width: 16,
        hidden: 24,
        ..LlamaConfig::default()
    };
    let whole =
        |vb: VarBuilder| Ok(Whole(embedding(size, 8, vb.pp("embed"))?, linear_no_bias(8, size, vb.pp("head"))?));
    for documents in [false, true] {
        let options = TrainOptions { step: StepOptions { documents, ..options(SMOOTH).step }, ..options(SMOOTH) };
        let run = TinyRun { options: options.clone(), ..TinyRun::default() };
        let trainers =
            [Trainer::new(whole, options.clone()), Trainer::new(|vb| Llama::new(&llama, vb), options.clone())];
        for trainer in trainers {
            let mut trainer = trainer.unwrap();
            let (tokens, targets) = run.batch(0);
            let evaluated = trainer.evaluate(&tokens, &targets).unwrap();
            let report = trainer.step(&tokens, &targets).unwrap();
            let parts = report.loss_parts.unwrap();
            assert!(close(parts.likelihood, evaluated), "{parts:?}, evaluated as {evaluated}");
            assert!(report.loss > parts.likelihood, "{report:?}");
        }
    }
}

/// A model that does not add its router's auxiliary losses to the loss.
struct Unbalanced(Embedding, Router, Experts, Linear);

impl Model for Unbalanced {
    fn forward(&self, tokens: &Tensor, train: bool) -> gapless::Result<Tensor> {
        let x = self.0.forward(tokens)?;
        self.3.forward(&self.2.forward(&x, &self.1.forward(&x, train)?)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> gapless::Result<Tensor> {
        self.forward(tokens, train)?.cross_entropy(targets)?.mean_all()
    }
}

#[test]
fn a_loss_that_is_not_added_is_not_reported() {
    let size = VOCABULARY as usize;
    let build = |vb: VarBuilder| {
        let router = Router::new(&RouterConfig::default(), 8, vb.pp("router"))?;
        let experts = Experts::new(8, 8, 8, vb.pp("experts"))?;
        let head = linear_no_bias(8, size, vb.pp("head"))?;
        Ok(Unbalanced(embedding(size, 8, vb.pp("embed"))?, router, experts, head))
    };
    let run = TinyRun { options: options(LossTerms::NONE), ..TinyRun::default() };
    let report = run.step(&mut Trainer::new(build, run.options.clone()).unwrap());
    assert_eq!(report.loss_parts, None);
}
