//! Mixture of experts: a router, and the experts that it sends rows to.

mod experts;
mod router;

pub use experts::Experts;
pub use router::{Capacity, Choice, Router, RouterConfig, Routing, Score};
