//! One training step by name: what `gapless plan`, `compare`, `schedule` and `sweep` are asked about.
//!
//! In: flags or a TOML table of the same keys ([`StepSpec`]). Out: a checked [`Step`]: the programs of every rank of its pipeline,
//! their plans, and when everything happens on a [`DeviceProfile`] ([`Timing`]). Never: weights, a device, or an arena.
//!
//! ```
//! use gapless::step::StepSpec;
//!
//! let spec: StepSpec = toml::from_str(
//!     r#"
//!     model = "gpt:vocabulary=64,layers=4,heads=2,width=32"
//!     batch = 8
//!     micro_batches = 4
//!     sequence = 16
//!     pipeline_ranks = 2
//!     schedule = "zbv"
//!     "#,
//! )?;
//! let step = spec.check()?;
//! let programs = step.programs(&step.record()?)?;
//! let timing = step.timing(&programs)?;
//! assert_eq!((programs.len(), timing.timeline.ranks.len()), (2, 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
mod eager;
mod estimate;
mod machine;
mod model;
mod read;
#[cfg(feature = "cuda")]
mod roofline;
mod sketch;
mod spec;
mod timing;

pub use device::{CostModel, DeviceProfile, UnknownDevice};
pub use eager::{EagerError, ExpertRows, Lowering};
pub use estimate::{Estimate, estimate};
pub use machine::ThisMachine;
pub use model::{ModelSpec, PRESETS};
#[cfg(feature = "cuda")]
pub use roofline::{Bound, Roofline, RooflineRow};
pub use sketch::{Sketch, SketchKey};
pub use spec::{Precision, Step, StepSpec};
pub use timing::{Timing, TimingError};

pub use crate::run::ConfigError;
