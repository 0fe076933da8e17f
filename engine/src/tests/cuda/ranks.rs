//! Several ranks, each of which is a trainer on a simulated device.

use std::ops::ControlFlow;

use gapless_parallel::{Axes, Axis, Mesh, by_name};
use gapless_testing::{every_other, few};

use super::mixture::{Mixture, mixtures};
use super::processor::device;
use super::small::{Small, Style, VOCABULARY};
use super::trainer::{batch, batch_over, expect_near, numbers, options, step};
use super::{gpu, host};
use crate::checkpoint::Checkpoint;
use crate::communicator::{Communicator, CommunicatorError, on_threads};
use crate::compile::{self, Target};
use crate::cuda::{Describe, Device, DeviceError, DeviceMemory, Launch, Recording};
use crate::nn::{Embedding, Linear, Module, RouterConfig, VarBuilder, embedding, linear};
use crate::{
    GenerateOptions, MemoryOptions, Model, Pipeline, Precision, Result, StepOptions, Tensor, TrainError, TrainOptions,
    Trainer,
};

const STEPS: usize = 3;

/// Options with a low work limit for the planner, because these plans need not be good.
pub fn quick() -> TrainOptions {
    TrainOptions {
        step: StepOptions { memory: MemoryOptions { planning: 1 << 20, ..options().step.memory }, ..options().step },
        ..options()
    }
}

pub fn mesh(data: usize, pipeline: usize, expert: usize) -> Mesh {
    Mesh { data, pipeline, expert, ..Mesh::default() }
}

/// A rank's losses and norms, a validation loss, generated text, and the rank's parameters.
struct Trained {
    steps: Vec<[f32; 2]>,
    validation: f32,
    text: Vec<u32>,
    parameters: Vec<(String, Vec<f64>)>,
}

fn train(steps: usize, trainer: &mut Trainer) -> Result<Trained, TrainError> {
    let steps = (0..steps).map(|_| step(trainer)).collect::<Result<_, TrainError>>()?;
    let sequence = trainer.options().step.sequence;
    let [tokens, targets] = batch_over(sequence, 9);
    let part = trainer.options().step.evaluation_batch() * sequence;
    let validation = trainer.evaluate(&tokens[..part], &targets[..part])?;
    let text = trainer.generate(&[&tokens[..3]], &GenerateOptions::greedy(5), |_| ControlFlow::Continue(()))?.remove(0);
    let names: Vec<String> = trainer.parameter_names().map(String::from).collect();
    let parameters = names.into_iter().map(|name| Ok((name.clone(), numbers(&trainer.tensor(&name)?))));
    Ok(Trained { steps, validation, text, parameters: parameters.collect::<Result<_, TrainError>>()? })
}

fn on_cpus<M: Model>(
    steps: usize,
    options: &TrainOptions,
    model: impl Fn(VarBuilder) -> Result<M> + Sync,
) -> Vec<Trained> {
    let ranks = options.step.mesh.ranks().unwrap();
    on_threads(ranks, |world| train(steps, &mut Trainer::builder(&model, options.clone()).distributed(world).build()?))
        .unwrap()
}

/// Trains on the given device of each rank.
fn on_devices<M: Model>(
    steps: usize,
    options: &TrainOptions,
    device: impl Fn(usize) -> Box<dyn Device> + Sync,
    model: impl Fn(VarBuilder) -> Result<M> + Sync,
) -> Vec<Trained> {
    let ranks = options.step.mesh.ranks().unwrap();
    let on_rank = |world: Box<dyn Communicator>| {
        let device = device(world.rank());
        train(steps, &mut Trainer::builder(&model, options.clone()).distributed(world).on_device(device).build()?)
    };
    on_threads(ranks, on_rank).unwrap()
}

/// Checks that every rank computes the same on its device as on the CPU, up to rounding, because sums have another
/// order.
pub fn compare<M: Model>(
    what: &str,
    options: &TrainOptions,
    device: impl Fn(usize) -> Box<dyn Device> + Sync,
    model: impl Fn(VarBuilder) -> Result<M> + Sync,
) {
    compare_steps(STEPS, what, options, device, model);
}

/// Like [`compare`], with a number of steps.
fn compare_steps<M: Model>(
    steps: usize,
    what: &str,
    options: &TrainOptions,
    device: impl Fn(usize) -> Box<dyn Device> + Sync,
    model: impl Fn(VarBuilder) -> Result<M> + Sync,
) {
    let (cpu, gpu) = (on_cpus(steps, options, &model), on_devices(steps, options, device, &model));
    let allowed = gpu::allowed(2e-5, 2e-4) as f32;
    for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        let what = format!("{what}, rank {rank}");
        for (cpu, gpu) in cpu.steps.as_flattened().iter().zip(gpu.steps.as_flattened()) {
            expect_near(&what, *gpu, *cpu, allowed);
        }
        expect_near(&what, gpu.validation, cpu.validation, allowed);
        assert_eq!(gpu.text, cpu.text, "{what}");
        assert_eq!(gpu.parameters.len(), cpu.parameters.len(), "{what}");
        for ((name, gpu), (_, cpu)) in gpu.parameters.iter().zip(&cpu.parameters) {
            let norm = cpu.iter().map(|x| x * x).sum::<f64>().sqrt();
            let error = gpu.iter().zip(cpu).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            // The gradient of a key bias is zero except for rounding noise, which differs on a GPU, and adds up in many steps.
            let is_noise = (gpu::is_asked_for() || steps > STEPS) && name == "k.bias";
            assert!(is_noise || error <= 1e-3 * norm + 5e-5, "{what}: {name} is {error} from {norm}");
        }
    }
    assert!(gpu.windows(2).all(|pair| pair[0].steps == pair[1].steps), "{what}: ranks say different losses");
}

/// Tests data ranks with a sharded optimizer, pipeline stages, and both together.
#[test]
fn ranks_train_as_on_the_cpu() {
    if !host::is_there() {
        return;
    }
    for (style, mesh, micro_batches, pipeline) in [
        (Style::Gpt, mesh(2, 1, 1), 2, Pipeline::default()),
        (Style::Gpt, mesh(1, 2, 1), 4, Pipeline::default()),
        (Style::Llama, mesh(2, 2, 1), 2, Pipeline::default()),
        (
            Style::Llama,
            mesh(1, 2, 1),
            4,
            Pipeline { schedule: by_name("interleaved").unwrap().into(), chunks: 2, ..Pipeline::default() },
        ),
    ] {
        let options = TrainOptions { step: StepOptions { mesh, micro_batches, pipeline, ..quick().step }, ..quick() };
        compare(&format!("{style:?} on {mesh:?}"), &options, |_| device(), |vb| Small::new(style, vb));
    }
}

/// A model whose tables are large enough for data ranks to shard the optimizer's states.
pub struct Wide {
    embedding: Embedding,
    head: Linear,
}

impl Wide {
    pub fn new(vb: VarBuilder) -> Result<Self> {
        const WIDTH: usize = 64;
        let embedding = embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        Ok(Self { embedding, head: linear(WIDTH, VOCABULARY, vb.pp("head"))? })
    }
}

impl Model for Wide {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.head.forward(&self.embedding.forward(tokens)?.gelu()?)
    }
}

#[test]
fn data_ranks_share_states() {
    if host::is_there() {
        compare(
            "shared states",
            &TrainOptions { step: StepOptions { mesh: mesh(2, 1, 1), ..quick().step }, ..quick() },
            |_| device(),
            Wide::new,
        );
    }
}

/// Shard ranks gather parameters and sum gradients while they compute.
#[test]
fn shard_ranks_share_parameters() {
    if !host::is_there() {
        return;
    }
    for data in [1, 2] {
        let mesh = Mesh { data, shard: 2, ..Mesh::default() };
        let step = StepOptions { mesh, micro_batches: 2 / data, prefetch: 2, ..quick().step };
        compare(&format!("{mesh:?}"), &TrainOptions { step, ..quick() }, |_| device(), Wide::new);
    }
}

/// The profile of a rank's step covers all arithmetic of the rank's program, in the parts between messages.
#[test]
fn a_profile_of_a_rank_is_its_step() {
    if !host::is_there() {
        return;
    }
    let options =
        TrainOptions { step: StepOptions { mesh: mesh(2, 2, 1), micro_batches: 2, ..quick().step }, ..quick() };
    let model = |vb| Small::new(Style::Llama, vb);
    let [tokens, targets] = batch(0);
    let profiles = on_threads(4, |world| {
        let mut trainer = Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build()?;
        trainer.profile(&tokens, &targets)
    });
    for (rank, profile) in profiles.unwrap().iter().enumerate() {
        let plan = compile::step::plan(model, &options.step, rank, Target::Cuda).unwrap();
        assert_eq!(profile.iter().map(|timed| timed.flops).sum::<u64>(), plan.flops()[0], "rank {rank}");
    }
}

/// Rows are sent to the rank of their expert and back. Tests expert ranks alone, with data ranks, and with stages.
#[test]
fn experts_have_ranks() {
    if !host::is_there() {
        return;
    }
    let config = RouterConfig { experts: 4, balance_loss: 0.1, z_loss: 0.01, ..RouterConfig::default() };
    let model = |vb| Mixture::new(&config, false, vb);
    for &mesh in few(&[mesh(2, 1, 2), mesh(1, 2, 2), mesh(1, 1, 2)], 1) {
        compare(
            &format!("experts on {mesh:?}"),
            &TrainOptions { step: StepOptions { mesh, ..quick().step }, ..quick() },
            |_| device(),
            model,
        );
    }
    // This only runs in f32, because rounding in bf16 may route a token to other experts.
    let in_f32 = TrainOptions { step: StepOptions { mesh: mesh(1, 1, 2), ..quick().step }, ..quick() };
    let exact = on_cpus(STEPS, &in_f32, model);
    let rounded = on_devices(
        STEPS,
        &TrainOptions { step: StepOptions { precision: Precision::Bf16, ..in_f32.step }, ..in_f32 },
        |_| device(),
        model,
    );
    for (exact, got) in exact[0].steps.iter().zip(&rounded[0].steps) {
        expect_near("loss in bf16", got[0], exact[0], 2e-2);
    }
}

/// Ranks that divide weights, the tokens of sequences, or experts along other axes than the rest of the model.
#[test]
fn divided_ranks_train_as_on_the_cpu() {
    if host::is_there() {
        compare_divided(|_| device());
    }
}

/// Trains 12 steps (by default [`STEPS`]) on ranks that divide weights, tokens or experts. All routers with a capacity are
/// among the mixtures.
pub fn compare_divided(device: impl Fn(usize) -> Box<dyn Device> + Sync) {
    let steps = few(&[(); 12], STEPS).len();
    // A multiple of twice the context ranks.
    const TOKENS: usize = 8;
    let one = Mesh::default();
    let [tensor, context] = [Mesh { tensor: 2, ..one }, Mesh { context: 2, ..one }];
    let options = |mesh, sequence_parallel| TrainOptions {
        step: StepOptions { mesh, sequence_parallel, sequence: TOKENS, ..quick().step },
        ..quick()
    };
    let both = Mesh { tensor: 2, ..context };
    let dense = [(both, true), (tensor, false), (context, false), (tensor, true), (Mesh { data: 2, ..context }, false)];
    for (turn, style) in [Style::Gpt, Style::Llama].into_iter().enumerate() {
        for (mesh, sequence_parallel) in every_other(&dense, turn) {
            let what = format!("{style:?} on {mesh:?}, sequence parallel: {sequence_parallel}");
            let model = |vb| Small::over(TOKENS, style, vb);
            compare_steps(steps, &what, &options(mesh, sequence_parallel), &device, model);
        }
    }
    let fold = Axes::of(&[Axis::Data, Axis::Tensor]);
    let folded = [
        (Mesh { data: 2, fold, ..tensor }, true),
        (context, false),
        (Mesh { fold: Axes::TENSOR, ..tensor }, false),
        (Mesh { fold: Axes::CONTEXT, ..context }, false),
    ];
    for (turn, (name, is_shared, config)) in
        mixtures().into_iter().filter(|(.., config)| config.capacity.is_some()).enumerate()
    {
        for (mesh, sequence_parallel) in every_other(&folded, turn) {
            let what = format!("{name} on {mesh:?}, sequence parallel: {sequence_parallel}");
            let model = |vb| Mixture::over(TOKENS, &config, is_shared, vb);
            compare_steps(steps, &what, &options(mesh, sequence_parallel), &device, model);
        }
    }
}

/// In bf16, the results of two data ranks and two stages are close to those of one rank. Sums over ranks are rounded
/// once.
#[test]
fn ranks_train_in_bf16() {
    if !host::is_there() {
        return;
    }
    compare_in_bf16(|_| device());
}

pub fn compare_in_bf16(device: impl Fn(usize) -> Box<dyn Device> + Sync) {
    for (mesh, micro_batches) in [(mesh(2, 1, 1), 1), (mesh(1, 2, 1), 2)] {
        let in_f32 = TrainOptions { step: StepOptions { micro_batches: 2, ..quick().step }, ..quick() };
        let in_bf16 = TrainOptions {
            step: StepOptions { mesh, micro_batches, precision: Precision::Bf16, ..quick().step },
            ..quick()
        };
        let model = |vb| Small::new(Style::Llama, vb);
        let (exact, ranks) = (on_cpus(STEPS, &in_f32, model), on_devices(STEPS, &in_bf16, &device, model));
        for rank in &ranks {
            for (exact, got) in exact[0].steps.iter().zip(&rank.steps) {
                expect_near("loss", got[0], exact[0], 1e-2);
                expect_near("norm", got[1], exact[1], 5e-2);
            }
        }
    }
}

/// A checkpoint is saved by two stages on devices. On two other devices it resumes with the same bits, and on one CPU
/// with the same results up to rounding.
#[test]
fn ranks_save_and_resume() {
    if !host::is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options =
        TrainOptions { step: StepOptions { mesh: mesh(1, 2, 1), micro_batches: 2, ..quick().step }, ..quick() };
    let model = |vb| Small::new(Style::Gpt, vb);
    let expected = on_threads(2, |world| {
        let mut trainer = Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build()?;
        step(&mut trainer)?;
        trainer.save(folder.path(), serde_json::json!({}))?;
        step(&mut trainer)
    })
    .unwrap();
    let saved = Checkpoint::latest(folder.path()).unwrap().unwrap();
    let resumed = on_threads(2, |world| {
        let mut trainer = Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build()?;
        trainer.resume(&saved)?;
        step(&mut trainer)
    })
    .unwrap();
    assert_eq!(resumed, expected);
    let mut alone =
        Trainer::new(model, TrainOptions { step: StepOptions { mesh: mesh(1, 1, 1), ..options.step }, ..options })
            .unwrap();
    alone.resume(&saved).unwrap();
    let alone = step(&mut alone).unwrap();
    let part = gpu::allowed(2e-5, 2e-4) as f32;
    alone.iter().zip(expected[0]).for_each(|(alone, ranks)| expect_near("loss or norm", *alone, ranks, part));
}

/// If a rank drops its communicator, the other ranks report an error that says what they were waiting for. After that,
/// they cannot be used.
#[test]
fn a_rank_that_leaves_is_named() {
    if !host::is_there() {
        return;
    }
    let options =
        TrainOptions { step: StepOptions { mesh: mesh(1, 2, 1), micro_batches: 2, ..quick().step }, ..quick() };
    let errors = on_threads(2, |world| {
        let rank = world.rank();
        let mut trainer = Trainer::builder(|vb| Small::new(Style::Gpt, vb), options.clone())
            .distributed(world)
            .on_device(device())
            .build()?;
        if rank == 1 {
            return Ok(Vec::new());
        }
        Ok(vec![step(&mut trainer).unwrap_err(), step(&mut trainer).unwrap_err()])
    })
    .unwrap();
    // The ranks compare their batches before a device starts, so the error is reported there.
    let gone = |error: &TrainError| matches!(error, TrainError::Ranks(CommunicatorError::PeerGone { .. }));
    assert!(errors[0].iter().all(gone), "{:?}", errors[0]);
}

/// If the device of one rank fails, this rank reports the failure, and the others are told about it.
#[test]
fn a_device_that_fails_is_told_to_the_others() {
    if !host::is_there() {
        return;
    }
    let options = TrainOptions { step: StepOptions { mesh: mesh(2, 1, 1), ..quick().step }, ..quick() };
    let errors = on_threads(2, |world| {
        let failing: Box<dyn Device> = match world.rank() {
            // All programs have been recorded by then, so the failure is in the middle of a step.
            1 => Box::new(Failing { device: device(), replays: 1 }),
            _ => device(),
        };
        let mut trainer = Trainer::builder(|vb| Small::new(Style::Gpt, vb), options.clone())
            .distributed(world)
            .on_device(failing)
            .build()?;
        Ok([step(&mut trainer).unwrap_err().to_string(), step(&mut trainer).unwrap_err().to_string()])
    })
    .unwrap();
    assert!(errors[1][0].contains("it has had enough"), "{}", errors[1][0]);
    assert!(errors[0][0].contains("rank 1") && errors[0][0].contains("it has had enough"), "{}", errors[0][0]);
    assert!(errors[0][1].contains("rank 1 is gone"), "{}", errors[0][1]);
}

/// A device that fails after a number of replays.
#[derive(Debug)]
struct Failing {
    device: Box<dyn Device>,
    replays: usize,
}

impl Device for Failing {
    fn name(&self) -> String {
        self.device.name()
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        self.device.reserve(bytes)
    }

    fn extend(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.device.extend(bytes)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.write(address, bytes)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read(address, bytes)
    }

    fn record(&mut self, launches: Vec<Launch>, describe: Describe<'_>) -> Result<Recording, DeviceError> {
        self.device.record(launches, describe)
    }

    fn run(&mut self, launches: &[Launch], describe: Describe<'_>) -> Result<(), DeviceError> {
        self.device.run(launches, describe)
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        let what = || "it has had enough".to_owned();
        let (device, call) = (self.name(), "cuGraphLaunch".to_owned());
        self.replays = self.replays.checked_sub(1).ok_or_else(|| DeviceError::Driver { device, call, what: what() })?;
        self.device.replay(recording)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.device.wait()
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.device.memory()
    }
}

/// A step that is not finite is skipped on every rank. Ranks on devices cannot be combined with ranks on CPUs.
#[test]
fn ranks_break_together_and_are_of_one_kind() {
    if !host::is_there() {
        return;
    }
    let options = TrainOptions { step: StepOptions { mesh: mesh(2, 1, 1), ..quick().step }, ..quick() };
    let model = |vb| Small::new(Style::Llama, vb);
    on_threads(2, |world| {
        let mut trainer = Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build()?;
        let before = trainer.tensor("up.weight")?;
        let infinite = (trainer.tensor("out.weight")?.ones_like()? * f64::INFINITY)?;
        trainer.set_tensor("out.weight", &infinite)?;
        let error = step(&mut trainer).unwrap_err();
        assert!(
            matches!(&error, TrainError::NonFinite { culprit, .. } if culprit.starts_with("fused in out")),
            "{error}"
        );
        assert_eq!(numbers(&before), numbers(&trainer.tensor("up.weight")?));
        Ok(())
    })
    .unwrap();
    let mixed = on_threads(2, |world| match world.rank() {
        0 => Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build(),
        _ => Trainer::builder(model, options.clone()).distributed(world).build(),
    });
    assert!(mixed.unwrap_err().to_string().contains("would drift apart"));
}

/// A parameter that is set keeps its value, whichever ranks have the shards of its master.
#[test]
fn parameters_of_ranks_are_written() {
    if !host::is_there() {
        return;
    }
    let model = |vb| Small::new(Style::Gpt, vb);
    for (mesh, micro_batches) in [(mesh(2, 1, 1), 2), (mesh(1, 2, 1), 2)] {
        let options = TrainOptions {
            step: StepOptions { mesh, micro_batches, precision: Precision::Bf16, ..quick().step },
            ..quick()
        };
        on_threads(2, |world| {
            let mut trainer =
                Trainer::builder(model, options.clone()).distributed(world).on_device(device()).build()?;
            let names: Vec<String> = trainer.parameter_names().map(String::from).collect();
            for name in &names {
                let fours = (trainer.tensor(name)?.zeros_like()? + 4.0)?;
                trainer.set_tensor(name, &fours)?;
            }
            step(&mut trainer)?;
            for name in &names {
                // A step changes a parameter by about the learning rate. Weight decay changes it by a thousandth of
                // its value.
                let written = numbers(&trainer.tensor(name)?);
                assert!(written.iter().all(|x| (x - 4.0).abs() < 0.1), "{name} on {mesh:?}: {written:?}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// A trainer of one rank returns an error for a mesh of several ranks.
#[test]
fn one_device_is_one_rank() {
    let options = TrainOptions { step: StepOptions { mesh: mesh(2, 1, 1), ..quick().step }, ..quick() };
    let error = Trainer::builder(|vb| Small::new(Style::Gpt, vb), options).on_device(device()).build().unwrap_err();
    assert!(error.to_string().contains("Trainer::builder"), "{error}");
}
