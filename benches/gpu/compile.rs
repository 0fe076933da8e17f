//! Compiles every kernel with the installed NVRTC. Reports the resources that each kernel uses, and puts the machine
//! code into the cache, so that the first run on a GPU has nothing to compile. Needs no GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use gapless::engine::Model;
use gapless::engine::compile::{CompileOptions, Executable, Target, compile};
use gapless::engine::cuda::{Architecture, Cache, CudaBackend, Family, Launch, Nvrtc, Resources};
use gapless::engine::runtime::Session;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::{DType, Mesh, StepOptions, TrainError, TrainOptions, Trainer};
use rayon::prelude::*;
use serde::Serialize;

use super::record::Found;
use super::step::{self, Float, Step};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Architectures for which kernels are compiled
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90,sm_90a,sm_100")]
    architectures: Vec<Architecture>,
    /// Maximum bytes that a thread of a kernel may spill to local memory, or read back
    #[arg(long, default_value_t = 16)]
    most_spilled: u32,
}

/// A kernel of one source, on one architecture.
#[derive(Debug, Serialize)]
struct Row {
    architecture: String,
    file: &'static str,
    #[serde(flatten)]
    resources: Resources,
    /// The maximum dynamic shared memory with which the models of this benchmark launch the kernel; 0 if none of these
    /// models launches it.
    launched_shared_bytes: u32,
}

#[derive(Debug, Serialize)]
struct Figures {
    nvrtc: String,
    most_spilled: u32,
    kernels: Vec<Row>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let nvrtc = match Nvrtc::load(None) {
        Ok(nvrtc) => nvrtc,
        Err(error) => return Ok(Found::skipped(&error.to_string())),
    };
    let launched = launched()?;
    let families: BTreeSet<Family> = Family::ALL.iter().copied().chain(launched.families).collect();
    // The longest sources come first, so that all threads finish at about the same time.
    let mut families: Vec<Family> = families.into_iter().collect();
    families.sort_by_key(|family| std::cmp::Reverse(family.source().len()));
    // Some families use instructions of certain architectures, and are only compiled for these.
    let of_family = |family: Family| {
        let able: BTreeSet<_> = arguments.architectures.iter().filter_map(|a| a.of_family(family)).collect();
        able.into_iter().map(move |architecture| (family, architecture))
    };
    let jobs: Vec<(Family, Architecture)> = families.iter().flat_map(|&family| of_family(family)).collect();
    let (cache, rows) = (Cache::of_user(), Mutex::new(Vec::new()));
    jobs.into_par_iter().try_for_each(|(family, architecture)| -> anyhow::Result<()> {
        let kernels = cache.fill(nvrtc, family, architecture)?;
        anyhow::ensure!(!kernels.is_empty(), "NVRTC's log has no kernel of {}", family.file());
        let row = |resources: Resources| {
            let launched_shared_bytes = launched.shared_bytes.get(&resources.kernel).copied().unwrap_or(0);
            Row { architecture: architecture.to_string(), file: family.file(), resources, launched_shared_bytes }
        };
        rows.lock().expect("no thread panics with it").extend(kernels.into_iter().map(row));
        Ok(())
    })?;
    let mut kernels = rows.into_inner().expect("no thread panics with it");
    kernels.sort_by(|a, b| (&a.resources.kernel, &a.architecture).cmp(&(&b.resources.kernel, &b.architecture)));
    let spills = |row: &&Row| row.resources.spill_store_bytes.max(row.resources.spill_load_bytes);
    let too_many = kernels.iter().filter(|row| spills(row) > arguments.most_spilled).count();
    let text = format!(
        "{} kernels of {} sources by NVRTC {}; {too_many} spill more than {} bytes\n{}",
        kernels.len(),
        families.len(),
        nvrtc.version(),
        arguments.most_spilled,
        table(&kernels),
    );
    let (version, most_spilled) = (nvrtc.version(), arguments.most_spilled);
    Found::new(too_many == 0, text, &Figures { nvrtc: version, most_spilled, kernels })
}

fn table(kernels: &[Row]) -> String {
    let mut text = format!(
        "{:60} {:7} {:>9} {:>6} {:>13} {:>7} {:>9}",
        "kernel", "", "registers", "stack", "spills", "shared", "dynamic"
    );
    for Row { architecture, resources, launched_shared_bytes, .. } in kernels {
        let Resources { kernel, registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes, .. } =
            resources;
        let spills = format!("{spill_store_bytes} / {spill_load_bytes}");
        text += &format!(
            "\n{kernel:60} {architecture:7} {registers:9} {stack_bytes:6} {spills:>13} {shared_bytes:7} {launched_shared_bytes:9}"
        );
    }
    text
}

/// The kernels that the models' training steps launch.
#[derive(Debug, Default)]
struct Launched {
    families: BTreeSet<Family>,
    /// The maximum dynamic shared memory of a block, by the kernel's name.
    shared_bytes: BTreeMap<String, u32>,
}

/// Returns the launches of the steps of GPT-2, Llama and mixtures of every kind, in f32 and bf16. Mixtures run on one
/// rank and on two expert ranks. Two blocks per model suffice, because further blocks have the same launches. Steps
/// have one micro-batch, or two whose gradients are accumulated. The steps of this benchmark are also planned within
/// budgets, because operations that are recomputed are fused in other ways.
fn launched() -> Result<Launched, TrainError> {
    let mut launched = Launched::default();
    for dtype in [DType::F32, DType::BF16] {
        for dropout in [0.0, 0.1] {
            let config = GptConfig { layers: 2, dropout, ..GptConfig::default() };
            launched.add(dtype, 1, &|vb| Gpt::new(&config, vb))?;
        }
        let config = LlamaConfig { layers: 2, ..LlamaConfig::default() };
        launched.add(dtype, 1, &|vb| Llama::new(&config, vb))?;
        for style in [MoeStyle::Switch, MoeStyle::Mixtral, MoeStyle::Qwen, MoeStyle::DeepSeek, MoeStyle::ExpertChoice] {
            // The bias of DeepSeek's router only has kernels in f32 (docs/gpu.md).
            if style != MoeStyle::DeepSeek || dtype == DType::F32 {
                for expert in [1, 2] {
                    launched.add(dtype, expert, &|vb| Moe::new(&MoeConfig::small(style, 512), vb))?;
                }
            }
        }
    }
    use step::Model::{Deepseek, Gpt2, Gpt2Lora, Llama1b, Mixture};
    for model in [Gpt2, Llama1b, Mixture, Deepseek, Gpt2Lora] {
        for dtype in [Float::F32, Float::Bf16] {
            let step = Step { model, dtype, micro_batch: 16, sequence: 1024, seed: 0, budget_bytes: None };
            let bytes = step.arena_bytes()?;
            for budget_bytes in [None, Some(bytes / 10 * 8)] {
                let step = Step { budget_bytes, ..step };
                launched.add_executable(&step.compiled(step.program()?)?)?;
            }
        }
    }
    Ok(launched)
}

impl Launched {
    fn add<M: Model>(
        &mut self,
        dtype: DType,
        expert: usize,
        build: &dyn Fn(gapless::engine::nn::VarBuilder) -> gapless::Result<M>,
    ) -> Result<(), TrainError> {
        for micro_batches in [1, 2] {
            let mesh = Mesh { expert, ..Mesh::default() };
            let options = TrainOptions {
                step: StepOptions {
                    mesh,
                    batch: 4,
                    micro_batches,
                    sequence: 64,
                    precision: dtype.try_into()?,
                    ..StepOptions::default()
                },
                ..TrainOptions::default()
            };
            let program = gapless::engine::compile::step::program(build, &options.step, 0, Target::Cuda)?;
            let within = CompileOptions::within(None, options.step.memory.planning, options.step.memory.routing);
            self.add_executable(&compile(&[program], &within)?)?;
        }
        Ok(())
    }

    fn add_executable(&mut self, executable: &Executable) -> Result<(), TrainError> {
        for launch in Session::<CudaBackend>::launches(executable)? {
            let Launch::Kernel(kernel) = launch else { continue };
            self.families.insert(kernel.family);
            let shared = self.shared_bytes.entry(kernel.name).or_default();
            *shared = kernel.shared_bytes.max(*shared);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sanitizers are restricted to kernels whose names begin with the prefixes in parts.py. All kernels must match a
    /// prefix.
    #[test]
    fn sanitizers_know_the_names_of_all_kernels() {
        let (_, names) = include_str!("parts.py").split_once("OURS = \"").unwrap();
        let beginnings: Vec<&str> = names.split('"').next().unwrap().split('|').collect();
        let launched = launched().unwrap();
        assert!(launched.shared_bytes.len() > 50, "{:?}", launched.shared_bytes);
        let is_known = |name: &str| beginnings.iter().any(|beginning| name.starts_with(beginning));
        let unknown: Vec<&String> = launched.shared_bytes.keys().filter(|name| !is_known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?} begin with none of OURS in parts.py");
        // No prefix may match a kernel of cuBLAS.
        for name in ["nvjet_tst_128x64", "cutlass_80_tensorop_bf16", "splitKreduce_kernel", "gemv2T_kernel_val"] {
            assert!(!is_known(name), "{name} is cuBLAS's");
        }
    }
}
