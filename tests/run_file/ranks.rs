//! Ranks of a run file.

use std::path::Path;

use gapless::run::{Console, RunConfig, Start, train};
use serde_json::Value;

use crate::{Place, TINY, losses, rows, tokenizer};

/// Pipeline ranks give the same bits as one rank, and data ranks the same results up to rounding. A run can be
/// resumed with other ranks. Weights that were loaded from a folder are saved as a folder, even if no rank has all of
/// them.
#[test]
fn ranks_of_a_file_train_as_one() {
    let place = Place::new();
    let go = |out: &str, settings: &[&str], start: &Start| {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let config = RunConfig::read(&place.file(TINY), &settings).unwrap();
        let out = place.path().join(out);
        let (mut shown, mut console) = (Vec::new(), Console::default());
        let summary = train(&config, &out, start, &mut console, |progress| shown.push(progress.done)).unwrap();
        assert_eq!(summary.steps, config.steps);
        assert_eq!(shown, (config.steps + 1 - shown.len() as u64..=config.steps).collect::<Vec<_>>());
        losses(&out.join("metrics.jsonl"))
    };
    let two_layers = "model.gpt.layers=2";
    let one = go("one", &[two_layers], &Start::Anew);
    let stages = [two_layers, "mesh.pipeline=2", "pipeline.schedule=zb-h1"];
    assert_eq!(go("stages", &stages, &Start::Anew), one);
    let samples = |out: &str| std::fs::read_to_string(place.path().join(out).join("samples.txt")).unwrap();
    assert_eq!(samples("stages"), samples("one"));
    // The parts of the time of a step or evaluation add up to at most the whole. Only runs on several ranks report a
    // time for communication.
    for (out, parts) in [("one", 3), ("stages", 4)] {
        for row in rows(&place.path().join(out).join("metrics.jsonl")) {
            let seconds = row["seconds"].as_object().unwrap();
            let known = |part: &&str| seconds.get(*part).and_then(Value::as_f64).is_some_and(|time| time > 0.0);
            let there: Vec<&str> =
                ["forward", "backward", "update", "communication"].into_iter().filter(known).collect();
            assert_eq!(there.len(), if row.get("loss").is_some() { parts } else { 0 }, "{row}");
            let sum: f64 = there.iter().map(|part| seconds[*part].as_f64().unwrap()).sum();
            assert!(row.get("loss").is_none() || sum <= 1.0001 * seconds["step"].as_f64().unwrap(), "{row}");
            assert_eq!(known(&"evaluation"), row.get("val_loss").is_some(), "{row}");
        }
    }
    for (out, mesh) in [("copies", "mesh.data=2"), ("shards", "mesh.shard=2")] {
        let ranks = go(out, &[two_layers, mesh, "step.prefetch=2"], &Start::Anew);
        for (&(step, ranks), &(_, one)) in ranks.iter().zip(&one) {
            let (ranks, one) = (f32::from_bits(ranks), f32::from_bits(one));
            assert!((ranks - one).abs() < 1e-4 * one, "{mesh}, step {step}: {ranks}, not {one}");
        }
        assert!(!samples(out).is_empty(), "{mesh}");
    }
    // Two steps on one rank, followed by two on two ranks.
    let constant = ["learning_rate.shape=constant", "learning_rate.warmup_steps=0"];
    let whole = go("whole", &[&constant[..], &[two_layers]].concat(), &Start::Anew);
    go("moved", &[&constant[..], &[two_layers, "steps=2"]].concat(), &Start::Anew);
    assert_eq!(go("moved", &[&constant[..], &stages].concat(), &Start::Resume), whole);
    // A sharded run goes on on one rank.
    go("gathered", &[&constant[..], &[two_layers, "steps=2", "mesh.shard=2"]].concat(), &Start::Anew);
    let gathered = go("gathered", &[&constant[..], &[two_layers]].concat(), &Start::Resume);
    for (&(step, gathered), &(_, whole)) in gathered.iter().zip(&whole) {
        let (gathered, whole) = (f32::from_bits(gathered), f32::from_bits(whole));
        assert!((gathered - whole).abs() < 1e-4 * whole, "step {step}: {gathered}, not {whole}");
    }

    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let text = TINY.replace("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", &format!("[model]\nfolder = {base:?}"));
    let text = text.replace("vocabulary = 256", &format!("tokenizer = {:?}", tokenizer(&place)));
    for (out, ranks) in
        [("one folder", "mesh.pipeline=1"), ("two stages", "mesh.pipeline=2"), ("two shards", "mesh.shard=2")]
    {
        let config = RunConfig::read(&place.file(&text), &[ranks.to_owned()]).unwrap();
        train(&config, &place.path().join(out), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    }
    let weights = |out: &str| std::fs::read(place.path().join(out).join("model/model.safetensors")).unwrap();
    assert!(weights("one folder") == weights("two stages"));
    assert_eq!(weights("one folder").len(), weights("two shards").len());
}
