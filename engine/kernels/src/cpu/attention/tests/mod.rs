//! Attention compared with a naive implementation in `f64`, whose gradients are themselves checked by finite
//! differences.

mod reference;

use gapless_testing::few;
use gapless_testing::prelude::*;
use half::bf16;

use self::reference::{Reference, Tensor, reference};
use super::*;
use crate::cpu::ScratchMemory;
use crate::cpu::gemm::tests::{pool, random};

/// The results of the kernels.
struct Computed {
    out: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// An attention with its operands.
struct Case {
    job: Attention,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    /// First keys of the queries; empty if all start at the first key.
    starts: Vec<u32>,
}

impl Case {
    fn of(job: Attention) -> Self {
        let len = |strides: HeadStrides, tokens: usize| strides.batch * job.batch + tokens * strides.token + 300;
        let spread = |len, seed| random(len, seed).into_iter().map(|x| 2.0 * x).collect();
        Self {
            q: spread(len(job.q, job.queries), 1),
            k: spread(len(job.k, job.keys), 2),
            v: random(len(job.v, job.keys), 3),
            dout: random(len(job.out, job.queries), 4),
            starts: Vec::new(),
            job,
        }
    }

    fn reference(&self) -> Reference {
        let Self { job, q, k, v, dout, starts } = self;
        let [q, k, v, dout] = [(job.q, q), (job.k, k), (job.v, v), (job.out, dout)].map(|(s, x)| Tensor::of(s, x));
        reference(job, starts, &q, &k, &v, &dout)
    }

    /// The case with operands rounded to bf16.
    fn rounded(&self) -> Self {
        let rounded = |x: &Vec<f32>| x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let Self { job, q, k, v, dout, starts } = self;
        let [q, k, v, dout] = [q, k, v, dout].map(rounded);
        Self { job: *job, q, k, v, dout, starts: starts.clone() }
    }

    fn compute<T: Factor>(&self, level: Level, threads: usize) -> Computed {
        let Self { job, q, k, v, dout, starts } = self;
        let stored = |x: &Vec<f32>| x.iter().map(|&x| T::store(x)).collect::<Vec<T>>();
        // Gaps between strides are zeros. Scratch is filled with NaN, so a float that is read before it was written
        // shows up in the result.
        let [mut out, mut dq, mut dk, mut dv] = [dout, q, k, v].map(|like| vec![T::store(0.0); like.len()]);
        let mut lse = vec![0.0; job.batch * job.heads * job.queries];
        let instructions = Instructions::of::<T>(level);
        let [q, k, v, dout] = [q, k, v, dout].map(stored);
        pool(threads).install(|| {
            let (q, k, v) = (q.as_ptr(), k.as_ptr(), v.as_ptr());
            let starts = if starts.is_empty() { std::ptr::null() } else { starts.as_ptr() };
            let mut memory = ScratchMemory::new(&job.forward_scratch::<T>(threads));
            let operands =
                Forward { q, k, v, out: out.as_mut_ptr(), lse: lse.as_mut_ptr(), positions: std::ptr::null(), starts };
            // SAFETY: `Case::of` allocates slices that contain every element that the strides address.
            unsafe { forward::run(job, &instructions, operands, &memory.lend()) };
            assert!(memory.is_intact(), "the forward of {job:?} writes beyond its scratch");

            let mut memory = ScratchMemory::new(&job.backward_scratch::<T>(threads));
            let operands = Backward {
                q,
                k,
                v,
                out: out.as_ptr(),
                lse: lse.as_ptr(),
                dout: dout.as_ptr(),
                starts,
                dq: dq.as_mut_ptr(),
                dk: dk.as_mut_ptr(),
                dv: dv.as_mut_ptr(),
            };
            // SAFETY: as above.
            unsafe { backward::run(job, &instructions, operands, &memory.lend()) };
            assert!(memory.is_intact(), "the backward of {job:?} writes beyond its scratch");
        });
        let [out, dq, dk, dv] = [out, dq, dk, dv].map(|x| x.into_iter().map(T::load).collect());
        Computed { out, lse, dq, dk, dv }
    }
}

/// Checks that all available levels agree with the reference.
fn check(job: Attention, threads: usize) {
    check_case(&Case::of(job), threads);
}

fn check_case(case: &Case, threads: usize) {
    check_stored::<f32>(case, threads);
    // Probabilities, gradients of scores, and the outputs that the backward reads are each rounded once, with a
    // relative error of at most 2⁻⁹.
    check_stored::<bf16>(&case.rounded(), threads);
}

fn check_stored<T: Factor>(case: &Case, threads: usize) {
    let job = case.job;
    let expected = case.reference();
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let got = case.compute::<T>(level, threads);
        let close = |name: &str, got: &[f32], expected: &[f64], size: &[f64]| {
            let norm = |x: &[f64]| x.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt();
            let off = |(&got, &expected): (&f32, &f64)| {
                let is_equal = f64::from(got) == expected;
                if is_equal { 0.0 } else { (f64::from(got) - expected).powi(2) }
            };
            // Scores reach 4·head_size·scale in magnitude, and their rounding errors enter the exponent. Gradients are
            // sums over hundreds of such probabilities. Relative to the norm, these errors stay below 2⁻²³ × 40. The
            // dot product over a head and the exponential together add head_size + 8 roundings per term.
            let of_storage = if T::IS_BF16 { 2f64.powi(-8) } else { 0.0 };
            let rounding = f64::from(f32::EPSILON) * (job.widest() + 8) as f64 + of_storage;
            let (error, bound) = (
                got.iter().zip(expected).map(off).sum::<f64>().sqrt(),
                5e-6 * norm(expected) + 1e-6 + rounding * norm(size),
            );
            assert!(error <= bound, "{level:?} {name} is off by {error:e}, {bound:e} is allowed, {job:?}");
        };
        let when_rounded = |size: &Tensor| if T::IS_BF16 { size.elements.clone() } else { Vec::new() };
        close("out", &got.out, &expected.out.elements, &when_rounded(&expected.out_size));
        close("lse", &got.lse, &expected.lse, &[]);
        close("dq", &got.dq, &expected.dq.elements, &expected.dq_size.elements);
        close("dk", &got.dk, &expected.dk.elements, &expected.dk_size.elements);
        close("dv", &got.dv, &expected.dv.elements, &when_rounded(&expected.dv_size));
    }
}

/// An attention over [batch, token, head, element] tensors, the layout that linear layers produce.
fn job(
    batch: usize,
    (heads, kv_heads): (usize, usize),
    (queries, keys): (usize, usize),
    head_size: usize,
) -> Attention {
    let strides = |heads: usize, tokens: usize| HeadStrides {
        batch: tokens * heads * head_size,
        head: head_size,
        token: heads * head_size,
    };
    Attention {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        head_size,
        value_size: head_size,
        scale: 1.0 / (head_size.max(1) as f32).sqrt(),
        mask: Mask::Causal { offset: keys.saturating_sub(queries) },
        window: None,
        chunk: None,
        cap: None,
        q: strides(heads, queries),
        k: strides(kv_heads, keys),
        v: strides(kv_heads, keys),
        out: strides(heads, queries),
        d_q: strides(heads, queries),
        d_k: strides(kv_heads, keys),
        d_v: strides(kv_heads, keys),
    }
}

generated! {
    #![cases(64)]

    #[test]
    fn any_shape_agrees_with_the_reference(
        batch in 0usize..3,
        (kv_heads, group) in (1usize..3, 1usize..4),
        (queries, keys) in (0usize..60, 0usize..60),
        head_size in prop_oneof![1usize..10, Just(32), Just(64), Just(70)],
        offset in prop_oneof![Just(None), (0usize..40).prop_map(Some)],
        heads_first in any::<bool>(),
        value_size in prop_oneof![Just(None), (0usize..80).prop_map(Some)],
        window in prop_oneof![Just(None), (1usize..50).prop_map(Some)],
        chunk in prop_oneof![Just(None), (1usize..50).prop_map(Some)],
        cap in prop_oneof![Just(None), (1u32..20).prop_map(|tenths| Some(tenths as f32 / 10.0))],
        threads in 1usize..4,
    ) {
        let mut job = job(batch, (kv_heads * group, kv_heads), (queries, keys), head_size);
        job.mask = offset.map_or(Mask::Full, |offset| Mask::Causal { offset });
        if heads_first {
            // [batch, head, token, element], with gaps.
            let token = head_size + 3;
            let strides = |heads, tokens| HeadStrides { batch: heads * tokens * token, head: tokens * token, token };
            job.q = strides(job.heads, queries);
            job.k = strides(kv_heads, keys);
            (job.d_q, job.d_k) = (job.q, job.k);
        }
        if let Some(value_size) = value_size {
            let strides = |heads, tokens| HeadStrides { batch: heads * tokens * value_size, head: value_size, token: heads * value_size };
            job.value_size = value_size;
            job.v = strides(kv_heads, keys);
            (job.out, job.d_v) = (strides(job.heads, queries), job.v);
        }
        (job.window, job.chunk, job.cap) = (window, chunk, cap);
        check(job, threads);
    }
}

/// The attention of a rank that holds `queries` of `keys` tokens.
fn folded(job: Attention, rank: usize, rounds: usize) -> Attention {
    let fold = Fold::new(job.keys, (job.keys / job.queries, rank), rounds).unwrap();
    Attention { mask: Mask::Folded(fold), ..job }
}

#[test]
fn long_sequences_agree_with_the_reference() {
    let cases = [
        (job(1, (1, 1), (410, 410), 64), 1),
        (job(1, (2, 1), (300, 500), 64), 3),
        (job(2, (2, 2), (130, 130), 256), 2),
        (job(1, (6, 2), (1, 800), 64), 2),
        (job(1, (1, 1), (800, 10), 16), 2),
        (Attention { mask: Mask::Full, ..job(1, (2, 1), (120, 430), 33) }, 2),
        (Attention { mask: Mask::Causal { offset: 0 }, ..job(1, (2, 1), (40, 430), 64) }, 2),
        (folded(job(2, (2, 1), (200, 600), 32), 1, 2), 2),
        (Attention { window: Some(1), ..job(1, (2, 1), (300, 500), 64) }, 2),
        (Attention { window: Some(37), ..job(1, (1, 1), (700, 700), 32) }, 3),
        (Attention { chunk: Some(37), ..job(1, (2, 1), (700, 700), 32) }, 3),
        (Attention { chunk: Some(300), window: Some(90), ..job(1, (1, 1), (300, 700), 16) }, 2),
        (Attention { window: Some(37), ..folded(job(1, (1, 1), (350, 700), 32), 1, 7) }, 3),
        (Attention { window: Some(300), cap: Some(1.5), ..job(1, (2, 1), (500, 700), 256) }, 1),
    ];
    for (index, &(job, threads)) in few(&cases, 8).iter().enumerate() {
        let case = Case::of(job);
        match index % 2 {
            0 => check_stored::<f32>(&case, threads),
            _ => check_case(&case, threads),
        }
    }
}

/// Returns, for each token of consecutive documents of these lengths, the start of its document.
fn starts_of(lengths: &[usize]) -> Vec<u32> {
    let begins = lengths.iter().scan(0, |end, &length| Some(std::mem::replace(end, *end + length)));
    begins.zip(lengths).flat_map(|(begin, &length)| vec![begin as u32; length]).collect()
}

/// Documents range from one token to several blocks of keys. There are two sequences, and one of them is a single
/// document.
#[test]
fn packed_documents_agree_with_the_reference() {
    for (lengths, heads, head_size, threads) in
        [(&[1, 2, 13, 4][..], (4, 2), 5, 1), (&[100, 7, 250, 93], (1, 1), 16, 3), (&[30, 1, 89], (1, 1), 256, 2)]
    {
        let tokens = lengths.iter().sum();
        let starts = [starts_of(lengths), vec![0; tokens]].concat();
        check_case(&Case { starts, ..Case::of(job(2, heads, (tokens, tokens), head_size)) }, threads);
    }
}

/// A change in one document changes no bit of the other documents' outputs and gradients.
#[test]
fn a_changed_document_changes_no_other() {
    let (lengths, changed) = ([70, 250, 33, 147], 70..320);
    let case = Case { starts: starts_of(&lengths), ..Case::of(job(1, (2, 1), (500, 500), 16)) };
    let other = {
        let Case { job, mut q, mut k, mut v, mut dout, starts } =
            Case { starts: case.starts.clone(), ..Case::of(case.job) };
        for (x, strides) in [(&mut q, job.q), (&mut k, job.k), (&mut v, job.v), (&mut dout, job.out)] {
            x[changed.start * strides.token..changed.end * strides.token].iter_mut().for_each(|x| *x = 3.0 - *x);
        }
        Case { job, q, k, v, dout, starts }
    };
    let [one, other] = [case, other].map(|case| case.compute::<f32>(Level::best(), 2));
    for (name, width, one, other) in [
        ("out", 32, &one.out, &other.out),
        ("dq", 32, &one.dq, &other.dq),
        ("dk", 16, &one.dk, &other.dk),
        ("dv", 16, &one.dv, &other.dv),
    ] {
        for (token, (one, other)) in one.chunks(width).zip(other.chunks(width)).enumerate().take(500) {
            assert_eq!(one == other, !changed.contains(&token), "{name} of token {token}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for job in [job(1, (1, 1), (500, 500), 64), job(2, (6, 3), (120, 400), 32), job(4, (6, 6), (100, 100), 64)] {
        let (case, kinds) = (Case::of(job), [Case::compute::<f32>, Case::compute::<bf16>]);
        for (compute, threads) in kinds.into_iter().flat_map(|kind| (2..=4).map(move |threads| (kind, threads))) {
            let one = compute(&case, Level::best(), 1);
            let several = compute(&case, Level::best(), threads);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let pairs = [
                ("out", &one.out, &several.out),
                ("lse", &one.lse, &several.lse),
                ("dq", &one.dq, &several.dq),
                ("dk", &one.dk, &several.dk),
                ("dv", &one.dv, &several.dv),
            ];
            for (name, one, several) in pairs {
                assert!(bits(one) == bits(several), "{name} has other bits on {threads} threads, {job:?}");
            }
        }
    }
}

/// A packed [batch, token, (q, k, v), head, element] tensor gives the same bits as separate ones. Its gradient is
/// written packed.
#[test]
fn a_packed_qkv_is_read_and_written_in_place() {
    let separate = job(2, (3, 3), (50, 50), 16);
    let width = 3 * 16;
    let packed = HeadStrides { batch: 50 * 3 * width, head: 16, token: 3 * width };
    let job = Attention { q: packed, k: packed, v: packed, d_q: packed, d_k: packed, d_v: packed, ..separate };
    let qkv = random(2 * 50 * 3 * width, 7);
    let dout = random(2 * 50 * width, 8);
    let unpack = |x: &[f32], part: usize| -> Vec<f32> {
        x.chunks(3 * width).flat_map(|token| token[part * width..][..width].to_vec()).collect()
    };
    let [q, k, v] = [0, 1, 2].map(|part| unpack(&qkv, part));
    let expected =
        Case { job: separate, q, k, v, dout: dout.clone(), starts: Vec::new() }.compute::<f32>(Level::best(), 1);

    let (mut out, mut lse) = (vec![0.0; dout.len()], vec![0.0; 2 * 3 * 50]);
    let mut dqkv = vec![f32::NAN; qkv.len()];
    pool(1).install(|| {
        let mut memory = ScratchMemory::new(&job.forward_scratch::<f32>(1));
        job.forward(&qkv, &qkv[width..], &qkv[2 * width..], None, &mut out, &mut lse, &mut memory.lend())
            .expect("the operands fit");
        let mut memory = ScratchMemory::new(&job.backward_scratch::<f32>(1));
        let (from, to) = (qkv.as_ptr(), dqkv.as_mut_ptr());
        // SAFETY: the three parts of both tensors interleave without overlapping.
        unsafe {
            let operands = Backward {
                q: from,
                k: from.add(width),
                v: from.add(2 * width),
                out: out.as_ptr(),
                lse: lse.as_ptr(),
                dout: dout.as_ptr(),
                starts: std::ptr::null(),
                dq: to,
                dk: to.add(width),
                dv: to.add(2 * width),
            };
            job.backward_raw(operands, &mut memory.lend());
        }
    });
    assert_eq!(out, expected.out);
    assert_eq!(lse, expected.lse);
    assert_eq!(unpack(&dqkv, 0), expected.dq);
    assert_eq!(unpack(&dqkv, 1), expected.dk);
    assert_eq!(unpack(&dqkv, 2), expected.dv);
}

/// Checks the reference itself: its gradients must equal the slopes of Σ dO ∘ O.
#[test]
fn the_reference_gradients_are_finite_differences() {
    let causal = Mask::Causal { offset: 2 };
    for (mask, window, cap) in [(Mask::Full, None, None), (causal, None, Some(0.7)), (causal, Some(3), None)] {
        let job = Attention { mask, window, cap, ..job(2, (4, 2), (5, 7), 3) };
        let case = Case::of(job);
        let [q, k, v] = [(job.q, &case.q), (job.k, &case.k), (job.v, &case.v)].map(|(s, x)| Tensor::of(s, x));
        let dout = Tensor::of(job.out, &case.dout);
        let expected = reference(&job, &[], &q, &k, &v, &dout);
        let loss = |inputs: &[Tensor; 3]| -> f64 {
            let out = reference(&job, &[], &inputs[0], &inputs[1], &inputs[2], &dout).out;
            out.elements.iter().zip(&dout.elements).map(|(out, dout)| out * dout).sum()
        };
        let inputs = [q, k, v];
        for (which, gradient) in [&expected.dq, &expected.dk, &expected.dv].into_iter().enumerate() {
            for at in 0..inputs[which].elements.len() - 300 {
                let step = 1e-5;
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    inputs[which].elements[at] += by;
                    loss(&inputs)
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                let error = (slope - gradient.elements[at]).abs();
                // The central difference is off by step² times a third derivative of order 10.
                assert!(error < 1e-7, "input {which} element {at}: slope {slope}, gradient {}", gradient.elements[at]);
            }
        }
    }
}

#[test]
fn unsound_operands_are_refused() {
    let good = job(1, (2, 1), (3, 4), 5);
    let run = |job: Attention, q: usize, scratch: &[u64]| {
        let (q, k, v) = (vec![0.0; q], vec![0.0; 20], vec![0.0; 20]);
        let (mut out, mut lse, mut memory) = (vec![0.0; 30], vec![0.0; 6], ScratchMemory::new(scratch));
        pool(1).install(|| job.forward(&q, &k, &v, None, &mut out, &mut lse, &mut memory.lend()))
    };
    let enough = &good.forward_scratch::<f32>(1)[..];
    let (&last, others) = enough.split_last().expect("it needs scratch");
    let short = |operand, needed, given| Err(AttentionError::TooShort { operand, needed, given });
    assert_eq!(run(good, 30, enough), Ok(()));
    assert_eq!(run(good, 29, enough), short("q", 30, 29));
    assert_eq!(run(good, 30, others), short("scratch", last as usize / 4, 0));
    assert_eq!(
        run(Attention { kv_heads: 0, ..good }, 30, enough),
        Err(AttentionError::Heads { heads: 2, kv_heads: 0 })
    );
    let wide = Attention { head_size: 257, ..good };
    assert_eq!(run(wide, 30, enough), Err(AttentionError::HeadSize { head_size: 257 }));
    assert_eq!(run(Attention { scale: 0.0, ..good }, 30, enough), Err(AttentionError::Scale { scale: 0.0 }));
    assert_eq!(run(Attention { window: Some(0), ..good }, 30, enough), Err(AttentionError::Window));
    assert_eq!(run(Attention { chunk: Some(0), ..good }, 30, enough), Err(AttentionError::Window));
    assert_eq!(run(Attention { cap: Some(0.0), ..good }, 30, enough), Err(AttentionError::Cap { cap: 0.0 }));
    let strides = HeadStrides { head: 4, ..good.out };
    assert_eq!(
        run(Attention { out: strides, ..good }, 30, enough),
        Err(AttentionError::Overlap { operand: "out", strides })
    );
    let strides = HeadStrides { token: usize::MAX, ..good.q };
    assert_eq!(run(Attention { q: strides, ..good }, 30, enough), Err(AttentionError::TooLarge { operand: "q" }));
}
