//! The training loop. It performs the steps, evaluations and checkpoints of a trainer on given data, and reports each
//! of them to a callback.

use std::error::Error;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use gapless_engine::checkpoint::Checkpoint;
use gapless_engine::data::{DataError, Dataset, TrainingWindows, ValidationWindows, Vocabulary};
use gapless_engine::nn::PairLoss;
use gapless_engine::{Batch, GenerateOptions, TrainError, Trainer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::guard::Recent;
use super::{Event, GuardConfig, References, RunError, RunFolder, Seconds, Stop, validation_loss, validation_rewards};

/// The result of a callback of [`TrainingLoop::run`]: whether to continue, or an error that ends the run.
pub type CallbackResult = Result<ControlFlow<()>, Box<dyn Error + Send + Sync>>;

/// The loop of a training program. It starts at the trainer's current step, so a trainer after [`Trainer::resume`]
/// continues its run.
///
/// ```no_run
/// # use gapless::{Dataset, Trainer};
/// # fn program(dataset: &Dataset, trainer: &mut Trainer) -> Result<(), Box<dyn std::error::Error>> {
/// use gapless::run::TrainingLoop;
/// use std::ops::ControlFlow::Continue;
///
/// let training = dataset.training(256, 8, 0)?;
/// let validation = dataset.validation(256, 32)?;
/// let fitted = TrainingLoop::new(&training, 300).evaluate(validation.as_ref(), 100).run(trainer, |event, trainer| {
///     println!("{event}"); // "step 12 loss 3.141 norm 0.59 lr 1.0e-3 2653 tokens/s", or of an evaluation, of a checkpoint
///     Ok(Continue(())) // or Break(()), to end
/// })?;
/// println!("loss {:?}", fitted.loss);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TrainingLoop<'a> {
    training: &'a TrainingWindows,
    steps: u64,
    evaluation: Option<(&'a ValidationWindows, u64)>,
    checkpoints: Option<(&'a RunFolder, u64, Value)>,
    saves_after: Option<Duration>,
    stop: Option<&'a Stop>,
    limit: Option<Duration>,
    patience: Option<u64>,
    best: Option<Best>,
    guard: Option<GuardConfig>,
    recent: Recent,
    references: Option<&'a References>,
}

/// The lowest validation loss so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Best {
    val_loss: f32,
    /// Number of evaluations since the one with the lowest loss.
    since: u64,
}

/// The reason why a [`TrainingLoop`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// All steps are done.
    #[default]
    Complete,
    /// The validation loss has not fallen for the number of evaluations given to [`TrainingLoop::patience`].
    NoImprovement,
    /// The time limit given to [`TrainingLoop::limit`] has passed.
    TimeLimit,
    /// A signal arrived, or a callback returned `Break`.
    Asked,
}

/// The outcome of a [`TrainingLoop`].
#[derive(Debug, Clone, Copy, Default)]
pub struct TrainingOutcome {
    /// Loss of the last step; `None` if there was no step left to do.
    pub loss: Option<f32>,
    /// Validation loss of the last evaluation; `None` if there was no evaluation or if no target counts.
    pub val_loss: Option<f32>,
    /// Mean tokens per second since the loop began. Only the time of steps counts.
    pub tokens_per_second: f64,
    /// The reason why the loop ended.
    pub ended: Ended,
}

impl<'a> TrainingLoop<'a> {
    /// Creates a loop that trains until the trainer has done `steps` steps. Steps from before a resume count.
    pub fn new(training: &'a TrainingWindows, steps: u64) -> Self {
        let (evaluation, checkpoints, saves_after, stop) = (None, None, None, None);
        let (limit, patience, best, guard, recent, references) = (None, None, None, None, Recent::default(), None);
        Self {
            training,
            steps,
            evaluation,
            checkpoints,
            saves_after,
            stop,
            limit,
            patience,
            best,
            guard,
            recent,
            references,
        }
    }

    /// Measures the validation loss on these windows every `every` steps and after the last step. If `every` is 0,
    /// measures only after the last step.
    pub fn evaluate(self, windows: Option<&'a ValidationWindows>, every: u64) -> Self {
        Self { evaluation: windows.map(|windows| (windows, every)), ..self }
    }

    /// Saves a checkpoint every `every` steps and at the end. If `every` is 0, saves only at the end. `run` is stored
    /// in each checkpoint; it should contain all settings that the program needs to build the same trainer again.
    pub fn save(self, folder: &'a RunFolder, every: u64, run: Value) -> Self {
        Self { checkpoints: Some((folder, every, run)), ..self }
    }

    /// Also saves a checkpoint when this much time has passed since the last checkpoint.
    pub fn save_after(self, time: Duration) -> Self {
        Self { saves_after: Some(time), ..self }
    }

    /// Ends the run with a checkpoint after the first step that ends later than `time` after the start of the loop.
    pub fn limit(self, time: Duration) -> Self {
        Self { limit: Some(time), ..self }
    }

    /// Turns on early stopping: the loop ends when this many evaluations in a row have not lowered the validation loss.
    pub fn patience(self, evaluations: u64) -> Self {
        Self { patience: Some(evaluations), ..self }
    }

    /// Takes over the state of early stopping and of [`Self::guard`] from a checkpoint that an earlier loop has saved.
    /// The trainer itself must be resumed by [`Trainer::resume`].
    pub fn continue_from(self, checkpoint: &Checkpoint) -> Self {
        let (best, recent) = found(checkpoint);
        Self { best, recent, ..self }
    }

    /// Skips steps whose loss or gradient norm is far above that of recent steps. The trainer's update must be guarded
    /// ([`UpdateOptions::guarded`](gapless_engine::UpdateOptions::guarded)). After too many skipped steps in a row, the
    /// run returns to a checkpoint that it has saved ([`Self::save`]). If it has already done so
    /// [`GuardConfig::rollbacks`] times, it ends with an error.
    pub fn guard(self, guard: GuardConfig) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Sets the log-likelihoods of the answers under the reference model, for training on preferences. They must be
    /// those of the loop's training and validation windows.
    pub fn references(self, references: &'a References) -> Self {
        Self { references: Some(references), ..self }
    }

    /// Ends the loop with a checkpoint when a signal arrives.
    pub fn stop(self, stop: &'a Stop) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Trains until a reason to end occurs ([`Ended`]), then saves a checkpoint. The callback also gets the trainer,
    /// for example to generate a sample. With several ranks, all ranks must call this method. If there is a reason to
    /// end on one rank, all ranks end after the same step.
    ///
    /// # Errors
    /// Returns an error if the model is not causal ([`Trainer::expect_causal`]), because the targets are the next tokens.
    /// Returns a [`RunError`] if the data cannot be read, the trainer fails, a checkpoint cannot be saved, or too many
    /// steps were skipped. Returns [`RunError::Callback`] if the callback returns an error.
    pub fn run(
        &self,
        trainer: &mut Trainer,
        mut on: impl FnMut(Event, &mut Trainer) -> CallbackResult,
    ) -> Result<TrainingOutcome, RunError> {
        trainer.expect_causal()?;
        let preference = trainer.options().step.preference;
        let needs_reference = preference.is_some_and(|preference| preference.needs_reference());
        if needs_reference && self.references.is_none() {
            let remedy = "measure it before the first step (References::measure), and call TrainingLoop::references";
            return Err(TrainError::config("preference.reference", "there is no reference", remedy).into());
        }
        let mut reference = vec![0.0; if needs_reference { self.training.batch() } else { 0 }];
        let has_labels = preference.is_some_and(|preference| preference.loss == PairLoss::Kto);
        let mut labels = vec![0.0; if has_labels { self.training.batch() } else { 0 }];
        let size = self.training.batch() * self.training.sequence();
        let (mut tokens, mut targets, mut starts) = buffers(trainer, size);
        let (first, begun, mut busy) = (trainer.steps(), Instant::now(), Duration::ZERO);
        let (mut breaks, mut best, mut saved) = (false, self.best, Saved { steps: None, at: begun });
        let (mut fitted, mut val_loss, mut recent) = (TrainingOutcome::default(), None, self.recent.clone());
        fitted.ended = loop {
            if let Some(ended) = self.end(trainer, breaks, best, begun)? {
                break ended;
            }
            if let Some(guard) = &self.guard {
                trainer.set_limits(recent.thresholds(guard));
            }
            let step_begun = Instant::now();
            self.training.fill_documents(
                trainer.steps() + recent.data_offset,
                0,
                &mut tokens,
                &mut targets,
                &mut starts,
            )?;
            if let Some(references) = self.references {
                references.fill(self.training, trainer.steps() + recent.data_offset, &mut reference);
            }
            for (index, label) in labels.iter_mut().enumerate() {
                let step = trainer.steps() + recent.data_offset;
                *label = f32::from(u8::from(self.training.is_desirable(step, index)));
            }
            let data = step_begun.elapsed();
            let batch = Batch { tokens: &tokens, targets: &targets, starts: &starts };
            let report = trainer.step_answers(&batch, &reference, &labels)?;
            let both = step_begun.elapsed();
            busy += both;
            let count = trainer.steps();
            let tokens_per_second = ((count - first) * size as u64) as f64 / busy.as_secs_f64().max(1e-9);
            (fitted.loss, fitted.tokens_per_second) = (Some(report.loss), tokens_per_second);
            let seconds = Seconds::of_step(trainer, data, both - data);
            breaks |= on(Event::Step { report, tokens_per_second, seconds }, trainer)?.is_break();
            if let Some(guard) = &self.guard {
                recent.push(&report, guard);
                if recent.skipped >= guard.patience {
                    (best, recent) = self.roll_back(trainer, guard, &recent)?;
                    breaks |= on(Event::RolledBack { from: count, to: trainer.steps() }, trainer)?.is_break();
                    continue;
                }
            }

            val_loss = None;
            if let Some((windows, _)) =
                self.evaluation.filter(|(_, every)| is_due(count, *every) || count == self.steps)
            {
                let evaluation_begun = Instant::now();
                let val_rewards;
                (val_loss, val_rewards) = match &preference {
                    None => (validation_loss(trainer, windows)?, None),
                    Some(preference) => {
                        let (loss, rewards) = validation_rewards(trainer, windows, preference, self.references)?;
                        (Some(loss), Some(rewards))
                    }
                };
                let evaluation = Some(evaluation_begun.elapsed().as_secs_f32());
                let seconds = Seconds { evaluation, ..Seconds::default() };
                fitted.val_loss = val_loss;
                best = Best::with(best, val_loss);
                breaks |=
                    on(Event::Evaluation { step: report.step, val_loss, val_rewards, seconds }, trainer)?.is_break();
            }
            if let Some((folder, every, run)) = &self.checkpoints
                && (is_due(count, *every) || self.is_save_due(trainer, saved)?)
            {
                let event =
                    Event::Saved { saved: folder.save(trainer, self.with_state(run, val_loss, best, &recent))? };
                saved = Saved { steps: Some(count), at: Instant::now() };
                breaks |= on(event, trainer)?.is_break();
            }
        };
        if let Some((folder, _, run)) = self.checkpoints.as_ref().filter(|_| saved.steps != Some(trainer.steps())) {
            let event = Event::Saved { saved: folder.save(trainer, self.with_state(run, val_loss, best, &recent))? };
            let _ends = on(event, trainer)?;
        }
        Ok(fitted)
    }

    /// Returns the reason to end before the next step, or `None` if the loop continues. With several ranks, all ranks
    /// end if one rank has a reason.
    fn end(
        &self,
        trainer: &mut Trainer,
        breaks: bool,
        best: Option<Best>,
        begun: Instant,
    ) -> Result<Option<Ended>, RunError> {
        if trainer.steps() >= self.steps {
            return Ok(Some(Ended::Complete));
        }
        if self.patience.zip(best).is_some_and(|(patience, best)| best.since >= patience) {
            return Ok(Some(Ended::NoImprovement));
        }
        if trainer.any(breaks || self.is_stopped())? {
            return Ok(Some(Ended::Asked));
        }
        match self.limit {
            Some(limit) if trainer.any(begun.elapsed() >= limit)? => Ok(Some(Ended::TimeLimit)),
            _ => Ok(None),
        }
    }

    /// Returns to the newest checkpoint from before the series of skipped steps. The position in the data is kept; all
    /// other results since this checkpoint are discarded. Later checkpoints are removed, so that a run that is
    /// interrupted now and resumed continues from the same checkpoint. Returns the state of early stopping and of the
    /// guard after the rollback.
    ///
    /// # Errors
    /// Returns [`RunError::Spikes`] if there is no such checkpoint or no rollback left, and the errors of
    /// [`Trainer::resume`].
    fn roll_back(
        &self,
        trainer: &mut Trainer,
        guard: &GuardConfig,
        recent: &Recent,
    ) -> Result<(Option<Best>, Recent), RunError> {
        let (done, skipped) = (trainer.steps(), recent.skipped);
        let folder =
            self.checkpoints.as_ref().filter(|_| recent.rollbacks < guard.rollbacks).map(|(folder, ..)| folder);
        let checkpoint = folder.map(|folder| folder.newest_until(done - skipped)).transpose()?.flatten();
        let Some((folder, checkpoint)) = folder.zip(checkpoint) else {
            return Err(RunError::Spikes { step: done, skipped });
        };
        trainer.resume(&checkpoint)?;
        // This is a barrier: every rank must have opened the checkpoint before the first rank removes later
        // checkpoints.
        trainer.any(false)?;
        if trainer.rank() == 0 {
            folder.remove_after(checkpoint.step())?;
        }
        let (best, before) = found(&checkpoint);
        Ok((best, before.rolled_back(recent, done - checkpoint.step())))
    }

    /// Returns `run` with three additions: the last validation loss, the best evaluation, and the recent steps of the
    /// guard. A `run` that is not a JSON object is returned unchanged.
    fn with_state(&self, run: &Value, val_loss: Option<f32>, best: Option<Best>, recent: &Recent) -> Value {
        let mut run = run.clone();
        if let Value::Object(run) = &mut run {
            run.extend(val_loss.map(|loss| ("val_loss".to_owned(), json!(loss))));
            run.extend(best.map(|best| ("best".to_owned(), json!(best))));
            run.extend(self.guard.map(|_| ("recent".to_owned(), json!(recent))));
        }
        run
    }

    fn is_save_due(&self, trainer: &mut Trainer, saved: Saved) -> Result<bool, RunError> {
        match self.saves_after {
            Some(after) => Ok(trainer.any(saved.at.elapsed() >= after)?),
            None => Ok(false),
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.signal().is_some())
    }
}

/// Reads the best evaluation and the recent steps that [`TrainingLoop::with_state`] has added to the checkpoint's
/// metadata.
fn found(checkpoint: &Checkpoint) -> (Option<Best>, Recent) {
    let said = |key: &str| checkpoint.metadata().get("run").and_then(|run| run.get(key));
    let best = said("best").and_then(|best| Best::deserialize(best).ok());
    (best, said("recent").and_then(|recent| Recent::deserialize(recent).ok()).unwrap_or_default())
}

impl Best {
    /// Returns the state after one more evaluation. An evaluation without a loss changes nothing.
    fn with(before: Option<Self>, val_loss: Option<f32>) -> Option<Self> {
        let Some(val_loss) = val_loss else { return before };
        let is_lower = before.is_none_or(|best| val_loss < best.val_loss);
        match before.filter(|_| !is_lower) {
            Some(best) => Some(Self { since: best.since + 1, ..best }),
            None => Some(Self { val_loss, since: 0 }),
        }
    }
}

/// The last checkpoint of this loop: its number of steps, and the time at which it was saved. Before the first
/// checkpoint, the time is the start of the loop.
#[derive(Clone, Copy)]
struct Saved {
    steps: Option<u64>,
    at: Instant,
}

fn is_due(count: u64, every: u64) -> bool {
    every > 0 && count.is_multiple_of(every)
}

/// Buffers for the tokens and targets of a batch, and for document starts if the trainer uses them.
fn buffers(trainer: &Trainer, size: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    (vec![0; size], vec![0; size], vec![0; if trainer.options().step.documents { size } else { 0 }])
}

/// Returns the prompt, followed by the continuation that the model generates with these options.
///
/// # Errors
/// Returns the errors of [`Vocabulary::encode`], [`Trainer::generate`] and [`Vocabulary::decode`].
pub fn sample(
    trainer: &mut Trainer,
    vocabulary: &Vocabulary,
    prompt: &str,
    options: &GenerateOptions,
) -> Result<String, RunError> {
    let ids = vocabulary.encode_beginning(prompt)?;
    let added = trainer.generate(&[&ids], options, |_| ControlFlow::Continue(()))?.remove(0);
    Ok(format!("{prompt}{}", vocabulary.decode(&added)?))
}

/// Returns at most `count` validation windows, spread evenly over the data. If `count` is 0, returns all windows. If
/// the data is too short for one window, logs a warning and returns `None`.
///
/// # Errors
/// Returns an error if reading fails or `sequence` is 0.
pub fn validation_windows(
    dataset: &Dataset,
    sequence: usize,
    count: usize,
) -> Result<Option<ValidationWindows>, DataError> {
    match dataset.validation(sequence, most_windows(count)) {
        Err(error @ DataError::TooShort { .. }) => {
            tracing::warn!(%error, "validation is left out");
            Ok(None)
        }
        windows => windows,
    }
}

/// Returns the maximum number of validation windows, of which 0 stands for all.
pub(super) fn most_windows(count: usize) -> usize {
    if count == 0 { usize::MAX } else { count }
}

#[cfg(test)]
mod tests {
    use gapless_engine::data::VocabularyChoice;
    use gapless_engine::{StepOptions, TrainOptions, communicator};
    use gapless_models::{Gpt, GptConfig};
    use gapless_parallel::Mesh;

    use super::super::{Console, with_saved};
    use super::*;
    use crate::{DataOptions, Source};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Flags {
        width: usize,
        lr: f64,
    }

    /// The callback of one of two ranks breaks after step 3. Both ranks then save a single checkpoint of this step, and
    /// a resumed run continues to the end. Settings that the resuming program does not give come from the checkpoint.
    #[test]
    fn what_ends_one_rank_ends_all_and_another_run_goes_on() {
        let place = tempfile::tempdir().unwrap();
        let text = place.path().join("text.txt");
        std::fs::write(&text, "to be or not to be, that is the question\n".repeat(50)).unwrap();
        let (vocabulary, cache) = (VocabularyChoice::Bytes, place.path().join("cache"));
        let dataset =
            Dataset::prepare(&Source::from(text), &DataOptions { vocabulary, cache, ..DataOptions::default() })
                .unwrap();
        let training = dataset.training(8, 4, 0).unwrap();
        let folder = RunFolder::open(&place.path().join("run")).unwrap();
        folder.claim().unwrap();
        let config = GptConfig { vocabulary: 256, sequence: 8, layers: 1, heads: 2, width: 16, ..GptConfig::default() };
        let options = TrainOptions {
            step: StepOptions {
                batch: 4,
                sequence: 8,
                mesh: Mesh { data: 2, ..Mesh::default() },
                ..StepOptions::default()
            },
            threads: 1,
            ..TrainOptions::default()
        };

        let run = |breaks_behind: u64, resumed: Option<&Checkpoint>| {
            let ranks = communicator::on_threads(2, |world| {
                let mut trainer =
                    Trainer::builder(|vb| Gpt::new(&config, vb), options.clone()).distributed(world).build()?;
                resumed.map(|checkpoint| trainer.resume(checkpoint)).transpose()?;
                let mut saved = Vec::new();
                let fit =
                    TrainingLoop::new(&training, 5).save(&folder, 3, json!({ "flags": Flags { width: 16, lr: 0.1 } }));
                let fitted = fit.run(&mut trainer, |event, trainer| {
                    if let Event::Saved { .. } = event {
                        saved.push(trainer.steps());
                    }
                    let breaks = trainer.rank() == 1 && trainer.steps() == breaks_behind;
                    Ok(if breaks { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
                });
                Ok((fitted.unwrap().loss, saved))
            });
            ranks.unwrap()
        };
        let [first, second]: [_; 2] = run(3, None).try_into().unwrap();
        assert_eq!((&first.1, &first), (&vec![3], &second));
        let checkpoint = folder.newest().unwrap();
        assert_eq!(checkpoint.step(), 3);
        let said = |given: &'static str| {
            let now = Flags { width: 32, lr: 0.2 };
            with_saved(&now, |flag| flag == given, &checkpoint, "flags", &["lr"], &Console::default())
        };
        assert_eq!(said("lr").unwrap(), Flags { width: 16, lr: 0.2 });
        assert_eq!(said("nothing").unwrap(), Flags { width: 16, lr: 0.1 });
        let error = said("width").unwrap_err().to_string();
        assert!(error.contains("width was 16 and is 32"), "{error}");
        let [first, second]: [_; 2] = run(0, Some(&checkpoint)).try_into().unwrap();
        assert_eq!((&first.1, &first), (&vec![5], &second));
    }
}
