//! Exchange of rows between the ranks that share the experts.

use super::Routing;
use crate::error::{Error, Result};
use crate::nn::ExpertRanks;
use crate::ops::{Collective, GroupedLinear, LimitedActivation, RoutedSwiGlu, RunLengths, RunStarts};
use crate::tensor::Tensor;

/// The exchange of rows between the expert ranks, and the products on the rows of this rank's experts. On one rank,
/// these rows come from the rank's own tokens. On several ranks, they come from the tokens of all expert ranks.
#[derive(Debug, Clone)]
pub struct Exchange {
    ranks: ExpertRanks,
    /// Row offsets of the runs of rows of this rank's tokens, ordered by expert.
    sent: Tensor,
    /// Row offsets of the runs of rows of this rank's experts.
    received: Tensor,
    /// The maximum number of rows of this rank's tokens.
    rows_sent: usize,
    /// The maximum number of rows of this rank's experts.
    rows_received: usize,
}

impl Routing {
    /// Records that expert ranks exchange the numbers of rows that they will send to each other. Returns the
    /// [`Exchange`] with which the rows themselves are sent.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not a multiple of the number of expert ranks.
    pub fn exchange(&self, expert_ranks: ExpertRanks) -> Result<Exchange> {
        let ExpertRanks { axes, ranks, .. } = expert_ranks;
        if ranks == 0 || !self.experts.is_multiple_of(ranks) {
            let why = format!("{ranks} ranks cannot share {} experts equally", self.experts);
            return Err(Error::config("mesh.expert", why, "choose a divisor of the number of experts"));
        }
        let sent = self.starts.clone();
        let rows_sent = self.slots.elem_count();
        if ranks == 1 {
            let received = sent.clone();
            return Ok(Exchange { ranks: expert_ranks, received, sent, rows_sent, rows_received: rows_sent });
        }
        let [lengths] = Tensor::apply_op(RunLengths, &[&sent])?;
        let [lengths] = Tensor::apply_op(Collective::AllToAll { axes, ranks }, &[&lengths])?;
        let [received] = Tensor::apply_op(RunStarts, &[&lengths])?;
        let rows_received = ranks * self.most_rows(ranks);
        Ok(Exchange { ranks: expert_ranks, sent, received, rows_sent, rows_received })
    }

    /// Returns the maximum number of rows that this rank's tokens may have on one expert rank.
    fn most_rows(&self, ranks: usize) -> usize {
        let dims = self.places.dims();
        let (choices, sequences) = (dims[dims.len() - 1], dims[0]);
        let tokens: usize = dims[..dims.len() - 1].iter().product();
        // A token chooses each expert at most once. So it has at most as many rows on a rank as the rank has experts.
        let most = tokens * choices.min(self.experts / ranks);
        self.capacity.map_or(most, |capacity| most.min(sequences * (self.experts / ranks) * capacity))
    }
}

impl Exchange {
    /// Sends the rows of this rank's tokens, [rows, width], to the ranks that hold the experts of these rows. Returns
    /// the rows of this rank's experts, [rows, width]. Any width is allowed.
    ///
    /// # Errors
    /// Returns an error if `rows` does not have as many rows as the routing.
    pub fn receive(&self, rows: &Tensor) -> Result<Tensor> {
        self.all_to_all(rows, true, &self.sent, &self.received)
    }

    /// Sends the rows of this rank's experts back to the ranks from which they came. This is the reverse of
    /// [`Self::receive`].
    ///
    /// # Errors
    /// Returns an error if `rows` does not have as many rows as this rank's experts.
    pub fn send_back(&self, rows: &Tensor) -> Result<Tensor> {
        self.all_to_all(rows, false, &self.received, &self.sent)
    }

    /// Returns the number of rows of this rank's experts under balanced routing. Returns `None` on one rank, where the
    /// number of rows is fixed.
    fn balanced(&self) -> Option<usize> {
        (self.ranks.ranks > 1).then_some(self.rows_sent)
    }

    fn all_to_all(&self, rows: &Tensor, to_experts: bool, from: &Tensor, to: &Tensor) -> Result<Tensor> {
        if self.ranks.ranks == 1 {
            return Ok(rows.clone());
        }
        let rows_there = if to_experts { self.rows_received } else { self.rows_sent };
        let op = Collective::AllToAllRows {
            axes: self.ranks.axes,
            ranks: self.ranks.ranks,
            rows: rows_there,
            receives_dynamic_rows: to_experts,
            balanced: self.rows_sent,
        };
        Tensor::apply_op::<1>(op, &[rows, from, to]).map(|[rows]| rows)
    }

    /// Multiplies every row by the weight of its expert. `rows` is [rows, in], `weight` is [experts here, out, in], and
    /// the result is [rows, out].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    pub fn linear(&self, rows: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Tensor::apply_op::<1>(
            GroupedLinear { sources: self.ranks.ranks, balanced: self.balanced() },
            &[rows, weight, &self.received],
        )
        .map(|[rows]| rows)
    }

    /// Computes silu(gate)·up of every row times the row's weight; gate and up are [rows, width], weights [rows, 1].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    pub fn swiglu(&self, gate: &Tensor, up: &Tensor, weights: &Tensor) -> Result<Tensor> {
        self.unit([gate, up, weights], None)
    }

    /// Computes the [activation](LimitedActivation) of gate and up of every row times the row's weight; gate and up are
    /// [rows, width], weights [rows, 1].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit.
    pub fn limited(&self, gate: &Tensor, up: &Tensor, weights: &Tensor, how: LimitedActivation) -> Result<Tensor> {
        self.unit([gate, up, weights], Some(how))
    }

    fn unit(&self, [gate, up, weights]: [&Tensor; 3], limited: Option<LimitedActivation>) -> Result<Tensor> {
        let op = RoutedSwiGlu { balanced: self.balanced(), limited };
        Tensor::apply_op::<1>(op, &[gate, up, weights, &self.received]).map(|[rows]| rows)
    }
}
