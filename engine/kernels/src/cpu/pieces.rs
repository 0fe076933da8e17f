//! Slices that are cut into pieces, each of which is the argument of a task.
//!
//! The interface is similar to rayon's parallel iterators over chunks. With rayon, the code for splitting and waiting
//! is compiled anew for each chain of adapters and each closure. Here only the task itself is generic, and one loop,
//! [`tasks::spread`], distributes the tasks of all kernels.

use std::marker::PhantomData;

use super::tasks;

/// A slice that can be cut into pieces of `size` elements; the last one may be shorter.
pub trait InPieces<T> {
    /// Cuts the slice into pieces that tasks read.
    ///
    /// # Panics
    /// Panics if `size` is 0.
    fn pieces(&self, size: usize) -> Shared<'_, T>;

    /// Cuts the slice into pieces that tasks write.
    ///
    /// # Panics
    /// Panics if `size` is 0.
    fn pieces_mut(&mut self, size: usize) -> Exclusive<'_, T>;
}

impl<T> InPieces<T> for [T] {
    fn pieces(&self, size: usize) -> Shared<'_, T> {
        assert!(size > 0, "pieces have elements");
        Shared { slice: self, size }
    }

    fn pieces_mut(&mut self, size: usize) -> Exclusive<'_, T> {
        assert!(size > 0, "pieces have elements");
        Exclusive { start: self.as_mut_ptr(), len: self.len(), size, slice: PhantomData }
    }
}

/// The pieces of one slice, or of several slices in parallel.
pub trait Pieces: Sync + Sized {
    /// The argument that one task receives.
    type Piece;

    /// The number of pieces.
    fn count(&self) -> usize;

    /// Returns one piece.
    ///
    /// # Safety
    /// `index` must be below [`Self::count`], and each index may be used only once.
    unsafe fn piece(&self, index: usize) -> Self::Piece;

    /// Pairs each piece with the piece of `other` at the same index, up to the shorter of the two.
    fn zip<O: Pieces>(self, other: O) -> Zip<Self, O> {
        Zip(self, other)
    }

    /// Pairs each piece with its index.
    fn enumerate(self) -> Enumerate<Self> {
        Enumerate(self)
    }

    /// Runs `task` for every piece, on all threads, without allocating.
    fn for_each(self, task: impl Fn(Self::Piece) + Sync) {
        self.for_each_in_runs(1, task);
    }

    /// Like [`Self::for_each`], for small pieces: a thread takes at least `least` of them in a row.
    fn for_each_in_runs(self, least: usize, task: impl Fn(Self::Piece) + Sync) {
        // SAFETY: `spread` calls the closure once with every index below the count.
        tasks::spread(self.count(), least, &|index| task(unsafe { self.piece(index) }));
    }
}

/// See [`InPieces::pieces`].
pub struct Shared<'a, T> {
    slice: &'a [T],
    size: usize,
}

impl<'a, T: Sync> Pieces for Shared<'a, T> {
    type Piece = &'a [T];

    fn count(&self) -> usize {
        self.slice.len().div_ceil(self.size)
    }

    unsafe fn piece(&self, index: usize) -> &'a [T] {
        let start = index * self.size;
        &self.slice[start..self.slice.len().min(start + self.size)]
    }
}

/// Pieces of a slice that may be absent. If the slice is absent, each task gets `None`, and the slices with which it is
/// zipped determine the number of tasks.
impl<P: Pieces> Pieces for Option<P> {
    type Piece = Option<P::Piece>;

    fn count(&self) -> usize {
        self.as_ref().map_or(usize::MAX, P::count)
    }

    unsafe fn piece(&self, index: usize) -> Self::Piece {
        // SAFETY: by this function's contract.
        self.as_ref().map(|pieces| unsafe { pieces.piece(index) })
    }
}

/// See [`InPieces::pieces_mut`].
pub struct Exclusive<'a, T> {
    start: *mut T,
    len: usize,
    size: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: each piece is returned once, so no two threads access the same element.
unsafe impl<T: Send> Sync for Exclusive<'_, T> {}

impl<'a, T: Send> Pieces for Exclusive<'a, T> {
    type Piece = &'a mut [T];

    fn count(&self) -> usize {
        self.len.div_ceil(self.size)
    }

    unsafe fn piece(&self, index: usize) -> &'a mut [T] {
        let start = index * self.size;
        assert!(start < self.len, "piece {index} of {}", self.count());
        // SAFETY: the piece lies inside the slice, which is borrowed for 'a. Pieces do not overlap, and by this
        // function's contract each is returned once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), self.size.min(self.len - start)) }
    }
}

/// See [`Pieces::zip`].
pub struct Zip<A, B>(A, B);

impl<A: Pieces, B: Pieces> Pieces for Zip<A, B> {
    type Piece = (A::Piece, B::Piece);

    fn count(&self) -> usize {
        self.0.count().min(self.1.count())
    }

    unsafe fn piece(&self, index: usize) -> Self::Piece {
        // SAFETY: the index is below both counts, and used once in each.
        unsafe { (self.0.piece(index), self.1.piece(index)) }
    }
}

/// See [`Pieces::enumerate`].
pub struct Enumerate<A>(A);

impl<A: Pieces> Pieces for Enumerate<A> {
    type Piece = (usize, A::Piece);

    fn count(&self) -> usize {
        self.0.count()
    }

    unsafe fn piece(&self, index: usize) -> Self::Piece {
        // SAFETY: by this function's contract.
        (index, unsafe { self.0.piece(index) })
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// The pieces equal the chunks of the standard library, on one thread and on three.
        #[test]
        fn pieces_are_chunks(len in 0..200_usize, shorter in 0..200_usize, size in 1..40_usize, least in 1..9_usize) {
            let read: Vec<u32> = (0..shorter as u32).collect();
            let mut expected = vec![0; len];
            for (index, (out, x)) in expected.chunks_mut(size).zip(read.chunks(size)).enumerate() {
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x * 1000 + index as u32 + 1);
            }
            for threads in [1, 3] {
                let mut out = vec![0; len];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let cell = std::sync::Mutex::new(&mut out);
                pool.install(|| {
                    let mut out = cell.lock().unwrap();
                    out.pieces_mut(size).zip(read.pieces(size)).enumerate().for_each_in_runs(least, |(index, (out, x))| {
                        out.iter_mut().zip(x).for_each(|(out, x)| *out += x * 1000 + index as u32 + 1);
                    });
                });
                prop_assert_eq!(&out, &expected);
            }
        }
    }
}
