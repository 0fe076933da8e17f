//! `gapless eval`: the perplexity of a model on a text. The model comes from a run or from a Hugging Face folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, ensure};
use gapless::engine::data::{Dataset, Format, TokenWidth, ValidationWindows};
use gapless::run::{EvaluationBatch, TrainedRun, WindowLoss};
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{exit_code, print, tell};
use crate::weights::{self, FolderArguments, Pretrained};

/// Maximum number of tokens per window for a Hugging Face folder, if the arguments do not give it.
const FOLDER_SEQUENCE: usize = 1024;

/// Measure the perplexity of a model (of a run or a Hugging Face folder) on data: e to the power of the mean loss per token.
///
/// A text is split into adjacent windows, each of which is evaluated on its own. Of prompts with completions and of
/// conversations (data.format of the run, or --format), only the answers are measured.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A run's folder (its newest checkpoint is used), or one of its checkpoints; a folder with config.json, safetensors files
    /// and tokenizer.json; or the folder of an adapter (adapter_config.json), which names its base.
    folder: PathBuf,
    /// A file or folder of text, or a .jsonl or .parquet file, read as by train; token ids as .bin (16 bits wide, 32 for a model with
    /// more than 65,536 tokens, or as a header of llm.c says); or the folder of a prepared dataset, whose validation part is used. Special
    /// tokens that a text spells out are encoded as such for a folder's model, as in transformers, and as data.special_tokens says for a
    /// run.
    data: PathBuf,
    /// Use the averages of a run's weights (optimizer.average) instead of the weights.
    #[arg(long)]
    average: bool,
    /// The width of ids in a .bin without a header: u16, u32 or u64.
    #[arg(long, value_parser = token_width)]
    token_width: Option<TokenWidth>,
    /// The contents of a line of a .jsonl or .parquet file: text, prompt, chat, preference or unpaired. The default is data.format of the run, or text.
    #[arg(long, value_parser = format)]
    format: Option<Format>,
    /// Tokens per window. The default is step.sequence of the run; for a folder, as many as the model was trained on, and at most 1024.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    sequence: Option<u32>,
    /// Windows per batch.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Maximum number of windows; all by default.
    #[arg(long)]
    windows: Option<usize>,
    /// The device: auto, cpu, cuda or cuda:1.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Worker threads; 0 for all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of_folder: FolderArguments,
}

fn token_width(text: &str) -> Result<TokenWidth, String> {
    serde_json::from_value(text.into()).map_err(|_| "not a width; use u16, u32 or u64".to_owned())
}

fn format(text: &str) -> Result<Format, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "not a format; use text, prompt, chat, preference or unpaired".to_owned())
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("eval", evaluate(arguments))
}

fn evaluate(arguments: &Arguments) -> anyhow::Result<()> {
    // Open the windows of data, and a model for one batch of them.
    let source = ModelSource::open(arguments)?;
    let longest = source.longest_sequence()?;
    let mut sequence = arguments.sequence.map_or_else(|| source.default_sequence(), |sequence| sequence as usize);
    if let Some(longest) = longest.filter(|&longest| longest < sequence) {
        if arguments.sequence.is_some() {
            tell(format_args!("windows are shortened to {longest} tokens, the model's maximum"));
        }
        sequence = longest;
    }
    let data = Data::open(&source, arguments)?;
    let (windows, documents) = data.windows(&mut sequence)?;
    if let ModelSource::Folder(opened) = &source {
        weights::tell_of_positions(opened.folder.config(), sequence);
    }
    let count = windows.count().min(arguments.windows.unwrap_or(usize::MAX));
    ensure!(count > 0, "--windows is 0; measure at least 1");
    let batch = (arguments.batch as usize).min(count);
    let mut model = source.model(arguments, batch, sequence, documents)?;

    // Measure the loss of all windows.
    let style = ProgressStyle::with_template("{pos}/{len} windows {wide_bar} perplexity {msg} ETA {eta}");
    let progress = ProgressBar::new(count as u64).with_style(style.context("the bar's template")?);
    let (mut room, mut measured, mut done) = (EvaluationBatch::new(&model), WindowLoss::default(), 0);
    while done < count {
        let taken = batch.min(count - done);
        let [tokens, targets, starts] = room.windows(taken, sequence);
        match documents {
            true => windows.fill_documents(done, tokens, targets, starts)?,
            false => windows.fill(done, tokens, targets)?,
        }
        (measured, done) = (measured.with(room.measure(&mut model, taken)?), done + taken);
        progress.set_position(done as u64);
        progress.set_message(format!("{:.3}", measured.mean().unwrap_or(f64::NAN).exp()));
    }
    progress.finish_and_clear();

    // Print the result.
    let none = "no target counts in the loss; raise --windows or --sequence";
    let (loss, measured) = (measured.mean().context(none)?, measured.counted);
    let perplexity = loss.exp();
    print(|out| match arguments.json {
        true => {
            let object = serde_json::json!({
                "perplexity": perplexity, "loss": loss, "tokens": measured, "windows": count, "sequence": sequence,
            });
            writeln!(out, "{object}")
        }
        false => writeln!(
            out,
            "perplexity {perplexity:.4} (loss {loss:.5}) over {measured} tokens in {count} windows of {sequence}"
        ),
    })
}

/// Adds the other formats to an error about lines that have no text.
fn with_formats(error: anyhow::Error, format: Format) -> anyhow::Error {
    match format == Format::Text && error.to_string().contains("missing field `text`") {
        true => {
            anyhow!("{error}; give --format chat for conversations, or --format prompt for prompts with completions")
        }
        false => error,
    }
}

/// The origin of the weights.
enum ModelSource {
    Run(Box<TrainedRun>),
    Folder(Box<Pretrained>),
}

impl ModelSource {
    fn open(arguments: &Arguments) -> anyhow::Result<Self> {
        if let Some(run) = weights::run_at(&arguments.folder, arguments.average, &arguments.of_folder)? {
            tell(format_args!("{}: {} steps", run.checkpoint.path().display(), run.checkpoint.step()));
            return Ok(Self::Run(Box::new(run)));
        }
        Ok(Self::Folder(Box::new(Pretrained::open(&arguments.folder, &arguments.of_folder)?)))
    }

    fn longest_sequence(&self) -> anyhow::Result<Option<usize>> {
        Ok(match self {
            Self::Run(run) => run.longest_sequence()?,
            Self::Folder(opened) => opened.folder.config().longest_sequence(),
        })
    }

    /// Returns the number of tokens per window if the arguments do not give it.
    fn default_sequence(&self) -> usize {
        match self {
            Self::Run(run) => run.config.step.sequence,
            Self::Folder(opened) => {
                opened.folder.config().trained_positions().unwrap_or(usize::MAX).min(FOLDER_SEQUENCE)
            }
        }
    }

    fn model(&self, arguments: &Arguments, batch: usize, sequence: usize, documents: bool) -> anyhow::Result<Trainer> {
        let (device, threads) = (arguments.device, arguments.threads);
        let options = TrainOptions {
            step: StepOptions { batch, sequence, documents, ..StepOptions::default() },
            device,
            threads,
            ..TrainOptions::default()
        };
        match self {
            Self::Run(run) => Ok(run.for_inference(options)?),
            Self::Folder(opened) => Ok(opened.model(options)?),
        }
    }
}

/// The data to measure, all of which is the validation part.
struct Data {
    dataset: Dataset,
    /// True if the documents of a text are isolated from each other, because they were isolated in training.
    isolates: bool,
    /// True if only answers are measured.
    has_answers: bool,
}

impl Data {
    fn open(source: &ModelSource, arguments: &Arguments) -> anyhow::Result<Self> {
        let path = &arguments.data;
        if path.join("dataset.json").exists() {
            let dataset = Dataset::open_prepared(path)?;
            let mut isolates = false;
            if let ModelSource::Run(run) = source {
                let is_same = dataset.vocabulary().hash() == run.vocabulary.hash();
                ensure!(
                    is_same,
                    "{} has another vocabulary than the run; use data that the run's tokenizer encoded",
                    path.display()
                );
                isolates = run.config.data.has_documents();
            }
            ensure!(
                dataset.validation_tokens() > 0,
                "{} has no validation part; prepare it with data.validation_every",
                path.display()
            );
            return Self { dataset, isolates, has_answers: false }.with_a_target(path);
        }
        let (dataset, format, isolates) = match source {
            ModelSource::Run(run) => {
                // A file without lines holds no examples.
                let of_run = if Format::is_read_from(path) { run.config.data.format } else { Format::Text };
                let format = arguments.format.unwrap_or(of_run);
                let dataset = run.held_out(path, format, arguments.token_width);
                (
                    dataset.map_err(|error| with_formats(error.into(), format))?,
                    format,
                    run.config.data.isolate_documents,
                )
            }
            ModelSource::Folder(opened) => {
                let format = arguments.format.unwrap_or_default();
                let dataset = opened.held_out(path, format, arguments.token_width);
                (dataset.map_err(|error| with_formats(error, format))?, format, false)
            }
        };
        Self { dataset, isolates, has_answers: format.has_answers() }.with_a_target(path)
    }

    fn with_a_target(self, path: &Path) -> anyhow::Result<Self> {
        let tokens = self.dataset.validation_tokens();
        ensure!(tokens > 1, "{} has {tokens} tokens, but a loss needs at least 2", path.display());
        Ok(self)
    }

    /// Divides the data into windows of `sequence` tokens. If a text is too short for one window, `sequence` is reduced
    /// so that the whole text is one window. Also returns whether the model must separate documents.
    fn windows(&self, sequence: &mut usize) -> anyhow::Result<(ValidationWindows, bool)> {
        let tokens = self.dataset.validation_tokens();
        if !self.has_answers {
            *sequence = (*sequence).min(usize::try_from(tokens - 1).unwrap_or(usize::MAX));
        }
        // A part of a window needs padding, which a model of separate documents leaves out of the loss.
        let is_padded = !self.has_answers && !(tokens - 1).is_multiple_of(*sequence as u64);
        let documents = self.has_answers || self.isolates || is_padded;
        let windows = match documents {
            true => self.dataset.padded_validation(*sequence, self.isolates)?,
            false => self.dataset.validation(*sequence, usize::MAX)?,
        };
        Ok((windows.context("all data are for validation")?, documents))
    }
}
