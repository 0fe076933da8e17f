//! Pipeline schedules: for each rank, one list of actions.
//!
//! A model is cut into stages, and a batch into micro-batches. A [`Schedule`] defines the order in which each rank runs
//! the forward and backward parts of its stages. The engine lowers that list into one program per rank, and the list
//! determines the lifetime of every tensor.
//!
//! ```
//! use gapless_parallel::{OneForwardOneBackward, Schedule, Shape};
//!
//! let table = OneForwardOneBackward.actions(&Shape { ranks: 2, chunks: 1, micro_batches: 3 })?;
//! let cells: Vec<String> = table[0].iter().map(ToString::to_string).collect();
//! assert_eq!(cells, ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]);
//! # Ok::<(), gapless_parallel::Error>(())
//! ```
//!
//! ```text
//! rank 0 │ F0 F1 ·· B0 F2 B1 ·· B2
//! rank 1 │ ·· F0 B0 F1 B1 F2 B2 ··
//! ```
//!
//! A table of [`Cell`]s, from a schedule here or from a file, can be processed as follows:
//!
//! ```text
//! Schedule ──▶ table ──▶ reduce_gradients, update_weights, fetch_weights ──▶ communicate ──▶ table
//!            read_table                                                                     │
//!                                     write_table ◀── check ◀───────────────────────────────┤
//!                                gantt, svg, trace ◀── Timeline (bubble, live, live_bytes) ◀── simulate(Durations)
//! ```
//!
//! [`check()`] and [`simulate`] depend on none of the generators and none of the passes.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod action;
mod check;
mod communicate;
mod costs;
mod draw;
mod error;
mod kept;
mod live_bytes;
mod mesh;
mod schedule;
mod simulate;
mod table_text;
mod weights;
mod world;

pub use action::{Action, Cell, Communication, CommunicationKind, Kind, MicroBatch, StageId};
pub use check::{Sends, Violation, check};
pub use communicate::{Waits, communicate};
pub use costs::{Costs, Durations, Rates};
pub use error::Error;
pub use kept::{KeptBuffer, peak_bytes};
pub use live_bytes::{LastReader, StageBytes};
pub use mesh::{Axes, Axis, Coordinate, Mesh};
pub use schedule::{
    Automatic, DualPipeV, GPipe, Interleaved, InterleavedZeroBubble, LayeredAccumulation, LoopedBreadthFirst,
    ModularPipeline, OneForwardOneBackward, Placement, Saved, Schedule, SearchedZb, SearchedZbv, Shape, Tabulated,
    VHalf, VMin, VOneForwardOneBackward, ZbH1, ZbH2, Zbv, all, by_name, read_table_file, register,
};
pub use simulate::{Span, Stuck, Timeline, simulate};
pub use table_text::{read_table, write_table};
pub use weights::{fetch_weights, merge_backwards, reduce_gradients, update_weights};
pub use world::{Launcher, World, WorldError};
