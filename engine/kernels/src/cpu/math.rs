//! Elementary functions on `f32` that vectorize.
//!
//! Each function is branch-free straight-line code marked `#[inline(always)]`. A loop over it becomes vector code
//! inside `pulp::Arch::dispatch`, or inside a `#[target_feature]` function with FMA. The results have the same bits on
//! every instruction set, because every multiply-add is fused. On a machine without FMA hardware, multiply-adds are
//! fused in software, which is slow.
//!
//! NaN passes through all of these functions, so that a non-finite loss is not hidden.

/// Adding and subtracting 1.5 × 2²³ rounds an `f32` of moderate size to the nearest integer. This integer is also in
/// the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// Returns eˣ within 1.1 ulp, or 2 ulp if the result is subnormal. The result is 0 below −104 and infinity above
/// 88.73.
///
/// x is split into n·ln 2 + r with |r| ≤ ln 2 / 2. A polynomial of degree 6, fitted at Chebyshev nodes, approximates
/// eʳ with a relative error of 1.0e-8.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN_2: f32 = std::f32::consts::LN_2;
    /// ln 2 − [`LN_2`].
    const LN_2_REST: f32 = -1.904_654_3e-9;

    // The limits are applied by comparisons, because `f32::min` and `f32::max` would replace a NaN.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };

    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN_2_REST, n.mul_add(-LN_2, x));

    let q = 0.001_392_625_1_f32;
    let q = q.mul_add(r, 0.008_363_233);
    let q = q.mul_add(r, 0.041_666_554);
    let q = q.mul_add(r, 0.166_665_77);
    let q = q.mul_add(r, 0.5);
    let power = (r * r).mul_add(q, r) + 1.0;

    // 2ⁿ is applied as a product of two powers, because n can be as large as 128 and as small as −150.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    power * power_of_two(half) * power_of_two(n.wrapping_sub(half))
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

    let large = 1.0 - 2.0 / (exp(2.0 * magnitude) + 1.0);
    let result = if magnitude < 0.625 { small } else { large };
    result.copysign(x)
}

/// The logistic function 1 / (1 + e⁻ˣ) within 3 ulp, down to its underflow at −88.7.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
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
    fn errors_stay_within_the_stated_ulps() {
        type Case = (&'static str, std::ops::RangeInclusive<f32>, fn(f32) -> f32, fn(f64) -> f64, f64);
        let cases: [Case; 5] = [
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
        let cases: [(f32, f32); 6] = [
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
        for f in [exp, tanh, sigmoid] {
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
        }
    }
}
