//! The share of each expert in the choices of a document's tokens.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::NONE;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// For each token, the share of each expert in the choices of the token's document.
///
/// - Inputs: ids [batch, tokens, k] below `experts`, and starts [batch, tokens], the first token of each token's
///   document.
/// - Output: f32 [batch, tokens, experts].
///
/// [`NONE`] does not count as a choice. The tokens of a document without choices have shares of 0. There is no
/// gradient.
#[derive(Debug, Clone, Copy)]
pub struct DocumentLoad {
    /// Number of experts.
    pub experts: usize,
}

impl Op for DocumentLoad {
    fn name(&self) -> &'static str {
        "document_load"
    }

    fn rule(&self, _: &[Spec], _: &[Spec]) -> Option<Rule> {
        Some(Rule::labels("b T K, b T -> b T E"))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("ids", &inputs[0])?;
        let &[batch, tokens, _] = inputs[0].dims() else { return Err("the ids must be [batch, tokens, k]".into()) };
        if inputs[1] != (Spec { shape: (batch, tokens).into(), dtype: DType::U32 }) {
            return Err("the starts must be u32 [batch, tokens]".into());
        }
        Ok(vec![Spec::f32((batch, tokens, self.experts))])
    }

    fn gradient(&self, _: &mut crate::Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        let shares = args.output::<f32>(0);
        let (ids, document_starts) = (args.input::<u32>(0), args.input::<u32>(1));
        let (tokens, k) = (gapless_kernels::width(args.input_dims(1)), gapless_kernels::width(args.input_dims(0)));
        let sequences = shares.chunks_exact_mut(tokens * self.experts).zip(ids.chunks_exact(tokens * k));
        for ((mut shares, mut ids), starts) in sequences.zip(document_starts.chunks_exact(tokens)) {
            for document in starts.chunk_by(|a, b| a == b) {
                let (own, other_shares) = shares.split_at_mut(document.len() * self.experts);
                let (chosen, other_ids) = ids.split_at(document.len() * k);
                (shares, ids) = (other_shares, other_ids);
                let (first, others) = own.split_at_mut(self.experts);
                first.fill(0.0);
                chosen.iter().filter(|&&id| id != NONE).for_each(|&id| first[id as usize] += 1.0);
                let all = first.iter().sum::<f32>().max(1.0);
                first.iter_mut().for_each(|share| *share /= all);
                others.chunks_exact_mut(self.experts).for_each(|share| share.copy_from_slice(first));
            }
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::document_load(operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (ids, document_starts) = (args.input(0), args.input(1));
        let &[batch, tokens, k] = &ids.dims[..] else { unreachable!("by the shape rule") };
        let share = |index: usize| {
            let (token, expert) = (index / self.experts, index % self.experts);
            let sequence = token / tokens * tokens;
            let document = (sequence..sequence + tokens)
                .filter(|&other| document_starts.data[other] == document_starts.data[token]);
            let ids = document.flat_map(|token| &ids.data[token * k..][..k]).filter(|&&id| id != f64::from(NONE));
            let (chosen, all) = ids.fold((0.0, 0.0), |(chosen, all), &id| {
                (chosen + f64::from(u8::from(id as usize == expert)), all + 1.0)
            });
            if all > 0.0 { chosen / all } else { 0.0 }
        };
        let count = batch * tokens * self.experts;
        vec![Array::new(&[batch, tokens, self.experts], (0..count).map(share).collect())]
    }
}
