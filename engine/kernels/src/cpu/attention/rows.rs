//! The operations on a row of scores between the two products of attention. They are plain loops over sixteen lanes,
//! compiled for each instruction set.

use std::slice::from_raw_parts;

use half::bf16;

use crate::cpu::Float;
use crate::cpu::bf16::rounded;
use crate::cpu::gemm::Factor;
use crate::cpu::math::{exp_normal, tanh};
use crate::cpu::simd::Level;

/// The number of partial sums of a row. It is the same on every level, so the order of summation is the same too.
const LANES: usize = 16;

/// Returns the length that must be initialized of the rows of a panel of queries, the last of which sees `visible` keys. It
/// covers every panel of 12 keys, as the transpose reads them, that contains a visible key.
pub(super) fn padded(visible: usize) -> usize {
    (visible + 12).next_multiple_of(LANES)
}

/// The running softmax of a row: the maximum of its scores so far, and the sum of their exponentials relative to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub max: f32,
    pub sum: f32,
}

impl Running {
    /// The state before any key.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// The row functions of one level. All of them require that the length of a row is a multiple of sixteen.
pub(super) struct Rows {
    /// Scales a row: `x` = `factor` · `x`.
    pub scale: unsafe fn(x: &mut [f32], factor: f32),
    /// Scales a row and rounds it: `to` = `factor` · `x`. The lengths need not be multiples of sixteen.
    pub scale_to_bf16: unsafe fn(x: &[f32], factor: f32, to: &mut [bf16]),
    dot_f32: unsafe fn(x: &[f32], y: &[f32]) -> f32,
    dot_bf16: unsafe fn(x: &[bf16], y: &[bf16]) -> f32,
    /// Returns the maximum of a row's scores, of which the first `visible` are valid. Replaces the others by −∞.
    pub max: unsafe fn(scores: &mut [f32], visible: usize) -> f32,
    /// Adds `scale` times a row's next scores, of which `max` is the maximum, to the row's running softmax. Replaces the
    /// scores by exponentials relative to the new maximum. Returns the factor that rescales earlier sums to the new
    /// maximum.
    pub softmax: unsafe fn(scores: &mut [f32], max: f32, scale: f32, running: &mut Running) -> f32,
    /// Replaces scores by probabilities, given the row's log-sum-exp. The first `visible` scores are valid.
    pub probabilities: unsafe fn(scores: &mut [f32], visible: usize, scale: f32, lse: f32),
    /// Caps scores: x = `cap` · tanh(`factor` · x / `cap`).
    pub cap: unsafe fn(scores: &mut [f32], factor: f32, cap: f32),
    /// Replaces gradients of probabilities by (dp − `delta`) · (1 − (s/`cap`)²), where s are the capped scores.
    pub cap_gradients: unsafe fn(gradients: &mut [f32], capped: &[f32], delta: f32, cap: f32),
    /// Replaces gradients of probabilities by gradients of unscaled scores: `scale` · p · (dp − `delta`).
    pub score_gradients:
        unsafe fn(gradients: &mut [f32], visible: usize, probabilities: &[f32], delta: f32, scale: f32),
    /// Rounds `len` floats to bf16, in steps of sixteen, so up to fifteen floats after them are rounded too. `to` may
    /// equal `from`.
    pub round: unsafe fn(from: *const f32, len: usize, to: *mut bf16),
    /// Rounds two rows of `len` floats to bf16, and stores them as lanes of two values, with the first row in the
    /// lower halves. If `second` is null, the upper halves are 0. `to` may equal either row.
    pub pair: unsafe fn(first: *const f32, second: *const f32, len: usize, to: *mut u32),
}

impl Rows {
    /// Returns Σ `x`·`y` over `len` elements.
    ///
    /// # Safety
    /// `x` and `y` must be readable for `len` elements.
    #[inline]
    pub unsafe fn dot<T: Factor>(&self, x: *const T, y: *const T, len: usize) -> f32 {
        // SAFETY: by this function's contract. Operands are f32 or bf16.
        unsafe {
            match (T::as_f32(x), T::as_f32(y)) {
                (Some(x), Some(y)) => (self.dot_f32)(from_raw_parts(x, len), from_raw_parts(y, len)),
                _ => (self.dot_bf16)(from_raw_parts(x.cast(), len), from_raw_parts(y.cast(), len)),
            }
        }
    }

    /// The functions of a level, which must be available, for products that take pairs of bf16 or single values.
    pub fn of(level: Level, pairs: bool) -> &'static Self {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = pairs;
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if pairs => &avx512_bf16::ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => &avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => &avx2::ROWS,
            _ => &portable::ROWS,
        }
    }
}

#[inline(always)]
fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

#[inline(always)]
fn scale_to_bf16(x: &[f32], factor: f32, to: &mut [bf16]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = rounded(factor * x);
    }
}

#[inline(always)]
fn dot<T: Float>(x: &[T], y: &[T]) -> f32 {
    let mut sums = [0.0; LANES];
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (y, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in x.iter().zip(y) {
        for lane in 0..LANES {
            sums[lane] = x[lane].load().mul_add(y[lane].load(), sums[lane]);
        }
    }
    for (lane, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        sums[lane] = x.load().mul_add(y.load(), sums[lane]);
    }
    fold(sums, |x, y| x + y)
}

#[inline(always)]
fn larger(x: f32, y: f32) -> f32 {
    if x > y { x } else { y }
}

#[inline(always)]
fn max(scores: &mut [f32], visible: usize) -> f32 {
    scores[visible..].fill(f32::NEG_INFINITY);
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for chunk in scores.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            maxima[lane] = larger(chunk[lane], maxima[lane]);
        }
    }
    fold(maxima, larger)
}

#[inline(always)]
fn softmax(scores: &mut [f32], max: f32, scale: f32, running: &mut Running) -> f32 {
    let max = larger(scale * max, running.max);
    let mut sums = [0.0; LANES];
    for chunk in scores.as_chunks_mut::<LANES>().0 {
        for lane in 0..LANES {
            chunk[lane] = exp_normal(scale * chunk[lane] - max);
            sums[lane] += chunk[lane];
        }
    }
    let factor = exp_normal(running.max - max);
    *running = Running { max, sum: running.sum.mul_add(factor, fold(sums, |x, y| x + y)) };
    factor
}

#[inline(always)]
fn probabilities(scores: &mut [f32], visible: usize, scale: f32, lse: f32) {
    scores[visible..].fill(f32::NEG_INFINITY);
    for score in scores {
        *score = exp_normal(score.mul_add(scale, -lse));
    }
}

#[inline(always)]
fn cap(scores: &mut [f32], factor: f32, cap: f32) {
    let factor = factor / cap;
    for score in scores {
        *score = cap * tanh(factor * *score);
    }
}

#[inline(always)]
fn cap_gradients(gradients: &mut [f32], capped: &[f32], delta: f32, cap: f32) {
    let inverse = 1.0 / cap;
    for (gradient, score) in gradients.iter_mut().zip(capped) {
        let tanh = inverse * score;
        *gradient = (*gradient - delta) * (1.0 - tanh * tanh);
    }
}

#[inline(always)]
fn score_gradients(gradients: &mut [f32], visible: usize, probabilities: &[f32], delta: f32, scale: f32) {
    gradients[visible..].fill(0.0);
    for (gradient, probability) in gradients.iter_mut().zip(probabilities) {
        *gradient = scale * probability * (*gradient - delta);
    }
}

#[inline(always)]
unsafe fn round(from: *const f32, len: usize, to: *mut bf16) {
    for start in (0..len).step_by(LANES) {
        // SAFETY: by the function's contract. Each step reads sixteen floats before it writes, and only overwrites
        // floats that were already read.
        unsafe {
            let x: [f32; LANES] = from.add(start).cast::<[f32; LANES]>().read_unaligned();
            let x: [bf16; LANES] = std::array::from_fn(|lane| rounded(x[lane]));
            to.add(start).cast::<[bf16; LANES]>().write_unaligned(x);
        }
    }
}

#[inline(always)]
unsafe fn pair(first: *const f32, second: *const f32, len: usize, to: *mut u32) {
    let bits = |x: f32| u32::from(rounded(x).to_bits());
    for start in (0..len).step_by(LANES) {
        // SAFETY: as in `round`.
        unsafe {
            let load = |row: *const f32| row.add(start).cast::<[f32; LANES]>().read_unaligned();
            let low = load(first);
            let high = if second.is_null() { [0.0; LANES] } else { load(second) };
            let pairs: [u32; LANES] = std::array::from_fn(|lane| bits(low[lane]) | bits(high[lane]) << 16);
            to.add(start).cast::<[u32; LANES]>().write_unaligned(pairs);
        }
    }
}

/// [`round`] and [`pair`] by the instruction that rounds to bf16. It stores subnormals as zeros, and products of pairs
/// read them as zeros.
#[cfg(target_arch = "x86_64")]
mod avx512_bf16 {
    use std::arch::x86_64::*;

    use super::{LANES, Rows, avx512, bf16};
    use crate::cpu::simd::{Pairs, Vector};

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn round(from: *const f32, len: usize, to: *mut bf16) {
        for start in (0..len).step_by(LANES) {
            // SAFETY: as in [`super::round`].
            unsafe {
                Pairs::load(from.add(start)).store_rounded(to.add(start));
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pair(first: *const f32, second: *const f32, len: usize, to: *mut u32) {
        // SAFETY: as in [`super::pair`]. Each register type is valid for any bits.
        unsafe {
            let load = |row: *const f32| {
                let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(_mm512_loadu_ps(row)));
                _mm512_cvtepu16_epi32(rounded)
            };
            for start in (0..len).step_by(LANES) {
                let low = load(first.add(start));
                let high = if second.is_null() { _mm512_setzero_si512() } else { load(second.add(start)) };
                let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                to.add(start).cast::<__m512i>().write_unaligned(pairs);
            }
        }
    }

    pub(super) static ROWS: Rows = Rows { round, pair, ..avx512::ROWS };
}

/// Combines the lanes pairwise. The arrays have constant lengths, so the compiler keeps them in registers.
#[inline(always)]
fn fold(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let lanes: [f32; 8] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let lanes: [f32; 4] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 4]));
    let lanes: [f32; 2] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 2]));
    combine(lanes[0], lanes[1])
}

/// Compiles the functions for one level.
macro_rules! level {
    ($module:ident $(, $feature:literal)?) => {
        mod $module {
            use super::{Rows, Running, bf16};

            $(#[target_feature(enable = $feature)])?
            unsafe fn scale(x: &mut [f32], factor: f32) {
                super::scale(x, factor);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn scale_to_bf16(x: &[f32], factor: f32, to: &mut [bf16]) {
                super::scale_to_bf16(x, factor, to);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn dot_f32(x: &[f32], y: &[f32]) -> f32 {
                super::dot(x, y)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn dot_bf16(x: &[bf16], y: &[bf16]) -> f32 {
                super::dot(x, y)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn round(from: *const f32, len: usize, to: *mut bf16) {
                // SAFETY: by the contract of the inlined function.
                unsafe { super::round(from, len, to) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn pair(first: *const f32, second: *const f32, len: usize, to: *mut u32) {
                // SAFETY: by the contract of the inlined function.
                unsafe { super::pair(first, second, len, to) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn max(scores: &mut [f32], visible: usize) -> f32 {
                super::max(scores, visible)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn softmax(scores: &mut [f32], max: f32, scale: f32, running: &mut Running) -> f32 {
                super::softmax(scores, max, scale, running)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn probabilities(scores: &mut [f32], visible: usize, scale: f32, lse: f32) {
                super::probabilities(scores, visible, scale, lse);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn cap(scores: &mut [f32], factor: f32, cap: f32) {
                super::cap(scores, factor, cap);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn cap_gradients(gradients: &mut [f32], capped: &[f32], delta: f32, cap: f32) {
                super::cap_gradients(gradients, capped, delta, cap);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn score_gradients(
                gradients: &mut [f32],
                visible: usize,
                probabilities: &[f32],
                delta: f32,
                scale: f32,
            ) {
                super::score_gradients(gradients, visible, probabilities, delta, scale);
            }

            pub(super) const ROWS: Rows = Rows {
                scale,
                scale_to_bf16,
                dot_f32,
                dot_bf16,
                max,
                softmax,
                probabilities,
                cap,
                cap_gradients,
                score_gradients,
                round,
                pair,
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
level!(avx512, "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
level!(avx2, "avx2,fma");
level!(portable);
