//! Attention with sinks.

use std::sync::Arc;

use candle_core::DType;
use gapless_kernels::cpu::Args;
use gapless_kernels::{Spec, Window};

use super::Attention;
use super::attention::AttentionGrad;
use crate::error::Result;
use crate::op::Keys;
use crate::reference::{Array, Reference};
use crate::rule::Rule;
use crate::tensor::Tensor;
use crate::{Gradient, Op};

/// The result of attention with sinks, as computed from that of [`Attention`], and its gradient. A sink is a score per head
/// that takes part in the softmax but has no value (Xiao et al., arXiv 2309.17453, in the form of gpt-oss).
///
/// - Inputs: the result y [batch, tokens, heads, value size], the log-sum-exp of the scores and the sink [batch, heads,
///   tokens], the sinks `[heads]`, and the inputs of [`Attention`].
/// - Output: y.
///
/// With a sink s, probabilities are exp(score − lse), where lse includes s. So the gradients of queries, keys and values
/// are those of [`Attention`] with this lse and the result y. The gradient of s is −Σ exp(s − lse)·(dy·y), because y does
/// not depend on s otherwise than by lse.
#[derive(Debug, Clone, Copy)]
pub struct SinkAttention(pub Attention);

impl Op for SinkAttention {
    fn name(&self) -> &'static str {
        "sink_attention"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let starts = if inputs.len() > 6 { ", b q" } else { "" };
        self.0.labels(format!("b q (h g) E, b (h g) q, (h g), b (h g) q D, b h K D, b h K E{starts} -> b q (h g) E[0]"))
    }

    fn keys(&self) -> Option<Keys> {
        Some(Keys { inputs: &[4, 5], outputs: &[] })
    }

    fn runs_on(&self, inputs: &[Window]) -> bool {
        self.0.runs_on(&inputs[3])
    }

    fn on_parts(&self, inputs: &[Window], _: &[Window]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self(self.0.of_queries(&inputs[3]))))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let of_attention = self.0.infer(&inputs[3..])?;
        if inputs[0] != of_attention[0] || inputs[1] != of_attention[1] {
            return Err("the result and its log-sum-exp must have the shapes of attention's".into());
        }
        let heads = inputs[1].dims()[1];
        if inputs[2].dims() != [heads] {
            return Err(format!("the sinks must be [{heads}]"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let (y, lse, sinks, dy) = (g.input(0), g.input(1), g.input(2), g.grad(0));
        let operands = [g.input(3), g.input(4), g.input(5), y.clone(), lse.clone(), dy.clone()];
        let starts = (g.inputs() > 6).then(|| g.input(6));
        let operands: Vec<&Tensor> = operands.iter().chain(&starts).collect();
        let grads = Tensor::apply_op::<3>(AttentionGrad { attention: self.0 }, &operands)?;
        for (input, grad) in (3..).zip(grads).filter(|&(input, _)| g.wants(input)).collect::<Vec<_>>() {
            g.accumulate(input, grad.transpose(1, 2)?);
        }
        if g.wants(2) {
            let wide = |x: &Tensor| x.to_dtype(DType::F32);
            let products = wide(&dy)?.mul(&wide(&y)?)?.sum(3)?;
            let share = lse.transpose(1, 2)?.neg()?.broadcast_add(&wide(&sinks)?)?.exp()?;
            let d_sinks = products.mul(&share)?.sum((0, 1))?.neg()?;
            g.accumulate(2, d_sinks.to_dtype(sinks.dtype())?);
        }
        Ok(())
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        0
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn run(&self, args: &mut Args<'_>) {
        if !args.is_overwritten(0) {
            let out = args.output::<f32>(0);
            out.copy_from_slice(args.input(0));
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let y = &operands.inputs[..1];
        gapless_kernels::cuda::launch::copy(&gapless_kernels::cuda::Operands { inputs: y, ..*operands })
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).clone()]
    }
}
