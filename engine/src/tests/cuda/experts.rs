//! The kernels of route.cu and experts.cu.

use super::judge::check;
use crate::ops::{
    Chooses, Combine, Dispatch, DocumentLoad, DropPolicy, Dropped, ExpertGroups, ExpertLoad, LimitedActivation, Route,
    RouteKept, RoutedSwiGlu, RunLengths, RunStarts, SlotWeights, TopK,
};
use crate::{Result, Tensor};

const TOKENS: usize = 45;
const EXPERTS: usize = 6;

/// Returns the choices of the tokens of two sequences, two per token, with runs of different lengths. No token
/// chooses expert 4.
fn ids() -> Vec<u32> {
    (0..2 * TOKENS as u32).flat_map(|token| [token * token % 3, 3 + token % 3 / 2 * 2]).collect()
}

const IDS_DIMS: &[usize] = &[2, TOKENS, 2];

fn route(ids: &Tensor, capacity: Option<(usize, DropPolicy)>, weights: Option<&Tensor>) -> Result<[Tensor; 3]> {
    let inputs: Vec<&Tensor> = [ids].into_iter().chain(weights).collect();
    Tensor::apply_op(Route { experts: EXPERTS, chooses: Chooses::Tokens, capacity }, &inputs)
}

#[test]
fn the_best_experts() {
    let groups = [(4, 1), (4, 2), (16, 3)].map(|(count, limit)| Some(ExpertGroups { count, limit }));
    for (experts, k) in [(16, 1), (16, 3), (80, 4), (1024, 8)] {
        for groups in [None].into_iter().chain(groups).filter(|g| g.is_none_or(|g| experts / g.count * g.limit >= k)) {
            check(&["top_k", "top_k_grad"], &[&[2, 5, experts]], &[], |x, _| {
                let [values, _] = Tensor::apply_op(TopK { k, groups, by_best: k == 3 }, &[&x[0]])?;
                Ok(values)
            });
            check(&["top_k"], &[&[3, experts], &[experts]], &[], |x, _| {
                let [values, _] = Tensor::apply_op(TopK { k, groups, by_best: k == 3 }, &[&x[0].sqr()?, &x[1]])?;
                Ok(values)
            });
        }
    }
    // If scores are equal, the first one is chosen.
    check(&["top_k"], &[&[3, 40]], &[], |x, _| {
        let [values, _] = Tensor::apply_op(TopK { k: 5, groups: None, by_best: false }, &[&x[0].affine(0.0, 1.0)?])?;
        Ok(values)
    });
}

#[test]
fn rows_to_experts_and_back() {
    for capacity in [None, Some((9, DropPolicy::Last)), Some((1, DropPolicy::Last)), Some((9, DropPolicy::Lightest))] {
        check(
            &["route", "dispatch", "combine", "slot_weights", "slot_weights_grad"],
            &[&[2, TOKENS, 37], IDS_DIMS],
            &[(IDS_DIMS, &ids())],
            |x, ids| {
                let [places, slots, _] = route(&ids[0], capacity, Some(&x[1]))?;
                let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
                let [weights] = Tensor::apply_op(SlotWeights, &[&x[1], &places, &slots])?;
                let [y] = Tensor::apply_op(Combine, &[&rows.broadcast_mul(&weights)?, &places, &slots])?;
                Ok(y)
            },
        );
    }
}

#[test]
fn experts_choose() {
    check(&["route", "dispatch"], &[&[2, TOKENS, 5], &[2, TOKENS, EXPERTS]], &[], |x, _| {
        let op = Route { experts: EXPERTS, chooses: Chooses::Experts, capacity: Some((7, DropPolicy::Lightest)) };
        let [places, slots, _] = Tensor::apply_op(op, &[&x[1]])?;
        let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
        Ok(rows)
    });
}

/// Slots without a row in another routing get none.
#[test]
fn rows_of_kept_choices() {
    for (capacity, rows) in [(9, 2 * TOKENS * 2), (1, 2 * EXPERTS), (40, 5 * TOKENS)] {
        check(&["route_kept"], &[&[2, TOKENS, 5], &[2, TOKENS, EXPERTS]], &[(IDS_DIMS, &ids())], |x, ids| {
            let [places, ..] = route(&ids[0], Some((capacity, DropPolicy::Last)), None)?;
            let by_tokens = RouteKept { experts: EXPERTS, chooses: Chooses::Tokens, rows };
            let [places, slots, _] = Tensor::apply_op(by_tokens, &[&places, &ids[0]])?;
            let [of_tokens] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
            let capacity = Some((capacity, DropPolicy::Lightest));
            let op = Route { experts: EXPERTS, chooses: Chooses::Experts, capacity };
            let [places, _, _] = Tensor::apply_op(op, &[&x[1]])?;
            let rows = 2 * TOKENS * EXPERTS;
            let by_experts = RouteKept { experts: EXPERTS, chooses: Chooses::Experts, rows };
            let [places, slots, _] = Tensor::apply_op(by_experts, &[&places])?;
            let [of_experts] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
            of_tokens.sum(0)?.add(&of_experts.sum(0)?)
        });
    }
}

const LIMITED: Option<LimitedActivation> = Some(LimitedActivation { alpha: 1.7, limit: 0.6 });

#[test]
fn gated_units_of_used_rows() {
    for (capacity, limited) in [(None, None), (Some((5, DropPolicy::Last)), None), (None, LIMITED)] {
        for width in [3, 170] {
            let rows = 2 * TOKENS * 2;
            let rows = capacity.map_or(rows, |(most, _)| rows.min(2 * EXPERTS * most));
            let shape = [rows, width];
            check(
                &["routed_swiglu", "routed_swiglu_grad"],
                &[&shape, &shape, &[rows, 1]],
                &[(IDS_DIMS, &ids())],
                |x, ids| {
                    let [_, _, starts] = route(&ids[0], capacity, None)?;
                    let op = RoutedSwiGlu { balanced: None, limited };
                    let [y] = Tensor::apply_op(op, &[&x[0], &x[1], &x[2], &starts])?;
                    Ok(y)
                },
            );
        }
    }
}

/// Most of each sequence is padding after its last token. The tokens before the padding belong to documents of
/// different lengths.
#[test]
fn padding_has_no_experts() {
    const K: usize = 2;
    let ends = [TOKENS - 4, 3];
    let routed: Vec<f32> =
        (0..2 * TOKENS).map(|token| if token % TOKENS < ends[token / TOKENS] { 1.5 } else { 0.0 }).collect();
    // The first document has more tokens than a warp has lanes.
    let start = |token: usize| [0, 0, TOKENS - 6, ends[0]].into_iter().rfind(|&start| start <= token);
    let starts: Vec<u32> = (0..2 * TOKENS).map(|token| start(token % TOKENS).unwrap_or_default() as u32).collect();
    let limits: Vec<u32> = (0..=TOKENS as u32).map(|count| count.div_ceil(5).max(1)).collect();
    let most = TOKENS.div_ceil(5);
    for capacity in [None, Some((most, DropPolicy::Last)), Some((most, DropPolicy::Lightest))] {
        for chooses in [Chooses::Tokens, Chooses::Experts] {
            let is_lightest = matches!(capacity, Some((_, DropPolicy::Lightest)));
            if chooses == Chooses::Experts && !is_lightest {
                continue;
            }
            check(
                &["top_k", "top_k_grad", "route", "unplaced", "document_load", "expert_load"],
                &[&[2, TOKENS, EXPERTS], &[EXPERTS], &[2, TOKENS, 5]],
                &[(&[2, TOKENS], &starts), (&[TOKENS + 1], &limits)],
                |x, ids| {
                    let routed = Tensor::from_slice(&routed, (2, TOKENS), x[0].device())?;
                    let [weights, chosen] =
                        Tensor::apply_op(TopK { k: K, groups: None, by_best: false }, &[&x[0], &x[1], &routed])?;
                    let (choices, weights_of) = match chooses {
                        Chooses::Tokens => (&chosen, Some(&weights).filter(|_| is_lightest)),
                        Chooses::Experts => (&x[0], None),
                    };
                    let limits = capacity.map(|_| &ids[1]);
                    let inputs = [choices].into_iter().chain(weights_of).chain([&routed]).chain(limits);
                    let route = Route { experts: EXPERTS, chooses, capacity };
                    let [places, slots, _] = Tensor::apply_op(route, &inputs.collect::<Vec<_>>())?;
                    let whole_tokens = chooses == Chooses::Experts;
                    let [_] = Tensor::apply_op(Dropped { whole_tokens }, &[&places, &routed])?;
                    let [_] = Tensor::apply_op(ExpertLoad { experts: EXPERTS, by_sequence: true }, &[&chosen])?;
                    let [load] = Tensor::apply_op(DocumentLoad { experts: EXPERTS }, &[&chosen, &ids[0]])?;
                    let [rows] = Tensor::apply_op(Dispatch, &[&x[2], &places, &slots])?;
                    let loss = load.to_dtype(x[0].dtype())?.mul(&x[0])?.sum_all()?.add(&rows.sqr()?.sum_all()?)?;
                    loss.add(&weights.sum_all()?)
                },
            );
        }
    }
}

#[test]
fn counts() {
    for by_sequence in [false, true] {
        for whole_tokens in [false, true] {
            check(
                &["expert_load", "unplaced", "run_lengths", "run_starts"],
                &[&[EXPERTS]],
                &[(IDS_DIMS, &ids())],
                |x, ids| {
                    let [places, _, starts] = route(&ids[0], Some((3, DropPolicy::Last)), None)?;
                    let [_] = Tensor::apply_op(Dropped { whole_tokens }, &[&places])?;
                    let [_] = Tensor::apply_op(ExpertLoad { experts: EXPERTS, by_sequence }, &[&ids[0]])?;
                    let [lengths] = Tensor::apply_op(RunLengths, &[&starts])?;
                    let [_] = Tensor::apply_op(RunStarts, &[&lengths])?;
                    x[0].sqr()
                },
            );
        }
    }
    // More runs than a warp has lanes.
    let lengths: Vec<u32> = (0..75).map(|run| run * run % 13).collect();
    check(&["run_starts"], &[&[3]], &[(&[75], &lengths)], |x, ids| {
        let [_] = Tensor::apply_op(RunStarts, &[&ids[0]])?;
        x[0].sqr()
    });
}
