//! Components that a researcher can replace: an allocator, a schedule, a cost model and a recompute policy. Each is in
//! its own file, and implements a trait of gapless. All are compared with built-in components on the same training
//! step. Then a sweep varies them by their names.
//!
//! `cargo run --release --example own`

mod allocator;
mod cost_model;
mod recompute;
mod schedule;
mod sweep;

use anyhow::Result;
use gapless::run::RunConfig;
use gapless::step::Step;

/// A small GPT on two pipeline ranks.
const STEP: &str = r#"
    model = "gpt:vocabulary=512,layers=6,heads=4,width=64"
    step = { batch = 8, micro_batches = 4, sequence = 128, precision = "bf16" }
    mesh.pipeline = 2
"#;

fn step() -> Result<Step> {
    Ok(Step::new(&RunConfig::parse(STEP, &[])?)?)
}

fn main() -> Result<()> {
    allocator::run(&step()?)?;
    schedule::run(step()?)?;
    cost_model::run(&step()?)?;
    recompute::run(step()?)?;
    sweep::run()
}
