//! Losses over pairs of answers to the same prompt, of which one is preferred, and over answers with a label.
//!
//! In: the weighted loss of each token, where sequence 2i of the batch has the chosen answer of pair i, and sequence
//! 2i + 1 the rejected one. With `kto`, sequence 2i has an answer with a label, and sequence 2i + 1 the same prompt with
//! the answer to another one. Out: a tensor of the same shape whose mean is the loss of the pairs. Never: a model's code,
//! which records the same loss as for any other training.

use candle_core::D;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::graph::{LossPart, SequenceLoss, Sequences, lock};
use crate::tensor::Tensor;

/// Training on preferences: `[preference]` of a run file. Each pair of answers has a chosen and a rejected answer to
/// the same prompt. With `kto`, there are answers with a label instead.
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
    /// The weight of the losses of desirable answers; only for `kto`.
    pub desirable_weight: f64,
    /// The weight of the losses of undesirable answers; only for `kto`.
    pub undesirable_weight: f64,
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
    /// Kahneman-Tversky optimization (Ethayarajh et al., arXiv 2402.01306, equation 8) of answers y with a label:
    /// w⁺·(1 − σ(β·(r(y) − z))) if y is desirable, w⁻·(1 − σ(β·(z − r(y)))) otherwise. The weights w⁺ and w⁻ are
    /// `desirable_weight` and `undesirable_weight`. The reference point z is max(0, the mean of r(y') over the
    /// micro-batch), where y' is the answer to another prompt; it has no gradient.
    Kto,
}

impl Default for Preference {
    fn default() -> Self {
        Self { loss: PairLoss::Dpo, beta: 0.1, reference: true, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

/// The mean rewards of a batch of pairs. With `dpo`, `ipo` and `kto`, the reward of an answer is β·r ([`PairLoss`]). With
/// `orpo`, it is β·m. With `kto`, the chosen answers are the desirable ones, and the rewards of a batch are the means of
/// those of its micro-batches; a kind of answer that a micro-batch lacks has a reward of 0 there.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rewards {
    /// Mean reward of the chosen answers.
    pub chosen: f32,
    /// Mean reward of the rejected answers.
    pub rejected: f32,
    /// Mean difference of the two rewards of a pair; with `kto`, the difference of the two means.
    pub margin: f32,
    /// The part of pairs whose chosen answer has the higher reward. With `kto`, the part of answers whose reward is above
    /// that of the reference point z if they are desirable, and below it otherwise.
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
    /// Returns [`Error::Config`] if beta is not a positive number, if a weight is negative or both are 0, or if there are
    /// weights but the loss has none.
    pub fn check(&self) -> Result<()> {
        if !(self.beta.is_finite() && self.beta > 0.0) {
            let why = format!("is {}", self.beta);
            return Err(Error::config("preference.beta", why, "set it above 0; 0.1 is usual"));
        }
        let Self { desirable_weight: desirable, undesirable_weight: undesirable, .. } = *self;
        let why = format!("the weights of desirable and undesirable answers are {desirable} and {undesirable}");
        let is_weight = |weight: f64| weight.is_finite() && weight >= 0.0;
        if !is_weight(desirable) || !is_weight(undesirable) || desirable + undesirable == 0.0 {
            return Err(Error::config("preference", why, "set them to 0 or above, and one above 0; 1 is usual"));
        }
        if self.loss != PairLoss::Kto && (desirable, undesirable) != (1.0, 1.0) {
            return Err(Error::config("preference", why, "leave them out; only the loss kto has these weights"));
        }
        Ok(())
    }

    /// True if the loss needs the log-likelihoods of a reference model.
    pub fn needs_reference(&self) -> bool {
        self.reference && self.loss != PairLoss::Orpo
    }

    /// Returns the mean loss and the mean rewards of pairs: a chosen and a rejected answer. With `kto`, a pair is an answer
    /// with a label and the answer to another prompt; all pairs share the reference point.
    pub fn of_pairs(&self, pairs: &[[Answer; 2]]) -> (f64, Rewards) {
        if self.loss == PairLoss::Kto {
            return self.of_labelled(pairs);
        }
        let pairs: Vec<_> = pairs.iter().map(|pair| self.of_pair(*pair)).collect();
        let mean = |of: &dyn Fn(&(f64, Rewards)) -> f64| pairs.iter().map(of).sum::<f64>() / pairs.len() as f64;
        let reward = |of: fn(&Rewards) -> f32| mean(&|(_, rewards)| f64::from(of(rewards))) as f32;
        let rewards = Rewards {
            chosen: reward(|rewards| rewards.chosen),
            rejected: reward(|rewards| rewards.rejected),
            margin: reward(|rewards| rewards.margin),
            accuracy: reward(|rewards| rewards.accuracy),
        };
        (mean(&|(loss, _)| *loss), rewards)
    }

    fn of_labelled(&self, pairs: &[[Answer; 2]]) -> (f64, Rewards) {
        let reward = |answer: &Answer| self.beta * (answer.log_likelihood - answer.reference);
        let count = pairs.len() as f64;
        let point = (pairs.iter().map(|[_, other]| reward(other)).sum::<f64>() / count).max(0.0);
        let (mut loss, mut right, mut sums, mut counts) = (0.0, 0.0, [0.0; 2], [0.0f64; 2]);
        for [answer, _] in pairs {
            let (kind, sign, weight) = match answer.is_desirable {
                true => (0, 1.0, self.desirable_weight),
                false => (1, -1.0, self.undesirable_weight),
            };
            let above = sign * (reward(answer) - point);
            loss += weight / (1.0 + above.exp()) / count;
            right += f64::from(u8::from(above > 0.0)) / count;
            sums[kind] += reward(answer);
            counts[kind] += 1.0;
        }
        let [chosen, rejected] = [0, 1].map(|kind| sums[kind] / counts[kind].max(1.0));
        let [chosen, rejected, margin, accuracy] = [chosen, rejected, chosen - rejected, right].map(|it| it as f32);
        (loss, Rewards { chosen, rejected, margin, accuracy })
    }

    fn of_pair(&self, pair: [Answer; 2]) -> (f64, Rewards) {
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
            PairLoss::Kto => unreachable!("its answers have labels"),
        };
        let [chosen, rejected] = rewards;
        let accuracy = f32::from(u8::from(chosen > rejected));
        let [margin, chosen, rejected] = [chosen - rejected, chosen, rejected].map(|reward| reward as f32);
        (loss, Rewards { chosen, rejected, margin, accuracy })
    }
}

/// An answer, as [`Preference::of_pairs`] compares it.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    /// Sum of log p over the answer's tokens.
    pub log_likelihood: f64,
    /// The same sum under the reference model; 0 without a reference.
    pub reference: f64,
    /// Number of tokens of the answer that count in the loss.
    pub tokens: usize,
    /// The answer's label; only `kto` reads it.
    pub is_desirable: bool,
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
        let SequenceLoss::Pairs { preference, reference, desirable } = sequence_loss else {
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
        if let Some(desirable) = desirable {
            let labels = chosen(&pairs(&Self::of(graph, desirable))?)?;
            return preference.labelled(&ratios.affine(beta, 0.0)?, &labels)?.broadcast_as(self.shape().clone());
        }
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
            PairLoss::Kto => unreachable!("its step has labels"),
        };
        let loss = losses.mean_all()?;
        let margin = margin(&rewards)?;
        let wins = margin.gt(0.0)?.where_cond(&margin.ones_like()?, &margin.zeros_like()?)?;
        report([chosen(&rewards)?, rewards.narrow(1, 1, 1)?, margin, wins], &loss)?;
        loss.broadcast_as(self.shape().clone())
    }
}

impl Preference {
    /// Returns the mean loss of answers with labels, and reports their rewards. `rewards` [pairs, 2] has the reward of each
    /// answer and that of the answer to another prompt, and `labels` [pairs, 1] has 1 for a desirable answer and 0 for an
    /// undesirable one.
    fn labelled(&self, rewards: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let answers = rewards.narrow(1, 0, 1)?;
        let point = rewards.narrow(1, 1, 1)?.mean_all()?.maximum(0.0)?.detach();
        let above = answers.broadcast_sub(&point)?.mul(&labels.affine(2.0, -1.0)?)?;
        let Self { desirable_weight, undesirable_weight, .. } = *self;
        let weights = labels.affine(desirable_weight - undesirable_weight, undesirable_weight)?;
        let loss = above.neg()?.sigmoid()?.mul(&weights)?.mean_all()?;
        let mean_of = |kind: &Tensor| answers.mul(kind)?.sum_all()?.div(&kind.sum_all()?.maximum(1.0)?);
        let (chosen, rejected) = (mean_of(labels)?, mean_of(&labels.affine(-1.0, 1.0)?)?);
        let margin = chosen.sub(&rejected)?;
        let right = above.gt(0.0)?.where_cond(&above.ones_like()?, &above.zeros_like()?)?;
        report([chosen, rejected, margin, right], &loss)?;
        Ok(loss)
    }
}

/// Reports the means of rewards, in the order of the fields of [`Rewards`].
fn report(rewards: [Tensor; 4], loss: &Tensor) -> Result<()> {
    let parts = [LossPart::ChosenReward, LossPart::RejectedReward, LossPart::RewardMargin, LossPart::RewardAccuracy];
    parts.into_iter().zip(rewards).try_for_each(|(part, tensor)| tensor.report_loss(part, loss))
}
