//! The terms of a loss over a vocabulary in addition to the likelihood of the targets.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The loss of a row of logits x over a vocabulary of V, with L = ln Σ eˣ and target t:
///
/// ```text
/// loss = L − (1 − ε)·x[t] − ε/V·Σx + z·L²
/// ```
///
/// ε is the label smoothing (Szegedy et al., arXiv 1512.00567, section 7). z is the weight of the z-loss (PaLM, arXiv
/// 2204.02311, section 5).
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LossTerms {
    /// The share of a target's probability that is spread evenly over the whole vocabulary.
    pub label_smoothing: f64,
    /// The weight of the squared log-sum-exp of the logits in the loss; 1e-4 is usual.
    pub z_loss: f64,
}

impl LossTerms {
    /// The default: plain cross-entropy, −log softmax(x)`[t]`.
    pub const NONE: Self = Self { label_smoothing: 0.0, z_loss: 0.0 };

    /// Returns the coefficients that kernels use for a row of `vocabulary` logits.
    #[inline(always)]
    pub fn for_row(&self, vocabulary: usize) -> RowLoss {
        let (smoothing, z) = (self.label_smoothing as f32, self.z_loss as f32);
        RowLoss { keep: 1.0 - smoothing, spread: smoothing / vocabulary as f32, z }
    }

    /// Returns the loss of a row and the gradient of each of its logits, in f64.
    pub fn exact(&self, logits: &[f64], target: usize) -> (f64, Vec<f64>) {
        let (vocabulary, Self { label_smoothing: e, z_loss: z }) = (logits.len() as f64, *self);
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        let spread = if e > 0.0 { e / vocabulary * logits.iter().sum::<f64>() } else { 0.0 };
        let loss = lse - (1.0 - e) * logits[target] - spread + z * lse * lse;
        (loss, self.gradient(logits, lse, target))
    }

    /// Returns the gradient of each logit of a row, given the row's log-sum-exp, in f64.
    pub fn gradient(&self, logits: &[f64], lse: f64, target: usize) -> Vec<f64> {
        let Self { label_smoothing: e, z_loss: z } = *self;
        let wanted = |i: usize| e / logits.len() as f64 + if i == target { 1.0 - e } else { 0.0 };
        logits.iter().enumerate().map(|(i, x)| (x - lse).exp() * (1.0 + 2.0 * z * lse) - wanted(i)).collect()
    }
}

/// The coefficients of a loss for rows of one length.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RowLoss {
    /// The coefficient of the target's own logit: 1 − ε.
    pub keep: f32,
    /// The coefficient of the sum of all logits: ε/V.
    pub spread: f32,
    /// The coefficient of the squared log-sum-exp.
    pub z: f32,
}

impl RowLoss {
    /// Returns the loss of a row from its log-sum-exp, the target's logit, and the sum of all logits. The sum is only
    /// used if there is label smoothing.
    #[inline(always)]
    pub fn loss(self, lse: f32, logit: f32, sum: f32) -> f32 {
        lse - self.keep * logit - self.spread * sum + self.z * lse * lse
    }

    /// Returns the multiplier of the softmax in the gradient of the logits.
    #[inline(always)]
    pub fn of_softmax(self, lse: f32) -> f32 {
        1.0 + 2.0 * self.z * lse
    }
}
