//! The online arena, for buffers whose lifetimes are planned and whose sizes depend on the data.
//!
//! Under expert parallelism, the number of rows that a rank receives is only known once the rows are counted, in the
//! middle of the step. Only buffers of such rows are [`Request`]s. The ticks, the balanced size and the bound of a
//! request are known at compile time. For each request, an [`ArenaPlan`] finds the idle addresses: those that the
//! static plan does not use during the request's whole lifetime. The plan also has a [`Reserve`] above the static plan,
//! for requests that don't fit into idle addresses. An [`Arena`] then hands out offsets while the step runs. A request
//! takes O(log n) and allocates no memory. [`check_run`] checks these offsets together with the static plan.
//!
//! ```
//! use gapless_alloc::arena::{Arena, ArenaOptions, ArenaPlan, Request, RequestId, Reserve};
//! use gapless_alloc::{Buffer, Problem};
//!
//! // 4096 bytes at address 0 are idle from tick 2 on.
//! let problem = Problem::new(vec![Buffer::new(0..2, 4096), Buffer::new(0..9, 512)])?;
//! let requests = vec![Request::new(1..8, 1024, 4096), Request::new(3..5, 1024, 4096)];
//! let options = ArenaOptions::with_reserve(Reserve::Worst);
//! let mut arena = Arena::new(ArenaPlan::new(&problem, &[0, 4096], requests, &options)?);
//!
//! assert_eq!(arena.plan().reserve(), 4608..4608 + 4096); // for the first; the second fits at address 0
//! assert_eq!(arena.request(RequestId(0), 3000).expect("within its bound"), 4608);
//! assert_eq!(arena.request(RequestId(1), 4096).expect("within its bound"), 0);
//! arena.release(RequestId(1));
//! arena.release(RequestId(0));
//! assert_eq!(arena.report().high_water_bytes, 3000);
//! # Ok::<(), gapless_alloc::Error>(())
//! ```
//!
//! ```text
//! bytes ▲
//!  8704 ┤
//!       │   ┌─────────────┐      request 0: in the reserve
//!  4608 ┼───┴─────────────┴───   end of the static plan
//!       │ static 1
//!  4096 ┼───────┬───┬───┬─────
//!       │static │   │ 1 │        request 1: in addresses that are idle by then
//!     0 ┼───────┴───┴───┴─────▶ ticks
//!       0       2   3   5
//! ```

mod blocks;
mod check;
mod idle;
mod online;
mod overflow;
mod plan;
mod rehearse;
mod report;
mod request;

pub use check::{RunViolation, Served, check_run};
pub use online::Arena;
pub use overflow::Overflow;
pub use plan::ArenaPlan;
pub use rehearse::{Rehearsal, rehearse};
pub use report::ArenaReport;
pub use request::{ArenaOptions, Need, Request, RequestId, Reserve};
