//! Mistakes of the user lead to clear errors, and no state is lost.

use gapless::engine::compile::Error as CompileError;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::{Mesh, StepOptions, TrainError, TrainOptions, Trainer, communicator};

use crate::common::{TinyRun, on_cpu, parameters};

fn small() -> GptConfig {
    GptConfig { vocabulary: 50, sequence: 16, layers: 1, heads: 2, width: 16, dropout: 0.0, ..GptConfig::default() }
}

fn options() -> TrainOptions {
    TrainOptions { step: StepOptions { batch: 2, sequence: 16, ..on_cpu().step }, ..on_cpu() }
}

fn refused(result: Result<Trainer, gapless::TrainError>, words: &[&str]) {
    let message = result.expect_err("must be refused").to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

#[test]
fn extents_that_do_not_fit_together() {
    let gpt = |config: GptConfig, options| Trainer::new(move |vb| Gpt::new(&config, vb), options);
    refused(gpt(GptConfig { heads: 3, ..small() }, options()), &["3 heads", "width of 16"]);
    refused(gpt(GptConfig { vocabulary: 0, ..small() }, options()), &["vocabulary"]);
    refused(gpt(GptConfig { dropout: 1.5, ..small() }, options()), &["dropout", "1.5"]);
    refused(
        gpt(small(), TrainOptions { step: StepOptions { sequence: 17, ..options().step }, ..options() }),
        &["17 tokens", "positions for 16", "GptConfig::sequence"],
    );
    refused(
        gpt(small(), TrainOptions { step: StepOptions { micro_batches: 3, ..options().step }, ..options() }),
        &["micro_batches", "multiple of"],
    );
    refused(
        gpt(small(), TrainOptions { step: StepOptions { batch: 0, ..options().step }, ..options() }),
        &["at least 1"],
    );
    let llama =
        LlamaConfig { vocabulary: 50, layers: 1, heads: 4, kv_heads: 3, width: 16, hidden: 8, ..Default::default() };
    refused(Trainer::new(|vb| Llama::new(&llama, vb), options()), &["3 key-value heads", "4 heads"]);
}

#[test]
fn a_gradient_that_is_not_kept_names_what_keeps_it() {
    let trainer = Trainer::new(|vb| Gpt::new(&small(), vb), options()).unwrap();
    let message = trainer.gradient("wte.weight").unwrap_err().to_string();
    assert!(message.contains("StepOptions::keep_gradients"), "{message}");
}

#[test]
fn a_tensor_of_another_rank_says_which_has_it() {
    let mesh = Mesh { pipeline: 2, ..Mesh::default() };
    let options = TrainOptions { step: StepOptions { mesh, micro_batches: 2, ..options().step }, ..options() };
    let config = GptConfig { layers: 2, ..small() };
    let messages = communicator::on_threads(2, |world| {
        let trainer = Trainer::builder(|vb| Gpt::new(&config, vb), options.clone()).distributed(world).build()?;
        let told = ["h.0.ln_1.weight", "ln_f.weight", "none"]
            .map(|name| trainer.tensor(name).err().map(|error| error.to_string()));
        Ok(told)
    });
    let messages = messages.unwrap();
    let says = |rank: usize, tensor: usize, words: &str| {
        let message: &Option<String> = &messages[rank][tensor];
        assert!(message.as_deref().unwrap_or_default().contains(words), "{message:?}");
    };
    says(0, 1, "\"ln_f.weight\" is on rank 1");
    says(1, 0, "\"h.0.ln_1.weight\" is on rank 0");
    says(0, 2, "no tensor named \"none\"");
    assert!(messages[0][0].is_none() && messages[1][1].is_none(), "{messages:?}");
}

#[test]
fn an_arena_larger_than_the_machine_is_refused_before_it_is_touched() {
    let config = GptConfig {
        vocabulary: 50_000,
        sequence: 2048,
        layers: 96,
        heads: 96,
        width: 12_288,
        dropout: 0.0,
        ..GptConfig::default()
    };
    let options = TrainOptions { step: StepOptions { batch: 64, sequence: 2048, ..on_cpu().step }, ..on_cpu() };
    if gapless::engine::metrics::available_memory_bytes().is_none() {
        return gapless_testing::not_checked("available memory is not known on this system");
    }
    refused(Trainer::new(|vb| Gpt::new(&config, vb), options), &["the arena needs", "largest", "micro-batches"]);
}

#[test]
fn batches_that_do_not_fit() {
    let run = TinyRun::default();
    let mut trainer = run.trainer();
    let (tokens, targets) = run.batch(0);
    assert!(matches!(trainer.step(&tokens[1..], &targets), Err(TrainError::ElementCount { .. })));
    let mut strange = tokens.clone();
    strange[3] = 50;
    assert!(matches!(trainer.step(&strange, &targets), Err(TrainError::TokenOutOfRange { id: 50, vocabulary: 50 })));
    assert!(matches!(trainer.step(&tokens, &strange), Err(TrainError::TokenOutOfRange { .. })));
    assert!(matches!(
        trainer.tensor("h.0.attn.c_atn.weight"),
        Err(TrainError::Compile(CompileError::UnknownTensor { .. }))
    ));
    assert_eq!(trainer.steps(), 0);
}

#[test]
fn a_non_finite_loss_stops_names_its_source_and_leaves_the_model_alone() {
    let run = TinyRun::default();
    let mut trainer = run.trainer();
    run.step(&mut trainer);
    let name = "h.1.mlp.c_fc.weight";
    let good = trainer.tensor(name).unwrap().copy().unwrap();
    trainer.set_tensor(name, &good.affine(f64::INFINITY, 0.0).unwrap()).unwrap();
    let before = parameters(&trainer);
    let (tokens, targets) = run.batch(1);
    let error = trainer.step(&tokens, &targets).unwrap_err();
    let TrainError::NonFinite { step: 2, culprit, .. } = &error else { panic!("{error}") };
    assert!(culprit.contains("linear in h.1.mlp.c_fc"), "{culprit}");
    assert_eq!(parameters(&trainer), before);
    assert_eq!(trainer.steps(), 1);

    trainer.set_tensor(name, &good).unwrap();
    let mut straight = run.trainer();
    run.step(&mut straight);
    let (a, b) = (run.step(&mut trainer), run.step(&mut straight));
    assert_eq!(a, b, "after mending, the run goes on as if nothing had happened");
}
