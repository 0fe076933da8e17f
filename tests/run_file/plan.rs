//! `gapless plan RUN.toml`: what a run will take is what it takes.

use std::path::Path;

use gapless::communicator::on_threads;
use gapless::run::{Console, RunConfig, Start, train};
use gapless::{Report, TrainError, Trainer};

use crate::{Place, TINY, tokenizer};

const GPT: &str = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16";

/// The report of every rank's trainer.
fn reserved(config: &RunConfig, vocabulary: usize) -> Vec<Report> {
    let (architecture, options) = (config.model(vocabulary).architecture().unwrap(), config.options().unwrap());
    on_threads(options.mesh.ranks().unwrap(), |world| {
        let trainer = Trainer::on(world, |vb| architecture.model(vb), options.clone())?;
        Ok::<_, TrainError>(trainer.report().clone())
    })
    .unwrap()
}

/// On every rank, to the byte and by the same plan; and what the run then says of itself.
#[test]
fn a_plan_is_what_the_run_reserves() {
    let place = Place::new();
    let moe = "[model.moe]\nexpert_hidden = 8\n[model.moe.llama]\nlayers = 2\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\n\
        [model.moe.router]\nexperts = 4\ntop_k = 2";
    let llama = "[model.llama]\nlayers = 2\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32";
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let folder = format!("[model]\nfolder = {base:?}");
    let lora = format!("{folder}\n[trainable.lora]\nrank = 2\ntargets = [\"q_proj\"]");
    let tokenizer = format!("tokenizer = {:?}", tokenizer(&place));
    let bytes = "vocabulary = 256";
    for (model, vocabulary, assignments) in [
        (GPT, bytes, &[][..]),
        (GPT, bytes, &["step.dtype=bf16"]),
        (GPT, bytes, &["sample.prompt="]),
        (GPT, bytes, &["memory.recompute=layers"]),
        (GPT, bytes, &["memory.budget=\"320KiB\""]),
        (GPT, bytes, &["optimizer.name=adamw8bit"]),
        (GPT, bytes, &["optimizer.name=lion", "step.micro_batches=1"]),
        (GPT, bytes, &["data.isolate_documents=true"]),
        (GPT, bytes, &["step.data_ranks=2"]),
        (GPT, bytes, &["model.gpt.layers=2", "step.pipeline_ranks=2", "step.schedule=zb-h1"]),
        (GPT, &tokenizer, &[]),
        (llama, bytes, &["step.dtype=bf16"]),
        (moe, bytes, &[]),
        (moe, bytes, &["step.expert_ranks=2"]),
        (moe, bytes, &["data.isolate_documents=true", "model.moe.router.capacity={ factor = 1.5, drop = \"last\" }"]),
        (&folder, &tokenizer, &[]),
        (&lora, &tokenizer, &["step.dtype=bf16"]),
    ] {
        let text = TINY.replace(GPT, model).replace(bytes, vocabulary).replace("steps = 4", "steps = 1");
        let assignments: Vec<String> = assignments.iter().map(|&assignment| assignment.to_owned()).collect();
        let of = format!("{model}\n{vocabulary} {assignments:?}");
        let config = RunConfig::read(&place.file(&text), &assignments).unwrap_or_else(|error| panic!("{of}: {error}"));
        let planned = config.plan().unwrap_or_else(|error| panic!("{of}: {error}"));
        let out = tempfile::tempdir().unwrap();
        let run = train(&config, &out.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        assert_eq!((planned[0].arena_bytes, &planned[0].plan_hash), (run.arena_bytes, &run.plan_hash), "{of}");
        let size = config.dataset().unwrap().vocabulary().size();
        let figures = |report: &Report| (report.arena_bytes, report.host_bytes, report.plan_hash.clone());
        assert_eq!(
            planned.iter().map(figures).collect::<Vec<_>>(),
            reserved(&config, size).iter().map(figures).collect::<Vec<_>>(),
            "{of}"
        );
    }
}

/// By the command, without the data; what cannot fit has its own exit code, and flags of tables are refused.
#[test]
fn the_command_plans_a_file() {
    let place = Place::new();
    let file = place.file(&TINY.replace("text.txt", "nowhere.txt")).display().to_string();
    let planned = |arguments: &[&str]| {
        let output = place.gapless(&[&["plan", &file], arguments].concat());
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code(), text)
    };
    let (code, text) = planned(&["--json"]);
    let one: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, Some(0), "{text}");
    assert!(one["arena_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{text}");
    let (code, text) = planned(&["--json", "--set", "step.data_ranks=2"]);
    let two: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(code == Some(0) && two.as_array().is_some_and(|ranks| ranks.len() == 2), "{text}");
    for (arguments, code, part) in [
        (&["--set", "step.data_ranks=2"][..], 0, "rank 1: "),
        (&["--set", "memory.budget=1000"], 3, "1000"),
        (&["--set", "step.batch=3"], 2, "step.micro_batches"),
        (&["--draw", "map.html"], 2, "memory.html"),
        (&["--capacity", "1MiB"], 2, "--set memory.budget"),
    ] {
        let (ended, text) = planned(arguments);
        assert!(ended == Some(code) && text.contains(part), "{arguments:?}: {ended:?} {text}");
    }
    let output = place.gapless(&["plan", "table.csv", "--set", "step.batch=4"]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains(".toml"));
}
