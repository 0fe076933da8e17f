//! The strongest directions of a matrix, found by randomized subspace iteration.
//!
//! GaLore projects gradients onto their first singular vectors. The projection needs only the *space* that these
//! vectors span. An exact decomposition would need a library that allocates memory. Instead, products with random rows
//! R approximate that space (Halko, Martinsson & Tropp, arXiv 0909.4061, algorithm 4.4). The rows of R·Gᵀ lie closer to
//! the strong directions of G than random rows do. Each further round makes the rows orthonormal and multiplies them by
//! G and Gᵀ, which brings them closer still.
//!
//! The products are the engine's own matrix products, and all memory is planned scratch. The random rows come from a
//! fixed seed. The tests below compare the result with an exact decomposition.

use gapless_kernels::Numbers;
use gapless_kernels::cpu::gemm::{Epilogue, Gemm, Mode, Strides};
use gapless_kernels::cpu::scratch::for_each_of;
use gapless_kernels::cpu::{InPieces, Pieces, Scratch, reduce, vectorize};

/// Number of rounds. Each round multiplies the rows by G and by Gᵀ.
pub(super) const ITERATIONS: usize = 3;

/// Returns the generator of the random rows, which are the same for every matrix and every step.
pub(super) fn start() -> Numbers {
    Numbers::from_seed(0x006a_107e)
}

/// A row counts as rounding noise if at most this fraction of its norm is left after subtracting its projection onto
/// the earlier rows.
const DEPENDENT: f32 = 1e-5;

/// Rows in which the magnitude of every element is below this count as zero.
const VANISHED: f32 = 1e-37;

/// The products with a matrix G that has the shape of a weight. P consists of [`Self::rank`] orthonormal rows along the
/// weight's shorter side, and the projection is R = P·G. If the weight is taller than wide, G in these formulas is the
/// transposed matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Projection {
    pub rows: usize,
    pub columns: usize,
    pub rank: usize,
}

impl Projection {
    pub fn shorter(&self) -> usize {
        self.rows.min(self.columns)
    }

    pub fn longer(&self) -> usize {
        self.rows.max(self.columns)
    }

    pub fn is_transposed(&self) -> bool {
        self.rows > self.columns
    }

    /// The product R = P·G.
    fn project(&self) -> Gemm {
        let (p, g) = (Strides::row_major(self.shorter()), Strides::row_major(self.columns));
        Gemm::new(self.rank, self.longer(), self.shorter(), p, self.turned(g))
    }

    /// The product R·Gᵀ, which has the shape of P.
    fn back_project(&self) -> Gemm {
        let (r, g) = (Strides::row_major(self.longer()), Strides::transposed(self.columns));
        Gemm::new(self.rank, self.shorter(), self.longer(), r, self.turned(g))
    }

    /// The product Pᵀ·R in the layout of the weight: Rᵀ·P if the weight is transposed.
    fn project_back_to_weight(&self) -> Gemm {
        let (first, second) =
            if self.is_transposed() { (self.longer(), self.shorter()) } else { (self.shorter(), self.longer()) };
        Gemm::new(self.rows, self.columns, self.rank, Strides::transposed(first), Strides::row_major(second))
    }

    fn turned(&self, strides: Strides) -> Strides {
        let Strides { row, column } = strides;
        if self.is_transposed() { Strides { row: column, column: row } } else { strides }
    }

    /// Returns the bytes of each piece of scratch that [`Self::recompute`], [`Self::apply`] and [`Self::add`] need with
    /// `threads` threads.
    pub fn scratch(&self, threads: usize) -> Vec<u64> {
        for_each_of(
            [self.project(), self.back_project(), self.project_back_to_weight()]
                .map(|product| product.scratch(threads)),
        )
    }

    /// Writes R = P·G to `r`.
    pub fn apply(&self, p: &[f32], g: &[f32], r: &mut [f32], scratch: &mut Scratch<'_>) {
        multiply(&self.project(), p, g, r, Mode::Overwrite, scratch);
    }

    /// Adds Pᵀ·R to the weight in place.
    pub fn add(&self, p: &[f32], r: &[f32], weight: &mut [f32], scratch: &mut Scratch<'_>) {
        let (first, second) = if self.is_transposed() { (r, p) } else { (p, r) };
        multiply(&self.project_back_to_weight(), first, second, weight, Mode::Accumulate, scratch);
    }

    /// Writes the P of this G to `p`, and R = P·G to `r`. If the rank of G is lower than the number of rows of P, the
    /// remaining rows of P are zeros. `coefficients` is scratch of one element per row.
    pub fn recompute(
        &self,
        g: &[f32],
        p: &mut [f32],
        r: &mut [f32],
        coefficients: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        let numbers = start();
        r.pieces_mut(COLUMNS).enumerate().for_each(|(task, r)| {
            r.iter_mut().enumerate().for_each(|(i, r)| *r = numbers.normal(task * COLUMNS + i) as f32);
        });
        for _ in 0..ITERATIONS {
            multiply(&self.back_project(), r, g, p, Mode::Overwrite, scratch);
            orthonormalise(p, self.shorter(), coefficients);
            self.apply(p, g, r, scratch);
        }
    }
}

fn multiply(gemm: &Gemm, a: &[f32], b: &[f32], c: &mut [f32], mode: Mode, scratch: &mut Scratch<'_>) {
    gemm.run(a, b, c, mode, Epilogue::default(), scratch).expect("extents and scratch by the shape rule");
}

/// Number of elements of a row that one task processes.
const COLUMNS: usize = 512;

/// Makes rows of `width` elements orthonormal in place, one after another. Rows that linearly depend on earlier rows
/// become zero. Classical Gram–Schmidt runs twice on each row, after which the rows are orthogonal to working precision
/// (Giraud, Langou & Rozložník, 2005, "twice is enough"). Unlike modified Gram–Schmidt, the classical form can run in
/// parallel.
fn orthonormalise(rows: &mut [f32], width: usize, coefficients: &mut [f32]) {
    /// Number of earlier rows that one task processes.
    const ROWS: usize = 8;
    for index in 0..rows.len() / width {
        let (earlier, rest) = rows.split_at_mut(index * width);
        let (row, coefficients) = (&mut rest[..width], &mut coefficients[..index]);
        // The row is scaled first, because the squares of small gradients would underflow.
        let greatest = vectorize!(reduce::max_abs(row));
        if greatest < VANISHED {
            row.fill(0.0);
            continue;
        }
        vectorize!(row.iter_mut().for_each(|x| *x /= greatest));
        let before = norm(row);
        for _ in 0..2 {
            let products = coefficients.pieces_mut(1).zip(earlier.pieces(width));
            products.for_each_in_runs(ROWS, |(c, other)| c[0] = vectorize!(reduce::sum2(other, row, |a, b| a * b)));
            row.pieces_mut(COLUMNS).enumerate().for_each(|(task, part)| {
                let columns = task * COLUMNS..task * COLUMNS + part.len();
                vectorize!({
                    for (&c, other) in coefficients.iter().zip(earlier.chunks_exact(width)) {
                        part.iter_mut().zip(&other[columns.clone()]).for_each(|(x, other)| *x -= c * other);
                    }
                });
            });
        }
        let after = norm(row);
        let factor = if after > DEPENDENT * before { 1.0 / after } else { 0.0 };
        vectorize!(row.iter_mut().for_each(|x| *x *= factor));
    }
}

fn norm(row: &[f32]) -> f32 {
    vectorize!(reduce::sum(row, |x| x * x)).sqrt()
}

/// Reference implementation in f64, as simple as possible.
pub(super) mod exact {
    use super::{ITERATIONS, start};
    use crate::reference::Array;

    /// The product A·B.
    pub fn product(a: &Array, b: &Array) -> Array {
        let (rows, inner, columns) = (a.dims[0], a.dims[1], b.dims[1]);
        let element = |i: usize, j: usize| (0..inner).map(|k| a.data[i * inner + k] * b.data[k * columns + j]).sum();
        Array::new(&[rows, columns], (0..rows * columns).map(|i| element(i / columns, i % columns)).collect())
    }

    pub fn transposed(a: &Array) -> Array {
        let (rows, columns) = (a.dims[0], a.dims[1]);
        Array::new(&[columns, rows], (0..rows * columns).map(|i| a.data[i % rows * columns + i / rows]).collect())
    }

    /// Returns P for a G that is not taller than wide.
    pub fn follow(g: &Array, rank: usize) -> Array {
        let random = (0..rank * g.dims[1]).map(|i| f64::from(start().normal(i) as f32)).collect();
        let mut r = Array::new(&[rank, g.dims[1]], random);
        let mut p = Array::zeros(&[rank, g.dims[0]]);
        for _ in 0..ITERATIONS {
            p = orthonormal(product(&r, &transposed(g)));
            r = product(&p, g);
        }
        p
    }

    /// Makes rows orthonormal by modified Gram–Schmidt.
    pub fn orthonormal(mut rows: Array) -> Array {
        let (count, width) = (rows.dims[0], rows.dims[1]);
        for i in 0..count {
            let (earlier, rest) = rows.data.split_at_mut(i * width);
            let row = &mut rest[..width];
            for other in earlier.chunks_exact(width) {
                let c: f64 = other.iter().zip(&*row).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(other).for_each(|(x, other)| *x -= c * other);
            }
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::exact::{orthonormal, product, transposed};
    use super::*;
    use crate::reference::Array;
    use gapless_kernels::cpu::ScratchMemory;

    fn normal(rows: usize, columns: usize, seed: u64) -> Array {
        let numbers = Numbers::from_seed(seed);
        Array::new(&[rows, columns], (0..rows * columns).map(|i| numbers.normal(i)).collect())
    }

    /// Returns U·diag(σ)·V, whose singular values σ are known, for random U and V.
    fn with_spectrum(rows: usize, columns: usize, singular: &[f64]) -> Array {
        let count = singular.len();
        let mut u = orthonormal(normal(count, rows, 3));
        let v = orthonormal(normal(count, columns, 4));
        u.data.chunks_exact_mut(rows).zip(singular).for_each(|(u, s)| u.iter_mut().for_each(|u| *u *= s));
        product(&transposed(&u), &v)
    }

    fn energy(x: &[f64]) -> f64 {
        x.iter().map(|x| x * x).sum()
    }

    /// Computes P and R in f32 for a matrix of any shape.
    fn follow(g: &Array, rank: usize) -> (Array, Array) {
        let projection = Projection { rows: g.dims[0], columns: g.dims[1], rank };
        let (mut p, mut r) = (vec![f32::NAN; rank * projection.shorter()], vec![f32::NAN; rank * projection.longer()]);
        let mut coefficients = vec![f32::NAN; rank];
        let mut memory = ScratchMemory::new(&projection.scratch(rayon::current_num_threads()));
        let data: Vec<f32> = g.data.iter().map(|&x| x as f32).collect();
        projection.recompute(&data, &mut p, &mut r, &mut coefficients, &mut memory.lend());
        assert!(memory.is_intact());
        let wide = |x: Vec<f32>, columns| Array::new(&[rank, columns], x.into_iter().map(f64::from).collect());
        (wide(p, projection.shorter()), wide(r, projection.longer()))
    }

    /// Among all spaces with as many directions, the space of the first singular vectors contains the most energy, Σ σᵢ²
    /// (Eckart & Young). The space found here contains nearly as much. The test covers spectra that decay like those of
    /// gradients, and nearly flat spectra.
    #[test]
    fn the_space_holds_nearly_what_singular_vectors_hold() {
        const RANK: usize = 16;
        let shapes = [(96, 200), (200, 96), (96, 96)];
        // Name, singular values, and the required fraction of the maximum energy.
        type Spectrum = (&'static str, fn(usize) -> f64, f64);
        let spectra: [Spectrum; 5] = [
            ("0.8^i", |i| 0.8f64.powi(i as i32), 0.9999),
            ("1/i", |i| 1.0 / (i + 1) as f64, 0.995),
            ("1/√i", |i| 1.0 / ((i + 1) as f64).sqrt(), 0.96),
            ("flat", |_| 1.0, 0.999),
            ("1e-12 · 1/i", |i| 1e-12 / (i + 1) as f64, 0.995),
        ];
        for (rows, columns) in shapes {
            for (name, spectrum, share) in spectra {
                let singular: Vec<f64> = (0..96).map(spectrum).collect();
                let g = with_spectrum(rows, columns, &singular);
                let (p, r) = follow(&g, RANK);
                let best = energy(&singular[..RANK]);
                println!("{rows}×{columns}, {name}: {:.5}", energy(&r.data) / best);
                assert!(energy(&r.data) > share * best, "{rows}×{columns}, {name}: {}", energy(&r.data) / best);
                // If the rows of P are orthonormal to f32 precision, the energy of R cannot exceed the maximum.
                let gram = product(&p, &transposed(&p));
                for (i, x) in gram.data.iter().enumerate() {
                    let expected = if i % (RANK + 1) == 0 { 1.0 } else { 0.0 };
                    assert!((x - expected).abs() < 1e-5, "{rows}×{columns}, {name}: {x} at {i}");
                }
            }
        }
    }

    #[test]
    fn matrices_of_few_directions_leave_rows_of_zeros() {
        let g = with_spectrum(60, 80, &[3.0, 2.0, 1.0]);
        let (p, r) = follow(&g, 8);
        let used = p.data.chunks_exact(60).filter(|row| energy(row) > 0.5).count();
        assert_eq!(used, 3);
        assert!((energy(&r.data) - 14.0).abs() < 1e-4);
        let (p, r) = follow(&Array::zeros(&[60, 80]), 8);
        assert_eq!((energy(&p.data), energy(&r.data)), (0.0, 0.0));
    }

    #[test]
    fn threads_change_no_bit() {
        let g = with_spectrum(130, 600, &(0..130).map(|i| 1.0 / f64::from(i + 1)).collect::<Vec<_>>());
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts");
            pool.install(|| follow(&g, 40))
        };
        assert_eq!(on(1), on(3));
    }
}
