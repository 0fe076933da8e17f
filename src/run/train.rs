//! Executes a whole run: reads the data, builds the model, and performs steps, evaluations, samples and checkpoints.
//! Writes all results into the run's folder.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use gapless_communicator::{Communicator, InProcess, on_threads};
use gapless_engine::checkpoint::{Checkpoint, CheckpointError};
use gapless_engine::data::{DataError, Dataset, TrainingWindows, ValidationWindows, Vocabulary};
use gapless_engine::nn::Trainable;
use gapless_engine::{GenerateOptions, Sampling, StepReport, TrainError, Trainer};
use gapless_models::hf::{self, Folder};
use gapless_parallel::Mesh;
use serde_json::{Value, json};

use super::config::text_of;
use super::fit::most_windows;
use super::folder::{PRETRAINED, free_name, newest_earlier, write};
use super::preflight::preflight;
use super::references::{REFERENCE, References};
use super::routing::StepRow;
use super::{
    ConfigError, Console, Ended, Event, ModelConfig, RunConfig, RunError, RunFolder, SampleConfig, Stop, Summary,
    TrainingLoop, TrainingOutcome, expect_same, sample, say_changes, validation_windows,
};

/// The starting point of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Start {
    /// Starts from random weights or, if `model.folder` is set, from the weights in that folder.
    #[default]
    Anew,
    /// Continues from the newest checkpoint in the run's own folder.
    Resume,
    /// Starts from a checkpoint of another run. The path is either that of a checkpoint, or that of a run's folder,
    /// whose newest checkpoint is then used.
    Fork(PathBuf),
}

/// Keys that may change when a run is resumed: none of them affects the steps done so far.
const MAY_CHANGE: &[&str] = &[
    "steps",
    "max_minutes",
    "learning_rate",
    "device",
    "threads",
    "mesh",
    "pipeline",
    "memory",
    "guard",
    "evaluation",
    "checkpoints",
    "sample",
    "estimate",
    // Places, which change if a run is moved. The hash of the data shows whether the data are the same.
    "data.cache",
    "data.path",
    "data.tokenizer",
    "model.folder",
];

/// Name of the summary in a run's folder.
const SUMMARY: &str = "summary.json";

/// Name of the configuration in a run's folder.
pub(super) const CONFIG: &str = "run.toml";

/// Name of the vocabulary in a run's folder.
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// The state of a run after a step, for progress displays.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Number of steps done so far.
    pub done: u64,
    /// Number of steps of the whole run.
    pub steps: u64,
    /// Loss of the last step.
    pub loss: f32,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Mean tokens per second of this process. Only the time of steps counts.
    pub tokens_per_second: f64,
    /// Estimated time until the last step at this rate, without evaluations and checkpoints.
    pub left: Duration,
}

/// Trains a model as the configuration describes. All results are written into one folder:
///
/// ```text
/// run.toml        the configuration with all defaults and absolute paths
/// tokenizer.json  the vocabulary, unless it is plain bytes or bare ids
/// pretrained/     the files that the run was given, apart from weights: settings of the model folder, tokenizer, chat template
/// memory.html     the memory map of the planned step
/// plan.csv        the same plan as a table of tensors, lifetimes and offsets, which `gapless compare` can read
/// reference.json  for preferences: the log-likelihoods of the answers under the model with which the run started
/// metrics.jsonl   one row per step and per evaluation
/// log.txt         messages and warnings
/// samples.txt     the text that was sampled at each evaluation
/// summary.json    the outcome of the run
/// checkpoints/    the newest checkpoints
/// model/          if the model is a Hugging Face folder: the trained folder; with LoRA, adapter/ in PEFT's format
/// earlier.1/      an earlier run of this folder, with all of the above; then earlier.2/ and so on
/// ```
///
/// The folder is self-contained: it may be moved, and [`TrainedRun`](super::TrainedRun) needs neither the data nor the model
/// folder. If the run fails after it has begun, the error is in log.txt and summary.json.
///
/// Returns an error if the folder has one of these files but no run has used the folder. Exceptions are `model/` and
/// `adapter/`: if such a folder exists, the trained weights are written to `model.1/` and so on.
///
/// A resumed run computes the same bits as an uninterrupted run. A fork is a new run with its own configuration, but
/// its model must have the parameters of the checkpoint. `show` is called after each step. A signal ([`Stop`]) ends the
/// run with a checkpoint.
///
/// If a launcher such as `mpirun` has started one process per rank of `mesh`, each process runs its rank. Otherwise,
/// all ranks are threads of this process.
///
/// # Errors
/// Returns a [`RunError`] if the run ends early. Nothing is written into the folder before the trainer exists, so
/// errors of the configuration, the data or the plan leave the folder unchanged.
pub fn train(
    config: &RunConfig,
    out: &Path,
    start: &Start,
    console: &mut Console,
    show: impl FnMut(Progress) + Send,
) -> Result<Summary, RunError> {
    config.check()?;
    let config = &config.clone().with_absolute_paths();
    let ranks = config.mesh.ranks().map_err(TrainError::from)?;
    let world = gapless_mpi::world()?;
    if world.size() > 1 && world.size() != ranks {
        let why = format!("it has {ranks} ranks, but {} processes were started", world.size());
        return Err(ConfigError::value("mesh", why, "start one process, or one for each rank").into());
    }
    let (is_first, begun) = (world.rank() == 0, &AtomicBool::new(false));
    let (mut last, mut show) = (None, show);
    let show = |progress| {
        last = Some(progress);
        show(progress);
    };
    let summary = if world.size() == ranks {
        let mut others = Console::silent();
        let console = if is_first { &mut *console } else { &mut others };
        Rank { config, out, start, begun, console }.train(world, show)
    } else {
        // Only the first rank gets the console and the callback for progress.
        let first = Mutex::new(Some((&mut *console, show)));
        let summaries = on_threads(ranks, |world| {
            let first =
                if world.rank() == 0 { first.lock().unwrap_or_else(PoisonError::into_inner).take() } else { None };
            match first {
                Some((console, show)) => Rank { config, out, start, begun, console }.train(world, show),
                None => Rank { config, out, start, begun, console: &mut Console::silent() }.train(world, |_| {}),
            }
        });
        summaries.map(|all| all.into_iter().next().expect("there is at least one rank"))
    };
    // If the folder is gone, there is no place for the error.
    if let Err(error) = &summary
        && is_first
        && begun.load(Ordering::Relaxed)
        && !matches!(error, RunError::FolderGone { .. })
    {
        record_failure(error, last, out, console);
    }
    summary
}

/// Writes the error that has ended a run into the run's log.txt and summary.json.
fn record_failure(error: &RunError, last: Option<Progress>, out: &Path, console: &Console) {
    console.log(format_args!("the run has failed: {error}"));
    let summary = json!({
        "ended": "failed",
        "error": error.to_string(),
        "steps": last.map(|progress| progress.done),
        "final_loss": last.map(|progress| progress.loss),
    });
    // The disk may be full. The error itself is returned, so a second one is only a warning.
    let path = out.join(SUMMARY);
    if let Err(error) = write(&path, &format!("{summary:#}\n")) {
        tracing::warn!(%error, "the error that ended the run is not in its summary");
    }
}

/// A rank of a run, before its data and its trainer exist.
struct Rank<'a> {
    config: &'a RunConfig,
    out: &'a Path,
    start: &'a Start,
    /// True once the folder belongs to this run.
    begun: &'a AtomicBool,
    console: &'a mut Console,
}

impl<'a> Rank<'a> {
    /// Executes the whole run on this rank. Only the first rank locks the folder and writes files. The first rank also
    /// prepares the data before the other ranks open it, so that they find the tokenized data in the cache.
    fn train(self, mut world: Box<dyn Communicator>, show: impl FnMut(Progress)) -> Result<Summary, RunError> {
        // All checks that may fail come before the first change to the folder.
        let Self { config, out, start, begun, console } = self;
        let is_first = world.rank() == 0;
        let folder = if is_first { RunFolder::open(out)? } else { RunFolder::of_another_rank(out) };
        let writes_config = is_first && may_write_config(config, out)?;
        let folder = folder.keep_last(config.checkpoints.keep_last).keep_best(config.checkpoints.keep_best);
        let checkpoint = match start {
            Start::Anew => None,
            Start::Resume => Some(folder.newest()?),
            // The number of steps of an epoch is only known after the data.
            Start::Fork(from) => Some(forked(from, config.epochs.map_or(config.steps, |_| u64::MAX))?),
        };
        let resumed = checkpoint.as_ref().filter(|_| *start == Start::Resume);
        match (resumed, &checkpoint) {
            (Some(checkpoint), _) => {
                expect_same(checkpoint, "config", &comparable(config, checkpoint), MAY_CHANGE, console)?
            }
            (None, Some(checkpoint)) => say_changes(checkpoint, "config", &comparable(config, checkpoint), console),
            (None, None) => {}
        }
        preflight(&mut *world, config, &folder, start)?;
        let dataset = if is_first { Some(config.dataset()?) } else { None };
        world.barrier()?;
        let dataset = dataset.map_or_else(|| config.dataset(), Ok)?;
        let config = &config.with_steps(&dataset)?;
        if let (Start::Fork(_), Some(from)) = (start, &checkpoint) {
            expect_steps_left(from, config.steps)?;
        }
        let saved = json!({ "config": config, "data_hash": dataset.hash() });
        if let Some(checkpoint) = resumed {
            expect_same(checkpoint, "data_hash", &json!(dataset.hash()), &[], console)?;
        }
        let held_out = config.evaluation.path.as_ref().map(|path| config.held_out(path, dataset.vocabulary()));
        let held_out = held_out.transpose()?;
        console.say(format_args!(
            "{} training tokens, {} validation tokens, a vocabulary of {}",
            dataset.training_tokens(),
            held_out.as_ref().unwrap_or(&dataset).validation_tokens(),
            dataset.vocabulary().size()
        ));
        if let Some(framing) = dataset.vocabulary().framing() {
            console.say(framing);
        }
        expect_known(&dataset, &config.model, console)?;
        let writes_vocabulary = is_first && may_write_vocabulary(dataset.vocabulary(), &folder)?;
        let mut run = RunInProgress::new(world, config, out, (dataset, held_out), checkpoint.is_none(), console)?;
        // The given files may be those of an earlier run of this folder, so they are copied before that run is set aside.
        let mut pretrained = None;
        let copy = || {
            if resumed.is_none() || !out.join(PRETRAINED).exists() {
                pretrained = copy_pretrained(config, out)?;
            }
            Ok(())
        };
        folder.start(&mut run.trainer, checkpoint.as_ref(), resumed.is_none(), run.console, copy)?;
        // From here on the folder belongs to this run.
        if is_first {
            begun.store(true, Ordering::Relaxed);
        }
        if let Some(partial) = pretrained {
            let to = out.join(PRETRAINED);
            let cannot = |source| RunError::Io { what: format!("cannot write {}", to.display()), source };
            fs::rename(partial, &to).map_err(cannot)?;
        }
        if writes_config {
            write(&out.join(CONFIG), &config.resolved(run.dataset.vocabulary()))?;
        }
        if writes_vocabulary {
            run.dataset.vocabulary().save(&out.join(TOKENIZER))?;
        }
        if is_first {
            run.console.write_rows(&out.join("metrics.jsonl"), resumed.is_some())?;
            let log = out.join("log.txt");
            let cannot = |source| RunError::Io { what: format!("cannot write {}", log.display()), source };
            run.console.write_log(&log, resumed.is_some()).map_err(cannot)?;
            let summary = out.join(SUMMARY);
            if resumed.is_some() && read_summary(&summary).is_some_and(|summary| summary.get("error").is_some()) {
                let cannot = |source| RunError::Io { what: format!("cannot remove {}", summary.display()), source };
                fs::remove_file(&summary).map_err(cannot)?;
            }
        }
        run.measure_reference(resumed.is_some(), is_first)?;
        let stop = Stop::on_signals_answered_by(is_first.then(|| run.console.errors()))
            .map_err(|source| RunError::Io { what: "cannot listen to signals".into(), source })?;
        let fitted = run.fit(&folder, resumed, saved, &stop, show)?;
        folder.check_exists()?;
        let mut summary = Summary::new(&run.trainer, &fitted, stop.signal());
        if is_first {
            let path = out.join(SUMMARY);
            // If no step was left to do, the summary of the earlier process is kept. There is none if that process was
            // killed after its last step.
            let before = read_summary(&path).filter(|_| summary.final_loss.is_none() && resumed.is_some());
            if before.is_some() {
                let steps = summary.steps;
                run.console.say(format_args!("all {steps} steps were done before; raise steps or epochs to continue"));
            }
            let exported = before.as_ref().and_then(|before| Some(PathBuf::from(before.get("weights")?.as_str()?)));
            summary.weights = match exported.filter(|folder| out.join(folder).exists()) {
                None if matches!(fitted.ended, Ended::Complete | Ended::NoImprovement) => run.export(&folder)?,
                exported => exported,
            };
            let mut row = before.unwrap_or_else(|| json!(summary));
            if let Some(weights) = &summary.weights {
                row["weights"] = json!(weights);
            }
            write(&path, &format!("{row:#}\n"))?;
        }
        Ok(summary)
    }
}

/// A rank of a run with its data and its trainer.
struct RunInProgress<'a> {
    config: &'a RunConfig,
    out: &'a Path,
    console: &'a mut Console,
    dataset: Dataset,
    training: TrainingWindows,
    validation: Option<ValidationWindows>,
    /// Identifies the data of the validation windows.
    validation_data: String,
    /// The log-likelihoods of answers under the reference model; `None` if the loss has no reference.
    references: Option<References>,
    trainer: Trainer,
}

impl<'a> RunInProgress<'a> {
    /// Cuts the data into windows and builds the trainer. The data are the dataset and, if `evaluation.path` is set, the
    /// data there.
    fn new(
        world: Box<dyn Communicator>,
        config: &'a RunConfig,
        out: &'a Path,
        (dataset, held_out): (Dataset, Option<Dataset>),
        is_new: bool,
        console: &'a mut Console,
    ) -> Result<Self, RunError> {
        let (sequence, batch) = (config.step.sequence, config.step.batch);
        let training = dataset.training(sequence, batch, config.seed)?;
        let validation = match &held_out {
            Some(held_out) => Some(held_out_windows(held_out, config)?),
            None => validation_windows(&dataset, sequence, config.evaluation.windows)?,
        };
        if !config.sample.prompt.is_empty() {
            dataset.vocabulary().encode(&config.sample.prompt)?;
        }
        let trainer = trainer(world, config, dataset.vocabulary().size(), is_new)?;
        let validation_data = {
            let hash = held_out.as_ref().unwrap_or(&dataset).hash();
            format!("{hash} {}", validation.as_ref().map_or(0, ValidationWindows::count))
        };
        let references = None;
        Ok(Self { config, out, console, dataset, training, validation, validation_data, references, trainer })
    }

    /// Measures the log-likelihoods of all answers with the weights with which the run starts, if the loss needs them.
    /// A resumed run reads those that it has measured at its start.
    fn measure_reference(&mut self, is_resumed: bool, is_first: bool) -> Result<(), RunError> {
        let Self { out, console, training, validation, validation_data, references, trainer, .. } = self;
        let preference = trainer.options().step.preference;
        if !preference.is_some_and(|preference| preference.needs_reference()) {
            return Ok(());
        }
        if is_resumed {
            *references = Some(References::open(out, validation_data)?);
            return Ok(());
        }
        let mut measured = References::measure(trainer, training, validation.as_ref())?;
        if is_first {
            measured.save(out, validation_data)?;
            let (training, validation) = measured.count();
            let answers = training + validation;
            console.say(format_args!("the reference model's log-likelihoods of {answers} answers are in {REFERENCE}"));
        }
        *references = Some(measured);
        Ok(())
    }

    /// Trains until the last step or a signal.
    fn fit(
        &mut self,
        folder: &RunFolder,
        resumed: Option<&Checkpoint>,
        saved: Value,
        stop: &Stop,
        mut show: impl FnMut(Progress),
    ) -> Result<TrainingOutcome, RunError> {
        let Self { config, out, console, dataset, training, validation, references, trainer, .. } = self;
        let steps = config.steps;
        let step_tokens = (config.step.batch * config.step.sequence) as f64;
        let mut fit = TrainingLoop::new(training, steps)
            .evaluate(validation.as_ref(), config.evaluation.every)
            .save(folder, config.checkpoints.every, saved)
            .stop(stop);
        let time = |minutes: f64| Duration::from_secs_f64(60.0 * minutes);
        fit = config.checkpoints.minutes.into_iter().fold(fit, |fit, minutes| fit.save_after(time(minutes)));
        fit = config.max_minutes.into_iter().fold(fit, |fit, minutes| fit.limit(time(minutes)));
        if config.evaluation.patience > 0 {
            fit = fit.patience(config.evaluation.patience);
        }
        if config.guard.is_on() {
            fit = fit.guard(config.guard);
        }
        fit = references.iter().fold(fit, TrainingLoop::references);
        fit = resumed.into_iter().fold(fit, TrainingLoop::continue_from);
        fit.run(trainer, |event, trainer| {
            match &event {
                Event::Step { report: StepReport { loss, lr, skipped, .. }, tokens_per_second, .. } => {
                    folder.check_exists()?;
                    if *skipped {
                        console.say(&event);
                    }
                    let (loss, learning_rate, tokens_per_second) = (*loss, *lr, *tokens_per_second);
                    console.row(&StepRow::new(&event, trainer)?);
                    let tokens = steps.saturating_sub(trainer.steps()) as f64 * step_tokens;
                    let left = Duration::try_from_secs_f64(tokens / tokens_per_second).unwrap_or_default();
                    show(Progress { done: trainer.steps(), steps, loss, learning_rate, tokens_per_second, left });
                }
                Event::Evaluation { .. } => {
                    console.row(&event);
                    console.say(&event);
                    sampled(config, dataset.vocabulary(), trainer, out, console)?;
                }
                Event::RolledBack { .. } => console.say(&event),
                Event::Saved { .. } if trainer.steps() == steps => console.say(&event),
                Event::Saved { .. } => {}
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Saves the weights that a finished run has trained. If the run started from a model folder, saves a new model
    /// folder or, with LoRA, an adapter, and returns the name of the new folder. Any other run saves nothing and
    /// returns `None`. If each rank holds only a part of the model, builds a trainer of the whole model, which loads
    /// the last checkpoint and saves its weights.
    fn export(self, saved: &RunFolder) -> Result<Option<PathBuf>, RunError> {
        let Self { config, out, console, dataset, mut trainer, .. } = self;
        let ModelConfig::Folder(path) = &config.model else { return Ok(None) };
        let (folder, is_lora) = (Folder::open(path)?, matches!(config.trainable, Trainable::Lora(_)));
        if config.mesh != (Mesh { data: config.mesh.data, ..Mesh::default() }) {
            drop(trainer);
            let mut whole = RunConfig { mesh: Mesh::default(), ..config.clone() };
            whole.step.sequence_parallel = false;
            trainer =
                self::trainer(Box::new(InProcess::world(1).remove(0)), &whole, dataset.vocabulary().size(), false)?;
            trainer.resume(&saved.newest()?)?;
        }
        let mut to = out.join(if is_lora { "adapter" } else { "model" });
        if fs::symlink_metadata(&to).is_ok() {
            // The existing folder may be in use. It may even be the model folder that this run started from.
            console.say(format_args!("{} exists and is not overwritten", to.display()));
            to = free_name(&to, 1);
        }
        match is_lora {
            true => {
                folder.save_adapter(&trainer, &to)?;
                hf::copy_tokenizer(&out.join(PRETRAINED), &to)?;
            }
            false => folder.save_with_tokenizer(&trainer, &to, None, &out.join(PRETRAINED))?,
        }
        console.say(format_args!("the trained weights are in {}", to.display()));
        Ok(to.file_name().map(PathBuf::from))
    }
}

/// Reads the summary of an earlier process. Returns `None` if there is none or if it cannot be read.
fn read_summary(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Copies the settings of the model folder and the tokenizer that the run was given into the run's folder, so that the
/// trained model can be used without them. The copies are in a folder that the caller renames to [`PRETRAINED`]; its path
/// is returned. Does nothing and returns `None` if the run was given neither.
fn copy_pretrained(config: &RunConfig, out: &Path) -> Result<Option<PathBuf>, RunError> {
    let model = match &config.model {
        ModelConfig::Folder(folder) => Some(folder),
        ModelConfig::Gpt(_) | ModelConfig::Llama(_) | ModelConfig::Moe(_) => None,
    };
    if model.is_none() && config.data.tokenizer.is_none() {
        return Ok(None);
    }
    let partial = out.join(format!("{PRETRAINED}.partial"));
    let io = |source| RunError::Io { what: format!("cannot write {}", partial.display()), source };
    // A run that was killed may have left the folder. Its files may be read-only, and so cannot be overwritten.
    if fs::symlink_metadata(&partial).is_ok() {
        fs::remove_dir_all(&partial).map_err(io)?;
    }
    fs::create_dir_all(&partial).map_err(io)?;
    if let Some(model) = model {
        hf::copy_settings(model, &partial)?;
    }
    match (&config.data.tokenizer, model) {
        (Some(file), _) => {
            hf::copy_tokenizer(file.parent().unwrap_or(Path::new(".")), &partial)?;
            // The file may have another name. A copy has the permissions of its source, so it may be read-only.
            let to = partial.join(TOKENIZER);
            if to.exists() {
                fs::remove_file(&to).map_err(io)?;
            }
            fs::copy(file, &to).map_err(io)?;
        }
        (None, Some(model)) => hf::copy_tokenizer(model, &partial)?,
        (None, None) => {}
    }
    Ok(Some(partial))
}

/// Returns true if the run should write its run.toml. Returns false if the folder has a run.toml with the same
/// configuration, because this may be the file that the user gave. A run.toml that an earlier run wrote by
/// [`RunConfig::resolved`] is replaced.
///
/// # Errors
/// Returns an error if the folder has a run.toml with another configuration, and no run has written this file.
fn may_write_config(config: &RunConfig, out: &Path) -> Result<bool, RunError> {
    let path = out.join(CONFIG);
    if fs::symlink_metadata(&path).is_err() {
        return Ok(true);
    }
    let text = text_of(&path).unwrap_or_default();
    match RunConfig::parse(&text, &[]).ok() {
        Some(there) if there.clone().with_absolute_paths() == *config => Ok(false),
        Some(there) if there.is_written_as(&text) => Ok(true),
        _ => Err(CheckpointError::Foreign { path: out.to_owned(), name: CONFIG }.into()),
    }
}

/// Returns true if the run should write its tokenizer.json. Returns false if the folder already has a tokenizer.json
/// with the same vocabulary.
///
/// # Errors
/// Returns an error if the folder has a tokenizer.json with another vocabulary, and no run has used the folder.
fn may_write_vocabulary(vocabulary: &Vocabulary, folder: &RunFolder) -> Result<bool, RunError> {
    let path = folder.path().join(TOKENIZER);
    match fs::symlink_metadata(&path) {
        Err(_) => Ok(true),
        Ok(_) if Vocabulary::open(&path).is_ok_and(|there| there.hash() == vocabulary.hash()) => Ok(false),
        Ok(_) if folder.was_run() => Ok(true),
        Ok(_) => Err(CheckpointError::Foreign { path: folder.path().to_owned(), name: TOKENIZER }.into()),
    }
}

/// Returns an error if the data contain token ids that the embedding of a model folder does not have. Also prints which
/// parts of the model folder are unused.
fn expect_known(dataset: &Dataset, model: &ModelConfig, console: &Console) -> Result<(), RunError> {
    let ModelConfig::Folder(path) = model else { return Ok(()) };
    let config = hf::Config::read(path)?;
    config.notices().iter().for_each(|notice| console.say(notice));
    let (known, largest) = (config.vocabulary(), dataset.largest_token());
    if (largest as usize) < known {
        return Ok(());
    }
    let why = format!("the tokens go up to id {largest}, but the model of {} has {known} tokens", path.display());
    Err(ConfigError::value("data", why, "use the tokenizer that the model was trained with").into())
}

/// Returns the windows of the data that `evaluation.path` names.
///
/// # Errors
/// Returns an error if there is not a single window, because the user has named the data.
fn held_out_windows(held_out: &Dataset, config: &RunConfig) -> Result<ValidationWindows, RunError> {
    let (sequence, tokens) = (config.step.sequence, held_out.validation_tokens());
    match held_out.validation(sequence, most_windows(config.evaluation.windows)) {
        Ok(Some(windows)) => Ok(windows),
        Ok(None) | Err(DataError::TooShort { .. }) => {
            let why =
                format!("the data have {tokens} tokens, but a window of {sequence} tokens needs {}", sequence + 1);
            let remedy = "give more data, lower step.sequence, or leave the key out";
            Err(ConfigError::value("evaluation.path", why, remedy).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens the checkpoint at `path`. If `path` is the folder of a run, opens the run's newest checkpoint.
pub(super) fn checkpoint_of(path: &Path) -> Result<Checkpoint, RunError> {
    let checkpoints = path.join("checkpoints");
    let none = || RunError::NoCheckpointYet { path: path.to_owned(), earlier: newest_earlier(path) };
    Ok(match checkpoints.exists() {
        true => Checkpoint::latest(&checkpoints)?.ok_or_else(none)?,
        false if path.join(CONFIG).exists() => return Err(none()),
        false => Checkpoint::open(path)?,
    })
}

/// Returns the configuration for a comparison with the one in a checkpoint. Before the data is read, the number of steps
/// of an epoch is not known, so the number of steps in the checkpoint is assumed.
fn comparable(config: &RunConfig, checkpoint: &Checkpoint) -> Value {
    let mut compared = RunConfig { epochs: None, ..config.clone() }.compared();
    if config.epochs.is_some() {
        compared["steps"] = checkpoint.metadata()["run"]["config"]["steps"].clone();
    }
    compared
}

fn forked(from: &Path, steps: u64) -> Result<Checkpoint, RunError> {
    let checkpoint = checkpoint_of(from)?;
    expect_steps_left(&checkpoint, steps)?;
    Ok(checkpoint)
}

fn expect_steps_left(checkpoint: &Checkpoint, steps: u64) -> Result<(), RunError> {
    match checkpoint.step() {
        done if done >= steps => Err(RunError::NothingLeft { path: checkpoint.path().to_owned(), done, steps }),
        _ => Ok(()),
    }
}

/// Samples a continuation of the configured prompt, prints it and appends it to samples.txt. Does nothing if no prompt
/// is configured.
fn sampled(
    config: &RunConfig,
    vocabulary: &Vocabulary,
    trainer: &mut Trainer,
    out: &Path,
    console: &Console,
) -> Result<(), RunError> {
    let SampleConfig { prompt, tokens, .. } = &config.sample;
    if prompt.is_empty() {
        return Ok(());
    }
    let sampling = Sampling { seed: config.seed, ..config.sample.sampling() };
    // A model that was trained on answers ends each answer with the end-of-text token.
    let stop = vocabulary.end_of_text().filter(|_| config.data.format.has_answers()).into_iter().collect();
    let text = sample(
        trainer,
        vocabulary,
        prompt,
        &GenerateOptions { tokens: *tokens, sampling, stop, ..GenerateOptions::default() },
    )?;
    if trainer.rank() > 0 {
        return Ok(());
    }
    console.say(format_args!("---\n{text}\n---"));
    let path = out.join("samples.txt");
    let line = format!("=== step {}\n{text}\n", trainer.steps());
    let file = fs::OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        tracing::warn!(path = %path.display(), %error, "cannot write a sample");
    }
    Ok(())
}

/// Builds the trainer of a rank. If the run is new and its model is a model folder, loads the weights in this folder.
fn trainer(
    world: Box<dyn Communicator>,
    config: &RunConfig,
    vocabulary: usize,
    is_new: bool,
) -> Result<Trainer, RunError> {
    let options = config.options();
    let (architecture, folder) = config.model(vocabulary).open()?;
    let mut trainer = Trainer::builder(|vb| architecture.model(vb), options).distributed(world).build()?;
    if let Some(folder) = folder.filter(|_| is_new) {
        if !matches!(config.trainable, Trainable::Lora(_)) {
            folder.check_saved()?;
        }
        folder.load(&mut trainer)?;
    }
    Ok(trainer)
}
