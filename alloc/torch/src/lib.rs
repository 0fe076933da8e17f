//! PyTorch plays gapless's plans: a CUDA allocator that records an iteration's requests, plans them when they repeat, and
//! then serves every request at its planned address.
//!
//! - In: requests and frees through PyTorch's C interface ([`ffi`]), and the end of each iteration.
//! - Out: addresses in mapped memory of the device, as little of it as the plan needs.
//! - Never: a tensor that is moved, or two living tensors that share a byte. A request that is not the plan's next is
//!   served from idle memory ([`device`]).
//!
//! ```
//! use gapless_torch::{CountedPages, Device, Options};
//!
//! let options = Options { check: true, wait_for_plan: true, ..Options::default() };
//! let mut device = Device::new(0, Box::new(CountedPages::new(1 << 30)), options)?;
//! let weights = device.allocate(64 << 20, 0)?;
//! for _ in 0..4 {
//!     let activations = device.allocate(100 << 20, 0)?;
//!     let gradients = device.allocate(64 << 20, 0)?;
//!     device.free(activations);
//!     let moments = device.allocate(90 << 20, 0)?; // takes the place of the activations
//!     device.free(gradients);
//!     device.free(moments);
//!     device.step();
//! }
//! let report = device.report();
//! assert_eq!(report.planned, 164 << 20);
//! assert_eq!(report.reserved, report.most_requested);
//! # let _ = weights;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//! addresses ▲ ┌──────────────────────────┐
//!           │ │ region: the plan         │  withheld from the heap while every event is the plan's next
//!           │ └──────────────────────────┘
//!           │ ┌──────────────────────────┐
//!           │ │ heap: all other requests │  what stays across iterations, and deviations
//!           └ └──────────────────────────┘
//! ```
//!
//! Unsafe code is only in [`driver`], which calls the CUDA driver, and in [`ffi`].
#![warn(missing_docs)]
#![deny(unsafe_code)]

mod checker;
pub mod device;
#[allow(unsafe_code, reason = "calls the CUDA driver")]
pub mod driver;
mod extents;
#[allow(unsafe_code, reason = "is called from C")]
pub mod ffi;
mod heap;
pub mod pages;
mod player;
pub mod recording;
mod report;
pub mod saved;
pub mod script;

pub use device::{Device, Options, OutOfMemory};
pub use pages::{CountedPages, Pages};
pub use report::Report;
pub use script::Script;
