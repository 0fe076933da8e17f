//! The memory report of a compiled step, before it runs.

use std::fmt;

use gapless_alloc::draw::{MemoryMap, Summary};
use serde::Serialize;

use crate::Executable;

/// The main numbers of a step's plan.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Number of trained parameters.
    pub parameters: u64,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Size of the file for offloaded activations.
    pub host_bytes: u64,
    /// The peak of live bytes. No plan can have a smaller arena.
    pub lower_bound_bytes: u64,
    /// Bytes of the arena above its planned part, for dynamic rows.
    pub reserve_bytes: u64,
    /// Size of the planned part of the arena, divided by the lower bound.
    pub gap: f64,
    /// Number of planned buffers.
    pub buffers: usize,
    /// Number of instructions of one training step.
    pub instructions: usize,
    /// Floating-point operations of one training step.
    pub flops_per_step: u64,
    /// Time spent planning, in milliseconds.
    pub plan_ms: f64,
    /// Hash of the plan: equal hashes mean equal addresses.
    pub plan_hash: String,
    /// Bytes by role at the peak, and the largest tensors at the peak.
    pub summary: Summary,
}

impl Report {
    /// Returns the report of an executable. `parameters` is the number of trained parameters.
    pub fn of(executable: &Executable, parameters: u64) -> Self {
        let solution = &executable.solution;
        Self {
            parameters,
            arena_bytes: executable.arena_bytes(),
            reserve_bytes: executable.arena_bytes() - solution.height,
            host_bytes: executable.host_bytes(),
            lower_bound_bytes: solution.lower_bound,
            gap: solution.gap(),
            buffers: executable.problem.len(),
            instructions: executable.programs[0].instructions.len(),
            flops_per_step: executable.flops[0],
            plan_ms: executable.plan_ms,
            plan_hash: executable.plan_hash.to_string(),
            summary: memory_map(executable).summary(12),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} parameters, {} instructions and {:.1} GFLOP per step, {} buffers planned in {:.1} ms (plan {})",
            self.parameters,
            self.instructions,
            self.flops_per_step as f64 / 1e9,
            self.buffers,
            self.plan_ms,
            self.plan_hash
        )?;
        if self.reserve_bytes > 0 {
            writeln!(f, "{} bytes more for the rows that expert ranks receive", self.reserve_bytes)?;
        }
        write!(f, "{}", self.summary)
    }
}

/// Returns the memory map of an executable.
pub fn memory_map(executable: &Executable) -> MemoryMap<'_> {
    MemoryMap::new("gapless", &executable.problem, &executable.solution.offsets, &executable.labels)
        .and_then(|map| map.with_marks(&executable.parts))
        .expect("the tables of an executable are of one length")
}

/// Returns the `count` largest tensors at the peak as text, one per line.
pub fn largest_at_peak(executable: &Executable, count: usize) -> String {
    memory_map(executable).summary(count).to_string()
}
