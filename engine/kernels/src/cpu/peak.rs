//! The multiply-add rates that one core reaches in registers alone, and the choice of how products of two bf16 operands
//! are computed.
//!
//! `vdpbf16ps` multiplies twice as many elements as an f32 multiply-add, but some processors start it at half the rate
//! or less. For example, an Intel Xeon with AVX-512-BF16 reached 100 GFLOP/s per core with `vdpbf16ps`, but 196 GFLOP/s
//! with f32. So both methods are timed once per process, for about 100 µs each, and products use the faster one.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use super::simd::{Level, Vector};

/// The method of computing products of two bf16 operands. The two methods round differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bf16Products {
    /// Two products at a time, with `vdpbf16ps` of AVX-512.
    Pairs,
    /// Conversion to f32, and then fused multiply-adds.
    F32,
}

/// The environment variable that selects the method, `pairs` or `f32`, instead of timing both.
const VARIABLE: &str = "GAPLESS_BF16_PRODUCTS";

impl Bf16Products {
    /// Returns the method that products use at [`Level::Avx512`] on this machine. It is determined once per process:
    /// by `GAPLESS_BF16_PRODUCTS` if this names a method that the processor has, or else by [`Peak::known`]. Other
    /// levels always use f32.
    pub fn chosen() -> Self {
        static CHOSEN: OnceLock<Bf16Products> = OnceLock::new();
        *CHOSEN.get_or_init(|| Self::choose(std::env::var(VARIABLE).ok().as_deref(), &Peak::known))
    }

    fn choose(wanted: Option<&str>, peak: &dyn Fn() -> Peak) -> Self {
        match wanted {
            _ if !has_pairs() => Self::F32,
            Some("pairs") => Self::Pairs,
            Some("f32") => Self::F32,
            _ => {
                let Peak { f32, bf16_pairs } = peak();
                if bf16_pairs.is_some_and(|pairs| pairs >= f32) { Self::Pairs } else { Self::F32 }
            }
        }
    }

    /// Returns the name that reports and `GAPLESS_BF16_PRODUCTS` use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pairs => "pairs",
            Self::F32 => "f32",
        }
    }
}

/// The rates of one core in FLOP/s, for multiply-adds on registers. A multiplication and an addition count as two
/// operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// The rate of fused multiply-adds of f32, at [`Level::best`].
    pub f32: f64,
    /// The rate of `vdpbf16ps`; `None` if the processor does not have it.
    pub bf16_pairs: Option<f64>,
}

impl Peak {
    /// Returns the rates of this machine, which are measured on the first call.
    pub fn known() -> Self {
        static PEAK: OnceLock<Peak> = OnceLock::new();
        *PEAK.get_or_init(Self::measured)
    }

    /// Measures the rates of this machine.
    pub fn measured() -> Self {
        Self { f32: rate(loops::of(Level::best())), bf16_pairs: loops::of_pairs().map(rate) }
    }

    /// Returns the rate of products of two bf16 operands, with the [chosen](Bf16Products::chosen) method.
    pub fn bf16(self) -> f64 {
        match Bf16Products::chosen() {
            Bf16Products::Pairs => self.bf16_pairs.unwrap_or(self.f32),
            Bf16Products::F32 => self.f32,
        }
    }
}

/// True if the processor has `vdpbf16ps`.
pub fn has_pairs() -> bool {
    loops::of_pairs().is_some()
}

/// True if the processor has the bf16 instructions of AMX, which gapless does not use. The flag is CPUID leaf 7, EDX
/// bit 22 (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A).
pub fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::x86_64::__cpuid_count(7, 0).edx >> 22 & 1 == 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Independent accumulators: enough to hide the latency of two multiply-adds per cycle.
const SUMS: usize = 12;
/// Iterations of one measurement, and the number of measurements. Only the fastest measurement counts.
const TURNS: usize = 2000;
const ROUNDS: usize = 8;

/// A loop of multiply-adds with a given number of iterations, and the floating-point operations of one iteration.
type Loop = (unsafe fn(usize) -> f32, usize);

fn rate((run, flops): Loop) -> f64 {
    let seconds = (0..ROUNDS).map(|_| {
        let begun = Instant::now();
        // SAFETY: the loops belong to levels that this machine supports.
        black_box(unsafe { run(black_box(TURNS)) });
        begun.elapsed().as_secs_f64()
    });
    let fastest = seconds.fold(f64::INFINITY, f64::min).max(1e-9);
    (flops * TURNS) as f64 / fastest
}

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indexing by a constant range unrolls into registers")]
unsafe fn multiply_add<V: Vector>(turns: usize) -> f32 {
    // SAFETY: the wrapper into which this is inlined has the features. The array has room for every vector.
    unsafe {
        let (x, y) = (V::splat(black_box(1.0)), V::splat(black_box(0.0)));
        // If all sums began with one value, the compiler might rotate them through registers in each iteration.
        let mut sums = [V::splat(0.0); SUMS];
        for i in 0..SUMS {
            sums[i] = V::splat(black_box(i as f32));
        }
        for _ in 0..turns {
            for i in 0..SUMS {
                sums[i] = x.mul_add(y, sums[i]);
            }
        }
        let mut lanes = [0.0; 16];
        let mut sum = sums[0];
        for i in 1..SUMS {
            sum = sum.add(sums[i]);
        }
        sum.store(lanes.as_mut_ptr());
        lanes[0]
    }
}

mod loops {
    use super::super::simd::*;
    use super::{Loop, SUMS, multiply_add};

    macro_rules! level {
        ($name:ident, $vector:ty $(, $feature:literal)?) => {
            $(#[target_feature(enable = $feature)])?
            unsafe fn $name(turns: usize) -> f32 {
                // SAFETY: by this function's contract, the machine has the features.
                unsafe { multiply_add::<$vector>(turns) }
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    level!(avx512, std::arch::x86_64::__m512, "avx512f,avx2,fma");
    #[cfg(target_arch = "x86_64")]
    level!(pairs, Pairs, "avx512f,avx512bf16,avx2,fma");
    #[cfg(target_arch = "x86_64")]
    level!(avx2, std::arch::x86_64::__m256, "avx2,fma");
    #[cfg(target_arch = "aarch64")]
    level!(neon, std::arch::aarch64::float32x4_t, "neon");
    level!(portable, Lanes);

    /// Returns the loop of a level, which this machine must support.
    pub fn of(level: Level) -> Loop {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => (avx512, 2 * 16 * SUMS),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => (avx2, 2 * 8 * SUMS),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => (neon, 2 * 4 * SUMS),
            _ => (portable, 2 * Lanes::LANES * SUMS),
        }
    }

    /// Returns the loop of pairs of bf16, or `None` if this machine does not have the instruction.
    pub fn of_pairs() -> Option<Loop> {
        #[cfg(target_arch = "x86_64")]
        {
            let has_them = Level::Avx512.is_available() && is_x86_feature_detected!("avx512bf16");
            has_them.then_some((pairs as unsafe fn(usize) -> f32, 2 * 2 * 16 * SUMS))
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_way_is_chosen_unless_one_is_named() {
        let peak = |f32, bf16_pairs| move || Peak { f32, bf16_pairs };
        let choose = |wanted: Option<&str>, peak: &dyn Fn() -> Peak| Bf16Products::choose(wanted, peak).name();
        if has_pairs() {
            assert_eq!(choose(None, &peak(196e9, Some(100e9))), "f32");
            assert_eq!(choose(None, &peak(98e9, Some(196e9))), "pairs");
            assert_eq!(choose(Some("pairs"), &peak(196e9, Some(100e9))), "pairs");
            assert_eq!(choose(Some("f32"), &peak(98e9, Some(196e9))), "f32");
            assert_eq!(choose(Some("neither"), &peak(98e9, Some(196e9))), "pairs");
        }
        let known = Peak::known();
        assert!(known.f32 > 1e8 && known.bf16() > 1e8, "{known:?}");
        assert_eq!(known.bf16_pairs.is_some(), has_pairs());
    }
}
