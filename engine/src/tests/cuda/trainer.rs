//! A trainer on a simulated device, through the public interface.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use candle_core::{DType, Device as CandleDevice};

use super::processor::{Processor, device};
use super::small::{BATCH, SEQUENCE, Small, Style, VOCABULARY, WIDTH};
use super::{gpu, host};
use crate::checkpoint::Checkpoint;
use crate::compile;
use crate::data::IGNORED;
use crate::learning_rate::{LearningRate, Shape};
use crate::nn::{PairLoss, Preference};
use crate::recompute::Recompute;
use crate::{
    Batch, DeviceChoice, GenerateOptions, LossTerms, MemoryOptions, Precision, Role, SkipThresholds, StepOptions,
    TrainError, TrainOptions, Trainer, UpdateOptions,
};

pub fn options() -> TrainOptions {
    let learning_rate = LearningRate { peak: 1e-2, floor: 1e-2, warmup_steps: 0, steps: 0, shape: Shape::Constant };
    let device = DeviceChoice::Cpu;
    TrainOptions {
        step: StepOptions { batch: BATCH, sequence: SEQUENCE, ..StepOptions::default() },
        threads: 1,
        seed: 3,
        learning_rate,
        device,
        ..TrainOptions::default()
    }
}

fn on_cpu(style: Style, options: &TrainOptions) -> Trainer {
    Trainer::new(|vb| Small::new(style, vb), options.clone()).unwrap()
}

fn on_device(style: Style, options: &TrainOptions) -> Trainer {
    Trainer::builder(|vb| Small::new(style, vb), options.clone()).on_device(device()).build().unwrap()
}

/// Tokens and targets of a step.
pub fn batch(step: u64) -> [Vec<u32>; 2] {
    batch_over(SEQUENCE, step)
}

/// Tokens and targets of a step with sequences of `tokens` tokens.
pub fn batch_over(tokens: usize, step: u64) -> [Vec<u32>; 2] {
    [0, 5].map(|shift| (0..BATCH * tokens).map(|i| ((i * 7 + shift + step as usize * 3) % VOCABULARY) as u32).collect())
}

pub fn step(trainer: &mut Trainer) -> Result<[f32; 2], TrainError> {
    let [tokens, targets] = batch_over(trainer.options().step.sequence, trainer.steps());
    trainer.step(&tokens, &targets).map(|report| [report.loss, report.gradient_norm])
}

pub fn numbers(tensor: &candle_core::Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

pub fn expect_near(what: &str, got: f32, expected: f32, part: f32) {
    assert!((got - expected).abs() <= part * expected.abs(), "{what}: {got}, not {expected}");
}

/// Steps, evaluation, generated text and gradients equal those on the CPU, up to rounding, because sums have another
/// order.
#[test]
fn trains_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    let allowed = gpu::allowed(2e-5, 2e-4) as f32;
    for style in [Style::Gpt, Style::Llama] {
        let options = TrainOptions {
            step: StepOptions { keep_gradients: true, micro_batches: 2, ..options().step },
            ..options()
        };
        let (mut cpu, mut gpu) = (on_cpu(style, &options), on_device(style, &options));
        assert_eq!(cpu.report().parameters, gpu.report().parameters);
        assert!(gpu.device().is_gpu && !cpu.device().is_gpu);
        assert!(gpu.device_memory().unwrap().unwrap().arena >= gpu.report().arena_bytes);
        for _ in 0..3 {
            let (on_cpu, on_gpu) = (step(&mut cpu).unwrap(), step(&mut gpu).unwrap());
            on_cpu.iter().zip(on_gpu).for_each(|(&cpu, gpu)| expect_near("loss or norm", gpu, cpu, allowed));
        }
        for name in cpu.parameter_names() {
            let [on_cpu, on_gpu] = [&cpu, &gpu].map(|trainer| numbers(&trainer.gradient(name).unwrap()));
            let norm = distance(&on_cpu, &vec![0.0; on_cpu.len()]);
            assert!(distance(&on_cpu, &on_gpu) <= 1e-3 * norm + 1e-5, "gradient of {name}");
        }
        let [tokens, targets] = batch(9);
        let part = options.step.evaluation_batch() * SEQUENCE;
        let mut losses =
            [&mut cpu, &mut gpu].map(|trainer| trainer.evaluate(&tokens[..part], &targets[..part]).unwrap());
        expect_near("validation", losses[1], losses[0], allowed);
        losses.reverse();
        let generate = |trainer: &mut Trainer| {
            trainer.generate(&[&tokens[..3]], &GenerateOptions::greedy(5), |_| ControlFlow::Continue(())).unwrap()
        };
        let texts = [&mut cpu, &mut gpu].map(generate);
        assert_eq!(texts[0], texts[1]);
    }
}

/// TF32 changes the bits of steps in f32 by its rounding, and none of steps in bf16.
#[test]
fn steps_in_tf32() {
    if !host::is_there() {
        return;
    }
    for (precision, is_affected) in [(Precision::F32, true), (Precision::PureBf16, false)] {
        let step_options = StepOptions { precision, ..options().step };
        let plain = TrainOptions { step: step_options, device: DeviceChoice::Auto, ..options() };
        let mut both = [false, true].map(|tf32| on_device(Style::Gpt, &TrainOptions { tf32, ..plain.clone() }));
        for _ in 0..3 {
            let [exact, rounded] = both.each_mut().map(|trainer| step(trainer).unwrap());
            assert_eq!(exact != rounded, is_affected, "{precision:?}");
            // An operand has an error of at most 2⁻¹¹; errors of several products have random signs.
            exact.iter().zip(rounded).for_each(|(&exact, got)| expect_near("loss or norm", got, exact, 1e-2));
        }
    }
    let refused = TrainOptions { tf32: true, ..options() }.check().unwrap_err().to_string();
    assert!(refused.contains("tf32") && refused.contains("leave it out"), "{refused}");
}

/// In bf16 the losses equal those of f32 within the precision of bf16, with one and several micro-batches. Parameters
/// are their f32 masters, rounded to bf16. Masters start as the f32 parameters.
#[test]
fn bf16_follows_f32() {
    if !host::is_there() {
        return;
    }
    for (style, micro_batches) in [(Style::Gpt, 1), (Style::Gpt, 2), (Style::Llama, 1), (Style::Llama, 4)] {
        let in_f32 = TrainOptions {
            step: StepOptions {
                micro_batches,
                memory: MemoryOptions { recompute: Recompute::Ops(vec!["linear".into()]), ..options().step.memory },
                ..options().step
            },
            ..options()
        };
        let in_bf16 =
            TrainOptions { step: StepOptions { precision: Precision::Bf16, ..in_f32.step.clone() }, ..in_f32.clone() };
        let (mut cpu, mut gpu) = (on_cpu(style, &in_f32), on_device(style, &in_bf16));
        for name in cpu.parameter_names() {
            assert_eq!(numbers(&cpu.tensor(name).unwrap()), numbers(&gpu.tensor(&format!("master/{name}")).unwrap()));
        }
        let mut last = f32::INFINITY;
        for _ in 0..12 {
            let (on_cpu, on_gpu) = (step(&mut cpu).unwrap(), step(&mut gpu).unwrap());
            expect_near("loss", on_gpu[0], on_cpu[0], 1e-2);
            expect_near("norm", on_gpu[1], on_cpu[1], 5e-2);
            last = on_gpu[0];
        }
        assert!(last < 2.9, "it learns: ln 19 is 2.94, and the loss {last}");
        for name in gpu.parameter_names() {
            let parameter = gpu.tensor(name).unwrap();
            let master = gpu.tensor(&format!("master/{name}")).unwrap();
            assert_eq!((parameter.dtype(), master.dtype()), (DType::BF16, DType::F32), "{name}");
            assert_eq!(numbers(&parameter), numbers(&master.to_dtype(DType::BF16).unwrap()), "{name}");
        }
    }
}

/// Compares CPU and GPU in bf16. Both run the same graph and store the same types. But a GPU rounds fewer values
/// between fused elementwise operations, and other values in attention and the head.
#[test]
fn in_bf16_trains_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    for (style, micro_batches) in [(Style::Gpt, 1), (Style::Llama, 2)] {
        let options = TrainOptions {
            step: StepOptions { keep_gradients: true, precision: Precision::Bf16, micro_batches, ..options().step },
            ..options()
        };
        let (mut cpu, mut gpu) = (on_cpu(style, &options), on_device(style, &options));
        for name in cpu.parameter_names() {
            assert_eq!(numbers(&cpu.tensor(name).unwrap()), numbers(&gpu.tensor(name).unwrap()), "{name} at first");
        }
        let (on_cpu, on_gpu) = (step(&mut cpu).unwrap(), step(&mut gpu).unwrap());
        expect_near("loss", on_gpu[0], on_cpu[0], 4e-3);
        expect_near("norm", on_gpu[1], on_cpu[1], 1e-2);
        for name in cpu.parameter_names() {
            let [on_cpu, on_gpu] = [&cpu, &gpu].map(|trainer| numbers(&trainer.gradient(name).unwrap()));
            let norm = distance(&on_cpu, &vec![0.0; on_cpu.len()]);
            // Each of the two gradients results from about ten consecutive roundings. Each rounding has an error of
            // at most 2⁻⁸ = 4e-3, with random sign.
            let off = distance(&on_cpu, &on_gpu);
            assert!(off <= 2e-2 * norm + 1e-5, "gradient of {name}: {off} of {norm}, {style:?}");
        }
    }
}

/// Steps on pairs of answers, and on answers with labels, have the losses, norms and rewards of the CPU.
#[test]
fn preferences_train_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    let allowed = gpu::allowed(2e-5, 2e-4) as f32;
    for loss in [PairLoss::Dpo, PairLoss::Ipo, PairLoss::Orpo, PairLoss::Kto] {
        let preference = Some(Preference { loss, ..Preference::default() });
        let step = StepOptions { documents: true, preference, micro_batches: 2, ..options().step };
        let options = TrainOptions { step, ..options() };
        let (mut cpu, mut gpu) = (on_cpu(Style::Llama, &options), on_device(Style::Llama, &options));
        for step in 0..3 {
            let [tokens, mut targets] = batch(step);
            // The first two tokens of each sequence are the prompt.
            targets.iter_mut().step_by(SEQUENCE).for_each(|target| *target = IGNORED);
            let starts = vec![0; tokens.len()];
            let batch = Batch { tokens: &tokens, targets: &targets, starts: &starts };
            let reference: Vec<f32> = match loss {
                PairLoss::Orpo => Vec::new(),
                _ => (0..BATCH).map(|sequence| -14.0 - sequence as f32 / 3.0).collect(),
            };
            let labels: &[f32] = if loss == PairLoss::Kto { &[1.0, 0.0, 0.0, 0.0] } else { &[] };
            let [of_cpu, of_gpu] =
                [&mut cpu, &mut gpu].map(|trainer| trainer.step_answers(&batch, &reference, labels).unwrap());
            expect_near("loss", of_gpu.loss, of_cpu.loss, allowed);
            expect_near("norm", of_gpu.gradient_norm, of_cpu.gradient_norm, 10.0 * allowed);
            let [of_cpu, of_gpu] = [of_cpu, of_gpu].map(|report| report.rewards.unwrap());
            let size = of_cpu.chosen.abs().max(of_cpu.rejected.abs());
            assert!((of_gpu.margin - of_cpu.margin).abs() <= 10.0 * allowed * size, "{of_gpu:?}, not {of_cpu:?}");
            assert_eq!(of_gpu.accuracy, of_cpu.accuracy, "{loss:?}");
        }
    }
}

/// Gradients of several micro-batches are summed in f32, so a summand of a thousandth of the sum is not lost.
#[test]
fn sums_over_micro_batches_are_f32() {
    let (bf16, pure) = (Precision::Bf16, Precision::PureBf16);
    for (micro_batches, precision, expected) in [(2, bf16, 4), (1, bf16, 2), (2, pure, 2)] {
        let options = TrainOptions { step: StepOptions { micro_batches, precision, ..options().step }, ..options() };
        let plan = compile::step::plan(|vb| Small::new(Style::Gpt, vb), &options.step, 0, options.target()).unwrap();
        let elements = |role| -> u64 {
            let specs =
                plan.specs(role).filter(|(name, _)| !name.starts_with("master/") && !name.contains("exp_avg_sq"));
            specs.map(|(_, spec)| spec.elements() as u64).sum()
        };
        let gradients =
            plan.labels().iter().zip(plan.problem().buffers()).filter(|(label, _)| label.role == Role::Gradient);
        let largest = gradients.map(|(_, buffer)| buffer.bytes).max().unwrap();
        // In GPT, the embedding has the largest gradients: one sum for its lookups, and one for the head.
        let expected = (expected * (VOCABULARY * 8) as u64).next_multiple_of(64);
        assert_eq!(largest, expected, "{micro_batches} micro-batches, {precision:?}");
        assert!(elements(Role::OptimizerState) >= elements(Role::Parameter));
    }
}

/// If a kernel can add a gradient to an f32 sum over micro-batches directly, the gradient is not rounded to bf16 first.
/// So the step converts only one gradient from bf16, once per micro-batch: that of the position embeddings. They are
/// broadcast over the batch, and their gradient is computed in bf16.
#[test]
fn sums_are_not_rounded_first() {
    for style in [Style::Gpt, Style::Llama] {
        let options = TrainOptions {
            step: StepOptions { micro_batches: 2, precision: Precision::Bf16, ..options().step },
            ..options()
        };
        let plan = compile::step::plan(|vb| Small::new(style, vb), &options.step, 0, options.target()).unwrap();
        let casts = plan.programs()[0].instructions.iter().filter(|instruction| instruction.kind.name() == "to_dtype");
        let of = casts.map(|cast| (cast.inputs[0].dtype, cast.inputs[0].span)).collect::<Vec<_>>();
        assert_eq!(of, [(DType::BF16, SEQUENCE * WIDTH); 2], "{style:?}");
    }
}

/// A profiled step is a normal step: it runs every instruction once and computes the same bits.
#[test]
fn a_profile_is_a_step() {
    if !host::is_there() {
        return;
    }
    let (mut stepped, mut timed) = (on_device(Style::Gpt, &options()), on_device(Style::Gpt, &options()));
    step(&mut stepped).unwrap();
    let [tokens, targets] = batch(0);
    let times = timed.profile(&tokens, &targets).unwrap();
    assert!(times.iter().any(|t| t.operation == "linear" && t.layer == "q" && t.flops > 0 && t.bytes > 0));
    // Updates that are launched together are one entry, with the arithmetic of all of them.
    let on_gpu = TrainOptions { device: DeviceChoice::Cuda(0), ..options() };
    let plan = compile::step::plan(|vb| Small::new(Style::Gpt, vb), &on_gpu.step, 0, on_gpu.target()).unwrap();
    let updates =
        plan.programs()[0].instructions.iter().filter(|instruction| instruction.kind.name() == "adamw").count();
    assert!(times.iter().filter(|t| t.operation == "adamw").count() < updates);
    assert_eq!(times.iter().map(|t| t.flops).sum::<u64>(), plan.flops()[0]);
    assert_eq!(step(&mut stepped).unwrap(), step(&mut timed).unwrap());
    let error = on_cpu(Style::Gpt, &options()).profile(&tokens, &targets).unwrap_err();
    assert!(error.to_string().starts_with("profile: "), "{error}");
}

/// A trainer can be saved on one device and resumed on another. A parameter that is set keeps its value.
#[test]
fn a_trainer_is_saved_resumed_and_written_to() {
    if !host::is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { step: StepOptions { precision: Precision::Bf16, ..options().step }, ..options() };
    let mut first = on_device(Style::Llama, &options);
    step(&mut first).unwrap();
    let saved = first.save(folder.path(), serde_json::json!({})).unwrap();
    let expected = step(&mut first).unwrap();
    let mut second = on_device(Style::Llama, &TrainOptions { seed: 77, ..options });
    second.resume(&Checkpoint::open(&saved).unwrap()).unwrap();
    assert_eq!(step(&mut second).unwrap(), expected);

    let zeros = second.tensor("q.weight").unwrap().zeros_like().unwrap();
    let ones = (zeros + 1.0).unwrap().to_device(&CandleDevice::Cpu).unwrap();
    second.set_tensor("q.weight", &ones).unwrap();
    step(&mut second).unwrap();
    // A step moves a parameter by the learning rate, not back to its old value.
    assert!(numbers(&second.tensor("q.weight").unwrap()).iter().all(|x| (x - 1.0).abs() < 0.1));
}

/// Covers all loss terms, clipping of gradient values, and weight averages. A step whose loss or gradient norm
/// exceeds its limit is skipped and changes nothing.
#[test]
fn a_guarded_step_is_left_out() {
    if !host::is_there() {
        return;
    }
    let loss = LossTerms { label_smoothing: 0.1, z_loss: 0.01 };
    let update = UpdateOptions { max_value: Some(1e-2), guarded: true, average: Some(0.9), ..UpdateOptions::default() };
    let options = TrainOptions { step: StepOptions { loss, update, ..options().step }, ..options() };
    let (mut cpu, mut device) = (on_cpu(Style::Gpt, &options), on_device(Style::Gpt, &options));
    let [[loss, norm], [of_cpu, norm_of_cpu]] = [step(&mut device).unwrap(), step(&mut cpu).unwrap()];
    expect_near("the loss", loss, of_cpu, 1e-5);
    expect_near("the norm", norm, norm_of_cpu, 1e-4);
    let all = |trainer: &Trainer| -> Vec<Vec<f64>> {
        let names = trainer.parameter_names().flat_map(|name| [name.to_owned(), format!("average/{name}")]);
        names.map(|name| numbers(&trainer.tensor(&name).unwrap())).collect()
    };
    let before = all(&device);
    let lower = [
        SkipThresholds { loss: 0.5 * loss, ..SkipThresholds::default() },
        SkipThresholds { gradient_norm: 0.1 * norm, ..SkipThresholds::default() },
    ];
    for limits in lower {
        device.set_limits(limits);
        let [tokens, targets] = batch(device.steps());
        assert!(device.step(&tokens, &targets).unwrap().skipped);
        assert_eq!(all(&device), before);
    }
    device.set_limits(SkipThresholds::default());
    step(&mut device).unwrap();
    assert_ne!(all(&device), before);
}

/// Packed documents with ignored targets: loss and norm equal those on the CPU. Changing the tokens of one document
/// does not affect the other documents.
#[test]
fn packed_documents_do_not_see_each_other() {
    if !host::is_there() {
        return;
    }
    for precision in [Precision::F32, Precision::Bf16] {
        let options = TrainOptions { step: StepOptions { documents: true, precision, ..options().step }, ..options() };
        let (mut cpu, mut device) = (on_cpu(Style::Llama, &options), on_device(Style::Llama, &options));
        let [tokens, mut targets] = batch(0);
        let sequence = options.step.sequence as u32;
        let starts: Vec<u32> = (0..tokens.len() as u32).map(|i| i % sequence / 3 * 3).collect();
        // The last token of a document has no target. All targets of the last document are ignored.
        let last = targets.len() - 3;
        for (i, target) in targets.iter_mut().enumerate() {
            if i % sequence as usize % 3 == 2 || i >= last {
                *target = IGNORED;
            }
        }
        let step = |trainer: &mut Trainer, tokens: &[u32]| {
            let report = trainer.step_batch(&Batch { tokens, targets: &targets, starts: &starts }).unwrap();
            [report.loss, report.gradient_norm]
        };
        let mut other = tokens.clone();
        other[last..].iter_mut().for_each(|token| *token = (*token + 1) % 5);
        let [of_cpu, of_device] = [&mut cpu, &mut device].map(|trainer| step(trainer, &tokens));
        let [of_loss, of_norm] = if precision == Precision::F32 { [1e-5, 1e-4] } else { [1e-2, 3e-2] };
        expect_near("the loss", of_device[0], of_cpu[0], of_loss);
        expect_near("the norm", of_device[1], of_cpu[1], of_norm);
        let mut again = on_device(Style::Llama, &options);
        assert_eq!(step(&mut again, &other)[0], of_device[0]);
    }
}

/// If a step is not finite, the error names the operation that caused it, and the model is unchanged.
#[test]
fn a_broken_step_is_named() {
    if !host::is_there() {
        return;
    }
    let mut trainer = on_device(Style::Llama, &options());
    let before = trainer.tensor("up.weight").unwrap();
    let infinite = (trainer.tensor("out.weight").unwrap().ones_like().unwrap() * f64::INFINITY).unwrap();
    trainer.set_tensor("out.weight", &infinite).unwrap();
    let error = step(&mut trainer).unwrap_err();
    assert!(matches!(&error, TrainError::NonFinite { culprit, .. } if culprit.starts_with("fused in out")), "{error}");
    assert_eq!(numbers(&before), numbers(&trainer.tensor("up.weight").unwrap()));
}

/// If there is no GPU, an explicit choice of a GPU is an error with a remedy. With `Auto`, the trainer says why it
/// runs on the CPU.
#[test]
fn without_a_gpu_the_cpu_says_why() {
    // SAFETY: loading the driver's library has no preconditions.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return gapless_testing::not_checked("this machine has a driver");
    }
    let build = |vb| Small::new(Style::Gpt, vb);
    let trainer = Trainer::new(build, TrainOptions { device: DeviceChoice::Auto, ..options() }).unwrap();
    let said = trainer.device().to_string();
    assert!(said.starts_with("runs on the CPU, 1 thread (") && said.contains("NVIDIA driver"), "{said}");
    let error = Trainer::new(build, TrainOptions { device: DeviceChoice::Cuda(0), ..options() }).unwrap_err();
    assert!(error.to_string().contains("NVIDIA driver; install it"), "{error}");
    // The same in bf16.
    let options = TrainOptions {
        step: StepOptions { precision: Precision::Bf16, ..options().step },
        device: DeviceChoice::Auto,
        ..options()
    };
    assert!(Trainer::new(build, options).unwrap().device().to_string().contains("NVIDIA driver"));
}

/// The contents of dead memory change no bit of a step on a device.
#[test]
fn dead_memory_changes_no_bit() {
    if !host::is_there() {
        return;
    }
    for style in [Style::Gpt, Style::Llama] {
        let steps = |poison| {
            let options = TrainOptions { poison, ..options() };
            let filled = Arc::new(AtomicUsize::new(0));
            let device = gpu::another().unwrap_or_else(|| Box::new(Processor::counting(filled.clone())));
            let mut trainer = Trainer::builder(|vb| Small::new(style, vb), options).on_device(device).build().unwrap();
            let steps: Vec<[f32; 2]> = (0..3).map(|_| step(&mut trainer).unwrap()).collect();
            assert!(gpu::is_asked_for() || (filled.load(Relaxed) > 0) == poison, "{style:?}");
            let names: Vec<String> = trainer.parameter_names().map(String::from).collect();
            (steps, names.iter().map(|name| numbers(&trainer.tensor(name).unwrap())).collect::<Vec<_>>())
        };
        assert_eq!(steps(true), steps(false), "{style:?}");
    }
}

#[test]
fn devices_have_names() {
    for (text, device) in [("auto", DeviceChoice::Auto), ("cpu", DeviceChoice::Cpu), ("cuda:3", DeviceChoice::Cuda(3))]
    {
        assert_eq!(text.parse(), Ok(device));
        assert_eq!(device.to_string(), text);
    }
    assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    assert!("cuda:x".parse::<DeviceChoice>().unwrap_err().contains("cuda:0"));
    assert!("tpu".parse::<DeviceChoice>().unwrap_err().contains("auto"));
}
