//! Checks with a counting allocator that CPU kernels do not allocate heap memory, on any thread of the pool.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use gapless_engine::kernels::cpu::ScratchMemory;
use gapless_engine::kernels::cpu::attention::{Attention, HeadStrides, Mask};
use gapless_engine::kernels::cpu::gemm::{Batch, Epilogue, Gemm, Mode, Strides};
use gapless_engine::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};
use gapless_engine::{Model, Result, StepOptions, Tensor, TrainOptions, Trainer};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the heap allocations of the second and third run of a kernel. The first run may allocate, to detect the
/// processor's features and for the pool's queues.
fn allocations(mut kernel: impl FnMut()) -> u64 {
    kernel();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    kernel();
    kernel();
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// Runs without the test harness, because the harness's own thread allocates now and then.
fn main() {
    gapless_testing::only_test("kernels_do_not_allocate", kernels_do_not_allocate);
}

fn kernels_do_not_allocate() {
    const THREADS: usize = 3;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("a thread pool starts");
    pool.install(|| {
        for (m, n, k, count) in [(1000, 384, 400, 1), (1, 700, 400, 1), (33, 40, 50, 40)] {
            let batch = Batch { count, a: m * k, b: k * n, c: m * n };
            let job = Gemm::new(m, n, k, Strides::row_major(k), Strides::transposed(k)).with_batch(batch);
            let (a, b, mut c) = (vec![1.0; m * k * count], vec![1.0; k * n * count], vec![0.0; m * n * count]);
            let mut memory = ScratchMemory::new(&job.scratch(THREADS));
            let counted = allocations(|| {
                job.run(&a, &b, &mut c, Mode::Overwrite, Epilogue::default(), &mut memory.lend())
                    .expect("the operands fit");
            });
            assert_eq!(counted, 0, "{job:?}");
        }
        for (batch, tokens) in [(4, 100), (1, 500)] {
            let strides = HeadStrides { batch: tokens * 6 * 32, head: 32, token: 6 * 32 };
            let job = Attention {
                batch,
                heads: 6,
                kv_heads: 6,
                queries: tokens,
                keys: tokens,
                head_size: 32,
                value_size: 32,
                scale: 0.2,
                mask: Mask::Causal { offset: 0 },
                window: Some(70),
                chunk: None,
                cap: Some(3.0),
                q: strides,
                k: strides,
                v: strides,
                out: strides,
                d_q: strides,
                d_k: strides,
                d_v: strides,
            };
            let x = vec![0.5; batch * tokens * 6 * 32];
            let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| x.clone());
            let mut lse = vec![0.0; batch * 6 * tokens];
            let mut forward = ScratchMemory::new(&job.forward_scratch::<f32>(THREADS));
            let mut backward = ScratchMemory::new(&job.backward_scratch::<f32>(THREADS));
            let counted = allocations(|| {
                job.forward(&x, &x, &x, None, &mut out, &mut lse, &mut forward.lend()).expect("the operands fit");
                let gradients = (&mut dq[..], &mut dk[..], &mut dv[..]);
                job.backward(&x, &x, &x, &out, &lse, &x, None, gradients, &mut backward.lend())
                    .expect("the operands fit");
            });
            assert_eq!(counted, 0, "{job:?}");
        }
        assert!(allocations(|| drop(vec![1u8])) > 0, "the counter counts");
    });
    for weighted in [false, true] {
        let options = TrainOptions {
            step: StepOptions { batch: 2, micro_batches: 2, sequence: 600, ..StepOptions::default() },
            threads: THREADS,
            ..Default::default()
        };
        let mut trainer = Trainer::new(|vb| Bigram::new(weighted, vb), options).expect("the model fits");
        // The planner has started rayon's global pool. Its threads allocate when they start, so wait until all of
        // them have started.
        rayon::broadcast(|_| ());
        let ids: Vec<u32> = (0..1200).map(|i| i * i % 64).collect();
        let counted = allocations(|| _ = trainer.step(&ids, &ids).expect("a step"));
        assert_eq!(counted, 0, "a fused head, weighted: {weighted}");
    }
}

/// A model whose head is fused with its loss. The head's gradients are computed in the forward or, if losses have
/// weights, in the backward.
struct Bigram {
    embed: Embedding,
    head: Linear,
    weights: Option<Tensor>,
}

impl Bigram {
    fn new(weighted: bool, vb: VarBuilder) -> Result<Self> {
        let weights = weighted.then(|| vb.get(600, "weights")).transpose()?;
        Ok(Self { embed: embedding(64, 16, vb.pp("embed"))?, head: linear_no_bias(16, 64, vb.pp("head"))?, weights })
    }
}

impl Model for Bigram {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.head.forward(&self.embed.forward(tokens)?)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, _train: bool) -> Result<Tensor> {
        let losses = self.head.cross_entropy(&self.embed.forward(tokens)?, targets)?;
        match &self.weights {
            None => losses.mean_all(),
            Some(weights) => losses.broadcast_mul(weights)?.mean_all(),
        }
    }
}
