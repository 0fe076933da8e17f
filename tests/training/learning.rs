//! A task that can be learned in seconds.

use gapless::engine::Numbers;
use gapless::engine::learning_rate::{LearningRate, Shape};

use crate::common::{TinyRun, VOCABULARY};

/// Returns a walk over the vocabulary, in which one step in ten is random. A model that has learned the walk has a
/// loss of about 0.7.
pub fn walk(run: &TinyRun, step: u64) -> (Vec<u32>, Vec<u32>) {
    let numbers = Numbers::from_seed(step);
    let count = run.options.step.batch * run.options.step.sequence;
    let mut ids = vec![step as u32 % VOCABULARY];
    for i in 0..count {
        let anywhere = (numbers.bits(2 * i + 1) % u64::from(VOCABULARY)) as u32;
        let next = (7 * ids[i] + 3) % VOCABULARY;
        ids.push(if numbers.bits(2 * i).is_multiple_of(10) { anywhere } else { next });
    }
    (ids[..count].to_vec(), ids[1..].to_vec())
}

/// A learning rate that suits most update rules.
pub const PEAK: f64 = 3e-3;

/// Trains for 200 steps, and returns the mean losses of the first and the last ten steps.
pub fn learn(run: TinyRun) -> [f32; 2] {
    learn_at(run, PEAK)
}

/// Like [`learn`], with another learning rate.
pub fn learn_at(mut run: TinyRun, peak: f64) -> [f32; 2] {
    const STEPS: u64 = 200;
    run.options.learning_rate =
        LearningRate { peak, floor: peak / 10.0, warmup_steps: 10, steps: STEPS, shape: Shape::Cosine };
    let mut trainer = run.trainer();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (tokens, targets) = walk(&run, step);
        losses.push(trainer.step(&tokens, &targets).unwrap().loss);
    }
    [&losses[..10], &losses[losses.len() - 10..]].map(|losses| losses.iter().sum::<f32>() / 10.0)
}
