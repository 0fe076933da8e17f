//! Reductions.

use candle_core::shape::{Dim, Dims};

use super::Tensor;
use crate::error::Result;
use crate::ops;

/// Sums, means and variances. A reduced dimension that is kept has extent 1 in the result. Otherwise, reduced
/// dimensions are removed.
impl Tensor {
    /// Sum over some dimensions.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn sum<D: Dims>(&self, dims: D) -> Result<Self> {
        let dims = dims.to_indexes(self.shape(), "sum")?;
        self.sum_keepdim(dims.clone())?.without(&dims)
    }

    /// Sum over some dimensions, which are kept.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn sum_keepdim<D: Dims>(&self, dims: D) -> Result<Self> {
        let mut dims = dims.to_indexes(self.shape(), "sum_keepdim")?;
        dims.sort_unstable();
        self.apply1(ops::Sum { dims })
    }

    /// Mean over some dimensions.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn mean<D: Dims>(&self, dims: D) -> Result<Self> {
        let dims = dims.to_indexes(self.shape(), "mean")?;
        self.mean_keepdim(dims.clone())?.without(&dims)
    }

    /// Mean over some dimensions, which are kept.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn mean_keepdim<D: Dims>(&self, dims: D) -> Result<Self> {
        let dims = dims.to_indexes(self.shape(), "mean_keepdim")?;
        let count: usize = dims.iter().map(|&dim| self.dims()[dim]).product();
        self.sum_keepdim(dims)?.affine(1.0 / count.max(1) as f64, 0.0)
    }

    /// Unbiased variance over one dimension.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn var<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "var")?;
        self.var_keepdim(dim)?.squeeze(dim)
    }

    /// Unbiased variance over one dimension, which is kept.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn var_keepdim<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "var_keepdim")?;
        let squares = self.broadcast_sub(&self.mean_keepdim(dim)?)?.sqr()?;
        squares.sum_keepdim(dim)? / (self.dims()[dim] as f64 - 1.0)
    }

    /// Sum of all elements: a scalar.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn sum_all(&self) -> Result<Self> {
        self.apply1(ops::ScaledSum { scale: 1.0 })
    }

    /// Mean of all elements: a scalar.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn mean_all(&self) -> Result<Self> {
        self.apply1(ops::ScaledSum { scale: 1.0 / self.elem_count().max(1) as f64 })
    }

    /// √Σx² over all elements: a scalar.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn norm(&self) -> Result<Self> {
        self.sqr()?.sum_all()?.sqrt()
    }

    /// ln Σ eˣ over some dimensions, which are removed.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn log_sum_exp<D: Dims>(&self, dims: D) -> Result<Self> {
        let mut dims = dims.to_indexes(self.shape(), "log_sum_exp")?;
        dims.sort_unstable_by(|a, b| b.cmp(a));
        dims.into_iter().try_fold(self.clone(), |x, dim| {
            let last = x.rank() - 1;
            // `dim` is moved to the end, and the other dimensions keep their order.
            let order: Vec<usize> = (0..last + 1).filter(|&d| d != dim).chain([dim]).collect();
            x.permute(order)?.apply1(ops::LogSumExp)
        })
    }

    /// Softmax over the last dimension.
    ///
    /// # Errors
    /// Returns an error if the rank is 0.
    pub fn softmax_last_dim(&self) -> Result<Self> {
        self.apply1(ops::Softmax)
    }

    /// Cumulative sum along a dimension, computed as a product with a triangular matrix of ones.
    ///
    /// # Errors
    /// Returns an error if there is no such dimension.
    pub fn cumsum<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "cumsum")?;
        let last = self.rank() - 1;
        let triangle = Self::tril2(self.dims()[dim], self.dtype(), self.device())?;
        self.transpose(dim, last)?.linear(&triangle, None)?.transpose(dim, last)
    }

    fn without(&self, dims: &[usize]) -> Result<Self> {
        let kept: Vec<usize> =
            self.dims().iter().enumerate().filter(|(dim, _)| !dims.contains(dim)).map(|(_, &extent)| extent).collect();
        self.reshape(kept)
    }
}

macro_rules! extremes {
    ($($what:literal, $greatest:ident, $value:ident, $value_keepdim:ident, $index:ident, $index_keepdim:ident;)*) => {
        /// Maxima and minima. If several elements are equal, the first is chosen and gets the gradient. (In candle,
        /// each of the equal elements gets the gradient.)
        impl Tensor {
            $(#[doc = concat!("The ", $what, " over one dimension, which is removed.")]
            ///
            /// # Errors
            /// Returns an error if there is no such dimension.
            pub fn $value<D: Dim>(&self, dim: D) -> Result<Self> {
                let dim = dim.to_index(self.shape(), stringify!($value))?;
                self.$value_keepdim(dim)?.squeeze(dim)
            }

            #[doc = concat!("The ", $what, " over one dimension, which is kept.")]
            ///
            /// # Errors
            /// Returns an error if there is no such dimension.
            pub fn $value_keepdim<D: Dim>(&self, dim: D) -> Result<Self> {
                let dim = dim.to_index(self.shape(), stringify!($value))?;
                self.extreme(dim, $greatest).map(|[value, _]| value)
            }

            #[doc = concat!("The index (u32) of the ", $what, " over one dimension, which is removed. Not differentiable.")]
            ///
            /// # Errors
            /// Returns an error if there is no such dimension.
            pub fn $index<D: Dim>(&self, dim: D) -> Result<Self> {
                let dim = dim.to_index(self.shape(), stringify!($index))?;
                self.$index_keepdim(dim)?.squeeze(dim)
            }

            #[doc = concat!("The index (u32) of the ", $what, " over one dimension, which is kept. Not differentiable.")]
            ///
            /// # Errors
            /// Returns an error if there is no such dimension.
            pub fn $index_keepdim<D: Dim>(&self, dim: D) -> Result<Self> {
                let dim = dim.to_index(self.shape(), stringify!($index))?;
                self.extreme(dim, $greatest).map(|[_, index]| index)
            })*
        }
    };
}

extremes! {
    "greatest", true, max, max_keepdim, argmax, argmax_keepdim;
    "least", false, min, min_keepdim, argmin, argmin_keepdim;
}

impl Tensor {
    /// Returns the maximum or minimum over one dimension, which is kept, and the index of that element.
    fn extreme(&self, dim: usize, is_greatest: bool) -> Result<[Self; 2]> {
        let last = self.rank() - 1;
        let x = self.transpose(dim, last)?;
        let x = if is_greatest { x } else { x.neg()? };
        let [value, index] = Self::apply_op(ops::Max, &[&x])?;
        let value = if is_greatest { value } else { value.neg()? };
        Ok([value.transpose(dim, last)?, index.transpose(dim, last)?])
    }
}

/// Maximum and minimum of all elements.
impl Tensor {
    /// The greatest element: a scalar.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn max_all(&self) -> Result<Self> {
        self.flatten_all()?.max(0)
    }

    /// The least element: a scalar.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn min_all(&self) -> Result<Self> {
        self.flatten_all()?.min(0)
    }
}
