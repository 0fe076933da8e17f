//! A corpus: documents in a fixed order, with their hash and a report of the files read.

use std::fmt;

/// One coherent text: a file, or a line of a .jsonl file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The origin of the document, for messages.
    pub name: String,
    /// The text; never empty.
    pub text: String,
}

/// Documents in a fixed order. The same files give the same corpus on every machine.
#[derive(Debug, Clone, Default)]
pub struct Corpus {
    documents: Vec<Document>,
    packages: usize,
    files: usize,
    skipped: usize,
}

/// A summary of what was read, displayed as one line.
///
/// ```
/// use gapless_data::CorpusReport;
/// let report = CorpusReport { packages: 3, files: 41, documents: 40, bytes: 5 << 20, skipped: 1, hash: "9f2c41d07b55aa10".into() };
/// assert_eq!(report.to_string(), "40 documents (5.0 MiB) from 41 files of 3 packages, 1 skipped, corpus 9f2c41d0");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CorpusReport {
    /// Packages of the lock file whose sources were found; 0 for files and folders.
    pub packages: usize,
    /// Files that were read.
    pub files: usize,
    /// Number of texts that are not empty.
    pub documents: usize,
    /// Bytes of text.
    pub bytes: u64,
    /// Files that were not text.
    pub skipped: usize,
    /// The blake3 hash of the texts in their order, as hexadecimal digits.
    pub hash: String,
}

impl Corpus {
    /// Creates a corpus from texts in memory. Empty texts are left out.
    pub fn from_texts<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Self {
        let mut corpus = Self::default();
        for (index, text) in texts.into_iter().enumerate() {
            corpus.push(format!("text {index}"), text.into());
        }
        corpus
    }

    /// The documents.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Bytes of text in all documents.
    pub fn bytes(&self) -> u64 {
        self.documents.iter().map(|document| document.text.len() as u64).sum()
    }

    /// Summarizes the corpus. The hash covers the texts but not the names, because names differ between machines.
    pub fn report(&self) -> CorpusReport {
        let mut hasher = TextHasher::default();
        for document in &self.documents {
            hasher.add_piece(&document.text, true);
        }
        CorpusReport {
            packages: self.packages,
            files: self.files,
            documents: self.documents.len(),
            bytes: self.bytes(),
            skipped: self.skipped,
            hash: hasher.hash(),
        }
    }

    pub(super) fn push(&mut self, name: String, text: String) {
        if !text.is_empty() {
            self.documents.push(Document { name, text });
        }
    }

    pub(super) fn count_package(&mut self) {
        self.packages += 1;
    }

    pub(super) fn count_file(&mut self) {
        self.files += 1;
    }

    pub(super) fn count_skipped(&mut self) {
        self.skipped += 1;
    }

    pub(super) fn skipped(&self) -> usize {
        self.skipped
    }
}

/// The hash of texts in their order, computed piece by piece.
#[derive(Debug, Default)]
pub(crate) struct TextHasher {
    hasher: blake3::Hasher,
    length: u64,
}

impl TextHasher {
    /// Adds the next bytes of a document.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
    }

    /// Ends a document and returns its size in bytes. An empty document does not change the hash.
    pub fn end_document(&mut self) -> u64 {
        let length = std::mem::take(&mut self.length);
        if length > 0 {
            self.hasher.update(&length.to_le_bytes());
        }
        length
    }

    /// Adds the next piece of a document, and ends it if `is_last`.
    pub fn add_piece(&mut self, piece: &str, is_last: bool) {
        self.update(piece.as_bytes());
        if is_last {
            self.end_document();
        }
    }

    /// Returns the blake3 hash of all documents so far, as hexadecimal digits.
    pub fn hash(&self) -> String {
        self.hasher.finalize().to_hex().to_string()
    }
}

impl fmt::Display for CorpusReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = self.bytes as f64 / f64::from(1 << 20);
        write!(f, "{} documents ({mebibytes:.1} MiB) from {} files", self.documents, self.files)?;
        if self.packages > 0 {
            write!(f, " of {} packages", self.packages)?;
        }
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        write!(f, ", corpus {}", self.hash.get(..8).unwrap_or(&self.hash))
    }
}
