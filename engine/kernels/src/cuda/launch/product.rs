//! Matrix products: what cuBLASLt is asked for.

use candle_core::{DType, Layout};

use super::{Launch, Operand, Operands, Strides};
use crate::Spec;
use crate::cuda::generate::dense;

/// Rows and columns in memory, neighbours along one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Device address of the first element.
    pub address: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// Whether the elements of a column are neighbours, rather than those of a row.
    pub is_transposed: bool,
    /// Elements from one row to the next; if transposed, from one column to the next.
    pub pitch: u64,
}

impl Matrix {
    /// Rows without gaps.
    pub fn dense(address: u64, dtype: DType, columns: u64) -> Self {
        Self { address, dtype, is_transposed: false, pitch: columns }
    }

    /// The same memory with rows for columns.
    pub fn t(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    /// The last two dimensions of an operand, if they are a matrix.
    fn of(Operand { address, layout, dtype }: &Operand) -> Option<Self> {
        let (is_transposed, pitch) = pitch(layout)?;
        Some(Self { address: *address, dtype: *dtype, is_transposed, pitch })
    }

    /// The same matrix, so many elements further on.
    pub fn skip(self, elements: u64) -> Self {
        Self { address: self.address + elements * self.dtype.size_in_bytes() as u64, ..self }
    }
}

/// Whether the last two dimensions are a matrix: one of them is dense, and rows do not reach into each other, as those of a
/// number that stands for many do.
pub fn is_matrix(layout: &Layout) -> bool {
    pitch(layout).is_some()
}

/// Whether a matrix is transposed, and its pitch.
fn pitch(layout: &Layout) -> Option<(bool, u64)> {
    let (&[.., rows, columns], &[.., row, column]) = (layout.dims(), layout.stride()) else { return None };
    let along = |is_transposed: bool| {
        let ((count, step), (length, pitch)) =
            if is_transposed { ((rows, row), (columns, column)) } else { ((columns, column), (rows, row)) };
        // A single one has no next.
        let pitch = if length <= 1 { count.max(1) } else { pitch };
        let is_dense = (count <= 1 || step == 1) && pitch >= count;
        is_dense.then_some((is_transposed, pitch as u64))
    };
    along(false).or_else(|| along(true))
}

/// Equal products of matrices that lie at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// How many.
    pub count: u64,
    /// Elements from one to the next, of a, b and c.
    pub distances: [u64; 3],
}

/// What follows a product of matrices without gaps, and its bias, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// GELU in its tanh form; what it is of is kept, as c is, at an address.
    Gelu {
        /// None where nobody asks for it.
        kept: Option<u64>,
    },
    /// Times the derivative of that GELU, of numbers that lie as c does.
    GeluGrad {
        /// Their address.
        of: u64,
    },
}

/// c = a·b, or c = d + a·b with a d that lies as c does, and may be c: m × k times k × n. Sums are in f32, whatever is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// The product.
    pub c: Matrix,
    /// Address of n numbers that are added to every row.
    pub bias: Option<u64>,
    /// What is done to each sum before it is stored.
    pub epilogue: Epilogue,
    /// Address of what it is added to: c's own, or another where nothing of c lies.
    pub onto: Option<u64>,
    /// How many of them.
    pub batch: Batch,
    /// Scratch for cuBLASLt: address and bytes.
    pub workspace: (u64, u64),
}

/// What cuBLASLt is given at most: what its documentation recommends for Hopper.
const MOST_WORKSPACE: u64 = 32 << 20;

/// Parts of a sum that may be computed side by side.
const PARTS: u64 = 8;

/// What cuBLASLt wants its scratch aligned to, and takes matrices to be aligned to unless it is told otherwise
/// (`cublasLtMatmul`, `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`).
pub const ALIGNMENT: u64 = 256;

/// Bytes of scratch for a product of so many elements: room for partial sums in f32, and to begin where it is aligned.
pub fn product_workspace(m: usize, n: usize) -> u64 {
    (4 * PARTS * m as u64 * n as u64).clamp(ALIGNMENT, MOST_WORKSPACE) + ALIGNMENT
}

impl Product {
    /// One product of matrices without gaps, of which a and b may be transposed.
    pub fn new((m, n, k): (u64, u64, u64), a: Matrix, b: Matrix, c: Matrix, workspace: (u64, u64)) -> Self {
        let batch = Batch { count: 1, distances: [0; 3] };
        Self { m, n, k, a, b, c, bias: None, epilogue: Epilogue::None, onto: None, batch, workspace }
    }

    /// What it reads: addresses and bytes, from the first element of each operand to the last.
    pub fn reads(&self) -> Vec<(u64, usize)> {
        let &Self { m, n, k, a, b, c, batch, .. } = self;
        let matrix = |matrix: Matrix, (rows, columns), distance| {
            let (outer, inner) = if matrix.is_transposed { (columns, rows) } else { (rows, columns) };
            let steps = |count: u64, by: u64| count.saturating_sub(1) * by;
            let elements = steps(batch.count, distance) + steps(outer, matrix.pitch) + inner;
            (matrix.address, elements as usize * matrix.dtype.size_in_bytes())
        };
        let [of_a, of_b, of_c] = batch.distances;
        let like_c = |address| matrix(Matrix { address, ..c }, (m, n), of_c);
        let read_by_epilogue = match self.epilogue {
            Epilogue::GeluGrad { of } => Some(like_c(of)),
            Epilogue::None | Epilogue::Gelu { .. } => None,
        };
        let added_to = self.onto.map(like_c);
        let bias = self.bias.map(|address| (address, n as usize * c.dtype.size_in_bytes()));
        let factors = [matrix(a, (m, k), of_a), matrix(b, (k, n), of_b)];
        factors.into_iter().chain(added_to).chain(bias).chain(read_by_epilogue).collect()
    }

    /// Arithmetic: a multiplication and an addition for each element of a sum.
    pub fn flops(&self) -> u64 {
        2 * self.m * self.n * self.k * self.batch.count
    }

    /// Bytes that it reads and writes, each element once.
    pub fn bytes(&self) -> u64 {
        let written = self.m * self.n * self.batch.count * self.c.dtype.size_in_bytes() as u64;
        let kept = if let Epilogue::Gelu { kept: Some(_) } = self.epilogue { written } else { 0 };
        self.reads().iter().map(|&(_, bytes)| bytes as u64).sum::<u64>() + written + kept
    }

    /// Whether rows of every matrix begin at multiples of 8 elements and have as many, as fast kernels of a library want them: of 16 bytes
    /// in bf16. A transposed matrix has columns in their place.
    pub fn is_aligned(&self) -> bool {
        let &Self { m, n, k, a, b, c, .. } = self;
        let row = |matrix: Matrix, rows: u64, columns: u64| if matrix.is_transposed { rows } else { columns };
        let of = |matrix: Matrix, rows, columns| {
            row(matrix, rows, columns).is_multiple_of(8)
                && matrix.pitch.is_multiple_of(8)
                && matrix.address.is_multiple_of(8 * matrix.dtype.size_in_bytes() as u64)
        };
        of(a, m, k) && of(b, k, n) && of(c, m, n)
    }

    /// Whether something is done with the sums before they are stored that another kernel could do behind it.
    pub fn is_followed(&self) -> bool {
        self.epilogue != Epilogue::None || self.onto.is_some_and(|onto| onto != self.c.address)
    }

    /// The same in two launches: for a library that has no algorithm for both at once.
    pub fn apart(self) -> Vec<Launch> {
        let (count, dtype) = (self.m * self.n, self.c.dtype);
        let product = Self { epilogue: Epilogue::None, ..self };
        let (product, behind) = match self.epilogue {
            Epilogue::None => match self.onto.filter(|_| self.is_followed()) {
                None => (product, None),
                Some(onto) => {
                    let (expression, c) = ("$0 + $1", self.c.address);
                    (Self { onto: None, ..product }, dense("add", expression, &[onto, c], c, (count, dtype)))
                }
            },
            Epilogue::Gelu { kept } => {
                let c = Matrix { address: kept.unwrap_or(self.c.address), ..self.c };
                (Self { c, ..product }, dense("gelu", "of_gelu($0)", &[c.address], self.c.address, (count, dtype)))
            }
            Epilogue::GeluGrad { of } => {
                let (expression, dy) = ("of_gelu_grad($0, $1)", self.c.address);
                (product, dense("gelu_grad", expression, &[of, dy], dy, (count, dtype)))
            }
        };
        [Launch::Product(product)].into_iter().chain(behind).collect()
    }
}

/// Scratch of products, in a piece of so many bytes as [`product_workspace`] wants.
pub fn scratch_in(piece: u64, bytes: u64) -> (u64, u64) {
    (piece.next_multiple_of(ALIGNMENT), bytes - ALIGNMENT)
}

/// Scratch of one product: the first piece of an operation's workspace.
fn scratch(operands: &Operands<'_>, m: u64, n: u64) -> Option<(u64, u64)> {
    Some(scratch_in(*operands.workspace.first()?, product_workspace(m as usize, n as usize)))
}

/// x·Wᵀ + b from (x, weight, perhaps bias).
pub fn linear(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, weight, bias @ ..], [y]) = (operands.inputs, operands.outputs) else { return None };
    let (k, n) = (x.width(), y.width());
    let m = x.count() / k;
    let of_x = Matrix::dense(x.address, x.dtype, k);
    let of_weight = Matrix::dense(weight.address, weight.dtype, k).t();
    let of_y = Matrix::dense(y.address, y.dtype, n);
    let product = Product::new((m, n, k), of_x, of_weight, of_y, scratch(operands, m, n)?);
    Some(vec![Launch::Product(Product { bias: bias.first().map(|bias| bias.address), ..product })])
}

/// dx = dy·W from (dy, weight).
pub fn linear_grad_input(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([dy, weight], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let (k, n) = (dy.width(), dx.width());
    let m = dy.count() / k;
    let of_dy = Matrix::dense(dy.address, dy.dtype, k);
    let of_weight = Matrix::dense(weight.address, weight.dtype, n);
    let of_dx = Matrix::dense(dx.address, dx.dtype, n);
    Some(vec![Launch::Product(Product::new((m, n, k), of_dy, of_weight, of_dx, scratch(operands, m, n)?))])
}

/// d_weight = dyᵀ·x, and perhaps d_bias = Σ dy over the rows, from (x, dy).
pub fn linear_grad_weight(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x, dy], [d_weight, d_bias @ ..]) = (operands.inputs, operands.outputs) else { return None };
    let (m, n) = (dy.width(), x.width());
    let k = x.count() / n;
    let of_dy = Matrix::dense(dy.address, dy.dtype, m).t();
    let of_x = Matrix::dense(x.address, x.dtype, n);
    let of_weight = Matrix::dense(d_weight.address, d_weight.dtype, n);
    let product = Product::new((m, n, k), of_dy, of_x, of_weight, scratch(operands, m, n)?);
    let mut launches =
        vec![Launch::Product(Product { onto: operands.accumulates(0).then_some(d_weight.address), ..product })];
    if !d_bias.is_empty() {
        let of_bias = Operands {
            inputs: std::slice::from_ref(dy),
            outputs: d_bias,
            workspace: &operands.workspace[1..],
            accumulate: operands.accumulate >> 1,
            ..*operands
        };
        let leading: Vec<usize> = (0..dy.dims().len() - 1).collect();
        launches.extend(super::sum(&leading, &of_bias)?);
    }
    Some(launches)
}

/// Bytes of the scratch of a sum over all dimensions but the last.
pub fn leading_sums_workspace(x: &Spec) -> Vec<u64> {
    super::column_sums_workspace(x, &(0..x.dims().len() - 1).collect::<Vec<_>>())
}

/// [.., m, k] · [.., k, n], each with its strides, to [.., m, n] without gaps, from (a, b).
pub fn matmul(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([a, b], [c]) = (operands.inputs, operands.outputs) else { return None };
    let (&[ref outer @ .., m, k], &[.., n]) = (a.dims(), b.dims()) else { return None };
    let (of_a, of_b, of_c) = (Matrix::of(a)?, Matrix::of(b)?, Matrix::dense(c.address, c.dtype, n as u64));
    let steps = |layout: &Layout| layout.stride()[..outer.len()].to_vec();
    let scratch = scratch(operands, m as u64, n as u64)?;
    let one = Product::new((m as u64, n as u64, k as u64), of_a, of_b, of_c, scratch);
    // c is dense, so that what merges for it merges for all.
    let [at_a, at_b, at_c] = Strides::merged(outer, [&steps(&a.layout), &steps(&b.layout), &steps(&c.layout)])?;
    let rank = at_a.rank as usize;
    let (count, distances) = match rank {
        0 => (1, [0; 3]),
        _ => (at_a.dims[rank - 1], [at_a, at_b, at_c].map(|at| at.strides[rank - 1])),
    };
    let outer = &at_a.dims[..rank.saturating_sub(1)];
    let products = (0..outer.iter().product::<u64>()).map(|index| {
        let start = |at: &Strides| {
            let mut left = index;
            outer.iter().enumerate().rev().fold(0, |start, (dim, &extent)| {
                let here = left % extent;
                left /= extent;
                start + here * at.strides[dim]
            })
        };
        let [a, b, c] = [(of_a, at_a), (of_b, at_b), (of_c, at_c)].map(|(matrix, at)| matrix.skip(start(&at)));
        Launch::Product(Product { a, b, c, batch: Batch { count, distances }, ..one })
    });
    Some(products.collect())
}
