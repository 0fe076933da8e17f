//! Comparisons, and selection by masks and indices.

use candle_core::WithDType;
use candle_core::shape::Dim;

use super::Tensor;
use crate::error::Result;
use crate::graph::lock;
use crate::ops::{self, Comparison};

/// A tensor, or a number for all of its elements.
pub trait TensorOrScalar {
    /// Returns the tensor. A number becomes a constant with the shape and type of `like`.
    fn beside(self, like: &Tensor) -> Tensor;
}

impl TensorOrScalar for &Tensor {
    fn beside(self, _: &Tensor) -> Tensor {
        self.clone()
    }
}

impl<T: WithDType> TensorOrScalar for T {
    fn beside(self, like: &Tensor) -> Tensor {
        like.graph.constant(self.to_f64(), like.spec().clone())
    }
}

macro_rules! comparisons {
    ($($name:ident, $broadcast:ident => $kind:ident, $sign:literal;)*) => {
        /// Comparisons. They return a mask (u8) that is 1 where the comparison holds and 0 elsewhere. A mask has no
        /// gradient.
        impl Tensor {
            $(#[doc = concat!("self ", $sign, " rhs, a number or a tensor of this shape.")]
            ///
            /// # Errors
            /// Returns an error if the shapes or types differ.
            pub fn $name<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
                let op = ops::Compare { comparison: Comparison::$kind };
                Self::apply_op::<1>(op, &[self, &rhs.beside(self)]).map(|[mask]| mask)
            }

            #[doc = concat!("self ", $sign, " rhs, for shapes that broadcast.")]
            ///
            /// # Errors
            /// Returns an error if the shapes do not broadcast, or the types differ.
            pub fn $broadcast(&self, rhs: &Self) -> Result<Self> {
                let shape = self.shape().broadcast_shape_binary_op(rhs.shape(), stringify!($name))?;
                self.broadcast_as(shape.clone())?.$name(&rhs.broadcast_as(shape)?)
            })*
        }
    };
}

comparisons! {
    eq, broadcast_eq => Equal, "=";
    ne, broadcast_ne => Unequal, "≠";
    lt, broadcast_lt => Less, "<";
    le, broadcast_le => AtMost, "≤";
    gt, broadcast_gt => Greater, ">";
    ge, broadcast_ge => AtLeast, "≥";
}

/// Maximum and minimum of two tensors. Where the two elements are equal, the first tensor gets the gradient. (candle
/// divides the gradient between both tensors.)
impl Tensor {
    /// The greater element of each pair.
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn maximum<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
        self.binary(&rhs.beside(self), ops::BinaryKind::Maximum)
    }

    /// The lesser element of each pair.
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn minimum<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
        self.binary(&rhs.beside(self), ops::BinaryKind::Minimum)
    }

    /// The greater element of each pair, for shapes that broadcast.
    ///
    /// # Errors
    /// Returns an error if the shapes do not broadcast.
    pub fn broadcast_maximum(&self, rhs: &Self) -> Result<Self> {
        self.broadcast_binary(rhs, ops::BinaryKind::Maximum)
    }

    /// The lesser element of each pair, for shapes that broadcast.
    ///
    /// # Errors
    /// Returns an error if the shapes do not broadcast.
    pub fn broadcast_minimum(&self, rhs: &Self) -> Result<Self> {
        self.broadcast_binary(rhs, ops::BinaryKind::Minimum)
    }

    /// Limits elements to the range from `min` to `max`.
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn clamp<T1: TensorOrScalar, T2: TensorOrScalar>(&self, min: T1, max: T2) -> Result<Self> {
        self.maximum(min)?.minimum(max)
    }
}

/// Selection by masks.
impl Tensor {
    /// Selects `on_true` where this mask (u8 or u32) is not 0, `on_false` elsewhere.
    ///
    /// # Errors
    /// Returns an error if the shapes differ, or if this tensor is not a mask.
    pub fn where_cond(&self, on_true: &Self, on_false: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::Where, &[self, on_true, on_false]).map(|[chosen]| chosen)
    }

    /// Replaces elements of this tensor by `number` where `mask` is not 0. The mask is u8 or u32, and broadcasts to the
    /// shape of this tensor.
    ///
    /// # Errors
    /// Returns an error if the mask's shape does not broadcast to the shape of this tensor.
    pub fn masked_fill<T: WithDType>(&self, mask: &Self, number: T) -> Result<Self> {
        mask.broadcast_as(self.shape().clone())?.where_cond(&number.beside(self), self)
    }
}

/// Selection by indices (u32).
impl Tensor {
    /// Selects elements along `dim` by `ids`. The result has the shape of `ids`. `ids` and this tensor have the same
    /// extents except along `dim`. If an id is out of range, the selected element is NaN.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the ids are known when the model is recorded and one of them is
    /// out of range.
    pub fn gather<D: Dim>(&self, ids: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "gather")?;
        self.expect_inside(ids, dim, "gather")?;
        Self::apply_op::<1>(ops::Gather { dim }, &[self, ids]).map(|[out]| out)
    }

    /// Returns a copy of this tensor to which each element of `source` is added. `ids`, which has the shape of
    /// `source`, gives the index along `dim` at which each element is added.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the ids are known when the model is recorded and one of them is
    /// out of range.
    pub fn scatter_add<D: Dim>(&self, ids: &Self, source: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "scatter_add")?;
        self.expect_inside(ids, dim, "scatter_add")?;
        let [added] = Self::apply_op(ops::ScatterAdd { dim, extent: self.dims()[dim] }, &[ids, source])?;
        self.add(&added)
    }

    /// Selects slices along `dim` by their indices `ids`, a vector.
    ///
    /// # Errors
    /// Returns an error if `ids` is not a vector of u32, or if the ids are known when the model is recorded and one of
    /// them is out of range.
    pub fn index_select<D: Dim>(&self, ids: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "index_select")?;
        ids.dims1()?;
        self.expect_inside(ids, dim, "index_select")?;
        // `dim` is moved to the front and the other dimensions are flattened, so that an embedding lookup can select
        // the slices.
        let front = self.transpose(0, dim)?;
        let rows = front.reshape((self.dims()[dim], self.elem_count() / self.dims()[dim].max(1)))?.embedding(ids)?;
        let mut dims = front.dims().to_vec();
        dims[0] = ids.elem_count();
        rows.reshape(dims)?.transpose(0, dim)
    }

    /// Returns a copy of this tensor to which the slices of `source` along `dim` are added. The vector `ids` gives the
    /// index of the slice to which each one is added.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the ids are known when the model is recorded and one of them is
    /// out of range.
    pub fn index_add<D: Dim>(&self, ids: &Self, source: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "index_add")?;
        let mut dims = vec![1; self.rank()];
        dims[dim] = ids.dims1()?;
        self.scatter_add(&ids.reshape(dims)?.broadcast_as(source.shape().clone())?, source, dim)
    }

    /// Checks that `ids` are in range, if their values are known when the model is recorded.
    pub(super) fn expect_inside(&self, ids: &Self, dim: usize, op: &str) -> Result<()> {
        let extent = self.dims()[dim];
        let known = lock(&self.graph).data(ids.id()).unwrap_or_default();
        match known.into_iter().find(|&id| id >= extent as f64) {
            Some(id) => Err(self.shape_error(op, format!("id {id} is outside dimension {dim} of extent {extent}"))),
            None => Ok(()),
        }
    }
}
