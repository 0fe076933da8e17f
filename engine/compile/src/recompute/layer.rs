//! What a layer's backward reads, and every way to keep it or to compute it again.
//!
//! In: a [`Layer`], cut out of its graph. Out: the [`Choice`]s that no other beats in all of kept bytes, bytes at the peak of
//! the layer's own backward, and time. Never: what other layers do.
//!
//! Up to [`EXACT`] candidates, all subsets are tried. Beyond, the subsets of runs of [`RUN`] candidates are joined run by run,
//! and those are added that minimal cuts find in the layer as a whole ([`min_cut`](super::min_cut)), with what lies between
//! two of them.

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
    /// Bytes that one micro-batch keeps from the layer's forward to its backward.
    pub kept: u64,
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
        let choices = match self.candidates.len() {
            count @ ..=EXACT => undominated((0..1 << count).map(|dropped| costs.of(dropped)).collect()),
            _ => {
                let mut choices = costs.joined_runs();
                choices.extend(self.cuts().into_iter().map(|dropped| costs.of(dropped)));
                undominated(choices)
            }
        };
        // Nothing dropped is among them, unless something is to be had in no time at all.
        let others = thinned(choices).into_iter().filter(|choice| choice.dropped != 0);
        [costs.of(0)].into_iter().chain(others).collect()
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
    /// Scratch: values that are there, and that will be read.
    there: Vec<bool>,
    alive: Vec<bool>,
    sequence: Vec<&'l Local>,
    wanted: Vec<usize>,
    missing: Vec<usize>,
}

impl<'l> Costs<'l> {
    pub fn new(layer: &'l Layer) -> Self {
        let (there, alive) = (vec![false; layer.bytes.len()], vec![false; layer.bytes.len()]);
        let (sequence, wanted, missing) = (Vec::new(), Vec::new(), Vec::new());
        Self { layer, makers: layer.makers(), there, alive, sequence, wanted, missing }
    }

    /// What it costs to drop these candidates.
    pub fn of(&mut self, dropped: Candidates) -> Choice {
        let layer = self.layer;
        self.there.fill(false);
        layer.saved.iter().for_each(|&value| self.there[value] = true);
        let chosen = layer.candidates.iter().enumerate().filter(|(index, _)| dropped >> index & 1 == 1);
        chosen.flat_map(|(_, values)| values).for_each(|&value| self.there[value] = false);
        let kept = layer.saved.iter().filter(|&&value| self.there[value]).map(|&value| layer.bytes[value]).sum();
        // What runs in the backward, in order: its own nodes, and in front of them what they miss.
        self.sequence.clear();
        let mut nanoseconds = 0u64;
        for own in &layer.backward {
            self.wanted.extend(&own.reads);
            while let Some(value) = self.wanted.pop() {
                let Some(maker) = self.makers[value].filter(|_| !self.there[value]) else { continue };
                if !self.missing.contains(&maker) {
                    self.missing.push(maker);
                    self.wanted.extend(&layer.forward[maker].reads);
                }
            }
            self.missing.sort_unstable();
            for again in self.missing.drain(..).map(|maker| &layer.forward[maker]) {
                nanoseconds = nanoseconds.saturating_add(again.nanoseconds);
                again.makes.iter().for_each(|&value| self.there[value] = true);
                self.sequence.push(again);
            }
            self.sequence.push(own);
        }
        Choice { dropped, kept, peak: self.peak(kept), nanoseconds }
    }

    /// The most bytes that are alive at once while the sequence runs, found from its end.
    fn peak(&mut self, kept: u64) -> u64 {
        let (alive, bytes) = (&mut self.alive, &self.layer.bytes);
        alive.fill(false);
        let (mut now, mut peak) = (0, kept);
        let mut set = |value: usize, to: bool, now: &mut u64| match (alive[value], to) {
            (false, true) => (alive[value], *now) = (true, *now + bytes[value]),
            (true, false) => (alive[value], *now) = (false, *now - bytes[value]),
            _ => {}
        };
        self.layer.leaves.iter().for_each(|&value| set(value, true, &mut now));
        for local in self.sequence.iter().rev() {
            local.makes.iter().chain(&local.reads).for_each(|&value| set(value, true, &mut now));
            peak = peak.max(now);
            local.makes.iter().for_each(|&value| set(value, false, &mut now));
        }
        peak
    }

    /// The choices of runs of candidates, each found where all others are kept, joined one after another.
    fn joined_runs(&mut self) -> Vec<Choice> {
        let mut joined = vec![self.of(0)];
        for first in (0..self.layer.candidates.len()).step_by(RUN) {
            let count = RUN.min(self.layer.candidates.len() - first);
            let run = thinned(undominated((0..1u64 << count).map(|subset| self.of(subset << first)).collect()));
            let pairs = joined.iter().flat_map(|before| run.iter().map(|run| before.dropped | run.dropped));
            joined = thinned(undominated(pairs.map(|dropped| self.of(dropped)).collect()));
        }
        joined
    }
}

/// Those that no other is at least as good as in every way, by time.
fn undominated(mut choices: Vec<Choice>) -> Vec<Choice> {
    choices.sort_unstable_by_key(|c| (c.nanoseconds, c.kept, c.peak, c.dropped));
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
    let least = [choices.iter().min_by_key(|choice| choice.kept), choices.iter().min_by_key(|choice| choice.peak)];
    for &choice in least.into_iter().flatten() {
        if !thinned.iter().any(|other| other.dropped == choice.dropped) {
            thinned.push(choice);
        }
    }
    thinned.sort_unstable_by_key(|c| (c.nanoseconds, c.kept, c.peak, c.dropped));
    thinned
}

/// Leaves out what another of no more time is as good as within so many bytes.
fn without(choices: &[Choice], bytes: u64) -> Vec<Choice> {
    let mut best: Vec<Choice> = Vec::new();
    for &choice in choices {
        let beats = |other: &Choice| other.kept <= choice.kept + bytes && other.peak <= choice.peak + bytes;
        if !best.iter().any(beats) {
            best.push(choice);
        }
    }
    best
}
