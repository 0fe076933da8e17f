//! Programs over one planned arena.

use std::io::Write;

use candle_core::DType;
use gapless_alloc::arena::{ArenaOptions, ArenaPlan, Reserve};
use gapless_alloc::csv::Table;
use gapless_alloc::draw::Mark;
use gapless_alloc::{Label, Options, PlanHash, Problem, Role, Solution};
use gapless_graph::Spec;

use crate::error::Result;
use crate::instruction::{CompiledProgram, Persistent, unknown};
use crate::offload_plan::HostPlan;

/// How to compile.
#[derive(Debug, Clone)]
pub struct CompileOptions {
    /// What the planner may spend. By default three quarters of what it spends on its own: a few seconds at most, where the
    /// bound is not met before.
    pub planner: Options,
    /// Room for what is counted while a program runs.
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
    /// An arena that must fit so many bytes, if any, planned with so much work; [`compile`](crate::compile) refuses what doesn't.
    pub fn within(capacity: Option<u64>, work: u64, reserve: Reserve) -> Self {
        let Self { planner, .. } = Self::default();
        Self { planner: Options { capacity, work, ..planner }, reserve }
    }
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

    /// Writes what was planned as a table, in minimalloc's columns: of each buffer a number and its tensor's name, its ticks, bytes and
    /// address.
    ///
    /// # Errors
    /// Only what the writer returns.
    pub fn write_plan(&self, out: impl Write) -> std::result::Result<(), gapless_alloc::Error> {
        // Names may stand twice, and have commas.
        let name = |(index, label): (usize, &Label)| format!("{index} {}", label.tensor.replace(',', ";"));
        let ids = self.labels.iter().enumerate().map(name).collect();
        Table::new(ids, self.problem.clone()).write(out, Some(&self.solution.offsets))
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
