//! Measures the matrix products of a GPT of width 384, alternating with those of the `gemm` crate. Prints the GFLOP/s
//! of both and their ratio. Then measures the same products in bf16. Prints their GFLOP/s, and the ratio to a loop of
//! `vdpbf16ps` on the same threads, or of fused multiply-adds if the processor does not have this instruction.
//!
//! Run with `cargo bench -p gapless-kernels --bench gemm [-- FILTER]`. Only lines that contain FILTER are measured.

use std::time::Instant;

use gapless_kernels::cpu::ScratchMemory;
use gapless_kernels::cpu::gemm::{Epilogue, Gemm, Mode, Strides};
use gapless_kernels::cpu::peak::Peak;
use half::bf16;

/// Number of measurements per side. The printed ratio is the median of the rounds' ratios.
const ROUNDS: usize = 15;
/// Floating-point operations per measurement.
const FLOPS: f64 = 2e9;

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    println!("threads kind     m     n     k   GFLOP/s    gemm's  ratio     bf16   of a loop");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts");
        for (kind, job) in jobs() {
            let label = format!("{threads:7} {kind:4} {:5} {:5} {:5}", job.m, job.n, job.k);
            if label.contains(&filter) {
                let ((ours, theirs, ratio), (bf16, of_loop)) =
                    pool.install(|| (measure(&job, threads), measure_bf16(&job, threads)));
                println!("{label}  {ours:8.1}  {theirs:8.1}  {ratio:5.2} {bf16:8.1} {of_loop:11.2}");
            }
        }
    }
}

/// Returns the measured products:
/// - the forward (tokens × weightᵀ), input gradient (tokens × weight) and weight gradient (tokensᵀ × tokens) of each
///   layer of the model, for the 2,048 tokens of a training step,
/// - the forward for the 256 tokens of a prompt and for a single token,
/// - one large square product.
fn jobs() -> Vec<(&'static str, Gemm)> {
    let layers = [(1152, 384), (384, 384), (1536, 384), (384, 1536), (256, 384), (4096, 384)];
    let forward = |tokens, n, k| ("NT", Gemm::new(tokens, n, k, Strides::row_major(k), Strides::transposed(k)));
    let input = |tokens, n, k| ("NN", Gemm::new(tokens, k, n, Strides::row_major(n), Strides::row_major(k)));
    let weight = |tokens, n, k| {
        let job = Gemm::new(n, k, tokens, Strides::transposed(n), Strides::row_major(k));
        ("TN", job.with_segment(256))
    };
    let step = layers.iter().flat_map(|&(n, k)| [forward(2048, n, k), input(2048, n, k), weight(2048, n, k)]);
    let head = [forward, input, weight].map(|product| product(256, 8192, 512));
    let prompt = layers.iter().map(|&(n, k)| forward(256, n, k));
    let token = layers.iter().map(|&(n, k)| forward(1, n, k));
    step.chain(head).chain(prompt).chain(token).chain([input(4096, 4096, 4096)]).collect()
}

/// Returns the GFLOP/s of this crate and of `gemm` (each the best of its rounds), and the median of the rounds'
/// ratios.
fn measure(job: &Gemm, threads: usize) -> (f64, f64, f64) {
    let &Gemm { m, n, k, a: a_strides, b: b_strides, .. } = job;
    let fill = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * 7919 % 1000) as f32 / 1000.0 - 0.5).collect() };
    let (a, b) = (fill(m * k), fill(k * n));
    let (mut c, mut their_c) = (vec![0.0; m * n], vec![0.0; m * n]);
    let mut memory = ScratchMemory::new(&job.scratch(threads));
    let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };

    let mut ours = || {
        job.run(&a, &b, &mut c, Mode::Overwrite, Epilogue::default(), &mut memory.lend()).expect("the operands fit");
    };
    let mut theirs = || {
        let [a_row, a_column, b_row, b_column, c_row] =
            [a_strides.row, a_strides.column, b_strides.row, b_strides.column, n].map(|stride| stride as isize);
        let c = their_c.as_mut_ptr();
        // SAFETY: each slice contains every element that the shape and the strides of its matrix address.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c,
                1,
                c_row,
                false,
                a.as_ptr(),
                a_column,
                a_row,
                b.as_ptr(),
                b_column,
                b_row,
                0.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    };

    let repeats = (FLOPS / job.flops() as f64).ceil().min(500.0) as usize;
    let mut rounds: Vec<(f64, f64)> = (0..=ROUNDS)
        .map(|_| (seconds(repeats, &mut ours), seconds(repeats, &mut theirs)))
        .skip(1) // the first round warms the caches and the clock
        .collect();
    let gflops = |seconds: f64| job.flops() as f64 / seconds / 1e9;
    let best = |side: fn(&(f64, f64)) -> f64| rounds.iter().map(side).fold(f64::INFINITY, f64::min);
    let (best_ours, best_theirs) = (gflops(best(|round| round.0)), gflops(best(|round| round.1)));
    rounds.sort_by(|x, y| (x.1 / x.0).total_cmp(&(y.1 / y.0)));
    let (ours, theirs) = rounds[ROUNDS / 2];
    (best_ours, best_theirs, theirs / ours)
}

/// Returns the GFLOP/s of the bf16 product (the best of its rounds), and the median of its ratios to the loop. The result
/// is rounded to bf16, except that of a weight gradient.
fn measure_bf16(job: &Gemm, threads: usize) -> (f64, f64) {
    let &Gemm { m, n, k, .. } = job;
    let fill = |len: usize| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i * 7919 % 1000) as f32 / 1000.0 - 0.5)).collect()
    };
    let (a, b, mut c, mut result) = (fill(m * k), fill(k * n), vec![0.0; m * n], vec![bf16::ZERO; m * n]);
    let is_rounded = job.k_segment == usize::MAX;
    let mut memory = ScratchMemory::new(&job.scratch(threads));
    let mut ours = || {
        let epilogue = Epilogue { rounded: is_rounded.then_some(&mut result[..]), ..Epilogue::default() };
        job.run(&a, &b, &mut c, Mode::Overwrite, epilogue, &mut memory.lend()).expect("the operands fit");
    };
    let repeats = (FLOPS / job.flops() as f64).ceil().min(500.0) as usize;
    let rate = |seconds: f64| job.flops() as f64 / seconds / 1e9;
    let rounds: Vec<(f64, f64)> = (0..=ROUNDS).map(|_| (rate(seconds(repeats, &mut ours)), peak())).skip(1).collect();
    let mut ratios: Vec<f64> = rounds.iter().map(|(ours, peak)| ours / peak).collect();
    ratios.sort_by(f64::total_cmp);
    (rounds.iter().map(|round| round.0).fold(0.0, f64::max), ratios[ROUNDS / 2])
}

/// Measures the GFLOP/s of all threads for products of bf16 in registers only.
fn peak() -> f64 {
    rayon::broadcast(|_| Peak::measured().bf16()).iter().sum::<f64>() / 1e9
}

/// Returns the seconds per call of `kernel`.
fn seconds(repeats: usize, kernel: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        kernel();
    }
    start.elapsed().as_secs_f64() / repeats as f64
}
