//! Which token comes next: one of its logits, by a rule and a random number.
//!
//! In: the logits of one token, those that were there already, a number in [0, 1). Out: an id. Never: a heap allocation, or a choice
//! that depends on anything else.

use crate::error::{Result, TrainError};

/// How tokens are drawn, in this order: penalty, temperature, then the likeliest that all of `top_k`, `top_p` and `min_p` leave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Only the so many likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only the fewest likeliest tokens that have this much of the probability together (Holtzman et al., arXiv 1904.09751).
    pub top_p: f32,
    /// Only tokens that are at least so likely as this part of the likeliest (Nguyen et al., arXiv 2407.01082).
    pub min_p: f32,
    /// Divides the logits of tokens that are there already, if they are positive, else multiplies them (Keskar et al., arXiv
    /// 1909.05858).
    pub repetition_penalty: f32,
    /// Same seed, same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 40, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, ..Self::default() }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        for (name, value, is_sound) in [
            ("temperature", temperature, temperature >= 0.0 && temperature.is_finite()),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p)),
            ("repetition_penalty", repetition_penalty, repetition_penalty > 0.0 && repetition_penalty.is_finite()),
        ] {
            if !is_sound {
                let remedy =
                    "a temperature is at least 0, a probability from 0 to 1 (top_p above 0), a penalty above 0";
                return Err(TrainError::Config { what: "sampling", why: format!("a {name} of {value}"), remedy });
            }
        }
        Ok(())
    }
}

/// Draws tokens, in memory of its own.
#[derive(Debug)]
pub(super) struct Sampler {
    sampling: Sampling,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    logit: f32,
    id: u32,
}

impl Candidate {
    /// Likeliest first; of equals, the lower id.
    fn order(a: &Self, b: &Self) -> std::cmp::Ordering {
        b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
    }
}

/// How many of the likeliest are put in order at first; eight times as many whenever they are not enough.
const SORTED: usize = 64;

impl Sampler {
    pub fn new(sampling: Sampling, vocabulary: usize) -> Self {
        Self { sampling, candidates: Vec::with_capacity(vocabulary) }
    }

    /// The token at `point`, in [0, 1), of the cumulative distribution of what is left, likeliest first. None if a logit is not a
    /// number, or none is finite.
    pub fn choose(&mut self, logits: &[f32], seen: &[bool], point: f32) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, .. } = self.sampling;
        let penalised = |(id, &logit): (usize, &f32)| {
            let logit = match seen.get(id) {
                Some(true) if logit > 0.0 => logit / repetition_penalty,
                Some(true) => logit * repetition_penalty,
                _ => logit,
            };
            Candidate { logit, id: id as u32 }
        };
        let all = logits.iter().enumerate().map(penalised);
        let best = all.clone().min_by(Candidate::order)?;
        if !best.logit.is_finite() {
            return None;
        }
        if temperature == 0.0 {
            return Some(best.id);
        }
        self.candidates.clear();
        self.candidates.extend(all);
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, Candidate::order);
            self.candidates.truncate(top_k);
        }
        // Relative to the likeliest.
        let weight = |candidate: &Candidate| f64::from(((candidate.logit - best.logit) / temperature).exp());
        let total: f64 = self.candidates.iter().map(weight).sum();

        // As much of the order as holds what is asked for, and how much that is.
        let wanted = total * f64::from(if top_p < 1.0 { top_p } else { point });
        let (mut kept, mut sum) = (0, 0.0);
        let mut sorted = 0;
        loop {
            if kept == sorted {
                sorted = (SORTED.max(8 * sorted)).min(self.candidates.len());
                if sorted < self.candidates.len() {
                    self.candidates.select_nth_unstable_by(sorted, Candidate::order);
                }
                self.candidates[..sorted].sort_unstable_by(Candidate::order);
            }
            let next = weight(&self.candidates[kept]);
            if kept > 0 && next < f64::from(min_p) {
                break;
            }
            (kept, sum) = (kept + 1, sum + next);
            if kept == self.candidates.len() || (sum > wanted && min_p == 0.0) || (top_p < 1.0 && sum >= wanted) {
                break;
            }
        }
        // What is kept is all that is drawn from; without a limit, the whole distribution.
        let has_limit = top_p < 1.0 || min_p > 0.0;
        let mut left = f64::from(point) * if has_limit { sum } else { total };
        let drawn = self.candidates[..kept].iter().find(|candidate| {
            left -= weight(candidate);
            left < 0.0
        });
        Some(drawn.unwrap_or(&self.candidates[kept - 1]).id)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// The distribution that a sampling leaves, as its definition says: all in order, then what each rule keeps.
    fn left(sampling: &Sampling, logits: &[f32], seen: &[bool]) -> Vec<(u32, f64)> {
        let penalty = sampling.repetition_penalty;
        let penalised = |(id, &x): (usize, &f32)| match seen[id] {
            true if x > 0.0 => (id as u32, x / penalty),
            true => (id as u32, x * penalty),
            false => (id as u32, x),
        };
        let mut all: Vec<(u32, f32)> = logits.iter().enumerate().map(penalised).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(if sampling.top_k > 0 { sampling.top_k } else { all.len() });
        let best = all[0].1;
        let weights: Vec<f64> = all.iter().map(|x| f64::from(((x.1 - best) / sampling.temperature).exp())).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = Vec::new();
        let mut sum = 0.0;
        for (&(id, _), weight) in all.iter().zip(weights) {
            let is_enough = sampling.top_p < 1.0 && sum >= total * f64::from(sampling.top_p);
            if !kept.is_empty() && (is_enough || weight < f64::from(sampling.min_p)) {
                break;
            }
            kept.push((id, weight));
            sum += weight;
        }
        kept.iter().map(|&(id, weight)| (id, weight / sum)).collect()
    }

    generated! {
        #[test]
        fn draws_are_those_of_the_definition(
            logits in prop::collection::vec(-8.0f32..8.0, 1..300),
            (temperature, top_k, top_p) in (0.1f32..3.0, 0..100usize, prop_oneof![Just(1.0f32), 0.01f32..1.0]),
            (min_p, repetition_penalty) in (prop_oneof![Just(0.0f32), 0.0f32..1.0], prop_oneof![Just(1.0f32), 0.5f32..2.0]),
            point in 0.0f32..1.0,
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed: 0 };
            let seen: Vec<bool> = (0..logits.len()).map(|id| id % 3 == 0).collect();
            let id = Sampler::new(sampling, logits.len()).choose(&logits, &seen, point).unwrap();
            let left = left(&sampling, &logits, &seen);
            let at = left.iter().position(|&(kept, _)| kept == id);
            prop_assert!(at.is_some(), "{id} is not among {left:?}");
            // The point lies in its part of the cumulative distribution, but for the rounding of its sums.
            let before: f64 = left[..at.unwrap()].iter().map(|x| x.1).sum();
            let within = before - 1e-9 <= f64::from(point) && f64::from(point) <= before + left[at.unwrap()].1 + 1e-9;
            prop_assert!(within, "{point} is not in the part of {id}: {left:?}");
        }
    }

    #[test]
    fn special_cases() {
        let choose = |sampling, logits: &[f32]| Sampler::new(sampling, logits.len()).choose(logits, &[], 0.999);
        assert_eq!(choose(Sampling::greedy(), &[1.0, 3.0, 3.0, 2.0]), Some(1), "of equals, the first");
        assert_eq!(choose(Sampling { top_k: 1, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling { top_p: 1e-6, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling { min_p: 1.0, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling::default(), &[f32::NEG_INFINITY, 3.0]), Some(1));
        assert_eq!(choose(Sampling::default(), &[1.0, f32::NAN]), None);
        assert_eq!(choose(Sampling::default(), &[]), None);
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
        assert_eq!(Sampler::new(penalty, 2).choose(&[3.0, 2.0], &[true, false], 0.0), Some(1));
        assert_eq!(Sampler::new(penalty, 2).choose(&[-1.0, -1.5], &[true, false], 0.0), Some(1));
    }

    #[test]
    fn unsound_rules_are_refused() {
        let default = Sampling::default();
        for unsound in [
            Sampling { temperature: f32::NAN, ..default },
            Sampling { temperature: -1.0, ..default },
            Sampling { top_p: 0.0, ..default },
            Sampling { min_p: 1.5, ..default },
            Sampling { repetition_penalty: 0.0, ..default },
        ] {
            assert!(unsound.check().is_err(), "{unsound:?}");
        }
        default.check().unwrap();
    }
}
