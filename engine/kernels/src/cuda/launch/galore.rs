//! Launches of galore.cu, and of the products and elementwise updates between them.

use candle_core::{DType, Layout};

use super::{
    AdamWRule, FOLD_BYTES, Kernel, Launch, Matrix, Operand, Operands, Product, number, product_workspace, scratch_in,
    update,
};
use crate::cuda::Family::GaLore;
use crate::cuda::{Constant, Fusible};

/// The settings of an update, and the extents of the weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GaLoreRule {
    /// The settings of the AdamW step.
    pub adamw: AdamWRule,
    /// Multiplier of the step.
    pub alpha: f32,
    /// The weight decay.
    pub decay: f32,
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight.
    pub columns: usize,
    /// Rows of the projection.
    pub rank: usize,
    /// Rounds of the subspace iteration.
    pub iterations: usize,
    /// Key of the random numbers with which the iteration starts.
    pub key: u64,
    /// Index of the scalar that is 1 in steps that recompute the projection, and 0 in others.
    pub refresh: usize,
}

impl GaLoreRule {
    fn shorter(&self) -> usize {
        self.rows.min(self.columns)
    }

    fn longer(&self) -> usize {
        self.rows.max(self.columns)
    }

    /// Returns the products R = P·G, R·Gᵀ, and Pᵀ·R in the layout of the weight, at these addresses. If the weight is
    /// taller than wide, G in these formulas is the transposed gradient.
    fn products(&self, [p, g, r, from, weight]: [u64; 5], scratch: u64) -> [Product; 3] {
        let [rank, shorter, longer, columns] = [self.rank, self.shorter(), self.longer(), self.columns];
        let dense = |address, width: usize| Matrix::dense(address, DType::F32, width as u64);
        let is_tall = self.rows > self.columns;
        let g = if is_tall { dense(g, columns).t() } else { dense(g, columns) };
        let (p, r) = (dense(p, shorter), dense(r, longer));
        let [left, right] = if is_tall { [r, p] } else { [p, r] };
        let product = |(m, n, k): (usize, usize, usize), a, b, c| {
            let workspace = scratch_in(scratch, product_workspace(m, n));
            Product::new((m as u64, n as u64, k as u64), a, b, c, workspace)
        };
        let back = product((self.rows, columns, rank), left.t(), right, dense(weight, columns));
        [
            product((rank, longer, shorter), p, g, r),
            product((rank, shorter, longer), r, g.t(), dense(from, shorter)),
            Product { onto: Some(weight), ..back },
        ]
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GaLoreArguments {
    start: u64,
    from: u64,
    projection: u64,
    coefficients: u64,
    norm: u64,
    refresh: u64,
    rank: u64,
    width: u64,
    longer: u64,
    key: u64,
}

/// Returns the sizes of the workspace of [`galore`]: the projected gradient, the rows of a new projection, a coefficient
/// per row, and scratch of the largest product.
pub fn galore_workspace(rule: &GaLoreRule) -> Vec<u64> {
    let elements = [rule.rank * rule.longer(), rule.rank * rule.shorter(), rule.rank];
    let product = product_workspace(rule.rows, rule.columns).max(product_workspace(rule.rank, rule.longer()));
    elements.map(|count| (count * size_of::<f32>()) as u64).into_iter().chain([product]).collect()
}

/// Returns the launches that compute the outputs (weight, projection, m, v) from the inputs (weight, gradient,
/// projection, m, v, norm, scalars), all f32.
///
/// Launches are recorded once, while a projection is recomputed only in some steps. So the products of the subspace
/// iteration run in every step, and the kernel that stores a new projection returns at once in all others.
pub fn galore(rule: &GaLoreRule, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([weight, gradient, projection, m, v, norm, scalars], &[r, from, coefficients, scratch]) =
        (operands.inputs, operands.workspace)
    else {
        return None;
    };
    if operands.inputs.iter().any(|input| input.dtype != DType::F32) {
        return None;
    }
    let [project, back_project, apply] =
        rule.products([projection.address, gradient.address, r, from, weight.address], scratch);
    let arguments = GaLoreArguments {
        start: r,
        from,
        projection: projection.address,
        coefficients,
        norm: norm.address,
        refresh: number(scalars, rule.refresh),
        rank: rule.rank as u64,
        width: rule.shorter() as u64,
        longer: rule.longer() as u64,
        key: rule.key,
    };
    let start = Kernel::flat(GaLore, "galore_start".into(), m.count(), arguments);
    let mut launches = vec![Launch::Kernel(start)];
    for _ in 0..rule.iterations {
        let orthonormalise = Kernel {
            family: GaLore,
            name: "galore_orthonormalise".into(),
            grid: [1; 3],
            block: (rule.shorter().next_multiple_of(32)).clamp(32, 1024) as u32,
            shared_bytes: FOLD_BYTES,
            tickets: 0,
            arguments: Box::new(arguments),
        };
        launches.extend([Launch::Product(back_project), Launch::Kernel(orthonormalise), Launch::Product(project)]);
    }
    // Replaces R by its step, which is 0 if the norm is not finite.
    let numbers = [number(norm, 0), number(scalars, 0), number(scalars, 1), number(scalars, 2)];
    let r = Operand { address: r, layout: Layout::contiguous(m.count() as usize), dtype: DType::F32 };
    let g = "($4 * fminf(%0 / ($0 + 1e-6f), 1.0f))";
    let next_m = format!("(%1 * $5 + (1.0f - %1) * {g})");
    let next_v = format!("(%2 * $6 + (1.0f - %2) * {g} * {g})");
    let change = format!("(($1 / $2) * {next_m} / (sqrtf({next_v}) * (1.0f / sqrtf($3)) + %3))");
    let if_finite = |then: &str, otherwise: &str| format!("$0 - $0 == 0.0f ? {then} : {otherwise}");
    let outputs = [if_finite(&format!("-%4 * {change}"), "0.0f"), if_finite(&next_m, "$5"), if_finite(&next_v, "$6")];
    let AdamWRule { max_norm, beta1, beta2, eps } = rule.adamw;
    let constants = [max_norm, beta1, beta2, eps, rule.alpha].map(Constant::Number).into();
    let moments = Fusible::Each { outputs: outputs.into(), constants };
    let of_moments = Operands { outputs: &[r.clone(), m.clone(), v.clone()], ..*operands };
    launches.extend(update("galore", moments, &numbers, &[&r, m, v], &of_moments)?);
    if rule.decay != 0.0 {
        let outputs = vec![if_finite("$2 * (1.0f - $1 * %0)", "$2")];
        let decayed = Fusible::Each { outputs, constants: vec![Constant::Number(rule.decay)] };
        let of_weight = Operands { outputs: std::slice::from_ref(weight), ..*operands };
        launches.extend(update("decay", decayed, &numbers[..2], &[weight], &of_weight)?);
    }
    launches.push(Launch::Product(apply));
    Some(launches)
}
