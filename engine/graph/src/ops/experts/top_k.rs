//! Choice of the best experts for each token.

use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{ExpertLoad, NONE, expect_routed, is_routed};
use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// Equal groups of experts, of which a token may use a limited number (node-limited routing, DeepSeek-V3, arXiv
/// 2412.19437, section 2.1.2). Groups are ranked by the sum of the scores of their two best experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// The number of groups, which must divide the number of experts.
    pub count: usize,
    /// The number of groups that a token may use.
    pub limit: usize,
}

/// Chooses for each token the `k` experts with the greatest scores, best first. Of experts with equal scores, the first
/// is chosen.
///
/// - Inputs: scores [.., tokens, experts]. Optionally a bias \[experts\], which affects the choice, but is not part of
///   the scores in the result. Optionally `routed`, f32 [batch, tokens], which is 0 for padding; with this input, the
///   scores must be [batch, tokens, experts].
/// - Outputs: scores [.., tokens, k] and ids [.., tokens, k].
///
/// The loss has no gradient with respect to the bias. In place of a gradient, the bias gets the number of tokens that
/// chose each expert. Load balancing without a loss updates the bias from these numbers (Wang et al., arXiv
/// 2408.15664). Padding tokens have the ids [`NONE`]. Padding tokens are not counted and have no gradient.
#[derive(Debug, Clone, Copy)]
pub struct TopK {
    /// Number of experts per token.
    pub k: usize,
    /// The groups of experts, and the number of groups that a token may use. `None` if a token may use all experts.
    pub groups: Option<ExpertGroups>,
    /// True if groups are ranked by their best expert alone (device-limited routing, DeepSeek-V2, arXiv 2405.04434, section
    /// 2.2.2).
    pub by_best: bool,
}

/// Maximum number of experts. It limits the arrays on the stack in which a token's experts are chosen.
const MAX_EXPERTS: usize = 1024;

impl TopK {
    /// Returns the indices of the optional inputs `bias` and `routed`, or `None` for one that is missing. `rank`
    /// returns the rank of an input: `bias` has rank 1, and `routed` has a higher rank.
    fn bias_and_routed(inputs: usize, rank: impl Fn(usize) -> usize) -> (Option<usize>, Option<usize>) {
        let routed = (inputs > 1 && rank(inputs - 1) > 1).then_some(inputs - 1);
        ((routed.unwrap_or(inputs) > 1).then_some(1), routed)
    }

    /// Writes the ids of a token's experts.
    fn choose<T: PartialOrd + Copy + std::ops::Add<Output = T>>(
        &self,
        score: impl Fn(usize) -> T,
        experts: usize,
        ids: &mut [u32],
    ) {
        let mut allowed = [u64::MAX; MAX_EXPERTS / 64];
        if let Some(ExpertGroups { count, limit }) = self.groups {
            allowed = [0; MAX_EXPERTS / 64];
            let size = experts / count;
            let worth = |group: usize| {
                let of_group = |i| score(group * size + i);
                let best = best(size, of_group, |_| true);
                let second = best.filter(|_| !self.by_best).and_then(|best| self::best(size, of_group, |i| i != best));
                match (best, second) {
                    (Some(a), Some(b)) => of_group(a) + of_group(b),
                    (a, _) => of_group(a.unwrap_or(0)),
                }
            };
            let mut taken = [0u64; MAX_EXPERTS / 64];
            for _ in 0..limit {
                // If scores are NaN, `best` returns the first group that is not taken yet.
                let group = best(count, worth, |g| !has(&taken, g)).unwrap_or(0);
                add(&mut taken, group);
                (group * size..(group + 1) * size).for_each(|expert| add(&mut allowed, expert));
            }
        }
        let mut taken = [0u64; MAX_EXPERTS / 64];
        for id in ids {
            let free = |expert: usize| has(&allowed, expert) && !has(&taken, expert);
            let expert = best(experts, &score, free).expect("there are as many as are chosen");
            add(&mut taken, expert);
            *id = expert as u32;
        }
    }
}

/// Returns the allowed index with the greatest score. If scores are equal or NaN, returns the first such index. Returns
/// `None` if no index is allowed.
fn best<T: PartialOrd>(count: usize, score: impl Fn(usize) -> T, may: impl Fn(usize) -> bool) -> Option<usize> {
    let mut best = None;
    for i in (0..count).filter(|&i| may(i)) {
        if best.is_none_or(|b| score(i) > score(b)) {
            best = Some(i);
        }
    }
    best
}

fn has(set: &[u64], i: usize) -> bool {
    set[i / 64] >> (i % 64) & 1 == 1
}

fn add(set: &mut [u64], i: usize) {
    set[i / 64] |= 1 << (i % 64);
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let (bias, routed) = Self::bias_and_routed(inputs.len(), |index| inputs[index].dims().len());
        let (bias, routed) = (bias.map_or("", |_| ", E"), routed.map_or("", |_| ", *"));
        Some(Rule::Labels(format!("* E{bias}{routed} -> * K, * K").into()))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (bias, routed) = Self::bias_and_routed(inputs.len(), |index| inputs[index].dims().len());
        crate::ops::expect_float(&inputs[..routed.unwrap_or(inputs.len())])?;
        crate::ops::expect_rank(&inputs[0], 2)?;
        let (&experts, tokens) = inputs[0].dims().split_last().expect("rank was checked");
        if bias.is_some_and(|bias| inputs[bias].dims() != [experts]) {
            return Err(format!("the bias must be [{experts}]"));
        }
        if let Some(routed) = routed {
            expect_routed(&inputs[routed], &inputs[0])?;
        }
        let mut choice = experts;
        if let Some(ExpertGroups { count, limit }) = self.groups {
            if count == 0 || !experts.is_multiple_of(count) || limit == 0 || limit > count {
                return Err(format!("cannot choose {limit} of {count} groups of {experts} experts"));
            }
            choice = experts / count * limit;
        }
        if self.k == 0 || self.k > choice || experts > MAX_EXPERTS {
            return Err(format!(
                "cannot choose {} of {choice} experts; choose at least 1, of at most {MAX_EXPERTS} experts in total",
                self.k
            ));
        }
        let dims = [tokens, &[self.k]].concat();
        Ok(vec![inputs[0].in_shape(dims.clone()), Spec { shape: dims.into(), dtype: candle_core::DType::U32 }])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let experts = gapless_kernels::width(g.input(0).dims());
        if g.wants(0) {
            let [d_scores] = Tensor::apply_op(TopKGrad { experts }, &[&g.output(1), &g.grad(0)])?;
            g.accumulate(0, d_scores);
        }
        let (bias, _) = Self::bias_and_routed(g.inputs(), |index| g.input(index).rank());
        if bias.is_some_and(|bias| g.wants(bias)) {
            let [load] = Tensor::apply_op(ExpertLoad { experts, by_sequence: false }, &[&g.output(1)])?;
            g.accumulate(1, load);
        }
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        (inputs[0].elements() * (self.k + 2)) as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (values, ids) = (args.output::<f32>(0), args.output::<u32>(1));
        let scores = args.input::<f32>(0);
        let (bias, routed) = Self::bias_and_routed(args.inputs(), |index| args.input_dims(index).len());
        let (bias, routed) = (bias.map(|i| args.input::<f32>(i)), routed.map(|i| args.input::<f32>(i)));
        let experts = gapless_kernels::width(args.input_dims(0));
        let tokens =
            values.chunks_exact_mut(self.k).zip(ids.chunks_exact_mut(self.k)).zip(scores.chunks_exact(experts));
        tokens.enumerate().for_each(|(token, ((values, ids), scores))| {
            self.choose(|i| scores[i] + bias.map_or(0.0, |bias| bias[i]), experts, ids);
            values.iter_mut().zip(&*ids).for_each(|(value, &id)| *value = scores[id as usize]);
            if !is_routed(routed, token) {
                ids.fill(NONE);
            }
        });
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let ranking = if self.by_best { 1 } else { 2 };
        let groups = self.groups.map(|groups| [groups.count, groups.limit, ranking]);
        gapless_kernels::cuda::launch::top_k(self.k, groups, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let scores = args.input(0);
        let mut dims = scores.dims.clone();
        let experts = std::mem::replace(dims.last_mut().expect("rank was checked"), self.k);
        let (bias, routed) = Self::bias_and_routed(args.inputs(), |index| args.input(index).dims.len());
        let (bias, routed) = (bias.map(|i| &*args.input(i).data), routed.map(|i| &*args.input(i).data));
        let (mut values, mut ids) = (Vec::new(), Vec::new());
        for (token, row) in scores.rows().enumerate() {
            let biased: Vec<f64> = (0..experts).map(|i| row[i] + bias.map_or(0.0, |bias| bias[i])).collect();
            // The sort is stable, so indices with equal scores keep their order.
            let sorted = |mut indices: Vec<usize>, by: &dyn Fn(usize) -> f64| {
                indices.sort_by(|&a, &b| by(b).total_cmp(&by(a)));
                indices
            };
            let groups = self.groups.unwrap_or(ExpertGroups { count: 1, limit: 1 });
            let size = experts / groups.count;
            let worth = |g: usize| {
                sorted((g * size..(g + 1) * size).collect(), &|i| biased[i])
                    .iter()
                    .take(if self.by_best { 1 } else { 2 })
                    .map(|&i| biased[i])
                    .sum()
            };
            let chosen = sorted((0..groups.count).collect(), &worth)[..groups.limit].to_vec();
            let mut allowed: Vec<usize> = chosen.iter().flat_map(|g| g * size..(g + 1) * size).collect();
            allowed.sort_unstable();
            for &id in &sorted(allowed, &|i| biased[i])[..self.k] {
                values.push(row[id]);
                ids.push(if is_routed(routed, token) { id as f64 } else { f64::from(NONE) });
            }
        }
        vec![Array::new(&dims, values), Array::new(&dims, ids)]
    }
}

/// Returns the gradients of all scores, from (ids, gradients of the chosen scores). Scores of experts that were not
/// chosen have gradient 0, and [`NONE`] is skipped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopKGrad {
    /// Number of scores per token.
    pub experts: usize,
}

impl Op for TopKGrad {
    fn name(&self) -> &'static str {
        "top_k_grad"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("* K, * K -> * E"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let mut dims = inputs[1].dims().to_vec();
        *dims.last_mut().expect("rank by the forward's rule") = self.experts;
        Ok(vec![inputs[1].in_shape(dims)])
    }

    fn run(&self, args: &mut Args<'_>) {
        let d_scores = args.output::<f32>(0);
        let (ids, dy) = (args.input::<u32>(0), args.input::<f32>(1));
        let k = gapless_kernels::width(args.input_dims(0));
        d_scores.fill(0.0);
        for ((d_scores, ids), dy) in
            d_scores.chunks_exact_mut(self.experts).zip(ids.chunks_exact(k)).zip(dy.chunks_exact(k))
        {
            let chosen = ids.iter().zip(dy).filter(|(id, _)| **id != NONE);
            chosen.for_each(|(&id, &dy)| d_scores[id as usize] = dy);
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::top_k_grad(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (ids, dy) = (args.input(0), args.input(1));
        let mut dims = dy.dims.clone();
        *dims.last_mut().expect("rank by the forward's rule") = self.experts;
        let mut d_scores = Array::zeros(&dims);
        for ((token, ids), dy) in ids.rows().enumerate().zip(dy.rows()) {
            for (&id, &dy) in ids.iter().zip(dy).filter(|(id, _)| **id != f64::from(NONE)) {
                d_scores.data[token * self.experts + id as usize] = dy;
            }
        }
        vec![d_scores]
    }
}
