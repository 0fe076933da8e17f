//! Tests of the kernels in grouped.cu, grouped_tensor_cores.cu and grouped_warpgroups.cu.

use candle_core::{DType, Layout};
use gapless_graph::Numbers;
use gapless_testing::few;

use super::host;
use super::judge::check;
use super::memory::Region;
use crate::Tensor;
use crate::cuda::launch::grouped_linear_grad_weight;
use crate::cuda::{Features, Operand, Operands, Random};
use crate::ops::GroupedLinear;

/// Returns the row offsets of runs of these lengths, and the end of the last run.
fn starts(lengths: &[u32]) -> Vec<u32> {
    let sum = |run: usize| lengths[..run].iter().sum();
    (0..=lengths.len()).map(sum).collect()
}

/// Checks the products for runs of these lengths, followed by unused rows.
fn check_runs(sources: usize, experts: usize, lengths: &[u32], unused: usize, (width, out): (usize, usize)) {
    let starts = starts(lengths);
    let rows = *starts.last().unwrap() as usize + unused;
    check(
        &["grouped_linear", "grouped_linear_grad_input", "grouped_linear_grad_weight"],
        &[&[rows, width], &[experts, out, width]],
        &[(&[starts.len()], &starts)],
        |x, ids| {
            let op = GroupedLinear { sources, balanced: None };
            Tensor::apply_op::<1>(op, &[&x[0], &x[1], &ids[0]]).map(|[y]| y)
        },
    );
}

/// Experts have no rows, a few rows, or more rows than a tile, over two sequences. Widths are such that rows are
/// aligned or not, and some are larger than a tile.
#[test]
fn rows_that_are_shared_unequally() {
    for &extents in few(&[(37, 23), (40, 136), (130, 33), (328, 264)], 1) {
        check_runs(1, 6, &[9, 0, 0, 0, 131, 3, 1, 65, 0, 0, 0, 17], 5, extents);
    }
    check_runs(1, 3, &[64, 128, 1], 0, (64, 64));
}

#[test]
fn rows_of_one_expert_and_of_none() {
    check_runs(1, 4, &[0, 0, 150, 0], 0, (16, 9));
    check_runs(1, 4, &[0, 0, 0, 0], 70, (16, 9));
    check_runs(1, 1, &[5], 0, (3, 1));
}

/// There are more experts than a warp has lanes, so each lane counts the tiles of several.
#[test]
fn rows_of_many_experts() {
    let lengths: Vec<u32> = (0..75).map(|expert| expert * expert % 4).collect();
    check_runs(1, 75, &lengths, 3, (8, 5));
}

/// There are more tiles than multiprocessors, so each block of grouped_warpgroups.cu computes several.
#[test]
fn tiles_that_share_a_block() {
    let lengths: Vec<u32> = (0..140).map(|expert| expert % 3).collect();
    check_runs(1, 140, &lengths, 3, (8, 16));
}

/// An expert's rows come from several ranks, ordered by rank.
#[test]
fn rows_of_two_sources() {
    check_runs(2, 3, &[7, 0, 2, 70, 0, 1, 0, 5, 66, 2, 0, 3], 4, (24, 9));
}

/// The gradients of weights have the same bits whether they are accumulated over micro-batches or computed at once.
#[test]
fn gradients_of_weights_do_not_depend_on_how_a_batch_is_cut() {
    if !host::is_there() {
        return;
    }
    let (experts, width, out) = (3, 5, 7);
    // Number of rows of each expert in each of three sequences.
    let lengths: [[u32; 3]; 3] = [[21, 0, 40], [0, 0, 0], [1, 70, 18]];
    // Returns the elements of an expert's rows in a sequence.
    let rows_of = |expert: usize, sequence: usize, columns: usize| -> Vec<f64> {
        let numbers = Numbers::from_seed((expert * 3 + sequence) as u64);
        (0..lengths[expert][sequence] as usize * columns).map(|i| numbers.normal(i)).collect()
    };
    let gradient = |micro_batches: &[&[usize]]| {
        let d_weight = Region::poisoned(experts * out * width, DType::F32);
        for (index, sequences) in micro_batches.iter().enumerate() {
            let runs = || (0..experts).flat_map(|expert| sequences.iter().map(move |&sequence| (expert, sequence)));
            let counts: Vec<u32> = runs().map(|(expert, sequence)| lengths[expert][sequence]).collect();
            let starts: Vec<f64> = starts(&counts).into_iter().map(f64::from).collect();
            let rows = *starts.last().unwrap() as usize;
            let all = |columns| -> Vec<f64> { runs().flat_map(|(e, s)| rows_of(e, s, columns)).collect() };
            let (x, dy) = (Region::of(&all(width), DType::F32), Region::of(&all(out), DType::F32));
            let at_starts = Region::of(&starts, DType::U32);
            let operand = |region: &Region, dims: &[usize], dtype| {
                let layout = Layout::contiguous(dims);
                Operand { address: region.address(), layout, dtype }
            };
            let operands = Operands {
                inputs: &[
                    operand(&x, &[rows, width], DType::F32),
                    operand(&dy, &[rows, out], DType::F32),
                    operand(&at_starts, &[starts.len()], DType::U32),
                ],
                outputs: &[operand(&d_weight, &[experts, out, width], DType::F32)],
                workspace: &[],
                accumulate: u64::from(index > 0),
                tickets: 0,
                random: Random { key: 0, micro_batch: 0 },
                features: Features::default(),
            };
            for launch in grouped_linear_grad_weight(1, &operands).unwrap() {
                // SAFETY: the regions are as large as the operands say. No other reference to the regions is used.
                unsafe { host::run(&launch, false) }.unwrap();
            }
        }
        d_weight.bytes().to_vec()
    };
    let whole = gradient(&[&[0, 1, 2]]);
    assert!(whole == gradient(&[&[0], &[1], &[2]]));
    assert!(whole == gradient(&[&[0, 1], &[2]]));
}
