//! Tests of the kernels in softmax.cu, rope.cu, embedding.cu and copy.cu, and of random noise.

use candle_core::{DType, Layout};
use gapless_graph::{Numbers, Stream, Window};
use gapless_testing::few;

use super::host;
use super::judge::{Stored, check, check_forward, judge};
use super::memory::Region;
use crate::Tensor;
use crate::cuda::launch::{HeadRows, Upstream, embedding_grad, embedding_grad_workspace, head};
use crate::cuda::{Features, Operand, Operands, Random};
use crate::graph::Spec;
use crate::kernels::LossTerms;
use crate::ops::{Cast, CrossEntropy, Dropout, Embedding, Jitter, LogSumExp, Rope, RopeScaling, Softmax};

/// The plain likelihood, and a loss with all regularization terms.
const TERMS: [LossTerms; 2] = [LossTerms::NONE, LossTerms { label_smoothing: 0.1, z_loss: 0.01 }];

/// Rows with fewer elements than a warp has lanes, and with more than a block has threads.
const SHAPES: [&[usize]; 3] = [&[2, 3, 5], &[4, 96], &[2, 2500]];

#[test]
fn softmax_and_its_normaliser() {
    for shape in SHAPES {
        check(&["softmax_last_dim", "softmax_grad"], &[shape], &[], |x, _| {
            Tensor::apply_op::<1>(Softmax, &[&x[0]]).map(|[y]| y)
        });
        check(&["log_sum_exp"], &[shape], &[], |x, _| Tensor::apply_op::<1>(LogSumExp, &[&x[0]]).map(|[y]| y));
    }
}

#[test]
fn losses() {
    let cases = [(&[2usize, 3, 5][..], &[0u32, 4, 1, 2, 2, 3][..]), (&[2, 1, 2500], &[2499, 17])];
    for ((shape, targets), terms) in cases.into_iter().flat_map(|case| TERMS.map(|terms| (case, terms))) {
        check(&["cross_entropy", "cross_entropy_grad"], &[shape], &[(&shape[..2], targets)], |x, ids| {
            let [losses, _] = Tensor::apply_op(CrossEntropy { terms }, &[&x[0], &ids[0]])?;
            losses.to_dtype(x[0].dtype())
        });
    }
}

#[test]
fn chunks_of_a_head_become_their_gradient() {
    if !host::is_there() {
        return;
    }
    // Rows that are kept in shared memory, as far as there is room, and rows that are no packs.
    for (rows, width, dtype) in [
        (3usize, 5usize, DType::F32),
        (2, 1500, DType::F32),
        (1, 30_000, DType::F32),
        (3, 5, DType::BF16),
        (2, 1504, DType::BF16),
        (2, 1501, DType::BF16),
        (1, 51_200, DType::BF16),
    ] {
        let numbers = Numbers::from_seed(3);
        let logits: Vec<f64> = (0..rows * width).map(|i| numbers.normal(i)).collect();
        let logits = Region::of(&logits, dtype).numbers();
        let targets: Vec<f64> = (0..rows).map(|row| (row * 7 % width) as f64).collect();
        // The gradients of five losses, stored at every second element. The rows of the chunk are the last ones.
        let d_losses = Region::of(&[9.0, 8.0, 0.5, 8.0, -1.5, 8.0, 2.0, 8.0, 1.0, 8.0], DType::F32);
        let first = 5 - rows as u64;
        let strided =
            Operand { address: d_losses.address(), layout: Layout::new(5.into(), vec![2], 0), dtype: DType::F32 };
        let each = |row: usize| d_losses.numbers()[2 * (first as usize + row)];
        let upstreams: [(Upstream<'_>, &dyn Fn(usize) -> f64); 3] = [
            (Upstream::None, &|_| 0.0),
            (Upstream::Everywhere(0.5), &|_| 0.5),
            (Upstream::Each(&strided, first), &each),
        ];
        let all = upstreams.into_iter().flat_map(|(u, d)| [(u, d, false, TERMS[0]), (u, d, true, TERMS[1])]);
        for (upstream, d_loss, is_reversed, terms) in all {
            let (region, ids) = (Region::of(&logits, dtype), Region::of(&targets, DType::U32));
            let losses = Region::poisoned(rows, DType::F32);
            let operand = Operand { address: region.address(), layout: Layout::contiguous((rows, width)), dtype };
            let of_rows = HeadRows {
                targets: ids.address(),
                losses: losses.address(),
                likelihoods: 0,
                weights: 0,
                rest: None,
                vocabulary: width as u64,
                first_entry: 0,
                gathered: None,
                statistics: 0,
            };
            for launch in head(&operand, of_rows, upstream, &terms, 0.0).unwrap() {
                // SAFETY: the regions have these sizes.
                unsafe { host::run(&launch, is_reversed) }.unwrap();
            }
            assert!(region.is_intact() && losses.is_intact());
            let (got, losses) = (region.numbers(), losses.numbers());
            for (row, x) in logits.chunks_exact(width).enumerate() {
                let (loss, gradient) = terms.exact(x, targets[row] as usize);
                assert!((losses[row] - loss).abs() <= 1e-5 * loss.abs(), "{} is not {loss}", losses[row]);
                for (got, (x, gradient)) in got[row * width..].iter().zip(x.iter().zip(gradient)) {
                    let exact = if matches!(upstream, Upstream::None) { *x } else { gradient * d_loss(row) };
                    let relative = if dtype == DType::BF16 { 4e-3 } else { 1e-5 };
                    assert!((got - exact).abs() <= relative * exact.abs() + 1e-7, "{got} is not {exact}");
                }
            }
        }
    }
}

#[test]
fn rotations_forth_and_back() {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 };
    for shape in [[2, 3, 2, 6], [1, 40, 3, 16]] {
        let frequencies = llama3.frequencies(10_000.0);
        // Explicit positions of the tokens.
        let positions: Vec<u32> = (0..shape[0] * shape[1]).map(|i| (i * 7 % 50) as u32).collect();
        for (neighbours, inverse) in [(false, false), (true, false), (true, true)] {
            let rope = Rope { frequencies, neighbours, inverse };
            check(&["rope"], &[&shape], &[], |x, _| Tensor::apply_op::<1>(rope, &[&x[0]]).map(|[y]| y));
            check(&["rope"], &[&shape], &[(&shape[..2], &positions)], |x, ids| {
                Tensor::apply_op::<1>(rope, &[&x[0], &ids[0]]).map(|[y]| y)
            });
        }
        // In memory, the head dimension comes before the token dimension.
        let [batch, tokens, heads, size] = shape;
        check(&["rope"], &[&[batch, heads, tokens, size]], &[], |x, _| {
            let rope = Rope { frequencies: RopeScaling::None.frequencies(100.0), neighbours: false, inverse: false };
            Tensor::apply_op::<1>(rope, &[&x[0].transpose(1, 2)?]).map(|[y]| y)
        });
    }
}

#[test]
fn rows_of_a_table_and_their_gradient() {
    // Some ids occur once, several times, in several blocks or never. Widths are below and above the number of
    // columns of a block.
    let many: Vec<u32> = (0..700).map(|i| i * i % 11).collect();
    // Places of several chunks, most of which have one id, and some spans with none of it.
    let most: Vec<u32> = (0..2600).map(|i| if i % 3 == 0 || (300..900).contains(&i) { i % 12 } else { 5 }).collect();
    // Cases with rows after the first look up a part of a table: some ids are before it or after it.
    let cases = [
        (&[3u32, 0, 3, 7, 3, 9][..], &[2usize, 3][..], 5, 0, 12),
        (&many, &[7, 100], 3, 0, 12),
        (&[1, 2, 1], &[3], 2100, 0, 12),
        (&[3, 0, 3, 7, 3, 9, 2, 5], &[2, 4], 16, 2, 6),
        (&most, &[2600], 8, 4, 5),
        (&most, &[2600], 7, 0, 12),
        (&most, &[2, 1300], 72, 0, 12),
    ];
    for &(ids, dims, width, first, rows) in few(&cases, 5) {
        check(&["embedding", "embedding_grad"], &[&[rows, width]], &[(dims, ids)], |x, ids| {
            let padding = (ids[0].dims().len() > 1).then_some(3);
            Tensor::apply_op::<1>(Embedding { padding, first }, &[&x[0], &ids[0]]).map(|[y]| y)
        });
    }
}

/// Tables of ids, as ranks look up when they divide tokens.
#[test]
fn rows_of_ids() {
    let table: Vec<u32> = (0..6 * 9).map(|i| i * i * 7919 % 60_000).collect();
    for (rows, width) in [(6, 9), (13, 4), (54, 1)] {
        let dims: &[usize] = &[rows, width];
        let ids: [(&[usize], &[u32]); 2] = [(dims, &table[..rows * width]), (&[2, 2], &[3, 0, 5, 3])];
        check_forward(&[], &ids, |_, ids| {
            let [picked] = Tensor::apply_op(Embedding { padding: None, first: 0 }, &[&ids[0], &ids[1]])?;
            picked.to_dtype(DType::F32)
        });
    }
}

/// Sequences one after another onto f32 have the bits of both at once, where an id has few rows in each and many in both.
#[test]
fn gradients_of_a_table_know_nothing_of_micro_batches() {
    if !host::is_there() {
        return;
    }
    let (sequence, width, vocabulary) = (400, 72, 12);
    let ids: Vec<f64> = (0..2 * sequence).map(|i| if i % 4 == 0 { 5.0 } else { (i * i % 11) as f64 }).collect();
    let numbers = Numbers::from_seed(3);
    for dtype in [DType::F32, DType::BF16] {
        let dy: Vec<f64> = (0..ids.len() * width).map(|i| numbers.normal(i)).collect();
        let gradient = |sequences: &[std::ops::Range<usize>]| {
            let table = Region::of(&vec![1.0; vocabulary * width], DType::F32);
            for places in sequences {
                let dims = (places.len() / sequence, sequence, width);
                let spec = Spec { shape: dims.into(), dtype };
                let of_ids = Spec { shape: (dims.0, dims.1).into(), dtype: DType::U32 };
                let table_spec = Spec { shape: (vocabulary, width).into(), dtype: DType::F32 };
                let ids = Region::of(&ids[places.clone()], DType::U32);
                let dy = Region::of(&dy[places.start * width..places.end * width], dtype);
                let scratch: Vec<Region> = embedding_grad_workspace(&of_ids)
                    .into_iter()
                    .map(|bytes| Region::poisoned(bytes as usize, DType::U8))
                    .collect();
                let operand = |region: &Region, spec: &Spec| Operand {
                    address: region.address(),
                    layout: Layout::contiguous(spec.shape.clone()),
                    dtype: spec.dtype,
                };
                let operands = Operands {
                    inputs: &[operand(&ids, &of_ids), operand(&dy, &spec)],
                    outputs: &[operand(&table, &table_spec)],
                    workspace: &scratch.iter().map(Region::address).collect::<Vec<_>>(),
                    accumulate: 1,
                    tickets: 0,
                    random: Random { key: 0, micro_batch: 0 },
                    features: Features::default(),
                };
                for launch in embedding_grad(None, 0, &operands).unwrap() {
                    // SAFETY: the regions are of these extents.
                    unsafe { host::run(&launch, false) }.unwrap();
                }
                assert!(table.is_intact() && scratch.iter().all(Region::is_intact));
            }
            table.bytes().to_vec()
        };
        let whole = 0..2 * sequence;
        assert!(gradient(std::slice::from_ref(&whole)) == gradient(&[0..400, 400..800]), "{dtype:?}");
    }
}

#[test]
fn copies_between_strides_and_types() {
    // In packs, and at addresses or over extents that have none.
    for width in [16, 24, 20, 7] {
        check(&["contiguous", "widen"], &[&[4, 5, width]], &[], |x, _| {
            x[0].transpose(0, 1)?.narrow(1, 1, 3)?.contiguous()
        });
        check(&["cat"], &[&[2, 3, width], &[2, 3, 16]], &[], |x, _| Tensor::cat(&[&x[0], &x[1]], 2));
        for dtype in [DType::F32, DType::BF16] {
            check(&["to_dtype"], &[&[3, width]], &[], |x, _| {
                Tensor::apply_op::<1>(Cast { dtype }, &[&x[0]]).map(|[y]| y)
            });
        }
    }
    check(&["contiguous", "widen"], &[&[4, 5, 6]], &[], |x, _| x[0].transpose(0, 2)?.narrow(1, 1, 3)?.contiguous());
    check(&["cat"], &[&[2, 3, 4], &[2, 5, 4]], &[], |x, _| Tensor::cat(&[&x[0], &x[1]], 1));
    check(&["cat"], &[&[2, 3, 4], &[4, 3, 4]], &[], |x, _| {
        Tensor::cat(&[&x[0].transpose(1, 2)?, &x[1].transpose(1, 2)?], 0)
    });
    for dtype in [DType::F32, DType::BF16] {
        check(&["to_dtype"], &[&[3, 70]], &[], |x, _| Tensor::apply_op::<1>(Cast { dtype }, &[&x[0]]).map(|[y]| y));
    }
}

/// The reference checks results within a tolerance. The generator of the CPU checks which elements are zero.
#[test]
fn noise_is_the_cpus_bit_by_bit() {
    for shape in SHAPES {
        for p in [0.0, 0.1, 0.9] {
            check(&["dropout"], &[shape], &[], |x, _| {
                Tensor::apply_op::<1>(Dropout { p, key: 5, part: None }, &[&x[0]]).map(|[y]| y)
            });
        }
        check(&["jitter"], &[shape], &[], |x, _| {
            Tensor::apply_op::<1>(Jitter { amount: 0.1, key: 9, part: None }, &[&x[0]]).map(|[y]| y)
        });
    }
    // Runs of a part that draws the numbers of the whole.
    let part = Window::of(&[40, 300], vec![vec![3..40], vec![100..233]]).spread();
    check(&["dropout"], &[&[37, 133]], &[], |x, _| {
        Tensor::apply_op::<1>(Dropout { p: 0.5, key: 5, part }, &[&x[0]]).map(|[y]| y)
    });
    check(&["jitter"], &[&[37, 133]], &[], |x, _| {
        Tensor::apply_op::<1>(Jitter { amount: 0.1, key: 9, part }, &[&x[0]]).map(|[y]| y)
    });
    if !host::is_there() {
        return;
    }
    // Powers of two stay exact in the kernel, so every bit of the noise is visible in the result.
    let count = 4099;
    let ones = Stored { data: vec![1.0; count], layout: Layout::contiguous(count), dtype: DType::F32 };
    let spec = [Spec::f32(count)];
    let stream = Stream::new(77, 123_456, 5);
    let numbers = stream.place(42, count);
    let dropout = Dropout { p: 0.5, key: 42, part: None };
    assert!(judge(&dropout, std::slice::from_ref(&ones), &spec, &spec, stream));
    let got = super::judge::outputs(&dropout, &[ones], &spec, stream).remove(0);
    for (i, got) in got.into_iter().enumerate() {
        assert_eq!(got, if numbers.bits(i) >> 63 == 1 { 2.0 } else { 0.0 }, "element {i}");
    }
}
