//! Launches of embedding.cu.

use super::copy::fill;
use super::{BLOCK, Kernel, Launch, Operands, blocks, launches, typed, typed_to};
use crate::cuda::Family::Embedding;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct EmbeddingArguments {
    table: u64,
    ids: u64,
    out: u64,
    width: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct EmbeddingGradArguments {
    ids: u64,
    dy: u64,
    d_table: u64,
    count: u64,
    width: u64,
    padding: u32,
    sums_first: u32,
}

/// The rows of a table that ids name.
pub fn embedding(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([table, ids], [out]) = (operands.inputs, operands.outputs) else { return None };
    let width = table.width();
    let arguments = EmbeddingArguments { table: table.address, ids: ids.address, out: out.address, width };
    launches([Kernel::rows(Embedding, typed("embedding", table.dtype)?, ids.count(), table.packs(), arguments)])
}

/// The table's gradient from (ids, dy), to which one id may add nothing.
pub fn embedding_grad(padding: Option<u32>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let clear = if operands.accumulate(0) == 0 { Some(fill(operands.outputs.first()?, 0.0)?) } else { None };
    let rows = add_rows(padding, false, operands)?;
    Some(clear.into_iter().chain([rows]).map(Launch::Kernel).collect())
}

/// A tensor that is the output, too, and the table's gradient from (ids, dy): rows that no id names are not touched.
pub fn add_embedding_grad(padding: Option<u32>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    launches([add_rows(padding, true, operands)?])
}

/// Adds rows of dy to those of the output that ids name: one after another, or their sums.
fn add_rows(padding: Option<u32>, sums_first: bool, operands: &Operands<'_>) -> Option<Kernel> {
    let ([ids, dy], [d_table]) = (operands.inputs, operands.outputs) else { return None };
    let (count, width) = (ids.count(), d_table.width());
    let arguments = EmbeddingGradArguments {
        ids: ids.address,
        dy: dy.address,
        d_table: d_table.address,
        count,
        width,
        // No vocabulary has as many ids.
        padding: padding.unwrap_or(u32::MAX),
        sums_first: u32::from(sums_first),
    };
    Some(Kernel {
        family: Embedding,
        name: typed_to("embedding_grad", dy.dtype, d_table.dtype)?,
        grid: [blocks(count, 1), 1, 1],
        block: BLOCK,
        shared_bytes: BLOCK / 32 * 4,
        tickets: 0,
        arguments: Box::new(arguments),
    })
}
