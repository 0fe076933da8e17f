//! Programs with addresses in one planned arena.

use std::collections::BTreeMap;
use std::io::Write;

use candle_core::DType;
use gapless_alloc::arena::{ArenaOptions, ArenaPlan, Reserve};
use gapless_alloc::csv::Table;
use gapless_alloc::draw::Mark;
use gapless_alloc::{Label, Options, PlanHash, Problem, Role, Solution};
use gapless_graph::Spec;
use gapless_parallel::Axes;

use crate::error::Result;
use crate::instruction::{CompiledProgram, Persistent, unknown};
use crate::offload_plan::HostPlan;
use crate::program::InstrKind;
use crate::row_sizes::DynamicBuffer;

/// Options of [`compile`](crate::compile).
#[derive(Debug, Clone)]
pub struct CompileOptions {
    /// Options of the planner. The default `work` limit is three quarters of the planner's own default. This allows a
    /// few seconds at most. Planning ends earlier if the lower bound is reached.
    pub planner: Options,
    /// The reserve for dynamic rows.
    pub reserve: Reserve,
}

impl Default for CompileOptions {
    fn default() -> Self {
        let planner = Options::default();
        let ArenaOptions { reserve, .. } = ArenaOptions::default();
        Self { planner: Options { work: planner.work / 4 * 3, ..planner }, reserve }
    }
}

impl CompileOptions {
    /// Returns options for an arena of at most `capacity` bytes. `work` limits the planner's work. If no plan fits the
    /// capacity, [`compile`](crate::compile) returns an error.
    pub fn within(capacity: Option<u64>, work: u64, reserve: Reserve) -> Self {
        let Self { planner, .. } = Self::default();
        Self { planner: Options { capacity, work, ..planner }, reserve }
    }
}

/// Index of a program in its executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramId(#[doc(hidden)] pub usize);

/// Programs over one arena, ready to run. Only [`compile`](crate::compile) creates an executable, from programs that it
/// has checked. The addresses cannot be changed afterwards, because kernels rely on them.
///
/// ```compile_fail,E0616
/// fn shrink(executable: &mut gapless_compile::Executable) {
///     executable.solution.height = 0;
/// }
/// ```
#[derive(Debug)]
pub struct Executable {
    pub(crate) programs: Vec<CompiledProgram>,
    pub(crate) persistent: Vec<Persistent>,
    pub(crate) problem: Problem,
    pub(crate) solution: Solution,
    pub(crate) dynamic_arena: Option<ArenaPlan>,
    pub(crate) dynamic_buffers: Vec<DynamicBuffer>,
    pub(crate) labels: Vec<Label>,
    pub(crate) parts: Vec<Mark>,
    pub(crate) plan_hash: PlanHash,
    pub(crate) plan_ms: f64,
    pub(crate) host: HostPlan,
    pub(crate) flops: Vec<u64>,
}

impl Executable {
    /// Returns the programs, by [`ProgramId`].
    #[doc(hidden)]
    pub fn programs(&self) -> &[CompiledProgram] {
        &self.programs
    }

    /// Returns the tensors that outlive the step, in the order of their declaration.
    #[doc(hidden)]
    pub fn persistent(&self) -> &[Persistent] {
        &self.persistent
    }

    /// Returns the planning problem of all programs.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns the plan, which has passed the checker.
    pub fn solution(&self) -> &Solution {
        &self.solution
    }

    /// Returns the plan of the arena of dynamic rows, which lies above and between the planned buffers. Returns `None`
    /// if there are no dynamic rows.
    pub fn routing(&self) -> Option<&ArenaPlan> {
        self.dynamic_arena.as_ref()
    }

    /// Returns the names and roles of the problem's buffers.
    pub fn labels(&self) -> &[Label] {
        &self.labels
    }

    /// Returns the parts of all programs as ranges of ticks, in order. Each has a name, e.g. `train 0F3`.
    pub fn parts(&self) -> &[Mark] {
        &self.parts
    }

    /// Returns the hash that identifies the plan.
    pub fn plan_hash(&self) -> PlanHash {
        self.plan_hash
    }

    /// Returns the time spent planning, in milliseconds.
    pub fn plan_ms(&self) -> f64 {
        self.plan_ms
    }

    /// Returns the plan of the file for offloaded activations.
    pub fn host(&self) -> &HostPlan {
        &self.host
    }

    /// Returns the floating-point operations of one run of each program.
    pub fn flops(&self) -> &[u64] {
        &self.flops
    }

    /// Returns the size of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.dynamic_arena.as_ref().map_or(self.solution.height, ArenaPlan::height)
    }

    /// Writes the plan as a table with minimalloc's columns. Each row describes a buffer: its id, its lifetime in
    /// ticks, its bytes and its address. The id consists of the buffer's index and the name of its tensor.
    ///
    /// # Errors
    /// Returns the errors of the writer.
    pub fn write_plan(&self, out: impl Write) -> std::result::Result<(), gapless_alloc::Error> {
        // Names of tensors may repeat and may contain commas.
        let name = |(index, label): (usize, &Label)| format!("{index} {}", label.tensor.replace(',', ";"));
        let ids = self.labels.iter().enumerate().map(name).collect();
        Table::new(ids, self.problem.clone()).write(out, Some(&self.solution.offsets))
    }

    /// Returns the size of the file for offloaded activations.
    pub fn host_bytes(&self) -> u64 {
        self.host.solution.height
    }

    /// Returns the largest number of messages and collectives of any program.
    pub fn requests(&self) -> usize {
        self.programs.iter().map(|program| program.requests).max().unwrap_or(0)
    }

    /// Returns the collectives of all programs in their order, by the axes along which they communicate: for each, the
    /// program, the operation and the elements of its input. All ranks of a group must have the same.
    pub fn collectives(&self) -> BTreeMap<Axes, String> {
        let mut collectives: BTreeMap<Axes, String> = BTreeMap::new();
        for program in &self.programs {
            for instruction in &program.instructions {
                let InstrKind::Collective(collective, _) = instruction.kind else { continue };
                let list = collectives.entry(collective.axes()).or_default();
                let elements = instruction.inputs.first().map_or(0, |input| input.span);
                list.push_str(&format!("{} {} {elements}; ", program.name, instruction.kind.name()));
            }
        }
        collectives
    }

    /// Returns the program of this name, or `None` if there is none.
    pub fn program(&self, name: &str) -> Option<ProgramId> {
        self.programs.iter().position(|program| program.name == name).map(ProgramId)
    }

    /// True if a program reads an input of this name.
    pub fn has_input(&self, id: ProgramId, name: &str) -> bool {
        self.programs[id.0].inputs.iter().any(|input| input.name == name)
    }

    /// Returns the names, shapes and types of those tensors of one role that outlive the step, in the order of their
    /// declaration.
    pub fn specs(&self, role: Role) -> impl Iterator<Item = (&str, &Spec)> {
        let of_role = self.persistent.iter().filter(move |p| p.label.role == role);
        of_role.map(|p| (p.label.tensor.as_str(), &p.spec))
    }

    /// Returns the tensor of this name that outlives the step.
    ///
    /// # Errors
    /// If no such tensor has this name, returns an error that suggests the most similar name.
    pub fn find_persistent(&self, name: &str) -> Result<&Persistent> {
        let found = self.persistent.iter().find(|p| p.label.tensor == name);
        found.ok_or_else(|| unknown(name, self.persistent.iter().map(|p| p.label.tensor.as_str())))
    }

    /// Returns the types of all tensors, with repetitions.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> {
        let instructions = self.programs.iter().flat_map(|program| &program.instructions);
        let operands = instructions.flat_map(|instruction| instruction.inputs.iter().chain(&*instruction.outputs));
        self.persistent.iter().map(|persistent| persistent.spec.dtype).chain(operands.map(|operand| operand.dtype))
    }
}
