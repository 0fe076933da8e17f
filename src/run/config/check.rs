//! What can be refused of a run before data, model and device are looked at.

use std::time::Duration;

use gapless_engine::data::Format;
use gapless_engine::runtime::cpu::MOST_THREADS;
use gapless_parallel::Shape;

use super::{ConfigError, ModelConfig, RunConfig, StepConfig, pipeline};
use crate::Pipeline;

fn fail(key: &str, why: String, remedy: &'static str) -> Result<(), ConfigError> {
    Err(ConfigError::value(key, why, remedy))
}

impl RunConfig {
    /// Refuses what can be refused before data are read.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.steps == 0 {
            return fail("steps", "is 0".into(), "train at least one step");
        }
        self.check_step()?;
        self.check_data()?;
        if self.memory.budget.is_some() && self.memory.recompute != "none" {
            let why = "a budget chooses itself what is computed again".to_owned();
            return fail("memory.budget", why, "leave memory.recompute or memory.budget out");
        }
        if self.checkpoints.keep_last == 0 {
            return fail("checkpoints.keep_last", "is 0".into(), "keep at least one, to resume from");
        }
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

    /// Refuses extents, and ranks that cannot share them.
    fn check_step(&self) -> Result<(), ConfigError> {
        let StepConfig { batch, micro_batches, sequence, data_ranks, pipeline_ranks, expert_ranks, chunks, .. } =
            self.step;
        let extents = [
            ("step.batch", batch),
            ("step.micro_batches", micro_batches),
            ("step.sequence", sequence),
            ("step.data_ranks", data_ranks),
            ("step.pipeline_ranks", pipeline_ranks),
            ("step.expert_ranks", expert_ranks),
            ("step.chunks", chunks.unwrap_or(1)),
        ];
        if let Some((key, _)) = extents.into_iter().find(|(_, extent)| *extent == 0) {
            return fail(key, "is 0".into(), "it is at least 1");
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

    /// Refuses what can be refused of the data before they are read.
    fn check_data(&self) -> Result<(), ConfigError> {
        if !self.data.path.exists() {
            let why = format!("there is no {}", self.data.path.display());
            return fail("data.path", why, "name a file or folder that is there");
        }
        if let Some(file) = self.data.tokenizer.as_ref().filter(|file| !file.is_file()) {
            return fail("data.tokenizer", format!("there is no {}", file.display()), "name a tokenizer.json");
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
        if let Some(size) = self.data.vocabulary.filter(|&size| size < 256) {
            return fail("data.vocabulary", format!("{size} tokens do not even hold the bytes"), "it is at least 256");
        }
        let is_lines =
            self.data.path.extension().is_some_and(|extension| extension == "jsonl") && self.data.path.is_file();
        if self.data.format.has_answers() && !is_lines {
            let why = format!("{} is no .jsonl file, whose lines have answers", self.data.path.display());
            return fail("data.format", why, "name one in data.path, or leave data.format out");
        }
        let has_tokenizer = self.data.tokenizer.is_some() || matches!(self.model, ModelConfig::Folder(_));
        if self.data.format == Format::Chat && !has_tokenizer {
            let why = "a conversation is written by the template of a tokenizer, and there is none".to_owned();
            return fail("data.format", why, "name a data.tokenizer, or a model.folder");
        }
        if self.data.has_documents() && self.step.device.starts_with("cuda") {
            let why = "documents that do not see each other are trained on the CPU alone".to_owned();
            return fail("step.device", why, "use \"cpu\", or leave data.format and data.isolate_documents out");
        }
        Ok(())
    }
}
