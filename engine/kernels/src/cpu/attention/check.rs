//! Checks of an attention's operands.
//!
//! In: a shape, slices and scratch. Out: an error that names the operand, before anything is written. Never: a read
//! or write of an element.

use super::{Attention, HeadStrides, MAX_HEAD_SIZE, forward};
use crate::cpu::gemm::Factor;
use crate::cpu::scratch::{PartLayout, Scratch};

/// The reason why an attention cannot run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// The number of query heads is not a multiple of the number of key heads.
    #[error("{heads} query heads cannot share {kv_heads} key heads evenly; choose a multiple")]
    Heads {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
    },
    /// A head is larger than the kernels support.
    #[error("a head of {head_size} elements is above the maximum of {MAX_HEAD_SIZE}; use more, smaller heads")]
    HeadSize {
        /// Elements of a head.
        head_size: usize,
    },
    /// The window or the chunk is zero, so that no key is visible.
    #[error("the window or the chunk is 0; it must be at least 1")]
    Window,
    /// The cap is not positive and finite.
    #[error("the cap of scores is {cap}; it must be positive and finite")]
    Cap {
        /// The cap.
        cap: f32,
    },
    /// The scale is not positive and finite.
    #[error("scale is {scale}; it must be positive and finite, as 1/√head_size is")]
    Scale {
        /// The scale.
        scale: f32,
    },
    /// A slice is too short for its tensor.
    #[error("{operand} needs {needed} elements, its slice has {given}; give all of the tensor, or correct its strides")]
    TooShort {
        /// Name of the tensor, or "scratch" for one of its pieces.
        operand: &'static str,
        /// Number of elements that the slice must have: the largest offset that the strides address, plus one.
        needed: usize,
        /// Elements that were given.
        given: usize,
    },
    /// A tensor's extent overflows the address space.
    #[error("{operand}'s strides address elements outside the address space; correct them")]
    TooLarge {
        /// Name of the tensor.
        operand: &'static str,
    },
    /// Two elements of a written tensor share an address.
    #[error("heads or tokens of {operand} overlap with strides {strides:?}; keep them apart")]
    Overlap {
        /// Name of the tensor.
        operand: &'static str,
        /// Its strides.
        strides: HeadStrides,
    },
}

impl Attention {
    /// Returns the address of the queries' first keys, or null if `starts` is `None`. Returns an error if the slice
    /// is too short.
    pub(super) fn check_starts(&self, starts: Option<&[u32]>) -> Result<*const u32, AttentionError> {
        let Some(starts) = starts else { return Ok(std::ptr::null()) };
        at_least("starts", self.per_query_len(1), starts.len())?;
        Ok(starts.as_ptr())
    }

    /// Returns the element count of a tensor with one element per query and head. If the count overflows, it saturates,
    /// so that the length check fails.
    pub(super) fn per_query_len(&self, heads: usize) -> usize {
        self.batch.saturating_mul(heads).saturating_mul(self.queries)
    }

    /// Checks the shape, operands and scratch of a forward.
    pub(super) fn check_forward<T: Factor>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        out: &[T],
        scratch: &Scratch<'_>,
    ) -> Result<(), AttentionError> {
        self.check_shape()?;
        self.check("q", q.len(), self.q, (self.heads, self.queries, self.head_size))?;
        self.check("k", k.len(), self.k, (self.kv_heads, self.keys, self.head_size))?;
        self.check("v", v.len(), self.v, (self.kv_heads, self.keys, self.value_size))?;
        self.check("out", out.len(), self.out, (self.heads, self.queries, self.value_size))?;
        self.check_apart("out", self.out, (self.heads, self.queries, self.value_size))?;
        check_scratch(scratch, &forward::parts::<T>(self, rayon::current_num_threads()))
    }

    pub(super) fn check_shape(&self) -> Result<(), AttentionError> {
        let &Self { heads, kv_heads, scale, window, chunk, cap, .. } = self;
        let head_size = self.widest();
        if heads > 0 && (kv_heads == 0 || heads % kv_heads != 0) {
            return Err(AttentionError::Heads { heads, kv_heads });
        }
        if head_size > MAX_HEAD_SIZE {
            return Err(AttentionError::HeadSize { head_size });
        }
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(AttentionError::Scale { scale });
        }
        if window == Some(0) || chunk == Some(0) {
            return Err(AttentionError::Window);
        }
        if let Some(cap) = cap.filter(|cap| !(*cap > 0.0 && cap.is_finite())) {
            return Err(AttentionError::Cap { cap });
        }
        Ok(())
    }

    /// Checks that a slice is long enough for its tensor.
    pub(super) fn check(
        &self,
        operand: &'static str,
        given: usize,
        strides: HeadStrides,
        (heads, tokens, size): (usize, usize, usize),
    ) -> Result<(), AttentionError> {
        if self.batch == 0 || heads == 0 || tokens == 0 || size == 0 {
            return Ok(());
        }
        let reach = || {
            let batch = (self.batch - 1).checked_mul(strides.batch)?;
            let head = (heads - 1).checked_mul(strides.head)?;
            let token = (tokens - 1).checked_mul(strides.token)?;
            batch.checked_add(head)?.checked_add(token)?.checked_add(size)
        };
        let limit = isize::MAX as usize / size_of::<f32>();
        let needed = reach().filter(|&needed| needed <= limit).ok_or(AttentionError::TooLarge { operand })?;
        at_least(operand, needed, given)
    }

    /// Checks that no two elements of a tensor share an address: each stride must exceed the largest offset that all
    /// smaller strides together address.
    pub(super) fn check_apart(
        &self,
        operand: &'static str,
        strides: HeadStrides,
        (heads, tokens, size): (usize, usize, usize),
    ) -> Result<(), AttentionError> {
        let mut axes = [(strides.batch, self.batch), (strides.head, heads), (strides.token, tokens)];
        if axes.iter().any(|&(_, length)| length == 0) {
            return Ok(());
        }
        axes.sort_unstable();
        let mut reach = size;
        for (stride, length) in axes {
            if length > 1 {
                if stride < reach {
                    return Err(AttentionError::Overlap { operand, strides });
                }
                reach += stride * (length - 1);
            }
        }
        Ok(())
    }
}

pub(super) fn at_least(operand: &'static str, needed: usize, given: usize) -> Result<(), AttentionError> {
    if given < needed { Err(AttentionError::TooShort { operand, needed, given }) } else { Ok(()) }
}

pub(super) fn check_scratch(scratch: &Scratch<'_>, parts: &[PartLayout]) -> Result<(), AttentionError> {
    match scratch.too_short(parts.iter().copied().flat_map(PartLayout::bytes)) {
        Some((needed, given)) => Err(AttentionError::TooShort { operand: "scratch", needed, given }),
        None => Ok(()),
    }
}
