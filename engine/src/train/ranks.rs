//! Ways to the other ranks of a mesh.

use gapless_parallel::Mesh;
use gapless_runtime::Communicators;

use crate::communicator::Communicator;
use crate::error::{Result, TrainError};

/// Refuses what is for several ranks.
pub(super) fn expect_one_rank(mesh: Mesh) -> Result<()> {
    let ranks = mesh.ranks()?;
    if ranks != 1 {
        let why = format!("a mesh of {ranks} ranks in a trainer of one");
        return Err(TrainError::Config { what: "mesh", why, remedy: "make it with Trainer::on, once per rank" });
    }
    Ok(())
}

/// A rank's ways to the others that it has to do with, out of the way to all.
pub(super) fn communicators(world: &mut dyn Communicator, mesh: Mesh) -> Result<Communicators> {
    let (size, ranks) = (world.size(), mesh.ranks()?);
    if size != ranks {
        let why = format!("{ranks} ranks, but {size} were started");
        return Err(TrainError::Config {
            what: "mesh",
            why,
            remedy: "data × pipeline × expert is the number of ranks",
        });
    }
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
