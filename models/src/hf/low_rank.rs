//! The principal components of a matrix, for PiSSA.

use candle_core::{Device, Tensor};

use super::error::Result;

/// Iterations after which the components count as found. Each multiplies the error by the ratio of the first component
/// that is left out to the last that is kept, squared.
const MAX_ITERATIONS: usize = 200;

/// Change of the singular values, relative to the greatest, below which iterations end.
const CONVERGED: f64 = 1e-13;

/// Returns the factors B [out, rank] and A [rank, in], row by row, of the best approximation B·A of rank `rank` of a matrix
/// [out, in]. Column i of B and row i of A both have the norm √σᵢ.
///
/// The method is subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4) with twice as many
/// vectors as components, until the singular values no longer change.
pub(super) fn principal(weight: &[f32], [outputs, inputs]: [usize; 2], rank: usize) -> Result<[Vec<f32>; 2]> {
    let width = (2 * rank).max(rank + 8).min(outputs).min(inputs);
    let wide: Vec<f64> = weight.iter().map(|&x| f64::from(x)).collect();
    let matrix = Tensor::from_vec(wide, (outputs, inputs), &Device::Cpu)?;
    let transposed = matrix.t()?;
    let numbers = gapless_engine::graph::Numbers::from_seed(0);
    let mut basis: Vec<Vec<f64>> =
        (0..width).map(|row| (0..inputs).map(|column| numbers.normal(row * inputs + column)).collect()).collect();
    orthonormalize(&mut basis);
    let mut before = vec![0.0; width];
    let mut iteration = 0;
    loop {
        // The rows of `basis` span the subspace. Rotating them makes the columns of `images` orthogonal.
        let flat = Tensor::from_vec(basis.concat(), (width, inputs), &Device::Cpu)?;
        let images = matrix.matmul(&flat.t()?)?;
        let gram = images.t()?.matmul(&images)?.to_vec2::<f64>()?;
        let (squares, rotation) = symmetric_eigen(gram);
        let values: Vec<f64> = squares.iter().map(|square| square.max(0.0).sqrt()).collect();
        let change = values.iter().zip(&before).take(rank).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let rotation = Tensor::from_vec(rotation.concat(), (width, width), &Device::Cpu)?;
        let (images, rows) = (images.matmul(&rotation.t()?)?, rotation.matmul(&flat)?);
        iteration += 1;
        if change <= CONVERGED * values[0] || iteration == MAX_ITERATIONS {
            let (images, rows) = (images.to_vec2::<f64>()?, rows.to_vec2::<f64>()?);
            let kept = rank.min(width);
            let root = |value: f64| if value > 0.0 { value.sqrt().recip() } else { 0.0 };
            // B = images / √σ, A = rows · √σ; components that do not exist are zero.
            let b = images
                .iter()
                .flat_map(|image| (0..rank).map(|i| if i < kept { (image[i] * root(values[i])) as f32 } else { 0.0 }));
            let a = (0..rank).flat_map(|i| {
                let scale = if i < kept { values[i].sqrt() } else { 0.0 };
                let row = if i < kept { &rows[i] } else { &rows[0] };
                row.iter().map(move |x| (x * scale) as f32)
            });
            return Ok([b.collect(), a.collect()]);
        }
        before = values;
        basis = transposed.matmul(&images)?.t()?.to_vec2::<f64>()?;
        orthonormalize(&mut basis);
    }
}

/// Makes rows orthonormal, by the modified Gram–Schmidt process, twice. Rows that depend on others become zero.
fn orthonormalize(rows: &mut [Vec<f64>]) {
    for i in 0..rows.len() {
        let (before, rest) = rows.split_at_mut(i);
        let row = &mut rest[0];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let length = dot(row, row).sqrt();
        for _ in 0..2 {
            for other in before.iter() {
                let along = dot(row, other);
                row.iter_mut().zip(other).for_each(|(x, other)| *x -= along * other);
            }
        }
        let left = dot(row, row).sqrt();
        let scale = if left > 1e-12 * length { left.recip() } else { 0.0 };
        row.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Returns the eigenvalues of a symmetric matrix, from the greatest down, and the eigenvectors as rows, by Jacobi's method.
fn symmetric_eigen(mut matrix: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let n = matrix.len();
    let mut vectors: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| if i == j { 1.0 } else { 0.0 }).collect()).collect();
    let norm: f64 = matrix.iter().flatten().map(|x| x * x).sum();
    // Convergence is quadratic, so few sweeps suffice.
    for _ in 0..60 {
        let off: f64 = (0..n).map(|i| (0..i).map(|j| matrix[i][j].powi(2)).sum::<f64>()).sum();
        if off <= 1e-30 * norm {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                if matrix[p][q] == 0.0 {
                    continue;
                }
                let theta = (matrix[q][q] - matrix[p][p]) / (2.0 * matrix[p][q]);
                let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cosine = (tangent * tangent + 1.0).sqrt().recip();
                let sine = tangent * cosine;
                let rotate = |x: &mut f64, y: &mut f64| (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
                for row in &mut matrix {
                    let (left, right) = row.split_at_mut(q);
                    rotate(&mut left[p], &mut right[0]);
                }
                for rows in [&mut matrix, &mut vectors] {
                    let (above, below) = rows.split_at_mut(q);
                    above[p].iter_mut().zip(&mut below[0]).for_each(|(x, y)| rotate(x, y));
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| matrix[b][b].total_cmp(&matrix[a][a]));
    (order.iter().map(|&i| matrix[i][i]).collect(), order.iter().map(|&i| vectors[i].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix of known components: orthogonal rows and columns of cosines, with falling singular values.
    #[test]
    fn components_are_found() {
        for (outputs, inputs, rank) in [(12, 20, 3), (20, 12, 3), (5, 5, 5), (3, 9, 4)] {
            let basis = |count: usize, i: usize, k: usize| {
                let scale = if k == 0 { 1.0 } else { 2.0f64.sqrt() };
                scale / (count as f64).sqrt()
                    * (std::f64::consts::PI * (i as f64 + 0.5) * k as f64 / count as f64).cos()
            };
            let value = |k: usize| 5.0 / (k as f64 + 1.0);
            let part = |first: usize, end: usize, i: usize, j: usize| {
                (first..end).map(|k| value(k) * basis(outputs, i, k) * basis(inputs, j, k)).sum::<f64>()
            };
            let whole = outputs.min(inputs);
            let places = (0..outputs).flat_map(|i| (0..inputs).map(move |j| (i, j)));
            let weight: Vec<f32> = places.clone().map(|(i, j)| part(0, whole, i, j) as f32).collect();
            let [b, a] = principal(&weight, [outputs, inputs], rank).unwrap();
            for (i, j) in places {
                let found: f32 = (0..rank).map(|k| b[i * rank + k] * a[k * inputs + j]).sum();
                let expected = part(0, rank.min(whole), i, j);
                assert!((f64::from(found) - expected).abs() < 1e-5, "{outputs}×{inputs} of rank {rank}: {i}, {j}");
            }
            for k in 0..rank.min(whole) {
                let norm: f32 = (0..inputs).map(|j| a[k * inputs + j].powi(2)).sum();
                assert!((f64::from(norm) - value(k)).abs() < 1e-4, "row {k} has the norm √{norm}");
            }
        }
    }
}
