//! The terms of a step's loss.

use gapless_compile::ProgramId;
use gapless_compile::step::LOSS_PARTS;
use gapless_graph::LossPart;
use gapless_graph::nn::Rewards;
use gapless_runtime::Session;

use crate::error::Result;

/// The terms of a training loss. Each term includes its weight, so their sum is the loss.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct LossParts {
    /// Mean of −log p over the targets that count in the loss; in training on preferences, the mean loss of the pairs.
    #[serde(rename = "loss_likelihood")]
    pub likelihood: f32,
    /// Sum of the balance losses of all routers; `None` if the loss has no such term.
    #[serde(rename = "loss_balance", skip_serializing_if = "Option::is_none")]
    pub balance: Option<f32>,
    /// Sum of the z-losses of all routers; `None` if the loss has no such term.
    #[serde(rename = "loss_router_z", skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f32>,
    /// Sum of the terms for label smoothing and z-loss of the head
    /// ([`StepOptions::loss`](gapless_compile::step::StepOptions::loss)); `None` if the loss has neither.
    #[serde(rename = "loss_regularization", skip_serializing_if = "Option::is_none")]
    pub regularization: Option<f32>,
}

impl LossParts {
    /// The outputs of the training step that [`Self::read`] needs.
    pub(super) fn outputs(session: &Session, program: Option<ProgramId>) -> Vec<(LossPart, &'static str)> {
        let Some(program) = program else { return Vec::new() };
        let has_output = |name: &str| session.has_output(program, name);
        LOSS_PARTS.into_iter().filter(|(_, name)| has_output(name)).collect()
    }

    /// Returns the terms of the last step's loss, or `None` if the loss is the likelihood alone. Also returns the
    /// rewards, or `None` if the step does not train on preferences.
    pub(super) fn read(
        session: &Session,
        program: ProgramId,
        outputs: &[(LossPart, &str)],
        loss: f32,
    ) -> Result<(Option<Self>, Option<Rewards>)> {
        let (mut likelihood, mut balance, mut router_z) = (None, None, None);
        let mut rewards: Option<Rewards> = None;
        for (part, name) in outputs {
            let value = session.scalar(program, name)?;
            match part {
                LossPart::Likelihood => likelihood = Some(value),
                LossPart::Balance => balance = Some(value),
                LossPart::RouterZ => router_z = Some(value),
                LossPart::ChosenReward => rewards.get_or_insert_default().chosen = value,
                LossPart::RejectedReward => rewards.get_or_insert_default().rejected = value,
                LossPart::RewardMargin => rewards.get_or_insert_default().margin = value,
                LossPart::RewardAccuracy => rewards.get_or_insert_default().accuracy = value,
            }
        }
        // The loss without the terms of routers: the likelihood and the regularization.
        let of_head = loss - balance.unwrap_or_default() - router_z.unwrap_or_default();
        let regularization = likelihood.map(|likelihood| of_head - likelihood);
        let parts = Self { likelihood: likelihood.unwrap_or(of_head), balance, router_z, regularization };
        let has_parts = [likelihood, balance, router_z].iter().any(Option::is_some);
        Ok((has_parts.then_some(parts), rewards))
    }
}

impl std::fmt::Display for LossParts {
    /// Formats the terms, e.g. "likelihood 3.141, balance 0.021, router z 0.001".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "likelihood {:.3}", self.likelihood)?;
        let parts = [("balance", self.balance), ("router z", self.router_z), ("regularization", self.regularization)];
        for (name, part) in parts {
            part.map_or(Ok(()), |part| write!(f, ", {name} {part:.3}"))?;
        }
        Ok(())
    }
}
