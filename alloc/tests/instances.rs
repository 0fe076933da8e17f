//! The planner on the field's instances, where they lie beside the workspace.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use flate2::read::GzDecoder;
use gapless_alloc::{Fit, Options, Proof, check, csv, plan};

/// Calls `judge` with the name and table of every plain CSV file of a family; says so where there is none.
#[track_caller]
fn each(family: &str, mut judge: impl FnMut(&str, csv::Table)) {
    let Some(folder) = gapless_testing::shared(&format!("instances/{family}")) else { return };
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        // Beside the tables lie figures of another planner.
        if name.ends_with(".csv") && name != "authors_planner.csv" {
            judge(&name, csv::read(BufReader::new(File::open(&path).unwrap())).unwrap());
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

/// Layers operation by operation, with a quarter of the default work. The interleaved step of 10^4 buffers is full ten times,
/// and a mask of one micro-batch is born before that of an earlier one is gone.
#[test]
fn steps_of_operations_meet_the_bound() {
    each("stalloc", |name, table| {
        let options = Options { work: Options::default().work / 4, ..Options::default() };
        let solution = plan(&table.problem, &options);
        check(&table.problem, &solution.offsets, None).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.proof, Proof::MaxLive, "{name}: gap {}", solution.gap());
    });
}

/// Steps of pipelines that are full as often as a micro-batch comes, with activations that start before those of their size
/// are gone: two small ones with split backwards, where statistics of a kilobyte or two lie between, and GPT layers in four
/// chunks on one of eight stages. With a quarter of the default work, as a compiler asks.
#[test]
fn steps_that_are_often_full_meet_the_bound() {
    for name in ["zb-h1", "v-min", "four-chunks"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/steps").join(name).with_extension("csv.gz");
        let table = csv::read(BufReader::new(GzDecoder::new(File::open(path).unwrap()))).unwrap();
        let options = Options { work: Options::default().work / 4, ..Options::default() };
        let solution = plan(&table.problem, &options);
        check(&table.problem, &solution.offsets, None).unwrap_or_else(|v| panic!("{name}: {v:?}"));
        assert_eq!(solution.proof, Proof::MaxLive, "{name}: gap {}", solution.gap());
    }
}
