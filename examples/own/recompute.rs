//! A recompute policy of your own. It recomputes values that are large and cheap to compute, instead of keeping them.

use anyhow::Result;
use gapless::engine::Spec;
use gapless::engine::graph::Node;
use gapless::step::Step;
use gapless::{Recompute, RecomputePolicy};

#[derive(Debug)]
struct LargeAndCheap {
    bytes: u64,
}

impl RecomputePolicy for LargeAndCheap {
    fn drops(&self, value: &Spec, maker: &Node) -> bool {
        value.bytes() >= self.bytes && !matches!(maker.op.name(), "linear" | "attention" | "linear_cross_entropy")
    }
}

/// Registers this policy, and compares the bytes and the time of a step under it with those under built-in policies.
pub fn run(mut step: Step) -> Result<()> {
    Recompute::register("large-and-cheap", LargeAndCheap { bytes: 64 << 10 })?;
    for name in ["none", "layers", "large-and-cheap"] {
        step.options.memory.recompute = name.parse()?;
        let programs = step.programs(&step.record()?)?;
        let timing = step.timing(&programs)?;
        let most = programs.iter().map(|program| Ok(step.plan(program)?.arena_bytes()));
        let most = most.collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0);
        println!("{name}: {most} bytes, {} ns, {:.1} % recomputed", timing.nanoseconds(), 100.0 * timing.overhead());
    }
    Ok(())
}
