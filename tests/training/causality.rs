//! Models of a user: generation with caches is refused or replaced if an operation combines tokens, and models that are
//! not causal neither generate text nor learn to predict the next token.

use std::ops::ControlFlow;

use gapless::engine::{Args, Array, Gradient, Op, Reference, Spec};
use gapless::nn::{Conv1dConfig, Embedding, Linear, Module, VarBuilder, conv1d, embedding, linear};
use gapless::run::TrainingLoop;
use gapless::{
    Causality, Dataset, DeviceChoice, GenerateOptions, Generation, Model, Result, StepOptions, Tensor, TrainOptions,
    Trainer,
};

const VOCABULARY: usize = 29;
const WIDTH: usize = 8;
const SEQUENCE: usize = 12;

/// The layer between an embedding and a head.
type Layer = fn(&Tensor, &VarBuilder) -> Result<Tensor>;

/// A model whose layer a function records.
struct Layered {
    embed: Embedding,
    layer: Layer,
    head: Linear,
    vb: VarBuilder,
}

impl Model for Layered {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        let x = self.embed.forward(tokens)?;
        self.head.forward(&(self.layer)(&x, &self.vb)?)
    }
}

fn trainer(layer: Layer, generation: Option<Generation>) -> gapless::Result<Trainer, gapless::TrainError> {
    let step = StepOptions { batch: 2, sequence: SEQUENCE, generation, ..StepOptions::default() };
    let mut options = TrainOptions { step, device: DeviceChoice::Cpu, threads: 1, ..TrainOptions::default() };
    options.learning_rate.peak = 0.02;
    let mut trainer = Trainer::new(
        |vb| {
            let embed = embedding(VOCABULARY, WIDTH, vb.pp("embed"))?;
            let head = linear(WIDTH, VOCABULARY, vb.pp("head"))?;
            Ok(Layered { embed, layer, head, vb: vb.pp("layer") })
        },
        options,
    )?;
    let tokens: Vec<u32> = (0..2 * SEQUENCE as u32).map(|i| i * i * 7 % VOCABULARY as u32).collect();
    let targets: Vec<u32> = tokens.iter().map(|id| (id * 5 + 3) % VOCABULARY as u32).collect();
    for _ in 0..3 {
        trainer.step(&tokens, &targets)?;
    }
    Ok(trainer)
}

fn continued(trainer: &mut Trainer) -> gapless::Result<Vec<u32>, gapless::TrainError> {
    let each = |_: &gapless::NextToken<'_>| ControlFlow::Continue(());
    Ok(trainer.generate(&[&[20, 6, 23, 13, 5]], &GenerateOptions::greedy(16), each)?.remove(0))
}

/// Each sees a token and the two before, as in docs/tour.md.
fn convolution(x: &Tensor, vb: &VarBuilder) -> Result<Tensor> {
    let config = Conv1dConfig { padding: 2, ..Conv1dConfig::default() };
    let seen = conv1d(WIDTH, WIDTH, 3, config, vb.pp("conv"))?.forward(&x.transpose(1, 2)?)?;
    x + seen.narrow(2, 0, x.dim(1)?)?.relu()?.transpose(1, 2)?
}

fn attends(x: &Tensor, is_causal: bool) -> Result<Tensor> {
    let heads = x.unsqueeze(1)?;
    let out = match is_causal {
        true => heads.causal_attention(&heads, &heads, 0.5)?,
        false => heads.attention(&heads, &heads, 0.5)?,
    };
    x + out.squeeze(1)?
}

/// Reverses the tokens, or leaves them as they are.
#[derive(Debug)]
struct Own {
    reverses: bool,
}

impl Op for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn infer(&self, inputs: &[Spec]) -> std::result::Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(Self { ..*self }, &[&g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let &[batch, tokens, width] = args.output_dims(0) else { unreachable!("the tests give rank 3") };
        let (y, x) = (args.output::<f32>(0), args.input::<f32>(0));
        for row in 0..batch * tokens {
            let from = if self.reverses { row / tokens * tokens + tokens - 1 - row % tokens } else { row };
            y[row * width..][..width].copy_from_slice(&x[from * width..][..width]);
        }
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}

fn own(x: &Tensor, reverses: bool) -> Result<Tensor> {
    let [y] = Tensor::apply_op(Own { reverses }, &[x])?;
    x + y
}

/// With caches, a model continues a prompt as without, whatever combines its tokens.
#[test]
fn caches_do_not_change_a_text() {
    let layers: [Layer; 6] = [
        convolution,
        |x, _| x + (x.cumsum(1)? * 0.2)?,
        // The positions of the first tokens are not those of a run that continues a text.
        |x, vb| x.broadcast_add(&vb.get((SEQUENCE, WIDTH), "wpe")?.narrow(0, 0, x.dim(1)?)?),
        |x, vb| x.broadcast_add(&vb.get((SEQUENCE, WIDTH), "wpe")?.rows_of_positions(x.dim(1)?)?),
        |x, _| attends(x, true),
        |x, _| own(x, false),
    ];
    for (index, layer) in layers.into_iter().enumerate() {
        let chunks = [Generation::default(), Generation { chunk: 1, ..Generation::default() }];
        let expected = continued(&mut trainer(layer, None).unwrap()).unwrap();
        for generation in chunks {
            assert_eq!(continued(&mut trainer(layer, Some(generation)).unwrap()).unwrap(), expected, "layer {index}");
        }
    }
    // Without caches, the window is a training sequence.
    let window = Some(Generation { window: Some(8), ..Generation::default() });
    let error = trainer(convolution, window).unwrap_err().to_string();
    assert!(error.contains("generation.window: the operation \"widen\"") && error.contains("step.sequence"), "{error}");
}

#[test]
fn models_that_are_not_causal_do_not_generate() {
    let refused = |layer: Layer, culprit: &str| {
        for generation in [None, Some(Generation::default())] {
            let error = continued(&mut trainer(layer, generation).unwrap()).unwrap_err().to_string();
            let of_culprit = format!("through the operation {culprit:?}, tokens depend on later tokens");
            assert!(error.contains(&of_culprit) && error.contains("causal_attention"), "{error}");
        }
    };
    refused(|x, _| attends(x, false), "attention");
    refused(|x, _| x.broadcast_add(&x.mean_keepdim(1)?), "sum");
    // Only a comparison of logits shows what an operation of a user does.
    refused(|x, _| own(x, true), "own");
}

/// A model of another kind may be trained step by step, but not by the loop that predicts next tokens.
#[test]
fn the_training_loop_needs_a_causal_model() {
    let ids = (0..400).map(|i| i % VOCABULARY as u32).collect();
    let dataset = Dataset::from_tokens(ids, gapless::engine::data::Vocabulary::ids(VOCABULARY), 0).unwrap();
    let training = dataset.training(SEQUENCE, 2, 0).unwrap();
    let fit = |layer: Layer| {
        let mut trainer = trainer(layer, None).unwrap();
        let fitted = TrainingLoop::new(&training, 4).run(&mut trainer, |_, _| Ok(ControlFlow::Continue(())));
        (fitted.map(drop).map_err(|error| error.to_string()), trainer.causality().clone())
    };
    assert_eq!(fit(|x, _| attends(x, true)), (Ok(()), Causality::Causal));
    let (fitted, causality) = fit(|x, _| attends(x, false));
    assert!(matches!(causality, Causality::NotCausal(culprit) if culprit.op == "attention"));
    assert!(fitted.unwrap_err().contains("model: through the operation \"attention\""));
}
