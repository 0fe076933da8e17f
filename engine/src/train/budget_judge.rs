//! Judges the search for a budget's recomputation: every way there is to keep and drop, lowered one by one.

use gapless_alloc::arena::Reserve;
use gapless_parallel::Rates;

use super::compile_step::TrainStep;
use super::pipeline::RankPlan;
use super::{Model, TrainOptions};
use crate::compile::{Program, alive_nodes, height};
use crate::error::{Error, Result};
use crate::graph::Tensor;
use crate::nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};
use crate::recompute::{Recompute, Saved};

/// Layers of x + W₂·f(W₁·norm(x)), of widths of their own.
struct Chain {
    embed: Embedding,
    layers: Vec<(RmsNorm, Linear, Linear, String)>,
    head: Linear,
}

impl Chain {
    fn new(hidden: &[usize], vb: VarBuilder) -> Result<Self> {
        let layer = |(index, &hidden): (usize, &usize)| {
            let vb = vb.pp("h").pp(index);
            let (norm, up) = (rms_norm(16, 1e-5, vb.pp("norm"))?, linear_no_bias(16, hidden, vb.pp("up"))?);
            Ok((norm, up, linear_no_bias(hidden, 16, vb.pp("down"))?, vb.prefix().to_owned()))
        };
        let layers = hidden.iter().enumerate().map(layer).collect::<Result<_>>()?;
        Ok(Self { embed: embedding(32, 16, vb.pp("embed"))?, layers, head: linear_no_bias(16, 32, vb.pp("head"))? })
    }
}

impl Model for Chain {
    fn forward(&self, tokens: &Tensor, _: bool) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        for (norm, up, down, name) in &self.layers {
            let _layer = x.enter(name);
            x = (&x + down.forward(&up.forward(&norm.forward(&x)?)?.gelu()?)?)?;
        }
        self.head.forward(&x)
    }
}

/// The most bytes alive at once, and the time of what is computed again, under every subset of what may be dropped.
fn all_ways(step: &TrainStep<Chain>, plan: &RankPlan, rates: &Rates) -> Vec<(u64, u64)> {
    let roots = {
        let graph = step.graph();
        let alive = alive_nodes(&graph, step.outputs());
        let saved = Saved::new(&graph, &alive);
        // Norms make their statistics with their results: they go together.
        let inside = |root: &&_| !saved.leaves_layer(**root);
        let mut groups: Vec<Vec<_>> = Vec::new();
        for &root in saved.roots().iter().filter(inside) {
            match groups.last_mut() {
                Some(last) if std::ptr::eq(saved.maker(last[0]), saved.maker(root)) => last.push(root),
                _ => groups.push(vec![root]),
            }
        }
        groups
    };
    let way = |subset: u32| {
        let dropped =
            roots.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1).flat_map(|(_, group)| group.clone());
        let program: Program = step.dropping(plan, 1, dropped).unwrap();
        let [_, again] = program.nanoseconds(rates);
        // The bound: no plan is lower.
        (height(&[&program], Some(0), Reserve::Worst).unwrap(), again)
    };
    (0..1 << roots.len()).map(way).collect()
}

#[test]
fn no_way_to_keep_and_drop_is_cheaper() {
    for hidden in [vec![64, 64, 64], vec![32, 96, 64], vec![96, 32]] {
        let options = TrainOptions { batch: 4, sequence: 16, threads: 1, ..TrainOptions::default() };
        let plan = RankPlan::new(options.mesh, 0, &options.pipeline, options.micro_batches).unwrap();
        let step = TrainStep::record(&|vb| Chain::new(&hidden, vb), &options, &plan).unwrap();
        let rates = Rates { flops: 1e9, bytes: 1e9 };
        let ways = all_ways(&step, &plan, &rates);
        let (least, most) = (ways.iter().map(|way| way.0).min().unwrap(), ways[0].0);
        assert!(least < most);
        for part in 1..=16 {
            let bytes = least + (most - least) * part / 16;
            let best = ways.iter().filter(|way| way.0 <= bytes).map(|way| way.1).min().unwrap();
            let options = TrainOptions { recompute: Recompute::Budget { bytes, rates }, ..options.clone() };
            let program = step.program(&options, &plan, 1, &[]).unwrap();
            let arena = height(&[&program], Some(bytes), Reserve::Worst).unwrap();
            let [all, again] = program.nanoseconds(&rates);
            println!(
                "{hidden:?}: {bytes} bytes, {arena} planned, {again} ns again, {best} at best, of {}",
                all - again
            );
            assert!(arena <= bytes);
            assert_eq!(again, best, "{hidden:?}, {bytes} bytes");
        }
        let options = TrainOptions { recompute: Recompute::Budget { bytes: least - 1, rates }, ..options };
        match step.program(&options, &plan, 1, &[]) {
            Err(Error::OverBudget { smallest, .. }) => assert!(smallest >= least, "{smallest} below {least}"),
            other => panic!("nothing fits below the least: {:?}", other.map(|program| program.steps.len())),
        }
    }
}
