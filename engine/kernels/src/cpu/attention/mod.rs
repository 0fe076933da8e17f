//! softmax(scale · Q·Kᵀ)·V in `f32` or bf16, and its gradients. The matrix of scores is never stored as a whole.
//!
//! In: queries, keys and values with any strides over (batch, head, token), so that a packed `qkv` can be read and
//! its gradient written in place. Out: the outputs, and the log-sum-exp of each row of scores in `f32`. The gradients
//! are computed from these two. Never: a heap allocation, scratch that grows with keys × queries, or a result that
//! depends on the number of threads.
//!
//! Operands are `f32` or bf16; bf16 is packed as in [`gemm`](crate::cpu::gemm). If the processor multiplies pairs of
//! bf16, probabilities and gradients of scores are rounded to bf16 before they are multiplied. Outputs and gradients in
//! bf16 are added up in `f32`, in scratch, and rounded once.
//!
//! The algorithm is FlashAttention-2 (Dao 2023, algorithms 1 and 2). The forward iterates over blocks of keys and
//! updates a maximum and a sum per query. The backward recomputes the probabilities from the log-sum-exp. The small
//! products use the micro-kernels of [`gemm`](crate::cpu::gemm). These skip a tile of registers if all of its scores
//! are masked.

mod backward;
mod check;
mod forward;
mod rows;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::slice::from_raw_parts_mut;

use self::check::{at_least, check_scratch};
use self::rows::Rows;
use crate::Fold;
use crate::cpu::gemm::kernel::{Kernels, ROW_STRIDE};
use crate::cpu::gemm::{BLOCK_K, Factor};
use crate::cpu::scratch::{PartLayout, Scratch};
use crate::cpu::simd::{Level, prefetch_row};

pub use self::check::AttentionError;

/// The largest head size that the kernels support.
pub const MAX_HEAD_SIZE: usize = 256;

/// Distances, in elements, of a tensor over (batch, head, token, element). The elements of a head are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadStrides {
    /// From one sequence to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one token to the next.
    pub token: usize,
}

/// The keys that a query can see, before [`Attention::window`] restricts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All keys.
    Full,
    /// Query i sees keys 0 to i + `offset`, inclusive. If a cache holds past keys, `offset` is their number.
    Causal {
        /// Position of the first query among the keys.
        offset: usize,
    },
    /// The queries are a rank's tokens of the keys' sequence. Each query sees the keys up to its own place.
    Folded(Fold),
}

/// The shape of an attention, and the operations between scores and probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Number of sequences.
    pub batch: usize,
    /// Heads of queries and outputs.
    pub heads: usize,
    /// Heads of keys and values. Must divide `heads`. Query head h reads key head h ÷ (`heads` ÷ `kv_heads`).
    pub kv_heads: usize,
    /// Queries per sequence.
    pub queries: usize,
    /// Keys per sequence.
    pub keys: usize,
    /// Number of elements of a head of queries or keys, at most [`MAX_HEAD_SIZE`].
    pub head_size: usize,
    /// Number of elements of a head of values or outputs, at most [`MAX_HEAD_SIZE`].
    pub value_size: usize,
    /// Positive multiplier of the scores, usually 1/√`head_size`.
    pub scale: f32,
    /// The keys that a query can see.
    pub mask: Mask,
    /// Maximum number of keys that a query sees, counted back from its last visible one. Must not be 0.
    pub window: Option<usize>,
    /// Number of keys of a chunk: a query sees no key before the chunk of its last visible one. Chunks begin at the
    /// query's start. Must not be 0.
    pub chunk: Option<usize>,
    /// Positive soft cap of the scores: a score s is replaced by cap · tanh(s/cap).
    pub cap: Option<f32>,
    /// Strides of the queries.
    pub q: HeadStrides,
    /// Strides of the keys.
    pub k: HeadStrides,
    /// Strides of the values.
    pub v: HeadStrides,
    /// Strides of the outputs and of their gradient.
    pub out: HeadStrides,
    /// Strides of the gradient of the queries.
    pub d_q: HeadStrides,
    /// Strides of the gradient of the keys.
    pub d_k: HeadStrides,
    /// Strides of the gradient of the values.
    pub d_v: HeadStrides,
}

/// The operands of [`Attention::forward_raw`].
#[derive(Debug, Clone, Copy)]
pub struct Forward<T> {
    /// Queries.
    pub q: *const T,
    /// Keys.
    pub k: *const T,
    /// Values.
    pub v: *const T,
    /// Outputs, written.
    pub out: *mut T,
    /// Log-sum-exp of the scores, \[batch, heads, queries\], which the forward writes; null if it is not needed.
    pub lse: *mut f32,
    /// Positions of the queries among the keys, \[batch, queries\]. They must be consecutive in each sequence. If
    /// null, the mask's offset determines the positions.
    pub positions: *const u32,
    /// The first key that each query sees, \[batch, queries\]; null if every query starts at the first key.
    pub starts: *const u32,
}

/// The operands of [`Attention::backward_raw`].
#[derive(Debug, Clone, Copy)]
pub struct Backward<T> {
    /// Queries.
    pub q: *const T,
    /// Keys.
    pub k: *const T,
    /// Values.
    pub v: *const T,
    /// Outputs of the forward.
    pub out: *const T,
    /// Log-sum-exp from the forward, \[batch, heads, queries\].
    pub lse: *const f32,
    /// Gradient of the outputs.
    pub dout: *const T,
    /// The first key that each query sees, \[batch, queries\]; null if every query starts at the first key.
    pub starts: *const u32,
    /// Gradient of the queries, overwritten.
    pub dq: *mut T,
    /// Gradient of the keys, overwritten.
    pub dk: *mut T,
    /// Gradient of the values, overwritten.
    pub dv: *mut T,
}

impl Attention {
    /// Returns the sizes in bytes of the pieces of scratch that the forward of `T` needs in a pool of `threads` threads.
    pub fn forward_scratch<T: Factor>(&self, threads: usize) -> Vec<u64> {
        forward::parts::<T>(self, threads).into_iter().flat_map(PartLayout::bytes).collect()
    }

    /// Returns the sizes in bytes of the pieces of scratch that the backward of `T` needs in a pool of `threads` threads.
    pub fn backward_scratch<T: Factor>(&self, threads: usize) -> Vec<u64> {
        backward::parts::<T>(self, threads).into_iter().flat_map(PartLayout::bytes).collect()
    }

    /// Returns the floating-point operations of the forward's two products, without masked scores.
    pub fn forward_flops(&self) -> u64 {
        2 * (self.head_size + self.value_size) as u64 * self.scores()
    }

    /// Returns the floating-point operations of the backward's five products, without masked scores.
    pub fn backward_flops(&self) -> u64 {
        2 * (3 * self.head_size + 2 * self.value_size) as u64 * self.scores()
    }

    /// Returns the number of scores that are not masked, over all heads.
    fn scores(&self) -> u64 {
        let seen = |query| {
            let visible = self.visible(query);
            (visible - self.first_key_from(0, visible)) as u64
        };
        (self.batch * self.heads) as u64 * (0..self.queries).map(seen).sum::<u64>()
    }

    /// Computes the outputs and the log-sum-exp \[batch, heads, queries\] on all threads of the current rayon pool.
    /// For a query that sees no key, the outputs are 0 and the log-sum-exp is −∞.
    ///
    /// With `starts` \[batch, queries\], a query sees no key before its own start. If the start is after the last key
    /// that the query sees, the query sees this last key only.
    ///
    /// # Errors
    /// Returns an error, and writes nothing, if
    /// - the shape is invalid,
    /// - a slice is too short for its strides,
    /// - the scratch is too small for [`Attention::forward_scratch`] of the current pool, or
    /// - outputs overlap.
    #[expect(clippy::too_many_arguments, reason = "the operands of an attention")]
    pub fn forward<T: Factor>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        starts: Option<&[u32]>,
        out: &mut [T],
        lse: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) -> Result<(), AttentionError> {
        self.check_forward(q, k, v, out, scratch)?;
        at_least("lse", self.per_query_len(self.heads), lse.len())?;
        let starts = self.check_starts(starts)?;
        let operands = Forward {
            q: q.as_ptr(),
            k: k.as_ptr(),
            v: v.as_ptr(),
            out: out.as_mut_ptr(),
            lse: lse.as_mut_ptr(),
            positions: std::ptr::null(),
            starts,
        };
        // SAFETY: every extent was compared with its slice above. The slices that are written are borrowed
        // exclusively.
        unsafe { self.forward_raw(operands, scratch) };
        Ok(())
    }

    /// Computes the outputs, and the log-sum-exp if `lse` is given, for queries at `positions` \[batch, queries\] among
    /// the keys of a cache. Positions must be consecutive in each sequence. Each query sees the keys up to its own
    /// position; the mask is ignored.
    ///
    /// # Errors
    /// Returns the errors of [`Attention::forward`], and an error if a position is not among the keys.
    #[expect(clippy::too_many_arguments, reason = "operands, as of `forward`")]
    pub fn forward_at<T: Factor>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        positions: &[u32],
        out: &mut [T],
        lse: Option<&mut [f32]>,
        scratch: &mut Scratch<'_>,
    ) -> Result<(), AttentionError> {
        self.check_forward(q, k, v, out, scratch)?;
        if let Some(lse) = &lse {
            at_least("lse", self.per_query_len(self.heads), lse.len())?;
        }
        at_least("positions", self.per_query_len(1), positions.len())?;
        let ends = positions
            .chunks_exact(self.queries.max(1))
            .take(self.batch)
            .map(|query_positions| query_positions[0] as usize + self.queries);
        at_least("cache", ends.max().unwrap_or(0), self.keys)?;
        let operands = Forward {
            q: q.as_ptr(),
            k: k.as_ptr(),
            v: v.as_ptr(),
            out: out.as_mut_ptr(),
            lse: lse.map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr),
            positions: positions.as_ptr(),
            starts: std::ptr::null(),
        };
        // SAFETY: as in `forward`.
        unsafe { self.forward_raw(operands, scratch) };
        Ok(())
    }

    /// Like [`Attention::forward`], with addresses instead of slices, for operands in one arena.
    ///
    /// # Safety
    /// - [`Attention::forward`] must accept the shape.
    /// - Every element that an operand's strides address must be valid, and `scratch` must have the pieces of
    ///   [`Attention::forward_scratch`]`::<T>(rayon::current_num_threads())`.
    /// - Written operands must not overlap any other operand. No other code may write an operand during the call.
    pub unsafe fn forward_raw<T: Factor>(&self, operands: Forward<T>, scratch: &mut Scratch<'_>) {
        // SAFETY: by this function's contract.
        unsafe { forward::run(self, &Instructions::of::<T>(Level::best()), operands, scratch) }
    }

    /// Computes the gradients of queries, keys and values on all threads of the current rayon pool.
    ///
    /// Gradients that are interleaved in one tensor, such as that of a packed `qkv`, need [`Attention::backward_raw`].
    ///
    /// # Errors
    /// Returns an error, and writes nothing, if
    /// - the shape is invalid,
    /// - a slice is too short for its strides,
    /// - the scratch is too small for [`Attention::backward_scratch`] of the current pool, or
    /// - gradients overlap.
    #[expect(clippy::too_many_arguments, reason = "the operands of an attention")]
    pub fn backward<T: Factor>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        out: &[T],
        lse: &[f32],
        dout: &[T],
        starts: Option<&[u32]>,
        (dq, dk, dv): (&mut [T], &mut [T], &mut [T]),
        scratch: &mut Scratch<'_>,
    ) -> Result<(), AttentionError> {
        self.check_shape()?;
        let of_q = (self.heads, self.queries, self.head_size);
        let of_k = (self.kv_heads, self.keys, self.head_size);
        let of_v = (self.kv_heads, self.keys, self.value_size);
        let of_out = (self.heads, self.queries, self.value_size);
        for (operand, len, strides, extents) in [
            ("q", q.len(), self.q, of_q),
            ("dq", dq.len(), self.d_q, of_q),
            ("k", k.len(), self.k, of_k),
            ("dk", dk.len(), self.d_k, of_k),
            ("v", v.len(), self.v, of_v),
            ("dv", dv.len(), self.d_v, of_v),
            ("out", out.len(), self.out, of_out),
            ("dout", dout.len(), self.out, of_out),
        ] {
            self.check(operand, len, strides, extents)?;
        }
        self.check_apart("dq", self.d_q, of_q)?;
        self.check_apart("dk", self.d_k, of_k)?;
        self.check_apart("dv", self.d_v, of_v)?;
        at_least("lse", self.per_query_len(self.heads), lse.len())?;
        check_scratch(scratch, &backward::parts::<T>(self, rayon::current_num_threads()))?;
        let starts = self.check_starts(starts)?;
        let operands = Backward {
            q: q.as_ptr(),
            k: k.as_ptr(),
            v: v.as_ptr(),
            out: out.as_ptr(),
            lse: lse.as_ptr(),
            dout: dout.as_ptr(),
            starts,
            dq: dq.as_mut_ptr(),
            dk: dk.as_mut_ptr(),
            dv: dv.as_mut_ptr(),
        };
        // SAFETY: every extent was compared with its slice above. The slices that are written are borrowed
        // exclusively.
        unsafe { self.backward_raw(operands, scratch) };
        Ok(())
    }

    /// Like [`Attention::backward`], with addresses instead of slices, for operands in one arena.
    ///
    /// # Safety
    /// The requirements of [`Attention::forward_raw`], with [`Attention::backward_scratch`] apply.
    pub unsafe fn backward_raw<T: Factor>(&self, operands: Backward<T>, scratch: &mut Scratch<'_>) {
        // SAFETY: by this function's contract.
        unsafe { backward::run(self, &Instructions::of::<T>(Level::best()), operands, scratch) }
    }

    /// Returns the number of keys up to and including the last one that the mask lets a query see.
    fn visible(&self, query: usize) -> usize {
        match self.mask {
            Mask::Full => self.keys,
            Mask::Causal { offset } => self.keys.min(query.saturating_add(offset).saturating_add(1)),
            Mask::Folded(fold) => self.keys.min(fold.place(query) + 1),
        }
    }

    /// Returns the index of the first key that a query sees.
    ///
    /// # Safety
    /// `starts` must be null, or valid for one entry per query of each sequence.
    unsafe fn first_key(&self, starts: *const u32, batch: usize, query: usize) -> usize {
        let start = match starts.is_null() {
            true => 0,
            // SAFETY: by this function's contract.
            false => unsafe { *starts.add(batch * self.queries + query) as usize },
        };
        self.first_key_from(start, self.visible(query))
    }

    /// Returns the index of the first key that a query sees whose keys begin at `start`, and which sees keys before
    /// `visible`.
    fn first_key_from(&self, start: usize, visible: usize) -> usize {
        let Some(last) = visible.checked_sub(1) else { return 0 };
        let start = start.min(last);
        let in_chunk = self.chunk.map_or(start, |chunk| last - (last - start) % chunk);
        self.window.map_or(in_chunk, |window| in_chunk.max(visible.saturating_sub(window)))
    }

    /// Returns the smallest index of a key that any of these queries sees.
    ///
    /// # Safety
    /// The requirements of [`Self::first_key`] apply.
    unsafe fn first_key_of(&self, starts: *const u32, batch: usize, queries: Range<usize>) -> usize {
        if starts.is_null() {
            // SAFETY: with null `starts`, no start is read.
            return unsafe { self.first_key(starts, batch, queries.start) };
        }
        // SAFETY: by this function's contract.
        queries.map(|query| unsafe { self.first_key(starts, batch, query) }).min().unwrap_or(0)
    }

    /// Number of query heads that share a key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Returns the number of keys that are packed together. It is smaller for wide heads, so that the packed keys
    /// stay in the level-2 cache.
    fn key_block(&self) -> usize {
        const FLOATS: usize = BLOCK_K * 64;
        (FLOATS / self.widest().max(1) / 32 * 32).clamp(96, BLOCK_K)
    }

    /// The larger of the head sizes of keys and values.
    fn widest(&self) -> usize {
        self.head_size.max(self.value_size)
    }
}

/// The kernels of one level.
struct Instructions {
    products: &'static Kernels,
    rows: &'static Rows,
}

impl Instructions {
    /// The kernels of a level for operands of type `T`.
    fn of<T: Factor>(level: Level) -> Self {
        let products = if T::IS_BF16 { Kernels::of_bf16(level) } else { Kernels::of(level) };
        Self { products, rows: Rows::of(level, products.k_of_line > 1) }
    }
}

/// Rows of the tallest micro-kernel of any level.
const PANEL_ROWS: usize = 12;
const _: () = assert!(MAX_HEAD_SIZE <= ROW_STRIDE && BLOCK_K + 16 <= ROW_STRIDE);

/// Returns the floats that a block of keys takes when it is packed as panels of B, in either orientation. The block
/// has no more keys than the attention.
fn packed_keys_len(job: &Attention) -> usize {
    packed_len(job, job.key_block().min(job.keys))
}

/// Returns the floats that `tokens` tokens of a head take when they are packed as panels of B, in either orientation.
fn packed_len(job: &Attention, tokens: usize) -> usize {
    tokens.next_multiple_of(32) * job.widest().next_multiple_of(32)
}

/// One head of a tensor: the address of its first element, and the distance between tokens. Code writes through this
/// address only if the caller's tensor is writable.
#[derive(Clone, Copy)]
struct Head<T> {
    start: *mut T,
    token: usize,
}

impl<T: Copy> Head<T> {
    /// # Safety
    /// The head must exist.
    unsafe fn new(tensor: *mut T, strides: HeadStrides, batch: usize, head: usize) -> Self {
        // SAFETY: by this function's contract.
        Self { start: unsafe { tensor.add(batch * strides.batch + head * strides.head) }, token: strides.token }
    }

    /// # Safety
    /// The token must exist.
    unsafe fn at(self, token: usize) -> *mut T {
        // SAFETY: by this function's contract.
        unsafe { self.start.add(token * self.token) }
    }

    /// Prefetches `size` elements of each of these tokens.
    ///
    /// # Safety
    /// The tokens must exist.
    unsafe fn prefetch(self, tokens: Range<usize>, size: usize) {
        for token in tokens {
            // SAFETY: by this function's contract.
            prefetch_row(unsafe { self.at(token) }, 0, size);
        }
    }
}

/// Rows of a head that a task adds up in `f32`: rows of the tensor itself if it is `f32`. Otherwise rows of scratch, which
/// are rounded to the tensor's rows when they are complete.
#[derive(Clone, Copy)]
struct Sums<T> {
    /// The first row, and the distance between rows.
    start: *mut f32,
    stride: usize,
    /// The token of the first row.
    first: usize,
    /// Elements of a row.
    size: usize,
    /// The tensor's head.
    head: Head<T>,
}

impl<T: Factor> Sums<T> {
    /// Returns the number of floats of scratch for rows of `size` elements.
    fn scratch_len(rows: usize, size: usize) -> usize {
        if T::IS_BF16 { rows * size } else { 0 }
    }

    /// # Safety
    /// The tokens from `first` on must exist, and `scratch` must have room for their rows.
    unsafe fn new(head: Head<T>, first: usize, size: usize, scratch: *mut f32) -> Self {
        // SAFETY: by this function's contract.
        let (start, stride) = match T::as_f32(unsafe { head.at(first) }) {
            Some(start) => (start.cast_mut(), head.token),
            None => (scratch, size),
        };
        Self { start, stride, first, size, head }
    }

    /// Returns the address of a token's row.
    fn at(&self, token: usize) -> *mut f32 {
        self.start.wrapping_add((token - self.first) * self.stride)
    }

    /// Returns a token's row.
    ///
    /// # Safety
    /// The token must exist, and no other code may access its row while it is borrowed.
    unsafe fn row<'r>(&self, token: usize) -> &'r mut [f32] {
        // SAFETY: by this function's contract.
        unsafe { from_raw_parts_mut(self.at(token), self.size) }
    }

    /// Multiplies a complete row by `factor`, and rounds it if the tensor is bf16.
    ///
    /// # Safety
    /// As for [`Self::row`], and for the same row of the tensor.
    unsafe fn finish(&self, rows: &Rows, token: usize, factor: f32) {
        // SAFETY: by this function's contract. A tensor is f32 or bf16.
        unsafe {
            match T::IS_BF16 {
                true => {
                    let to = from_raw_parts_mut(self.head.at(token).cast(), self.size);
                    (rows.scale_to_bf16)(self.row(token), factor, to);
                }
                false if factor != 1.0 => (rows.scale)(self.row(token), factor),
                false => {}
            }
        }
    }
}
