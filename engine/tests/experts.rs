//! Layers of experts compared with finite differences and f64 references: every kind of routing, forward and backward.

use gapless_engine::nn::{Capacity, Choice, ExpertRanks, RouterConfig, Score};
use gapless_engine::ops::{
    Chooses, Combine, Dispatch, DocumentLoad, DropPolicy, Dropped, ExpertGroups, ExpertLoad, GroupedLinear, Jitter,
    LimitedActivation, Route, RouteKept, RoutedSwiGlu, SlotWeights, TopK,
};
use gapless_engine::{Result, Tensor, gradient_check};

/// The tolerance of gradients: central differences in f64 have errors of about 1e-9. The errors of f32 kernels are a
/// multiple of 2⁻²⁴ = 6e-8.
const FINITE_DIFFERENCE: f64 = 1e-6;
const KERNEL: f64 = 1e-5;

fn check(shapes: &[&[usize]], ids: &[(&[usize], &[u32])], f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>) {
    let error = gradient_check(shapes, ids, f).unwrap();
    assert!(error.finite_difference <= FINITE_DIFFERENCE, "{error:?}");
    assert!(error.kernel <= KERNEL, "{error:?}");
    assert!(error.bf16.is_none_or(|error| error <= 1.0), "{error:?}");
}

const TOKENS: usize = 7;
const EXPERTS: usize = 4;

/// The choices of two sequences of seven tokens, two per token. No token chooses expert 2.
const IDS: [u32; 28] = [0, 1, 3, 0, 1, 3, 1, 0, 0, 3, 3, 1, 1, 0, 3, 1, 3, 0, 0, 1, 1, 3, 3, 0, 1, 0, 0, 3];
const IDS_DIMS: &[usize] = &[2, TOKENS, 2];

fn route(ids: &Tensor, capacity: Option<(usize, DropPolicy)>, weights: Option<&Tensor>) -> Result<[Tensor; 3]> {
    let inputs: Vec<&Tensor> = [ids].into_iter().chain(weights).collect();
    Tensor::apply_op(Route { experts: EXPERTS, chooses: Chooses::Tokens, capacity }, &inputs)
}

#[test]
fn rows_to_experts_and_back() {
    for capacity in [None, Some((2, DropPolicy::Last)), Some((100, DropPolicy::Last)), Some((1, DropPolicy::Last))] {
        check(&[&[2, TOKENS, 5]], &[(IDS_DIMS, &IDS)], |x, ids| {
            let [places, slots, _] = route(&ids[0], capacity, None)?;
            let kept = RouteKept { experts: EXPERTS, chooses: Chooses::Tokens, rows: slots.dim(0)? };
            let [places, slots, _] = Tensor::apply_op(kept, &[&places, &ids[0]])?;
            let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
            let [y] = Tensor::apply_op(Combine, &[&rows.sqr()?, &places, &slots])?;
            Ok(y)
        });
    }
}

#[test]
fn products_by_expert() {
    // Widths are below and above the tile sizes of the kernels, and there are few or many rows.
    for (width, out) in [(5, 3), (33, 17)] {
        for capacity in [None, Some((3, DropPolicy::Last))] {
            check(&[&[2, TOKENS, width], &[EXPERTS, out, width]], &[(IDS_DIMS, &IDS)], |x, ids| {
                let [places, slots, starts] = route(&ids[0], capacity, None)?;
                let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
                let [y] = Tensor::apply_op(GroupedLinear { sources: 1, balanced: None }, &[&rows, &x[1], &starts])?;
                let [y] = Tensor::apply_op(Combine, &[&y, &places, &slots])?;
                Ok(y)
            });
        }
    }
}

#[test]
fn all_rows_to_one_expert() {
    let ids = [3; 150];
    check(&[&[150, 6], &[EXPERTS, 9, 6]], &[(&[150, 1], &ids)], |x, ids| {
        let [places, slots, starts] = route(&ids[0], None, None)?;
        let [rows] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
        let [y] = Tensor::apply_op(GroupedLinear { sources: 1, balanced: None }, &[&rows, &x[1], &starts])?;
        let [y] = Tensor::apply_op(Combine, &[&y, &places, &slots])?;
        Ok(y)
    });
}

#[test]
fn the_weighted_unit() {
    for capacity in [None, Some((2, DropPolicy::Last)), Some((2, DropPolicy::Lightest))] {
        check(&[&[2, TOKENS, 5], &[2, TOKENS, 5], &[2, TOKENS, 2]], &[(IDS_DIMS, &IDS)], |x, ids| {
            let lightest = matches!(capacity, Some((_, DropPolicy::Lightest)));
            let [places, slots, starts] = route(&ids[0], capacity, lightest.then_some(&x[2]))?;
            let [gate] = Tensor::apply_op(Dispatch, &[&x[0], &places, &slots])?;
            let [up] = Tensor::apply_op(Dispatch, &[&x[1], &places, &slots])?;
            let [weights] = Tensor::apply_op(SlotWeights, &[&x[2], &places, &slots])?;
            let limited = (!lightest).then_some(LimitedActivation { alpha: 1.7, limit: 0.6 });
            let [y] =
                Tensor::apply_op(RoutedSwiGlu { balanced: None, limited: None }, &[&gate, &up, &weights, &starts])?;
            let [z] = Tensor::apply_op(RoutedSwiGlu { balanced: None, limited }, &[&gate, &up, &weights, &starts])?;
            let y = y.add(&z)?;
            let [y] = Tensor::apply_op(Combine, &[&y, &places, &slots])?;
            Ok(y)
        });
    }
}

#[test]
fn the_best_experts() {
    let groups = |count, limit| Some(ExpertGroups { count, limit });
    for (k, groups) in
        [(1, None), (3, None), (8, None), (3, groups(4, 2)), (2, groups(4, 2)), (2, groups(8, 5)), (2, groups(1, 1))]
    {
        check(&[&[2, 5, 8]], &[], |x, _| {
            let [values, _] = Tensor::apply_op(TopK { k, groups, by_best: k == 2 }, &[&x[0]])?;
            values.sqr()
        });
    }
}

#[test]
fn experts_that_choose() {
    for most in [1, 3, TOKENS] {
        check(&[&[2, TOKENS, EXPERTS], &[2, TOKENS, 5], &[EXPERTS, 6, 5]], &[], |x, _| {
            let route =
                Route { experts: EXPERTS, chooses: Chooses::Experts, capacity: Some((most, DropPolicy::Lightest)) };
            let [places, slots, starts] = Tensor::apply_op(route, &[&x[0]])?;
            let [rows] = Tensor::apply_op(Dispatch, &[&x[1], &places, &slots])?;
            let [rows] = Tensor::apply_op(GroupedLinear { sources: 1, balanced: None }, &[&rows, &x[2], &starts])?;
            let [weights] = Tensor::apply_op(SlotWeights, &[&x[0], &places, &slots])?;
            let [rows] =
                Tensor::apply_op(RoutedSwiGlu { balanced: None, limited: None }, &[&rows, &rows, &weights, &starts])?;
            let [y] = Tensor::apply_op(Combine, &[&rows, &places, &slots])?;
            Ok(y)
        });
    }
}

#[test]
fn losses_and_noise() {
    check(&[&[2, 5, 8]], &[], |x, _| x[0].log_sum_exp(2)?.sqr()?.mean_all());
    check(&[&[3, 40]], &[], |x, _| Jitter::apply(&x[0], 0.3)?.sqr());
    check(&[&[2, TOKENS, EXPERTS]], &[(IDS_DIMS, &IDS)], |x, ids| {
        let [load] = Tensor::apply_op(ExpertLoad { experts: EXPERTS, by_sequence: true }, &[&ids[0]])?;
        x[0].softmax_last_dim()?.sum(1)?.mul(&load)?.sum_all()
    });
    for whole_tokens in [false, true] {
        check(&[&[2, TOKENS, 2]], &[(IDS_DIMS, &IDS)], |x, ids| {
            let [places, ..] = route(&ids[0], Some((1, DropPolicy::Last)), None)?;
            let [count] = Tensor::apply_op(Dropped { whole_tokens }, &[&places])?;
            x[0].sum_all()?.mul(&count)
        });
    }
}

/// Returns inputs with padding after the fifth token of the second sequence. The tokens before the padding form two
/// documents.
fn padded(x: &Tensor) -> Result<[Tensor; 3]> {
    let routed: Vec<f32> = (0..2 * TOKENS).map(|token| if token < TOKENS + 5 { 1.2 } else { 0.0 }).collect();
    let starts: Vec<u32> = vec![0, 0, 0, 0, 4, 4, 4, 0, 0, 2, 2, 2, 5, 5];
    // The capacity is half of the tokens that count, rounded up.
    let limits: Vec<u32> = (0..=TOKENS as u32).map(|count| count.div_ceil(2).max(1)).collect();
    let [routed, starts] =
        [Tensor::from_slice(&routed, (2, TOKENS), x.device())?, Tensor::from_slice(&starts, (2, TOKENS), x.device())?];
    Ok([routed, starts, Tensor::new(limits, x.device())?])
}

#[test]
fn padding_has_no_experts() {
    let most = TOKENS.div_ceil(2);
    let capacities = [None, Some((most, DropPolicy::Last)), Some((most, DropPolicy::Lightest))];
    for capacity in capacities {
        check(&[&[2, TOKENS, EXPERTS], &[2, TOKENS, 5]], &[], |x, _| {
            let [routed, starts, limits] = padded(&x[0])?;
            let [weights, ids] = Tensor::apply_op(TopK { k: 2, groups: None, by_best: false }, &[&x[0], &routed])?;
            let lightest = capacity.filter(|(_, drop)| *drop == DropPolicy::Lightest).map(|_| &weights);
            let limits = capacity.map(|_| &limits);
            let inputs: Vec<&Tensor> = [&ids].into_iter().chain(lightest).chain([&routed]).chain(limits).collect();
            let route = Route { experts: EXPERTS, chooses: Chooses::Tokens, capacity };
            let [places, slots, _] = Tensor::apply_op(route, &inputs)?;
            let [rows] = Tensor::apply_op(Dispatch, &[&x[1], &places, &slots])?;
            let [weights] = Tensor::apply_op(SlotWeights, &[&weights, &places, &slots])?;
            let [y] = Tensor::apply_op(Combine, &[&rows.broadcast_mul(&weights)?, &places, &slots])?;
            let [load] = Tensor::apply_op(DocumentLoad { experts: EXPERTS }, &[&ids, &starts])?;
            let [dropped] = Tensor::apply_op(Dropped { whole_tokens: false }, &[&places, &routed])?;
            y.sum_all()?.mul(&dropped.affine(1.0, 1.0)?)?.add(&load.mul(&x[0])?.sum_all()?)
        });
    }
    check(&[&[2, TOKENS, EXPERTS], &[2, TOKENS, 5]], &[], |x, _| {
        let [routed, _, limits] = padded(&x[0])?;
        let capacity = Some((most, DropPolicy::Lightest));
        let route = Route { experts: EXPERTS, chooses: Chooses::Experts, capacity };
        let [places, slots, _] = Tensor::apply_op(route, &[&x[0], &routed, &limits])?;
        let [rows] = Tensor::apply_op(Dispatch, &[&x[1], &places, &slots])?;
        let [dropped] = Tensor::apply_op(Dropped { whole_tokens: true }, &[&places, &routed])?;
        rows.sqr()?.sum_all()?.mul(&dropped.affine(1.0, 1.0)?)
    });
}

/// Checks whole routers with finite differences of their parameters.
#[test]
fn routers() {
    let capacity = |factor, drop| Some(Capacity { factor, drop });
    let base = RouterConfig { experts: 8, top_k: 2, ..RouterConfig::default() };
    let configs = [
        base.clone(),
        RouterConfig { renormalise: false, balance_loss: 0.5, z_loss: 0.1, ..base.clone() },
        RouterConfig {
            top_k: 1,
            renormalise: false,
            jitter: 0.2,
            capacity: capacity(1.0, DropPolicy::Last),
            ..base.clone()
        },
        RouterConfig { capacity: capacity(0.75, DropPolicy::Lightest), ..base.clone() },
        RouterConfig {
            score: Score::Sigmoid,
            scale: 2.5,
            groups: Some(ExpertGroups { count: 4, limit: 2 }),
            balance_loss: 0.5,
            ..base.clone()
        },
        RouterConfig {
            choice: Choice::Experts,
            capacity: capacity(1.0, DropPolicy::Lightest),
            balance_loss: 0.0,
            ..base
        },
    ];
    for config in configs {
        let shapes: [&[usize]; 5] = [&[2, 6, 5], &[8, 5], &[8, 4, 5], &[8, 4, 5], &[8, 5, 4]];
        check(&shapes, &[], |x, _| {
            let routing = config.route(&x[0], &x[1], None, true)?;
            let (rows, routed) = (routing.dispatch(&x[0])?, routing.exchange(ExpertRanks::default())?);
            let (gate, up) = (routed.linear(&rows, &x[2])?, routed.linear(&rows, &x[3])?);
            let rows = routed.linear(&routed.swiglu(&gate, &up, &routing.row_weights()?)?, &x[4])?;
            let y = routing.combine(&rows)?.sqr()?.sum_all()?;
            routing.loss().map_or(Ok(y.clone()), |loss| y.add(&loss.mean_all()?))
        });
    }
}
