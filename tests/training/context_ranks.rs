//! Sequences whose tokens are divided among ranks give the results of one rank.

use gapless::engine::Numbers;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, MoeStyle, Traits};
use gapless::nn::Preference;
use gapless::{Batch, Mesh, Precision, StepOptions, Trainer};
use gapless_testing::{every_other, in_turn};

use crate::common::{Kind, TinyRun};
use crate::tensor_ranks::{BF16, case as case_on, checkpoints_go_around, close, lora, options, run, step_of, within};

const STEPS: u64 = 3;

fn mesh(context: usize) -> Mesh {
    Mesh { context, ..Mesh::default() }
}

fn case(kind: Kind, mesh: Mesh, sequence_parallel: bool) -> TinyRun {
    let mut run = case_on(kind, mesh, sequence_parallel);
    // Each rank's gradients are summands of the whole ones. The first moments show the sums.
    run.options.step.keep_gradients = false;
    run
}

#[test]
fn context_ranks_train_as_one_rank_does() {
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Latent, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let alone = run(&case(kind, mesh(1), false), STEPS);
        let and = |mesh: Mesh, context| Mesh { context, ..mesh };
        let one = Mesh::default();
        let cases = [
            (mesh(2), false),
            (mesh(4), false),
            (and(Mesh { tensor: 2, ..one }, 2), true),
            (and(Mesh { tensor: 2, ..one }, 2), false),
            (and(Mesh { data: 2, ..one }, 2), false),
            (and(Mesh { pipeline: 2, ..one }, 2), false),
            (and(Mesh { shard: 2, ..one }, 2), false),
        ];
        for &(mesh, sequence_parallel) in in_turn(&cases, turn) {
            let what = format!("{kind:?} on {mesh:?}, sequence parallel: {sequence_parallel}");
            let ranks = run(&case(kind, mesh, sequence_parallel), STEPS);
            let has_heads = |name: &String| name.ends_with(".o_proj.weight") || name.ends_with(".attn.c_proj.weight");
            assert!(mesh.tensor == 1 || ranks.split.iter().any(has_heads), "{what}: {:?}", ranks.split);
            close(&ranks, &alone, &what);
        }
    }
}

/// Each rank routes its own tokens and computes their experts, also if expert ranks share these. Losses, norms, loads and
/// the gradient of each expert are those of one rank, with every kind of routing, and with packed documents.
#[test]
fn context_ranks_compute_the_experts_of_their_own_tokens() {
    let meshes = [
        (mesh(2), false),
        (Mesh { expert: 2, ..mesh(2) }, false),
        (mesh(4), false),
        (Mesh { expert: 2, data: 2, ..mesh(2) }, false),
        (Mesh { tensor: 2, expert: 2, ..mesh(2) }, true),
        (Mesh { shard: 2, expert: 2, ..mesh(2) }, false),
    ];
    for (turn, kind) in Kind::MOE.into_iter().enumerate() {
        for (index, (mesh, sequence_parallel)) in every_other(&meshes, turn).into_iter().enumerate() {
            let documents = (turn + index).is_multiple_of(2);
            let on = |mesh: Mesh, sequence_parallel| {
                let mut case = case(kind, mesh, sequence_parallel);
                case.options.step.documents = documents;
                run(&case, STEPS)
            };
            let what = format!("{kind:?} on {mesh:?}, documents: {documents}");
            close(&on(mesh, sequence_parallel), &on(Mesh::default(), false), &what);
        }
    }
}

/// Packed documents begin and end inside, at and across the borders of chunks.
#[test]
fn other_settings_combine_with_context_ranks() {
    type Setting = (&'static str, (f64, f64), fn(&mut StepOptions));
    let exact = (1e-5, 1e-3);
    let settings: [Setting; 5] = [
        ("packed documents", exact, |step| step.documents = true),
        ("pairs of answers", exact, |step| (step.documents, step.preference) = (true, Some(Preference::default()))),
        ("adapters", exact, |step| lora(Kind::Llama, step)),
        ("mixed precision", (4.0 * BF16, f64::INFINITY), |step| step.precision = Precision::Bf16),
        ("recomputation of all layers", exact, |step| step.memory.recompute = "layers".parse().unwrap()),
    ];
    for (what, tolerance, set) in settings {
        let on = |mesh: Mesh, sequence_parallel: bool| {
            let mut case = case(Kind::Llama, mesh, sequence_parallel);
            set(&mut case.options.step);
            run(&case, STEPS)
        };
        let alone = on(mesh(1), false);
        for (mesh, sequence_parallel) in [(mesh(2), false), (mesh(4), false), (Mesh { tensor: 2, ..mesh(2) }, true)] {
            within(&on(mesh, sequence_parallel), &alone, tolerance, &format!("{what} on {mesh:?}"));
        }
    }
}

/// Windows of attention begin inside, at and across the borders of chunks, and every rank adds sinks once.
#[test]
fn windows_and_sinks_combine_with_context_ranks() {
    let tokens: Vec<u32> = (0..96).map(|i| i * i * 7 % 50).collect();
    for (sliding_window, sinks) in [(Some(5), false), (Some(9), true), (None, true)] {
        let traits = Box::new(Traits { sinks, ..Traits::default() });
        let llama = LlamaConfig {
            vocabulary: 50,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            width: 48,
            hidden: 80,
            ..LlamaConfig::default()
        };
        let config = LlamaConfig { sliding_window, traits, ..llama };
        let on = |mesh| {
            let mut options = options(mesh, false, 4, 24);
            options.step.keep_gradients = false;
            step_of(|vb| Llama::new(&config, vb), &options, (&tokens, 2))
        };
        let alone = on(mesh(1));
        for mesh in [mesh(2), mesh(4), Mesh { tensor: 2, ..mesh(2) }] {
            close(&on(mesh), &alone, &format!("a window of {sliding_window:?}, sinks: {sinks}, on {mesh:?}"));
        }
    }
}

/// The losses of an evaluation and the log-likelihoods of answers are those of one rank.
#[test]
fn context_ranks_evaluate_as_one_rank_does() {
    for (kind, pairs) in [(Kind::Gpt, false), (Kind::Moe(MoeStyle::Switch), false), (Kind::Llama, true)] {
        let on = |mesh: Mesh| {
            let mut case = case(kind, mesh, false);
            if pairs {
                (case.options.step.documents, case.options.step.preference) = (true, Some(Preference::default()));
            }
            let evaluate = |mut trainer: Trainer| {
                let size = trainer.options().step.evaluation_batch() * trainer.options().step.sequence;
                let (tokens, targets) = case.batch(3);
                let starts = vec![0; if pairs { size } else { 0 }];
                let batch = Batch { tokens: &tokens[..size], targets: &targets[..size], starts: &starts };
                match pairs {
                    true => trainer.log_likelihoods(&batch).unwrap(),
                    false => vec![trainer.evaluate_batch(&batch).unwrap()],
                }
            };
            if mesh.ranks().unwrap() == 1 { vec![evaluate(case.trainer())] } else { case.on_ranks(evaluate) }
        };
        let alone = on(mesh(1)).swap_remove(0);
        for mesh in [mesh(2), mesh(4), Mesh { tensor: 2, ..mesh(2) }] {
            for values in on(mesh) {
                let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
                assert!(
                    values.len() == alone.len() && values.iter().zip(&alone).all(is_close),
                    "{kind:?} on {mesh:?}: {values:?} instead of {alone:?}"
                );
            }
        }
    }
}

#[test]
fn checkpoints_go_from_and_to_context_ranks() {
    let meshes = [mesh(1), mesh(2), mesh(4), Mesh { tensor: 2, ..mesh(2) }, Mesh { shard: 2, ..mesh(2) }];
    checkpoints_go_around(meshes.len(), |_, mesh| case(Kind::Llama, meshes[mesh], false));
}

#[test]
fn sequences_that_do_not_divide_are_refused() {
    let mut odd = case(Kind::Llama, mesh(2), false);
    odd.options.step.sequence = 23;
    let error = odd.options.step.check().unwrap_err().to_string();
    assert!(error.contains("mesh.context") && error.contains("twice the context ranks"), "{error}");
}

/// The work of the fullest rank, in scores, is close to the mean: in sequences of one text exactly the mean.
#[test]
fn context_ranks_have_equal_work() {
    for (turn, (sequence, ranks)) in [(4096, 2), (8192, 4), (8192, 8), (32_768, 8)].into_iter().enumerate() {
        let mut all = 0.0;
        for draw in 0..10 {
            let numbers = Numbers::from_seed(10 * turn as u64 + draw);
            // For each token, the first token of its document.
            let mut starts: Vec<u32> = Vec::new();
            for document in 0.. {
                let length = 2f64.powf(5.0 + 7.5 * f64::from(numbers.uniform(document))) as usize;
                let start = starts.len();
                starts.extend(vec![start as u32; length.min(sequence - start)]);
                if starts.len() == sequence {
                    break;
                }
            }
            let fullest = |documents: bool, starts: &[u32]| {
                let step = StepOptions { sequence, documents, mesh: mesh(ranks), ..StepOptions::default() };
                step.context_balance(starts).unwrap()
            };
            let of_documents = fullest(true, &starts);
            assert!(of_documents <= 1.15, "{of_documents} in {sequence} tokens on {ranks} ranks");
            all += of_documents;
            assert_eq!(fullest(false, &vec![0; sequence]), 1.0);
        }
        assert!(all / 10.0 <= 1.1, "{} on the average of {sequence} tokens on {ranks} ranks", all / 10.0);
    }
}

/// A vocabulary and a sequence whose parts are of different sizes on the ranks that share both.
#[test]
fn odd_vocabularies_are_divided_by_tensor_and_context_ranks() {
    let config = GptConfig { vocabulary: 19, sequence: 8, layers: 2, heads: 2, width: 16, ..GptConfig::default() };
    let tokens: Vec<u32> = (0..16).map(|i| i * i * 7 % 19).collect();
    let on = |mesh: Mesh, sequence_parallel| {
        let mut options = options(mesh, sequence_parallel, 2, 8);
        options.step.keep_gradients = false;
        step_of(|vb| Gpt::new(&config, vb), &options, (&tokens, 2))
    };
    let alone = on(mesh(1), false);
    for sequence_parallel in [false, true] {
        close(&on(Mesh { tensor: 2, ..mesh(2) }, sequence_parallel), &alone, "odd");
    }
}
