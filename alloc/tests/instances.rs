//! The planner on public and recorded instances.

use std::path::Path;

use gapless_alloc::{Fit, Options, Proof, check, csv, plan};
use gapless_testing::{evidence, open, table_name};

/// Calls `expect` with the name and table of every instance of a family.
fn each(family: &str, mut expect: impl FnMut(&str, csv::Table)) {
    for path in std::fs::read_dir(evidence(&format!("instances/{family}"))).unwrap().map(|entry| entry.unwrap().path())
    {
        // Tables of 100,000 buffers are for benchmarks. `authors_planner` has figures of another planner.
        if let Some(name) = table_name(&path).filter(|name| !name.contains("100k") && *name != "authors_planner") {
            expect(name, csv::read(open(&path).unwrap()).unwrap());
        }
    }
}

#[test]
fn minimallocs_challenges_fit_their_capacity() {
    each("minimalloc", |name, table| {
        let capacity = name.split('.').nth(1).and_then(|part| part.parse().ok());
        let solution = plan(&table.problem, &Options { capacity, ..Options::default() });
        check(&table.problem, &solution.offsets, capacity).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.fit, Fit::Fits, "{name}");
    });
}

#[test]
fn training_steps_meet_the_bound() {
    each("training", |name, table| {
        let solution = plan(&table.problem, &Options::default());
        check(&table.problem, &solution.offsets, None).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.proof, Proof::MaxLive, "{name}: gap {}", solution.gap());
    });
}

/// Layers recorded operation by operation, planned with three quarters of the default work. The interleaved step of
/// 10^4 buffers has the most bytes alive at ten ticks. In it, the mask of one micro-batch is born before the mask of an
/// earlier one has died.
#[test]
fn steps_of_operations_meet_the_bound() {
    each("stalloc", |name, table| {
        let options = Options { work: Options::default().work / 4 * 3, ..Options::default() };
        let solution = plan(&table.problem, &options);
        check(&table.problem, &solution.offsets, None).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.proof, Proof::MaxLive, "{name}: gap {}", solution.gap());
    });
}

/// Steps of pipelines that are full once per micro-batch. Their activations are born before others of equal size have
/// died. Two steps are small, with split backwards, and with statistics of one or two kilobytes between the
/// activations. One has GPT layers in four chunks, on one of eight stages. All get three quarters of the default work,
/// like the compiler's plans.
#[test]
fn steps_that_are_often_full_meet_the_bound() {
    for name in ["zb-h1", "v-min", "four-chunks"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/steps").join(name).with_extension("csv.gz");
        let table = csv::read(open(&path).unwrap()).unwrap();
        let options = Options { work: Options::default().work / 4 * 3, ..Options::default() };
        let solution = plan(&table.problem, &options);
        check(&table.problem, &solution.offsets, None).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.proof, Proof::MaxLive, "{name}: gap {}", solution.gap());
    }
}
