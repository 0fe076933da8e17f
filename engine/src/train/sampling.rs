//! Sampling of the next token from its logits.
//!
//! - In: the logits of one token, the ids seen so far, and a random number in [0, 1).
//! - Out: an id.
//! - Never: a heap allocation, or a choice that depends on anything but these inputs and the options.

use crate::error::{Result, TrainError};

/// Sampling options. They apply in this order:
///
/// 1. the repetition penalty, and bans of repeated sequences;
/// 2. the temperature. If it is 0, the most likely token is taken and steps 3 and 4 have no effect;
/// 3. `top_k`, and then `top_p` and `min_p`, which are both applied to the tokens that `top_k` has kept;
/// 4. `typical_p`, `epsilon_cutoff` and `eta_cutoff`, in this order. Each is applied to the tokens that the options
///    before it have kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens with at least this total probability (Holtzman et al., arXiv
    /// 1904.09751).
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the most likely token's probability (Nguyen et al.,
    /// arXiv 2407.01082).
    pub min_p: f32,
    /// Locally typical sampling (Meister et al., arXiv 2202.00666, section 4): keeps the tokens whose information (−log
    /// p) is closest to the entropy of the distribution, until their total probability reaches this value.
    pub typical_p: f32,
    /// Keeps tokens with at least this probability (Hewitt et al., arXiv 2210.15191); 0 keeps all.
    pub epsilon_cutoff: f32,
    /// Keeps tokens with at least the probability min(ε, √ε·exp(−entropy)), where ε is this option (Hewitt et al.,
    /// section 4); 0 keeps all.
    pub eta_cutoff: f32,
    /// Penalty on tokens that already occur in the sequence (Keskar et al., arXiv 1909.05858). A positive logit of such
    /// a token is divided by the penalty, and a negative one is multiplied by it.
    pub repetition_penalty: f32,
    /// Bans any sequence of this many tokens that already occurs in the prompt or the continuation; 0 bans none.
    pub no_repeat_ngram_size: usize,
    /// Seed of the random numbers. The same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Options that always take the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, ..Self::default() }
    }

    /// True if an option of step 4 of [`Sampling`] is set. These options depend on the probabilities of the tokens that
    /// step 3 has kept.
    fn goes_by_probability(&self) -> bool {
        self.typical_p < 1.0 || self.epsilon_cutoff > 0.0 || self.eta_cutoff > 0.0
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, repetition_penalty, .. } = *self;
        for (name, value, is_sound) in [
            ("temperature", temperature, temperature >= 0.0 && temperature.is_finite()),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p)),
            ("typical_p", typical_p, typical_p > 0.0 && typical_p <= 1.0),
            ("epsilon_cutoff", epsilon_cutoff, (0.0..1.0).contains(&epsilon_cutoff)),
            ("eta_cutoff", eta_cutoff, (0.0..1.0).contains(&eta_cutoff)),
            ("repetition_penalty", repetition_penalty, repetition_penalty > 0.0 && repetition_penalty.is_finite()),
        ] {
            if !is_sound {
                let remedy = "set temperature to at least 0, probabilities from 0 to 1 (top_p and typical_p above 0), cutoffs from 0 to \
                              below 1, repetition_penalty above 0";
                return Err(TrainError::config("sampling", format!("{name} is {value}"), remedy));
            }
        }
        Ok(())
    }
}

/// Draws tokens. All memory is allocated when the sampler is created.
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
    /// Orders by descending logit, then by ascending id.
    fn order(a: &Self, b: &Self) -> std::cmp::Ordering {
        b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
    }
}

/// Number of most likely tokens that are sorted first. If more tokens are needed, eight times as many are sorted, and
/// so on.
const SORTED: usize = 64;

impl Sampler {
    pub fn new(sampling: Sampling, vocabulary: usize) -> Self {
        Self { sampling, candidates: Vec::with_capacity(vocabulary) }
    }

    /// Draws a token. The tokens that the options keep form a cumulative distribution, the most likely token first. The
    /// result is the token at `point` of this distribution; `point` is in [0, 1). Banned tokens are never drawn.
    /// Returns `None` if a logit is NaN, or if no allowed token has a finite logit.
    pub fn choose(&mut self, logits: &[f32], seen: &[bool], banned: &[bool], point: f32) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, .. } = self.sampling;
        let penalised = |(id, &logit): (usize, &f32)| {
            let logit = match (banned.get(id), seen.get(id)) {
                (Some(true), _) => f32::NEG_INFINITY,
                (_, Some(true)) if logit > 0.0 => logit / repetition_penalty,
                (_, Some(true)) => logit * repetition_penalty,
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
        self.candidates.extend(all.filter(|candidate| candidate.logit != f32::NEG_INFINITY));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, Candidate::order);
            self.candidates.truncate(top_k);
        }
        // Weights relative to the most likely token.
        let weight = |candidate: &Candidate| f64::from(((candidate.logit - best.logit) / temperature).exp());
        let total: f64 = self.candidates.iter().map(weight).sum();

        // Sort only as many tokens as needed. If an option of step 4 is set, these are all tokens. Otherwise they are
        // the most likely tokens whose total probability reaches `top_p` or `point`.
        let is_cut_later = self.sampling.goes_by_probability();
        let wanted = match (top_p < 1.0, is_cut_later) {
            (true, _) => total * f64::from(top_p),
            (false, true) => f64::INFINITY,
            (false, false) => total * f64::from(point),
        };
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
        if is_cut_later {
            self.candidates.truncate(kept);
            self.keep_by_probability();
            (kept, sum) = (self.candidates.len(), self.candidates.iter().map(weight).sum());
        }
        // If an option has limited the tokens, `point` refers to the distribution of the kept tokens. Otherwise `point`
        // refers to the whole distribution, of which only the beginning was sorted.
        let has_limit = top_p < 1.0 || min_p > 0.0 || is_cut_later;
        let mut left = f64::from(point) * if has_limit { sum } else { total };
        let drawn = self.candidates[..kept].iter().find(|candidate| {
            left -= weight(candidate);
            left < 0.0
        });
        Some(drawn.unwrap_or(&self.candidates[kept - 1]).id)
    }

    /// Keeps the candidates that `typical_p`, `epsilon_cutoff` and `eta_cutoff` allow. Each option is applied to the
    /// candidates that the previous option has kept. The candidates must be sorted by likelihood, and stay sorted.
    fn keep_by_probability(&mut self) {
        let Sampling { temperature, typical_p, epsilon_cutoff, eta_cutoff, .. } = self.sampling;
        let all = &mut self.candidates;
        if typical_p < 1.0 {
            let left = Distribution::of(all, temperature);
            let distance = |one: &Candidate| (left.information(one) - left.entropy).abs();
            all.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(Candidate::order(a, b)));
            let mut mass = 0.0;
            let last = all.iter().find(|one| {
                mass += left.probability(one);
                mass >= f64::from(typical_p)
            });
            let farthest = last.map_or(f64::INFINITY, distance);
            all.retain(|one| distance(one) <= farthest);
            all.sort_unstable_by(Candidate::order);
        }
        let mut keep_above = |least: &dyn Fn(&Distribution) -> f64| {
            let left = Distribution::of(all, temperature);
            let (best, least) = (all[0].logit, least(&left));
            all.retain(|one| left.probability(one) >= least || one.logit == best);
        };
        if epsilon_cutoff > 0.0 {
            keep_above(&|_| f64::from(epsilon_cutoff));
        }
        if eta_cutoff > 0.0 {
            let epsilon = f64::from(eta_cutoff);
            keep_above(&|left| epsilon.min(epsilon.sqrt() * (-left.entropy).exp()));
        }
    }
}

/// The probabilities of a list of candidates, and the entropy of this distribution.
struct Distribution {
    best: f32,
    temperature: f32,
    log_total: f64,
    entropy: f64,
}

impl Distribution {
    /// Computes the distribution of at least one candidate.
    fn of(candidates: &[Candidate], temperature: f32) -> Self {
        let best = candidates.iter().map(|one| one.logit).fold(f32::NEG_INFINITY, f32::max);
        let mut new = Self { best, temperature, log_total: 0.0, entropy: 0.0 };
        new.log_total = candidates.iter().map(|one| (-new.information(one)).exp()).sum::<f64>().ln();
        new.entropy = candidates.iter().map(|one| new.probability(one) * new.information(one)).sum();
        new
    }

    /// Returns −log p of a candidate.
    fn information(&self, candidate: &Candidate) -> f64 {
        self.log_total + f64::from((self.best - candidate.logit) / self.temperature)
    }

    fn probability(&self, candidate: &Candidate) -> f64 {
        (-self.information(candidate)).exp()
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// Returns the distribution after all options, computed directly from their definitions on a fully sorted list.
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
        let kept =
            by_probability(sampling, kept.into_iter().map(|(id, _)| penalised((id as usize, &logits[id as usize]))));
        let weight = |logit: f32| f64::from(((logit - best) / sampling.temperature).exp());
        let sum: f64 = kept.iter().map(|&(_, logit)| weight(logit)).sum();
        kept.into_iter().map(|(id, logit)| (id, weight(logit) / sum)).collect()
    }

    /// Returns the ids and logits that pass the filters `typical_p`, `epsilon_cutoff` and `eta_cutoff`, most likely
    /// first.
    fn by_probability(sampling: &Sampling, left: impl Iterator<Item = (u32, f32)>) -> Vec<(u32, f32)> {
        let mut left: Vec<(u32, f32)> = left.collect();
        let probabilities = |left: &[(u32, f32)]| {
            let weights = left.iter().map(|x| f64::from((x.1 - left[0].1) / sampling.temperature).exp());
            let weights: Vec<f64> = weights.collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(|weight| weight / sum).collect::<Vec<f64>>()
        };
        let entropy = |p: &[f64]| p.iter().map(|p| -p * p.ln()).filter(|x| !x.is_nan()).sum::<f64>();
        if sampling.typical_p < 1.0 {
            let p = probabilities(&left);
            let expected = entropy(&p);
            let mut order: Vec<usize> = (0..left.len()).collect();
            order.sort_by(|&a, &b| {
                let [a, b] = [a, b].map(|at| (-p[at].ln() - expected).abs());
                a.total_cmp(&b)
            });
            let before = |at: usize| order[..at].iter().map(|&at| p[at]).sum::<f64>();
            let kept = (0..order.len()).filter(|&at| before(at) < f64::from(sampling.typical_p));
            let mut kept: Vec<usize> = kept.map(|at| order[at]).collect();
            kept.sort_unstable();
            left = kept.into_iter().map(|at| left[at]).collect();
        }
        for is_eta in [false, true] {
            let p = probabilities(&left);
            let eta = f64::from(sampling.eta_cutoff);
            let eta = eta.min(eta.sqrt() * (-entropy(&p)).exp());
            let least = if is_eta { eta } else { f64::from(sampling.epsilon_cutoff) };
            left = left
                .into_iter()
                .zip(&p)
                .filter(|(_, probability)| **probability >= least || **probability == p[0])
                .map(|x| x.0)
                .collect();
        }
        left
    }

    generated! {
        #[test]
        fn draws_are_those_of_the_definition(
            logits in prop::collection::vec(-8.0f32..8.0, 1..300),
            (temperature, top_k, top_p) in (0.1f32..3.0, 0..100usize, prop_oneof![Just(1.0f32), 0.01f32..1.0]),
            (min_p, repetition_penalty) in (prop_oneof![Just(0.0f32), 0.0f32..1.0], prop_oneof![Just(1.0f32), 0.5f32..2.0]),
            typical_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            (epsilon_cutoff, eta_cutoff) in (prop_oneof![Just(0.0f32), 0.0f32..0.3], prop_oneof![Just(0.0f32), 0.0f32..0.3]),
            point in 0.0f32..1.0,
        ) {
            let cutoffs = Sampling { typical_p, epsilon_cutoff, eta_cutoff, ..Sampling::default() };
            let sampling = Sampling { temperature, top_k, top_p, min_p, repetition_penalty, ..cutoffs };
            let seen: Vec<bool> = (0..logits.len()).map(|id| id % 3 == 0).collect();
            let id = Sampler::new(sampling, logits.len()).choose(&logits, &seen, &[], point).unwrap();
            let left = left(&sampling, &logits, &seen);
            let at = left.iter().position(|&(kept, _)| kept == id);
            prop_assert!(at.is_some(), "{id} is not among {left:?}");
            // The point lies in the token's interval of the cumulative distribution, up to rounding of the sums.
            let before: f64 = left[..at.unwrap()].iter().map(|x| x.1).sum();
            let within = before - 1e-9 <= f64::from(point) && f64::from(point) <= before + left[at.unwrap()].1 + 1e-9;
            prop_assert!(within, "{point} is not in the part of {id}: {left:?}");
        }
    }

    #[test]
    fn special_cases() {
        let choose = |sampling, logits: &[f32]| Sampler::new(sampling, logits.len()).choose(logits, &[], &[], 0.999);
        assert_eq!(choose(Sampling::greedy(), &[1.0, 3.0, 3.0, 2.0]), Some(1), "of equals, the first");
        assert_eq!(choose(Sampling { top_k: 1, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling { top_p: 1e-6, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling { min_p: 1.0, ..Sampling::default() }, &[1.0, 3.0, 2.0]), Some(1));
        assert_eq!(choose(Sampling::default(), &[f32::NEG_INFINITY, 3.0]), Some(1));
        assert_eq!(choose(Sampling::default(), &[1.0, f32::NAN]), None);
        assert_eq!(choose(Sampling::default(), &[]), None);
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
        assert_eq!(Sampler::new(penalty, 2).choose(&[3.0, 2.0], &[true, false], &[], 0.0), Some(1));
        assert_eq!(Sampler::new(penalty, 2).choose(&[-1.0, -1.5], &[true, false], &[], 0.0), Some(1));
        let banned = |sampling| Sampler::new(sampling, 2).choose(&[3.0, 2.0], &[], &[true, false], 0.0);
        assert_eq!((banned(Sampling::greedy()), banned(Sampling::default())), (Some(1), Some(1)));
    }

    /// The tokens have probabilities 0.5, 0.3, 0.15 and 0.05. Their information is 0.693, 1.204, 1.897 and 2.996, and
    /// the entropy is 1.142.
    #[test]
    fn cutoffs_by_hand() {
        let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
        let plain = Sampling { temperature: 1.0, top_k: 0, ..Sampling::default() };
        let kept = |sampling| {
            let mut sampler = Sampler::new(sampling, 4);
            let mut drawn: Vec<u32> =
                (0..100).map(|point| sampler.choose(&logits, &[], &[], point as f32 / 100.0).unwrap()).collect();
            drawn.dedup();
            drawn
        };
        for (sampling, expected) in [
            (plain, &[0, 1, 2, 3][..]),
            // The second token is closest to the entropy, and then the first.
            (Sampling { typical_p: 0.2, ..plain }, &[1]),
            (Sampling { typical_p: 0.7, ..plain }, &[0, 1]),
            (Sampling { typical_p: 0.9, ..plain }, &[0, 1, 2]),
            (Sampling { epsilon_cutoff: 0.1, ..plain }, &[0, 1, 2]),
            (Sampling { epsilon_cutoff: 0.9, ..plain }, &[0]),
            // min(0.2, 0.447 · exp(−1.142) = 0.143)
            (Sampling { eta_cutoff: 0.2, ..plain }, &[0, 1, 2]),
            (Sampling { eta_cutoff: 0.01, ..plain }, &[0, 1, 2, 3]),
            // The cutoff applies to the first three tokens. Their probabilities, divided by their sum, are 0.526, 0.316
            // and 0.158.
            (Sampling { top_k: 3, epsilon_cutoff: 0.155, ..plain }, &[0, 1, 2]),
            (Sampling { typical_p: 0.2, ..Sampling::greedy() }, &[0]),
        ] {
            assert_eq!(kept(sampling), expected, "{sampling:?}");
        }
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
            Sampling { typical_p: 0.0, ..default },
            Sampling { epsilon_cutoff: 1.0, ..default },
            Sampling { eta_cutoff: -0.1, ..default },
        ] {
            assert!(unsound.check().is_err(), "{unsound:?}");
        }
        default.check().unwrap();
    }
}
