//! Decoding tokens into text as they arrive.

use std::fmt;

use crate::DataError;

/// Replacement for bytes that do not form a character (yet).
const REPLACEMENT: char = '\u{fffd}';

type Decode<'a> = Box<dyn Fn(&[u32]) -> Result<String, DataError> + 'a>;

/// Decodes tokens that arrive one by one. Joined together, the returned pieces are the text of all tokens. A character
/// that consists of several tokens is returned with the last of these tokens. A character that stays incomplete is
/// returned as � by [`Self::finish`].
pub struct TextStream<'a> {
    decode: Decode<'a>,
    /// The tokens of the last returned piece, which are the context for later tokens, followed by the tokens not
    /// returned yet.
    ids: Vec<u32>,
    /// Number of `ids` whose text has been returned.
    returned_ids: usize,
    /// The text of the `ids` that have been returned.
    text: String,
}

impl fmt::Debug for TextStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextStream").field("ids", &self.ids).field("told", &self.returned_ids).finish_non_exhaustive()
    }
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(decode: impl Fn(&[u32]) -> Result<String, DataError> + 'a) -> Self {
        Self { decode: Box::new(decode), ids: Vec::new(), returned_ids: 0, text: String::new() }
    }

    /// Continues after a prompt, whose text is not returned. With the prompt as context, the next piece may begin with
    /// a space that decoding the piece alone would not give.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn after(mut self, prompt: &[u32]) -> Result<Self, DataError> {
        self.ids = prompt.to_vec();
        self.mark_returned()?;
        Ok(self)
    }

    /// Adds a token and returns the text that it completes. Returns `None` if the last character is still incomplete.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, DataError> {
        self.ids.push(id);
        let text = (self.decode)(&self.ids)?;
        if text.ends_with(REPLACEMENT) || text.len() <= self.text.len() {
            return Ok(None);
        }
        let piece = behind(&self.text, &text).to_owned();
        self.ids.drain(..self.returned_ids);
        self.mark_returned()?;
        Ok(Some(piece))
    }

    /// Returns the remaining text after the last token. Bytes that do not form a whole character become �.
    ///
    /// # Errors
    /// Returns an error if the tokenizer returns one.
    pub fn finish(self) -> Result<String, DataError> {
        let text = (self.decode)(&self.ids)?;
        Ok(behind(&self.text, &text).to_owned())
    }

    fn mark_returned(&mut self) -> Result<(), DataError> {
        self.returned_ids = self.ids.len();
        self.text = (self.decode)(&self.ids)?;
        Ok(())
    }
}

/// Returns the rest of `text` after its longest common prefix with `before`.
fn behind<'t>(before: &str, text: &'t str) -> &'t str {
    let same: usize = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    &text[same..]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes with a tokenizer of one token per byte.
    fn pieces(prompt: &[u8], bytes: &[u8]) -> Vec<String> {
        let decode = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let ids: Vec<u32> = prompt.iter().map(|&byte| byte.into()).collect();
        let mut stream = TextStream::new(decode).after(&ids).unwrap();
        let mut pieces: Vec<String> = bytes.iter().filter_map(|&byte| stream.push(byte.into()).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn pieces_make_the_whole_text() {
        for (prompt, bytes, expected) in [
            ("", &b"ab"[..], &["a", "b", ""][..]),
            ("x", "é!".as_bytes(), &["é", "!", ""]),
            ("x", b"a\xc3", &["a", "\u{fffd}"]),
            ("x", b"\xe2\x82", &["\u{fffd}"]),
            ("", b"\xffa", &["\u{fffd}a", ""]),
            ("", b"", &[""]),
        ] {
            assert_eq!(pieces(prompt.as_bytes(), bytes), expected, "{bytes:?}");
        }
    }
}
