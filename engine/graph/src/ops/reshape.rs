//! Reshaping: the same elements in another shape.

use std::sync::Arc;

use candle_core::{Layout, Shape};
use gapless_kernels::{Spec, Window};

use super::view_only;
use crate::error::Result;
use crate::rule::Rule;
use crate::{Gradient, Op};

/// A view in another shape. If the strides of the input do not allow a view, the builder inserts a copy before it.
#[derive(Debug, Clone)]
pub struct Reshape {
    /// The new shape.
    pub shape: Shape,
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        if inputs[0].elements() != self.shape.elem_count() {
            return Err(format!(
                "{} elements do not fill {:?}, which has {}",
                inputs[0].elements(),
                self.shape.dims(),
                self.shape.elem_count()
            ));
        }
        Ok(vec![Spec { shape: self.shape.clone(), dtype: inputs[0].dtype }])
    }

    fn view(&self, input: &Layout) -> Option<Layout> {
        reshaped(input, &self.shape)
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::Reshape)
    }

    fn on_parts(&self, _: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { shape: outputs[0].dims().into() }))
    }

    fn linear_inputs(&self) -> usize {
        usize::MAX
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let dx = g.grad(0).reshape(g.input(0).dims().to_vec())?;
        g.accumulate(0, dx);
        Ok(())
    }

    view_only!();
}

/// Returns the layout that shows `input` in `shape` without moving data, or `None` if there is no such layout.
/// Dimensions can only be merged if their elements are evenly spaced in memory.
fn reshaped(input: &Layout, shape: &Shape) -> Option<Layout> {
    // Dimensions of extent 1 are left out, because their strides do not matter.
    let old: Vec<(usize, usize)> =
        input.dims().iter().copied().zip(input.stride().iter().copied()).filter(|&(dim, _)| dim != 1).collect();
    let mut strides = vec![1; shape.rank()];
    let mut next_old = 0;
    let mut dim = 0;
    while dim < shape.rank() {
        let (mut new_count, first) = (shape.dims()[dim], dim);
        dim += 1;
        if new_count == 1 {
            continue;
        }
        let &(mut old_count, mut stride) = old.get(next_old)?;
        next_old += 1;
        while new_count != old_count {
            if new_count < old_count {
                new_count *= shape.dims().get(dim)?;
                dim += 1;
            } else {
                let &(count, inner) = old.get(next_old)?;
                if stride != count * inner {
                    return None;
                }
                (old_count, stride, next_old) = (old_count * count, inner, next_old + 1);
            }
        }
        for index in (first..dim).rev() {
            strides[index] = stride;
            stride *= shape.dims()[index];
        }
    }
    Some(Layout::new(shape.clone(), strides, input.start_offset()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strides(dims: &[usize], strides: &[usize], to: &[usize]) -> Option<Vec<usize>> {
        let layout = Layout::new(Shape::from_dims(dims), strides.to_vec(), 0);
        reshaped(&layout, &Shape::from_dims(to)).map(|l| l.stride().to_vec())
    }

    #[test]
    fn a_view_exists_exactly_where_merged_dimensions_are_even() {
        assert_eq!(strides(&[4, 6], &[6, 1], &[2, 2, 6]), Some(vec![12, 6, 1]));
        assert_eq!(strides(&[4, 6], &[6, 1], &[24]), Some(vec![1]));
        // A third of a packed [tokens, 3·width] can be split into heads as a view. Merging the tokens and the width of
        // that third takes a copy.
        assert_eq!(strides(&[4, 6], &[18, 1], &[4, 2, 3]), Some(vec![18, 3, 1]));
        assert_eq!(strides(&[4, 6], &[18, 1], &[24]), None);
        assert_eq!(strides(&[2, 3], &[1, 2], &[6]), None);
        assert_eq!(strides(&[1, 5], &[99, 1], &[5, 1]), Some(vec![1, 1]));
    }
}
