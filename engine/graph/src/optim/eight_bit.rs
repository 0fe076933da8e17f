//! Eight-bit storage of optimizer states. Each element is divided by a scale, which is derived from the greatest
//! magnitude of its block, and stored as an eight-bit float.
//!
//! The block-wise quantization is that of Dettmers et al. ("8-bit Optimizers via Block-wise Quantization", arXiv
//! 2110.02861, section 2.1). A block of [`BLOCK`] neighbours shares one f32 scale. So an outlier affects only the
//! elements of its own block, and blocks are independent.
//!
//! The code of an element is a small float, and not the paper's dynamic tree. The dynamic tree has half of its values
//! in the greatest decade, and only two values in the seventh. Adam divides by √v, so the relative error of v matters,
//! even for small v. A float has the same relative error in all decades. The tests compare the two codes:
//!
//! - If the gradients of a block differ by a factor of 10³, Adam's steps with the float are within 3 to 4 % of exact
//!   steps, and steps with the dynamic tree are not.
//! - If the gradients are of similar size, the dynamic tree is slightly better, with errors of 2 % instead of 3 %.
//!
//! | | bits | greatest ÷ least | relative error |
//! |---|---|---|---|
//! | [`Signed`], first moment | sign, 4 exponent, 3 mantissa | 2.5·10⁵ | ≤ 2⁻⁴ in the upper 3.1·10⁴ |
//! | [`Unsigned`], second moment | 5 exponent, 3 mantissa | 1.6·10¹⁰ | ≤ 2⁻⁴ in the upper 2.0·10⁹ |
//!
//! Below the range given in the last column, values are evenly spaced down to zero, like the subnormal values of any
//! float. In a block that is not all zero, a second moment never rounds to zero, because Adam's step would then be
//! extremely large (the zero-point problem of Li et al., arXiv 2309.01507, section 4). Instead, it rounds up to the
//! smallest value, which makes Adam's step smaller.
//!
//! Encoding and decoding take a few integer operations and no table, so that they vectorize.

/// Number of elements that share a scale. An element takes 8 + 32/256 bits, of which 32/256 are for the f32 scale.
pub(super) const BLOCK: usize = 256;

const MANTISSA_BITS: u32 = 3;

/// The greatest value that a code can stand for, in multiples of the scale.
const GREATEST: f32 = 1.875;

/// A block whose greatest magnitude is below this is stored as zeros. For any other block, [`GREATEST`] divided by the
/// greatest magnitude is finite.
const LEAST_SCALED: f32 = 1e-37;

/// A tiny float with `EXPONENTS` exponents. The greatest exponent stands for 2⁰.
pub(super) trait Code {
    /// Number of exponents. Exponent 0 is included; its values are evenly spaced.
    const EXPONENTS: u32;
    /// Returns the code of `x`, an element divided by the scale.
    fn encode(x: f32) -> u8;
    /// Returns the value of a code, which the caller must multiply by the scale.
    fn decode(code: u8) -> f32;
}

/// A code with one sign bit, 4 exponent bits and 3 mantissa bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Signed;

/// A code with 5 exponent bits and 3 mantissa bits. Encoding never returns the code of zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unsigned;

impl Code for Signed {
    const EXPONENTS: u32 = 16;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        let sign = (x.to_bits() >> 31) << 7;
        (sign | encode_magnitude(x.abs(), Self::EXPONENTS)) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let magnitude = decode_magnitude(u32::from(code) & 0x7f, Self::EXPONENTS);
        f32::from_bits(magnitude.to_bits() | (u32::from(code) & 0x80) << 24)
    }
}

impl Code for Unsigned {
    const EXPONENTS: u32 = 32;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        let code = encode_magnitude(x, Self::EXPONENTS);
        // This form with a comparison vectorizes.
        (if code == 0 { 1 } else { code }) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        decode_magnitude(u32::from(code), Self::EXPONENTS)
    }
}

/// The difference between the exponent field of an f32 and the exponent of the code for the same value.
const fn bias(exponents: u32) -> u32 {
    127 - (exponents - 1)
}

/// Returns 2^(exponents + 1), the factor by which a value in the evenly spaced range is multiplied to get its code.
const fn even_scale(exponents: u32) -> f32 {
    f32::from_bits((127 + exponents - 2 + MANTISSA_BITS) << 23)
}

/// Returns the code nearest to x, for 0 ≤ x ≤ [`GREATEST`]. Of two equally near codes, it returns the even one.
#[inline(always)]
fn encode_magnitude(x: f32, exponents: u32) -> u32 {
    const DROPPED: u32 = 23 - MANTISSA_BITS;
    let bits = x.to_bits();
    // The additions wrap, because overflow checks would not vectorize.
    let nearest = bits.wrapping_add((1 << (DROPPED - 1)) - 1).wrapping_add(bits >> DROPPED & 1) >> DROPPED;
    // Adding 2²³ rounds to an integer and leaves this integer in the low bits.
    let even = (x * even_scale(exponents) + 8_388_608.0).to_bits() & 0xff;
    let is_even = bits >> 23 <= bias(exponents);
    if is_even { even } else { nearest.wrapping_sub(bias(exponents) << MANTISSA_BITS) }
}

#[inline(always)]
fn decode_magnitude(code: u32, exponents: u32) -> f32 {
    let float = f32::from_bits((code + (bias(exponents) << MANTISSA_BITS)) << (23 - MANTISSA_BITS));
    let even = code as f32 * (1.0 / even_scale(exponents));
    if code < 1 << MANTISSA_BITS { even } else { float }
}

/// Encodes a block into `codes`, and returns the scale by which decoded elements are multiplied.
#[inline(always)]
pub(super) fn quantise<C: Code>(block: &[f32], codes: &mut [u8]) -> f32 {
    let greatest = gapless_kernels::cpu::reduce::max_abs(block);
    // If the greatest magnitude is NaN or too small, the block is stored as zeros.
    let factor = if greatest >= LEAST_SCALED { GREATEST / greatest } else { 0.0 };
    for (code, &x) in codes.iter_mut().zip(block) {
        let scaled = x * factor;
        // The product may round up past `GREATEST`.
        *code = C::encode(if scaled > GREATEST { GREATEST } else { scaled });
    }
    if greatest >= LEAST_SCALED { greatest / GREATEST } else { 0.0 }
}

/// Decodes `codes` into `block`.
#[inline(always)]
pub(super) fn dequantise<C: Code>(codes: &[u8], scale: f32, block: &mut [f32]) {
    for (x, &code) in block.iter_mut().zip(codes) {
        *x = C::decode(code) * scale;
    }
}

/// The reference implementation in f64, written from the definition of the codes.
pub(super) mod exact {
    use super::{BLOCK, GREATEST, LEAST_SCALED};

    /// Returns the values of the codes 0, 1, 2, … without a sign.
    pub fn values(exponents: i32) -> Vec<f64> {
        let value = |exponent: i32, mantissa: i32| match exponent {
            0 => f64::from(mantissa) / 8.0 * 2f64.powi(2 - exponents),
            _ => (1.0 + f64::from(mantissa) / 8.0) * 2f64.powi(exponent + 1 - exponents),
        };
        (0..exponents).flat_map(|exponent| (0..8).map(move |mantissa| value(exponent, mantissa))).collect()
    }

    /// Returns the code whose value is nearest to x.
    pub fn nearest(values: &[f64], x: f64) -> usize {
        let distance = |&code: &usize| (values[code] - x).abs();
        (0..values.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("there are values")
    }

    /// Decodes a whole tensor.
    pub fn decode(codes: &[f64], scales: &[f64], signed: bool) -> Vec<f64> {
        let values = values(if signed { 16 } else { 32 });
        let decode = |(index, &code): (usize, &f64)| {
            let (code, scale) = (code as usize, scales[index / BLOCK]);
            if signed && code >= 128 { -values[code - 128] * scale } else { values[code] * scale }
        };
        codes.iter().enumerate().map(decode).collect()
    }

    /// Returns the codes and scales of a whole tensor.
    pub fn encode(x: &[f64], signed: bool) -> (Vec<f64>, Vec<f64>) {
        let values = values(if signed { 16 } else { 32 });
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for block in x.chunks(BLOCK) {
            let greatest = block.iter().fold(0.0, |greatest: f64, x| greatest.max(x.abs()));
            let scale = if greatest >= f64::from(LEAST_SCALED) { greatest / f64::from(GREATEST) } else { 0.0 };
            for &x in block {
                let scaled = if scale > 0.0 { x / scale } else { 0.0 };
                let code = nearest(&values, scaled.abs());
                codes.push(match signed {
                    true => code + if x.is_sign_negative() { 128 } else { 0 },
                    false => code.max(1),
                } as f64);
            }
            scales.push(scale);
        }
        (codes, scales)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;
    use gapless_kernels::Numbers;

    #[test]
    fn every_code_has_the_value_of_its_definition_and_is_its_own_nearest() {
        for (code, value) in exact::values(16).into_iter().enumerate() {
            assert_eq!(f64::from(Signed::decode(code as u8)), value);
            assert_eq!(f64::from(Signed::decode(code as u8 + 128)), -value);
            assert_eq!(usize::from(Signed::encode(value as f32)), code);
            assert_eq!(usize::from(Signed::encode(-value as f32)), code + 128);
        }
        for (code, value) in exact::values(32).into_iter().enumerate() {
            assert_eq!(f64::from(Unsigned::decode(code as u8)), value);
            assert_eq!(usize::from(Unsigned::encode(value as f32)), code.max(1), "the zero rounds up");
        }
        assert_eq!(exact::values(16).last(), Some(&f64::from(GREATEST)));
    }

    /// Returns the allowed error of an element. This is the larger of two values, plus a few roundings to f32: half a
    /// unit in the last place of the 3-bit mantissa, and `spacings` times the spacing of the evenly spaced range.
    fn allowed(x: f64, greatest: f64, exponents: i32, spacings: f64) -> f64 {
        let spacing = 2f64.powi(-exponents - 1) * greatest / f64::from(GREATEST);
        (x.abs() / 16.0).max(spacings * spacing) * (1.0 + 1e-6)
    }

    /// Values of very different sizes: both signs, zeros, and the smallest floats.
    fn numbers() -> impl Strategy<Value = Vec<f32>> {
        let number = prop_oneof![
            8 => (-60i32..20, -1.0f32..1.0).prop_map(|(exponent, x)| x * 2f32.powi(exponent)),
            1 => Just(0.0f32),
            1 => any::<u32>().prop_map(|bits| f32::from_bits(bits % 0x7e00_0000)),
        ];
        prop::collection::vec(number, 1..3 * BLOCK)
    }

    generated! {
        #[test]
        fn errors_stay_within_their_bounds_and_codes_are_those_of_the_judge(x in numbers()) {
            for block in x.chunks(BLOCK) {
                check_block::<Signed>(block, 0.5)?;
                // A second moment may be rounded up by one whole spacing.
                check_block::<Unsigned>(&block.iter().map(|x| x.abs()).collect::<Vec<_>>(), 1.0)?;
            }
        }
    }

    fn check_block<C: Code>(block: &[f32], spacings: f64) -> Result<(), TestCaseError> {
        let signed = C::EXPONENTS == 16;
        let (mut codes, mut back) = (vec![0; block.len()], vec![0.0; block.len()]);
        let scale = quantise::<C>(block, &mut codes);
        dequantise::<C>(&codes, scale, &mut back);
        let greatest = f64::from(block.iter().fold(0.0f32, |greatest, x| greatest.max(x.abs())));
        if greatest < f64::from(LEAST_SCALED) {
            prop_assert!(back.iter().all(|&x| x == 0.0));
            return Ok(());
        }
        let (expected, scales) = exact::encode(&block.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), signed);
        prop_assert!((f64::from(scale) - scales[0]).abs() <= 1e-7 * scales[0]);
        for (((&x, &y), &code), &expected) in block.iter().zip(&back).zip(&codes).zip(&expected) {
            let (x, y) = (f64::from(x), f64::from(y));
            let allowed = allowed(x, greatest, C::EXPONENTS as i32, spacings);
            prop_assert!((x - y).abs() <= allowed + 1e-45, "{x:e} came back as {y:e}, of at most {greatest:e}");
            // The scale is rounded to f32. So for a value half way between two codes, either code may be the nearest.
            prop_assert!((f64::from(code) - expected).abs() <= 1.0 || x.abs() <= allowed);
            prop_assert!(signed || y > 0.0, "no second moment vanishes");
        }
        Ok(())
    }

    /// The dynamic tree of the paper (section 1.3). It has seven decades, each with `first`·2ⁱ even steps, and the
    /// value 1.
    fn dynamic_tree(first: usize) -> Vec<f64> {
        let mut values = vec![0.0];
        for decade in 0..7 {
            let steps = first << decade;
            let middle = |step: usize| 0.1 + 0.9 * (step as f64 + 0.5) / steps as f64;
            values.extend((0..steps).map(|step| middle(step) * 10f64.powi(decade - 6)));
        }
        values.push(1.0);
        values
    }

    /// Returns the root mean square error of Adam's steps m/√v, relative to the size of a step. The functions `m` and
    /// `v` store and restore the two moments. The gradients' sizes are log-normal with a standard deviation of `spread`
    /// e-folds.
    fn error(spread: f64, m: impl Fn(&[f64]) -> Vec<f64>, v: impl Fn(&[f64]) -> Vec<f64>) -> f64 {
        const BLOCKS: usize = 64;
        let numbers = Numbers::from_seed(11);
        let step = |m: f64, v: f64| m / (v.sqrt() + 1e-8);
        let mut squares = 0.0;
        for block in 0..BLOCKS {
            let normal = |i: usize, which: usize| numbers.normal(2 * (block * BLOCK + i) + which);
            let sizes: Vec<f64> = (0..BLOCK).map(|i| 1e-3 * (spread * normal(i, 0)).exp()).collect();
            // These are the moments after many steps in which the size of each gradient was constant.
            let exact_m: Vec<f64> = sizes.iter().enumerate().map(|(i, size)| size * normal(i, 1)).collect();
            let exact_v: Vec<f64> = sizes.iter().map(|size| size * size).collect();
            for (i, (m, v)) in m(&exact_m).into_iter().zip(v(&exact_v)).enumerate() {
                squares += (step(m, v) - step(exact_m[i], exact_v[i])).powi(2);
            }
        }
        (squares / (BLOCKS * BLOCK) as f64).sqrt()
    }

    /// Compares the float code with the dynamic tree. If the elements of a block are of similar size, steps with both
    /// codes are accurate, and those with the tree are slightly better. If not, steps with the tree are wrong. They are
    /// extremely large wherever a second moment is rounded to zero.
    #[test]
    fn steps_stay_near_exact_ones_where_a_dynamic_tree_fails() {
        let ours = |signed| {
            move |x: &[f64]| {
                let (codes, scales) = exact::encode(x, signed);
                exact::decode(&codes, &scales, signed)
            }
        };
        let tree = |first, least| {
            let values = dynamic_tree(first);
            move |x: &[f64]| {
                let greatest = x.iter().fold(0.0, |greatest: f64, x| greatest.max(x.abs()));
                let code = |x: &f64| exact::nearest(&values, x.abs() / greatest).max(least);
                x.iter().map(|x| values[code(x)] * greatest * x.signum()).collect()
            }
        };
        // Each case gives the spread and three bounds: the maximum error of the float code, the minimum error of the
        // tree if the second moment is never rounded to zero, and the minimum error of the paper's tree.
        for (spread, most, without_zero, with_zero) in
            [(0.5, 0.04, 0.0, 0.0), (1.0, 0.04, 0.0, 0.0), (1.5, 0.04, 0.08, 100.0), (2.0, 0.05, 0.2, 1000.0)]
        {
            let ours = error(spread, ours(true), ours(false));
            let trees = [1, 0].map(|least| error(spread, tree(1, 0), tree(2, least)));
            println!("spread {spread}: {ours:.4} of a step; with a dynamic tree {:.4}, {:.4}", trees[0], trees[1]);
            assert!(ours < most, "spread {spread}: {ours}");
            assert!(trees[0] >= without_zero && trees[1] >= with_zero, "spread {spread}: {trees:?}");
        }
    }
}
