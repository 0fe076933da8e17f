//! Sums and maxima of slices in sixteen lanes. The loops vectorize, and give the same bits on every machine.

use super::Float;

const LANES: usize = 16;

/// Σ f(x).
#[inline(always)]
pub fn sum<T: Float>(x: &[T], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail: f32 = chunks.remainder().iter().map(|&x| f(x.load())).sum();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x.load());
        }
    }
    fold(lanes, |a, b| a + b) + tail
}

/// Σ f(a, b).
#[inline(always)]
pub fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(&a, &b)| f(a, b)).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += f(a, b);
        }
    }
    fold(lanes, |a, b| a + b) + tail
}

/// Σ f(a, b, c), for each of the `N` values of f.
#[inline(always)]
pub fn sums3<T: Float, const N: usize>(a: &[T], b: &[T], c: &[T], f: impl Fn(f32, f32, f32) -> [f32; N]) -> [f32; N] {
    let ((a, a_tail), (b, b_tail), (c, c_tail)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    let (mut lanes, mut tail) = ([[0.0; LANES]; N], [0.0; N]);
    for ((a, b), c) in a_tail.iter().zip(b_tail).zip(c_tail) {
        let values = f(a.load(), b.load(), c.load());
        (0..N).for_each(|n| tail[n] += values[n]);
    }
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        // One loop for each value becomes one vector for each.
        for (n, lanes) in lanes.iter_mut().enumerate() {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                *sum += f(a[lane].load(), b[lane].load(), c[lane].load())[n];
            }
        }
    }
    std::array::from_fn(|n| fold(lanes[n], |a, b| a + b) + tail[n])
}

/// Returns the greatest element, or −∞ for an empty slice.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    fold(lanes, f32::max).max(tail)
}

/// Returns the least element, or ∞ for an empty slice.
#[inline(always)]
pub fn min(x: &[f32]) -> f32 {
    let mut lanes = [f32::INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder().iter().copied().fold(f32::INFINITY, f32::min);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x < *lane { x } else { *lane };
        }
    }
    fold(lanes, f32::min).min(tail)
}

/// Returns the greatest magnitude, or 0 for an empty slice.
#[inline(always)]
pub fn max_abs(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder().iter().fold(0.0, |max: f32, x| max.max(x.abs()));
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x.abs() > *lane { x.abs() } else { *lane };
        }
    }
    fold(lanes, f32::max).max(tail)
}

/// Combines the lanes pairwise, as a tree.
#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}
