//! From corpora to batches of tokens.
//!
//! In: text (a file, a folder, compressed or not, or the Rust sources of the locked dependencies) or a file of token
//! ids. Out: windows of `sequence` inputs and as many next-token targets, written into the caller's slices. Text is
//! tokenized once and kept on disk. Training reads windows from that file, so that the corpus need not fit in memory,
//! and a step allocates nothing.
//!
//! ```text
//! Source ──▶ Corpus ──▶ Vocabulary ──▶ tokens.bin ──▶ Dataset ──▶ TrainingWindows::fill(step, …)
//!            documents  tokenizer.json  [train│valid.]         └──▶ ValidationWindows::fill(first, …)
//! ```
//!
//! ```
//! use gapless_data::{DataOptions, Dataset, Source, VocabularyChoice};
//!
//! # let folder = tempfile::tempdir()?;
//! # let file = folder.path().join("poem.txt");
//! std::fs::write(&file, "the quick brown fox jumps over the lazy dog\n".repeat(100))?;
//! let options = DataOptions {
//!     vocabulary: VocabularyChoice::Bytes,
//!     cache: folder.path().join("cache"),
//!     ..DataOptions::default()
//! };
//! let dataset = Dataset::prepare(&Source::Path(file), &options)?;
//!
//! let (sequence, batch, seed) = (16, 4, 42);
//! let training = dataset.training(sequence, batch, seed)?;
//! let (mut inputs, mut targets) = (vec![0; batch * sequence], vec![0; batch * sequence]);
//! training.fill(7, 0, &mut inputs, &mut targets)?; // the batch of step 7: always the same one
//! assert_eq!(inputs[1..sequence], targets[..sequence - 1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// Target of a token that does not count in the loss.
pub const IGNORED: u32 = u32::MAX;

mod chat;
mod compressed;
mod corpus;
mod dataset;
mod encode;
mod error;
mod examples;
mod files;
mod framing;
#[cfg(feature = "parquet")]
mod parquet;
mod permutation;
mod rust_sources;
mod sound;
mod stream;
mod texts;
mod tokenize;
mod tokenizer;
mod tokens;
mod vocabulary;
mod windows;

pub use chat::{Answers, ChatTemplate, Conversation, Message};
pub use compressed::{open_regular, read_exact_at, read_text};
pub use corpus::{Corpus, CorpusReport, Document};
pub use dataset::{DataOptions, Dataset, Source};
pub use error::DataError;
pub use examples::Format;
pub use framing::TextOptions;
pub use permutation::Permutation;
pub use rust_sources::RustSources;
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
pub use tokens::{TokenWidth, Tokens};
pub use vocabulary::{Vocabulary, VocabularyChoice};
pub use windows::{TrainingWindows, ValidationWindows};
