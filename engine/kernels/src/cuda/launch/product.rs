//! Matrix products, described in the form in which cuBLASLt computes them. Each function that returns launches
//! returns `None` if an operand is not a supported matrix.

use candle_core::{DType, Layout};

use super::{Features, Launch, Operand, Operands, Strides};
use crate::Spec;
use crate::cuda::generate::dense;

/// A matrix in memory whose rows or columns are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Device address of the first element.
    pub address: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// True if columns are contiguous, false if rows are.
    pub is_transposed: bool,
    /// Distance in elements between the starts of consecutive rows, or of consecutive columns if the matrix is
    /// transposed.
    pub pitch: u64,
}

impl Matrix {
    /// A matrix with contiguous rows and no gaps.
    pub fn dense(address: u64, dtype: DType, columns: u64) -> Self {
        Self { address, dtype, is_transposed: false, pitch: columns }
    }

    /// The transposed matrix, in the same memory.
    pub fn t(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    /// Returns the matrix in the last two dimensions of an operand, or `None` if they do not form a matrix.
    fn of(Operand { address, layout, dtype }: &Operand) -> Option<Self> {
        let (is_transposed, pitch) = pitch(layout)?;
        Some(Self { address: *address, dtype: *dtype, is_transposed, pitch })
    }

    /// Returns the matrix of the same form that begins `elements` later in memory.
    pub fn skip(self, elements: u64) -> Self {
        Self { address: self.address + elements * self.dtype.size_in_bytes() as u64, ..self }
    }
}

/// True if the last two dimensions form a matrix: one of them is contiguous, and rows do not overlap. Rows of a
/// broadcast tensor overlap.
pub fn is_matrix(layout: &Layout) -> bool {
    pitch(layout).is_some()
}

/// Returns whether a matrix is transposed, and its pitch; `None` if the layout is not a matrix.
fn pitch(layout: &Layout) -> Option<(bool, u64)> {
    let (&[.., rows, columns], &[.., row, column]) = (layout.dims(), layout.stride()) else { return None };
    let along = |is_transposed: bool| {
        let ((count, step), (length, pitch)) =
            if is_transposed { ((rows, row), (columns, column)) } else { ((columns, column), (rows, row)) };
        // If there is only one row or column, its pitch is arbitrary.
        let pitch = if length <= 1 { count.max(1) } else { pitch };
        let is_dense = (count <= 1 || step == 1) && pitch >= count;
        is_dense.then_some((is_transposed, pitch as u64))
    };
    along(false).or_else(|| along(true))
}

/// Several products of the same form. The matrices of an operand are at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Number of products.
    pub count: u64,
    /// Elements from one matrix to the next, for a, b and c.
    pub distances: [u64; 3],
}

/// The elementwise function that is applied to a product and its bias before the result is stored. All tensors are
/// contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// No function.
    None,
    /// GELU in its tanh approximation. Its input can be stored as well, with the layout of c.
    Gelu {
        /// Address of GELU's input; `None` if it is not stored.
        kept: Option<u64>,
    },
    /// Multiplication by the derivative of the tanh approximation of GELU. The inputs of the derivative have the
    /// layout of c.
    GeluGrad {
        /// Address of GELU's input.
        of: u64,
    },
}

/// c = a·b, or c = d + a·b. d has the layout of c and may be c itself. a is m × k, and b is k × n. Sums are in f32
/// for all types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// The left operand.
    pub a: Matrix,
    /// The right operand.
    pub b: Matrix,
    /// The product.
    pub c: Matrix,
    /// Address of n elements that are added to every row.
    pub bias: Option<u64>,
    /// The function that is applied to each element before it is stored.
    pub epilogue: Epilogue,
    /// Address of d, the tensor that the product is added to: c itself, or memory that does not overlap c. `None` for
    /// c = a·b.
    pub onto: Option<u64>,
    /// The number of products and their distances.
    pub batch: Batch,
    /// Scratch for cuBLASLt: address and size in bytes.
    pub workspace: (u64, u64),
    /// True if the elements of a and b, which are f32, may be rounded to 10 bits of mantissa (TF32) before they are
    /// multiplied on tensor cores.
    pub tf32: bool,
}

/// The maximum size of scratch for cuBLASLt in bytes, as NVIDIA's documentation recommends for Hopper.
const MOST_WORKSPACE: u64 = 32 << 20;

/// Maximum number of parts of a sum that are computed in parallel.
const PARTS: u64 = 8;

/// The alignment that cuBLASLt requires of its scratch, and assumes of matrices unless told otherwise
/// (`cublasLtMatmul`, `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`).
pub const ALIGNMENT: u64 = 256;

/// Returns the bytes of scratch for a product with an m × n result: room for partial sums in f32, and for aligning
/// the start.
pub fn product_workspace(m: usize, n: usize) -> u64 {
    (4 * PARTS * m as u64 * n as u64).clamp(ALIGNMENT, MOST_WORKSPACE) + ALIGNMENT
}

impl Product {
    /// Creates one product of contiguous matrices. a and b may be transposed.
    pub fn new((m, n, k): (u64, u64, u64), a: Matrix, b: Matrix, c: Matrix, workspace: (u64, u64)) -> Self {
        let batch = Batch { count: 1, distances: [0; 3] };
        Self { m, n, k, a, b, c, bias: None, epilogue: Epilogue::None, onto: None, batch, workspace, tf32: false }
    }

    /// Lets the product use TF32 if the device does, and if all of its matrices are f32.
    pub fn with_features(&mut self, features: Features) {
        self.tf32 = features.tf32 && [self.a, self.b, self.c].iter().all(|matrix| matrix.dtype == DType::F32);
    }

    /// Returns the address ranges that the product reads. Each is an address and a size in bytes, from the first
    /// element of an operand to the last.
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

    /// Returns the floating-point operations. Each term of a sum counts as a multiplication and an addition.
    pub fn flops(&self) -> u64 {
        2 * self.m * self.n * self.k * self.batch.count
    }

    /// Returns the bytes read and written, each element once.
    pub fn bytes(&self) -> u64 {
        let written = self.m * self.n * self.batch.count * self.c.dtype.size_in_bytes() as u64;
        let kept = if let Epilogue::Gelu { kept: Some(_) } = self.epilogue { written } else { 0 };
        self.reads().iter().map(|&(_, bytes)| bytes as u64).sum::<u64>() + written + kept
    }

    /// True if every matrix is aligned along its contiguous dimension: extent and pitch are multiples of 8 elements
    /// (16 bytes in bf16), and the address is a multiple of 16 bytes. The fast kernels of cuBLASLt require this.
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

    /// True if the product has an epilogue or is added to another tensor. A separate kernel could do either of these.
    pub fn is_followed(&self) -> bool {
        self.epilogue != Epilogue::None || self.onto.is_some_and(|onto| onto != self.c.address)
    }

    /// Splits the product and its epilogue into two launches, for a library that has no algorithm for both at once.
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

/// Returns the aligned scratch within a piece of workspace, as an address and a size in bytes. The piece must have
/// the size of [`product_workspace`].
pub fn scratch_in(piece: u64, bytes: u64) -> (u64, u64) {
    (piece.next_multiple_of(ALIGNMENT), bytes - ALIGNMENT)
}

/// Returns the scratch of one product, which is in the first piece of the operation's workspace. Returns `None` if
/// there is no such piece.
fn scratch(operands: &Operands<'_>, m: u64, n: u64) -> Option<(u64, u64)> {
    Some(scratch_in(*operands.workspace.first()?, product_workspace(m as usize, n as usize)))
}

/// Computes x·Wᵀ + b from (x, weight, optional bias).
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

/// Computes dx = dy·W from (dy, weight).
pub fn linear_grad_input(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([dy, weight], [dx]) = (operands.inputs, operands.outputs) else { return None };
    let (k, n) = (dy.width(), dx.width());
    let m = dy.count() / k;
    let of_dy = Matrix::dense(dy.address, dy.dtype, k);
    let of_weight = Matrix::dense(weight.address, weight.dtype, n);
    let of_dx = Matrix::dense(dx.address, dx.dtype, n);
    Some(vec![Launch::Product(Product::new((m, n, k), of_dy, of_weight, of_dx, scratch(operands, m, n)?))])
}

/// Computes d_weight = dyᵀ·x and, optionally, d_bias = Σ dy over the rows, from (x, dy).
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

/// Returns the sizes of the scratch for a sum over all dimensions but the last.
pub fn leading_sums_workspace(x: &Spec) -> Vec<u64> {
    super::column_sums_workspace(x, &(0..x.dims().len() - 1).collect::<Vec<_>>())
}

/// Computes [.., m, k] · [.., k, n] from (a, b), which may have any strides. The result is a contiguous [.., m, n].
pub fn matmul(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([a, b], [c]) = (operands.inputs, operands.outputs) else { return None };
    let (&[ref outer @ .., m, k], &[.., n]) = (a.dims(), b.dims()) else { return None };
    let (of_a, of_b, of_c) = (Matrix::of(a)?, Matrix::of(b)?, Matrix::dense(c.address, c.dtype, n as u64));
    let steps = |layout: &Layout| layout.stride()[..outer.len()].to_vec();
    let scratch = scratch(operands, m as u64, n as u64)?;
    let one = Product::new((m as u64, n as u64, k as u64), of_a, of_b, of_c, scratch);
    // c is contiguous, so dimensions that merge for a and b merge for c too.
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
