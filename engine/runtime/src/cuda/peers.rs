//! Ranks whose devices exchange tensors by themselves, where all of them can.
//!
//! In: the ways to the other ranks, over the host. Out: the same from device to device; or as they were, and a word on why. Never: some
//! ranks that go one way, and others the other.

use std::collections::HashSet;

use gapless_communicator::{self as communicator, Communicator};

use super::backend::CudaBackend;
use crate::error::{Error, Result};
use crate::transfers::Communicators;

/// Bytes of a digest.
const DIGEST: usize = 16;

/// What a rank tells the others: its device, if it exchanges tensors by itself; and its process.
type Word = [u8; 1 + 2 * DIGEST];

impl CudaBackend {
    /// The ways to the other ranks from device to device, if all ranks of `world` have devices that can, each its own. A collective
    /// operation.
    ///
    /// # Errors
    /// [`Error::Communicator`] when another rank fails, or NCCL does.
    pub fn between_devices(&mut self, world: &mut dyn Communicator, ways: Communicators) -> Result<Communicators> {
        let failed = |source| Error::Communicator { instruction: "connecting devices".into(), source };
        let mine = self.runner.device.between_devices();
        let words = gather(world, mine.as_deref().ok()).map_err(failed)?;
        let distinct =
            |part: std::ops::Range<usize>| words.iter().map(|word| &word[part.clone()]).collect::<HashSet<_>>().len();
        let why = match &mine {
            Err(why) => why,
            Ok(_) if words.iter().any(|word| word[0] == 0) => "another rank cannot exchange otherwise",
            Ok(_) if distinct(1..1 + DIGEST) < words.len() => "ranks share a GPU",
            Ok(_) => {
                let shares_process = distinct(1 + DIGEST..size_of::<Word>()) < words.len();
                tracing::info!("ranks exchange from GPU to GPU, by NCCL");
                let mut connect = |way: Option<Box<dyn Communicator>>| {
                    way.map(|way| self.runner.device.connect(way, shares_process)).transpose().map_err(failed)
                };
                let Communicators { pipeline, batch, experts, replicas } = ways;
                return Ok(Communicators {
                    pipeline: connect(pipeline)?,
                    batch: connect(batch)?,
                    experts: connect(experts)?,
                    replicas: connect(replicas)?,
                });
            }
        };
        if world.size() > 1 {
            tracing::info!(why, "ranks exchange by way of the host");
        }
        Ok(ways)
    }
}

/// The words of all ranks.
fn gather(world: &mut dyn Communicator, device: Option<&str>) -> communicator::Result<Vec<Word>> {
    // Two hosts may have the same number for a process, or a place on the bus.
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut mine: Word = [0; _];
    mine[0] = u8::from(device.is_some());
    mine[1..1 + DIGEST].copy_from_slice(&digest(&format!("{} of {host}", device.unwrap_or_default())));
    mine[1 + DIGEST..].copy_from_slice(&digest(&format!("{} of {host}", std::process::id())));
    let mut all = vec![0; size_of::<Word>() * world.size()];
    world.all_gather(&mine, &mut all)?;
    Ok(all.as_chunks().0.to_vec())
}

fn digest(text: &str) -> [u8; DIGEST] {
    *blake3::hash(text.as_bytes()).as_bytes().first_chunk().expect("a hash has 32 bytes")
}
