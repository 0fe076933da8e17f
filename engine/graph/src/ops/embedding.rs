//! Lookup of table rows by ids.

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::cpu::{Args, Element, InPieces, Pieces, rows_per_task, vectorize, with_float};
use gapless_kernels::{Spec, Window};

use super::OutputTypes;
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Looks up rows of a table of floats or ids: from a table [vocabulary, width] and ids [..] to [.., width]. The result for an id that the
/// table does not have is zeros.
#[derive(Debug, Clone, Copy, Default)]
pub struct Embedding {
    /// An id whose row gets no gradient, like PyTorch's `padding_idx`.
    pub padding: Option<u32>,
    /// The id of the table's first row: above 0 if the table is a rank's part of a larger one.
    pub first: u32,
}

/// Returns the number of the table's row for an id, if the table has it.
fn row_of(id: u32, first: u32, rows: usize) -> Option<usize> {
    id.checked_sub(first).map(|row| row as usize).filter(|&row| row < rows)
}

/// Returns the first row that a rank holds of a table. The rule allows a single range of rows.
fn first_row(table: &Window) -> u32 {
    table.held()[0].first().map_or(0, |rows| rows.start as u32)
}

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("v' w, * -> * w"))
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { first: first_row(&inputs[0]), ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_stored(&inputs[0])?;
        super::expect_ids("ids", &inputs[1])?;
        let &[_, width] = inputs[0].dims() else { return Err("the table must be [vocabulary, width]".into()) };
        let dims: Vec<usize> = inputs[1].dims().iter().copied().chain([width]).collect();
        Ok(vec![inputs[0].in_shape(dims)])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let vocabulary = g.input(0).dims()[0];
        let op = EmbeddingGrad { vocabulary, of: *self, types: OutputTypes::default() };
        let [d_table] = Tensor::apply_op(op, &[&g.input(1), &g.grad(0)])?;
        g.accumulate(0, d_table);
        Ok(())
    }

    /// Counts the bytes of the rows that are looked up, not of the whole table.
    fn bytes_moved(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        inputs[1].bytes() + 2 * outputs[0].bytes()
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match args.output_dtype(0) {
            DType::U32 => self.look_up::<u32>(args),
            DType::U8 => self.look_up::<u8>(args),
            dtype => with_float!(dtype, Stored => self.look_up::<Stored>(args)),
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::embedding(self.first, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (table, ids) = (args.input(0), args.input(1));
        let width = table.dims[1];
        let dims: Vec<usize> = ids.dims.iter().copied().chain([width]).collect();
        let mut out = Array::zeros(&dims);
        for (&id, out) in ids.data.iter().zip(out.data.chunks_exact_mut(width)) {
            if let Some(row) = row_of(id as u32, self.first, table.dims[0]) {
                out.copy_from_slice(&table.data[row * width..][..width]);
            }
        }
        vec![out]
    }
}

impl Embedding {
    fn look_up<T: Element + Default>(&self, args: &mut Args<'_>) {
        let out = args.output::<T>(0);
        let (table, ids) = (args.input::<T>(0), args.input::<u32>(1));
        let (width, vocabulary) = (super::width(args.output_dims(0)), args.input_dims(0)[0]);
        let rows = rows_per_task(width);
        out.pieces_mut(rows * width).zip(ids.pieces(rows)).for_each(|(out, ids)| {
            for (out, &id) in out.chunks_exact_mut(width).zip(ids) {
                match row_of(id, self.first, vocabulary) {
                    Some(row) => out.copy_from_slice(&table[row * width..][..width]),
                    None => out.fill(T::default()),
                }
            }
        });
    }
}

/// The gradient of [`Embedding`]'s table: adds each row of dy to the table row of its id, if the table has it. Parts of
/// the table are processed in parallel. Within each part, the rows of dy are added in order.
#[derive(Debug, Clone, Copy)]
struct EmbeddingGrad {
    vocabulary: usize,
    of: Embedding,
    types: OutputTypes<1>,
}

/// Number of parts into which the table is divided.
const TASKS: usize = 64;

impl Op for EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("*, * w -> v' w"))
    }

    fn on_parts(&self, _: &[Window], outputs: &[Window]) -> Option<Arc<dyn Op>> {
        let vocabulary = outputs[0].dims()[0];
        let of = Embedding { first: first_row(&outputs[0]), ..self.of };
        Some(Arc::new(Self { vocabulary, of, ..*self }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(self.types.apply_to([inputs[1].in_shape((self.vocabulary, super::width(inputs[1].dims())))]))
    }

    /// Counts dy once, and the gradient of the whole table twice, because it is read and written.
    fn bytes_moved(&self, inputs: &[Spec], outputs: &[Spec]) -> u64 {
        inputs[1].bytes() + 2 * outputs[0].bytes()
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[1].elements() as u64
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn with_output_dtype(&self, index: usize, dtype: DType) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { types: self.types.with(index, dtype), ..*self }))
    }

    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let d_table = args.output::<f32>(0);
        let (ids, dy) = (args.input::<u32>(0), args.input::<f32>(1));
        let width = super::width(args.output_dims(0));
        // Every task scans all ids for those that refer to the task's part of the table. Reading ids is cheap compared
        // with adding rows.
        let rows = self.vocabulary.div_ceil(TASKS).max(1);
        d_table.pieces_mut(rows * width).enumerate().for_each(|(task, table)| {
            if !accumulate {
                table.fill(0.0);
            }
            let (first, rows) = (self.of.first + (task * rows) as u32, table.len() / width);
            vectorize!({
                for (&id, dy) in ids.iter().zip(dy.chunks_exact(width)).filter(|(id, _)| Some(**id) != self.of.padding)
                {
                    let Some(row) = row_of(id, first, rows) else { continue };
                    table[row * width..][..width].iter_mut().zip(dy).for_each(|(d, &dy)| *d += dy);
                }
            });
        });
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::EmbeddingGrad { padding: self.of.padding, first: self.of.first })
    }
    fn cuda_workspace(&self, inputs: &[Spec], _: &[Spec]) -> Vec<u64> {
        gapless_kernels::cuda::launch::embedding_grad_workspace(&inputs[0])
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::embedding_grad(self.of.padding, self.of.first, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (ids, dy) = (args.input(0), args.input(1));
        let width = super::width(&dy.dims);
        let mut d_table = Array::zeros(&[self.vocabulary, width]);
        for (&id, dy) in ids.data.iter().zip(dy.rows()).filter(|(id, _)| Some(**id as u32) != self.of.padding) {
            let Some(row) = row_of(id as u32, self.of.first, self.vocabulary) else { continue };
            for (c, dy) in dy.iter().enumerate() {
                d_table.data[row * width + c] += dy;
            }
        }
        vec![d_table]
    }
}
