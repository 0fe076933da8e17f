//! Rotary position embedding (Su et al., arXiv 2104.09864).

use std::f64::consts::TAU;

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, copy_row, math, rows_per_task, vectorize, with_float};
pub use gapless_kernels::cuda::launch::RopeFrequencies;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The scaling of rotary frequencies. It adapts a model to longer sequences than those of its original training.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// The frequencies are not scaled.
    #[default]
    None,
    /// All frequencies are divided by one factor (Chen et al., arXiv 2306.15595).
    Linear {
        /// The divisor of the frequencies.
        factor: f64,
    },
    /// Frequencies that turn fewer than `low` times within `original` tokens are divided by `factor`. Frequencies that
    /// turn more than `high` times are kept. The frequencies between these two limits are interpolated (Llama 3.1).
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// The number of turns below which a frequency is divided.
        low: f64,
        /// The number of turns above which a frequency is kept.
        high: f64,
        /// The sequence length of the original training, in tokens.
        original: f64,
    },
    /// Like `Llama3`, but the interpolation is linear in the index of the frequency, and queries and keys are scaled
    /// (YaRN, Peng et al., arXiv 2309.00071).
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// The index of the last frequency that is kept.
        first: f64,
        /// The index of the first frequency that is divided by the whole `factor`.
        last: f64,
        /// The factor by which cosines and sines, and so queries and keys, are multiplied.
        amplitude: f64,
    },
}

impl RopeScaling {
    /// Returns the [`RopeScaling::Yarn`] for the settings of the paper (section 3.2). Frequencies that turn more than
    /// `fast` times within `original` tokens are kept. Frequencies that turn less than `slow` times are divided by
    /// `factor`. If `whole` is true, the indices between which frequencies are interpolated are rounded outwards to
    /// integers.
    pub fn yarn(
        factor: f64,
        (fast, slow): (f64, f64),
        original: f64,
        theta: f64,
        head_size: usize,
        whole: bool,
    ) -> Self {
        let size = head_size as f64;
        let number = |turns: f64| size * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (first, last) = (number(fast), number(slow));
        let (first, last) = if whole { (first.floor(), last.ceil()) } else { (first, last) };
        let amplitude = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
        Self::Yarn { factor, first: first.max(0.0), last: last.min(size - 1.0), amplitude }
    }

    /// Returns the frequencies as a formula that the kernels evaluate.
    pub fn frequencies(self, theta: f64) -> RopeFrequencies {
        let kept = RopeFrequencies { theta, factor: 1.0, per_turn: 0.0, per_number: 0.0, offset: 1.0, amplitude: 1.0 };
        match self {
            Self::None => kept,
            Self::Linear { factor } => RopeFrequencies { factor, offset: 0.0, ..kept },
            Self::Llama3 { factor, low, high, original } => {
                // If both are equal, the interpolation becomes a step.
                let width = if high == low { 1e-9 } else { high - low };
                RopeFrequencies { factor, per_turn: original / TAU / width, offset: -low / width, ..kept }
            }
            Self::Yarn { factor, first, last, amplitude } => {
                // If both indices are equal, the interpolation becomes a step.
                let width = if first == last { 0.001 } else { last - first };
                RopeFrequencies { factor, per_number: -1.0 / width, offset: 1.0 + first / width, amplitude, ..kept }
            }
        }
    }
}

/// Rotary position embedding of x [batch, tokens, heads, head size]; the output has the same shape.
///
/// For each frequency i, a pair of elements is rotated by the token's position times the frequency. The pair is (x_i,
/// x_{i+d/2}) or, with `neighbours`, (x_2i, x_{2i+1}), where d is the head size. Without scaling, the frequency is
/// theta^(−2i/d). An optional second input gives the positions, u32 [batch, tokens]. Without it, the tokens of each
/// sequence are at positions 0, 1, 2, ….
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// The angle per token by which each pair is rotated.
    pub frequencies: RopeFrequencies,
    /// True if a pair is two adjacent elements, as in the paper; false if they are half a head apart.
    pub neighbours: bool,
    /// True to rotate back, which is the gradient.
    pub inverse: bool,
}

/// Number of tokens whose angles one task computes. Each task computes every frequency once.
const TABLE_ROWS: usize = 16;

impl Rope {
    /// Returns the cosine and the sine by which a pair is rotated, from those of its angle.
    #[inline(always)]
    fn rotation(&self, (sin, cos): (f64, f64)) -> (f64, f64) {
        let amplitude = self.frequencies.amplitude;
        (amplitude * cos, if self.inverse { -amplitude * sin } else { amplitude * sin })
    }

    /// Computes the table for at most [`TABLE_ROWS`] tokens, [tokens, `d`], where `d` is the head size: for each token
    /// the cosines of all frequencies, then the sines, so that [`Self::rotate`] reads both contiguously. The angles are
    /// computed in f64, because positions may be large.
    fn tabulate(&self, table: &mut [f32], d: usize, position: impl Fn(usize) -> usize) {
        let mut positions = [0.0; TABLE_ROWS];
        positions.iter_mut().take(table.len() / d).enumerate().for_each(|(row, at)| *at = position(row) as f64);
        vectorize!({
            for i in 0..d / 2 {
                let frequency = self.frequencies.at(i, d);
                let (mut cosines, mut sines) = ([0.0; TABLE_ROWS], [0.0; TABLE_ROWS]);
                // These are loops instead of closures, which would not all be inlined, and so not vectorize.
                for ((cos, sin), position) in cosines.iter_mut().zip(&mut sines).zip(positions) {
                    let rotation = self.rotation(math::sin_cos(position * frequency));
                    (*cos, *sin) = (rotation.0 as f32, rotation.1 as f32);
                }
                for ((cos, sin), angles) in cosines.into_iter().zip(sines).zip(table.chunks_exact_mut(d)) {
                    (angles[i], angles[d / 2 + i]) = (cos, sin);
                }
            }
        });
    }

    /// Rotates the heads of all tokens. Row i of the output, [heads, head size], belongs to row i of the table, or of its
    /// repetitions.
    fn rotate<T: Float>(&self, args: &mut Args<'_>, table: &[f32]) {
        let out = args.output::<T>(0);
        let &[.., heads, d] = args.output_dims(0) else { unreachable!("rank 4 by the shape rule") };
        let source = (!args.is_overwritten(0)).then(|| args.strided::<T>(0));
        let rows = table.len() / d;
        out.pieces_mut(heads * d).enumerate().for_each_in_runs(rows_per_task(heads * d), |(row, out)| {
            if let Some((x, layout)) = source {
                for (head, out) in out.chunks_exact_mut(d).enumerate() {
                    copy_row(x, layout, row * heads + head, out);
                }
            }
            let (cos, sin) = table[row % rows * d..][..d].split_at(d / 2);
            let turn = |a: &mut T, b: &mut T, (&cos, &sin): (&f32, &f32)| {
                let (x, y) = (a.load(), b.load());
                (*a, *b) = (T::store(x * cos - y * sin), T::store(y * cos + x * sin));
            };
            vectorize!({
                for out in out.chunks_exact_mut(d) {
                    if self.neighbours {
                        let pairs = out.as_chunks_mut().0.iter_mut();
                        pairs.zip(cos.iter().zip(sin)).for_each(|([a, b], angle)| turn(a, b, angle));
                    } else {
                        let (a, b) = out.split_at_mut(d / 2);
                        a.iter_mut().zip(b).zip(cos.iter().zip(sin)).for_each(|((a, b), angle)| turn(a, b, angle));
                    }
                }
            });
        });
    }
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    /// Without positions, the index of a token is its position.
    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels(if inputs.len() > 1 { "b t h D, b t -> b t h D" } else { "b T h D -> b T h D" }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..1])?;
        match inputs[0].dims() {
            [batch, tokens, _, d] if d % 2 == 0 => {
                if let Some(positions) = inputs.get(1) {
                    super::expect_ids("positions", positions)?;
                    if positions.dims() != [*batch, *tokens] {
                        return Err("the positions must be [batch, tokens]".into());
                    }
                }
                Ok(vec![inputs[0].clone()])
            }
            [_, _, _, d] => Err(format!("the head size {d} is odd; it must be even")),
            _ => Err("the input must be [batch, tokens, heads, head size]".into()),
        }
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let positions = (g.inputs() > 1).then(|| g.input(1));
        let d_out = g.grad(0);
        let inputs: Vec<&Tensor> = [&d_out].into_iter().chain(&positions).collect();
        let [dx] = Tensor::apply_op(Self { inverse: !self.inverse, ..*self }, &inputs)?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        3 * inputs[0].elements() as u64
    }

    fn reads_strides(&self, index: usize, _: &candle_core::Layout) -> bool {
        index == 0
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        // Scratch for one (cos, sin) per token and frequency. If positions are given, each sequence has its own table.
        let [batch, tokens, _, d] = inputs[0].dims() else { return Vec::new() };
        let rows = if inputs.len() > 1 { batch * tokens } else { *tokens };
        vec![4 * (rows * d) as u64]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let &[batch, tokens, _, d] = args.output_dims(0) else { unreachable!("rank 4 by the shape rule") };
        let table = args.workspace().take::<f32>();
        let positions = (args.inputs() > 1).then(|| args.input::<u32>(1));
        let rows = if positions.is_some() { batch * tokens } else { tokens };
        let table = &mut table[..rows * d];
        table.pieces_mut(TABLE_ROWS * d).enumerate().for_each(|(piece, table)| {
            let token = |row| positions.map_or(row, |positions| positions[row] as usize);
            self.tabulate(table, d, |row| token(piece * TABLE_ROWS + row));
        });
        with_float!(args.output_dtype(0), T => self.rotate::<T>(args, table));
    }
    fn cuda_workspace(&self, inputs: &[Spec], outputs: &[Spec]) -> Vec<u64> {
        self.workspace(inputs, outputs, 1)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::rope(self.frequencies, self.neighbours, self.inverse, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let &[_, tokens, heads, d] = &x.dims[..] else { unreachable!("rank 4 by the shape rule") };
        let position = |row: usize| match args.inputs() {
            1 => row / heads % tokens,
            _ => args.input(1).data[row / heads] as usize,
        };
        let mut out = x.clone();
        for (row, out) in out.data.chunks_exact_mut(d).enumerate() {
            for i in 0..d / 2 {
                let angle = position(row) as f64 * self.frequencies.at(i, d);
                let (cos, sin) = self.rotation(angle.sin_cos());
                let (first, second) = if self.neighbours { (2 * i, 2 * i + 1) } else { (i, i + d / 2) };
                let (a, b) = (out[first], out[second]);
                (out[first], out[second]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        vec![out]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a scaled frequency, computed case by case as the papers define it.
    fn written_out(scaling: RopeScaling, theta: f64, number: usize, size: usize) -> f64 {
        let plain = 1.0 / theta.powf(2.0 * number as f64 / size as f64);
        match scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = TAU / plain;
                if wavelength < original / high {
                    plain
                } else if wavelength > original / low {
                    plain / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
            RopeScaling::Yarn { factor, first, last, .. } => {
                let divided = if (number as f64) < first {
                    0.0
                } else if number as f64 > last {
                    1.0
                } else {
                    (number as f64 - first) / (last - first)
                };
                plain / factor * divided + plain * (1.0 - divided)
            }
        }
    }

    #[test]
    fn one_formula_has_all_scalings() {
        let (theta, size) = (10_000.0, 64);
        let yarn = RopeScaling::yarn(4.0, (32.0, 1.0), 4096.0, theta, size, true);
        // For `fast`, which is 32 turns, the index is 64·ln(4096/(32·2π))/(2·ln 10⁴) = 10.47…. For `slow`, which is one
        // turn, the index is 22.51….
        let RopeScaling::Yarn { first, last, amplitude, .. } = yarn else { panic!("{yarn:?}") };
        assert_eq!((first, last), (10.0, 23.0));
        assert!((amplitude - 1.138_629_436).abs() < 1e-9);
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 512.0 };
        for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 3.0 }, llama3, yarn] {
            for number in 0..size / 2 {
                let found = scaling.frequencies(theta).at(number, size);
                let expected = written_out(scaling, theta, number, size);
                // The tolerance allows for a few roundings in f64.
                assert!(
                    (found - expected).abs() <= 1e-14 * expected,
                    "{scaling:?} {number}: {found} is not {expected}"
                );
            }
        }
    }
}
