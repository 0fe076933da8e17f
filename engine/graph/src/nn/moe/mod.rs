//! Mixture of experts: a router, and the experts to which it sends rows.

mod exchange;
mod experts;
mod router;

pub use exchange::Exchange;
pub use experts::Experts;
pub use router::{Capacity, Choice, Router, RouterConfig, Routing, Score};
