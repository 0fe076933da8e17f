//! Errors in the shape of a schedule, or in the text of a table.

/// Every error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error("{schedule}: {what} must be at least 1")]
    Zero { schedule: &'static str, what: &'static str },
    #[error("{schedule} runs {needed} chunk(s) per rank, not {chunks}; use {needed}")]
    Chunks { schedule: &'static str, needed: u32, chunks: u32 },
    #[error("{schedule} runs on {needed} rank(s), not {ranks}; use {needed}, or the modular pipeline")]
    Ranks { schedule: &'static str, needed: u32, ranks: u32 },
    #[error(
        "{schedule}: {micro_batches} micro-batches do not split into {rounds} equal rounds; use a multiple of {rounds}"
    )]
    Rounds { schedule: &'static str, micro_batches: u32, rounds: u32 },
    #[error(
        "{schedule}: {micro_batches} micro-batches in groups of {group} leave {rest} for the last group, fewer than \
         {ranks} ranks; a group and its rest must each keep every rank busy"
    )]
    Group { schedule: &'static str, micro_batches: u32, group: u32, rest: u32, ranks: u32 },
    #[error("{schedule} needs at least {needed} micro-batches, not {micro_batches}")]
    MicroBatches { schedule: &'static str, needed: u32, micro_batches: u32 },
    #[error("{schedule} keeps at least {needed} activations alive, one of each chunk; raise the peak of {peak}")]
    Peak { schedule: &'static str, needed: u32, peak: u32 },
    #[error("{schedule} finds no order with a peak of {peak} activations; use {needed}, which are always enough")]
    Room { schedule: &'static str, needed: u32, peak: u32 },
    #[error(
        "{schedule}: {ranks} ranks × {chunks} chunks × {micro_batches} micro-batches are too many: ranks × chunks × (micro-batches \
         + ranks) is at most {most}; use fewer of them"
    )]
    TooLarge { schedule: &'static str, ranks: u32, chunks: u32, micro_batches: u32, most: u32 },
    #[error(
        "a mesh of {data} data × {pipeline} pipeline × {shard} shard × {expert} expert × {context} context × {tensor} tensor \
         ranks is not valid; set each to at least 1, and their product below 2^64"
    )]
    Mesh { data: usize, pipeline: usize, shard: usize, expert: usize, context: usize, tensor: usize },
    #[error("unknown schedule {name:?}; choose one of {known}, or the path of a table that ends in .csv")]
    Unknown { name: String, known: String },
    #[error(
        "a schedule cannot be registered as {name:?}; choose a name that no schedule has and that does not end in .csv"
    )]
    Name { name: &'static str },
    #[error("{table}: {why}")]
    Table { table: String, why: String },
    #[error("row {row}, cell {cell}: {text:?} is not {expected}")]
    Cell { row: usize, cell: usize, text: String, expected: &'static str },
}
