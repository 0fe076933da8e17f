//! Random numbers without state. Each number is a pure function of a key and an index. The key is derived from the seed
//! and, for a training step, from the step, the micro-batch and the place in the model.
//!
//! The generator is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), used as a counter-based generator: number i of a
//! sequence is a hash of the sequence's key + i·γ. So a number does not change with recomputation, resuming or the
//! number of threads.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random numbers of one step and micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: u64,
    /// Index of the micro-batch within the whole batch of the step.
    pub micro_batch: u64,
}

impl Stream {
    /// Creates the stream of a step and micro-batch, in a run with this seed.
    pub fn new(seed: u64, step: u64, micro_batch: u64) -> Self {
        Self { key: mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(step.wrapping_mul(GOLDEN))), micro_batch }
    }

    /// Returns the key from which all random numbers of the step are derived.
    pub fn key(self) -> u64 {
        self.key
    }

    /// Returns the random numbers of one place in the model, where a micro-batch uses `elements` of them. Each
    /// micro-batch continues where the last one ended. So a row gets the same numbers, however the batch is divided.
    pub fn place(self, key: u64, elements: usize) -> Numbers {
        let start = self.micro_batch.wrapping_mul(elements as u64);
        Numbers { key: mix(self.key ^ mix(key.wrapping_add(1))), start }
    }
}

/// An endless sequence of random numbers, accessed by index.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    key: u64,
    start: u64,
}

impl Numbers {
    /// Creates a sequence that only depends on the seed, and not on a step or place.
    pub fn from_seed(seed: u64) -> Self {
        Self { key: mix(seed.wrapping_add(GOLDEN)), start: 0 }
    }

    /// Returns the key from which all numbers of the sequence are derived, for a sequence from [`Self::from_seed`].
    pub fn key(self) -> u64 {
        self.key
    }

    /// 64 random bits.
    #[inline(always)]
    pub fn bits(self, index: usize) -> u64 {
        mix(self.key.wrapping_add(self.start.wrapping_add(index as u64).wrapping_mul(GOLDEN)))
    }

    /// Returns a number with uniform distribution in [0, 1), with 24 bits.
    #[inline(always)]
    pub fn uniform(self, index: usize) -> f32 {
        (self.bits(index) >> 40) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Returns a number with standard normal distribution (Box & Muller, 1958).
    pub fn normal(self, index: usize) -> f64 {
        let bits = self.bits(index);
        let unit = |b: u64| ((b & 0xffff_ffff) as f64 + 0.5) / (1u64 << 32) as f64;
        (-2.0 * unit(bits >> 32).ln()).sqrt() * (std::f64::consts::TAU * unit(bits)).cos()
    }
}

/// Stochastic rounding of the elements of one stored tensor. Its random numbers are a function of the step, the tensor and
/// the element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StochasticRounding {
    /// A hash of the tensor's name.
    pub tensor: u32,
    /// Index of the part, if the tensor is one of several equal parts of a larger one.
    pub part: u32,
}

impl StochasticRounding {
    /// The first of the places of tensors. Operations of a model have smaller ones.
    pub const PLACES: u64 = 1 << 32;

    /// Returns the rounding of a part of the tensor with this name. The hash is FNV-1a (Fowler, Noll & Vo, RFC 9923).
    pub fn of(name: &str, part: usize) -> Self {
        let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        Self { tensor: name.bytes().fold(0x811c_9dc5, hash), part: part as u32 }
    }

    /// Returns the random numbers of the step of `stream`, for a part of `elements` elements.
    pub fn numbers(self, mut stream: Stream, elements: usize) -> Numbers {
        stream.micro_batch = self.part.into();
        stream.place(Self::PLACES + u64::from(self.tensor), elements)
    }
}

#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_continue_each_other() {
        let whole = Stream::new(1, 7, 0).place(3, 8);
        let halves = [Stream::new(1, 7, 0).place(3, 4), Stream::new(1, 7, 1).place(3, 4)];
        for i in 0..8 {
            assert_eq!(whole.bits(i), halves[i / 4].bits(i % 4));
        }
    }

    #[test]
    fn parts_of_a_tensor_are_rounded_as_the_whole() {
        let [stream, another] = [0, 3].map(|micro_batch| Stream::new(1, 7, micro_batch));
        let whole = StochasticRounding::of("h.0.weight", 0).numbers(stream, 8);
        let parts = [0, 1].map(|part| StochasticRounding::of("h.0.weight", part).numbers(another, 4));
        for i in 0..8 {
            assert_eq!(whole.bits(i), parts[i / 4].bits(i % 4));
            assert_ne!(whole.bits(i), StochasticRounding::of("h.1.weight", 0).numbers(stream, 8).bits(i));
        }
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let numbers = Numbers::from_seed(5);
        let n = 100_000;
        let mean = (0..n).map(|i| f64::from(numbers.uniform(i))).sum::<f64>() / n as f64;
        // The standard error of the mean is 0.29 / √n = 0.0009. The tolerance is four times this error.
        assert!((mean - 0.5).abs() < 0.004, "{mean}");
        let (sum, squares) = (0..n).map(|i| numbers.normal(i)).fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
        assert!((sum / n as f64).abs() < 0.013, "{sum}");
        assert!((squares / n as f64 - 1.0).abs() < 0.018, "{squares}");
    }
}
