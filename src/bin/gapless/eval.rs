//! `gapless eval`: the perplexity of a model on a text. The model comes from a run or from a Hugging Face folder.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use gapless::engine::data::{Corpus, DataError, Dataset, TokenWidth, Tokenizer, Tokens, ValidationWindows};
use gapless::run::{EvaluationBatch, TrainedRun, WindowLoss};
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{exit_code, print, tell};
use crate::weights::{self, FolderArguments, Pretrained};

/// Measure the perplexity of a model (of a run or a Hugging Face folder) on a text: e to the power of the mean loss per token.
///
/// The text is split into adjacent windows, each of which is evaluated on its own.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A run's folder (its newest checkpoint is used), or one of its checkpoints; a folder with config.json, safetensors files
    /// and tokenizer.json; or the folder of an adapter (adapter_config.json), which names its base.
    folder: PathBuf,
    /// A file or folder of text, read as by train; token ids as .bin (16 bits wide, 32 for a model with more than 65,536 tokens, or as a
    /// header of llm.c says); or the folder of a prepared dataset, whose validation part is used. Special tokens that a text spells out
    /// are encoded as such for a folder's model, as in transformers, and as data.special_tokens says for a run.
    data: PathBuf,
    /// Use the averages of a run's weights (optimizer.average) instead of the weights.
    #[arg(long)]
    average: bool,
    /// The width of ids in a .bin without a header: u16, u32 or u64.
    #[arg(long, value_parser = token_width)]
    token_width: Option<TokenWidth>,
    /// Tokens per window.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    sequence: u32,
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

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("eval", evaluate(arguments))
}

fn evaluate(arguments: &Arguments) -> anyhow::Result<()> {
    // Open the windows of data, and a model for one batch of them.
    let source = ModelSource::open(arguments)?;
    let mut sequence = arguments.sequence as usize;
    if let Some(longest) = source.longest_sequence()?.filter(|&longest| longest < sequence) {
        tell(format_args!("windows are shortened to {longest} tokens, the model's maximum"));
        sequence = longest;
    }
    let windows = Windows::open(&source, arguments, &mut sequence)?;
    if let ModelSource::Folder(opened) = &source {
        weights::tell_of_positions(opened.folder.config(), sequence);
    }
    let count = windows.count(sequence).min(arguments.windows.unwrap_or(usize::MAX));
    ensure!(count > 0, "{} has no window of {sequence} tokens; use a shorter --sequence", arguments.data.display());
    let batch = (arguments.batch as usize).min(count);
    let documents = windows.has_documents(&source);
    let mut model = source.model(arguments, batch, sequence, documents)?;

    // Measure the loss of all windows.
    let style = ProgressStyle::with_template("{pos}/{len} windows {wide_bar} perplexity {msg} ETA {eta}");
    let progress = ProgressBar::new(count as u64).with_style(style.context("the bar's template")?);
    let (mut room, mut measured, mut done) = (EvaluationBatch::new(&model), WindowLoss::default(), 0);
    while done < count {
        let taken = batch.min(count - done);
        let [tokens, targets, starts] = room.windows(taken, sequence);
        windows.fill(done, sequence, tokens, targets, starts)?;
        (measured, done) = (measured.with(room.measure(&mut model, taken)?), done + taken);
        progress.set_position(done as u64);
        progress.set_message(format!("{:.3}", measured.mean().unwrap_or(f64::NAN).exp()));
    }
    progress.finish_and_clear();

    // Print the result.
    let (loss, measured) = (measured.mean().context("all targets are ignored, so there is no loss")?, measured.counted);
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

    /// Returns the number of tokens in the model's vocabulary.
    fn vocabulary(&self) -> usize {
        match self {
            Self::Run(run) => run.vocabulary.size(),
            Self::Folder(opened) => opened.folder.config().vocabulary(),
        }
    }

    /// Tokenizes the text that the arguments name. Each document begins with the special tokens that the tokenizer puts
    /// before a text. If there are several documents, which are lines of a .jsonl file or files of a folder, each also
    /// ends with the end-of-text token of the run or model folder.
    fn encode(&self, arguments: &Arguments) -> anyhow::Result<Vec<u32>> {
        let corpus = Corpus::read(&arguments.data)?;
        let texts = corpus.documents();
        let joined = |encode: &dyn Fn(&str) -> Result<Vec<u32>, DataError>, end: Option<u32>| {
            let mut ids = Vec::new();
            for document in texts {
                ids.extend(encode(&document.text)?);
                ids.extend(end.filter(|_| texts.len() > 1));
            }
            Ok(ids)
        };
        match self {
            Self::Run(run) => joined(&|text| run.vocabulary.encode_beginning(text), run.vocabulary.end_of_text()),
            Self::Folder(opened) => {
                let tokenizer = Tokenizer::open(&opened.tokenizer)?;
                joined(&|text| tokenizer.encode(text, true), tokenizer.eos())
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

/// Token ids, divided into windows.
enum Windows {
    /// Adjacent windows, starting with the first token. The last target of a window is the token that follows the
    /// window.
    Tokens(Tokens),
    /// Windows of a prepared dataset.
    Dataset(ValidationWindows),
}

impl Windows {
    /// Opens a text, token ids or a dataset, and divides the tokens into windows of `sequence` tokens. If the text is
    /// too short for one window, `sequence` is reduced so that the whole text is one window.
    fn open(source: &ModelSource, arguments: &Arguments, sequence: &mut usize) -> anyhow::Result<Self> {
        let path = &arguments.data;
        if path.join("dataset.json").exists() {
            let dataset = Dataset::open_prepared(path)?;
            if let ModelSource::Run(run) = source {
                let is_same = dataset.vocabulary().hash() == run.vocabulary.hash();
                ensure!(
                    is_same,
                    "{} has another vocabulary than the run; use data that the run's tokenizer encoded",
                    path.display()
                );
            }
            let windows = dataset.validation(*sequence, usize::MAX)?;
            return Ok(Self::Dataset(windows.with_context(|| {
                format!("{} has no validation part; prepare it with data.validation_every", path.display())
            })?));
        }
        let tokens = match path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("bin")) {
            true => Tokens::open_for(&[path], arguments.token_width, source.vocabulary())?,
            false => Tokens::from_ids(source.encode(arguments)?),
        };
        ensure!(tokens.count() > 1, "{} has {} tokens, but a loss needs at least 2", path.display(), tokens.count());
        *sequence = (*sequence).min(usize::try_from(tokens.count() - 1).unwrap_or(usize::MAX));
        let left = (tokens.count() - 1) % *sequence as u64;
        if left > 0 {
            tell(format_args!("the last {left} tokens do not fill a window and are skipped"));
        }
        Ok(Self::Tokens(tokens))
    }

    fn count(&self, sequence: usize) -> usize {
        match self {
            Self::Tokens(tokens) => ((tokens.count() - 1) / sequence as u64) as usize,
            Self::Dataset(windows) => windows.count(),
        }
    }

    /// True if the documents of a window must be isolated from each other, because they were isolated in training.
    fn has_documents(&self, source: &ModelSource) -> bool {
        match (self, source) {
            (Self::Dataset(_), ModelSource::Run(run)) => run.config.data.has_documents(),
            _ => false,
        }
    }

    /// Fills the buffers with consecutive windows, beginning with window number `first`. Also fills `starts` with the
    /// document starts, unless `starts` is empty.
    fn fill(
        &self,
        first: usize,
        sequence: usize,
        tokens: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> anyhow::Result<()> {
        match self {
            Self::Tokens(ids) => {
                let start = (first * sequence) as u64;
                ids.read(start, tokens)?;
                ids.read(start + 1, targets)?;
            }
            Self::Dataset(windows) => windows.fill_documents(first, tokens, targets, starts)?,
        }
        Ok(())
    }
}
