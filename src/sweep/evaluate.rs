//! Computes the rows of configurations. Time and sure bytes are computed for all configurations. Only configurations
//! that fit and can be on a Pareto front are planned and replayed through the allocators.
//!
//! The *sure bytes* of a step are bytes that are certainly alive at the same time, so every allocator reserves at least
//! as many. Let A be a configuration, and let B be another one that is at least as fast. If an allocator reserves no
//! more bytes for B than the sure bytes of A, then A cannot be on the Pareto front of this allocator.
//!
//! Sure bytes are those of gapless's own step. If `lowering` selects an eager framework, the allocators replay other
//! tables, to which sure bytes do not apply. Then the live bytes of these tables take their place.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use gapless_alloc::{Label, Options, PlanHash, Problem, live_at, lower_bound, peak_tick, table_hash};
use gapless_allocators::{Comparison, Kind, Report, Requests, compare};
use gapless_engine::TrainError;
use gapless_engine::compile::Program;
use gapless_engine::compile::step::StepGraph;
use gapless_engine::compile::{Error as CompileError, ServedRows, table, table_with_rows};

use super::map::coarse_map;
use super::row::Figures;
use super::{Configuration, PlannedConfigurations, Row, Status, Sweep};
use crate::run::key_of;
use crate::step::{
    EagerError, Lowering, Origin, Sketch, SketchBase, SketchGraph, SketchKey, Step, TimingError, estimate,
};

/// Computes rows. All threads share its cache of replayed tables.
pub(super) struct Evaluator<'a> {
    sweep: &'a Sweep,
    /// Bytes that allocators reserve for a table, by the digest of the table. Equal tables of different ranks or
    /// configurations are replayed only once.
    reserved: Mutex<HashMap<PlanHash, ReservedBytes>>,
}

/// The reserved bytes of each allocator, by its name.
type ReservedBytes = BTreeMap<&'static str, u64>;

/// The reasons why a configuration has no [`Figures`].
enum Refused {
    OverBudget(String),
    Invalid(String),
}

impl From<TrainError> for Refused {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Compile(error @ CompileError::OverBudget { .. }) => Self::OverBudget(error.to_string()),
            other => Self::Invalid(other.to_string()),
        }
    }
}

impl From<EagerError> for Refused {
    fn from(error: EagerError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl From<TimingError> for Refused {
    fn from(error: TimingError) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// For each menu, the fewest bytes that any configuration so far takes under the plan, and under each allocator.
/// Configurations are evaluated in order of speed, the fastest first. So these bytes belong to configurations that are
/// at least as fast as all later configurations.
pub(super) struct BestKnown {
    plan: Vec<u64>,
    reserved: BTreeMap<&'static str, Vec<u64>>,
}

impl<'a> Evaluator<'a> {
    pub fn new(sweep: &'a Sweep) -> Self {
        Self { sweep, reserved: Mutex::default() }
    }

    /// Computes time and sure bytes of configurations that share the forward and the gradients of their graphs, and passes
    /// each row to `give`. Those that share a graph are adjacent. Stops when `give` returns false.
    pub fn sketch(&self, group: &[&Configuration], give: &mut dyn FnMut(Row) -> bool) {
        let mut steps = group.iter().filter_map(|configuration| configuration.step.as_ref().ok());
        let base = steps.next().map(SketchBase::new);
        for of_graph in group.chunk_by(|a, b| a.graph_key() == b.graph_key()) {
            if !self.sketch_graph(of_graph, base.as_ref(), give) {
                return;
            }
        }
    }

    /// Computes time and sure bytes of configurations that share a graph, and passes each row to `give`. Returns false as
    /// soon as `give` does.
    fn sketch_graph(
        &self,
        group: &[&Configuration],
        base: Option<&SketchBase>,
        give: &mut dyn FnMut(Row) -> bool,
    ) -> bool {
        let first = group.iter().find_map(|configuration| configuration.step.as_ref().ok());
        let graph = first.zip(base).map(|(step, base)| base.graph(step).map_err(|error| error.to_string()));
        let mut known = HashMap::new();
        for configuration in group {
            let row = match (&configuration.step, &graph) {
                (Ok(step), Some(Ok(graph))) => match sketch(configuration, step, graph, &mut known) {
                    Ok(figures) => row(configuration, Status::Sketched, None, Some(figures)),
                    Err(refused) => refused.row(configuration),
                },
                (Err(why), _) | (_, Some(Err(why))) => row(configuration, Status::Invalid, Some(why.clone()), None),
                (Ok(_), None) => unreachable!("a step is in its own group"),
            };
            if !give(row) {
                return false;
            }
        }
        true
    }

    /// Returns the configuration's final row if planning can be skipped. This is the case if the sure bytes exceed the
    /// capacity, or if other configurations dominate this configuration. Returns `None` if the configuration must be
    /// planned.
    pub fn skipped_row(&self, configuration: &Configuration, sketched: &Row, least: &BestKnown) -> Option<Row> {
        let figures = sketched.figures.as_ref()?;
        let sure = figures.at_least.iter().copied().max().unwrap_or(0);
        let status = match sure > self.capacity(configuration) {
            true => Status::TooLarge,
            false
                if self.sweep.options.plan == PlannedConfigurations::Front
                    && least.is_dominated(configuration, sure, sure_of_allocators(configuration, sure)) =>
            {
                Status::Dominated
            }
            false => return None,
        };
        Some(Row { status, ..sketched.clone() })
    }

    /// Memory of each rank's device, in bytes.
    fn capacity(&self, configuration: &Configuration) -> u64 {
        let device = configuration.step.as_ref().map_or(u64::MAX, |step| step.device_bytes());
        self.sweep.options.capacity.unwrap_or(device)
    }

    /// Plans a configuration, replays it through the allocators, and returns its final row. The plan or an allocator is
    /// skipped if the configuration cannot be on its Pareto front, because a configuration that is at least as fast
    /// takes no more bytes. A step that is refused only now keeps the figures of its sketch, so that a sweep that
    /// continues visits it in the same round.
    pub fn plan_and_replay(&self, configuration: &Configuration, row: Row, least: &BestKnown) -> Row {
        let (Ok(step), Some(sketched)) = (&configuration.step, &row.figures) else { return row };
        let mut figures = sketched.clone();
        match self.figures(configuration, step, least, &mut figures) {
            Ok(status) => Row { status, figures: Some(figures), ..row },
            Err(refused) => Row { figures: row.figures, ..refused.row(configuration) },
        }
    }

    fn figures(
        &self,
        configuration: &Configuration,
        step: &Step,
        least: &BestKnown,
        figures: &mut Figures,
    ) -> Result<Status, Refused> {
        let graph = step.record()?;
        let all = self.sweep.options.plan == PlannedConfigurations::All;
        let eager = self.eager_tables(step, &graph)?;
        if let Some(tables) = &eager
            && !all
            && least.is_dominated(configuration, figures.live(), most_alive(tables))
        {
            return Ok(Status::Dominated);
        }
        let programs = programs(step, &graph)?;
        // The plan and all allocators get the same rows of experts.
        let rows: Vec<_> = (0..programs.len()).map(|rank| step.received_rows(&graph, rank)).collect();
        let tables = programs.iter().zip(&rows).map(|(program, rows)| table_with_rows(program, rows));
        let tables = tables.collect::<Result<Vec<Problem>, CompileError>>().map_err(TrainError::from)?;
        figures.live_bytes = tables.iter().map(lower_bound).collect();
        let (most, capacity) = (figures.live(), self.capacity(configuration));
        if most > capacity {
            return Ok(Status::TooLarge);
        }
        let can_be_on_front = most < least.plan(configuration);
        if all || can_be_on_front {
            plan(step, &programs, &rows, can_be_on_front, figures)?;
        }
        let replayed = eager.unwrap_or_else(|| tables.into_iter().zip(figures.live_bytes.iter().copied()).collect());
        let most = most_alive(&replayed);
        let is_replayed = |kind: &Kind| all || most < least.reserved(configuration, kind.name());
        let kinds: Vec<Kind> = self.sweep.allocators.iter().copied().filter(is_replayed).collect();
        for (problem, live) in &replayed {
            if kinds.is_empty() || (*live as f64) < self.sweep.options.fullest * most as f64 {
                continue;
            }
            figures.allocated = figures.allocated.max(*live);
            for (name, bytes) in self.reserved(problem, &kinds) {
                let most: &mut u64 = figures.reserved.entry(name.to_owned()).or_default();
                *most = bytes.max(*most);
            }
        }
        Ok(match figures.arena() {
            Some(arena) if arena <= capacity => Status::Fits,
            Some(_) => Status::TooLarge,
            None => Status::Dominated,
        })
    }

    /// Returns each rank's table under an eager framework, with its peak of live bytes. Returns `None` if `lowering`
    /// selects no such framework, or if the sweep has no allocators to replay the tables.
    fn eager_tables(&self, step: &Step, graph: &StepGraph) -> Result<Option<Vec<(Problem, u64)>>, EagerError> {
        if step.lowering == Lowering::Gapless || self.sweep.allocators.is_empty() {
            return Ok(None);
        }
        let with_live = |table: Problem| {
            let live = lower_bound(&table);
            (table, live)
        };
        let ranks = 0..step.options.mesh.pipeline;
        ranks.map(|rank| step.eager(graph, rank).map(with_live)).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the bytes that each allocator reserves for a table, from the cache where possible.
    fn reserved(&self, problem: &Problem, kinds: &[Kind]) -> ReservedBytes {
        let digest = table_hash(problem);
        let lock = || self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reserved = lock().get(&digest).cloned().unwrap_or_default();
        let missing: Vec<Kind> = kinds.iter().copied().filter(|kind| !reserved.contains_key(kind.name())).collect();
        if !missing.is_empty() {
            let comparison = Comparison { kinds: missing, capacity: Some(u64::MAX), ..Comparison::default() };
            let compared = compare(problem, &Requests::new(problem), &comparison);
            let bytes = |entry: &gapless_allocators::Entry| entry.outcome.as_ref().ok().map(Report::peak_reserved);
            reserved.extend(compared.allocators.iter().filter_map(|entry| Some((entry.kind.name(), bytes(entry)?))));
            lock().insert(digest, reserved.clone());
        }
        reserved.retain(|name, _| kinds.iter().any(|kind| kind.name() == *name));
        reserved
    }
}

impl BestKnown {
    pub fn new(sweep: &Sweep) -> Self {
        let nothing = vec![u64::MAX; sweep.menus.len()];
        Self { reserved: sweep.allocators.iter().map(|kind| (kind.name(), nothing.clone())).collect(), plan: nothing }
    }

    /// Records the bytes of a configuration. Configurations must be recorded in order of speed, the fastest first.
    pub fn record(&mut self, configuration: &Configuration, row: &Row) {
        let Some(figures) = &row.figures else { return };
        for &menu in &configuration.menus {
            self.plan[menu] = self.plan[menu].min(figures.arena().unwrap_or(u64::MAX));
            for (name, least) in &mut self.reserved {
                least[menu] = least[menu].min(figures.reserved.get(*name).copied().unwrap_or(u64::MAX));
            }
        }
    }

    /// Returns a limit for the arena. If the configuration's arena is below this limit, the configuration is on the
    /// Pareto front of plans in at least one of its menus.
    fn plan(&self, configuration: &Configuration) -> u64 {
        configuration.menus.iter().map(|&menu| self.plan[menu]).max().unwrap_or(u64::MAX)
    }

    /// Like [`Self::plan`], but returns the limit for the bytes that an allocator reserves.
    fn reserved(&self, configuration: &Configuration, name: &str) -> u64 {
        configuration.menus.iter().map(|&menu| self.reserved[name][menu]).max().unwrap_or(u64::MAX)
    }

    /// True if a configuration cannot be on any Pareto front. Its plan takes at least `planned` bytes, and every
    /// allocator reserves at least `reserved` bytes for it. It cannot be on a front if in each of its menus, the plan
    /// and every allocator take at most these bytes for configurations that are at least as fast.
    fn is_dominated(&self, configuration: &Configuration, planned: u64, reserved: u64) -> bool {
        self.plan(configuration) <= planned
            && self.reserved.keys().all(|name| self.reserved(configuration, name) <= reserved)
    }
}

impl Refused {
    fn row(self, configuration: &Configuration) -> Row {
        let (status, why) = match self {
            Self::OverBudget(why) => (Status::OverBudget, why),
            Self::Invalid(why) => (Status::Invalid, why),
        };
        row(configuration, status, Some(why), None)
    }
}

/// Returns a lower bound of the bytes that an allocator reserves for a configuration with these sure bytes. They bound
/// only the tables of gapless's own step.
fn sure_of_allocators(configuration: &Configuration, sure: u64) -> u64 {
    configuration.step.as_ref().map_or(0, |step| if step.lowering == Lowering::Gapless { sure } else { 0 })
}

/// Returns the live bytes of the fullest table.
fn most_alive(tables: &[(Problem, u64)]) -> u64 {
    tables.iter().map(|(_, live)| *live).max().unwrap_or(0)
}

/// Lowers the training step of every rank. If ranks exceed their budget, the refusal names the rank that needs most.
fn programs(step: &Step, graph: &StepGraph) -> Result<Vec<Program>, Refused> {
    let (mut programs, mut over) = (Vec::new(), None::<(u64, String)>);
    for rank in 0..step.options.mesh.pipeline {
        match step.program(graph, rank) {
            Ok(program) => programs.push(program),
            Err(TrainError::Compile(error @ CompileError::OverBudget { smallest, .. })) => {
                if over.as_ref().is_none_or(|(most, _)| *most < smallest) {
                    over = Some((smallest, format!("rank {rank}: {error}")));
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    match over {
        Some((_, why)) => Err(Refused::OverBudget(why)),
        None => Ok(programs),
    }
}

/// Plans all ranks, at first with little planning work. The rank with the largest arena determines how much memory the
/// step takes, and no arena can be smaller than the live bytes of its rank. So if the step can be on a Pareto front,
/// each rank whose arena exceeds the live bytes of the fullest rank is planned again, with the full planning work.
fn plan(
    step: &Step,
    programs: &[Program],
    rows: &[impl Fn(&str, u32, u64) -> u64],
    can_be_on_front: bool,
    figures: &mut Figures,
) -> Result<(), Refused> {
    let (most, whole) = (figures.live(), step.options.memory.planning);
    let quick = whole.min(Options::QUICK_WORK);
    let mut quickly = step.clone();
    quickly.options.memory.planning = quick;
    for (rank, program) in programs.iter().enumerate() {
        let mut executable = quickly.plan(program)?;
        // More planning work can only lower the static plan. It has no effect on a reserve.
        let is_lowest = executable.solution().height == executable.solution().lower_bound;
        if can_be_on_front && !is_lowest && executable.arena_bytes() > most && quick < whole {
            let again = step.plan(program)?;
            if again.arena_bytes() < executable.arena_bytes() {
                executable = again;
            }
        }
        let ServedRows { problem, solution, arena_bytes, grown_to } =
            executable.serve_rows(&rows[rank]).map_err(TrainError::from)?;
        figures.arena_bytes.push(arena_bytes);
        figures.served_bytes.push(solution.height);
        figures.reserve_grown_to = [figures.reserve_grown_to, grown_to].into_iter().flatten().reduce(f64::max);
        figures.plans.push(executable.plan_hash().to_string());
        if figures.live_bytes[rank] == most {
            figures.roles = roles_at_peak(&problem, executable.labels());
            figures.map = coarse_map(&problem, &solution.offsets, executable.labels(), arena_bytes);
            figures.map_bytes = arena_bytes;
        }
    }
    Ok(())
}

/// Computes the [`Figures`] of a step that do not require a plan. `known` has the sketches so far, because
/// configurations that differ only in their schedule may share a sketch.
fn sketch(
    configuration: &Configuration,
    step: &Step,
    graph: &SketchGraph<'_>,
    known: &mut HashMap<(String, SketchKey), Sketch>,
) -> Result<Figures, Refused> {
    let (timing, at_least) = match step.sketch_key()? {
        Some(key) => {
            let mut others = configuration.keys.clone();
            others.retain(|(name, _)| key_of(name) != "pipeline.schedule");
            let others = format!("{others:?}");
            let sketch = match known.entry((others, key.clone())) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(graph.sketch(step, &key)?),
            };
            (step.timing_by(sketch)?, step.surely_alive(sketch)?)
        }
        None => {
            let programs = programs(step, graph.whole(step)?)?;
            let live = |program: &Program| Ok(lower_bound(&table(program)?));
            let live = programs.iter().map(live).collect::<Result<_, CompileError>>().map_err(TrainError::from)?;
            (step.timing(&programs)?, live)
        }
    };
    let formulas = estimate(step, graph.parameters());
    let options = &step.options;
    let seconds = timing.nanoseconds() as f64 / 1e9;
    let costs = timing.stages.iter();
    Ok(Figures {
        parameters: graph.parameters(),
        micro_batch: options.evaluation_batch(),
        at_least,
        live_bytes: Vec::new(),
        arena_bytes: Vec::new(),
        served_bytes: Vec::new(),
        reserve_grown_to: None,
        plans: Vec::new(),
        roles: BTreeMap::new(),
        map: Vec::new(),
        map_bytes: 0,
        allocated: 0,
        reserved: BTreeMap::new(),
        nanoseconds: timing.nanoseconds(),
        bubble: timing.timeline.bubble_share(),
        overhead: timing.overhead(),
        tokens_per_second: (options.batch * options.sequence) as f64 / seconds.max(1e-9),
        formula_bytes: formulas.bytes_per_parameter as u64,
        megatron_bytes: formulas.megatron as u64,
        stages: costs
            .map(|costs| [costs.forward, costs.backward_input, costs.backward_weight, costs.transfer])
            .collect(),
        updates: timing.updates,
    })
}

fn row(configuration: &Configuration, status: Status, why: Option<String>, figures: Option<Figures>) -> Row {
    let values = configuration.values.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let origin = Origin::new(configuration.step.as_ref().ok());
    Row { key: configuration.key.clone(), origin, configuration: values, status, why, figures }
}

/// Returns the bytes that are alive at the peak, by role.
fn roles_at_peak(problem: &Problem, labels: &[Label]) -> BTreeMap<String, u64> {
    let mut roles = BTreeMap::new();
    if let Some(tick) = peak_tick(problem) {
        for id in live_at(problem, tick) {
            let role = labels[id.index()].role.name().to_owned();
            *roles.entry(role).or_default() += problem.buffer(id).bytes;
        }
    }
    roles
}
