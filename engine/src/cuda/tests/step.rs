//! Whole training steps on a stand-in for a device, beside the CPU's.

use candle_core::DType;

use super::host;
use crate::compile::{CompileOptions, Executable, Target, compile};
use crate::cpu::{Communicators, RunOptions, Workers};
use crate::cuda::{Device, DeviceError, Executor, Launch, Recording};
use crate::nn::{Embedding, Linear, Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias, rms_norm};
use crate::recompute::Recompute;
use crate::{Model, Result, Tensor, TrainOptions, Trainer, cpu};

/// Memory of the processor, and launches that are run there.
#[derive(Debug, Default)]
struct Processor {
    memory: Vec<u64>,
    recorded: Vec<Vec<Launch>>,
}

impl Processor {
    fn at(&self, address: u64, bytes: usize) -> *mut u8 {
        let base = self.memory.as_ptr().expose_provenance() as u64;
        assert!(base <= address && address + bytes as u64 <= base + 8 * self.memory.len() as u64, "beside the memory");
        std::ptr::with_exposed_provenance_mut(address as usize)
    }
}

impl Device for Processor {
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        assert!(self.memory.is_empty(), "reserved once");
        // Full of NaN, with room for the alignment.
        self.memory = vec![u64::MAX; bytes as usize / 8 + 64];
        Ok((self.memory.as_mut_ptr().expose_provenance() as u64).next_multiple_of(256))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: `at` has looked whether it is this memory, which `&mut self` holds alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(address, bytes.len()), bytes.len()) };
        Ok(())
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.at(address, bytes.len()), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn record(&mut self, launches: Vec<Launch>) -> Result<Recording, DeviceError> {
        self.recorded.push(launches);
        Ok(Recording(self.recorded.len() - 1))
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        for launch in &self.recorded[recording.0] {
            // SAFETY: the addresses are those of a checked plan in this memory.
            unsafe { host::run(launch, false) }.unwrap_or_else(|why| panic!("{launch:?}: {why}"));
        }
        Ok(())
    }
}

/// What the parts of a small language model are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Learned positions, layer norm, GELU, dropout, biases, the head tied to the embedding.
    Gpt,
    /// Rotary positions, RMS norm, SwiGLU, heads that share keys and values.
    Llama,
}

/// One block between an embedding and a head.
struct Small {
    style: Style,
    embedding: Embedding,
    positions: Tensor,
    norms: [Box<dyn Module>; 3],
    q: Linear,
    kv: [Linear; 2],
    out: Linear,
    up: Linear,
    gate: Linear,
    down: Linear,
    head: Linear,
}

const VOCABULARY: usize = 19;
const WIDTH: usize = 8;
const SEQUENCE: usize = 6;
const BATCH: usize = 4;

impl Small {
    fn new(style: Style, vb: VarBuilder) -> Result<Self> {
        let norm = |name: &str| -> Result<Box<dyn Module>> {
            Ok(match style {
                Style::Gpt => Box::new(layer_norm(WIDTH, 1e-5, vb.pp(name))?),
                Style::Llama => Box::new(rms_norm(WIDTH, 1e-5, vb.pp(name))?),
            })
        };
        let project = |from, to, name: &str| match style {
            Style::Gpt => linear(from, to, vb.pp(name)),
            Style::Llama => linear_no_bias(from, to, vb.pp(name)),
        };
        let kv = if style == Style::Gpt { WIDTH } else { WIDTH / 2 };
        let embedding = embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        let head = match style {
            Style::Gpt => Linear::new(embedding.embeddings().clone(), None, "head"),
            Style::Llama => linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
        };
        Ok(Self {
            style,
            embedding,
            positions: vb.get((SEQUENCE, WIDTH), "positions")?,
            norms: [norm("norm_1")?, norm("norm_2")?, norm("norm_3")?],
            q: project(WIDTH, WIDTH, "q")?,
            kv: [project(WIDTH, kv, "k")?, project(WIDTH, kv, "v")?],
            out: project(WIDTH, WIDTH, "out")?,
            up: project(WIDTH, 2 * WIDTH, "up")?,
            gate: project(WIDTH, 2 * WIDTH, "gate")?,
            down: project(2 * WIDTH, WIDTH, "down")?,
            head,
        })
    }

    fn hidden(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let is_gpt = self.style == Style::Gpt;
        let dropout = if train && is_gpt { 0.1 } else { 0.0 };
        let (b, t) = tokens.dims2()?;
        let x = self.embedding.forward(tokens)?.broadcast_add(&self.positions)?.dropout(dropout)?;
        let y = self.norms[0].forward(&x)?;
        let heads = |x: Tensor| x.reshape((b, t, x.dims()[2] / 4, 4))?.transpose(1, 2);
        let rotated = |x: Tensor| if is_gpt { Ok(x) } else { x.rope(10_000.0) };
        let q = rotated(heads(self.q.forward(&y)?)?)?;
        let [k, v] = [heads(self.kv[0].forward(&y)?)?, heads(self.kv[1].forward(&y)?)?];
        let y = q.causal_attention(&rotated(k)?, &v, 0.5)?.transpose(1, 2)?.reshape((b, t, WIDTH))?;
        let x = x.add(&self.out.forward(&y)?.dropout(dropout)?)?;
        let y = self.norms[1].forward(&x)?;
        let up = self.up.forward(&y)?;
        let y = if is_gpt { up.gelu()? } else { self.gate.forward(&y)?.swiglu(&up)? };
        self.norms[2].forward(&x.add(&self.down.forward(&y)?.dropout(dropout)?)?)
    }
}

impl Model for Small {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.head.forward(&self.hidden(tokens, train)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        self.head.cross_entropy(&self.hidden(tokens, train)?, targets)?.mean_all()
    }
}

/// A step's program for a target, planned.
fn executable(style: Style, options: &TrainOptions, target: Target) -> Executable {
    let program = Trainer::program_for(|vb| Small::new(style, vb), options, 0, target).unwrap();
    compile(&[program], &CompileOptions::default()).unwrap()
}

/// Three steps from the same parameters with the same dropout: losses, norms and parameters of the CPU's executor and of the
/// device's, in one micro-batch and in two, keeping everything and computing things again.
#[test]
fn steps_are_those_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    for style in [Style::Gpt, Style::Llama] {
        for (micro_batches, recompute) in [(1, Recompute::None), (2, Recompute::Ops(vec!["linear".into()]))] {
            let options = TrainOptions {
                batch: BATCH,
                micro_batches,
                sequence: SEQUENCE,
                threads: 1,
                recompute,
                ..TrainOptions::default()
            };
            let workers = Workers::new(1).unwrap();
            let planned = executable(style, &options, Target::Cpu { threads: 1 });
            let mut on_cpu = cpu::Executor::new(planned, workers, 3, Communicators::default()).unwrap();
            let planned = executable(style, &options, Target::Cuda);
            let mut on_device = Executor::new(planned, Box::<Processor>::default(), 3, (0, 1)).unwrap();
            let (of_cpu, of_device) = (on_cpu.program("train").unwrap(), on_device.program("train").unwrap());
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
                let scalars = options.optimizer.scalars(step, 1e-2);
                on_cpu.write_input(of_cpu, "step.scalars", 0, &scalars).unwrap();
                on_device.write_input(of_device, "step.scalars", 0, &scalars).unwrap();
                let run = RunOptions { seed: 3, step, part_stride: 1, ..RunOptions::default() };
                on_cpu.run(of_cpu, run).unwrap();
                on_device.run(of_device, step).unwrap();
                for name in ["loss", "gradient_norm"] {
                    let (cpu, device) =
                        (on_cpu.scalar(of_cpu, name).unwrap(), on_device.output(of_device, name).unwrap());
                    let device: f32 = device.to_scalar().unwrap();
                    // Sums in f32 in another order, through a step or two of training.
                    assert!(
                        (cpu - device).abs() <= 2e-5 * cpu.abs(),
                        "{style:?}, step {step}: {name} {device}, not {cpu}"
                    );
                }
            }
            let persistent = &on_device.executable().persistent;
            let floats = persistent.iter().filter(|tensor| tensor.spec.dtype == DType::F32);
            let names: Vec<String> = floats.map(|tensor| tensor.label.tensor.clone()).collect();
            for name in &names {
                let numbers = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let (cpu, device) = (numbers(on_cpu.tensor(name).unwrap()), numbers(on_device.tensor(name).unwrap()));
                let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let off = norm(&mut cpu.iter().zip(&device).map(|(a, b)| a - b));
                // The gradient of a bias of keys is 0 but for rounding, which AdamW divides by its own root.
                let allowed = 1e-3 * norm(&mut cpu.iter().copied()) + 1e-4;
                assert!(off <= allowed, "{style:?}: {name} is off by {off}");
            }
        }
    }
}

/// Kernels of a GPU would write beyond the CPU's scratch.
#[test]
fn a_program_for_the_cpu_is_refused() {
    let options = TrainOptions { batch: BATCH, sequence: SEQUENCE, threads: 1, ..TrainOptions::default() };
    let planned = executable(Style::Gpt, &options, Target::Cpu { threads: 1 });
    let error = Executor::new(planned, Box::<Processor>::default(), 0, (0, 1)).unwrap_err().to_string();
    assert!(error.contains("lower for Target::Cuda"), "{error}");
}

/// What has no kernels is refused by name, before anything runs.
#[test]
fn what_only_the_cpu_can_do_is_said() {
    let options =
        TrainOptions { batch: BATCH, sequence: SEQUENCE, compress: vec!["linear".into()], ..TrainOptions::default() };
    let planned = executable(Style::Gpt, &options, Target::Cuda);
    let error = Executor::new(planned, Box::<Processor>::default(), 0, (0, 1)).unwrap_err().to_string();
    assert!(error.starts_with("compress in "), "{error}");
    assert!(error.contains("cannot run on a GPU yet"), "{error}");
}
