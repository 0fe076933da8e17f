//! Sketches a step of a deep model from two models with fewer layers.
//!
//! In: steps that have the forward and the gradients in common. Out: their sketches. If the layers of the model are
//! equal, each stage of the first of two models keeps only [`KEPT`] whole ones. In the second model, one of the stages
//! has one more. What this layer adds to each time and to each number of bytes is added to every stage, as often as it
//! lacks a layer. Bytes are exact, because they are sums over buffers. Times differ by up to 1 %: into which of its
//! operations a layer is fused for a GPU, and how much of a collective is hidden, depends on the layers around it.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::OnceLock;

use gapless_engine::TrainError;
use gapless_engine::compile::StagePartition;
use gapless_engine::compile::step::{EqualLayers, StepGraph, WholeStep, boxed_build};
use gapless_parallel::{Action, Axes, StageId};

use super::sketch::{ActionKind, KeptBytes, Sketch, SketchKey, Variant};
use super::timing::ActionDurations;
use super::{Reach, Step};

/// The number of whole layers in each stage of the smallest model.
const KEPT: usize = 1;
/// The most collectives under way that a layer surely has parameters for. With more, a layer's collectives overlap layers
/// that the models lack.
const UNDER_WAY: usize = 4;
/// The part of its time by which a layer of another stage of its rank may change a stage.
const OTHER_STAGES: f64 = 0.02;

/// The parts that sketches of steps with one [key](Step::whole_key) have in common.
#[derive(Debug)]
pub struct SketchBase {
    whole: CommonPart,
    few: Option<FewLayers>,
}

/// Two models with fewer layers.
#[derive(Debug)]
struct FewLayers {
    /// The layers that each stage of the first model lacks.
    left_out: Vec<usize>,
    /// The stage that has one more in the second model.
    stage: StageId,
    models: [FewLayersModel; 2],
}

#[derive(Debug)]
struct FewLayersModel {
    layers: usize,
    cut: StagePartition,
    whole: CommonPart,
}

/// The forward and the gradients of a model, recorded for the first step that uses them.
#[derive(Debug, Default)]
struct CommonPart(OnceLock<Option<WholeStep>>);

/// The graphs from which the sketches of a step are computed.
#[derive(Debug)]
pub struct SketchGraph<'b> {
    base: &'b SketchBase,
    /// The graph of the whole model, once it is needed.
    whole: OnceLock<StepGraph>,
    few: Option<[StepGraph; 2]>,
}

impl SketchBase {
    /// Records what the sketches of steps with the [key](Step::whole_key) of this step have in common.
    pub fn new(step: &Step) -> Self {
        Self { whole: CommonPart::default(), few: FewLayers::of(step) }
    }

    /// Records the graphs of a step.
    ///
    /// # Errors
    /// Returns the errors of [`Step::record`].
    pub fn graph(&self, step: &Step) -> Result<SketchGraph<'_>, TrainError> {
        let record = |model: &FewLayersModel| model.whole.record(&model.of(step)).ok();
        let few =
            self.few.as_ref().and_then(|FewLayers { models: [less, more], .. }| Some([record(less)?, record(more)?]));
        let graph = SketchGraph { base: self, whole: OnceLock::new(), few };
        if graph.few.is_none() {
            graph.whole(step)?;
        }
        Ok(graph)
    }
}

impl FewLayers {
    /// Returns the models from which this step's model can be extended. Returns `None` if there are none, or if they would
    /// take almost as long.
    fn of(step: &Step) -> Option<Self> {
        let equal = EqualLayers::find(&boxed_build(|vb| step.build(vb)), &step.options).ok()??;
        let mut left_out = equal.spare(KEPT);
        let (all, without) = (step.architecture().layers(), left_out.iter().sum::<usize>());
        // The second model is recorded whole, but only one of its ranks is lowered.
        if all != equal.layers() || (all - without) * 3 > all * 2 {
            return None;
        }
        let model = |left_out: &[usize]| {
            let without = left_out.iter().sum();
            let whole = CommonPart::default();
            let model = FewLayersModel { layers: all - without, cut: equal.without(left_out), whole };
            let few = model.of(step);
            equal.is_without(without, &boxed_build(|vb| few.build(vb)), &few.options).ok()?.then_some(model)
        };
        let first = model(&left_out)?;
        let stage = (0..left_out.len()).max_by_key(|&stage| left_out[stage])?;
        left_out[stage] -= 1;
        let second = model(&left_out)?;
        left_out[stage] += 1;
        Some(Self { left_out, stage: StageId(u32::try_from(stage).ok()?), models: [first, second] })
    }

    /// The layers that a stage of the first model lacks.
    fn lacks(&self, stage: StageId) -> i128 {
        self.left_out[stage.0 as usize] as i128
    }
}

impl FewLayersModel {
    /// Returns the step with this model.
    fn of(&self, step: &Step) -> Step {
        let mut few = step.clone();
        few.set_layers(self.layers);
        few.options.pipeline.cut = self.cut.clone();
        few
    }
}

impl SketchGraph<'_> {
    /// Returns the graph of the step that was [recorded](SketchBase::graph).
    ///
    /// # Errors
    /// Returns the errors of [`Step::record`].
    pub fn whole(&self, step: &Step) -> Result<&StepGraph, TrainError> {
        if let Some(whole) = self.whole.get() {
            return Ok(whole);
        }
        let whole = self.base.whole.record(step)?;
        Ok(self.whole.get_or_init(|| whole))
    }

    /// Returns the number of trained parameters over all ranks.
    pub fn parameters(&self) -> u64 {
        let of_few = || {
            let [few, more] = self.few.as_ref()?.each_ref().map(StepGraph::parameters);
            let left_out = &self.base.few.as_ref()?.left_out;
            Some(few + (more - few) * left_out.iter().sum::<usize>() as u64)
        };
        self.whole.get().map(StepGraph::parameters).or_else(of_few).unwrap_or(0)
    }

    /// Computes the sketch of a step whose graph was [recorded](SketchBase::graph).
    ///
    /// # Errors
    /// Returns the errors of [`Step::sketch`].
    pub fn sketch(&self, step: &Step, key: &SketchKey) -> Result<Sketch, TrainError> {
        match self.of_few(step, key) {
            Some(sketch) => Ok(sketch),
            None => step.sketch(self.whole(step)?, key),
        }
    }

    /// Returns the sketch of a step by those of the two models. Returns `None` if the step treats equal layers differently,
    /// or if the models have other actions. If a model is refused, so is the whole one, for the reason that is reported.
    fn of_few(&self, step: &Step, key: &SketchKey) -> Option<Sketch> {
        let ([few, more], layers) = (self.few.as_ref()?, self.base.few.as_ref()?);
        let options = &step.options;
        let is_local = options.prefetch.max(options.reductions) <= UNDER_WAY;
        // Measured times of equal operations differ.
        if step.device.is_measured() || !is_local || EqualLayers::are_told_apart(options) || !step.has_equal_links() {
            return None;
        }
        let rank = key.stages.iter().position(|stages| stages.contains(&layers.stage.0))?;
        let few = layers.models[0].of(step).sketch(few, key).ok()?;
        let more = layers.models[1].of(step).sketch_of(more, key, Some(rank)).ok()?;
        few.extended(&more, &Extension { layers, key, rank })
    }
}

impl CommonPart {
    /// Records the graph of a step, from the common part if the step is divided.
    fn record(&self, step: &Step) -> Result<StepGraph, TrainError> {
        let is_divided = WholeStep::is_divided(&step.options);
        match is_divided.then(|| self.0.get_or_init(|| step.record_whole().ok())) {
            Some(Some(whole)) => step.record_from(whole),
            _ => step.record(),
        }
    }
}

impl Step {
    /// Returns whether the groups of all pipeline ranks are connected alike.
    fn has_equal_links(&self) -> bool {
        let (mesh, node) = (self.options.mesh, self.device.node);
        Axes::sets().filter(|&axes| axes & Axes::PIPELINE == Axes::NONE).all(|axes| {
            let first = Reach::of_group(mesh, 0, axes, node);
            (1..mesh.pipeline).all(|rank| Reach::of_group(mesh, rank, axes, node) == first)
        })
    }
}

/// The way in which a sketch is extended.
struct Extension<'a> {
    layers: &'a FewLayers,
    key: &'a SketchKey,
    /// The rank whose stage has one layer more.
    rank: usize,
}

impl Extension<'_> {
    /// Extends a number of each rank. `more` is that of the rank with one layer more.
    fn of_rank(&self, rank: usize, [own, few, more]: [u64; 3]) -> Option<u64> {
        let lacks: i128 = self.stages_of(rank).map(|stage| self.layers.lacks(stage)).sum();
        u64::try_from(i128::from(own) + (i128::from(more) - i128::from(few)) * lacks).ok()
    }

    /// Returns what the layer adds to each number of its stage. `part` divides a key into its stage, if there is only one,
    /// and the rest. Returns `None` if the layer changes another stage by more than this part of it.
    fn added<K: Eq + Hash, R: Eq + Hash>(
        &self,
        few: &HashMap<K, u64>,
        more: &HashMap<K, u64>,
        most: f64,
        part: impl Fn(&K) -> (Option<StageId>, R),
    ) -> Option<HashMap<R, i128>> {
        let mut added = HashMap::new();
        for (key, &more) in more {
            let few = *few.get(key)?;
            let change = i128::from(more) - i128::from(few);
            match part(key) {
                (Some(stage), rest) if stage == self.layers.stage && change != 0 => _ = added.insert(rest, change),
                _ if change.abs() as f64 <= few as f64 * most => {}
                _ => return None,
            }
        }
        Some(added)
    }

    /// Extends the numbers of these stages. Returns `None` if a stage that lacks layers has no number to which they add.
    fn extended<K: Eq + Hash + Clone, R: Eq + Hash>(
        &self,
        few: &HashMap<K, u64>,
        added: &HashMap<R, i128>,
        stages: impl Iterator<Item = StageId>,
        part: impl Fn(&K) -> (Option<StageId>, R),
    ) -> Option<HashMap<K, u64>> {
        let (mut extended, mut changes) = (few.clone(), 0);
        for (key, number) in &mut extended {
            let (Some(stage), rest) = part(key) else { continue };
            let lacks = self.layers.lacks(stage);
            if let Some(added) = added.get(&rest).filter(|_| lacks > 0) {
                *number = u64::try_from(i128::from(*number) + added * lacks).ok()?;
                changes += 1;
            }
        }
        let lacking = stages.filter(|&stage| self.layers.lacks(stage) > 0).count();
        (changes == added.len() * lacking).then_some(extended)
    }

    fn stages_of(&self, rank: usize) -> impl Iterator<Item = StageId> {
        self.key.stages[rank].iter().map(|&stage| StageId(stage))
    }
}

impl Sketch {
    /// Returns the sketch of the whole model. `more` is that of the rank with one layer more.
    fn extended(&self, more: &Self, by: &Extension<'_>) -> Option<Self> {
        let twice = match (&self.twice, &more.twice) {
            (Some(few), Some(more)) => Some(few.extended(more, by)?),
            (None, None) => None,
            _ => return None,
        };
        Some(Self { once: self.once.extended(&more.once, by)?, twice })
    }
}

impl Variant {
    fn extended(&self, more: &Self, by: &Extension<'_>) -> Option<Self> {
        let (few, more_kept) = (&self.ranks[by.rank], more.ranks.first()?);
        let of_two = |&((kind, stage), (until, last)): &(ActionKind, ActionKind)| {
            ((stage == last).then_some(stage), (kind, until))
        };
        let of_one = |&(kind, stage): &ActionKind| (Some(stage), kind);
        let each = by.added(&few.each, &more_kept.each, 0.0, of_two)?;
        let sums = by.added(&few.sums, &more_kept.sums, 0.0, of_one)?;
        let kept = |(rank, own): (usize, &KeptBytes)| {
            Some(KeptBytes {
                always: by.of_rank(rank, [own.always, few.always, more_kept.always])?,
                each: by.extended(&own.each, &each, by.stages_of(rank), of_two)?,
                sums: by.extended(&own.sums, &sums, by.stages_of(rank), of_one)?,
            })
        };
        Some(Self {
            measured: self.measured.extended(&more.measured, by)?,
            ranks: self.ranks.iter().enumerate().map(kept).collect::<Option<_>>()?,
        })
    }
}

impl ActionDurations {
    fn extended(&self, more: &Self, by: &Extension<'_>) -> Option<Self> {
        let of_action = |action: &Action| (Some(action.stage), (action.kind, action.micro_batch));
        let all = || (0..by.key.stages.len()).flat_map(|rank| by.stages_of(rank));
        let of_actions = |few: &HashMap<Action, u64>, more| {
            by.extended(few, &by.added(few, more, OTHER_STAGES, of_action)?, all(), of_action)
        };
        let of_early = |(_, action): &(usize, Action)| of_action(action);
        let early = by.added(&self.early, &more.early, OTHER_STAGES, of_early)?;
        let (few, more_update) = (self.updates[by.rank], *more.updates.first()?);
        let updates = self.updates.iter().enumerate().map(|(rank, &own)| by.of_rank(rank, [own, few, more_update]));
        Some(Self {
            actions: of_actions(&self.actions, &more.actions)?,
            transfers: of_actions(&self.transfers, &more.transfers)?,
            updates: updates.collect::<Option<_>>()?,
            recomputed: of_actions(&self.recomputed, &more.recomputed)?,
            offloaded: of_actions(&self.offloaded, &more.offloaded)?,
            early: by.extended(&self.early, &early, all(), of_early)?,
            once: of_actions(&self.once, &more.once)?,
            all_as: self.all_as,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;

    /// Sketches of few layers have the times and the bytes of the whole model. Only operations on all parameters together
    /// differ, by the rounding to nanoseconds.
    #[test]
    fn few_layers_tell_what_all_layers_do() {
        let models = [
            ("llama:vocabulary=128,layers=25,heads=4,kv_heads=2,width=32,hidden=48", "swiglu"),
            ("gpt:vocabulary=96,layers=24,heads=2,width=32", "gelu"),
        ];
        let meshes = ["", "tensor_ranks = 2\nsequence_parallel = true", "context_ranks = 2", "data_ranks = 2"];
        let shards = ["", "shard_ranks = 2\nzero_stage = 2", "shard_ranks = 2\nprefetch = 4\nreductions = 4"];
        let pipelines = [
            "",
            "pipeline_ranks = 2",
            "pipeline_ranks = 4\nschedule = 'zb-h1'",
            "schedule = 'zbv'\npipeline_ranks = 2",
        ];
        let rest = [
            "",
            "recompute = 'layers'",
            "recompute = 'ops:OP'\noptimizer = 'adamw8bit'",
            "precision = 'bf16'\ncompress = ['OP']",
        ];
        let mut compared = 0;
        for i in 0..24 {
            let (model, op) = models[i % 2];
            let others = [meshes[i / 2 % 4], shards[i % 3], pipelines[(i / 3 + i) % 4], rest[i / 5 % 4]].join("\n");
            let text = format!("model = '{model}'\nsequence = 16\nbatch = 48\nmicro_batches = 6\n{others}");
            let keys: Vec<String> =
                text.replace("OP", op).lines().filter(|key| !key.is_empty()).map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
            // Parts of small vectors are too small for 8 bits.
            let Ok(graph) = step.record() else { continue };
            let (key, base) = (step.sketch_key().unwrap().unwrap(), SketchBase::new(&step));
            let whole = step.sketch(&graph, &key).unwrap();
            let few_graph = base.graph(&step).unwrap();
            let few = few_graph.of_few(&step, &key).unwrap_or_else(|| panic!("{keys:?}"));
            assert_eq!(few_graph.parameters(), graph.parameters(), "{keys:?}");
            assert_eq!(few.once.ranks, whole.once.ranks, "{keys:?}");
            assert_eq!(few.twice.is_some(), whole.twice.is_some());
            for (few, whole) in [(Some(few.once), Some(whole.once)), (few.twice, whole.twice)] {
                let (Some(few), Some(whole)) = (few, whole) else { continue };
                assert_eq!(few.ranks, whole.ranks, "{keys:?}");
                let (few, whole) = (few.measured, whole.measured);
                let is_near = |few: u64, whole: u64| few.abs_diff(whole) * 10_000 <= whole;
                assert!(few.updates.iter().zip(&whole.updates).all(|(&few, &whole)| is_near(few, whole)), "{keys:?}");
                assert!(few.early.iter().all(|(place, &time)| is_near(time, whole.early[place])), "{keys:?}");
                let rest = ActionDurations { updates: whole.updates.clone(), early: whole.early.clone(), ..few };
                assert_eq!(rest, whole, "{keys:?}");
            }
            compared += 1;
        }
        assert!(compared > 20, "{compared}");
    }

    /// A step on GPUs, whose operations are fused, has equal bytes, and times within 1 %.
    #[test]
    fn fused_layers_take_about_the_same_time() {
        for rest in ["", "recompute = 'layers'\nschedule = 'zbv'", "recompute = 'ops:rms_norm,swiglu'\nshard_ranks = 2"]
        {
            let text = format!(
                "model = 'llama:vocabulary=4096,layers=24,heads=8,kv_heads=2,width=1024,hidden=2048'\ndevice = 'cuda'\n\
                 precision = 'bf16'\nsequence = 2048\nbatch = 32\nmicro_batches = 8\npipeline_ranks = 2\ntensor_ranks = 2\n\
                 sequence_parallel = true\n{rest}"
            );
            let keys: Vec<String> = text.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
            let (key, base) = (step.sketch_key().unwrap().unwrap(), SketchBase::new(&step));
            let few = base.graph(&step).unwrap().of_few(&step, &key).expect(rest);
            let whole = step.sketch(&step.record().unwrap(), &key).unwrap();
            assert_eq!(step.surely_alive(&few).unwrap(), step.surely_alive(&whole).unwrap(), "{rest}");
            let [few, whole] = [&few, &whole].map(|sketch| step.timing_by(sketch).unwrap().nanoseconds());
            assert!(few.abs_diff(whole) * 100 <= whole, "{rest}: {few} ns, {whole}");
        }
    }
}
