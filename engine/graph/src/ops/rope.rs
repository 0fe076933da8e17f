//! Rotary position embedding (Su et al., arXiv 2104.09864).

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, vectorize};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Rotates the halves of each head against each other: for frequency i of token t, the pair (x_i, x_{i+d/2}) turns by
/// t·theta^(−2i/d). Input and output are [batch, tokens, heads, head size].
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// Rotate back: the gradient.
    pub inverse: bool,
}

impl Rope {
    /// Cosine and sine for one token and frequency, in f64: positions may be large.
    fn rotation(&self, token: usize, frequency: usize, head_size: usize) -> (f64, f64) {
        let angle = token as f64 * self.theta.powf(-2.0 * frequency as f64 / head_size as f64);
        let (sin, cos) = angle.sin_cos();
        (cos, if self.inverse { -sin } else { sin })
    }
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        match inputs[0].dims() {
            [_, _, _, d] if d % 2 == 0 => Ok(vec![inputs[0].clone()]),
            [_, _, _, d] => Err(format!("the head size {d} is odd; its halves rotate against each other")),
            _ => Err("[batch, tokens, heads, head size] is needed".into()),
        }
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(Self { inverse: !self.inverse, ..*self }, &[&g.grad(0)])?;
        g.send(0, dx);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        3 * inputs[0].elements() as u64
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        // One (cos, sin) per token and frequency.
        let [_, tokens, _, d] = inputs[0].dims() else { return Vec::new() };
        vec![4 * (tokens * d) as u64]
    }

    fn run(&self, args: &mut Args<'_>) {
        let (out, table) = (args.output::<f32>(0), args.workspace().take::<f32>());
        let &[_, tokens, heads, d] = args.output_dims(0) else { unreachable!("rank 4 by the shape rule") };
        let half = d / 2;
        let table = &mut table[..tokens * d];
        table.pieces_mut(d).enumerate().for_each(|(token, row)| {
            // Cosines first, then sines, so that the rotation below reads both in order.
            let (cos, sin) = row.split_at_mut(half);
            for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
                let (c, s) = self.rotation(token, i, d);
                (*cos, *sin) = (c as f32, s as f32);
            }
        });
        let source = (!args.is_overwritten(0)).then(|| args.strided::<f32>(0));
        let table = &*table;
        out.pieces_mut(heads * d).enumerate().for_each(|(row, out)| {
            let (cos, sin) = table[row % tokens * d..][..d].split_at(half);
            for (head, out) in out.chunks_exact_mut(d).enumerate() {
                if let Some((x, layout)) = source {
                    let (x, step) = gapless_kernels::cpu::row_of(x, layout, row * heads + head);
                    out.iter_mut().enumerate().for_each(|(i, o)| *o = x[i * step]);
                }
                let (a, b) = out.split_at_mut(half);
                vectorize!({
                    for ((a, b), (&cos, &sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                    }
                });
            }
        });
    }
    fn cuda_workspace(&self, inputs: &[Spec], outputs: &[Spec]) -> Vec<u64> {
        self.workspace(inputs, outputs, 1)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::rope(self.theta, self.inverse, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let x = args.input(0);
        let &[_, tokens, heads, d] = &x.dims[..] else { unreachable!("rank 4 by the shape rule") };
        let mut out = x.clone();
        for (row, out) in out.data.chunks_exact_mut(d).enumerate() {
            for i in 0..d / 2 {
                let (cos, sin) = self.rotation(row / heads % tokens, i, d);
                let (a, b) = (out[i], out[i + d / 2]);
                (out[i], out[i + d / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        vec![out]
    }
}
