//! Slices in pieces, each of which is a task.
//!
//! They read as rayon's parallel iterators of chunks do. Those are compiled, with all of their splitting and waiting, once for
//! each chain and closure; of these only what a task does is, and one loop of [`tasks::spread`] hands them all out.

use std::marker::PhantomData;

use super::tasks;

/// Slices that are cut into pieces of so many elements; the last may be shorter.
pub trait InPieces<T> {
    /// Pieces to read.
    ///
    /// # Panics
    /// For pieces of no elements.
    fn pieces(&self, size: usize) -> Shared<'_, T>;

    /// Pieces to write.
    ///
    /// # Panics
    /// For pieces of no elements.
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

/// The pieces of one slice, or of several side by side.
pub trait Pieces: Sync + Sized {
    /// What one task is given.
    type Piece;

    /// How many there are.
    fn count(&self) -> usize;

    /// One of them.
    ///
    /// # Safety
    /// `index` is below [`Self::count`], and is asked for once.
    unsafe fn piece(&self, index: usize) -> Self::Piece;

    /// Each piece with that of `other` at the same place; as many as the shorter has.
    fn zip<O: Pieces>(self, other: O) -> Zip<Self, O> {
        Zip(self, other)
    }

    /// Each piece with its number.
    fn enumerate(self) -> Enumerate<Self> {
        Enumerate(self)
    }

    /// Runs `task` for every piece, on all threads, without allocating.
    fn for_each(self, task: impl Fn(Self::Piece) + Sync) {
        self.for_each_in_runs(1, task);
    }

    /// The same where a piece is little work: no thread takes fewer than `least` in a row.
    fn for_each_in_runs(self, least: usize, task: impl Fn(Self::Piece) + Sync) {
        // SAFETY: `spread` calls with every number below the count, once.
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

/// Pieces that may not be there, of as many tasks as the others have.
impl<P: Pieces> Pieces for Option<P> {
    type Piece = Option<P::Piece>;

    fn count(&self) -> usize {
        self.as_ref().map_or(usize::MAX, P::count)
    }

    unsafe fn piece(&self, index: usize) -> Self::Piece {
        // SAFETY: by the contract.
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

// SAFETY: a piece is handed out once, so that no element is reached from two threads.
unsafe impl<T: Send> Sync for Exclusive<'_, T> {}

impl<'a, T: Send> Pieces for Exclusive<'a, T> {
    type Piece = &'a mut [T];

    fn count(&self) -> usize {
        self.len.div_ceil(self.size)
    }

    unsafe fn piece(&self, index: usize) -> &'a mut [T] {
        let start = index * self.size;
        assert!(start < self.len, "piece {index} of {}", self.count());
        // SAFETY: inside the slice, which is borrowed for 'a; pieces do not overlap, and by the contract each is made once.
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
        // SAFETY: below both counts, and once each.
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
        // SAFETY: by the contract.
        (index, unsafe { self.0.piece(index) })
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// As the standard library's chunks, on one thread and on three.
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
