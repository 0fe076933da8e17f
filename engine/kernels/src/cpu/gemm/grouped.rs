//! Grouped products: each group of rows, such as the tokens of an expert, has a product of its own.
//!
//! In: the operands of all groups, stored one after another, and the groups' boundaries, which depend on the data.
//! Out: every group's product, computed by one list of tasks. Never: a wait between two groups. A group's order of
//! summation is the same as in a separate product.

use std::ops::Range;

use half::bf16;

use super::drive::{self, Group, Operands};
use super::finish::RawEpilogue;
use super::kernel::Factor;
use super::place::Packing;
use super::{Epilogue, Gemm, GemmError, Mode, Strides, extent, kernels_of};
use crate::cpu::scratch::Scratch;
use crate::cpu::simd::Level;

/// The boundaries of groups of rows. A group consists of consecutive runs, which may be empty. All groups have the
/// same number of runs.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    starts: &'a [u32],
    count: usize,
    /// Runs per group.
    runs: usize,
}

impl<'a> Groups<'a> {
    /// Creates the groups from the start of each run, followed by the end of the last run.
    ///
    /// # Errors
    /// Returns an error if the starts descend, or if their number does not give each group the same number of runs.
    pub fn new(starts: &'a [u32], count: usize) -> Result<Self, GemmError> {
        let runs = starts.len().checked_sub(1).and_then(|all| all.checked_div(count));
        match runs {
            Some(runs) if starts.len() == runs * count + 1 && starts.is_sorted() => Ok(Self { starts, count, runs }),
            _ => Err(GemmError::Groups { starts: starts.len(), groups: count }),
        }
    }

    /// Returns the starts of a group's runs, followed by the end of the last one.
    fn cuts(&self, group: usize) -> &'a [u32] {
        &self.starts[group * self.runs..][..=self.runs]
    }

    fn rows(&self, group: usize) -> Range<usize> {
        let (first, end) = (group * self.runs, (group + 1) * self.runs);
        self.starts[first] as usize..self.starts[end] as usize
    }

    /// Returns the row after the last group.
    fn end(&self) -> usize {
        self.starts[self.starts.len() - 1] as usize
    }
}

impl Gemm {
    /// Returns the sizes in bytes of the pieces of scratch for groups that are at most as large as this product.
    pub fn scratch_grouped(&self, threads: usize) -> Vec<u64> {
        Packing::of_groups(self, threads).bytes().collect()
    }

    /// Computes C = A·B for the rows of each group. Group g uses matrix g modulo `matrices` of B; the matrices are
    /// stored one after another. `self` describes the product as if one group had all rows. If `rounded` is given,
    /// the result is stored there, and the contents of C are undefined afterwards.
    ///
    /// # Errors
    /// Returns an error, and writes nothing, if a slice is too short for the groups, if the scratch is too small for
    /// [`Gemm::scratch_grouped`] of the current pool, or if there are more rows than `self` has.
    pub fn run_grouped<A: Factor, B: Factor>(
        &self,
        groups: Groups<'_>,
        matrices: usize,
        a: &[A],
        b: &[B],
        (c, rounded): (&mut [f32], Option<&mut [bf16]>),
        scratch: &mut Scratch<'_>,
    ) -> Result<(), GemmError> {
        let all = Gemm { m: groups.end(), ..*self };
        all.check_grouped(self, (1, matrices.min(groups.count)), a, b, (c, rounded.as_deref()), scratch)?;
        let size = self.k * self.n;
        let group = |index: usize| {
            let rows = groups.rows(index);
            let (a, c) = (rows.start * self.a.row, rows.start * self.c_row);
            Group { m: rows.len(), k: self.k, a, b: index % matrices * size, c, cuts: None }
        };
        let epilogue = RawEpilogue::of(Epilogue { rounded, ..Epilogue::default() });
        // SAFETY: every extent has been compared with its slice, and the groups' rows do not overlap. C and the
        // scratch are borrowed exclusively.
        unsafe { self.drive_groups(groups.count, &group, a, b, (c, epilogue), Mode::Overwrite, scratch) };
        Ok(())
    }

    /// Computes C = A·B or C + A·B for each group, where k runs over the rows of the group. Each group has its own
    /// matrix in C; the matrices are stored one after another. The order of summation restarts with each run. The
    /// first run starts from C's old values, or from zero with [`Mode::Overwrite`]. `self` describes the product as
    /// if one group had all rows.
    ///
    /// # Errors
    /// Returns the errors of [`Gemm::run_grouped`].
    pub fn sum_grouped<A: Factor, B: Factor>(
        &self,
        groups: Groups<'_>,
        a: &[A],
        b: &[B],
        c: &mut [f32],
        mode: Mode,
        scratch: &mut Scratch<'_>,
    ) -> Result<(), GemmError> {
        let all = Gemm { k: groups.end(), ..*self };
        all.check_grouped(self, (groups.count, 1), a, b, (c, None), scratch)?;
        let group = |index: usize| {
            let rows = groups.rows(index);
            let (a, b) = (rows.start * self.a.column, rows.start * self.b.row);
            let c = index * self.m * self.c_row;
            Group { m: self.m, k: rows.len(), a, b, c, cuts: Some(groups.cuts(index)) }
        };
        // SAFETY: as above; the matrices of C do not overlap.
        unsafe { self.drive_groups(groups.count, &group, a, b, (c, RawEpilogue::NONE), mode, scratch) };
        Ok(())
    }

    /// Checks that each slice is long enough for all rows and for the given numbers of matrices in B and in C. Also
    /// checks that the scratch suffices for `most`.
    fn check_grouped<A, B>(
        &self,
        most: &Self,
        (of_c, of_b): (usize, usize),
        a: &[A],
        b: &[B],
        (c, rounded): (&[f32], Option<&[bf16]>),
        scratch: &Scratch<'_>,
    ) -> Result<(), GemmError> {
        let &Self { m, n, k, c_row, .. } = self;
        let too_short = |operand, needed, given| Err(GemmError::TooShort { operand, m, n, k, needed, given });
        if m > most.m || k > most.k {
            return too_short("the whole", m.max(k), if m > most.m { most.m } else { most.k });
        }
        if c_row < n {
            return Err(GemmError::Overlap { n, c_row, count: of_c, batch_c: m.saturating_mul(c_row) });
        }
        let size = |operand, rows: usize, row: usize| rows.checked_mul(row).ok_or(GemmError::TooLarge { operand });
        let c_needed = extent("C", m, n, Strides::row_major(c_row), of_c, size("C", m, c_row)?)?;
        let operands = [
            ("A", extent("A", m, k, self.a, 1, 0)?, a.len()),
            ("B", extent("B", k, n, self.b, of_b, size("B", most.k, n)?)?, b.len()),
            ("C", c_needed, c.len()),
            ("rounded C", c_needed, rounded.map_or(c_needed, <[bf16]>::len)),
        ];
        for (operand, needed, given) in operands {
            if given < needed {
                return too_short(operand, needed, given);
            }
        }
        match scratch.too_short(Packing::of_groups(most, rayon::current_num_threads()).bytes()) {
            Some((needed, given)) => too_short("scratch", needed, given),
            None => Ok(()),
        }
    }

    /// # Safety
    /// For each group, every element that the group's shape and the strides address must be readable in A and B, and
    /// writable in C. The groups' C must not overlap.
    #[expect(clippy::too_many_arguments, reason = "the operands of a product")]
    unsafe fn drive_groups<'s, A: Factor, B: Factor>(
        &self,
        count: usize,
        group: &(dyn Fn(usize) -> Group<'s> + Sync),
        a: &[A],
        b: &[B],
        (c, epilogue): (&mut [f32], RawEpilogue),
        mode: Mode,
        scratch: &'s Scratch<'_>,
    ) {
        let threads = rayon::current_num_threads();
        let operands = Operands {
            a: a.as_ptr(),
            b: b.as_ptr(),
            c: c.as_mut_ptr(),
            accumulate: mode == Mode::Accumulate,
            epilogue,
            scratch,
            packing: Packing::of_groups(self, threads),
            restarts: &[],
        };
        let kernels = kernels_of::<A, B>(Level::best());
        // Groups differ in size, so there are more tasks than for equal products.
        // SAFETY: by this function's contract. The scratch was checked.
        unsafe { drive::run_groups(self, kernels, operands, count, 8 * threads, group) };
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::super::tests::{pool, random};
    use super::super::{Epilogue, Mode};
    use super::*;
    use crate::cpu::ScratchMemory;
    use crate::cpu::bf16::rounded;

    fn stored<T: Factor>(len: usize, seed: u64) -> Vec<T> {
        random(len, seed).into_iter().map(T::store).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// Returns the start of each run, beginning at `from`, and the end of the last run.
    fn starts_of(from: u32, runs: &[u32]) -> Vec<u32> {
        let ends = runs.iter().scan(from, |end, rows| {
            *end += rows;
            Some(*end)
        });
        std::iter::once(from).chain(ends).collect()
    }

    fn c_rounded(c: &[f32]) -> Vec<bf16> {
        c.iter().map(|&c| rounded(c)).collect()
    }

    /// Runs a single product on one thread.
    fn run<T: Factor>(job: &Gemm, a: &[T], b: &[T], c: &mut [f32], mode: Mode) {
        let mut memory = ScratchMemory::new(&job.scratch(1));
        pool(1).install(|| job.run(a, b, c, mode, Epilogue::default(), &mut memory.lend())).expect("it fits");
    }

    /// Compares each group's rows with a separate product of these rows and the group's matrix.
    fn check_rows<T: Factor>(starts: &[u32], count: usize, matrices: usize, (n, k): (usize, usize), transposed: bool) {
        let groups = Groups::new(starts, count).expect("they are");
        let rows = groups.end();
        let b_strides = if transposed { Strides::transposed(k) } else { Strides::row_major(n) };
        let job = Gemm::new(rows, n, k, Strides::row_major(k), b_strides);
        let (a, b, c) = (stored::<T>(rows * k, 1), stored::<T>(matrices * n * k, 2), random(rows * n, 3));
        let (mut together, mut one_by_one) = (c.clone(), c);
        let mut to: Vec<bf16> = c_rounded(&together);
        for rounded in [Some(&mut to[..]), None] {
            let mut memory = ScratchMemory::new(&job.scratch_grouped(2));
            pool(2)
                .install(|| job.run_grouped(groups, matrices, &a, &b, (&mut together, rounded), &mut memory.lend()))
                .expect("it fits");
            assert!(memory.is_intact());
        }
        assert_eq!(to, c_rounded(&together), "{starts:?} in {count} groups by {n} × {k}");
        for group in 0..count {
            let rows = groups.rows(group);
            let b = &b[group % matrices * n * k..][..n * k];
            let c = &mut one_by_one[rows.start * n..rows.end * n];
            run(&Gemm { m: rows.len(), ..job }, &a[rows.start * k..rows.end * k], b, c, Mode::Overwrite);
        }
        assert_eq!(bits(&together), bits(&one_by_one), "{starts:?} in {count} groups by {n} × {k}");
    }

    /// Compares each group's sum with separate products, run by run.
    fn check_sums<T: Factor>(starts: &[u32], count: usize, (m, n): (usize, usize), mode: Mode) {
        let groups = Groups::new(starts, count).expect("they are");
        let k = groups.end();
        let job = Gemm::new(m, n, k, Strides::transposed(m), Strides::row_major(n));
        let (a, b, c) = (stored::<T>(k * m, 1), stored::<T>(k * n, 2), random(count * m * n, 3));
        let (mut together, mut one_by_one) = (c.clone(), c);
        let mut memory = ScratchMemory::new(&job.scratch_grouped(2));
        pool(2).install(|| job.sum_grouped(groups, &a, &b, &mut together, mode, &mut memory.lend())).expect("it fits");
        assert!(memory.is_intact());
        for (group, c) in one_by_one.chunks_exact_mut(m * n).enumerate() {
            if mode == Mode::Overwrite {
                c.fill(0.0);
            }
            for ends in groups.cuts(group).windows(2) {
                let (from, to) = (ends[0] as usize, ends[1] as usize);
                run(&Gemm { k: to - from, ..job }, &a[from * m..], &b[from * n..], c, Mode::Accumulate);
            }
        }
        assert_eq!(bits(&together), bits(&one_by_one), "{starts:?} in {count} groups, {m} × {n}");
    }

    generated! {
        #[test]
        fn groups_have_the_bits_of_products_by_themselves(
            (count, runs) in (1..5usize, 1..4usize).prop_flat_map(|(count, runs)| {
                (Just(count), prop::collection::vec(0..60u32, count * runs..=count * runs))
            }),
            from in 0..9u32,
            matrices in 1..5usize,
            (n, k) in (1..90usize, 1..90usize),
            transposed: bool,
            accumulate: bool,
        ) {
            let starts = starts_of(from, &runs);
            check_rows::<f32>(&starts, count, matrices, (n, k), transposed);
            check_rows::<bf16>(&starts, count, matrices, (n, k), transposed);
            let mode = if accumulate { Mode::Accumulate } else { Mode::Overwrite };
            check_sums::<f32>(&starts, count, (n, k), mode);
            check_sums::<bf16>(&starts, count, (n, k), mode);
        }
    }

    /// Runs are longer than a block, a chunk has several blocks, and there are more rows and columns than in a tile.
    #[test]
    fn groups_may_be_large() {
        for runs in [&[4, 0, 5, 1, 0, 0][..], &[1, 3, 889, 800, 0, 11], &[100, 120, 130, 90, 60, 35]] {
            let starts = starts_of(7, runs);
            check_rows::<f32>(&starts, 2, 2, (300, 70), true);
            check_rows::<f32>(&starts, 3, 1, (40, 900), false);
            check_rows::<bf16>(&starts, 3, 2, (40, 900), true);
            check_sums::<f32>(&starts, 2, (100, 300), Mode::Overwrite);
            check_sums::<f32>(&starts, 3, (400, 30), Mode::Accumulate);
            check_sums::<bf16>(&starts, 2, (400, 40), Mode::Overwrite);
        }
    }

    #[test]
    fn operands_that_are_too_short_are_refused() {
        for (starts, count) in [(&[][..], 1), (&[0], 0), (&[0, 2, 1], 2), (&[0, 1, 2], 3)] {
            assert!(Groups::new(starts, count).is_err(), "{starts:?}, {count}");
        }
        let job = Gemm::new(4, 2, 3, Strides::row_major(3), Strides::row_major(2));
        let memory = || ScratchMemory::new(&job.scratch_grouped(1));
        let rows = |end, a: usize, b: usize, c: usize| {
            let (starts, mut c) = ([0, end], vec![0.0; c]);
            let groups = Groups::new(&starts, 1).expect("they are");
            let (a, b) = (vec![0.0_f32; a], vec![0.0_f32; b]);
            pool(1).install(|| job.run_grouped(groups, 1, &a, &b, (&mut c, None), &mut memory().lend()))
        };
        assert_eq!(rows(4, 12, 6, 8), Ok(()));
        for (end, a, b, c) in [(5, 15, 6, 10), (4, 11, 6, 8), (4, 12, 5, 8), (4, 12, 6, 7)] {
            assert!(rows(end, a, b, c).is_err(), "{end}, {a}, {b}, {c}");
        }
    }
}
