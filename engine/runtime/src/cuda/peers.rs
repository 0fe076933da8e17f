//! Direct exchange of tensors between the devices of several ranks, if all of these devices support it.
//!
//! - In: a host communicator.
//! - Out: a device communicator of the same ranks. If there is none, the reason is logged.
//! - Never: a device communicator on some ranks and none on others.

use std::collections::HashSet;
use std::ops::Range;

use gapless_communicator::{self as communicator, Communicator};

use super::backend::CudaBackend;
use crate::error::{Error, Result};

/// Length of a digest.
const DIGEST: usize = 16;

/// The message that each rank sends to all others: whether its device can exchange tensors directly, a digest that
/// identifies the device, and one that identifies the process.
type Greeting = [u8; 1 + 2 * DIGEST];
const DEVICE: Range<usize> = 1..1 + DIGEST;
const PROCESS: Range<usize> = 1 + DIGEST..1 + 2 * DIGEST;

impl CudaBackend {
    /// Creates a device communicator of the ranks of `world`. Returns `None` if two ranks share a device, or if a
    /// device cannot exchange tensors directly. A collective operation: all ranks must call it.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`] if another rank or NCCL fails.
    pub(crate) fn connect_devices(&mut self, world: &mut dyn Communicator) -> Result<Option<Box<dyn Communicator>>> {
        if world.size() == 1 {
            return Ok(None);
        }
        let failed = |source| Error::Communicator { instruction: "connecting devices".into(), source };
        let mine = self.runner.device.exchange_id();
        let greetings = gather(world, mine.as_deref().ok()).map_err(failed)?;
        let are_distinct = |part: Range<usize>| {
            let parts: HashSet<&[u8]> = greetings.iter().map(|greeting| &greeting[part.clone()]).collect();
            parts.len() == greetings.len()
        };
        let why = match &mine {
            Err(why) => why,
            Ok(_) if greetings.iter().any(|greeting| greeting[0] == 0) => "another rank has no NCCL",
            Ok(_) if !are_distinct(DEVICE) => "ranks share a GPU",
            Ok(_) => {
                tracing::info!("ranks exchange tensors from GPU to GPU, with NCCL");
                let control = world.split(0, world.rank()).map_err(failed)?;
                return self.runner.device.connect(control, !are_distinct(PROCESS)).map(Some).map_err(failed);
            }
        };
        tracing::info!(why, "ranks exchange tensors through host memory");
        Ok(None)
    }
}

/// Gathers the greetings of all ranks.
fn gather(world: &mut dyn Communicator, device: Option<&str>) -> communicator::Result<Vec<Greeting>> {
    // Process ids and bus ids are only unique within a host, so the digests include the host.
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut mine: Greeting = [0; _];
    mine[0] = u8::from(device.is_some());
    mine[DEVICE].copy_from_slice(&digest(&format!("{} of {host}", device.unwrap_or_default())));
    mine[PROCESS].copy_from_slice(&digest(&format!("{} of {host}", std::process::id())));
    let mut all = vec![0; size_of::<Greeting>() * world.size()];
    world.all_gather(&mine, &mut all)?;
    Ok(all.as_chunks().0.to_vec())
}

fn digest(text: &str) -> [u8; DIGEST] {
    *blake3::hash(text.as_bytes()).as_bytes().first_chunk().expect("a hash has 32 bytes")
}
