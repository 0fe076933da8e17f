//! The positions of the answers in the text of a conversation.
//!
//! If the template has `{% generation %}` tags, answers lie between them. Otherwise, the conversation is rendered once
//! up to the prompt for an answer, and once with the answer. The answer is the text that the second rendering adds. The
//! renderings are compared byte by byte. If they do not determine the position of an answer, an error is returned.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::conversation::{MARK, RenderedRange};
use super::{ChatTemplate, Conversation};
use crate::DataError;

/// The answers of a conversation that count in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Answers {
    /// All assistant messages, except those with `weight` 0.
    #[default]
    All,
    /// Only the last assistant message; the conversation is cut after it. This suits templates that render earlier
    /// answers differently.
    Last,
}

impl ChatTemplate {
    /// Renders a conversation as text, and returns the byte ranges that count in the loss:
    /// - If the template has `{% generation %}` tags, the ranges between them.
    /// - Otherwise, the text that each answer adds to the conversation before it, including the prompt for the answer.
    ///   The token that ends the assistant's turn is included if the template writes it.
    /// - For a prompt with a completion, the completion.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::render`], or if the position of an answer in the text is
    /// ambiguous.
    pub fn answers_of(
        &self,
        conversation: &Conversation,
        which: Answers,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let turns = conversation.turns();
        if let Some(prompt) = conversation.prompt() {
            let start = self.text_of(conversation, prompt, true)?;
            let text = self.text_of(conversation, turns.len(), false)?;
            if !text.starts_with(&start) {
                return Err(
                    self.fail("the text of the prompt is not the beginning of the text with its completion".into())
                );
            }
            let completion = start.len()..text.len();
            return Ok((text, vec![completion]));
        }
        let answers: Vec<usize> = (0..turns.len()).filter(|&index| turns[index].is_answer).collect();
        let last = answers.last().copied();
        let length = if which == Answers::Last { last.map_or(turns.len(), |last| last + 1) } else { turns.len() };
        let counts = |index: usize| turns[index].counts && (which == Answers::All || last == Some(index));
        let whole = RenderedRange { messages: length, add_generation_prompt: false, marked: None };
        let (text, tagged) = self.render_part(conversation, whole)?;
        let spans = if !self.template_of(conversation).marks_answers {
            let added = |index| self.added(conversation, index, length, &text);
            answers.into_iter().filter(|&index| counts(index)).map(added).collect::<Result<_, _>>()?
        } else if answers.iter().all(|&index| counts(index)) {
            tagged
        } else {
            self.tagged(conversation, &answers, &text, &tagged, counts)?
        };
        Ok((text, spans))
    }

    fn text_of(&self, conversation: &Conversation, messages: usize, prompt: bool) -> Result<String, DataError> {
        Ok(self.render_part(conversation, RenderedRange { messages, add_generation_prompt: prompt, marked: None })?.0)
    }

    /// Selects the tagged ranges of the answers that count. To find the ranges of a message, renders the conversation
    /// up to this message: the ranges that this adds belong to the message.
    fn tagged(
        &self,
        conversation: &Conversation,
        answers: &[usize],
        text: &str,
        tagged: &[Range<usize>],
        counts: impl Fn(usize) -> bool,
    ) -> Result<Vec<Range<usize>>, DataError> {
        let (mut spans, mut before) = (Vec::new(), 0);
        for &index in answers {
            let part = RenderedRange { messages: index + 1, add_generation_prompt: false, marked: None };
            let (upto, tags) = self.render_part(conversation, part)?;
            let is_same = (before..=tagged.len()).contains(&tags.len())
                && tags.iter().zip(tagged).all(|(a, b)| upto[a.clone()] == text[b.clone()]);
            if !is_same {
                return Err(self.fail(format!(
                    "the {{% generation %}} tags of message {index} are ambiguous: the template tags the answers up to \
                     it differently when more messages follow; leave \"weight\" out, or write one row per answer"
                )));
            }
            if counts(index) {
                spans.extend_from_slice(&tagged[before..tags.len()]);
            }
            before = tags.len();
        }
        Ok(spans)
    }

    /// Returns the range of an answer in `text`, the rendering of the first `length` messages. The range is the text
    /// that the answer adds to the conversation before it.
    fn added(
        &self,
        conversation: &Conversation,
        index: usize,
        length: usize,
        text: &str,
    ) -> Result<Range<usize>, DataError> {
        let upto = self.text_of(conversation, index + 1, false)?;
        let marked = |messages| self.around_mark(conversation, index, messages);
        let prompt = match self.text_of(conversation, index, true) {
            Ok(prompt) => prompt,
            // Templates that read the first message reject a prompt without messages.
            Err(error) if index == 0 => {
                let all = self.text_of(conversation, length, false)?;
                let with_prompt = self.text_of(conversation, length, true)?;
                let prompt = with_prompt.strip_prefix(&*all).filter(|prompt| !prompt.is_empty());
                match (marked(1)?, prompt) {
                    (Some((before, _)), Some(prompt)) if before.ends_with(prompt) => before,
                    _ => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        let Some(answer) = upto.strip_prefix(&*prompt) else {
            let reason = "the text up to its generation prompt is not the beginning of the text with the answer";
            return Err(self.not_defined(index, reason, ""));
        };
        if text.starts_with(&upto) {
            return Ok(prompt.len()..upto.len());
        }
        // The template renders earlier messages differently when more messages follow. The answer itself may still be
        // the same.
        let found = match (marked(index + 1)?, marked(length)?) {
            (Some((before, after)), Some((around, behind))) if text.starts_with(&around) && text.ends_with(&behind) => {
                let start = before.strip_prefix(&*prompt).and_then(|more| around.strip_suffix(more)).map(str::len);
                let is_whole = behind.starts_with(&after);
                start
                    .filter(|&start| is_whole && text[start..].starts_with(answer))
                    .map(|start| start..start + answer.len())
            }
            _ => None,
        };
        let reason = "the template writes it differently when more messages follow";
        found.ok_or_else(|| self.not_defined(index, reason, ", or set data.answers to \"last\""))
    }

    /// Returns the text before and after a message's content, or `None` unless that content appears exactly once.
    fn around_mark(
        &self,
        conversation: &Conversation,
        index: usize,
        messages: usize,
    ) -> Result<Option<(String, String)>, DataError> {
        let part = RenderedRange { messages, add_generation_prompt: false, marked: Some(index) };
        let (text, _) = self.render_part(conversation, part)?;
        let once = text.split_once(MARK).filter(|(_, after)| !after.contains(MARK));
        Ok(once.map(|(before, after)| (before.to_owned(), after.to_owned())))
    }

    /// Returns the error for an answer whose position is ambiguous. `or` is a further remedy for the error to suggest.
    fn not_defined(&self, index: usize, reason: &str, or: &str) -> DataError {
        self.fail(format!(
            "the part of the text that is the answer in message {index} is ambiguous: {reason}; put {{% generation %}} and \
             {{% endgeneration %}} around the answers in the template{or}"
        ))
    }
}
