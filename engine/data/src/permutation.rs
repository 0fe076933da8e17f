//! A keyed permutation of `0..len` in constant memory.

/// Rounds of the network. With a good round function, four rounds give a pseudo-random permutation (Luby and Rackoff,
/// 1988). Small domains mix more slowly, and additional rounds cost only nanoseconds.
const ROUNDS: usize = 8;

/// A pseudo-random order of `0..len` without a table. It is a Feistel network over the next power of four, applied
/// repeatedly until the value falls below `len` (fewer than four times on average; "cycle walking", Black and Rogaway,
/// 2002).
///
/// ```
/// use gapless_data::Permutation;
/// let order = Permutation::new(10, 42);
/// let mut seen: Vec<u64> = (0..10).map(|position| order.at(position)).collect();
/// seen.sort();
/// assert_eq!(seen, (0..10).collect::<Vec<_>>());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Creates the order of `0..len` for a `key`. `len` must be at most 2⁶².
    pub fn new(len: u64, key: u64) -> Self {
        debug_assert!(len <= 1 << 62);
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1))));
        Self { len, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// The value at `position` in this order. Positions from `len` on start again from the first.
    pub fn at(&self, position: u64) -> u64 {
        if self.len == 0 {
            return 0;
        }
        let mut value = position % self.len;
        loop {
            value = self.encrypt(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// 2⁶⁴ ÷ the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GOLDEN);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;

    generated! {
        /// Checks the definition of a permutation: every value occurs exactly once.
        #[test]
        fn every_value_once(len in 1u64..3000, key: u64) {
            let order = Permutation::new(len, key);
            let mut seen = vec![false; len as usize];
            for position in 0..len {
                let value = order.at(position) as usize;
                prop_assert!(!std::mem::replace(&mut seen[value], true), "{value} comes twice");
            }
        }

        #[test]
        fn large_lengths_stay_inside(len in 1u64..1 << 62, key: u64, position: u64) {
            prop_assert!(Permutation::new(len, key).at(position) < len);
        }
    }

    /// Over many keys, every value comes first about equally often. The chi-square statistic of 10 cells over 20,000
    /// keys must stay below 27.9, which is the 99.9 % quantile for 9 degrees of freedom. The keys are fixed, so the
    /// test is deterministic.
    #[test]
    fn keys_spread_evenly() {
        const KEYS: u64 = 20_000;
        for position in [0, 4, 9] {
            let mut counts = [0u64; 10];
            for key in 0..KEYS {
                counts[Permutation::new(10, key).at(position) as usize] += 1;
            }
            let expected = KEYS as f64 / 10.0;
            let chi_square: f64 = counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
            assert!(chi_square < 27.9, "position {position}: {counts:?} has chi-square {chi_square}");
        }
    }
}
