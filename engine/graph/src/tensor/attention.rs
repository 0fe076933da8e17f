//! Attention: fused where every query sees all keys or those before it, composed where a mask says which.

use super::Tensor;
use crate::error::Result;
use crate::graph::Sequences;
use crate::ops;

/// Attention of `self`, the queries.
impl Tensor {
    /// Fused causal attention of `self` (the queries): [batch, heads, tokens, head size], with keys and values of
    /// [batch, key-value heads, tokens, head size]. Never makes the tokens × tokens scores
    /// (FlashAttention, arXiv 2205.14135). Where sequences are continued ([`Sequences`]), the tokens before are seen too, out of a
    /// cache that the new keys and values are written to; where documents are packed, it is [`Self::document_attention`].
    ///
    /// # Errors
    /// When the shapes do not fit or the heads are not a multiple of the key-value heads.
    pub fn causal_attention(&self, k: &Self, v: &Self, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention::causal(scale))
    }

    /// Fused attention, with a window and capped scores as [`ops::Attention`] says; values of a head may be of another size than its
    /// keys. If it is causal, sequences are continued and documents told apart as by [`Self::causal_attention`].
    ///
    /// # Errors
    /// As [`Self::causal_attention`]; a window without causality; a scale or cap that is no positive number.
    pub fn attend(&self, k: &Self, v: &Self, how: ops::Attention) -> Result<Self> {
        self.attend_past(&k.with_past("keys")?, &v.with_past("values")?, how)
    }

    /// [`Self::attend`] where keys and values are made of what [`Self::with_past`] gives: they are of all tokens of the window, and are
    /// cached no more.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub fn attend_past(&self, k: &Self, v: &Self, how: ops::Attention) -> Result<Self> {
        if !how.causal {
            self.expect_whole_sequences()?;
        }
        match self.sequences() {
            Sequences::Whole => self.fused_attention(&[self, k, v], how),
            Sequences::Packed { starts, .. } => {
                self.fused_attention(&[self, k, v, &Self::of(&self.graph, starts)], how)
            }
            Sequences::Continued { positions, .. } => {
                let inputs = [self, k, v, &Self::of(&self.graph, positions)];
                Self::apply_op::<1>(ops::CachedAttention(how), &inputs)?[0].transpose(1, 2)
            }
        }
    }

    /// As [`Self::causal_attention`], but every query sees every key.
    ///
    /// # Errors
    /// As [`Self::causal_attention`]; where sequences are continued, for the keys to come are not known, or documents packed.
    pub fn attention(&self, k: &Self, v: &Self, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention::full(scale))
    }

    /// As [`Self::causal_attention`], but no query sees a key before its first one: `starts` are u32 [batch, tokens]. Where each
    /// token's is the first of its document, documents that are packed into one sequence do not see each other. Four bytes a
    /// token more than without; blocks of keys that nobody sees are passed over.
    ///
    /// # Errors
    /// As [`Self::causal_attention`]; where sequences are continued.
    pub fn document_attention(&self, k: &Self, v: &Self, starts: &Self, scale: f64) -> Result<Self> {
        if let Sequences::Continued { .. } = self.sequences() {
            self.expect_whole_sequences()?;
        }
        self.fused_attention(&[self, k, v, starts], ops::Attention::causal(scale))
    }

    /// Attention under a mask that broadcasts to [batch, heads, queries, keys]: of u8 or u32, 0 for the keys that a query does not
    /// see; of floats, what is added to the scores. A query that sees nothing gives NaN. The scores exist whole.
    ///
    /// # Errors
    /// When the shapes do not fit or the heads are not a multiple of the key-value heads; where sequences are continued, for there is
    /// no cache that a mask is laid over, or documents packed.
    pub fn masked_attention(&self, k: &Self, v: &Self, mask: &Self, scale: f64) -> Result<Self> {
        self.expect_whole_sequences()?;
        let (batch, heads, queries, size) = self.dims4()?;
        let (_, kv_heads, keys, _) = k.dims4()?;
        if kv_heads == 0 || heads % kv_heads != 0 {
            let what = format!("{heads} heads are not a multiple of {kv_heads} key-value heads");
            return Err(self.shape_error("masked_attention", what));
        }
        // Key-value heads once for each head that reads them.
        let shared = |x: &Self| {
            let repeated = x.unsqueeze(2)?.broadcast_as((batch, kv_heads, heads / kv_heads, keys, size))?;
            repeated.reshape((batch, heads, keys, size))
        };
        let scores = (self.matmul(&shared(k)?.t()?)? * scale)?;
        let mask = mask.broadcast_as((batch, heads, queries, keys))?;
        let scores = match mask.dtype().is_float() {
            true => scores.add(&mask)?,
            false => scores.masked_fill(&mask.eq(0u8)?, f32::NEG_INFINITY)?,
        };
        scores.softmax_last_dim()?.matmul(&shared(v)?)
    }

    /// Causal attention in which every query sees the last `window` keys up to its own (Beltagy et al., arXiv 2004.05150). Blocks of
    /// keys that nobody sees are passed over.
    ///
    /// # Errors
    /// As [`Self::causal_attention`]; a window of 0.
    pub fn sliding_attention(&self, k: &Self, v: &Self, window: usize, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention { window: Some(window), ..ops::Attention::causal(scale) })
    }

    fn expect_whole_sequences(&self) -> Result<()> {
        let why = match self.sequences() {
            Sequences::Whole => return Ok(()),
            Sequences::Continued { .. } => "attention over a cache must be causal",
            Sequences::Packed { .. } => "attention over packed documents must be causal",
        };
        Err(self.shape_error("attention", why.into()))
    }

    fn fused_attention(&self, inputs: &[&Self], how: ops::Attention) -> Result<Self> {
        let [out, _] = Self::apply_op::<2>(how, inputs)?;
        out.transpose(1, 2)
    }
}
