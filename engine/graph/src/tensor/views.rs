//! Views, and operations composed of them.

use candle_core::shape::{Dim, Dims, ShapeWithOneHole};
use candle_core::{D as Last, Shape};

use super::Tensor;
use crate::error::{Error, Result};
use crate::graph::lock;
use crate::ops;

/// Views, which move no data, and operations composed of them.
impl Tensor {
    /// Returns the same elements in another shape. One extent may be `()`. It is then computed from the number of
    /// elements and the other extents. The elements are copied if the strides do not allow a view.
    ///
    /// # Errors
    /// Returns an error if the numbers of elements differ.
    pub fn reshape(&self, shape: impl ShapeWithOneHole) -> Result<Self> {
        let shape = shape.into_shape(self.elem_count())?;
        self.apply1(ops::Reshape { shape })
    }

    /// Swaps two dimensions.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn transpose<D1: Dim, D2: Dim>(&self, dim1: D1, dim2: D2) -> Result<Self> {
        let dim1 = dim1.to_index(self.shape(), "transpose")?;
        let dim2 = dim2.to_index(self.shape(), "transpose")?;
        self.apply1(ops::Transpose { dim1, dim2 })
    }

    /// Swaps the last two dimensions.
    ///
    /// # Errors
    /// Returns an error if the rank is below 2.
    pub fn t(&self) -> Result<Self> {
        self.transpose(Last::Minus2, Last::Minus1)
    }

    /// Selects `len` indices of one dimension, from `start` on.
    ///
    /// # Errors
    /// Returns an error if the range exceeds the dimension.
    pub fn narrow<D: Dim>(&self, dim: D, start: usize, len: usize) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "narrow")?;
        if start == 0 && len == self.dims()[dim] {
            return Ok(self.clone());
        }
        self.apply1(ops::Narrow { dim, start, len })
    }

    /// Divides one dimension into `chunks` parts of equal extent. If the extent is not a multiple of `chunks`, the
    /// first parts are longer by one. If the extent is smaller than `chunks`, each part has extent 1 and there are
    /// fewer parts.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension, or if `chunks` is 0.
    pub fn chunk<D: Dim>(&self, chunks: usize, dim: D) -> Result<Vec<Self>> {
        let dim = dim.to_index(self.shape(), "chunk")?;
        let extent = self.dims()[dim];
        if chunks == 0 {
            return Err(self.shape_error("chunk", "the number of parts must be at least 1".into()));
        }
        let chunks = chunks.min(extent);
        let sizes: Vec<usize> = (0..chunks).map(|i| extent / chunks + usize::from(i < extent % chunks)).collect();
        self.split(&sizes, dim)
    }

    /// Divides one dimension into parts of the given sizes.
    ///
    /// # Errors
    /// Returns an error if the sizes do not add up to the dimension's extent.
    pub fn split<D: Dim>(&self, sizes: &[usize], dim: D) -> Result<Vec<Self>> {
        let dim = dim.to_index(self.shape(), "split")?;
        if sizes.iter().sum::<usize>() != self.dims()[dim] {
            return Err(self.shape_error("split", format!("parts of {sizes:?} do not add up to dimension {dim}")));
        }
        let starts = sizes.iter().scan(0, |end, size| Some(std::mem::replace(end, *end + size)));
        starts.zip(sizes).map(|(start, &size)| self.narrow(dim, start, size)).collect()
    }

    /// Reorders the dimensions: dimension `dims[i]` becomes dimension i.
    ///
    /// # Errors
    /// Returns an error unless `dims` names every dimension exactly once.
    pub fn permute<D: Dims>(&self, dims: D) -> Result<Self> {
        let dims = dims.to_indexes(self.shape(), "permute")?;
        if dims.len() != self.rank() || (0..dims.len()).any(|dim| !dims.contains(&dim)) {
            return Err(self.shape_error("permute", format!("{dims:?} does not name every dimension once")));
        }
        // One dimension is moved at a time. `at[i]` is the original dimension that is now at position i.
        let mut at: Vec<usize> = (0..dims.len()).collect();
        let mut permuted = self.clone();
        for (to, dim) in dims.into_iter().enumerate() {
            let from = at.iter().position(|&d| d == dim).expect("every dimension stands somewhere");
            if from != to {
                permuted = permuted.transpose(from, to)?;
                at.swap(from, to);
            }
        }
        Ok(permuted)
    }

    /// Merges the dimensions from `start` to `end`, including both.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn flatten<D1: Dim, D2: Dim>(&self, start: D1, end: D2) -> Result<Self> {
        let (start, end) = (start.to_index(self.shape(), "flatten")?, end.to_index(self.shape(), "flatten")?);
        if start >= end {
            return Ok(self.clone());
        }
        let (dims, merged) = (self.dims(), self.dims()[start..=end].iter().product());
        self.reshape([&dims[..start], &[merged], &dims[end + 1..]].concat())
    }

    /// Merges the dimensions from 0 to `end`, including both.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn flatten_to<D: Dim>(&self, end: D) -> Result<Self> {
        self.flatten(0, end)
    }

    /// Merges the dimensions from `start` on.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn flatten_from<D: Dim>(&self, start: D) -> Result<Self> {
        self.flatten(start, Last::Minus1)
    }

    /// Merges all dimensions.
    ///
    /// # Errors
    /// Never returns an error; the signature is candle's.
    pub fn flatten_all(&self) -> Result<Self> {
        self.reshape(self.elem_count())
    }

    /// The same as [`Self::broadcast_as`].
    ///
    /// # Errors
    /// Returns an error if the shapes do not broadcast.
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Self> {
        self.broadcast_as(shape)
    }

    /// Repeats the tensor along new leading dimensions, without copying.
    ///
    /// # Errors
    /// Returns an error if the new shape is too large.
    pub fn broadcast_left(&self, left: impl Into<Shape>) -> Result<Self> {
        self.broadcast_as([left.into().dims(), self.dims()].concat())
    }

    /// Copies the tensor several times along each dimension. The entries of `shape` are the numbers of copies. If
    /// `shape` has more entries than the tensor has dimensions, leading dimensions are added.
    ///
    /// # Errors
    /// Returns an error if the new shape is too large.
    pub fn repeat(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let added = shape.rank().saturating_sub(self.rank());
        let mut repeated = self.reshape([&vec![1; added], self.dims()].concat())?;
        for (dim, &times) in shape.dims().iter().enumerate().filter(|&(_, &times)| times != 1) {
            let mut dims = repeated.dims().to_vec();
            dims.insert(dim, times);
            repeated = repeated.unsqueeze(dim)?.broadcast_as(dims)?.flatten(dim, dim + 1)?;
        }
        Ok(repeated)
    }

    /// Concatenates tensors along one dimension.
    ///
    /// # Errors
    /// Returns an error if the tensors differ in the extent of another dimension.
    pub fn cat<A: AsRef<Self>, D: Dim>(tensors: &[A], dim: D) -> Result<Self> {
        let tensors: Vec<&Self> = tensors.iter().map(AsRef::as_ref).collect();
        let first = tensors.first().ok_or_else(|| Error::Shape {
            op: "cat".into(),
            layer: String::new(),
            what: "there are no tensors to join".into(),
            shapes: vec![],
        })?;
        let dim = dim.to_index(first.shape(), "cat")?;
        if tensors.len() == 1 {
            return Ok((*first).clone());
        }
        Self::apply_op::<1>(ops::Cat { dim }, &tensors).map(|[out]| out)
    }

    /// Concatenates tensors of the same shape along a new dimension.
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn stack<A: AsRef<Self>, D: Dim + Copy>(tensors: &[A], dim: D) -> Result<Self> {
        let slices = tensors.iter().map(|tensor| tensor.as_ref().unsqueeze(dim)).collect::<Result<Vec<_>>>()?;
        let Some(first) = slices.first() else { return Self::cat(&slices, 0) };
        let dim = dim.to_index_plus_one(tensors[0].as_ref().shape(), "stack")?;
        debug_assert!(dim < first.rank(), "the new dimension is there");
        Self::cat(&slices, dim)
    }

    /// Adds `left` zeros before and `right` zeros after the indices of a dimension.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn pad_with_zeros<D: Dim>(&self, dim: D, left: usize, right: usize) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "pad_with_zeros")?;
        if left + right == 0 {
            return Ok(self.clone());
        }
        self.apply1(ops::Widen { dim, start: left, extent: left + self.dims()[dim] + right })
    }

    /// Shifts the indices of one dimension by `shift`, cyclically.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn roll<D: Dim>(&self, shift: i32, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "roll")?;
        let extent = self.dims()[dim];
        let shift = (i64::from(shift)).rem_euclid(extent.max(1) as i64) as usize;
        if shift == 0 {
            return Ok(self.clone());
        }
        let [front, back] = [self.narrow(dim, 0, extent - shift)?, self.narrow(dim, extent - shift, shift)?];
        Self::cat(&[back, front], dim)
    }

    /// Repeats dimensions of extent 1, and adds leading dimensions, without copying.
    ///
    /// # Errors
    /// Returns an error if the shapes do not broadcast.
    pub fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if &shape == self.shape() {
            return Ok(self.clone());
        }
        self.apply1(ops::BroadcastAs { shape })
    }

    /// Inserts a dimension of extent 1.
    ///
    /// # Errors
    /// Returns an error if there is no such position.
    pub fn unsqueeze<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index_plus_one(self.shape(), "unsqueeze")?;
        let mut dims = self.dims().to_vec();
        dims.insert(dim, 1);
        self.reshape(dims)
    }

    /// Removes a dimension if its extent is 1. If its extent is larger, returns the tensor itself.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn squeeze<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "squeeze")?;
        let mut dims = self.dims().to_vec();
        if dims[dim] != 1 {
            return Ok(self.clone());
        }
        dims.remove(dim);
        self.reshape(dims)
    }

    pub(super) fn shape_error(&self, op: &str, what: String) -> Error {
        let layer = lock(&self.graph).layer().to_string();
        Error::Shape { op: op.into(), layer, what, shapes: vec![self.shape().clone()] }
    }
}
