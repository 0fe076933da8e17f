//! `gapless plan RUN.toml` predicts the memory that a run needs.

use std::path::Path;

use gapless::communicator::on_threads;
use gapless::run::{Console, RunConfig, Start, train};
use gapless::{Report, TrainError, Trainer};

use crate::{Place, TINY, tokenizer};

const GPT: &str = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16";

/// Returns the report of every rank's trainer.
fn reserved(config: &RunConfig, vocabulary: usize) -> Vec<Report> {
    let (architecture, options) = (config.model(vocabulary).architecture().unwrap(), config.options());
    on_threads(options.step.mesh.ranks().unwrap(), |world| {
        let trainer = Trainer::builder(|vb| architecture.model(vb), options.clone()).distributed(world).build()?;
        Ok::<_, TrainError>(trainer.report().clone())
    })
    .unwrap()
}

/// On every rank, the planned bytes and the plan equal those of the trainer, and those that the run reports.
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
        (GPT, bytes, &["step.precision=bf16"]),
        (GPT, bytes, &["sample.prompt="]),
        (GPT, bytes, &["memory.recompute=layers"]),
        (GPT, bytes, &["memory.budget=\"320KiB\""]),
        (GPT, bytes, &["optimizer.name=adamw8bit"]),
        (GPT, bytes, &["optimizer.name=lion", "step.micro_batches=1"]),
        (GPT, bytes, &["data.isolate_documents=true"]),
        (GPT, bytes, &["mesh.data=2"]),
        (GPT, bytes, &["model.gpt.layers=2", "mesh.pipeline=2", "pipeline.schedule=zb-h1"]),
        (GPT, &tokenizer, &[]),
        (llama, bytes, &["step.precision=bf16"]),
        (moe, bytes, &[]),
        (moe, bytes, &["mesh.expert=2"]),
        (moe, bytes, &["data.isolate_documents=true", "model.moe.router.capacity={ factor = 1.5, drop = \"last\" }"]),
        (GPT, bytes, &["step.precision=pure_bf16"]),
        (GPT, bytes, &["memory.compress=[\"linear\"]", "memory.planning=1000"]),
        (GPT, bytes, &["memory.offload=[\"linear\"]", "memory.recompute=ops:gelu"]),
        (GPT, bytes, &["memory.release_gradients=true", "optimizer.max_norm=inf", "step.micro_batches=1"]),
        (GPT, bytes, &["optimizer.average=0.999", "guard.norm=3.0"]),
        (GPT, bytes, &["trainable.only=[\"*.bias\"]", "loss.z_loss=1e-4"]),
        (GPT, bytes, &["model.gpt.layers=2", "mesh={ data = 2, pipeline = 2 }", "step.micro_batches=1"]),
        (GPT, bytes, &["model.gpt.layers=4", "mesh.pipeline=2", "pipeline.schedule=zbv", "memory.recompute=layers"]),
        (GPT, bytes, &["model.gpt.layers=4", "mesh.pipeline=2", "pipeline.cut=[\"h.1\"]"]),
        ("model = \"llama:layers=1,heads=2,kv_heads=1,width=16,hidden=32\"", bytes, &["optimizer.name=muon"]),
        (moe, bytes, &["mesh.expert=2", "memory.routing=1.0", "memory.overflow=recompute"]),
        (moe, bytes, &["mesh.expert=2", "memory.routing=64KiB", "memory.overflow=grow"]),
        (&folder, &tokenizer, &[]),
        (&lora, &tokenizer, &["trainable.lora.rank=4", "mesh.data=2"]),
        (&lora, &tokenizer, &["step.precision=bf16"]),
    ] {
        let text = TINY.replace(GPT, model).replace(bytes, vocabulary).replace("steps = 4", "steps = 1");
        let assignments: Vec<String> = assignments.iter().map(|&assignment| assignment.to_owned()).collect();
        let case = format!("{model}\n{vocabulary} {assignments:?}");
        let config =
            RunConfig::read(&place.file(&text), &assignments).unwrap_or_else(|error| panic!("{case}: {error}"));
        let planned = config.plan().unwrap_or_else(|error| panic!("{case}: {error}"));
        let out = tempfile::tempdir().unwrap();
        let run = train(&config, &out.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        assert_eq!((planned[0].arena_bytes, &planned[0].plan_hash), (run.arena_bytes, &run.plan_hash), "{case}");
        let size = config.dataset().unwrap().vocabulary().size();
        let figures = |report: &Report| (report.arena_bytes, report.host_bytes, report.plan_hash.clone());
        assert_eq!(
            planned.iter().map(figures).collect::<Vec<_>>(),
            reserved(&config, size).iter().map(figures).collect::<Vec<_>>(),
            "{case}"
        );
    }
}

/// Checks smaller versions of the run files that `gapless init` prints.
#[test]
fn a_plan_of_an_example_is_what_it_reserves() {
    let place = Place::new();
    let data = place.path().join("text.txt");
    for (name, smaller) in [
        ("small-gpt", "model.gpt={ layers = 2, heads = 2, width = 32 }"),
        ("llama", "model.llama={ layers = 2, heads = 2, kv_heads = 1, width = 32, hidden = 64 }"),
        ("moe", "model.moe.llama={ layers = 2, heads = 2, kv_heads = 1, width = 32, hidden = 64 }"),
        ("budget", "model.gpt={ layers = 2, heads = 2, width = 32 }"),
        ("pipeline", "model.gpt={ layers = 4, heads = 2, width = 32 }"),
    ] {
        let printed = String::from_utf8(place.gapless(&["init", name]).stdout).unwrap();
        let file = place.file(&printed);
        let data = format!("data.path={data:?}");
        let sets = [smaller, &data, "data.vocabulary=256", "step.sequence=32", "device=cpu", "threads=1"];
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        let config = RunConfig::read(&file, &sets).unwrap_or_else(|error| panic!("{name}: {error}"));
        let figures = |report: &Report| (report.arena_bytes, report.host_bytes, report.plan_hash.clone());
        assert_eq!(
            config.plan().unwrap().iter().map(figures).collect::<Vec<_>>(),
            reserved(&config, 256).iter().map(figures).collect::<Vec<_>>(),
            "{name}"
        );
    }
}

/// Keys are accepted under their former names, with the same meaning, and a notice is printed.
#[test]
fn former_names_are_understood() {
    let place = Place::new();
    let old = TINY.replace("threads = 1\n", "").replace("device = \"cpu\"\n", "").replace(
        "precision = \"f32\"",
        "dtype = \"bf16\"\ndevice = \"cpu\"\nthreads = 1\ndata_ranks = 2\nschedule = \"gpipe\"",
    );
    let former = RunConfig::read(&place.file(&old), &[]).unwrap();
    let sets = ["step.precision=bf16", "mesh.data=2", "pipeline.schedule=gpipe"].map(str::to_owned);
    assert!(former == RunConfig::read(&place.file(TINY), &sets).unwrap());
    assert_eq!(former.notices.len(), 5);
    assert!(former.notices.iter().any(|notice| notice.contains("step.data_ranks is now called mesh.data")));
    let twice = old.replace("[sample]", "[mesh]\ndata = 2\n[sample]");
    let error = RunConfig::read(&place.file(&twice), &[]).unwrap_err().to_string();
    assert!(error.contains("step.data_ranks") && error.contains("is given along with mesh.data"), "{error}");
}

/// The command plans a run file without the run's data. A step that cannot fit has its own exit code, and options for
/// tables are refused.
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
    let config = RunConfig::read_without_data(Some(file.as_ref()), &[]).unwrap();
    let [of_run] = &config.plan().unwrap()[..] else { panic!("one rank") };
    // All parts of the output contain the same numbers and the same plan.
    for figures in [&one, &one["ranks"][0]] {
        assert_eq!(
            (&figures["arena_bytes"], &figures["plan_hash"]),
            (&of_run.arena_bytes.into(), &of_run.plan_hash.clone().into())
        );
    }
    let (code, text) = planned(&["--json", "--set", "mesh.data=2"]);
    let two: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(code == Some(0) && two["ranks"].as_array().is_some_and(|ranks| ranks.len() == 2), "{text}");
    for (arguments, code, part) in [
        (&["--set", "mesh.data=2"][..], 0, "rank 1: "),
        (&["--set", "memory.budget=1000"], 3, "1000"),
        (&["--set", "step.batch=3"], 2, "step.micro_batches"),
        (&["--precision", "bf16", "--data-ranks", "2"], 0, "rank 1: "),
        (&["--capacity", "1MiB"], 2, "--budget 600MiB"),
    ] {
        let (ended, text) = planned(arguments);
        assert!(ended == Some(code) && text.contains(part), "{arguments:?}: {ended:?} {text}");
    }
    let output = place.gapless(&["plan", "table.csv", "--set", "step.batch=4"]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains(".toml"));
}

/// Everything that can be refused is refused before the data are tokenized, so no cache is written.
#[test]
fn refusals_come_before_the_data() {
    let place = Place::new();
    let model = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16\n";
    let lora = |targets: &str| format!("{model}[trainable.lora]\nrank = 2\ntargets = [{targets}]\n");
    let refused = |from: &str, to: &str, expected: &[&str]| {
        let file = place.file(&TINY.replace(from, to));
        let train = |config: RunConfig| {
            train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {})
        };
        let error = match RunConfig::read(&file, &[]) {
            Ok(config) => train(config).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        assert!(!place.path().join("cache").exists(), "{to} is refused after the data were tokenized");
        assert!(!place.path().join("run/run.toml").exists());
    };
    refused("heads = 2", "heads = 3", &["heads", "3"]);
    refused(model, &lora("\"q_proj\""), &["\"q_proj\" is not a linear layer", "c_attn, c_proj, c_fc"]);
    refused(model, &lora("\"wte\""), &["wte", "c_attn, c_proj, c_fc"]);
    refused("[data]", "[trainable]\nonly = [\"layers.*\"]\n\n[data]", &["\"layers.*\"", "h.*.attn.c_attn.weight"]);
    refused("steps = 4", "steps = 4\nmemory.budget = 1000", &["budget"]);
    refused("device = \"cpu\"", "device = \"cuda:99\"", &[]);
    let text = TINY.replace("[checkpoints]\nevery = 2", "[checkpoints]\nevery = 1\nkeep_last = 3");
    let config = RunConfig::read(&place.file(&text), &[]).unwrap();
    train(&config, &place.path().join("run"), &Start::Anew, &mut Console::default(), |_| {}).unwrap();
    assert!(place.path().join("cache").exists());
}
