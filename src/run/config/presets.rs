//! Well-known models by name.

/// Preset models: their names, their titles in reports, and their tables.
pub const PRESETS: [(&str, &str, &str); 23] = [
    (
        "small",
        "small GPT, 6 layers of width 384",
        "gpt = { vocabulary = 4096, sequence = 0, layers = 6, heads = 6, width = 384 }",
    ),
    ("gpt2", "GPT-2 124M", "gpt = { layers = 12, heads = 12, width = 768 }"),
    ("gpt2-medium", "GPT-2 355M", "gpt = { layers = 24, heads = 16, width = 1024 }"),
    ("gpt2-large", "GPT-2 774M", "gpt = { layers = 36, heads = 20, width = 1280 }"),
    ("gpt2-xl", "GPT-2 1.5B", "gpt = { layers = 48, heads = 25, width = 1600 }"),
    ("gpt3-175b", "GPT-3 175B", "gpt = { sequence = 2048, layers = 96, heads = 96, width = 12288 }"),
    ("llama2-7b", "Llama 2 7B", "llama = { vocabulary = 32000, kv_heads = 32, hidden = 11008, rope_theta = 1e4 }"),
    (
        "llama2-13b",
        "Llama 2 13B",
        "llama = { vocabulary = 32000, layers = 40, heads = 40, kv_heads = 40, width = 5120, hidden = 13824, rope_theta = 1e4 }",
    ),
    (
        "llama2-70b",
        "Llama 2 70B",
        "llama = { vocabulary = 32000, layers = 80, heads = 64, width = 8192, hidden = 28672, rope_theta = 1e4 }",
    ),
    ("llama3-8b", "Llama 3 8B", "llama = {}"),
    ("llama3-70b", "Llama 3 70B", "llama = { layers = 80, heads = 64, width = 8192, hidden = 28672 }"),
    ("llama3-405b", "Llama 3 405B", "llama = { layers = 126, heads = 128, width = 16384, hidden = 53248 }"),
    ("qwen2.5-7b", "Qwen2.5 7B", QWEN2_5_7B),
    ("qwen2.5-32b", "Qwen2.5 32B", QWEN2_5_32B),
    ("qwen2.5-72b", "Qwen2.5 72B", QWEN2_5_72B),
    ("qwen3-8b", "Qwen3 8B", QWEN3_8B),
    ("qwen3-32b", "Qwen3 32B", QWEN3_32B),
    ("qwen3-30b-a3b", "Qwen3 30B-A3B", QWEN3_30B_A3B),
    ("qwen3-235b-a22b", "Qwen3 235B-A22B", QWEN3_235B_A22B),
    ("mixtral8x7b", "Mixtral 8x7B", "moe = {}"),
    ("mixtral8x22b", "Mixtral 8x22B", MIXTRAL_8X22B),
    ("qwen-moe", "Qwen1.5-MoE-A2.7B", QWEN_MOE),
    ("deepseek-v3", "DeepSeek-V3", DEEPSEEK_V3),
];

/// Qwen2.5 technical report (arXiv 2412.15115), table 1.
const QWEN2_5_7B: &str = "
[llama]
vocabulary = 152064
layers = 28
heads = 28
kv_heads = 4
width = 3584
hidden = 18944
qkv_bias = true
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const QWEN2_5_32B: &str = "
[llama]
vocabulary = 152064
layers = 64
heads = 40
width = 5120
hidden = 27648
qkv_bias = true
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const QWEN2_5_72B: &str = "
[llama]
vocabulary = 152064
layers = 80
heads = 64
width = 8192
hidden = 29568
qkv_bias = true
rope_theta = 1e6
rms_norm_eps = 1e-6
";

/// Qwen3 technical report (arXiv 2505.09388), tables 1 and 2.
const QWEN3_8B: &str = "
[llama]
vocabulary = 151936
layers = 36
head_size = 128
hidden = 12288
qk_norm = 'head'
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const QWEN3_32B: &str = "
[llama]
vocabulary = 151936
layers = 64
heads = 64
head_size = 128
width = 5120
hidden = 25600
qk_norm = 'head'
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const QWEN3_30B_A3B: &str = "
moe.expert_hidden = 768
moe.router = { experts = 128, top_k = 8, balance_loss = 0.001 }
[moe.llama]
vocabulary = 151936
layers = 48
kv_heads = 4
head_size = 128
width = 2048
hidden = 6144
qk_norm = 'head'
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const QWEN3_235B_A22B: &str = "
moe.expert_hidden = 1536
moe.router = { experts = 128, top_k = 8, balance_loss = 0.001 }
[moe.llama]
vocabulary = 151936
layers = 94
heads = 64
kv_heads = 4
head_size = 128
width = 4096
hidden = 12288
qk_norm = 'head'
rope_theta = 1e6
rms_norm_eps = 1e-6
";

const MIXTRAL_8X22B: &str = "
moe.expert_hidden = 16384
[moe.llama]
vocabulary = 32000
layers = 56
heads = 48
width = 6144
hidden = 16384
rope_theta = 1e6
";

const QWEN_MOE: &str = "
moe.expert_hidden = 1408
moe.shared_hidden = 5632
moe.shared_gate = true
moe.router = { experts = 60, top_k = 4, renormalise = false, balance_loss = 0.001 }
[moe.llama]
vocabulary = 151936
layers = 24
heads = 16
kv_heads = 16
width = 2048
hidden = 5632
rope_theta = 1e6
rms_norm_eps = 1e-6
";

/// DeepSeek-V3 (arXiv 2412.19437), section 4.2, without the module that predicts a second token.
const DEEPSEEK_V3: &str = "
moe.expert_hidden = 2048
moe.shared_hidden = 2048
moe.dense_layers = [0, 1, 2]
moe.router = { experts = 256, top_k = 8, score = 'sigmoid', scale = 2.5, groups = { count = 8, limit = 4 }, balance_loss = 1e-4, bias_rate = 1e-3 }
moe.latent = {}
[moe.llama]
vocabulary = 129280
layers = 61
heads = 128
kv_heads = 128
width = 7168
hidden = 18432
rope_theta = 1e4
rms_norm_eps = 1e-6
";

#[cfg(test)]
mod tests {
    use gapless_models::hf::Architecture;

    use super::*;
    use crate::run::ModelConfig;

    /// The number of parameters of each preset as published: in a paper, rounded as there, or of the weights on
    /// huggingface.co.
    #[test]
    fn parameters_are_those_published() {
        let hundred_million = 100_000_000;
        let published: [(&str, u64, u64, &str); 22] = [
            ("gpt2", 124_439_808, 1, "openai-community/gpt2"),
            ("gpt2-medium", 354_823_168, 1, "openai-community/gpt2-medium"),
            ("gpt2-large", 774_030_080, 1, "openai-community/gpt2-large"),
            ("gpt2-xl", 1_557_611_200, 1, "openai-community/gpt2-xl"),
            ("gpt3-175b", 175_000_000_000, 10 * hundred_million, "arXiv 2005.14165, table 2.1"),
            ("llama2-7b", 6_738_415_616, 1, "meta-llama/Llama-2-7b-hf"),
            ("llama2-13b", 13_015_864_320, 1, "meta-llama/Llama-2-13b-hf"),
            ("llama2-70b", 68_976_648_192, 1, "meta-llama/Llama-2-70b-hf"),
            ("llama3-8b", 8_030_261_248, 1, "meta-llama/Meta-Llama-3-8B"),
            ("llama3-70b", 70_553_706_496, 1, "meta-llama/Meta-Llama-3-70B"),
            ("llama3-405b", 405_853_388_800, 1, "meta-llama/Llama-3.1-405B"),
            ("qwen2.5-7b", 7_615_616_512, 1, "Qwen/Qwen2.5-7B"),
            ("qwen2.5-32b", 32_763_876_352, 1, "Qwen/Qwen2.5-32B"),
            ("qwen2.5-72b", 72_706_203_648, 1, "Qwen/Qwen2.5-72B"),
            ("qwen3-8b", 8_190_735_360, 1, "Qwen/Qwen3-8B"),
            ("qwen3-32b", 32_762_123_264, 1, "Qwen/Qwen3-32B"),
            ("qwen3-30b-a3b", 30_532_122_624, 1, "Qwen/Qwen3-30B-A3B"),
            ("qwen3-235b-a22b", 235_093_634_560, 1, "Qwen/Qwen3-235B-A22B"),
            ("mixtral8x7b", 46_702_792_704, 1, "mistralai/Mixtral-8x7B-v0.1"),
            ("mixtral8x22b", 140_620_634_112, 1, "mistralai/Mixtral-8x22B-v0.1"),
            ("qwen-moe", 14_300_000_000, hundred_million, "Qwen/Qwen1.5-MoE-A2.7B"),
            ("deepseek-v3", 671_000_000_000, 10 * hundred_million, "arXiv 2412.19437, abstract"),
        ];
        let (first, others) = PRESETS.split_first().unwrap();
        assert_eq!((first.0, others.len()), ("small", published.len()));
        for ((name, ..), (of, expected, unit, source)) in others.iter().zip(published) {
            assert_eq!(*name, of);
            let parameters = match ModelConfig::named(name).unwrap().architecture().unwrap() {
                Architecture::Gpt(gpt) => {
                    gpt.check().unwrap();
                    gpt.parameters()
                }
                Architecture::Llama(llama) => {
                    llama.check().unwrap();
                    llama.parameters()
                }
                Architecture::Moe(moe) => {
                    moe.check().unwrap();
                    moe.parameters()
                }
            };
            let rounded = (parameters + unit / 2) / unit * unit;
            assert_eq!(rounded, expected, "{name}: {parameters}, published as {source}");
        }
    }
}
