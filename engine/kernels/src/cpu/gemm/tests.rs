//! Products compared with a naive implementation in `f64`, and bit by bit with each other.

use gapless_testing::few;
use gapless_testing::prelude::*;

use super::*;
use crate::cpu::ScratchMemory;
use crate::cpu::bf16::{rounded, widened};
use crate::cpu::peak::Bf16Products;
use half::bf16;

/// Returns `len` random numbers from a small generator. A failing case can be reproduced from its seed.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

pub(crate) fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts")
}

/// The additions to the plain product in a case.
#[derive(Debug, Clone, Copy)]
struct Extras {
    mode: Mode,
    bias: bool,
    residual: bool,
}

const PLAIN: Extras = Extras { mode: Mode::Overwrite, bias: false, residual: false };

/// Operands of exactly the size that a job needs, with C pre-filled.
struct Operands {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    bias: Vec<f32>,
    residual: Vec<f32>,
}

impl Operands {
    fn of(job: &Gemm) -> Self {
        let Batch { count, a, b, c } = job.batch;
        let len = |m, n, strides, distance| extent("test", m, n, strides, count, distance).expect("small");
        let c_len = len(job.m, job.n, Strides::row_major(job.c_row), c);
        Self {
            a: random(len(job.m, job.k, job.a, a), 1),
            b: random(len(job.k, job.n, job.b, b), 2),
            c: random(c_len, 3),
            bias: random(job.n, 4),
            residual: random(c_len, 5),
        }
    }

    fn run(&self, job: &Gemm, level: Level, threads: usize, extras: Extras) -> Vec<f32> {
        self.run_with(&self.a, &self.b, job, level, threads, extras)
    }

    /// Like [`Self::run`], with operands rounded to bf16.
    fn run_bf16(&self, job: &Gemm, threads: usize, extras: Extras) -> Vec<f32> {
        let [a, b] = [&self.a, &self.b].map(|x| in_bf16(x));
        self.run_with(&a, &b, job, Level::best(), threads, extras)
    }

    fn run_with<A: Factor, B: Factor>(
        &self,
        a: &[A],
        b: &[B],
        job: &Gemm,
        level: Level,
        threads: usize,
        extras: Extras,
    ) -> Vec<f32> {
        let run = |to: Option<&mut [bf16]>| {
            let mut c = self.c.clone();
            // Scratch is filled with NaN, so a float that is read before it was written shows up in the result.
            let mut memory = ScratchMemory::new(&job.scratch(threads));
            let epilogue = Epilogue {
                bias: extras.bias.then_some(&self.bias[..]),
                residual: extras.residual.then_some(&self.residual[..]),
                rounded: to,
            };
            pool(threads)
                .install(|| job.run_at(level, a, b, &mut c, extras.mode, epilogue, &mut memory.lend()))
                .expect("the operands fit");
            assert!(memory.is_intact(), "{job:?} writes beyond its scratch");
            c
        };
        let c = run(None);
        let mut stored: Vec<bf16> = self.c.iter().map(|&c| rounded(c)).collect();
        run(Some(&mut stored));
        assert!(
            c.iter().zip(&stored).all(|(&c, &stored)| rounded(c).to_bits() == stored.to_bits()),
            "{job:?} rounds otherwise"
        );
        c
    }

    /// Returns the exact value of each element of C, and the sum of the magnitudes of its terms.
    fn reference(&self, job: &Gemm, extras: Extras) -> Vec<(f64, f64)> {
        let mut c: Vec<(f64, f64)> = self.c.iter().map(|&c| (f64::from(c), 0.0)).collect();
        for matrix in 0..job.batch.count {
            for i in 0..job.m {
                for j in 0..job.n {
                    let at = matrix * job.batch.c + i * job.c_row + j;
                    let mut terms = vec![];
                    if extras.mode == Mode::Accumulate {
                        terms.push(f64::from(self.c[at]));
                    }
                    for p in 0..job.k {
                        let a = self.a[matrix * job.batch.a + i * job.a.row + p * job.a.column];
                        let b = self.b[matrix * job.batch.b + p * job.b.row + j * job.b.column];
                        terms.push(f64::from(a) * f64::from(b));
                    }
                    if extras.bias {
                        terms.push(f64::from(self.bias[j]));
                    }
                    if extras.residual {
                        terms.push(f64::from(self.residual[at]));
                    }
                    c[at] = (terms.iter().sum(), terms.iter().map(|term| term.abs()).sum());
                }
            }
        }
        c
    }
}

/// Checks that all available levels agree with the reference, and bit by bit with each other.
fn check(job: &Gemm, threads: usize, extras: Extras) {
    check_bf16(job, threads, extras);
    let operands = Operands::of(job);
    let reference = operands.reference(job, extras);
    let mut first: Option<Vec<f32>> = None;
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let got = operands.run(job, level, threads, extras);
        for (at, (&got, &(expected, magnitude))) in got.iter().zip(&reference).enumerate() {
            // The error of summing n terms in f32 is at most n·ε/2 of the sum of their magnitudes (Higham 2002,
            // section 4.2).
            let bound = (job.k + 4) as f64 * f64::from(f32::EPSILON) / 2.0 * magnitude;
            let error = (f64::from(got) - expected).abs();
            assert!(error <= bound, "{level:?} C[{at}]: {got} for {expected}, off by {error:e}, {job:?} {extras:?}");
        }
        match &first {
            None => first = Some(got),
            Some(first) => assert_eq!(bits(first), bits(&got), "{level:?} has other bits, {job:?} {extras:?}"),
        }
    }
}

/// Checks that bf16 operands give the same bits as f32 operands of equal values. If products are computed in pairs, the
/// bits may differ, within the same error bound.
fn check_bf16(job: &Gemm, threads: usize, extras: Extras) {
    let mut operands = Operands::of(job);
    let [a, b] = [&operands.a, &operands.b].map(|x| in_bf16(x));
    operands.a = a.iter().map(|&x| widened(x)).collect();
    operands.b = b.iter().map(|&x| widened(x)).collect();
    let expected = operands.run(job, Level::best(), threads, extras);
    let reference = operands.reference(job, extras);
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let c = operands.run_with(&a, &b, job, level, threads, extras);
        let mixed = operands.run_with(&operands.a, &b, job, level, threads, extras);
        if Kernels::of_bf16(level).k_of_line == 1 {
            assert_eq!(bits(&c), bits(&expected), "{level:?}, {job:?} {extras:?}");
        }
        for (at, (&got, &(expected, magnitude))) in c.iter().zip(&reference).enumerate() {
            // As above; in addition, subnormal products are flushed to zero.
            let bound = (job.k + 4) as f64 * (f64::from(f32::EPSILON) / 2.0 * magnitude + f64::from(f32::MIN_POSITIVE));
            let error = (f64::from(got) - expected).abs();
            assert!(error <= bound, "{level:?} C[{at}]: {got} for {expected}, off by {error:e}, {job:?} {extras:?}");
        }
        assert_eq!(bits(&mixed), bits(&expected), "{level:?}, A of f32, {job:?} {extras:?}");
    }
}

fn in_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| rounded(value)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Rows,
    Columns,
    Scattered,
}

/// Returns the strides of a rows × columns matrix, with a gap after each contiguous line.
fn strides(order: Order, rows: usize, columns: usize, gap: usize) -> Strides {
    match order {
        Order::Rows => Strides::row_major(columns + gap),
        Order::Columns => Strides::transposed(rows + gap),
        Order::Scattered => Strides { row: 2 * columns + gap + 1, column: 2 },
    }
}

fn order() -> impl Strategy<Value = Order> {
    prop_oneof![Just(Order::Rows), Just(Order::Columns), Just(Order::Scattered)]
}

/// Sizes around the edges of the tiles, most of them small.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..40, 2 => 40usize..130, 1 => 250usize..270]
}

fn extras() -> impl Strategy<Value = Extras> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(accumulate, bias, residual)| Extras {
        mode: if accumulate { Mode::Accumulate } else { Mode::Overwrite },
        bias,
        residual,
    })
}

generated! {
    #![cases(64)]

    #[test]
    fn any_shape_agrees_with_the_reference(
        (m, n, k) in (size(), size(), size()),
        (a, b) in (order(), order()),
        gap in 0usize..5,
        k_segment in prop_oneof![Just(usize::MAX), 1usize..80],
        threads in 1usize..4,
        extras in extras(),
    ) {
        let mut job = Gemm::new(m, n, k, strides(a, m, k, gap), strides(b, k, n, gap)).with_segment(k_segment);
        job.c_row = n + gap;
        check(&job, threads, extras);
    }

    #[test]
    fn any_batch_agrees_with_the_reference(
        (m, n, k) in (0usize..40, 0usize..40, 0usize..20),
        count in 0usize..5,
        (a, b) in (order(), order()),
        (shared_b, beside) in (any::<bool>(), any::<bool>()),
        threads in 1usize..4,
        extras in extras(),
    ) {
        let job = Gemm::new(m, n, k, strides(a, m, k, 1), strides(b, k, n, 2));
        let batch_b = if shared_b { 0 } else { k * n + 1 };
        let batch = Batch { count, a: m * k + 1, b: batch_b, c: if beside { n } else { m * n + 2 } };
        let job = Gemm { c_row: if beside { n * count } else { n }, ..job.with_batch(batch) };
        check(&job, threads, extras);
    }
}

#[test]
fn long_k_and_several_chunks_agree_with_the_reference() {
    for (m, n, k, k_segment) in
        [(70, 33, 900, 256), (13, 40, 1300, usize::MAX), (65, 2050, 600, 500), (2, 300, 769, 384), (1, 300, 769, 384)]
    {
        let job = Gemm::new(m, n, k, Strides::row_major(k), Strides::transposed(k)).with_segment(k_segment);
        check(&job, 2, Extras { bias: true, residual: true, ..PLAIN });
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for (m, n, k, count) in [(200, 130, 500, 1), (1, 700, 400, 1), (40, 50, 60, 7), (500, 2100, 700, 1)] {
        let batch = Batch { count, a: m * k, b: k * n, c: m * n };
        let job = Gemm::new(m, n, k, Strides::transposed(m), Strides::transposed(k)).with_batch(batch);
        let operands = Operands::of(&job);
        let one = operands.run(&job, Level::best(), 1, PLAIN);
        for &threads in few(&[3, 2, 4], 1) {
            let several = operands.run(&job, Level::best(), threads, PLAIN);
            assert!(bits(&one) == bits(&several), "{threads} threads have other bits, {job:?}");
            let [one, several] = [1, threads].map(|threads| operands.run_bf16(&job, threads, PLAIN));
            assert!(bits(&one) == bits(&several), "{threads} threads have other bits of bf16, {job:?}");
        }
    }
}

/// Products of a few rows read B in place. Each row has the same bits as in a product of many rows, also at the edges
/// of blocks.
#[test]
fn bits_of_rows_do_not_depend_on_the_other_rows() {
    let (m, n, k) = (160, 90, 500);
    let whole = Gemm::new(m, n, k, Strides::row_major(k), Strides::transposed(k));
    let operands = Operands::of(&whole);
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let all = operands.run(&whole, level, 2, PLAIN);
        let all_bf16 = operands.run_bf16(&whole, 2, PLAIN);
        for rows in (1..=13).map(|count| 11 * count..12 * count).chain([0..1, 77..78, m - 1..m]) {
            let few = Gemm { m: rows.len(), ..whole };
            let operands = Operands {
                a: operands.a[rows.start * k..][..rows.len() * k].to_vec(),
                b: operands.b.clone(),
                c: vec![0.0; rows.len() * n],
                ..Operands::of(&few)
            };
            let expected = rows.start * n..rows.end * n;
            let got = operands.run(&few, level, 2, PLAIN);
            assert_eq!(bits(&all[expected.clone()]), bits(&got), "rows {rows:?}, {level:?}");
            let got = operands.run_bf16(&few, 2, PLAIN);
            assert_eq!(bits(&all_bf16[expected]), bits(&got), "rows {rows:?} of bf16");
        }
    }
}

/// One call with segments has the same bits as accumulating calls. So micro-batches of 1 × 8 and 8 × 1 agree bit by
/// bit.
#[test]
fn segments_in_one_call_are_accumulating_calls() {
    segments_are_calls(|x| x);
    segments_are_calls(rounded);
}

fn segments_are_calls<F: Factor>(as_factor: impl Fn(f32) -> F) {
    for segment in [1, 7, 33, 256, 383, 384, 385, 511] {
        let (m, n, k) = (67, 45, 8 * segment);
        let whole = Gemm::new(m, n, k, Strides::transposed(m), Strides::row_major(n)).with_segment(segment);
        let operands = Operands::of(&whole);
        let [a, b] = [&operands.a, &operands.b].map(|x| x.iter().map(|&x| as_factor(x)).collect::<Vec<F>>());
        for threads in [1, 3] {
            let one_call = operands.run_with(&a, &b, &whole, Level::best(), threads, PLAIN);
            let part = Gemm { k: segment, ..whole };
            let mut c = operands.c.clone();
            let mut memory = ScratchMemory::new(&part.scratch(threads));
            for i in 0..8 {
                let mode = if i == 0 { Mode::Overwrite } else { Mode::Accumulate };
                let (a, b) = (&a[i * segment * m..], &b[i * segment * n..]);
                pool(threads)
                    .install(|| part.run(a, b, &mut c, mode, Epilogue::default(), &mut memory.lend()))
                    .expect("the operands fit");
            }
            assert!(bits(&one_call) == bits(&c), "segments of {segment} on {threads} threads");
        }
    }
}

/// Rows of bf16 are packed if their distance is odd or a multiple of 1024, and otherwise may be read in place.
#[test]
fn bits_do_not_depend_on_where_rows_of_bf16_lie() {
    let (m, n, k) = (100, 70, 900);
    let values = in_bf16(&Operands::of(&Gemm::new(m, n, k, Strides::row_major(k), Strides::row_major(n))).a);
    let results = [900, 901, 902, 1024].map(|row| {
        let job = Gemm::new(m, n, k, Strides::row_major(row), Strides::row_major(n));
        let mut a = vec![bf16::NAN; m * row];
        a.chunks_mut(row).zip(values.chunks(k)).for_each(|(a, values)| a[..k].copy_from_slice(values));
        let operands = Operands::of(&job);
        bits(&operands.run_with(&a, &in_bf16(&operands.b), &job, Level::best(), 2, PLAIN))
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

/// Products of pairs store subnormal results as zeros, and other products store them as they are, in whole vectors and at
/// the right edge of C.
#[test]
fn subnormal_results_are_stored_alike_in_all_columns() {
    let (m, n, k) = (3, 45, 2);
    let job = Gemm::new(m, n, k, Strides::row_major(k), Strides::row_major(n));
    let tiny = f32::from_bits(3 << 16);
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let (zeros, residual) = (vec![bf16::ZERO; k * n], vec![-tiny; m * n]);
        let (mut c, mut stored, mut memory) =
            (vec![0.0; m * n], vec![bf16::NAN; m * n], ScratchMemory::new(&job.scratch(1)));
        let epilogue = Epilogue { residual: Some(&residual), rounded: Some(&mut stored), ..Epilogue::default() };
        let a = &zeros[..m * k];
        pool(1)
            .install(|| job.run_at(level, a, &zeros, &mut c, Mode::Overwrite, epilogue, &mut memory.lend()))
            .expect("the operands fit");
        let is_pairs = level == Level::Avx512 && Bf16Products::chosen() == Bf16Products::Pairs;
        let expected = bf16::from_f32(if is_pairs { -0.0 } else { -tiny });
        assert!(stored.iter().all(|x| x.to_bits() == expected.to_bits()), "{level:?}: {stored:?}");
    }
}

#[test]
fn an_empty_k_gives_zero_or_leaves_c() {
    let job = Gemm::new(3, 5, 0, Strides::row_major(0), Strides::row_major(5));
    let operands = Operands::of(&job);
    assert_eq!(operands.run(&job, Level::best(), 1, PLAIN), vec![0.0; 15]);
    let kept = operands.run(&job, Level::best(), 1, Extras { mode: Mode::Accumulate, ..PLAIN });
    assert_eq!(bits(&kept), bits(&operands.c));
}

#[test]
fn unsound_operands_are_refused() {
    let good = Gemm::new(4, 6, 5, Strides::row_major(5), Strides::row_major(6));
    let pair = Batch { count: 2, a: 20, b: 30, c: 24 };
    let run = |job: Gemm, a: usize, b: usize, c: usize, scratch: &[u64]| {
        let (a, b, mut c, mut memory) = (vec![0.0; a], vec![0.0; b], vec![0.0; c], ScratchMemory::new(scratch));
        pool(1).install(|| job.run(&a, &b, &mut c, Mode::Overwrite, Epilogue::default(), &mut memory.lend()))
    };
    let enough = &good.scratch(1)[..];
    let &[packed_a, packed_b] = enough else { panic!("a small product has a piece for each operand") };
    let short = |operand, needed, given| Err(GemmError::TooShort { operand, m: 4, n: 6, k: 5, needed, given });
    assert_eq!(run(good, 20, 30, 24, enough), Ok(()));
    assert_eq!(run(good, 19, 30, 24, enough), short("A", 20, 19));
    assert_eq!(run(good, 20, 29, 24, enough), short("B", 30, 29));
    assert_eq!(run(good, 20, 30, 23, enough), short("C", 24, 23));
    let floats = |bytes: u64| bytes as usize / 4;
    let lacking = short("scratch", floats(packed_b), floats(packed_b) - 1);
    assert_eq!(run(good, 20, 30, 24, &[packed_a, packed_b - 4]), lacking);
    assert_eq!(run(good, 20, 30, 24, &[packed_a]), short("scratch", floats(packed_b), 0));
    assert_eq!(run(good.with_batch(pair), 39, 60, 48, enough), short("A", 40, 39));
    assert_eq!(run(good.with_segment(0), 20, 30, 24, enough), Err(GemmError::EmptySegment));
    let overlap = |c_row, count, batch_c| Err(GemmError::Overlap { n: 6, c_row, count, batch_c });
    assert_eq!(run(Gemm { c_row: 5, ..good }, 20, 30, 24, enough), overlap(5, 1, 0));
    assert_eq!(run(good.with_batch(Batch { c: 23, ..pair }), 40, 60, 48, enough), overlap(6, 2, 23));
    let huge = Gemm { a: Strides { row: usize::MAX, column: 1 }, ..good };
    assert_eq!(run(huge, 20, 30, 24, enough), Err(GemmError::TooLarge { operand: "A" }));
}
