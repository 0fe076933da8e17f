//! Loss spikes: outlying steps are skipped. If too many steps are skipped, the run ends or returns to a checkpoint.

use std::path::Path;

use gapless::run::{Console, RunConfig, RunError, Start, Summary, train};

use crate::{Place, TINY, losses, rows};

/// Keys for parameter groups, averages, clipped gradient values, loss terms and a guard.
const GUARDED: &str = r#"
[loss]
label_smoothing = 0.1
z_loss = 1e-4

[guard]
norm = 1.1
loss = 0.2
window = 4
patience = 30

[optimizer]
average = 0.9
max_value = 1.0

[[optimizer.groups]]
names = ["wte", "*.bias"]
weight_decay = 0.0

[[optimizer.groups]]
names = ["h.0"]
name = "lion"
learning_rate = 0.3

[sample]"#;

/// Creates a run that learns at first, and then diverges because its learning rate is too large.
fn unstable(place: &Place, last: &str) -> RunConfig {
    let assignments = [
        "steps=30",
        "learning_rate.peak=0.1",
        "learning_rate.shape=constant",
        "learning_rate.warmup_steps=4",
        "checkpoints.every=0",
        last,
    ];
    RunConfig::read(&place.file(&TINY.replace("[sample]", GUARDED)), &assignments.map(str::to_owned)).unwrap()
}

fn run(config: &RunConfig, out: &Path, start: Start) -> Result<Summary, RunError> {
    train(config, out, &start, &mut Console::default(), |_| {})
}

/// A resumed run skips the same steps and gives the same bits.
#[test]
fn steps_far_above_the_others_are_left_out() {
    let place = Place::new();
    let out = |name: &str| place.path().join(name);
    let go = |last: &str, name: &str, start| run(&unstable(&place, last), &out(name), start).unwrap();
    go("seed=3", "whole", Start::Anew);
    go("steps=17", "parts", Start::Anew);
    go("seed=3", "parts", Start::Resume);
    let [whole, parts] = ["whole", "parts"].map(|name| out(name).join("metrics.jsonl"));
    let skipped = |metrics: &Path| -> Vec<u64> {
        let skipped = rows(metrics).into_iter().filter(|row| row["skipped"] == true);
        skipped.map(|row| row["step"].as_u64().unwrap()).collect()
    };
    assert!(skipped(&whole).len() > 2, "{:?}", rows(&whole));
    assert_eq!(skipped(&whole), skipped(&parts));
    assert_eq!(losses(&whole), losses(&parts));
    // The averaged weights are different from the weights.
    let sampled = |more: &[&str]| {
        let asked = [&["sample", "whole", "--prompt", "to", "--tokens", "20", "--temperature", "0"], more].concat();
        let output = place.gapless(&asked);
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    assert_ne!(sampled(&["--average"]), sampled(&[]));
    run(&RunConfig::read(&place.file(TINY), &[]).unwrap(), &out("plain"), Start::Anew).unwrap();
    let output = place.gapless(&["sample", "plain", "--prompt", "to", "--average"]);
    assert!(
        output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("average/"),
        "{output:?}"
    );
}

/// If too many steps in a row are skipped, the run ends, or it returns to an earlier checkpoint and continues with
/// other data, up to twice. A run that is interrupted and resumed does the same.
#[test]
fn too_many_of_them_end_a_run_or_take_it_back() {
    let place = Place::new();
    let ended = run(&unstable(&place, "guard.patience=1"), &place.path().join("ended"), Start::Anew).unwrap_err();
    assert!(matches!(ended, RunError::Spikes { skipped: 1, .. }), "{ended}");

    let out = place.path().join("back");
    let mut back = unstable(&place, "checkpoints.every=5");
    (back.guard.patience, back.guard.rollbacks) = (2, 2);
    let rows_of = |start| {
        let error = run(&back, &out, start).unwrap_err();
        assert!(matches!(error, RunError::Spikes { skipped: 2, .. }), "{error}");
        losses(&out.join("metrics.jsonl"))
    };
    let rows = rows_of(Start::Anew);
    let returns: Vec<_> = rows.windows(2).filter(|pair| pair[1].0 <= pair[0].0).map(|pair| pair[1]).collect();
    assert!(matches!(*returns, [(6, one), (6, two)] if one != two && ![one, two].contains(&rows[5].1)), "{rows:?}");
    assert_eq!(rows_of(Start::Resume), [&rows[..], &rows[5..]].concat());
}
