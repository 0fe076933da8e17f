//! Stop strings (`stop_strings`): texts that end generation, even if they begin or end within a token.

use gapless_engine::data::{DataError, Tokenizer};

/// Checks generated tokens for stop strings. The token that completes a stop string ends the text and is kept as a
/// whole, as in transformers, even if the token contains further characters after the stop string.
#[derive(Debug)]
pub struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    /// The last tokens of the text. The number of tokens is the number of bytes of the longest stop string plus one.
    /// The additional token is needed because a decoder may drop the leading space of the first token.
    ids: Vec<u32>,
}

impl<'a> StopStrings<'a> {
    /// Creates the check for the tokens that follow `prompt`. A stop string may begin in the prompt, but one that lies
    /// entirely in the prompt does not count.
    pub fn new(tokenizer: &'a Tokenizer, strings: &'a [String], prompt: &[u32]) -> Self {
        Self { tokenizer, strings, ids: prompt.to_vec() }
    }

    /// Appends the next token of the text. Returns true if this token completes one of the stop strings. Special tokens
    /// are compared by their spelling.
    ///
    /// # Errors
    /// Returns the tokenizer's error if it cannot decode the tokens.
    pub fn ends_with(&mut self, id: u32) -> Result<bool, DataError> {
        let Some(longest) = self.strings.iter().map(String::len).max() else { return Ok(false) };
        self.ids.drain(..self.ids.len().saturating_sub(longest));
        let before = self.tokenizer.decode(&self.ids, true)?;
        self.ids.push(id);
        let after = self.tokenizer.decode(&self.ids, true)?;
        // A character whose bytes are spread over several tokens counts as part of the token that completes it.
        let same = before.chars().zip(after.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        Ok(self.strings.iter().any(|text| is_completed(text, &after, same)))
    }
}

/// True if `text` occurs in `all` and at least one occurrence ends after the first `first` bytes.
fn is_completed(text: &str, all: &str, first: usize) -> bool {
    let start = (first + 1).saturating_sub(text.len());
    let start = (start..=all.len()).find(|&at| all.is_char_boundary(at)).unwrap_or(all.len());
    all[start..].contains(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_completes_a_text() {
        // Stop string, text before the last token, text with the last token.
        for (text, before, all, expected) in [
            ("stop", "sto", "stop", true),
            ("stop", "st", "stopera", true),
            ("stop", "last", "lastopper", true),
            ("stop", "", "stop", true),
            ("stop", "stop", "stop at", false),
            ("stop", "stop", "stopstop", true),
            ("stop", "sto", "stand", false),
            ("aa", "aa", "aaa", true),
            ("é", "n", "né", true),
            ("né", "né", "néé", false),
            ("é", "né", "né!", false),
        ] {
            assert_eq!(is_completed(text, all, before.len()), expected, "{text:?} in {before:?} | {all:?}");
        }
    }
}
