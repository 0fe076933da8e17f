//! Launches of adafactor.cu.

use candle_core::{DType, Layout};

use super::{Kernel, Launch, Operand, Operands, blocks, sum, typed};
use crate::cuda::Family::Adafactor;

/// The settings of an update, and the shape of the parameter as a number of matrices. A vector is one matrix of one
/// row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorRule {
    /// The largest global norm of the gradients. Gradients with a larger norm are scaled down to it.
    pub max_norm: f32,
    /// Upper limit of the root mean square of a step.
    pub clip_threshold: f32,
    /// Lower limit of the multiplier of a step.
    pub least_scale: f32,
    /// The weight decay.
    pub decay: f32,
    /// Number of matrices.
    pub matrices: usize,
    /// Rows of a matrix.
    pub rows: usize,
    /// Columns of a matrix.
    pub columns: usize,
}

impl AdafactorRule {
    /// True if the second moment is stored as means of rows and columns.
    fn is_factored(&self) -> bool {
        self.rows > 1
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdafactorArguments {
    parameter: u64,
    master: u64,
    gradient: u64,
    rows_sq: u64,
    columns_sq: u64,
    norm: u64,
    scalars: u64,
    of_rows: u64,
    squares: u64,
    totals: u64,
    matrices: u64,
    rows: u64,
    columns: u64,
    max_norm: f32,
    clip_threshold: f32,
    least_scale: f32,
    decay: f32,
    sums_in_f32: u32,
}

/// Returns the sizes of the workspace of [`adafactor`]: a sum of row means per matrix, two sums of squares per row, and
/// their totals per matrix.
pub fn adafactor_workspace(matrices: usize, rows: usize) -> Vec<u64> {
    [matrices, 2 * matrices * rows, 2 * matrices].map(|count| (count * size_of::<f32>()) as u64).into()
}

/// Returns the launches that compute the outputs (parameter, means of rows, means of columns, master) from the inputs
/// (parameter, gradient, norm, scalars, means of rows, means of columns, master). A vector has one tensor of means, with
/// its shape. Only a parameter with f32 states and another type has a master.
pub fn adafactor(rule: &AdafactorRule, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [parameter, gradient, norm, scalars, states @ ..] = operands.inputs else { return None };
    let &[of_rows, squares, totals] = operands.workspace else { return None };
    let (means, master) = states.split_at_checked(1 + usize::from(rule.is_factored()))?;
    let (first, last) = (means.first()?, means.last()?);
    let &AdafactorRule { matrices, rows, columns, .. } = rule;
    let arguments = AdafactorArguments {
        parameter: parameter.address,
        master: master.first().map_or(0, |master| master.address),
        gradient: gradient.address,
        rows_sq: if rule.is_factored() { first.address } else { 0 },
        columns_sq: last.address,
        norm: norm.address,
        scalars: scalars.address,
        of_rows,
        squares,
        totals,
        matrices: matrices as u64,
        rows: rows as u64,
        columns: columns as u64,
        max_norm: rule.max_norm,
        clip_threshold: rule.clip_threshold,
        least_scale: rule.least_scale,
        decay: rule.decay,
        sums_in_f32: u32::from(gradient.dtype == DType::F32),
    };
    let kernel = |name: &str| {
        let name = typed(&format!("adafactor_{name}"), parameter.dtype)?;
        Some(Kernel::rows(Adafactor, name, (matrices * rows) as u64, columns.div_ceil(4) as u64, arguments))
    };
    // Sums neighbouring f32 elements.
    let sum_each = |from: u64, outputs: usize, to: u64| {
        let operand =
            |address, dims: &[usize]| Operand { address, layout: Layout::contiguous(dims), dtype: DType::F32 };
        let (inputs, outputs) = ([operand(from, &[outputs, rows])], [operand(to, &[outputs])]);
        sum(&[1], &Operands { inputs: &inputs, outputs: &outputs, workspace: &[], accumulate: 0, ..*operands })
    };
    let mut launches = Vec::new();
    if rule.is_factored() {
        launches.push(Launch::Kernel(kernel("rows")?));
        // A warp per 16 rows, as far as a block has warps.
        let block = 32 * rows.div_ceil(16).min(32) as u32;
        let grid = [blocks((matrices * columns.div_ceil(32)) as u64, 1), 1, 1];
        launches.push(Launch::Kernel(Kernel { grid, block, shared_bytes: 4 * block, ..kernel("columns")? }));
        launches.extend(sum_each(first.address, matrices, of_rows)?);
    }
    launches.push(Launch::Kernel(kernel("squares")?));
    launches.extend(sum_each(squares, 2 * matrices, totals)?);
    launches.push(Launch::Kernel(Kernel { shared_bytes: 0, ..kernel("apply")? }));
    Some(launches)
}
