//! Folders of models that were trained from random weights: the reader opens them as the same model.

use std::path::Path;

use gapless::engine::nn::{Capacity, Choice, RouterConfig, Score};
use gapless::engine::ops::{DropPolicy, ExpertGroups, RopeScaling};
use gapless::models::hf::{Architecture, Folder, HfError, NewFolder};
use gapless::models::{Activation, GateActivation, GptConfig, LatentConfig, LlamaConfig, MoeConfig, Norms, QkNorm};
use gapless::{Precision, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

use crate::case::options;

const SEQUENCE: usize = 12;

fn gpt() -> GptConfig {
    GptConfig {
        vocabulary: 60,
        sequence: SEQUENCE,
        layers: 2,
        heads: 2,
        width: 16,
        dropout: 0.1,
        ..GptConfig::default()
    }
}

fn llama() -> LlamaConfig {
    LlamaConfig { vocabulary: 60, layers: 2, heads: 4, kv_heads: 2, width: 32, hidden: 40, ..LlamaConfig::default() }
}

fn gemma() -> LlamaConfig {
    LlamaConfig {
        activation: GateActivation::Gelu,
        norms: Norms::Both,
        offset_norms: true,
        scaled_embedding: true,
        query_scale: Some(24.0),
        sliding_window: Some(4),
        full_layers: vec![1],
        tied: true,
        ..llama()
    }
}

fn moe() -> MoeConfig {
    let router = RouterConfig { experts: 4, jitter: 0.01, z_loss: 0.001, ..RouterConfig::default() };
    MoeConfig { llama: llama(), router, expert_hidden: 24, ..MoeConfig::default() }
}

/// A mixture with latent attention, and sigmoid routers with a bias that changes in training.
fn deepseek() -> MoeConfig {
    let groups = Some(ExpertGroups { count: 2, limit: 1 });
    let score = Score::Sigmoid;
    let router = RouterConfig { score, scale: 2.5, groups, bias_rate: 0.001, experts: 4, ..RouterConfig::default() };
    let latent = LatentConfig {
        query_rank: Some(20),
        kv_rank: 24,
        plain_size: 10,
        rotated_size: 6,
        value_size: 14,
        neighbours: true,
    };
    let (dense_layers, latent) = (vec![0], Some(latent));
    MoeConfig { router, shared_hidden: 48, dense_layers, latent, ..moe() }
}

/// Models that a family has, with the name of the family.
fn models() -> Vec<(&'static str, Architecture)> {
    use Architecture::{Gpt, Llama, Moe};
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    let erf = Activation::GeluErf;
    let qwen = MoeConfig {
        llama: LlamaConfig { qkv_bias: true, ..llama() },
        shared_hidden: 20,
        shared_gate: true,
        dense_layers: vec![1],
        router: RouterConfig { renormalise: false, ..moe().router },
        ..moe()
    };
    vec![
        ("gpt2", Gpt(gpt())),
        ("gpt2", Gpt(GptConfig { hidden: Some(40), activation: erf, tied: false, ..gpt() })),
        ("llama", Llama(llama())),
        ("llama", Llama(LlamaConfig { tied: true, head_size: Some(10), rope_scaling: scaling, ..llama() })),
        (
            "llama",
            Llama(LlamaConfig { qkv_bias: true, output_bias: true, mlp_bias: true, padding: Some(0), ..llama() }),
        ),
        ("mistral", Llama(LlamaConfig { sliding_window: Some(4), ..llama() })),
        ("qwen2", Llama(LlamaConfig { qkv_bias: true, sliding_window: Some(4), full_layers: vec![0], ..llama() })),
        ("qwen3", Llama(LlamaConfig { qk_norm: QkNorm::Head, ..llama() })),
        ("olmo2", Llama(LlamaConfig { qk_norm: QkNorm::Width, norms: Norms::After, ..llama() })),
        ("gemma2", Llama(LlamaConfig { attention_cap: Some(50.0), logit_cap: Some(30.0), ..gemma() })),
        ("gemma3_text", Llama(LlamaConfig { qk_norm: QkNorm::Head, window_rope_theta: Some(1e4), ..gemma() })),
        ("mixtral", Moe(moe())),
        ("qwen2_moe", Moe(qwen)),
        ("qwen3_moe", Moe(MoeConfig { llama: LlamaConfig { qk_norm: QkNorm::Head, ..llama() }, ..moe() })),
        ("deepseek_v3", Moe(deepseek())),
    ]
}

/// Saves a model with random weights, and returns its loss.
fn saved(architecture: &Architecture, options: &TrainOptions, out: &Path) -> f32 {
    let mut loss = 0.0;
    let trainer = || {
        let mut trainer = Trainer::new(|vb| architecture.model(vb), options.clone())?;
        loss = evaluated(&mut trainer);
        Ok::<_, HfError>(trainer)
    };
    let folder = NewFolder::of(architecture, SEQUENCE, Some(7)).unwrap();
    folder.save(out, trainer, |_| Ok(())).unwrap();
    loss
}

fn evaluated(trainer: &mut Trainer) -> f32 {
    let ids: Vec<u32> = (0..2 * SEQUENCE as u32).map(|i| i * i % 59).collect();
    let targets: Vec<u32> = ids.iter().map(|id| (id + 1) % 60).collect();
    trainer.evaluate(&ids, &targets).unwrap()
}

#[test]
fn a_new_folder_is_opened_as_the_same_model() {
    for (family, architecture) in models() {
        for precision in [Precision::F32, Precision::Bf16] {
            let options = TrainOptions {
                step: StepOptions { precision, ..options(SEQUENCE).step },
                seed: 5,
                ..options(SEQUENCE)
            };
            let out = tempfile::tempdir().unwrap();
            let before = saved(&architecture, &options, out.path());
            let config: Value =
                serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
            assert_eq!((&config["model_type"], &config["eos_token_id"]), (&family.into(), &7.into()));
            assert_eq!(config["dtype"], if precision == Precision::F32 { "float32" } else { "bfloat16" });
            let folder = Folder::open(out.path()).unwrap_or_else(|error| panic!("{family}: {error}"));
            let mut trainer = Trainer::new(|vb| folder.model(vb), options).unwrap();
            folder.load(&mut trainer).unwrap();
            assert_eq!(evaluated(&mut trainer).to_bits(), before.to_bits(), "{family} {precision:?}");
            if precision == Precision::F32 {
                // Only the config.json is needed to write the model once more.
                let again = tempfile::tempdir().unwrap();
                let like = NewFolder::like(out.path()).unwrap();
                like.save(again.path(), || Ok::<_, HfError>(trainer), |_| Ok(())).unwrap();
                let bytes = |name: &str| [&out, &again].map(|folder| std::fs::read(folder.path().join(name)).unwrap());
                for name in ["config.json", "generation_config.json", "model.safetensors"] {
                    let [first, second] = bytes(name);
                    assert!(first == second, "{family}: {name}");
                }
            }
        }
    }
}

/// A model that no family computes is refused, and the error names what differs.
#[test]
fn a_model_without_a_family_is_refused() {
    let capacity = Some(Capacity { factor: 1.0, drop: DropPolicy::Lightest });
    let with_router = |router| Architecture::Moe(MoeConfig { router, ..moe() });
    let of_llama = Architecture::Llama;
    for (architecture, family, words) in [
        (
            of_llama(LlamaConfig { activation: GateActivation::Gelu, ..llama() }),
            "llama",
            "activation = \"silu\" (not \"gelu\")",
        ),
        (of_llama(LlamaConfig { output_bias: true, ..llama() }), "llama", "output_bias = false (not true)"),
        (of_llama(LlamaConfig { logit_cap: Some(30.0), ..llama() }), "llama", "logit_cap = null (not 30.0)"),
        (with_router(RouterConfig { capacity, ..moe().router }), "mixtral", "router.capacity"),
        (with_router(RouterConfig { capacity, choice: Choice::Experts, ..moe().router }), "mixtral", "router.choice"),
        (with_router(RouterConfig { bias_rate: 0.1, ..moe().router }), "mixtral", "router.fixed_bias"),
        (Architecture::Moe(MoeConfig { dense_layers: vec![1], ..deepseek() }), "deepseek_v3", "dense_layers"),
    ] {
        let error = NewFolder::of(&architecture, SEQUENCE, None).unwrap_err();
        assert!(matches!(&error, HfError::NoFamily { family: found, .. } if *found == family), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}
