//! Shape and element type.

use candle_core::{DType, Shape};

/// Shape and element type of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Extent of every dimension.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

impl Spec {
    /// An f32 tensor.
    pub fn f32(shape: impl Into<Shape>) -> Self {
        Self { shape: shape.into(), dtype: DType::F32 }
    }

    /// Returns the spec of a tensor with the same element type and another shape.
    pub fn in_shape(&self, shape: impl Into<Shape>) -> Self {
        Self { shape: shape.into(), dtype: self.dtype }
    }

    /// Extent of every dimension.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elem_count()
    }

    /// Returns the size in bytes of a contiguous tensor. The result is only valid if
    /// [`checked_bytes`](Self::checked_bytes) returns `Some`. For all tensors of a graph, this has been checked.
    pub fn bytes(&self) -> u64 {
        (self.elements() * self.dtype.size_in_bytes()) as u64
    }

    /// Like [`bytes`](Self::bytes), but returns `None` if the size exceeds `isize::MAX`, or if an element is not a
    /// whole number of bytes.
    pub fn checked_bytes(&self) -> Option<u64> {
        let size = self.dtype.size_in_bytes();
        let bytes = self.dims().iter().try_fold(size, |bytes, &dim| bytes.checked_mul(dim))?;
        u64::try_from(bytes).ok().filter(|&bytes| size > 0 && bytes <= MAX_BYTES)
    }
}

/// The maximum size of a tensor in bytes, which is the maximum that Rust allows for an object.
pub(crate) const MAX_BYTES: u64 = isize::MAX as u64;

/// Returns the extent of the last dimension, or 1 for scalars.
pub fn width(dims: &[usize]) -> usize {
    dims.last().copied().unwrap_or(1).max(1)
}
