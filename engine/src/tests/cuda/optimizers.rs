//! Every optimizer, and what adapters need, on a simulated device: 12 steps with the CPU's losses, from one device to the
//! other and back, in the planned bytes.

use std::sync::Arc;

use gapless_testing::{few, in_turn};

use super::mixture::{Mixture, mixtures};
use super::processor::device;
use super::small::{Small, Style};
use super::step::executable;
use super::trainer::{expect_near, options, step};
use super::{gpu, host};
use crate::checkpoint::Checkpoint;
use crate::compile::Target;
use crate::cuda::Launch;
use crate::nn::{Lora, Quantize, QuantizedFormat, QuantizedRounding, Trainable, VarBuilder};
use crate::optim::{Adafactor, AdamW8bit, GaLore, Lion, Muon, Optimizer};
use crate::runtime::Session;
use crate::{MemoryOptions, Model, ParameterGroup, Precision, Result, StepOptions, TrainOptions, Trainer};

use Precision::{Bf16, F32, PureBf16};

/// Trains 12 steps. After four steps on the device, the CPU resumes and trains four, and then a second device does.
/// Every step's loss is compared with a CPU that trains all of them.
fn train_on_both<M: Model>(what: &str, options: &TrainOptions, model: impl Fn(VarBuilder) -> Result<M> + Copy) {
    let allowed = if options.step.precision == F32 { gpu::allowed(2e-5, 2e-4) } else { 1e-2 } as f32;
    let on_cpu = || Trainer::new(model, options.clone()).unwrap();
    let on_device = || {
        let trainer = Trainer::builder(model, options.clone()).on_device(device()).build().unwrap();
        expect_planned_bytes(what, &trainer);
        trainer
    };
    let (mut reference, mut current) = (on_cpu(), on_device());
    for resumed in [None, Some(on_cpu()), Some(on_device())] {
        if let Some(mut resumed) = resumed {
            let folder = tempfile::tempdir().unwrap();
            let saved = current.save(folder.path(), serde_json::json!({})).unwrap();
            resumed.resume(&Checkpoint::open(&saved).unwrap()).unwrap();
            for tensor in current.session.executable().persistent() {
                let name = &tensor.label.tensor;
                let [before, after] = [&current, &resumed].map(|trainer| bits(trainer, name));
                assert!(before == after, "{what}: {name} has other bits on the other device");
            }
            current = resumed;
        }
        for _ in 0..4 {
            let ([loss, norm], [expected, expected_norm]) =
                (step(&mut current).unwrap(), step(&mut reference).unwrap());
            expect_near(what, loss, expected, allowed);
            expect_near(what, norm, expected_norm, 5.0 * allowed);
        }
    }
    assert_eq!(current.steps(), 12, "{what}");
}

/// Returns the bits of a persistent tensor of floats or codes.
fn bits(trainer: &Trainer, name: &str) -> Vec<u64> {
    let tensor = trainer.session.tensor(name).unwrap().to_dtype(candle_core::DType::F64).unwrap();
    tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

/// Checks that the device has reserved the planned arena, and before it the key, the tickets and no slots.
fn expect_planned_bytes(what: &str, trainer: &Trainer) {
    let memory = trainer.session.device_memory().unwrap().unwrap();
    if gpu::is_asked_for() {
        return assert_eq!(memory.unexplained(), 0, "{what}: {memory}");
    }
    let launches = Session::launches(trainer.session.executable()).unwrap();
    let tickets = launches.iter().map(|launch| match launch {
        Launch::Kernel(kernel) => u64::from(kernel.tickets),
        Launch::Product(_) | Launch::Copy(_) | Launch::CopyEnd(_) => 0,
    });
    let tickets = (4 * tickets.max().unwrap().max(1)).next_multiple_of(256);
    let planned = 256 + tickets + trainer.report().arena_bytes.next_multiple_of(256);
    // The simulated device pads what it reserves by 64 words.
    assert_eq!(memory.arena, planned + 8 * 64, "{what}");
}

/// Returns every update rule, with its share of the learning rate and the parts of the model that it updates in a model
/// with several rules. GaLore runs in f32.
fn rules(precision: Precision) -> Vec<(Arc<dyn Optimizer>, f64, &'static [&'static str])> {
    let galore = GaLore { rank: 3, refresh_steps: 3, ..GaLore::default() };
    let eight_bit = AdamW8bit { smallest: 0, embeddings: true, ..AdamW8bit::default() };
    let adafactor = Adafactor { weight_decay: 0.1, max_norm: 1.0, ..Adafactor::default() };
    let mut all: Vec<(Arc<dyn Optimizer>, f64, &'static [&'static str])> = vec![
        (eight_bit.into(), 1.0, &["embedding", "v", "experts.gate_proj"]),
        // A step of Lion is as large if the mean of moment and gradient is only rounding noise.
        (Lion::default().into(), 0.1, &["q", "norm_1"]),
        (Adafactor::default().into(), 1.0, &["up", "experts.down_proj"]),
        (adafactor.into(), 1.0, &["k", "norm_2"]),
        (Muon::default().into(), 1.0, &["gate", "down", "experts.up_proj", "shared"]),
    ];
    if precision == F32 {
        all.push((galore.into(), 1.0, &["out"]));
    }
    all
}

fn in_precision(precision: Precision, trainable: Trainable) -> TrainOptions {
    let memory = MemoryOptions { planning: 1 << 14, ..MemoryOptions::default() };
    TrainOptions { step: StepOptions { precision, memory, trainable, ..options().step }, ..options() }
}

/// Returns options with every rule in one step: AdamW, and a group for each of the others.
fn with_all_rules(precision: Precision, is_mixture: bool) -> TrainOptions {
    let mut options = in_precision(precision, Trainable::All);
    let is_there = |part: &&&str| is_mixture || !(part.starts_with("experts") || part.starts_with("shared"));
    let group = |(optimizer, learning_rate, parts): (_, _, &[&str])| ParameterGroup {
        names: parts.iter().filter(is_there).map(|part| (*part).to_owned()).collect(),
        optimizer,
        learning_rate,
    };
    options.step.update.groups = rules(precision).into_iter().map(group).collect();
    options
}

/// Trains with every rule in one model, and with each alone.
fn compare(precision: Precision) {
    if !host::is_there() {
        return;
    }
    let model = |vb| Small::new(Style::Llama, vb);
    train_on_both(&format!("all rules in {precision:?}"), &with_all_rules(precision, false), model);
    for (rule, share, _) in few(&rules(precision), 0) {
        let mut options = in_precision(precision, Trainable::All);
        options.learning_rate.peak *= share;
        options.learning_rate.floor *= share;
        options.step.optimizer = rule.clone();
        train_on_both(&format!("{rule:?} in {precision:?}"), &options, model);
    }
}

#[test]
fn optimizers_train_as_on_the_cpu_in_f32() {
    compare(F32);
}

/// Parameters in bf16 have no masters, and the states of most rules are in bf16.
#[test]
fn optimizers_train_as_on_the_cpu_in_pure_bf16() {
    compare(PureBf16);
}

#[test]
fn optimizers_train_as_on_the_cpu_in_bf16() {
    compare(Bf16);
}

/// In a mixture in bf16, the router's bias is f32 and moves towards balance. Tensors of experts are several matrices.
#[test]
fn optimizers_train_mixtures_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    let all = mixtures();
    let (name, is_shared, router) = all.iter().find(|(.., router)| router.bias_rate > 0.0).unwrap();
    let (options, model) = (with_all_rules(Bf16, true), |vb: VarBuilder| Mixture::new(router, *is_shared, vb));
    let planned = executable(&options, Target::Cuda, model);
    let bias = planned.persistent().iter().find(|tensor| tensor.label.tensor.ends_with("e_score_correction_bias"));
    assert_eq!(bias.unwrap().spec.dtype, candle_core::DType::F32);
    Session::launches(&planned).unwrap();
    few(&[name], 0).iter().for_each(|name| train_on_both(name, &options, model));
}

/// Adapters train on frozen weights, plain and quantized, with and without trained norms of rows.
#[test]
fn adapters_train_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    let quantize = |format, double, rounding| Some(Quantize { format, double, rounding, ..Quantize::default() });
    let (int8, nf4) = (QuantizedFormat::Int8, QuantizedFormat::Nf4);
    let kinds = [
        (false, None),
        (true, None),
        (false, quantize(int8, false, None)),
        (false, quantize(nf4, true, Some(QuantizedRounding::Bf16))),
        (true, quantize(nf4, true, None)),
        (true, quantize(nf4, false, Some(QuantizedRounding::F16))),
    ];
    for (turn, (dora, quantize)) in kinds.into_iter().enumerate() {
        let targets = vec!["q".into(), "down".into()];
        let lora = Lora { rank: 2, dropout: 0.1, targets, dora, quantize, ..Lora::default() };
        for &precision in in_turn(&[Bf16, F32, PureBf16], turn) {
            let options = in_precision(precision, Trainable::Lora(lora.clone()));
            train_on_both(&format!("{lora:?} in {precision:?}"), &options, |vb| Small::new(Style::Llama, vb));
        }
    }
}
