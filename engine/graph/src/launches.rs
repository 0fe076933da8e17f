//! The CUDA launches of an operation. Inputs whose strides the operation's kernels cannot read are copied first; then
//! the kernels run.

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cuda::launch::copy_to;
use gapless_kernels::cuda::{Launch, Operand, Operands};

use crate::op::Op;

/// Returns the sizes in bytes of the pieces of scratch that the launches of an operation need: first the operation's
/// own pieces, then one piece per copied input.
pub fn workspace<'a>(op: &dyn Op, inputs: impl Iterator<Item = (&'a Layout, DType)>, outputs: &[Spec]) -> Vec<u64> {
    let (mut specs, mut copies) = (Vec::new(), Vec::new());
    for (index, (layout, dtype)) in inputs.enumerate() {
        let spec = Spec { shape: layout.shape().clone(), dtype };
        if is_copied(op, index, layout) {
            copies.push(spec.bytes());
        }
        specs.push(spec);
    }
    [op.cuda_workspace(&specs, outputs), copies].concat()
}

/// Returns the launches of an operation, or `None` if it has no kernels. `operands.workspace` must have the pieces that
/// [`workspace`] returns.
pub fn launches(op: &dyn Op, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let mut inputs = operands.inputs.to_vec();
    let copied: Vec<usize> = (0..inputs.len()).filter(|&i| is_copied(op, i, &inputs[i].layout)).collect();
    let (own, pieces) = operands.workspace.split_at(operands.workspace.len().checked_sub(copied.len())?);
    let mut launches = Vec::new();
    for (index, &address) in copied.into_iter().zip(pieces) {
        let input = &mut inputs[index];
        let layout = Layout::contiguous(input.layout.shape().clone());
        let copy = Operand { address, layout, dtype: input.dtype };
        launches.push(Launch::Kernel(copy_to(input, &copy, &copy.layout, 0)?));
        *input = copy;
    }
    launches.extend(op.cuda(&Operands { inputs: &inputs, workspace: own, ..*operands })?);
    Some(launches)
}

fn is_copied(op: &dyn Op, index: usize, layout: &Layout) -> bool {
    !layout.is_contiguous() && !op.cuda_reads_strides(index, layout)
}
