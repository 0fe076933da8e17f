//! Decodes a Llama of 100 million parameters in f32, with gapless and with candle-transformers. Both use the same
//! weights, and are measured in turn in one process.
//!
//! `cargo run --release -p gapless-bench-generate --features candle-transformers` prints the following for 1 and 8
//! sequences:
//! - the tokens per second of gapless and of candle-transformers, and their ratio;
//! - the fraction of the memory bandwidth that gapless reaches, assuming that each token reads every weight once; the
//!   bandwidth is measured by this program;
//! - the speed of reading prompts, compared with a forward pass for evaluation;
//! - the ratio of the CPU times of all threads, for machines that also do other work.
//!
//! `RAYON_NUM_THREADS` limits the threads of gapless and of candle.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama as CandleLlama};
use cpu_time::ProcessTime;
use gapless::models::{Llama, LlamaConfig};
use gapless::{DeviceChoice, GenerateOptions, Generation, NextToken, StepOptions, TrainOptions, Trainer};
use rayon::prelude::*;

const PROMPT: usize = 128;
const ADDED: usize = 17;
const ROUNDS: usize = 3;
const SEQUENCE: usize = 512;

/// The start of a measurement: wall-clock time and CPU time.
#[derive(Clone, Copy)]
struct Begun {
    wall: Instant,
    processors: ProcessTime,
}

impl Begun {
    fn now() -> Self {
        Self { wall: Instant::now(), processors: ProcessTime::now() }
    }

    /// Returns the seconds since the start: wall-clock time, and CPU time of all threads.
    fn seconds(self) -> [f64; 2] {
        [self.wall.elapsed().as_secs_f64(), self.processors.elapsed().as_secs_f64()]
    }
}

fn main() -> Result<()> {
    let config = LlamaConfig {
        vocabulary: 32_000,
        layers: 12,
        heads: 12,
        kv_heads: 4,
        width: 768,
        hidden: 2048,
        tied: true,
        ..LlamaConfig::default()
    };
    let weight_bytes = 4 * config.parameters();
    println!("{} parameters in f32, a prompt of {PROMPT} tokens, {} new tokens", config.parameters(), ADDED - 1);
    for batch in [1, 8] {
        let mut ours = ours(&config, batch)?;
        let theirs = theirs(&config, &ours)?;
        let prompts: Vec<Vec<u32>> =
            (0..batch as u32).map(|b| (0..PROMPT as u32).map(|i| (i * i * 7 + b) % 31_999).collect()).collect();
        let (mut rates, mut processor_ratios, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (tokens, our_time) = generate(&mut ours, &prompts)?;
            let (their_tokens, their_time) = generate_with_candle(&theirs, &prompts)?;
            let bandwidth = bandwidth(weight_bytes as usize);
            ensure!(tokens == their_tokens, "tokens differ: {tokens:?}, candle-transformers {their_tokens:?}");
            // The first round is a warm-up.
            if round > 0 {
                let rate = |time: [f64; 2]| (batch * (ADDED - 1)) as f64 / time[0];
                rates.push((rate(our_time), rate(their_time)));
                processor_ratios.push(their_time[1] / our_time[1]);
                shares.push(rate(our_time) / batch as f64 * weight_bytes as f64 / bandwidth);
            }
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        println!(
            "batch {batch}: {:.1} tokens/s, candle-transformers {:.1}, ratio {:.2} (of CPU times {:.2}); {:.2} of the rate that \
             the bandwidth allows",
            median(rates.iter().map(|x| x.0).collect()),
            median(rates.iter().map(|x| x.1).collect()),
            median(rates.iter().map(|x| x.0 / x.1).collect()),
            median(processor_ratios),
            median(shares),
        );
    }
    prefill(&config)
}

fn options(batch: usize) -> TrainOptions {
    let generation = Some(Generation { batch, window: Some(PROMPT + ADDED), ..Generation::default() });
    TrainOptions {
        step: StepOptions { batch: 1, sequence: SEQUENCE, generation, ..StepOptions::default() },
        device: DeviceChoice::Cpu,
        threads: rayon::current_num_threads(),
        ..TrainOptions::default()
    }
}

fn ours(config: &LlamaConfig, batch: usize) -> Result<Trainer> {
    Ok(Trainer::builder(|vb| Llama::new(config, vb), options(batch)).for_inference().build()?)
}

/// Generates tokens greedily. Returns the tokens, and the time of all tokens except the first, which is computed
/// together with the prompts.
fn generate(trainer: &mut Trainer, prompts: &[Vec<u32>]) -> Result<(Vec<Vec<u32>>, [f64; 2])> {
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let (mut first, mut count) = (Begun::now(), 0);
    let each = |_: &NextToken<'_>| {
        count += 1;
        if count == prompts.len() {
            first = Begun::now();
        }
        ControlFlow::Continue(())
    };
    let tokens = trainer.generate(&prompts, &GenerateOptions::greedy(ADDED), each)?;
    Ok((tokens, first.seconds()))
}

/// Creates candle-transformers' model with the same weights.
fn theirs(config: &LlamaConfig, ours: &Trainer) -> Result<(CandleLlama, Config)> {
    let their_config = Config {
        hidden_size: config.width,
        intermediate_size: config.hidden,
        vocab_size: config.vocabulary,
        num_hidden_layers: config.layers,
        num_attention_heads: config.heads,
        num_key_value_heads: config.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope_theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: SEQUENCE,
        tie_word_embeddings: true,
    };
    let mut tensors = HashMap::new();
    for name in ours.parameter_names() {
        tensors.insert(name.to_owned(), ours.tensor(name)?.force_contiguous()?);
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Ok((CandleLlama::load(vb, &their_config)?, their_config))
}

fn generate_with_candle(
    (model, config): &(CandleLlama, Config),
    prompts: &[Vec<u32>],
) -> Result<(Vec<Vec<u32>>, [f64; 2])> {
    let mut cache = Cache::new(true, DType::F32, config, &Device::Cpu)?;
    let mut next = |ids: Vec<u32>, position: usize| -> Result<Vec<u32>> {
        let ids = Tensor::from_vec(ids, (prompts.len(), ()), &Device::Cpu)?;
        Ok(model.forward(&ids, position, &mut cache)?.argmax(candle_core::D::Minus1)?.to_vec1()?)
    };
    let mut last = next(prompts.concat(), 0)?;
    let mut tokens: Vec<Vec<u32>> = last.iter().map(|&id| vec![id]).collect();
    let first = Begun::now();
    for added in 1..ADDED {
        last = next(last, PROMPT + added - 1)?;
        tokens.iter_mut().zip(&last).for_each(|(tokens, &id)| tokens.push(id));
    }
    Ok((tokens, first.seconds()))
}

/// Returns the bytes per second at which all threads together read `bytes` bytes, the best of three attempts.
fn bandwidth(bytes: usize) -> f64 {
    let data = vec![1u64; bytes / 8];
    let read = || {
        let begun = Instant::now();
        let sum: u64 = data.par_chunks(1 << 16).map(|part| part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))).sum();
        assert_eq!(std::hint::black_box(sum), data.len() as u64);
        begun.elapsed()
    };
    let best = (0..3).map(|_| read()).min().unwrap_or_default();
    bytes as f64 / best.as_secs_f64()
}

/// Compares the speed of reading a prompt of a whole window with that of evaluating as many tokens.
fn prefill(config: &LlamaConfig) -> Result<()> {
    let generation = Some(Generation { window: Some(SEQUENCE), ..Generation::default() });
    let mut trainer = Trainer::builder(
        |vb| Llama::new(config, vb),
        TrainOptions { step: StepOptions { generation, ..options(1).step }, ..options(1) },
    )
    .for_inference()
    .build()?;
    let ids: Vec<u32> = (0..=SEQUENCE as u32).map(|i| i * i % 31_999).collect();
    let mut ratios = Vec::new();
    let mut rates = [0.0f64; 2];
    for round in 0..=3 {
        let begun = Instant::now();
        trainer.evaluate(&ids[..SEQUENCE], &ids[1..])?;
        let forward = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        trainer.generate(&[&ids[..SEQUENCE]], &GenerateOptions::greedy(1), |_| ControlFlow::Continue(()))?;
        let reading = begun.elapsed().as_secs_f64();
        if round > 0 {
            ratios.push(forward / reading);
            rates = [rates[0].max(SEQUENCE as f64 / reading), rates[1].max(SEQUENCE as f64 / forward)];
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "prefill {:.0} tokens/s, forward with loss {:.0} tokens/s, ratio {:.2}",
        rates[0],
        rates[1],
        ratios[ratios.len() / 2]
    );
    Ok(())
}
