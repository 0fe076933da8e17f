//! Losses over pairs of answers to the same prompt, of which one is preferred.
//!
//! In: the weighted loss of each token, where sequence 2i of the batch has the chosen answer of pair i, and sequence
//! 2i + 1 the rejected one. Out: a tensor of the same shape whose mean is the loss of the pairs. Never: a model's code,
//! which records the same loss as for any other training.

use candle_core::D;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::graph::{LossPart, SequenceLoss, Sequences, lock};
use crate::tensor::Tensor;

/// Training on preferences: `[preference]` of a run file. Each pair of answers has a chosen and a rejected answer to
/// the same prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Preference {
    /// The loss of a pair.
    pub loss: PairLoss,
    /// The factor β of the rewards. With `ipo`, it is the paper's τ; with `orpo`, it is the weight λ of the odds ratio.
    pub beta: f64,
    /// Whether likelihoods are compared with those of a reference model, which is the model with which the run starts.
    /// Adapters are zero at the start of a run, so with LoRA the reference is the frozen base. If false, the reference
    /// gives all answers the same likelihood. `orpo` has no reference.
    pub reference: bool,
}

/// The loss of a pair. Here, r(y) = log π(y) − log π_ref(y) is the log-likelihood ratio of an answer y with |y| tokens,
/// y⁺ is the chosen answer, and y⁻ is the rejected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PairLoss {
    /// Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7): −log σ(β·(r(y⁺) − r(y⁻))).
    #[default]
    #[serde(alias = "sigmoid")]
    Dpo,
    /// Identity preference optimization (Azar et al., arXiv 2310.12036, equation 17), with ratios per token as in TRL:
    /// (r(y⁺)/|y⁺| − r(y⁻)/|y⁻| − 1/(2β))².
    Ipo,
    /// Odds ratio preference optimization (Hong et al., arXiv 2403.07691, equations 6 and 7). With m(y) = log π(y)/|y|
    /// and o(y) = m(y) − log(1 − exp m(y)), the loss is −m(y⁺) − β·log σ(o(y⁺) − o(y⁻)).
    Orpo,
}

impl Default for Preference {
    fn default() -> Self {
        Self { loss: PairLoss::Dpo, beta: 0.1, reference: true }
    }
}

/// The mean rewards of a batch of pairs. With `dpo` and `ipo`, the reward of an answer is β·r ([`PairLoss`]). With
/// `orpo`, it is β·m.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rewards {
    /// Mean reward of the chosen answers.
    pub chosen: f32,
    /// Mean reward of the rejected answers.
    pub rejected: f32,
    /// Mean difference of the two rewards of a pair.
    pub margin: f32,
    /// The part of pairs whose chosen answer has the higher reward.
    pub accuracy: f32,
}

impl std::fmt::Display for Rewards {
    /// Formats the rewards, e.g. "margin 0.123 accuracy 75 %".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "margin {:.3} accuracy {:.0} %", self.margin, 100.0 * self.accuracy)
    }
}

impl Preference {
    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if beta is not a positive number.
    pub fn check(&self) -> Result<()> {
        match self.beta.is_finite() && self.beta > 0.0 {
            true => Ok(()),
            false => Err(Error::config("preference.beta", format!("is {}", self.beta), "set it above 0; 0.1 is usual")),
        }
    }

    /// True if the loss needs the log-likelihoods of a reference model.
    pub fn needs_reference(&self) -> bool {
        self.reference && self.loss != PairLoss::Orpo
    }

    /// Returns the loss and the rewards of one pair: the chosen answer and the rejected one.
    pub fn of_pair(&self, pair: [Answer; 2]) -> (f64, Rewards) {
        let log_sigmoid = |x: f64| x.min(0.0) - (-x.abs()).exp().ln_1p();
        let ratio = |answer: Answer| answer.log_likelihood - answer.reference;
        let mean = |answer: Answer| ratio(answer) / answer.tokens as f64;
        let (rewards, loss) = match self.loss {
            PairLoss::Dpo => {
                let [chosen, rejected] = pair.map(|answer| self.beta * ratio(answer));
                ([chosen, rejected], -log_sigmoid(chosen - rejected))
            }
            PairLoss::Ipo => {
                let [chosen, rejected] = pair.map(mean);
                (pair.map(|answer| self.beta * ratio(answer)), (chosen - rejected - 0.5 / self.beta).powi(2))
            }
            PairLoss::Orpo => {
                let means = pair.map(mean);
                let [chosen, rejected] = means.map(|mean| mean - (-mean.exp_m1()).ln());
                (means.map(|mean| self.beta * mean), -means[0] - self.beta * log_sigmoid(chosen - rejected))
            }
        };
        let [chosen, rejected] = rewards;
        let accuracy = f32::from(u8::from(chosen > rejected));
        let [margin, chosen, rejected] = [chosen - rejected, chosen, rejected].map(|reward| reward as f32);
        (loss, Rewards { chosen, rejected, margin, accuracy })
    }
}

/// An answer, as [`Preference::of_pair`] compares it.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    /// Sum of log p over the answer's tokens.
    pub log_likelihood: f64,
    /// The same sum under the reference model; 0 without a reference.
    pub reference: f64,
    /// Number of tokens of the answer that count in the loss.
    pub tokens: usize,
}

impl Tensor {
    /// Applies the graph's [`SequenceLoss`] to `self`, the weighted loss of each token. Returns a tensor of the same
    /// shape, whose mean is the loss of the step.
    pub(crate) fn compared(self) -> Result<Self> {
        let graph = self.graph();
        let (sequence_loss, sequences) = {
            let graph = lock(graph);
            (graph.sequence_loss(), graph.sequences())
        };
        let (Some(sequence_loss), Sequences::Packed { weights, .. }) = (sequence_loss, sequences) else {
            return Ok(self);
        };
        let weights = Self::of(graph, weights);
        let log_likelihoods = self.reshape(weights.shape().clone())?.sum(D::Minus1)?.neg()?;
        let SequenceLoss::Pairs { preference, reference } = sequence_loss else {
            lock(graph).set_log_likelihoods(log_likelihoods.id());
            return Ok(self);
        };
        let pairs = |tensor: &Self| tensor.reshape((tensor.elem_count() / 2, 2));
        let reference = reference.map(|id| Self::of(graph, id));
        let ratios = pairs(&reference.map_or(Ok(log_likelihoods.clone()), |known| log_likelihoods.sub(&known))?)?;
        let means = |ratios: &Self| ratios.div(&pairs(&weights.sum(D::Minus1)?)?);
        let chosen = |both: &Self| both.narrow(1, 0, 1);
        let margin = |both: &Self| chosen(both)?.sub(&both.narrow(1, 1, 1)?);
        // −log σ(a − b) is log(e⁰ + e^(b−a)), whose gradient is exact where the difference is 0.
        let losing = |both: &Self| both.broadcast_sub(&chosen(both)?)?.log_sum_exp(D::Minus1);
        let beta = preference.beta;
        let (rewards, losses) = match preference.loss {
            PairLoss::Dpo => {
                let rewards = ratios.affine(beta, 0.0)?;
                let losses = losing(&rewards)?;
                (rewards, losses)
            }
            PairLoss::Ipo => (ratios.affine(beta, 0.0)?, margin(&means(&ratios)?)?.affine(1.0, -0.5 / beta)?.sqr()?),
            PairLoss::Orpo => {
                let means = means(&ratios)?;
                let odds = means.sub(&means.exp()?.affine(-1.0, 1.0)?.log()?)?;
                let losses = losing(&odds)?.affine(beta, 0.0)?.sub(&chosen(&means)?.squeeze(1)?)?;
                (means.affine(beta, 0.0)?, losses)
            }
        };
        let loss = losses.mean_all()?;
        let margin = margin(&rewards)?;
        let wins = margin.gt(0.0)?.where_cond(&margin.ones_like()?, &margin.zeros_like()?)?;
        let reported = [
            (LossPart::ChosenReward, chosen(&rewards)?),
            (LossPart::RejectedReward, rewards.narrow(1, 1, 1)?),
            (LossPart::RewardMargin, margin),
            (LossPart::RewardAccuracy, wins),
        ];
        for (part, tensor) in reported {
            tensor.report_loss(part, &loss)?;
        }
        loss.broadcast_as(self.shape().clone())
    }
}
