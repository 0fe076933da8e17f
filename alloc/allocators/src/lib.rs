//! Models of the allocators used for training today, replayed on the same lifetime table as a plan.
//!
//! In: a [`Problem`](gapless_alloc::Problem), turned into the [`Requests`] of a program that repeats its step, or a
//! PyTorch memory snapshot ([`read_snapshot`]). Out: the memory that each [`Allocator`] would reserve for this program
//! ([`replay`](fn@replay)), and a comparison of all allocators ([`compare`](fn@compare)). Never: memory; the models
//! touch no byte of the memory that they hand out.
//!
//! Each allocator is a file or a folder. Each model follows the source of the original, and is compared with a
//! recording of the original if there is one. `docs/allocators.md` describes how each allocator works and where its
//! model deviates.
//!
//! ```
//! use gapless_alloc::{Buffer, Problem};
//! use gapless_allocators::{Allocator, Device, PyTorch, PyTorchOptions, Requests, replay};
//!
//! // Two tensors of 3 MiB, one after the other: PyTorch's caching allocator reuses the first one's segment.
//! let problem = Problem::new(vec![Buffer::new(0..1, 3 << 20), Buffer::new(1..2, 3 << 20)])?;
//! let mut pytorch = PyTorch::new(Device::new(1 << 30), PyTorchOptions::default());
//! let report = replay(&Requests::new(&problem), &mut pytorch, 1)?;
//! assert_eq!(report.peak_reserved(), 20 << 20); // medium requests share segments of 20 MiB
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//! Problem ─▶ Requests ─▶ replay(Allocator) ─▶ Report
//!    └──────────────────▶ compare ──────────▶ table, JSON, page
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod allocator;
mod bfc;
mod compare;
mod device;
mod gmlake;
mod ideal;
mod kind;
mod malloc;
mod planned;
mod pytorch;
mod replay;
mod snapshot;
mod stalloc;

pub use allocator::{Allocator, Block, Extent, Gauge, OutOfMemory, Statistics, Stream};
pub use bfc::Bfc;
pub use compare::{Compared, Comparison, Entry, Timeline, compare, page};
pub use device::{Device, DriverCalls};
pub use gmlake::{GmLake, GmLakeOptions};
pub use ideal::Ideal;
pub use kind::{InvalidName, Kind, Setup, UnknownAllocator};
pub use malloc::Malloc;
pub use planned::Planned;
pub use pytorch::{OptionsError, PyTorch, PyTorchOptions};
pub use replay::{Report, Request, Requests, replay, replay_observed, smallest_capacity};
pub use snapshot::{Refused, Snapshot, SnapshotError, read_snapshot};
pub use stalloc::StAlloc;
