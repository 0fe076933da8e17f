//! The reference implementation of attention in `f64`: outputs, gradients, and the magnitudes of their terms.

use super::{Attention, HeadStrides, Mask};

/// A tensor's elements in `f64`, addressed by (batch, head, token, element).
#[derive(Clone)]
pub(super) struct Tensor {
    strides: HeadStrides,
    pub elements: Vec<f64>,
}

impl Tensor {
    pub fn of(strides: HeadStrides, values: &[f32]) -> Self {
        Self { strides, elements: values.iter().map(|&x| f64::from(x)).collect() }
    }

    fn zeros_like(&self) -> Self {
        Self { elements: vec![0.0; self.elements.len()], ..self.clone() }
    }

    fn at(&self, batch: usize, head: usize, token: usize, element: usize) -> usize {
        batch * self.strides.batch + head * self.strides.head + token * self.strides.token + element
    }
}

/// The expected results.
pub(super) struct Reference {
    pub out: Tensor,
    pub lse: Vec<f64>,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    /// For each output, the sum of the absolute values of its terms. If terms cancel, rounding errors are
    /// proportional to this sum rather than to the exact value. (With a single key, the terms of gradients cancel
    /// entirely.)
    pub out_size: Tensor,
    /// Like `out_size`, for the gradients of the queries.
    pub dq_size: Tensor,
    /// Like `out_size`, for the gradients of the keys.
    pub dk_size: Tensor,
    /// Like `out_size`, for the gradients of the values.
    pub dv_size: Tensor,
}

/// The scores of a query.
struct Row {
    /// The index of this row among the rows of all heads.
    number: usize,
    probabilities: Vec<f64>,
    /// The derivative of each capped score with respect to the uncapped one; 1 if there is no cap.
    slopes: Vec<f64>,
    lse: f64,
}

/// Calls `row` for each query head and query.
fn for_each_row(
    job: &Attention,
    starts: &[u32],
    q: &Tensor,
    k: &Tensor,
    mut row: impl FnMut((usize, usize, usize), Row),
) {
    for b in 0..job.batch {
        for h in 0..job.heads {
            for i in 0..job.queries {
                let dot = |j| -> f64 {
                    (0..job.head_size)
                        .map(|d| q.elements[q.at(b, h, i, d)] * k.elements[k.at(b, h / job.group(), j, d)])
                        .sum()
                };
                let start = starts.get(b * job.queries + i).map_or(0, |&start| start as usize);
                let visible = match job.mask {
                    Mask::Full => job.keys,
                    Mask::Causal { offset } => job.keys.min(i + offset + 1),
                    Mask::Folded(fold) => fold.place(i) + 1,
                };
                let chunks = |chunk: usize| (start..visible).step_by(chunk).next_back().unwrap_or(start);
                let start = job.chunk.map_or(start, chunks);
                let start = job.window.map_or(start, |window| start.max(visible.saturating_sub(window)));
                let tanh = |j: usize| job.cap.map(|cap| (f64::from(job.scale) * dot(j) / f64::from(cap)).tanh());
                let score = |j: usize| match (job.cap, tanh(j)) {
                    (Some(cap), Some(tanh)) => f64::from(cap) * tanh,
                    _ => f64::from(job.scale) * dot(j),
                };
                let seen = |j: usize| (start..visible).contains(&j);
                let scores: Vec<f64> =
                    (0..job.keys).map(|j| if seen(j) { score(j) } else { f64::NEG_INFINITY }).collect();
                let slopes = (0..job.keys).map(|j| tanh(j).map_or(1.0, |tanh| 1.0 - tanh * tanh)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                let lse = if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
                let probabilities = scores.iter().map(|score| (score - lse).exp()).collect();
                row((b, h, i), Row { number: (b * job.heads + h) * job.queries + i, probabilities, slopes, lse });
            }
        }
    }
}

/// Computes outputs and gradients, row by row.
pub(super) fn reference(
    job: &Attention,
    starts: &[u32],
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    dout: &Tensor,
) -> Reference {
    let mut result = Reference {
        out: dout.zeros_like(),
        lse: vec![0.0; job.batch * job.heads * job.queries],
        dq: q.zeros_like(),
        dk: k.zeros_like(),
        dv: v.zeros_like(),
        out_size: dout.zeros_like(),
        dq_size: q.zeros_like(),
        dk_size: k.zeros_like(),
        dv_size: v.zeros_like(),
    };
    for_each_row(job, starts, q, k, |(b, h, i), Row { number, probabilities, slopes, lse }| {
        result.lse[number] = lse;
        let kv = h / job.group();
        let products =
            |j| (0..job.value_size).map(move |d| dout.elements[dout.at(b, h, i, d)] * v.elements[v.at(b, kv, j, d)]);
        let dprobability = |j| products(j).sum::<f64>();
        let dprobability_size = |j| products(j).map(f64::abs).sum::<f64>();
        let delta: f64 = probabilities.iter().enumerate().map(|(j, p)| p * dprobability(j)).sum();
        let delta_size: f64 = probabilities.iter().enumerate().map(|(j, p)| p * dprobability_size(j)).sum();
        for (j, p) in probabilities.iter().enumerate() {
            let dscore = f64::from(job.scale) * slopes[j] * p * (dprobability(j) - delta);
            let dscore_size = f64::from(job.scale) * p * (dprobability_size(j) + delta_size);
            for d in 0..job.value_size {
                let (at_v, at_out) = (v.at(b, kv, j, d), dout.at(b, h, i, d));
                result.out.elements[at_out] += p * v.elements[at_v];
                result.dv.elements[at_v] += p * dout.elements[at_out];
                result.out_size.elements[at_out] += p * v.elements[at_v].abs();
                result.dv_size.elements[at_v] += p * dout.elements[at_out].abs();
            }
            for d in 0..job.head_size {
                let (at_q, at_k) = (q.at(b, h, i, d), k.at(b, kv, j, d));
                result.dq.elements[at_q] += dscore * k.elements[at_k];
                result.dk.elements[at_k] += dscore * q.elements[at_q];
                result.dq_size.elements[at_q] += dscore_size * k.elements[at_k].abs();
                result.dk_size.elements[at_k] += dscore_size * q.elements[at_q].abs();
            }
        }
    });
    result
}
