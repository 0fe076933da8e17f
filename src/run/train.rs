//! A whole run: data, model, steps, evaluations, samples, checkpoints, and a folder that holds all that there is to know of it.

use std::fmt;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gapless_engine::checkpoint::{Checkpoint, CheckpointError, Difference, differences};
use gapless_engine::data::{DataError, Dataset, TrainingWindows, ValidationWindows};
use gapless_engine::metrics::{JsonLines, MetricsError, peak_rss_bytes};
use gapless_engine::nn::Trainable;
use gapless_engine::{GenerateOptions, Sampling, TrainError, Trainer};
use gapless_models::hf::{Folder, HfError};
use gapless_models::{Gpt, Llama, Moe};
use serde::Serialize;
use serde_json::{Value, json};

use super::{ConfigError, Console, ModelConfig, RunConfig, RunFolder, SampleConfig, Stop};

/// Keys that a run may go on with other values of: none of them changes what the steps so far have done.
const MAY_CHANGE: [&str; 9] = [
    "steps",
    "learning_rate",
    "step.device",
    "step.threads",
    "memory",
    "evaluation",
    "checkpoints",
    "sample",
    "data.cache",
];

/// Why a run ended before its last step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A Hugging Face folder.
    #[error(transparent)]
    Pretrained(Box<HfError>),
    /// The trainer.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// The folder or its checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Figures that cannot be written.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Nothing to go on from.
    #[error("there is no checkpoint in {}; run without --resume first", path.display())]
    NothingToResume {
        /// Where checkpoints would be.
        path: PathBuf,
    },
    /// The saved run was another one.
    #[error("the run in {} was of another configuration: {}; these keys cannot change, set them back or choose another --out", path.display(), differences.join(", "))]
    Changed {
        /// The checkpoint.
        path: PathBuf,
        /// Each key with its values.
        differences: Vec<String>,
    },
    /// A file of the run's folder that cannot be written, or signals that cannot be listened to.
    #[error("{what}: {source}")]
    Io {
        /// What was to be done.
        what: String,
        /// Why it cannot be done.
        source: std::io::Error,
    },
}

impl From<HfError> for RunError {
    fn from(error: HfError) -> Self {
        Self::Pretrained(Box::new(error))
    }
}

impl From<TrainError> for RunError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

/// Where a run is, for whoever shows it.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Steps in all.
    pub steps: u64,
    /// Of the last step.
    pub loss: f32,
    /// Of the last step.
    pub learning_rate: f64,
    /// Mean since the start of the process.
    pub tokens_per_second: f64,
}

/// How a run ended: `summary.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Loss of the last step; none where no step was left to do.
    pub final_loss: Option<f32>,
    /// Mean loss over the validation windows; none where there are too few.
    pub val_loss: Option<f32>,
    /// Mean since the start of the process.
    pub tokens_per_second: f64,
    /// Steps done.
    pub steps: u64,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Of the planned arena.
    pub arena_bytes: u64,
    /// No plan is smaller.
    pub lower_bound_bytes: u64,
    /// Arena ÷ lower bound.
    pub gap: f64,
    /// Most memory that the process has held.
    pub peak_rss_bytes: Option<u64>,
    /// Of planning.
    pub plan_ms: f64,
    /// Same hash, same plan.
    pub plan_hash: String,
    /// The signal that ended it early.
    pub signal: Option<u8>,
}

/// Trains as the configuration says, into a folder that is this run's own:
///
/// ```text
/// run.toml        the configuration with all defaults
/// memory.html     the memory map of the planned step
/// metrics.jsonl   one row per step and per evaluation
/// samples.txt     what was sampled at each evaluation
/// summary.json    how it ended
/// checkpoints/    the newest ones
/// model/          of a Hugging Face folder: the trained one; with LoRA, adapter/ in PEFT's format
/// ```
///
/// With `resume` it goes on from the newest checkpoint, to the same bits as without the break. `show` is called after each step.
/// A signal ([`Stop`]) ends it with a checkpoint.
///
/// # Errors
/// [`RunError`]. Until there is a trainer nothing is written.
pub fn train(
    config: &RunConfig,
    out: &Path,
    resume: bool,
    console: &mut Console,
    show: impl FnMut(Progress),
) -> Result<Summary, RunError> {
    // All that may be refused comes before the folder is changed.
    config.check()?;
    let mut folder = RunFolder::open(out)?.keep_last(config.checkpoints.keep_last);
    let checkpoint = if resume { Some(newest(&folder)?) } else { None };
    if let Some(checkpoint) = &checkpoint {
        compare(checkpoint, "config", &json!(config), console)?;
    }
    let dataset = config.dataset()?;
    let saved = json!({ "config": config, "data_hash": dataset.hash() });
    if let Some(checkpoint) = &checkpoint {
        compare(checkpoint, "data_hash", &json!(dataset.hash()), console)?;
    }
    console.say(format_args!(
        "{} training tokens, {} validation tokens, a vocabulary of {}",
        dataset.training_tokens(),
        dataset.validation_tokens(),
        dataset.vocabulary().size()
    ));
    let mut run = Run::new(config, out, dataset, checkpoint.is_none(), console)?;
    if let Some(checkpoint) = &checkpoint {
        run.trainer.resume(checkpoint)?;
    }
    let report = run.trainer.report();
    run.console.say(run.trainer.device());
    run.console.say(&report);

    // From here on the folder is this run's.
    folder.claim()?;
    match checkpoint {
        Some(checkpoint) => run.console.say(format_args!("resumed after {} steps", checkpoint.step())),
        None => {
            if let Some(earlier) = folder.set_aside()? {
                run.console.say(format_args!("checkpoints of an earlier run are now in {}", earlier.display()));
            }
        }
    }
    write(&out.join("run.toml"), &config.resolved(run.dataset.vocabulary().size()))?;
    write(&out.join("memory.html"), &run.trainer.memory_map().html())?;
    let metrics = out.join("metrics.jsonl");
    let rows = if resume { JsonLines::append(&metrics) } else { JsonLines::create(&metrics) }?;
    *run.console = std::mem::take(run.console).with_rows(rows);
    let stop = Stop::on_signals().map_err(|source| RunError::Io { what: "cannot listen to signals".into(), source })?;
    let done = run.steps(&folder, &saved, &stop, show)?;
    run.console.say(format_args!("saved {}", folder.save(&mut run.trainer, saved)?.display()));
    let summary = Summary {
        final_loss: done.loss,
        val_loss: done.val_loss,
        tokens_per_second: done.tokens_per_second,
        steps: run.trainer.steps(),
        parameters: report.parameters,
        arena_bytes: report.arena_bytes,
        lower_bound_bytes: report.lower_bound_bytes,
        gap: report.gap,
        peak_rss_bytes: peak_rss_bytes(),
        plan_ms: report.plan_ms,
        plan_hash: report.plan_hash.to_string(),
        signal: stop.signal(),
    };
    run.export()?;
    write(&out.join("summary.json"), &format!("{:#}\n", json!(summary)))?;
    Ok(summary)
}

/// What a run has besides its folder.
struct Run<'a> {
    config: &'a RunConfig,
    out: &'a Path,
    console: &'a mut Console,
    dataset: Dataset,
    training: TrainingWindows,
    validation: Option<ValidationWindows>,
    trainer: Trainer,
    /// Of the prompt; none where nothing is sampled.
    prompt: Option<Vec<u32>>,
}

/// Figures of the steps that were done.
#[derive(Default)]
struct Done {
    loss: Option<f32>,
    val_loss: Option<f32>,
    tokens_per_second: f64,
}

impl<'a> Run<'a> {
    fn new(
        config: &'a RunConfig,
        out: &'a Path,
        dataset: Dataset,
        is_new: bool,
        console: &'a mut Console,
    ) -> Result<Self, RunError> {
        let (sequence, batch) = (config.step.sequence, config.step.batch);
        let training = dataset.training(sequence, batch, config.seed)?;
        let validation = match dataset.validation(sequence, batch.max(32)) {
            // Too little of it is no reason not to train.
            Err(error @ DataError::TooShort { .. }) => {
                console.say(format_args!("no validation: {error}"));
                None
            }
            validation => validation?,
        };
        let prompt = match (config.sample.prompt.as_str(), dataset.vocabulary()) {
            ("", _) => None,
            (prompt, vocabulary) => Some(vocabulary.encode(prompt)?),
        };
        let trainer = trainer(config, dataset.vocabulary().size(), is_new)?;
        Ok(Self { config, out, console, dataset, training, validation, trainer, prompt })
    }

    /// Until the last one, or a signal.
    fn steps(
        &mut self,
        folder: &RunFolder,
        saved: &Value,
        stop: &Stop,
        mut show: impl FnMut(Progress),
    ) -> Result<Done, RunError> {
        let RunConfig { steps, step: extents, evaluation, checkpoints, .. } = self.config;
        let size = extents.batch * extents.sequence;
        let (mut tokens, mut targets) = (vec![0; size], vec![0; size]);
        let (first, mut busy, mut done) = (self.trainer.steps(), Duration::ZERO, Done::default());
        while self.trainer.steps() < *steps && stop.signal().is_none() {
            let begun = Instant::now();
            self.training.fill(self.trainer.steps(), 0, &mut tokens, &mut targets)?;
            let step = self.trainer.step(&tokens, &targets)?;
            busy += begun.elapsed();
            let count = self.trainer.steps();
            let rate = ((count - first) * size as u64) as f64 / busy.as_secs_f64().max(1e-9);
            (done.loss, done.tokens_per_second) = (Some(step.loss), rate);
            self.console.row(&json!({
                "step": step.step, "loss": step.loss, "gradient_norm": step.gradient_norm, "lr": step.lr,
                "tokens_per_second": rate,
            }));
            show(Progress {
                done: count,
                steps: *steps,
                loss: step.loss,
                learning_rate: step.lr,
                tokens_per_second: rate,
            });
            let is_due = |every: u64| every > 0 && count.is_multiple_of(every);
            if is_due(evaluation.every) || count == *steps {
                done.val_loss = self.evaluate()?;
                self.console.row(&json!({ "step": step.step, "val_loss": done.val_loss }));
                self.sample()?;
            }
            if is_due(checkpoints.every) && count < *steps {
                folder.save(&mut self.trainer, saved.clone())?;
            }
        }
        Ok(done)
    }

    /// Mean loss over all validation windows; none if there are fewer than a batch of them.
    fn evaluate(&mut self) -> Result<Option<f32>, RunError> {
        let batch = self.trainer.options().evaluation_batch();
        let Some(windows) = self.validation.as_ref().filter(|windows| windows.count() >= batch) else {
            return Ok(None);
        };
        let (batches, size) = (windows.count() / batch, batch * self.config.step.sequence);
        let (mut tokens, mut targets) = (vec![0; size], vec![0; size]);
        let mut sum = 0.0;
        for i in 0..batches {
            windows.fill(i * batch, &mut tokens, &mut targets)?;
            sum += self.trainer.evaluate(&tokens, &targets)?;
        }
        let loss = sum / batches as f32;
        self.console.say(format_args!("step {:>5} validation loss {loss:.4}", self.trainer.steps()));
        Ok(Some(loss))
    }

    /// Saves a finished run of somebody's weights in the form that they came in.
    fn export(&self) -> Result<(), RunError> {
        let (ModelConfig::Folder(path), true) = (&self.config.model, self.trainer.steps() == self.config.steps) else {
            return Ok(());
        };
        let (folder, is_lora) = (Folder::open(path)?, matches!(self.config.trainable, Trainable::Lora(_)));
        let to = self.out.join(if is_lora { "adapter" } else { "model" });
        if to.exists() {
            fs::remove_dir_all(&to)
                .map_err(|source| RunError::Io { what: format!("cannot replace {}", to.display()), source })?;
        }
        match is_lora {
            true => folder.save_adapter(&self.trainer, &to)?,
            false => folder.save(&self.trainer, &to, None)?,
        }
        self.console.say(format_args!("the trained weights are in {}", to.display()));
        Ok(())
    }

    /// Says how the prompt goes on, and keeps it.
    fn sample(&mut self) -> Result<(), RunError> {
        let (sample, Some(prompt)) = (&self.config.sample, &self.prompt) else { return Ok(()) };
        let SampleConfig { tokens, temperature, top_k, top_p, .. } = *sample;
        let sampling = Sampling { temperature, top_k, top_p, seed: self.config.seed, ..Sampling::default() };
        let options = GenerateOptions { tokens, sampling, stop: Vec::new() };
        let continuation = self.trainer.generate(&[prompt], &options, |_| ControlFlow::Continue(()))?.remove(0);
        let text = format!("{}{}", sample.prompt, self.dataset.vocabulary().decode(&continuation)?);
        self.console.say(format_args!("---\n{text}\n---"));
        let path = self.out.join("samples.txt");
        let line = format!("=== step {}\n{text}\n", self.trainer.steps());
        let file = fs::OpenOptions::new().create(true).append(true).open(&path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            tracing::warn!(path = %path.display(), %error, "a sample is not kept");
        }
        Ok(())
    }
}

/// The model, planned; with its weights, where a run begins from somebody's.
fn trainer(config: &RunConfig, vocabulary: usize, is_new: bool) -> Result<Trainer, RunError> {
    let options = config.options()?;
    Ok(match config.model(vocabulary) {
        ModelConfig::Gpt(gpt) => Trainer::new(|vb| Gpt::new(&gpt, vb), options)?,
        ModelConfig::Llama(llama) => Trainer::new(|vb| Llama::new(&llama, vb), options)?,
        ModelConfig::Moe(moe) => Trainer::new(|vb| Moe::new(&moe, vb), options)?,
        ModelConfig::Folder(path) => {
            let folder = Folder::open(path)?;
            let mut trainer = Trainer::new(|vb| folder.model(vb), options)?;
            if is_new {
                folder.load(&mut trainer)?;
            }
            trainer
        }
    })
}

/// The checkpoint to go on from.
fn newest(folder: &RunFolder) -> Result<Checkpoint, RunError> {
    let path = folder.checkpoints().to_owned();
    Checkpoint::latest(&path)?.ok_or(RunError::NothingToResume { path })
}

/// Says what has changed since a checkpoint, and refuses what cannot.
fn compare(checkpoint: &Checkpoint, part: &str, now: &Value, console: &Console) -> Result<(), RunError> {
    let saved = checkpoint.metadata().get("run").and_then(|run| run.get(part)).unwrap_or(&Value::Null);
    let may_change = |key: &str| {
        MAY_CHANGE
            .iter()
            .any(|name| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let all = differences(saved, now);
    let (allowed, refused): (Vec<_>, Vec<_>) = all.iter().partition(|difference| may_change(&difference.key));
    for difference in allowed {
        console.say(format_args!("changed since the checkpoint: {}", in_words(difference)));
    }
    if refused.is_empty() {
        return Ok(());
    }
    let differences = refused.into_iter().map(in_words).collect();
    Err(RunError::Changed { path: checkpoint.path().to_owned(), differences })
}

fn in_words(difference: &Difference) -> String {
    let shown = |value: &Option<Value>| value.as_ref().map_or("absent".to_owned(), Value::to_string);
    let key = if difference.key.is_empty() { "the data's hash" } else { &difference.key };
    format!("{key} was {} and is {}", shown(&difference.saved), shown(&difference.expected))
}

fn write(path: &Path, text: &str) -> Result<(), RunError> {
    fs::write(path, text).map_err(|source| RunError::Io { what: format!("cannot write {}", path.display()), source })
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} steps", self.steps)?;
        if let Some(loss) = self.final_loss {
            write!(f, ", loss {loss:.4}, {:.0} tokens/s", self.tokens_per_second)?;
        }
        if let Some(loss) = self.val_loss {
            write!(f, ", validation loss {loss:.4}")?;
        }
        let mebibytes = self.arena_bytes as f64 / f64::from(1 << 20);
        write!(f, ", arena {mebibytes:.1} MiB ({:.4} of the lower bound)", self.gap)
    }
}
