//! Configurations to rows: time and live bytes of all, plans and allocators only of what can fit and where the order of the results
//! could depend on it.
//!
//! What is alive at once bounds every allocator from below. So a configuration needs no more of an allocator's bytes than that, where one
//! that is as fast has been found to reserve no more than that already: it is on no Pareto front of that allocator.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use gapless_alloc::{PlanHash, Problem, live_at, lower_bound, peak_tick, plan_hash};
use gapless_allocators::{Comparison, Kind, Report, Requests, compare};
use gapless_engine::TrainError;
use gapless_engine::compile::step::StepGraph;
use gapless_engine::compile::{Error as CompileError, Executable, Program, table};

use super::row::Figures;
use super::{Configuration, Planned, Row, Status, Sweep};
use crate::step::{Step, TimingError, estimate};

/// What rows are made with.
pub(super) struct Evaluator<'a> {
    sweep: &'a Sweep,
    /// What allocators reserve for a table, by its digest: ranks and configurations that differ in less have the same.
    reserved: Mutex<HashMap<PlanHash, Reserved>>,
}

/// Bytes by allocator.
type Reserved = BTreeMap<Kind, u64>;

/// Why a configuration has no figures.
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

impl From<TimingError> for Refused {
    fn from(error: TimingError) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// The least that is reserved by what is as fast: of the plan, and of each allocator.
struct Least {
    plan: u64,
    of: BTreeMap<Kind, u64>,
}

impl<'a> Evaluator<'a> {
    pub fn new(sweep: &'a Sweep) -> Self {
        Self { sweep, reserved: Mutex::default() }
    }

    /// The rows of configurations that share a graph but for those that are known, the fastest first, until `give` wants no more.
    pub fn group(&self, group: &[(&Configuration, Option<Row>)], give: &mut dyn FnMut(Row) -> bool) {
        let first = group.iter().find_map(|(of, _)| of.step.as_ref().ok());
        let graph = first.map(|step| step.record().map_err(|error| error.to_string()));
        let mut timed: Vec<(&Configuration, Row, bool)> = Vec::new();
        for (of, known) in group {
            let row = match (known, &of.step, &graph) {
                (Some(known), ..) => known.clone(),
                (None, Ok(step), Some(Ok(graph))) => self.timed(of, step, graph),
                (None, Err(why), _) | (None, _, Some(Err(why))) => row(of, Status::Invalid, Some(why.clone()), None),
                (None, Ok(_), None) => unreachable!("a step is in its own group"),
            };
            match row.figures {
                Some(_) => timed.push((of, row, known.is_some())),
                None if known.is_some() => {}
                None if !give(row) => return,
                None => {}
            }
        }
        timed.sort_by_key(|(_, row, _)| row.figures.as_ref().map(|of| (of.nanoseconds, of.live())));
        let mut least =
            Least { plan: u64::MAX, of: self.sweep.allocators.iter().map(|&kind| (kind, u64::MAX)).collect() };
        for (of, mut row, is_known) in timed {
            if let (false, Ok(step), Some(Ok(graph))) = (is_known, &of.step, &graph)
                && let Err(refused) = self.place(step, graph, &least, &mut row)
            {
                (row.status, row.why, row.figures) = refused.into();
            }
            least.see(row.figures.as_ref());
            if !is_known && !give(row) {
                return;
            }
        }
    }

    /// A row of time and live bytes.
    fn timed(&self, of: &Configuration, step: &Step, graph: &StepGraph) -> Row {
        match self.figures(step, graph) {
            Ok(figures) => row(of, Status::Dominated, None, Some(figures)),
            Err(refused) => {
                let (status, why, _) = refused.into();
                row(of, status, why, None)
            }
        }
    }

    fn figures(&self, step: &Step, graph: &StepGraph) -> Result<Figures, Refused> {
        // Of every rank, for they wait for each other.
        let programs = step.programs(graph)?;
        let timing = step.timing(&programs)?;
        let live = |program: &Program| Ok(lower_bound(&table(program)?));
        let live = programs.iter().map(live).collect::<Result<Vec<u64>, CompileError>>().map_err(TrainError::from)?;
        let formulas = estimate(step, graph.parameters());
        let options = &step.options;
        let seconds = timing.nanoseconds() as f64 / 1e9;
        let costs = timing.stages.iter();
        Ok(Figures {
            parameters: graph.parameters(),
            micro_batch: options.evaluation_batch(),
            live_bytes: live,
            arena_bytes: Vec::new(),
            plans: Vec::new(),
            roles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            nanoseconds: timing.nanoseconds(),
            bubble: timing.timeline.bubble_share(),
            overhead: timing.overhead(),
            tokens_per_second: (options.batch * options.sequence) as f64 / seconds.max(1e-9),
            formula_bytes: formulas.bytes_per_parameter as u64,
            megatron_bytes: formulas.megatron as u64,
            stages: costs.map(|of| [of.forward, of.backward_input, of.backward_weight, of.transfer]).collect(),
            updates: timing.updates,
        })
    }

    /// Plans and replays what can fit, where nothing that is as fast is known to take less.
    fn place(&self, step: &Step, graph: &StepGraph, least: &Least, row: &mut Row) -> Result<(), Refused> {
        let Some(figures) = &mut row.figures else { return Ok(()) };
        let most = figures.live();
        let capacity = self.sweep.options.capacity.unwrap_or(step.device.memory);
        if most > capacity {
            row.status = Status::TooLarge;
            return Ok(());
        }
        let all = self.sweep.options.plan == Planned::All;
        let is_planned = all || most < least.plan;
        let kinds: Vec<Kind> =
            least.of.iter().filter(|(_, bytes)| all || most < **bytes).map(|(kind, _)| *kind).collect();
        if !is_planned && kinds.is_empty() {
            return Ok(());
        }
        for (rank, live) in figures.live_bytes.clone().into_iter().enumerate() {
            let is_full = live as f64 >= self.sweep.options.fullest * most as f64;
            let replayed = if is_full { &kinds[..] } else { &[] };
            if !is_planned && replayed.is_empty() {
                continue;
            }
            let program = step.program(graph, rank)?;
            let problem = if is_planned {
                let executable = step.plan(program)?;
                figures.arena_bytes.push(executable.arena_bytes());
                figures.plans.push(executable.plan_hash.to_string());
                if live == most {
                    figures.roles = roles_at_peak(&executable);
                }
                executable.problem
            } else {
                table(&program).map_err(TrainError::from)?
            };
            for (kind, bytes) in self.reserved(&problem, replayed) {
                let most: &mut u64 = figures.reserved.entry(kind.name().to_owned()).or_default();
                *most = bytes.max(*most);
            }
        }
        row.status = match figures.arena() {
            Some(arena) if arena <= capacity => Status::Fits,
            Some(_) => Status::TooLarge,
            None => Status::Dominated,
        };
        Ok(())
    }

    /// What allocators reserve for a table.
    fn reserved(&self, problem: &Problem, kinds: &[Kind]) -> Reserved {
        if kinds.is_empty() {
            return Reserved::new();
        }
        let digest = plan_hash(problem, &vec![0; problem.len()]);
        let lock = || self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reserved = lock().get(&digest).cloned().unwrap_or_default();
        let missing: Vec<Kind> = kinds.iter().copied().filter(|kind| !reserved.contains_key(kind)).collect();
        if !missing.is_empty() {
            let comparison = Comparison { kinds: missing, capacity: Some(u64::MAX), ..Comparison::default() };
            let compared = compare(problem, &Requests::new(problem), &comparison);
            let bytes = |entry: &gapless_allocators::Entry| entry.outcome.as_ref().ok().map(Report::peak_reserved);
            reserved.extend(compared.allocators.iter().filter_map(|entry| Some((entry.kind, bytes(entry)?))));
            lock().insert(digest, reserved.clone());
        }
        reserved.retain(|kind, _| kinds.contains(kind));
        reserved
    }
}

impl Least {
    /// Learns of a row that is no slower than those to come.
    fn see(&mut self, figures: Option<&Figures>) {
        let Some(figures) = figures else { return };
        self.plan = self.plan.min(figures.arena().unwrap_or(u64::MAX));
        for (kind, least) in &mut self.of {
            *least = (*least).min(figures.reserved.get(kind.name()).copied().unwrap_or(u64::MAX));
        }
    }
}

impl From<Refused> for (Status, Option<String>, Option<Figures>) {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::OverBudget(why) => (Status::OverBudget, Some(why), None),
            Refused::Invalid(why) => (Status::Invalid, Some(why), None),
        }
    }
}

fn row(of: &Configuration, status: Status, why: Option<String>, figures: Option<Figures>) -> Row {
    let configuration = of.values.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    Row { key: of.key.clone(), configuration, status, why, figures }
}

/// What is alive at the peak, by role.
fn roles_at_peak(executable: &Executable) -> BTreeMap<String, u64> {
    let mut roles = BTreeMap::new();
    if let Some(tick) = peak_tick(&executable.problem) {
        for id in live_at(&executable.problem, tick) {
            let role = executable.labels[id.index()].role.name().to_owned();
            *roles.entry(role).or_default() += executable.problem.buffer(id).bytes;
        }
    }
    roles
}
