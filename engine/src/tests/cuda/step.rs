//! Whole training steps on a simulated device, compared with the CPU.

use candle_core::DType;
use gapless_parallel::Mesh;

use super::processor::{Processor, device};
use super::small::{BATCH, SEQUENCE, Small, Style, VOCABULARY};
use super::{gpu, host};
use crate::compile::{CompileOptions, Executable, Target, compile, step};
use crate::nn::VarBuilder;
use crate::recompute::Recompute;
use crate::runtime::cpu::Workers;
use crate::runtime::{RunOptions, Session};
use crate::{MemoryOptions, Model, Result, StepOptions, Tensor, TrainOptions};

/// Returns the planned program of a training step for a target.
pub fn executable<M: Model>(
    options: &TrainOptions,
    target: Target,
    model: impl Fn(VarBuilder) -> Result<M>,
) -> Executable {
    let program = step::program(model, &options.step, 0, target).unwrap();
    compile(&[program], &CompileOptions::default()).unwrap()
}

/// A model whose loss includes the mean of a matrix product, so the product's gradient is a broadcast scalar.
struct Similar(Small);

impl Model for Similar {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.0.forward(tokens, train)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.0.hidden(tokens, train)?;
        self.0.loss(tokens, targets, train)?.add(&x.matmul(&x.t()?)?.mean_all()?)
    }
}

#[test]
fn steps_with_a_number_that_stands_for_many() {
    if host::is_there() {
        compare_steps("similar", |vb| Small::new(Style::Llama, vb).map(Similar));
    }
}

#[test]
fn steps_are_those_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    for style in [Style::Gpt, Style::Llama] {
        compare_steps(&format!("{style:?}"), |vb| Small::new(style, vb));
    }
}

/// Compares three steps on the CPU and on the device: losses, norms and parameters. Both start from the same
/// parameters and use the same noise. There are two cases: one micro-batch without recomputation, and two
/// micro-batches with it.
pub fn compare_steps<M: Model>(what: &str, model: impl Fn(VarBuilder) -> Result<M>) {
    for (micro_batches, recompute) in [(1, Recompute::None), (2, Recompute::Ops(vec!["linear".into()]))] {
        let options = TrainOptions {
            step: StepOptions {
                batch: BATCH,
                micro_batches,
                sequence: SEQUENCE,
                memory: MemoryOptions { recompute, ..MemoryOptions::default() },
                ..StepOptions::default()
            },
            threads: 1,
            ..TrainOptions::default()
        };
        let workers = Workers::new(1).unwrap();
        let planned = executable(&options, Target::Cpu { threads: 1 }, &model);
        let mut on_cpu = Session::on_cpu(planned, workers, 3).unwrap();
        let planned = executable(&options, Target::Cuda, &model);
        let mut on_device = Session::on_cuda(planned, device(), 3, (0, 1)).unwrap();
        let (of_cpu, of_device) =
            (on_cpu.executable().program("train").unwrap(), on_device.executable().program("train").unwrap());
        for step in 0..3 {
            let ids = |shift: usize, i: usize| ((i * 7 + shift + step as usize * 3) % VOCABULARY) as u32;
            let count = BATCH / micro_batches * SEQUENCE;
            for micro_batch in 0..micro_batches {
                for (name, shift) in [("tokens", 0), ("targets", 5)] {
                    let data: Vec<u32> = (0..count).map(|i| ids(shift, micro_batch * count + i)).collect();
                    on_cpu.write_input(of_cpu, name, micro_batch as u32, &data).unwrap();
                    on_device.write_input(of_device, name, micro_batch as u32, &data).unwrap();
                }
            }
            let scalars = options.step.optimizer.scalars(step, 1e-2);
            on_cpu.write_input(of_cpu, "step.scalars", 0, &scalars).unwrap();
            on_device.write_input(of_device, "step.scalars", 0, &scalars).unwrap();
            let run = RunOptions { seed: 3, step, micro_batch_stride: 1, ..RunOptions::default() };
            on_cpu.run(of_cpu, run).unwrap();
            on_device.run(of_device, run).unwrap();
            for name in ["loss", "gradient_norm"] {
                let (cpu, device) = (on_cpu.scalar(of_cpu, name).unwrap(), on_device.output(of_device, name).unwrap());
                let device: f32 = device.to_scalar().unwrap();
                // The tolerance allows for f32 sums in another order, over a few steps of training.
                let part = gpu::allowed(2e-5, 2e-4) as f32;
                assert!((cpu - device).abs() <= part * cpu.abs(), "{what}, step {step}: {name} {device}, not {cpu}");
            }
        }
        let persistent = &on_device.executable().persistent();
        let floats = persistent.iter().filter(|tensor| tensor.spec.dtype == DType::F32);
        let names: Vec<String> = floats.map(|tensor| tensor.label.tensor.clone()).collect();
        for name in &names {
            let numbers = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let (cpu, device) = (numbers(on_cpu.tensor(name).unwrap()), numbers(on_device.tensor(name).unwrap()));
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let off = norm(&mut cpu.iter().zip(&device).map(|(a, b)| a - b));
            // The gradient of a key bias is zero except for rounding noise. AdamW divides the noise by the root of
            // its own square. On a GPU, the noise is different.
            let is_noise = gpu::is_asked_for() && name == "k.bias";
            let allowed = 1e-3 * norm(&mut cpu.iter().copied()) + 1e-4;
            assert!(is_noise || off <= allowed, "{what}: {name} is off by {off}");
        }
    }
}

/// A program for the CPU is refused, because GPU kernels would write past the end of the CPU's scratch.
#[test]
fn a_program_for_the_cpu_is_refused() {
    let options = TrainOptions {
        step: StepOptions { batch: BATCH, sequence: SEQUENCE, ..StepOptions::default() },
        threads: 1,
        ..TrainOptions::default()
    };
    let planned = executable(&options, Target::Cpu { threads: 1 }, |vb| Small::new(Style::Gpt, vb));
    let error = Session::on_cuda(planned, Box::<Processor>::default(), 0, (0, 1)).unwrap_err().to_string();
    assert!(error.contains("for Target::Cuda"), "{error}");
}

/// A rank that is not connected reports an error at its first message.
#[test]
fn a_rank_without_others_is_an_error() {
    if !host::is_there() {
        return;
    }
    let (batch, sequence, mesh) = (BATCH, SEQUENCE, Mesh::pipeline(2));
    let options = TrainOptions {
        step: StepOptions { batch, sequence, mesh, micro_batches: 2, ..StepOptions::default() },
        ..TrainOptions::default()
    };
    let program = step::program(|vb| Small::new(Style::Gpt, vb), &options.step, 1, Target::Cuda).unwrap();
    let planned = compile(&[program], &CompileOptions::default()).unwrap();
    let train = planned.program("train").unwrap();
    let mut session = Session::on_cuda(planned, device(), 0, (0, 1)).unwrap();
    let error = session.run(train, RunOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("receive") && error.contains("without a communicator"), "{error}");
}
