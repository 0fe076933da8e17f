//! Weights that are stored in eight or four bits per element: quantization, and dequantization of a block of a matrix.
//!
//! In: a matrix in f32, or its codes and scales. Out: codes and scales, or a block of the matrix in f32 or bf16. Never:
//! a training gradient; a quantized weight does not change.
//!
//! The formats are those of bitsandbytes:
//! - [`Format::Int8`] (LLM.int8(), arXiv 2208.07339, without its decomposition of activations): a row of the matrix is
//!   divided by its greatest magnitude and rounded to integers from −127 to 127. A code is the integer's eight bits.
//! - [`Format::Nf4`] (QLoRA, arXiv 2305.14314, section 3): each block of 64 neighbours, in row-major order over the whole
//!   matrix, is divided by its greatest magnitude and rounded to one of the 16 values of [`NF4`]. A byte holds two codes,
//!   the first in its upper half.
//! - With double quantization, the greatest magnitudes of all blocks are shifted by their mean and quantized in blocks of
//!   256 to the 256 values of [`dynamic_map`].

use std::ops::Range;
use std::sync::LazyLock;

use half::f16;

use super::{Float, InPieces, Pieces, vectorize};
use crate::Spread;

/// Number of neighbours that share a scale in [`Format::Nf4`].
pub const BLOCK: usize = 64;
/// Number of blocks whose scales share a scale with double quantization.
pub const NESTED_BLOCK: usize = 256;

/// The values of a four-bit NormalFloat (arXiv 2305.14314, appendix E).
#[expect(clippy::excessive_precision, reason = "the values as they are published")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The two values of each byte of [`Format::Nf4`].
static NF4_PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [NF4[byte >> 4], NF4[byte & 15]];
        byte += 1;
    }
    pairs
};

/// Returns the values of an eight-bit code with a dynamic exponent (arXiv 1511.04561), in ascending order: 0, 1, and for
/// each decade 10⁻⁷⁺ⁱ below 1, 2ⁱ values of either sign, evenly spaced.
pub fn dynamic_map() -> &'static [f32; 256] {
    static MAP: LazyLock<[f32; 256]> = LazyLock::new(|| {
        let mut values = vec![0.0, 1.0];
        for decade in 0..7 {
            let (count, scale) = (1usize << decade, 10f64.powi(decade - 6) as f32);
            let step = (1.0f32 - 0.1) / count as f32;
            // The upper half is computed from the upper end.
            let boundary = |i: usize| match i < count.div_ceil(2) {
                true => step.mul_add(i as f32, 0.1),
                false => step.mul_add(-((count - i) as f32), 1.0),
            };
            let mean = |i: usize| (boundary(i) + boundary(i + 1)) / 2.0 * scale;
            values.extend((0..count).flat_map(|i| [mean(i), -mean(i)]));
        }
        values.sort_by(f32::total_cmp);
        values.try_into().expect("2 + 2 · (2⁷ − 1) values")
    });
    &MAP
}

/// The format of a quantized matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Eight bits per element, and an f32 scale per row.
    Int8,
    /// Four bits per element, and a scale per [`BLOCK`].
    Nf4 {
        /// True if the scales are quantized, too.
        is_double: bool,
    },
}

impl Format {
    /// Returns the number of bytes of the codes of a matrix.
    pub fn code_bytes(self, elements: usize) -> usize {
        match self {
            Self::Int8 => elements,
            Self::Nf4 { .. } => elements.div_ceil(2),
        }
    }
}

/// A quantized matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The codes, as [`Format`] says.
    pub codes: Vec<u8>,
    /// The scales.
    pub scales: OwnedScales,
}

/// The scales of a [`Quantized`] matrix; see [`Scales`].
#[derive(Debug, Clone, PartialEq)]
pub enum OwnedScales {
    /// See [`Scales::Plain`].
    Plain(Vec<f32>),
    /// See [`Scales::Double`].
    Double {
        /// A code for each block.
        codes: Vec<u8>,
        /// A scale for each [`NESTED_BLOCK`].
        nested: Vec<f32>,
        /// The value that is added to each scale.
        offset: f32,
    },
}

/// The scales of a quantized matrix.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// The greatest magnitude of each row or block.
    Plain(&'a [f32]),
    /// The greatest magnitude of block i is map\[`codes`\[i\]\] · `nested`\[j ÷ [`NESTED_BLOCK`]\] + `offset`, with the map
    /// [`dynamic_map`]. Block i is block j of the whole matrix.
    Double {
        /// A code for each block.
        codes: &'a [u8],
        /// A scale for each [`NESTED_BLOCK`].
        nested: &'a [f32],
        /// The value that is added to each scale.
        offset: f32,
        /// The place of the blocks among those of the whole matrix.
        blocks: Spread,
    },
}

impl OwnedScales {
    /// Borrows the scales.
    pub fn view(&self) -> Scales<'_> {
        match self {
            Self::Plain(scales) => Scales::Plain(scales),
            Self::Double { codes, nested, offset } => {
                Scales::Double { codes, nested, offset: *offset, blocks: Spread::whole(codes.len()) }
            }
        }
    }
}

impl Scales<'_> {
    #[inline(always)]
    fn at(self, map: &[f32; 256], index: usize) -> f32 {
        match self {
            Self::Plain(scales) => scales[index],
            Self::Double { codes, nested, offset, blocks } => {
                map[usize::from(codes[index])] * nested[blocks.index(index) / NESTED_BLOCK] + offset
            }
        }
    }
}

/// The type to which elements are rounded after they are dequantized, whatever the type of the product's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Rounding {
    /// Elements are not rounded.
    #[default]
    None,
    /// To the nearest bf16.
    Bf16,
    /// To the nearest f16.
    F16,
}

impl Rounding {
    /// Rounds an element.
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::Bf16 => super::bf16::widened(super::bf16::rounded(x)),
            Self::F16 => f16::from_f32(x).to_f32(),
        }
    }
}

/// A quantized matrix in memory.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// The format of the codes.
    pub format: Format,
    /// Number of columns of the matrix.
    pub columns: usize,
    /// The codes.
    pub codes: &'a [u8],
    /// The scales.
    pub scales: Scales<'a>,
    /// The rounding of the elements.
    pub rounding: Rounding,
}

impl Matrix<'_> {
    /// Writes a block of the matrix to `out`, row by row, on all threads.
    ///
    /// # Panics
    /// Panics if the block is not inside the matrix, or if `out` has another number of elements than the block.
    pub fn dequantize<T: Float>(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == rows.len() * columns.len(), "a block of the matrix");
        if out.is_empty() {
            return;
        }
        let map = dynamic_map();
        out.pieces_mut(columns.len()).enumerate().for_each_in_runs(4, |(index, out)| {
            let first = (rows.start + index) * self.columns + columns.start;
            match self.format {
                Format::Int8 => {
                    let scale = self.scales.at(map, rows.start + index) * (1.0 / 127.0);
                    let codes = &self.codes[first..first + out.len()];
                    vectorize!(for (x, &code) in out.iter_mut().zip(codes) {
                        *x = T::store(self.rounding.round(f32::from(code as i8) * scale));
                    });
                }
                Format::Nf4 { .. } => match self.rounding {
                    // With a constant, the compiler removes the rounding from the loop.
                    Rounding::None => vectorize!(self.nf4(map, first, out, Rounding::None)),
                    Rounding::Bf16 => vectorize!(self.nf4(map, first, out, Rounding::Bf16)),
                    Rounding::F16 => self.nf4(map, first, out, Rounding::F16),
                },
            }
        });
    }

    /// Writes the elements from `first` on, in row-major order over the whole matrix.
    #[inline(always)]
    fn nf4<T: Float>(&self, map: &[f32; 256], first: usize, out: &mut [T], rounding: Rounding) {
        let (mut at, mut out) = (first, out);
        while !out.is_empty() {
            let count = out.len().min(BLOCK - at % BLOCK);
            let (now, rest) = std::mem::take(&mut out).split_at_mut(count);
            let scale = self.scales.at(map, at / BLOCK);
            // Whole bytes: both halves are looked up at once, then scaled.
            let mut values = [0.0f32; BLOCK + 2];
            let bytes = &self.codes[at / 2..(at + now.len()).div_ceil(2)];
            for (pair, &byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                *pair = NF4_PAIRS[usize::from(byte)];
            }
            for (x, value) in now.iter_mut().zip(&values[at % 2..]) {
                *x = T::store(rounding.round(value * scale));
            }
            (at, out) = (at + now.len(), rest);
        }
    }
}

/// Quantizes a matrix as bitsandbytes does. `elements` are the matrix's elements in row-major order.
///
/// # Panics
/// Panics if the elements do not form rows of `columns` elements.
pub fn quantize(format: Format, elements: &[f32], columns: usize) -> Quantized {
    assert!(elements.len().is_multiple_of(columns.max(1)), "whole rows");
    match format {
        Format::Int8 => int8(elements, columns),
        Format::Nf4 { is_double } => nf4(elements, is_double),
    }
}

/// bitsandbytes rounds the elements to f16 first.
fn int8(elements: &[f32], columns: usize) -> Quantized {
    let mut codes = vec![0u8; elements.len()];
    let mut scales = vec![0.0f32; elements.len() / columns.max(1)];
    let rows = codes.pieces_mut(columns.max(1)).zip(elements.pieces(columns.max(1))).zip(scales.pieces_mut(1));
    rows.for_each(|((codes, row), scale)| {
        let in_f16 = |x: f32| f16::from_f32(x).to_f32();
        scale[0] = row.iter().fold(0.0, |most: f32, &x| most.max(in_f16(x).abs()));
        // PyTorch computes 127 / scale in these two steps, which decides ties.
        let per_scale = if scale[0] > 0.0 { scale[0].recip() * 127.0 } else { 0.0 };
        for (code, &x) in codes.iter_mut().zip(row) {
            *code = (in_f16(x) * per_scale).round_ties_even() as i8 as u8;
        }
    });
    Quantized { codes, scales: OwnedScales::Plain(scales) }
}

fn nf4(elements: &[f32], is_double: bool) -> Quantized {
    let mut codes = vec![0u8; elements.len().div_ceil(2)];
    let mut scales = vec![0.0f32; elements.len().div_ceil(BLOCK)];
    let bounds: [f32; 15] = std::array::from_fn(|i| (NF4[i] + NF4[i + 1]) / 2.0);
    let blocks = codes.pieces_mut(BLOCK / 2).zip(elements.pieces(BLOCK)).zip(scales.pieces_mut(1));
    blocks.for_each_in_runs(64, |((codes, block), scale)| {
        scale[0] = greatest(block);
        for (code, pair) in codes.iter_mut().zip(block.chunks(2)) {
            let nearest = |x: f32| bounds.iter().filter(|&&bound| bound < x).count() as u8;
            let scaled = |at: usize| pair.get(at).map_or(0.0, |x| x * (1.0 / scale[0].max(SMALLEST)));
            *code = nearest(scaled(0)) << 4 | nearest(scaled(1));
        }
    });
    let scales = if is_double { double(&scales) } else { OwnedScales::Plain(scales) };
    Quantized { codes, scales }
}

/// A greater scale has a finite reciprocal.
const SMALLEST: f32 = 1e-38;

fn greatest(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |most: f32, x| most.max(x.abs()))
}

fn double(scales: &[f32]) -> OwnedScales {
    let offset = (scales.iter().map(|&x| f64::from(x)).sum::<f64>() / scales.len().max(1) as f64) as f32;
    let map = dynamic_map();
    let (mut codes, mut nested) = (Vec::new(), Vec::new());
    for block in scales.chunks(NESTED_BLOCK) {
        let shifted: Vec<f32> = block.iter().map(|scale| scale - offset).collect();
        let scale = greatest(&shifted);
        nested.push(scale);
        codes.extend(shifted.iter().map(|x| {
            let x = x * (1.0 / scale.max(SMALLEST));
            let above = map.partition_point(|&value| value < x).clamp(1, 255);
            // The nearer of the two neighbours.
            (if x - map[above - 1] <= map[above] - x { above - 1 } else { above }) as u8
        }));
    }
    OwnedScales::Double { codes, nested, offset }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::random::Numbers;

    fn normal(count: usize) -> Vec<f32> {
        let numbers = Numbers::from_seed(7);
        (0..count).map(|i| numbers.normal(i) as f32).collect()
    }

    /// Dequantizes element by element, as the formulas of the formats read.
    fn element(matrix: &Matrix<'_>, row: usize, column: usize) -> f32 {
        let at = row * matrix.columns + column;
        match matrix.format {
            Format::Int8 => {
                let Scales::Plain(scales) = matrix.scales else { panic!("{:?}", matrix.scales) };
                f32::from(matrix.codes[at] as i8) * (scales[row] * (1.0 / 127.0))
            }
            Format::Nf4 { .. } => {
                let code = matrix.codes[at / 2] >> (if at.is_multiple_of(2) { 4 } else { 0 }) & 15;
                NF4[usize::from(code)]
                    * match matrix.scales {
                        Scales::Plain(scales) => scales[at / 64],
                        Scales::Double { codes, nested, offset, .. } => {
                            dynamic_map()[usize::from(codes[at / 64])] * nested[at / 64 / 256] + offset
                        }
                    }
            }
        }
    }

    /// Blocks of a matrix whose rows are not whole blocks, some of which begin within a byte.
    #[test]
    fn a_block_has_the_elements_of_the_matrix() {
        for (rows, columns) in [(5, 64), (7, 96), (9, 33), (3, 200)] {
            let x = normal(rows * columns);
            for format in [Format::Int8, Format::Nf4 { is_double: false }, Format::Nf4 { is_double: true }] {
                let quantized = quantize(format, &x, columns);
                assert_eq!(quantized.codes.len(), format.code_bytes(x.len()));
                for rounding in [Rounding::None, Rounding::Bf16, Rounding::F16] {
                    let (codes, scales) = (&quantized.codes[..], quantized.scales.view());
                    let matrix = Matrix { format, columns, codes, scales, rounding };
                    for (of_rows, of_columns) in [(0..rows, 0..columns), (1..3, 3..29), (2..3, 8..32), (0..1, 4..4)] {
                        let mut wide = vec![f32::NAN; of_rows.len() * of_columns.len()];
                        let mut narrow = vec![bf16::NAN; wide.len()];
                        matrix.dequantize(of_rows.clone(), of_columns.clone(), &mut wide);
                        matrix.dequantize(of_rows.clone(), of_columns.clone(), &mut narrow);
                        let places =
                            of_rows.clone().flat_map(|row| of_columns.clone().map(move |column| (row, column)));
                        for ((place, wide), narrow) in places.zip(wide).zip(narrow) {
                            let expected = rounding.round(element(&matrix, place.0, place.1));
                            assert_eq!(wide, expected, "{format:?} {rounding:?} {place:?}");
                            assert_eq!(narrow, bf16::from_f32(expected), "{format:?} {rounding:?} {place:?}");
                        }
                    }
                }
            }
        }
    }

    /// An element is rounded to the nearest value of its format: an integer, or one of the 16 values. Double quantization
    /// changes a scale by less than half of the widest gap of the map, 0.9/64/2, of the scales' range.
    #[test]
    fn elements_come_back_nearly() {
        let (columns, x) = (128, normal(128 * 64));
        let error = |format: Format| {
            let quantized = quantize(format, &x, columns);
            let (codes, scales) = (&quantized.codes[..], quantized.scales.view());
            let matrix = Matrix { format, columns, codes, scales, rounding: Rounding::None };
            let mut out = vec![0.0f32; x.len()];
            matrix.dequantize(0..64, 0..columns, &mut out);
            let errors = out.chunks(BLOCK).zip(x.chunks(BLOCK)).map(|(found, x)| {
                let worst = found.iter().zip(x).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()));
                worst / greatest(x)
            });
            errors.fold(0.0, f32::max)
        };
        // Half a step of 1/127 of the row's greatest, which is at most 2.5 times that of a block here.
        assert!(error(Format::Int8) < 2.5 * 0.5 / 127.0);
        // Half of the widest gap, between the two least values.
        let half = (NF4[1] - NF4[0]) / 2.0;
        assert!(error(Format::Nf4 { is_double: false }) <= half * 1.0001);
        assert!(error(Format::Nf4 { is_double: true }) <= half + 0.02);
    }

    #[test]
    fn a_matrix_of_zeros_comes_back() {
        let x = vec![0.0; 130];
        for format in [Format::Int8, Format::Nf4 { is_double: false }, Format::Nf4 { is_double: true }] {
            let quantized = quantize(format, &x, 65);
            let (codes, scales) = (&quantized.codes[..], quantized.scales.view());
            let matrix = Matrix { format, columns: 65, codes, scales, rounding: Rounding::None };
            let mut out = vec![f32::NAN; 130];
            matrix.dequantize(0..2, 0..65, &mut out);
            assert_eq!(out, x, "{format:?}");
        }
    }
}
