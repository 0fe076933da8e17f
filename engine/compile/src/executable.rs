//! Instructions with resolved addresses, planned and checked.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Layout};
use gapless_alloc::arena::{ArenaOptions, ArenaPlan, RequestId, Reserve};
use gapless_alloc::draw::Mark;
use gapless_alloc::{Label, Options, PlanHash, Problem, Role, Solution, lower_bound, plan_hash};
use gapless_graph::Spec;
use gapless_graph::nn::Fill;
use gapless_kernels::cpu::args::{Address, Element};
use gapless_kernels::cpu::scratch::Piece;

use super::lifetimes::{Lifetimes, lifetimes, tick_of};
use crate::dynamic_alloc::Requests;
use crate::error::{Error, Result};
use crate::offload_plan::{HostPlan, plan_host};
use crate::plan::{lowest_within, planned};
use crate::program::{BufferId, Held, Operand, Part, Program, Work};

/// How to compile.
#[derive(Debug, Clone)]
pub struct CompileOptions {
    /// What the planner may spend. By default a quarter of what it spends on its own: about a second, where the bound is
    /// not met before.
    pub planner: Options,
    /// Room for what is counted while a program runs.
    pub reserve: Reserve,
}

impl Default for CompileOptions {
    fn default() -> Self {
        let planner = Options::default();
        let ArenaOptions { reserve, .. } = ArenaOptions::default();
        Self { planner: Options { work: planner.work / 4, ..planner }, reserve }
    }
}

impl CompileOptions {
    /// An arena that must fit so many bytes, if any, planned with so much work; [`compile`] refuses what doesn't.
    pub fn within(capacity: Option<u64>, work: u64, reserve: Reserve) -> Self {
        let Self { planner, .. } = Self::default();
        Self { planner: Options { capacity, work, ..planner }, reserve }
    }
}

/// One operation at its addresses.
#[derive(Debug)]
pub struct Instruction {
    pub work: Work,
    pub inputs: Box<[Address]>,
    pub outputs: Box<[Address]>,
    pub workspace: Box<[Piece]>,
    /// Bit i: output i is added to.
    pub accumulate: u64,
    pub micro_batch: u32,
    pub layer: Arc<str>,
    /// Ranges of bytes that nobody reads after this instruction.
    pub dead_after: Box<[Range<u64>]>,
    /// The count that the last element of output 0 is.
    pub counts: Option<u32>,
    /// If it is left out unless the rows of this count were let go.
    pub only_if: Option<u32>,
    /// What it is the first to write, of what is placed while the program runs.
    pub requests: Box<[Asked]>,
    /// What nobody reads after it.
    pub releases: Box<[Released]>,
}

impl Instruction {
    /// Its operation, layer and micro-batch, for errors.
    pub fn describe(&self) -> String {
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        format!("{} in {layer}, micro-batch {}", self.work.name(), self.micro_batch)
    }
}

/// A request for as many bytes as a count says.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub request: RequestId,
    /// The request whose place instructions look at.
    pub place: RequestId,
    pub count: u32,
    pub row_bytes: u64,
    pub when: When,
}

/// A request that ends.
#[derive(Debug, Clone, Copy)]
pub struct Released {
    pub request: RequestId,
    pub count: u32,
    pub when: When,
}

/// In which runs a request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// In all.
    Always,
    /// In those in which the rows wait for their backward.
    Kept,
    /// In those in which they were let go.
    LetGo,
}

/// A tensor at its address, with the name that the host knows it by.
#[derive(Debug, Clone)]
pub struct Named {
    pub name: String,
    pub micro_batch: u32,
    pub spec: Spec,
    pub address: Address,
}

/// A program whose tensors have addresses.
#[derive(Debug)]
pub struct CompiledProgram {
    pub name: String,
    pub instructions: Vec<Instruction>,
    pub inputs: Vec<Named>,
    pub outputs: Vec<Named>,
    pub requests: usize,
    /// Where in the file what is offloaded waits, by [`HostId`](super::HostId).
    pub host: Vec<u64>,
    pub counts: usize,
}

impl CompiledProgram {
    /// Where an input lies that takes these elements.
    pub fn input_for<T: Element>(&self, name: &str, micro_batch: u32, data: &[T]) -> Result<&Address> {
        let found = self.inputs.iter().find(|input| input.name == name && input.micro_batch == micro_batch);
        let Some(Named { address, spec, .. }) = found else {
            return Err(unknown(name, self.inputs.iter().map(|input| input.name.as_str())));
        };
        if address.span != data.len() || spec.dtype != T::DTYPE {
            return Err(Error::ElementCount { name: name.into(), expected: address.span, given: data.len() });
        }
        Ok(address)
    }

    /// An output by its name.
    pub fn output(&self, name: &str) -> Result<&Named> {
        let found = self.outputs.iter().find(|output| output.name == name);
        found.ok_or_else(|| unknown(name, self.outputs.iter().map(|output| output.name.as_str())))
    }
}

/// A tensor that outlives the step.
#[derive(Debug, Clone)]
pub struct Persistent {
    pub label: Label,
    pub address: Address,
    pub spec: Spec,
    /// What it holds before the first step.
    pub fill: Fill,
    /// Whether an instruction of this rank changes it, rather than a message from the rank that does.
    pub changes_here: bool,
}

/// Index of a program in its executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramId(#[doc(hidden)] pub usize);

/// Programs over one arena: what is left to do at run time is to run them.
#[derive(Debug)]
pub struct Executable {
    #[doc(hidden)]
    pub programs: Vec<CompiledProgram>,
    #[doc(hidden)]
    pub persistent: Vec<Persistent>,
    /// The problem that was planned.
    pub problem: Problem,
    /// Its plan; it has passed the checker.
    pub solution: Solution,
    /// The arena of what is counted while a program runs, above and between what the plan has placed; none if nothing is.
    pub routing: Option<ArenaPlan>,
    /// Names and roles of the problem's buffers.
    pub labels: Vec<Label>,
    /// Ranges of ticks with a name, e.g. `train 0F3`, in order.
    pub parts: Vec<Mark>,
    /// The identity of the plan.
    pub plan_hash: PlanHash,
    /// Time spent planning.
    pub plan_ms: f64,
    /// The file that offloaded activations wait in.
    pub host: HostPlan,
    /// Arithmetic of one run of each program.
    pub flops: Vec<u64>,
}

impl Executable {
    /// Size of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.routing.as_ref().map_or(self.solution.height, ArenaPlan::height)
    }

    /// Size of the file that offloaded activations wait in.
    pub fn host_bytes(&self) -> u64 {
        self.host.solution.height
    }

    /// Messages and collectives that a program has, at most.
    pub fn requests(&self) -> usize {
        self.programs.iter().map(|program| program.requests).max().unwrap_or(0)
    }

    /// Finds a program by name.
    pub fn program(&self, name: &str) -> Option<ProgramId> {
        self.programs.iter().position(|program| program.name == name).map(ProgramId)
    }

    /// Whether a program reads an input of this name.
    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.programs[id.0].inputs.iter().any(|input| input.name == name)
    }

    /// Names, shapes and types of the tensors of a role that outlive the step, in the order of their declaration.
    pub fn specs(&self, role: Role) -> impl Iterator<Item = (&str, &Spec)> {
        let of_role = self.persistent.iter().filter(move |p| p.label.role == role);
        of_role.map(|p| (p.label.tensor.as_str(), &p.spec))
    }

    /// A tensor that outlives the step, by its name.
    pub fn find_persistent(&self, name: &str) -> Result<&Persistent> {
        let found = self.persistent.iter().find(|p| p.label.tensor == name);
        found.ok_or_else(|| unknown(name, self.persistent.iter().map(|p| p.label.tensor.as_str())))
    }

    /// The types of all its tensors, each perhaps many times.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> {
        let instructions = self.programs.iter().flat_map(|program| &program.instructions);
        let operands = instructions.flat_map(|instruction| instruction.inputs.iter().chain(&*instruction.outputs));
        self.persistent.iter().map(|persistent| persistent.spec.dtype).chain(operands.map(|operand| operand.dtype))
    }
}

/// Names the nearest of those that there are.
fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Error {
    let common = |other: &&str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = names.max_by_key(common).unwrap_or("there are none").to_owned();
    Error::UnknownTensor { name: name.into(), nearest }
}

/// Plans all `programs` into one arena and resolves their addresses.
///
/// # Errors
/// When the live bytes exceed `u64`; [`Error::OverBudget`] when no plan was found within the planner's capacity;
/// [`Error::BadPlan`] if the planner is broken.
pub fn compile(programs: &[Program], options: &CompileOptions) -> Result<Executable> {
    let Lifetimes { problem, labels, of, spans } = lifetimes(&programs.iter().collect::<Vec<_>>())?;
    let started = Instant::now();
    let solution = {
        let _span = tracing::info_span!("plan", buffers = problem.len()).entered();
        lowest_within(&problem, &options.planner)?
    };
    let requests = Requests::of(programs, &of, &spans, &problem);
    let routing = requests.plan(&problem, &solution, options.reserve)?;
    let height = routing.as_ref().map_or(solution.height, ArenaPlan::height);
    if let Some(budget) = options.planner.capacity.filter(|&capacity| height > capacity) {
        return Err(Error::OverBudget { budget, smallest: height });
    }
    let mut host = plan_host(programs, &spans, &options.planner)?;
    let plan_ms = started.elapsed().as_secs_f64() * 1e3;
    let plan_hash = plan_hash(&problem, &solution.offsets);
    // By index into the problem, which is the order of declaration.
    let mut persistent: BTreeMap<usize, Persistent> = BTreeMap::new();
    let mut compiled = Vec::new();
    let mut parts = Vec::new();
    for (number, ((program, indices), span)) in programs.iter().zip(&of).zip(&spans).enumerate() {
        check_operands(program)?;
        let address = |operand: &Operand| {
            let address = resolve(operand, solution.offsets[indices[operand.buffer.index()]]);
            Address { counted: requests.address(number, program, operand), ..address }
        };
        let mut asked = requests.by_step(number, program);
        let piece = |&buffer: &BufferId| Piece {
            offset: solution.offsets[indices[buffer.index()]],
            bytes: program.buffers[buffer.index()].bytes,
        };
        let deaths = deaths(&problem, indices, span);
        let named = |instances: &[crate::program::Instance]| -> Vec<Named> {
            instances
                .iter()
                .map(|i| Named {
                    name: i.name.clone(),
                    micro_batch: i.micro_batch,
                    spec: i.spec.clone(),
                    address: address(&i.operand),
                })
                .collect()
        };
        let instructions = program.steps.iter().enumerate().map(|(index, step)| {
            let dead = deaths.get(&tick_of(span.start, index)).map_or(&[][..], Vec::as_slice);
            let range = |&b: &usize| solution.offsets[b]..solution.offsets[b] + problem.buffers()[b].bytes;
            Instruction {
                work: step.work.clone(),
                inputs: step.inputs.iter().map(address).collect(),
                outputs: step.outputs.iter().map(address).collect(),
                workspace: step.workspace.iter().map(piece).collect(),
                accumulate: step.accumulate,
                micro_batch: step.micro_batch,
                layer: step.layer.clone(),
                dead_after: dead.iter().map(range).collect(),
                counts: step.counts,
                only_if: step.only_if,
                requests: asked[index].0.drain(..).collect(),
                releases: asked[index].1.drain(..).collect(),
            }
        });
        compiled.push(CompiledProgram {
            name: program.name.clone(),
            instructions: instructions.collect(),
            inputs: named(&program.inputs),
            outputs: named(&program.outputs),
            requests: program.requests,
            host: std::mem::take(&mut host.offsets[number]),
            counts: program.counts,
        });
        let mut changes = vec![false; program.buffers.len()];
        for step in program.steps.iter().filter(|step| matches!(step.work, Work::Compute(_) | Work::Collective(..))) {
            step.outputs.iter().for_each(|output| changes[output.buffer.index()] = true);
        }
        for ((buffer, &index), changes_here) in program.buffers.iter().zip(indices).zip(changes) {
            let Held::Always { fill, spec } = &buffer.held else { continue };
            let persistent = persistent.entry(index).or_insert_with(|| {
                let address = Address {
                    offset: solution.offsets[index],
                    layout: Layout::contiguous(spec.shape.clone()),
                    dtype: spec.dtype,
                    span: spec.elements(),
                    overwritten_by: None,
                    counted: None,
                };
                let (label, spec) = (buffer.label.clone(), spec.clone());
                Persistent { label, address, spec, fill: fill.clone(), changes_here: false }
            });
            persistent.changes_here |= changes_here;
        }
        parts.extend(program.parts.iter().map(|Part { steps, name, .. }| {
            let ticks = tick_of(span.start, steps.start)..tick_of(span.start, steps.end);
            Mark::new(ticks, format!("{} {name}", program.name))
        }));
    }
    let flops = programs.iter().map(Program::flops).collect();
    let persistent = persistent.into_values().collect();
    Ok(Executable {
        programs: compiled,
        persistent,
        problem,
        solution,
        routing,
        labels,
        parts,
        plan_hash,
        plan_ms,
        host,
        flops,
    })
}

/// The size of the arena of all `programs`; above the capacity, only that it is at least so much.
pub fn height(programs: &[&Program], CompileOptions { planner, reserve }: CompileOptions) -> Result<u64> {
    let Lifetimes { problem, of, spans, .. } = lifetimes(programs)?;
    let bound = lower_bound(&problem);
    if planner.capacity.is_some_and(|capacity| bound > capacity) {
        return Ok(bound);
    }
    let requests = Requests::of(programs, &of, &spans, &problem);
    // What is counted stands above the plan that `compile` makes, and between its buffers.
    let solution = match requests.is_empty() {
        true => planned(&problem, &planner),
        false => lowest_within(&problem, &planner),
    }?;
    let routing = requests.plan(&problem, &solution, reserve)?;
    Ok(routing.as_ref().map_or(solution.height, ArenaPlan::height))
}

/// Everything that kernels rely on and the planner knows nothing of: operands lie in their buffers, an overwritten input is
/// all of its buffer and no other operand's, what the host reads has no gaps.
fn check_operands(program: &Program) -> Result<()> {
    let fail = |what: String| Err(Error::BadPlan { what });
    let bytes = |operand: &Operand| program.buffers[operand.buffer.index()].bytes;
    let inside = |operand: &Operand| {
        let elements = (operand.layout.start_offset() + span(&operand.layout)) as u64;
        elements * operand.dtype.size_in_bytes() as u64 <= bytes(operand)
    };
    for step in &program.steps {
        let name = step.work.name();
        if !step.inputs.iter().chain(&step.outputs).all(inside) {
            return fail(format!("an operand of {name} in {:?} reaches beyond its buffer", &*step.layer));
        }
        for input in &step.inputs {
            let Some(output) = input.overwritten_by.and_then(|output| step.outputs.get(output)) else { continue };
            let whole = |o: &Operand| o.layout.is_contiguous() && o.layout.start_offset() == 0;
            let same = input.buffer == output.buffer && whole(input) && whole(output) && input.dtype == output.dtype;
            let alone = step.inputs.iter().filter(|other| other.buffer == input.buffer).count() == 1;
            if !same || !alone || span(&input.layout) != span(&output.layout) {
                return fail(format!("{name} in {:?} overwrites an input of another shape or use", &*step.layer));
            }
        }
    }
    match program.inputs.iter().chain(&program.outputs).find(|i| !i.operand.layout.is_contiguous()) {
        Some(instance) => fail(format!("{:?} has gaps, so the host cannot read or write it", instance.name)),
        None => Ok(()),
    }
}

/// Elements from the first that a layout shows to the last.
fn span(layout: &Layout) -> usize {
    let reach = layout.dims().iter().zip(layout.stride()).map(|(&dim, &stride)| dim.saturating_sub(1) * stride);
    if layout.dims().contains(&0) { 0 } else { 1 + reach.sum::<usize>() }
}

fn resolve(operand: &Operand, offset: u64) -> Address {
    let size = operand.dtype.size_in_bytes();
    let layout = &operand.layout;
    let span = span(layout);
    Address {
        offset: offset + (layout.start_offset() * size) as u64,
        layout: Layout::new(layout.shape().clone(), layout.stride().to_vec(), 0),
        dtype: operand.dtype,
        span,
        overwritten_by: operand.overwritten_by,
        counted: None,
    }
}

/// The buffers that die with the step that reads at a tick, by that tick.
fn deaths(problem: &Problem, indices: &[usize], span: &Range<u64>) -> HashMap<u64, Vec<usize>> {
    let mut deaths: HashMap<u64, Vec<usize>> = HashMap::new();
    for &index in indices {
        let end = problem.buffers()[index].lifetime.end;
        // The end is one past the second tick of the last step that uses the buffer.
        if let Some(tick) = end.checked_sub(2).filter(|&t| t >= span.start && end < span.end) {
            deaths.entry(tick).or_default().push(index);
        }
    }
    deaths
}

impl Named {
    /// Whether the host reads and writes it as f32.
    pub fn is_f32(&self) -> bool {
        self.spec.dtype == DType::F32
    }
}
