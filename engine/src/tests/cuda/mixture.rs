//! Whole training steps of mixture-of-experts models.

use gapless_testing::few;

use super::host;
use super::processor::device;
use super::small::{SEQUENCE, Small, Style, WIDTH};
use super::step::compare_steps;
use super::trainer::{batch, expect_near, options};
use crate::data::IGNORED;
use crate::nn::{
    Capacity, Choice, Experts, Linear, Module, Router, RouterConfig, Score, VarBuilder, linear_no_bias, rms_norm,
};
use crate::ops::{DropPolicy, ExpertGroups};
use crate::{Batch, DeviceChoice, Model, Result, StepOptions, StepReport, Tensor, TrainOptions, Trainer};

/// A small Llama followed by a layer of experts, optionally with a shared expert.
pub struct Mixture {
    llama: Small,
    norm: Box<dyn Module>,
    router: Router,
    experts: Experts,
    shared: Option<Shared>,
}

struct Shared {
    gate: Linear,
    up: Linear,
    down: Linear,
    share: Linear,
}

impl Mixture {
    pub fn new(config: &RouterConfig, is_shared: bool, vb: VarBuilder) -> Result<Self> {
        Self::over(SEQUENCE, config, is_shared, vb)
    }

    /// The model for sequences of `tokens` tokens.
    pub fn over(tokens: usize, config: &RouterConfig, is_shared: bool, vb: VarBuilder) -> Result<Self> {
        let project = |from, to, name| linear_no_bias(from, to, vb.pp("shared").pp(name));
        let shared = || -> Result<Shared> {
            Ok(Shared {
                gate: project(WIDTH, WIDTH, "gate")?,
                up: project(WIDTH, WIDTH, "up")?,
                down: project(WIDTH, WIDTH, "down")?,
                share: project(WIDTH, 1, "share")?,
            })
        };
        Ok(Self {
            llama: Small::over(tokens, Style::Llama, vb.clone())?,
            norm: Box::new(rms_norm(WIDTH, 1e-5, vb.pp("norm"))?),
            router: Router::new(config, WIDTH, vb.pp("router"))?,
            experts: Experts::new(config.experts, WIDTH, 5, vb.pp("experts"))?,
            shared: is_shared.then(shared).transpose()?,
        })
    }

    /// Returns the head's input, and the router's loss per token.
    fn hidden(&self, tokens: &Tensor, train: bool) -> Result<(Tensor, Option<Tensor>)> {
        let x = self.llama.hidden(tokens, train)?;
        let normed = self.norm.forward(&x)?;
        let routing = self.router.forward(&normed, train)?;
        let mut y = self.experts.forward(&normed, &routing)?;
        if let Some(Shared { gate, up, down, share }) = &self.shared {
            let own = down.forward(&gate.forward(&normed)?.swiglu(&up.forward(&normed)?)?)?;
            y = y.add(&own.broadcast_mul(&share.forward(&normed)?.sigmoid()?)?)?;
        }
        Ok((x.add(&y)?, routing.loss().cloned()))
    }
}

impl Model for Mixture {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        self.llama.head.forward(&self.hidden(tokens, train)?.0)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
        let (x, losses) = self.hidden(tokens, train)?;
        let of_tokens = self.llama.head.cross_entropy(&x, targets)?;
        losses.map_or(Ok(of_tokens.clone()), |losses| of_tokens.add(&losses))?.mean_all()
    }
}

/// Returns routers of every kind. Each comes with a name, and with whether the model has a shared expert.
pub fn mixtures() -> Vec<(&'static str, bool, RouterConfig)> {
    let most = |drop| Some(Capacity { factor: 1.0, drop });
    // Two of four experts, normalized weights, balance loss.
    let mixtral = RouterConfig { experts: 4, ..RouterConfig::default() };
    // Weights that are not normalized, and a gated shared expert.
    let qwen = RouterConfig { top_k: 3, renormalise: false, balance_loss: 0.01, ..RouterConfig::default() };
    // One expert per token, with a capacity, jitter and a loss of the logits.
    let switch = RouterConfig {
        experts: 4,
        top_k: 1,
        renormalise: false,
        capacity: most(DropPolicy::Last),
        jitter: 0.1,
        z_loss: 0.01,
        ..RouterConfig::default()
    };
    // Sigmoid scores, groups, and a bias that moves towards balance.
    let deepseek = RouterConfig {
        experts: 8,
        score: Score::Sigmoid,
        scale: 2.5,
        groups: Some(ExpertGroups { count: 4, limit: 2 }),
        bias_rate: 0.01,
        balance_loss: 1e-3,
        ..RouterConfig::default()
    };
    // A capacity that keeps the rows with the largest weights, both if tokens choose experts and if experts choose
    // tokens.
    let heaviest = |choice| RouterConfig {
        experts: 4,
        choice,
        capacity: most(DropPolicy::Lightest),
        balance_loss: 0.0,
        ..RouterConfig::default()
    };
    vec![
        ("Mixtral", false, mixtral),
        ("Qwen", true, qwen),
        ("Switch", false, switch),
        ("DeepSeek", true, deepseek),
        ("tokens that choose", false, heaviest(Choice::Tokens)),
        ("experts that choose", false, heaviest(Choice::Experts)),
    ]
}

#[test]
fn steps_of_mixtures() {
    if host::is_there() {
        for (name, is_shared, config) in few(&mixtures(), 2) {
            compare_steps(name, |vb| Mixture::new(config, *is_shared, vb));
        }
    }
}

/// If examples are followed by padding, losses and norms equal those on the CPU.
#[test]
fn padding_counts_nowhere() {
    if !host::is_there() {
        return;
    }
    for (name, is_shared, config) in few(&mixtures(), 2) {
        let options = TrainOptions { step: StepOptions { documents: true, ..options().step }, ..options() };
        let build = |vb| Mixture::new(config, *is_shared, vb);
        let mut cpu = Trainer::new(build, TrainOptions { device: DeviceChoice::Cpu, ..options.clone() }).unwrap();
        let mut device = Trainer::builder(build, options.clone()).on_device(device()).build().unwrap();
        let [tokens, mut targets] = batch(0);
        // Each sequence has two examples of two tokens, then padding. All of the last sequence's targets are ignored.
        let (sequence, all) = (options.step.sequence, tokens.len());
        let starts: Vec<u32> = (0..all).map(|i| (i % sequence / 2 * 2).min(4) as u32).collect();
        for (i, target) in targets.iter_mut().enumerate() {
            if i % sequence >= 4 || i % 2 == 0 || i >= all - sequence {
                *target = IGNORED;
            }
        }
        for _ in 0..3 {
            let [of_cpu, of_device] = [&mut cpu, &mut device].map(|trainer| {
                trainer.step_batch(&Batch { tokens: &tokens, targets: &targets, starts: &starts }).unwrap()
            });
            let parts = |report: &StepReport| report.loss_parts.map(|parts| (parts.balance, parts.router_z));
            let (a, b) = (parts(&of_device).unwrap_or_default(), parts(&of_cpu).unwrap_or_default());
            for (device, cpu) in [(a.0, b.0), (a.1, b.1), (Some(of_device.loss), Some(of_cpu.loss))] {
                expect_near(name, device.unwrap_or_default(), cpu.unwrap_or_default(), 1e-5);
            }
            expect_near(name, of_device.gradient_norm, of_cpu.gradient_norm, 1e-4);
        }
    }
}
