//! `gapless sample`: prints text as a model generates it. The model comes from a run or from a Hugging Face folder.

use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use gapless::engine::data::{DataError, Message, TextStream, Tokenizer};
use gapless::models::hf::{GenerationConfig, StopStrings};
use gapless::run::TrainedRun;
use gapless::{DeviceChoice, GenerateOptions, Generation, NextToken, Sampling, StepOptions, TrainOptions, Trainer};

use crate::output::{exit_code, tell};
use crate::weights::{self, FolderArguments, Pretrained};

/// Number of prompt tokens that are read at a time.
const CHUNK: usize = 128;

/// Default for the maximum number of tokens to add.
const TOKENS: usize = 256;

/// Continue a text, or answer a question, with the weights of a run or of a Hugging Face folder.
///
/// A run's folder is enough: its data and the model folder from which it started need not exist. Options that are not given are as in
/// [sample] of run.toml, or as in generation_config.json and transformers: without do_sample
/// the most likely token is taken; any of --temperature, --top-k, --top-p and --min-p turns random sampling on.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A run's folder (its newest checkpoint is used), or one of its checkpoints; a folder with config.json, safetensors files
    /// and tokenizer.json; or the folder of an adapter (adapter_config.json), which names its base.
    folder: PathBuf,
    /// Use the averages of a run's weights (optimizer.average) instead of the weights.
    #[arg(long)]
    average: bool,
    /// The beginning of the text, or the user's message; by default read from the standard input.
    #[arg(long)]
    prompt: Option<String>,
    /// Put the prompt into the chat template, of the folder or of the tokenizer that the run was given, and generate an answer.
    #[arg(long)]
    chat: bool,
    /// The system message before the user's message.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Maximum number of new tokens. The default for a run is sample.tokens of its run.toml. The default for a model
    /// folder is max_new_tokens or max_length of its generation_config.json. If these are missing, the default is 256.
    #[arg(long)]
    tokens: Option<usize>,
    /// Maximum number of tokens in the window; by default the prompt and the new tokens, up to the model's maximum.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    window: Option<u32>,
    /// Divide the logits by this temperature; 0 takes the most likely token.
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from this many most likely tokens only; 0 for all.
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the fewest most likely tokens whose probabilities add up to this.
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from tokens that are at least this fraction as likely as the most likely one.
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Above 1, make tokens that occurred before less likely.
    #[arg(long, allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// The seed of random sampling; the same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Do not stop at the model's end-of-text token.
    #[arg(long)]
    ignore_eos: bool,
    /// The device: auto, cpu, cuda or cuda:1.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Worker threads; 0 for all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    of_folder: FolderArguments,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    exit_code("sample", sample(arguments))
}

fn sample(arguments: &Arguments) -> anyhow::Result<()> {
    // Read the source of the weights, the prompt and the options.
    let source = ModelSource::open(arguments)?;
    let (prompt, ids) = source.prompt(arguments)?;
    let options = source.options(arguments, ids.len())?;

    // Build the model.
    let wanted = ids.len().saturating_add(options.tokens);
    let limit = source.longest_sequence()?;
    if let Some(limit) = limit.filter(|&limit| limit < ids.len() && arguments.window.is_none()) {
        let read = ids.len();
        bail!(
            "the prompt has {read} tokens, but the model has positions for {limit}; shorten it, or use only its last \
             tokens with --window {limit}"
        );
    }
    let window = arguments.window.map_or_else(|| wanted.min(limit.unwrap_or(wanted)), |window| window as usize);
    let generation = Generation { batch: 1, window: Some(window), chunk: CHUNK };
    let mut trainer = source.model(generation, arguments.device, arguments.threads)?;
    if let ModelSource::Folder(opened) = &source {
        weights::tell_of_positions(opened.0.folder.config(), wanted.min(window));
    }
    if wanted > window {
        tell(format_args!(
            "the text may exceed the window of {window} tokens; when the window is full, its newer half is processed again"
        ));
    }

    // Print the text while it is generated.
    let mut out = Stream::default();
    out.write(&prompt);
    let mut text = source.stream().after(&ids)?;
    let mut stop = source.stop_strings(&ids);
    let (begun, mut first, mut failed) = (Instant::now(), None, None);
    let each = |next: &NextToken<'_>| {
        first.get_or_insert_with(Instant::now);
        let mut next = || -> Result<bool, DataError> {
            out.write(text.push(next.token)?.as_deref().unwrap_or_default());
            Ok(out.is_over() || stop.as_mut().map_or(Ok(false), |stop| stop.ends_with(next.token))?)
        };
        match next() {
            Ok(false) => return ControlFlow::Continue(()),
            Ok(true) => {}
            Err(error) => failed = Some(error),
        }
        ControlFlow::Break(())
    };
    let added = trainer.generate(&[&ids], &options, each)?.remove(0);
    if let Some(error) = failed {
        return Err(error.into());
    }
    out.write(&text.finish()?);
    out.write("\n");
    out.end()?;
    if let Some(first) = first {
        report(ids.len(), first - begun, added.len(), first.elapsed());
    }
    Ok(())
}

/// The origin of the weights.
enum ModelSource {
    Run(Box<RunSource>),
    Folder(Box<(Pretrained, Tokenizer, GenerationConfig)>),
}

/// A run, with the tokenizer and the generation settings of the Hugging Face folder from which it started.
struct RunSource {
    run: TrainedRun,
    tokenizer: Option<Tokenizer>,
    config: Option<GenerationConfig>,
}

impl ModelSource {
    fn open(arguments: &Arguments) -> anyhow::Result<Self> {
        if let Some(run) = weights::run_at(&arguments.folder, arguments.average, &arguments.of_folder)? {
            tell(format_args!("{}: {} steps", run.checkpoint.path().display(), run.checkpoint.step()));
            let tokenizer = run.tokenizer_folder().map(Tokenizer::open).transpose()?;
            let config = run.generation_config()?;
            return Ok(Self::Run(Box::new(RunSource { run, tokenizer, config })));
        }
        let pretrained = Pretrained::open(&arguments.folder, &arguments.of_folder)?;
        let tokenizer = Tokenizer::open(&pretrained.tokenizer)?;
        let config = GenerationConfig::read(pretrained.folder.path())?;
        for (option, value) in &config.not_followed {
            tell(format_args!("the folder's generation option {option} ({value}) is not supported and is ignored"));
        }
        Ok(Self::Folder(Box::new((pretrained, tokenizer, config))))
    }

    /// Returns the tokenizer of the Hugging Face folder, or `None` if the run has a vocabulary of its own.
    fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Run(source) => source.tokenizer.as_ref(),
            Self::Folder(opened) => Some(&opened.1),
        }
    }

    /// Returns the text to print before the continuation, and the token ids of the prompt.
    fn prompt(&self, arguments: &Arguments) -> anyhow::Result<(String, Vec<u32>)> {
        let mut text = arguments.prompt.clone().unwrap_or_default();
        if arguments.prompt.is_none() {
            io::stdin().read_to_string(&mut text).context("cannot read the prompt from the standard input")?;
        }
        if arguments.chat {
            let with_template = self.tokenizer().and_then(|tokenizer| Some((tokenizer, tokenizer.chat_template()?)));
            let Some((tokenizer, template)) = with_template else {
                bail!("{} has no chat template; leave --chat out", arguments.folder.display());
            };
            let system = arguments.system.iter().map(|system| Message::new("system", system));
            let messages: Vec<Message> = system.chain([Message::new("user", text)]).collect();
            return Ok((String::new(), tokenizer.encode(&template.render(&messages, true)?, false)?));
        }
        let ids = match self {
            Self::Run(source) => source.run.vocabulary.encode_beginning(&text)?,
            Self::Folder(opened) => opened.1.encode(&text, true)?,
        };
        ensure!(!ids.is_empty(), "the prompt is empty; give at least one character");
        Ok((text, ids))
    }

    /// Returns the options for continuing a prompt of `prompt` tokens.
    fn options(&self, arguments: &Arguments, prompt: usize) -> anyhow::Result<GenerateOptions> {
        let mut options = match self {
            Self::Run(source) => {
                // Training ends documents with the first of these tokens, and answers as the chat template says.
                let of_folder = source.config.iter().flat_map(|config| &config.stop).copied();
                let stop = source.run.vocabulary.end_of_text().into_iter().chain(of_folder).collect();
                let tokens = Some(source.run.config.sample.tokens).filter(|&tokens| tokens > 0).unwrap_or(TOKENS);
                GenerateOptions { tokens, stop, ..GenerateOptions::default() }
            }
            Self::Folder(opened) => {
                let of_folder = &opened.2;
                let is_allowed = of_folder.tokens(prompt) != Some(0) || arguments.tokens.is_some();
                let most = of_folder.max_length.unwrap_or_default();
                ensure!(
                    is_allowed,
                    "the prompt has {prompt} tokens, but the folder's max_length allows {most} in total; give --tokens"
                );
                GenerateOptions { tokens: of_folder.tokens(prompt).unwrap_or(TOKENS), ..of_folder.options(prompt) }
            }
        };
        options.tokens = arguments.tokens.unwrap_or(options.tokens);
        options.sampling = self.sampling(arguments);
        if arguments.ignore_eos {
            options.stop.clear();
        }
        Ok(options)
    }

    /// Returns the strings that end the text, or `None` if no folder names such strings.
    fn stop_strings(&self, prompt: &[u32]) -> Option<StopStrings<'_>> {
        let config = match self {
            Self::Run(source) => source.config.as_ref()?,
            Self::Folder(opened) => &opened.2,
        };
        Some(StopStrings::new(self.tokenizer()?, &config.stop_strings, prompt))
    }

    /// Returns the sampling settings of the run or folder. Settings that are given as arguments replace them.
    fn sampling(&self, arguments: &Arguments) -> Sampling {
        let &Arguments { temperature, top_k, top_p, min_p, repetition_penalty, seed, .. } = arguments;
        let is_drawn = temperature.is_some() || top_k.is_some() || top_p.is_some() || min_p.is_some();
        let base = match self {
            Self::Run(source) => source.run.config.sample.sampling(),
            Self::Folder(opened) if is_drawn => opened.2.sampling,
            Self::Folder(opened) => opened.2.default_sampling(),
        };
        Sampling {
            temperature: temperature.unwrap_or(base.temperature),
            top_k: top_k.unwrap_or(base.top_k),
            top_p: top_p.unwrap_or(base.top_p),
            min_p: min_p.unwrap_or(base.min_p),
            repetition_penalty: repetition_penalty.unwrap_or(base.repetition_penalty),
            seed,
            ..base
        }
    }

    fn longest_sequence(&self) -> anyhow::Result<Option<usize>> {
        Ok(match self {
            Self::Run(source) => source.run.longest_sequence()?,
            Self::Folder(opened) => opened.0.folder.config().longest_sequence(),
        })
    }

    fn model(&self, generation: Generation, device: DeviceChoice, threads: usize) -> anyhow::Result<Trainer> {
        match self {
            Self::Run(source) => Ok(source.run.model(generation, device, threads)?),
            Self::Folder(opened) => {
                let sequence = generation.window.unwrap_or(CHUNK).min(CHUNK);
                let generation = Some(generation);
                let options = TrainOptions {
                    step: StepOptions { batch: 1, sequence, generation, ..StepOptions::default() },
                    device,
                    threads,
                    ..TrainOptions::default()
                };
                Ok(opened.0.model(options)?)
            }
        }
    }

    /// Returns a stream that converts tokens to text.
    fn stream(&self) -> TextStream<'_> {
        match self {
            Self::Run(source) => source.run.vocabulary.stream(),
            Self::Folder(opened) => opened.1.stream(),
        }
    }
}

fn report(read: usize, reading: Duration, added: usize, adding: Duration) {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    // The time of the first new token counts with the prompt, because both are computed together.
    tell(format_args!(
        "{read} prompt tokens ({:.1} tokens/s), {added} new tokens ({:.1} tokens/s)",
        rate(read, reading),
        rate(added.saturating_sub(1), adding)
    ));
}

/// The standard output, to which text is written piece by piece. If the output has been closed, writes do nothing.
#[derive(Default)]
struct Stream {
    failed: Option<io::Error>,
}

impl Stream {
    fn write(&mut self, text: &str) {
        if self.failed.is_none() {
            let mut out = io::stdout().lock();
            self.failed = out.write_all(text.as_bytes()).and_then(|()| out.flush()).err();
        }
    }

    fn is_over(&self) -> bool {
        self.failed.is_some()
    }

    fn end(self) -> anyhow::Result<()> {
        match self.failed {
            Some(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(error).context("cannot write to the standard output")
            }
            _ => Ok(()),
        }
    }
}
