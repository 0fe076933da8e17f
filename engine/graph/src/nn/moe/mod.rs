//! Mixture of experts: a router, and the experts that it sends rows to.

mod exchange;
mod experts;
mod router;

pub use exchange::Exchange;
pub use experts::Experts;
pub use router::{Capacity, Choice, Router, RouterConfig, Routing, Score};
