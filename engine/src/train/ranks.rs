//! Communicators between the ranks of a mesh, and checks that all ranks have equal settings and data.

use std::collections::{BTreeMap, BTreeSet};

use gapless_compile::Executable;
use gapless_kernels::Element;
use gapless_parallel::{Axes, Mesh};
use gapless_runtime::Communicators;

use super::Batch;
use crate::communicator::Communicator;
use crate::error::{Result, TrainError};

/// Returns an error if the mesh has several ranks.
pub(super) fn expect_one_rank(mesh: Mesh) -> Result<()> {
    let ranks = mesh.ranks()?;
    if ranks != 1 {
        let why = format!("the mesh has {ranks} ranks, but this trainer is a single one");
        return Err(TrainError::config("mesh", why, "build one per rank with Trainer::builder(..).on(world)"));
    }
    Ok(())
}

/// Returns an error if `world` does not have as many ranks as the mesh.
pub(super) fn expect_ranks(world: &dyn Communicator, mesh: Mesh) -> Result<()> {
    let (size, ranks) = (world.size(), mesh.ranks()?);
    if size != ranks {
        let why = format!("the mesh has {ranks} ranks, but {size} were started");
        return Err(TrainError::config("mesh", why, "start as many ranks as the product of its axes"));
    }
    Ok(())
}

/// Returns the axes along which the collectives of any rank's programs communicate. The result is equal on all ranks,
/// although the programs of different stages may have different collectives.
///
/// # Errors
/// Returns [`TrainError::RanksDiffer`] if two ranks of a group have other collectives, or have them in another order: they
/// would wait for each other forever. All ranks return the same error.
pub(super) fn groups(world: &mut dyn Communicator, mesh: Mesh, executable: &Executable) -> Result<BTreeSet<Axes>> {
    let here = executable.collectives();
    let digest_of = |axes: Axes| here.get(&axes).map_or([0; DIGEST], |list| digest(list.as_bytes()));
    let mine: Vec<u8> = Axes::sets().flat_map(digest_of).collect();
    let mut all = vec![0; mine.len() * world.size()];
    world.all_gather(&mine, &mut all)?;
    let mut used = BTreeSet::new();
    for (index, axes) in Axes::sets().enumerate() {
        let of_rank = |rank: usize| &all[rank * mine.len() + index * DIGEST..][..DIGEST];
        let mut firsts = BTreeMap::new();
        for rank in 0..world.size() {
            let color = mesh.color(mesh.coordinate(rank), axes);
            if of_rank(rank) != *firsts.entry(color).or_insert(of_rank(rank)) {
                return Err(TrainError::RanksDiffer { rank, what: "collectives", here: format!("{here:?}") });
            }
        }
        if (0..world.size()).any(|rank| of_rank(rank) != [0; DIGEST]) {
            used.insert(axes);
        }
    }
    Ok(used)
}

/// Splits the communicator of all ranks into one for this rank's pipeline, and one for each of its groups along these
/// axes that has several ranks.
pub(super) fn communicators(
    world: &mut dyn Communicator,
    mesh: Mesh,
    groups: &BTreeSet<Axes>,
) -> Result<Communicators> {
    let at = mesh.coordinate(world.rank());
    let mut split = |axes| world.split(mesh.color(at, axes), mesh.index(at, axes));
    let pipeline = Some(split(Axes::PIPELINE)?);
    let groups = groups.iter().filter(|&&axes| mesh.size(axes) > 1).map(|&axes| Ok((axes, split(axes)?)));
    Ok(Communicators { pipeline, groups: groups.collect::<Result<_>>()? })
}

/// Bytes of a value's digest.
const DIGEST: usize = 8;

/// Checks that named values are equal on all ranks. If they are not, all ranks return the same error, except that each
/// rank's error shows the rank's own value.
///
/// # Errors
/// Returns [`TrainError::RanksDiffer`] with the first rank that differs from rank 0, and the name of the value that
/// differs.
pub(super) fn expect_equal(world: &mut dyn Communicator, values: &[(&'static str, String)]) -> Result<()> {
    // Compare the names first, because the ranks may run different builds, which have different settings.
    let names: String = values.iter().map(|(name, _)| format!("{name} ")).collect();
    let build = [("program version", format!("{} {names}", env!("CARGO_PKG_VERSION")))];
    compare_digests(world, &build)?;
    compare_digests(world, values)
}

fn compare_digests(world: &mut dyn Communicator, values: &[(&'static str, String)]) -> Result<()> {
    let mine: Vec<u8> = values.iter().flat_map(|(_, value)| digest(value.as_bytes())).collect();
    let mut all = vec![0; mine.len() * world.size()];
    world.all_gather(&mine, &mut all)?;
    let differs = |digests: &[u8]| {
        digests.chunks_exact(DIGEST).zip(all.chunks_exact(DIGEST)).position(|(theirs, of_first)| theirs != of_first)
    };
    for (rank, digests) in all.chunks_exact(mine.len()).enumerate() {
        if let Some(index) = differs(digests) {
            let (what, here) = (values[index].0, values[index].1.clone());
            return Err(TrainError::RanksDiffer { rank, what, here });
        }
    }
    Ok(())
}

fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    *blake3::hash(bytes).as_bytes().first_chunk().expect("a hash has 32 bytes")
}

/// The interval, in steps, at which ranks compare their batches, starting with the first step.
const COMPARED_EVERY: u64 = 100;

/// Compares the batches that are given to all ranks, at every 100th step and without allocating memory.
#[derive(Debug)]
pub(super) struct BatchCheck {
    all: Vec<u8>,
}

impl BatchCheck {
    pub fn new(ranks: usize) -> Self {
        Self { all: vec![0; ranks * 2 * DIGEST] }
    }

    /// Every 100th step, checks that all ranks have the same step number and the same batch. Does nothing at other
    /// steps.
    ///
    /// # Errors
    /// Returns [`TrainError::RanksDiffer`] on all ranks if a rank differs.
    pub fn run(&mut self, world: &mut dyn Communicator, step: u64, batch: &Batch<'_>) -> Result<()> {
        if !step.is_multiple_of(COMPARED_EVERY) {
            return Ok(());
        }
        let mut hasher = blake3::Hasher::new();
        for ids in [batch.tokens, batch.targets, batch.starts] {
            hasher.update(u32::bytes(ids));
        }
        let digest = *hasher.finalize().as_bytes().first_chunk::<DIGEST>().expect("a hash has 32 bytes");
        let mut mine = [0; 2 * DIGEST];
        mine[..DIGEST].copy_from_slice(&step.to_le_bytes());
        mine[DIGEST..].copy_from_slice(&digest);
        world.all_gather(&mine, &mut self.all)?;
        let of_first = &self.all[..2 * DIGEST];
        for (rank, theirs) in self.all.chunks_exact(2 * DIGEST).enumerate() {
            if theirs[..DIGEST] != of_first[..DIGEST] {
                return Err(TrainError::RanksDiffer { rank, what: "step", here: step.to_string() });
            }
            if theirs != of_first {
                let here = format!("that of step {step} begins with {:?}", &batch.tokens[..batch.tokens.len().min(4)]);
                return Err(TrainError::RanksDiffer { rank, what: "batch", here });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use gapless_compile::Target;
    use gapless_compile::step::{self, StepOptions};
    use gapless_graph::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};
    use gapless_graph::{Model, Tensor};
    use gapless_parallel::Axis;

    use super::*;
    use crate::communicator::on_threads;

    struct TwoLayers {
        embed: Embedding,
        up: Linear,
        down: Linear,
    }

    impl Model for TwoLayers {
        fn forward(&self, tokens: &Tensor, _train: bool) -> gapless_graph::Result<Tensor> {
            self.down.forward(&self.up.forward(&self.embed.forward(tokens)?)?.gelu()?)
        }
    }

    /// Ranks whose programs have other collectives would wait for each other forever.
    #[test]
    fn other_collectives_are_refused_on_all_ranks() {
        let build = |vb: VarBuilder| {
            let (up, down) = (linear_no_bias(8, 16, vb.pp("up"))?, linear_no_bias(16, 8, vb.pp("down"))?);
            Ok(TwoLayers { embed: embedding(8, 8, vb.pp("embed"))?, up, down })
        };
        let answers = |differs: bool| {
            let ranks = on_threads(4, |mut world| {
                let mesh = Mesh { data: 2, tensor: 2, ..Mesh::default() };
                let mut options = StepOptions { batch: 4, sequence: 4, mesh, ..StepOptions::default() };
                // The ranks of the second tensor group divide tokens, and the fourth rank alone does not.
                options.sequence_parallel = world.rank() >= 2 && !(differs && world.rank() == 3);
                let executable = step::plan(build, &options, world.rank(), Target::Cpu { threads: 1 })?;
                Ok(groups(&mut *world, mesh, &executable).map_err(|error| error.to_string()))
            });
            ranks.unwrap()
        };
        for answer in answers(true) {
            assert!(answer.as_ref().is_err_and(|why| why.contains("rank 3 has another collectives")), "{answer:?}");
        }
        // Groups need not have the same collectives as others.
        let tensor = Axes::of(&[Axis::Tensor]);
        for answer in answers(false) {
            assert!(answer.as_ref().is_ok_and(|groups| groups.contains(&tensor)), "{answer:?}");
        }
    }

    /// Every rank of a group receives the numbers of its members, in the order of ranks.
    #[test]
    fn communicators_have_the_ranks_of_their_groups() {
        let mesh = Mesh { data: 2, pipeline: 2, shard: 2, expert: 2, context: 2, tensor: 2, ..Mesh::default() };
        let tensor = Axes::of(&[Axis::Tensor]);
        let sets =
            BTreeSet::from([Axes::NONE, Axes::BATCH, Axes::SHARD, Axes::EXPERT, !Axes::EXPERT, tensor, Axes::ALL]);
        let ranks = mesh.ranks().unwrap();
        let gathered = on_threads(ranks, |mut world| {
            let rank = world.rank() as u8;
            let Communicators { pipeline, groups } = communicators(&mut *world, mesh, &sets)?;
            let all = groups.into_iter().chain(pipeline.map(|pipeline| (Axes::PIPELINE, pipeline)));
            let gather = |(axes, mut group): (Axes, Box<dyn Communicator>)| {
                let mut members = vec![0; group.size()];
                group.all_gather(&[rank], &mut members)?;
                Ok((axes, members))
            };
            all.map(gather).collect::<Result<Vec<_>>>()
        });
        for (rank, groups) in gathered.unwrap().into_iter().enumerate() {
            assert_eq!(groups.len(), sets.len(), "the pipeline, and every set but that of no axis");
            for (axes, members) in groups {
                let color = |rank: usize| mesh.color(mesh.coordinate(rank), axes);
                let expected: Vec<u8> =
                    (0..ranks).filter(|&other| color(other) == color(rank)).map(|r| r as u8).collect();
                assert_eq!(members, expected, "{axes:?} of rank {rank}");
            }
        }
    }
}
