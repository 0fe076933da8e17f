//! The router's weights in the order of rows.

use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::NONE;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Returns the weight of every row's slot: from weights [.., k], places [.., k] and slots \[rows\] to [rows, 1]. Rows
/// without a slot have weight 0.
#[derive(Debug, Clone, Copy)]
pub struct SlotWeights;

impl Op for SlotWeights {
    fn name(&self) -> &'static str {
        "slot_weights"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let slots = &"ABCDEFGHIJ"[..inputs[0].dims().len()];
        Some(Rule::Labels(format!("{slots}, {slots}, R -> R _").into()))
    }

    fn linear_inputs(&self) -> usize {
        1
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_float(&inputs[..1])?;
        super::expect_places(&inputs[1], &inputs[2])?;
        if inputs[0].dims() != inputs[1].dims() {
            return Err("the weights must be one per place".into());
        }
        Ok(vec![inputs[0].in_shape((inputs[2].elements(), 1))])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [d_weights] = Tensor::apply_op(SlotWeightsGrad, &[&g.grad(0), &g.input(1)])?;
        g.accumulate(0, d_weights);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, args: &mut Args<'_>) {
        gather(args, 2);
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::gather(2, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (weights, slots) = (args.input(0), args.input(2));
        let weight = |&slot: &f64| if slot == f64::from(NONE) { 0.0 } else { weights.data[slot as usize] };
        vec![Array::new(&[slots.data.len(), 1], slots.data.iter().map(weight).collect())]
    }
}

/// Copies the elements of input 0 whose indices input `indices` gives. Where the index is [`NONE`], the output is 0.
fn gather(args: &mut Args<'_>, indices: usize) {
    let out = args.output::<f32>(0);
    let (from, indices) = (args.input::<f32>(0), args.input::<u32>(indices));
    for (out, &index) in out.iter_mut().zip(indices) {
        *out = if index == NONE { 0.0 } else { from[index as usize] };
    }
}

/// Returns the gradient of every slot's weight, from (gradients of the rows, places). Slots without a row have gradient
/// 0.
#[derive(Debug, Clone, Copy)]
struct SlotWeightsGrad;

impl Op for SlotWeightsGrad {
    fn name(&self) -> &'static str {
        "slot_weights_grad"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let slots = &"ABCDEFGHIJ"[..inputs[1].dims().len()];
        Some(Rule::Labels(format!("R _, {slots} -> {slots}").into()))
    }

    fn linear_inputs(&self) -> usize {
        1
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].in_shape(inputs[1].shape.clone())])
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, args: &mut Args<'_>) {
        gather(args, 1);
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::gather(1, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (rows, places) = (args.input(0), args.input(1));
        vec![places.map(|place| if place == f64::from(NONE) { 0.0 } else { rows.data[place as usize] })]
    }
}
