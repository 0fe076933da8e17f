//! Texts that are read piece by piece, so that a corpus may be larger than the memory.

use std::fs;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use crate::compressed::{open_text, read_error};
use crate::corpus::TextHasher;
use crate::encode::{MAX_UNCUT_BYTES, PIECE_BYTES, border, pieces};
use crate::files::{check_text, each_text, has_lines, no_text, text_below};
use crate::{Corpus, CorpusReport, DataError};

/// A visitor that is called for each piece of a document. Its second argument is true for the last piece.
pub(super) type Visit<'a> = dyn FnMut(&str, bool) -> Result<(), DataError> + 'a;

/// Documents in a fixed order.
pub(super) trait Texts {
    /// The report of all documents.
    fn report(&self) -> CorpusReport;

    /// Visits the pieces of all documents. Pieces end at a [`border`].
    fn visit(&self, visit: &mut Visit) -> Result<(), DataError>;
}

impl Texts for Corpus {
    fn report(&self) -> CorpusReport {
        Self::report(self)
    }

    fn visit(&self, visit: &mut Visit) -> Result<(), DataError> {
        self.documents().iter().try_for_each(|document| visit_text(document.name.as_ref(), &document.text, visit))
    }
}

/// Visits texts. Returns true if the texts still match their report. They do not match it if a file has changed after
/// it was hashed.
pub(super) fn visit_as_reported(texts: &dyn Texts, visit: &mut Visit) -> Result<bool, DataError> {
    let mut hasher = TextHasher::default();
    texts.visit(&mut |piece, last| {
        hasher.add_piece(piece, last);
        visit(piece, last)
    })?;
    Ok(hasher.hash() == texts.report().hash)
}

/// Visits the pieces of a document in memory. `path` is only used in errors.
fn visit_text(path: &Path, text: &str, visit: &mut Visit) -> Result<(), DataError> {
    let mut pieces = pieces(text, PIECE_BYTES).peekable();
    while let Some(piece) = pieces.next() {
        if piece.len() > MAX_UNCUT_BYTES {
            return Err(DataError::NoBreak { path: path.to_owned(), most: MAX_UNCUT_BYTES as u64 });
        }
        visit(piece, pieces.peek().is_none())?;
    }
    Ok(())
}

/// Text files that stay on disk: the same documents as [`Corpus::read`] returns.
pub(super) struct TextFiles {
    files: Vec<PathBuf>,
    report: CorpusReport,
}

impl TextFiles {
    /// Reads all files once, for the report.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Corpus::read`].
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let is_folder = fs::metadata(path).map_err(|error| DataError::read(path, error))?.is_dir();
        let candidates = if is_folder { text_below(path)? } else { vec![path.to_owned()] };
        let (mut files, mut skipped, mut documents, mut bytes) = (Vec::new(), 0, 0, 0);
        let mut hasher = TextHasher::default();
        for file in candidates {
            let length = match check_text(&file) {
                Err(DataError::Binary { path, reason }) if is_folder => {
                    tracing::debug!(path = %path.display(), reason, "skipped");
                    skipped += 1;
                    continue;
                }
                length => length?,
            };
            let mut end_document = |hasher: &mut TextHasher| {
                let length = hasher.end_document();
                (documents, bytes) = (documents + usize::from(length > 0), bytes + length);
            };
            if has_lines(&file) {
                each_text(&file, |_, text| {
                    hasher.update(text.as_bytes());
                    end_document(&mut hasher);
                    Ok(())
                })?;
            } else if length > 0 {
                each_part(&file, |part| hasher.update(part))?;
                end_document(&mut hasher);
            }
            files.push(file);
        }
        if documents == 0 {
            return Err(no_text(path, is_folder, skipped)?);
        }
        let report = CorpusReport { packages: 0, files: files.len(), documents, bytes, skipped, hash: hasher.hash() };
        Ok(Self { files, report })
    }
}

impl Texts for TextFiles {
    fn report(&self) -> CorpusReport {
        self.report.clone()
    }

    fn visit(&self, visit: &mut Visit) -> Result<(), DataError> {
        for file in &self.files {
            if has_lines(file) {
                each_text(file, |_, text| visit_text(file, &text, visit))?;
            } else {
                visit_file(file, visit)?;
            }
        }
        Ok(())
    }
}

/// Visits all bytes of a text in parts.
fn each_part(path: &Path, mut visit: impl FnMut(&[u8])) -> Result<(), DataError> {
    let mut source = open_text(path)?;
    loop {
        let part = source.fill_buf().map_err(|error| read_error(path, error))?;
        if part.is_empty() {
            return Ok(());
        }
        visit(part);
        let length = part.len();
        source.consume(length);
    }
}

/// Visits the pieces of a file that is one document. Only a few pieces are in memory at a time.
fn visit_file(path: &Path, visit: &mut Visit) -> Result<(), DataError> {
    let mut source = open_text(path)?;
    let (mut bytes, mut searched) = (Vec::new(), 0);
    loop {
        let mut start = 0;
        while let Some(end) = border(&bytes[start..], PIECE_BYTES.max(searched)) {
            visit(text_of(path, &bytes[start..start + end])?, false)?;
            (start, searched) = (start + end, 0);
        }
        bytes.drain(..start);
        searched = bytes.len();
        if searched > MAX_UNCUT_BYTES {
            return Err(DataError::NoBreak { path: path.to_owned(), most: MAX_UNCUT_BYTES as u64 });
        }
        let read = source.by_ref().take(16 * PIECE_BYTES as u64).read_to_end(&mut bytes);
        if read.map_err(|error| read_error(path, error))? == 0 {
            return if bytes.is_empty() { Ok(()) } else { visit(text_of(path, &bytes)?, true) };
        }
    }
}

fn text_of<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    str::from_utf8(bytes).map_err(|error| DataError::Binary { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;

    /// Formats texts, with a bar after each piece and a full stop after each document.
    fn shown(texts: &dyn Texts) -> String {
        let mut shown = String::new();
        texts
            .visit(&mut |piece, last| {
                shown += piece;
                shown += if last { "|." } else { "|" };
                Ok(())
            })
            .unwrap();
        shown
    }

    generated! {
        /// Files on disk are visited exactly like documents in memory: the pieces have the same borders.
        #[test]
        fn files_and_memory_agree(
            words in prop::collection::vec(prop_oneof![Just("fn x() {}\n"), Just("é "), Just("\r\n \n"), Just("word ")], 0..30),
            (repeats, lines) in (1usize..30_000, prop::collection::vec("[a\n é]{0,9}", 0..4)),
        ) {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("a.txt"), ["\u{feff}", &words.concat().repeat(repeats)].concat()).unwrap();
            fs::write(folder.path().join("b.txt"), b"\xff").unwrap();
            let lines: String = lines.iter().map(|text| format!("{}\r\n\n", serde_json::json!({ "text": text }))).collect();
            fs::write(folder.path().join("c.jsonl"), format!("\u{feff}{lines}")).unwrap();
            match (Corpus::read(folder.path()), TextFiles::open(folder.path())) {
                (Ok(corpus), Ok(files)) => {
                    prop_assert_eq!(corpus.report(), Texts::report(&files));
                    prop_assert!(shown(&corpus) == shown(&files));
                }
                (one, other) => prop_assert_eq!(one.unwrap_err().to_string(), other.err().unwrap().to_string()),
            }
        }
    }
}
