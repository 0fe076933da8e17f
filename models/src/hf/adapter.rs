//! Adapters in PEFT's format: folders with adapter_config.json and adapter_model.safetensors, read and written.
//!
//! In: a folder, or a trainer that has adapters. Out: for a folder, the setting `trainable` and the adapters' values in
//! a trainer's arena; for a trainer, a folder that PEFT can read. Never: an option that is ignored, or the base model's
//! weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::DType;
use gapless_engine::nn::{Lora, LoraInit, Trainable};
use gapless_engine::{DeviceChoice, StepOptions, TrainError, TrainOptions, Trainer};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use super::error::{ConfigProblem, HfError, Result, WeightProblem};
use super::fields::{Fields, read_object};
use super::folder::Folder;
use super::save::{write_error, write_then_rename};
use super::tensors::{Dtype, TensorFile, is_supported, narrow};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const BASE: &str = "base_model_name_or_path";

/// The prefix of every tensor name in PEFT's files.
const PREFIX: &str = "base_model.model.";

/// Options without an effect on results: the internal state of PEFT's objects, and how the base model's weights are
/// stored.
const PASSED_OVER: [&str; 7] = [
    "auto_mapping",
    "fan_in_fan_out",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
];

/// Options that are supported only if they are switched off: null, false or empty.
const OFF: [&str; 23] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "kasa_config",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_bias",
    "lora_ga_config",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];

/// Adapters in a folder whose options and file header have been read and checked.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    config: Map<String, Value>,
    lora: Lora,
    base: Option<String>,
    file: TensorFile,
}

impl Adapter {
    /// Opens a folder and checks its options. Weights are not read.
    ///
    /// # Errors
    /// Returns [`HfError::Config`], which lists every option that is wrong, unsupported or unknown, and
    /// [`HfError::NoAdapter`] if there is no weights file. Also returns the errors of [`TensorFile::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let config = read_object(&path.join(CONFIG))?;
        let mut fields = Fields::new(config.clone(), "");
        // A pattern is replaced by the modules in the file, which are those that it matches.
        let is_pattern = fields.peek("target_modules").is_some_and(Value::is_string);
        let mut lora = take(&mut fields);
        let base = fields.text(BASE);
        let problems = fields.problems();
        if !problems.is_empty() {
            return Err(HfError::Config { path: path.join(CONFIG), problems });
        }
        let weights = path.join(WEIGHTS);
        if !weights.exists() {
            return Err(HfError::NoAdapter { path });
        }
        let file = TensorFile::open(weights)?;
        if is_pattern {
            let names = file.tensors().map(|(name, ..)| name);
            let layers: BTreeSet<String> = names.filter_map(|name| Some(adapted(&name)?.to_owned())).collect();
            lora.targets = layers.into_iter().collect();
        }
        Ok(Self { path, config, lora, base, file })
    }

    /// True if the folder contains an adapter's configuration. Such a folder must be opened as an adapter even if it
    /// also contains a model, as in transformers.
    pub fn is_at(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Returns the folder of the model for which the adapter was trained. A relative path is looked up first in the
    /// adapter's folder, then in the current directory.
    ///
    /// # Errors
    /// Returns an error if the adapter's configuration names no base model, if the base model's folder does not exist,
    /// or if it is the adapter's own folder.
    pub fn base(&self) -> Result<PathBuf> {
        let malformed = |why: String| HfError::Malformed { path: self.path.join(CONFIG), why };
        let Some(base) = &self.base else { return Err(malformed(format!("{BASE} is missing"))) };
        let candidates = [self.path.join(base), PathBuf::from(base)];
        let Some(found) = candidates.into_iter().find(|folder| folder.is_dir()) else {
            return Err(HfError::NoBase { path: self.path.clone(), base: base.into() });
        };
        let read = |path: &Path| path.canonicalize().map_err(|source| HfError::Read { path: path.to_owned(), source });
        if read(&found)? == read(&self.path)? {
            return Err(malformed(format!("{BASE} is {base:?}, which is the adapter's own folder")));
        }
        Ok(found)
    }

    /// Returns the setting [`StepOptions::trainable`] of a trainer that trains these adapters.
    pub fn trainable(&self) -> Trainable {
        Trainable::Lora(self.lora.clone())
    }

    /// Fills the adapters of a trainer of `base`. The trainer must have been created with [`Self::trainable`]. A
    /// pipeline rank reads only the adapters of its own stages.
    ///
    /// # Errors
    /// Returns [`HfError::Weights`], which lists every tensor that is missing, superfluous, or of a wrong shape or
    /// type. Returns an error if the trainer's adapters have another scale than this adapter, or if an element is not
    /// finite. After an error, some of the trainer's adapters may have been filled.
    pub fn load(&self, base: &Folder, trainer: &mut Trainer) -> Result<()> {
        let lora = of_trainer(trainer)?;
        if lora.scale() != self.lora.scale() {
            let why = format!("the trainer's adapters have the scale {}, not {}", lora.scale(), self.lora.scale());
            return Err(config_error(why, "build it with Adapter::trainable"));
        }
        let expected = adapters(base, &trainer.options().step.trainable)?;
        self.compare(&expected)?;
        let here: BTreeSet<String> = trainer.parameter_names().map(str::to_owned).collect();
        for (stored, (parameter, shape)) in expected.iter().filter(|(_, (parameter, _))| here.contains(parameter)) {
            let mut elements = Vec::new();
            self.file.read_elements(stored, 0, shape.iter().product(), |x| elements.push(x))?;
            trainer.set_whole(parameter, &elements)?;
        }
        Ok(())
    }

    /// Saves a trainer's adapters as a folder at `out`, with this adapter's options, tensor names and types.
    ///
    /// # Errors
    /// Returns the errors of [`Folder::save_adapter`].
    pub fn save(&self, base: &Folder, trainer: &Trainer, out: impl AsRef<Path>) -> Result<()> {
        let dtype = |stored: &str| self.file.info(stored).map_or(Dtype::F32, |info| info.dtype);
        write(base, trainer, out.as_ref(), self.config.clone(), &dtype)
    }

    /// Creates a trainer for inference and fills it with the weights of `base` and these adapters.
    /// [`StepOptions::trainable`] in `options` is replaced by [`Self::trainable`].
    ///
    /// # Errors
    /// Returns the errors of [`TrainerBuilder::build`](gapless_engine::TrainerBuilder::build), [`Folder::load`] and
    /// [`Self::load`].
    pub fn for_inference(&self, base: &Folder, options: TrainOptions) -> Result<Trainer> {
        let options = TrainOptions { step: StepOptions { trainable: self.trainable(), ..options.step }, ..options };
        let mut trainer = Trainer::builder(|vb| base.model(vb), options).for_inference().build()?;
        base.load(&mut trainer)?;
        self.load(base, &mut trainer)?;
        Ok(trainer)
    }

    /// Adds the adapters to the weights of their layers, in f32, and saves the merged model as a folder at `out`, which
    /// must be empty or not exist. The names, types and files are those of `base`, as in [`Folder::save`]. The
    /// tokenizer is the adapter's if the adapter has one, and the base model's otherwise.
    ///
    /// # Errors
    /// Returns the errors of [`Self::for_inference`] and [`Folder::save`].
    pub fn merge(&self, base: &Folder, out: impl AsRef<Path>) -> Result<()> {
        write_then_rename(out.as_ref(), |partial| {
            // The smallest batch and sequence suffice, because the model is not run.
            let options = TrainOptions {
                step: StepOptions { batch: 1, sequence: 1, ..StepOptions::default() },
                device: DeviceChoice::Cpu,
                ..TrainOptions::default()
            };
            let trainer = self.for_inference(base, options)?;
            let tokenizer = if self.has_tokenizer() { &self.path } else { &base.path };
            base.write_into(&trainer, partial, None, tokenizer)
        })
    }

    /// True if the adapter's folder has a tokenizer of its own.
    pub fn has_tokenizer(&self) -> bool {
        self.path.join("tokenizer.json").is_file()
    }

    fn compare(&self, expected: &Adapters) -> Result<()> {
        let mut problems = Vec::new();
        for (name, (_, shape)) in expected {
            let (name, expected) = (name.clone(), shape.clone());
            match self.file.info(&name) {
                None => problems.push(WeightProblem::Missing { name, shape: expected }),
                Some(info) if info.shape != expected => {
                    problems.push(WeightProblem::Shape { name, expected, found: info.shape.clone() });
                }
                Some(info) if !is_supported(info.dtype) => {
                    problems.push(WeightProblem::Type { name, found: info.dtype.to_string() });
                }
                Some(_) => {}
            }
        }
        for (name, _, shape) in self.file.tensors().filter(|(name, ..)| !expected.contains_key(name)) {
            problems.push(WeightProblem::Extra { name, shape });
        }
        match problems.is_empty() {
            true => Ok(()),
            false => Err(HfError::Weights { path: self.path.clone(), problems }),
        }
    }
}

impl Folder {
    /// Saves the adapters of a trainer of this model in PEFT's format, as a folder at `out`, which must be empty or not
    /// exist. ([`Self::save`] saves the model with the adapters merged into its weights.)
    ///
    /// # Errors
    /// Returns [`HfError::Exists`] if `out` is not empty. Returns an error if the trainer has no adapters, or if a file
    /// cannot be written. After an error, no incomplete folder is left.
    pub fn save_adapter(&self, trainer: &Trainer, out: impl AsRef<Path>) -> Result<()> {
        let lora = of_trainer(trainer)?;
        let config = json!({
            "alpha_pattern": {},
            "bias": "none",
            // PEFT sets this option for GPT-2, whose linear layers are stored transposed.
            "fan_in_fan_out": self.config.is_gpt2(),
            "inference_mode": true,
            "init_lora_weights": match lora.init {
                LoraInit::Zero => json!(true),
                LoraInit::Pissa => json!(PISSA),
            },
            "lora_alpha": whole(lora.alpha),
            "lora_bias": false,
            "lora_dropout": lora.dropout,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": lora.rank,
            "rank_pattern": {},
            "target_modules": self.config.text_part().map_or(json!(lora.targets), |part| part.targets(&lora.targets)),
            "task_type": "CAUSAL_LM",
            "use_dora": lora.dora,
            "use_rslora": lora.rank_stabilised,
        });
        let Value::Object(config) = config else { unreachable!("it is written as an object") };
        write(self, trainer, out.as_ref(), config, &|_| Dtype::F32)
    }
}

/// For each stored tensor of an adapter, by its stored name: the name of the parameter, and the shape of the tensor.
type Adapters = BTreeMap<String, (String, Vec<usize>)>;

fn adapters(base: &Folder, trainable: &Trainable) -> Result<Adapters> {
    // PEFT names modules by their path in the whole model, even if the base model's files leave out a prefix of the
    // path.
    let prefix = |name: &str| if base.config.is_gpt2() && !name.starts_with("lm_head.") { "transformer." } else { "" };
    let declared = base.config.declared(trainable)?;
    let adapters = declared.into_iter().filter(|(name, _)| trainable.is_adapter(name));
    Ok(adapters.map(|(name, shape)| (format!("{PREFIX}{}{name}", prefix(&name)), (name, shape))).collect())
}

fn of_trainer(trainer: &Trainer) -> Result<&Lora> {
    match &trainer.options().step.trainable {
        Trainable::Lora(lora) => Ok(lora),
        other => Err(config_error(format!("{other:?} has no adapters"), "build the trainer with Trainable::Lora")),
    }
}

fn config_error(why: String, remedy: &'static str) -> HfError {
    TrainError::config("adapter", why, remedy).into()
}

fn write(
    base: &Folder,
    trainer: &Trainer,
    out: &Path,
    mut config: Map<String, Value>,
    dtype_of: &dyn Fn(&str) -> Dtype,
) -> Result<()> {
    let adapters = adapters(base, &trainer.options().step.trainable)?;
    let folder = base.path.canonicalize().map_err(|source| HfError::Read { path: base.path.clone(), source })?;
    config.insert(BASE.into(), json!(folder.to_string_lossy()));
    let mut tensors = Vec::new();
    for (stored, (parameter, shape)) in adapters {
        let elements = trainer.tensor(&parameter)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let (dtype, mut bytes) = (dtype_of(&stored), Vec::new());
        narrow(&elements, dtype, &mut bytes);
        tensors.push((stored, dtype, shape, bytes));
    }
    write_then_rename(out, |partial| {
        let weights = partial.join(WEIGHTS);
        let malformed =
            |error: safetensors::SafeTensorError| HfError::Malformed { path: weights.clone(), why: error.to_string() };
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(malformed)?;
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(malformed)?;
        fs::write(&weights, bytes).map_err(write_error(&weights))?;
        let path = partial.join(CONFIG);
        let text = serde_json::to_vec_pretty(&config).expect("names and numbers make valid JSON");
        fs::write(&path, text).map_err(write_error(&path))
    })
}

/// Converts a number to JSON like PEFT: to an integer if it has no fraction.
fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 1e15 { json!(number as i64) } else { json!(number) }
}

fn take(fields: &mut Fields) -> Lora {
    if fields.has("peft_type") {
        fields.one_of("peft_type", &["LORA"]);
    } else {
        fields.problems.push(ConfigProblem::Missing { field: "peft_type".into() });
    }
    let lora = Lora {
        rank: fields.count("r", None, 1..=1 << 20),
        alpha: fields.positive("lora_alpha", None),
        dropout: dropout(fields),
        targets: targets(fields),
        rank_stabilised: fields.flag("use_rslora", false),
        dora: fields.flag("use_dora", false),
        init: initial_values(fields),
        quantize: None,
    };
    fields.one_of("bias", &["none"]);
    fields.one_of("task_type", &["CAUSAL_LM"]);
    fields.require_off(&OFF);
    fields.ignore(&PASSED_OVER);
    lora
}

fn dropout(fields: &mut Fields) -> f64 {
    let Some(value) = fields.take("lora_dropout") else { return 0.0 };
    value.as_f64().filter(|dropout| (0.0..1.0).contains(dropout)).unwrap_or_else(|| {
        fields.wrong("lora_dropout", &value, "a number from 0 to below 1");
        0.0
    })
}

/// Returns the path of the layer if the stored tensor is the first matrix of the layer's adapter.
fn adapted(stored: &str) -> Option<&str> {
    let path = stored.strip_prefix(PREFIX)?.strip_suffix(".lora_A.weight")?;
    Some(path.strip_prefix("transformer.").unwrap_or(path))
}

/// Reads `target_modules`: the names of layers, or a pattern of their paths, for which an empty list is returned.
fn targets(fields: &mut Fields) -> Vec<String> {
    let Some(value) = fields.take("target_modules") else {
        fields.problems.push(ConfigProblem::Missing { field: "target_modules".into() });
        return Vec::new();
    };
    if value.as_str().is_some_and(|pattern| pattern != "all-linear") {
        return Vec::new();
    }
    let names: Option<Vec<String>> =
        value.as_array().and_then(|names| names.iter().map(|name| Some(name.as_str()?.to_owned())).collect());
    names.filter(|names| !names.is_empty()).unwrap_or_else(|| {
        fields.unsupported("target_modules", &value, "a list of module names, or a pattern");
        Vec::new()
    })
}

/// The name of PEFT's method that computes initial values and the base's weights by [`LoraInit::Pissa`].
const PISSA: &str = "pissa";

/// Reads `init_lora_weights`, the method that set the adapters' initial values. These values no longer matter after
/// training. A method that also changed the base model's weights is a problem, because this folder does not hold the
/// changed weights, unless they can be computed again.
fn initial_values(fields: &mut Fields) -> LoraInit {
    let Some(found) = fields.take("init_lora_weights") else { return LoraInit::Zero };
    if found == PISSA {
        return LoraInit::Pissa;
    }
    if !found.is_boolean() && !["gaussian", "eva", "orthogonal"].iter().any(|name| found == *name) {
        fields.unsupported("init_lora_weights", &found, "true, false, gaussian, eva, orthogonal, pissa");
    }
    LoraInit::Zero
}
