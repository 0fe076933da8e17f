//! What a researcher can put in the place of ours, each by a trait and in a file of its own: an allocator, a schedule, a cost model, a
//! recompute policy. All of them meet the tables of the same training step.
//!
//! `cargo run --release --example own`

mod allocator;
mod cost_model;
mod recompute;
mod schedule;

use anyhow::Result;
use gapless::step::{Step, StepSpec};

/// A small GPT on two ranks of a pipeline.
fn step() -> Result<Step> {
    let spec: StepSpec = toml::from_str(
        r#"
        model = "gpt:vocabulary=512,layers=6,heads=4,width=64"
        batch = 8
        micro_batches = 4
        sequence = 128
        dtype = "mixed"
        pipeline_ranks = 2
        "#,
    )?;
    Ok(spec.check()?)
}

fn main() -> Result<()> {
    allocator::run(&step()?)?;
    schedule::run(step()?)?;
    cost_model::run(&step()?)?;
    recompute::run(step()?)
}
