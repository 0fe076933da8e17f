//! What can be wrong with the shape of a schedule.

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error("{schedule}: {what} must be at least 1")]
    Zero { schedule: &'static str, what: &'static str },
    #[error("{schedule} runs one chunk per rank, not {chunks}")]
    Chunks { schedule: &'static str, chunks: u32 },
}
