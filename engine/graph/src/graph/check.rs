//! Checks of an operation's declarations, such as in-place pairs and layouts of views.
//!
//! In: the declarations of an [`Op`], possibly a user's own, about its operands. Out: the reason as text if a
//! declaration is invalid. Never: a change to a declaration or a node.

use candle_core::{DType, Layout};
use gapless_kernels::Spec;
use gapless_kernels::cpu::args::{MAX_OUTPUTS, byte_range};

use crate::op::{Op, RowUse};

/// Checks that the operands to which an operation's declarations refer by index exist and have valid types and shapes.
pub(super) fn operands(op: &dyn Op, inputs: &[Spec], outputs: &[Spec]) -> Result<(), String> {
    if !(1..=MAX_OUTPUTS).contains(&outputs.len()) {
        return Err(format!("it has {} outputs; an operation has 1 to {MAX_OUTPUTS}", outputs.len()));
    }
    for &(input, output) in op.inplace().iter().chain(op.mutates()) {
        if input >= inputs.len() || output >= outputs.len() {
            let (given, made) = (inputs.len(), outputs.len());
            return Err(format!(
                "output {output} takes the bytes of input {input}, but it has {given} inputs and {made} outputs"
            ));
        }
    }
    let mutates = op.mutates();
    for (index, &(input, output)) in mutates.iter().enumerate() {
        if mutates[..index].iter().any(|other| other.0 == input || other.1 == output) {
            return Err(format!("input {input} or output {output} is in two pairs of Op::mutates; it can be in one"));
        }
        if inputs[input] != outputs[output] {
            let (from, to) = (&inputs[input], &outputs[output]);
            return Err(format!("output {output} overwrites input {input}, so {to:?} must be {from:?}"));
        }
    }
    if let RowUse::DynamicOutputs { offsets, .. } = op.rows() {
        match inputs.get(offsets) {
            Some(spec) if spec.dtype == DType::U32 => {}
            Some(spec) => {
                return Err(format!("its rows are counted by input {offsets}, which is {:?}, not u32", spec.dtype));
            }
            None => return Err(format!("its rows are counted by input {offsets}, but it has {} inputs", inputs.len())),
        }
        if outputs.iter().any(|output| output.dims().is_empty()) {
            return Err("its rows are counted, but it has an output without dimensions".into());
        }
    }
    Ok(())
}

/// Returns the only output of a view operation. Returns an error if the view's layout exceeds the storage of the root.
pub(super) fn view<'s>(layout: &Layout, outputs: &'s [Spec], root: &Spec) -> Result<&'s Spec, String> {
    let [output] = outputs else {
        return Err(format!("it is a view and has {} outputs; a view has one", outputs.len()));
    };
    if layout.dims() != output.dims() || root.dtype != output.dtype {
        let (dims, dtype) = (layout.dims(), root.dtype);
        return Err(format!("it views {dtype:?} of shape {dims:?} as {:?} of shape {:?}", output.dtype, output.dims()));
    }
    match byte_range(layout, output.dtype).is_some_and(|range| range.end <= root.bytes()) {
        true => Ok(output),
        false => {
            let (strides, start) = (layout.stride(), layout.start_offset());
            let dims = (output.dims(), root.dims());
            Err(format!(
                "its view of {:?} with strides {strides:?} from element {start} on extends beyond a tensor of {:?}",
                dims.0, dims.1
            ))
        }
    }
}
