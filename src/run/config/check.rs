//! What can be refused of a run before data, model and device are looked at.

use std::path::PathBuf;
use std::time::Duration;

use gapless_engine::UpdateOptions;
use gapless_engine::data::{Answers, Format, Source};
use gapless_engine::runtime::cpu::MOST_THREADS;
use gapless_models::limits;
use gapless_parallel::Shape;

use super::{ConfigError, ModelConfig, RunConfig, StepConfig, pipeline};
use crate::Pipeline;

/// Tokens of a step, at most.
const MOST_TOKENS: usize = 1 << 28;
/// Micro-batches of a step, at most.
const MOST_MICRO_BATCHES: usize = 1 << 16;
/// Ranks along one axis, and chunks of one, at most.
const MOST_RANKS: usize = 1 << 16;
/// Tokens of a vocabulary that is trained, at most.
const MOST_TRAINED: usize = 1 << 24;

fn fail(key: &str, why: String, remedy: &'static str) -> Result<(), ConfigError> {
    Err(ConfigError::value(key, why, remedy))
}

impl RunConfig {
    /// Refuses what can be refused before data are read.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_keys()?;
        self.check_files()
    }

    /// The same without the files of the data, and of their tokenizer.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn check_keys(&self) -> Result<(), ConfigError> {
        if self.steps == 0 {
            return fail("steps", "is 0".into(), "train at least one step");
        }
        self.check_model()?;
        self.check_step()?;
        self.check_data()?;
        if self.memory.budget.is_some() && self.memory.recompute != "none" {
            let why = "a budget chooses itself what is computed again".to_owned();
            return fail("memory.budget", why, "leave memory.recompute or memory.budget out");
        }
        if self.checkpoints.keep_last == 0 {
            return fail("checkpoints.keep_last", "is 0".into(), "keep at least one, to resume from");
        }
        self.check_update()?;
        for (key, minutes) in [("max_minutes", self.max_minutes), ("checkpoints.minutes", self.checkpoints.minutes)] {
            if minutes
                .is_some_and(|minutes| Duration::try_from_secs_f64(60.0 * minutes).map_or(true, |it| it.is_zero()))
            {
                return fail(key, "is no time".into(), "it is a number above 0, or left out");
            }
        }
        if self.evaluation.patience > 0 && (self.evaluation.every == 0 || self.data.validation_every == 0) {
            let why = "there are no evaluations to wait for".to_owned();
            return fail("evaluation.patience", why, "set evaluation.every and data.validation_every, or leave it out");
        }
        self.learning_rate().check().map(drop).or_else(|error| fail("learning_rate", error.to_string(), "see its keys"))
    }

    /// Refuses what no update can do.
    fn check_update(&self) -> Result<(), ConfigError> {
        let numbers = [
            ("loss.label_smoothing", Some(self.loss.label_smoothing), (0.0..1.0).contains(&self.loss.label_smoothing)),
            ("loss.z_loss", Some(self.loss.z_loss), self.loss.z_loss >= 0.0 && self.loss.z_loss.is_finite()),
            ("optimizer.max_value", self.optimizer.max_value, self.optimizer.max_value.is_none_or(|most| most > 0.0)),
            (
                "optimizer.average",
                self.optimizer.average,
                self.optimizer.average.is_none_or(|decay| (0.0..1.0).contains(&decay)),
            ),
            ("guard.norm", self.guard.norm.map(f64::from), self.guard.norm.is_none_or(|times| times > 1.0)),
            ("guard.loss", self.guard.loss.map(f64::from), self.guard.loss.is_none_or(|above| above > 0.0)),
        ];
        if let Some((key, Some(number), _)) = numbers.into_iter().find(|(_, _, is_sound)| !is_sound) {
            let remedy = match key {
                "loss.label_smoothing" | "optimizer.average" => "it is at least 0 and below 1",
                "loss.z_loss" => "it is at least 0",
                "guard.norm" => "it is above 1",
                _ => "it is above 0",
            };
            return fail(key, format!("is {number}"), remedy);
        }
        if self.guard.window == 0 || self.guard.patience == 0 {
            let key = if self.guard.window == 0 { "guard.window" } else { "guard.patience" };
            return fail(key, "is 0".into(), "it is at least 1");
        }
        let groups = &self.optimizer.groups;
        if groups.len() > UpdateOptions::MAX_GROUPS {
            let why = format!("{} are more than {}", groups.len(), UpdateOptions::MAX_GROUPS);
            return fail("optimizer.groups", why, "put parameters that are updated alike into one group");
        }
        if groups.iter().any(|group| group.names.is_empty()) {
            return fail("optimizer.groups", "one of them names nothing".into(), "name parameters or modules");
        }
        match groups.iter().find(|group| !(group.learning_rate >= 0.0 && group.learning_rate.is_finite())) {
            Some(group) => {
                let why = format!("one has a learning_rate of {}", group.learning_rate);
                fail("optimizer.groups", why, "it multiplies that of all, and is at least 0")
            }
            None => Ok(()),
        }
    }

    /// Refuses a model of which nothing can be made.
    fn check_model(&self) -> Result<(), ConfigError> {
        let (key, checked) = match &self.model {
            ModelConfig::Gpt(gpt) => ("model.gpt", gpt.check()),
            ModelConfig::Llama(llama) => ("model.llama", llama.check()),
            ModelConfig::Moe(moe) => ("model.moe", moe.check()),
            ModelConfig::Folder(_) => return Ok(()),
        };
        match checked {
            Ok(()) => Ok(()),
            Err(gapless_engine::Error::Config { why, remedy, .. }) => fail(key, why, remedy),
            Err(error) => fail(key, error.to_string(), "correct it"),
        }
    }

    /// Refuses extents, and ranks that cannot share them.
    fn check_step(&self) -> Result<(), ConfigError> {
        let StepConfig { batch, micro_batches, sequence, data_ranks, pipeline_ranks, expert_ranks, chunks, .. } =
            self.step;
        let extents = [
            ("step.batch", batch, MOST_TOKENS),
            ("step.micro_batches", micro_batches, MOST_MICRO_BATCHES),
            ("step.sequence", sequence, MOST_TOKENS),
            ("step.data_ranks", data_ranks, MOST_RANKS),
            ("step.pipeline_ranks", pipeline_ranks, MOST_RANKS),
            ("step.expert_ranks", expert_ranks, MOST_RANKS),
            ("step.chunks", chunks.unwrap_or(1), MOST_RANKS),
        ];
        if let Some((key, extent, most)) = extents.into_iter().find(|(_, extent, most)| !(1..=*most).contains(extent)) {
            let why = if extent == 0 { "is 0".into() } else { format!("is {extent}, and {most} are the most") };
            return fail(key, why, "it is at least 1");
        }
        if batch.checked_mul(sequence).is_none_or(|tokens| tokens > MOST_TOKENS) {
            let why = format!("{batch} sequences of {sequence} tokens are more than {MOST_TOKENS} tokens");
            return fail("step.batch", why, "choose a smaller step.batch or step.sequence");
        }
        if self.step.threads > MOST_THREADS {
            let why = format!("{} are more than {MOST_THREADS}", self.step.threads);
            return fail("step.threads", why, "use as many as there are cores, or 0 for all of them");
        }
        let Pipeline { schedule, chunks, .. } = pipeline("step.schedule", &self.step.schedule, chunks)?;
        let parts = data_ranks.checked_mul(expert_ranks).and_then(|ranks| ranks.checked_mul(micro_batches));
        if parts.is_none_or(|parts| !batch.is_multiple_of(parts)) {
            let ranks = if data_ranks * expert_ranks > 1 {
                format!(" for each of {data_ranks} × {expert_ranks} ranks that share the batch")
            } else {
                String::new()
            };
            let why = format!("{batch} sequences do not divide into {micro_batches}{ranks}");
            return fail("step.micro_batches", why, "choose a divisor of step.batch");
        }
        let experts = match &self.model {
            ModelConfig::Moe(moe) => Some(moe.router.experts),
            // What a folder's model has is known when it is opened.
            ModelConfig::Folder(_) => Some(0),
            ModelConfig::Gpt(_) | ModelConfig::Llama(_) => None,
        };
        if expert_ranks > 1 && experts.is_none_or(|experts| !experts.is_multiple_of(expert_ranks)) {
            let why = format!("{expert_ranks} ranks cannot share {} experts alike", experts.unwrap_or(0));
            return fail(
                "step.expert_ranks",
                why,
                "choose a divisor of the router's experts, or 1 for a model without",
            );
        }
        // A pipeline of one rank asks nothing of a schedule.
        let shape = [pipeline_ranks, chunks, micro_batches].map(u32::try_from);
        let [Ok(ranks), Ok(chunks), Ok(micro_batches)] = shape else {
            return fail("step.pipeline_ranks", "makes more stages than can be counted".into(), "choose less");
        };
        if pipeline_ranks > 1
            && let Err(error) = schedule.actions(&Shape { ranks, chunks, micro_batches })
        {
            return fail("step.schedule", error.to_string(), "choose another step.chunks or step.micro_batches");
        }
        Ok(())
    }

    /// Refuses what the keys of the data say, whatever the data are.
    fn check_data(&self) -> Result<(), ConfigError> {
        let weights: f64 = self.data.mix.iter().map(|source| source.weight).sum();
        if self.data.mix.iter().any(|source| source.weight.is_nan() || source.weight <= 0.0) || weights >= 1.0 {
            let why = format!("its weights are {weights} together");
            return fail("data.mix", why, "each is above 0, and together they leave something of 1 to data.path");
        }
        if self.data.tokenizer.is_some() && self.data.vocabulary.is_some() {
            return fail(
                "data.vocabulary",
                "stands beside data.tokenizer, which has one".into(),
                "leave one of them out",
            );
        }
        if let (ModelConfig::Folder(_), Some(_)) = (&self.model, self.data.vocabulary) {
            let why = "a tokenizer of its own has other ids than the model of model.folder knows".to_owned();
            return fail("data.vocabulary", why, "leave it out: the folder's tokenizer.json is used");
        }
        let has_tokenizer = self.data.tokenizer.is_some() || matches!(self.model, ModelConfig::Folder(_));
        if self.data.format == Format::Chat && !has_tokenizer {
            let why = "a conversation is written by the template of a tokenizer, and there is none".to_owned();
            return fail("data.format", why, "name a data.tokenizer, or a model.folder");
        }
        if self.data.answers != Answers::All && self.data.format != Format::Chat {
            let why = "only conversations have answers before the last".to_owned();
            return fail("data.answers", why, "leave it out, or set data.format to \"chat\"");
        }
        if self.data.has_documents() && self.step.device.starts_with("cuda") {
            let why = "documents that do not see each other are trained on the CPU alone".to_owned();
            return fail("step.device", why, "use \"cpu\", or leave data.format and data.isolate_documents out");
        }
        Ok(())
    }

    /// Refuses data and a tokenizer that are not there, or are not what the keys take them for.
    fn check_files(&self) -> Result<(), ConfigError> {
        let sources = self.data.mix.iter().map(|source| ("data.mix", &source.path));
        let sources: Vec<_> = std::iter::once(("data.path", &self.data.path)).chain(sources).collect();
        if let Some((key, path)) = sources.iter().find(|(_, path)| !path.exists()) {
            return fail(key, format!("there is no {}", path.display()), "name a file or folder that is there");
        }
        if let Some(file) = self.data.tokenizer.as_ref().filter(|file| !file.is_file()) {
            return fail("data.tokenizer", format!("there is no {}", file.display()), "name a tokenizer.json");
        }
        let are_ids = |path: &PathBuf| Source::Path(path.clone()).is_ids().unwrap_or(false);
        if let Some(size) = self.data.vocabulary.filter(|&size| size < 256)
            && !sources.iter().all(|(_, path)| are_ids(path))
        {
            return fail("data.vocabulary", format!("{size} tokens do not even hold the bytes"), "it is at least 256");
        }
        let most = if sources.iter().all(|(_, path)| are_ids(path)) { limits::MOST_TOKENS } else { MOST_TRAINED };
        if let Some(size) = self.data.vocabulary.filter(|&size| size > most) {
            return fail("data.vocabulary", format!("is {size}, and {most} are the most"), "choose a smaller one");
        }
        let other = sources.iter().map(|(_, path)| path).find(|path| !Format::is_read_from(path) || !path.is_file());
        if let Some(path) = other.filter(|_| self.data.format.has_answers()) {
            let why = format!("{} is no .jsonl or .parquet file, whose lines have answers", path.display());
            return fail("data.format", why, "name one in data.path, or leave data.format out");
        }
        Ok(())
    }
}
