//! The cost model of one layer: every choice of keeping or recomputing the values that its backward reads.
//!
//! - In: a [`Layer`], extracted from its graph.
//! - Out: the Pareto-optimal [`Choice`]s in bytes kept, peak bytes of the layer's own backward, and time.
//! - Never: the choices of other layers.
//!
//! If a schedule splits the backward into I (gradients of inputs) and W (gradients of weights), a choice also says
//! which of the candidates that W reads are freed at the end of I and recomputed for W. Before that, these candidates
//! may have been kept for I, or recomputed for I. The choice then also has a cost for the values kept between I and W.
//!
//! The number of choices tried depends on the number of candidates. A candidate that W reads counts twice.
//!
//! - Up to [`EXACT`] candidates, all pairs of subsets for I and W are tried.
//! - If there are more, either all or none of the candidates that W reads are freed at the end of I.
//! - If there are more than [`EXACT`] candidates even when each counts once, they are divided into runs of [`RUN`]. The
//!   best subsets of the runs are combined, run by run. Minimal cuts of the whole layer are added
//!   ([`min_cut`](super::min_cut)), and so are subsets between neighbouring cuts.

use super::min_cut::hull;

/// Maximum number of candidates of a layer.
pub(super) const CANDIDATES: usize = u64::BITS as usize;

/// Maximum number of candidates for which all subsets are tried.
pub(super) const EXACT: usize = 16;

/// Number of candidates per run in a larger layer.
pub(super) const RUN: usize = 12;

/// Maximum number of candidates between two neighbouring cuts for which all subsets are tried.
const BETWEEN: usize = 8;

/// Maximum number of choices of a layer. If there are more, similar choices are merged: a choice is removed if a choice
/// that is at least as fast needs hardly more bytes.
const CHOICES: usize = 256;

/// A set of candidates, as a bit mask.
pub(super) type Candidates = u64;

/// One way to recompute a layer, with its costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The candidates that are dropped after the forward.
    pub(super) dropped: Candidates,
    /// The candidates that are freed at the end of I and recomputed for W, if the backward is split.
    pub(super) freed_after_input: Candidates,
    /// Bytes that one micro-batch keeps from the layer's forward to its backward.
    pub kept: u64,
    /// Bytes of forward values that one micro-batch keeps from I to W; 0 if the backward is not split.
    pub kept_until_weights: u64,
    /// Peak bytes of the layer during its backward, kept values included.
    pub peak: u64,
    /// Time of the recomputation, in nanoseconds.
    pub nanoseconds: u64,
}

/// A node within its layer. Its values are indices into [`Layer::bytes`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Local {
    pub reads: Vec<usize>,
    pub makes: Vec<usize>,
    pub nanoseconds: u64,
}

/// Everything on which the choices of a layer depend. Equal layers have equal choices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Layer {
    /// Bytes of each value.
    pub bytes: Vec<u64>,
    /// Forward nodes that can be recomputed, in order.
    pub forward: Vec<Local>,
    pub backward: Vec<Local>,
    /// Nodes that compute weight gradients, if the backward is split.
    pub weights: Vec<Local>,
    /// Number of values that the forward reads or produces. These values come first in [`Self::bytes`].
    pub forward_values: usize,
    /// Values that are kept from forward to backward if nothing is dropped.
    pub saved: Vec<usize>,
    /// The values that each candidate saves, in the order in which they are computed.
    pub candidates: Vec<Vec<usize>>,
    /// Results of the backward that other layers read.
    pub leaves: Vec<usize>,
}

impl Layer {
    /// Returns all choices worth considering. The first one keeps everything. The others follow from the fastest to the
    /// slowest.
    pub fn choices(&self) -> Vec<Choice> {
        let mut costs = Costs::new(self);
        let for_weights = self.candidates_for_weights();
        let choices = match self.candidates.len() {
            count if count + for_weights.len() <= EXACT => {
                let subsets = (0..1u64 << count)
                    .flat_map(|dropped| (0..1u64 << for_weights.len()).map(move |subset| (dropped, subset)));
                undominated(
                    subsets.map(|(dropped, subset)| costs.choice(dropped, spread(subset, &for_weights))).collect(),
                )
            }
            count => {
                let all = for_weights.iter().fold(0, |all, &index| all | 1 << index);
                let all_or_none: &[Candidates] = if all == 0 { &[0] } else { &[0, all] };
                let mut choices = Vec::new();
                for &freed_after_input in all_or_none {
                    match count {
                        ..=EXACT => {
                            choices.extend((0..1 << count).map(|dropped| costs.choice(dropped, freed_after_input)))
                        }
                        _ => {
                            choices.extend(costs.joined_runs(freed_after_input));
                            choices.extend(
                                self.cuts().into_iter().map(|dropped| costs.choice(dropped, freed_after_input)),
                            );
                        }
                    }
                }
                undominated(choices)
            }
        };
        // The choice that keeps everything is normally among the undominated choices. It is missing if something can be
        // dropped without costing time.
        let others = thinned(choices).into_iter().filter(|choice| (choice.dropped, choice.freed_after_input) != (0, 0));
        [costs.choice(0, 0)].into_iter().chain(others).collect()
    }

    /// Returns the candidates with a value that W reads.
    fn candidates_for_weights(&self) -> Vec<u32> {
        let is_read = |value: &usize| self.weights.iter().any(|local| local.reads.contains(value));
        let candidates = (0..).zip(&self.candidates);
        candidates.filter(|(_, values)| values.iter().any(is_read)).map(|(index, _)| index).collect()
    }

    /// Returns the sets of candidates that minimal cuts drop, and subsets between neighbouring cuts.
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

    /// Returns the bytes that dropping a candidate saves.
    pub fn candidate_bytes(&self, candidate: usize) -> u64 {
        self.candidates[candidate].iter().map(|&value| self.bytes[value]).sum()
    }

    /// Returns for each value the node that can recompute it, if any.
    pub fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.bytes.len()];
        for (index, local) in self.forward.iter().enumerate() {
            local.makes.iter().for_each(|&value| makers[value] = Some(index));
        }
        makers
    }
}

/// Moves bit i of a subset to position `places[i]`.
fn spread(subset: u64, places: &[u32]) -> Candidates {
    places.iter().enumerate().fold(0, |all, (bit, &place)| all | (subset >> bit & 1) << place)
}

/// Computes the costs of choices.
pub(super) struct Costs<'l> {
    layer: &'l Layer,
    makers: Vec<Option<usize>>,
    /// By value: whether it belongs to a candidate.
    is_candidate: Vec<bool>,
    /// By value: whether W reads it.
    read_by_weights: Vec<bool>,
    /// Nodes that compute a value that W reads.
    makes_for_weights: Vec<usize>,
    /// Scratch: which values are available.
    available: Vec<bool>,
    /// Scratch: which values will still be read.
    alive: Vec<bool>,
    sequence: Vec<&'l Local>,
    wanted: Vec<usize>,
    missing: Vec<usize>,
    /// Values that are freed at the end of I.
    freed_after_input: Vec<usize>,
    /// Nodes that I runs early for W.
    early_for_weights: Vec<usize>,
}

impl<'l> Costs<'l> {
    pub fn new(layer: &'l Layer) -> Self {
        let [mut is_candidate, mut read_by_weights, available, alive] =
            [(); 4].map(|()| vec![false; layer.bytes.len()]);
        layer.candidates.iter().flatten().for_each(|&value| is_candidate[value] = true);
        layer.weights.iter().flat_map(|local| &local.reads).for_each(|&value| read_by_weights[value] = true);
        let makes = |&node: &usize| layer.forward[node].makes.iter().any(|&value| read_by_weights[value]);
        let makes_for_weights = (0..layer.forward.len()).filter(makes).collect();
        let (sequence, wanted, missing) = (Vec::new(), Vec::new(), Vec::new());
        let (makers, freed_after_input, early_for_weights) = (layer.makers(), Vec::new(), Vec::new());
        Self {
            layer,
            makers,
            is_candidate,
            read_by_weights,
            makes_for_weights,
            available,
            alive,
            sequence,
            wanted,
            missing,
            freed_after_input,
            early_for_weights,
        }
    }

    /// Returns the choice that drops the candidates `dropped` and frees `freed_after_input` at the end of I, with its
    /// costs.
    pub fn choice(&mut self, dropped: Candidates, freed_after_input: Candidates) -> Choice {
        let layer = self.layer;
        self.available.fill(false);
        layer.saved.iter().for_each(|&value| self.available[value] = true);
        self.find_ends(freed_after_input);
        let chosen = layer.candidates.iter().enumerate().filter(|(index, _)| dropped >> index & 1 == 1);
        chosen.flat_map(|(_, values)| values).for_each(|&value| self.available[value] = false);
        self.find_smaller();
        let kept = layer.saved.iter().filter(|&&value| self.available[value]).map(|&value| layer.bytes[value]).sum();
        // The execution order of the backward: its own nodes, each preceded by the recomputation of values that the
        // node reads.
        self.sequence.clear();
        let mut nanoseconds = 0u64;
        for own in &layer.backward {
            nanoseconds = nanoseconds.saturating_add(self.recompute(own));
            nanoseconds = nanoseconds.saturating_add(self.keep_smaller_for_w(own));
            self.sequence.push(own);
        }
        let until_input = self.sequence.len();
        self.freed_after_input.iter().for_each(|&value| self.available[value] = false);
        for own in &layer.weights {
            nanoseconds = nanoseconds.saturating_add(self.recompute(own));
            self.sequence.push(own);
        }
        let (kept_until_weights, peak) = self.bytes(kept, until_input);
        Choice { dropped, freed_after_input, kept, kept_until_weights, peak, nanoseconds }
    }

    /// Appends the recomputation of values that a node reads. Returns the time of this recomputation.
    fn recompute(&mut self, own: &Local) -> u64 {
        let layer = self.layer;
        self.wanted.extend(&own.reads);
        while let Some(value) = self.wanted.pop() {
            let Some(maker) = self.makers[value].filter(|_| !self.available[value]) else { continue };
            if !self.missing.contains(&maker) {
                self.missing.push(maker);
                self.wanted.extend(&layer.forward[maker].reads);
            }
        }
        self.missing.sort_unstable();
        let mut nanoseconds = 0u64;
        for node in self.missing.drain(..).map(|maker| &layer.forward[maker]) {
            nanoseconds = nanoseconds.saturating_add(node.nanoseconds);
            node.makes.iter().for_each(|&value| self.available[value] = true);
            self.sequence.push(node);
        }
        nanoseconds
    }

    /// Finds the values that are freed at the end of I. These are the candidates `again`, and the values from which
    /// these candidates are computed. The search ends at values that W also reads or that are always kept.
    fn find_ends(&mut self, again: Candidates) {
        let layer = self.layer;
        self.freed_after_input.clear();
        let chosen = layer.candidates.iter().enumerate().filter(|(index, _)| again >> index & 1 == 1);
        self.wanted.extend(chosen.flat_map(|(_, values)| values));
        while let Some(value) = self.wanted.pop() {
            if self.freed_after_input.contains(&value) {
                continue;
            }
            self.freed_after_input.push(value);
            let Some(maker) = self.makers[value] else { continue };
            let waits =
                |value: usize| self.read_by_weights[value] || (self.available[value] && !self.is_candidate[value]);
            self.wanted.extend(layer.forward[maker].reads.iter().filter(|&&value| !waits(value)));
        }
    }

    /// Finds the nodes that run early, in I instead of W: those whose outputs take fewer bytes until W than their
    /// inputs.
    fn find_smaller(&mut self) {
        let Self { layer, read_by_weights, available, freed_after_input, early_for_weights, .. } = self;
        let bytes = |values: &mut dyn Iterator<Item = &usize>| values.map(|&value| layer.bytes[value]).sum::<u64>();
        early_for_weights.clear();
        early_for_weights.extend(self.makes_for_weights.iter().copied().filter(|&node| {
            let Local { reads, makes, .. } = &layer.forward[node];
            let mut made = makes.iter().filter(|value| !available[**value] && !freed_after_input.contains(value));
            let is_wanted = makes
                .iter()
                .any(|&value| read_by_weights[value] && !available[value] && !freed_after_input.contains(&value));
            is_wanted && bytes(&mut made) < bytes(&mut reads.iter().filter(|value| !read_by_weights[**value]))
        }));
    }

    /// Appends the nodes that run early for W before `own`, a node of I that reads some of their inputs. Returns the
    /// time that the appended nodes take.
    fn keep_smaller_for_w(&mut self, own: &Local) -> u64 {
        let layer = self.layer;
        let mut nanoseconds = 0u64;
        for node in self.early_for_weights.iter().map(|&node| &layer.forward[node]) {
            let reads = |value: &usize| own.reads.contains(value) && !self.read_by_weights[*value];
            let is_there = |value: &usize| self.available[*value] || self.makers[*value].is_none();
            let is_made = node.makes.iter().any(|&value| self.available[value]);
            if !is_made && node.reads.iter().any(reads) && node.reads.iter().all(is_there) {
                nanoseconds = nanoseconds.saturating_add(node.nanoseconds);
                node.makes.iter().for_each(|&value| self.available[value] = true);
                self.sequence.push(node);
            }
        }
        nanoseconds
    }

    /// Returns the bytes kept until W, and the peak bytes of the whole sequence, which is walked backwards. While W
    /// recomputes values, another micro-batch already holds the bytes that a micro-batch keeps from forward to
    /// backward, which are `kept`. So the bytes that W recomputes are added to `kept`.
    fn bytes(&mut self, kept: u64, until_input: usize) -> (u64, u64) {
        self.alive.fill(false);
        let mut alive = Alive { values: &mut self.alive, bytes: &self.layer.bytes, now: 0 };
        let (for_input, for_weights) = self.sequence.split_at(until_input);
        let most_for_weights = alive.peak(for_weights);
        let back = most_for_weights - alive.now;
        let waits = (0..self.layer.forward_values).filter(|&value| alive.values[value]);
        let waits = waits.map(|value| self.layer.bytes[value]).sum();
        alive.set(&self.layer.leaves, true);
        (waits, alive.peak(for_input).max(kept + back))
    }

    /// Returns choices for all candidates, combined from the choices of one run after the other. Each run's own choices
    /// are examined while all other candidates are kept. In every choice, `freed_after_input` is freed at the end of I.
    fn joined_runs(&mut self, freed_after_input: Candidates) -> Vec<Choice> {
        let mut joined = vec![self.choice(0, freed_after_input)];
        for first in (0..self.layer.candidates.len()).step_by(RUN) {
            let count = RUN.min(self.layer.candidates.len() - first);
            let run = thinned(undominated(
                (0..1u64 << count).map(|subset| self.choice(subset << first, freed_after_input)).collect(),
            ));
            let pairs = joined.iter().flat_map(|before| run.iter().map(|run| before.dropped | run.dropped));
            joined = thinned(undominated(pairs.map(|dropped| self.choice(dropped, freed_after_input)).collect()));
        }
        joined
    }
}

/// Returns the Pareto-optimal choices, ordered by time.
fn undominated(mut choices: Vec<Choice>) -> Vec<Choice> {
    choices.sort_unstable_by_key(|c| {
        (c.nanoseconds, c.kept, c.kept_until_weights, c.peak, c.dropped, c.freed_after_input)
    });
    remove_beaten(&choices, 0)
}

/// Reduces the choices to at most [`CHOICES`]. The choices with the lowest peak and with the fewest bytes are kept in
/// addition. Bytes are compared in three ways: those kept until the backward, those kept until W, and both together.
fn thinned(choices: Vec<Choice>) -> Vec<Choice> {
    let all = choices.iter().map(|choice| choice.peak).max().unwrap_or(0);
    let (mut thinned, mut part) = (choices.clone(), all / 16_384);
    while thinned.len() > CHOICES && part < all {
        thinned = remove_beaten(&choices, part);
        part = 2 * part + 1;
    }
    // The smallest choices always stay, because they decide which budgets can be met at all.
    let least_of = |bytes: fn(&Choice) -> u64| choices.iter().min_by_key(|choice| bytes(choice));
    let least = [
        least_of(|choice| choice.kept),
        least_of(|choice| choice.kept_until_weights),
        least_of(|choice| choice.kept + choice.kept_until_weights),
        least_of(|choice| choice.peak),
    ];
    for &choice in least.into_iter().flatten() {
        if !thinned.contains(&choice) {
            thinned.push(choice);
        }
    }
    thinned.sort_unstable_by_key(|c| {
        (c.nanoseconds, c.kept, c.kept_until_weights, c.peak, c.dropped, c.freed_after_input)
    });
    thinned
}

/// Removes each choice that an earlier choice beats. `choices` are sorted by time, so an earlier choice is at least as
/// fast. An earlier choice beats a later one if it keeps at most `bytes` more, and has a peak at most `bytes` higher.
fn remove_beaten(choices: &[Choice], bytes: u64) -> Vec<Choice> {
    let mut best: Vec<Choice> = Vec::new();
    for &choice in choices {
        let beats = |other: &Choice| {
            let holds =
                other.kept <= choice.kept + bytes && other.kept_until_weights <= choice.kept_until_weights + bytes;
            holds && other.peak <= choice.peak + bytes
        };
        if !best.iter().any(beats) {
            best.push(choice);
        }
    }
    best
}

/// The set of live values while nodes are walked from last to first.
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

    /// Returns the peak bytes while these nodes run. Before the call, `self` holds the values that are live after the
    /// nodes. After the call, it holds the values that are live before the nodes.
    fn peak(&mut self, nodes: &[&Local]) -> u64 {
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
