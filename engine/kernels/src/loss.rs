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
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        let loss = self.exact_loss(lse, logits[target], logits.iter().sum(), logits.len());
        (loss, self.gradient(logits, lse, target))
    }

    /// Returns the loss of a row of `vocabulary` logits from its log-sum-exp, the target's logit, and the sum of all
    /// logits, in f64.
    pub fn exact_loss(&self, lse: f64, logit: f64, sum: f64, vocabulary: usize) -> f64 {
        let Self { label_smoothing: e, z_loss: z } = *self;
        let spread = if e > 0.0 { e / vocabulary as f64 * sum } else { 0.0 };
        lse - (1.0 - e) * logit - spread + z * lse * lse
    }

    /// Returns the gradient of each logit of a row, given the row's log-sum-exp, in f64.
    pub fn gradient(&self, logits: &[f64], lse: f64, target: usize) -> Vec<f64> {
        self.gradient_of_part(logits, lse, Some(target), logits.len())
    }

    /// Returns the gradient of some logits of a row of `vocabulary` logits, given the row's log-sum-exp, in f64. `target`
    /// is the index of the target's logit, or `None` if it is not among these logits.
    pub fn gradient_of_part(&self, logits: &[f64], lse: f64, target: Option<usize>, vocabulary: usize) -> Vec<f64> {
        let Self { label_smoothing: e, z_loss: z } = *self;
        let wanted = |i: usize| e / vocabulary as f64 + if Some(i) == target { 1.0 - e } else { 0.0 };
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
