//! Says everything that is wrong with a table of actions. It knows none of the generators: only what training needs.
//!
//! In: one list of actions per rank. Out: all violations. It never repairs.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Action, Kind, MicroBatch, StageId};

/// How a send behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sends {
    /// A send is done at once; the message waits for its receiver.
    Buffered,
    /// A send lasts until its receiver gets to the action that needs the message. Orders in which two neighbours send
    /// to each other first, as 1F1B's do, stop here: they need their receives posted ahead.
    Blocking,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Violation {
    #[error("stage {stage:?} of micro-batch {micro_batch:?} has no {what}")]
    Missing { stage: StageId, micro_batch: MicroBatch, what: &'static str },
    #[error("{action} is done {times} times")]
    Repeated { action: Action, times: usize },
    #[error("stage {stage:?} of micro-batch {micro_batch:?} has a whole backward beside a split one")]
    WholeAndSplit { stage: StageId, micro_batch: MicroBatch },
    #[error("rank {rank}: {action} is outside of the {stages} stages and {micro_batches} micro-batches")]
    OutOfRange { rank: usize, action: Action, stages: u32, micro_batches: u32 },
    #[error("stage {stage:?} runs on ranks {ranks:?}, not on one")]
    Scattered { stage: StageId, ranks: Vec<usize> },
    #[error("rank {rank}: {action} comes before {needs}, which it needs")]
    OutOfOrder { rank: usize, action: Action, needs: Action },
    #[error("rank {rank} waits for ever at {at} ({sends:?} sends)")]
    Deadlock { rank: usize, at: Action, sends: Sends },
}

/// All violations of a table for `stages` stages and `micro_batches` micro-batches; none if it trains.
pub fn check(table: &[Vec<Action>], stages: u32, micro_batches: u32, sends: Sends) -> Vec<Violation> {
    let mut violations = Vec::new();
    count(table, stages, micro_batches, &mut violations);
    order(table, &mut violations);
    let owners = owners(table, &mut violations);
    deadlock(table, &owners, stages, sends, &mut violations);
    violations
}

fn count(table: &[Vec<Action>], stages: u32, micro_batches: u32, violations: &mut Vec<Violation>) {
    let mut times: BTreeMap<Action, usize> = BTreeMap::new();
    for (rank, &action) in table.iter().enumerate().flat_map(|(rank, row)| row.iter().map(move |action| (rank, action)))
    {
        if action.stage.0 >= stages || action.micro_batch.0 >= micro_batches {
            violations.push(Violation::OutOfRange { rank, action, stages, micro_batches });
        }
        *times.entry(action).or_default() += 1;
    }
    let repeated = times.iter().filter(|&(_, &times)| times > 1);
    violations.extend(repeated.map(|(&action, &times)| Violation::Repeated { action, times }));

    for (stage, micro_batch) in (0..stages).flat_map(|stage| (0..micro_batches).map(move |m| (stage, m))) {
        let has = |kind| times.contains_key(&Action::new(kind, stage, micro_batch));
        let (whole, input, weight) = (has(Kind::Backward), has(Kind::BackwardInput), has(Kind::BackwardWeight));
        let (stage, micro_batch) = (StageId(stage), MicroBatch(micro_batch));
        let mut missing = |what| violations.push(Violation::Missing { stage, micro_batch, what });
        if !has(Kind::Forward) {
            missing("forward");
        }
        match (whole, input, weight) {
            (true, false, false) | (false, true, true) => {}
            (true, ..) => violations.push(Violation::WholeAndSplit { stage, micro_batch }),
            (false, false, false) => missing("backward"),
            (false, false, true) => missing("input gradient"),
            (false, true, false) => missing("weight gradient"),
        }
    }
}

/// Within a rank: F before B and I, I before W, of the same stage and micro-batch.
fn order(table: &[Vec<Action>], violations: &mut Vec<Violation>) {
    for (rank, row) in table.iter().enumerate() {
        let mut done = BTreeSet::new();
        for &action in row {
            let needs = match action.kind {
                Kind::Forward => None,
                Kind::Backward | Kind::BackwardInput => Some(Kind::Forward),
                Kind::BackwardWeight => Some(Kind::BackwardInput),
            };
            if let Some(needs) = needs.map(|kind| Action { kind, ..action }).filter(|needs| !done.contains(needs)) {
                violations.push(Violation::OutOfOrder { rank, action, needs });
            }
            done.insert(action);
        }
    }
}

fn owners(table: &[Vec<Action>], violations: &mut Vec<Violation>) -> BTreeMap<StageId, usize> {
    let mut ranks: BTreeMap<StageId, BTreeSet<usize>> = BTreeMap::new();
    for (rank, row) in table.iter().enumerate() {
        row.iter().for_each(|action| _ = ranks.entry(action.stage).or_default().insert(rank));
    }
    let scattered = ranks.iter().filter(|(_, ranks)| ranks.len() > 1);
    violations.extend(
        scattered.map(|(&stage, ranks)| Violation::Scattered { stage, ranks: ranks.iter().copied().collect() }),
    );
    ranks.into_iter().filter_map(|(stage, ranks)| Some((stage, ranks.into_iter().next()?))).collect()
}

/// What a stage hands to its neighbour: the activation downwards, the gradient upwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    forward: bool,
    from: StageId,
    micro_batch: MicroBatch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Receive(Message),
    Compute(Message),
    Send(Message),
}

/// Runs all ranks, each until it has to wait, over and over until none moves.
fn deadlock(
    table: &[Vec<Action>],
    owners: &BTreeMap<StageId, usize>,
    stages: u32,
    sends: Sends,
    violations: &mut Vec<Violation>,
) {
    let programs: Vec<Vec<(Step, Action)>> =
        table.iter().map(|row| row.iter().flat_map(|&action| steps(action, owners, stages)).collect()).collect();
    let mut at = vec![0; table.len()];
    let mut available = BTreeSet::new();
    loop {
        let mut moved = false;
        for rank in 0..programs.len() {
            while let Some(&(step, _)) = programs[rank].get(at[rank]) {
                match step {
                    Step::Compute(message) => _ = available.insert((rank, message)),
                    Step::Receive(message) => {
                        // A message made on this very rank only has to be made; another's has to have been sent.
                        let sender = owners.get(&message.from).copied().unwrap_or(rank);
                        let waits = Some(Step::Send(message));
                        let sending = || programs[sender].get(at[sender]).map(|&(step, _)| step) == waits;
                        let key = if sender == rank { (rank, message) } else { (usize::MAX, message) };
                        if !available.contains(&key) {
                            if sends == Sends::Buffered || sender == rank || !sending() {
                                break;
                            }
                            at[sender] += 1;
                        }
                    }
                    // A blocking send ends when its receiver moves it on.
                    Step::Send(_) if sends == Sends::Blocking => break,
                    Step::Send(message) => _ = available.insert((usize::MAX, message)),
                }
                at[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck =
        programs.iter().zip(at).enumerate().filter_map(|(rank, (program, at))| Some((rank, program.get(at)?.1)));
    violations.extend(stuck.map(|(rank, at)| Violation::Deadlock { rank, at, sends }));
}

fn steps(action: Action, owners: &BTreeMap<StageId, usize>, stages: u32) -> Vec<(Step, Action)> {
    let Action { stage, micro_batch, kind } = action;
    let message = |forward, from| Message { forward, from, micro_batch };
    let forward = match kind {
        Kind::Forward => true,
        Kind::Backward | Kind::BackwardInput => false,
        Kind::BackwardWeight => return Vec::new(),
    };
    let above = stage.0.checked_sub(1).map(StageId);
    let below = Some(StageId(stage.0.saturating_add(1))).filter(|below| below.0 < stages);
    let (source, target) = if forward { (above, below) } else { (below, above) };
    let mut steps: Vec<Step> = source.map(|source| Step::Receive(message(forward, source))).into_iter().collect();
    steps.push(Step::Compute(message(forward, stage)));
    // Nothing is sent to oneself, nor to a stage that nobody runs.
    if target.and_then(|target| owners.get(&target)).is_some_and(|owner| owners.get(&stage) != Some(owner)) {
        steps.push(Step::Send(message(forward, stage)));
    }
    steps.into_iter().map(|step| (step, action)).collect()
}
