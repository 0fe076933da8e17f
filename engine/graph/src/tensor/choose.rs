//! Comparisons, and what is chosen by masks and indices.

use candle_core::WithDType;
use candle_core::shape::Dim;

use super::Tensor;
use crate::error::Result;
use crate::graph::lock;
use crate::ops::{self, Comparison};

/// A tensor, or a number for all of its elements.
pub trait TensorOrScalar {
    /// The tensor; of a number one of the shape and type of `like`.
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
        /// Masks (u8): 1 where it holds, 0 elsewhere. Not differentiable.
        impl Tensor {
            $(#[doc = concat!("self ", $sign, " rhs, a number or a tensor of this shape.")]
            ///
            /// # Errors
            /// When the shapes or types differ.
            pub fn $name<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
                let op = ops::Compare { comparison: Comparison::$kind };
                Self::apply_op::<1>(op, &[self, &rhs.beside(self)]).map(|[mask]| mask)
            }

            #[doc = concat!("self ", $sign, " rhs, for shapes that broadcast.")]
            ///
            /// # Errors
            /// When the shapes do not broadcast, or the types differ.
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

/// The greater or the lesser of two. Where they are equal, the gradient is the first one's; candle shares it.
impl Tensor {
    /// The greater of each pair.
    ///
    /// # Errors
    /// When the shapes differ.
    pub fn maximum<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
        self.binary(&rhs.beside(self), ops::BinaryKind::Maximum)
    }

    /// The lesser of each pair.
    ///
    /// # Errors
    /// When the shapes differ.
    pub fn minimum<T: TensorOrScalar>(&self, rhs: T) -> Result<Self> {
        self.binary(&rhs.beside(self), ops::BinaryKind::Minimum)
    }

    /// The greater of each pair, for shapes that broadcast.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    pub fn broadcast_maximum(&self, rhs: &Self) -> Result<Self> {
        self.broadcast_binary(rhs, ops::BinaryKind::Maximum)
    }

    /// The lesser of each pair, for shapes that broadcast.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    pub fn broadcast_minimum(&self, rhs: &Self) -> Result<Self> {
        self.broadcast_binary(rhs, ops::BinaryKind::Minimum)
    }

    /// Numbers below `min` become `min`, those above `max` become `max`.
    ///
    /// # Errors
    /// When the shapes differ.
    pub fn clamp<T1: TensorOrScalar, T2: TensorOrScalar>(&self, min: T1, max: T2) -> Result<Self> {
        self.maximum(min)?.minimum(max)
    }
}

/// Masks.
impl Tensor {
    /// `on_true` where this mask (u8 or u32) is not 0, `on_false` elsewhere.
    ///
    /// # Errors
    /// When the shapes differ, or this is no mask.
    pub fn where_cond(&self, on_true: &Self, on_false: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::Where, &[self, on_true, on_false]).map(|[chosen]| chosen)
    }

    /// The tensor with `number` where `mask` (u8 or u32, of a shape that broadcasts to this one's) is not 0.
    ///
    /// # Errors
    /// When the mask's shape does not broadcast.
    pub fn masked_fill<T: WithDType>(&self, mask: &Self, number: T) -> Result<Self> {
        mask.broadcast_as(self.shape().clone())?.where_cond(&number.beside(self), self)
    }
}

/// Indices (u32).
impl Tensor {
    /// Along `dim`, the elements that `ids` names: of the shape of `ids`, which is this one's but for that dimension. An id outside
    /// of it gives NaN.
    ///
    /// # Errors
    /// When the shapes do not fit, or an id that is known here is outside.
    pub fn gather<D: Dim>(&self, ids: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "gather")?;
        self.expect_inside(ids, dim, "gather")?;
        Self::apply_op::<1>(ops::Gather { dim }, &[self, ids]).map(|[out]| out)
    }

    /// The tensor with the elements of `source` added along `dim`, each to the one that `ids`, of the shape of `source`, names.
    ///
    /// # Errors
    /// When the shapes do not fit, or an id that is known here is outside.
    pub fn scatter_add<D: Dim>(&self, ids: &Self, source: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "scatter_add")?;
        self.expect_inside(ids, dim, "scatter_add")?;
        let [added] = Self::apply_op(ops::ScatterAdd { dim, extent: self.dims()[dim] }, &[ids, source])?;
        self.add(&added)
    }

    /// Along `dim`, the indices that `ids` (a vector) names.
    ///
    /// # Errors
    /// When `ids` is not a vector of u32, or an id that is known here is outside.
    pub fn index_select<D: Dim>(&self, ids: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "index_select")?;
        ids.dims1()?;
        self.expect_inside(ids, dim, "index_select")?;
        // The dimension in front, and the others as a row.
        let front = self.transpose(0, dim)?;
        let rows = front.reshape((self.dims()[dim], self.elem_count() / self.dims()[dim].max(1)))?.embedding(ids)?;
        let mut dims = front.dims().to_vec();
        dims[0] = ids.elem_count();
        rows.reshape(dims)?.transpose(0, dim)
    }

    /// The tensor with the indices of `source` along `dim` added, each to the one that `ids` (a vector) names.
    ///
    /// # Errors
    /// When the shapes do not fit, or an id that is known here is outside.
    pub fn index_add<D: Dim>(&self, ids: &Self, source: &Self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "index_add")?;
        let mut dims = vec![1; self.rank()];
        dims[dim] = ids.dims1()?;
        self.scatter_add(&ids.reshape(dims)?.broadcast_as(source.shape().clone())?, source, dim)
    }

    /// Refuses ids that are known when the model is recorded, and too large.
    pub(super) fn expect_inside(&self, ids: &Self, dim: usize, op: &str) -> Result<()> {
        let extent = self.dims()[dim];
        let known = lock(&self.graph).data(ids.id()).unwrap_or_default();
        match known.into_iter().find(|&id| id >= extent as f64) {
            Some(id) => Err(self.shape_error(op, format!("id {id} is outside dimension {dim} of extent {extent}"))),
            None => Ok(()),
        }
    }
}
