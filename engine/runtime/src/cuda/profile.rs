//! What each instruction of a program launches, reads, writes and computes, and how long it takes on a device.

use std::ops::{Deref, Range};
use std::time::Duration;

use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_kernels::cuda::{Launch, Product};

use super::backend::CudaBackend;
use super::place::{Launches, Part, Place, specs};
use crate::error::Result;
use crate::session::RunOptions;

/// One launch of an instruction, by itself.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LaunchWork {
    /// The kernel's name, or `product` with its extents `m×n×k`.
    pub name: String,
    /// Whether it is a product of matrices.
    pub is_product: bool,
    /// Whether every extent and pitch of a product is a multiple of 8 elements along which they are contiguous; true for kernels.
    pub is_aligned: bool,
    /// Arithmetic.
    pub flops: u64,
    /// Bytes that it reads and writes. Kernels of one instruction share equally what its products leave.
    pub bytes: u64,
}

/// What an instruction has to do, or several that are launched together.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Work {
    /// The operation's name.
    pub operation: &'static str,
    /// The layer that it belongs to.
    pub layer: String,
    /// The micro-batch.
    pub micro_batch: u32,
    /// What is launched for it, in order.
    pub launches: Vec<LaunchWork>,
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
    /// From the end of what came before it to the end of its last launch.
    pub time: Duration,
    /// The same for each of its launches.
    pub times: Vec<Duration>,
    /// For each launch that is a product, the algorithm of the library, where the device says so.
    pub algorithms: Vec<Option<String>>,
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

    /// The names of what is launched.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.launches.iter().map(|launch| &*launch.name)
    }
}

/// The launches of an instruction with its arithmetic, its operands' bytes, and the bytes that its kernels move besides.
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
            name: format!("product {}×{}×{}", product.m, product.n, product.k),
            is_product: true,
            is_aligned: product.is_aligned(),
            flops: product.flops(),
            bytes: product.bytes(),
        },
    };
    launches.iter().map(each).collect()
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
            let counts: Vec<usize> = launches.iter().map(Vec::len).collect();
            let groups = counts
                .iter()
                .enumerate()
                .flat_map(|(group, &count)| std::iter::repeat_n(group, count))
                .collect::<Vec<_>>();
            let single: Vec<&Launch> = launches.iter().flatten().collect();
            let mut times = run.device.time(&single, &|launch| describe(groups[launch]))?.into_iter();
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
