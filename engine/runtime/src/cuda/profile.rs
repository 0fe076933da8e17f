//! The launches of each instruction of a program: the bytes they move, their arithmetic, and their measured time.

use std::ops::{Deref, Range};
use std::time::Duration;

use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_kernels::cuda::{Launch, Product};

use super::backend::CudaBackend;
use super::place::{Launches, Part, Persistents, Place, specs};
use crate::error::Result;
use crate::session::RunOptions;

/// One launch of an instruction.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LaunchWork {
    /// The kernel's name, or `product` with its extents `m×n×k`.
    pub name: String,
    /// True for a matrix product.
    pub is_product: bool,
    /// True if this is not a product, or if the product is aligned ([`Product::is_aligned`]).
    pub is_aligned: bool,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written. Products have their own bytes; the remaining bytes of the instruction are divided
    /// equally among its kernels.
    pub bytes: u64,
}

/// The work of an instruction, or of several that are launched together.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Work {
    /// The operation's name.
    pub operation: &'static str,
    /// The layer of the operation.
    pub layer: String,
    /// The micro-batch.
    pub micro_batch: u32,
    /// Its launches, in order.
    pub launches: Vec<LaunchWork>,
    /// Floating-point operations (`Op::flops`).
    pub flops: u64,
    /// Bytes read and written (`Op::bytes_moved`).
    pub bytes: u64,
}

/// An instruction's work with its measured time.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Timed {
    /// The work.
    #[serde(flatten)]
    pub work: Work,
    /// Time from the end of the previous instruction to the end of this one's last launch.
    pub time: Duration,
    /// The time of each launch.
    pub times: Vec<Duration>,
    /// The library's algorithm for each launch that is a product, if the device reports it.
    pub algorithms: Vec<Option<String>>,
}

impl Deref for Timed {
    type Target = Work;

    fn deref(&self) -> &Work {
        &self.work
    }
}

impl Work {
    /// Returns the work of instructions that are launched together, named after the first of them. Returns `None` if no
    /// instruction computes.
    fn of(instructions: &[Instruction], launches: &[Launch]) -> Option<Self> {
        let operations = instructions.iter().filter_map(|instruction| match &instruction.kind {
            InstrKind::Compute(op) => Some((op, instruction)),
            _ => None,
        });
        // The time of a copy's end is the part of the copy that no other work hides.
        if let [Instruction { kind: kind @ (InstrKind::Offloaded(_) | InstrKind::Fetched(_)), layer, .. }, ..] =
            instructions
        {
            let (layer, micro_batch, operation) = (layer.to_string(), instructions[0].micro_batch, kind.name());
            return Some(Self { operation, layer, micro_batch, launches: each(launches, 0, 0, 0), flops: 0, bytes: 0 });
        }
        let (first, Instruction { layer, micro_batch, .. }) = operations.clone().next()?;
        let (layer, micro_batch, operation) = (layer.to_string(), *micro_batch, first.name());
        let (flops, bytes) =
            operations.clone().fold((0, 0), |(flops, bytes), (op, Instruction { inputs, outputs, .. })| {
                let (inputs, outputs) = (specs(inputs), specs(outputs));
                (flops + op.flops(&inputs, &outputs), bytes + op.bytes_moved(&inputs, &outputs))
            });
        let again: u64 = operations
            .map(|(op, Instruction { inputs, outputs, .. })| op.cuda_bytes_again(&specs(inputs), &specs(outputs)))
            .sum();
        Some(Self { operation, layer, micro_batch, launches: each(launches, flops, bytes, again), flops, bytes })
    }

    /// The names of its launches.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.launches.iter().map(|launch| &*launch.name)
    }
}

/// Returns the work of each launch of an instruction. `flops` and `bytes` are the totals of the instruction. `again` is
/// the number of bytes that the instruction's kernels move in addition to reading and writing the operands once.
fn each(launches: &[Launch], flops: u64, bytes: u64, again: u64) -> Vec<LaunchWork> {
    let products = || {
        launches.iter().filter_map(|launch| if let Launch::Product(product) = launch { Some(product) } else { None })
    };
    let kernels = launches.iter().filter(|launch| matches!(launch, Launch::Kernel(_))).count().max(1) as u64;
    let flops_left = flops.saturating_sub(products().map(Product::flops).sum()) / kernels;
    let bytes_left = (bytes.saturating_sub(products().map(Product::bytes).sum()) + again) / kernels;
    let each = |launch: &Launch| match launch {
        Launch::Kernel(kernel) => LaunchWork {
            name: kernel.name.clone(),
            is_product: false,
            is_aligned: true,
            flops: flops_left,
            bytes: bytes_left,
        },
        Launch::Product(product) => LaunchWork {
            name: {
                let tf32 = if product.tf32 { " in TF32" } else { "" };
                format!("product {}×{}×{}{tf32}", product.m, product.n, product.k)
            },
            is_product: true,
            is_aligned: product.is_aligned(),
            flops: product.flops(),
            bytes: product.bytes(),
        },
        Launch::Copy(_) | Launch::CopyEnd(_) => LaunchWork {
            name: if matches!(launch, Launch::Copy(_)) { "copy started" } else { "end of a copy" }.into(),
            is_product: false,
            is_aligned: true,
            flops: 0,
            bytes: 0,
        },
    };
    launches.iter().map(each).collect()
}

/// Groups the launches of a part by instruction. The part ends before the instruction `end`. An instruction that is
/// launched together with an earlier instruction belongs to the group of that instruction.
fn by_instruction(launches: Launches, end: usize) -> Vec<(Range<usize>, Vec<Launch>)> {
    let mut groups: Vec<(Range<usize>, Vec<Launch>)> = Vec::new();
    for (of, launch) in launches {
        match groups.last_mut() {
            Some((span, group)) if span.start == of => group.push(launch),
            last => {
                // The group ends at the next instruction that has launches of its own.
                if let Some((span, _)) = last {
                    span.end = of;
                }
                groups.push((of..end, vec![launch]));
            }
        }
    }
    groups
}

/// The instructions of a part, and the launches of each.
type Groups = (Vec<Range<usize>>, Vec<Vec<Launch>>);

/// Returns the parts of a program, with launches grouped by instruction.
fn grouped(place: &Place, program: &CompiledProgram, persistent: &Persistents) -> Result<Vec<Part<Groups>>> {
    let grouped = |part: Part<Launches>| {
        let end = part.span.end;
        part.try_map(|launches| Ok(by_instruction(launches, end).into_iter().unzip()))
    };
    place.parts(program, persistent)?.into_iter().map(grouped).collect()
}

impl CudaBackend {
    /// Returns the work of each program of an executable on a GPU, in order and without messages. No GPU is needed.
    ///
    /// # Errors
    /// Returns [`Error::NoDeviceKernels`](crate::Error::NoDeviceKernels) under the same conditions as
    /// [`Session::on_cuda`](crate::Session::on_cuda).
    pub fn work(executable: &Executable) -> Result<Vec<Vec<Work>>> {
        let persistent = Persistents::of(executable);
        let of_program = |program: &CompiledProgram| -> Result<Vec<Work>> {
            // Instructions that are only run if rows were evicted are excluded.
            let parts = grouped(&Place::NOWHERE, program, &persistent)?.into_iter();
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
        let parts = grouped(&self.runner.place, program, &Persistents::of(executable))?;
        let mut timed: Vec<Timed> = Vec::new();
        self.runner.go_through(executable, id, options, &parts, |run, part| {
            let Some((spans, launches)) = &part.launches else { return Ok(()) };
            let describe = |group: usize| program.instructions[spans[group].start].describe();
            run.settle()?;
            let all: Vec<(usize, &Launch)> = launches
                .iter()
                .enumerate()
                .flat_map(|(group, launches)| launches.iter().map(move |launch| (group, launch)))
                .collect();
            let single: Vec<&Launch> = all.iter().map(|&(_, launch)| launch).collect();
            let mut times = run.device.time(&single, &|launch| describe(all[launch].0))?.into_iter();
            for (span, launches) in spans.iter().zip(launches) {
                let times: Vec<Duration> = times.by_ref().take(launches.len()).collect();
                let algorithms = launches.iter().map(|launch| run.device.algorithm(launch)).collect();
                let work = Work::of(&program.instructions[span.clone()], launches);
                timed.extend(work.map(|work| Timed { work, time: times.iter().sum(), times, algorithms }));
            }
            Ok(())
        })?;
        Ok(timed)
    }
}
