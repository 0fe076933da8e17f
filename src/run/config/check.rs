//! Checks of a run's settings. They do not read the data, open the model or use a device.

use std::path::PathBuf;
use std::time::Duration;

use gapless_engine::compile::step::RankPlan;
use gapless_engine::data::{Answers, Format, Source};
use gapless_engine::nn::{LoraInit, PairLoss, Preference, Trainable};
use gapless_engine::{Precision, TrainError};
use gapless_models::limits;

use super::{ConfigError, ModelConfig, Rule, RunConfig};

/// Maximum size of a vocabulary that is trained on the data.
const MAX_TRAINED_VOCABULARY: usize = 1 << 24;

/// Maximum number of steps of a run. Up to this number, every number of steps is exact in an f64.
pub(super) const MAX_STEPS: u64 = 1 << 53;

fn fail(key: &str, why: String, remedy: &'static str) -> Result<(), ConfigError> {
    Err(ConfigError::value(key, why, remedy))
}

/// Converts an error from the check of a training step to an error that names a key of the run file.
pub(crate) fn refused(error: TrainError) -> ConfigError {
    match (&error, error.refused()) {
        (_, Some((key, why, remedy))) => ConfigError::value(key, why, remedy),
        (TrainError::LearningRate(why), _) => {
            ConfigError::value("learning_rate", why, "docs/run_file.md lists its keys")
        }
        _ => ConfigError::value("step", error, "correct it"),
    }
}

impl RunConfig {
    /// Checks all settings, and that the data and tokenizer files exist.
    ///
    /// # Errors
    /// Returns a [`ConfigError::Value`] for the first invalid setting.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_keys()?;
        self.check_files()
    }

    /// Checks everything except the data and tokenizer files.
    ///
    /// # Errors
    /// Returns a [`ConfigError::Value`] for the first invalid setting.
    pub fn check_keys(&self) -> Result<(), ConfigError> {
        if self.steps == 0 {
            return fail("steps", "is 0".into(), "train at least one step");
        }
        if self.steps > MAX_STEPS {
            let why = format!("is {}, above the maximum of {MAX_STEPS}", self.steps);
            return fail("steps", why, "choose a smaller value");
        }
        if let Some(epochs) = self.epochs.filter(|epochs| !(epochs.is_finite() && *epochs > 0.0)) {
            return fail("epochs", format!("is {epochs}"), "set it above 0; 1 reads the data once");
        }
        if self.optimizer.stochastic_rounding {
            let key = "optimizer.stochastic_rounding";
            if self.optimizer.name != Rule::AdamW {
                let why = format!("{:?} rounds to the nearest value", self.optimizer.name);
                return fail(key, why, "leave it out, or choose optimizer.name = \"adamw\"");
            }
            if self.step.precision != Precision::PureBf16 {
                let why = "the step has f32 parameters or masters, which are not rounded to bf16".into();
                return fail(key, why, "leave it out, or choose step.precision = \"pure_bf16\"");
            }
        }
        let options = self.options();
        options.check().map_err(refused)?;
        self.check_model()?;
        // The schedule must exist for this number of ranks, chunks and micro-batches. If rank 0 has a plan, all other
        // ranks have one too.
        RankPlan::of(&options.step, 0).map_err(|error| {
            ConfigError::value("pipeline.schedule", error, "choose another pipeline.chunks or step.micro_batches")
        })?;
        self.check_data()?;
        if self.checkpoints.keep_last == 0 {
            return fail("checkpoints.keep_last", "is 0".into(), "keep at least one, to resume from");
        }
        for (key, minutes) in [("max_minutes", self.max_minutes), ("checkpoints.minutes", self.checkpoints.minutes)] {
            if minutes
                .is_some_and(|minutes| Duration::try_from_secs_f64(60.0 * minutes).map_or(true, |it| it.is_zero()))
            {
                return fail(key, "is not a valid time".into(), "set it above 0, or leave it out");
            }
        }
        let has_validation = self.evaluation.path.is_some() || self.data.validation_every > 0;
        if self.evaluation.patience > 0 && (self.evaluation.every == 0 || !has_validation) {
            let why = "the run has no evaluations".to_owned();
            return fail("evaluation.patience", why, "set evaluation.every and data.validation_every, or leave it out");
        }
        self.check_guard()
    }

    fn check_guard(&self) -> Result<(), ConfigError> {
        if let Some(times) = self.guard.norm.filter(|times| times.is_nan() || *times <= 1.0) {
            return fail("guard.norm", format!("is {times}"), "set it above 1");
        }
        if let Some(above) = self.guard.loss.filter(|above| above.is_nan() || *above <= 0.0) {
            return fail("guard.loss", format!("is {above}"), "set it above 0");
        }
        if self.guard.window == 0 || self.guard.patience == 0 {
            let key = if self.guard.window == 0 { "guard.window" } else { "guard.patience" };
            return fail(key, "is 0".into(), "set it to at least 1");
        }
        Ok(())
    }

    /// Returns an error if the model is invalid, or if its number of experts is not divisible by the number of expert
    /// ranks.
    fn check_model(&self) -> Result<(), ConfigError> {
        let model = self.model.with_positions(self.step.sequence);
        let (checked, experts) = match &model {
            ModelConfig::Gpt(gpt) => (gpt.check(), None),
            ModelConfig::Llama(llama) => (llama.check(), None),
            ModelConfig::Moe(moe) => (moe.check(), Some(moe.router.experts)),
            // A folder's model is checked when the folder is opened.
            ModelConfig::Folder(_) => return Ok(()),
        };
        if let Trainable::Lora(lora) = &self.trainable
            && (lora.dora || lora.init == LoraInit::Pissa)
        {
            let key = if lora.dora { "trainable.lora.dora" } else { "trainable.lora.init" };
            let why = "needs initial values that follow from the weights of a model folder".to_owned();
            return fail(key, why, "set model.folder, or leave it out");
        }
        checked.map_err(|error| match error {
            gapless_engine::Error::Config { why, remedy, .. } => ConfigError::value(self.model.key(), why, remedy),
            error => ConfigError::value(self.model.key(), error, "correct it"),
        })?;
        let ranks = self.mesh.size(self.mesh.experts());
        if ranks > 1 && experts.is_none_or(|experts| !experts.is_multiple_of(ranks)) {
            let why = format!("{ranks} ranks cannot share {} experts equally", experts.unwrap_or(0));
            let key = if self.mesh.expert > 1 { "mesh.expert" } else { "mesh.fold" };
            return fail(key, why, "let a divisor of the router's experts share them, or one rank for a model without");
        }
        Ok(())
    }

    /// Checks the keys of `[data]` without reading the data.
    fn check_data(&self) -> Result<(), ConfigError> {
        let weights: f64 = self.data.mix.iter().map(|source| source.weight).sum();
        if self.data.mix.iter().any(|source| source.weight.is_nan() || source.weight <= 0.0) || weights >= 1.0 {
            let why = format!("the sum of its weights is {weights}");
            return fail("data.mix", why, "set each weight above 0 and their sum below 1: data.path has the rest");
        }
        if self.data.tokenizer.is_some() && self.data.vocabulary.is_some() {
            return fail(
                "data.vocabulary",
                "is given along with data.tokenizer, which has its own".into(),
                "leave one of them out",
            );
        }
        if let (ModelConfig::Folder(_), Some(_)) = (&self.model, self.data.vocabulary) {
            let why = "a vocabulary of its own would have other ids than the model of model.folder".to_owned();
            return fail("data.vocabulary", why, "leave it out: the folder's tokenizer.json is used");
        }
        let has_tokenizer = self.data.tokenizer.is_some() || matches!(self.model, ModelConfig::Folder(_));
        if self.data.format == Format::Chat && !has_tokenizer {
            let why = "conversations need the chat template of a tokenizer, and there is none".to_owned();
            return fail("data.format", why, "name a data.tokenizer, or a model.folder");
        }
        if !self.data.format.has_preferences() && self.preference != Preference::default() {
            let why = "only pairs of answers and answers with labels have a loss of preferences".to_owned();
            return fail("preference", why, "leave it out, or set data.format to \"preference\" or \"unpaired\"");
        }
        let has_labels = self.data.format == Format::Unpaired;
        if self.data.format.has_preferences() && has_labels != (self.preference.loss == PairLoss::Kto) {
            let why = "the loss kto, and no other, is one of answers with labels".to_owned();
            let remedy = match has_labels {
                true => "set preference.loss to \"kto\", or data.format to \"preference\"",
                false => "set data.format to \"unpaired\", or preference.loss to another one",
            };
            return fail("preference.loss", why, remedy);
        }
        if self.data.answers != Answers::All && self.data.format != Format::Chat {
            let why = "only conversations have several answers".to_owned();
            return fail("data.answers", why, "leave it out, or set data.format to \"chat\"");
        }
        Ok(())
    }

    /// Checks that the files of the data and of the tokenizer exist, and that their kinds match the other keys.
    fn check_files(&self) -> Result<(), ConfigError> {
        if self.data.path.as_os_str().is_empty() {
            return fail("data.path", "is missing".into(), "name a file or folder to learn from");
        }
        let sources = self.data.mix.iter().map(|source| ("data.mix", &source.path));
        let held_out = self.evaluation.path.iter().map(|path| ("evaluation.path", path));
        let sources: Vec<_> = std::iter::once(("data.path", &self.data.path)).chain(sources).chain(held_out).collect();
        if let Some((key, path)) = sources.iter().find(|(_, path)| !path.exists()) {
            return fail(key, format!("there is no {}", path.display()), "name a file or folder that exists");
        }
        if let Some(file) = self.data.tokenizer.as_ref().filter(|file| !file.is_file()) {
            return fail("data.tokenizer", format!("there is no {}", file.display()), "name a tokenizer.json");
        }
        let are_ids = |path: &PathBuf| Source::Path(path.clone()).is_ids().unwrap_or(false);
        if let Some(size) = self.data.vocabulary.filter(|&size| size < 256)
            && !sources.iter().all(|(_, path)| are_ids(path))
        {
            return fail(
                "data.vocabulary",
                format!("{size} tokens are fewer than the 256 bytes"),
                "set it to at least 256",
            );
        }
        let most =
            if sources.iter().all(|(_, path)| are_ids(path)) { limits::MAX_TOKENS } else { MAX_TRAINED_VOCABULARY };
        if let Some(size) = self.data.vocabulary.filter(|&size| size > most) {
            return fail(
                "data.vocabulary",
                format!("is {size}, above the maximum of {most}"),
                "choose a smaller value",
            );
        }
        let other = sources.iter().find(|(_, path)| !Format::is_read_from(path) || !path.is_file());
        if let Some((key, path)) = other.filter(|_| self.data.format.has_answers()) {
            let why = format!("{} is not a .jsonl or .parquet file, which the format needs", path.display());
            return match *key {
                "evaluation.path" => fail(key, why, "name one, in the format of data.format"),
                _ => fail("data.format", why, "name one in data.path, or leave data.format out"),
            };
        }
        Ok(())
    }
}
