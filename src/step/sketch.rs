//! Estimates a whole step from two of its micro-batches. A sketch gives the step's time, and its *sure bytes*, which
//! are certainly alive at the same time.
//!
//! In: the graph of a step. Out: the time of each action of each stage, and the bytes that the action keeps. Times and
//! bytes are taken from programs that run two micro-batches, one after the other. A sketch is valid for all schedules
//! that assign the same stages to the same ranks and split the same backwards. Steps with a budget have no sketch,
//! because the sketch would require the search for their recomputation.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;

use gapless_alloc::Role;
use gapless_engine::TrainError;
use gapless_engine::compile::step::{RankSketch, StepGraph};
use gapless_engine::compile::{BufferKind, Instr, InstrKind, Program};
use gapless_engine::ops::Collective;
use gapless_engine::recompute::stages_that_recompute_twice;
use gapless_parallel::{Action, Kind, MicroBatch, StageId};

use super::timing::{ActionDurations, RankProgram};
use super::{Step, Timing, TimingError};

/// The properties of a schedule on which a sketch depends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SketchKey {
    /// Stages of each rank, in ascending order.
    pub(super) stages: Vec<Vec<u32>>,
    /// Whether the schedule has split backwards, and whether it has whole backwards.
    kinds: [bool; 2],
}

/// An action without its micro-batch.
pub(super) type ActionKind = (Kind, StageId);

/// Times and bytes by action.
#[derive(Debug, Clone)]
pub struct Sketch {
    pub(super) once: Variant,
    /// Times and bytes of a second variant: all values that a split backward recomputes for the input gradients are
    /// recomputed again for the weight gradients. `None` if the recompute policy does not allow this variant.
    pub(super) twice: Option<Variant>,
}

/// Times and bytes of one way to recompute.
#[derive(Debug, Clone)]
pub(super) struct Variant {
    pub measured: ActionDurations,
    pub ranks: Vec<KeptBytes>,
}

/// Bytes that a rank keeps across actions.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct KeptBytes {
    /// Bytes that live through the whole step.
    pub always: u64,
    /// For each micro-batch: bytes that live from one action to another.
    pub each: HashMap<(ActionKind, ActionKind), u64>,
    /// Sums over micro-batches: bytes that live from the first action of a kind to the last.
    pub sums: HashMap<ActionKind, u64>,
}

impl Step {
    /// Returns the key of the step's sketch, or `None` if the step has no sketch because it has a budget.
    ///
    /// # Errors
    /// Returns an error if the schedule does not exist for the step's shape.
    pub fn sketch_key(&self) -> Result<Option<SketchKey>, TimingError> {
        if self.options.memory.budget.is_some() {
            return Ok(None);
        }
        let table = self.options.pipeline.schedule.actions(&self.shape())?;
        let of_row = |row: &Vec<Action>| {
            let mut stages: Vec<u32> = row.iter().map(|action| action.stage.0).collect();
            stages.sort_unstable();
            stages.dedup();
            stages
        };
        let has = |kind| table.iter().flatten().any(|action| action.kind == kind);
        let kinds = [has(Kind::BackwardInput), has(Kind::Backward)];
        Ok(Some(SketchKey { stages: table.iter().map(of_row).collect(), kinds }))
    }

    /// Computes a sketch of the step from two of its micro-batches.
    ///
    /// # Errors
    /// Returns the errors of [`Self::program`].
    pub fn sketch(&self, graph: &StepGraph, key: &SketchKey) -> Result<Sketch, TrainError> {
        self.sketch_of(graph, key, None)
    }

    /// Computes a sketch of all ranks, or of only one.
    pub(super) fn sketch_of(
        &self,
        graph: &StepGraph,
        key: &SketchKey,
        only: Option<usize>,
    ) -> Result<Sketch, TrainError> {
        let last = self.options.micro_batches.clamp(1, 2) as u32 - 1;
        let mut sketch: Option<Sketch> = None;
        for (split, _) in [true, false].into_iter().zip(key.kinds).filter(|(_, is_there)| *is_there) {
            let table: Vec<Vec<Action>> =
                key.stages.iter().map(|stages| one_after_another(stages, last, split)).collect();
            let ranks = graph.sketch(&self.options, table, only, self.target())?;
            let variant = |index: usize| {
                let mut programs: Vec<RankProgram<'_>> = Vec::new();
                for &RankSketch { rank, like, programs: ref own } in &ranks {
                    let stages = key.stages[like].iter().zip(&key.stages[rank]);
                    let stages = stages.map(|(&theirs, &own)| (StageId(theirs), StageId(own))).collect();
                    let of_like = if like == rank { own } else { &ranks[like].programs };
                    programs.push(RankProgram { program: of_like.get(index)?, rank, like, stages });
                }
                let mut kept: Vec<KeptBytes> = Vec::new();
                for of_rank in &programs {
                    kept.push(match of_rank.like {
                        like if like == of_rank.rank => KeptBytes::of(of_rank.program, last),
                        like => kept[like].as_of(of_rank),
                    });
                }
                Some(Variant { measured: self.measured(&programs).all_as(MicroBatch(last)), ranks: kept })
            };
            let once = variant(0).expect("each rank has a program");
            let this = Sketch { once, twice: variant(1) };
            match &mut sketch {
                None => sketch = Some(this),
                Some(both) => both.join(this),
            }
        }
        Ok(sketch.expect("a table has backwards of one kind or the other"))
    }

    /// Estimates the timeline of the step from its sketch.
    ///
    /// # Errors
    /// Returns the errors of [`Self::timing`].
    pub fn timing_by(&self, sketch: &Sketch) -> Result<Timing, TimingError> {
        let table = self.options.pipeline.schedule.actions(&self.shape())?;
        let mut measured = sketch.once.measured.clone();
        for (rank, row) in table.iter().enumerate() {
            // If recomputing twice saves less than a hundredth of the bytes, the compiler's choice depends on buffers
            // within an action, about which a sketch has no data. The sketch then assumes the faster variant, which
            // recomputes once.
            let (twice, least) = sketch.stages_that_recompute_twice(rank, row);
            let once = sketch.once.ranks[rank].most(row);
            if least < once - once / 100 {
                sketch.use_twice(&twice, &mut measured);
            }
        }
        self.simulated(measured.with_once(&table))
    }

    /// Returns the sure bytes of each rank, which are a lower bound of its peak of live bytes. Sure bytes include
    /// parameters and states, the bytes that micro-batches keep from one action to another, and sums of gradients. They
    /// do not include bytes that live only within an action.
    ///
    /// # Errors
    /// Returns an error if the schedule does not exist for the step's shape.
    pub fn surely_alive(&self, sketch: &Sketch) -> Result<Vec<u64>, TimingError> {
        let table = self.options.pipeline.schedule.actions(&self.shape())?;
        let of_rank = |(rank, row): (usize, &Vec<Action>)| sketch.stages_that_recompute_twice(rank, row).1;
        Ok(table.iter().enumerate().map(of_rank).collect())
    }
}

/// Returns actions in which each micro-batch runs forward and backward through all stages before the next micro-batch
/// starts.
fn one_after_another(stages: &[u32], last: u32, split: bool) -> Vec<Action> {
    let kinds: &[Kind] = if split { &[Kind::BackwardInput, Kind::BackwardWeight] } else { &[Kind::Backward] };
    let actions_of = |micro_batch: u32| {
        let down = stages.iter().map(move |&stage| Action::new(Kind::Forward, stage, micro_batch));
        let up = stages.iter().rev();
        down.chain(up.flat_map(move |&stage| kinds.iter().map(move |&kind| Action::new(kind, stage, micro_batch))))
    };
    (0..=last).flat_map(actions_of).collect()
}

impl Sketch {
    /// Adds the actions of another sketch. This sketch must have split backwards, and the other one whole backwards.
    fn join(&mut self, other: Self) {
        // Whole backwards have only one variant.
        self.twice.iter_mut().for_each(|twice| twice.join(other.once.clone()));
        self.once.join(other.once);
    }

    /// Chooses the stages of a rank that recompute in both halves of a split backward. Returns these stages, and the
    /// peak bytes with this choice. The compiler chooses in the same way, but counts all bytes, not only those of the
    /// sketch.
    fn stages_that_recompute_twice(&self, rank: usize, row: &[Action]) -> (BTreeSet<StageId>, u64) {
        let split = row.iter().filter(|action| self.twice.is_some() && action.kind == Kind::BackwardInput);
        let all = split.map(|action| action.stage).collect();
        let Ok(found) =
            stages_that_recompute_twice(all, |stages| Ok::<u64, Infallible>(self.kept(rank, stages).most(row)));
        found
    }

    /// Returns the bytes that a rank keeps if the stages `twice` recompute in both halves of the backward.
    fn kept(&self, rank: usize, twice: &BTreeSet<StageId>) -> KeptBytes {
        let mut kept = self.once.ranks[rank].clone();
        if let Some(other) = self.twice.as_ref().filter(|_| !twice.is_empty()) {
            let is_other = |&(_, (_, stage)): &(ActionKind, ActionKind)| twice.contains(&stage);
            kept.each.retain(|places, _| !is_other(places));
            kept.each.extend(other.ranks[rank].each.iter().filter(|(places, _)| is_other(places)));
        }
        kept
    }

    /// Replaces the times of these stages by the times of the variant that recomputes twice.
    fn use_twice(&self, stages: &BTreeSet<StageId>, measured: &mut ActionDurations) {
        let Some(Variant { measured: twice, .. }) = &self.twice else { return };
        for (mine, other) in [
            (&mut measured.actions, &twice.actions),
            (&mut measured.recomputed, &twice.recomputed),
            (&mut measured.offloaded, &twice.offloaded),
        ] {
            mine.extend(other.iter().filter(|(action, _)| stages.contains(&action.stage)));
        }
    }
}

impl Variant {
    fn join(&mut self, other: Self) {
        self.measured.actions.extend(other.measured.actions);
        self.measured.recomputed.extend(other.measured.recomputed);
        self.measured.offloaded.extend(other.measured.offloaded);
        self.measured.transfers.extend(other.measured.transfers);
        for (mine, theirs) in self.ranks.iter_mut().zip(other.ranks) {
            mine.always = mine.always.min(theirs.always);
            mine.each.extend(theirs.each);
            // If both kinds of backward add to a sum, the lifetime of the sum is not known. So the sum is left out, and
            // the sure bytes stay a lower bound.
            mine.sums.clear();
        }
    }
}

impl KeptBytes {
    fn of(program: &Program, last: u32) -> Self {
        let mut used: Vec<Option<(Action, Action)>> = vec![None; program.buffers.len()];
        for part in &program.parts {
            let Some(action) = part.action else { continue };
            // The position of a wait, and of the start of a gather, depends on the schedule, so these and messages do not count
            // as uses. A sum over ranks starts in the action that computes its summand.
            let uses = |instr: &&Instr| match instr.kind {
                InstrKind::Compute(_) => true,
                InstrKind::Collective(collective, _) => !matches!(collective, Collective::AllGather { .. }),
                _ => false,
            };
            for instr in program.instrs[part.instrs.clone()].iter().filter(uses) {
                for operand in instr.inputs.iter().chain(&instr.outputs) {
                    used[operand.buffer.index()].get_or_insert((action, action)).1 = action;
                }
            }
        }
        let mut kept = Self::default();
        for (buffer, used) in program.buffers.iter().zip(used) {
            if matches!(buffer.kind, BufferKind::Persistent { .. }) {
                kept.always += buffer.bytes;
            }
            let (true, None, Some((from, until))) =
                (matches!(buffer.kind, BufferKind::Temporary), buffer.dynamic_rows, used)
            else {
                continue;
            };
            let place = |action: Action| (action.kind, action.stage);
            let whose = [from, until].map(|action| action.micro_batch.0);
            if whose == [last, last] && from != until {
                *kept.each.entry((place(from), place(until))).or_default() += buffer.bytes;
            } else if buffer.label.role == Role::Gradient
                && last > 0
                && whose == [0, last]
                && place(from) == place(until)
            {
                *kept.sums.entry(place(from)).or_default() += buffer.bytes;
            }
        }
        kept
    }

    /// Returns the bytes that an equal rank keeps.
    fn as_of(&self, rank: &RankProgram<'_>) -> Self {
        let place = |(kind, stage): ActionKind| (kind, rank.action(Action::new(kind, stage.0, 0)).stage);
        Self {
            always: self.always,
            each: self.each.iter().map(|(&(from, until), &bytes)| ((place(from), place(until)), bytes)).collect(),
            sums: self.sums.iter().map(|(&at, &bytes)| (place(at), bytes)).collect(),
        }
    }

    /// Returns the peak of the bytes that are alive between two adjacent actions of a row.
    fn most(&self, row: &[Action]) -> u64 {
        let at: HashMap<Action, usize> = row.iter().enumerate().map(|(index, &action)| (action, index)).collect();
        // Bytes allocated in each action, and bytes freed in it.
        let mut changes = vec![(0u64, 0u64); row.len()];
        let mut ends: HashMap<ActionKind, (usize, usize)> = HashMap::new();
        for (index, action) in row.iter().enumerate() {
            ends.entry((action.kind, action.stage)).or_insert((index, index)).1 = index;
        }
        for (&((kind, stage), (until, last)), &bytes) in &self.each {
            for action in row.iter().filter(|action| (action.kind, action.stage) == (kind, stage)) {
                let dead = Action { kind: until, stage: last, ..*action };
                if let (Some(&born), Some(&dead)) = (at.get(action), at.get(&dead))
                    && born <= dead
                {
                    changes[born].0 += bytes;
                    changes[dead].1 += bytes;
                }
            }
        }
        for (place, &bytes) in &self.sums {
            if let Some(&(first, last)) = ends.get(place) {
                changes[first].0 += bytes;
                changes[last].1 += bytes;
            }
        }
        // Only times between actions count: within an action, its outputs and the inputs that it frees need not be
        // alive together.
        let most = changes.into_iter().scan(0, |live, (born, dead)| {
            *live = *live + born - dead;
            Some(*live)
        });
        self.always + most.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use gapless_alloc::lower_bound;
    use gapless_engine::compile::table;

    use super::*;
    use crate::run::RunConfig;

    /// Shard ranks add up gradients in each micro-batch. Their sums over micro-batches are half of those of one rank, and
    /// parameters that they do not divide have whole ones.
    #[test]
    fn sums_of_gradients_on_shard_ranks_are_counted() {
        let sums = |mesh: &str| {
            let text = format!(
                "model = 'gpt:vocabulary=64,layers=4,heads=2,width=32'\nsequence = 16\nbatch = 16\nmicro_batches = 4\n{mesh}"
            );
            let keys: Vec<String> = text.lines().map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
            let (key, graph) = (step.sketch_key().unwrap().unwrap(), step.record().unwrap());
            let (sketch, programs) = (step.sketch(&graph, &key).unwrap(), step.programs(&graph).unwrap());
            let live = lower_bound(&table(&programs[0]).unwrap());
            let sure = step.surely_alive(&sketch).unwrap()[0];
            assert!(sure <= live && sure * 2 > live, "{mesh}: {sure} of {live}");
            sketch.once.ranks[0].sums.values().sum::<u64>()
        };
        let whole = sums("shard_ranks = 1");
        for stage in [2, 3] {
            let divided = sums(&format!("shard_ranks = 2\nzero_stage = {stage}"));
            assert!(divided * 2 >= whole && divided < whole, "stage {stage}: {divided} of {whole}");
        }
    }
}
