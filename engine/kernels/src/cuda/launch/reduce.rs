//! Launches of reduce.cu.

use candle_core::DType;

use super::{BLOCK, Kernel, Launch, Operand, Operands, Strides, blocks, launches, typed, typed_to};
use crate::Spec;
use crate::cuda::Family::Reduce;

/// Rows divided into pieces.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pieces {
    pub(super) rows: PieceRows,
    sequences: u64,
}

/// The numbers of rows in sequences and pieces, with the layout of `Pieces` in pieces.cuh.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PieceRows {
    sequence: u64,
    of_sequence: u64,
    length: u64,
    share: u64,
}

/// Number of rows per piece in sums of columns.
const PIECE: u64 = 64;

/// Most blocks along the second and third dimension of a grid.
const MOST_GRID_ROWS: u64 = 65_535;

/// Number of rows that a warp sums. A piece's warps then add up their sums.
const SHARE: u64 = 16;

const WARP: u32 = 32;

/// Threads per block in kernels that sum columns.
pub(super) const SUMMING: u32 = 128;

/// Columns per thread: `OWN_COLUMNS` of pieces.cuh.
const OWN_COLUMNS: u64 = 4;

/// Returns the number of blocks that together sum this many columns, each with this many threads side by side.
pub(super) fn blocks_of_columns(width: u64, threads: u32) -> u32 {
    blocks(width.div_ceil(OWN_COLUMNS), threads)
}

impl Pieces {
    /// Divides the rows of [.., sequence, width] into pieces of `length` rows, and each piece into shares of `share`
    /// rows. With fewer than three dimensions, all rows form one sequence.
    pub(super) fn of(dims: &[usize], length: u64, share: u64) -> Self {
        let rows = dims.iter().rev().skip(1).product::<usize>() as u64;
        let sequence = if dims.len() > 2 { dims[dims.len() - 2] as u64 } else { rows };
        let sequences = if rows == 0 { 0 } else { rows / sequence };
        let of_sequence = sequence.div_ceil(length);
        Self { rows: PieceRows { sequence, of_sequence, length, share }, sequences }
    }

    /// Divides rows into the pieces that sums of columns use.
    fn of_columns(rows: &[usize]) -> Self {
        Self::of(rows, PIECE, SHARE)
    }

    /// Returns the number of pieces.
    pub(super) fn count(self) -> u64 {
        self.sequences * self.rows.of_sequence
    }
}

/// Number of pieces in a run. The sums of a run are added up before the runs are: `RUN` of pieces.cuh.
const RUN: u64 = 16;

/// The combination of the sums of pieces, with the layout of `Fold` in pieces.cuh.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Fold {
    parts: u64,
    tickets: u64,
    out: [u64; 2],
    width: u64,
    sequences: u64,
    pieces: PieceRows,
    results: u32,
    accumulate: u32,
    is_f32: u32,
}

impl Fold {
    /// Combines the sums of pieces into one output, or into two of equal width. Each bit of `accumulate` says whether
    /// the kernel adds to that output. Returns `None` if an output has neither the type `dtype` nor f32, or if there
    /// is no workspace.
    pub(super) fn new(
        pieces: Pieces,
        dtype: DType,
        outs: &[Operand],
        operands: &Operands<'_>,
        accumulate: u64,
    ) -> Option<Self> {
        let (first, last) = (outs.first()?, outs.last()?);
        let is_stored = |out: &Operand| out.dtype == dtype || out.dtype == DType::F32;
        let fits = outs.len() <= 2 && outs.iter().all(|out| is_stored(out) && out.count() == first.count());
        let is_f32 = |(index, out): (usize, &Operand)| u32::from(out.dtype == DType::F32) << index;
        fits.then_some(Self {
            parts: *operands.workspace.first()?,
            tickets: operands.tickets,
            out: [first.address, last.address],
            width: first.count(),
            sequences: pieces.sequences,
            pieces: pieces.rows,
            results: outs.len() as u32,
            accumulate: accumulate as u32,
            is_f32: outs.iter().enumerate().map(is_f32).sum(),
        })
    }

    /// Returns the number of tickets for a grid with this many blocks of columns. Returns `None` if the number
    /// exceeds `u32`.
    pub(super) fn tickets(&self, blocks_of_columns: u32) -> Option<u32> {
        let runs = self.sequences * self.pieces.of_sequence.div_ceil(RUN);
        u32::try_from(u64::from(blocks_of_columns) * (runs + 1)).ok()
    }

    /// Returns the struct as fields of 8 bytes.
    pub(super) fn words(&self) -> [u64; 12] {
        let &Self { parts, tickets, out: [first, last], width, sequences, pieces, results, accumulate, is_f32 } = self;
        let counts = u64::from(results) | u64::from(accumulate) << 32;
        let PieceRows { sequence, of_sequence, length, share } = pieces;
        [parts, tickets, first, last, width, sequences, sequence, of_sequence, length, share, counts, u64::from(is_f32)]
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ColumnSumsArguments {
    x: u64,
    fold: Fold,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SumArguments {
    x: u64,
    out: u64,
    outputs: u64,
    summed: u64,
    kept: Strides,
    reduced: Strides,
    accumulate: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ScaledSumArguments {
    x: u64,
    parts: u64,
    ticket: u64,
    out: u64,
    count: u64,
    length: u64,
    scale: f64,
    accumulate: u32,
}

/// Returns the shape [rows in sequences, width] of a sum over `dims`. Returns `None` unless `dims` are the leading
/// dimensions.
fn as_rows(x: &[usize], dims: &[usize]) -> Option<Vec<usize>> {
    if dims.is_empty() || !dims.iter().enumerate().all(|(i, &d)| i == d) {
        return None;
    }
    let width = x[dims.len()..].iter().product();
    Some([&x[..dims.len()], &[width]].concat())
}

/// Returns the size of the workspace of [`sum`]: the pieces' sums. It is empty if the summed dimensions are not the
/// leading ones.
pub fn column_sums_workspace(x: &Spec, dims: &[usize]) -> Vec<u64> {
    let bytes = as_rows(x.dims(), dims).map(|rows| 4 * Pieces::of_columns(&rows).count() * crate::width(&rows) as u64);
    bytes.into_iter().collect()
}

/// Returns the launch that sums over `dims`.
pub fn sum(dims: &[usize], operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [out]) = (operands.inputs, operands.outputs) else { return None };
    // A grid's size along this dimension is limited.
    let is_narrow = u64::from(blocks_of_columns(out.count(), WARP)) <= MOST_GRID_ROWS;
    if let (Some(rows), true, [_]) =
        (as_rows(x.dims(), dims).filter(|_| is_narrow), x.layout.is_contiguous(), operands.workspace)
    {
        let pieces = Pieces::of_columns(&rows);
        let fold = Fold::new(pieces, x.dtype, operands.outputs, operands, operands.accumulate)?;
        let blocks_side_by_side = blocks_of_columns(out.count(), WARP);
        return launches([Kernel {
            family: Reduce,
            name: typed("column_sums", x.dtype)?,
            grid: [blocks(pieces.count(), 1), blocks_side_by_side, 1],
            block: WARP * (PIECE / SHARE) as u32,
            shared_bytes: WARP * (OWN_COLUMNS * PIECE / SHARE) as u32 * 4,
            tickets: fold.tickets(blocks_side_by_side)?,
            arguments: Box::new(ColumnSumsArguments { x: x.address, fold }),
        }]);
    }
    let (extents, strides) = (x.dims(), x.layout.stride());
    let part = |keep: bool| {
        let of = |from: &[usize]| -> Vec<usize> {
            from.iter().enumerate().filter(|(d, _)| dims.contains(d) != keep).map(|(_, &n)| n).collect()
        };
        Strides::merged(&of(extents), [&of(strides)]).map(|[strides]| strides)
    };
    let (outputs, summed) = (out.count(), x.count() / out.count().max(1));
    let arguments = SumArguments {
        x: x.address,
        out: out.address,
        outputs,
        summed,
        kept: part(true)?,
        reduced: part(false)?,
        accumulate: operands.accumulate(0),
    };
    launches([Kernel::flat(Reduce, typed_to("sum", x.dtype, out.dtype)?, 32 * outputs, arguments)])
}

/// Returns the launch that computes scale · Σ x. Each of `part_count` blocks sums a contiguous part of x, and stores
/// the scaled sum. The block that finishes last adds these sums, in the order of the parts.
pub fn scaled_sum(scale: f64, part_count: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [out], &[parts]) = (operands.inputs, operands.outputs, operands.workspace) else { return None };
    let part_count = part_count as u64;
    let arguments = ScaledSumArguments {
        x: x.address,
        parts,
        ticket: operands.tickets,
        out: out.address,
        count: x.count(),
        length: x.count().div_ceil(part_count),
        scale,
        accumulate: operands.accumulate(0),
    };
    launches([Kernel {
        family: Reduce,
        name: typed("scaled_sum", x.dtype).filter(|_| x.dtype == out.dtype)?,
        grid: [blocks(part_count, 1), 1, 1],
        block: BLOCK,
        shared_bytes: 8 * BLOCK,
        tickets: 1,
        arguments: Box::new(arguments),
    }])
}
