//! What each instruction of a program launches, reads, writes and computes, and how long it takes on a device.

use std::ops::{Deref, Range};
use std::time::Duration;

use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_kernels::cuda::Launch;

use super::backend::CudaBackend;
use super::place::{Launches, Part, Place, specs};
use crate::error::Result;
use crate::session::RunOptions;

/// What an instruction has to do, or several that are launched together.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Work {
    /// The operation's name.
    pub operation: &'static str,
    /// The layer that it belongs to.
    pub layer: String,
    /// The micro-batch.
    pub micro_batch: u32,
    /// What is launched for it.
    pub kernels: Vec<String>,
    /// Arithmetic (`Op::flops`).
    pub flops: u64,
    /// Bytes that it reads and writes (`Op::bytes_moved`).
    pub bytes: u64,
}

/// How long it took.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Timed {
    /// What it had to do.
    #[serde(flatten)]
    pub work: Work,
    /// From the end of what came before it to the end of its last kernel.
    pub time: Duration,
}

impl Deref for Timed {
    type Target = Work;

    fn deref(&self) -> &Work {
        &self.work
    }
}

impl Work {
    /// Of instructions that are launched as the first of them; none if that computes nothing.
    fn of(instructions: &[Instruction], launches: &[Launch]) -> Option<Self> {
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
        let kernels = launches.iter().map(|launch| match launch {
            Launch::Kernel(kernel) => kernel.name.clone(),
            Launch::Product(product) => format!("product {}×{}×{}", product.m, product.n, product.k),
        });
        Some(Self { operation, layer, micro_batch, kernels: kernels.collect(), flops, bytes })
    }
}

/// Launches of one part of a program, up to the instruction `end`: each instruction's own together, with those that are launched as it.
fn by_instruction(launches: Launches, end: usize) -> Vec<(Range<usize>, Vec<Launch>)> {
    let mut groups: Vec<(Range<usize>, Vec<Launch>)> = Vec::new();
    for (of, launch) in launches {
        match groups.last_mut() {
            Some((span, group)) if span.start == of => group.push(launch),
            last => {
                // Up to the next one that has launches of its own, others have theirs among them.
                if let Some((span, _)) = last {
                    span.end = of;
                }
                groups.push((of..end, vec![launch]));
            }
        }
    }
    groups
}

/// A part's instructions, and the launches of each.
type Groups = (Vec<Range<usize>>, Vec<Vec<Launch>>);

/// The parts of a program, and what each instruction of them launches.
fn grouped(place: &Place, program: &CompiledProgram) -> Result<Vec<Part<Groups>>> {
    let grouped = |part: Part<Launches>| {
        let end = part.span.end;
        part.try_map(|launches| Ok(by_instruction(launches, end).into_iter().unzip()))
    };
    place.parts(program)?.into_iter().map(grouped).collect()
}

impl CudaBackend {
    /// What each program of an executable has to do on a device, in order, but for messages; known without one.
    ///
    /// # Errors
    /// [`Error::NoDeviceKernels`](crate::Error::NoDeviceKernels), as [`Session::on_cuda`](crate::Session::on_cuda).
    pub fn work(executable: &Executable) -> Result<Vec<Vec<Work>>> {
        let of_program = |program: &CompiledProgram| -> Result<Vec<Work>> {
            // What is only done if rows were let go is not counted.
            let parts = grouped(&Place::NOWHERE, program)?.into_iter();
            let parts = parts.filter(|part| program.instructions[part.span.start].predicate.is_none());
            let groups =
                parts.filter_map(|part| part.launches).flat_map(|(spans, launches)| spans.into_iter().zip(launches));
            Ok(groups.filter_map(|(span, launches)| Work::of(&program.instructions[span], &launches)).collect())
        };
        executable.programs().iter().map(of_program).collect()
    }

    /// See [`Session::profile`](crate::Session::profile).
    pub(crate) fn profile(
        &mut self,
        executable: &Executable,
        id: ProgramId,
        options: RunOptions,
    ) -> Result<Vec<Timed>> {
        let program = &executable.programs()[id.0];
        let parts = grouped(&self.runner.place, program)?;
        let mut timed: Vec<Timed> = Vec::new();
        self.runner.go_through(executable, id, options, &parts, |run, part| {
            let Some((spans, launches)) = &part.launches else { return Ok(()) };
            let describe = |group: usize| program.instructions[spans[group].start].describe();
            run.settle()?;
            let times = run.device.time(launches, &describe)?;
            for ((span, launches), time) in spans.iter().zip(launches).zip(times) {
                let work = Work::of(&program.instructions[span.clone()], launches);
                timed.extend(work.map(|work| Timed { work, time }));
            }
            Ok(())
        })?;
        Ok(timed)
    }
}
