//! A cost model of your own: a device on which small products are slow.

use anyhow::Result;
use gapless::engine::compile::{Instr, InstrKind};
use gapless::step::{CostModel, DeviceProfile, Precision, Reach, Step};

/// Number of elements of the output tile that one block of a product computes.
const TILE: f64 = 128.0 * 128.0;

#[derive(Debug)]
struct Tiled(DeviceProfile);

impl CostModel for Tiled {
    fn nanoseconds(&self, instr: &Instr, precision: Precision) -> u64 {
        let whole = self.0.nanoseconds(instr, precision);
        match &instr.kind {
            InstrKind::Compute(op) if op.name().starts_with("linear") => {
                let elements = instr.outputs[0].layout.shape().elem_count() as f64;
                // The device computes 132 tiles at a time, and a partial tile takes as long as a full tile.
                let waves = (elements / TILE / 132.0).ceil();
                (whole as f64 * (waves * 132.0 * TILE / elements).min(4.0)) as u64
            }
            _ => whole,
        }
    }

    fn transfer(&self, bytes: u64, reach: Reach) -> u64 {
        self.0.transfer(bytes, reach)
    }

    fn collective(&self, bytes: f64, reach: Reach, can_hide: bool) -> u64 {
        self.0.collective(bytes, reach, can_hide)
    }

    fn offload(&self, bytes: u64) -> u64 {
        self.0.offload(bytes)
    }
}

/// Compares the step's time under this cost model with its time on the step's device.
pub fn run(step: &Step) -> Result<()> {
    let programs = step.programs(&step.record()?)?;
    let device = step.timing(&programs)?;
    let tiled = step.timing_with(&programs, &Tiled(step.device.clone()))?;
    for (name, timing) in [(&*step.device.name, device), ("tiled", tiled)] {
        println!("{name}: {} ns, {:.1} % of it idle", timing.nanoseconds(), 100.0 * timing.timeline.bubble_share());
    }
    Ok(())
}
