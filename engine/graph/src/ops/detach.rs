//! The identity without a gradient.

use candle_core::Layout;
use gapless_kernels::Spec;

use super::view_only;
use crate::Op;
use crate::rule::Rule;

/// A view that counts as a constant in the backward.
#[derive(Debug, Clone, Copy)]
pub struct Detach;

impl Op for Detach {
    fn name(&self) -> &'static str {
        "detach"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* -> *"))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn view(&self, input: &Layout) -> Option<Layout> {
        Some(input.clone())
    }

    fn stops_gradients(&self) -> bool {
        true
    }

    view_only!();
}
