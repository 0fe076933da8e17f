//! Rules of thumb for the memory that training takes. Reports compare plans with them.

use gapless_models::hf::Architecture;
use gapless_parallel::Mesh;

use super::{Precision, Step};

/// Two estimates of the bytes that the fullest rank takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Bytes of parameters, gradients, masters and moments for a rank's equal share of the model, without activations.
    /// In bf16 with f32 masters, this is 18 bytes per parameter. ZeRO (arXiv 1910.02054, section 3.1) counts 16 bytes;
    /// the other 2 are because gradients are f32 here.
    pub bytes_per_parameter: f64,
    /// The result of Megatron-LM's `theoretical_memory_usage.py`. This is the bytes of parameters, gradients, masters
    /// and moments for the first stage with its embedding, plus activations by arXiv 2205.05198, table 2, with
    /// selective recomputation.
    pub megatron: f64,
}

/// The sizes that Megatron-LM's formulas use.
struct Extents {
    layers: f64,
    width: f64,
    heads: f64,
    kv_heads: f64,
    head_size: f64,
    hidden: f64,
    vocabulary: f64,
    experts: f64,
    is_gated: bool,
    is_tied: bool,
}

impl Extents {
    fn of(architecture: &Architecture) -> Self {
        let number = |n: usize| n as f64;
        match architecture {
            Architecture::Gpt(gpt) => Self {
                layers: number(gpt.layers),
                width: number(gpt.width),
                heads: number(gpt.heads),
                kv_heads: number(gpt.heads),
                head_size: number(gpt.width) / number(gpt.heads.max(1)),
                hidden: number(gpt.hidden.unwrap_or(4 * gpt.width)),
                vocabulary: number(gpt.vocabulary),
                experts: 1.0,
                is_gated: false,
                is_tied: gpt.tied,
            },
            Architecture::Llama(llama) => Self {
                layers: number(llama.layers),
                width: number(llama.width),
                heads: number(llama.heads),
                kv_heads: number(llama.kv_heads),
                head_size: number(llama.head_size.unwrap_or(llama.width / llama.heads.max(1))),
                hidden: number(llama.hidden),
                vocabulary: number(llama.vocabulary),
                experts: 1.0,
                is_gated: true,
                is_tied: llama.tied,
            },
            Architecture::Moe(moe) => Self {
                hidden: number(moe.expert_hidden),
                experts: number(moe.router.experts),
                ..Self::of(&Architecture::Llama(moe.llama.clone()))
            },
        }
    }

    /// Number of parameters in the layers and their norms.
    fn parameters_in_layers(&self) -> f64 {
        let gate = if self.is_gated { 1.5 } else { 1.0 };
        let attention = (1.0 + self.kv_heads / self.heads) * (self.head_size * self.heads / self.width);
        let feed_forward = self.hidden / self.width * self.experts * gate;
        let norms = 2.0 / self.width + 1.0 / (self.layers * self.width);
        2.0 * self.layers * self.width * self.width * (attention + feed_forward + norms)
    }
}

/// Computes the estimates for a step of a model with `parameters` parameters.
pub fn estimate(step: &Step, parameters: u64) -> Estimate {
    let extents = Extents::of(step.architecture());
    let options = &step.options;
    let Mesh { pipeline, data, shard, tensor, .. } = options.mesh;
    let [stages, data, shard, tensor, micro_batches, chunks] =
        [pipeline, data, shard, tensor, options.micro_batches, options.pipeline.chunks].map(|n| n as f64);
    // Parameter, gradient and optimizer states.
    let [parameter, gradient, states] = match step.precision() {
        Precision::F32 => [4.0, 4.0, 8.0],
        Precision::PureBf16 => [2.0, 2.0, 4.0],
        Precision::Bf16 => [2.0, 4.0, 12.0 / data],
    };
    let per_parameter = parameter / if options.zero_stage == 3 { shard } else { 1.0 } + (gradient + states) / shard;
    // The fullest rank has an equal share of the layers, and also the embedding.
    let table = extents.width * extents.vocabulary;
    let head = if stages == 1.0 && !extents.is_tied { table } else { 0.0 };
    let first = extents.parameters_in_layers() / stages + table + head;
    let sequences = options.evaluation_batch() as f64;
    let tokens = options.sequence as f64 * sequences / options.mesh.context as f64;
    // Without sequence parallelism, tensor ranks divide 24 of the 34 bytes per element of a layer.
    let whole = tensor > 1.0 && !options.sequence_parallel;
    let per_element = if whole { 10.0 + 24.0 / tensor } else { 18.0 + 4.0 * extents.hidden / extents.width };
    let mut activations = tokens * extents.width * per_element * extents.layers;
    activations += (8.0 + extents.width) * tokens * stages;
    if chunks > 1.0 {
        activations *= 1.0 + (stages - 1.0) / (stages * chunks);
    } else if stages > 1.0 {
        activations *= (micro_batches / stages).min(1.0);
    } else {
        activations += tokens * extents.width * 4.0 * (1.0 + extents.vocabulary / extents.width);
    }
    // The script's margin for what it leaves out without sequence parallelism.
    activations *= if whole { 1.05 } else { 1.0 / tensor };
    Estimate {
        bytes_per_parameter: per_parameter * parameters as f64 / stages / tensor,
        megatron: per_parameter * first / tensor + activations,
    }
}

#[cfg(test)]
mod tests {
    use gapless_parallel::Mesh;

    use super::*;
    use crate::run::RunConfig;

    /// Expected values computed by hand from the formulas.
    #[test]
    fn what_the_formulas_say_of_a_7b_model() {
        let run = RunConfig::parse(
            "model = 'llama2-7b'
mesh.pipeline = 4
step = { precision = 'bf16', batch = 4, micro_batches = 4, sequence = 4096 }",
            &[],
        )
        .unwrap();
        let found = estimate(&Step::new(&run).unwrap(), 6_738_415_616);
        assert_eq!(found.bytes_per_parameter, 18.0 * 6_738_415_616.0 / 4.0);
        // Layers: 2 · 32 · 4096² · (2 + 1.5 · 11008/4096) and 65 norms.
        let layers = 64.0 * 4096f64.powi(2) * (2.0 + 1.5 * 11008.0 / 4096.0) + 65.0 * 8192.0;
        let first = layers / 4.0 + 32_000.0 * 4096.0;
        let activations = 4096.0 * (4096.0 * 18.0 + 4.0 * 11008.0) * 32.0 + (8.0 + 4096.0) * 4096.0 * 4.0;
        assert!((found.megatron / (18.0 * first + activations) - 1.0).abs() < 1e-4, "{found:?}");
        let split = |sequence_parallel| {
            let mut run = RunConfig { mesh: Mesh { tensor: 4, ..run.mesh }, ..run.clone() };
            run.step.sequence_parallel = sequence_parallel;
            estimate(&Step::new(&run).unwrap(), 6_738_415_616)
        };
        assert_eq!(split(true).bytes_per_parameter, found.bytes_per_parameter / 4.0);
        assert_eq!(split(true).megatron, found.megatron / 4.0);
        // 4 KiB tokens · 4096 · (10 + 24 / 4) · 32 layers, and what all stages receive.
        let whole = 4096.0 * 4096.0 * 16.0 * 32.0 + (8.0 + 4096.0) * 4096.0 * 4.0;
        assert!((split(false).megatron / (18.0 * first / 4.0 + 1.05 * whole) - 1.0).abs() < 1e-4);
    }
}
