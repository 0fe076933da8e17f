//! What can be wrong with data, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why data could not be read, tokenized or cut into batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Nothing is at the path.
    #[error("{path} does not exist; check the path of the data")]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused a read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Text that was not the same when it was read again.
    #[error("the text changed while it was tokenized into {path}; run again when no program writes it")]
    Changed {
        /// The tokens that were to be kept.
        path: PathBuf,
    },
    /// A text that goes on for too long without a place at which it may be cut.
    #[error("{path} has no line break within {} MiB; break its lines", most >> 20)]
    NoBreak {
        /// The file.
        path: PathBuf,
        /// Bytes, at most.
        most: u64,
    },
    /// A file that is not what it was compressed to.
    #[error(
        "cannot decompress {path}: {source}; check that it is not damaged, and compressed in the format of its extension"
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// What the decompressor said.
        source: io::Error,
    },
    /// The operating system refused a write.
    #[error("cannot write {path}: {source}; check that the disk has room and the cache folder is writable")]
    Write {
        /// What was written.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file given as text is not text.
    #[error(
        "{path} is not text: {reason}; give UTF-8 text, .jsonl or .parquet with a \"text\" field, or token ids as .bin"
    )]
    Binary {
        /// The file.
        path: PathBuf,
        /// Which byte gave it away.
        reason: String,
    },
    /// A line of a .jsonl file is not an object with a text.
    #[error("{path}, line {line}: {reason}; make each line a JSON object with a string field \"text\"")]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A Parquet file that cannot be read.
    #[error(
        "cannot read {path}: {reason}; give a .parquet file with a column \"text\" or those of data.format, to a build with the feature \"parquet\""
    )]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A line of a .jsonl file is no example of the format.
    #[error(
        "{path}, line {line}: {reason}; with the format \"prompt\" a line has the strings \"prompt\" and \"completion\", with \"chat\" \
         \"messages\", a list of objects with \"role\" and \"content\""
    )]
    Example {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A file without an example.
    #[error("{path} has no example; give a .jsonl or .parquet file with one on each line")]
    NoExamples {
        /// The file.
        path: PathBuf,
    },
    /// Examples whose answers all stand behind the end of a sequence, or that have none.
    #[error("no {part} example has an answer within {sequence} tokens; give longer sequences, or more examples")]
    NoAnswers {
        /// `training` or `validation`.
        part: &'static str,
        /// Tokens in a window.
        sequence: usize,
    },
    /// Conversations, but nothing that says how they are written.
    #[error(
        "there is no chat template for the conversations of {path}; give a tokenizer.json from a folder with a chat_template.jinja, \
         or with a template in its tokenizer_config.json"
    )]
    NoTemplate {
        /// The file of conversations.
        path: PathBuf,
    },
    /// Windows of documents that nothing tells apart.
    #[error(
        "documents in token ids (.bin) cannot be separated without the id of the end of text; put their tokenizer.json beside the .bin"
    )]
    NoDocuments,
    /// Sources that cannot be mixed.
    #[error("data.mix: {why}")]
    Mixture {
        /// Why not.
        why: String,
    },
    /// There is no text (or no token) at all.
    #[error(
        "no text in {path} ({skipped} files skipped{}); .txt, .rs, .md, .jsonl, .ndjson, .json and .parquet files are read, all but .parquet also as .gz or .zst",
        named(others)
    )]
    Empty {
        /// The file or folder.
        path: PathBuf,
        /// Files that were there, but were binary or not UTF-8.
        skipped: usize,
        /// Some files that were there, but of types that are not read.
        others: Vec<PathBuf>,
    },
    /// The lock file is not one.
    #[error("cannot read the packages of {path}: {reason}; give the Cargo.lock of a workspace that was built here")]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// A part of the data is shorter than one window.
    #[error(
        "the {part} data has {tokens} tokens, but one window of {sequence} tokens and its targets needs {needed}; \
         give more data or a shorter sequence{}", if *part == "validation" { ", or a larger share for validation" } else { "" }
    )]
    TooShort {
        /// `training` or `validation`.
        part: &'static str,
        /// Tokens that there are.
        tokens: u64,
        /// Tokens in a window.
        sequence: usize,
        /// Tokens that there have to be.
        needed: u64,
    },
    /// A .bin file whose length is not a whole number of tokens.
    #[error(
        "{path} has {bytes} bytes, not a whole number of {width}-byte token ids; check that it is complete, and data.token_width"
    )]
    CutOff {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// Bytes per token.
        width: u64,
    },
    /// A .bin file whose ids seem to be wider than they are read.
    #[error(
        "{path} seems to have token ids of {bytes} bytes: read as ids of {read_as} bytes, every second one is almost 0; set data.token_width or \
         --token-width to their width, \"u16\", \"u32\" or \"u64\""
    )]
    Width {
        /// The file or folder.
        path: PathBuf,
        /// Bytes of an id as it would be read.
        read_as: u64,
        /// Bytes of an id as the file seems to have them.
        bytes: u64,
    },
    /// A .bin file with a header of llm.c that does not fit the file.
    #[error("{path} is not a token file of llm.c: {reason}; check that it is complete and written by llm.c")]
    Header {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A token that the vocabulary doesn't have.
    #[error(
        "{path}: token {token} at position {position} is outside the vocabulary of {vocabulary}; \
         give the tokenizer that made the file, or set the vocabulary's size"
    )]
    TokenOutside {
        /// The file.
        path: PathBuf,
        /// The token's index in the file.
        position: u64,
        /// The token.
        token: u32,
        /// How many tokens the vocabulary has.
        vocabulary: usize,
    },
    /// A byte-level vocabulary has to hold every byte and the end of text.
    #[error(
        "a vocabulary of {size} is too small for byte-level BPE; take at least {least}, or the byte vocabulary (256)"
    )]
    VocabularyTooSmall {
        /// The size asked for.
        size: usize,
        /// The smallest that works.
        least: usize,
    },
    /// The model's embedding and the tokenizer disagree.
    #[error(
        "the model has a vocabulary of {model} tokens, the tokenizer one of {tokenizer}; \
         build the model with {tokenizer}, or give the tokenizer that it was trained with"
    )]
    VocabularyMismatch {
        /// Rows of the model's embedding.
        model: usize,
        /// Tokens that the tokenizer can make.
        tokenizer: usize,
    },
    /// A token that is asked for and that the tokenizer does not have.
    #[error("{path} has no token {token:?}, which data.end_of_text names; name one of its tokens")]
    NoToken {
        /// The tokenizer's file.
        path: PathBuf,
        /// The token's text.
        token: String,
    },
    /// A tokenizer without a token to put between documents.
    #[error(
        "the token of {path} that ends a text is unknown: the files beside it name none, and no token has a usual name such as \
         {wanted}; name one in data.end_of_text"
    )]
    NoEndOfText {
        /// The tokenizer's file.
        path: PathBuf,
        /// The name that is looked for first.
        wanted: &'static str,
    },
    /// A chat template that cannot be read, or a conversation that it does not take.
    #[error("chat template in {path}: {reason}")]
    Template {
        /// The template's file.
        path: PathBuf,
        /// What is wrong, and in which line of the template.
        reason: String,
    },
    /// Text, and ids without the tokenizer that made them.
    #[error(
        "there is no tokenizer to encode text with; put the tokenizer.json of the ids beside the .bin, or into the model's folder"
    )]
    NoTokenizer,
    /// The tokenizers library refused.
    #[error("cannot use the tokenizer {path}: {reason}")]
    Tokenizer {
        /// The tokenizer's file, or what was done.
        path: PathBuf,
        /// What the library said.
        reason: String,
    },
    /// A prepared dataset is not whole.
    #[error("the prepared dataset in {path} is damaged: {reason}; delete the folder and prepare it again")]
    Damaged {
        /// The dataset's folder.
        path: PathBuf,
        /// What does not match.
        reason: String,
    },
    /// Slices that don't hold whole windows, or windows past the batch.
    #[error(
        "{inputs} inputs and {targets} targets from window {first} on are not whole windows of {sequence} tokens \
         within {windows} windows"
    )]
    Slices {
        /// Length of the slice of inputs.
        inputs: usize,
        /// Length of the slice of targets.
        targets: usize,
        /// The first window asked for.
        first: usize,
        /// Tokens in a window.
        sequence: usize,
        /// Windows that there are.
        windows: usize,
    },
    /// A size that has to be at least one is zero.
    #[error("{what} is 0; set it to at least 1")]
    Zero {
        /// Which one.
        what: &'static str,
    },
}

fn named(others: &[PathBuf]) -> String {
    let names: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
    if names.is_empty() { String::new() } else { format!(", and files of other types, such as {}", names.join(", ")) }
}

impl DataError {
    /// Wraps an error of a read, a missing file apart from the rest.
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path: path.to_owned() },
            _ => Self::Read { path: path.to_owned(), source },
        }
    }

    /// For `map_err` on a write.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }
}
