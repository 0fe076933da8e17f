//! Conversion between bf16, in which tensors are stored, and f32, in which kernels compute.
//!
//! Every bf16 value is an f32 value, so widening is exact. Rounding is to nearest, ties to even, including subnormals
//! and infinities. GPUs round in the same way. `vcvtneps2bf16` does so too, except that it flushes subnormals to
//! zero.

use candle_core::Layout;
use half::bf16;

use super::{BLOCK, InPieces, Pieces, each_row, row_of, vectorize};

/// Converts to f32, exactly.
#[inline(always)]
pub fn widened(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to the nearest bf16, ties to even. A NaN stays a NaN.
#[inline(always)]
pub fn rounded(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
}

/// Rounds to one of the two nearest bf16 values, `x` itself if it is one: away from zero with a probability that is the
/// distance to the value nearer to zero, in units of the distance between the two. So the expectation is `x`. `random` has
/// 16 uniform bits. Values that are not finite stay what they are.
#[inline(always)]
pub fn rounded_stochastically(x: f32, random: u16) -> bf16 {
    let either = x.to_bits().wrapping_add(random.into()) >> 16;
    if x.is_finite() { bf16::from_bits(either as u16) } else { rounded(x) }
}

/// Rounds a row in place: bf16 number i takes the place of the first half of the bytes of floats 2·i and 2·i + 1.
#[inline(always)]
pub fn round_in_place(row: &mut [f32]) {
    const LANES: usize = 16;
    let from = row.as_mut_ptr();
    let to = from.cast::<bf16>();
    let whole = row.len() - row.len() % LANES;
    // SAFETY: all addresses are within the row. Sixteen floats are read before the first of their places, which are
    // never behind them, is written.
    unsafe {
        for start in (0..whole).step_by(LANES) {
            let x = from.add(start).cast::<[f32; LANES]>().read();
            to.add(start).cast::<[bf16; LANES]>().write(std::array::from_fn(|lane| rounded(x[lane])));
        }
        for i in whole..row.len() {
            to.add(i).write(rounded(from.add(i).read()));
        }
    }
}

/// A type that kernels load from and store to while they compute in f32.
pub trait Float: super::Element {
    /// Converts to f32.
    fn load(self) -> f32;

    /// Converts from f32, rounding if necessary.
    fn store(x: f32) -> Self;

    /// Converts from f32. If rounding is necessary, it is [stochastic](rounded_stochastically).
    fn store_stochastically(x: f32, random: u16) -> Self;

    /// Loads `len` contiguous elements as f32.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for `len` elements, and the two ranges must not overlap.
    #[inline(always)]
    unsafe fn load_all(from: *const Self, to: *mut f32, len: usize) {
        for i in 0..len {
            // SAFETY: by this function's contract.
            unsafe { *to.add(i) = (*from.add(i)).load() };
        }
    }
}

impl Float for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn store_stochastically(x: f32, _: u16) -> Self {
        x
    }

    #[inline(always)]
    unsafe fn load_all(from: *const Self, to: *mut f32, len: usize) {
        // SAFETY: by this function's contract.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        widened(self)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        rounded(x)
    }

    #[inline(always)]
    fn store_stochastically(x: f32, random: u16) -> Self {
        rounded_stochastically(x, random)
    }
}

/// Evaluates an expression with a type alias for the float type in which a tensor is stored.
#[doc(hidden)]
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $float:ident => $body:expr) => {
        match $dtype == $crate::cpu::bf16::DTYPE {
            true => {
                type $float = $crate::cpu::bf16::Stored;
                $body
            }
            false => {
                type $float = f32;
                $body
            }
        }
    };
}
#[doc(inline)]
pub use with_float;

/// The bf16 type.
pub use half::bf16 as Stored;

/// The candle name of bf16.
pub const DTYPE: candle_core::DType = candle_core::DType::BF16;

/// Widens contiguous elements.
pub(super) fn widen(x: &[bf16], out: &mut [f32]) {
    out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).for_each(|(out, x)| {
        vectorize!(out.iter_mut().zip(x).for_each(|(o, &x)| *o = widened(x)));
    });
}

/// Widens the elements of a strided tensor to f32, and stores them contiguously in `out`.
pub(super) fn widen_strided(x: &[bf16], layout: &Layout, out: &mut [f32]) {
    each_row(out, layout, |row, out| {
        let (x, step) = row_of(x, layout, row);
        vectorize!(match step {
            1 => out.iter_mut().zip(x).for_each(|(o, &x)| *o = widened(x)),
            _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = widened(x[i * step])),
        });
    });
}

/// Rounds contiguous elements.
pub(super) fn round(x: &[f32], out: &mut [bf16]) {
    out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).for_each(|(out, x)| {
        vectorize!(out.iter_mut().zip(x).for_each(|(o, &x)| *o = rounded(x)));
    });
}

/// Returns the layout of the f32 copy of a tensor with this layout. The copy is contiguous and contains broadcast
/// elements once. If the tensor is contiguous in some order of dimensions, the copy has the same order.
pub fn widened_layout(layout: &Layout) -> Layout {
    let stored: usize = distinct(layout).dims().iter().product();
    if stored == super::args::span(layout) {
        return Layout::new(layout.shape().clone(), layout.stride().to_vec(), 0);
    }
    let mut step = 1;
    let mut strides = vec![0; layout.dims().len()];
    for ((stride, &dim), &old) in strides.iter_mut().zip(layout.dims()).zip(layout.stride()).rev() {
        if old > 0 {
            *stride = step;
            step *= dim;
        }
    }
    Layout::new(layout.shape().clone(), strides, 0)
}

/// Returns the layout with each broadcast dimension reduced to one element.
pub fn distinct(layout: &Layout) -> Layout {
    let dims =
        layout.dims().iter().zip(layout.stride()).map(|(&dim, &stride)| if stride == 0 { dim.min(1) } else { dim });
    Layout::new(dims.collect::<Vec<_>>().into(), layout.stride().to_vec(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the `half` crate, for all bf16 values, and for f32 values between and halfway between them.
    #[test]
    fn rounding_is_to_the_nearest() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let expected = bf16::from_f32(x);
                assert!(rounded(x) == expected || (x.is_nan() && rounded(x).is_nan()), "{x:e}");
                assert!(widened(expected).to_bits() == expected.to_f32().to_bits() || expected.is_nan());
            }
        }
    }

    /// Over all random numbers, the mean of the rounded values is the value. Both are exact in f64.
    #[test]
    fn the_expectation_of_stochastic_rounding_is_the_value() {
        for x in [1.0f32, -1.0, 1.003, -2.7e-3, 3.1e38, 1e-40, -0.0, f32::from_bits(0x3f80_ffff)] {
            let sum: f64 = (0..=u16::MAX).map(|random| f64::from(widened(rounded_stochastically(x, random)))).sum();
            assert_eq!(sum / 65536.0, f64::from(x), "{x}");
        }
        for x in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let kept = widened(rounded_stochastically(x, u16::MAX));
            assert!(kept == x || (kept.is_nan() && x.is_nan()), "{x}");
        }
    }

    #[test]
    fn copies_have_no_gaps() {
        let layout = |dims: &[usize], strides: &[usize]| Layout::new(dims.into(), strides.to_vec(), 0);
        for (dims, strides, expected) in [
            (&[2, 3, 4][..], &[12, 4, 1][..], &[12, 4, 1][..]),
            (&[2, 3, 4], &[1, 2, 6], &[1, 2, 6]),
            (&[2, 3, 4], &[30, 10, 1], &[12, 4, 1]),
            (&[2, 3, 4], &[0, 10, 1], &[0, 4, 1]),
            (&[2, 3], &[0, 0], &[0, 0]),
        ] {
            let wide = widened_layout(&layout(dims, strides));
            assert_eq!(wide.stride(), expected, "{strides:?}");
            let x: Vec<bf16> = (0..100).map(|i| rounded(i as f32)).collect();
            let once = distinct(&layout(dims, strides));
            let mut out = vec![0.0; once.dims().iter().product()];
            widen_strided(&x, &once, &mut out);
            if strides != expected {
                let mut all = vec![0.0; dims.iter().product()];
                widen_strided(&x, &layout(dims, strides), &mut all);
                for (index, expected) in all.iter().enumerate() {
                    let (row, step) = row_of(&out, &wide, index / dims[dims.len() - 1]);
                    assert_eq!(row[index % dims[dims.len() - 1] * step], *expected);
                }
            }
        }
    }
}
