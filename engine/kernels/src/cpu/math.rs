//! Elementary functions that vectorize.
//!
//! Each function is branch-free straight-line code marked `#[inline(always)]`. A loop over it becomes vector code
//! inside `pulp::Arch::dispatch`, or inside a `#[target_feature]` function with FMA. The results have the same bits on
//! every instruction set, because every multiply-add is fused. On a machine without FMA hardware, multiply-adds are
//! fused in software, which is slow.
//!
//! NaN passes through all of these functions, so that a non-finite loss is not hidden.

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

/// Adding and subtracting 1.5 × 2²³ rounds an `f32` of moderate size to the nearest integer. This integer is also in
/// the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// Returns eˣ within 1.1 ulp, or 2 ulp if the result is subnormal. The result is 0 below −104 and infinity above
/// 88.73.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // The limits are applied by comparisons, because `f32::min` and `f32::max` would replace a NaN.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let (power, rounded) = split(x);
    // 2ⁿ is applied as a product of two powers, because n can be as large as 128 and as small as −150.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    power * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Returns [`exp`] of `x` with a quarter fewer operations, for softmax and its like, in which results that are not normal
/// floats do not count: the result is 0 below −87.7 and infinity above 88.3.
#[inline(always)]
pub fn exp_normal(x: f32) -> f32 {
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -88.0 { -88.0 } else { x };
    let (power, rounded) = split(x);
    // The shift drops all bits of the sum but those of n. The powers for −127 and 128 are 0 and infinity.
    power * f32::from_bits(rounded.to_bits().wrapping_add(127) << 23)
}

/// Splits x into n·ln 2 + r with |r| ≤ ln 2 / 2. Returns eʳ, and n + [`ROUND`].
///
/// A polynomial of degree 6, fitted at Chebyshev nodes, approximates eʳ with a relative error of 1.0e-8.
#[inline(always)]
fn split(x: f32) -> (f32, f32) {
    const LN_2: f32 = std::f32::consts::LN_2;
    /// ln 2 − [`LN_2`].
    const LN_2_REST: f32 = -1.904_654_3e-9;

    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN_2_REST, n.mul_add(-LN_2, x));

    let q = 0.001_392_625_1_f32;
    let q = q.mul_add(r, 0.008_363_233);
    let q = q.mul_add(r, 0.041_666_554);
    let q = q.mul_add(r, 0.166_665_77);
    let q = q.mul_add(r, 0.5);
    ((r * r).mul_add(q, r) + 1.0, rounded)
}

/// 2ⁿ for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Returns tanh x within 2 ulp.
///
/// Above 0.625 the formula is 1 − 2 / (e²ˣ + 1). Up to 0.625 this formula would lose digits by cancellation, so an odd
/// polynomial with a relative error of 1.6e-8 is used.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();

    let z = x * x;
    let p = -0.006_096_714_f32;
    let p = p.mul_add(z, 0.020_997_18);
    let p = p.mul_add(z, -0.053_850_91);
    let p = p.mul_add(z, 0.133_327_7);
    let p = p.mul_add(z, -0.333_333_3);
    let small = (magnitude * z).mul_add(p, magnitude);

    let large = 1.0 - 2.0 / (exp_normal(2.0 * magnitude) + 1.0);
    let result = if magnitude < 0.625 { small } else { large };
    result.copysign(x)
}

/// The logistic function 1 / (1 + e⁻ˣ) within 3 ulp, down to its underflow at −88.3.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp_normal(-x))
}

/// Returns (sin x, cos x) for |x| ≤ 2³², each within 3e-16.
///
/// x is split into n·π/2 + r with |r| ≤ π/4. The Taylor polynomials of degrees 15 and 16 have truncation errors below
/// 5e-17 there.
#[inline(always)]
pub fn sin_cos(x: f64) -> (f64, f64) {
    /// Adding and subtracting 1.5 × 2⁵² rounds to the nearest integer, which is also in the low bits of the sum.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// π/2 − [`FRAC_PI_2`].
    const FRAC_PI_2_REST: f64 = 6.123_233_995_736_766e-17;

    let rounded = x.mul_add(FRAC_2_PI, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-FRAC_PI_2_REST, n.mul_add(-FRAC_PI_2, x));
    // A term of a Taylor polynomial is the one before it, times −r², divided by the next two factors of its factorial.
    let z = -r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for factors in [14.0 * 15.0, 12.0 * 13.0, 10.0 * 11.0, 8.0 * 9.0, 6.0 * 7.0, 4.0 * 5.0, 2.0 * 3.0] {
        sin = (sin * z).mul_add(1.0 / factors, 1.0);
    }
    for factors in [15.0 * 16.0, 13.0 * 14.0, 11.0 * 12.0, 9.0 * 10.0, 7.0 * 8.0, 5.0 * 6.0, 3.0 * 4.0, 1.0 * 2.0] {
        cos = (cos * z).mul_add(1.0 / factors, 1.0);
    }
    let sin = r * sin;

    // Each quarter turn swaps both and changes a sign.
    let quarters = rounded.to_bits();
    let (s, c) = if quarters & 1 == 0 { (sin, cos) } else { (cos, sin) };
    (if quarters & 2 == 0 { s } else { -s }, if (quarters + 1) & 2 == 0 { c } else { -c })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the largest error of `f`, and the argument where it occurs. The error is in ulps of the reference, or
    /// in units of the subnormal spacing if that is larger. The arguments are every 211th finite float inside
    /// `range`, of both signs.
    fn worst_ulp(range: std::ops::RangeInclusive<f32>, f: fn(f32) -> f32, reference: fn(f64) -> f64) -> (f64, f32) {
        let mut worst = (0.0, 0.0);
        for bits in (0..=u32::MAX).step_by(211) {
            let x = f32::from_bits(bits);
            if !range.contains(&x) {
                continue;
            }
            let expected = reference(f64::from(x));
            let magnitude = (expected.abs() as f32).min(f32::MAX);
            let ulp = f64::from(f32::from_bits(magnitude.to_bits() + 1)) - f64::from(magnitude);
            let error = if ulp.is_finite() { (f64::from(f(x)) - expected).abs() / ulp } else { 0.0 };
            if error > worst.0 {
                worst = (error, x);
            }
        }
        worst
    }

    #[test]
    fn sines_and_cosines_stay_within_the_stated_errors() {
        // Small and large angles, and those next to multiples of an eighth of a turn, where signs and quarters change.
        let steps = [1.0, 0.1, 1e-3, 1e-8, FRAC_PI_2, std::f64::consts::FRAC_PI_4, 42_949.672_96];
        for x in (0..100_000).step_by(7).flat_map(|n| steps.map(|step| f64::from(n) * step)) {
            for x in [x, -x, x.next_up(), x.next_down()] {
                let ((sin, cos), (expected_sin, expected_cos)) = (sin_cos(x), x.sin_cos());
                let error = (sin - expected_sin).abs().max((cos - expected_cos).abs());
                assert!(error <= 3e-16, "sin_cos({x:e}): ({sin}, {cos}) is not ({expected_sin}, {expected_cos})");
            }
        }
        assert!(sin_cos(f64::NAN).0.is_nan() && sin_cos(f64::INFINITY).1.is_nan());
    }

    #[test]
    fn errors_stay_within_the_stated_ulps() {
        type Case = (&'static str, std::ops::RangeInclusive<f32>, fn(f32) -> f32, fn(f64) -> f64, f64);
        let cases: [Case; 6] = [
            ("exp_normal", -87.3..=88.3, exp_normal, f64::exp, 1.1),
            ("exp", -87.3..=88.72, exp, f64::exp, 1.1),
            ("exp, subnormal", -104.0..=-87.3, exp, f64::exp, 2.0),
            ("tanh", -20.0..=20.0, tanh, f64::tanh, 2.0),
            ("sigmoid", -88.0..=88.0, sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 3.0),
            ("exp, softmax", -20.0..=0.0, exp, f64::exp, 1.1),
        ];
        for (name, range, f, reference, limit) in cases {
            let (error, at) = worst_ulp(range, f, reference);
            assert!(error > 0.0 && error <= limit, "{name}: {error:.3} ulp at {at:e}, allowed {limit}");
        }
    }

    #[test]
    fn ends_of_the_range() {
        let cases: [(f32, f32); 12] = [
            (exp_normal(0.0), 1.0),
            (exp_normal(-87.7), 0.0),
            (exp_normal(-1e9), 0.0),
            (exp_normal(f32::NEG_INFINITY), 0.0),
            (exp_normal(88.4), f32::INFINITY),
            (exp_normal(f32::INFINITY), f32::INFINITY),
            (exp(0.0), 1.0),
            (exp(f32::NEG_INFINITY), 0.0),
            (exp(f32::INFINITY), f32::INFINITY),
            (tanh(f32::INFINITY), 1.0),
            (tanh(f32::NEG_INFINITY), -1.0),
            (sigmoid(f32::NEG_INFINITY), 0.0),
        ];
        for (got, expected) in cases {
            assert_eq!(got, expected);
        }
        for f in [exp, exp_normal, tanh, sigmoid] {
            assert!(f(f32::NAN).is_nan());
        }
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn vector_code_gives_the_same_bits() {
        let x: Vec<f32> = (0..4099).map(|i| (i as f32 - 2048.0) * 0.047).collect();
        let mut y = x.clone();
        pulp::Arch::new().dispatch(|| {
            for y in &mut y {
                *y = tanh(*y) + exp(*y);
            }
        });
        for (x, y) in x.iter().zip(&y) {
            assert_eq!((tanh(*x) + exp(*x)).to_bits(), y.to_bits(), "at {x}");
            let is_normal = (-87.3..=88.3).contains(x);
            assert!(!is_normal || exp_normal(*x).to_bits() == exp(*x).to_bits(), "at {x}");
        }
    }
}
