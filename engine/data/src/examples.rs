//! Examples for training on answers: prompts with completions, conversations, pairs of answers, and answers with labels.
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
    /// The keys `prompt`, `chosen` and `rejected`: two answers to a prompt, of which the first is preferred. All are
    /// strings or lists of messages. If `prompt` is missing, it is the common beginning of the two answers. Only the
    /// answers count in the loss. Optional keys are those of `chat`. `[preference]` has the loss.
    Preference,
    /// The keys `prompt`, `completion` and `label`: an answer, and whether it is desirable (`true` or `false`). Prompt and
    /// completion are both strings or both lists of messages. Only the completion counts in the loss. Optional keys are
    /// those of `chat`. The loss is `kto` of `[preference]`. Each prompt also stands beside the completion of the row
    /// before, and the first prompt beside the last completion, for the reference point of the loss.
    Unpaired,
}

impl Format {
    /// True if only a part of each text counts in the loss.
    pub fn has_answers(self) -> bool {
        self != Self::Text
    }

    /// True if the answers of rows are compared by a loss of preferences.
    pub fn has_preferences(self) -> bool {
        matches!(self, Self::Preference | Self::Unpaired)
    }

    /// Number of examples in a row, which stay together: 2 for preferences, otherwise 1.
    pub(crate) fn examples_per_row(self) -> usize {
        if self.has_preferences() { 2 } else { 1 }
    }

    /// True if a file with this extension is read line by line or row by row, so that each line or row can be an
    /// example.
    pub fn is_read_from(path: &Path) -> bool {
        has_lines(path)
    }
}

/// The tokens of an example, for each whether it counts in the loss, and whether the example's answer is desirable.
type Encoded = (Vec<u32>, Vec<bool>, bool);

/// One example, as parsed from a line.
pub(crate) struct Line {
    number: usize,
    content: Content,
    is_desirable: bool,
}

enum Content {
    /// A text, and the byte at which its answer begins.
    Prompt(String, usize),
    Chat(Conversation),
}

/// Reads the lines of a .jsonl file, or the rows of a .parquet file. A row with a pair of answers becomes two lines: the
/// chosen answer and the rejected one. So does a row with a label: the answer, and that of the row before.
///
/// # Errors
/// Returns an error if the file cannot be read, if a line is not an example, or if there are no lines. The error for a
/// line contains the line's number.
pub(crate) fn read_lines(path: &Path, format: Format) -> Result<Vec<Line>, DataError> {
    check_text(path)?;
    let fail = |line, reason| DataError::Example { path: path.to_owned(), line, reason };
    let (mut lines, mut labelled) = (Vec::new(), Vec::new());
    each_line(path, |number, line| {
        if format == Format::Unpaired {
            labelled.push(Labelled::of(number, line).map_err(|reason| fail(number, reason))?);
            return Ok(());
        }
        let contents = contents_of(line, format).map_err(|reason| fail(number, reason))?;
        let content = |(index, content)| Line { number, content, is_desirable: index == 0 };
        lines.extend(contents.into_iter().enumerate().map(content));
        Ok(())
    })?;
    if let [one] = &labelled[..] {
        return Err(fail(one.number, "is the only row; the loss needs the answers to other prompts".into()));
    }
    for (index, row) in labelled.iter().enumerate() {
        let before = &labelled[index.checked_sub(1).unwrap_or(labelled.len() - 1)];
        for completion in [&row.completion, &before.completion] {
            let content = row.with(completion).map_err(|reason| fail(row.number, reason))?;
            lines.push(Line { number: row.number, content, is_desirable: row.label });
        }
    }
    if lines.is_empty() {
        return Err(DataError::NoExamples { path: path.to_owned() });
    }
    Ok(lines)
}

fn contents_of(line: &str, format: Format) -> Result<Vec<Content>, String> {
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
    if format == Format::Preference {
        return pair_of(line).map(Vec::from);
    }
    let is_list =
        || serde_json::from_str(line).is_ok_and(|Kind { prompt }| prompt.is_some_and(|prompt| prompt.is_array()));
    if format == Format::Chat || is_list() {
        return Conversation::of_row(line).map(|conversation| vec![Content::Chat(conversation)]);
    }
    let Prompt { prompt, completion } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    Ok(vec![Content::Prompt(format!("{prompt}{completion}"), prompt.len())])
}

/// A row with an answer and its label.
struct Labelled {
    number: usize,
    /// The whole row.
    row: Json,
    completion: Json,
    label: bool,
}

impl Labelled {
    fn of(number: usize, line: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Row {
            prompt: Json,
            completion: Json,
            label: bool,
        }
        let Row { prompt, completion, label } = serde_json::from_str(line).map_err(|error| error.to_string())?;
        match (&prompt, &completion) {
            (Json::String(_), Json::String(_)) | (Json::Array(_), Json::Array(_)) => {}
            _ => return Err("\"prompt\" and \"completion\" are neither both strings nor both lists of messages".into()),
        }
        let row = serde_json::from_str(line).map_err(|error| error.to_string())?;
        Ok(Self { number, row, completion, label })
    }

    /// Returns the row's prompt with a completion, which may be that of another row.
    fn with(&self, completion: &Json) -> Result<Content, String> {
        match (&self.row["prompt"], completion) {
            (Json::String(prompt), Json::String(completion)) => {
                Ok(Content::Prompt(format!("{prompt}{completion}"), prompt.len()))
            }
            (Json::Array(prompt), Json::Array(_)) => {
                let mut row = self.row.clone();
                row["completion"] = completion.clone();
                let conversation =
                    Conversation::with_answer(&row.to_string(), &["prompt", "completion"], prompt.len())?;
                Ok(Content::Chat(conversation))
            }
            _ => {
                Err("has strings where the row before has messages, or the reverse; give all rows the same form".into())
            }
        }
    }
}

/// Parses a pair of answers: the chosen one and the rejected one.
fn pair_of(line: &str) -> Result<[Content; 2], String> {
    #[derive(Deserialize)]
    struct Pair {
        prompt: Option<Json>,
        chosen: Json,
        rejected: Json,
    }
    let Pair { prompt, chosen, rejected } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    match (&prompt, &chosen, &rejected) {
        (Some(Json::String(prompt)), Json::String(chosen), Json::String(rejected)) => {
            Ok([chosen, rejected].map(|answer| Content::Prompt(format!("{prompt}{answer}"), prompt.len())))
        }
        (None, Json::String(chosen), Json::String(rejected)) => {
            let shared = chosen.char_indices().zip(rejected.chars()).take_while(|((_, a), b)| a == b);
            let end = shared.last().map_or(0, |((at, last), _)| at + last.len_utf8());
            // A space belongs to the word after it, as in TRL.
            let start = if chosen[..end].ends_with(' ') { end - 1 } else { end };
            Ok([chosen, rejected].map(|text| Content::Prompt(text.clone(), start)))
        }
        (Some(Json::Array(prompt)), Json::Array(_), Json::Array(_)) => Ok([
            Content::Chat(Conversation::with_answer(line, &["prompt", "chosen"], prompt.len())?),
            Content::Chat(Conversation::with_answer(line, &["prompt", "rejected"], prompt.len())?),
        ]),
        (None, Json::Array(chosen), Json::Array(rejected)) => {
            let shared = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
            Ok([
                Content::Chat(Conversation::with_answer(line, &["chosen"], shared)?),
                Content::Chat(Conversation::with_answer(line, &["rejected"], shared)?),
            ])
        }
        _ => Err("\"prompt\", \"chosen\" and \"rejected\" are neither all strings nor all lists of messages".into()),
    }
}

impl Line {
    /// The text on which a vocabulary is trained; empty for conversations.
    pub fn text(&self) -> &str {
        match &self.content {
            Content::Prompt(text, _) => text,
            Content::Chat(_) => "",
        }
    }

    /// Returns the line's tokens, for each whether it counts in the loss, and the line's label. The tokens include the special tokens
    /// around the text. If there is the tokenizer of a Hugging Face folder, its post-processor or chat template
    /// determines the special tokens. If there is only a vocabulary, the only special token is the end-of-text token.
    fn encode(&self, encoding: &Encoding<'_>) -> Result<Encoded, DataError> {
        let (tokens, counts) = self.tokens(encoding)?;
        Ok((tokens, counts, self.is_desirable))
    }

    fn tokens(&self, encoding: &Encoding<'_>) -> Result<(Vec<u32>, Vec<bool>), DataError> {
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
    /// For each example, whether its answer is desirable.
    desirable: Vec<bool>,
    /// True if each two adjacent examples are those of a row with preferences.
    are_pairs: bool,
}

impl Examples {
    /// Concatenates encoded examples. Returns the stream of tokens, and the examples in it.
    pub fn new(encoded: Vec<Encoded>, are_pairs: bool) -> (Vec<u32>, Self) {
        let mut examples = Self { bounds: vec![0], counts: Vec::new(), desirable: Vec::new(), are_pairs };
        let mut tokens = Vec::new();
        for (ids, counts, is_desirable) in encoded {
            examples.desirable.push(is_desirable);
            tokens.extend(ids);
            examples.counts.extend(counts);
            examples.bounds.push(tokens.len() as u64);
        }
        (tokens, examples)
    }

    /// True if each two adjacent examples are those of a row with preferences.
    pub fn are_pairs(&self) -> bool {
        self.are_pairs
    }

    /// True if the answer of the example that starts at this token is desirable. This is the chosen answer of a pair.
    pub fn is_desirable(&self, start: u64) -> bool {
        self.desirable[self.bounds.partition_point(|&bound| bound <= start) - 1]
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
        if self.are_pairs {
            self.desirable.iter().for_each(|&desirable| _ = hasher.update(&[u8::from(desirable)]));
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Packs the examples of a part of the stream into rows. A row has room for `sequence` tokens, not counting the
    /// last token of each example, which has no target. The longest examples come first, and each goes into the fullest
    /// row that has room for it (Ding et al., arXiv 2404.10830). An example that is longer than a row is cut. An
    /// example without a target that counts is left out.
    ///
    /// Pairs are not packed: each example has a row of its own, the two rows of a pair are adjacent, and a pair is left
    /// out if one of its answers has no target that counts.
    pub fn rows(&self, part: &Range<u64>, sequence: usize) -> Vec<Vec<Range<u64>>> {
        let mut examples: Vec<Range<u64>> = self.bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        examples.retain(|example| part.start <= example.start && example.end <= part.end);
        let all = examples.len();
        let longest = sequence as u64 + 1;
        let cut = examples.iter().filter(|example| example.end - example.start > longest).count();
        examples.iter_mut().for_each(|example| example.end = example.end.min(example.start + longest));
        let has_answer = |example: &Range<u64>| (example.start + 1..example.end).any(|token| self.counts(token));
        if self.are_pairs {
            let pairs = examples.chunks_exact(2).filter(|pair| pair.iter().all(has_answer));
            examples = pairs.flatten().cloned().collect();
        } else {
            examples.retain(has_answer);
        }
        let left_out = all - examples.len();
        if cut + left_out > 0 {
            tracing::warn!(
                all,
                cut,
                left_out,
                "examples longer than {sequence} tokens, or without an answer within them"
            );
        }
        if self.are_pairs {
            return examples.into_iter().map(|example| vec![example]).collect();
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
                true,
            )
        };
        Examples::new(lengths.iter().enumerate().map(example).collect(), false)
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

    /// An answer with a label is followed by the same prompt with the answer of the line before, and both have its label.
    #[test]
    fn answers_with_labels_stand_beside_those_before() {
        let lines = [
            r#"{"prompt": "a", "completion": "bc", "label": true}"#,
            r#"{"prompt": "d", "completion": "e", "label": false}"#,
            r#"{"prompt": "f", "completion": "g", "label": true}"#,
        ];
        let all = dataset(&lines.join("\n"), Format::Unpaired).unwrap().training(6, 2, 7).unwrap();
        let mut seen = Vec::new();
        for step in 0..3 {
            let (mut tokens, mut targets, mut starts) = ([0; 12], [0; 12], [9; 12]);
            all.fill_documents(step, 0, &mut tokens, &mut targets, &mut starts).unwrap();
            let answers = [0, 1].map(|index| -> String {
                let ids = targets[6 * index..][..6].iter().filter(|&&id| id != IGNORED && id != 0);
                ids.map(|&id| char::from(id as u8)).collect()
            });
            assert_eq!(tokens[0], tokens[6], "the prompt is the same");
            seen.push((char::from(tokens[0] as u8), answers, [0, 1].map(|index| all.is_desirable(step, index))));
            assert_eq!([0, 1].map(|index| all.all().is_desirable(all.index(step, index))), seen[seen.len() - 1].2);
        }
        seen.sort();
        let row = |prompt, answers: [&str; 2], label| (prompt, answers.map(String::from), [label; 2]);
        assert_eq!(seen, [row('a', ["bc", "g"], true), row('d', ["e", "bc"], false), row('f', ["g", "e"], true)]);

        for (text, expected) in [
            (lines[0].to_owned(), "is the only row"),
            (format!("{}\n{{\"prompt\": \"a\", \"completion\": \"b\"}}", lines[0]), "missing field `label`"),
            (format!("{}\n{{\"prompt\": \"a\", \"completion\": [], \"label\": true}}", lines[0]), "neither both"),
            (format!("{}\n{{\"prompt\": [], \"completion\": [], \"label\": true}}", lines[0]), "the same form"),
        ] {
            let error = dataset(&text, Format::Unpaired).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// The two answers of a pair are in adjacent rows of a batch, whatever the form of the line. A pair is left out if a
    /// sequence has no room for one of its answers. Each n-th pair is for validation.
    #[test]
    fn pairs_of_answers_stay_together() {
        let lines = [
            ("ab", r#"{"prompt": "ab", "chosen": "cd", "rejected": "e"}"#),
            ("abcdefgh", r#"{"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}"#),
            ("x:", r#"{"chosen": "x: y", "rejected": "x: z"}"#),
            ("é", r#"{"prompt": "é", "chosen": "p", "rejected": "qr"}"#),
            ("v", r#"{"prompt": "v", "chosen": "u", "rejected": "w"}"#),
        ];
        let text = lines.map(|(_, line)| line).join("\n");
        let all = dataset(&text, Format::Preference).unwrap().training(6, 4, 7).unwrap();
        assert_eq!((all.per_epoch(), all.all().count()), (8, 8));
        let window = |step, first| {
            let (mut tokens, mut targets, mut starts) = ([0; 6], [0; 6], [9; 6]);
            all.fill_documents(step, first, &mut tokens, &mut targets, &mut starts).unwrap();
            (tokens, targets)
        };
        let answer = |targets: [u32; 6]| -> String {
            let ids = targets.into_iter().filter(|&id| id != IGNORED && id != 0);
            ids.map(|id| char::from(id as u8)).collect()
        };
        let mut seen: Vec<[String; 2]> = Vec::new();
        for (step, pair) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let [chosen, rejected] = [0, 1].map(|second| window(step, 2 * pair + second));
            assert_eq!(chosen.0[0], rejected.0[0], "the prompt is the same");
            assert_eq!(all.index(step, 2 * pair) + 1, all.index(step, 2 * pair + 1));
            let (mut tokens, mut targets) = ([0; 6], [0; 6]);
            all.all().fill(all.index(step, 2 * pair), &mut tokens, &mut targets).unwrap();
            assert_eq!((tokens, targets), chosen);
            seen.push([answer(chosen.1), answer(rejected.1)]);
        }
        seen.sort();
        assert_eq!(
            seen,
            [
                ["y", "z"].map(|it| format!(" {it}")),
                ["cd", "e"].map(Into::into),
                ["p", "qr"].map(Into::into),
                ["u", "w"].map(Into::into)
            ]
        );

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lines.jsonl");
        fs::write(&file, text).unwrap();
        let options =
            DataOptions { vocabulary: VocabularyChoice::Bytes, validation_every: 2, ..DataOptions::default() };
        let halves = Dataset::examples(&file, Format::Preference, &options).unwrap();
        assert_eq!(halves.training(9, 2, 0).unwrap().per_epoch(), 6);
        let validation = halves.validation(9, 3).unwrap().unwrap();
        assert_eq!(validation.count(), 4, "a pair is not cut");
        let plain = dataset("{\"prompt\": \"a\", \"completion\": \"b\"}", Format::Prompt).unwrap();
        let mixed = Dataset::mixture(vec![(halves, 0.5), (plain, 0.5)]).unwrap_err().to_string();
        assert!(mixed.contains("pairs of answers and other data"), "{mixed}");
    }

    /// Pairs of conversations have the answers of the same prompts with completions, whether or not the prompt is given.
    #[test]
    fn pairs_of_conversations_are_rendered_by_the_template() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = folder.path().join("tokenizer.json");
        Vocabulary::train(["2+2? 4 5 user assistant"].into_iter(), 260).unwrap().save(&tokenizer).unwrap();
        let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let options = DataOptions {
            vocabulary: VocabularyChoice::File(tokenizer),
            validation_every: 0,
            ..DataOptions::default()
        };
        let [user, four, five] = [("user", "2+2?"), ("assistant", "4"), ("assistant", "five")]
            .map(|(role, text)| format!(r#"{{"role": "{role}", "content": "{text}"}}"#));
        let window = |format, lines: &str, index: usize| {
            let file = folder.path().join("lines.jsonl");
            fs::write(&file, lines).unwrap();
            let windows = Dataset::examples(&file, format, &options).unwrap().training(48, 1, 0).unwrap().all();
            let (mut tokens, mut targets) = ([0; 48], [0; 48]);
            windows.fill(index, &mut tokens, &mut targets).unwrap();
            (tokens, targets)
        };
        let expected = [&four, &five].map(|answer| {
            let line = format!(r#"{{"prompt": [{user}], "completion": [{answer}]}}"#);
            window(Format::Prompt, &line, 0)
        });
        for line in [
            format!(r#"{{"prompt": [{user}], "chosen": [{four}], "rejected": [{five}]}}"#),
            format!(r#"{{"chosen": [{user}, {four}], "rejected": [{user}, {five}]}}"#),
        ] {
            assert_eq!([0, 1].map(|index| window(Format::Preference, &line, index)), expected, "{line}");
        }
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
            ("{\"prompt\": \"a\", \"chosen\": \"b\"}", Format::Preference, "missing field `rejected`"),
            ("{\"prompt\": \"a\", \"chosen\": [], \"rejected\": \"b\"}", Format::Preference, "all strings"),
            ("{\"chosen\": [{}], \"rejected\": []}", Format::Preference, "message 0 has no \"role\""),
            ("{\"chosen\": [], \"rejected\": []}", Format::Preference, "chat_template.jinja"),
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
