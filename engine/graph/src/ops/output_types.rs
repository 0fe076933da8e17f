//! Output types of gradient operations that differ from the types of their inputs.

use candle_core::DType;
use gapless_kernels::Spec;

/// For each output, the type requested by [`Op::with_output_dtype`](crate::Op::with_output_dtype), if any.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputTypes<const N: usize>([Option<DType>; N]);

impl<const N: usize> Default for OutputTypes<N> {
    fn default() -> Self {
        Self([None; N])
    }
}

impl<const N: usize> OutputTypes<N> {
    /// Returns a copy in which output `index` has the type `dtype`.
    pub fn with(mut self, index: usize, dtype: DType) -> Self {
        self.0[index] = Some(dtype);
        self
    }

    /// Returns the outputs in the requested types.
    pub fn apply_to(&self, outputs: impl IntoIterator<Item = Spec>) -> Vec<Spec> {
        let typed = outputs.into_iter().zip(&self.0);
        typed.map(|(output, dtype)| Spec { dtype: dtype.unwrap_or(output.dtype), ..output }).collect()
    }
}
