//! Searches over plans: the largest batch that fits, and the mesh for a number of ranks.

use std::fmt;

use gapless_alloc::draw::Bytes;
use gapless_engine::TrainError;
use gapless_engine::compile::Error as CompileError;
use gapless_models::hf::Architecture;
use gapless_parallel::Mesh;
use serde::Serialize;

use super::{ConfigError, Fits, Limit, Step};
use crate::run::RunConfig;

/// The largest batch that fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LargestBatch {
    /// Number of sequences of the batch.
    pub batch: usize,
    /// Number of sequences of the next larger batch, which does not fit. A batch is a multiple of the number of
    /// micro-batches over all ranks that share it.
    pub next: usize,
    /// Number of batches that were planned.
    pub planned: usize,
}

impl Step {
    /// Finds the largest batch whose arenas are within a limit, with the step's number of micro-batches. Returns `None`
    /// if not even the smallest batch fits.
    ///
    /// # Errors
    /// Returns an error if the smallest batch cannot be planned.
    pub fn largest_batch(&self, limit: &Limit) -> Result<Option<LargestBatch>, TrainError> {
        let Mesh { data, expert, .. } = self.options.mesh;
        let smallest = self.options.micro_batches * data * expert;
        let mut planned = 0;
        let mut fits = |factor: usize| -> Result<bool, TrainError> {
            let mut step = self.clone();
            step.options.batch = smallest.saturating_mul(factor);
            // Options refuse a batch with more tokens than any step has, and compiling one with too many bytes.
            if factor > 1 && step.options.check().is_err() {
                return Ok(false);
            }
            planned += 1;
            match step.fits(limit.clone()) {
                Ok(fits) => Ok(fits.fits),
                Err(TrainError::Compile(CompileError::TooLarge { .. })) if factor > 1 => Ok(false),
                Err(error) => Err(error),
            }
        };
        // `low` fits, and `high` does not.
        let (mut low, mut high) = (0, 1);
        while fits(high)? {
            (low, high) = (high, 2 * high);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle)? { low = middle } else { high = middle }
        }
        Ok((low > 0).then_some(LargestBatch { batch: low * smallest, next: high * smallest, planned }))
    }
}

impl fmt::Display for LargestBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, next, planned } = self;
        write!(f, "largest batch that fits: {batch} sequences; {next} do not fit ({planned} batches were planned)")
    }
}

/// A mesh that was compared with others.
#[derive(Debug, Clone, Serialize)]
pub struct MeshOption {
    /// The mesh.
    pub mesh: Mesh,
    /// Size of the largest arena of a rank in bytes; `None` if the step does not exist on this mesh.
    pub arena_bytes: Option<u64>,
    /// Estimated time of the step in milliseconds.
    pub step_ms: Option<f64>,
    /// Whether every rank fits; `None` if no limit is known.
    pub fits: Option<bool>,
    /// The reason why the step does not exist on this mesh.
    pub refused: Option<String>,
}

/// The meshes of a number of ranks, and the best of them.
#[derive(Debug, Clone, Serialize)]
pub struct MeshChoice {
    /// All meshes. Those with expert ranks are left out if the model has no experts.
    pub compared: Vec<MeshOption>,
    /// Index of the chosen mesh: the fastest that fits. If none fits, the one whose ranks need least. `None` if the
    /// step exists on none of them.
    pub chosen: Option<usize>,
}

impl MeshChoice {
    /// Plans and times a run's step on every mesh of `ranks` ranks. The mesh of the run itself has no effect.
    ///
    /// # Errors
    /// Returns an error if the run is invalid for another reason than its mesh.
    pub fn among(run: &RunConfig, ranks: usize) -> Result<Self, ConfigError> {
        let on = |mesh| RunConfig { mesh, ..run.clone() };
        let has_experts = matches!(Step::new(&on(Mesh::default()))?.architecture(), Architecture::Moe(_));
        let divisors = |n: usize| (1..=n).filter(move |extent| n.is_multiple_of(*extent));
        let meshes = divisors(ranks).flat_map(|pipeline| {
            let rest = ranks / pipeline;
            let expert_ranks = divisors(rest).filter(|&expert| has_experts || expert == 1);
            expert_ranks.map(move |expert| Mesh { pipeline, expert, data: rest / expert })
        });
        let compared: Vec<MeshOption> = meshes.map(|mesh| MeshOption::of(mesh, &on(mesh))).collect();
        let rank = |option: &MeshOption| {
            let milliseconds = option.step_ms.unwrap_or(f64::INFINITY);
            // Of meshes that do not fit, the one that needs least is preferred.
            match option.fits {
                Some(false) => (1, option.arena_bytes.unwrap_or(u64::MAX) as f64, milliseconds),
                _ => (0, milliseconds, option.arena_bytes.unwrap_or(u64::MAX) as f64),
            }
        };
        let possible = compared.iter().enumerate().filter(|(_, option)| option.refused.is_none());
        let best = possible.min_by(|(_, a), (_, b)| {
            let ((a, first, second), (b, other_first, other_second)) = (rank(a), rank(b));
            a.cmp(&b).then(first.total_cmp(&other_first)).then(second.total_cmp(&other_second))
        });
        let chosen = best.map(|(index, _)| index);
        Ok(Self { compared, chosen })
    }

    /// The chosen mesh.
    pub fn mesh(&self) -> Option<Mesh> {
        self.chosen.map(|index| self.compared[index].mesh)
    }
}

impl MeshOption {
    fn of(mesh: Mesh, run: &RunConfig) -> Self {
        let refused = |why: String| Self {
            mesh,
            arena_bytes: None,
            step_ms: None,
            fits: None,
            refused: Some(why.lines().next().unwrap_or_default().to_owned()),
        };
        let step = match run.check_keys().and_then(|()| Step::new(run)) {
            Ok(step) => step.with_little_work(),
            Err(error) => return refused(error.to_string()),
        };
        let (mut arenas, mut programs) = (Vec::new(), Vec::new());
        for stage in 0..mesh.pipeline {
            match step.compile(stage) {
                Ok((executable, compiled)) => {
                    arenas.push(executable.arena_bytes());
                    programs.extend(compiled.program);
                }
                Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => arenas.push(smallest),
                Err(error) => return refused(error.to_string()),
            }
        }
        let timing = if programs.len() == arenas.len() { step.timing(&programs).ok() } else { None };
        let fits = step.limit().map(|limit| Fits::new(mesh, &arenas, limit).fits);
        let step_ms = timing.map(|timing| timing.nanoseconds() as f64 / 1e6);
        Self { mesh, arena_bytes: arenas.iter().copied().max(), step_ms, fits, refused: None }
    }
}

impl fmt::Display for MeshChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>8} {:>6} {:>7} {:>12} {:>12}", "pipeline", "data", "experts", "largest rank", "step")?;
        for (index, option) in self.compared.iter().enumerate() {
            let MeshOption { mesh: Mesh { pipeline, data, expert }, arena_bytes, step_ms, fits, refused } = option;
            write!(f, "{pipeline:>8} {data:>6} {expert:>7} ")?;
            if let Some(why) = refused {
                writeln!(f, "{why}")?;
                continue;
            }
            let arena = arena_bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
            let time = step_ms.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
            let verdict = match fits {
                Some(true) => "  fits",
                Some(false) => "  does not fit",
                None => "",
            };
            let mark = if self.chosen == Some(index) { "  <- chosen" } else { "" };
            writeln!(f, "{arena:>12} {time:>12}{verdict}{mark}")?;
        }
        Ok(())
    }
}
