//! One training step by name: what `gapless plan`, `compare`, `schedule` and `sweep` are asked about.
//!
//! In: a run's file or flags of the same keys ([`RunConfig`](crate::run::RunConfig)), whose data and weights need not be there. Out: a
//! [`Step`]: the programs of every rank of its pipeline, their plans, and when everything happens on a [`DeviceProfile`] ([`Timing`]).
//! Never: weights, a device, or an arena.
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

mod device;
mod eager;
mod estimate;
mod machine;
mod planned;
#[cfg(feature = "cuda")]
mod roofline;
mod sketch;
mod timing;

pub use device::{CostModel, DeviceProfile, UnknownDevice};
pub use eager::{EagerError, ExpertRows};
pub use estimate::{Estimate, estimate};
pub use machine::ThisMachine;
pub use planned::Step;
#[cfg(feature = "cuda")]
pub use roofline::{Bound, Roofline, RooflineRow};
pub use sketch::{Sketch, SketchKey};
pub use timing::{Timing, TimingError};

use crate::run::refused;
pub use crate::run::{ConfigError, Lowering};
pub use gapless_engine::Precision;
