//! Launches of elementwise updates, whose kernels are generated.

use candle_core::{DType, Layout};

use super::{Launch, Operand, Operands};
use crate::cuda::{Fusible, generate};

/// Returns the address of element `index` of an f32 tensor, for [`update`].
pub fn number(of: &Operand, index: usize) -> u64 {
    of.address + (index * size_of::<f32>()) as u64
}

/// Returns the launch of an elementwise function of tensors that also reads single f32 elements, such as the norm and
/// the learning rate. In the expressions, `$0` is the first of `numbers`, which are addresses; the elements of `tensors`
/// follow. All tensors and outputs have the same number of elements, and are contiguous. Outputs may be at the
/// addresses of tensors. Returns `None` if there are no kernels for the types.
pub fn update(
    name: &str,
    fusible: Fusible,
    numbers: &[u64],
    tensors: &[&Operand],
    operands: &Operands<'_>,
) -> Option<Vec<Launch>> {
    let count = tensors.first()?.count() as usize;
    let flat = |of: &Operand| Operand { layout: Layout::contiguous(count), ..of.clone() };
    let repeated =
        |&address: &u64| Operand { address, layout: Layout::new(count.into(), vec![0], 0), dtype: DType::F32 };
    let inputs: Vec<Operand> = numbers.iter().map(repeated).chain(tensors.iter().map(|of| flat(of))).collect();
    let outputs: Vec<Operand> = operands.outputs.iter().map(flat).collect();
    generate::each(name, fusible, &Operands { inputs: &inputs, outputs: &outputs, ..*operands })
}
