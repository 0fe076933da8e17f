//! Vectorized loops over elements, in blocks of fixed size. The blocks do not depend on the number of threads.

use std::sync::LazyLock;

use candle_core::Layout;

use super::{Args, Float, InPieces, Pieces, with_float};

/// Number of elements per task: enough to outweigh the cost of starting a task, and few enough to stay in a core's
/// cache.
pub const BLOCK: usize = 16 * 1024;

/// Number of elements of a strided input that are copied at a time to make them contiguous.
const TILE: usize = 1024;

static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);

/// Returns the widest vector instruction set of this machine.
pub fn arch() -> pulp::Arch {
    *ARCH
}

/// Evaluates an expression, compiled for the widest vector instructions of this machine. This is a macro, because
/// only a closure that is always inlined is compiled for these instructions.
#[doc(hidden)]
#[macro_export]
macro_rules! vectorize {
    ($body:expr) => {{
        // Moving a capture makes the closure `FnOnce`. A closure that is not `FnOnce` is called through a shim, which
        // need not be inlined. The shim is compiled for the baseline instruction set, where each multiply-add is a call
        // of `fmaf`.
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

/// The value that [`vectorize`] moves into its closure.
#[doc(hidden)]
#[derive(Debug)]
pub struct CalledOnce;

/// Returns the number of rows of `width` elements in a task.
pub fn rows_per_task(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

/// Returns the number of columns in a task that adds up rows of `width` elements: whole cache lines of the sums, which stay
/// in the first-level cache. Of as many tasks as there are threads, each reads the longest pieces of rows.
pub fn columns_per_task(width: usize) -> usize {
    width.div_ceil(rayon::current_num_threads()).next_multiple_of(64).clamp(64, 1024)
}

/// Calls `f` for each row of a contiguous output, with the index of the row (along the last dimension of `layout`)
/// and the row's elements.
pub fn each_row<T: Send>(out: &mut [T], layout: &Layout, f: impl Fn(usize, &mut [T]) + Sync) {
    let width = last_extent(layout);
    let rows = rows_per_task(width);
    out.pieces_mut(rows * width).enumerate().for_each(|(task, out)| {
        out.chunks_mut(width).enumerate().for_each(|(row, out)| f(task * rows + row, out));
    });
}

/// Computes out = f(x), in f32 or bf16. The output may overwrite the input.
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

/// Computes out = f(a, b), in f32 or bf16. The inputs have equal shapes or broadcast strides, and the output may
/// overwrite one of them.
pub fn zip(args: &mut Args<'_>, f: impl Fn(f32, f32) -> f32 + Sync) {
    with_float!(args.output_dtype(0), T => {
        // Only these three loops are compiled for each f and type. The code around them is compiled once per type.
        let f = |a: T, b: T| T::store(f(a.load(), b.load()));
        zip_in::<T>(
            args,
            &|out, a, b| vectorize!(out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b))),
            &|out, b| vectorize!(out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(*o, b))),
            &|out, a| vectorize!(out.iter_mut().zip(a).for_each(|(o, &a)| *o = f(a, *o))),
        );
    });
}

/// out = f(a, b).
type Apart<'f, T> = dyn Fn(&mut [T], &[T], &[T]) + Sync + 'f;
/// A function out = f(out, b) or out = f(a, out), of the output and the other input.
type Onto<'f, T> = dyn Fn(&mut [T], &[T]) + Sync + 'f;

fn zip_in<T: Float>(args: &mut Args<'_>, apart: &Apart<'_, T>, onto_a: &Onto<'_, T>, onto_b: &Onto<'_, T>) {
    let out = args.output::<T>(0);
    match [0, 1].map(|input| (!args.is_overwritten(input)).then(|| args.strided::<T>(input))) {
        [Some(a), Some(b)] => in_tiles(out, [a, b], |out, [a, b]| apart(out, a, b)),
        [None, Some(b)] => in_tiles(out, [b], |out, [b]| onto_a(out, b)),
        [Some(a), None] => in_tiles(out, [a], |out, [a]| onto_b(out, a)),
        [None, None] => unreachable!("an output overwrites one input at most"),
    }
}

/// Calls `f` with pieces of a contiguous output, and the elements of each input at the same indices. If an input is
/// not contiguous, its elements are copied first.
fn in_tiles<T: Float, const N: usize>(
    out: &mut [T],
    inputs: [(&[T], &Layout); N],
    f: impl Fn(&mut [T], [&[T]; N]) + Sync,
) {
    let inputs = inputs.map(|(data, layout)| (data, (!layout.is_contiguous()).then_some(layout)));
    let Some(width) = inputs.iter().find_map(|(_, layout)| layout.map(last_extent)) else {
        out.pieces_mut(BLOCK).enumerate().for_each(|(task, out)| {
            f(out, inputs.map(|(data, _)| &data[task * BLOCK..][..out.len()]));
        });
        return;
    };
    // A tile has as many narrow rows as fit.
    let rows_per_tile = (TILE / width).max(1);
    let tiles = rows_per_task(rows_per_tile * width);
    out.pieces_mut(tiles * rows_per_tile * width).enumerate().for_each(|(task, out)| {
        let mut copies = [[T::store(0.0); TILE]; N];
        for (i, out) in out.chunks_mut(rows_per_tile * width).enumerate() {
            let row = (task * tiles + i) * rows_per_tile;
            for (column, out) in (0..).step_by(TILE).zip(out.chunks_mut(TILE)) {
                let mut copies = copies.iter_mut();
                f(
                    out,
                    inputs.map(|(data, layout)| {
                        let copy = copies.next().expect("one for each input");
                        match layout {
                            None => &data[row * width + column..][..out.len()],
                            Some(layout) => side_by_side(data, layout, row, column, out.len(), copy),
                        }
                    }),
                );
            }
        }
    });
}

/// Returns `len` elements of a tensor from (`row`, `column`) on. If these elements are contiguous, returns a part of
/// the tensor's storage; otherwise returns a copy of them.
fn side_by_side<'t, T: Copy>(
    data: &'t [T],
    layout: &Layout,
    mut row: usize,
    mut column: usize,
    len: usize,
    copy: &'t mut [T; TILE],
) -> &'t [T] {
    let width = last_extent(layout);
    let mut copied = 0;
    while copied < len {
        let (data, step) = row_of(data, layout, row);
        let to = &mut copy[copied..len.min(copied + width - column)];
        let n = to.len();
        match step {
            1 if n == len => return &data[column..][..len],
            0 => to.fill(data[0]),
            1 => to.copy_from_slice(&data[column..][..n]),
            _ => to.iter_mut().zip(column..).for_each(|(to, i)| *to = data[i * step]),
        }
        (row, column, copied) = (row + 1, 0, copied + n);
    }
    &copy[..len]
}

/// Returns the extent of the last dimension, or 1 for scalars.
pub fn last_extent(layout: &Layout) -> usize {
    layout.dims().last().copied().unwrap_or(1).max(1)
}

/// Returns the storage from the start of row `row` on, and the stride along the row. Rows are counted over all
/// dimensions but the last.
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

/// Copies row `row` of a tensor (see [`row_of`]) to `out`, which has as many elements.
pub fn copy_row<T: Copy>(data: &[T], layout: &Layout, row: usize, out: &mut [T]) {
    match row_of(data, layout, row) {
        (x, 1) => out.copy_from_slice(&x[..out.len()]),
        (x, step) => out.iter_mut().enumerate().for_each(|(i, o)| *o = x[i * step]),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Shape;

    use super::*;

    /// Covers rows that are narrower and wider than a tile, in tasks that may end in the middle of a row.
    #[test]
    fn pieces_have_what_their_layouts_show() {
        for dims in [vec![], vec![1], vec![0, 3], vec![TILE], vec![3, 2 * TILE + 9], vec![5000, 7], vec![40, 3, 600]] {
            let shape = Shape::from(dims);
            let dense = Layout::contiguous(&shape);
            let [count, width, rank] = [shape.elem_count(), last_extent(&dense), shape.rank()];
            let strided = |strides| Layout::new(shape.clone(), strides, 0);
            let of_columns = strided((0..rank).map(|dim| usize::from(dim + 1 == rank)).collect());
            let of_rows = strided(dense.stride().iter().map(|&stride| stride / width).collect());
            let every_third = strided(dense.stride().iter().map(|stride| 3 * stride).collect());
            let with_gaps =
                strided(dense.stride().iter().map(|&s| if s == 1 { 1 } else { s / width * (width + 3) }).collect());
            let reversed =
                strided(shape.dims().iter().scan(1, |next, dim| Some(std::mem::replace(next, *next * dim))).collect());
            let layouts = [dense, of_columns, of_rows, every_third, with_gaps, reversed];
            let data: Vec<f32> = (0..4 * count).map(|i| i as f32).collect();
            let place = |mut i: usize, layout: &Layout| {
                let mut place = 0;
                for (dim, stride) in layout.dims().iter().zip(layout.stride()).rev() {
                    place += i % dim * stride;
                    i /= dim;
                }
                place
            };
            let shown = |layout: &Layout| (0..count).map(|i| data[place(i, layout)]).collect::<Vec<f32>>();
            for a in &layouts {
                let mut out = vec![-1.0; count];
                in_tiles(&mut out, [(&data, a)], |out, [a]| out.copy_from_slice(a));
                assert_eq!(out, shown(a), "{a:?}");
                for b in &layouts {
                    let mut out = vec![-1.0; count];
                    in_tiles(&mut out, [(&data, a), (&data, b)], |out, [a, b]| {
                        out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (a, b))| *o = a - 2.0 * b);
                    });
                    let expected: Vec<f32> = shown(a).iter().zip(shown(b)).map(|(a, b)| a - 2.0 * b).collect();
                    assert_eq!(out, expected, "{a:?}, {b:?}");
                }
            }
        }
    }
}
