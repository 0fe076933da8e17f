//! Where the answers of a conversation stand in its text.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ChatTemplate, Conversation};
use crate::DataError;

/// Which answers of a conversation count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Answers {
    /// Every message of the assistant.
    #[default]
    All,
    /// The last message of the assistant. What follows it is left out.
    Last,
}

impl ChatTemplate {
    /// A conversation as text, and the bytes of it that count: those between the template's `{% generation %}` tags, or, of a template
    /// without them, what each answer adds to the conversation before it, which ends with the prompt for it. The token that ends the
    /// assistant's turn is included as far as the template writes it. Messages of the weight 0 do not count.
    ///
    /// # Errors
    /// As [`Self::render`]; an answer whose place in the text is not well defined.
    pub fn answers_of(
        &self,
        conversation: &Conversation,
        which: Answers,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let turns = conversation.turns();
        let is_answer = |&index: &usize| turns[index].is_answer;
        let answers: Vec<usize> = (0..turns.len()).filter(is_answer).collect();
        let last = answers.last().copied();
        let length = if which == Answers::Last { last.map_or(turns.len(), |last| last + 1) } else { turns.len() };
        let (text, tagged) = self.render_part(conversation, length, false)?;
        let counts = |index: usize| turns[index].counts && (which == Answers::All || last == Some(index));
        if !self.template_of(conversation).marks_answers {
            let spans = answers.into_iter().filter(|&index| counts(index));
            let spans = spans.map(|index| self.added(conversation, index, &text)).collect::<Result<_, _>>()?;
            return Ok((text, spans));
        }
        if answers.iter().all(|&index| counts(index)) {
            return Ok((text, tagged));
        }
        // Which of the tagged parts belong to which message.
        let mut spans = Vec::new();
        let mut before = 0;
        for index in answers {
            let (prefix, tags) = self.render_part(conversation, index + 1, false)?;
            let same = tags.len() <= tagged.len()
                && tags.len() >= before
                && tags.iter().zip(&tagged).all(|(a, b)| prefix[a.clone()] == text[b.clone()]);
            if !same {
                return Err(self.fail(format!(
                    "the {{% generation %}} tags write the answers up to message {index} differently when more messages follow, so which \
                     of them is that message is not known; leave \"weight\" out and set data.answers to \"all\""
                )));
            }
            if counts(index) {
                spans.extend_from_slice(&tagged[before..tags.len()]);
            }
            before = tags.len();
        }
        Ok((text, spans))
    }

    /// What an answer adds to the conversation before it.
    fn added(&self, conversation: &Conversation, index: usize, text: &str) -> Result<Range<usize>, DataError> {
        let (prompt, _) = self.render_part(conversation, index, true)?;
        let (upto, _) = self.render_part(conversation, index + 1, false)?;
        let reason = if !upto.starts_with(&prompt) {
            "the text up to it with the prompt for it is not how the text with it begins"
        } else if !text.starts_with(&upto) {
            "the template writes it, or a message before it, differently when more messages follow"
        } else {
            return Ok(prompt.len()..upto.len());
        };
        Err(self.fail(format!(
            "which part of the text is the answer in message {index} is not well defined: {reason}; put {{% generation %}} and \
             {{% endgeneration %}} around the answers in the template, or set data.answers to \"last\""
        )))
    }
}
