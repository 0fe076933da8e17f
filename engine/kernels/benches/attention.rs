//! Measures causal attention in f32 and bf16, forward and backward. Prints GFLOP/s, not counting masked scores, and the
//! ratios to multiply-adds in registers only on the same threads ([`Peak`]).
//!
//! Run with `cargo bench -p gapless-kernels --bench attention [-- FILTER]`. Only lines that contain FILTER are measured.

use std::time::Instant;

use gapless_kernels::cpu::ScratchMemory;
use gapless_kernels::cpu::attention::{Attention, HeadStrides, Mask};
use gapless_kernels::cpu::gemm::Factor;
use gapless_kernels::cpu::peak::Peak;
use half::bf16;

/// Number of measurements of each kind. The printed GFLOP/s are the best ones, and the ratios are medians.
const ROUNDS: usize = 11;

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    println!("threads batch heads tokens size type  forward  backward (GFLOP/s)   of the peak");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool starts");
        for (batch, heads, tokens, size) in
            [(32, 6, 64, 64), (8, 6, 256, 64), (8, 6, 1024, 64), (1, 6, 1024, 64), (8, 12, 256, 32), (4, 4, 512, 128)]
        {
            let label = format!("{threads:7} {batch:5} {heads:5} {tokens:6} {size:4}");
            let (job, f32, bf16) = (job(batch, heads, tokens, size), format!("{label} f32 "), format!("{label} bf16"));
            pool.install(|| {
                if f32.contains(&filter) {
                    measure(&f32, &job, threads, |x| x, |peak| peak.f32);
                }
                if bf16.contains(&filter) {
                    measure(&bf16, &job, threads, bf16::from_f32, Peak::bf16);
                }
            });
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
        chunk: None,
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

fn measure<T: Factor>(label: &str, job: &Attention, threads: usize, of: fn(f32) -> T, peak: fn(Peak) -> f64) {
    let &Attention { batch, heads, queries: tokens, head_size, .. } = job;
    let width = heads * head_size;
    let fill = |len: usize| -> Vec<T> { (0..len).map(|i| of((i * 7919 % 1000) as f32 / 500.0 - 1.0)).collect() };
    let (qkv, dout) = (fill(batch * tokens * 3 * width), fill(batch * tokens * width));
    let (mut out, mut lse) = (dout.clone(), vec![0.0; batch * heads * tokens]);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| qkv.clone());
    let (q, k, v) = (&qkv[..], &qkv[width..], &qkv[2 * width..]);
    let mut forward_scratch = ScratchMemory::new(&job.forward_scratch::<T>(threads));
    let mut backward_scratch = ScratchMemory::new(&job.backward_scratch::<T>(threads));

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
        let peak = rayon::broadcast(|_| peak(Peak::measured())).iter().sum::<f64>() / 1e9;
        rounds.push([forward, backward, peak]);
    }
    rounds.remove(0); // it warms the caches and the clock
    let best = |side: usize| rounds.iter().map(|round| round[side]).fold(0.0, f64::max);
    let ratio = |side: usize| {
        let mut ratios: Vec<f64> = rounds.iter().map(|round| round[side] / round[2]).collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ROUNDS / 2]
    };
    println!("{label} {:8.1}  {:8.1}             {:5.2}  {:5.2}", best(0), best(1), ratio(0), ratio(1));
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
