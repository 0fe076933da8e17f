//! The answer to the question whether a step fits into the memory of its ranks.

use std::fmt;

use gapless_alloc::Options;
use gapless_alloc::draw::Bytes;
use gapless_engine::TrainError;
use gapless_engine::compile::{Error as CompileError, Program};
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
    /// The memory of the device that is outside of arenas; all 0 for a budget.
    pub overheads: Overheads,
}

/// The memory of a device that no arena of a rank can use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Overheads {
    /// The CUDA context, in bytes.
    pub context_bytes: u64,
    /// The kernels of a step, in bytes.
    pub kernels_bytes: u64,
    /// cuBLASLt, in bytes. This is 0, because its workspace is planned as a part of the arena.
    pub cublaslt_bytes: u64,
    /// NCCL's buffers, in bytes; 0 if the step has one rank.
    pub nccl_bytes: u64,
    /// Bytes that the profile reserves for other reasons.
    pub other_bytes: u64,
    /// The sources of these numbers; empty for a budget.
    pub sources: OverheadSources,
}

/// The source of each of the [`Overheads`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct OverheadSources {
    /// The source of the CUDA context's bytes.
    pub context: String,
    /// The source of the kernels' bytes.
    pub kernels: String,
    /// The source of cuBLASLt's bytes.
    pub cublaslt: String,
    /// The source of NCCL's bytes.
    pub nccl: String,
    /// The source of the other bytes.
    pub other: String,
}

impl OverheadSources {
    /// Returns the sources of a profile. The values of a profile of one's own are its author's.
    pub(super) fn new(profile: &str, is_built_in: bool) -> Self {
        let of_profile = format!("from the profile {profile}");
        let source = |text: &str| if is_built_in { text.to_owned() } else { of_profile.clone() };
        Self {
            context: source("measured on an H200, scaled by multiprocessors"),
            kernels: source("measured on an H200"),
            // cuBLASLt's workspace is planned on every GPU.
            cublaslt: "its workspace is planned as a part of the arena".to_owned(),
            nccl: source("reported for H100s, scaled by the link"),
            other: of_profile.clone(),
        }
    }
}

impl Overheads {
    /// Returns the sum.
    pub fn bytes(&self) -> u64 {
        let Self { context_bytes, kernels_bytes, cublaslt_bytes, nccl_bytes, other_bytes, sources: _ } = self;
        context_bytes + kernels_bytes + cublaslt_bytes + nccl_bytes + other_bytes
    }
}

/// Writes each overhead with its source.
impl fmt::Display for Overheads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { context_bytes, kernels_bytes, cublaslt_bytes, nccl_bytes, other_bytes, sources } = self;
        let mut parts = Vec::new();
        for (name, bytes, source) in [
            ("CUDA context", *context_bytes, &sources.context),
            ("kernels", *kernels_bytes, &sources.kernels),
            ("cuBLASLt", *cublaslt_bytes, &sources.cublaslt),
            ("NCCL", *nccl_bytes, &sources.nccl),
            ("reserve", *other_bytes, &sources.other),
        ] {
            if bytes > 0 {
                parts.push(format!("{name} {} ({source})", Bytes(bytes)));
            } else if name == "cuBLASLt" && context_bytes + kernels_bytes > 0 {
                parts.push(format!("{name} nothing ({source})"));
            }
        }
        write!(f, "outside the arena: {}", parts.join("; "))
    }
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
        let rank = mesh.rank(Coordinate { pipeline, ..Coordinate::default() });
        Self { fits: arena_bytes <= limit.bytes, rank, ranks: mesh.ranks().unwrap_or(1), arena_bytes, limit }
    }
}

impl fmt::Display for Fits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arena_bytes, limit, .. } = self;
        let who = if self.ranks > 1 { format!("rank {}", self.rank) } else { "the step".to_owned() };
        let (arena, difference) = (Bytes(*arena_bytes), Bytes(arena_bytes.abs_diff(limit.bytes)));
        match self.fits {
            true => write!(f, "fits: yes, {difference} spare: {who} takes {arena} of the {limit}")?,
            false => write!(f, "fits: no: {who} needs {arena}, {difference} more than the {limit}")?,
        }
        if limit.overheads.bytes() > 0 { write!(f, "\n{}", limit.overheads) } else { Ok(()) }
    }
}

impl Limit {
    /// Returns the limit rounded down to 10 MiB, so that it can be typed as a budget.
    pub fn typed_bytes(&self) -> u64 {
        self.bytes / (10 << 20) * (10 << 20)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, device, overheads } = self;
        write!(f, "{}", Bytes(*bytes))?;
        match device {
            None => write!(f, " of the budget"),
            Some(device) if overheads.bytes() == 0 => write!(f, " of {device}"),
            Some(device) => {
                let (memory, outside) = (Bytes(bytes + overheads.bytes()), Bytes(overheads.bytes()));
                write!(f, " of {device} ({memory} less {outside} outside the arena)")
            }
        }
    }
}

impl Step {
    /// Returns the bytes that the arena of a rank may take on the step's device: its memory less the overheads.
    pub fn device_bytes(&self) -> u64 {
        self.device.memory.saturating_sub(self.device.overheads(self.options.mesh).bytes())
    }

    /// Returns the smaller of the budget and the memory of the device that the run names. Returns `None` if the run has
    /// neither.
    pub fn limit(&self) -> Option<Limit> {
        let device = self.has_named_device.then(|| Limit {
            bytes: self.device_bytes(),
            device: Some(self.device.name.clone()),
            overheads: self.device.overheads(self.options.mesh),
        });
        let no_overheads = Overheads::default();
        let budget = self.options.memory.budget.map(|bytes| Limit { bytes, device: None, overheads: no_overheads });
        budget.into_iter().chain(device).min_by_key(|limit| limit.bytes)
    }

    /// Plans every pipeline stage and compares the arenas with a limit. The arenas serve the training step, the
    /// evaluation and the generation. Plans are made with little work, and with all of it only where a stage would not
    /// fit otherwise.
    ///
    /// # Errors
    /// Returns the errors of [`Self::compile`], except that no plan fits the budget.
    pub fn fits(&self, limit: Limit) -> Result<Fits, TrainError> {
        let arena = |stage| Ok(self.arena(stage, Some(&limit))?.0);
        let arenas = (0..self.options.mesh.pipeline).map(arena).collect::<Result<Vec<_>, TrainError>>()?;
        Ok(Fits::new(self.options.mesh, &arenas, limit))
    }

    /// Plans a pipeline stage with little work, and with all of it only if the stage would not fit otherwise. Returns
    /// the size of the arena and the program of the training step. If no plan fits the budget, returns the size of the
    /// smallest plan that was found, and no program.
    pub(super) fn arena(&self, stage: usize, limit: Option<&Limit>) -> Result<(u64, Option<Program>), TrainError> {
        let plan = |step: &Self| match step.compile(stage) {
            Ok((executable, compiled)) => {
                Ok((executable.arena_bytes(), executable.solution().lower_bound, compiled.program))
            }
            // The search found no plan, but gives no bound: more work may find one.
            Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => Ok((smallest, 0, None)),
            Err(error) => Err(error),
        };
        let (bytes, bound, program) = plan(&self.with_little_work())?;
        match limit {
            Some(limit) if bytes > limit.bytes && bound <= limit.bytes => {
                plan(self).map(|(bytes, _, program)| (bytes, program))
            }
            _ => Ok((bytes, program)),
        }
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
    use crate::run::RunConfig;

    #[test]
    fn answers_can_be_read() {
        let overheads = Overheads {
            context_bytes: 506 << 20,
            kernels_bytes: 6 << 20,
            nccl_bytes: 1 << 29,
            sources: OverheadSources::new("h100", true),
            ..Overheads::default()
        };
        let card = |bytes| Limit { bytes, device: Some("h100".into()), overheads: overheads.clone() };
        let mesh = Mesh { data: 2, pipeline: 3, expert: 2, ..Mesh::default() };
        let fits = Fits::new(mesh, &[3 << 30, 5 << 30, 4 << 30], card(6 << 30));
        assert_eq!(
            fits.to_string(),
            "fits: yes, 1 GiB spare: rank 2 takes 5 GiB of the 6 GiB of h100 (7 GiB less 1 GiB outside the arena)\n\
             outside the arena: CUDA context 506 MiB (measured on an H200, scaled by multiprocessors); kernels 6 MiB (measured on an \
             H200); cuBLASLt nothing (its workspace is planned as a part of the arena); NCCL 512 MiB (reported for H100s, scaled by \
             the link)"
        );
        let budget = Limit { bytes: 1 << 20, device: None, overheads: Overheads::default() };
        let fits = Fits::new(Mesh::default(), &[3 << 20], budget);
        assert_eq!(fits.to_string(), "fits: no: the step needs 3 MiB, 2 MiB more than the 1 MiB of the budget");
    }

    /// If the quick search finds nothing within the budget, the search with all work runs.
    #[test]
    fn a_budget_is_searched_with_all_work_before_it_is_refused() {
        let text = "model = 'gpt:vocabulary=64,layers=2,heads=2,width=32'\nstep = { batch = 2, sequence = 16 }";
        let step = Step::new(&RunConfig::parse(text, &[]).unwrap()).unwrap();
        let limit = |bytes| Limit { bytes, device: None, overheads: Overheads::default() };
        let within = |bytes: u64| step.within(Some(bytes)).fits(limit(bytes)).unwrap();
        let Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) = step.within(Some(1)).compile(0)
        else {
            panic!("a step takes more than a byte")
        };
        assert!(within(smallest).fits);
        let refused = within(1);
        assert_eq!((refused.fits, refused.arena_bytes), (false, smallest));
    }
}
