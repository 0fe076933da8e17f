//! Selection of elements by ids along one dimension, and its gradient, which adds elements at the indices that the ids
//! give.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, InPieces, Pieces};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Selects elements of x by ids along `dim`; x and the ids have the same extents in all other dimensions. An id out of
/// range selects NaN. The loss then becomes NaN, so the step is rejected as not finite.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// Dimension along which ids select.
    pub dim: usize,
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let [x, ids] = labels(inputs[0].dims().len(), self.dim);
        Some(Rule::Labels(format!("{x}, {ids} -> {ids}").into()))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(&inputs[..1])?;
        super::expect_ids("ids", &inputs[1])?;
        let mut dims = inputs[1].dims().to_vec();
        if dims.len() != inputs[0].dims().len() {
            return Err(format!("ids has {} dimensions, but the other tensor {}", dims.len(), inputs[0].dims().len()));
        }
        dims[self.dim] = inputs[0].dims()[self.dim];
        if dims != inputs[0].dims() {
            return Err(format!("all dimensions but {} must be equal", self.dim));
        }
        Ok(vec![inputs[0].in_shape(inputs[1].shape.clone())])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let extent = g.input(0).dims()[self.dim];
        let [dx] = Tensor::apply_op(ScatterAdd { dim: self.dim, extent }, &[&g.input(1), &g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let Sizes { extent, count, inner } = Sizes::of(args.input_dims(0), args.input_dims(1), self.dim);
        let x = args.input::<f32>(0).pieces((extent * inner).max(1));
        let ids = args.input::<u32>(1).pieces((count * inner).max(1));
        out.pieces_mut((count * inner).max(1)).zip(ids.zip(x)).for_each_in_runs(8, |(out, (ids, x))| {
            for (i, (out, &id)) in out.iter_mut().zip(ids).enumerate() {
                *out = if (id as usize) < extent { x[id as usize * inner + i % inner] } else { f32::NAN };
            }
        });
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::gather_along(self.dim, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (x, ids) = (args.input(0), args.input(1));
        let Sizes { extent, count, inner } = Sizes::of(&x.dims, &ids.dims, self.dim);
        let element = |(i, &id): (usize, &f64)| match id < extent as f64 {
            true => x.data[(i / (count * inner) * extent + id as usize) * inner + i % inner],
            false => f64::NAN,
        };
        vec![Array::new(&ids.dims, ids.data.iter().enumerate().map(element).collect())]
    }
}

/// Adds each element of `source` to the output at the index that its id gives along `dim`. The inputs (ids, source)
/// have the same shape. Outputs to which nothing is added are zero. An id out of range sets the output at index 0 to
/// NaN.
#[derive(Debug, Clone, Copy)]
pub struct ScatterAdd {
    /// Dimension along which ids select.
    pub dim: usize,
    /// Extent of that dimension in the output.
    pub extent: usize,
}

impl Op for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let [x, ids] = labels(inputs[0].dims().len(), self.dim);
        Some(Rule::Labels(format!("{ids}, {ids} -> {x}").into()))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_ids("ids", &inputs[0])?;
        super::expect_float(&inputs[1..])?;
        if inputs[0].dims() != inputs[1].dims() {
            return Err("ids must have the shape of what is added".into());
        }
        let mut dims = inputs[1].dims().to_vec();
        dims[self.dim] = self.extent;
        Ok(vec![inputs[1].in_shape(dims)])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [d_source] = Tensor::apply_op(Gather { dim: self.dim }, &[&g.grad(0), &g.input(0)])?;
        g.accumulate(1, d_source);
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[1].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let out = args.output::<f32>(0);
        let Sizes { extent, count, inner } = Sizes::of(args.output_dims(0), args.input_dims(0), self.dim);
        let ids = args.input::<u32>(0).pieces((count * inner).max(1));
        let source = args.input::<f32>(1).pieces((count * inner).max(1));
        out.pieces_mut((extent * inner).max(1)).zip(ids.zip(source)).for_each_in_runs(8, |(out, (ids, source))| {
            out.fill(0.0);
            for (i, (&id, x)) in ids.iter().zip(source).enumerate() {
                match (id as usize) < extent {
                    true => out[id as usize * inner + i % inner] += x,
                    false => out[i % inner] = f32::NAN,
                }
            }
        });
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::scatter_add(self.dim, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (ids, source) = (args.input(0), args.input(1));
        let mut dims = source.dims.clone();
        dims[self.dim] = self.extent;
        let mut out = Array::zeros(&dims);
        let Sizes { extent, count, inner } = Sizes::of(&dims, &ids.dims, self.dim);
        for (i, (&id, x)) in ids.data.iter().zip(&source.data).enumerate() {
            let start = i / (count * inner) * extent * inner + i % inner;
            match id < extent as f64 {
                true => out.data[start + id as usize * inner] += x,
                false => out.data[start] = f64::NAN,
            }
        }
        vec![out]
    }
}

/// Returns the labels of the elements and of the ids, which differ along `dim`.
fn labels(rank: usize, dim: usize) -> [String; 2] {
    ["E", "I"].map(|own| {
        let label = |(index, label): (usize, char)| if index == dim { own.into() } else { label.to_string() };
        ('a'..='z').take(rank).enumerate().map(label).collect()
    })
}

/// The extents of the elements and of the ids along `dim`, and the distance between adjacent indices along `dim`, in
/// elements.
struct Sizes {
    extent: usize,
    count: usize,
    inner: usize,
}

impl Sizes {
    fn of(elements: &[usize], ids: &[usize], dim: usize) -> Self {
        Self { extent: elements[dim], count: ids[dim], inner: ids[dim + 1..].iter().product::<usize>().max(1) }
    }
}
