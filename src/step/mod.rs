//! A single training step, described by the keys of a run file. `gapless plan`, `compare`, `schedule` and `sweep` are
//! built on it.
//!
//! In: a run file, or flags with the same keys ([`RunConfig`](crate::run::RunConfig)). The data and weights of the run
//! need not exist. Out: a [`Step`], which gives the programs of every pipeline rank, their plans, and the time of every
//! action on a [`DeviceProfile`] ([`Timing`]). A step loads no weights, opens no device and reserves no arena.
//!
//! ```
//! use gapless::run::RunConfig;
//! use gapless::step::Step;
//!
//! let run = RunConfig::parse(
//!     r#"
//!     model = "gpt:vocabulary=64,layers=4,heads=2,width=32"
//!     step = { batch = 8, micro_batches = 4, sequence = 16 }
//!     mesh.pipeline = 2
//!     pipeline.schedule = "zbv"
//!     "#,
//!     &[],
//! )?;
//! let step = Step::new(&run)?;
//! let programs = step.programs(&step.record()?)?;
//! let timing = step.timing(&programs)?;
//! assert_eq!((programs.len(), timing.timeline.ranks.len()), (2, 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cards;
mod device;
mod eager;
mod estimate;
mod expert_rows;
mod few_layers;
mod fits;
mod largest_batch;
mod layout;
mod machine;
mod origin;
mod planned;
#[cfg(feature = "cuda")]
mod roofline;
mod search;
mod sketch;
mod timing;

pub use device::{CostModel, DeviceProfile, Reach, UnknownDevice};
pub use eager::{EagerBytes, EagerError, EagerRun, ExpertRows, StartUp};
pub use estimate::{Estimate, estimate};
pub use expert_rows::RoutedRows;
pub use few_layers::{SketchBase, SketchGraph};
pub use fits::{Fits, Limit, OverheadSources, Overheads};
pub use largest_batch::LargestBatch;
pub use layout::Layout;
pub use machine::ThisMachine;
pub use origin::Origin;
pub use planned::Step;
#[cfg(feature = "cuda")]
pub use roofline::{Bound, Roofline, RooflineRow};
pub use search::{Candidate, Search, Varied};
pub use sketch::{Sketch, SketchKey};
pub use timing::{BusyTime, Timing, TimingError};

use crate::run::refused;
pub use crate::run::{ConfigError, ExpertLoad, Lowering, MegatronConfig, RecordedLoad};
pub use gapless_engine::Precision;
