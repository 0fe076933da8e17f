//! Launches of quantized.cu, and products with dequantized weights. Each function returns `None` if the kernels do not
//! support its operands.

use candle_core::{DType, Layout};

use super::{BLOCK, FOLD_BYTES, Kernel, Launch, Operand, Operands, launches, linear, linear_grad_input, typed};
use crate::cpu::quantized::{Format, NF4, Rounding, dynamic_map};
use crate::cuda::Family::Quantized;
use crate::{Spec, Spread};

/// A quantized matrix [rows, columns].
#[derive(Debug, Clone, Copy)]
pub struct QuantizedMatrix {
    /// The format of the codes.
    pub format: Format,
    /// The rounding of dequantized elements.
    pub rounding: Rounding,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// The place of the matrix's blocks among those of the matrix of which it is a part.
    pub blocks: Spread,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct QuantizedArguments {
    codes: u64,
    scales: u64,
    scale_codes: u64,
    offset: u64,
    start: u64,
    inner: u64,
    near: u64,
    stride: u64,
    columns: u64,
    format: u32,
    rounding: u32,
    values: [f32; 16],
    map: [f32; 256],
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct DequantizeArguments {
    weight: QuantizedArguments,
    out: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct WeightSquaresArguments {
    weight: QuantizedArguments,
    plain: u64,
    a: u64,
    b: u64,
    squares: u64,
    rows: u64,
    rank: u64,
    scale: f32,
}

/// Number of elements per thread of `dequantize`, and of rows per block of `weight_squares`: `OWN` and `ROWS` of
/// quantized.cu.
const OWN: u64 = 8;
const ROWS: u64 = 8;

/// Bytes of shared memory for the values of NF4's codes.
const VALUES_BYTES: u32 = 4 * NF4.len() as u32;

impl QuantizedArguments {
    /// The arguments of a matrix that is not quantized.
    fn plain(columns: u64) -> Self {
        Self {
            codes: 0,
            scales: 0,
            scale_codes: 0,
            offset: 0,
            start: 0,
            inner: 1,
            near: 0,
            stride: 0,
            columns,
            format: 0,
            rounding: 0,
            values: NF4,
            map: *dynamic_map(),
        }
    }
}

impl QuantizedMatrix {
    /// The arguments of the matrix that is stored in these tensors.
    fn arguments(&self, stored: &[Operand]) -> Option<QuantizedArguments> {
        let Spread { start, inner, near, stride, elements: _ } = self.blocks;
        let plain = QuantizedArguments::plain(self.columns as u64);
        let with = |format: u32, scale_codes, scales, offset| QuantizedArguments {
            format,
            scale_codes,
            scales,
            offset,
            ..plain
        };
        let addresses: Vec<u64> = stored.iter().map(|operand| operand.address).collect();
        let (codes, of_format) = match (self.format, &addresses[..]) {
            (Format::Int8, &[codes, scales]) => (codes, with(0, 0, scales, 0)),
            (Format::Nf4 { is_double: false }, &[codes, scales]) => (codes, with(1, 0, scales, 0)),
            (Format::Nf4 { is_double: true }, &[codes, of_scales, nested, offset]) => {
                (codes, with(2, of_scales, nested, offset))
            }
            _ => return None,
        };
        let rounding = match self.rounding {
            Rounding::None => 0,
            Rounding::Bf16 => 1,
            Rounding::F16 => 2,
        };
        let [start, inner, near, stride] = [start, inner, near, stride].map(|number| number as u64);
        Some(QuantizedArguments { codes, start, inner, near, stride, rounding, ..of_format })
    }

    /// Returns the bytes of the dequantized matrix.
    pub fn dequantized_bytes(&self, dtype: DType) -> u64 {
        Spec { shape: (self.rows, self.columns).into(), dtype }.bytes()
    }

    /// Returns the launches of a product with the matrix, which `product` describes for a matrix that is not quantized.
    /// The matrix is dequantized into the first piece of the workspace. The operands are a tensor, the tensors in which the
    /// matrix is stored, and what follows the matrix among the operands of `product`.
    fn product(
        &self,
        operands: &Operands<'_>,
        stored: usize,
        product: impl FnOnce(&Operands<'_>) -> Option<Vec<Launch>>,
    ) -> Option<Vec<Launch>> {
        let ([x, others @ ..], [address, workspace @ ..]) = (operands.inputs, operands.workspace) else { return None };
        let (stored, behind) = others.split_at_checked(stored)?;
        let layout = Layout::contiguous((self.rows, self.columns));
        let weight = Operand { address: *address, layout, dtype: x.dtype };
        let count = weight.count();
        let arguments = DequantizeArguments { weight: self.arguments(stored)?, out: *address, count };
        let name = typed("dequantize", x.dtype)?;
        let kernel = Kernel::flat(Quantized, name, count.div_ceil(OWN), arguments);
        let inputs = [&[x.clone(), weight], behind].concat();
        let of_product = product(&Operands { inputs: &inputs, workspace, ..*operands })?;
        let dequantize = Launch::Kernel(Kernel { shared_bytes: VALUES_BYTES, ..kernel });
        Some([dequantize].into_iter().chain(of_product).collect())
    }

    /// Computes x·Wᵀ + b from x, the `stored` tensors of W and an optional bias. The workspace has room for W in the type of
    /// x, and that of a product.
    pub fn linear(&self, stored: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        self.product(operands, stored, linear)
    }

    /// Computes dx = dy·W from dy and the `stored` tensors of W, with the workspace of [`Self::linear`].
    pub fn linear_grad_input(&self, stored: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
        self.product(operands, stored, linear_grad_input)
    }
}

/// Computes the squares of the norms of the rows of W + scale·B·A, from A, B and either W or the tensors in which the
/// quantized W is stored.
pub fn weight_squares(scale: f32, quantized: Option<QuantizedMatrix>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([a, b, stored @ ..], [squares]) = (operands.inputs, operands.outputs) else { return None };
    let (plain, weight) = match (quantized, stored) {
        (Some(matrix), _) => (0, matrix.arguments(stored)?),
        (None, [plain]) if plain.dtype == a.dtype => (plain.address, QuantizedArguments::plain(a.width())),
        (None, _) => return None,
    };
    let (rows, rank) = (squares.count(), b.width());
    let [a_address, b_address, to] = [a, b, squares].map(|operand| operand.address);
    let arguments =
        WeightSquaresArguments { weight, plain, a: a_address, b: b_address, squares: to, rows, rank, scale };
    let blocks = u64::from(BLOCK) * rows.div_ceil(ROWS);
    let kernel = Kernel::flat(Quantized, typed("weight_squares", a.dtype)?, blocks, arguments);
    launches([Kernel { shared_bytes: VALUES_BYTES + ROWS as u32 * FOLD_BYTES, ..kernel }])
}
