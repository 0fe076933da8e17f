//! A part of a stream, cut into windows.
//!
//! In: tokens, or examples that lie whole in their windows. Out: the window of each visit, and its inputs and targets,
//! written into the caller's slices. Never: state that is carried from one window to the next.

use std::ops::Range;
use std::sync::Arc;

use crate::examples::Examples;
use crate::permutation::mix;
use crate::{DataError, IGNORED, Permutation, Tokens};

/// A part of a stream, cut into windows.
#[derive(Debug, Clone)]
pub(crate) struct WindowSource {
    tokens: Arc<Tokens>,
    range: Range<u64>,
    pub sequence: usize,
    kind: Kind,
}

/// The two kinds of windows.
#[derive(Debug, Clone)]
enum Kind {
    /// Any consecutive tokens. Documents end with `end_of_text`, if that token is known.
    Stream { end_of_text: Option<u32> },
    /// Adjacent windows of which the last one may be shorter and is then padded. Documents end with `end_of_text`, if
    /// they are isolated.
    Padded { end_of_text: Option<u32> },
    /// Whole examples, packed into rows. The rows 2i and 2i + 1 of pairs are the two answers of pair i.
    Rows { examples: Arc<Examples>, rows: Arc<Vec<Vec<Range<u64>>>> },
}

impl WindowSource {
    /// Creates windows of consecutive tokens. Documents end with `end_of_text`, if that token is known.
    pub fn new(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        end_of_text: Option<u32>,
        sequence: usize,
        part: &'static str,
    ) -> Result<Self, DataError> {
        if sequence == 0 {
            return Err(DataError::Zero { what: "the sequence length" });
        }
        let range = range.start.min(tokens.count())..range.end.min(tokens.count());
        let (length, needed) = (range.end.saturating_sub(range.start), sequence as u64 + 1);
        if length < needed {
            return Err(DataError::TooShort { part, tokens: length, sequence, needed });
        }
        Ok(Self { tokens, range, sequence, kind: Kind::Stream { end_of_text } })
    }

    /// Creates adjacent windows of all tokens of `range`. If tokens are left for a part of a window, the rest of the
    /// last window is padded. Documents are isolated if `end_of_text` is given.
    pub fn padded(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        end_of_text: Option<u32>,
        sequence: usize,
        part: &'static str,
    ) -> Result<Self, DataError> {
        if sequence == 0 {
            return Err(DataError::Zero { what: "the sequence length" });
        }
        let length = range.end.saturating_sub(range.start);
        if length < 2 {
            return Err(DataError::TooShort { part, tokens: length, sequence: 1, needed: 2 });
        }
        Ok(Self { tokens, range, sequence, kind: Kind::Padded { end_of_text } })
    }

    /// Creates windows of whole examples.
    pub fn of_examples(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        examples: Arc<Examples>,
        sequence: usize,
        part: &'static str,
    ) -> Result<Self, DataError> {
        if sequence == 0 {
            return Err(DataError::Zero { what: "the sequence length" });
        }
        let rows = examples.rows(&range, sequence);
        if rows.is_empty() {
            return Err(DataError::NoAnswers { part, sequence });
        }
        Ok(Self { tokens, range, sequence, kind: Kind::Rows { examples, rows: rows.into() } })
    }

    /// Number of windows if the windows are adjacent and the first window starts at the first token.
    pub fn all(&self) -> u64 {
        match &self.kind {
            Kind::Stream { .. } => self.whole_windows(self.length()),
            Kind::Padded { .. } => (self.length() - 1).div_ceil(self.sequence as u64),
            Kind::Rows { rows, .. } => rows.len() as u64,
        }
    }

    fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Number of adjacent windows in `tokens` tokens. The last token is only a target.
    fn whole_windows(&self, tokens: u64) -> u64 {
        (tokens - 1) / self.sequence as u64
    }

    /// Number of windows in an epoch.
    pub fn per_epoch(&self) -> u64 {
        match &self.kind {
            Kind::Stream { .. } => self.whole_windows(self.length() + 1 - self.sequence as u64).max(1),
            Kind::Padded { .. } => self.all(),
            Kind::Rows { rows, .. } => rows.len() as u64,
        }
    }

    /// Number of windows that stay together: 2 for pairs of answers, otherwise 1.
    pub fn group(&self) -> u64 {
        match &self.kind {
            Kind::Rows { examples, .. } if examples.are_pairs() => 2,
            _ => 1,
        }
    }

    /// Returns the start of adjacent window number `window`. Like the result of [`Self::visited`], this is a position
    /// or the index of a row.
    pub fn nth(&self, window: u64) -> u64 {
        match self.kind {
            Kind::Stream { .. } | Kind::Padded { .. } => self.range.start + window * self.sequence as u64,
            Kind::Rows { .. } => window,
        }
    }

    /// Returns the start of the first window of the group of a visit ([`Self::group`]): the position of the window's
    /// first token, or the index of its row of examples. Visits are counted over the whole run.
    pub fn visited(&self, visit: u128, seed: u64) -> u64 {
        let windows = self.per_epoch() / self.group();
        let (epoch, place) = ((visit / u128::from(windows)) as u64, (visit % u128::from(windows)) as u64);
        let key = mix(seed ^ mix(epoch));
        if let Kind::Rows { .. } = self.kind {
            return self.group() * Permutation::new(windows, key).at(place);
        }
        let sequence = self.sequence as u64;
        let spare = self.length() - 1 - windows * sequence;
        let shift = mix(key) % (spare.min(sequence - 1) + 1);
        self.range.start + shift + Permutation::new(windows, key).at(place) * sequence
    }

    /// True if the answer of the window of row `row` is desirable; false if the windows are not answers with preferences.
    pub fn is_desirable(&self, row: u64) -> bool {
        match &self.kind {
            Kind::Rows { examples, rows } => examples.is_desirable(rows[row as usize][0].start),
            _ => false,
        }
    }

    /// Writes the inputs and targets of the window at `start`.
    pub fn fill(&self, start: u64, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        if let Kind::Rows { examples, rows } = &self.kind {
            return self.fill_row(examples, &rows[start as usize], inputs, targets);
        }
        let sequence = self.sequence;
        if let Kind::Padded { .. } = self.kind {
            let length = (self.range.end - 1 - start).min(sequence as u64) as usize;
            self.tokens.read(start, &mut inputs[..length])?;
            self.tokens.read(start + 1, &mut targets[..length])?;
            inputs[length..].fill(0);
            targets[length..].fill(IGNORED);
            return Ok(());
        }
        self.tokens.read(start, inputs)?;
        targets[..sequence - 1].copy_from_slice(&inputs[1..]);
        self.tokens.read(start + sequence as u64, &mut targets[sequence - 1..])
    }

    /// Writes the examples of a row one after another. The rest of the row is padded with tokens that do not count in
    /// the loss.
    fn fill_row(
        &self,
        examples: &Examples,
        row: &[Range<u64>],
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let mut at = 0;
        for example in row {
            let length = (example.end - example.start - 1) as usize;
            let (inputs, targets) = (&mut inputs[at..at + length], &mut targets[at..at + length]);
            self.tokens.read(example.start, inputs)?;
            self.tokens.read(example.start + 1, targets)?;
            for (target, token) in targets.iter_mut().zip(example.start + 1..) {
                *target = if examples.counts(token) { *target } else { IGNORED };
            }
            at += length;
        }
        inputs[at..].fill(0);
        targets[at..].fill(IGNORED);
        Ok(())
    }

    /// Writes to `starts`, for each token of a window, where its document begins within the window. `inputs` and
    /// `targets` must be filled. Targets that belong to the next document become [`IGNORED`].
    pub fn documents(
        &self,
        start: u64,
        inputs: &[u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        let mut first = 0;
        match &self.kind {
            Kind::Padded { end_of_text: None } => starts.fill(0),
            Kind::Stream { end_of_text } | Kind::Padded { end_of_text } => {
                let end = end_of_text.ok_or(DataError::NoDocuments)?;
                for (at, token) in inputs.iter().enumerate() {
                    starts[at] = first as u32;
                    if *token == end {
                        (first, targets[at]) = (at + 1, IGNORED);
                    }
                }
            }
            Kind::Rows { rows, .. } => {
                for example in &rows[start as usize] {
                    let end = first + (example.end - example.start - 1) as usize;
                    starts[first..end].fill(first as u32);
                    first = end;
                }
                starts[first..].fill(first as u32);
            }
        }
        Ok(())
    }
}
