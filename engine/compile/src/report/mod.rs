//! What a program or a plan says of itself: bytes by role, recomputed layers, messages, its actions as a schedule's table.

mod memory;
mod message_order;
mod recomputed;
mod schedule_view;

pub use memory::{Report, largest_at_peak, memory_map};
pub use recomputed::{RecomputedLayer, recomputed_layers, recomputed_per_micro_batch};
