//! The operations of mixture-of-experts layers: choosing experts, ordering rows by expert, multiplying each expert's
//! rows by its own weight, and returning the results to their tokens.
//!
//! A *slot* is one of a token's choices: token × k + choice. A *row* is a slot at its position in the order of experts.
//! All shapes, and so the maximum number of rows, are known when the graph is built. The number of rows of each expert
//! is known only when the program runs; [`Route`] derives `starts` from it. Rows after the last used one are zeros.
//!
//! ```text
//! scores ─▶ top_k ─▶ ids ─▶ route ─▶ slots, places, starts
//!              └── weights ─▶ slot_weights ──┐
//! x ─▶ dispatch ─▶ grouped_linear ×2 ─▶ routed_swiglu ─▶ grouped_linear ─▶ combine ─▶ y
//! ```
//!
//! With packed documents, operations that choose experts or count tokens have one more input, `routed`, f32 [batch,
//! tokens]. This is the weight of each token in a router's statistics, which is 0 for padding. A padding token has no
//! row and no choice ([`NONE`]), and uses no capacity.
//!
//! The rows of an expert are in the order of their tokens, and the gradients of weights are summed sequence by
//! sequence, so the result does not depend on how a batch is divided into micro-batches.

mod combine;
mod document_load;
mod grouped_linear;
mod jitter;
mod load;
mod log_sum_exp;
mod route;
mod routed_swiglu;
mod slot_weights;
mod starts;
mod top_k;

pub use combine::{Combine, Dispatch};
pub use document_load::DocumentLoad;
pub use grouped_linear::GroupedLinear;
pub use jitter::Jitter;
pub use load::{Dropped, ExpertLoad};
pub use log_sum_exp::LogSumExp;
pub use route::{Chooses, DropPolicy, Route, RouteKept};
pub use routed_swiglu::{LimitedActivation, RoutedSwiGlu};
pub use slot_weights::SlotWeights;
pub use starts::{RunLengths, RunStarts};
pub(crate) use top_k::TopKGrad;
pub use top_k::{ExpertGroups, TopK};

use std::ops::Range;

use gapless_kernels::Spec;

use crate::op::RowUse;

/// Marks a row or a slot that does not exist.
pub const NONE: u32 = u32::MAX;

/// Returns `(batch, tokens, last)` for the extents [batch, tokens, last] or, as one sequence, [tokens, last].
fn by_sequence(dims: &[usize]) -> Result<(usize, usize, usize), String> {
    match *dims {
        [batch, tokens, last] => Ok((batch, tokens, last)),
        [tokens, last] => Ok((1, tokens, last)),
        _ => Err("the input must be [batch, tokens, ..] or [tokens, ..]".into()),
    }
}

/// Checks that places and slots are u32 and that places are [.., k]. Returns k.
fn expect_places(places: &Spec, slots: &Spec) -> Result<usize, String> {
    super::expect_ids("places", places)?;
    super::expect_ids("slots", slots)?;
    super::expect_rank(places, 1)?;
    Ok(super::width(places.dims()))
}

/// Checks that `routed`, the weights of tokens in a router's statistics, is f32 [batch, tokens], for `x` [batch,
/// tokens, ..].
fn expect_routed(routed: &Spec, x: &Spec) -> Result<(), String> {
    let (_, tokens) = x.dims().split_last().ok_or("the input must be [batch, tokens, ..]")?;
    if *routed != Spec::f32(tokens.to_vec()) {
        return Err("the token weights must be f32, one for each token".into());
    }
    Ok(())
}

/// True if a token is not padding.
fn is_routed<T: PartialOrd + Default>(routed: Option<&[T]>, token: usize) -> bool {
    routed.is_none_or(|routed| routed[token] > T::default())
}

/// The rows of each expert, as runs of adjacent rows. `starts` holds the offset at which each run begins, and finally
/// the end of the last run. Runs are ordered by source (the rank from which the rows come), then by expert, then by
/// sequence.
#[derive(Debug, Clone, Copy)]
struct RowRuns<'a> {
    offsets: &'a [u32],
    sources: usize,
    experts: usize,
}

impl<'a> RowRuns<'a> {
    /// Returns the offsets of the runs of one expert from one source.
    fn offsets_of(self, source: usize, expert: usize) -> &'a [u32] {
        let sequences = (self.offsets.len() - 1) / (self.sources * self.experts);
        &self.offsets[(source * self.experts + expert) * sequences..][..=sequences]
    }

    /// Returns the rows of an expert, one range per sequence, in the order of the sequences in the whole batch.
    fn by_sequence(self, expert: usize) -> impl Iterator<Item = Range<usize>> {
        let ranges = (0..self.sources).flat_map(move |source| self.offsets_of(source, expert).windows(2));
        ranges.map(|pair| pair[0] as usize..pair[1] as usize).filter(|rows| !rows.is_empty())
    }
}

/// Returns [`Op::rows`](crate::Op::rows) of an operation whose row offsets are input `offsets`. Rows are dynamic if
/// `balanced`, the number of rows on balanced ranks, is given.
fn rows(offsets: usize, balanced: Option<usize>) -> RowUse {
    balanced.map_or(RowUse::FixedOutputs, |balanced| RowUse::DynamicOutputs { offsets, balanced })
}

/// Returns the number of rows under balanced routing on each of `ranks` ranks that divide the tokens.
fn balanced_on(ranks: usize, balanced: Option<usize>) -> Option<usize> {
    balanced.map(|rows| rows.div_ceil(ranks))
}

/// Returns the number of used rows.
fn used_rows(offsets: &[u32]) -> usize {
    offsets.last().map_or(0, |&end| end as usize)
}

/// Converts offsets that a reference implementation holds as f64.
fn exact_offsets(starts: &crate::reference::Array) -> Vec<u32> {
    starts.data.iter().map(|&start| start as u32).collect()
}
