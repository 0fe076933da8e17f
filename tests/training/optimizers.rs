//! Optimizers with smaller states, and one that a user implements. Tests their bits, bytes, checkpoints, ranks, and
//! learning.

use std::sync::Arc;

use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::optim::{
    AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State,
};
use gapless::engine::{Args, Array, Op, Reference, Role, Spec};
use gapless::models::MoeStyle;
use gapless::nn::Init;
use gapless::{Mesh, Tensor, Trainer, communicator};
use gapless_testing::{few, in_turn};

use crate::common::{Kind, Outcome, TinyRun};
use crate::learning::{PEAK, learn, learn_at, walk};

type Rule = Arc<dyn Optimizer>;

/// AdamW with 8-bit states. Some weights of the small models are large enough for 8-bit states, and some of these
/// weights divide into shards of whole blocks.
fn eight_bit() -> Rule {
    AdamW8bit::default().into()
}

/// GaLore, which recomputes its projections at steps 0, 3 and 6.
fn galore() -> Rule {
    GaLore { rank: 12, refresh_steps: 3, ..GaLore::default() }.into()
}

/// Muon. Every data rank updates whole matrices, and the states of other parameters are sharded.
fn muon() -> Rule {
    Muon::default().into()
}

fn run(kind: Kind, rule: Rule) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.step.optimizer = rule;
    run
}

#[test]
fn threads_micro_batches_and_poison_change_no_bit() {
    let mixture = Kind::Moe(MoeStyle::DeepSeek);
    for (kind, rule) in [
        (Kind::Gpt, eight_bit()),
        (Kind::Llama, eight_bit()),
        (Kind::Gpt, galore()),
        (mixture, eight_bit()),
        (mixture, galore()),
        (Kind::Llama, Lion::default().into()),
        (Kind::Gpt, muon()),
        (mixture, muon()),
    ] {
        let plain = run(kind, rule.clone()).steps(4);
        let changes: [fn(&mut TinyRun); 4] = [
            |run| run.options.threads = 1,
            |run| run.options.threads = 3,
            |run| run.options.step.micro_batches = 4,
            |run| run.options.poison = true,
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut run = run(kind, rule.clone());
            change(&mut run);
            assert_eq!(run.steps(4), plain, "{kind:?}, {rule:?}, change {index}");
        }
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_same_bits() {
    for rule in [eight_bit(), galore(), muon()] {
        let dir = tempfile::tempdir().unwrap();
        // When the run is saved, GaLore's projection is two steps old, and is used for one more step.
        let run = run(Kind::Gpt, rule);
        let mut straight = run.trainer();
        run.go_on(&mut straight, 2);
        straight.save(dir.path(), serde_json::Value::Null).unwrap();
        let expected = run.go_on(&mut straight, 3);
        let mut resumed = run.trainer();
        resumed.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
        assert_eq!(run.go_on(&mut resumed, 3), expected, "{:?}", run.options.step.optimizer);
    }
}

#[test]
fn states_of_another_rule_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut saved = run(Kind::Gpt, eight_bit()).trainer();
    saved.save(dir.path(), serde_json::Value::Null).unwrap();
    let mut trainer = run(Kind::Gpt, AdamW::default().into()).trainer();
    let error = trainer.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap_err().to_string();
    assert!(error.contains("exp_avg/h.0.attn.c_attn.weight is missing"), "{error}");
}

/// Compares the reported bytes with the formula of each rule. Every tensor takes whole cache lines.
#[test]
fn states_take_the_bytes_of_their_formulas() {
    const LINE: usize = 64;
    let f32s = |count: usize| (4 * count).next_multiple_of(LINE);
    let adam = |dims: &[usize]| 2 * f32s(dims.iter().product());
    let eight_bit_bytes = |dims: &[usize]| {
        let n: usize = dims.iter().product();
        2 * n.next_multiple_of(LINE) + 2 * f32s(n.div_ceil(256))
    };
    let galore_bytes = |dims: &[usize]| {
        let (m, n, r) = (dims[0].min(dims[1]), dims[0].max(dims[1]), 12);
        f32s(m * r) + 2 * f32s(n * r)
    };
    for (rule, applies, bytes) in [
        (
            eight_bit(),
            (|dims: &[usize]| dims.iter().product::<usize>() >= 4096) as fn(&[usize]) -> bool,
            &eight_bit_bytes as &dyn Fn(&[usize]) -> usize,
        ),
        (galore(), |dims| dims.len() == 2, &galore_bytes),
    ] {
        let trainer = run(Kind::Gpt, rule).trainer();
        let (mut expected, mut reduced) = (0, 0);
        for name in trainer.parameter_names() {
            let tensor = trainer.tensor(name).unwrap();
            // The embedding is excluded, because it is read by lookups.
            let is_reduced = applies(tensor.dims()) && !name.starts_with("wte");
            expected += if is_reduced { bytes(tensor.dims()) } else { adam(tensor.dims()) };
            reduced += usize::from(is_reduced);
        }
        let roles = trainer.report().summary.roles;
        let states = roles.iter().find(|share| share.role == Role::OptimizerState).unwrap();
        assert_eq!(states.bytes, expected as u64, "{:?}", trainer.options().step.optimizer);
        assert!(reduced >= 4);
    }
}

fn on_data_ranks(rule: Rule, data: usize) -> TinyRun {
    let mut run = run(Kind::Gpt, rule);
    run.options.threads = 1;
    run.options.step.micro_batches = 8 / data;
    run.options.step.mesh = Mesh { data, ..Mesh::default() };
    run
}

/// Compares losses up to rounding, because sums over ranks are in another order (see tests/training/ranks.rs).
/// Sometimes the other order rounds a state to an adjacent code.
fn close(outcome: &Outcome, losses: &[u32], what: &str) {
    for (&a, &b) in outcome.losses.iter().zip(losses) {
        let (a, b) = (f32::from_bits(a), f32::from_bits(b));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} instead of {b}");
    }
}

#[test]
fn data_ranks_share_states_and_their_checkpoints_fit_any_number_of_ranks() {
    for (turn, rule) in [eight_bit(), galore(), Lion::default().into(), muon()].into_iter().enumerate() {
        let alone = run(Kind::Gpt, rule.clone()).steps(5);
        for &(from, to) in in_turn(&[(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)], turn) {
            let what = format!("{rule:?} from {from} to {to} ranks");
            let dir = tempfile::tempdir().unwrap();
            on_data_ranks(rule.clone(), from).save_on_ranks(2, dir.path());
            let resumed = on_data_ranks(rule.clone(), to).resume_on_ranks(dir.path(), 3);
            close(&resumed, &alone.losses[2..], &what);
            if from == to {
                let straight = on_data_ranks(rule.clone(), to).steps_on_ranks(5);
                assert_eq!(resumed.losses, straight.losses[2..], "{what}");
                assert_eq!(resumed.parameters, straight.parameters, "{what}");
            }
        }
    }
}

#[test]
fn stages_of_a_pipeline_change_no_bit() {
    for rule in [eight_bit(), galore(), muon()] {
        let plain = run(Kind::Gpt, rule.clone()).steps(4);
        let mut run = on_data_ranks(rule, 1);
        run.options.step.mesh = Mesh::pipeline(2);
        assert_eq!(run.steps_on_ranks(4), plain, "{:?}", run.options.step.optimizer);
    }
}

/// Each of two ranks holds half of the states that divide into whole blocks, and all of the other states.
#[test]
fn parts_are_of_whole_blocks() {
    let halves = on_data_ranks(eight_bit(), 2).on_ranks(|trainer| {
        let elements = |name: &str| trainer.tensor(name).unwrap().elem_count();
        // 192 × 48 elements are 36 blocks, and 144 × 48 are 27.
        [
            elements("exp_avg_8bit/h.0.mlp.c_fc.weight"),
            elements("exp_avg_scale/h.0.mlp.c_fc.weight"),
            elements("exp_avg_8bit/h.0.attn.c_attn.weight"),
        ]
    });
    assert_eq!(halves, [[192 * 48 / 2, 18, 144 * 48]; 2]);
}

#[test]
fn fewer_bytes_learn_about_as_much() {
    let [start, adam] = learn(run(Kind::Gpt, AdamW::default().into()));
    assert!(adam < 0.4 * start);
    // All states have 8 bits, including those of biases, norms and embeddings. A state is rounded by up to 2 % in
    // either direction. The effect is less than the difference between batches. With a wrong rule, the loss would
    // stay near its initial value.
    let all_8bit = AdamW8bit { smallest: 0, embeddings: true, ..AdamW8bit::default() };
    // With a quarter of the directions, this optimizer learns slightly more slowly.
    let galore = GaLore { rank: 12, refresh_steps: 20, alpha: 1.0, ..GaLore::default() };
    let rules: [(Rule, f64, std::ops::Range<f32>); 4] = [
        (all_8bit.into(), PEAK, 0.99..1.01),
        (muon(), PEAK, 0.0..1.1),
        (galore.into(), PEAK, 0.8..1.2),
        (Lion::default().into(), 2e-3, 0.0..1.1),
    ];
    for (rule, lr, allowed) in few(&rules, 1) {
        let [_, end] = learn_at(run(Kind::Gpt, rule.clone()), *lr);
        println!("{rule:?}: from {start} to {end}, AdamW {adam}");
        assert!(allowed.contains(&(end / adam)), "{rule:?}: {end} instead of {adam}");
    }
}

/// Plain momentum, in the form in which a user would implement it.
#[derive(Debug)]
struct Momentum {
    /// Number of elements of a state that is never read.
    spare: usize,
}

impl Optimizer for Momentum {
    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let state = |name, spec| State { name, spec, init: Init::Const(0.0).into() };
        let mut states = vec![state("velocity", Spec::f32(parameter.dims))];
        if self.spare > 0 {
            states.push(state("spare", Spec::f32(self.spare)));
        }
        states
    }

    fn scalars(&self, _step: u64, lr: f64) -> [f32; SCALARS] {
        [lr as f32; SCALARS]
    }

    fn update(&self, update: ParameterUpdate<'_>) -> gapless::Result<Tensor> {
        let inputs = [update.parameter, update.gradient, &update.states[0], update.scalars];
        Tensor::apply_op::<2>(MomentumUpdate, &inputs).map(|[parameter, _]| parameter)
    }
}

/// Updates (parameter, velocity) in place from (parameter, gradient, velocity, scalars).
#[derive(Debug)]
struct MomentumUpdate;

impl Op for MomentumUpdate {
    fn name(&self) -> &'static str {
        "momentum"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone(), inputs[2].clone()])
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0), (2, 1)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let (p, v) = (args.output::<f32>(0), args.output::<f32>(1));
        let (g, lr) = (args.input::<f32>(1), args.input::<f32>(3)[0]);
        for ((p, v), g) in p.iter_mut().zip(v).zip(g) {
            *v = 0.9 * *v + g;
            *p -= lr * *v;
        }
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let v = args.input(2).zip(args.input(1), |v, g| 0.9 * v + g);
        vec![args.input(0).zip(&v, |p, v| p - args.input(3).data[0] * v), v]
    }
}

#[test]
fn a_rule_from_outside_is_as_good() {
    let rule: Rule = Arc::new(Momentum { spare: 0 });
    let mut run = run(Kind::Gpt, rule);
    run.options.learning_rate.peak = 0.03;
    let mut trainer = run.trainer();
    let losses: Vec<f32> = (0..60)
        .map(|step| {
            let (tokens, targets) = walk(&run, step % 4);
            trainer.step(&tokens, &targets).unwrap().loss
        })
        .collect();
    assert!(losses[59] < losses[0] - 0.5, "{losses:?}");
    let alone = run.steps(3);
    run.options.threads = 1;
    run.options.step.mesh = Mesh { data: 2, ..Mesh::default() };
    close(&run.steps_on_ranks(3), &alone.losses, "two ranks");
}

#[test]
fn states_that_do_not_divide_are_refused_with_a_remedy() {
    let run = on_data_ranks(Arc::new(Momentum { spare: 3 }), 2);
    let made = communicator::on_threads(2, |world| run.try_rank(Some(world)).map(|_: Trainer| ()));
    let error = made.unwrap_err().to_string();
    assert!(error.contains("spare/") && error.contains("Optimizer::shard_granularity"), "{error}");
}
