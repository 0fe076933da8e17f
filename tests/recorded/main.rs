//! Results that must not change: the plan hash, arena bytes, loss bits and norm bits that are recorded in
//! `steps.txt`.
//!
//! The records cover the default run of `train_gpt`, the presets of the command line, every schedule on four ranks,
//! mixtures of experts and byte budgets. A change of the planner may change hashes and reduce heights. No change may
//! alter bits. `GAPLESS_RECORD=1 cargo test --test recorded` rewrites the file; review the differences before you
//! commit the file.

#[path = "../common/mod.rs"]
mod common;

use std::fmt::Write;

use common::{Kind, TinyRun, on_cpu};
use gapless::engine::compile::Executable;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::nn::VarBuilder;
use gapless::parallel::{self, Shape};
use gapless::{
    DeviceChoice, MemoryOptions, Mesh, Model, Pipeline, Precision, Report, StepOptions, TrainOptions, Trainer,
};

/// Returns the run that the other tests use too, with a planner limit so large that heights show the planner's quality.
fn run() -> TinyRun {
    TinyRun {
        kind: Kind::Gpt,
        options: TrainOptions {
            step: StepOptions {
                memory: MemoryOptions { planning: 1 << 23, ..TinyRun::default().options.step.memory },
                ..TinyRun::default().options.step
            },
            ..TinyRun::default().options
        },
    }
}

fn options() -> TrainOptions {
    run().options
}

/// Compares rows of one kind with the recorded ones. A row has a name, arena bytes, the plan hash, and the bits of
/// losses and norms.
fn expect(kind: &str, rows: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded/steps.txt");
    let recorded = std::fs::read_to_string(path).unwrap_or_default();
    let is_of_kind = |line: &&str| line.split(' ').next() == Some(kind);
    if std::env::var_os("GAPLESS_RECORD").is_some() {
        let others = recorded.lines().filter(|line| !is_of_kind(line));
        let mut all: Vec<&str> = others.chain(rows.lines()).collect();
        all.sort_by_key(|line| line.split(' ').next().map(str::to_owned));
        std::fs::write(path, all.join("\n") + "\n").expect("the record is writable");
        return;
    }
    let expected: String = recorded.lines().filter(is_of_kind).map(|line| format!("{line}\n")).collect();
    let mut differences = String::new();
    for (expected, found) in expected.lines().zip(rows.lines()).filter(|(a, b)| a != b) {
        writeln!(differences, "- {expected}\n+ {found}").unwrap();
    }
    assert!(differences.is_empty() && expected.len() == rows.len(), "{kind} is not as recorded:\n{differences}");
}

fn planned(rows: &mut String, name: &str, executable: &Executable) {
    writeln!(rows, "{name} {} {}", executable.arena_bytes(), executable.plan_hash()).unwrap();
}

/// Appends the row of a run: its name, its arena, and the results of its first steps.
fn stepped(rows: &mut String, name: &str, report: &Report, outcome: &common::Outcome) {
    let bits = |bits: &[u32]| bits.iter().map(|bits| format!("{bits:08x}")).collect::<Vec<_>>().join(",");
    let (losses, norms) = (bits(&outcome.losses), bits(&outcome.gradient_norms));
    writeln!(rows, "{name} {} {} {losses} {norms}", report.arena_bytes, report.plan_hash).unwrap();
}

fn plan<M: Model>(
    rows: &mut String,
    name: &str,
    options: &TrainOptions,
    build: impl Fn(VarBuilder) -> gapless::Result<M>,
) {
    planned(rows, name, &gapless::plan::step(build, options, 0).unwrap());
}

#[test]
fn presets() {
    let mut rows = String::new();
    let options =
        TrainOptions { step: StepOptions { batch: 8, sequence: 1024, ..on_cpu().step }, threads: 2, ..on_cpu() };
    for (name, layers, heads, width) in
        [("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024), ("gpt2-large", 36, 20, 1280), ("gpt2-xl", 48, 25, 1600)]
    {
        let config = GptConfig { layers, heads, width, sequence: 1024, ..GptConfig::default() };
        plan(&mut rows, &format!("preset {name}"), &options, |vb| Gpt::new(&config, vb));
        let cuda = TrainOptions {
            step: StepOptions { precision: Precision::Bf16, ..options.step.clone() },
            device: DeviceChoice::Cuda(0),
            ..options.clone()
        };
        plan(&mut rows, &format!("preset {name} cuda bf16"), &cuda, |vb| Gpt::new(&config, vb));
    }
    plan(&mut rows, "preset llama3-8b", &options, |vb| Llama::new(&LlamaConfig::default(), vb));
    plan(&mut rows, "preset mixtral8x7b", &options, |vb| Moe::new(&MoeConfig::default(), vb));
    plan(&mut rows, "preset qwen-moe", &options, |vb| Moe::new(&MoeConfig::qwen1_5_a2_7b(), vb));
    expect("preset", &rows);
}

/// The model and batch of `train_gpt`.
#[test]
fn default_run() {
    let mut rows = String::new();
    let config = GptConfig { vocabulary: 4096, sequence: 256, layers: 6, heads: 6, width: 384, ..GptConfig::default() };
    let options =
        TrainOptions { step: StepOptions { batch: 8, sequence: 256, ..on_cpu().step }, threads: 2, ..on_cpu() };
    let mut trainer = Trainer::new(|vb| Gpt::new(&config, vb), options.clone()).unwrap();
    let run = TinyRun { kind: Kind::Gpt, options };
    let outcome = run.go_on(&mut trainer, 2);
    stepped(&mut rows, "default train_gpt", &trainer.report(), &outcome);
    expect("default", &rows);
}

/// Appends the rows of every rank of a mesh.
fn on_ranks(rows: &mut String, name: &str, run: &TinyRun) {
    let ranks = run.on_ranks(|mut trainer| {
        let outcome = run.go_on(&mut trainer, 2);
        (trainer.report(), outcome)
    });
    for (rank, (report, outcome)) in ranks.iter().enumerate() {
        stepped(rows, &format!("{name} rank {rank}"), report, outcome);
    }
}

#[test]
fn schedules() {
    let mut rows = String::new();
    let measured = ["zb-searched", "zbv-searched"].iter().filter_map(|name| parallel::by_name(name).ok());
    for schedule in parallel::all().into_iter().chain(measured) {
        let name = schedule.name();
        let shape = |chunks| Shape { ranks: 4, chunks, micro_batches: 8 };
        let Some(chunks) = [2, 1].into_iter().find(|&chunks| schedule.actions(&shape(chunks)).is_ok()) else {
            continue;
        };
        let pipeline = Pipeline { schedule: schedule.into(), chunks: chunks as usize, ..Pipeline::default() };
        let options = options();
        let options = TrainOptions {
            step: StepOptions { micro_batches: 8, mesh: Mesh::pipeline(4), pipeline, ..options.step },
            threads: 1,
            ..options
        };
        on_ranks(&mut rows, &format!("schedule {name}"), &TinyRun { kind: Kind::Gpt, options });
    }
    expect("schedule", &rows);
}

#[test]
fn mixtures() {
    let mut rows = String::new();
    for kind in Kind::MOE.into_iter().chain([Kind::Llama]) {
        let run = TinyRun { kind, ..run() };
        let mut trainer = run.trainer();
        let outcome = run.go_on(&mut trainer, 2);
        stepped(&mut rows, &format!("mixture {kind:?}"), &trainer.report(), &outcome);
    }
    for style in [MoeStyle::Mixtral, MoeStyle::DeepSeek] {
        let mesh = Mesh { expert: 2, ..Mesh::default() };
        let options = TrainOptions { step: StepOptions { mesh, ..options().step }, threads: 1, ..options() };
        on_ranks(&mut rows, &format!("mixture expert-ranks {style:?}"), &TinyRun { kind: Kind::Moe(style), options });
    }
    let options = TrainOptions {
        step: StepOptions { mesh: Mesh { data: 2, ..Mesh::default() }, ..options().step },
        threads: 1,
        ..options()
    };
    on_ranks(&mut rows, "mixture data-ranks Gpt", &TinyRun { kind: Kind::Gpt, options });
    expect("mixture", &rows);
}

#[test]
fn budgets() {
    let mut rows = String::new();
    let whole = TinyRun {
        options: TrainOptions { step: StepOptions { micro_batches: 2, ..options().step }, ..options() },
        ..run()
    };
    let all = whole.trainer().report().arena_bytes;
    for percent in [95, 90, 85] {
        let budget = Some(all * percent / 100);
        let run = TinyRun {
            options: TrainOptions {
                step: StepOptions {
                    memory: MemoryOptions { budget, ..whole.options.step.memory.clone() },
                    ..whole.options.step.clone()
                },
                ..whole.options.clone()
            },
            ..whole.clone()
        };
        let mut trainer = run.trainer();
        let outcome = run.go_on(&mut trainer, 2);
        stepped(&mut rows, &format!("budget {percent} %"), &trainer.report(), &outcome);
    }
    expect("budget", &rows);
}
