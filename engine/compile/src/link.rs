//! Links programs to an executable: lifetimes, plan, check, addresses.
//!
//! - In: programs in their final form.
//! - Out: the same programs with addresses in one arena, whose plan has passed the checker.
//! - Never: a change to the order of instructions.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Instant;

use candle_core::Layout;
use gapless_alloc::arena::ArenaPlan;
use gapless_alloc::draw::Mark;
use gapless_alloc::{Problem, Solution, lower_bound, plan_hash};
use gapless_kernels::cpu::args::{Address, Widened, span};
use gapless_kernels::cpu::bf16::{distinct, widened_layout};
use gapless_kernels::cpu::scratch::Piece;

use crate::dynamic_alloc::DynamicBuffers;
use crate::error::{Error, Result};
use crate::executable::{CompileOptions, Executable};
use crate::instruction::{BoundTensor, CompiledProgram, Instruction, Persistent};
use crate::lifetimes::{Lifetimes, lifetimes, tick_of};
use crate::offload_plan::plan_host;
use crate::plan::{lowest_within, planned};
use crate::program::{BufferId, BufferKind, InstrKind, IoTensor, Operand, Part, Program};
use crate::verify::verify;

/// Plans all `programs` into one arena and resolves their addresses.
///
/// # Errors
/// - [`Error::Unsound`] if a program could not run correctly.
/// - [`Error::TooLarge`] if a program has more bytes than any machine.
/// - [`Error::OverBudget`] if no plan was found within the planner's capacity.
/// - [`Error::BadPlan`] if the plan does not pass the checker, which means that the planner has a bug.
pub fn compile(programs: &[Program], options: &CompileOptions) -> Result<Executable> {
    programs.iter().try_for_each(verify)?;
    // Lifetimes, and the static plan.
    let Lifetimes { problem, labels, problem_index, spans } = lifetimes(&programs.iter().collect::<Vec<_>>())?;
    let started = Instant::now();
    let solution = {
        let _span = tracing::info_span!("plan", buffers = problem.len()).entered();
        lowest_within(&problem, &options.planner)?
    };
    // The arena of dynamic rows, and the file for offloaded activations.
    let requests = DynamicBuffers::new(programs, &problem_index, &spans, &problem);
    let dynamic_arena = requests.plan(&problem, &solution, options.reserve)?;
    let height = dynamic_arena.as_ref().map_or(solution.height, ArenaPlan::height);
    if let Some(budget) = options.planner.capacity.filter(|&capacity| height > capacity) {
        return Err(Error::OverBudget { budget, smallest: height, remedies: Vec::new() });
    }
    let mut host = plan_host(programs, &spans, &options.planner)?;
    let plan_ms = started.elapsed().as_secs_f64() * 1e3;
    // Addresses.
    let mut compiled = Vec::new();
    let (mut parts, mut dynamic_buffers) = (Vec::new(), Vec::new());
    for (program_index, program) in programs.iter().enumerate() {
        let (indices, span) = (&problem_index[program_index], &spans[program_index]);
        let linker = Linker {
            program_index,
            program,
            indices,
            span,
            problem: &problem,
            solution: &solution,
            requests: &requests,
        };
        compiled.push(linker.program(std::mem::take(&mut host.offsets[program_index])));
        parts.extend(linker.marks());
        dynamic_buffers.extend(requests.buffers(program_index, program, indices));
    }
    let persistent = persistent(programs, &problem_index, &solution);
    let plan_hash = plan_hash(&problem, &solution.offsets);
    let flops = programs.iter().map(Program::flops).collect();
    let labels = labels.into_iter().cloned().collect();
    let programs = compiled;
    Ok(Executable {
        programs,
        persistent,
        problem,
        solution,
        dynamic_arena,
        dynamic_buffers,
        labels,
        parts,
        plan_hash,
        plan_ms,
        host,
        flops,
    })
}

/// Returns the size of the arena of all `programs`. If the lower bound exceeds the capacity, returns the lower bound
/// without planning.
pub fn height(programs: &[&Program], CompileOptions { planner, reserve }: CompileOptions) -> Result<u64> {
    let Lifetimes { problem, problem_index, spans, .. } = lifetimes(programs)?;
    let bound = lower_bound(&problem);
    if planner.capacity.is_some_and(|capacity| bound > capacity) {
        return Ok(bound);
    }
    let requests = DynamicBuffers::new(programs, &problem_index, &spans, &problem);
    // The arena of dynamic rows depends on the static plan. So if there are dynamic rows, the static plan must be the
    // one that `compile` makes.
    let solution = match requests.is_empty() {
        true => planned(&problem, &planner),
        false => lowest_within(&problem, &planner),
    }?;
    let dynamic_arena = requests.plan(&problem, &solution, reserve)?;
    Ok(dynamic_arena.as_ref().map_or(solution.height, ArenaPlan::height))
}

/// Assigns addresses to the operands of one program.
struct Linker<'a> {
    program_index: usize,
    program: &'a Program,
    /// For each buffer of the program, the buffer's index in the problem.
    indices: &'a [usize],
    /// The ticks of the program.
    span: &'a Range<u64>,
    problem: &'a Problem,
    solution: &'a Solution,
    requests: &'a DynamicBuffers,
}

impl Linker<'_> {
    fn program(&self, host: Vec<u64>) -> CompiledProgram {
        let Self { program, .. } = *self;
        let deaths = self.deaths();
        let mut dynamic = self.requests.by_instruction(self.program_index, program).into_iter();
        let activities = program.activities();
        let instructions = program.instrs.iter().enumerate().map(|(index, instr)| {
            let dead = deaths.get(&tick_of(self.span.start, index)).map_or(&[][..], Vec::as_slice);
            let (requests, releases) = dynamic.next().expect("one for each step");
            Instruction {
                kind: instr.kind.clone(),
                activity: activities[index],
                inputs: instr.inputs.iter().map(|operand| self.address(operand)).collect(),
                outputs: instr.outputs.iter().map(|operand| self.address(operand)).collect(),
                workspace: instr.workspace.iter().map(|&buffer| self.piece(buffer)).collect(),
                accumulate: instr.accumulate,
                micro_batch: instr.micro_batch,
                layer: instr.layer.clone(),
                dead_after: dead.iter().map(|&index| self.range(index)).collect(),
                defines_count: instr.defines_count,
                predicate: instr.predicate,
                requests: requests.into(),
                releases: releases.into(),
            }
        });
        CompiledProgram {
            name: program.name.clone(),
            instructions: instructions.collect(),
            inputs: program.inputs.iter().map(|input| self.named(input)).collect(),
            outputs: program.outputs.iter().map(|output| self.named(output)).collect(),
            requests: program.requests,
            messages: program.messages(),
            host,
            row_counts: program.row_counts,
        }
    }

    fn offset(&self, buffer: BufferId) -> u64 {
        self.solution.offsets[self.indices[buffer.index()]]
    }

    fn address(&self, operand: &Operand) -> Address {
        let (size, layout) = (operand.dtype.size_in_bytes(), &operand.layout);
        Address {
            offset: self.offset(operand.buffer) + (layout.start_offset() * size) as u64,
            layout: Layout::new(layout.shape().clone(), layout.stride().to_vec(), 0),
            dtype: operand.dtype,
            span: span(layout),
            overwritten_by: operand.overwritten_by,
            widened: operand.widened.map(|buffer| {
                Box::new(Widened {
                    offset: self.offset(buffer),
                    layout: widened_layout(layout),
                    distinct: distinct(layout),
                })
            }),
            dynamic: self.requests.address(self.program_index, self.program, operand),
        }
    }

    fn piece(&self, buffer: BufferId) -> Piece {
        Piece { offset: self.offset(buffer), bytes: self.program.buffers[buffer.index()].bytes }
    }

    fn named(&self, instance: &IoTensor) -> BoundTensor {
        let IoTensor { name, micro_batch, operand, spec } = instance;
        BoundTensor {
            name: name.clone(),
            micro_batch: *micro_batch,
            spec: spec.clone(),
            address: self.address(operand),
        }
    }

    /// Returns the address range of the problem's buffer `index`.
    fn range(&self, index: usize) -> Range<u64> {
        let offset = self.solution.offsets[index];
        offset..offset + self.problem.buffers()[index].bytes
    }

    /// Returns the buffers that die at each instruction, by the instruction's first tick.
    fn deaths(&self) -> HashMap<u64, Vec<usize>> {
        let mut deaths: HashMap<u64, Vec<usize>> = HashMap::new();
        for &index in self.indices {
            let end = self.problem.buffers()[index].lifetime.end;
            // A lifetime ends one tick after the second tick of the last instruction that uses the buffer.
            if let Some(tick) = end.checked_sub(2).filter(|&tick| tick >= self.span.start && end < self.span.end) {
                deaths.entry(tick).or_default().push(index);
            }
        }
        deaths
    }

    /// Returns the parts of the program as ranges of ticks, for pictures. A part without instructions is left out: passes
    /// may have fused or moved all of its instructions into other parts.
    fn marks(&self) -> impl Iterator<Item = Mark> {
        let parts = self.program.parts.iter().filter(|part| !part.instrs.is_empty());
        parts.map(|Part { instrs, name, .. }| {
            let ticks = tick_of(self.span.start, instrs.start)..tick_of(self.span.start, instrs.end);
            Mark::new(ticks, format!("{} {name}", self.program.name))
        })
    }
}

/// Returns the tensors that outlive a step, in the order of their declaration, which is also their order in the
/// problem.
fn persistent(programs: &[Program], problem_index: &[Vec<usize>], solution: &Solution) -> Vec<Persistent> {
    let mut persistent: BTreeMap<usize, Persistent> = BTreeMap::new();
    for (program, indices) in programs.iter().zip(problem_index) {
        let mut changes = vec![false; program.buffers.len()];
        for instr in program
            .instrs
            .iter()
            .filter(|instr| matches!(instr.kind, InstrKind::Compute(_) | InstrKind::Collective(..)))
        {
            instr.outputs.iter().for_each(|output| changes[output.buffer.index()] = true);
        }
        for ((buffer, &index), changes_here) in program.buffers.iter().zip(indices).zip(changes) {
            let BufferKind::Persistent { fill, spec } = &buffer.kind else { continue };
            let persistent = persistent.entry(index).or_insert_with(|| {
                let (layout, span) = (Layout::contiguous(spec.shape.clone()), spec.elements());
                let (offset, dtype) = (solution.offsets[index], spec.dtype);
                let address =
                    Address { offset, layout, dtype, span, overwritten_by: None, dynamic: None, widened: None };
                let (label, spec, fill) = (buffer.label.clone(), spec.clone(), fill.clone());
                Persistent { label, address, spec, fill, changes_here: false }
            });
            persistent.changes_here |= changes_here;
        }
    }
    persistent.into_values().collect()
}
