//! Compares the plans of every kind of training step with commonly used allocators.

use gapless::allocators::{Comparison, Kind, Requests, compare};
use gapless::engine::compile::Executable;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::{StepOptions, TrainOptions};
use gapless_testing::in_turn;

use crate::common::on_cpu;

fn programs() -> Vec<(String, Executable)> {
    let mut programs = Vec::new();
    for (turn, micro_batches) in [1, 2, 8].into_iter().enumerate() {
        for &keep_gradients in in_turn(&[false, true], turn) {
            let options = TrainOptions {
                step: StepOptions { batch: 8, sequence: 128, micro_batches, keep_gradients, ..on_cpu().step },
                ..on_cpu()
            };
            for dropout in [0.0, 0.1] {
                let gpt = GptConfig {
                    vocabulary: 5000,
                    sequence: 128,
                    layers: 4,
                    heads: 4,
                    width: 256,
                    dropout,
                    ..GptConfig::default()
                };
                let name = format!("gpt, {micro_batches} micro-batches, dropout {dropout}, keep {keep_gradients}");
                programs.push((name, gapless::plan::step(|vb| Gpt::new(&gpt, vb), &options, 0).unwrap()));
            }
            let llama = LlamaConfig {
                vocabulary: 5000,
                layers: 4,
                heads: 8,
                kv_heads: 2,
                width: 256,
                hidden: 700,
                ..LlamaConfig::default()
            };
            let name = format!("llama, {micro_batches} micro-batches, keep {keep_gradients}");
            programs.push((name, gapless::plan::step(|vb| Llama::new(&llama, vb), &options, 0).unwrap()));
            for style in [MoeStyle::Mixtral, MoeStyle::Switch, MoeStyle::DeepSeek, MoeStyle::ExpertChoice] {
                let moe = MoeConfig::small(style, 5000);
                let name = format!("{style:?}, {micro_batches} micro-batches, keep {keep_gradients}");
                programs.push((name, gapless::plan::step(|vb| Moe::new(&moe, vb), &options, 0).unwrap()));
            }
        }
    }
    programs
}

#[test]
fn every_program_is_planned_at_the_bound_and_nobody_reserves_less() {
    for (name, program) in programs() {
        assert_eq!(program.solution().height, program.solution().lower_bound, "{name}");
        let compared = compare(program.problem(), &Requests::new(program.problem()), &Comparison::default());
        let reserved = |kind: Kind| {
            let entry = compared.allocators.iter().find(|entry| entry.kind == kind).expect("all kinds were asked for");
            entry.outcome.as_ref().expect("80 GiB hold it").peak_reserved()
        };
        let ours = reserved(Kind::GAPLESS);
        assert_eq!(ours, reserved(Kind::IDEAL), "{name}: fragmentation");
        for kind in Kind::all() {
            assert!(reserved(kind) >= ours, "{name}: {kind:?} reserves less");
        }
    }
}
