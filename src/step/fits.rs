//! The answer to the question whether a step fits into the memory of its ranks.

use std::fmt;

use gapless_alloc::Options;
use gapless_alloc::draw::Bytes;
use gapless_engine::TrainError;
use gapless_engine::compile::Error as CompileError;
use gapless_parallel::{Coordinate, Mesh};
use serde::Serialize;

use super::Step;

/// The bytes that the arena of a rank may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Maximum size of an arena in bytes.
    pub bytes: u64,
    /// The device, if its memory is the limit; `None` if the budget is.
    pub device: Option<String>,
    /// Bytes of the device's memory that the CUDA context and the kernels take; 0 for a budget.
    pub reserve_bytes: u64,
}

/// Whether the arenas of all ranks are within a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fits {
    /// Whether every rank fits.
    pub fits: bool,
    /// The rank with the largest arena.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Size of this rank's arena in bytes. If no plan fits the budget, the size of the smallest plan that was found.
    pub arena_bytes: u64,
    /// The limit.
    pub limit: Limit,
}

impl Fits {
    /// Compares the arenas of a mesh's pipeline stages with a limit. Data and expert ranks have the arena of their stage.
    ///
    /// # Panics
    /// Panics if there is no arena.
    pub fn new(mesh: Mesh, arenas: &[u64], limit: Limit) -> Self {
        let largest = arenas.iter().enumerate().max_by_key(|&(stage, &bytes)| (bytes, std::cmp::Reverse(stage)));
        let (pipeline, &arena_bytes) = largest.expect("a mesh has at least one stage");
        let rank = mesh.rank(Coordinate { pipeline, data: 0, expert: 0 });
        Self { fits: arena_bytes <= limit.bytes, rank, ranks: mesh.ranks().unwrap_or(1), arena_bytes, limit }
    }
}

impl fmt::Display for Fits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arena_bytes, limit, .. } = self;
        let who = if self.ranks > 1 { format!("rank {}", self.rank) } else { "the step".to_owned() };
        let (arena, difference) = (Bytes(*arena_bytes), Bytes(arena_bytes.abs_diff(limit.bytes)));
        match self.fits {
            true => write!(f, "fits: yes, {difference} spare: {who} takes {arena} of the {limit}"),
            false => write!(f, "fits: no: {who} needs {arena}, {difference} more than the {limit}"),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, device, reserve_bytes } = self;
        write!(f, "{}", Bytes(*bytes))?;
        match device {
            None => write!(f, " of the budget"),
            Some(device) if *reserve_bytes == 0 => write!(f, " of {device}"),
            Some(device) => {
                let memory = Bytes(bytes + reserve_bytes);
                let reserve = Bytes(*reserve_bytes);
                write!(f, " of {device} ({memory} less {reserve} for the CUDA context and kernels)")
            }
        }
    }
}

impl Step {
    /// Returns the smaller of the budget and the memory of the device that the run names. Returns `None` if the run has
    /// neither.
    pub fn limit(&self) -> Option<Limit> {
        let device = self.has_named_device.then(|| Limit {
            bytes: self.device.arena_bytes(),
            device: Some(self.device.name.clone()),
            reserve_bytes: self.device.reserve,
        });
        let budget = self.options.memory.budget.map(|bytes| Limit { bytes, device: None, reserve_bytes: 0 });
        budget.into_iter().chain(device).min_by_key(|limit| limit.bytes)
    }

    /// Plans every pipeline stage and compares the arenas with a limit. The arenas serve the training step, the
    /// evaluation and the generation. Plans are made with little work, and with all of it only where a stage would not
    /// fit otherwise.
    ///
    /// # Errors
    /// Returns the errors of [`Self::compile`], except that no plan fits the budget.
    pub fn fits(&self, limit: Limit) -> Result<Fits, TrainError> {
        let quickly = self.with_little_work();
        let arena = |step: &Self, stage| match step.compile(stage) {
            Ok((executable, _)) => Ok((executable.arena_bytes(), executable.solution().lower_bound)),
            Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => Ok((smallest, smallest)),
            Err(error) => Err(error),
        };
        let mut arenas = Vec::new();
        for stage in 0..self.options.mesh.pipeline {
            arenas.push(match arena(&quickly, stage)? {
                (bytes, bound) if bytes > limit.bytes && bound <= limit.bytes => arena(self, stage)?.0,
                (bytes, _) => bytes,
            });
        }
        Ok(Fits::new(self.options.mesh, &arenas, limit))
    }

    /// Returns a copy of the step whose plans are made with little work. Their arenas may be slightly larger.
    pub(super) fn with_little_work(&self) -> Self {
        let mut step = self.clone();
        step.options.memory.planning = step.options.memory.planning.min(Options::QUICK_WORK);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_can_be_read() {
        let card = |bytes| Limit { bytes, device: Some("h100".into()), reserve_bytes: 1 << 29 };
        let mesh = Mesh { data: 2, pipeline: 3, expert: 2 };
        let fits = Fits::new(mesh, &[3 << 30, 5 << 30, 4 << 30], card(6 << 30));
        assert_eq!(
            fits.to_string(),
            "fits: yes, 1 GiB spare: rank 2 takes 5 GiB of the 6 GiB of h100 (6.50 GiB less 512 MiB for the CUDA context and kernels)"
        );
        let budget = Limit { bytes: 1 << 20, device: None, reserve_bytes: 0 };
        let fits = Fits::new(Mesh::default(), &[3 << 20], budget);
        assert_eq!(fits.to_string(), "fits: no: the step needs 3 MiB, 2 MiB more than the 1 MiB of the budget");
    }
}
