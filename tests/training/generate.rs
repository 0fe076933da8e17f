//! Generation with caches gives the same bits and the same text as forward passes over whole windows.

use std::ops::ControlFlow;

use gapless::models::MoeStyle;
use gapless::{DType, GenerateOptions, Generation, NextToken, Sampling, Trainer};

use crate::common::{Kind, TinyRun};

/// Models in which the expert of a token does not depend on other tokens.
const KINDS: [Kind; 7] = [
    Kind::Gpt,
    Kind::Llama,
    Kind::Sinks,
    Kind::Moe(MoeStyle::Mixtral),
    Kind::Moe(MoeStyle::Qwen),
    Kind::Moe(MoeStyle::DeepSeek),
    Kind::Latent,
];

fn run(kind: Kind, generation: Option<Generation>) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.step.generation = generation;
    run
}

fn go_on(_: &NextToken<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Prompts of one token, of less than a chunk, of several chunks, and of more than the window.
fn prompts() -> [Vec<u32>; 4] {
    [1, 3, 13, 30].map(|length| (0..length).map(|i| (i * i * 7 + length) % crate::common::VOCABULARY).collect())
}

fn texts(trainer: &mut Trainer, options: &GenerateOptions) -> Vec<Vec<u32>> {
    let prompts = prompts();
    trainer.generate(&prompts.each_ref().map(Vec::as_slice), options, go_on).unwrap()
}

/// Prompts are generated together. The logits of every token are bit-identical to those of a forward pass over the
/// whole window.
#[test]
fn logits_have_the_bits_of_the_whole_window() {
    let in_f32 = KINDS.into_iter().flat_map(|kind| [(kind, 1, 5, DType::F32), (kind, 2, 8, DType::F32)]);
    let in_bf16 = [Kind::Gpt, Kind::Llama, Kind::Sinks].map(|kind| (kind, 2, 5, DType::BF16));
    for (kind, threads, chunk, dtype) in in_f32.chain(in_bf16) {
        let mut run = run(kind, Some(Generation { batch: 3, window: None, chunk }));
        (run.options.threads, run.options.step.precision) = (threads, dtype.try_into().unwrap());
        run.options.poison = true;
        let mut trainer = run.trainer();
        // After a step, no parameter has its initial value any more; some initial values are zero.
        run.step(&mut trainer);
        let prompts: Vec<Vec<u32>> = prompts().into_iter().take(3).collect();
        let mut sequences = prompts.clone();
        let mut found: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
        let record = |next: &NextToken<'_>| {
            let bits = next.logits.iter().map(|x| x.to_bits()).collect();
            found.push((sequences[next.sequence].clone(), bits));
            sequences[next.sequence].push(next.token);
            ControlFlow::Continue(())
        };
        let views: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        trainer.generate(&views, &GenerateOptions::greedy(11), record).unwrap();
        assert_eq!(found.len(), 33);
        for (context, bits) in found {
            let mut window = context.clone();
            window.resize(run.options.step.sequence, 0);
            let logits = trainer.logits(&window).unwrap().get(0).unwrap().get(context.len() - 1).unwrap();
            let expected: Vec<u32> = logits.to_vec1::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, expected, "{kind:?}, {threads} threads, after {} tokens", context.len());
        }
    }
}

/// Latent attention caches the latent and the rotated key of each token, which all heads share. Other kinds of
/// attention cache keys and values.
#[test]
fn caches_hold_what_heads_share() {
    let cached = |kind| {
        let trainer = run(kind, Some(Generation { batch: 3, window: Some(16), chunk: 4 })).trainer();
        let mut plan = Vec::new();
        trainer.write_plan(&mut plan).unwrap();
        // The columns are the buffer's number and name, the start and end of its lifetime, and its bytes.
        let rows: Vec<Vec<String>> =
            String::from_utf8(plan).unwrap().lines().map(|l| l.split(',').map(str::to_owned).collect()).collect();
        let cache = |row: &Vec<String>| {
            let name = row[0].split_once(' ')?.1.to_owned();
            let is_cache = ["/keys", "/values", "/latent", "/rotated_keys"].iter().any(|end| name.ends_with(end));
            is_cache.then(|| (name, row[3].parse::<u64>().unwrap()))
        };
        rows.iter().filter_map(cache).collect::<std::collections::BTreeMap<_, _>>()
    };
    let bytes = |size: usize| (3 * 16 * size * 4) as u64;
    let (rank, rotated) = crate::common::LATENT;
    let caches = cached(Kind::Latent);
    assert_eq!(caches.len(), 4);
    for (name, found) in caches {
        let of_a_token = if name.ends_with("/latent") { rank } else { rotated };
        assert_eq!(found, bytes(of_a_token), "{name}");
    }
    let heads_of_llama = bytes(2 * 12);
    assert!(cached(Kind::Llama).values().all(|&found| found == heads_of_llama));
}

/// One seed gives the same text in all of these cases: with and without caches, alone and together with other
/// sequences, with and without a training step in the same arena. The window is filled several times.
#[test]
fn one_seed_is_one_text() {
    let sampling = Sampling { temperature: 1.5, top_k: 0, top_p: 0.95, repetition_penalty: 1.2, ..Sampling::default() };
    let options = GenerateOptions { tokens: 70, sampling, ..GenerateOptions::default() };
    for kind in KINDS {
        let whole = texts(&mut run(kind, None).trainer(), &options);
        for generation in [
            Generation::default(),
            Generation { batch: 4, window: None, chunk: 7 },
            Generation { batch: 3, window: Some(24), chunk: 1 },
        ] {
            assert_eq!(texts(&mut run(kind, Some(generation)).trainer(), &options), whole, "{kind:?}, {generation:?}");
        }
        assert!(whole.iter().all(|text| text.len() == 70));
    }
    let other = GenerateOptions { sampling: Sampling { seed: 1, ..sampling }, ..options.clone() };
    let mut trainer = run(Kind::Gpt, Some(Generation::default())).trainer();
    assert_ne!(texts(&mut trainer, &other), texts(&mut trainer, &options));
}

/// Text is generated between steps, in memory that the steps also use. This does not change the results of the steps,
/// and the text is generated with the current weights.
#[test]
fn training_goes_on_as_if_nothing_was_generated() {
    for kind in [Kind::Gpt, Kind::Moe(MoeStyle::Mixtral)] {
        let plain = run(kind, None);
        let expected = plain.steps(4);
        let with = run(kind, Some(Generation { batch: 2, window: Some(16), chunk: 4 }));
        let mut trainer = with.trainer();
        let before = texts(&mut trainer, &GenerateOptions::greedy(20));
        let mut losses = Vec::new();
        for _ in 0..4 {
            losses.push(with.step(&mut trainer).loss.to_bits());
            texts(&mut trainer, &GenerateOptions::greedy(20));
        }
        assert_eq!(losses, expected.losses, "{kind:?}");
        assert_eq!(crate::common::parameters(&trainer), expected.parameters, "{kind:?}");
        assert_ne!(texts(&mut trainer, &GenerateOptions::greedy(20)), before, "{kind:?} has learned nothing");
    }
}

/// A model for inference has no gradients and no states, and generates the same text.
#[test]
fn inference_needs_no_training() {
    use gapless::models::{Llama, LlamaConfig};

    let config =
        LlamaConfig { vocabulary: 50, layers: 2, heads: 4, kv_heads: 2, width: 48, hidden: 80, ..Default::default() };
    let options = run(Kind::Llama, Some(Generation { batch: 2, window: None, chunk: 8 })).options;
    let mut trained = Trainer::new(|vb| Llama::new(&config, vb), options.clone()).unwrap();
    let mut inference =
        Trainer::builder(|vb| Llama::new(&config, vb), options.clone()).for_inference().build().unwrap();
    assert_eq!(texts(&mut inference, &GenerateOptions::greedy(30)), texts(&mut trained, &GenerateOptions::greedy(30)));
    assert_eq!(inference.report().parameters, config.parameters());
    assert!(inference.tensor("exp_avg/lm_head.weight").is_err() && trained.tensor("exp_avg/lm_head.weight").is_ok());
    assert!(inference.report().arena_bytes < trained.report().arena_bytes);
    let (tokens, targets) = run(Kind::Llama, None).batch(0);
    let part = options.step.evaluation_batch() * options.step.sequence;
    assert_eq!(
        inference.evaluate(&tokens[..part], &targets[..part]).unwrap(),
        trained.evaluate(&tokens[..part], &targets[..part]).unwrap()
    );
    for error in [
        inference.step(&tokens, &targets).map(|_| ()).unwrap_err(),
        inference.logits(&tokens[..24]).map(|_| ()).unwrap_err(),
        inference.save(&std::env::temp_dir(), serde_json::Value::Null).map(|_| ()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("inference"), "{error}");
    }
}

/// A sequence ends when it generates a stop token, or when the callback breaks. The stop token is part of the result.
/// The other sequences continue.
#[test]
fn sequences_end_one_by_one() {
    let mut trainer = run(Kind::Gpt, Some(Generation { batch: 3, window: None, chunk: 4 })).trainer();
    let options = GenerateOptions { tokens: 12, ..GenerateOptions::default() };
    let all = texts(&mut trainer, &options);
    let stop = all[2][5];
    let stopped = texts(&mut trainer, &GenerateOptions { stop: vec![stop], ..options.clone() });
    for (all, stopped) in all.iter().zip(&stopped) {
        let end = all.iter().position(|&id| id == stop).map_or(12, |at| at + 1);
        assert_eq!(*stopped, all[..end]);
    }
    let prompts = prompts();
    let prompts = prompts.each_ref().map(Vec::as_slice);
    let third =
        |next: &NextToken<'_>| if next.sequence == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let ended = trainer.generate(&prompts, &options, third).unwrap();
    assert_eq!(ended[1], all[1][..1]);
    assert_eq!([&ended[0], &ended[2], &ended[3]], [&all[0], &all[2], &all[3]]);
    assert!(trainer.generate(&[], &options, go_on).unwrap().is_empty());
    assert_eq!(texts(&mut trainer, &GenerateOptions { tokens: 0, ..options }), vec![vec![0; 0]; 4]);
}

/// Some tokens are banned. A slow implementation of the rules computes the allowed tokens. Every generated token is the
/// most likely of the allowed tokens.
#[test]
fn tokens_that_may_not_come_do_not() {
    let mut trainer = run(Kind::Gpt, Some(Generation { batch: 2, window: Some(16), chunk: 4 })).trainer();
    let free = texts(&mut trainer, &GenerateOptions::greedy(12));
    let (first, second) = (free[0][0], free[0][1]);
    let greedy = GenerateOptions::greedy(40);
    let ngram = |no_repeat_ngram_size| Sampling { no_repeat_ngram_size, ..Sampling::greedy() };
    let prompts = prompts();
    for options in [
        GenerateOptions { banned: vec![vec![first]], ..greedy.clone() },
        GenerateOptions { banned: vec![vec![first, second], vec![first, first, first], vec![]], ..greedy.clone() },
        GenerateOptions { banned_first: vec![first, 1_000_000], ..greedy.clone() },
        GenerateOptions { min_tokens: 7, stop: vec![first, second], ..greedy.clone() },
        GenerateOptions { sampling: ngram(1), ..GenerateOptions::greedy(20) },
        GenerateOptions { sampling: ngram(2), ..greedy.clone() },
        GenerateOptions { sampling: ngram(3), ..greedy },
    ] {
        let mut texts: Vec<Vec<u32>> = prompts.iter().map(Vec::clone).collect();
        let check = |next: &NextToken<'_>| {
            let text = &mut texts[next.sequence];
            let prompt = prompts[next.sequence].len();
            let may_come = |&id: &u32| {
                let with: Vec<u32> = text.iter().copied().chain([id]).collect();
                let size = options.sampling.no_repeat_ngram_size;
                let repeats = size > 0
                    && with.len() > size
                    && (0..with.len() - size).any(|at| with[at..at + size] == with[with.len() - size..]);
                let is_early = text.len() - prompt < options.min_tokens && options.stop.contains(&id);
                let is_first = text.len() == prompt && options.banned_first.contains(&id);
                let is_banned = options.banned.iter().any(|banned| !banned.is_empty() && with.ends_with(banned));
                !repeats && !is_early && !is_first && !is_banned
            };
            let ids = (0..next.logits.len() as u32).filter(may_come);
            // Among equals, the first.
            let best = ids.rev().max_by(|&a, &b| next.logits[a as usize].total_cmp(&next.logits[b as usize]));
            assert_eq!(Some(next.token), best, "{options:?}, {text:?}");
            text.push(next.token);
            ControlFlow::Continue(())
        };
        let prompts = prompts.each_ref().map(Vec::as_slice);
        let added = trainer.generate(&prompts, &options, check).unwrap();
        let ends = |text: &Vec<u32>| text.len() == options.tokens || options.stop.contains(text.last().unwrap());
        assert!(added.iter().all(|text| ends(text) && text.len() > options.min_tokens), "{options:?}");
    }
    let all = GenerateOptions { banned: (0..50).map(|id| vec![id]).collect(), ..GenerateOptions::greedy(1) };
    let prompts = prompts.each_ref().map(Vec::as_slice);
    assert!(trainer.generate(&prompts, &all, go_on).unwrap_err().to_string().contains("suppress"));
}

#[test]
fn mistakes_are_refused() {
    let mut trainer = run(Kind::Gpt, Some(Generation::default())).trainer();
    let mut refused = |prompt: &[u32], sampling| {
        let options = GenerateOptions { sampling, ..GenerateOptions::default() };
        trainer.generate(&[prompt], &options, go_on).unwrap_err().to_string()
    };
    assert!(refused(&[], Sampling::default()).contains("prompt"));
    assert!(refused(&[50], Sampling::default()).contains("token 50"));
    assert!(refused(&[1], Sampling { top_p: 0.0, ..Sampling::default() }).contains("top_p"));
    // Invalid options: more positions than the table has, and sizes of zero.
    let fails = |generation| run(Kind::Gpt, Some(generation)).try_trainer().unwrap_err();
    assert!(fails(Generation { window: Some(33), ..Generation::default() }).to_string().contains("positions for 32"));
    let small = Generation { window: Some(33), chunk: 8, ..Generation::default() };
    assert!(fails(small).to_string().contains("32 positions"));
    assert!(fails(Generation { chunk: 0, ..Generation::default() }).refused().is_some());
}
