//! Interrupting, saving and resuming give the same bits as a run without interruption. If resuming is impossible, the
//! error says why.

use std::fs;
use std::path::{Path, PathBuf};

use gapless::engine::checkpoint::Checkpoint;
use serde_json::json;

use crate::common::{Kind, TinyRun, parameters};

fn saved(run: &TinyRun, steps: u64, dir: &Path) -> PathBuf {
    let mut trainer = run.trainer();
    run.go_on(&mut trainer, steps);
    trainer.save(dir, json!({ "note": "mine" })).unwrap()
}

#[test]
fn a_resumed_run_goes_on_with_the_same_bits() {
    for kind in Kind::all() {
        let dir = tempfile::tempdir().unwrap();
        let run = TinyRun { kind, ..TinyRun::default() };
        let mut straight = run.trainer();
        run.go_on(&mut straight, 3);
        let expected = run.go_on(&mut straight, 3);

        saved(&run, 3, dir.path());
        let mut other = run.clone();
        other.options.seed = 99; // the seed, and with it dropout, is the checkpoint's
        let mut resumed = other.trainer();
        let checkpoint = Checkpoint::latest(dir.path()).unwrap().unwrap();
        assert_eq!(resumed.resume(&checkpoint).unwrap(), json!({ "note": "mine" }));
        assert_eq!(resumed.steps(), 3);
        assert_eq!(run.go_on(&mut resumed, 3), expected, "{kind:?}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(&TinyRun::default(), 1, dir.path());
    let other = TinyRun { kind: Kind::Llama, ..TinyRun::default() };
    let mut trainer = other.trainer();
    let before = parameters(&trainer);
    let error = trainer.resume(&Checkpoint::open(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("another tensors: h.0.attn.c_attn.bias is [144]"), "{error}");
    assert_eq!(parameters(&trainer), before);
}

#[test]
fn damaged_and_newer_checkpoints_are_named_and_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let run = TinyRun::default();
    let good = saved(&run, 1, dir.path());
    let damage = |change: &dyn Fn(&Path)| {
        let bad = saved(&run, 2, dir.path());
        change(&bad);
        let error = Checkpoint::open(&bad).unwrap_err().to_string();
        let latest = Checkpoint::latest(dir.path()).unwrap().unwrap();
        assert_eq!(latest.path(), good, "the last good one is still found");
        fs::remove_dir_all(bad).unwrap();
        error
    };
    let model = |folder: &Path| folder.join("model.safetensors");
    let truncated = damage(&|folder| {
        let bytes = fs::read(model(folder)).unwrap();
        fs::write(model(folder), &bytes[..bytes.len() - 100]).unwrap();
    });
    assert!(truncated.contains("model.safetensors"), "{truncated}");
    let flipped = damage(&|folder| {
        let mut bytes = fs::read(model(folder)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(model(folder), bytes).unwrap();
    });
    assert!(flipped.contains("model.safetensors"), "{flipped}");
    damage(&|folder| fs::remove_file(folder.join("manifest.json")).unwrap());
}
