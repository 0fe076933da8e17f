//! Windows of a stream: which tokens belong to which batch.

use std::ops::Range;
use std::sync::Arc;

use crate::examples::Examples;
use crate::permutation::mix;
use crate::{DataError, IGNORED, Permutation, Tokens};

/// The batches of a training run: a pure function of seed, step and index.
///
/// The stream is cut into windows of `sequence` tokens, at a border that every epoch draws anew, and each epoch visits all
/// its windows once, in an order of its own. Nothing is remembered from step to step: a resumed run needs the step number
/// alone.
///
/// ```
/// use std::sync::Arc;
/// use gapless_data::{Tokens, TrainingWindows};
///
/// let tokens = Arc::new(Tokens::from_ids((0..101).collect()));
/// let windows = TrainingWindows::new(tokens, 0..101, 10, 2, 42)?;
/// assert_eq!(windows.per_epoch(), 9); // nine of ten tokens, and room to shift the borders
///
/// let (mut inputs, mut targets) = ([0; 20], [0; 20]);
/// windows.fill(3, 0, &mut inputs, &mut targets)?;
/// assert_eq!(targets, inputs.map(|token| token + 1));
/// # Ok::<(), gapless_data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TrainingWindows {
    /// Each with the places that it has among [`PLACES`].
    parts: Vec<(Cut, Range<u64>)>,
    batch: usize,
    seed: u64,
}

/// Windows of a mixture of which every part has as many as its weight says, in an order of their own.
const PLACES: u64 = 4096;

/// The same windows at every evaluation, spread evenly over a stream.
#[derive(Debug, Clone)]
pub struct ValidationWindows {
    /// Each with how many of the windows are its.
    parts: Vec<(Cut, usize)>,
}

/// A part of a stream, cut into windows.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    tokens: Arc<Tokens>,
    range: Range<u64>,
    sequence: usize,
    kind: Kind,
}

/// What a window is.
#[derive(Debug, Clone)]
enum Kind {
    /// Any tokens that follow each other. Documents end with this token, if there is one.
    Stream { end_of_text: Option<u32> },
    /// Whole examples side by side.
    Rows { examples: Arc<Examples>, rows: Arc<Vec<Vec<Range<u64>>>> },
}

impl TrainingWindows {
    /// Batches of `batch` windows over the tokens of `range`.
    ///
    /// # Errors
    /// A range shorter than one window and the target of its last token; a size of zero.
    pub fn new(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        sequence: usize,
        batch: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        Self::of(vec![(Cut::new(tokens, range, None, sequence, "training")?, 1.0)], batch, seed)
    }

    /// Of parts with their weights.
    pub(super) fn of(parts: Vec<(Cut, f64)>, batch: usize, seed: u64) -> Result<Self, DataError> {
        if batch == 0 {
            return Err(DataError::Zero { what: "the batch size" });
        }
        let shares = shares(&parts, PLACES as usize);
        let mut first = 0;
        let with_places = |((cut, _), share): ((Cut, f64), usize)| {
            let places = first..first + share as u64;
            first = places.end;
            (cut, places)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_places).collect(), batch, seed })
    }

    /// Windows in an epoch; of a mixture, those of all of its parts, of which each has epochs of its own. The borders of a stream's shift by
    /// up to a window, so that the last one is left out (if there are more).
    pub fn per_epoch(&self) -> u64 {
        self.parts.iter().map(|(cut, _)| cut.per_epoch()).sum()
    }

    /// Windows in a batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens in a window.
    pub fn sequence(&self) -> usize {
        self.parts[0].0.sequence
    }

    /// How often all windows have been visited before `step`, in epochs.
    pub fn epochs(&self, step: u64) -> f64 {
        step as f64 * self.batch as f64 / self.per_epoch() as f64
    }

    /// Which window is number `index` of the batch of `step`: its part, and there the position of its first token within the stream; of
    /// examples, the number of the row.
    fn start(&self, step: u64, index: usize) -> (&Cut, u64) {
        let visit = u128::from(step) * self.batch as u128 + index as u128;
        if let [(cut, _)] = &self.parts[..] {
            return (cut, cut.visited(visit, self.seed));
        }
        // Every so many windows, each part has its places, at which it goes on where it was.
        let (round, at) = (visit / u128::from(PLACES), (visit % u128::from(PLACES)) as u64);
        let place = Permutation::new(PLACES, mix(!self.seed ^ mix(round as u64))).at(at);
        let part = self.parts.iter().find(|(_, places)| places.contains(&place));
        let (cut, places) = part.expect("the parts share all places");
        let own = u128::from(places.end - places.start);
        (cut, cut.visited(round * own + u128::from(place - places.start), self.seed))
    }

    /// Writes windows `first..` of the batch of `step`, as many as the slices hold: a micro-batch, or a rank's share.
    /// Inputs and targets are row-major, windows × sequence; a target is the token after its input. Allocates nothing.
    ///
    /// # Errors
    /// Slices that don't hold whole windows, or more than the batch has; a read that fails.
    pub fn fill(&self, step: u64, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.batch, first, |index| self.start(step, index), inputs, targets)
    }

    /// [`Self::fill`], and the place in its window where the document, or the example, of each token begins. Targets that stand in
    /// another document, or that the loss does not count, are [`IGNORED`]. Without room for `starts`, it is [`Self::fill`].
    ///
    /// # Errors
    /// As [`Self::fill`]; of bare ids, whose documents are not known.
    pub fn fill_documents(
        &self,
        step: u64,
        first: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        self.fill(step, first, inputs, targets)?;
        documents(self.sequence(), |index| self.start(step, first + index), inputs, targets, starts)
    }
}

impl ValidationWindows {
    /// At most `count` windows, evenly spread over the tokens of `range`.
    ///
    /// # Errors
    /// A range shorter than one window and the target of its last token; a size of zero.
    pub fn new(tokens: Arc<Tokens>, range: Range<u64>, sequence: usize, count: usize) -> Result<Self, DataError> {
        Self::of(vec![(Cut::new(tokens, range, None, sequence, "validation")?, 1.0)], count)
    }

    /// Of parts with their weights.
    pub(super) fn of(parts: Vec<(Cut, f64)>, count: usize) -> Result<Self, DataError> {
        if count == 0 {
            return Err(DataError::Zero { what: "the number of validation windows" });
        }
        let shares = shares(&parts, count);
        let most = |cut: &Cut| usize::try_from(cut.all()).unwrap_or(usize::MAX);
        let with_count = |((cut, _), share): ((Cut, f64), usize)| {
            let count = share.min(most(&cut));
            (cut, count)
        };
        Ok(Self { parts: parts.into_iter().zip(shares).map(with_count).collect() })
    }

    /// How many windows there are.
    pub fn count(&self) -> usize {
        self.parts.iter().map(|(_, count)| count).sum()
    }

    /// Tokens in a window.
    pub fn sequence(&self) -> usize {
        self.parts[0].0.sequence
    }

    /// Which window is number `index`: its part, and there the position of its first token within the stream; of examples, the number of
    /// the row.
    fn start(&self, mut index: usize) -> (&Cut, u64) {
        let mut parts = self.parts.iter();
        let (cut, count) = loop {
            let (cut, count) = parts.next().expect("windows are counted");
            match index.checked_sub(*count) {
                Some(rest) => index = rest,
                None => break (cut, *count),
            }
        };
        let window = (index as u128 * u128::from(cut.all()) / count as u128) as u64;
        match cut.kind {
            Kind::Stream { .. } => (cut, cut.range.start + window * cut.sequence as u64),
            Kind::Rows { .. } => (cut, window),
        }
    }

    /// Writes windows `first..`, as many as the slices hold. Allocates nothing.
    ///
    /// # Errors
    /// Slices that don't hold whole windows, or more than there are; a read that fails.
    pub fn fill(&self, first: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        fill(self.sequence(), self.count(), first, |index| self.start(index), inputs, targets)
    }

    /// [`Self::fill`], as [`TrainingWindows::fill_documents`].
    ///
    /// # Errors
    /// As there.
    pub fn fill_documents(
        &self,
        first: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        self.fill(first, inputs, targets)?;
        documents(self.sequence(), |index| self.start(first + index), inputs, targets, starts)
    }
}

impl Cut {
    /// Windows of a stream whose documents end with a token, if that is known.
    pub fn new(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        end_of_text: Option<u32>,
        sequence: usize,
        part: &'static str,
    ) -> Result<Self, DataError> {
        if sequence == 0 {
            return Err(DataError::Zero { what: "the sequence length" });
        }
        let range = range.start.min(tokens.count())..range.end.min(tokens.count());
        let (length, needed) = (range.end.saturating_sub(range.start), sequence as u64 + 1);
        if length < needed {
            return Err(DataError::TooShort { part, tokens: length, sequence, needed });
        }
        Ok(Self { tokens, range, sequence, kind: Kind::Stream { end_of_text } })
    }

    /// Windows of whole examples.
    pub fn of_examples(
        tokens: Arc<Tokens>,
        range: Range<u64>,
        examples: Arc<Examples>,
        sequence: usize,
        part: &'static str,
    ) -> Result<Self, DataError> {
        if sequence == 0 {
            return Err(DataError::Zero { what: "the sequence length" });
        }
        let rows = examples.rows(&range, sequence);
        if rows.is_empty() {
            return Err(DataError::NoAnswers { part, sequence });
        }
        Ok(Self { tokens, range, sequence, kind: Kind::Rows { examples, rows: rows.into() } })
    }

    /// How many windows there are side by side.
    fn all(&self) -> u64 {
        match &self.kind {
            Kind::Stream { .. } => self.whole_windows(self.length()),
            Kind::Rows { rows, .. } => rows.len() as u64,
        }
    }

    fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Windows side by side in `tokens` tokens, the last target among them.
    fn whole_windows(&self, tokens: u64) -> u64 {
        (tokens - 1) / self.sequence as u64
    }

    /// Windows in an epoch.
    fn per_epoch(&self) -> u64 {
        match &self.kind {
            Kind::Stream { .. } => self.whole_windows(self.length() + 1 - self.sequence as u64).max(1),
            Kind::Rows { rows, .. } => rows.len() as u64,
        }
    }

    /// Which window a visit is of, counted from the first of a run: the position of its first token, or the number of the row.
    fn visited(&self, visit: u128, seed: u64) -> u64 {
        let windows = self.per_epoch();
        let (epoch, place) = ((visit / u128::from(windows)) as u64, (visit % u128::from(windows)) as u64);
        let key = mix(seed ^ mix(epoch));
        if let Kind::Rows { .. } = self.kind {
            return Permutation::new(windows, key).at(place);
        }
        let sequence = self.sequence as u64;
        let spare = self.length() - 1 - windows * sequence;
        let shift = mix(key) % (spare.min(sequence - 1) + 1);
        self.range.start + shift + Permutation::new(windows, key).at(place) * sequence
    }

    /// Writes one window.
    fn fill(&self, start: u64, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        if let Kind::Rows { examples, rows } = &self.kind {
            return self.fill_row(examples, &rows[start as usize], inputs, targets);
        }
        let sequence = self.sequence;
        self.tokens.read(start, inputs)?;
        targets[..sequence - 1].copy_from_slice(&inputs[1..]);
        self.tokens.read(start + sequence as u64, &mut targets[sequence - 1..])
    }

    /// Examples one after another, and tokens that don't count behind them.
    fn fill_row(
        &self,
        examples: &Examples,
        row: &[Range<u64>],
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let mut at = 0;
        for example in row {
            let length = (example.end - example.start - 1) as usize;
            let (inputs, targets) = (&mut inputs[at..at + length], &mut targets[at..at + length]);
            self.tokens.read(example.start, inputs)?;
            self.tokens.read(example.start + 1, targets)?;
            for (target, token) in targets.iter_mut().zip(example.start + 1..) {
                *target = if examples.counts(token) { *target } else { IGNORED };
            }
            at += length;
        }
        inputs[at..].fill(0);
        targets[at..].fill(IGNORED);
        Ok(())
    }

    /// Where the document of each token begins, in a window that is filled already.
    fn documents(&self, start: u64, inputs: &[u32], targets: &mut [u32], starts: &mut [u32]) -> Result<(), DataError> {
        let mut first = 0;
        match &self.kind {
            Kind::Stream { end_of_text } => {
                let end = end_of_text.ok_or(DataError::NoDocuments)?;
                for (at, token) in inputs.iter().enumerate() {
                    starts[at] = first as u32;
                    if *token == end {
                        (first, targets[at]) = (at + 1, IGNORED);
                    }
                }
            }
            Kind::Rows { rows, .. } => {
                for example in &rows[start as usize] {
                    let end = first + (example.end - example.start - 1) as usize;
                    starts[first..end].fill(first as u32);
                    first = end;
                }
                starts[first..].fill(first as u32);
            }
        }
        Ok(())
    }
}

/// How many of `count` things each part has by its weight: one at least, and all together as many as there are, if there are enough.
fn shares(parts: &[(Cut, f64)], count: usize) -> Vec<usize> {
    let all: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let (mut weights, mut given) = (0.0, 0);
    let mut shares = Vec::with_capacity(parts.len());
    for (index, (_, weight)) in parts.iter().enumerate() {
        weights += weight;
        // What is left has room for one of each of those behind.
        let most = count.saturating_sub(parts.len() - 1 - index).max(given + 1);
        let end = ((count as f64 * weights / all).round() as usize).clamp(given + 1, most);
        shares.push(end - given);
        given = end;
    }
    shares
}

/// Writes windows `first..` of so many.
fn fill<'a>(
    sequence: usize,
    windows: usize,
    first: usize,
    start: impl Fn(usize) -> (&'a Cut, u64),
    inputs: &mut [u32],
    targets: &mut [u32],
) -> Result<(), DataError> {
    let count = inputs.len() / sequence;
    let whole = inputs.len() == targets.len() && inputs.len() == count * sequence;
    if !whole || first.checked_add(count).is_none_or(|end| end > windows) {
        let (inputs, targets) = (inputs.len(), targets.len());
        return Err(DataError::Slices { inputs, targets, first, sequence, windows });
    }
    let slices = inputs.chunks_exact_mut(sequence).zip(targets.chunks_exact_mut(sequence));
    for (index, (inputs, targets)) in (first..).zip(slices) {
        let (cut, start) = start(index);
        cut.fill(start, inputs, targets)?;
    }
    Ok(())
}

/// Where the document of each token begins, in windows that are filled already.
fn documents<'a>(
    sequence: usize,
    start: impl Fn(usize) -> (&'a Cut, u64),
    inputs: &[u32],
    targets: &mut [u32],
    starts: &mut [u32],
) -> Result<(), DataError> {
    let windows = inputs.chunks_exact(sequence).zip(targets.chunks_exact_mut(sequence));
    for (index, ((inputs, targets), starts)) in windows.zip(starts.chunks_exact_mut(sequence)).enumerate() {
        let (cut, start) = start(index);
        cut.documents(start, inputs, targets, starts)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;
    use std::collections::HashSet;

    /// Tokens that tell their own position.
    fn counting(count: u32) -> Arc<Tokens> {
        Arc::new(Tokens::from_ids((0..count).collect()))
    }

    generated! {
        #[test]
        fn an_epoch_visits_disjoint_windows_once(
            before in 0u64..5, length in 2u64..600, sequence in 1usize..40, batch in 1usize..9, seed: u64, epoch in 0u64..4,
        ) {
            prop_assume!(length > sequence as u64);
            let range = before..before + length;
            let tokens = counting((before + length + 3) as u32);
            let windows = TrainingWindows::new(tokens, range.clone(), sequence, batch, seed).unwrap();
            let per_epoch = windows.per_epoch();
            // All but less than two windows' tokens are visited.
            prop_assert!(per_epoch * sequence as u64 + 2 * sequence as u64 > length - 1);

            let visits = epoch * per_epoch..(epoch + 1) * per_epoch;
            let starts: Vec<u64> = visits
                .map(|visit| windows.start(visit / batch as u64, (visit % batch as u64) as usize).1)
                .collect();
            let mut covered = HashSet::new();
            for start in starts {
                for position in start..start + sequence as u64 {
                    prop_assert!(covered.insert(position), "token {position} is visited twice");
                    prop_assert!(range.contains(&position) && range.contains(&(position + 1)));
                }
            }
        }

        #[test]
        fn parts_of_a_batch_are_the_batch(
            length in 50u32..300, sequence in 1usize..20, batch in 1usize..9, seed: u64, step: u64, first in 0usize..8,
        ) {
            prop_assume!(first < batch);
            let windows = TrainingWindows::new(counting(length), 0..u64::from(length), sequence, batch, seed).unwrap();
            let (mut inputs, mut targets) = (vec![0; batch * sequence], vec![0; batch * sequence]);
            windows.fill(step, 0, &mut inputs, &mut targets).unwrap();
            prop_assert!(inputs.iter().zip(&targets).all(|(input, target)| input + 1 == *target));

            let (mut some_inputs, mut some_targets) = (vec![0; sequence], vec![0; sequence]);
            windows.fill(step, first, &mut some_inputs, &mut some_targets).unwrap();
            prop_assert_eq!(&some_inputs, &inputs[first * sequence..][..sequence]);
            prop_assert_eq!(&some_targets, &targets[first * sequence..][..sequence]);
        }

        #[test]
        fn validation_windows_are_disjoint_and_inside(length in 2u32..600, sequence in 1usize..40, count in 1usize..50) {
            prop_assume!(length as usize > sequence);
            let windows = ValidationWindows::new(counting(length), 0..u64::from(length), sequence, count).unwrap();
            prop_assert!((1..=count).contains(&windows.count()));
            let starts: Vec<u64> = (0..windows.count()).map(|index| windows.start(index).1).collect();
            prop_assert!(starts.windows(2).all(|pair| pair[0] + sequence as u64 <= pair[1]));
            prop_assert!(starts.last().unwrap() + (sequence as u64) < u64::from(length));
        }
    }

    /// Every 4096 windows each part has its share of them, goes through its own windows as it does alone, and depends on no other call.
    #[test]
    fn parts_of_a_mixture_have_their_shares_and_their_own_order() {
        let cut = |from: u64, to: u64| Cut::new(counting(3000), from..to, None, 10, "training").unwrap();
        let weights = [0.7, 0.3 - 1e-6, 1e-6];
        let ranges = [(0, 1000), (1000, 1300), (1300, 3000)];
        let parts: Vec<_> =
            ranges.into_iter().zip(weights).map(|((from, to), weight)| (cut(from, to), weight)).collect();
        let windows = TrainingWindows::of(parts, 8, 5).unwrap();
        let mut seen: Vec<Vec<u64>> = vec![Vec::new(); 3];
        for visit in 0..2 * PLACES {
            let start = windows.start(visit / 8, (visit % 8) as usize).1;
            let part = ranges.iter().position(|(from, to)| (*from..*to).contains(&start)).unwrap();
            seen[part].push(start);
        }
        // 0.7 · 4096 is 2867.2; the last has one at least.
        assert_eq!(seen.iter().map(Vec::len).collect::<Vec<_>>(), [2 * 2867, 2 * 1228, 2]);
        for (of_mixture, (from, to)) in seen.iter().zip(ranges) {
            let alone = TrainingWindows::of(vec![(cut(from, to), 1.0)], 1, 5).unwrap();
            let mut of_mixture = of_mixture.clone();
            let mut expected: Vec<u64> = (0..of_mixture.len() as u64).map(|visit| alone.start(visit, 0).1).collect();
            of_mixture.sort_unstable();
            expected.sort_unstable();
            assert_eq!(of_mixture, expected);
        }
        // Of validation windows no more than there are.
        let parts = vec![(cut(0, 1000), 1.0), (cut(1000, 1031), 1.0)];
        let windows = ValidationWindows::of(parts, 20).unwrap();
        let starts: Vec<u64> = (0..windows.count()).map(|index| windows.start(index).1).collect();
        assert_eq!(starts[..2], [0, 90]);
        assert_eq!(starts[10..], [1000, 1010, 1020]);
    }

    #[test]
    fn seeds_steps_and_epochs_differ() {
        let starts = |seed, steps: Range<u64>| -> Vec<u64> {
            let windows = TrainingWindows::new(counting(1000), 0..1000, 10, 1, seed).unwrap();
            assert_eq!(windows.per_epoch(), 99);
            steps.map(|step| windows.start(step, 0).1).collect()
        };
        assert_eq!(starts(1, 0..99), starts(1, 0..99));
        assert_ne!(starts(1, 0..99), starts(2, 0..99));
        assert_ne!(starts(1, 0..99), starts(1, 99..198));
    }

    #[test]
    fn mistakes_have_remedies() {
        let training = |range, sequence, batch| TrainingWindows::new(counting(20), range, sequence, batch, 0);
        assert!(matches!(training(0..10, 10, 1), Err(DataError::TooShort { tokens: 10, needed: 11, .. })));
        assert!(matches!(training(0..99, 20, 1), Err(DataError::TooShort { tokens: 20, .. })));
        assert!(matches!(training(0..20, 0, 1), Err(DataError::Zero { .. })));
        assert!(matches!(training(0..20, 10, 0), Err(DataError::Zero { .. })));
        assert_eq!(training(0..11, 10, 1).unwrap().start(5, 0).1, 0);

        let windows = training(0..20, 5, 2).unwrap();
        for (first, inputs, targets) in [(0, 15, 15), (2, 5, 5), (0, 4, 4), (0, 10, 5), (usize::MAX, 5, 5)] {
            let filled = windows.fill(0, first, &mut vec![0; inputs], &mut vec![0; targets]);
            assert!(matches!(filled, Err(DataError::Slices { .. })), "{first} {inputs} {targets}");
        }
    }
}
