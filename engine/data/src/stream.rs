//! Text as its tokens come.

use std::fmt;

use crate::DataError;

/// What stands for bytes that are no character, or not yet.
const REPLACEMENT: char = '\u{fffd}';

type Decode<'a> = Box<dyn Fn(&[u32]) -> Result<String, DataError> + 'a>;

/// The text of tokens that come one by one. All pieces together are the text of all tokens: a character that several tokens make is
/// told with the last of them, or at the end as it is.
pub struct TextStream<'a> {
    decode: Decode<'a>,
    /// The tokens of the last piece, which decide how the next ones begin, and those whose text was not told.
    ids: Vec<u32>,
    /// How many of them are told.
    told: usize,
    /// The text of those.
    text: String,
}

impl fmt::Debug for TextStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextStream").field("ids", &self.ids).field("told", &self.told).finish_non_exhaustive()
    }
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(decode: impl Fn(&[u32]) -> Result<String, DataError> + 'a) -> Self {
        Self { decode: Box::new(decode), ids: Vec::new(), told: 0, text: String::new() }
    }

    /// Goes on after a prompt, whose text is not told: what follows it may begin with a space that it would not have alone.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn after(mut self, prompt: &[u32]) -> Result<Self, DataError> {
        self.ids = prompt.to_vec();
        self.tell()?;
        Ok(self)
    }

    /// What the next token completes, if anything.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, DataError> {
        self.ids.push(id);
        let text = (self.decode)(&self.ids)?;
        if text.ends_with(REPLACEMENT) || text.len() <= self.text.len() {
            return Ok(None);
        }
        let piece = behind(&self.text, &text).to_owned();
        self.ids.drain(..self.told);
        self.tell()?;
        Ok(Some(piece))
    }

    /// What is left at the end: bytes that are no whole character come out as �.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub fn finish(self) -> Result<String, DataError> {
        let text = (self.decode)(&self.ids)?;
        Ok(behind(&self.text, &text).to_owned())
    }

    fn tell(&mut self) -> Result<(), DataError> {
        self.told = self.ids.len();
        self.text = (self.decode)(&self.ids)?;
        Ok(())
    }
}

/// What a text has behind the characters that it begins with like another.
fn behind<'t>(before: &str, text: &'t str) -> &'t str {
    let same: usize = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    &text[same..]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token is one byte.
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
