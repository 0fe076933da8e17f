//! Communicators between the ranks of a mesh, and checks that all ranks have equal settings and data.

use gapless_kernels::Element;
use gapless_parallel::Mesh;
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
        return Err(TrainError::config("mesh", why, "start data × pipeline × expert ranks"));
    }
    Ok(())
}

/// Splits the communicator of all ranks into one communicator each for this rank's pipeline, batch, experts and
/// replicas.
pub(super) fn communicators(world: &mut dyn Communicator, mesh: Mesh) -> Result<Communicators> {
    let at = mesh.coordinate(world.rank());
    let Mesh { expert, .. } = mesh;
    let pipeline = world.split(at.data * expert + at.expert, at.pipeline)?;
    let batch = world.split(at.pipeline, at.data * expert + at.expert)?;
    let mut communicators = Communicators { pipeline: Some(pipeline), batch: Some(batch), ..Default::default() };
    if expert > 1 {
        let copy = at.data * mesh.pipeline + at.pipeline;
        communicators.experts = Some(world.split(copy, at.expert)?);
        communicators.replicas = Some(world.split(at.pipeline * expert + at.expert, at.data)?);
    }
    Ok(communicators)
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
