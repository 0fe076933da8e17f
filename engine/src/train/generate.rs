//! Text generation, token by token.
//!
//! With caches ([`StepOptions::generation`](gapless_compile::step::StepOptions::generation)), a prompt is read in
//! chunks, and each further token costs the computation of one token. Without caches, each token costs a forward pass
//! over the whole window. The context and the generated tokens are the same with and without caches. There are no
//! caches for a model with an operation that combines tokens, other than causal attention.

use std::ops::ControlFlow;

use gapless_compile::ProgramId;
use gapless_graph::{Causality, Culprit};
use gapless_kernels::Numbers;

use super::sampling::Sampler;
use super::{CAUSAL_REMEDY, Sampling, Trainer, not_causal};
use crate::error::{Result, TrainError};

/// Options of text generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Maximum number of tokens to add.
    pub tokens: usize,
    /// Sampling options.
    pub sampling: Sampling,
    /// Tokens that end a sequence. The end token itself is part of the result.
    pub stop: Vec<u32>,
    /// Number of tokens to add before one of `stop` may be drawn.
    pub min_tokens: usize,
    /// Sequences of tokens that must not occur. The last token of such a sequence is banned whenever the tokens
    /// before it have just occurred. A sequence of one token bans that token.
    pub banned: Vec<Vec<u32>>,
    /// Tokens that must not be the first one added.
    pub banned_first: Vec<u32>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            tokens: 200,
            sampling: Sampling::default(),
            stop: Vec::new(),
            min_tokens: 0,
            banned: Vec::new(),
            banned_first: Vec::new(),
        }
    }
}

impl GenerateOptions {
    /// Adds this many tokens, each the most likely one.
    pub fn greedy(tokens: usize) -> Self {
        Self { tokens, sampling: Sampling::greedy(), ..Self::default() }
    }

    /// True if these options may ban a token.
    fn has_bans(&self) -> bool {
        let has_first = !self.banned_first.is_empty() || self.min_tokens > 0 && !self.stop.is_empty();
        has_first || !self.banned.is_empty() || self.sampling.no_repeat_ngram_size > 0
    }
}

/// A token that was drawn.
#[derive(Debug, Clone, Copy)]
pub struct NextToken<'a> {
    /// Index of the prompt that the token continues.
    pub sequence: usize,
    /// The token.
    pub token: u32,
    /// The logits from which the token was drawn, one per id of the vocabulary.
    pub logits: &'a [f32],
}

impl Trainer {
    /// Continues prompts, and returns the tokens added to each prompt. As many prompts are continued at the same time
    /// as there are caches.
    ///
    /// Every token is passed to `each` as soon as it is drawn, and `each` may end the token's sequence. With caches, no
    /// memory is allocated once the prompts have been read, except by `each`.
    ///
    /// The window is the maximum length of a context. When the context of a sequence has filled the window, its newer
    /// half is read again and becomes the new context. If a prompt is longer than the window, only its last tokens are
    /// read. The continuation of a prompt does not depend on the other prompts, except in models whose experts choose
    /// tokens or drop tokens.
    ///
    /// # Errors
    /// Returns an error for an empty prompt, for ids outside the vocabulary, for invalid sampling options, if logits
    /// are not finite, or if every token is banned. Returns an error if the logits of a token depend on later tokens
    /// ([`Self::causality`]). Also returns the errors of [`Self::evaluate`].
    pub fn generate(
        &mut self,
        prompts: &[&[u32]],
        options: &GenerateOptions,
        mut each: impl FnMut(&NextToken<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<u32>>> {
        options.sampling.check()?;
        self.expect_causal()?;
        for prompt in prompts {
            if prompt.is_empty() {
                let why = "it is empty";
                return Err(TrainError::config("prompt", why, "begin with at least one token"));
            }
            self.check_ids(prompt)?;
        }
        let mut way = LogitsSource::of(self);
        let mut sampler = Sampler::new(options.sampling, self.vocabulary);
        let mut added = Vec::with_capacity(prompts.len());
        for (group, prompts) in prompts.chunks(way.batch()).enumerate() {
            let first = group * way.batch();
            let sequence = |(slot, prompt): (usize, &&[u32])| {
                Sequence::new(first + slot, prompt, options, way.window(), self.vocabulary)
            };
            let mut sequences: Vec<Sequence> = prompts.iter().enumerate().map(sequence).collect();
            self.continue_all(&mut way, &mut sequences, options, &mut sampler, &mut each)?;
            added.extend(sequences.into_iter().map(|mut sequence| sequence.tokens.split_off(sequence.prompt)));
        }
        Ok(added)
    }

    /// Continues sequences at the same time until all of them have ended.
    fn continue_all(
        &mut self,
        way: &mut LogitsSource,
        sequences: &mut [Sequence],
        options: &GenerateOptions,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(&NextToken<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut must_prefill = true;
        for index in 0..options.tokens {
            // Compute the logits of the next tokens.
            let program = match way {
                LogitsSource::Cached(cached) if must_prefill => self.prefill(cached, sequences)?,
                LogitsSource::Cached(cached) => self.decode(cached, sequences)?,
                LogitsSource::Whole(whole) => {
                    self.whole_windows(whole, sequences)?;
                    None
                }
            };
            // Choose the tokens.
            let vocabulary = self.vocabulary;
            let mut choose = |logits: &[f32]| {
                let width = logits.len() / way.batch();
                let mut rows = logits.chunks_exact(width).zip(&mut *sequences).filter(|(_, one)| !one.has_ended);
                rows.try_for_each(|(logits, sequence)| {
                    let logits = &logits[..vocabulary];
                    let token = sequence.choose(logits, sampler, options, index)?;
                    let ends = each(&NextToken { sequence: sequence.number, token, logits }).is_break();
                    sequence.has_ended = ends || options.stop.contains(&token);
                    Some(())
                })
            };
            let chosen = match (program, &*way) {
                (Some(program), _) => self.session.with_output(program, "logits", choose)?,
                (None, LogitsSource::Whole(whole)) => choose(&whole.logits),
                (None, LogitsSource::Cached(_)) => None,
            };
            if chosen.is_none() {
                let why = "the logits are not finite, or every token is suppressed";
                let remedy = "go back to a sound checkpoint, or suppress fewer tokens";
                return Err(TrainError::config("generation", why, remedy));
            }
            if sequences.iter().all(|sequence| sequence.has_ended) {
                break;
            }
            // Discard the older half of the context of sequences that have filled the window.
            let slides = sequences.iter_mut().map(|sequence| sequence.discard_old(way.window()));
            must_prefill = slides.fold(false, |any, slid| any | slid);
        }
        Ok(())
    }

    /// Reads the contexts of all sequences, chunk by chunk. If a context has several chunks, the last chunk begins
    /// early enough to be full. So it may repeat tokens of the previous chunk, whose cache entries are then written
    /// again. Returns the program whose output holds the logits.
    fn prefill(&mut self, cached: &mut Cached, sequences: &[Sequence]) -> Result<Option<ProgramId>> {
        let Cached { prefill, chunk, batch, window, .. } = *cached;
        let context = |slot: usize| sequences.get(slot).map_or(&[][..], |sequence| sequence.context(window));
        let runs = (0..batch).map(|slot| context(slot).len().div_ceil(chunk)).max().unwrap_or(0);
        for run in 0..runs {
            for slot in 0..batch {
                let context = context(slot);
                let first = (run * chunk).min(context.len().saturating_sub(chunk));
                for i in 0..chunk {
                    // Positions after the end of a context are filled with id 0. The cache entries of these positions
                    // are overwritten before they are read.
                    cached.ids[slot * chunk + i] = context.get(first + i).copied().unwrap_or(0);
                    cached.positions[slot * chunk + i] = (first + i) as u32;
                }
                let last = context.len().saturating_sub(first + 1).min(chunk - 1);
                cached.rows[slot] = (slot * chunk + last) as u32;
            }
            self.session.write_input(prefill, "tokens", 0, &cached.ids)?;
            if self.session.has_input(prefill, "positions") {
                self.session.write_input(prefill, "positions", 0, &cached.positions)?;
            }
            if self.session.has_input(prefill, "rows") {
                self.session.write_input(prefill, "rows", 0, &cached.rows)?;
            }
            self.run(prefill, false)?;
        }
        Ok(Some(prefill))
    }

    /// Reads the last token of each sequence. Returns the program whose output holds the logits.
    fn decode(&mut self, cached: &mut Cached, sequences: &[Sequence]) -> Result<Option<ProgramId>> {
        let Cached { decode, batch, window, .. } = *cached;
        for slot in 0..batch {
            let context = sequences.get(slot).map_or(&[][..], |sequence| sequence.context(window));
            cached.ids[slot] = context.last().copied().unwrap_or(0);
            cached.positions[slot] = context.len().saturating_sub(1) as u32;
        }
        self.session.write_input(decode, "tokens", 0, &cached.ids[..batch])?;
        if self.session.has_input(decode, "positions") {
            self.session.write_input(decode, "positions", 0, &cached.positions[..batch])?;
        }
        self.run(decode, false)?;
        Ok(Some(decode))
    }

    /// Runs a forward pass over the whole window. Without caches, there is only one sequence at a time.
    fn whole_windows(&mut self, whole: &mut Whole, sequences: &[Sequence]) -> Result<()> {
        let context = sequences[0].context(whole.ids.len());
        // In a causal model, padding after the context does not affect the last token of the context. Models whose
        // experts choose tokens or drop tokens are an exception: there, padding competes with the context.
        whole.ids[..context.len()].copy_from_slice(context);
        let is_full = context.len() == whole.ids.len();
        let mut logits_with = |padding: u32| -> Result<Vec<f32>> {
            whole.ids[context.len()..].fill(padding);
            Ok(self.logits(&whole.ids)?.get(0)?.get(context.len() - 1)?.to_vec1()?)
        };
        let logits = logits_with(0)?;
        if let (Some(culprit), false) = (&whole.unknown, is_full) {
            let others = logits_with(1)?;
            if logits.iter().zip(&others).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(TrainError::config("model", not_causal(culprit), CAUSAL_REMEDY));
            }
            // One comparison per call of `generate` is enough to notice such an operation.
            whole.unknown = None;
        }
        whole.logits = logits;
        Ok(())
    }
}

/// The way to compute the next token's logits: with caches, or by a forward pass over the whole window.
#[derive(Debug)]
enum LogitsSource {
    Cached(Cached),
    Whole(Whole),
}

/// The inputs of the programs with caches.
#[derive(Debug)]
struct Cached {
    prefill: ProgramId,
    decode: ProgramId,
    batch: usize,
    window: usize,
    chunk: usize,
    ids: Vec<u32>,
    positions: Vec<u32>,
    rows: Vec<u32>,
}

/// The input of a forward pass, and the logits of one token.
#[derive(Debug)]
struct Whole {
    ids: Vec<u32>,
    logits: Vec<f32>,
    /// An operation that may let tokens depend on later ones, until a comparison has shown that it does not.
    unknown: Option<Culprit>,
}

impl LogitsSource {
    fn of(trainer: &Trainer) -> Self {
        let (Some((prefill, decode)), Some(generation)) =
            (trainer.programs.generation, trainer.options.step.generation)
        else {
            let unknown = match &trainer.causality {
                Causality::Unknown(culprit) => Some(culprit.clone()),
                Causality::Causal | Causality::NotCausal(_) => None,
            };
            return Self::Whole(Whole { ids: vec![0; trainer.options.step.sequence], logits: Vec::new(), unknown });
        };
        let (window, chunk) = generation.window(&trainer.options.step);
        let batch = generation.batch;
        let (ids, positions) = (vec![0; batch * chunk], vec![0; batch * chunk]);
        Self::Cached(Cached { prefill, decode, batch, window, chunk, ids, positions, rows: vec![0; batch] })
    }

    fn batch(&self) -> usize {
        match self {
            Self::Cached(cached) => cached.batch,
            Self::Whole(_) => 1,
        }
    }

    fn window(&self) -> usize {
        match self {
            Self::Cached(cached) => cached.window,
            Self::Whole(whole) => whole.ids.len(),
        }
    }
}

/// A prompt, and the tokens added to it.
#[derive(Debug)]
struct Sequence {
    number: usize,
    tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Index in `tokens` of the first token of the current context.
    first: usize,
    has_ended: bool,
    /// For each id, whether it occurs in the sequence. Empty if no rule needs this.
    seen: Vec<bool>,
    /// For each id, whether it is banned as the next token. Empty if no token is ever banned.
    banned: Vec<bool>,
    numbers: Numbers,
}

impl Sequence {
    fn new(number: usize, prompt: &[u32], options: &GenerateOptions, window: usize, vocabulary: usize) -> Self {
        // `options.tokens` may be huge if only a stop token should end the sequence, so the reservation is limited.
        let mut tokens = Vec::with_capacity(prompt.len() + options.tokens.min(1 << 16));
        tokens.extend_from_slice(prompt);
        let mut seen = Vec::new();
        if options.sampling.repetition_penalty != 1.0 {
            seen.resize(vocabulary, false);
            prompt.iter().for_each(|&id| seen[id as usize] = true);
        }
        let banned = vec![false; if options.has_bans() { vocabulary } else { 0 }];
        let first = prompt.len().saturating_sub(window);
        let numbers = Numbers::from_seed(options.sampling.seed.wrapping_add(number as u64));
        Self { number, tokens, prompt: prompt.len(), first, has_ended: false, seen, banned, numbers }
    }

    /// Returns the context from which the next token is drawn. If the sequence has ended, the context may exceed the
    /// window; its first tokens, up to the length of the window, are then returned.
    fn context(&self, window: usize) -> &[u32] {
        let seen = &self.tokens[self.first..];
        &seen[..seen.len().min(window)]
    }

    /// Draws the next token and adds it to the sequence. Returns `None` if the logits are not finite or every token
    /// is banned.
    fn choose(
        &mut self,
        logits: &[f32],
        sampler: &mut Sampler,
        options: &GenerateOptions,
        index: usize,
    ) -> Option<u32> {
        self.ban(options, index);
        let token = sampler.choose(logits, &self.seen, &self.banned, self.numbers.uniform(index))?;
        self.tokens.push(token);
        if let Some(seen) = self.seen.get_mut(token as usize) {
            *seen = true;
        }
        Some(token)
    }

    /// Marks the tokens that must not be drawn next.
    fn ban(&mut self, options: &GenerateOptions, index: usize) {
        let Self { tokens, banned, .. } = self;
        banned.fill(false);
        let mut ban = |id: u32| {
            if let Some(is_banned) = banned.get_mut(id as usize) {
                *is_banned = true;
            }
        };
        for sequence in &options.banned {
            if let Some((&last, before)) = sequence.split_last()
                && tokens.ends_with(before)
            {
                ban(last);
            }
        }
        if index == 0 {
            options.banned_first.iter().for_each(|&id| ban(id));
        }
        if index < options.min_tokens {
            options.stop.iter().for_each(|&id| ban(id));
        }
        let size = options.sampling.no_repeat_ngram_size;
        if size > 0 && size <= tokens.len() {
            let newest = &tokens[tokens.len() + 1 - size..];
            tokens.windows(size).filter(|ngram| ngram.starts_with(newest)).for_each(|ngram| ban(ngram[size - 1]));
        }
    }

    /// Discards the older half of the context if the context exceeds the window. Returns true if it was discarded.
    fn discard_old(&mut self, window: usize) -> bool {
        let is_full = !self.has_ended && self.tokens.len() - self.first > window;
        if is_full {
            self.first = self.tokens.len() - (window / 2).max(1);
        }
        is_full
    }
}
