//! Adapters in PEFT's format. Compares their results with those of PEFT, and tests reading and writing them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use gapless::models::hf::{Adapter, Folder, HfError};
use gapless::nn::LoraInit;
use gapless::{Lora, Mesh, Quantize, StepOptions, TrainOptions, Trainable, Trainer, Window, communicator};
use serde_json::{Value, json};

use crate::case::{options, read, unsupported};
use crate::numbers::{GRADIENT, LOGITS, LOSS, PARAMETERS, relative, root_mean_square, values};
use crate::saving::bits;

pub struct Case {
    pub name: String,
    pub folder: PathBuf,
    pub expected: HashMap<String, Tensor>,
    about: Value,
}

impl Case {
    fn all() -> Vec<Self> {
        let folders = crate::roots().into_iter().flat_map(|root| crate::folders(&root.join("lora")));
        folders.map(Self::read).collect()
    }

    pub fn read(folder: PathBuf) -> Self {
        let (expected, about) = read(&folder);
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        Self { name, folder, expected, about }
    }

    /// Opens the base model and the adapter, and creates a trainer with both.
    fn trainer(&self) -> Result<(Folder, Adapter, Trainer), HfError> {
        let adapter = Adapter::open(self.folder.join("adapter"))?;
        self.trainer_of(&adapter.base()?, adapter.trainable())
    }

    /// Creates a trainer with the weights of the folder `base` and this case's adapter.
    pub fn trainer_of(&self, base: &Path, trainable: Trainable) -> Result<(Folder, Adapter, Trainer), HfError> {
        let adapter = Adapter::open(self.folder.join("adapter"))?;
        let base = Folder::open(base)?;
        let sequence = self.ids()[0].len() - 1;
        let options = TrainOptions { step: StepOptions { trainable, ..options(sequence).step }, ..options(sequence) };
        let mut trainer = Trainer::new(|vb| base.model(vb), options)?;
        base.load(&mut trainer)?;
        adapter.load(&base, &mut trainer)?;
        Ok((base, adapter, trainer))
    }

    pub fn ids(&self) -> Vec<Vec<u32>> {
        let ids = values(&self.expected["input_ids"]).into_iter().map(|id| id as u32).collect::<Vec<_>>();
        ids.chunks_exact(self.expected["input_ids"].dims()[1]).map(<[u32]>::to_vec).collect()
    }

    /// Returns the expected tensors whose keys begin with `prefix`, with the rest of each key.
    fn expected_under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Tensor)> {
        self.expected.iter().filter_map(move |(key, tensor)| Some((key.strip_prefix(prefix)?, tensor)))
    }

    fn noise(&self, name: &str) -> f64 {
        self.about["noise_f32_against_f64"][name].as_f64().unwrap_or(0.0)
    }

    /// Compares logits, losses, gradients and the adapter after three steps with the expected ones. `what` describes the
    /// trainer.
    pub fn compare(&self, trainer: &mut Trainer, what: &str) {
        let (ids, length) = (self.ids(), self.ids()[0].len());
        let logits = logits(trainer, &ids, &self.expected["logits"]);
        assert!(logits <= LOGITS.max(5.0 * self.noise("logits")), "{what}: logits differ by {logits:e}");

        let flat =
            |first: usize| ids.iter().flat_map(|ids| &ids[first..first + length - 1]).copied().collect::<Vec<_>>();
        let (tokens, targets) = (flat(0), flat(1));
        let (mut losses, mut gradients) = (Vec::new(), 0.0f64);
        for step in 0..3 {
            losses.push(f64::from(trainer.step(&tokens, &targets).unwrap().loss));
            for (stored, expected) in self.expected_under("grad.").filter(|_| step == 0) {
                let found = trainer.gradient(parameter(stored)).unwrap();
                gradients = gradients.max(relative(&values(&found), &values(expected)));
            }
        }
        losses.push(f64::from(trainer.evaluate(&tokens, &targets).unwrap()));
        assert!(gradients <= GRADIENT.max(5.0 * self.noise("grad")), "{what}: gradients {gradients:e}");
        let off = losses.iter().zip(values(&self.expected["losses"])).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off <= LOSS, "{what}: losses {losses:?}");
        let mut parameters = 0.0f64;
        for (stored, expected) in self.expected_under("param_after.") {
            let found = trainer.tensor(parameter(stored)).unwrap();
            parameters = parameters.max(root_mean_square(&values(&found), &values(expected)));
        }
        assert!(parameters <= PARAMETERS, "{what}: parameters {parameters:e}");
        println!(
            "{what:<24} logits {logits:.1e} losses {off:.1e} gradients {gradients:.1e} parameters {parameters:.1e}"
        );
    }
}

/// Returns the engine's name of a parameter, given PEFT's name.
fn parameter(stored: &str) -> &str {
    let module = stored.strip_prefix("base_model.model.").unwrap();
    module.strip_prefix("transformer.").unwrap_or(module)
}

#[test]
fn what_peft_computes() {
    let mut checked = 0;
    for case in Case::all() {
        let (_, _, mut trainer) = match case.trainer() {
            Ok(made) => made,
            Err(error) => {
                let why = unsupported(&error).unwrap_or_else(|| panic!("{}: {error}", case.name));
                println!("{:<24} refused: {why}", case.name);
                continue;
            }
        };
        checked += 1;
        case.compare(&mut trainer, &case.name);
    }
    assert!(checked > 0);
}

/// Returns the largest difference of logits. A trainer's window is one token shorter than the ids, so the last
/// position is not compared.
pub fn logits(trainer: &mut Trainer, ids: &[Vec<u32>], expected: &Tensor) -> f64 {
    let mut worst = 0.0f64;
    for (row, ids) in ids.iter().enumerate() {
        let found = values(&trainer.logits(&ids[..ids.len() - 1]).unwrap());
        let expected = expected.get(row).unwrap().narrow(0, 0, ids.len() - 1).unwrap();
        worst = worst.max(relative(&found, &values(&expected)));
    }
    worst
}

/// The tensors of a file, by name.
fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect()
}

fn config(folder: &Path) -> serde_json::Map<String, Value> {
    serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
}

#[test]
fn an_adapter_that_is_saved_is_the_one_that_was_opened() {
    for case in Case::all() {
        let Ok((base, adapter, trainer)) = case.trainer() else { continue };
        let out = tempfile::tempdir().unwrap();
        let (again, new) = (out.path().join("again"), out.path().join("new"));
        adapter.save(&base, &trainer, &again).unwrap();
        base.save_adapter(&trainer, &new).unwrap();
        let before = tensors(&case.folder.join("adapter/adapter_model.safetensors"));
        let theirs = config(&case.folder.join("adapter"));
        for saved in [&again, &new] {
            let after = tensors(&saved.join("adapter_model.safetensors"));
            assert!(before.keys().eq(after.keys()), "{}: {:?}", case.name, after.keys());
            for (name, tensor) in &before {
                assert!(*saved == new || bits(tensor) == bits(&after[name]), "{}: {name} has changed", case.name);
                assert_eq!(tensor.dims(), after[name].dims(), "{}: {name}", case.name);
            }
            // Every option that PEFT reads must have the same meaning in the saved adapter.
            let ours = config(saved);
            for (option, value) in &ours {
                let same = theirs.get(option) == Some(value) || option == "base_model_name_or_path";
                assert!(same, "{}: {option} is {value}, was {:?}", case.name, theirs.get(option));
            }
            let opened = Adapter::open(saved).unwrap();
            assert_eq!(opened.trainable(), adapter.trainable(), "{}", case.name);
            assert_eq!(opened.base().unwrap(), case.folder.join("base").canonicalize().unwrap());
        }
        assert!(matches!(base.save_adapter(&trainer, &new), Err(HfError::Exists { .. })));
    }
}

#[test]
fn a_merged_folder_is_the_base_with_the_adapter_added() {
    for case in Case::all() {
        let Ok((base, _, mut trainer)) = case.trainer() else { continue };
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("merged");
        base.save(&trainer, &out, None).unwrap();
        let read = |folder: &Path| {
            let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let files = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
            files.flat_map(|path| tensors(&path)).collect::<BTreeMap<String, Tensor>>()
        };
        let (before, after) = (read(&case.folder.join("base")), read(&out));
        assert!(before.keys().eq(after.keys()));
        let expected: HashMap<&str, &Tensor> = case.expected_under("merged.").collect();
        assert!(!expected.is_empty());
        for (name, tensor) in &before {
            match expected.get(name.as_str()) {
                None => assert!(bits(tensor) == bits(&after[name]), "{}: {name} has changed", case.name),
                Some(expected) => {
                    let off = relative(&values(&after[name]), &values(expected));
                    let limit = 1e-6f64.max(2.0 * case.noise("merged"));
                    assert!(off <= limit, "{}: {name} differs by {off:e}", case.name);
                }
            }
        }
        // The same model without adapters.
        let folder = Folder::open(&out).unwrap();
        let options = TrainOptions {
            step: StepOptions { trainable: Trainable::All, ..trainer.options().step.clone() },
            ..trainer.options().clone()
        };
        let mut merged = Trainer::new(|vb| folder.model(vb), options).unwrap();
        folder.load(&mut merged).unwrap();
        let ids = case.ids();
        for trainer in [&mut trainer, &mut merged] {
            assert!(logits(trainer, &ids, &case.expected["logits"]) <= LOGITS, "{}", case.name);
        }
    }
}

/// For every model family, with adapters on all linear layers: the saved adapter is read back unchanged, and the
/// merged model computes the same.
#[test]
fn adapters_of_every_family_are_saved_read_and_merged() {
    for case in crate::case::Case::all() {
        let Ok(folder) = Folder::open(&case.checkpoint) else { continue };
        let all = ["q_proj", "v_proj", "o_proj", "c_attn", "mlp.c_proj", "shared_expert.up_proj"];
        let has =
            |target: &&&str| folder.config().parameters().any(|(name, _)| name.contains(&format!("{target}.weight")));
        let targets: Vec<String> = all.iter().filter(has).map(|&target| target.to_owned()).collect();
        let lora = Lora { rank: 4, alpha: 6.0, targets, rank_stabilised: true, ..Lora::default() };
        let sequence = folder.config().longest_sequence().map_or(8, |longest| longest.min(8));
        let options = TrainOptions {
            step: StepOptions { trainable: Trainable::Lora(lora), ..options(sequence).step },
            ..options(sequence)
        };
        let new = || {
            let mut trainer = Trainer::new(|vb| folder.model(vb), options.clone())?;
            folder.load(&mut trainer)?;
            Ok::<_, HfError>(trainer)
        };
        let mut trainer = new().unwrap();
        let ids: Vec<u32> = (0..2 * sequence as u32).collect();
        for _ in 0..2 {
            trainer.step(&ids, &ids).unwrap();
        }

        let out = tempfile::tempdir().unwrap();
        let (adapter, merged) = (out.path().join("adapter"), out.path().join("merged"));
        folder.save_adapter(&trainer, &adapter).unwrap();
        folder.save(&trainer, &merged, None).unwrap();
        let mut read = new().unwrap();
        Adapter::open(&adapter).unwrap().load(&folder, &mut read).unwrap();
        for name in trainer.parameter_names() {
            assert!(bits(&trainer.tensor(name).unwrap()) == bits(&read.tensor(name).unwrap()), "{}: {name}", case.name);
        }
        let of_merged = Folder::open(&merged).unwrap();
        let whole =
            TrainOptions { step: StepOptions { trainable: Trainable::All, ..options.step.clone() }, ..options.clone() };
        let mut whole = Trainer::new(|vb| of_merged.model(vb), whole).unwrap();
        of_merged.load(&mut whole).unwrap();
        let [expected, found] =
            [&mut trainer, &mut whole].map(|trainer| values(&trainer.logits(&ids[..sequence]).unwrap()));
        // A merged weight is rounded to the type in which it is stored on disk.
        let is_bf16 = case.name.contains("bf16");
        let (off, limit) = (relative(&found, &expected), if is_bf16 { 5e-2 } else { LOGITS });
        println!("{:<24} merged, logits differ by {off:.1e}", case.name);
        assert!(off <= limit, "{}: {off:e}", case.name);
    }
}

/// Ranks that divide weights keep their parts of the adapters that follow from whole weights: the norms of DoRA, also of
/// quantized weights, and the principal components of PiSSA.
#[test]
fn ranks_start_adapters_from_whole_weights() {
    let folder = Folder::open("tests/evidence/hf/quantized/plain").unwrap();
    let (plain, nf4) = (None, Some(Quantize::default()));
    let targets = || ["q_proj", "o_proj", "up_proj", "down_proj"].map(str::to_owned).to_vec();
    let lora = |dora, init, quantize| Lora { rank: 16, targets: targets(), dora, init, quantize, ..Lora::default() };
    for lora in [
        lora(true, LoraInit::default(), plain.clone()),
        lora(false, LoraInit::Pissa, plain.clone()),
        lora(true, LoraInit::Pissa, plain),
        lora(true, LoraInit::default(), nf4),
    ] {
        let on = |mesh: Mesh| {
            let parts = communicator::on_threads(mesh.ranks().unwrap(), |world| {
                let mut options = options(8);
                options.step.trainable = Trainable::Lora(lora.clone());
                (options.step.mesh, options.step.keep_gradients) = (mesh, false);
                let mut trainer = Trainer::builder(|vb| folder.model(vb), options).distributed(world).build()?;
                folder.load(&mut trainer).unwrap();
                let part = |name: &str| {
                    let tensor = trainer.tensor(name).unwrap().to_dtype(candle_core::DType::F32).unwrap();
                    (name.to_owned(), (trainer.window(name).unwrap(), values(&tensor)))
                };
                Ok(trainer.parameter_names().map(part).collect::<BTreeMap<String, (Window, Vec<f64>)>>())
            });
            parts.unwrap()
        };
        let whole = on(Mesh::default()).swap_remove(0);
        for mesh in [Mesh { tensor: 2, ..Mesh::default() }, Mesh { shard: 2, ..Mesh::default() }] {
            let mut divided = BTreeSet::new();
            for (name, (window, part)) in on(mesh).into_iter().flatten() {
                let own: Vec<f64> = window.runs().flatten().map(|index| whole[&name].1[index]).collect();
                assert!(part == own, "{lora:?} on {mesh:?}: {name}");
                if !window.is_whole() {
                    divided.insert(name);
                }
            }
            let is_start = |name: &String| name.contains("lora") || name.contains("magnitude");
            assert!(divided.iter().any(is_start), "{lora:?} on {mesh:?}: {divided:?}");
        }
    }
}

/// An option that would change the computation is an error that names the option.
#[test]
fn options_that_are_not_supported_are_named() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/lora/llama_qv/adapter");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    let open = |option: &str, value: Value| {
        let mut options = config(&from);
        options.insert(option.into(), value);
        std::fs::write(folder.path().join("adapter_config.json"), serde_json::to_vec(&options).unwrap()).unwrap();
        Adapter::open(folder.path())
    };
    for (option, value) in [
        ("peft_type", json!("IA3")),
        ("r", json!(0)),
        ("lora_alpha", json!("large")),
        ("lora_dropout", json!(1.0)),
        ("target_modules", json!("all-linear")),
        ("target_modules", json!([])),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("rank_pattern", json!({ "q_proj": 2 })),
        ("alpha_pattern", json!({ "q_proj": 2 })),
        ("modules_to_save", json!(["lm_head"])),
        ("layers_to_transform", json!([0])),
        ("exclude_modules", json!(["v_proj"])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("task_type", json!("SEQ_CLS")),
        ("use_something_new", json!(true)),
    ] {
        let error = open(option, value).unwrap_err().to_string();
        assert!(error.contains(option), "{option}: {error}");
    }
    let scale = |adapter: Adapter| match adapter.trainable() {
        Trainable::Lora(lora) => lora.scale(),
        other => panic!("{other:?}"),
    };
    // The layers that a pattern matches are those in the file.
    let Trainable::Lora(matched) = open("target_modules", json!(".*_proj")).unwrap().trainable() else { panic!() };
    let layers = ["0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"];
    assert_eq!(matched.targets, layers.map(|layer| format!("model.layers.{layer}")));
    assert_eq!(scale(open("use_rslora", json!(true)).unwrap()), 4.0);
    assert_eq!(scale(open("rank_pattern", json!({})).unwrap()), 2.0);
    // An adapter with another scale than the trainer's is refused.
    let adapter = open("lora_alpha", json!(9)).unwrap();
    let case = Case::all().swap_remove(0);
    let (base, _, mut trainer) = case.trainer().unwrap();
    assert!(adapter.load(&base, &mut trainer).unwrap_err().to_string().contains("scale"));
    let options = TrainOptions {
        step: StepOptions { trainable: Trainable::All, ..trainer.options().step.clone() },
        ..trainer.options().clone()
    };
    let whole = Trainer::new(|vb| base.model(vb), options).unwrap();
    assert!(base.save_adapter(&whole, folder.path().join("out")).unwrap_err().to_string().contains("no adapters"));
}
