//! Whole training steps on the CPU: their results, their memory, and the inputs that are refused.
//!
//! These tests are one binary, because linking a binary per file would take longer than running the tests.

mod accumulation;
mod bad_input;
mod bf16;
mod causality;
mod collectives;
#[path = "../common/mod.rs"]
mod common;
mod context_ranks;
mod determinism;
mod documents;
mod expert_ranks;
mod folded_ranks;
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
mod sharded_ranks;
mod stash;
mod step_memory;
mod tensor_ranks;
mod tensor_reports;
mod trainable;
mod uneven;
mod update;
mod watch;
