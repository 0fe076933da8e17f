//! The ways to divide a step among a number of ranks.

use gapless_engine::StepOptions;
use gapless_models::hf::Architecture;
use gapless_parallel::{Axes, Axis, Mesh};
use serde::Serialize;

use super::Step;
use crate::run::RunConfig;

/// A division of a step among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// The number of ranks along each axis.
    pub mesh: Mesh,
    /// Whether tensor ranks divide the tokens between operations on split tensors.
    pub sequence_parallel: bool,
    /// The stage of ZeRO on shard ranks.
    pub zero_stage: usize,
}

/// One rank.
impl Default for Layout {
    fn default() -> Self {
        let StepOptions { mesh, sequence_parallel, zero_stage, .. } = StepOptions::default();
        Self { mesh, sequence_parallel, zero_stage }
    }
}

impl Layout {
    /// The least tokens of a sequence that each of several context ranks has. Shorter sequences are divided along other axes,
    /// which send less.
    const CONTEXT_TOKENS: usize = 4096;

    /// Returns the ways to divide a step among `ranks` ranks: each way to write their number as a product of
    ///
    /// - tensor ranks, of which a node has whole groups, because their messages are in the path of the computation. They
    ///   use sequence parallelism;
    /// - context ranks, if each has 4,096 tokens of a sequence or more;
    /// - expert ranks, if they divide the experts of the model. The experts may also be folded over tensor ranks, and
    ///   over tensor and context ranks;
    /// - pipeline ranks, at most as many as the model has layers;
    /// - copies: data ranks, shard ranks, or as many shard ranks as fill a node with data ranks between nodes. Shard
    ///   ranks have ZeRO stage 2 or 3.
    pub fn all(step: &Step, ranks: usize) -> Vec<Self> {
        let (layers, experts) = match step.architecture() {
            Architecture::Gpt(gpt) => (gpt.layers, 1),
            Architecture::Llama(llama) => (llama.layers, 1),
            Architecture::Moe(moe) => (moe.llama.layers, moe.router.experts),
        };
        let node = step.device.node;
        let has_context = |context: usize| context == 1 || step.options.sequence / context >= Self::CONTEXT_TOKENS;
        let mut layouts = Vec::new();
        for tensor in divisors(ranks).filter(|tensor| node.is_multiple_of(*tensor)) {
            for pipeline in divisors(ranks / tensor).filter(|&pipeline| pipeline <= layers) {
                for context in divisors(ranks / tensor / pipeline).filter(|&context| has_context(context)) {
                    let rest = ranks / tensor / pipeline / context;
                    for expert in divisors(rest).filter(|expert| experts.is_multiple_of(*expert)) {
                        let of_node = node / (tensor * context * expert).min(node);
                        let mesh = Mesh { tensor, pipeline, context, expert, ..Mesh::default() };
                        for (data, shard) in copies(rest / expert, of_node) {
                            let folds = folds(&mesh, experts);
                            let meshes = folds.map(|fold| Mesh { data, shard, fold, ..mesh });
                            layouts.extend(meshes.flat_map(Self::stages));
                        }
                    }
                }
            }
        }
        layouts
    }

    /// Returns the layouts of a mesh, which differ in the stage of ZeRO.
    fn stages(mesh: Mesh) -> impl Iterator<Item = Self> {
        let stages: &[usize] = if mesh.shard > 1 { &[2, 3] } else { &[3] };
        stages.iter().map(move |&zero_stage| Self { mesh, sequence_parallel: mesh.tensor > 1, zero_stage })
    }

    /// Gives a run this layout.
    pub fn apply(&self, run: &mut RunConfig) {
        run.mesh = self.mesh;
        run.step.sequence_parallel = self.sequence_parallel;
        run.step.zero_stage = self.zero_stage;
    }

    /// Returns the flags of the command that have this layout; empty for one rank.
    pub fn flags(&self) -> Vec<String> {
        let Mesh { data, pipeline, shard, expert, context, tensor, fold } = self.mesh;
        let axes = [
            ("tensor", tensor),
            ("context", context),
            ("expert", expert),
            ("pipeline", pipeline),
            ("shard", shard),
            ("data", data),
        ];
        let several = axes.into_iter().filter(|&(_, extent)| extent > 1);
        let mut flags: Vec<String> = several.map(|(name, extent)| format!("--{name}-ranks {extent}")).collect();
        let folded: Vec<String> = fold.iter().map(|axis| format!("{axis:?}").to_lowercase()).collect();
        flags.extend((!folded.is_empty()).then(|| format!("--fold {}", folded.join(","))));
        flags.extend((shard > 1).then(|| format!("--zero-stage {}", self.zero_stage)));
        flags.extend(self.sequence_parallel.then(|| "--sequence-parallel true".to_owned()));
        flags
    }
}

fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |extent| number.is_multiple_of(*extent))
}

/// Returns the numbers of data and shard ranks of `ranks` copies: all of one kind, or shard ranks that fill a node.
fn copies(ranks: usize, of_node: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut shards = vec![1, of_node, ranks];
    shards.retain(|&shard| shard > 0 && ranks.is_multiple_of(shard));
    shards.dedup();
    shards.into_iter().map(move |shard| (ranks / shard, shard))
}

/// Returns the axes over which experts may be folded: none, tensor ranks, and tensor and context ranks.
fn folds(mesh: &Mesh, experts: usize) -> impl Iterator<Item = Axes> {
    let folds = [Axes::NONE, Axes::TENSOR, Axes::TENSOR | Axes::CONTEXT];
    let extents = [1, mesh.tensor, mesh.context];
    let is_new = move |&(index, _): &(usize, Axes)| index == 0 || extents[index] > 1 && experts > 1;
    let of_mesh = *mesh;
    let several = move |fold: Axes| {
        let several = fold.iter().filter(|&axis| of_mesh.size(Axes::of(&[axis])) > 1);
        Axes::of(&several.collect::<Vec<Axis>>())
    };
    let divides = move |fold: &Axes| experts.is_multiple_of(of_mesh.size(Axes::EXPERT | *fold));
    folds.into_iter().enumerate().filter(is_new).map(move |(_, fold)| several(fold)).filter(divides)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn layouts(model: &str, ranks: usize, sequence: usize) -> Vec<Layout> {
        let text = format!("model = '{model}'\nestimate.profile = 'h100'\nstep.sequence = {sequence}");
        Layout::all(&Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap(), ranks)
    }

    /// Each layout has the given number of ranks, and none occurs twice.
    fn check(layouts: &[Layout], ranks: usize) {
        assert!(layouts.iter().all(|layout| layout.mesh.ranks().unwrap() == ranks));
        let flags: BTreeSet<String> = layouts.iter().map(|layout| layout.flags().join(" ")).collect();
        assert_eq!(flags.len(), layouts.len());
    }

    #[test]
    fn ranks_are_divided_along_all_axes() {
        // Four ways to use two tensor, pipeline, data or shard ranks, the last in two stages.
        let two = layouts("gpt:vocabulary=64,layers=4,heads=2,width=32", 2, 64);
        check(&two, 2);
        let flags: Vec<String> = two.iter().map(|layout| layout.flags().join(" ")).collect();
        assert_eq!(
            flags,
            [
                "--data-ranks 2",
                "--shard-ranks 2 --zero-stage 2",
                "--shard-ranks 2 --zero-stage 3",
                "--pipeline-ranks 2",
                "--tensor-ranks 2 --sequence-parallel true"
            ]
        );
        // On two nodes, shard ranks may fill a node each.
        let nodes = layouts("llama3-8b", 16, 8192);
        check(&nodes, 16);
        let has = |test: &dyn Fn(&Mesh) -> bool| nodes.iter().any(|layout| test(&layout.mesh));
        assert!(has(&|mesh| (mesh.data, mesh.shard) == (2, 8)) && has(&|mesh| (mesh.tensor, mesh.shard) == (2, 8)));
        assert!(has(&|mesh| mesh.context == 2) && !has(&|mesh| mesh.context > 2) && !has(&|mesh| mesh.expert > 1));
        assert!(!has(&|mesh| mesh.tensor > 8));
    }

    #[test]
    fn layouts_are_the_same_for_the_kernels_of_cpus_and_gpus() {
        assert_eq!(layouts("llama3-8b", 16, 16384), layouts("llama3-8b' \ndevice = 'cuda", 16, 16384));
    }

    #[test]
    fn experts_are_divided_and_folded() {
        let layouts = layouts("mixtral8x7b", 16, 8192);
        check(&layouts, 16);
        assert!(layouts.iter().all(|layout| 8 % layout.mesh.size(layout.mesh.experts()) == 0));
        let folds: BTreeSet<Axes> = layouts.iter().map(|layout| layout.mesh.fold).collect();
        let expected = [Axes::NONE, Axes::TENSOR, Axes::CONTEXT, Axes::TENSOR | Axes::CONTEXT];
        assert_eq!(folds, BTreeSet::from(expected));
        assert!(layouts.iter().any(|layout| layout.mesh.expert == 8));
    }
}
