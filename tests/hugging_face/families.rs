//! Compares a tiny model of each family with transformers: losses before and in training, greedy tokens, and the bits of
//! experts that are loaded and saved.
//!
//! `tests/evidence/hf/families.jsonl` has the results, and `families.py` beside it computes them. The weights are not
//! stored: [`elements`] computes them from the names of the tensors. If the folder `$GAPLESS_HF` has a families.jsonl, its
//! cases are compared too.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{Device, Tensor};
use gapless::engine::optim::{Adafactor, GaLore, Muon};
use gapless::models::hf::{Config, Folder, HfError};
use gapless::{DeviceChoice, GenerateOptions, Generation, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

use crate::case::options;
use crate::options::{expect_counted, read, with};

/// The number of tokens that a model sees in a sequence.
pub const SEQUENCE: usize = 19;
/// The greatest difference of losses. The greatest noise of f32 is a tenth of it.
const LOSS: f64 = 1e-5;

/// Returns 64 random bits per element: splitmix64, from the FNV-1a hash of a name and a salt.
fn bits(name: &str, salt: u64) -> impl Iterator<Item = u64> {
    let hash = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let state = format!("{name}:{salt}").bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    (1u64..).map(move |i| {
        let z = state.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Returns the elements of a stored tensor.
fn elements(name: &str, shape: &[usize], salt: u64) -> Vec<f32> {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let peaked =
        ["lm_head", "embed_out", "q_proj", "k_proj", "qkv", "query_key", "q_b_proj", "mlp.gate.", "mlp.router."];
    let routers = ["block_sparse_moe.gate", "block_sparse_moe.router", "feed_forward.router"];
    let root = (*shape.last().unwrap_or(&1) as f64).sqrt();
    let (mean, width) = match shape.len() {
        _ if name.ends_with("bias") => (0.0, 0.4),
        1 if !has(&["act_fn"]) => (1.0, 0.4),
        0 | 1 => (0.0, 0.5),
        _ if has(&["embed_tokens", "embed_in"]) => (0.0, 0.4),
        _ if has(&peaked) || has(&routers) => (0.0, 3.0 / root),
        _ => (0.0, 1.8 / root),
    };
    let uniform = bits(name, salt).map(|bits| (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0);
    uniform.take(shape.iter().product()).map(|x| (mean + width * x) as f32).collect()
}

fn ids(what: &str, salt: u64, count: usize, vocabulary: u64) -> Vec<u32> {
    bits(what, salt).take(count).map(|bits| 3 + (bits % (vocabulary - 3)) as u32).collect()
}

pub struct Family {
    pub name: String,
    record: Value,
}

impl Family {
    pub fn all() -> Vec<Self> {
        let files = crate::roots().into_iter().map(|root| root.join("families.jsonl"));
        let lines = files.filter_map(|file| std::fs::read_to_string(file).ok());
        let of_line = |line: &str| {
            let record: Value = serde_json::from_str(line).unwrap();
            Self { name: record["name"].as_str().unwrap().to_owned(), record }
        };
        lines.flat_map(|text| text.lines().map(of_line).collect::<Vec<_>>()).collect()
    }

    pub fn is_multimodal(&self) -> bool {
        self.record["config"].get("vision_config").is_some()
    }

    fn u32s(&self, name: &str) -> Vec<u32> {
        serde_json::from_value(self.record[name].clone()).unwrap()
    }

    /// Writes the folder.
    pub fn write(&self, folder: &Path) {
        let rows: Vec<(String, Vec<usize>, Vec<usize>, usize)> =
            serde_json::from_value(self.record["tensors"].clone()).unwrap();
        let mut tensors = BTreeMap::new();
        for (name, shape, layers, experts) in rows {
            for layer in if layers.is_empty() { vec![0] } else { layers } {
                for expert in 0..experts.max(1) {
                    let name = name.replace(".layers.#.", &format!(".layers.{layer}."));
                    let name = name.replace(".experts.#.", &format!(".experts.{expert}."));
                    let elements = elements(&name, &shape, self.record["salt"].as_u64().unwrap());
                    tensors.insert(name, Tensor::from_vec(elements, &shape[..], &Device::Cpu).unwrap());
                }
            }
        }
        // transformers stores the constants of xIELU.
        for alpha in tensors.keys().filter(|name| name.ends_with("act_fn.alpha_p")).cloned().collect::<Vec<_>>() {
            for (constant, value) in [("beta", 0.5_f32), ("eps", -1e-6)] {
                tensors.insert(alpha.replace("alpha_p", constant), Tensor::new(value, &Device::Cpu).unwrap());
            }
        }
        std::fs::write(folder.join("config.json"), self.record["config"].to_string()).unwrap();
        let tensors = tensors.into_iter().collect();
        candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    }

    /// Returns the tokens of two sequences, and those that follow them.
    pub fn sequences(&self, vocabulary: u64) -> [Vec<u32>; 2] {
        let ids = ids("input_ids", self.record["salt"].as_u64().unwrap(), 2 * (SEQUENCE + 1), vocabulary);
        [0, 1].map(|first| {
            ids.chunks_exact(SEQUENCE + 1).flat_map(|ids| &ids[first..first + SEQUENCE]).copied().collect()
        })
    }

    /// Compares losses, and returns the greatest difference.
    fn train(&self, trainer: &mut Trainer, vocabulary: u64) -> f64 {
        let [tokens, targets] = self.sequences(vocabulary);
        let expected: Vec<f64> = serde_json::from_value(self.record["losses"].clone()).unwrap();
        let found = expected.iter().map(|_| f64::from(trainer.step(&tokens, &targets).unwrap().loss));
        found.zip(&expected).map(|(found, expected)| (found - expected).abs()).fold(0.0, f64::max)
    }

    /// Returns the greedy continuation of the prompt.
    fn generate(&self, folder: &Folder) -> Result<Vec<u32>, HfError> {
        let (prompt, count) = (self.u32s("prompt"), self.u32s("tokens").len());
        let window = prompt.len() + count;
        let generation = Some(Generation { batch: 1, window: Some(window), chunk: 128 });
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: window, generation, ..StepOptions::default() },
            device: DeviceChoice::Cpu,
            threads: 2,
            ..TrainOptions::default()
        };
        let mut model = Trainer::builder(|vb| folder.model(vb), options).for_inference().build()?;
        folder.load(&mut model)?;
        let options = GenerateOptions::greedy(count);
        Ok(model.generate(&[&prompt[..]], &options, |_| ControlFlow::Continue(()))?.remove(0))
    }
}

/// Compares each family with its record, and panics with all differences.
fn compare(differences: impl Fn(&Family, &Path) -> Result<Option<String>, HfError>) {
    let mut wrong = Vec::new();
    for family in Family::all() {
        let folder = tempfile::tempdir().unwrap();
        family.write(folder.path());
        let found = differences(&family, folder.path()).unwrap_or_else(|error| Some(error.to_string()));
        wrong.extend(found.map(|found| format!("{}: {found}", family.name)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every family trains and generates on a GPU. Among them are all traits of decoders: sinks, rotary bases that grow,
/// experts with biases, latent attention, windows.
#[cfg(feature = "cuda")]
#[test]
fn each_family_has_gpu_kernels() {
    use gapless::TrainError;
    use gapless::engine::compile::Target;
    use gapless::engine::compile::step::{RankPlan, boxed_build, compile_step};
    use gapless::engine::runtime::Session;

    compare(|family, path| {
        let folder = Folder::open(path)?;
        let generation = Some(Generation { batch: 1, window: Some(SEQUENCE), chunk: 4 });
        let step = StepOptions { batch: 1, sequence: SEQUENCE, generation, ..StepOptions::default() };
        let ranks = RankPlan::of(&step, 0).map_err(TrainError::from)?;
        let build = boxed_build(|vb| folder.model(vb));
        let (executable, _) = compile_step(&build, &step, &ranks, Target::Cuda).map_err(TrainError::from)?;
        println!("{:<24} planned", family.name);
        Ok(Session::launches(&executable).err().map(|error| error.to_string()))
    });
}

#[test]
fn each_family_has_the_losses_of_transformers() {
    compare(|family, path| {
        let folder = Folder::open(path)?;
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(SEQUENCE))?;
        folder.load(&mut trainer)?;
        let off = family.train(&mut trainer, folder.config().vocabulary() as u64);
        println!("{:<24} losses {off:.1e}", family.name);
        Ok((off > LOSS).then(|| format!("losses differ by {off:e}")))
    });
}

#[test]
fn each_family_continues_a_text_like_transformers() {
    compare(|family, path| {
        let (found, expected) = (family.generate(&Folder::open(path)?)?, family.u32s("tokens"));
        Ok((found != expected).then(|| format!("greedy tokens {found:?}, not {expected:?}")))
    });
}

/// Experts, whose tensors have names and layouts of their own, are saved as they were read, and so are all parts of
/// multimodal models.
#[test]
fn experts_and_other_parts_keep_their_bits() {
    compare(|family, path| {
        if !family.is_multimodal() && !family.record["config"].to_string().contains("experts_per_tok") {
            return Ok(None);
        }
        let folder = Folder::open(path)?;
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(4))?;
        folder.load(&mut trainer)?;
        let saved = path.join("saved");
        folder.save(&trainer, &saved, None)?;
        let weights = |folder: &Path| candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu);
        let (before, after) = (weights(path)?, weights(&saved)?);
        let same = |(name, tensor): (&String, &Tensor)| {
            after.get(name).is_some_and(|saved| crate::saving::bits(saved) == crate::saving::bits(tensor))
        };
        Ok((before.len() != after.len() || !before.iter().all(same)).then(|| "tensors have changed".to_owned()))
    });
}

/// The number of parameters that is computed from the configuration is that of the model, without fixed biases.
#[test]
fn parameters_of_each_family_are_counted() {
    let families = Family::all();
    assert!(families.len() > 20);
    for family in families {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), family.record["config"].to_string()).unwrap();
        let Ok(config) = Config::read(folder.path()) else { panic!("{} is refused", family.name) };
        expect_counted(&config, &family.name);
    }
}

/// Families with parts that the decoder does not have are refused with the part.
#[test]
fn families_that_cannot_be_read_are_refused_with_the_reason() {
    for (family, reason) in [
        ("qwen3_next", "linear attention"),
        ("gemma3n_text", "per-layer embeddings"),
        ("mamba2", "state-space layers"),
        ("whisper", "an encoder"),
    ] {
        let error = read(&with(family, &serde_json::json!({}))).unwrap_err();
        assert!(error.contains(family) && error.contains(reason), "{error}");
    }
}

/// Returns the family's folder in a temporary folder.
fn written(name: &str) -> tempfile::TempDir {
    let family = Family::all().into_iter().find(|family| family.name == name).unwrap();
    let folder = tempfile::tempdir().unwrap();
    family.write(folder.path());
    folder
}

/// The published files of Qwen3-VL have the weights of experts transposed.
#[test]
fn transposed_experts_are_those_of_the_others() {
    let folder = written("qwen3_vl_moe");
    let loss = || {
        let folder = Folder::open(folder.path()).unwrap();
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(SEQUENCE)).unwrap();
        folder.load(&mut trainer).unwrap();
        trainer.evaluate(&[5; 2 * SEQUENCE], &[6; 2 * SEQUENCE]).unwrap()
    };
    let before = loss();
    let file = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains(".experts.")) {
        *tensor = tensor.transpose(1, 2).unwrap().contiguous().unwrap();
    }
    candle_core::safetensors::save(&tensors, file).unwrap();
    assert_eq!(loss(), before);
}

/// The text part of a multimodal model has older and newer names in files.
#[test]
fn each_name_of_a_text_part_is_read() {
    let folder = written("llava");
    let file = folder.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let losses = [
        ["language_model.model.", "language_model.lm_head."],
        ["model.language_model.", "lm_head."],
        ["model.", "lm_head."],
        ["language_model.", "lm_head."],
    ]
    .map(|[decoder, head]| {
        let renamed = |name: &String| {
            let of_decoder = name.strip_prefix("language_model.model.").map(|rest| format!("{decoder}{rest}"));
            let renamed =
                of_decoder.or_else(|| Some(format!("{head}{}", name.strip_prefix("language_model.lm_head.")?)));
            renamed.unwrap_or_else(|| name.clone())
        };
        let tensors = tensors.iter().map(|(name, tensor)| (renamed(name), tensor.clone())).collect();
        candle_core::safetensors::save(&tensors, &file).unwrap();
        let folder = Folder::open(folder.path()).unwrap();
        let mut trainer = Trainer::new(|vb| folder.model(vb), options(SEQUENCE)).unwrap();
        folder.load(&mut trainer).unwrap();
        trainer.evaluate(&[5; 2 * SEQUENCE], &[6; 2 * SEQUENCE]).unwrap()
    });
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
}

/// Muon's hidden matrices are neither the head, whatever its name, nor the biases of experts. Other rules train these
/// biases, too.
#[test]
fn heads_and_biases_of_experts_are_no_hidden_matrices() {
    for (family, matrix, other) in [
        ("gpt_neox", "gpt_neox.layers.0.attention.dense.weight", "embed_out.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_proj", "model.layers.0.mlp.experts.gate_proj_bias"),
    ] {
        let folder = written(family);
        let folder = Folder::open(folder.path()).unwrap();
        let trained = |optimizer| {
            let options = TrainOptions {
                step: StepOptions { batch: 1, sequence: SEQUENCE, optimizer, ..StepOptions::default() },
                device: DeviceChoice::Cpu,
                threads: 1,
                ..TrainOptions::default()
            };
            let mut trainer = Trainer::new(|vb| folder.model(vb), options).unwrap();
            let loss = trainer.step(&[5; SEQUENCE], &[6; SEQUENCE]).unwrap().loss;
            assert!(loss.is_finite(), "{:?}", trainer.options().step.optimizer);
            trainer
        };
        trained(Adafactor::default().into());
        trained(GaLore { rank: 2, ..GaLore::default() }.into());
        let muon = trained(Muon::default().into());
        let has = |state: &str, parameter: &str| muon.tensor(&format!("{state}/{parameter}")).is_ok();
        assert!(has("momentum", matrix) && !has("exp_avg", matrix));
        assert!(has("exp_avg", other) && !has("momentum", other));
    }
}

/// The constants of xIELU in a file are those with which the model computes. Other families have none.
#[test]
fn constants_of_xielu_are_checked() {
    let constants = [("model.layers.0.mlp.act_fn.beta", 0.5_f32), ("model.layers.0.mlp.act_fn.eps", -1e-6)];
    let load = |folder: &Path, factor: f32| {
        let file = folder.join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        for (name, value) in constants {
            tensors.insert(name.to_owned(), Tensor::new(value * factor, &Device::Cpu).unwrap());
        }
        candle_core::safetensors::save(&tensors, file).unwrap();
        let folder = Folder::open(folder)?;
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: SEQUENCE, ..StepOptions::default() },
            device: DeviceChoice::Cpu,
            threads: 1,
            ..TrainOptions::default()
        };
        folder.load(&mut Trainer::new(|vb| folder.model(vb), options)?)
    };
    let apertus = written("apertus");
    load(apertus.path(), 1.0).unwrap();
    let error = load(apertus.path(), 2.0).unwrap_err().to_string();
    assert!(error.contains("act_fn.beta is 1; supported: 0.5"), "{error}");
    let error = load(written("arcee").path(), 1.0).unwrap_err().to_string();
    assert!(error.contains("act_fn.beta") && error.contains("not a tensor of the model"), "{error}");
}

/// Compares the lines that each family takes with the table of docs/hugging_face.md: its entry in families.rs, and its own
/// functions in experts.rs. `--nocapture` prints the table, and the lines of `models/`.
#[test]
fn a_family_takes_few_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/src");
    let read = |file: &str| std::fs::read_to_string(root.join("hf").join(file)).unwrap();
    let (families, experts) = (read("families.rs"), read("experts.rs"));
    // The number of lines from the first line to the one with the closing bracket of this indentation.
    let length = |lines: &[&str]| {
        let indent = lines[0].len() - lines[0].trim_start().len();
        let closes = |line: &&str| line.get(indent..).is_some_and(|rest| ["}", "};", "},"].contains(&rest));
        if lines[0].ends_with('{') { 1 + lines.iter().position(closes).unwrap() } else { 1 }
    };
    let (lines, functions): (Vec<&str>, Vec<&str>) = (families.lines().collect(), experts.lines().collect());
    let mut counts = BTreeMap::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = line.split_once("name: \"").and_then(|(_, rest)| rest.split('"').next()) else { continue };
        let entry = &lines[if line.contains("Family {") { at } else { at - 1 }..];
        let entry = &entry[..length(entry)];
        let own = entry.iter().filter_map(|line| line.split_once("experts::")?.1.split([')', ',', '(']).next());
        let own = own.map(|name| functions.iter().position(|line| line.contains(&format!("fn {name}("))).unwrap());
        counts.insert(name, entry.len() + own.map(|at| length(&functions[at..])).sum::<usize>());
    }
    let cells: Vec<String> = counts.iter().map(|(name, count)| format!("| `{name}` | {count} ")).collect();
    for row in cells.chunks(3) {
        let row = format!("{}|", row.concat());
        println!("{row}");
        gapless_testing::assert_on_page("docs/hugging_face.md", &row);
    }
    let folders = [root.clone(), root.join("decoder"), root.join("hf")];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let of_file = |path: std::path::PathBuf| std::fs::read_to_string(path).map_or(0, |text| text.lines().count());
    println!("{} lines of models/", files.map(of_file).sum::<usize>());
    assert!(counts.len() == 66 && counts.values().all(|count| *count < 60), "{counts:?}");
}
