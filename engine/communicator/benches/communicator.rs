//! Measures the exchanges between ranks of one process. Each is compared with plain single-threaded code for the same
//! work (a copy, or a sum in the order of ranks), measured in turn with it. Prints milliseconds and their ratio.
//!
//! Run with `cargo bench -p gapless-communicator --bench communicator`.

use std::time::Instant;

use gapless_communicator::{Communicator, InProcess, Tag};

/// Measurements per side; the printed values are medians.
const ROUNDS: usize = 15;
/// Elements per rank: 64 MiB.
const COUNT: usize = 16 << 20;

fn main() {
    println!("ranks exchange          ms   plain  ratio");
    for ranks in [2, 4] {
        let rows = std::thread::scope(|scope| {
            let threads: Vec<_> =
                InProcess::world(ranks).into_iter().map(|rank| scope.spawn(move || measure(rank))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect::<Vec<_>>()
        });
        for (exchange, ours, plain) in &rows[0] {
            println!("{ranks:5} {exchange:14} {ours:6.2}  {plain:6.2}  {:5.2}", ours / plain);
        }
    }
}

type Row = (&'static str, f64, f64);

/// Measures all exchanges on this rank; only rank 0's results are printed.
fn measure(mut rank: InProcess) -> Vec<Row> {
    let (me, size) = (rank.rank(), rank.size());
    // The values of every rank, and their sum.
    let held = || vec![vec![1.0f32; COUNT]; if me == 0 { size + 1 } else { 0 }];
    let (mut all, mut values, mut shard) = (held(), vec![1.0f32; COUNT], vec![0.0f32; COUNT / size]);
    let mut bytes = vec![1u8; 4 * COUNT];

    let copy = |all: &mut Vec<Vec<f32>>| {
        let (first, rest) = all.split_at_mut(1);
        rest[0].copy_from_slice(&first[0]);
    };
    let sum = |all: &mut Vec<Vec<f32>>| {
        let (sums, all) = all.split_last_mut().expect("there are ranks");
        for (block, sums) in sums.chunks_mut(1024).enumerate() {
            sums.copy_from_slice(&all[0][block * 1024..][..sums.len()]);
            for values in &all[1..] {
                sums.iter_mut().zip(&values[block * 1024..]).for_each(|(sum, value)| *sum += *value);
            }
        }
    };
    let sum_for_all = |all: &mut Vec<Vec<f32>>| {
        sum(all);
        let (sums, all) = all.split_last_mut().expect("there are ranks");
        all.iter_mut().for_each(|values| values.copy_from_slice(sums));
    };

    let message = turns(&mut rank, &mut all, copy, |rank| match rank.rank() {
        0 => rank.send(&bytes, 1, Tag::default()),
        1 => rank.receive(&mut bytes, 0, Tag::default()),
        _ => Ok(()),
    });
    let reduce_scatter = turns(&mut rank, &mut all, sum, |rank| rank.reduce_scatter(&values, &mut shard));
    let all_reduce = turns(&mut rank, &mut all, sum_for_all, |rank| rank.all_reduce(&mut values));
    [("message", message), ("reduce_scatter", reduce_scatter), ("all_reduce", all_reduce)]
        .map(|(exchange, (ours, plain))| (exchange, ours, plain))
        .into()
}

/// Returns the median milliseconds of an exchange and of the plain code. Rank 0 runs the plain code while the others
/// wait.
fn turns(
    rank: &mut InProcess,
    all: &mut Vec<Vec<f32>>,
    plain: impl Fn(&mut Vec<Vec<f32>>),
    mut exchange: impl FnMut(&mut InProcess) -> gapless_communicator::Result<()>,
) -> (f64, f64) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        rank.barrier().expect("all ranks are there");
        let start = Instant::now();
        exchange(rank).expect("all ranks are there");
        ours.push(start.elapsed().as_secs_f64() * 1e3);
        rank.barrier().expect("all ranks are there");
        if rank.rank() == 0 {
            let start = Instant::now();
            plain(all);
            theirs.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(0.0)
    };
    (median(ours), median(theirs))
}
