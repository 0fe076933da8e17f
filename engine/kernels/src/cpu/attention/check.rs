//! Whether an attention can run, and why not.
//!
//! In: a shape, slices and scratch. Out: an error that names the operand, before anything is written. Never: a look at an element.

use super::{Attention, HeadStrides, MAX_HEAD_SIZE, forward};
use crate::cpu::scratch::{Parts, Scratch};

/// Why an attention cannot run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// Query heads that cannot share the key heads evenly.
    #[error("{heads} query heads cannot share {kv_heads} key heads evenly; choose a multiple")]
    Heads {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
    },
    /// A head wider than the kernels take.
    #[error("a head of {head_size} elements is above the maximum of {MAX_HEAD_SIZE}; use more, smaller heads")]
    HeadSize {
        /// Elements of a head.
        head_size: usize,
    },
    /// A window in which no key is.
    #[error("the window is 0; it must be at least 1")]
    Window,
    /// A cap that is not a positive number.
    #[error("the cap of scores is {cap}; it must be positive and finite")]
    Cap {
        /// The cap.
        cap: f32,
    },
    /// A factor that is not a positive number.
    #[error("scale is {scale}; it must be positive and finite, as 1/√head_size is")]
    Scale {
        /// The factor.
        scale: f32,
    },
    /// A slice ends before the tensor that it should hold.
    #[error("{operand} needs {needed} elements, its slice has {given}; give all of the tensor, or correct its strides")]
    TooShort {
        /// Name of the tensor, or "scratch" for one of its pieces.
        operand: &'static str,
        /// Elements that the strides reach.
        needed: usize,
        /// Elements that were given.
        given: usize,
    },
    /// A tensor's strides overflow `usize`.
    #[error("{operand}'s strides reach beyond the address space; correct them")]
    TooLarge {
        /// Name of the tensor.
        operand: &'static str,
    },
    /// A tensor to be written in which two elements share an address.
    #[error("heads or tokens of {operand} overlap with strides {strides:?}; keep them apart")]
    Overlap {
        /// Name of the tensor.
        operand: &'static str,
        /// Its strides.
        strides: HeadStrides,
    },
}

impl Attention {
    /// The address of the queries' first keys, if there are enough of them.
    pub(super) fn check_starts(&self, starts: Option<&[u32]>) -> Result<*const u32, AttentionError> {
        let Some(starts) = starts else { return Ok(std::ptr::null()) };
        at_least("starts", self.numbers_of(1), starts.len())?;
        Ok(starts.as_ptr())
    }

    /// Elements of a tensor with one for each query of each of so many heads; the most that there are if there would be more.
    pub(super) fn numbers_of(&self, heads: usize) -> usize {
        self.batch.saturating_mul(heads).saturating_mul(self.queries)
    }

    /// Whether shape, operands and scratch of a forward fit together.
    pub(super) fn check_forward<T>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        out: &[f32],
        scratch: &Scratch<'_>,
    ) -> Result<(), AttentionError> {
        self.check_shape()?;
        self.check("q", q.len(), self.q, (self.heads, self.queries, self.head_size))?;
        self.check("k", k.len(), self.k, (self.kv_heads, self.keys, self.head_size))?;
        self.check("v", v.len(), self.v, (self.kv_heads, self.keys, self.value_size))?;
        self.check("out", out.len(), self.out, (self.heads, self.queries, self.value_size))?;
        self.check_apart("out", self.out, (self.heads, self.queries, self.value_size))?;
        check_scratch(scratch, &forward::parts(self, rayon::current_num_threads()))
    }

    pub(super) fn check_shape(&self) -> Result<(), AttentionError> {
        let &Self { heads, kv_heads, scale, window, cap, .. } = self;
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
        if window == Some(0) {
            return Err(AttentionError::Window);
        }
        if let Some(cap) = cap.filter(|cap| !(*cap > 0.0 && cap.is_finite())) {
            return Err(AttentionError::Cap { cap });
        }
        Ok(())
    }

    /// Whether a tensor fits its slice.
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

    /// Whether no two elements of a tensor share an address: each stride must step over all that the smaller ones
    /// reach.
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

pub(super) fn check_scratch(scratch: &Scratch<'_>, parts: &[Parts]) -> Result<(), AttentionError> {
    match scratch.too_short(parts.iter().copied().flat_map(Parts::bytes)) {
        Some((needed, given)) => Err(AttentionError::TooShort { operand: "scratch", needed, given }),
        None => Ok(()),
    }
}
