//! Appending the keys or values of new tokens to a cache.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces, copy_row, rows_per_task};

use crate::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// Writes x [batch, heads, tokens, head size] to rows of a cache [batch, heads, window, head size]. The rows are
/// `positions` (u32 [batch, tokens]). The output is the changed cache. There is no gradient, because the rows that
/// earlier runs wrote have none.
#[derive(Debug, Clone, Copy)]
pub struct CacheWrite;

impl Op for CacheWrite {
    fn name(&self) -> &'static str {
        "cache_write"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("b h W d, b h T d, b T -> b h W d"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..2])?;
        super::expect_ids("positions", &inputs[2])?;
        let (&[batch, heads, window, size], &[b, h, tokens, d]) = (inputs[0].dims(), inputs[1].dims()) else {
            return Err("the cache and the new rows must be [batch, heads, tokens, head size]".into());
        };
        if (b, h, d) != (batch, heads, size) || inputs[2].dims() != [batch, tokens] {
            return Err(
                "the new rows must have the cache's batch, heads and head size, and the positions be [batch, tokens]"
                    .into(),
            );
        }
        if tokens > window {
            return Err(format!("{tokens} tokens do not fit a window of {window}"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn reads_strides(&self, index: usize, _: &candle_core::Layout) -> bool {
        index == 1
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    /// Counts the bytes of the written rows, not of the whole cache.
    fn bytes_moved(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        2 * inputs[1].bytes()
    }

    fn run(&self, args: &mut Args<'_>) {
        let cache = args.output::<f32>(0);
        let ((x, layout), positions) = (args.strided::<f32>(1), args.input::<u32>(2));
        let &[_, heads, tokens, size] = args.input_dims(1) else { unreachable!("rank 4 by the shape rule") };
        let window = args.output_dims(0)[2];
        cache.pieces_mut(window * size).enumerate().for_each_in_runs(rows_per_task(tokens * size), |(head, cache)| {
            for token in 0..tokens {
                let position = positions[head / heads * tokens + token] as usize;
                copy_row(x, layout, head * tokens + token, &mut cache[position * size..][..size]);
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::cache_write(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, positions) = (args.input(1), args.input(2));
        let mut cache = args.input(0).clone();
        let (heads, tokens, window) = (x.dims[1], x.dims[2], cache.dims[2]);
        for (row, x) in x.rows().enumerate() {
            let (head, token) = (row / tokens, row % tokens);
            let position = positions.data[head / heads * tokens + token] as usize;
            cache.data[(head * window + position) * x.len()..][..x.len()].copy_from_slice(x);
        }
        vec![cache]
    }
}
