//! Slicing with `i`: `x.i((.., 0, 2..))`.

use std::ops::{Bound, Range, RangeBounds, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use super::Tensor;
use crate::error::Result;

/// The selection of indices of one dimension.
#[derive(Debug, Clone)]
pub enum TensorIndexer {
    /// One index; the dimension is removed.
    Select(usize),
    /// A range of indices.
    Narrow(Bound<usize>, Bound<usize>),
    /// The indices given by a vector (u32).
    IndexSelect(Tensor),
}

impl From<usize> for TensorIndexer {
    fn from(index: usize) -> Self {
        Self::Select(index)
    }
}

impl From<&Tensor> for TensorIndexer {
    fn from(ids: &Tensor) -> Self {
        Self::IndexSelect(ids.clone())
    }
}

macro_rules! ranges {
    ($($range:ty),*) => {
        $(impl From<$range> for TensorIndexer {
            fn from(range: $range) -> Self {
                Self::Narrow(range.start_bound().cloned(), range.end_bound().cloned())
            }
        })*
    };
}

ranges!(Range<usize>, RangeFrom<usize>, RangeFull, RangeInclusive<usize>, RangeTo<usize>, RangeToInclusive<usize>);

/// Slicing by indices and ranges, like candle's trait of this name.
pub trait IndexOp<T> {
    /// Returns the elements that `index` selects from the first dimensions.
    ///
    /// # Errors
    /// Returns an error if an index is out of range, or if there are fewer dimensions than indices.
    fn i(&self, index: T) -> Result<Tensor>;
}

impl<T: Into<TensorIndexer>> IndexOp<T> for Tensor {
    fn i(&self, index: T) -> Result<Tensor> {
        self.slice([index.into()])
    }
}

macro_rules! tuples {
    ($(($($type:ident $name:ident),*);)*) => {
        $(impl<$($type: Into<TensorIndexer>),*> IndexOp<($($type,)*)> for Tensor {
            fn i(&self, ($($name,)*): ($($type,)*)) -> Result<Tensor> {
                self.slice([$($name.into()),*])
            }
        })*
    };
}

tuples! {
    (A a);
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
    (A a, B b, C c, D d, E e);
}

impl Tensor {
    fn slice<const N: usize>(&self, indexers: [TensorIndexer; N]) -> Result<Self> {
        if N > self.rank() {
            return Err(self.shape_error("i", format!("there are {N} indices for {} dimensions", self.rank())));
        }
        let (mut slice, mut dim) = (self.clone(), 0);
        for indexer in indexers {
            let (start, end) = match indexer {
                TensorIndexer::Select(index) => {
                    slice = slice.get_on_dim(dim, index)?;
                    continue;
                }
                TensorIndexer::IndexSelect(ids) => {
                    slice = slice.index_select(&ids, dim)?;
                    dim += 1;
                    continue;
                }
                TensorIndexer::Narrow(start, end) => (start, end),
            };
            let start = match start {
                Bound::Included(start) => start,
                Bound::Excluded(start) => start.saturating_add(1),
                Bound::Unbounded => 0,
            };
            let end = match end {
                Bound::Included(end) => end.saturating_add(1),
                Bound::Excluded(end) => end,
                Bound::Unbounded => slice.dims()[dim],
            };
            slice = slice.narrow(dim, start, end.saturating_sub(start))?;
            dim += 1;
        }
        Ok(slice)
    }

    /// Selects one index of the first dimension, and removes that dimension.
    ///
    /// # Errors
    /// Returns an error if the index is out of range.
    pub fn get(&self, index: usize) -> Result<Self> {
        self.get_on_dim(0, index)
    }

    /// Selects one index of a dimension, and removes that dimension.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension or index.
    pub fn get_on_dim<D: candle_core::shape::Dim>(&self, dim: D, index: usize) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "get")?;
        self.narrow(dim, index, 1)?.squeeze(dim)
    }
}
