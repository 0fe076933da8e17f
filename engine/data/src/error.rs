//! The errors of reading and preparing data.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why data could not be read, tokenized or cut into batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The path does not exist.
    #[error("{path} does not exist; check the path of the data")]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused a read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file that was read.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The text changed between two readings.
    #[error("the text changed while it was tokenized into {path}; run again when no program writes it")]
    Changed {
        /// The file of tokens that was being written.
        path: PathBuf,
    },
    /// A stretch of text without a place to cut is too long.
    #[error("{path} has no line break within {} MiB; break its lines", most >> 20)]
    NoBreak {
        /// The file.
        path: PathBuf,
        /// The most bytes that are allowed between two places to cut.
        most: u64,
    },
    /// A compressed file cannot be decompressed.
    #[error(
        "cannot decompress {path}: {source}; check that it is not damaged, and compressed in the format of its extension"
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The decompressor's error.
        source: io::Error,
    },
    /// The operating system refused a write.
    #[error("cannot write {path}: {source}; check that the disk has room and the cache folder is writable")]
    Write {
        /// The file that was written.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A file given as text is not text.
    #[error(
        "{path} is not text: {reason}; give UTF-8 text, .jsonl or .parquet with a \"text\" field, or token ids as .bin"
    )]
    Binary {
        /// The file.
        path: PathBuf,
        /// The offending byte.
        reason: String,
    },
    /// A line of a .jsonl file is not an object with a text.
    #[error("{path}, line {line}: {reason}; make each line a JSON object with a string field \"text\"")]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The error in the line.
        reason: String,
    },
    /// A Parquet file cannot be read.
    #[error(
        "cannot read {path}: {reason}; give a .parquet file with a column \"text\" or those of data.format, to a build with the feature \"parquet\""
    )]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The error in the file.
        reason: String,
    },
    /// A line of a .jsonl file is not an example of the chosen format.
    #[error(
        "{path}, line {line}: {reason}; with the format \"prompt\" a line has the strings \"prompt\" and \"completion\", with \"chat\" \
         \"messages\", a list of objects with \"role\" and \"content\""
    )]
    Example {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The error in the line.
        reason: String,
    },
    /// A file contains no example.
    #[error("{path} has no example; give a .jsonl or .parquet file with one on each line")]
    NoExamples {
        /// The file.
        path: PathBuf,
    },
    /// No example has an answer before the end of its sequence.
    #[error("no {part} example has an answer within {sequence} tokens; give longer sequences, or more examples")]
    NoAnswers {
        /// The part of the data: `training` or `validation`.
        part: &'static str,
        /// Tokens in a window.
        sequence: usize,
    },
    /// There are conversations but no chat template to format them.
    #[error(
        "there is no chat template for the conversations of {path}; give a tokenizer.json from a folder with a chat_template.jinja, \
         or with a template in its tokenizer_config.json"
    )]
    NoTemplate {
        /// The file of conversations.
        path: PathBuf,
    },
    /// Windows per document were requested, but the vocabulary has no end-of-text token.
    #[error(
        "documents in token ids (.bin) cannot be separated without the id of the end of text; put their tokenizer.json beside the .bin"
    )]
    NoDocuments,
    /// The sources cannot be mixed.
    #[error("data.mix: {why}")]
    Mixture {
        /// The reason.
        why: String,
    },
    /// There is no text, or no token, at all.
    #[error(
        "no text in {path} ({skipped} files skipped{}); .txt, .rs, .md, .jsonl, .ndjson, .json and .parquet files are read, all but .parquet also as .gz or .zst",
        named(others)
    )]
    Empty {
        /// The file or folder.
        path: PathBuf,
        /// Number of files that were found, but were binary or not UTF-8.
        skipped: usize,
        /// Some of the files that were found, but whose types are not read.
        others: Vec<PathBuf>,
    },
    /// The lock file cannot be parsed.
    #[error("cannot read the packages of {path}: {reason}; give the Cargo.lock of a workspace that was built here")]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The parser's error.
        reason: String,
    },
    /// A part of the data is shorter than one window.
    #[error(
        "the {part} data has {tokens} tokens, but one window of {sequence} tokens and its targets needs {needed}; \
         give more data or a shorter sequence{}", if *part == "validation" { ", or a larger share for validation" } else { "" }
    )]
    TooShort {
        /// The part of the data: `training` or `validation`.
        part: &'static str,
        /// Tokens of this part.
        tokens: u64,
        /// Tokens in a window.
        sequence: usize,
        /// Tokens that are required.
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
    /// The ids of a .bin file seem to be wider than the width with which they are read.
    #[error(
        "{path} seems to have token ids of {bytes} bytes: read as ids of {read_as} bytes, every second one is almost 0; set data.token_width or \
         --token-width to their width, \"u16\", \"u32\" or \"u64\""
    )]
    Width {
        /// The file or folder.
        path: PathBuf,
        /// Bytes per id as it would be read.
        read_as: u64,
        /// Bytes per id as they appear to be.
        bytes: u64,
    },
    /// A .bin file's llm.c header does not match the file.
    #[error("{path} is not a token file of llm.c: {reason}; check that it is complete and written by llm.c")]
    Header {
        /// The file.
        path: PathBuf,
        /// The mismatch.
        reason: String,
    },
    /// A token is outside the vocabulary.
    #[error(
        "{path}: token {token} at position {position} is outside the vocabulary of {vocabulary}; \
         give the tokenizer that made the file, or set the vocabulary's size"
    )]
    TokenOutside {
        /// The file.
        path: PathBuf,
        /// The token's position in the file.
        position: u64,
        /// The token.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// The requested vocabulary is too small. A byte-level vocabulary must contain every byte and the end-of-text
    /// token.
    #[error(
        "a vocabulary of {size} is too small for byte-level BPE; take at least {least}, or the byte vocabulary (256)"
    )]
    VocabularyTooSmall {
        /// The size asked for.
        size: usize,
        /// The smallest size that is possible.
        least: usize,
    },
    /// The model's embedding and the tokenizer have different vocabulary sizes.
    #[error(
        "the model has a vocabulary of {model} tokens, the tokenizer one of {tokenizer}; \
         build the model with {tokenizer}, or give the tokenizer that it was trained with"
    )]
    VocabularyMismatch {
        /// Rows of the model's embedding.
        model: usize,
        /// Tokens of the tokenizer's vocabulary.
        tokenizer: usize,
    },
    /// The tokenizer does not have the token that was requested as its end-of-text token.
    #[error("{path} has no token {token:?}, which data.end_of_text names; name one of its tokens")]
    NoToken {
        /// The tokenizer's file.
        path: PathBuf,
        /// The token's text.
        token: String,
    },
    /// No file and no option names the token that ends a document, and no token of the tokenizer has one of the usual
    /// names.
    #[error(
        "the token of {path} that ends a text is unknown: the files beside it name none, and no token has a usual name such as \
         {wanted}; name one in data.end_of_text"
    )]
    NoEndOfText {
        /// The tokenizer's file.
        path: PathBuf,
        /// The usual name that is tried first.
        wanted: &'static str,
    },
    /// A chat template cannot be parsed, or rejects a conversation.
    #[error("chat template in {path}: {reason}")]
    Template {
        /// The template's file.
        path: PathBuf,
        /// The error, and its line in the template.
        reason: String,
    },
    /// There is text to encode, but the vocabulary is that of token ids without their tokenizer.
    #[error(
        "there is no tokenizer to encode text with; put the tokenizer.json of the ids beside the .bin, or into the model's folder"
    )]
    NoTokenizer,
    /// The tokenizers library failed.
    #[error("cannot use the tokenizer {path}: {reason}")]
    Tokenizer {
        /// The tokenizer's file, or the operation.
        path: PathBuf,
        /// The library's error.
        reason: String,
    },
    /// A prepared dataset is incomplete or damaged.
    #[error("the prepared dataset in {path} is damaged: {reason}; delete the folder and prepare it again")]
    Damaged {
        /// The dataset's folder.
        path: PathBuf,
        /// The mismatch.
        reason: String,
    },
    /// The slices do not hold whole windows, or the requested windows extend past the last window.
    #[error(
        "{inputs} inputs and {targets} targets from window {first} on are not whole windows of {sequence} tokens \
         within {windows} windows"
    )]
    Slices {
        /// Length of the slice of inputs.
        inputs: usize,
        /// Length of the slice of targets.
        targets: usize,
        /// The first window requested.
        first: usize,
        /// Tokens in a window.
        sequence: usize,
        /// Number of windows that exist.
        windows: usize,
    },
    /// A size that must be at least one is zero.
    #[error("{what} is 0; set it to at least 1")]
    Zero {
        /// Name of the size.
        what: &'static str,
    },
}

fn named(others: &[PathBuf]) -> String {
    let names: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
    if names.is_empty() { String::new() } else { format!(", and files of other types, such as {}", names.join(", ")) }
}

impl DataError {
    /// Turns a read error into a [`DataError`]. If the file does not exist, that is [`Self::Missing`].
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path: path.to_owned() },
            _ => Self::Read { path: path.to_owned(), source },
        }
    }

    /// Wraps a write error, for `map_err`.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }
}
