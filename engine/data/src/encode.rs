//! Documents to a file of tokens, on all cores.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::{DataError, Document, TokenWidth, Vocabulary};

/// Bytes of text that one task encodes, about: enough to hide its start, few enough to keep all cores busy.
const PIECE_BYTES: usize = 64 << 10;

/// Pieces that are in memory as tokens at once.
const PIECES_AT_ONCE: usize = 256;

/// Writes a file of tokens and hashes it on the way.
pub(super) struct TokenWriter {
    file: BufWriter<File>,
    path: PathBuf,
    width: TokenWidth,
    hasher: blake3::Hasher,
}

impl TokenWriter {
    /// Starts a file, in place of one that may be there.
    pub fn create(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        let file = BufWriter::new(File::create(path).map_err(DataError::write(path))?);
        Ok(Self { file, path: path.to_owned(), width, hasher: blake3::Hasher::new() })
    }

    /// Encodes documents in parallel and writes each, followed by the end of text. Answers how many tokens that made.
    pub fn documents<'a>(
        &mut self,
        documents: impl Iterator<Item = &'a Document>,
        vocabulary: &Vocabulary,
    ) -> Result<u64, DataError> {
        let mut pieces = documents.flat_map(|document| {
            let mut pieces = pieces(&document.text).peekable();
            std::iter::from_fn(move || pieces.next().map(|piece| (piece, pieces.peek().is_none())))
        });
        let mut count = 0;
        let mut bytes = Vec::new();
        loop {
            let group: Vec<_> = pieces.by_ref().take(PIECES_AT_ONCE).collect();
            if group.is_empty() {
                return Ok(count);
            }
            let encoded: Result<Vec<_>, _> = group
                .into_par_iter()
                .map(|(piece, last)| {
                    let mut ids = vocabulary.encode(piece)?;
                    ids.extend(vocabulary.end_of_text().filter(|_| last));
                    Ok(ids)
                })
                .collect();
            for ids in encoded? {
                count += ids.len() as u64;
                bytes.clear();
                self.width.append(&ids, &mut bytes);
                self.hasher.update(&bytes);
                self.file.write_all(&bytes).map_err(DataError::write(&self.path))?;
            }
        }
    }

    /// Ends the file and answers its blake3 in hexadecimal.
    pub fn finish(self) -> Result<String, DataError> {
        let file = self.file.into_inner().map_err(|error| DataError::write(&self.path)(error.into_error()))?;
        file.sync_all().map_err(DataError::write(&self.path))?;
        Ok(self.hasher.finalize().to_hex().to_string())
    }
}

/// Cuts a text into pieces of about [`PIECE_BYTES`], each ending with a line whose last character and whose
/// successor's first are not white space. There the tokenizer's own pattern always cuts (a line break joins white space
/// only), so that the pieces' tokens are the whole text's tokens.
fn pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let (piece, rest) = text.split_at(cut(text.as_bytes(), PIECE_BYTES));
        text = rest;
        Some(piece)
    })
}

/// Bytes of the longest run without white space that a tokenizer is trained on as one word: training takes time by the square
/// of a word's length.
const LONGEST_WORD: usize = 1024;

/// Cuts a text for training a tokenizer: into the words that the whole text has, but for runs without white space, which are cut
/// at [`LONGEST_WORD`]. A piece is about [`PIECE_BYTES`] at most, so that training takes memory by the piece, not by the file.
pub(super) fn pieces_for_training(text: &str) -> impl Iterator<Item = &str> {
    pieces(text).flat_map(|mut piece| {
        std::iter::from_fn(move || {
            if piece.is_empty() {
                return None;
            }
            let (first, rest) = piece.split_at(cut_for_training(piece));
            piece = rest;
            Some(first)
        })
    })
}

fn cut_for_training(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut word = 0;
    for end in 1..bytes.len() {
        // A word begins with the space in front of it.
        let is_border = bytes[end] == b' ' && bytes[end - 1].is_ascii_graphic();
        if is_border && end >= PIECE_BYTES {
            return end;
        }
        if bytes[end].is_ascii_whitespace() {
            word = end;
        } else if end - word >= LONGEST_WORD && text.is_char_boundary(end) {
            return end;
        }
    }
    bytes.len()
}

fn cut(text: &[u8], least: usize) -> usize {
    // Bytes from 128 on may belong to white space beyond ASCII: only printable ASCII counts as a border.
    let solid = |byte: u8| byte.is_ascii_graphic();
    (least.max(2)..text.len())
        .find(|&end| text[end - 1] == b'\n' && solid(text[end - 2]) && solid(text[end]))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Corpus;
    use crate::tokens::{Scan, Tokens};
    use gapless_testing::prelude::*;

    fn encode(texts: &[&str], vocabulary: &Vocabulary) -> Vec<u32> {
        let corpus = Corpus::from_texts(texts.iter().copied());
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = TokenWriter::create(file.path(), TokenWidth::U32).unwrap();
        let count = writer.documents(corpus.documents().iter(), vocabulary).unwrap();
        let hash = writer.finish().unwrap();

        let tokens = Tokens::open(file.path(), TokenWidth::U32).unwrap();
        assert_eq!((tokens.count(), tokens.scan(vocabulary.size()).unwrap()), (count, Scan { hash, outside: None }));
        let mut ids = vec![0; count as usize];
        tokens.read(0, &mut ids).unwrap();
        ids
    }

    #[test]
    fn training_does_not_depend_on_the_length_of_runs_or_lines() {
        let lines = "fn one(two: &three) -> four {}\n".repeat(3000);
        let pieces: Vec<&str> = pieces_for_training(&lines).collect();
        assert!(pieces.len() > 1 && pieces.concat() == lines);
        let spaces = lines.replace('\n', " ");
        let pieces: Vec<&str> = pieces_for_training(&spaces).collect();
        assert!(
            pieces.len() > 1 && pieces.iter().all(|piece| piece.len() < 2 * PIECE_BYTES) && pieces.concat() == spaces
        );
        let run = "é".repeat(400_000);
        let pieces: Vec<&str> = pieces_for_training(&run).collect();
        assert!(pieces.iter().all(|piece| piece.len() <= LONGEST_WORD + 1) && pieces.concat() == run);
        // Takes a moment, not minutes.
        assert!(Vocabulary::train([run.as_str()].into_iter(), 300).unwrap().size() > 257);
    }

    #[test]
    fn documents_end_with_the_end_of_text() {
        assert_eq!(encode(&["ab", "c"], &Vocabulary::bytes()), [97, 98, 0, 99, 0]);
    }

    #[test]
    fn pieces_encode_to_the_tokens_of_the_whole() {
        // More than one piece, with all the kinds of borders that sources have.
        let own = concat!(include_str!("vocabulary.rs"), "\n\n\n", include_str!("encode.rs"), "\r\n \u{a0}\n x\n");
        let text = own.repeat(20);
        assert!(pieces(&text).count() > 3);
        let vocabulary = Vocabulary::train([own].into_iter(), 600).unwrap();
        let mut whole = vocabulary.encode(&text).unwrap();
        whole.extend(vocabulary.end_of_text());
        assert_eq!(encode(&[&text], &vocabulary), whole);
    }

    generated! {
        #[test]
        fn every_border_is_a_border_of_the_whole(text in "[a' \n\r\t1é\u{a0}.]{0,60}", least in 0usize..40) {
            let vocabulary = Vocabulary::train([text.as_str(), "a' 1é. a\n\n"].into_iter(), 300).unwrap();
            let (left, right) = text.split_at(cut(text.as_bytes(), least));
            let halves = [vocabulary.encode(left).unwrap(), vocabulary.encode(right).unwrap()].concat();
            prop_assert_eq!(halves, vocabulary.encode(&text).unwrap());
        }
    }
}
