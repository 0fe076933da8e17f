//! Types of gradients that are not those of what they are made of.

use candle_core::DType;
use gapless_kernels::Spec;

/// By output the type that was asked for by [`Op::with_output_dtype`](crate::Op::with_output_dtype).
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputTypes<const N: usize>([Option<DType>; N]);

impl<const N: usize> Default for OutputTypes<N> {
    fn default() -> Self {
        Self([None; N])
    }
}

impl<const N: usize> OutputTypes<N> {
    /// With another one.
    pub fn with(mut self, index: usize, dtype: DType) -> Self {
        self.0[index] = Some(dtype);
        self
    }

    /// Outputs in the types that were asked for.
    pub fn of(&self, outputs: impl IntoIterator<Item = Spec>) -> Vec<Spec> {
        let typed = outputs.into_iter().zip(&self.0);
        typed.map(|(output, dtype)| Spec { dtype: dtype.unwrap_or(output.dtype), ..output }).collect()
    }
}
