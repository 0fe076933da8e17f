//! How long each instruction of a program takes on a device.

use std::time::Duration;

use gapless_compile::internal::Instruction;
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_kernels::cuda::Launch;

use super::backend::{CudaBackend, Part, specs};
use crate::error::Result;
use crate::session::RunOptions;

/// How long an instruction took, or several that are launched together, beside what it has to do.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Timed {
    /// The operation's name.
    pub operation: &'static str,
    /// The layer that it belongs to.
    pub layer: String,
    /// The micro-batch.
    pub micro_batch: u32,
    /// From the end of what came before it to the end of its last kernel.
    pub time: Duration,
    /// Arithmetic (`Op::flops`).
    pub flops: u64,
    /// Bytes that it reads and writes (`Op::bytes_moved`).
    pub bytes: u64,
}

impl Timed {
    /// Of instructions that were launched as the first of them; none if that computes nothing.
    fn of(instructions: &[Instruction], time: Duration) -> Option<Self> {
        let operations = instructions.iter().filter_map(|instruction| match &instruction.kind {
            InstrKind::Compute(op) => Some((op, instruction)),
            _ => None,
        });
        let (first, Instruction { layer, micro_batch, .. }) = operations.clone().next()?;
        let (layer, micro_batch, operation) = (layer.to_string(), *micro_batch, first.name());
        let (flops, bytes) = operations.fold((0, 0), |(flops, bytes), (op, Instruction { inputs, outputs, .. })| {
            let (inputs, outputs) = (specs(inputs), specs(outputs));
            (flops + op.flops(&inputs, &outputs), bytes + op.bytes_moved(&inputs, &outputs))
        });
        Some(Self { operation, layer, micro_batch, time, flops, bytes })
    }
}

impl CudaBackend {
    /// Runs a program as [`Session::run`](crate::Session::run) does, and says how long each instruction took: on a stream instead of as a graph. Updates that
    /// are launched together are one.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device); [`Error::Communicator`](crate::Error::Communicator) when another rank fails.
    pub fn profile(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Vec<Timed>> {
        self.write_key(options)?;
        let Self { device, place, staging, .. } = self;
        let program = &executable.programs[id.0];
        let mut exchanging = staging.run();
        let mut profile = || {
            let mut timed: Vec<Timed> = Vec::new();
            let mut parts = place.parts(program)?.into_iter().peekable();
            while let Some(part) = parts.next() {
                let launches = match part {
                    Part::Launches(launches) => launches,
                    Part::Exchange(index) => {
                        exchanging.exchange(id.0, &program.instructions[index], &mut **device, place.base)?;
                        continue;
                    }
                };
                let end = match parts.peek() {
                    Some(&Part::Exchange(index)) => index,
                    _ => program.instructions.len(),
                };
                let mut groups: Vec<(usize, Vec<Launch>)> = Vec::new();
                for (of, launch) in launches {
                    match groups.last_mut().filter(|group| group.0 == of) {
                        Some(group) => group.1.push(launch),
                        None => groups.push((of, vec![launch])),
                    }
                }
                let (of, groups): (Vec<usize>, Vec<Vec<Launch>>) = groups.into_iter().unzip();
                let times = device.time(&groups, &|group| program.instructions[of[group]].describe())?;
                // Up to the next one that has launches of its own, others have theirs among them.
                let ends = of.iter().skip(1).copied().chain([end]);
                for ((&first, end), time) in of.iter().zip(ends).zip(times) {
                    timed.extend(Timed::of(&program.instructions[first..end], time));
                }
            }
            Ok(timed)
        };
        let ran = profile();
        exchanging.end(ran)
    }
}
