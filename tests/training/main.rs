//! Whole training steps on the CPU: their results, their memory, and what is refused.
//!
//! These tests are one binary, because linking one per file would take longer than running them.

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
