//! Results do not depend on the number of threads, the micro-batches, or the contents of dead memory.

use crate::common::{Kind, TinyRun};

fn check(name: &str, change: impl Fn(&mut TinyRun)) {
    for kind in Kind::all() {
        let plain = TinyRun { kind, ..TinyRun::default() }.steps(4);
        let mut run = TinyRun { kind, ..TinyRun::default() };
        change(&mut run);
        assert_eq!(plain, run.steps(4), "{name}, {kind:?}: bits of losses, gradient norms or parameters differ");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for threads in [1, 3, 4] {
        check("threads", |run| run.options.threads = threads);
    }
}

/// Eight sequences are processed at once, in halves, or one by one. Sums over the batch are taken sequence by
/// sequence. With powers of two, scaling by 1/8 is exact.
#[test]
fn any_cut_into_micro_batches_gives_the_same_bits() {
    for micro_batches in [2, 8] {
        check("micro-batches", |run| run.options.step.micro_batches = micro_batches);
    }
}

#[test]
fn nan_in_every_dead_range_changes_nothing() {
    check("poison", |run| run.options.poison = true);
    check("poison in micro-batches", |run| {
        run.options.poison = true;
        run.options.step.micro_batches = 4;
    });
}

/// Checks that the two tests above can fail: another seed must give different results.
#[test]
fn another_seed_gives_other_bits() {
    let plain = TinyRun::default().steps(2);
    let mut run = TinyRun::default();
    run.options.seed += 1;
    assert_ne!(plain, run.steps(2));
}
