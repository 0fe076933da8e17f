//! The memory of steps of realistic size. The steps are planned without a device. They are compared with recorded
//! PyTorch runs, and planned under budgets.
//!
//! `cargo test --workspace --test training step_memory -- --nocapture` prints the tables, and fails if
//! docs/recompute.md has others.

use gapless::alloc::Role;
use gapless::alloc::draw::Bytes;
use gapless::engine::compile::compile;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::parallel::Rates;
use gapless::{DeviceChoice, MemoryOptions, Precision, Recompute, StepOptions, TrainOptions};
use gapless_testing::few;

use crate::common::on_cpu;

/// The figures of a planned step.
struct StepPlan {
    arena: u64,
    roles: Vec<(Role, u64)>,
    /// FLOPs of recomputation, as a fraction of all other FLOPs. `overhead` is the corresponding fraction of the
    /// estimated time.
    extra_flops: f64,
    overhead: f64,
}

impl StepPlan {
    fn bytes(&self, role: Role) -> u64 {
        self.roles.iter().find(|(other, _)| *other == role).map_or(0, |(_, bytes)| *bytes)
    }

    /// Returns the bytes of parameters, optimizer states, and gradients. With several micro-batches, gradients are
    /// alive during the whole step.
    fn persistent(&self) -> u64 {
        2 * self.bytes(Role::Parameter) + self.bytes(Role::OptimizerState)
    }
}

/// FLOP/s of a bf16 matrix product, and bytes per second of a copy, on an H100 (see docs/recompute.md).
const H100: Rates = Rates { flops: 770e12, bytes: 3e12 };

fn plan(options: &TrainOptions, model: &Model) -> StepPlan {
    let program = match model {
        Model::Gpt(config) => gapless::plan::program(|vb| Gpt::new(config, vb), options, 0),
        Model::Llama(config) => gapless::plan::program(|vb| Llama::new(config, vb), options, 0),
    };
    let program = program.unwrap();
    let [all, again] = program.nanoseconds(&H100);
    let (flops, rematerialized_flops) = (program.flops(), program.rematerialized_flops());
    let executable = compile(&[program], &options.step.planning()).unwrap();
    let tick = gapless::alloc::peak_tick(executable.problem()).unwrap();
    let alive: Vec<_> = gapless::alloc::live_at(executable.problem(), tick).collect();
    let bytes_of = |role: Role| {
        let bytes = alive.iter().filter(|id| executable.labels()[id.index()].role == role);
        (role, bytes.map(|&id| executable.problem().buffer(id).bytes).sum())
    };
    StepPlan {
        arena: executable.solution().height,
        roles: Role::ALL.into_iter().map(bytes_of).collect(),
        extra_flops: rematerialized_flops as f64 / (flops - rematerialized_flops) as f64,
        overhead: again as f64 / (all - again) as f64,
    }
}

enum Model {
    Gpt(GptConfig),
    Llama(LlamaConfig),
}

/// A recorded run of PyTorch 2.15: bf16 model, four micro-batches of 1024 tokens per sequence, fused AdamW.
struct Recorded {
    name: &'static str,
    layers: usize,
    heads: usize,
    width: usize,
    sequences: usize,
    /// Peak of allocated bytes, without those that are alive during the whole step.
    activations: f64,
    /// Peak of the bytes that the allocator reserved.
    reserved: u64,
}

const GIB: f64 = (1u64 << 30) as f64;

const RECORDED: [Recorded; 3] = [
    Recorded {
        name: "GPT-2 124M",
        layers: 12,
        heads: 12,
        width: 768,
        sequences: 16,
        activations: 9.164 * GIB,
        reserved: 12_838_764_544,
    },
    Recorded {
        name: "GPT-2 355M",
        layers: 24,
        heads: 16,
        width: 1024,
        sequences: 8,
        activations: 8.349 * GIB,
        reserved: 15_386_804_224,
    },
    Recorded {
        name: "GPT-2 1.5B",
        layers: 48,
        heads: 25,
        width: 1600,
        sequences: 4,
        activations: 10.572 * GIB,
        reserved: 40_879_783_936,
    },
];

/// The recorded activations and reserved bytes of the 1.5B model with every layer checkpointed.
const CHECKPOINTED: (f64, u64) = (1.762 * GIB, 30_792_482_816);

#[test]
fn activations_take_less_than_those_of_recorded_pytorch_runs() {
    let cheap = Recompute::Ops(vec!["layer_norm".into(), "gelu".into()]);
    let all = Recompute::Layers(gapless::Layers::All);
    let most = [[0.55, 0.42], [0.80, 0.52], [0.95, 0.65]];
    for (recorded, [plain, selective]) in RECORDED.iter().zip(most) {
        let &Recorded { name, layers, heads, width, sequences, activations, reserved } = recorded;
        let config = GptConfig { layers, heads, width, ..GptConfig::default() };
        let mut policies = vec![
            ("nothing", Recompute::None, activations, reserved, plain),
            ("layer_norm, gelu", cheap.clone(), activations, reserved, selective),
        ];
        if layers == 48 {
            policies.push(("all layers", all.clone(), CHECKPOINTED.0, CHECKPOINTED.1, 0.6));
        }
        for (what, recompute, activations, reserved, most) in policies {
            let options = TrainOptions {
                step: StepOptions {
                    batch: 4 * sequences,
                    micro_batches: 4,
                    sequence: 1024,
                    precision: Precision::PureBf16,
                    memory: MemoryOptions { recompute, ..on_cpu().step.memory },
                    ..on_cpu().step
                },
                device: DeviceChoice::Cuda(0),
                ..on_cpu()
            };
            let step = plan(&options, &Model::Gpt(config.clone()));
            let ours = step.arena - step.persistent();
            let ratio = ours as f64 / activations;
            // A run of PyTorch is named in the first of its lines.
            let (first, torch, reserved) = match what {
                "nothing" => (format!("{name}, {sequences} "), format!("{} ", Bytes(activations as u64)), reserved),
                "all layers" => (String::new(), format!("{} (checkpointed) ", Bytes(activations as u64)), reserved),
                _ => (String::new(), String::new(), 0),
            };
            let reserved = if reserved == 0 { String::new() } else { format!("{} ", Bytes(reserved)) };
            let flops = if step.extra_flops == 0.0 { "0".into() } else { format!("{:.2} %", 100.0 * step.extra_flops) };
            let line = format!(
                "| {first}| {what} | {} | {} | {torch}| {ratio:.2} | {flops} | {reserved}|",
                Bytes(step.arena),
                Bytes(ours)
            );
            println!("{line}");
            gapless_testing::assert_on_page("docs/recompute.md", &line);
            assert!(ratio <= most, "{name}, {what}: {ratio} of PyTorch's");
            assert!(what == "all layers" || step.extra_flops <= 0.02, "{name}, {what}: {}", step.extra_flops);
        }
    }
}

#[test]
fn llama_2_7b_under_budgets() {
    let llama =
        LlamaConfig { vocabulary: 32_000, kv_heads: 32, hidden: 11_008, rope_theta: 1e4, ..LlamaConfig::default() };
    let model = Model::Llama(llama);
    let mut options = TrainOptions {
        step: StepOptions {
            batch: 2,
            micro_batches: 2,
            sequence: 4096,
            precision: Precision::PureBf16,
            ..on_cpu().step
        },
        device: DeviceChoice::Cuda(0),
        ..on_cpu()
    };
    let all = plan(&options, &model);
    let activations = all.arena - all.persistent();
    println!("everything kept: {}, of which activations {}", Bytes(all.arena), Bytes(activations));
    // Each row has a percentage of the activations, and an upper limit for the additional time in percent. The limits
    // are half of what is required, because the first of the two micro-batches has room that gradients do not take
    // yet. The time is relative to a step with fused norms and residuals.
    let budgets = [(50, 4.75, "9.5"), (20, 10.5, "21"), (80, 0.55, "1.1"), (70, 1.15, "2.0")];
    for &(percent, most, goal) in few(&budgets, 2) {
        let bytes = all.persistent() + activations / 100 * percent;
        (options.step.memory.budget, options.step.memory.rates) = (Some(bytes), H100);
        let step = plan(&options, &model);
        let overhead = 100.0 * step.overhead;
        let line = format!("| {percent} % | {overhead:.2} % | {:.2} % | {goal} % |", 2.0 * overhead);
        println!("{line}");
        gapless_testing::assert_on_page("docs/recompute.md", &line);
        assert!(step.arena <= bytes);
        assert!(overhead <= most, "{percent} %: {overhead} % more time");
    }
}
