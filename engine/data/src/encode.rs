//! Writes token files, and cuts texts into pieces to encode.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{DataError, TokenWidth};

/// Approximate bytes of text per encoding task. A task is large enough to outweigh the cost of starting it, and small
/// enough to keep all cores busy.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// Approximate bytes of text per call of a tokenizer. For longer texts, `tokenizers` takes more time per byte (see
/// `benches/tokenize`).
pub(super) const ENCODED_BYTES: usize = 2 << 10;

/// The most bytes of text without a place to cut. Such text is encoded in one call, which takes memory of many times
/// the text's size.
pub(super) const MAX_UNCUT_BYTES: usize = 32 << 20;

/// A file of tokens that is being written, and its hash.
pub(super) struct TokenWriter {
    file: BufWriter<File>,
    path: PathBuf,
    width: TokenWidth,
    hasher: blake3::Hasher,
    tokens: u64,
}

/// The contents of a file of tokens, as far as they are safely on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    pub tokens: u64,
    /// The blake3 hash of the bytes, as hexadecimal digits.
    pub hash: String,
}

impl TokenWriter {
    /// Creates a file, replacing an existing one.
    pub fn create(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        let file = BufWriter::new(File::create(path).map_err(DataError::write(path))?);
        Ok(Self { file, path: path.to_owned(), width, hasher: blake3::Hasher::new(), tokens: 0 })
    }

    /// Opens a file to continue after the contents `written`. Returns `None` if the file no longer begins with these
    /// contents.
    pub fn resume(path: &Path, width: TokenWidth, written: &Written) -> Result<Option<Self>, DataError> {
        let read = |error| DataError::read(path, error);
        let Ok(mut file) = File::options().read(true).write(true).open(path) else { return Ok(None) };
        let bytes = written.tokens * width.bytes();
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader((&file).take(bytes)).map_err(read)?;
        if hasher.count() != bytes || hasher.finalize().to_hex().as_str() != written.hash {
            return Ok(None);
        }
        file.set_len(bytes).and_then(|()| file.seek(SeekFrom::End(0))).map_err(DataError::write(path))?;
        let (file, path) = (BufWriter::new(file), path.to_owned());
        Ok(Some(Self { file, path, width, hasher, tokens: written.tokens }))
    }

    /// Appends tokens.
    pub fn append(&mut self, ids: &[u32]) -> Result<(), DataError> {
        let mut bytes = Vec::with_capacity(ids.len() * self.width.bytes() as usize);
        self.width.append(ids, &mut bytes);
        self.tokens += ids.len() as u64;
        self.hasher.update(&bytes);
        self.file.write_all(&bytes).map_err(DataError::write(&self.path))
    }

    /// Appends a file of `tokens` tokens of the same width.
    pub fn append_file(&mut self, path: &Path, tokens: u64) -> Result<(), DataError> {
        let mut file = File::open(path).map_err(|error| DataError::read(path, error))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = file.read(&mut buffer).map_err(|error| DataError::read(path, error))?;
            if read == 0 {
                self.tokens += tokens;
                return Ok(());
            }
            self.hasher.update(&buffer[..read]);
            self.file.write_all(&buffer[..read]).map_err(DataError::write(&self.path))?;
        }
    }

    /// Flushes all tokens written so far to the disk, and returns their number and hash.
    pub fn save(&mut self) -> Result<Written, DataError> {
        self.file.flush().map_err(DataError::write(&self.path))?;
        self.file.get_ref().sync_all().map_err(DataError::write(&self.path))?;
        Ok(Written { tokens: self.tokens, hash: self.hasher.finalize().to_hex().to_string() })
    }
}

/// Renames `path.tmp` to `path`, if `path.tmp` exists.
pub(super) fn move_into_place(path: &Path) -> Result<(), DataError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    match std::fs::rename(&temporary, path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(DataError::write(path)(error)),
        _ => Ok(()),
    }
}

/// Cuts a text into pieces of about `least` bytes. Each piece ends with a line break that has no white space next to
/// it.
///
/// The tokens of the pieces together are those of the whole text. Tokenizers trained by this crate always separate
/// tokens at such a line break, because their pattern joins line breaks only with white space. For other tokenizers,
/// [`Vocabulary::cuts_at_lines`](crate::Vocabulary::cuts_at_lines) tests this property.
pub(super) fn pieces(mut text: &str, least: usize) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let (piece, rest) = text.split_at(cut(text.as_bytes(), least));
        text = rest;
        Some(piece)
    })
}

/// Most bytes of a word on which a tokenizer is trained. Longer runs without white space are cut, because training time
/// grows with the square of a word's length.
const LONGEST_WORD: usize = 1024;

/// Cuts a text for training a tokenizer. The words stay those of the whole text, except that runs without white space
/// are cut at [`LONGEST_WORD`]. A piece has about [`PIECE_BYTES`] at most, so that the memory for training does not
/// depend on the size of the file.
pub(super) fn pieces_for_training(text: &str) -> impl Iterator<Item = &str> {
    pieces(text, PIECE_BYTES).flat_map(|mut piece| {
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
        // A word begins with the space before it.
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
    border(text, least).unwrap_or(text.len())
}

/// Returns the first place at or after `least` where a text may be cut, or `None` if there is none.
pub(super) fn border(text: &[u8], least: usize) -> Option<usize> {
    // Bytes from 128 on may belong to white space outside ASCII, so only printable ASCII counts.
    let solid = |byte: u8| byte.is_ascii_graphic();
    (least.max(2)..text.len()).find(|&end| text[end - 1] == b'\n' && solid(text[end - 2]) && solid(text[end]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenize::tokenize;
    use crate::tokens::Tokens;
    use crate::{Corpus, Vocabulary};
    use gapless_testing::prelude::*;

    fn encode(texts: &[&str], vocabulary: &Vocabulary) -> Vec<u32> {
        let folder = tempfile::tempdir().unwrap();
        let corpus = Corpus::from_texts(texts.iter().copied());
        let path = folder.path().join("tokens.bin");
        let parts = tokenize(&corpus, vocabulary, &|_| false, &path).unwrap();

        let tokens = Tokens::open_bare(&path, TokenWidth::of_vocabulary(vocabulary.size())).unwrap();
        let Written { tokens: count, hash } = parts.all;
        let largest = vocabulary.end_of_text().unwrap_or(0);
        let scan = tokens.scan(vocabulary.size()).unwrap();
        assert_eq!((tokens.count(), scan.hash, scan.outside), (count, hash, None));
        assert!(scan.largest >= largest);
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
        // Without the cuts, this would take minutes.
        assert!(Vocabulary::train([run.as_str()].into_iter(), 300).unwrap().size() > 257);
    }

    #[test]
    fn documents_end_with_the_end_of_text() {
        assert_eq!(encode(&["ab", "c"], &Vocabulary::bytes()), [97, 98, 0, 99, 0]);
    }

    #[test]
    fn pieces_encode_to_the_tokens_of_the_whole() {
        // The text has more than one piece, and all kinds of borders that occur in sources.
        let own = concat!(include_str!("vocabulary.rs"), "\n\n\n", include_str!("encode.rs"), "\r\n \u{a0}\n x\n");
        let text = own.repeat(20);
        assert!(pieces(&text, PIECE_BYTES).count() > 3);
        let vocabulary = Vocabulary::train([own].into_iter(), 600).unwrap();
        let mut whole = vocabulary.encode(&text).unwrap();
        whole.extend(vocabulary.end_of_text());
        assert_eq!(encode(&[&text], &vocabulary), whole);
    }

    #[test]
    fn a_tokenizer_that_marks_where_a_text_begins_encodes_documents_whole() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": {"type": "Prepend", "prepend": "_"}, "model":
            {"type": "BPE", "unk_token": "?", "vocab": {"?": 0, "_": 1, "a": 2, "\n": 3, "</s>": 4}, "merges": []}}"#;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json).unwrap();
        let vocabulary = Vocabulary::open(file.path()).unwrap();
        assert!(!vocabulary.cuts_at_lines().unwrap() && Vocabulary::bytes().cuts_at_lines().unwrap());
        let text = "a\n".repeat(PIECE_BYTES);
        let expected = [&[1], &[2, 3].repeat(PIECE_BYTES)[..], &[4]].concat();
        assert_eq!(encode(&[&text, &text], &vocabulary), expected.repeat(2));
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
