//! Tokenizes texts into a file, on all cores and with bounded memory, and continues where an interrupted process
//! stopped.
//!
//! In: texts that are visited in pieces. Out: the tokens of the documents for training, followed by those for
//! validation. Batches of pieces are encoded in parallel and written in order. A second file records the progress. The
//! resulting bytes depend neither on the number of threads nor on where a process was interrupted.

use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::corpus::TextHasher;
use crate::encode::{ENCODED_BYTES, TokenWriter, Written, move_into_place, pieces};
use crate::permutation::mix;
use crate::texts::{Texts, visit_as_reported};
use crate::{DataError, TokenWidth, Vocabulary};

/// Bytes of text that are encoded at once.
const BATCH_BYTES: usize = if cfg!(test) { 1 << 10 } else { 16 << 20 };

/// Approximate bytes of text that must be encoded again if a process is interrupted.
const SAVE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 64 << 20 };

/// Approximate bytes of text on which a vocabulary is trained, if the corpus has more.
const SAMPLE_BYTES: u64 = 128 << 20;

/// The result of tokenizing: the written tokens, and the number of those for validation.
pub(super) struct Tokenized {
    pub all: Written,
    pub validation_tokens: u64,
}

/// The progress of tokenizing, as it is kept on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Progress {
    corpus: String,
    vocabulary: String,
    /// Number of pieces that have been written.
    pieces: u64,
    /// The hash of the texts of these pieces.
    text: String,
    training: Written,
    validation: Written,
}

/// Returns the hash of the vocabulary with which an interrupted process has begun to tokenize this corpus. Returns
/// `None` if there was no such process.
pub(super) fn begun_with(tokens: &Path, corpus: &str) -> Option<String> {
    let progress = Progress::open(&beside(tokens, "progress"))?;
    (progress.corpus == corpus).then_some(progress.vocabulary)
}

/// Returns the texts on which a vocabulary is trained: all pieces, or a sample if the corpus is large. The sample is
/// the same in each call.
///
/// # Errors
/// Returns [`DataError::Changed`] if the texts no longer match their report, or a read error.
pub(super) fn sample(texts: &dyn Texts, folder: &Path) -> Result<Vec<String>, DataError> {
    let bytes = texts.report().bytes.max(SAMPLE_BYTES);
    let share = (u128::from(u64::MAX) * u128::from(SAMPLE_BYTES) / u128::from(bytes)) as u64;
    let (mut sample, mut index) = (Vec::new(), 0);
    let is_same = visit_as_reported(texts, &mut |piece, _| {
        if mix(index) <= share {
            sample.push(piece.to_owned());
        }
        index += 1;
        Ok(())
    })?;
    if is_same { Ok(sample) } else { Err(DataError::Changed { path: folder.to_owned() }) }
}

/// Encodes documents, each with its begin and end tokens, into a file. Continues where an earlier call was interrupted.
///
/// # Errors
/// Returns [`DataError::Changed`] if the texts no longer match their report. In this case, the progress is discarded.
/// Also returns errors of reading, writing and of the tokenizer.
pub(super) fn tokenize(
    texts: &dyn Texts,
    vocabulary: &Vocabulary,
    is_validation: &dyn Fn(u64) -> bool,
    tokens: &Path,
) -> Result<Tokenized, DataError> {
    let report = texts.report();
    let mut job = Job::open(vocabulary, report.hash.clone(), report.bytes, tokens)?;
    let (done, mut piece, mut document, mut begins) = (job.progress.pieces, 0, 0, true);
    let changed = || DataError::Changed { path: tokens.to_owned() };
    let visited = texts.visit(&mut |text, last| {
        job.text.add_piece(text, last);
        job.seen += text.len() as u64;
        piece += 1;
        // The text may have changed since an earlier call encoded its first pieces.
        if piece == done && job.text.hash() != job.progress.text {
            return Err(changed());
        }
        let begins = std::mem::replace(&mut begins, last);
        if piece > done {
            job.push(text, begins, last, is_validation(document))?;
        }
        document += u64::from(last);
        Ok(())
    });
    match visited.and_then(|()| if job.text.hash() == report.hash { Ok(()) } else { Err(changed()) }) {
        Err(error @ DataError::Changed { .. }) => {
            fs::remove_file(&job.path).or_else(not_there).map_err(DataError::write(&job.path))?;
            Err(error)
        }
        visited => visited.and_then(|()| job.finish(tokens)),
    }
}

fn not_there(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// A text that waits to be encoded.
struct Waiting {
    text: String,
    /// Number of pieces of the text. It is 1, unless the document must not be cut.
    pieces: u64,
    begins_document: bool,
    ends_document: bool,
    is_validation: bool,
}

struct Job<'a> {
    vocabulary: &'a Vocabulary,
    progress: Progress,
    path: PathBuf,
    training: TokenWriter,
    validation: TokenWriter,
    cuts_at_lines: bool,
    batch: Vec<Waiting>,
    batch_bytes: usize,
    unsaved_bytes: usize,
    /// Number of texts that spell out a special token, and the first such token. These tokens are encoded as plain
    /// text.
    spelled: (u64, Option<String>),
    /// The hash of the texts visited so far.
    text: TextHasher,
    /// Bytes of the texts visited so far.
    seen: u64,
    /// Bytes of all texts.
    bytes: u64,
}

impl<'a> Job<'a> {
    fn open(vocabulary: &'a Vocabulary, corpus: String, bytes: u64, tokens: &Path) -> Result<Self, DataError> {
        let width = TokenWidth::of_vocabulary(vocabulary.size());
        let [path, front, back] = ["progress", "tmp", "validation"].map(|kind| beside(tokens, kind));
        let begun = Progress { corpus, vocabulary: vocabulary.hash(), ..Progress::default() };
        let kept =
            Progress::open(&path).filter(|kept| (&kept.corpus, &kept.vocabulary) == (&begun.corpus, &begun.vocabulary));
        let resumed = match kept {
            Some(kept) => TokenWriter::resume(&front, width, &kept.training)?
                .zip(TokenWriter::resume(&back, width, &kept.validation)?)
                .map(|writers| (kept, writers)),
            None => None,
        };
        let (progress, (training, validation)) = match resumed {
            Some(resumed) => resumed,
            None => (begun, (TokenWriter::create(&front, width)?, TokenWriter::create(&back, width)?)),
        };
        let cuts_at_lines = vocabulary.cuts_at_lines()?;
        let (batch, batch_bytes, unsaved_bytes, seen) = (Vec::new(), 0, 0, 0);
        Ok(Self {
            vocabulary,
            progress,
            path,
            training,
            validation,
            cuts_at_lines,
            batch,
            batch_bytes,
            unsaved_bytes,
            spelled: (0, None),
            text: TextHasher::default(),
            seen,
            bytes,
        })
    }

    fn push(
        &mut self,
        text: &str,
        begins_document: bool,
        ends_document: bool,
        is_validation: bool,
    ) -> Result<(), DataError> {
        self.batch_bytes += text.len();
        match self.batch.last_mut() {
            Some(begun) if !begun.ends_document && !self.cuts_at_lines => {
                begun.text += text;
                begun.pieces += 1;
                begun.ends_document = ends_document;
            }
            _ => self.batch.push(Waiting {
                text: text.to_owned(),
                pieces: 1,
                begins_document,
                ends_document,
                is_validation,
            }),
        }
        let may_encode = ends_document || self.cuts_at_lines;
        if may_encode && self.batch_bytes >= BATCH_BYTES { self.encode() } else { Ok(()) }
    }

    /// Encodes and writes the batch.
    fn encode(&mut self) -> Result<(), DataError> {
        let (vocabulary, at_once) = (self.vocabulary, if self.cuts_at_lines { ENCODED_BYTES } else { usize::MAX });
        let encode = |waiting: &Waiting| {
            let mut ids = Vec::new();
            if waiting.begins_document {
                ids.extend(vocabulary.begin_of_text());
            }
            for part in pieces(&waiting.text, at_once) {
                ids.extend(vocabulary.encode(part)?);
            }
            ids.extend(vocabulary.end_of_text().filter(|_| waiting.ends_document));
            Ok((ids, vocabulary.spelled_special(&waiting.text).map(str::to_owned)))
        };
        let encoded: Vec<(Vec<u32>, Option<String>)> =
            self.batch.par_iter().map(encode).collect::<Result<_, DataError>>()?;
        for (waiting, (ids, spelled)) in self.batch.iter().zip(encoded) {
            self.spelled.0 += u64::from(spelled.is_some());
            self.spelled.1 = self.spelled.1.take().or(spelled);
            if waiting.is_validation { &mut self.validation } else { &mut self.training }.append(&ids)?;
            self.progress.pieces += waiting.pieces;
        }
        self.unsaved_bytes += self.batch_bytes;
        self.batch.clear();
        self.batch_bytes = 0;
        let (done, all) = (self.seen, self.bytes);
        tracing::info!(target: "gapless_data::progress", done, all, "tokenizing: {} %", 100 * done / all.max(1));
        if self.unsaved_bytes >= SAVE_BYTES { self.save() } else { Ok(()) }
    }

    fn save(&mut self) -> Result<(), DataError> {
        self.progress.training = self.training.save()?;
        self.progress.validation = self.validation.save()?;
        self.progress.text = self.text.hash();
        self.unsaved_bytes = 0;
        let json = serde_json::to_vec(&self.progress).expect("strings and numbers are valid JSON");
        let temporary = beside(&self.path, "tmp");
        fs::write(&temporary, json).map_err(DataError::write(&temporary))?;
        move_into_place(&self.path)
    }

    /// Appends the validation tokens to the training tokens, and renames the file to its final name.
    fn finish(mut self, tokens: &Path) -> Result<Tokenized, DataError> {
        self.encode()?;
        self.save()?;
        if let (pieces, Some(token)) = &self.spelled {
            tracing::warn!(
                pieces,
                "texts spell out special tokens such as {token}, which are encoded as text; data.special_tokens = true encodes them as special tokens"
            );
        }
        let (back, validation_tokens) = (beside(tokens, "validation"), self.progress.validation.tokens);
        self.training.append_file(&back, validation_tokens)?;
        let all = self.training.save()?;
        move_into_place(tokens)?;
        for done in [self.path, back] {
            fs::remove_file(&done).map_err(DataError::write(&done))?;
        }
        Ok(Tokenized { all, validation_tokens })
    }
}

impl Progress {
    fn open(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

/// Returns the path with `kind` as an additional extension.
fn beside(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(kind);
    name.into()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;
    use crate::texts::Visit;
    use crate::{Corpus, CorpusReport};

    /// Texts that return a read error after the given number of pieces.
    struct Failing<'a>(&'a dyn Texts, u64);

    impl Texts for Failing<'_> {
        fn report(&self) -> CorpusReport {
            self.0.report()
        }

        fn visit(&self, visit: &mut Visit) -> Result<(), DataError> {
            let left = Cell::new(self.1);
            self.0.visit(&mut |piece, last| {
                if left.get() == 0 {
                    return Err(DataError::read(Path::new("disk"), io::ErrorKind::Other.into()));
                }
                left.set(left.get() - 1);
                visit(piece, last)
            })
        }
    }

    /// Texts whose piece with the given number changes after they were hashed.
    struct Changing<'a>(&'a Corpus, u64);

    impl Texts for Changing<'_> {
        fn report(&self) -> CorpusReport {
            self.0.report()
        }

        fn visit(&self, visit: &mut Visit) -> Result<(), DataError> {
            let mut piece = 0;
            self.0.visit(&mut |text, last| {
                piece += 1;
                if piece == self.1 { visit(&text.replace('t', "T"), last) } else { visit(text, last) }
            })
        }
    }

    /// Tokens of a changed text are never kept under the hash of the original text, even if the process ends before it
    /// can notice the change.
    #[test]
    fn a_text_that_changes_meanwhile_is_not_kept() {
        let corpus = Corpus::from_texts((0..600).map(|index| format!("text number {index} of many, ").repeat(3)));
        let vocabulary = Vocabulary::bytes();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.bin");
        let make = |texts: &dyn Texts| tokenize(texts, &vocabulary, &|_| false, &path);
        for piece in [1, 300, 600] {
            assert!(matches!(make(&Changing(&corpus, piece)), Err(DataError::Changed { .. })));
            assert!(!path.exists() && !beside(&path, "progress").exists());
        }
        // The process is interrupted after a change, and started again with the original text.
        assert!(matches!(make(&Failing(&Changing(&corpus, 10), 499)), Err(DataError::Read { .. })));
        assert!(beside(&path, "progress").exists());
        assert!(matches!(make(&corpus), Err(DataError::Changed { .. })));
        let parts = make(&corpus).unwrap();
        assert_eq!(fs::read(&path).unwrap().len() as u64, 2 * parts.all.tokens);
        let expected: Vec<u8> = corpus.documents().iter().flat_map(|it| [it.text.as_bytes(), &[0]].concat()).collect();
        let ids: Vec<u8> = fs::read(&path).unwrap().chunks(2).map(|id| id[0]).collect();
        assert!(ids == expected);
    }

    #[test]
    fn what_was_ended_goes_on_to_the_same_bytes() {
        let corpus = Corpus::from_texts((0..600).map(|index| format!("text number {index} of many, ").repeat(3)));
        let vocabulary = Vocabulary::train(["text number of many"].into_iter(), 270).unwrap();
        let every_third = |document: u64| document % 3 == 2;
        let folder = tempfile::tempdir().unwrap();
        let whole = folder.path().join("whole.bin");
        let parts = tokenize(&corpus, &vocabulary, &every_third, &whole).unwrap();
        let expected = fs::read(&whole).unwrap();
        assert_eq!(parts.all.hash, blake3::hash(&expected).to_hex().to_string());

        let path = folder.path().join("ended.bin");
        let hash = corpus.report().hash;
        let done = || Progress::open(&beside(&path, "progress")).map_or(0, |progress| progress.pieces);
        for damage in [None, Some("tmp"), Some("validation"), Some("progress")] {
            let mut before = 0;
            for pieces in [3, 200, 210, 555] {
                assert!(tokenize(&Failing(&corpus, pieces), &vocabulary, &every_third, &path).is_err());
                assert!(before <= done() && done() <= pieces, "what is done stays done");
                before = done();
            }
            assert!(before > 400 && begun_with(&path, &hash) == Some(vocabulary.hash()));
            // Data that a process wrote after its last save must be ignored. If data that it had saved is lost, this
            // must be noticed.
            let front = beside(&path, "tmp");
            let mut longer = fs::read(&front).unwrap();
            longer.extend([7; 100]);
            fs::write(&front, longer).unwrap();
            if let Some(kind) = damage {
                let damaged = beside(&path, kind);
                let half = fs::read(&damaged).unwrap();
                fs::write(&damaged, &half[..half.len() / 2]).unwrap();
            }
            let again = tokenize(&corpus, &vocabulary, &every_third, &path).unwrap();
            assert!(fs::read(&path).unwrap() == expected, "{damage:?}");
            assert_eq!((again.all, again.validation_tokens), (parts.all.clone(), parts.validation_tokens));
            assert_eq!((begun_with(&path, &hash), fs::read_dir(folder.path()).unwrap().count()), (None, 2));
        }
    }
}
