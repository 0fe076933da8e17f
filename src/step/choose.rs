//! Searches over plans: the largest batch that fits, and the mesh for a number of ranks.

use std::fmt;

use gapless_alloc::draw::Bytes;
use gapless_engine::compile::Error as CompileError;
use gapless_engine::recompute::Recompute;
use gapless_engine::{MemoryOptions, TrainError};
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
        let smallest = self.options.parts();
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
    /// Whether tensor ranks divide the tokens between operations on split tensors.
    pub sequence_parallel: bool,
    /// Size of the largest arena of a rank in bytes; `None` if the step does not exist on this mesh.
    pub arena_bytes: Option<u64>,
    /// Estimated time of the step in milliseconds.
    pub step_ms: Option<f64>,
    /// Whether every rank fits; `None` if no limit is known.
    pub fits: Option<bool>,
    /// The error, if the step does not exist on this mesh.
    pub refused: Option<String>,
    /// The same reason in a few words.
    pub reason: Option<String>,
}

/// The meshes of a number of ranks, and the best of them.
#[derive(Debug, Clone, Serialize)]
pub struct MeshChoice {
    /// All meshes of which each node has whole groups of tensor ranks. Those with expert ranks are left out if the model
    /// has no experts.
    pub compared: Vec<MeshOption>,
    /// Index of the chosen mesh: the fastest that fits. If none fits, the one whose ranks need least. `None` if the
    /// step exists on none of them.
    pub chosen: Option<usize>,
    /// The budget of each rank in bytes within which the meshes were planned, because none fits without recomputation.
    pub budget: Option<u64>,
    /// Number of micro-batches of the step.
    pub micro_batches: usize,
}

/// Returns the meshes of a number of ranks. Messages between tensor ranks are in the path of the computation, so these
/// ranks are on one node. Only a model with experts has expert ranks.
pub(super) fn meshes(step: &Step, ranks: usize) -> Vec<Mesh> {
    let has_experts = matches!(step.architecture(), Architecture::Moe(_));
    let divisors = |n: usize| (1..=n).filter(move |extent| n.is_multiple_of(*extent));
    let tensor_ranks = divisors(ranks).filter(|tensor| step.device.node.is_multiple_of(*tensor));
    let meshes = tensor_ranks.flat_map(|tensor| {
        divisors(ranks / tensor).flat_map(move |pipeline| {
            let rest = ranks / tensor / pipeline;
            let expert_ranks = divisors(rest).filter(move |&expert| expert == 1 || has_experts);
            expert_ranks.map(move |expert| Mesh { tensor, pipeline, expert, data: rest / expert, ..Mesh::default() })
        })
    });
    meshes.collect()
}

impl MeshChoice {
    /// Plans and times a run's step on every mesh of `ranks` ranks. The mesh of the run itself has no effect. Tensor ranks
    /// divide the tokens, too, if these are divisible (sequence parallelism), because that takes fewer bytes for the same
    /// messages. If no mesh fits, and the run sets neither a budget nor a recomputation, all meshes are planned again within the limit, and
    /// these plans are returned if any of them fits.
    ///
    /// # Errors
    /// Returns an error if the run is invalid for another reason than its mesh.
    pub fn among(run: &RunConfig, ranks: usize) -> Result<Self, ConfigError> {
        // The ranks that are reported on may not exist on every mesh.
        let on = |mesh, sequence_parallel| {
            let mut run = RunConfig { mesh, ..run.clone() };
            run.estimate.rank = "0".into();
            run.step.sequence_parallel = sequence_parallel;
            run
        };
        let first = Step::new(&on(Mesh::default(), false))?;
        let meshes = meshes(&first, ranks);
        let best_of = |mesh: Mesh, budget| {
            let option = MeshOption::of(&on(mesh, mesh.tensor > 1), budget);
            match option.refused {
                Some(_) if mesh.tensor > 1 => MeshOption::of(&on(mesh, false), budget),
                _ => option,
            }
        };
        let compare = |budget| meshes.iter().map(|&mesh| best_of(mesh, budget)).collect::<Vec<MeshOption>>();
        let fits = |compared: &[MeshOption]| compared.iter().any(|option| option.fits == Some(true));
        let (mut compared, mut budget) = (compare(None), None);
        let MemoryOptions { recompute, budget: given, .. } = &first.options.memory;
        if let Some(limit) = first.limit().map(|limit| limit.typed_bytes())
            && (recompute, given) == (&Recompute::None, &None)
            && !fits(&compared)
        {
            let within = compare(Some(limit));
            if fits(&within) {
                (compared, budget) = (within, Some(limit));
            }
        }
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
        Ok(Self { compared, chosen, budget, micro_batches: first.options.micro_batches })
    }

    /// The chosen mesh.
    pub fn best(&self) -> Option<&MeshOption> {
        self.chosen.map(|index| &self.compared[index])
    }
}

impl MeshOption {
    /// Plans and times a run on its mesh, within a budget if one is given.
    fn of(run: &RunConfig, budget: Option<u64>) -> Self {
        let (mesh, sequence_parallel) = (run.mesh, run.step.sequence_parallel);
        let refused = |why: String| {
            let why = why.lines().next().unwrap_or_default().to_owned();
            Self {
                mesh,
                sequence_parallel,
                arena_bytes: None,
                step_ms: None,
                fits: None,
                reason: Some(shortened(&why)),
                refused: Some(why),
            }
        };
        let step = match run.check_keys().and_then(|()| Step::new(run)) {
            Ok(step) if budget.is_some() => step.within(budget),
            Ok(step) => step,
            Err(error) => return refused(error.to_string()),
        };
        let limit = step.limit();
        let (mut arenas, mut programs) = (Vec::new(), Vec::new());
        for stage in 0..mesh.pipeline {
            match step.arena(stage, limit.as_ref()) {
                Ok((bytes, program)) => {
                    arenas.push(bytes);
                    programs.extend(program);
                }
                Err(error) => return refused(error.to_string()),
            }
        }
        let timing = if programs.len() == arenas.len() { step.timing(&programs).ok() } else { None };
        let fits = limit.map(|limit| Fits::new(mesh, &arenas, limit).fits);
        let step_ms = timing.map(|timing| timing.nanoseconds() as f64 / 1e6);
        let arena_bytes = arenas.iter().copied().max();
        Self { mesh, sequence_parallel, arena_bytes, step_ms, fits, refused: None, reason: None }
    }
}

/// Shortens the reason for a refusal to a few words for a table: without the key, the remedy and details.
fn shortened(why: &str) -> String {
    const MAX_CHARS: usize = 60;
    if why.contains("do not divide into") {
        return "batch not divisible".to_owned();
    }
    let why = why.split(';').next().unwrap_or_default();
    let why = why.split_once(": ").map_or(why, |(_, why)| why);
    match why.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", why[..end].trim_end()),
        None => why.to_owned(),
    }
}

impl fmt::Display for MeshChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>8} {:>8} {:>6} {:>7} {:>12} {:>12}",
            "tensor", "pipeline", "data", "experts", "largest rank", "step"
        )?;
        for (index, option) in self.compared.iter().enumerate() {
            let MeshOption { mesh, sequence_parallel, arena_bytes, step_ms, fits, reason, .. } = option;
            let Mesh { tensor, pipeline, data, expert, .. } = mesh;
            let tensor = format!("{tensor}{}", if *sequence_parallel { " + seq" } else { "" });
            write!(f, "{tensor:>8} {pipeline:>8} {data:>6} {expert:>7} ")?;
            if let Some(why) = reason {
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
        if let Some(budget) = self.budget {
            writeln!(f, "no mesh fits without recomputation; these plans have --budget {}MiB", budget >> 20)?;
        }
        let longest = self.compared.iter().map(|option| option.mesh.pipeline).max().unwrap_or(1);
        if self.micro_batches < longest {
            writeln!(
                f,
                "--micro-batches {}: pipelines of more ranks than micro-batches are mostly idle; more micro-batches make them faster",
                self.micro_batches
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_in_a_table_are_short() {
        let long = format!("mesh.data: {}; choose another", "x".repeat(80));
        for (why, short) in [
            ("step.micro_batches: 4 sequences do not divide into 3 micro-batches; make", "batch not divisible"),
            ("pipeline.schedule: dualpipev needs 4 micro-batches; choose another", "dualpipev needs 4 micro-batches"),
            (&long, &format!("{}…", "x".repeat(60))),
        ] {
            assert_eq!(shortened(why), short);
        }
    }

    #[test]
    fn the_rank_that_is_shown_does_not_limit_the_meshes() {
        let text = "model = 'gpt:vocabulary=64,layers=4,heads=2,width=32'\nestimate.rank = '1'\n\
                    step = { batch = 4, sequence = 16 }";
        let choice = MeshChoice::among(&RunConfig::parse(text, &[]).unwrap(), 2).unwrap();
        assert!(
            choice.compared.len() == 3 && choice.compared.iter().all(|option| option.refused.is_none()),
            "{choice}"
        );
    }
}
