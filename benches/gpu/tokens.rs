//! Generated text, so that no data has to be downloaded. To test learning, the ids are those of a Markov chain. To
//! measure speed, the ids are uniform. Speed depends on the number of distinct ids, and pytorch.py uses uniform ids
//! too.
//!
//! In the chain, each of 64 states is followed by one of four states, with probabilities 5/8, 1/8, 1/8 and 1/8. The
//! states' ids are spread over the vocabulary. An untrained model has a loss of ln(vocabulary). A model that has
//! learned the chain has a loss of at most 5/8·ln(8/5) + 3/8·ln 8 = 1.07 nats.

/// Number of states of the chain.
const STATES: u64 = 64;

/// A stream of batches that only depends on the seed.
#[derive(Debug)]
pub struct Tokens {
    random: u64,
    /// The state of the chain; `None` if ids are uniform.
    state: Option<u64>,
    vocabulary: u64,
}

impl Tokens {
    /// Ids of the Markov chain.
    pub fn chain(vocabulary: usize, seed: u64) -> Self {
        Self { random: seed, state: Some(0), vocabulary: vocabulary as u64 }
    }

    /// Uniformly distributed ids.
    pub fn uniform(vocabulary: usize, seed: u64) -> Self {
        Self { random: seed, state: None, vocabulary: vocabulary as u64 }
    }

    /// Returns the ids of a batch, and for each id the id that follows it.
    pub fn batch(&mut self, batch: usize, sequence: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for _ in 0..batch {
            let ids: Vec<u32> = (0..=sequence).map(|_| self.next()).collect();
            tokens.extend_from_slice(&ids[..sequence]);
            targets.extend_from_slice(&ids[1..]);
        }
        (tokens, targets)
    }

    fn next(&mut self) -> u32 {
        let drawn = self.draw();
        let Some(state) = self.state else {
            // The high half is a fraction of 2^32.
            return (((drawn >> 32) * self.vocabulary) >> 32) as u32;
        };
        let choice = match drawn % 8 {
            0 => 1,
            1 => 2,
            2 => 3,
            _ => 0,
        };
        // Any fixed table works. Mixing the bits makes the successors of a state unrelated.
        let state = mixed(state * 4 + choice) % STATES;
        self.state = Some(state);
        (state * (self.vocabulary / STATES).max(1) % self.vocabulary) as u32
    }

    /// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.random)
    }
}

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn a_seed_makes_one_text_of_which_targets_are_the_next_ids() {
        for text in [Tokens::chain, Tokens::uniform] {
            let (tokens, targets) = text(50_257, 1).batch(3, 32);
            assert_eq!((&tokens, &targets), (&text(50_257, 1).batch(3, 32).0, &targets));
            assert_ne!(tokens, text(50_257, 2).batch(3, 32).0);
            for (tokens, targets) in tokens.chunks(32).zip(targets.chunks(32)) {
                assert_eq!(tokens[1..], targets[..31]);
            }
        }
    }

    /// The number of distinct ids matches that of `torch.randint`: n draws from V ids give V·(1 − (1 − 1/V)ⁿ)
    /// distinct ids on average, and differ from this by a few times its square root at most.
    #[test]
    fn uniform_ids_are_as_many_as_pytorchs() {
        for vocabulary in [5, 512, 50_257] {
            let tokens = Tokens::uniform(vocabulary, 0).batch(16, 1024).0;
            let distinct = tokens.iter().collect::<BTreeSet<_>>().len() as f64;
            let v = vocabulary as f64;
            let expected = v * (1.0 - (1.0 - 1.0 / v).powi(tokens.len() as i32));
            assert!((distinct - expected).abs() <= 3.0 * expected.sqrt(), "{distinct} of {vocabulary}, not {expected}");
            assert!(tokens.iter().all(|&id| (id as usize) < vocabulary));
        }
    }

    #[test]
    fn few_ids_follow_an_id_and_many_there_are() {
        for vocabulary in [5, 256, 50_257] {
            let (tokens, targets) = Tokens::chain(vocabulary, 0).batch(1, 20_000);
            let mut followers: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
            for (token, target) in tokens.into_iter().zip(targets) {
                assert!((token as usize) < vocabulary);
                followers.entry(token).or_default().insert(target);
            }
            let most = followers.values().map(BTreeSet::len).max();
            assert!(vocabulary < 64 || most <= Some(4), "{most:?} of {vocabulary}");
            assert!(followers.len() > vocabulary.min(64) / 4, "{} of {vocabulary}", followers.len());
        }
    }
}
