//! AdamW with eight-bit moments (Dettmers et al., arXiv 2110.02861).

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{self, Args, InPieces, Pieces, vectorize};

use super::adamw::AdamWStep;
use super::eight_bit::{BLOCK, Signed, Unsigned, dequantise, exact, quantise};
use super::{AdamW, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::Result;
use crate::nn::Init;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// AdamW that stores both moments in eight bits per element, with one f32 scale per [`Self::BLOCK`] elements. This
/// takes 2 + 8/256 bytes per parameter instead of 8. All arithmetic is in f32; only the stored moments are rounded.
///
/// As in the paper, some parameters keep their moments in f32. These are small parameters, whose moments take little
/// memory, and embedding tables, which have the most uneven gradients (section 2.3). Gradient clipping and weight decay
/// are those of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW8bit {
    /// Settings of the AdamW step.
    pub rule: AdamW,
    /// Number of elements below which a parameter keeps its moments in f32.
    pub smallest: usize,
    /// True if embedding tables have eight-bit moments too.
    pub embeddings: bool,
}

impl Default for AdamW8bit {
    fn default() -> Self {
        Self { rule: AdamW::default(), smallest: 4096, embeddings: false }
    }
}

impl AdamW8bit {
    /// Number of neighbouring elements that share a scale.
    pub const BLOCK: usize = BLOCK;

    fn applies(&self, parameter: &ParameterInfo<'_>) -> bool {
        parameter.elements() >= self.smallest && (self.embeddings || !parameter.looked_up)
    }
}

impl Optimizer for AdamW8bit {
    fn check(&self) -> Result<()> {
        self.rule.check_within()
    }

    fn needs_norm(&self) -> bool {
        self.rule.needs_norm()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        if !self.applies(parameter) {
            return self.rule.states(parameter);
        }
        // A scale of zero decodes every code to zero, so zeros are valid initial codes.
        let codes = |name| State { name, spec: codes(parameter.dims), init: Init::Const(0.0).into() };
        let scales = |name| State { name, spec: scales(parameter.elements()), init: Init::Const(0.0).into() };
        vec![codes("exp_avg_8bit"), codes("exp_avg_sq_8bit"), scales("exp_avg_scale"), scales("exp_avg_sq_scale")]
    }

    /// Parts consist of whole blocks, so a part has the same blocks as the whole parameter.
    fn shard_granularity(&self, parameter: &ParameterInfo<'_>) -> Option<usize> {
        if self.applies(parameter) { Some(BLOCK) } else { self.rule.shard_granularity(parameter) }
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        self.rule.scalars(step, lr)
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        if !self.applies(&update.info) {
            return self.rule.update(update);
        }
        let op = AdamW8bitUpdate { rule: self.rule, decay: self.rule.decay(&update.info) };
        let [m, v, m_scales, v_scales] = update.states else { unreachable!("four states were asked for") };
        let inputs = [update.parameter, update.gradient, m, v, m_scales, v_scales, update.norm, update.scalars];
        let [parameter, ..] = Tensor::apply_op::<5>(op, &inputs)?;
        Ok(parameter)
    }
}

fn codes(dims: &[usize]) -> Spec {
    Spec { shape: dims.into(), dtype: DType::U8 }
}

fn scales(elements: usize) -> Spec {
    Spec::f32(elements.div_ceil(BLOCK))
}

/// Updates (parameter, m, v, scales of m, scales of v) in place, from (parameter, gradient, m, v, scales of m, scales
/// of v, norm, scalars). If the norm is not finite, nothing is updated.
#[derive(Debug, Clone, Copy)]
struct AdamW8bitUpdate {
    rule: AdamW,
    decay: f64,
}

/// Number of blocks per task. With this number, a task has as many elements as a task of other element-wise kernels.
const TASK: usize = cpu::BLOCK / BLOCK;

/// One block of a moment.
struct Moment<'a> {
    codes: &'a mut [u8],
    scale: &'a mut f32,
}

#[inline(always)]
fn update_block(step: AdamWStep, p: &mut [f32], g: &[f32], m: Moment<'_>, v: Moment<'_>) {
    let (mut exact_m, mut exact_v) = ([0.0; BLOCK], [0.0; BLOCK]);
    let (exact_m, exact_v) = (&mut exact_m[..p.len()], &mut exact_v[..p.len()]);
    dequantise::<Signed>(m.codes, *m.scale, exact_m);
    dequantise::<Unsigned>(v.codes, *v.scale, exact_v);
    for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(exact_m.iter_mut().zip(exact_v.iter_mut())) {
        (*m, *v) = step.moments(g, *m, *v);
        *p = *p * step.keep - step.change(*m, *v);
    }
    *m.scale = quantise::<Signed>(exact_m, m.codes);
    *v.scale = quantise::<Unsigned>(exact_v, v.codes);
}

impl Op for AdamW8bitUpdate {
    fn name(&self) -> &'static str {
        "adamw_8bit"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_equal(&inputs[..2])?;
        let (codes, scales) = (codes(inputs[0].dims()), scales(inputs[0].elements()));
        let expected = [&codes, &codes, &scales, &scales];
        if inputs[2..6].iter().ne(expected) {
            return Err(format!("the states must be {codes:?} twice and {scales:?} twice"));
        }
        Ok(vec![inputs[0].clone(), codes.clone(), codes, scales.clone(), scales])
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        // 15 operations per element for the update, and about as many for decoding and encoding the moments.
        30 * inputs[0].elements() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &[(0, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    }

    fn run(&self, args: &mut Args<'_>) {
        let (p, m, v) = (args.output::<f32>(0), args.output::<u8>(1), args.output::<u8>(2));
        let (m_scales, v_scales) = (args.output::<f32>(3), args.output::<f32>(4));
        let (gradient, norm, scalars) = (args.input::<f32>(1), args.input::<f32>(6)[0], args.input::<f32>(7));
        let Some(step) = self.rule.step_factors(self.decay, norm, scalars) else { return };
        let moments = m.pieces_mut(BLOCK).zip(v.pieces_mut(BLOCK));
        let scales = m_scales.pieces_mut(1).zip(v_scales.pieces_mut(1));
        let parameters = p.pieces_mut(BLOCK).zip(gradient.pieces(BLOCK));
        parameters.zip(moments.zip(scales)).for_each_in_runs(TASK, |((p, g), ((m, v), (m_scale, v_scale)))| {
            let (m, v) = (Moment { codes: m, scale: &mut m_scale[0] }, Moment { codes: v, scale: &mut v_scale[0] });
            vectorize!(update_block(step, p, g, m, v));
        });
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::adamw_8bit(self.rule.on_device(), self.decay, BLOCK, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let (p, gradient, codes) = (args.input(0), args.input(1), [args.input(2), args.input(3)]);
        let (scales, norm, scalars) = ([args.input(4), args.input(5)], args.input(6), args.input(7));
        let decode = |i: usize, signed| Array::new(&p.dims, exact::decode(&codes[i].data, &scales[i].data, signed));
        let (m, v) = (decode(0, true), decode(1, false));
        let inputs = vec![p, gradient, &m, &v, norm, scalars];
        let plain = self.rule.exact(self.decay, p, &Reference { inputs, ..*args });
        let [p, m, v] = <[Array; 3]>::try_from(plain).expect("AdamW changes three tensors");
        let ((m, m_scales), (v, v_scales)) = (exact::encode(&m.data, true), exact::encode(&v.data, false));
        let codes = |codes| Array::new(&p.dims, codes);
        let scales = |scales: Vec<f64>| Array::new(&[scales.len()], scales);
        vec![p.clone(), codes(m), codes(v), scales(m_scales), scales(v_scales)]
    }
}
