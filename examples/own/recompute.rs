//! A recompute policy of your own. It recomputes values that are large and cheap to compute, instead of keeping them.

use std::sync::Arc;

use anyhow::Result;
use gapless::engine::Spec;
use gapless::engine::graph::Node;
use gapless::engine::recompute::CustomPolicy;
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

/// Compares the bytes and the time of a step under this policy with those under built-in policies.
pub fn run(mut step: Step) -> Result<()> {
    let mine = || Recompute::Custom(CustomPolicy(Arc::new(LargeAndCheap { bytes: 64 << 10 })));
    for (name, policy) in [("none", Recompute::None), ("layers", "layers".parse()?), ("large and cheap", mine())] {
        step.options.memory.recompute = policy;
        let programs = step.programs(&step.record()?)?;
        let timing = step.timing(&programs)?;
        let most = programs.iter().map(|program| Ok(step.plan(program)?.arena_bytes()));
        let most = most.collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0);
        println!("{name}: {most} bytes, {} ns, {:.1} % recomputed", timing.nanoseconds(), 100.0 * timing.overhead());
    }
    Ok(())
}
