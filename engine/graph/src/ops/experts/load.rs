//! Counts of the tokens that chose each expert, and of the choices that got no row.

use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{NONE, expect_routed, is_routed};
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// Counts how often each expert occurs in ids [.., tokens, k], as f32. The result is [batch, experts] with one count
/// per sequence, or \[experts\] with one count for all sequences. [`NONE`] is not counted. There is no gradient.
#[derive(Debug, Clone, Copy)]
pub struct ExpertLoad {
    /// Number of experts.
    pub experts: usize,
    /// True if each sequence has counts of its own.
    pub by_sequence: bool,
}

impl Op for ExpertLoad {
    fn name(&self) -> &'static str {
        "expert_load"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels(match (self.by_sequence, inputs[0].dims().len()) {
            (false, _) => "* K -> E",
            (true, 3) => "b t K -> b E",
            (true, _) => "t K -> _ E",
        }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("ids", &inputs[0])?;
        let (batch, ..) = super::by_sequence(inputs[0].dims())?;
        Ok(vec![if self.by_sequence { Spec::f32((batch, self.experts)) } else { Spec::f32(self.experts) }])
    }

    fn gradient(&self, _: &mut crate::Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    /// Counts are integers, so below 2²⁴ the order of summation does not matter.
    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let load = args.output::<f32>(0);
        let ids = args.input::<u32>(0);
        if !accumulate {
            load.fill(0.0);
        }
        let sequences = load.len() / self.experts;
        for (load, ids) in load.chunks_exact_mut(self.experts).zip(ids.chunks_exact(ids.len() / sequences)) {
            ids.iter().filter(|&&id| id != NONE).for_each(|&id| load[id as usize] += 1.0);
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::expert_load(self.experts, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let ids = args.input(0);
        let (batch, tokens, k) = super::by_sequence(&ids.dims).expect("checked by the shape rule");
        let mut load = Array::zeros(&if self.by_sequence { vec![batch, self.experts] } else { vec![self.experts] });
        for (slot, &id) in ids.data.iter().enumerate().filter(|(_, id)| **id != f64::from(NONE)) {
            let sequence = if self.by_sequence { slot / (tokens * k) } else { 0 };
            load.data[sequence * self.experts + id as usize] += 1.0;
        }
        vec![load]
    }
}

/// Counts the places [.., k] that are [`NONE`], or the tokens whose places are all [`NONE`]. The output is a scalar. An
/// optional second input, f32 [..], is 0 for tokens that are not counted. There is no gradient.
#[derive(Debug, Clone, Copy)]
pub struct Dropped {
    /// True if tokens without any row are counted. If false, places without a row are counted.
    pub whole_tokens: bool,
}

impl Dropped {
    fn nowhere<P: PartialEq, T: PartialOrd + Default>(
        &self,
        places: &[P],
        k: usize,
        routed: Option<&[T]>,
        none: P,
    ) -> usize {
        let of_token = |(token, places): (usize, &[P])| {
            let nowhere = places.iter().filter(|place| **place == none).count();
            match is_routed(routed, token) {
                false => 0,
                true if self.whole_tokens => usize::from(nowhere == k),
                true => nowhere,
            }
        };
        places.chunks_exact(k).enumerate().map(of_token).sum()
    }
}

impl Op for Dropped {
    fn name(&self) -> &'static str {
        "unplaced"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels(if inputs.len() > 1 { "* K, * -> " } else { "* K -> " }))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("places", &inputs[0])?;
        if let Some(routed) = inputs.get(1) {
            expect_routed(routed, &inputs[0])?;
        }
        Ok(vec![Spec::f32(())])
    }

    fn gradient(&self, _: &mut crate::Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    /// Counts are integers, so the order of summation does not matter.
    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        let accumulate = args.accumulate(0);
        let [count] = args.output::<f32>(0) else { unreachable!("a scalar") };
        let places = args.input::<u32>(0);
        let routed = (args.inputs() > 1).then(|| args.input::<f32>(1));
        let nowhere = self.nowhere(places, gapless_kernels::width(args.input_dims(0)), routed, NONE);
        *count = if accumulate { *count } else { 0.0 } + nowhere as f32;
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::unplaced(self.whole_tokens, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let places = args.input(0);
        let routed = (args.inputs() > 1).then(|| &*args.input(1).data);
        let nowhere = self.nowhere(&places.data, gapless_kernels::width(&places.dims), routed, f64::from(NONE));
        vec![Array::new(&[], vec![nowhere as f64])]
    }
}
