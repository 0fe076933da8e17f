//! Rows on the ranks of their experts.

use super::Routing;
use crate::error::{Error, Result};
use crate::ops::{Collective, GroupedLinear, RoutedSwiGlu, RunLengths, RunStarts};
use crate::tensor::Tensor;

/// The rows of a rank's own experts: those of its own tokens where one rank has all experts, else those of all expert ranks'
/// tokens.
#[derive(Debug, Clone)]
pub struct Exchange {
    ranks: usize,
    /// Where the runs of this rank's tokens begin, by expert.
    sent: Tensor,
    /// Where the runs of this rank's experts begin.
    received: Tensor,
    /// The most rows that this rank's tokens have.
    rows_sent: usize,
    /// The most rows that this rank's experts have.
    rows_received: usize,
}

impl Routing {
    /// Lets `ranks` expert ranks know how many rows come from each.
    ///
    /// # Errors
    /// When the ranks do not divide the experts.
    pub fn exchange(&self, ranks: usize) -> Result<Exchange> {
        if ranks == 0 || !self.experts.is_multiple_of(ranks) {
            let why = format!("{ranks} ranks cannot share {} experts equally", self.experts);
            return Err(Error::config("mesh.expert", why, "choose a divisor of the number of experts"));
        }
        let sent = self.starts.clone();
        let rows_sent = self.slots.elem_count();
        if ranks == 1 {
            return Ok(Exchange { ranks, received: sent.clone(), sent, rows_sent, rows_received: rows_sent });
        }
        let [lengths] = Tensor::apply_op(RunLengths, &[&sent])?;
        let [lengths] = Tensor::apply_op(Collective::AllToAll { ranks }, &[&lengths])?;
        let [received] = Tensor::apply_op(RunStarts, &[&lengths])?;
        Ok(Exchange { ranks, sent, received, rows_sent, rows_received: ranks * self.most_rows(ranks) })
    }

    /// The most rows that one of the ranks may get of this rank's tokens.
    fn most_rows(&self, ranks: usize) -> usize {
        let dims = self.places.dims();
        let (choices, sequences) = (dims[dims.len() - 1], dims[0]);
        let tokens: usize = dims[..dims.len() - 1].iter().product();
        // A token chooses an expert at most once.
        let most = tokens * choices.min(self.experts / ranks);
        self.capacity.map_or(most, |capacity| most.min(sequences * (self.experts / ranks) * capacity))
    }
}

impl Exchange {
    /// The rows, [rows, any], of this rank's tokens to the ranks of their experts: [rows of this rank's experts, any].
    ///
    /// # Errors
    /// When there are not as many rows as the routing has.
    pub fn receive(&self, rows: &Tensor) -> Result<Tensor> {
        self.all_to_all(rows, true, &self.sent, &self.received)
    }

    /// The reverse of [`Self::receive`].
    ///
    /// # Errors
    /// When there are not as many rows as this rank's experts have.
    pub fn give_back(&self, rows: &Tensor) -> Result<Tensor> {
        self.all_to_all(rows, false, &self.received, &self.sent)
    }

    /// Rows that this rank's experts have when all ranks' have the same number, if that is to be counted.
    fn balanced(&self) -> Option<usize> {
        (self.ranks > 1).then_some(self.rows_sent)
    }

    fn all_to_all(&self, rows: &Tensor, to_experts: bool, from: &Tensor, to: &Tensor) -> Result<Tensor> {
        if self.ranks == 1 {
            return Ok(rows.clone());
        }
        let rows_there = if to_experts { self.rows_received } else { self.rows_sent };
        let op = Collective::AllToAllRows {
            ranks: self.ranks,
            rows: rows_there,
            counted: to_experts,
            balanced: self.rows_sent,
        };
        Tensor::apply_op::<1>(op, &[rows, from, to]).map(|[rows]| rows)
    }

    /// Every row times the weight of its expert: [rows, in] and [experts here, out, in] to [rows, out].
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn linear(&self, rows: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Tensor::apply_op::<1>(
            GroupedLinear { sources: self.ranks, balanced: self.balanced() },
            &[rows, weight, &self.received],
        )
        .map(|[rows]| rows)
    }

    /// silu(gate)·up of every row, times its weight: [rows, width] and [rows, 1].
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn swiglu(&self, gate: &Tensor, up: &Tensor, weights: &Tensor) -> Result<Tensor> {
        Tensor::apply_op::<1>(RoutedSwiGlu { balanced: self.balanced() }, &[gate, up, weights, &self.received])
            .map(|[rows]| rows)
    }
}
