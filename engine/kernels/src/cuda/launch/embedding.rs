//! Launches of embedding.cu and embedding_grad.cu.

use candle_core::DType;

use super::copy::fill;
use super::reduce::{PieceRows, Pieces};
use super::{Kernel, Launch, Operand, Operands, blocks, launches, typed, typed_to};
use crate::Spec;
use crate::cuda::Family::{Embedding, EmbeddingGrad};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct EmbeddingArguments {
    table: u64,
    ids: u64,
    out: u64,
    width: u64,
    first: u32,
    rows: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SortArguments {
    ids: u64,
    keys: u64,
    count: u64,
    padding: u32,
    first: u32,
    rows: u32,
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

/// Returns the launch that looks up a table's rows by ids, of which `first` is that of the first row. The result for
/// an id that the table does not have is zeros.
pub fn embedding(first: u32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([table, ids], [out]) = (operands.inputs, operands.outputs) else { return None };
    let (width, rows) = (table.width(), row_count(table)?);
    let arguments = EmbeddingArguments { table: table.address, ids: ids.address, out: out.address, width, first, rows };
    let name = match table.dtype {
        DType::U8 => "embedding_u8".into(),
        DType::U32 => "embedding_u32".into(),
        other => typed("embedding", other)?,
    };
    launches([Kernel::rows(Embedding, name, ids.count(), table.packs(), arguments)])
}

/// The number of rows of a table [rows, width], which is below `u32::MAX` as all ids are.
fn row_count(table: &Operand) -> Option<u32> {
    u32::try_from(*table.dims().first()?).ok()
}

/// Most positions that one block sorts: `CHUNK` of embedding_grad.cu.
const CHUNK: u64 = 2048;

/// Number of positions in a span. Rows of one id are summed per span of a sequence.
const SPAN: u64 = 256;

/// Most rows of one id that a single warp adds: `SHORT` of embedding_grad.cu.
const SHORT: u64 = 128;

/// Number of columns in a block that adds the rows of one id: `SHARED_COLUMNS` of embedding_grad.cu.
const SHARED_COLUMNS: u64 = 64;

/// Number of columns in a warp that adds the rows of one id: 32 times `OWN` of embedding_grad.cu.
const WARP_COLUMNS: u64 = 256;

/// Threads per block in the kernel that adds rows.
const ADDING: u32 = 512;

/// Divides positions into chunks. Returns the number of positions per chunk, and the number of chunks.
fn chunks(places: u64) -> (u64, u64) {
    let length = places.next_power_of_two().min(CHUNK);
    (length, places.div_ceil(length))
}

/// Returns the sizes of the workspace for [`embedding_grad`]. The first piece holds the positions of each chunk,
/// sorted by id. If there are several chunks, a second piece holds all positions in sorted order.
pub fn embedding_grad_workspace(ids: &Spec) -> Vec<u64> {
    let places = ids.elements() as u64;
    let (length, chunks) = chunks(places);
    let of_chunks = 8 * length * chunks;
    if chunks > 1 { vec![of_chunks, 8 * places] } else { vec![of_chunks] }
}

/// Returns the launches that compute the table's gradient from (ids, dy). The id of the table's first row is `first`.
/// Positions with the id `padding`, or with one that the table does not have, add nothing to it.
pub fn embedding_grad(padding: Option<u32>, first: u32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let clear = if operands.accumulate(0) == 0 { Some(fill(operands.outputs.first()?, 0.0)?) } else { None };
    Some(clear.into_iter().map(Launch::Kernel).chain(add_rows((padding, first), false, operands)?).collect())
}

/// Returns the launches that add the table's gradient from (ids, dy) to a tensor. The tensor is input and output. The
/// kernels do not touch rows whose ids do not occur.
pub fn add_embedding_grad(padding: Option<u32>, first: u32, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    add_rows((padding, first), true, operands)
}

/// Returns the launches that add rows of dy to the output rows given by the ids. With `sums_first`, the sums of all
/// spans are added up before the kernel adds them to the output. Otherwise it adds the sums of spans to the output
/// one after another.
fn add_rows((padding, first): (Option<u32>, u32), sums_first: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids, dy], [d_table], &[keys, ref rest @ ..]) = (operands.inputs, operands.outputs, operands.workspace) else {
        return None;
    };
    let (count, width) = (ids.count(), d_table.width());
    let (length, chunks) = chunks(count);
    // Without padding, no id is skipped: no vocabulary contains the id `u32::MAX`.
    let padding = padding.unwrap_or(u32::MAX);
    let sort = Kernel {
        family: EmbeddingGrad,
        name: "embedding_sort".into(),
        grid: [blocks(chunks, 1), 1, 1],
        block: (length / 2).next_multiple_of(32).clamp(32, 1024) as u32,
        shared_bytes: 8 * length as u32,
        tickets: 0,
        arguments: Box::new(SortArguments {
            ids: ids.address,
            keys,
            count,
            padding,
            first,
            rows: row_count(d_table)?,
            length: length as u32,
        }),
    };
    let sorted = if chunks > 1 { *rest.first()? } else { keys };
    let ranks = RankArguments { chunks: keys, sorted, count };
    let rank = (chunks > 1).then(|| Kernel::flat(EmbeddingGrad, "embedding_rank".into(), count, ranks));
    let spans = Pieces::of(dy.dims(), SPAN, SPAN);
    // If there are at most `SHORT` positions, no id has more rows than a single warp adds.
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
        // The starts of spans and, for each warp, the sums of its span.
        shared_bytes: if long > 0 { 4 * ADDING + ADDING / 32 * 4 * SHARED_COLUMNS as u32 } else { 0 },
        tickets: 0,
        arguments: Box::new(arguments),
    };
    Some([Some(sort), rank, Some(add)].into_iter().flatten().map(Launch::Kernel).collect())
}
