//! Tests of the windows that are visited, and of their order.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use gapless_testing::prelude::*;

use super::training::MIXTURE_PERIOD;
use super::*;
use crate::Tokens;

/// Tokens whose value is their position.
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
        // All tokens are visited, except for fewer than two windows of them.
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

/// Each part has its share of every 4096 windows. A part visits its own windows in the same order as without the other
/// parts, and the result does not depend on other calls.
#[test]
fn parts_of_a_mixture_have_their_shares_and_their_own_order() {
    let cut = |from: u64, to: u64| WindowSource::new(counting(3000), from..to, None, 10, "training").unwrap();
    let weights = [0.7, 0.3 - 1e-6, 1e-6];
    let ranges = [(0, 1000), (1000, 1300), (1300, 3000)];
    let parts: Vec<_> = ranges.into_iter().zip(weights).map(|((from, to), weight)| (cut(from, to), weight)).collect();
    let windows = TrainingWindows::of(parts, 8, 5).unwrap();
    let mut seen: Vec<Vec<u64>> = vec![Vec::new(); 3];
    for visit in 0..2 * MIXTURE_PERIOD {
        let start = windows.start(visit / 8, (visit % 8) as usize).1;
        let part = ranges.iter().position(|(from, to)| (*from..*to).contains(&start)).unwrap();
        seen[part].push(start);
    }
    // 0.7 · 4096 is 2867.2. The last part gets at least one window.
    assert_eq!(seen.iter().map(Vec::len).collect::<Vec<_>>(), [2 * 2867, 2 * 1228, 2]);
    for (of_mixture, (from, to)) in seen.iter().zip(ranges) {
        let alone = TrainingWindows::of(vec![(cut(from, to), 1.0)], 1, 5).unwrap();
        let mut of_mixture = of_mixture.clone();
        let mut expected: Vec<u64> = (0..of_mixture.len() as u64).map(|visit| alone.start(visit, 0).1).collect();
        of_mixture.sort_unstable();
        expected.sort_unstable();
        assert_eq!(of_mixture, expected);
    }
    // A part gets at most as many validation windows as it has.
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
