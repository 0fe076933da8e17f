//! Loops over elements: cut into blocks of fixed size (never by the number of threads), each vectorised.

use std::sync::LazyLock;

use candle_core::Layout;

use super::{Args, Float, InPieces, Pieces, with_float};

/// Elements per task: big enough to outweigh the hand-over, small enough to stay in a core's cache.
pub const BLOCK: usize = 16 * 1024;

/// Elements of a row that are copied at a time to lie side by side.
const TILE: usize = 256;

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
    with_float!(args.output_dtype(0), T => {
        // Two loops for each f. What is around them, for layouts and overwritten inputs, is compiled once.
        let f = |a: T, b: T| T::store(f(a.load(), b.load()));
        zip_in::<T>(
            args,
            &|out, a, b| vectorize!(out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b))),
            &|out, b| vectorize!(out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(*o, b))),
        );
    });
}

/// out = f(a, b).
type Apart<'f, T> = dyn Fn(&mut [T], &[T], &[T]) + Sync + 'f;
/// out = f(out, b).
type InPlace<'f, T> = dyn Fn(&mut [T], &[T]) + Sync + 'f;

fn zip_in<T: Float>(args: &mut Args<'_>, apart: &Apart<'_, T>, in_place: &InPlace<'_, T>) {
    let out = args.output::<T>(0);
    let sides = [0, 1].map(|input| (!args.is_overwritten(input)).then(|| args.strided::<T>(input)));
    let mut layouts = sides.iter().flatten().map(|&(_, layout)| layout);
    let is_dense = layouts.clone().all(Layout::is_contiguous);
    // Each has the output's shape.
    let width = if is_dense { BLOCK } else { layouts.next().map_or(1, last_extent) };
    let rows = rows_per_task(width);
    out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
        for (row, out) in out.chunks_mut(width).enumerate() {
            let row = task * rows + row;
            let sides = sides.map(|side| {
                side.map(|(data, layout)| match is_dense {
                    true => (&data[row * width..], 1),
                    false => row_of(data, layout, row),
                })
            });
            match sides {
                [Some((a, 1)), Some((b, 1))] => apart(out, a, b),
                [None, Some((b, 1))] => in_place(out, b),
                [a, b] => zip_in_tiles(out, a, b, apart, in_place),
            }
        }
    });
}

/// A row whose inputs, each with its step, do not all lie side by side, or of which the second is overwritten.
fn zip_in_tiles<T: Float>(
    out: &mut [T],
    a: Option<(&[T], usize)>,
    b: Option<(&[T], usize)>,
    apart: &Apart<'_, T>,
    in_place: &InPlace<'_, T>,
) {
    let mut copies = [[T::store(0.0); TILE]; 2];
    for (start, out) in (0..).step_by(TILE).zip(out.chunks_mut(TILE)) {
        let [a_copy, b_copy] = copies.each_mut().map(|copy| &mut copy[..out.len()]);
        let b = match b {
            Some((b, step)) => tile(b, start, step, b_copy),
            None => {
                b_copy.copy_from_slice(out);
                b_copy
            }
        };
        match a {
            Some((a, step)) => apart(out, tile(a, start, step, a_copy), b),
            None => in_place(out, b),
        }
    }
}

/// As many elements as `copy` has, every `step`th from the `start`th on: where they lie, or copied.
fn tile<'t, T: Copy>(data: &'t [T], start: usize, step: usize, copy: &'t mut [T]) -> &'t [T] {
    match step {
        0 => copy.fill(data[0]),
        1 => return &data[start..][..copy.len()],
        _ => copy.iter_mut().zip(start..).for_each(|(to, i)| *to = data[i * step]),
    }
    copy
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
