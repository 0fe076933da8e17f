//! The eager lowering against recordings of the real library: the most bytes alive, exactly, and what PyTorch's allocator wastes on them
//! within half a point. With `GAPLESS_SLOW_TESTS`, on all recordings beside the project.
//!
//! Not judged: sequences of changing lengths, and mixtures of experts, which have no rules yet.

use gapless::allocators::{Kind, Requests, replay};
use gapless::engine::compile::StagePartition;
use gapless::step::{Lowering, Precision, StepSpec};
use gapless_testing::evidence;
use serde_json::Value;

/// The step that a recording is of, and its rank; none if our models cannot say it.
fn step_of(entry: &Value) -> Option<(StepSpec, Vec<String>, usize)> {
    let config = &entry["config"];
    let number = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
    let (layers, heads, width) = (number("L"), number("H"), number("D"));
    let (ranks, chunks) = (number("p").max(1), number("v").max(1));
    let model = match config["kind"].as_str()? {
        "gpt2" => format!("gpt:vocabulary=50304,layers={layers},heads={heads},width={width}"),
        "llama" | "pipe" if config.get("moe").is_none() => format!(
            "llama:vocabulary=32000,layers={},heads={heads},kv_heads={heads},width={width},hidden={}",
            layers * ranks,
            number("FF")
        ),
        _ => return None,
    };
    let micro_batches = number("accum").max(number("microbatches"));
    let spec = StepSpec {
        model: serde_json::from_value(Value::String(model)).ok(),
        batch: number("mb") * micro_batches,
        micro_batches,
        sequence: number("seq"),
        dtype: Precision::Mixed,
        lowering: if config["mode"] == "amp" { Lowering::EagerAmp } else { Lowering::Eager },
        pipeline_ranks: ranks,
        schedule: if chunks > 1 { "interleaved" } else { "1f1b" }.to_owned(),
        chunks: Some(chunks),
        recompute: if config["ckpt"] == true { "layers" } else { "none" }.to_owned(),
        ..StepSpec::default()
    };
    // Equal numbers of layers on all stages.
    let per_stage = layers / chunks;
    let cuts = (1..ranks * chunks).map(|stage| format!("model.layers.{}", stage * per_stage)).collect();
    Some((spec, cuts, number("rank")))
}

#[test]
fn steps_allocate_what_the_library_does() {
    let folder = evidence("pytorch");
    let manifest = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_str(&manifest).unwrap();
    let (mut wrong, mut judged) = (String::new(), 0);
    for entry in &entries {
        let name = entry["name"].as_str().unwrap();
        let Some((spec, cuts, rank)) = step_of(entry) else { continue };
        let mut step = spec.check().unwrap();
        step.options.pipeline.cut = StagePartition::Before(cuts);
        let problem = step.eager(&step.record().unwrap(), rank).unwrap();
        let requests = Requests::new(&problem);
        let mut pytorch = Kind::PyTorch.build(80 << 30, &problem, &requests);
        let wasted = replay(&requests, &mut *pytorch, 3).unwrap().fragmentation();
        let recorded = &entry["iteration"]["replay_3_iterations"]["default"];
        let live = recorded["live_peak"].as_u64().unwrap();
        let waste = recorded["fragmentation"].as_f64().unwrap();
        let [of, more] = [wasted, wasted - waste].map(|part| 100.0 * part);
        let line = format!("{name}: {} bytes of {live}; waste {of:.2} %, {more:+.2} points", requests.peak_live());
        println!("{line}");
        if requests.peak_live() != live || more.abs() > 0.5 {
            wrong += &(line + "\n");
        }
        judged += 1;
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(judged >= 9, "{judged} of {} recordings are of models that can be said", entries.len());
}

#[test]
fn stages_may_begin_inside_a_layer() {
    let spec: StepSpec = toml::from_str(
        "model = 'gpt:vocabulary=64,layers=3,heads=2,width=32'\nbatch = 4\nmicro_batches = 4\nsequence = 16\npipeline_ranks = 2\n\
         lowering = 'eager'",
    )
    .unwrap();
    let mut step = spec.check().unwrap();
    step.options.pipeline.cut = StagePartition::Before(vec!["h.1.mlp".to_owned()]);
    let graph = step.record().unwrap();
    for rank in 0..2 {
        let problem = step.eager(&graph, rank).unwrap();
        let requests = Requests::new(&problem);
        let lasting: u64 = requests.persistent().iter().map(|&id| requests.bytes(id)).sum();
        assert!(lasting < requests.peak_live(), "{rank}: {lasting} of {}", requests.peak_live());
    }
}

#[test]
fn what_has_no_rule_is_named() {
    let check = |text: &str, expected: &str| {
        let spec: StepSpec = toml::from_str(&format!("batch = 2\nsequence = 16\nlowering = 'eager'\n{text}")).unwrap();
        let error = match spec.check() {
            Ok(step) => step.eager(&step.record().unwrap(), 0).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(expected), "{error}");
    };
    let gpt = "model = 'gpt:vocabulary=64,layers=2,heads=2,width=32'";
    check("model = 'moe'", "no rule says what");
    check(&format!("{gpt}\nrecompute = 'ops:gelu'"), "other than layers");
    check(&format!("{gpt}\npipeline_ranks = 2\nmicro_batches = 2\nschedule = 'zb-h1'"), "splits backwards");
    check(&format!("{gpt}\noptimizer = 'galore'"), "nothing but adamw");
}
