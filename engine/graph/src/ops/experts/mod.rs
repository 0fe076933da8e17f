//! What layers of experts are made of: choosing experts, bringing rows together by expert, multiplying each expert's rows by
//! its own weight, and bringing them back.
//!
//! A *slot* is one of a token's choices: token × k + choice. A *row* is a slot in the order in which experts work. Every size
//! is known when the graph is built: how many rows an expert has is data ([`Route`] writes it into `starts`), how many all
//! have together is not. Rows behind the last one that is used are zeros.
//!
//! ```text
//! scores ─▶ top_k ─▶ ids ─▶ route ─▶ slots, places, starts
//!              └── weights ─▶ slot_weights ──┐
//! x ─▶ dispatch ─▶ grouped_linear ×2 ─▶ routed_swiglu ─▶ grouped_linear ─▶ combine ─▶ y
//! ```
//!
//! Where documents are packed, operations that decide or count have one input more, `routed`, f32 [batch, tokens]: what a token
//! counts in a router's statistics, 0 for padding. Padding has no row, no choice ([`NONE`]) and no part in a capacity.
//!
//! Rows of an expert stand in the order of their tokens, and weights' gradients are summed sequence by sequence, so that the
//! bits do not depend on how a batch is cut into micro-batches.

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
pub use load::{ExpertLoad, Unplaced};
pub use log_sum_exp::LogSumExp;
pub use route::{Chooses, DropPolicy, Route};
pub use routed_swiglu::RoutedSwiGlu;
pub use slot_weights::SlotWeights;
pub use starts::{RunLengths, RunStarts};
pub(crate) use top_k::TopKGrad;
pub use top_k::{ExpertGroups, TopK};

use std::ops::Range;

use gapless_kernels::Spec;

use crate::op::Rows;

/// In place of a row or a slot where there is none.
pub const NONE: u32 = u32::MAX;

/// `(batch, tokens, last)` of [batch, tokens, last] or [tokens, last].
fn by_sequence(dims: &[usize]) -> Result<(usize, usize, usize), String> {
    match *dims {
        [batch, tokens, last] => Ok((batch, tokens, last)),
        [tokens, last] => Ok((1, tokens, last)),
        _ => Err("the input must be [batch, tokens, ..] or [tokens, ..]".into()),
    }
}

/// Refuses places and slots that are not u32, and places that are not [.., k]. Returns k.
fn expect_places(places: &Spec, slots: &Spec) -> Result<usize, String> {
    super::expect_ids("places", places)?;
    super::expect_ids("slots", slots)?;
    super::expect_rank(places, 1)?;
    Ok(super::width(places.dims()))
}

/// Refuses what says of each token of `x` [batch, tokens, ..] what it counts, if it is not f32 [batch, tokens].
fn expect_routed(routed: &Spec, x: &Spec) -> Result<(), String> {
    let (_, tokens) = x.dims().split_last().ok_or("the input must be [batch, tokens, ..]")?;
    if *routed != Spec::f32(tokens.to_vec()) {
        return Err("the token weights must be f32, one for each token".into());
    }
    Ok(())
}

/// Whether a token has experts: none of padding has.
fn is_routed<T: PartialOrd + Default>(routed: Option<&[T]>, token: usize) -> bool {
    routed.is_none_or(|routed| routed[token] > T::default())
}

/// Which rows each expert has. `starts` says where runs of rows begin, and last, where all end. Runs are in the order of
/// source (the rank that rows come from), expert, sequence; next to each other.
#[derive(Debug, Clone, Copy)]
struct Runs<'a> {
    starts: &'a [u32],
    sources: usize,
    experts: usize,
}

impl<'a> Runs<'a> {
    /// The runs of one source of an expert.
    fn of(self, source: usize, expert: usize) -> &'a [u32] {
        let sequences = (self.starts.len() - 1) / (self.sources * self.experts);
        &self.starts[(source * self.experts + expert) * sequences..][..=sequences]
    }

    /// The rows of an expert by sequence, in the order of their tokens in the whole batch.
    fn by_sequence(self, expert: usize) -> impl Iterator<Item = Range<usize>> {
        let ranges = (0..self.sources).flat_map(move |source| self.of(source, expert).windows(2));
        ranges.map(|pair| pair[0] as usize..pair[1] as usize).filter(|rows| !rows.is_empty())
    }
}

/// What an operation knows of rows that input `starts` ends: they are counted if the balanced number of them is given.
fn rows(starts: usize, balanced: Option<usize>) -> Rows {
    balanced.map_or(Rows::Fixed, |balanced| Rows::Counted { starts, balanced })
}

/// Rows that are used at all.
fn used_rows(starts: &[u32]) -> usize {
    starts.last().map_or(0, |&end| end as usize)
}

/// Starts as the references have them, in f64.
fn exact_starts(starts: &crate::reference::Array) -> Vec<u32> {
    starts.data.iter().map(|&start| start as u32).collect()
}
