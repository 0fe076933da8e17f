//! A prepared dataset: vocabulary, tokens, and which part of them is validation.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::encode::move_into_place;
use crate::examples::{Examples, Line, encode_lines, read_lines};
use crate::files::token_files;
use crate::texts::{TextFiles, Texts};
use crate::tokenize::{begun_with, sample, tokenize};
use crate::windows::Cut;
use crate::{
    Corpus, CorpusReport, DataError, Format, RustSources, TokenWidth, Tokenizer, Tokens, TrainingWindows,
    ValidationWindows, Vocabulary, VocabularyChoice,
};

const TOKENIZER: &str = "tokenizer.json";
const TOKENS: &str = "tokens.bin";
const MANIFEST: &str = "dataset.json";

/// Where data comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The Rust sources of a workspace and its locked dependencies.
    RustSources(RustSources),
    /// A file of text, a folder of them, or token ids as .bin, a file or a folder of them: of 16 bits (of 32 bits for vocabularies of
    /// more than 65,536), little-endian, or as the header of llm.c says.
    Path(PathBuf),
}

/// A `Cargo.lock` stands for the Rust sources that it names: text that is there wherever Rust is.
impl From<PathBuf> for Source {
    fn from(path: PathBuf) -> Self {
        let is_lock = path.file_name().is_some_and(|name| name == "Cargo.lock");
        if is_lock { Self::RustSources(RustSources::of_lock(path)) } else { Self::Path(path) }
    }
}

/// How data is tokenized and split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// The vocabulary; by default BPE of 4,096 tokens.
    pub vocabulary: VocabularyChoice,
    /// Every n-th document is validation (so that both parts have the same distribution); with fewer documents than n,
    /// and for .bin, it is the last n-th of the tokens. 0 means no validation; 1 would leave nothing to train on and is
    /// taken as 2. By default 32, about 3 %.
    pub validation_every: usize,
    /// Where tokenizers and tokens are kept, one folder for each corpus, vocabulary and split. By default `.gapless/data`.
    pub cache: PathBuf,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self { vocabulary: VocabularyChoice::Bpe { size: 4096 }, validation_every: 32, cache: ".gapless/data".into() }
    }
}

/// A vocabulary, and a stream of tokens whose front is for training and whose back for validation.
#[derive(Debug, Clone)]
pub struct Dataset {
    vocabulary: Vocabulary,
    /// One, or those of a mixture.
    parts: Vec<Part>,
    hash: String,
    corpus: Option<CorpusReport>,
    folder: Option<PathBuf>,
}

/// A stream of tokens.
#[derive(Debug, Clone)]
struct Part {
    tokens: Arc<Tokens>,
    training: Range<u64>,
    validation: Range<u64>,
    /// What belongs together and what counts, if that is not all.
    examples: Option<Arc<Examples>>,
    /// What part of all windows is of this stream, relative to the others.
    weight: f64,
}

/// `dataset.json`: what the folder holds, written last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    corpus: CorpusReport,
    /// Of the bytes, or of `tokenizer.json`.
    vocabulary_hash: String,
    width: TokenWidth,
    training_tokens: u64,
    validation_tokens: u64,
    tokens_hash: String,
}

impl Dataset {
    /// Reads, tokenizes and splits a source, or takes what an earlier call kept. Of text files a few pieces are in memory at once; a
    /// call that was ended, as by a signal, is gone on with.
    ///
    /// # Errors
    /// Whatever is wrong with the source or the vocabulary, or a cache that cannot be written.
    pub fn prepare(source: &Source, options: &DataOptions) -> Result<Self, DataError> {
        if let Source::Path(path) = source
            && let Some((files, validation)) = token_files(path)?
        {
            return Self::from_ids(path, &files, validation, options);
        }
        Self::from_texts(&*source.texts()?, options)
    }

    /// [`Self::prepare`] of several sources with one vocabulary, mixed by weights: of the windows of training and of validation, each source
    /// has the part that its weight is of all weights. A vocabulary that is to be trained is trained on all that are text.
    ///
    /// # Errors
    /// As [`Self::prepare`]; weights that are none, and token ids of another vocabulary.
    pub fn prepare_mixture(sources: &[(Source, f64)], options: &DataOptions) -> Result<Self, DataError> {
        let options = DataOptions { vocabulary: shared_vocabulary(sources, options)?, ..options.clone() };
        let prepared = sources.iter().map(|(source, weight)| Ok((Self::prepare(source, &options)?, *weight)));
        Self::mixture(prepared.collect::<Result<_, DataError>>()?)
    }

    /// Several datasets of one vocabulary as one, mixed as [`Self::prepare_mixture`] does.
    ///
    /// # Errors
    /// [`DataError::Mixture`]: weights that are none, other vocabularies, nothing at all.
    pub fn mixture(parts: Vec<(Self, f64)>) -> Result<Self, DataError> {
        let fail = |why: String| Err(DataError::Mixture { why });
        if let Some((_, weight)) = parts.iter().find(|(_, weight)| !(*weight > 0.0 && weight.is_finite())) {
            return fail(format!("a weight of {weight}; it is above 0"));
        }
        let Some(vocabulary) = parts.first().map(|(first, _)| first.vocabulary.clone()) else {
            return fail("it has no source".into());
        };
        if parts.iter().any(|(part, _)| part.vocabulary.hash() != vocabulary.hash()) {
            return fail("its sources have different vocabularies; name one tokenizer for all".into());
        }
        let said: Vec<String> = parts.iter().map(|(part, weight)| format!("{weight} {}", part.hash)).collect();
        let of_part = |(dataset, weight): (Self, f64)| {
            let all: f64 = dataset.parts.iter().map(|part| part.weight).sum();
            dataset.parts.into_iter().map(move |part| Part { weight: weight * part.weight / all, ..part })
        };
        Ok(Self {
            vocabulary,
            parts: parts.into_iter().flat_map(of_part).collect(),
            hash: blake3::hash(said.join("\n").as_bytes()).to_hex().to_string(),
            corpus: None,
            folder: None,
        })
    }

    /// Tokenizes and splits a corpus, or takes what an earlier call kept.
    ///
    /// # Errors
    /// Whatever is wrong with the vocabulary, or a cache that cannot be written.
    pub fn from_corpus(corpus: &Corpus, options: &DataOptions) -> Result<Self, DataError> {
        Self::from_texts(corpus, options)
    }

    fn from_texts(texts: &dyn Texts, options: &DataOptions) -> Result<Self, DataError> {
        let report = texts.report();
        let (known, name) = match &options.vocabulary {
            VocabularyChoice::Bytes => (Some(Vocabulary::bytes()), "bytes".to_owned()),
            VocabularyChoice::Bpe { size } => (None, format!("bpe-{size}")),
            VocabularyChoice::File(path) => {
                let given = Vocabulary::open(path)?;
                let name = format!("given-{}", &given.hash()[..8]);
                (Some(given), name)
            }
        };
        // All that shapes the tokens is in the name: a folder that a run still needs is never made anew for another.
        let folder = options.cache.join(format!("{}-{name}-{}", &report.hash[..16], options.validation_every));
        match Self::open_prepared(&folder) {
            Ok(dataset) if dataset.corpus.as_ref().is_some_and(|kept| kept.hash == report.hash) => {
                tracing::debug!(folder = %folder.display(), "dataset prepared before");
                return Ok(Self { corpus: Some(report), ..dataset });
            }
            Err(error @ DataError::Damaged { .. }) => tracing::warn!(%error, "preparing the dataset again"),
            _ => tracing::info!(folder = %folder.display(), %report, "preparing the dataset"),
        }
        let vocabulary = match (known, &options.vocabulary) {
            (None, VocabularyChoice::Bpe { size }) => match begun_with(&folder.join(TOKENS), &report.hash) {
                // That of a preparation that was ended is not trained again.
                Some(hash) => Vocabulary::open(&folder.join(TOKENIZER)).ok().filter(|kept| kept.hash() == hash),
                None => None,
            }
            .map_or_else(|| Vocabulary::train(sample(texts)?.iter().map(String::as_str), *size), Ok)?,
            (known, _) => known.unwrap_or_else(Vocabulary::bytes),
        };
        Self::build(texts, &vocabulary, options.validation_every, &folder)
    }

    /// Opens a folder that [`Dataset::prepare`] made, whatever has become of its source since: a run that resumes opens
    /// the folder it started with.
    ///
    /// # Errors
    /// A folder that is missing or damaged.
    pub fn open_prepared(folder: &Path) -> Result<Self, DataError> {
        let damaged = |reason: String| DataError::Damaged { path: folder.to_owned(), reason };
        let path = folder.join(MANIFEST);
        let json = fs::read(&path).map_err(|error| DataError::read(&path, error))?;
        let manifest: Manifest =
            serde_json::from_slice(&json).map_err(|error| damaged(format!("{MANIFEST}: {error}")))?;

        let bytes = Vocabulary::bytes();
        let vocabulary = if manifest.vocabulary_hash == bytes.hash() {
            bytes
        } else {
            Vocabulary::open(&folder.join(TOKENIZER)).map_err(|error| damaged(error.to_string()))?
        };
        if vocabulary.hash() != manifest.vocabulary_hash {
            return Err(damaged(format!("{TOKENIZER} is not the one that made the tokens")));
        }
        let tokens =
            Tokens::open_bare(&folder.join(TOKENS), manifest.width).map_err(|error| damaged(error.to_string()))?;
        let scan = tokens.scan(vocabulary.size())?;
        let count = manifest.training_tokens.checked_add(manifest.validation_tokens);
        if scan.hash != manifest.tokens_hash || scan.outside.is_some() || count != Some(tokens.count()) {
            return Err(damaged(format!("{TOKENS} has changed")));
        }
        let dataset = Self::new(vocabulary, tokens, manifest.validation_tokens, &scan.hash);
        Ok(Self { corpus: Some(manifest.corpus), folder: Some(folder.to_owned()), ..dataset })
    }

    /// Token ids that are in memory already; the last n-th is validation.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn from_tokens(ids: Vec<u32>, vocabulary: Vocabulary, validation_every: usize) -> Result<Self, DataError> {
        let validation = last_part(ids.len() as u64, validation_every);
        Self::from_stream(Tokens::from_ids(ids), vocabulary, validation, Path::new("tokens in memory"))
    }

    /// Reads examples of answers, every n-th of them for validation, and tokenizes them in memory. Of a tokenizer's file, the folder
    /// around it says which special tokens there are and how conversations are written.
    ///
    /// # Errors
    /// Lines that are no examples; whatever is wrong with the vocabulary; conversations without a template, or that it refuses.
    pub fn examples(path: &Path, format: Format, options: &DataOptions) -> Result<Self, DataError> {
        let lines = read_lines(path, format)?;
        let vocabulary = match &options.vocabulary {
            VocabularyChoice::File(file) => Vocabulary::open(file)?,
            VocabularyChoice::Bytes => Vocabulary::bytes(),
            VocabularyChoice::Bpe { size } => Vocabulary::train(lines.iter().map(Line::text), *size)?,
        };
        let folder = match &options.vocabulary {
            VocabularyChoice::File(file) => file.parent().map(Tokenizer::open).transpose()?,
            _ => None,
        };
        if format == Format::Chat && folder.as_ref().and_then(Tokenizer::chat_template).is_none() {
            return Err(DataError::NoTemplate { path: path.to_owned() });
        }
        // Those for validation come last.
        let every = options.validation_every;
        let is_validation = |index: usize| every > 0 && index % every.max(2) == every.max(2) - 1;
        let encoded = encode_lines(path, &lines, &vocabulary, folder.as_ref())?.into_iter().enumerate();
        let (back, mut front): (Vec<_>, Vec<_>) = encoded.partition(|(index, _)| is_validation(*index));
        let validation = back.iter().map(|(_, (tokens, _))| tokens.len() as u64).sum();
        front.extend(back);
        let (tokens, examples) = Examples::new(front.into_iter().map(|(_, example)| example).collect());
        let tokens = Tokens::from_ids(tokens);
        let hash = format!("{} {}", tokens.scan(vocabulary.size())?.hash, examples.hash());
        let mut dataset = Self::new(vocabulary, tokens, validation, &hash);
        dataset.parts[0].examples = Some(Arc::new(examples));
        Ok(dataset)
    }

    /// The vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// What text was read; nothing for bare tokens and mixtures.
    pub fn corpus(&self) -> Option<&CorpusReport> {
        self.corpus.as_ref()
    }

    /// The folder that the tokenizer and the tokens are kept in; nothing for bare tokens and mixtures.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Tokens for training.
    pub fn training_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.training.end - part.training.start).sum()
    }

    /// Tokens for validation.
    pub fn validation_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.validation.end - part.validation.start).sum()
    }

    /// blake3 of the vocabulary, the tokens and the split, in hexadecimal: the same hash gives the same batches.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The batches of a training run.
    ///
    /// # Errors
    /// Data shorter than one window; a size of zero.
    pub fn training(&self, sequence: usize, batch: usize, seed: u64) -> Result<TrainingWindows, DataError> {
        let cut = |part: &Part| Ok((self.cut(part, &part.training, sequence, "training")?, part.weight));
        TrainingWindows::of(self.parts.iter().map(cut).collect::<Result<_, DataError>>()?, batch, seed)
    }

    /// At most `count` windows to evaluate on; nothing when there is no validation part.
    ///
    /// # Errors
    /// Data shorter than one window; a size of zero.
    pub fn validation(&self, sequence: usize, count: usize) -> Result<Option<ValidationWindows>, DataError> {
        let there = self.parts.iter().filter(|part| !part.validation.is_empty());
        let cut = |part: &Part| Ok((self.cut(part, &part.validation, sequence, "validation")?, part.weight));
        let cuts = there.map(cut).collect::<Result<Vec<_>, DataError>>()?;
        if cuts.is_empty() { Ok(None) } else { ValidationWindows::of(cuts, count).map(Some) }
    }

    /// A part of it in windows: of whole examples, or of a stream.
    fn cut(&self, part: &Part, range: &Range<u64>, sequence: usize, name: &'static str) -> Result<Cut, DataError> {
        let (tokens, range) = (part.tokens.clone(), range.clone());
        match &part.examples {
            Some(examples) => Cut::of_examples(tokens, range, examples.clone(), sequence, name),
            None => Cut::new(tokens, range, self.vocabulary.end_of_text(), sequence, name),
        }
    }

    /// Files of ids, with the tokenizer beside them, the one that was chosen, or none. The last `validation` files are validation;
    /// if none is, the last n-th of the tokens.
    fn from_ids(path: &Path, files: &[PathBuf], validation: usize, options: &DataOptions) -> Result<Self, DataError> {
        let beside = if path.is_dir() { path.join(TOKENIZER) } else { path.with_file_name(TOKENIZER) };
        let vocabulary = match &options.vocabulary {
            VocabularyChoice::File(tokenizer) => Vocabulary::open(tokenizer)?,
            VocabularyChoice::Bytes => Vocabulary::bytes(),
            VocabularyChoice::Bpe { .. } if beside.exists() => Vocabulary::open(&beside)?,
            VocabularyChoice::Bpe { size } => Vocabulary::ids(*size),
        };
        let width = TokenWidth::of_vocabulary(vocabulary.size());
        let tokens = Tokens::open_all(files, width)?;
        let validation = match validation {
            0 => last_part(tokens.count(), options.validation_every),
            _ if options.validation_every == 0 => 0,
            files_of_it => Tokens::open_all(&files[files.len() - files_of_it..], width)?.count(),
        };
        Self::from_stream(tokens, vocabulary, validation, path)
    }

    fn from_stream(tokens: Tokens, vocabulary: Vocabulary, validation: u64, path: &Path) -> Result<Self, DataError> {
        if tokens.count() == 0 {
            return Err(DataError::Empty { path: path.to_owned(), skipped: 0, others: Vec::new() });
        }
        let scan = tokens.scan(vocabulary.size())?;
        if let Some((position, token)) = scan.outside {
            let ((path, position), vocabulary) = (tokens.place(position), vocabulary.size());
            let path = path.to_owned();
            return Err(DataError::TokenOutside { path, position, token, vocabulary });
        }
        Ok(Self::new(vocabulary, tokens, validation, &scan.hash))
    }

    fn new(vocabulary: Vocabulary, tokens: Tokens, validation: u64, tokens_hash: &str) -> Self {
        let training = 0..tokens.count() - validation;
        let hash = blake3::hash(format!("{} {tokens_hash} {training:?}", vocabulary.hash()).as_bytes());
        let validation = training.end..tokens.count();
        let part = Part { tokens: Arc::new(tokens), training, validation, examples: None, weight: 1.0 };
        let hash = hash.to_hex().to_string();
        Self { vocabulary, parts: vec![part], hash, corpus: None, folder: None }
    }

    /// Writes a dataset's folder, manifest last, and opens it.
    fn build(texts: &dyn Texts, vocabulary: &Vocabulary, every: usize, folder: &Path) -> Result<Self, DataError> {
        fs::create_dir_all(folder).map_err(DataError::write(folder))?;
        let tokenizer = folder.join(TOKENIZER);
        vocabulary.save(&tokenizer.with_extension("json.tmp"))?;
        move_into_place(&tokenizer)?;

        let corpus = texts.report();
        let by_document = every > 0 && corpus.documents >= every.max(2);
        let every_nth = every.max(2) as u64;
        let is_validation = |document: u64| by_document && document % every_nth == every_nth - 1;
        let parts = tokenize(texts, vocabulary, &is_validation, &folder.join(TOKENS))?;
        let validation_tokens = if by_document { parts.validation_tokens } else { last_part(parts.all.tokens, every) };
        let manifest = Manifest {
            corpus,
            vocabulary_hash: vocabulary.hash(),
            width: TokenWidth::of_vocabulary(vocabulary.size()),
            training_tokens: parts.all.tokens - validation_tokens,
            validation_tokens,
            tokens_hash: parts.all.hash,
        };
        let path = folder.join(MANIFEST);
        let json = serde_json::to_vec_pretty(&manifest).expect("a manifest of strings and numbers is valid JSON");
        fs::write(path.with_extension("json.tmp"), json).map_err(DataError::write(&path))?;
        move_into_place(&path)?;
        Self::open_prepared(folder)
    }
}

impl Source {
    /// Its documents, if it is no file of ids.
    fn texts(&self) -> Result<Box<dyn Texts>, DataError> {
        Ok(match self {
            Self::RustSources(sources) => Box::new(Corpus::rust_sources(sources)?),
            Self::Path(path) => Box::new(TextFiles::open(path)?),
        })
    }

    fn is_text(&self) -> Result<bool, DataError> {
        match self {
            Self::RustSources(_) => Ok(true),
            Self::Path(path) => Ok(token_files(path)?.is_none()),
        }
    }
}

/// The vocabulary of a mixture: the one that was chosen, or one that is trained on all of its texts and kept in the cache.
fn shared_vocabulary(sources: &[(Source, f64)], options: &DataOptions) -> Result<VocabularyChoice, DataError> {
    let VocabularyChoice::Bpe { size } = options.vocabulary else { return Ok(options.vocabulary.clone()) };
    let mut texts = Vec::new();
    for (source, _) in sources {
        if source.is_text()? {
            texts.push(source.texts()?);
        }
    }
    if texts.is_empty() {
        return Ok(options.vocabulary.clone());
    }
    let mut hasher = blake3::Hasher::new();
    texts.iter().for_each(|texts| _ = hasher.update(texts.report().hash.as_bytes()));
    let folder = options.cache.join(format!("{}-bpe-{size}", &hasher.finalize().to_hex()[..16]));
    let tokenizer = folder.join(TOKENIZER);
    if !tokenizer.exists() {
        let mut pieces = Vec::new();
        for texts in texts {
            pieces.extend(sample(&*texts)?);
        }
        fs::create_dir_all(&folder).map_err(DataError::write(&folder))?;
        Vocabulary::train(pieces.iter().map(String::as_str), size)?.save(&tokenizer.with_extension("json.tmp"))?;
        move_into_place(&tokenizer)?;
    }
    Ok(VocabularyChoice::File(tokenizer))
}

/// How many of `tokens` the last n-th is.
fn last_part(tokens: u64, every: usize) -> u64 {
    if every == 0 { 0 } else { tokens / (every as u64).max(2) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents that tell themselves apart by their letter.
    fn lettered(count: usize) -> Corpus {
        Corpus::from_texts((0..count).map(|index| char::from(b'a' + index as u8).to_string().repeat(20)))
    }

    fn options(folder: &Path, vocabulary: VocabularyChoice, validation_every: usize) -> DataOptions {
        DataOptions { vocabulary, validation_every, cache: folder.join("cache") }
    }

    /// All tokens of a part, as text.
    fn text_of(dataset: &Dataset, range: &Range<u64>) -> String {
        let mut ids = vec![0; (range.end - range.start) as usize];
        dataset.parts[0].tokens.read(range.start, &mut ids).unwrap();
        dataset.vocabulary.decode(&ids).unwrap()
    }

    #[test]
    fn every_nth_document_or_the_tail_is_validation() {
        let folder = tempfile::tempdir().unwrap();
        let check = |documents, every, letters: &str, tokens| {
            let options = options(folder.path(), VocabularyChoice::Bytes, every);
            let dataset = Dataset::from_corpus(&lettered(documents), &options).unwrap();
            let mut text =
                text_of(&dataset, &dataset.parts[0].validation).replace('\0', "").chars().collect::<Vec<_>>();
            text.dedup();
            assert_eq!((text.into_iter().collect::<String>().as_str(), dataset.validation_tokens()), (letters, tokens));
            assert_eq!(dataset.training_tokens() + tokens, 21 * documents as u64);
        };
        check(7, 3, "cf", 42);
        check(3, 3, "c", 21);
        check(2, 3, "b", 14);
        check(1, 10, "a", 2);
        check(5, 0, "", 0);
        check(4, 1, "bd", 42);
    }

    #[test]
    fn what_is_kept_is_used_and_what_is_damaged_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let corpus = lettered(9);
        let options = options(folder.path(), VocabularyChoice::Bpe { size: 280 }, 4);
        let first = Dataset::from_corpus(&corpus, &options).unwrap();
        let kept = first.folder().unwrap().to_owned();
        let modified = |name: &str| fs::metadata(kept.join(name)).unwrap().modified().unwrap();
        let before = (modified(TOKENS), modified(MANIFEST));
        let again = Dataset::from_corpus(&corpus, &options).unwrap();
        assert_eq!(again.hash(), first.hash());
        assert_eq!((modified(TOKENS), modified(MANIFEST)), before);

        for name in [TOKENIZER, TOKENS, MANIFEST] {
            let path = kept.join(name);
            let whole = fs::read(&path).unwrap();
            let mut flipped = whole.clone();
            flipped[whole.len() / 2] ^= 1;
            let shorter = &whole[..whole.len() - 2];
            for damaged in [flipped.as_slice(), shorter, b""] {
                fs::write(&path, damaged).unwrap();
                let error = Dataset::open_prepared(&kept).err().map(|error| error.to_string());
                // A flip in the manifest may hit what is only told, like the number of files.
                assert!(name == MANIFEST || error.is_some_and(|error| error.contains("is damaged")), "{name}");
                assert_eq!(Dataset::from_corpus(&corpus, &options).unwrap().hash(), first.hash(), "{name}");
                assert_eq!(Dataset::open_prepared(&kept).unwrap().hash(), first.hash());
            }
        }
        let split_otherwise = DataOptions { validation_every: 3, ..options };
        let other = Dataset::from_corpus(&corpus, &split_otherwise).unwrap();
        assert_ne!(other.hash(), first.hash());
        assert_eq!(other.vocabulary().hash(), first.vocabulary().hash());
        assert_eq!(Dataset::open_prepared(&kept).unwrap().hash(), first.hash(), "the other has a folder of its own");
    }

    #[test]
    fn token_ids_and_their_vocabulary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ids.bin");
        let prepare = |ids: &[u16], vocabulary| {
            fs::write(&path, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            Dataset::prepare(&Source::Path(path.clone()), &options(folder.path(), vocabulary, 10))
        };
        let ids: Vec<u16> = (0..300).collect();
        let bare = prepare(&ids, VocabularyChoice::Bpe { size: 300 }).unwrap();
        assert_eq!((bare.training_tokens(), bare.validation_tokens(), bare.vocabulary().size()), (270, 30, 300));
        assert_eq!(text_of(&bare, &(298..300)), "298 299");

        let message = |result: Result<Dataset, DataError>| result.unwrap_err().to_string();
        let outside = message(prepare(&ids, VocabularyChoice::Bpe { size: 299 }));
        assert!(outside.contains("token 299 at position 299 is outside the vocabulary of 299"), "{outside}");
        assert!(message(prepare(&ids, VocabularyChoice::Bytes)).contains("token 256 at position 256"));
        assert!(message(prepare(&[], VocabularyChoice::Bytes)).contains("no text in"));

        let trained = Vocabulary::train(["some text"].into_iter(), 260).unwrap();
        trained.save(&folder.path().join(TOKENIZER)).unwrap();
        assert!(message(prepare(&ids, VocabularyChoice::Bpe { size: 4096 })).contains("outside the vocabulary"));
        let beside = prepare(&ids[..200], VocabularyChoice::Bpe { size: 4096 }).unwrap();
        assert_eq!(beside.vocabulary().hash(), trained.hash());
    }

    #[test]
    fn a_folder_of_token_ids_is_one_stream() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, ids: Range<u16>| {
            fs::write(folder.path().join(name), ids.flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
        };
        let prepare = |size| {
            let options = options(&folder.path().join(".cache"), VocabularyChoice::Bpe { size }, 10);
            Dataset::prepare(&Source::Path(folder.path().to_owned()), &options)
        };
        write("some_train_000002.bin", 100..150);
        write("some_train_000001.bin", 0..100);
        let all = prepare(200).unwrap();
        assert_eq!(
            (all.training_tokens(), all.validation_tokens(), text_of(&all, &(99..101))),
            (135, 15, "99 100".into())
        );
        write("some_val_000000.bin", 150..180);
        let split = prepare(200).unwrap();
        assert_eq!((split.training_tokens(), split.validation_tokens()), (150, 30));
        let error = prepare(120).unwrap_err().to_string();
        assert!(error.contains("some_train_000002.bin: token 120 at position 20 is outside"), "{error}");
        fs::write(folder.path().join("notes.txt"), "text goes first").unwrap();
        assert!(prepare(300).unwrap().corpus().is_some());
    }

    #[test]
    fn a_given_tokenizer_is_kept_with_the_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let given = folder.path().join("given.json");
        let prepare = |text: &str| {
            Vocabulary::train([text].into_iter(), 265).unwrap().save(&given).unwrap();
            let options = options(folder.path(), VocabularyChoice::File(given.clone()), 0);
            Dataset::from_corpus(&lettered(3), &options).unwrap()
        };
        let (one, other) = (prepare("aaaa aaaa"), prepare("bbbb bbbb"));
        assert_ne!(one.hash(), other.hash());
        assert_eq!(Dataset::open_prepared(other.folder().unwrap()).unwrap().hash(), other.hash());
        assert!(other.validation(4, 1).unwrap().is_none());
        assert!(matches!(other.training(1000, 1, 0), Err(DataError::TooShort { .. })));
    }
}
