//! Examples for training on answers: prompts with completions, and conversations.
//!
//! In: lines of JSON. Out: the tokens of each example, and which of them count in the loss. The tokens that count are
//! those of answers, including the token that ends an answer. Never: a row with an example in which no token counts.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::files::{check_text, each_line, has_lines};
use crate::{Answers, Conversation, DataError, Tokenizer, Vocabulary};

/// The keys that each line of a .jsonl file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The key `text`. All of its tokens count in the loss, as for .txt, .md and .rs files.
    #[default]
    Text,
    /// The keys `prompt` and `completion` (or `response`), which are strings or lists of messages. Only the completion
    /// counts in the loss.
    Prompt,
    /// The key `messages`: a list of messages with `role` and `content`. Optional keys are `tools`, `documents` and
    /// `chat_template_kwargs`. The assistant messages that [`DataOptions::answers`](crate::DataOptions::answers)
    /// selects count in the loss.
    Chat,
}

impl Format {
    /// True if only a part of each text counts in the loss.
    pub fn has_answers(self) -> bool {
        self != Self::Text
    }

    /// True if a file with this extension is read line by line or row by row, so that each line or row can be an
    /// example.
    pub fn is_read_from(path: &Path) -> bool {
        has_lines(path)
    }
}

/// The tokens of an example, and for each whether it counts in the loss.
type Encoded = (Vec<u32>, Vec<bool>);

/// One example, as parsed from a line.
pub(crate) struct Line {
    number: usize,
    content: Content,
}

enum Content {
    /// A text, and the byte at which its answer begins.
    Prompt(String, usize),
    Chat(Conversation),
}

/// Reads the lines of a .jsonl file, or the rows of a .parquet file.
///
/// # Errors
/// Returns an error if the file cannot be read, if a line is not an example, or if there are no lines. The error for a
/// line contains the line's number.
pub(crate) fn read_lines(path: &Path, format: Format) -> Result<Vec<Line>, DataError> {
    check_text(path)?;
    let mut lines = Vec::new();
    each_line(path, |number, line| {
        let content = content_of(line, format).map_err(|reason| DataError::Example {
            path: path.to_owned(),
            line: number,
            reason,
        })?;
        lines.push(Line { number, content });
        Ok(())
    })?;
    if lines.is_empty() {
        return Err(DataError::NoExamples { path: path.to_owned() });
    }
    Ok(lines)
}

fn content_of(line: &str, format: Format) -> Result<Content, String> {
    #[derive(Deserialize)]
    struct Prompt {
        prompt: String,
        #[serde(alias = "response")]
        completion: String,
    }
    #[derive(Deserialize)]
    struct Kind {
        prompt: Option<Json>,
    }
    let is_list =
        || serde_json::from_str(line).is_ok_and(|Kind { prompt }| prompt.is_some_and(|prompt| prompt.is_array()));
    if format == Format::Chat || is_list() {
        return Conversation::of_row(line).map(Content::Chat);
    }
    let Prompt { prompt, completion } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    Ok(Content::Prompt(format!("{prompt}{completion}"), prompt.len()))
}

impl Line {
    /// The text on which a vocabulary is trained; empty for conversations.
    pub fn text(&self) -> &str {
        match &self.content {
            Content::Prompt(text, _) => text,
            Content::Chat(_) => "",
        }
    }

    /// Returns the line's tokens, and for each whether it counts in the loss. The tokens include the special tokens
    /// around the text. If there is the tokenizer of a Hugging Face folder, its post-processor or chat template
    /// determines the special tokens. If there is only a vocabulary, the only special token is the end-of-text token.
    fn encode(&self, encoding: &Encoding<'_>) -> Result<Encoded, DataError> {
        let &Encoding { path, vocabulary, folder, answers } = encoding;
        match &self.content {
            Content::Chat(conversation) => {
                let known = folder.and_then(|tokenizer| Some((tokenizer, tokenizer.chat_template()?)));
                let Some((tokenizer, template)) = known else {
                    return Err(DataError::NoTemplate { path: path.to_owned() });
                };
                let (text, answers) = template.answers_of(conversation, answers)?;
                tokenizer.encode_spans(&text, &answers, false)
            }
            Content::Prompt(text, prompt) => {
                let answer = *prompt..text.len();
                let (mut tokens, mut counts) = match folder {
                    Some(tokenizer) => {
                        let begins = !vocabulary.begin_of_text().is_empty();
                        tokenizer.encode_spans(text, &[answer], begins)?
                    }
                    None => vocabulary.encode_spans(text, &[answer])?,
                };
                // An answer ends with the end-of-text token, which counts in the loss too.
                if let Some(end) = vocabulary.end_of_text() {
                    let length = tokens.len() - usize::from(tokens.last() == Some(&end));
                    tokens.truncate(length);
                    counts.truncate(length);
                    tokens.push(end);
                    counts.push(true);
                }
                Ok((tokens, counts))
            }
        }
    }
}

/// Everything that is needed to turn lines into tokens.
#[derive(Clone, Copy)]
pub(crate) struct Encoding<'a> {
    /// The file of the lines.
    pub path: &'a Path,
    pub vocabulary: &'a Vocabulary,
    /// The tokenizer of a Hugging Face folder, with the chat template if the folder has one. `None` if there is only a
    /// vocabulary.
    pub folder: Option<&'a Tokenizer>,
    pub answers: Answers,
}

/// Tokenizes all lines in parallel.
///
/// # Errors
/// Returns an error of the tokenizer, an error of the template with the number of the line, or an error if there are
/// conversations but no template.
pub(crate) fn encode_lines(lines: &[Line], encoding: &Encoding<'_>) -> Result<Vec<Encoded>, DataError> {
    let encode = |line: &Line| {
        line.encode(encoding).map_err(|error| match error {
            error @ DataError::NoTemplate { .. } => error,
            error => {
                DataError::Example { path: encoding.path.to_owned(), line: line.number, reason: error.to_string() }
            }
        })
    };
    lines.par_iter().map(encode).collect()
}

/// The boundaries of examples in a stream of tokens, and which tokens count in the loss.
#[derive(Debug)]
pub(crate) struct Examples {
    /// The first token of each example, followed by the end of the last one.
    bounds: Vec<u64>,
    counts: Vec<bool>,
}

impl Examples {
    /// Concatenates encoded examples. Returns the stream of tokens, and the examples in it.
    pub fn new(encoded: Vec<Encoded>) -> (Vec<u32>, Self) {
        let (mut tokens, mut examples) = (Vec::new(), Self { bounds: vec![0], counts: Vec::new() });
        for (ids, counts) in encoded {
            tokens.extend(ids);
            examples.counts.extend(counts);
            examples.bounds.push(tokens.len() as u64);
        }
        (tokens, examples)
    }

    /// True if the loss counts this token.
    pub fn counts(&self, token: u64) -> bool {
        self.counts[token as usize]
    }

    /// Returns the blake3 hash of the boundaries and of the tokens that count, as hexadecimal digits.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        self.bounds.iter().for_each(|bound| _ = hasher.update(&bound.to_le_bytes()));
        self.counts.iter().for_each(|&counts| _ = hasher.update(&[u8::from(counts)]));
        hasher.finalize().to_hex().to_string()
    }

    /// Packs the examples of a part of the stream into rows. A row has room for `sequence` tokens, not counting the
    /// last token of each example, which has no target. The longest examples come first, and each goes into the fullest
    /// row that has room for it (Ding et al., arXiv 2404.10830). An example that is longer than a row is cut. An
    /// example without a target that counts is left out.
    pub fn rows(&self, part: &Range<u64>, sequence: usize) -> Vec<Vec<Range<u64>>> {
        let mut examples: Vec<Range<u64>> = self.bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        examples.retain(|example| part.start <= example.start && example.end <= part.end);
        let all = examples.len();
        let longest = sequence as u64 + 1;
        let cut = examples.iter().filter(|example| example.end - example.start > longest).count();
        examples.iter_mut().for_each(|example| example.end = example.end.min(example.start + longest));
        examples.retain(|example| (example.start + 1..example.end).any(|token| self.counts(token)));
        let left_out = all - examples.len();
        if cut + left_out > 0 {
            tracing::warn!(
                all,
                cut,
                left_out,
                "examples longer than {sequence} tokens, or without an answer within them"
            );
        }
        // The last token of an example has no target.
        let length = |example: &Range<u64>| (example.end - example.start - 1) as usize;
        examples.sort_by_key(|example| (Reverse(length(example)), example.start));
        let mut rows: Vec<Vec<Range<u64>>> = Vec::new();
        let mut by_room: BTreeSet<(usize, usize)> = BTreeSet::new();
        for example in examples {
            let length = length(&example);
            let (room, row) = match by_room.range((length, 0)..).next().copied() {
                Some(fullest) => {
                    by_room.remove(&fullest);
                    fullest
                }
                None => {
                    rows.push(Vec::new());
                    (sequence, rows.len() - 1)
                }
            };
            rows[row].push(example);
            by_room.insert((room - length, row));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use gapless_testing::prelude::*;

    use super::*;
    use crate::{DataOptions, Dataset, IGNORED, VocabularyChoice};

    /// Examples of these lengths, in which tokens from the middle on count.
    fn examples(lengths: &[usize]) -> (Vec<u32>, Examples) {
        let example = |(index, &length): (usize, &usize)| {
            (
                (0..length).map(|at| (100 * index + at) as u32).collect(),
                (0..length).map(|at| at >= length / 2).collect(),
            )
        };
        Examples::new(lengths.iter().enumerate().map(example).collect())
    }

    generated! {
        #[test]
        fn rows_hold_every_example_once_in_as_few_as_a_search_of_all_finds(
            (lengths, sequence) in (prop::collection::vec(2usize..12, 1..30), 2usize..16)
        ) {
            let (tokens, examples) = examples(&lengths);
            let part = 0..tokens.len() as u64;
            let rows = examples.rows(&part, sequence);
            // All examples with an answer within a row must occur, identified by their first tokens.
            let mut firsts: Vec<u64> = rows.iter().flatten().map(|example| example.start).collect();
            firsts.sort_unstable();
            let answered = examples.bounds.windows(2).zip(&lengths).filter(|(_, length)| (*length / 2).max(1) <= sequence);
            prop_assert_eq!(firsts, answered.clone().map(|(bounds, _)| bounds[0]).collect::<Vec<_>>());
            // The test makes the same greedy choice by searching all rows.
            let mut simple: Vec<usize> = Vec::new();
            let mut wanted: Vec<usize> = answered.map(|(_, length)| (length - 1).min(sequence)).collect();
            wanted.sort_unstable_by(|a, b| b.cmp(a));
            for length in wanted {
                match simple.iter_mut().filter(|used| **used + length <= sequence).max() {
                    Some(fullest) => *fullest += length,
                    None => simple.push(length),
                }
            }
            let mut used: Vec<usize> =
                rows.iter().map(|row| row.iter().map(|example| (example.end - example.start - 1) as usize).sum()).collect();
            simple.sort_unstable();
            used.sort_unstable();
            prop_assert_eq!(used, simple);
        }
    }

    fn dataset(text: &str, format: Format) -> Result<Dataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lines.jsonl");
        fs::write(&file, text).unwrap();
        let options =
            DataOptions { vocabulary: VocabularyChoice::Bytes, validation_every: 0, ..DataOptions::default() };
        Dataset::examples(&file, format, &options)
    }

    #[test]
    fn answers_and_their_ends_alone_are_targets() {
        let lines = "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n\n{\"prompt\": \"x\", \"response\": \"y\"}\n";
        let windows = dataset(lines, Format::Prompt).unwrap().training(8, 1, 0).unwrap();
        let (mut tokens, mut targets, mut starts) = ([0; 8], [0; 8], [9; 8]);
        windows.fill_documents(5, 0, &mut tokens, &mut targets, &mut starts).unwrap();
        let none = IGNORED;
        assert_eq!(tokens, [97, 98, 99, 100, 120, 121, 0, 0]);
        assert_eq!(targets, [none, 99, 100, 0, 121, 0, none, none]);
        assert_eq!(starts, [0, 0, 0, 0, 4, 4, 6, 6]);
    }

    #[test]
    fn lines_that_are_no_examples_are_refused() {
        for (lines, format, expected) in [
            ("", Format::Prompt, "has no example"),
            ("{\"prompt\": \"a\"}", Format::Prompt, "line 1: missing field `completion`"),
            ("\n{\"text\": \"a\"}", Format::Prompt, "line 2: missing field `prompt`"),
            ("[1]", Format::Prompt, "line 1"),
            ("{\"messages\": 5}", Format::Chat, "line 1"),
            ("{\"messages\": [{\"content\": \"a\"}]}", Format::Chat, "message 0 has no \"role\""),
            ("{\"messages\": []}", Format::Chat, "chat_template.jinja"),
        ] {
            let error = dataset(lines, format).unwrap_err().to_string();
            assert!(error.contains(expected), "{lines}: {error}");
        }
        let long = dataset("{\"prompt\": \"abcdefgh\", \"completion\": \"i\"}", Format::Prompt).unwrap();
        assert!(
            long.training(4, 1, 0)
                .unwrap_err()
                .to_string()
                .contains("no training example has an answer within 4 tokens")
        );
    }

    #[test]
    fn documents_of_a_stream_are_told_apart() {
        let dataset = Dataset::from_tokens(vec![5, 6, 0, 7, 0, 0, 8, 9, 5], crate::Vocabulary::bytes(), 0).unwrap();
        let windows = dataset.training(8, 1, 0).unwrap();
        let (mut tokens, mut targets, mut starts) = ([0; 8], [0; 8], [9; 8]);
        windows.fill_documents(0, 0, &mut tokens, &mut targets, &mut starts).unwrap();
        let none = IGNORED;
        assert_eq!(tokens, [5, 6, 0, 7, 0, 0, 8, 9]);
        assert_eq!(targets, [6, 0, none, 0, none, none, 9, 5]);
        assert_eq!(starts, [0, 0, 0, 3, 3, 5, 6, 6]);
        let bare = Dataset::from_tokens(vec![1; 20], crate::Vocabulary::ids(5), 0).unwrap().training(8, 1, 0).unwrap();
        let error = bare.fill_documents(0, 0, &mut tokens, &mut targets, &mut starts).unwrap_err();
        assert!(error.to_string().contains("cannot be separated"), "{error}");
    }
}
