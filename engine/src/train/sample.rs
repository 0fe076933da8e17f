//! Text out of a model, token by token.

use gapless_kernels::Numbers;

use super::Trainer;
use crate::error::{Result, TrainError};

/// How to sample.
#[derive(Debug, Clone, Copy)]
pub struct SampleOptions {
    /// Tokens to add.
    pub tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Only the so many likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Same seed, same text.
    pub seed: u64,
}

impl Default for SampleOptions {
    fn default() -> Self {
        Self { tokens: 200, temperature: 0.8, top_k: 40, seed: 0 }
    }
}

impl Trainer {
    /// Continues `prompt`. Every token costs a whole forward pass over the last `sequence` tokens.
    ///
    /// # Errors
    /// An empty prompt, or ids outside the vocabulary; else as [`Self::evaluate`].
    pub fn sample(&mut self, prompt: &[u32], options: &SampleOptions) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            let why = "it is empty".to_owned();
            return Err(TrainError::Config { what: "prompt", why, remedy: "begin with at least one token" });
        }
        let sequence = self.options.sequence;
        let numbers = Numbers::from_seed(options.seed);
        let mut tokens = prompt.to_vec();
        let mut window = vec![0; sequence];
        for i in 0..options.tokens {
            let context = &tokens[tokens.len().saturating_sub(sequence)..];
            // Causal attention: what stands behind the context does not reach its last token; but where experts choose, or
            // drop the lightest, it competes with it.
            window[..context.len()].copy_from_slice(context);
            window[context.len()..].fill(0);
            let last = context.len() - 1;
            let logits: Vec<f32> = self.logits(&window)?.get(0)?.get(last)?.to_vec1()?;
            tokens.push(choose(&logits, options, numbers.uniform(i)));
        }
        Ok(tokens.split_off(prompt.len()))
    }
}

/// The token at `point` (in [0, 1)) of the cumulative distribution, likeliest first.
fn choose(logits: &[f32], options: &SampleOptions, point: f32) -> u32 {
    let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
    ranked.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    if options.temperature <= 0.0 {
        return ranked[0];
    }
    if options.top_k > 0 {
        ranked.truncate(options.top_k);
    }
    let max = logits[ranked[0] as usize];
    let weight = |&id: &u32| ((logits[id as usize] - max) / options.temperature).exp();
    let mut left = point * ranked.iter().map(weight).sum::<f32>();
    for id in &ranked {
        left -= weight(id);
        if left < 0.0 {
            return *id;
        }
    }
    ranked[ranked.len() - 1]
}
