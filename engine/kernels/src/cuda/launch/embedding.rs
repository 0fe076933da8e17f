//! Launches of embedding.cu and embedding_grad.cu.

use super::copy::fill;
use super::reduce::{PieceRows, Pieces};
use super::{Kernel, Launch, Operands, blocks, launches, typed, typed_to};
use crate::Spec;
use crate::cuda::Family::{Embedding, EmbeddingGrad};

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
struct SortArguments {
    ids: u64,
    keys: u64,
    count: u64,
    padding: u32,
    length: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RankArguments {
    chunks: u64,
    sorted: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct EmbeddingGradArguments {
    sorted: u64,
    dy: u64,
    d_table: u64,
    count: u64,
    width: u64,
    spans: PieceRows,
    span_count: u64,
    long_blocks: u32,
    sums_first: u32,
}

/// The rows of a table that ids name.
pub fn embedding(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([table, ids], [out]) = (operands.inputs, operands.outputs) else { return None };
    let width = table.width();
    let arguments = EmbeddingArguments { table: table.address, ids: ids.address, out: out.address, width };
    launches([Kernel::rows(Embedding, typed("embedding", table.dtype)?, ids.count(), table.packs(), arguments)])
}

/// Places that are sorted together: `CHUNK` of embedding_grad.cu.
const CHUNK: u64 = 2048;

/// Places of a sequence whose rows are summed by themselves.
const SPAN: u64 = 256;

/// Rows of an id that a warp adds by itself, at most: `SHORT` of embedding_grad.cu.
const SHORT: u64 = 128;

/// Columns of a block that adds the rows of one id: `SHARED_COLUMNS` of embedding_grad.cu.
const SHARED_COLUMNS: u64 = 64;

/// Columns of a warp that adds the rows of one id: 32 times `OWN` of embedding_grad.cu.
const WARP_COLUMNS: u64 = 256;

/// Threads of a block that adds rows.
const ADDING: u32 = 512;

/// Places of a chunk of so many, and chunks.
fn chunks(places: u64) -> (u64, u64) {
    let length = places.next_power_of_two().min(CHUNK);
    (length, places.div_ceil(length))
}

/// Bytes of the places, sorted by their ids: chunk by chunk and, of several chunks, all of them.
pub fn embedding_grad_workspace(ids: &Spec) -> Vec<u64> {
    let places = ids.elements() as u64;
    let (length, chunks) = chunks(places);
    let of_chunks = 8 * length * chunks;
    if chunks > 1 { vec![of_chunks, 8 * places] } else { vec![of_chunks] }
}

/// The table's gradient from (ids, dy), to which one id may add nothing.
pub fn embedding_grad(padding: Option<u32>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let clear = if operands.accumulate(0) == 0 { Some(fill(operands.outputs.first()?, 0.0)?) } else { None };
    Some(clear.into_iter().map(Launch::Kernel).chain(add_rows(padding, false, operands)?).collect())
}

/// A tensor that is the output, too, and the table's gradient from (ids, dy): rows that no id names are not touched.
pub fn add_embedding_grad(padding: Option<u32>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    add_rows(padding, true, operands)
}

/// Adds rows of dy to those of the output that ids name: the sums of spans one after another, or the sum of these.
fn add_rows(padding: Option<u32>, sums_first: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids, dy], [d_table], &[keys, ref rest @ ..]) = (operands.inputs, operands.outputs, operands.workspace) else {
        return None;
    };
    let (count, width) = (ids.count(), d_table.width());
    let (length, chunks) = chunks(count);
    // No vocabulary has as many ids.
    let padding = padding.unwrap_or(u32::MAX);
    let sort = Kernel {
        family: EmbeddingGrad,
        name: "embedding_sort".into(),
        grid: [blocks(chunks, 1), 1, 1],
        block: (length / 2).next_multiple_of(32).clamp(32, 1024) as u32,
        shared_bytes: 8 * length as u32,
        tickets: 0,
        arguments: Box::new(SortArguments { ids: ids.address, keys, count, padding, length: length as u32 }),
    };
    let sorted = if chunks > 1 { *rest.first()? } else { keys };
    let ranks = RankArguments { chunks: keys, sorted, count };
    let rank = (chunks > 1).then(|| Kernel::flat(EmbeddingGrad, "embedding_rank".into(), count, ranks));
    let spans = Pieces::of(dy.dims(), SPAN, SPAN);
    // No id has more rows than a warp adds, if there are no more.
    let long = if count > SHORT { count.div_ceil(SHORT) * width.div_ceil(SHARED_COLUMNS) } else { 0 };
    let short = (count * width.div_ceil(WARP_COLUMNS)).div_ceil(u64::from(ADDING / 32));
    let arguments = EmbeddingGradArguments {
        sorted,
        dy: dy.address,
        d_table: d_table.address,
        count,
        width,
        spans: spans.rows,
        span_count: spans.count(),
        long_blocks: blocks(long, 1),
        sums_first: u32::from(sums_first),
    };
    let add = Kernel {
        family: EmbeddingGrad,
        name: typed_to("embedding_grad", dy.dtype, d_table.dtype)?,
        grid: [blocks(long + short, 1), 1, 1],
        block: ADDING,
        // Where spans begin, and of each warp the sums of its span.
        shared_bytes: if long > 0 { 4 * ADDING + ADDING / 32 * 4 * SHARED_COLUMNS as u32 } else { 0 },
        tickets: 0,
        arguments: Box::new(arguments),
    };
    Some([Some(sort), rank, Some(add)].into_iter().flatten().map(Launch::Kernel).collect())
}
