//! Stop strings: texts that end generation (`stop_strings`), wherever the boundaries of the tokens are.

use gapless_engine::data::{DataError, Tokenizer};

/// Checks a sequence of tokens for stop strings. The token that completes one is the last of the sequence and is kept
/// as a whole, as in transformers, even if it contains further text after the stop string.
#[derive(Debug)]
pub struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    /// The newest tokens: one more than the longest stop string has bytes, because a decoder may drop the leading space
    /// of the first.
    ids: Vec<u32>,
}

impl<'a> StopStrings<'a> {
    /// Starts after a prompt. A stop string may begin in the prompt; one that is complete there does not count.
    pub fn new(tokenizer: &'a Tokenizer, strings: &'a [String], prompt: &[u32]) -> Self {
        Self { tokenizer, strings, ids: prompt.to_vec() }
    }

    /// True if the next token completes one of the stop strings. Special tokens are compared as they are spelled.
    ///
    /// # Errors
    /// Returns the tokenizer's error if it cannot decode the tokens.
    pub fn ends_with(&mut self, id: u32) -> Result<bool, DataError> {
        let Some(longest) = self.strings.iter().map(String::len).max() else { return Ok(false) };
        self.ids.drain(..self.ids.len().saturating_sub(longest));
        let before = self.tokenizer.decode(&self.ids, true)?;
        self.ids.push(id);
        let after = self.tokenizer.decode(&self.ids, true)?;
        // A character that was incomplete before belongs to the token that completes it.
        let same = before.chars().zip(after.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        Ok(self.strings.iter().any(|text| is_completed(text, &after, same)))
    }
}

/// True if `text` occurs in `all` and ends after the first `first` bytes.
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
