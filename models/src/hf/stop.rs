//! Texts that end a generated one (`stop_strings`), wherever the tokens have their seams.

use gapless_engine::data::{DataError, Tokenizer};

/// Watches a sequence of tokens for texts that end it. The token that completes one ends the sequence as a whole, as in transformers:
/// what stands behind the text in the same token stays.
#[derive(Debug)]
pub struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    /// The newest tokens: as many as the longest text has bytes, and one more, whose leading space a decoder may take away.
    ids: Vec<u32>,
}

impl<'a> StopStrings<'a> {
    /// Watches what comes behind a prompt. A text may begin in the prompt; one that is complete there ends nothing.
    pub fn new(tokenizer: &'a Tokenizer, strings: &'a [String], prompt: &[u32]) -> Self {
        Self { tokenizer, strings, ids: prompt.to_vec() }
    }

    /// Whether the next token completes one of the texts. Special tokens count as they are spelled.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn ends_with(&mut self, id: u32) -> Result<bool, DataError> {
        let Some(longest) = self.strings.iter().map(String::len).max() else { return Ok(false) };
        self.ids.drain(..self.ids.len().saturating_sub(longest));
        let before = self.tokenizer.decode(&self.ids, true)?;
        self.ids.push(id);
        let after = self.tokenizer.decode(&self.ids, true)?;
        // A character that the token completes is the token's.
        let same = before.chars().zip(after.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        Ok(self.strings.iter().any(|text| is_completed(text, &after, same)))
    }
}

/// Whether a text stands somewhere in `all` and ends behind its first bytes.
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
        // Text, what was there before the last token, what is there with it.
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
