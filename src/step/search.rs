//! Searches for the fastest step that fits a number of GPUs: its mesh, its micro-batches and its recomputation.
//!
//! In: a run and a number of ranks. Out: the fastest configuration whose plan fits, and the faster ones that do not fit. All
//! configurations are timed by sketches, which take two micro-batches each. Only those are planned whose sure bytes fit, the
//! fastest first, until one fits.

use std::fmt;

use gapless_alloc::draw::Bytes;
use gapless_engine::recompute::{Layers, Recompute};
use gapless_parallel::Mesh;
use serde::Serialize;

use super::choose::meshes;
use super::{ConfigError, Step};
use crate::run::RunConfig;

/// Most faster configurations that are printed.
const MAX_SHOWN: usize = 8;

/// A configuration of a step.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// The mesh.
    pub mesh: Mesh,
    /// Whether tensor ranks divide the tokens between operations on split tensors.
    pub sequence_parallel: bool,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Whether all layers are recomputed.
    pub recomputes: bool,
    /// Time of the step in milliseconds, as its sketch estimates it.
    pub step_ms: f64,
    /// Bytes of the rank with the most bytes: of its arena if the step was planned, otherwise a lower bound.
    pub bytes: u64,
    /// Whether the step was planned.
    pub is_planned: bool,
    /// Bytes that the arena of a rank may take.
    pub limit_bytes: u64,
}

/// The result of a search.
#[derive(Debug, Clone, Serialize)]
pub struct Search {
    /// Number of configurations that exist.
    pub configurations: usize,
    /// Number of configurations that were planned.
    pub planned: usize,
    /// The configurations that are faster than the chosen one, and do not fit. The fastest is first.
    pub faster: Vec<Candidate>,
    /// The fastest configuration that fits; `None` if none fits.
    pub chosen: Option<Candidate>,
}

impl Search {
    /// Searches the meshes of `ranks` ranks, each number of micro-batches that is a power of two, and recomputation of no or of
    /// all layers. Other settings are those of the run, which must name a device.
    ///
    /// # Errors
    /// Returns an error if the run is invalid for another reason than what is searched, or if no configuration exists.
    pub fn among(run: &RunConfig, ranks: usize) -> Result<Self, ConfigError> {
        let configured = |mesh: Mesh, micro_batches, recompute| {
            let mut run = RunConfig { mesh, ..run.clone() };
            run.estimate.rank = "0".into();
            run.step.sequence_parallel = mesh.tensor > 1;
            run.step.micro_batches = micro_batches;
            run.memory.recompute = recompute;
            run
        };
        let first = Step::new(&configured(Mesh::default(), 1, Recompute::None))?;
        let mut candidates: Vec<(Step, Candidate)> = Vec::new();
        for mesh in meshes(&first, ranks) {
            let counts = std::iter::successors(Some(1), |count| Some(2 * count));
            for micro_batches in counts.take_while(|count| count * mesh.data * mesh.expert <= first.options.batch) {
                let with = |recompute| configured(mesh, micro_batches, recompute);
                let plain = with(Recompute::None);
                let Ok(step) = plain.check_keys().and_then(|()| Step::new(&plain)) else { continue };
                let Ok(graph) = step.record() else { continue };
                for recompute in [Recompute::None, Recompute::Layers(Layers::All)] {
                    let recomputes = recompute != Recompute::None;
                    let step = Step::new(&with(recompute))?;
                    let Ok(Some(key)) = step.sketch_key() else { continue };
                    let Ok(sketch) = step.sketch(&graph, &key) else { continue };
                    let (Ok(timing), Ok(sure)) = (step.timing_by(&sketch), step.surely_alive(&sketch)) else {
                        continue;
                    };
                    let candidate = Candidate {
                        mesh,
                        sequence_parallel: mesh.tensor > 1,
                        micro_batches,
                        recomputes,
                        step_ms: timing.nanoseconds() as f64 / 1e6,
                        bytes: sure.into_iter().max().unwrap_or(0),
                        is_planned: false,
                        limit_bytes: step.device_bytes(),
                    };
                    candidates.push((step, candidate));
                }
            }
        }
        if candidates.is_empty() {
            let why = format!("no mesh of {ranks} ranks has a step of this batch");
            return Err(ConfigError::value("step.batch", why, "change the batch, the schedule or the number of ranks"));
        }
        candidates.sort_by(|(_, a), (_, b)| a.step_ms.total_cmp(&b.step_ms).then(a.bytes.cmp(&b.bytes)));
        let mut search = Self { configurations: candidates.len(), planned: 0, faster: Vec::new(), chosen: None };
        for (step, mut candidate) in candidates {
            if candidate.bytes <= candidate.limit_bytes
                && let Some(limit) = step.limit()
                && let Ok(fits) = step.fits(limit)
            {
                search.planned += 1;
                (candidate.bytes, candidate.is_planned) = (fits.arena_bytes, true);
                if fits.fits {
                    search.chosen = Some(candidate);
                    break;
                }
            }
            search.faster.push(candidate);
        }
        Ok(search)
    }
}

impl Candidate {
    /// Gives a run this configuration.
    pub fn apply(&self, run: &mut RunConfig) {
        run.mesh = self.mesh;
        run.step.sequence_parallel = self.sequence_parallel;
        run.step.micro_batches = self.micro_batches;
        run.memory.recompute = if self.recomputes { Recompute::Layers(Layers::All) } else { Recompute::None };
    }

    /// Returns the flags of the command that have this configuration.
    pub fn flags(&self) -> String {
        let Self { mesh: Mesh { tensor, pipeline, expert, data, .. }, micro_batches, .. } = self;
        let mut flags = format!("--micro-batches {micro_batches}");
        for (name, extent) in [("tensor", tensor), ("pipeline", pipeline), ("expert", expert), ("data", data)] {
            if *extent > 1 {
                flags += &format!(" --{name}-ranks {extent}");
            }
        }
        flags += if self.sequence_parallel { " --sequence-parallel true" } else { "" };
        flags + if self.recomputes { " --recompute layers" } else { "" }
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { configurations, planned, faster, chosen } = self;
        writeln!(f, "{configurations} configurations, of which {planned} were planned")?;
        // If none fits, those are shown that need least.
        let mut shown: Vec<&Candidate> = faster.iter().collect();
        match chosen {
            Some(_) => drop(shown.drain(..shown.len().saturating_sub(MAX_SHOWN))),
            None => {
                shown.sort_by_key(|candidate| candidate.bytes);
                shown.truncate(MAX_SHOWN);
            }
        }
        for candidate in shown.into_iter().chain(chosen) {
            let Candidate { step_ms, bytes, is_planned, limit_bytes, .. } = candidate;
            let least = if *is_planned { "" } else { "at least " };
            let verdict = match bytes > limit_bytes {
                true => format!("does not fit: {} too much", Bytes(bytes - limit_bytes)),
                false if *is_planned => "fits".to_owned(),
                false => "has no plan".to_owned(),
            };
            writeln!(f, "{step_ms:>10.1} ms  {least}{}, {verdict}: {}", Bytes(*bytes), candidate.flags())?;
        }
        match chosen {
            Some(chosen) => writeln!(f, "the fastest that fits: {}", chosen.flags()),
            None => writeln!(f, "no configuration fits"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the fastest configuration does not fit by a byte, a slower one is chosen, and all faster ones take too much.
    #[test]
    fn the_fastest_that_fits_is_chosen() {
        let text = "model = 'gpt:vocabulary=256,layers=4,heads=4,width=64'\nestimate.profile = 'h100'\n\
                    step = { batch = 8, sequence = 64, precision = 'bf16' }";
        let mut run = RunConfig::parse(text, &[]).unwrap();
        let wide = Search::among(&run, 4).unwrap();
        assert!(wide.faster.is_empty() && wide.planned == 1 && wide.configurations > 20, "{wide}");
        let fastest = wide.chosen.unwrap();
        let step = |candidate: &Candidate| {
            let mut run = run.clone();
            candidate.apply(&mut run);
            Step::new(&run).unwrap()
        };
        let planned = step(&fastest);
        assert_eq!(planned.fits(planned.limit().unwrap()).unwrap().arena_bytes, fastest.bytes);
        let outside = planned.device.overheads(fastest.mesh).bytes();
        run.estimate.memory = Some(outside + fastest.bytes - 1);
        let narrow = Search::among(&run, 4).unwrap();
        let chosen = narrow.chosen.as_ref().unwrap();
        assert!(chosen.bytes <= chosen.limit_bytes && chosen.step_ms >= fastest.step_ms, "{narrow}");
        assert!(narrow.faster.iter().all(|candidate| candidate.bytes > candidate.limit_bytes), "{narrow}");
        assert_eq!(narrow.faster[0].flags(), fastest.flags());
        assert!(
            narrow.to_string().contains("does not fit: ") && narrow.to_string().contains(&chosen.flags()),
            "{narrow}"
        );
        run.estimate.memory = Some(outside + 1000);
        let none = Search::among(&run, 4).unwrap();
        assert!(none.chosen.is_none() && none.faster.len() == none.configurations && none.planned == 0, "{none}");
    }
}
