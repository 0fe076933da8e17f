//! Bytes × time: the address of every tensor of a step, decided before the step runs.
//!
//! A [`Problem`] is a table of buffers, each with a size and a half-open lifetime in ticks. [`plan`] gives every buffer
//! one offset in one arena, so that buffers alive at the same tick never share a byte. The arena is as small as the
//! searches can make it; no plan is lower than the [`lower_bound`], the most bytes alive at any one tick. [`check`]
//! checks any plan and shares no code with the planner.
//!
//! ```
//! use gapless_alloc::{check, plan, Buffer, Options, Problem};
//!
//! let problem = Problem::new(vec![
//!     Buffer::new(0..4, 1024), // born at tick 0, dead at tick 4
//!     Buffer::new(0..2, 512),
//!     Buffer::new(2..4, 512), // takes the place of the one before
//! ])?;
//! let solution = plan(&problem, &Options::default());
//! assert_eq!(solution.height, solution.lower_bound);
//! check(&problem, &solution.offsets, None).expect("every plan passes the checker");
//! # Ok::<(), gapless_alloc::Error>(())
//! ```
//!
//! ```text
//! bytes ▲
//!  1536 ┤┌───────┐┌───────┐
//!       ││   1   ││   2   │
//!  1024 ┤├───────┴┴───────┤
//!       ││       0        │
//!     0 ┼┴───┬───┬───┬────┴─▶ ticks
//!        0   1   2   3   4
//! ```
//!
//! [`arena`] serves the few buffers whose size depends on the data. While the step runs, it places them around an
//! existing plan.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod arena;
mod bound;
mod check;
pub mod csv;
mod deadline;
pub mod draw;
mod error;
mod explain;
mod gaps;
mod hash;
mod label;
mod order;
mod planner;
mod pools;
mod problem;
pub mod synthetic;

pub use bound::{live_at, lower_bound, peak_tick};
pub use check::{Violation, check};
pub use deadline::Deadline;
pub use error::Error;
pub use explain::{Change, Explanation, Remedy, explain};
pub use gaps::{Gap, Pieces};
pub use hash::{PlanHash, plan_hash, table_hash};
pub use label::{Label, Role};
pub use planner::{Fit, Options, Proof, Solution, Stats, StopReason, plan};
pub use pools::{PoolPlan, plan_pools};
pub use problem::{Arrangement, Buffer, BufferId, Group, Lifetime, Problem};
