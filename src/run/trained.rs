//! A run's model, opened for inference.

use std::path::{Path, PathBuf};

use gapless_engine::checkpoint::Checkpoint;
use gapless_engine::data::{Dataset, Format, TokenWidth, Vocabulary};
use gapless_engine::{DeviceChoice, Generation, StepOptions, TrainOptions, Trainer};
use gapless_models::hf::{Config, GenerationConfig};

use super::folder::PRETRAINED;
use super::train::{CONFIG, TOKENIZER, checkpoint_of};
use super::{DataConfig, ModelConfig, RunConfig, RunError};

/// The configuration, the vocabulary and a checkpoint of a run. They are read from the run's folder alone, so the folder
/// may be moved, and neither the data nor the model folder from which the run started need to exist.
///
/// ```no_run
/// use gapless::run::{TrainedRun, sample};
///
/// let run = TrainedRun::open("runs/run".as_ref())?;
/// let mut model = run.model(gapless::Generation::default(), gapless::DeviceChoice::Auto, 0)?;
/// println!("{}", sample(&mut model, &run.vocabulary, "Once", &Default::default())?);
/// # Ok::<(), gapless::run::RunError>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct TrainedRun {
    /// The configuration in the run's run.toml. If the model is a Hugging Face folder, `model.folder` is the run's copy of
    /// this folder, which has no weights. The checkpoint has all weights.
    pub config: RunConfig,
    /// The vocabulary, which converts text to token ids and back.
    pub vocabulary: Vocabulary,
    /// The checkpoint that was given to [`Self::open`], or else the newest one.
    pub checkpoint: Checkpoint,
    /// Whether models get the averaged weights (`optimizer.average`) instead of the trained weights.
    pub average: bool,
    /// The folder with the tokenizer's files. `None` if the vocabulary was trained by the run, or is bytes or bare ids.
    tokenizer: Option<PathBuf>,
}

impl TrainedRun {
    /// True if the path is a run's folder or one of its checkpoints.
    pub fn is_at(path: &Path) -> bool {
        folder_of(path).is_some()
    }

    /// Opens a run with one of its checkpoints. `path` is either a checkpoint, or the run's folder, whose newest usable
    /// checkpoint is then opened. The folder is not locked, so the run may still be training.
    ///
    /// # Errors
    /// Returns an error if there is no run or no checkpoint at the path. Also returns an error if the run needs a
    /// tokenizer.json and this file is missing or invalid.
    pub fn open(path: &Path) -> Result<Self, RunError> {
        let folder = folder_of(path).unwrap_or(path);
        let pretrained = folder.join(PRETRAINED);
        let config = match pretrained.join("config.json").is_file() {
            true => RunConfig::read_with_model(&folder.join(CONFIG), &pretrained)?,
            false => RunConfig::read_without_data(Some(&folder.join(CONFIG)), &[])?,
        };
        let checkpoint = checkpoint_of(path)?;
        let tokenizer = folder.join(TOKENIZER);
        let vocabulary = match (config.data.vocabulary, &config.model) {
            // If there is a tokenizer.json, it is that of an earlier run of this folder.
            (Some(256), _) => Vocabulary::bytes(),
            _ if tokenizer.exists() => Vocabulary::open_with(&tokenizer, &config.data.text_options())?,
            // The data of this run were token ids, so there is no tokenizer.
            (Some(size), _) => Vocabulary::ids(size),
            (None, ModelConfig::Folder(model)) => Vocabulary::ids(Config::read(model)?.vocabulary()),
            (None, _) => Vocabulary::open(&tokenizer)?,
        };
        // The folder of a run of an earlier version has no copies.
        let beside = match &config.model {
            ModelConfig::Folder(model) if config.data.tokenizer.is_none() => Some(model.clone()),
            _ => None,
        };
        let mut folders = [Some(pretrained), beside].into_iter().flatten();
        let tokenizer = folders.find(|folder| folder.join(TOKENIZER).is_file());
        Ok(Self { config, vocabulary, checkpoint, average: false, tokenizer })
    }

    /// The folder with the files of the tokenizer that the run was given, among them its chat template. `None` if the
    /// vocabulary was trained by the run, or is bytes or bare ids.
    pub fn tokenizer_folder(&self) -> Option<&Path> {
        self.tokenizer.as_deref()
    }

    /// Reads the generation settings of the Hugging Face folder from which the run started. Returns `None` if the run
    /// started from random weights.
    ///
    /// # Errors
    /// Returns the errors of [`GenerationConfig::read`].
    pub fn generation_config(&self) -> Result<Option<GenerationConfig>, RunError> {
        match &self.config.model {
            ModelConfig::Folder(folder) => Ok(Some(GenerationConfig::read(folder)?)),
            ModelConfig::Gpt(_) | ModelConfig::Llama(_) | ModelConfig::Moe(_) => Ok(None),
        }
    }

    /// Builds the model with the weights of the checkpoint, for generation. `threads` is the number of threads on a CPU; 0
    /// uses all cores.
    ///
    /// # Errors
    /// Returns the errors of [`Self::for_inference`].
    pub fn model(&self, generation: Generation, device: DeviceChoice, threads: usize) -> Result<Trainer, RunError> {
        let sequence = generation.window.unwrap_or(usize::MAX).min(generation.chunk);
        let generation = Some(generation);
        self.for_inference(TrainOptions {
            step: StepOptions { batch: 1, sequence, generation, ..StepOptions::default() },
            device,
            threads,
            ..TrainOptions::default()
        })
    }

    /// Builds the model with the weights of the checkpoint. The options `precision` and `trainable` are replaced by
    /// those of the run.
    ///
    /// # Errors
    /// Returns the errors of [`TrainerBuilder::build`](gapless_engine::TrainerBuilder::build), [`Trainer::load`] and
    /// [`Trainer::load_average`].
    pub fn for_inference(&self, options: TrainOptions) -> Result<Trainer, RunError> {
        let (precision, trainable) = (self.config.step.precision, self.config.trainable.clone());
        let options = TrainOptions { step: StepOptions { precision, trainable, ..options.step }, ..options };
        let architecture = self.config.model(self.vocabulary.size()).architecture()?;
        let mut trainer = Trainer::builder(|vb| architecture.model(vb), options).for_inference().build()?;
        match self.average {
            false => trainer.load(&self.checkpoint)?,
            true => trainer.load_average(&self.checkpoint)?,
        }
        Ok(trainer)
    }

    /// Opens data to measure the model on, as the run reads its own data, but in the given format and with ids of the
    /// given width. All of it is for validation. Tokenized data is cached below the working directory, since the run's own
    /// cache may be on another machine.
    ///
    /// # Errors
    /// Returns the errors of [`RunConfig::held_out`].
    pub fn held_out(&self, path: &Path, format: Format, width: Option<TokenWidth>) -> Result<Dataset, RunError> {
        let mut config = self.config.clone();
        config.data.format = format;
        config.data.token_width = width.or(config.data.token_width);
        config.data.cache = DataConfig::default().cache;
        if let Some(folder) = self.tokenizer_folder() {
            config.data.tokenizer = Some(folder.join(TOKENIZER));
        }
        config.held_out(path, &self.vocabulary)
    }

    /// Returns the maximum number of tokens that the model can read, or `None` if there is no maximum.
    ///
    /// # Errors
    /// Returns an error if the config.json of the run's model folder cannot be read.
    pub fn longest_sequence(&self) -> Result<Option<usize>, RunError> {
        Ok(match &self.config.model {
            ModelConfig::Gpt(_) => Some(self.config.step.sequence),
            ModelConfig::Llama(_) | ModelConfig::Moe(_) => None,
            ModelConfig::Folder(path) => Config::read(path)?.longest_sequence(),
        })
    }
}

/// Returns the run's folder if `path` is this folder or one of the run's checkpoints, and `None` otherwise.
fn folder_of(path: &Path) -> Option<&Path> {
    let checkpoints = path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "checkpoints"));
    [Some(path), checkpoints.and_then(Path::parent)].into_iter().flatten().find(|folder| folder.join(CONFIG).exists())
}
