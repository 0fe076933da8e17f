//! What a layer's backward reads, and every way to keep it or to compute it again.
//!
//! In: a [`Layer`], cut out of its graph. Out: the [`Choice`]s that no other beats in all of kept bytes, bytes at the peak of
//! the layer's own backward, and time. Never: what other layers do.
//!
//! Where a schedule splits the backward into I (gradients of inputs) and W (gradients of weights), a choice also says which of the
//! candidates that W reads end with I and are computed again for W, whether they were kept for I or came back for it; and what
//! waits between the two.
//!
//! Up to [`EXACT`] candidates, those that W reads counted twice, all subsets are tried for both halves. Beyond, all that W reads ends
//! with I, or none of it; and with more than [`EXACT`] candidates, the subsets of runs of [`RUN`] are joined run by run, and those are
//! added that minimal cuts find in the layer as a whole ([`min_cut`](super::min_cut)), with what lies between two of them.

use super::min_cut::hull;

/// Candidates of a layer, at most.
pub(super) const CANDIDATES: usize = u64::BITS as usize;

/// Candidates of which all subsets are tried.
pub(super) const EXACT: usize = 16;

/// The same in a layer that has more.
pub(super) const RUN: usize = 12;

/// Candidates between two neighbouring cuts of which all subsets are tried.
const BETWEEN: usize = 8;

/// Choices of a layer, at most; above that, those are left out that others are as good as within a small part of its bytes.
const CHOICES: usize = 256;

/// A set of candidates.
pub(super) type Candidates = u64;

/// One way to keep and drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The candidates that are dropped.
    pub(super) dropped: Candidates,
    /// Those that end with I, where the backward is split.
    pub(super) again: Candidates,
    /// Bytes that one micro-batch keeps from the layer's forward to its backward.
    pub kept: u64,
    /// Bytes of the forward's values that one micro-batch keeps from I to W; none where the backward is whole.
    pub waits: u64,
    /// The most bytes of the layer that are alive at once in its backward, kept ones included.
    pub peak: u64,
    /// Time of what is computed again, in nanoseconds.
    pub nanoseconds: u64,
}

/// A node as its layer sees it, by the indices of values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Local {
    pub reads: Vec<usize>,
    pub makes: Vec<usize>,
    pub nanoseconds: u64,
}

/// All that the choices of a layer depend on: layers that are equal have the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Layer {
    /// Bytes of each value.
    pub bytes: Vec<u64>,
    /// What can run again, in order.
    pub forward: Vec<Local>,
    pub backward: Vec<Local>,
    /// Its nodes for the gradients of weights, if they come apart from the others.
    pub weights: Vec<Local>,
    /// So many values come first that the forward makes or reads.
    pub of_forward: usize,
    /// What is kept from the forward to the backward where nothing is dropped.
    pub saved: Vec<usize>,
    /// What each candidate saves; in the order in which they are made.
    pub candidates: Vec<Vec<usize>>,
    /// What others read of the backward's results.
    pub leaves: Vec<usize>,
}

impl Layer {
    /// The one that keeps everything, which comes first, and others from the cheapest to the one that takes longest.
    pub fn choices(&self) -> Vec<Choice> {
        let mut costs = Costs::new(self);
        let for_weights = self.candidates_for_weights();
        let choices = match self.candidates.len() {
            count if count + for_weights.len() <= EXACT => {
                let subsets = (0..1u64 << count)
                    .flat_map(|dropped| (0..1u64 << for_weights.len()).map(move |subset| (dropped, subset)));
                undominated(subsets.map(|(dropped, subset)| costs.of(dropped, spread(subset, &for_weights))).collect())
            }
            count => {
                let all = for_weights.iter().fold(0, |all, &index| all | 1 << index);
                let all_or_none: &[Candidates] = if all == 0 { &[0] } else { &[0, all] };
                let mut choices = Vec::new();
                for &again in all_or_none {
                    match count {
                        ..=EXACT => choices.extend((0..1 << count).map(|dropped| costs.of(dropped, again))),
                        _ => {
                            choices.extend(costs.joined_runs(again));
                            choices.extend(self.cuts().into_iter().map(|dropped| costs.of(dropped, again)));
                        }
                    }
                }
                undominated(choices)
            }
        };
        // Nothing dropped is among them, unless something is to be had in no time at all.
        let others = thinned(choices).into_iter().filter(|choice| (choice.dropped, choice.again) != (0, 0));
        [costs.of(0, 0)].into_iter().chain(others).collect()
    }

    /// The candidates that W reads some of.
    fn candidates_for_weights(&self) -> Vec<u32> {
        let is_read = |value: &usize| self.weights.iter().any(|local| local.reads.contains(value));
        let candidates = (0..).zip(&self.candidates);
        candidates.filter(|(_, values)| values.iter().any(is_read)).map(|(index, _)| index).collect()
    }

    /// What minimal cuts drop, with what lies between two that are neighbours.
    fn cuts(&self) -> Vec<Candidates> {
        let hull = hull(self);
        let mut cuts = hull.clone();
        for pair in hull.windows(2) {
            let differ: Vec<u32> = (0..u64::BITS).filter(|index| (pair[0] ^ pair[1]) >> index & 1 == 1).collect();
            let differ = &differ[..differ.len().min(BETWEEN)];
            cuts.extend((0..1u64 << differ.len()).map(|subset| pair[0] ^ spread(subset, differ)));
        }
        cuts
    }

    /// The bytes of a candidate.
    pub fn candidate_bytes(&self, candidate: usize) -> u64 {
        self.candidates[candidate].iter().map(|&value| self.bytes[value]).sum()
    }

    /// By value, the node that can make it again.
    pub fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.bytes.len()];
        for (index, local) in self.forward.iter().enumerate() {
            local.makes.iter().for_each(|&value| makers[value] = Some(index));
        }
        makers
    }
}

/// The bits of a subset, moved to these places.
fn spread(subset: u64, places: &[u32]) -> Candidates {
    places.iter().enumerate().fold(0, |all, (bit, &place)| all | (subset >> bit & 1) << place)
}

/// Says what choices cost.
pub(super) struct Costs<'l> {
    layer: &'l Layer,
    makers: Vec<Option<usize>>,
    /// Values of candidates; values that W reads, and nodes that make some of them.
    is_candidate: Vec<bool>,
    by_weights: Vec<bool>,
    makes_for_weights: Vec<usize>,
    /// Scratch: values that are there, and that will be read.
    there: Vec<bool>,
    alive: Vec<bool>,
    sequence: Vec<&'l Local>,
    wanted: Vec<usize>,
    missing: Vec<usize>,
    /// Values that end with I, and nodes that I runs for W.
    ends: Vec<usize>,
    smaller: Vec<usize>,
}

impl<'l> Costs<'l> {
    pub fn new(layer: &'l Layer) -> Self {
        let [mut is_candidate, mut by_weights, there, alive] = [(); 4].map(|()| vec![false; layer.bytes.len()]);
        layer.candidates.iter().flatten().for_each(|&value| is_candidate[value] = true);
        layer.weights.iter().flat_map(|local| &local.reads).for_each(|&value| by_weights[value] = true);
        let makes = |&node: &usize| layer.forward[node].makes.iter().any(|&value| by_weights[value]);
        let makes_for_weights = (0..layer.forward.len()).filter(makes).collect();
        let (sequence, wanted, missing) = (Vec::new(), Vec::new(), Vec::new());
        let (makers, ends, smaller) = (layer.makers(), Vec::new(), Vec::new());
        Self {
            layer,
            makers,
            is_candidate,
            by_weights,
            makes_for_weights,
            there,
            alive,
            sequence,
            wanted,
            missing,
            ends,
            smaller,
        }
    }

    /// What it costs to drop these candidates, and to end those with I.
    pub fn of(&mut self, dropped: Candidates, again: Candidates) -> Choice {
        let layer = self.layer;
        self.there.fill(false);
        layer.saved.iter().for_each(|&value| self.there[value] = true);
        self.find_ends(again);
        let chosen = layer.candidates.iter().enumerate().filter(|(index, _)| dropped >> index & 1 == 1);
        chosen.flat_map(|(_, values)| values).for_each(|&value| self.there[value] = false);
        self.find_smaller();
        let kept = layer.saved.iter().filter(|&&value| self.there[value]).map(|&value| layer.bytes[value]).sum();
        // What runs in the backward, in order: its own nodes, and in front of them what they miss.
        self.sequence.clear();
        let mut nanoseconds = 0u64;
        for own in &layer.backward {
            nanoseconds = nanoseconds.saturating_add(self.bring_back(own));
            nanoseconds = nanoseconds.saturating_add(self.make_for_weights(own));
            self.sequence.push(own);
        }
        let until_input = self.sequence.len();
        self.ends.iter().for_each(|&value| self.there[value] = false);
        for own in &layer.weights {
            nanoseconds = nanoseconds.saturating_add(self.bring_back(own));
            self.sequence.push(own);
        }
        let (waits, peak) = self.bytes(kept, until_input);
        Choice { dropped, again, kept, waits, peak, nanoseconds }
    }

    /// Lays down what a node misses, and says how long it takes.
    fn bring_back(&mut self, own: &Local) -> u64 {
        let layer = self.layer;
        self.wanted.extend(&own.reads);
        while let Some(value) = self.wanted.pop() {
            let Some(maker) = self.makers[value].filter(|_| !self.there[value]) else { continue };
            if !self.missing.contains(&maker) {
                self.missing.push(maker);
                self.wanted.extend(&layer.forward[maker].reads);
            }
        }
        self.missing.sort_unstable();
        let mut nanoseconds = 0u64;
        for again in self.missing.drain(..).map(|maker| &layer.forward[maker]) {
            nanoseconds = nanoseconds.saturating_add(again.nanoseconds);
            again.makes.iter().for_each(|&value| self.there[value] = true);
            self.sequence.push(again);
        }
        nanoseconds
    }

    /// Says which values end with I: these candidates, and what leads to them from what else W reads, or what is kept for good.
    fn find_ends(&mut self, again: Candidates) {
        let layer = self.layer;
        self.ends.clear();
        let chosen = layer.candidates.iter().enumerate().filter(|(index, _)| again >> index & 1 == 1);
        self.wanted.extend(chosen.flat_map(|(_, values)| values));
        while let Some(value) = self.wanted.pop() {
            if self.ends.contains(&value) {
                continue;
            }
            self.ends.push(value);
            let Some(maker) = self.makers[value] else { continue };
            let waits = |value: usize| self.by_weights[value] || (self.there[value] && !self.is_candidate[value]);
            self.wanted.extend(layer.forward[maker].reads.iter().filter(|&&value| !waits(value)));
        }
    }

    /// Says which nodes I runs for W: those whose results are smaller than what of their inputs would wait for them.
    fn find_smaller(&mut self) {
        let Self { layer, by_weights, there, ends, smaller, .. } = self;
        let bytes = |values: &mut dyn Iterator<Item = &usize>| values.map(|&value| layer.bytes[value]).sum::<u64>();
        smaller.clear();
        smaller.extend(self.makes_for_weights.iter().copied().filter(|&node| {
            let Local { reads, makes, .. } = &layer.forward[node];
            let mut made = makes.iter().filter(|value| !there[**value] && !ends.contains(value));
            let is_wanted = makes.iter().any(|&value| by_weights[value] && !there[value] && !ends.contains(&value));
            is_wanted && bytes(&mut made) < bytes(&mut reads.iter().filter(|value| !by_weights[**value]))
        }));
    }

    /// Lays down what I makes for W in front of one of its nodes, which reads some of its inputs, and says how long it takes.
    fn make_for_weights(&mut self, own: &Local) -> u64 {
        let layer = self.layer;
        let mut nanoseconds = 0u64;
        for again in self.smaller.iter().map(|&node| &layer.forward[node]) {
            let reads = |value: &usize| own.reads.contains(value) && !self.by_weights[*value];
            let is_there = |value: &usize| self.there[*value] || self.makers[*value].is_none();
            let is_made = again.makes.iter().any(|&value| self.there[value]);
            if !is_made && again.reads.iter().any(reads) && again.reads.iter().all(is_there) {
                nanoseconds = nanoseconds.saturating_add(again.nanoseconds);
                again.makes.iter().for_each(|&value| self.there[value] = true);
                self.sequence.push(again);
            }
        }
        nanoseconds
    }

    /// Bytes that wait for W, and the most that are alive at once while the sequence runs, found from its end. What W brings back comes
    /// on top of what another micro-batch keeps.
    fn bytes(&mut self, kept: u64, until_input: usize) -> (u64, u64) {
        self.alive.fill(false);
        let mut alive = Alive { values: &mut self.alive, bytes: &self.layer.bytes, now: 0 };
        let (for_input, for_weights) = self.sequence.split_at(until_input);
        let most_for_weights = alive.most(for_weights);
        let back = most_for_weights - alive.now;
        let waits = (0..self.layer.of_forward).filter(|&value| alive.values[value]);
        let waits = waits.map(|value| self.layer.bytes[value]).sum();
        alive.set(&self.layer.leaves, true);
        (waits, alive.most(for_input).max(kept + back))
    }

    /// The choices of runs of candidates, each found where all others are kept, joined one after another; `again` of them end with I.
    fn joined_runs(&mut self, again: Candidates) -> Vec<Choice> {
        let mut joined = vec![self.of(0, again)];
        for first in (0..self.layer.candidates.len()).step_by(RUN) {
            let count = RUN.min(self.layer.candidates.len() - first);
            let run = thinned(undominated((0..1u64 << count).map(|subset| self.of(subset << first, again)).collect()));
            let pairs = joined.iter().flat_map(|before| run.iter().map(|run| before.dropped | run.dropped));
            joined = thinned(undominated(pairs.map(|dropped| self.of(dropped, again)).collect()));
        }
        joined
    }
}

/// Those that no other is at least as good as in every way, by time.
fn undominated(mut choices: Vec<Choice>) -> Vec<Choice> {
    choices.sort_unstable_by_key(|c| (c.nanoseconds, c.kept, c.waits, c.peak, c.dropped, c.again));
    without(&choices, 0)
}

/// At most [`CHOICES`], and those that keep least and are least at their peak.
fn thinned(choices: Vec<Choice>) -> Vec<Choice> {
    let all = choices.iter().map(|choice| choice.peak).max().unwrap_or(0);
    let (mut thinned, mut part) = (choices.clone(), all / 16_384);
    while thinned.len() > CHOICES && part < all {
        thinned = without(&choices, part);
        part = 2 * part + 1;
    }
    // What fits into least is never given up for time: it says which budgets can be kept at all.
    let least_of = |bytes: fn(&Choice) -> u64| choices.iter().min_by_key(|choice| bytes(choice));
    let least =
        [least_of(|of| of.kept), least_of(|of| of.waits), least_of(|of| of.kept + of.waits), least_of(|of| of.peak)];
    for &choice in least.into_iter().flatten() {
        if !thinned.contains(&choice) {
            thinned.push(choice);
        }
    }
    thinned.sort_unstable_by_key(|c| (c.nanoseconds, c.kept, c.waits, c.peak, c.dropped, c.again));
    thinned
}

/// Leaves out what another of no more time is as good as within so many bytes.
fn without(choices: &[Choice], bytes: u64) -> Vec<Choice> {
    let mut best: Vec<Choice> = Vec::new();
    for &choice in choices {
        let beats = |other: &Choice| {
            let holds = other.kept <= choice.kept + bytes && other.waits <= choice.waits + bytes;
            holds && other.peak <= choice.peak + bytes
        };
        if !best.iter().any(beats) {
            best.push(choice);
        }
    }
    best
}

/// What is alive while nodes are walked from the last to the first.
struct Alive<'c> {
    values: &'c mut [bool],
    bytes: &'c [u64],
    now: u64,
}

impl Alive<'_> {
    fn set(&mut self, values: &[usize], to: bool) {
        for &value in values {
            match (std::mem::replace(&mut self.values[value], to), to) {
                (false, true) => self.now += self.bytes[value],
                (true, false) => self.now -= self.bytes[value],
                _ => {}
            }
        }
    }

    /// The most bytes while these nodes run; what is alive behind them is, in the end, what was in front of them.
    fn most(&mut self, nodes: &[&Local]) -> u64 {
        let mut most = self.now;
        for local in nodes.iter().rev() {
            self.set(&local.reads, true);
            self.set(&local.makes, true);
            most = most.max(self.now);
            self.set(&local.makes, false);
        }
        most
    }
}
