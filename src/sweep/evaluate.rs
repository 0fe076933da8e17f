//! One configuration to its row: time first, then live bytes, and plans and allocators only of what can fit.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use gapless_alloc::{PlanHash, live_at, peak_tick};
use gapless_allocators::{Comparison, Kind, Report, Requests, compare};
use gapless_engine::TrainError;
use gapless_engine::compile::step::StepGraph;
use gapless_engine::compile::{Error as CompileError, Executable, Program, live_bytes};

use super::row::Figures;
use super::{Configuration, Row, Status, Sweep};
use crate::step::{Step, TimingError, estimate};

/// What rows are made with.
pub(super) struct Evaluator<'a> {
    sweep: &'a Sweep,
    /// What allocators reserve for a plan's table, by plan: ranks and configurations that differ in less have the same.
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

impl<'a> Evaluator<'a> {
    pub fn new(sweep: &'a Sweep) -> Self {
        Self { sweep, reserved: Mutex::default() }
    }

    /// The rows of configurations that share a graph, until `give` wants no more.
    pub fn group(&self, group: &[&Configuration], give: &mut dyn FnMut(Row) -> bool) {
        let first = group.iter().find_map(|of| of.step.as_ref().ok());
        let graph = first.map(|step| step.record().map_err(|error| error.to_string()));
        for of in group {
            let row = match (&of.step, &graph) {
                (Ok(step), Some(Ok(graph))) => self.row(of, step, graph),
                (Err(why), _) | (_, Some(Err(why))) => row(of, Status::Invalid, Some(why.clone()), None),
                (Ok(_), None) => unreachable!("a step is in its own group"),
            };
            if !give(row) {
                return;
            }
        }
    }

    fn row(&self, of: &Configuration, step: &Step, graph: &StepGraph) -> Row {
        match self.figures(step, graph) {
            Ok((status, figures)) => row(of, status, None, Some(figures)),
            Err(Refused::OverBudget(why)) => row(of, Status::OverBudget, Some(why), None),
            Err(Refused::Invalid(why)) => row(of, Status::Invalid, Some(why), None),
        }
    }

    fn figures(&self, step: &Step, graph: &StepGraph) -> Result<(Status, Figures), Refused> {
        // Programs and their time: of every rank, for they wait for each other.
        let programs = step.programs(graph)?;
        let timing = step.timing(&programs)?;
        // What is alive at once bounds every allocator.
        let live = programs.iter().map(live_bytes).collect::<Result<Vec<u64>, _>>().map_err(TrainError::from)?;
        let capacity = self.sweep.options.capacity.unwrap_or(step.device.memory);
        let most = live.iter().copied().max().unwrap_or(0);
        let is_planned = most <= capacity;
        let (mut arenas, mut plans, mut roles, mut reserved) =
            (Vec::new(), Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (program, &live) in programs.into_iter().zip(&live).filter(|_| is_planned) {
            let executable = plan(step, program)?;
            arenas.push(executable.arena_bytes());
            plans.push(executable.plan_hash.to_string());
            if live == most {
                roles = roles_at_peak(&executable);
            }
            if live as f64 >= self.sweep.options.fullest * most as f64 {
                for (kind, bytes) in self.reserved(&executable) {
                    let most: &mut u64 = reserved.entry(kind.name().to_owned()).or_default();
                    *most = bytes.max(*most);
                }
            }
        }
        let status = match arenas.iter().all(|&bytes| bytes <= capacity) && is_planned {
            true => Status::Fits,
            false => Status::TooLarge,
        };
        let formulas = estimate(step, graph.parameters());
        let options = &step.options;
        let seconds = timing.nanoseconds() as f64 / 1e9;
        let figures = Figures {
            parameters: graph.parameters(),
            micro_batch: options.evaluation_batch(),
            live_bytes: live,
            arena_bytes: arenas,
            plans,
            roles,
            reserved,
            nanoseconds: timing.nanoseconds(),
            bubble: timing.timeline.bubble_share(),
            overhead: timing.overhead(),
            tokens_per_second: (options.batch * options.sequence) as f64 / seconds.max(1e-9),
            formula_bytes: formulas.bytes_per_parameter as u64,
            megatron_bytes: formulas.megatron as u64,
            stages: timing
                .stages
                .iter()
                .map(|of| [of.forward, of.backward_input, of.backward_weight, of.transfer])
                .collect(),
            updates: timing.updates,
        };
        Ok((status, figures))
    }

    /// What the allocators reserve for a plan's table.
    fn reserved(&self, executable: &Executable) -> Reserved {
        let known = || self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reserved) = known().get(&executable.plan_hash) {
            return reserved.clone();
        }
        let requests = Requests::new(&executable.problem);
        let comparison =
            Comparison { kinds: self.sweep.allocators.clone(), capacity: Some(u64::MAX), ..Comparison::default() };
        let compared = compare(&executable.problem, &requests, &comparison);
        let reserved: Reserved = compared
            .allocators
            .iter()
            .filter_map(|entry| Some((entry.kind, entry.outcome.as_ref().ok().map(Report::peak_reserved)?)))
            .collect();
        known().insert(executable.plan_hash, reserved.clone());
        reserved
    }
}

fn row(of: &Configuration, status: Status, why: Option<String>, figures: Option<Figures>) -> Row {
    let configuration = of.values.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    Row { key: of.key.clone(), configuration, status, why, figures }
}

fn plan(step: &Step, program: Program) -> Result<Executable, Refused> {
    Ok(step.plan(program)?)
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
