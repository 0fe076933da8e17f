//! Measures the attention of a GPT of width 384, forward and backward, and a plain [`Gemm`] product in the same run.
//! Prints the GFLOP/s of each, not counting masked scores, and the ratios of attention to the product.
//!
//! Run with `cargo bench -p gapless-kernels --bench attention`.

use std::time::Instant;

use gapless_kernels::cpu::ScratchMemory;
use gapless_kernels::cpu::attention::{Attention, HeadStrides, Mask};
use gapless_kernels::cpu::gemm::{Epilogue, Gemm, Mode, Strides};

/// Number of measurements of each kind. The printed GFLOP/s are the best ones, and the ratios are medians.
const ROUNDS: usize = 11;

fn main() {
    println!("threads batch heads tokens size  forward  backward    gemm  (GFLOP/s)  forward/gemm  backward/gemm");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts");
        for (batch, tokens) in [(8, 256), (8, 1024), (1, 1024)] {
            pool.install(|| measure(&job(batch, 6, tokens, 64), threads));
        }
    }
}

/// Returns a causal attention over a packed [batch, token, (q, k, v), head, element] tensor.
fn job(batch: usize, heads: usize, tokens: usize, head_size: usize) -> Attention {
    let width = heads * head_size;
    let packed = HeadStrides { batch: tokens * 3 * width, head: head_size, token: 3 * width };
    Attention {
        batch,
        heads,
        kv_heads: heads,
        queries: tokens,
        keys: tokens,
        head_size,
        value_size: head_size,
        scale: 1.0 / (head_size as f32).sqrt(),
        mask: Mask::Causal { offset: 0 },
        window: None,
        cap: None,
        q: packed,
        k: packed,
        v: packed,
        out: HeadStrides { batch: tokens * width, head: head_size, token: width },
        d_q: packed,
        d_k: packed,
        d_v: packed,
    }
}

fn measure(job: &Attention, threads: usize) {
    let &Attention { batch, heads, queries: tokens, head_size, .. } = job;
    let width = heads * head_size;
    let fill = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect() };
    let (qkv, dout) = (fill(batch * tokens * 3 * width), fill(batch * tokens * width));
    let (mut out, mut lse) = (vec![0.0; dout.len()], vec![0.0; batch * heads * tokens]);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0; qkv.len()]);
    let (q, k, v) = (&qkv[..], &qkv[width..], &qkv[2 * width..]);
    let mut forward_scratch = ScratchMemory::new(&job.forward_scratch(threads));
    let mut backward_scratch = ScratchMemory::new(&job.backward_scratch(threads));

    let product = Gemm::new(2048, 1152, 384, Strides::row_major(384), Strides::row_major(1152));
    let (a, b, mut c) = (fill(2048 * 384), fill(384 * 1152), vec![0.0; 2048 * 1152]);
    let mut product_scratch = ScratchMemory::new(&product.scratch(threads));

    let mut rounds = vec![];
    for _ in 0..=ROUNDS {
        let forward = gflops(job.forward_flops(), || {
            job.forward(q, k, v, None, &mut out, &mut lse, &mut forward_scratch.lend()).expect("the operands fit");
        });
        let backward = gflops(job.backward_flops(), || {
            let gradients = (&mut dq[..], &mut dk[..], &mut dv[..]);
            job.backward(q, k, v, &out, &lse, &dout, None, gradients, &mut backward_scratch.lend())
                .expect("the operands fit");
        });
        let gemm = gflops(product.flops(), || {
            product
                .run(&a, &b, &mut c, Mode::Overwrite, Epilogue::default(), &mut product_scratch.lend())
                .expect("the operands fit");
        });
        rounds.push([forward, backward, gemm]);
    }
    rounds.remove(0); // it warms the caches and the clock
    let best = |side: usize| rounds.iter().map(|round| round[side]).fold(0.0, f64::max);
    let ratio = |side: usize| {
        let mut ratios: Vec<f64> = rounds.iter().map(|round| round[side] / round[2]).collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ROUNDS / 2]
    };
    println!(
        "{threads:7} {batch:5} {heads:5} {tokens:6} {head_size:4}  {:7.1}  {:8.1} {:7.1}             {:12.2}  {:13.2}",
        best(0),
        best(1),
        best(2),
        ratio(0),
        ratio(1)
    );
}

/// Returns the GFLOP/s of a kernel, which is called often enough to be measured.
fn gflops(flops: u64, mut kernel: impl FnMut()) -> f64 {
    let repeats = (5e8 / flops as f64).ceil() as usize;
    let start = Instant::now();
    for _ in 0..repeats {
        kernel();
    }
    flops as f64 * repeats as f64 / start.elapsed().as_secs_f64() / 1e9
}
