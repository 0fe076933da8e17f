//! Loops over elements: cut into blocks of fixed size (never by the number of threads), each vectorised.

use std::sync::LazyLock;

use candle_core::Layout;

use super::{Args, Float, InPieces, Pieces, with_float};

/// Elements per task: big enough to outweigh the hand-over, small enough to stay in a core's cache.
pub const BLOCK: usize = 16 * 1024;

static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);

/// The widest vectors that this machine has.
pub fn arch() -> pulp::Arch {
    *ARCH
}

/// Evaluates an expression compiled for the widest vectors that this machine has. A macro, because only a closure that is
/// always inlined gets them.
#[doc(hidden)]
#[macro_export]
macro_rules! vectorize {
    ($body:expr) => {{
        // What moves a capture can be called once alone. Others are called through a shim that need not be inlined, and whose code is
        // then for no instruction set: a call of `fmaf` for each multiply-add.
        let once = $crate::cpu::CalledOnce;
        $crate::cpu::arch().dispatch(
            #[inline(always)]
            || {
                let _called = once;
                $body
            },
        )
    }};
}
#[doc(inline)]
pub use vectorize;

/// What [`vectorize`] moves into its closure.
#[doc(hidden)]
#[derive(Debug)]
pub struct CalledOnce;

/// Rows of `width` elements that make up a task.
pub fn rows_per_task(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

/// Calls f with the index of each row of the last dimension of `layout`, and its elements of a dense output.
pub fn each_row<T: Send>(out: &mut [T], layout: &Layout, f: impl Fn(usize, &mut [T]) + Sync) {
    let width = last_extent(layout);
    let rows = rows_per_task(width);
    out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
        out.chunks_mut(width).enumerate().for_each(|(row, out)| f(task * rows + row, out));
    });
}

/// out = f(x), where the output may overwrite the input. In either type of float.
pub fn map(args: &mut Args<'_>, f: impl Fn(f32) -> f32 + Sync) {
    with_float!(args.output_dtype(0), T => map_in::<T>(args, f));
}

fn map_in<T: Float>(args: &mut Args<'_>, f: impl Fn(f32) -> f32 + Sync) {
    let out = args.output::<T>(0);
    if args.is_overwritten(0) {
        out.pieces_mut(BLOCK).for_each(|out| vectorize!(out.iter_mut().for_each(|o| *o = T::store(f(o.load())))));
        return;
    }
    let x = args.input::<T>(0);
    out.pieces_mut(BLOCK).zip(x.pieces(BLOCK)).for_each(|(out, x)| {
        vectorize!(out.iter_mut().zip(x).for_each(|(o, &x)| *o = T::store(f(x.load()))));
    });
}

/// out = f(a, b) for equal shapes or broadcast strides, where the output may overwrite one of them. In either type of float.
pub fn zip(args: &mut Args<'_>, f: impl Fn(f32, f32) -> f32 + Sync) {
    with_float!(args.output_dtype(0), T => zip_in::<T>(args, f));
}

fn zip_in<T: Float>(args: &mut Args<'_>, f: impl Fn(f32, f32) -> f32 + Sync) {
    let f = |a: T, b: T| T::store(f(a.load(), b.load()));
    let out = args.output::<T>(0);
    match (args.is_overwritten(0), args.is_overwritten(1)) {
        (true, _) => zip_onto(out, args.strided(1), f),
        (_, true) => zip_onto(out, args.strided(0), |o, a| f(a, o)),
        _ => {
            let ((a, a_layout), (b, b_layout)) = (args.strided::<T>(0), args.strided::<T>(1));
            if a_layout.is_contiguous() && b_layout.is_contiguous() {
                let blocks = a.pieces(BLOCK).zip(b.pieces(BLOCK));
                out.pieces_mut(BLOCK).zip(blocks).for_each(|(out, (a, b))| {
                    vectorize!(out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b)));
                });
                return;
            }
            let width = last_extent(a_layout);
            let rows = rows_per_task(width);
            out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
                for (row, out) in out.chunks_mut(width).enumerate() {
                    let (a, a_step) = row_of(a, a_layout, task * rows + row);
                    let (b, b_step) = row_of(b, b_layout, task * rows + row);
                    vectorize!(with_steps(out, a, a_step, b, b_step, &f));
                }
            });
        }
    }
}

/// out = f(out, b).
fn zip_onto<T: Float>(out: &mut [T], (b, layout): (&[T], &Layout), f: impl Fn(T, T) -> T + Sync) {
    if layout.is_contiguous() {
        out.pieces_mut(BLOCK).zip(b.pieces(BLOCK)).for_each(|(out, b)| {
            vectorize!(out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(*o, b)));
        });
        return;
    }
    let width = last_extent(layout);
    let rows = rows_per_task(width);
    out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
        for (row, out) in out.chunks_mut(width).enumerate() {
            let (b, step) = row_of(b, layout, task * rows + row);
            vectorize!(match step {
                1 => out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(*o, b)),
                _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = f(*o, b[i * step])),
            });
        }
    });
}

#[inline(always)]
fn with_steps<T: Float>(out: &mut [T], a: &[T], a_step: usize, b: &[T], b_step: usize, f: &impl Fn(T, T) -> T) {
    match (a_step, b_step) {
        (1, 1) => out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b)),
        (1, 0) => out.iter_mut().zip(a).for_each(|(o, &a)| *o = f(a, b[0])),
        (0, 1) => out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(a[0], b)),
        _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = f(a[i * a_step], b[i * b_step])),
    }
}

/// Extent of the last dimension; 1 for scalars.
pub fn last_extent(layout: &Layout) -> usize {
    layout.dims().last().copied().unwrap_or(1).max(1)
}

/// The storage from the start of row `row` (counted over all dimensions but the last), and the step along it.
pub fn row_of<'d, T>(data: &'d [T], layout: &Layout, mut row: usize) -> (&'d [T], usize) {
    let (Some((_, outer)), Some((&step, strides))) = (layout.dims().split_last(), layout.stride().split_last()) else {
        return (data, 0);
    };
    let mut start = 0;
    for (&dim, &stride) in outer.iter().zip(strides).rev() {
        start += (row % dim) * stride;
        row /= dim;
    }
    (&data[start..], step)
}
