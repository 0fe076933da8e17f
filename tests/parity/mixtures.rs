//! Mixtures of experts: every kind of routing, with inputs that drive the routing to its extremes.

use candle_core::{Device, Tensor};
use gapless::Trainer;
use gapless::engine::nn::{Capacity, Choice as Chooser, RouterConfig};
use gapless::engine::ops::{DropPolicy, ExpertGroups};
use gapless::models::{LlamaConfig, MoeConfig, MoeStyle};
use gapless_testing::in_turn;

use crate::candle::{Choice, Reference, ids};
use crate::verdict::Verdict;
use crate::{BATCH, Config, Result, options};

/// Every kind of routing, with auxiliary losses large enough to affect the gradients.
pub fn all() -> Vec<MoeConfig> {
    let small = |style| {
        let MoeConfig { llama, router, .. } = MoeConfig::small(style, 61);
        let llama = LlamaConfig { layers: 2, width: 32, hidden: 45, ..llama };
        let router = RouterConfig { experts: 8, jitter: 0.0, ..router };
        MoeConfig { llama, router, expert_hidden: 19, ..MoeConfig::small(style, 61) }
    };
    let with = |style, change: &dyn Fn(&mut RouterConfig)| {
        let mut config = small(style);
        change(&mut config.router);
        config
    };
    let groups = Some(ExpertGroups { count: 4, limit: 2 });
    vec![
        small(MoeStyle::Mixtral),
        with(MoeStyle::Switch, &|router| (router.balance_loss, router.z_loss) = (0.5, 0.1)),
        MoeConfig { shared_hidden: 23, ..with(MoeStyle::Qwen, &|router| router.top_k = 3) },
        MoeConfig {
            shared_hidden: 23,
            ..with(MoeStyle::DeepSeek, &|router| {
                *router = RouterConfig { top_k: 3, groups, bias_rate: 0.01, balance_loss: 0.5, ..router.clone() };
            })
        },
        small(MoeStyle::ExpertChoice),
        with(MoeStyle::ExpertChoice, &|router| {
            router.capacity = Some(Capacity { factor: 0.6, drop: DropPolicy::Lightest });
            router.z_loss = 0.1;
        }),
        with(MoeStyle::Mixtral, &|router| {
            router.capacity = Some(Capacity { factor: 0.9, drop: DropPolicy::Lightest });
            router.scale = 1.5;
        }),
    ]
}

/// The layers that have a router.
pub fn gates(trainer: &Trainer) -> Vec<String> {
    trainer
        .parameter_names()
        .filter_map(|name| name.strip_suffix(".mlp.gate.weight"))
        .map(|layer| format!("{layer}.mlp.gate"))
        .collect()
}

/// The name of a router's load bias. The loss has no gradient with respect to the bias, so the load is stored in
/// place of the gradient.
pub const LOAD_BIAS: &str = ".e_score_correction_bias";

/// Checks that the engine made the same choices in f32 as the reference in f64. Choices are not continuous, so other
/// results can only be compared if the choices are equal.
pub fn expect_choices(
    twin: &Reference,
    trainer: &Trainer,
    tokens: &Tensor,
    place: &str,
) -> Result<Vec<(String, Choice)>> {
    let choices = decided_choices(twin, tokens, place)?;
    for (gate, choice) in &choices {
        let watched = |what: &str| -> Result<Vec<f32>> {
            Ok(trainer.watched(&format!("{gate}.{what}"))?.flatten_all()?.to_vec1()?)
        };
        let is_watched = |what: &str| trainer.watched_names().any(|name| name == format!("{gate}.{what}"));
        if is_watched("load") {
            let load: Vec<f32> = choice.load.iter().map(|&load| load as f32).collect();
            assert_eq!(watched("load")?, load, "load of {gate} of {place}");
        }
        match is_watched("dropped") {
            true => assert_eq!(watched("dropped")?, [choice.dropped as f32], "dropped by {gate} of {place}"),
            false => assert_eq!(choice.dropped, 0, "{gate} of {place}"),
        }
        assert!(is_watched("load") || is_watched("dropped"), "{gate} of {place} can be watched");
    }
    Ok(choices)
}

/// Returns the choices of the reference. Scores have relative errors of about 1e-7, so every choice must have a
/// larger margin.
pub fn decided_choices(twin: &Reference, tokens: &Tensor, place: &str) -> Result<Vec<(String, Choice)>> {
    let choices = twin.choices(tokens)?;
    for (gate, Choice { margin, .. }) in &choices {
        assert!(*margin > 1e-6, "{gate} of {place} chooses by {margin:.1e}: take other numbers");
    }
    Ok(choices)
}

/// Updates the routers' biases (Wang et al., arXiv 2408.15664, algorithm 1).
pub fn balance(twin: &Reference, choices: &[(String, Choice)], rate: f64) -> Result {
    for (name, variable) in twin.variables() {
        let Some(gate) = name.strip_suffix(LOAD_BIAS) else { continue };
        let (_, Choice { load, .. }) = choices.iter().find(|choice| choice.0 == gate).expect("every gate chooses");
        let mean = load.iter().sum::<f64>() / load.len() as f64;
        let moves: Vec<f64> = load.iter().map(|&load| rate * f64::from((mean - load).total_cmp(&0.0) as i8)).collect();
        let moved = (variable.as_tensor() + Tensor::new(moves, variable.device())?)?;
        variable.set(&moved)?;
    }
    Ok(())
}

/// A change to the routers of a model before a step.
#[derive(Debug, Clone, Copy)]
enum Push {
    /// Every token prefers the same expert.
    ToOne,
    /// No token chooses one of the experts.
    FromOne,
    /// The preferred experts become the avoided ones, and vice versa, with every step.
    Oscillate,
    /// All scores are equal, so the order of experts or tokens decides.
    Nowhere,
}

const PUSHED: usize = 3;

impl Push {
    fn push(self, trainer: &mut Trainer, step: u32) -> Result {
        let change = |trainer: &mut Trainer, name: &str, change: &dyn Fn(usize, usize, f32) -> f32| -> Result {
            let mut rows: Vec<Vec<f32>> = trainer.tensor(name)?.to_vec2()?;
            let every = rows
                .iter_mut()
                .enumerate()
                .flat_map(|(i, row)| row.iter_mut().enumerate().map(move |(j, x)| (i, j, x)));
            every.for_each(|(i, j, x)| *x = change(i, j, *x));
            Ok(trainer.set_tensor(name, &Tensor::new(rows, &Device::Cpu)?)?)
        };
        // Gives all tokens a common component, so that a router's weight for this component affects all tokens.
        change(trainer, "model.embed_tokens.weight", &|_, j, x| if j == 0 { 0.2 } else { x })?;
        let towards = |push: f32| {
            move |i: usize, j: usize, x: f32| match (i, j) {
                (PUSHED, 0) => push,
                (PUSHED, _) | (_, 0) => 0.0,
                _ => x,
            }
        };
        for gate in gates(trainer) {
            let name = format!("{gate}.weight");
            match self {
                Self::ToOne => change(trainer, &name, &towards(0.6))?,
                Self::FromOne => change(trainer, &name, &towards(-0.6))?,
                Self::Oscillate => change(trainer, &name, &|_, _, x| if step == 0 { x } else { -x })?,
                Self::Nowhere => change(trainer, &name, &|_, _, _| 0.0)?,
            }
        }
        Ok(())
    }

    /// Checks that the routing is the intended one.
    fn expect(self, config: &RouterConfig, choice: &Choice, tokens: usize, place: &str) {
        let all = (BATCH * tokens) as f64;
        let taken = config.capacity.map_or(usize::MAX, |capacity| {
            (capacity.factor * (tokens * config.top_k) as f64 / config.experts as f64).ceil() as usize
        });
        match (config.choice, self) {
            (Chooser::Experts, Self::Nowhere) => assert_eq!(choice.dropped, BATCH * (tokens - taken), "{place}"),
            (Chooser::Experts, _) => {}
            (Chooser::Tokens, Self::ToOne) => {
                assert_eq!(choice.load[PUSHED], all, "{place}");
                assert!(choice.dropped >= BATCH * tokens.saturating_sub(taken), "{place}");
            }
            (Chooser::Tokens, Self::FromOne) => assert_eq!(choice.load[PUSHED], 0.0, "{place}"),
            (Chooser::Tokens, Self::Nowhere) if config.bias_rate == 0.0 => {
                let first: Vec<f64> = (0..config.experts).map(|i| if i < config.top_k { all } else { 0.0 }).collect();
                assert_eq!(choice.load, first, "{place}");
                assert_eq!(choice.dropped, config.top_k * BATCH * tokens.saturating_sub(taken), "{place}");
            }
            (Chooser::Tokens, _) => {}
        }
    }
}

#[test]
fn gradients_are_those_of_candle_wherever_the_tokens_go() -> Result {
    const TOKENS: usize = 13;
    const PUSHES: [[Push; 2]; 2] = [[Push::ToOne, Push::Oscillate], [Push::Nowhere, Push::FromOne]];
    let mut verdict = Verdict::default();
    for (turn, mixture) in all().into_iter().enumerate() {
        for (push_turn, push) in in_turn(&PUSHES, turn).iter().flatten().enumerate() {
            let micro_batches = [1, 3][(turn + push_turn) % 2];
            let config = Config::Moe(Box::new(mixture.clone()));
            let mut options = options(TOKENS, micro_batches);
            options.learning_rate.peak = 1e-3;
            let mut trainer = config.trainer(options)?;
            for step in 0..2 {
                push.push(&mut trainer, step)?;
                let twin = config.twin(&trainer)?;
                let (tokens, targets) = config.batch(TOKENS, step);
                let report = trainer.step(&tokens, &targets)?;
                let place = format!("{push:?}, {mixture:?}, {micro_batches} micro-batches, step {step}");
                for (_, choice) in twin.choices(&ids(&tokens, BATCH)?)? {
                    push.expect(&mixture.router, &choice, TOKENS, &place);
                }
                verdict.expect_step(&trainer, report, &twin, (&tokens, &targets), &place)?;
            }
        }
    }
    verdict.finish("gradients of pushed routers");
    Ok(())
}
