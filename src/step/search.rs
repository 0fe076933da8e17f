//! Searches for the fastest step on a number of ranks that fits: its mesh and, on demand, its micro-batches and its
//! recomputation.
//!
//! In: a run and a number of ranks. Out: all configurations in the order of their time, and the fastest whose plan fits. All
//! configurations are timed by sketches, which take two micro-batches each. Those are planned whose sure bytes fit, the
//! fastest first, until one fits.

use std::fmt;

use gapless_alloc::draw::Bytes;
use gapless_engine::compile::step::text;
use gapless_engine::recompute::{Layers, Recompute};
use rayon::prelude::*;
use serde::Serialize;

use super::{ConfigError, Fits, Layout, SketchBase, Step};
use crate::run::RunConfig;

/// Most faster configurations that are printed if there are many.
const MAX_SHOWN: usize = 8;
/// Most configurations that are all printed.
const FEW: usize = 40;

/// The settings that a search varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Varied {
    /// The mesh, with sequence parallelism and the stage of ZeRO.
    Mesh,
    /// Also the number of micro-batches, in powers of two, and recomputation of no or of all layers.
    MeshAndMemory,
}

/// A configuration of a step.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// The mesh, and how its ranks share tensors.
    #[serde(flatten)]
    pub layout: Layout,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// The activations that are recomputed.
    #[serde(with = "text")]
    pub recompute: Recompute,
    /// Time of the step in milliseconds: of the compiled step if it was planned, otherwise an estimate by its sketch.
    pub step_ms: Option<f64>,
    /// Bytes of the rank with the most bytes: of its arena if the step was planned, otherwise a lower bound.
    pub arena_bytes: Option<u64>,
    /// Whether the step was planned.
    pub is_planned: bool,
    /// Bytes that the arena of a rank may take; `None` if no limit is known.
    pub limit_bytes: Option<u64>,
    /// Whether every rank fits; `None` if no limit is known, or if the step was not planned.
    pub fits: Option<bool>,
    /// The error, if there is no such step.
    pub refused: Option<String>,
}

/// The configurations of a step on a number of ranks, and the best of them.
#[derive(Debug, Clone, Serialize)]
pub struct Search {
    /// The configurations, the fastest first, and then those that do not exist.
    pub compared: Vec<Candidate>,
    /// Index of the chosen configuration: the fastest that fits. If none fits, the one that needs least. `None` if the step
    /// exists in none of them.
    pub chosen: Option<usize>,
    /// The budget of each rank in bytes within which configurations were planned, because none fits without recomputation.
    pub budget: Option<u64>,
}

impl Search {
    /// Searches the layouts of `ranks` ranks ([`Layout::all`]). The mesh of the run itself has no effect; settings that are
    /// not varied are those of the run. If no mesh fits, and neither a recomputation nor a budget is set or varied, steps are
    /// planned within the limit, the fastest first, until one fits.
    ///
    /// # Errors
    /// Returns an error if the run is invalid for another reason than what is searched.
    pub fn among(run: &RunConfig, ranks: usize, varied: Varied) -> Result<Self, ConfigError> {
        let first = Step::new(&configured(run, Layout::default(), run.step.micro_batches, &run.memory.recompute))?;
        let (batch, own) = (first.options.batch, first.options.micro_batches);
        let (counts, policies) = match varied {
            Varied::Mesh => (vec![own], vec![run.memory.recompute.clone()]),
            Varied::MeshAndMemory => {
                let counts =
                    std::iter::successors(Some(1), |count| Some(2 * count)).take_while(|&count| count <= batch);
                (counts.collect(), vec![Recompute::None, Recompute::Layers(Layers::All)])
            }
        };
        let layouts = Layout::all(&first, ranks);
        let graphs: Vec<(Layout, usize)> =
            layouts.iter().flat_map(|&layout| counts.iter().map(move |&count| (layout, count))).collect();
        let estimate = |&(layout, micro_batches): &(Layout, usize)| estimated(run, layout, micro_batches, &policies);
        // While operations are timed on this machine, no other work may run.
        let estimated: Vec<Vec<Candidate>> = match first.device.is_measured() {
            true => graphs.iter().map(estimate).collect(),
            false => graphs.par_iter().map(estimate).collect(),
        };
        let mut compared: Vec<Candidate> = estimated.into_iter().flatten().collect();
        if varied == Varied::MeshAndMemory {
            compared.retain(|candidate| candidate.refused.is_none());
        }
        let order = |candidate: &Candidate| {
            (candidate.refused.is_some(), candidate.step_ms.unwrap_or(0.0), candidate.arena_bytes)
        };
        compared.sort_by(|a, b| {
            let ((a, a_ms, a_bytes), (b, b_ms, b_bytes)) = (order(a), order(b));
            a.cmp(&b).then(a_ms.total_cmp(&b_ms)).then(a_bytes.cmp(&b_bytes))
        });
        let mut search = Self { compared, chosen: None, budget: None };
        search.plan(run);
        if !search.fits()
            && varied == Varied::Mesh
            && (&run.memory.recompute, run.memory.budget) == (&Recompute::None, None)
            && let Some(limit) = first.limit()
        {
            let mut within = search.clone();
            within.budget = Some(limit.typed_bytes());
            within.plan(run);
            if within.fits() {
                search = within;
            }
        }
        if search.chosen.is_none() {
            let possible = search.compared.iter().enumerate().filter(|(_, candidate)| candidate.refused.is_none());
            search.chosen = possible.min_by_key(|(_, candidate)| candidate.arena_bytes).map(|(index, _)| index);
        }
        Ok(search)
    }

    /// Plans configurations, the fastest first, until one fits. Without a limit, the fastest is chosen.
    fn plan(&mut self, run: &RunConfig) {
        let budget = self.budget;
        for (index, candidate) in self.compared.iter_mut().enumerate().filter(|(_, it)| it.refused.is_none()) {
            let is_too_large = candidate.limit_bytes.is_some_and(|limit| candidate.arena_bytes > Some(limit));
            if is_too_large && budget.is_none() {
                continue;
            }
            candidate.plan(run, budget);
            if candidate.refused.is_none() && candidate.fits != Some(false) {
                self.chosen = Some(index);
                return;
            }
        }
    }

    /// The chosen configuration.
    pub fn best(&self) -> Option<&Candidate> {
        self.chosen.map(|index| &self.compared[index])
    }

    /// True if the chosen configuration fits, or if no limit is known.
    pub fn fits(&self) -> bool {
        self.best().is_some_and(|best| best.is_planned && best.fits != Some(false))
    }
}

/// Returns a run with this configuration.
fn configured(run: &RunConfig, layout: Layout, micro_batches: usize, recompute: &Recompute) -> RunConfig {
    let mut run = run.clone();
    Candidate::new(layout, micro_batches, recompute).apply(&mut run);
    // The ranks that are reported on may not exist on every mesh.
    run.estimate.rank = "0".into();
    run
}

/// Estimates the steps of a layout under several recompute policies. If there is no such step with sequence parallelism, those
/// without it are estimated.
fn estimated(run: &RunConfig, layout: Layout, micro_batches: usize, policies: &[Recompute]) -> Vec<Candidate> {
    let of = |layout| sketched(run, layout, micro_batches, policies);
    let made = match of(layout) {
        Err(_) if layout.sequence_parallel => of(Layout { sequence_parallel: false, ..layout }),
        made => made,
    };
    made.unwrap_or_else(|why| {
        let refused = Candidate::new(layout, micro_batches, &policies[0]);
        vec![Candidate { refused: Some(why.lines().next().unwrap_or_default().to_owned()), ..refused }]
    })
}

fn sketched(
    run: &RunConfig,
    layout: Layout,
    micro_batches: usize,
    policies: &[Recompute],
) -> Result<Vec<Candidate>, String> {
    let of_run = |recompute: &Recompute| {
        let run = configured(run, layout, micro_batches, recompute);
        run.check_keys().and_then(|()| Step::new(&run)).map_err(|error| error.to_string())
    };
    let first = of_run(&policies[0])?;
    let base = SketchBase::new(&first);
    let graph = base.graph(&first).map_err(|error| error.to_string())?;
    let sketch = |recompute: &Recompute| {
        let step = of_run(recompute)?;
        // The sketch of a step with a budget would need its plan. The sketch without recomputation gives no bound.
        let has_budget = step.options.memory.budget.is_some();
        let sketched = if has_budget { step.within(None) } else { step.clone() };
        let Some(key) = sketched.sketch_key().map_err(|error| error.to_string())? else {
            return Err("a step with a budget has no sketch".to_owned());
        };
        let sketch = graph.sketch(&sketched, &key).map_err(|error| error.to_string())?;
        let timing = sketched.timing_by(&sketch).map_err(|error| error.to_string())?;
        let sure = sketched.surely_alive(&sketch).map_err(|error| error.to_string())?.into_iter().max();
        Ok(Candidate {
            step_ms: Some(timing.nanoseconds() as f64 / 1e6),
            arena_bytes: sure.filter(|_| !has_budget),
            limit_bytes: step.limit().map(|limit| limit.bytes),
            ..Candidate::new(layout, micro_batches, recompute)
        })
    };
    policies.iter().map(sketch).collect()
}

impl Candidate {
    fn new(layout: Layout, micro_batches: usize, recompute: &Recompute) -> Self {
        Self {
            layout,
            micro_batches,
            recompute: recompute.clone(),
            step_ms: None,
            arena_bytes: None,
            is_planned: false,
            limit_bytes: None,
            fits: None,
            refused: None,
        }
    }

    /// Plans the step on every pipeline rank, within a budget if one is given.
    fn plan(&mut self, run: &RunConfig, budget: Option<u64>) {
        if let Err(why) = self.try_plan(run, budget) {
            self.refused = Some(why.lines().next().unwrap_or_default().to_owned());
        }
    }

    fn try_plan(&mut self, run: &RunConfig, budget: Option<u64>) -> Result<(), String> {
        let run = configured(run, self.layout, self.micro_batches, &self.recompute);
        let step = Step::new(&run).map_err(|error| error.to_string())?;
        let step = if budget.is_some() { step.within(budget) } else { step };
        let limit = step.limit();
        let mesh = self.layout.mesh;
        let (mut arenas, mut programs) = (Vec::new(), Vec::new());
        for stage in 0..mesh.pipeline {
            let (bytes, program) = step.arena(stage, limit.as_ref()).map_err(|error| error.to_string())?;
            arenas.push(bytes);
            programs.extend(program);
        }
        if programs.len() == arenas.len() {
            let timing = step.timing(&programs).map_err(|error| error.to_string())?;
            self.step_ms = Some(timing.nanoseconds() as f64 / 1e6);
        }
        self.fits = limit.map(|limit| Fits::new(mesh, &arenas, limit).fits);
        (self.arena_bytes, self.is_planned) = (arenas.into_iter().max(), true);
        Ok(())
    }

    /// Gives a run this configuration.
    pub fn apply(&self, run: &mut RunConfig) {
        self.layout.apply(run);
        run.step.micro_batches = self.micro_batches;
        run.memory.recompute = self.recompute.clone();
    }

    /// Returns the flags of the command that have this configuration.
    pub fn flags(&self) -> String {
        let mut flags = vec![format!("--micro-batches {}", self.micro_batches)];
        flags.extend(self.layout.flags());
        flags.extend((self.recompute != Recompute::None).then(|| format!("--recompute {}", self.recompute)));
        flags.join(" ")
    }
}

/// Writes the time, the bytes and the flags, as a line of a table.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step_ms, arena_bytes, is_planned, limit_bytes, fits, refused, .. } = self;
        let time = step_ms.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
        let bytes = arena_bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
        let least = if *is_planned || arena_bytes.is_none() { "" } else { "at least " };
        let excess = arena_bytes.zip(*limit_bytes).map_or(0, |(bytes, limit)| bytes.saturating_sub(limit));
        let verdict = match (refused, fits) {
            (Some(why), _) => shortened(why),
            (None, Some(true)) => "fits".to_owned(),
            (None, _) if excess > 0 => format!("does not fit: {} too much", Bytes(excess)),
            (None, Some(false)) => "does not fit".to_owned(),
            (None, None) => String::new(),
        };
        write!(f, "{time:>12} {least:>9}{bytes:>12}  {}", self.flags())?;
        if verdict.is_empty() { Ok(()) } else { write!(f, "  {verdict}") }
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compared, chosen, budget } = self;
        let planned = compared.iter().filter(|candidate| candidate.is_planned).count();
        writeln!(f, "{} configurations, of which {planned} were planned", compared.len())?;
        let mut shown: Vec<usize> = (0..compared.len()).collect();
        if compared.len() > FEW {
            let end = chosen.filter(|_| self.fits()).map_or(0, |chosen| chosen + 1);
            shown = (end.saturating_sub(MAX_SHOWN + 1)..end).collect();
            // If none fits, those are shown that need least.
            if shown.is_empty() {
                shown = (0..compared.len()).filter(|&index| compared[index].refused.is_none()).collect();
                shown.sort_by_key(|&index| compared[index].arena_bytes);
                shown.truncate(MAX_SHOWN);
            }
        }
        for index in shown {
            writeln!(f, "{}{}", compared[index], if *chosen == Some(index) { "  <- chosen" } else { "" })?;
        }
        if let Some(budget) = budget {
            writeln!(f, "no mesh fits without recomputation; planned ones have --budget {}MiB", budget >> 20)?;
        }
        let longest = |candidate: &Candidate| candidate.layout.mesh.pipeline > candidate.micro_batches;
        if compared.iter().any(longest) && compared.iter().all(|it| it.micro_batches == compared[0].micro_batches) {
            writeln!(
                f,
                "--micro-batches {}: pipelines of more ranks than micro-batches are mostly idle; more micro-batches make them faster",
                compared[0].micro_batches
            )?;
        }
        match self.best() {
            Some(best) if best.fits == Some(true) => writeln!(f, "the fastest that fits: {}", best.flags()),
            Some(best) if best.fits.is_none() && best.is_planned => writeln!(f, "the fastest: {}", best.flags()),
            Some(best) => writeln!(f, "no configuration fits; the one that needs least: {}", best.flags()),
            None => writeln!(f, "no configuration exists"),
        }
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
        let search = Search::among(&RunConfig::parse(text, &[]).unwrap(), 2, Varied::Mesh).unwrap();
        // Data, tensor and pipeline ranks, and shard ranks in two stages.
        assert_eq!(search.compared.len(), 5, "{search}");
        assert!(search.compared.iter().all(|candidate| candidate.refused.is_none()), "{search}");
        assert!(search.chosen == Some(0) && search.compared.iter().filter(|it| it.is_planned).count() == 1);
    }

    /// If the fastest configuration does not fit by a byte, a slower one is chosen, and all faster ones take too much.
    #[test]
    fn the_fastest_that_fits_is_chosen() {
        let text = "model = 'gpt:vocabulary=256,layers=4,heads=4,width=64'\nestimate.profile = 'h100'\n\
                    step = { batch = 8, sequence = 64, precision = 'bf16' }";
        let mut run = RunConfig::parse(text, &[]).unwrap();
        let search = |run: &RunConfig| Search::among(run, 4, Varied::MeshAndMemory).unwrap();
        let wide = search(&run);
        let planned = |search: &Search| search.compared.iter().filter(|candidate| candidate.is_planned).count();
        assert!(wide.chosen == Some(0) && planned(&wide) == 1 && wide.compared.len() > 40, "{wide}");
        let fastest = wide.best().unwrap();
        let step = |candidate: &Candidate| {
            let mut run = run.clone();
            candidate.apply(&mut run);
            Step::new(&run).unwrap()
        };
        let step = step(fastest);
        let fits = step.fits(step.limit().unwrap()).unwrap();
        assert_eq!(Some(fits.arena_bytes), fastest.arena_bytes);
        let outside = step.device.overheads(fastest.layout.mesh).bytes();
        run.estimate.memory = Some(outside + fits.arena_bytes - 1);
        let narrow = search(&run);
        let chosen = narrow.best().unwrap();
        assert!(chosen.arena_bytes <= chosen.limit_bytes && narrow.chosen > Some(0), "{narrow}");
        let faster = &narrow.compared[..narrow.chosen.unwrap()];
        assert!(faster.iter().all(|candidate| candidate.arena_bytes > candidate.limit_bytes), "{narrow}");
        assert_eq!(faster[0].flags(), fastest.flags());
        let text = narrow.to_string();
        assert!(text.contains("does not fit: ") && text.contains(&chosen.flags()), "{narrow}");
        run.estimate.memory = Some(outside + 1000);
        let none = search(&run);
        assert!(!none.fits() && planned(&none) == 0, "{none}");
        let least = none.compared.iter().map(|candidate| candidate.arena_bytes).min().unwrap();
        assert_eq!(none.best().unwrap().arena_bytes, least);
    }
}
