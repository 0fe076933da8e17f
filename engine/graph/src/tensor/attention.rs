//! Attention. It is one fused operation if it is causal or unmasked, and composed of other operations if an arbitrary
//! mask is given.

use candle_core::DType;

use super::Tensor;
use crate::error::Result;
use crate::graph::Sequences;
use crate::ops;

/// Attention, with `self` as the queries.
impl Tensor {
    /// Fused causal attention. The queries `self` are [batch, heads, tokens, head size], keys and values [batch,
    /// key-value heads, tokens, head size]. The scores, tokens × tokens, are never stored (FlashAttention, arXiv
    /// 2205.14135).
    ///
    /// If sequences are continued ([`Sequences`]), the new keys and values are written to a cache, and queries also see
    /// the past tokens in that cache. If documents are packed, this is [`Self::document_attention`] over the packed
    /// documents.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the heads are not a multiple of the key-value heads.
    pub fn causal_attention(&self, k: &Self, v: &Self, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention::causal(scale))
    }

    /// Fused attention with the settings of [`ops::Attention`], such as a window and a soft cap. The values of a head
    /// may have another size than the keys. Causal attention treats continued sequences and packed documents as
    /// [`Self::causal_attention`] does.
    ///
    /// # Errors
    /// Returns the errors of [`Self::causal_attention`]. Returns an error if a window is set but the attention is not
    /// causal, or if the scale or the cap is not positive.
    pub fn attend(&self, k: &Self, v: &Self, how: ops::Attention) -> Result<Self> {
        self.attend_past(&k.cached("keys")?, &v.cached("values")?, how)
    }

    /// Like [`Self::attend`], for keys and values that are computed from results of [`Self::cached`]. These keys and
    /// values already cover all tokens of the window, so they are not cached again.
    ///
    /// # Errors
    /// Returns the errors of [`Self::attend`].
    pub fn attend_past(&self, k: &Self, v: &Self, how: ops::Attention) -> Result<Self> {
        if !how.causal {
            self.expect_whole_sequences()?;
        }
        match self.sequences() {
            Sequences::Whole | Sequences::Placed { .. } => self.fused_attention(&[self, k, v], how),
            Sequences::Packed { document_starts, .. } => {
                self.fused_attention(&[self, k, v, &Self::of(&self.graph, document_starts)], how)
            }
            Sequences::Continued { positions, .. } => {
                let inputs = [self, k, v, &Self::of(&self.graph, positions)];
                Self::apply_op::<1>(ops::CachedAttention(how), &inputs)?[0].transpose(1, 2)
            }
        }
    }

    /// Like [`Self::attend`], with a sink for each head: `sinks` `[heads]` are scores that take part in the softmax but have
    /// no value. So the weights of a query's keys sum to less than 1.
    ///
    /// # Errors
    /// Returns the errors of [`Self::attend`], and an error if `sinks` is not `[heads]`.
    pub fn attend_with_sinks(&self, k: &Self, v: &Self, sinks: &Self, how: ops::Attention) -> Result<Self> {
        let (k, v) = (&k.cached("keys")?, &v.cached("values")?);
        let sinks = sinks.to_dtype(DType::F32)?;
        let mut inputs = vec![self.clone(), k.clone(), v.clone()];
        match self.sequences() {
            Sequences::Whole | Sequences::Placed { .. } => {}
            Sequences::Packed { document_starts, .. } => inputs.push(Self::of(&self.graph, document_starts)),
            Sequences::Continued { positions, .. } => {
                let inputs = [self, k, v, &Self::of(&self.graph, positions), &sinks];
                return Self::apply_op::<1>(ops::CachedAttention(how), &inputs)?[0].transpose(1, 2);
            }
        }
        let inputs: Vec<&Self> = inputs.iter().collect();
        let [out, lse] = Self::apply_op::<2>(how, &inputs)?;
        // The share of the softmax that keys have: exp(lse) / (exp(lse) + exp(sink)).
        let share = lse.broadcast_sub(&sinks.unsqueeze(1)?)?.sigmoid()?;
        let y = out.broadcast_mul(&share.transpose(1, 2)?.unsqueeze(3)?.to_dtype(out.dtype())?)?.detach();
        let lse = lse.sub(&share.log()?)?.detach();
        let inputs: Vec<&Self> = [&y, &lse, &sinks].into_iter().chain(inputs).collect();
        Self::apply_op::<1>(ops::SinkAttention(how), &inputs)?[0].transpose(1, 2)
    }

    /// Like [`Self::causal_attention`], but every query sees every key.
    ///
    /// # Errors
    /// Returns the errors of [`Self::causal_attention`]. Returns an error if documents are packed, or if sequences are
    /// continued, because future keys are not known then.
    pub fn attention(&self, k: &Self, v: &Self, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention::full(scale))
    }

    /// Like [`Self::causal_attention`], but `starts` (u32 [batch, tokens]) gives for each query the index of the first
    /// key that the query sees. If this is the first token of the query's document, documents that are packed into one
    /// sequence do not see each other. Blocks of keys that no query sees are skipped. `starts` takes 4 bytes per token.
    ///
    /// # Errors
    /// Returns the errors of [`Self::causal_attention`], and an error if sequences are continued.
    pub fn document_attention(&self, k: &Self, v: &Self, starts: &Self, scale: f64) -> Result<Self> {
        if let Sequences::Continued { .. } = self.sequences() {
            self.expect_whole_sequences()?;
        }
        self.fused_attention(&[self, k, v, starts], ops::Attention::causal(scale))
    }

    /// Attention with a mask that broadcasts to [batch, heads, queries, keys]. A mask of u8 or u32 is 0 for keys that a
    /// query does not see. A mask of floats is added to the scores. A query that sees no key gives NaN. The scores are
    /// stored as a whole.
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the heads are not a multiple of the key-value heads. Returns an
    /// error if documents are packed, or if sequences are continued, because masks do not cover the cache.
    pub fn masked_attention(&self, k: &Self, v: &Self, mask: &Self, scale: f64) -> Result<Self> {
        self.expect_whole_sequences()?;
        let (batch, heads, queries, size) = self.dims4()?;
        let (_, kv_heads, keys, _) = k.dims4()?;
        if kv_heads == 0 || heads % kv_heads != 0 {
            let what = format!("{heads} heads are not a multiple of {kv_heads} key-value heads");
            return Err(self.shape_error("masked_attention", what));
        }
        // Repeats each key-value head for all query heads that read it.
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

    /// Causal attention in which every query sees only the last `window` keys, including the query's own (Beltagy et
    /// al., arXiv 2004.05150). Blocks of keys that no query sees are skipped.
    ///
    /// # Errors
    /// Returns the errors of [`Self::causal_attention`], and an error for a window of 0.
    pub fn sliding_attention(&self, k: &Self, v: &Self, window: usize, scale: f64) -> Result<Self> {
        self.attend(k, v, ops::Attention { window: Some(window), ..ops::Attention::causal(scale) })
    }

    fn expect_whole_sequences(&self) -> Result<()> {
        let why = match self.sequences() {
            Sequences::Whole | Sequences::Placed { .. } => return Ok(()),
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
