//! Training steps on the CPU, whole: their numbers, their memory, and what is refused.
//!
//! One binary, as linking one for each file would take longer than to run them.

mod accumulation;
mod bad_input;
mod bf16;
#[path = "../common/mod.rs"]
mod common;
mod determinism;
mod documents;
mod expert_ranks;
mod generate;
mod learning;
mod live_bytes;
mod loss_parts;
mod moe;
mod optimizers;
mod overflow;
mod padding;
mod programs;
mod ranks;
mod ranks_differ;
mod recompute;
mod resume;
mod routing;
mod stash;
mod step_memory;
mod trainable;
mod uneven;
mod update;
mod watch;
