//! Reports about programs and plans: bytes by role, recomputed layers, messages, and the row of a schedule table that a
//! program runs.

mod memory;
mod message_order;
mod recomputed;
mod schedule_view;

pub use memory::{Report, largest_at_peak, memory_map};
pub use recomputed::{RecomputedLayer, recomputed_layers, recomputed_per_micro_batch};
