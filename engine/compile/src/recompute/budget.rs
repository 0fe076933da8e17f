//! The cheapest step that fits into a number of bytes.
//!
//! In: the layers of a rank with their [`Choice`]s, how many micro-batches of each are under way at once, and a judge that
//! compiles and plans a [`RematPlan`] for real. Out: the one that costs least time of those that fit. Never: bytes
//! that were not planned.
//!
//! The layers together: while layer l runs backward, the layers before it hold what they keep, and every other
//! micro-batch under way all that it keeps. So a choice per layer is sought (a multiple-choice knapsack) with
//!
//! ```text
//! (held by other micro-batches) + Σ kept of layers before l + peak of l  ≤  limit,   for every l,
//! ```
//!
//! least in time; from the first layer to the last by dynamic programming over what no other state beats in bytes and
//! time. Others hold what they keep between forward and backward, and where the backward is split, what waits between its halves;
//! they are counted when most do the one, and when most do the other. The limit starts at the budget less what else the plan
//! holds, and is corrected by what the real plans come to.
//!
//! All micro-batches have these choices but for the first to run backward: while it does, the gradients that the others find
//! complete are still being born, so that there is room to keep more. Its limit is raised as far as the real plans allow.

use std::collections::HashMap;

use gapless_graph::Place;
use gapless_parallel::{Action, Kind};

use super::block::Block;
use super::layer::Choice;
use super::{RematPlan, SavedActivations, Variant};
use crate::error::{Error, Result};

/// States that the dynamic programming keeps per layer, about, where it would look at more than [`MANY`].
const STATES: usize = 4096;

/// States that it looks at one by one.
const MANY: usize = 1 << 16;

/// Guesses at what other micro-batches hold.
const GUESSES: u64 = 32;

/// Plans that are made for one budget, at most.
const PLANS: usize = 24;

/// The same for the micro-batch that begins the gradients.
const PLANS_OF_FIRST: usize = 8;

/// What is to be fitted into what.
pub struct Budget<'a> {
    /// Bytes of the arena.
    pub bytes: u64,
    pub saved: &'a SavedActivations<'a>,
    /// Of this rank, in the order of the graph.
    pub blocks: &'a [Block],
    /// Micro-batches under way at once, by place.
    pub in_flight: HashMap<Place, InFlight>,
    /// The micro-batch that runs backward first, if there are others.
    pub first: Option<u32>,
}

impl Budget<'_> {
    /// Finds it. `place` gives the size of an arena planned for a capacity, or if that is above it anyway, at least a lower
    /// bound; without a capacity, that of the lowest plan.
    ///
    /// # Errors
    /// [`Error::OverBudget`] with the smallest arena found, when none fits; what `place` returns.
    pub fn fit(&self, mut place: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>) -> Result<RematPlan> {
        let plain: Vec<usize> = vec![0; self.blocks.len()];
        let height = place(&self.recomputation(&plain), Some(self.bytes))?;
        if height <= self.bytes {
            return Ok(self.recomputation(&plain));
        }
        match self.search(&plain, height, &mut place)? {
            Some((choices, limit)) => self.spare_first(choices, limit, &mut place),
            None => {
                let least = self.recomputation(&self.least());
                match place(&least, None)? {
                    smallest if smallest <= self.bytes => Ok(least),
                    smallest => Err(Error::OverBudget { budget: self.bytes, smallest }),
                }
            }
        }
    }

    /// The same choices for all micro-batches, with the limit that they were found at.
    fn search(
        &self,
        plain: &[usize],
        height: u64,
        mut place: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<Option<(Vec<usize>, u64)>> {
        // What the model does not see: parameters, workspaces, what the update holds.
        let unseen = i128::from(height) - i128::from(self.peak(plain));
        let (mut low, mut high) = (0i128, i128::from(height) - unseen);
        let mut limit = i128::from(self.bytes) - unseen;
        let mut best: Option<(Vec<usize>, u64)> = None;
        let mut known: HashMap<Vec<usize>, u64> = HashMap::new();
        for _ in 0..PLANS {
            let found = u64::try_from(limit).ok().and_then(|limit| Some((self.solve(limit)?, limit)));
            let Some((choices, at)) = found else {
                low = low.max(limit);
                if high - low <= 1 {
                    break;
                }
                limit = (low + high) / 2;
                continue;
            };
            let before = known.get(&choices).copied();
            let height = match before {
                Some(height) => height,
                None => place(&self.recomputation(&choices), Some(self.bytes))?,
            };
            known.insert(choices.clone(), height);
            let slack = i128::from(self.bytes) - i128::from(height);
            if slack >= 0 {
                low = low.max(limit);
                if best.as_ref().is_none_or(|(found, _)| self.nanoseconds(&choices) < self.nanoseconds(found)) {
                    best = Some((choices, at));
                }
            } else {
                high = high.min(limit);
            }
            // Where the model says that it would just fit; between what is known where it was wrong before, or says the same.
            let next = limit + slack;
            limit = if before.is_none() && next > low && next < high { next } else { (low + high) / 2 };
            if high - low <= i128::from(self.bytes / 4096) {
                break;
            }
        }
        Ok(best)
    }

    /// Choices of its own for the micro-batch that begins the gradients, above the limit of the others.
    fn spare_first(
        &self,
        rest: Vec<usize>,
        limit: u64,
        mut place: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<RematPlan> {
        let (mut best, all) = (self.recomputation(&rest), self.peak(&vec![0; self.blocks.len()]));
        let (Some(first), mut low, mut high) = (self.first, limit, all) else { return Ok(best) };
        let mut taken = rest.clone();
        // Everything kept comes first.
        let mut limit = all;
        for _ in 0..PLANS_OF_FIRST {
            let Some(choices) = self.solve(limit) else { break };
            let fits = choices == taken || {
                let more = self.recomputation(&rest).but_for(first, self.variant(&choices));
                let fits = place(&more, Some(self.bytes))? <= self.bytes;
                if fits {
                    (best, taken) = (more, choices);
                }
                fits
            };
            *(if fits { &mut low } else { &mut high }) = limit;
            if high.saturating_sub(low) <= all / 1024 {
                break;
            }
            limit = low + (high - low) / 2;
        }
        Ok(best)
    }

    /// The choices that hold least by the model.
    fn least(&self) -> Vec<usize> {
        let plain: Vec<usize> = vec![0; self.blocks.len()];
        let most = self.peak(&plain);
        let (mut low, mut high) = (0, most);
        while high - low > 1 + most / 4096 {
            let limit = low + (high - low) / 2;
            *(if self.solve(limit).is_some() { &mut high } else { &mut low }) = limit;
        }
        self.solve(high).unwrap_or(plain)
    }

    fn choice(&self, block: usize, choice: usize) -> &Choice {
        &self.blocks[block].choices[choice]
    }

    fn nanoseconds(&self, choices: &[usize]) -> u64 {
        let times = choices.iter().enumerate().map(|(block, &choice)| self.choice(block, choice).nanoseconds);
        times.fold(0, u64::saturating_add)
    }

    /// What other micro-batches than the one at work hold of a block, at either moment.
    fn others(&self, block: usize, choice: &Choice) -> [u64; 2] {
        let moments = self.in_flight.get(&self.blocks[block].place).copied().unwrap_or_default();
        moments.map(|[kept, waits]| kept.saturating_sub(1) * choice.kept + waits * choice.waits)
    }

    /// The most bytes that layers hold, by the model.
    fn peak(&self, choices: &[usize]) -> u64 {
        let chosen = || choices.iter().enumerate().map(|(block, &choice)| (block, self.choice(block, choice)));
        let others = chosen().map(|(block, choice)| self.others(block, choice)).fold([0, 0], added);
        let mut before = 0;
        let at_layer = chosen().map(|(_, choice)| {
            let peak = before + choice.peak;
            before += choice.kept;
            peak
        });
        others.into_iter().max().unwrap_or(0) + at_layer.max().unwrap_or(0)
    }

    /// The choices that take least time below a limit; none if there are none.
    fn solve(&self, limit: u64) -> Option<Vec<usize>> {
        let alone = self.in_flight.values().flatten().all(|&[kept, waits]| kept <= 1 && waits == 0);
        let guesses = if alone { 0..1 } else { 0..GUESSES };
        let mut best: Option<(Vec<usize>, u64)> = None;
        for guess in guesses {
            let others = (u128::from(limit) * u128::from(guess) / u128::from(GUESSES)) as u64;
            let below = best.as_ref().map(|best| best.1);
            if let Some(choices) = self.solve_beside(limit - others, others, below) {
                let nanoseconds = self.nanoseconds(&choices);
                best = Some((choices, nanoseconds));
            }
        }
        best.map(|best| best.0)
    }

    /// The same with `others` bytes for the other micro-batches, if it takes less than so much time.
    fn solve_beside(&self, limit: u64, others: u64, below: Option<u64>) -> Option<Vec<usize>> {
        let mut layers: Vec<Vec<State>> = vec![vec![State::default()]];
        for (index, block) in self.blocks.iter().enumerate() {
            let others_of: Vec<[u64; 2]> = block.choices.iter().map(|choice| self.others(index, choice)).collect();
            let mut next = States::new(&layers[index], block, &others_of);
            for (from, state) in layers[index].iter().enumerate() {
                for (choice, of) in block.choices.iter().enumerate() {
                    let state = State {
                        kept: state.kept + of.kept,
                        others: added(state.others, others_of[choice]),
                        nanoseconds: state.nanoseconds.saturating_add(of.nanoseconds),
                        from: from as u32,
                        choice: choice as u32,
                    };
                    let takes_less = below.is_none_or(|below| state.nanoseconds < below);
                    if takes_less
                        && layers[index][from].kept + of.peak <= limit
                        && state.others.iter().all(|&held| held <= others)
                    {
                        next.push(state);
                    }
                }
            }
            layers.push(next.undominated());
        }
        // Sorted by bytes, and so the other way around by time: the last takes least.
        let mut at = layers.last()?.len().checked_sub(1)?;
        let mut choices = Vec::with_capacity(self.blocks.len());
        for states in layers[1..].iter().rev() {
            choices.push(states[at].choice as usize);
            at = states[at].from as usize;
        }
        choices.reverse();
        Some(choices)
    }

    fn variant(&self, choices: &[usize]) -> Variant {
        let chosen = choices.iter().zip(self.blocks);
        let dropping =
            self.saved.dropping(chosen.clone().flat_map(|(&choice, block)| block.dropped(&block.choices[choice])));
        self.saved.ending_with_input(dropping, chosen.flat_map(|(&choice, block)| block.again(&block.choices[choice])))
    }

    fn recomputation(&self, choices: &[usize]) -> RematPlan {
        RematPlan::uniform(self.variant(choices))
    }
}

/// Choices for the first layers.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    kept: u64,
    /// Held by other micro-batches, at either moment.
    others: [u64; 2],
    nanoseconds: u64,
    /// The state of the layers before, and the last layer's choice.
    from: u32,
    choice: u32,
}

impl State {
    /// Bytes of the work at hand and of other micro-batches are added: as many micro-batches of one stage as of another make
    /// them go together; where they don't, a state may be missed.
    fn bytes(&self) -> u64 {
        self.kept + self.others[0].max(self.others[1])
    }
}

/// The states behind a layer: all of them, or where they are many, the fastest of those that are about as large.
struct States {
    all: Vec<State>,
    /// By bytes above the least, in steps; none where all are there.
    fastest: Vec<Option<State>>,
    smallest: Option<State>,
    least: u64,
    instr: u64,
}

impl States {
    /// What will be pushed comes from a state before and a choice of a layer.
    fn new(before: &[State], block: &Block, others: &[[u64; 2]]) -> Self {
        let of_choices = |of: fn(u64, u64) -> u64| {
            block.choices.iter().zip(others).map(move |(choice, others)| choice.kept + of(others[0], others[1]))
        };
        let of_states = || before.iter().map(State::bytes);
        let least = of_states().min().unwrap_or(0) + of_choices(u64::min).min().unwrap_or(0);
        let most = of_states().max().unwrap_or(0) + of_choices(u64::max).max().unwrap_or(0);
        let many = before.len() * block.choices.len() > MANY;
        let fastest = vec![None; if many { STATES } else { 0 }];
        Self { all: Vec::new(), fastest, smallest: None, least, instr: (most - least) / STATES as u64 + 1 }
    }

    fn push(&mut self, state: State) {
        if self.fastest.is_empty() {
            return self.all.push(state);
        }
        let fastest = &mut self.fastest[((state.bytes() - self.least) / self.instr) as usize];
        let order = |state: &State| (state.nanoseconds, state.bytes());
        if fastest.is_none_or(|known| order(&state) < order(&known)) {
            *fastest = Some(state);
        }
        if self.smallest.is_none_or(|known| state.bytes() < known.bytes()) {
            self.smallest = Some(state);
        }
    }

    /// Those that no other beats in bytes and time, by bytes.
    fn undominated(mut self) -> Vec<State> {
        self.all.extend(self.fastest.into_iter().chain([self.smallest]).flatten());
        self.all.sort_unstable_by_key(|s| (s.bytes(), s.nanoseconds, s.from, s.choice));
        let mut best: Vec<State> = Vec::new();
        for state in self.all {
            if best.last().is_none_or(|last| state.nanoseconds < last.nanoseconds) {
                best.push(state);
            }
        }
        best
    }
}

/// Micro-batches of a stage between forward and backward, and between the halves of a split backward: when most are in the former
/// state, and when most are in the latter.
pub type InFlight = [[u64; 2]; 2];

fn added(one: [u64; 2], other: [u64; 2]) -> [u64; 2] {
    [one[0] + other[0], one[1] + other[1]]
}

/// The most micro-batches of each stage that a rank's row of actions holds at once.
pub fn in_flight(row: &[Action]) -> HashMap<Place, InFlight> {
    let mut now: HashMap<Place, [u64; 2]> = HashMap::new();
    let mut most: HashMap<Place, InFlight> = HashMap::new();
    for action in row {
        let place = Place::Stage(action.stage);
        let [kept, waits] = now.entry(place).or_default();
        match action.kind {
            Kind::Forward => *kept += 1,
            Kind::Backward => *kept = kept.saturating_sub(1),
            Kind::BackwardInput => (*kept, *waits) = (kept.saturating_sub(1), *waits + 1),
            Kind::BackwardWeight => *waits = waits.saturating_sub(1),
        }
        let [most_kept, most_waits] = most.entry(place).or_default();
        *most_kept = [*kept, *waits].max(*most_kept);
        if (*waits, *kept) > (most_waits[1], most_waits[0]) {
            *most_waits = [*kept, *waits];
        }
    }
    most
}

/// The micro-batch whose backward comes first in a rank's row of actions, if there are others.
pub fn first_backward(row: &[Action]) -> Option<u32> {
    let mut backward = row.iter().filter(|action| action.kind != Kind::Forward).map(|action| action.micro_batch.0);
    let first = backward.next()?;
    backward.any(|other| other != first).then_some(first)
}
