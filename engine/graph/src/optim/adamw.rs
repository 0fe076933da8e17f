//! AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101).

use candle_core::DType;
use gapless_kernels::cpu::{Args, BLOCK, Float, InPieces, Pieces, vectorize, with_float};
use gapless_kernels::{Spec, StochasticRounding};

use super::{Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State, StateInit};
use crate::error::{Error, Result};
use crate::nn::Init;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// AdamW. Weight decay applies to matrices, not to vectors (biases, norms). Gradients are clipped by their global norm.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// The value that is added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// The maximum global norm of the gradients. Gradients with a larger norm are scaled down to this norm. Infinity
    /// means no clipping.
    pub max_norm: f64,
    /// Whether a parameter in bf16 without an f32 master, and its moments, are rounded up or down at random, so that the
    /// expectation of the rounded value is the exact one (Gupta et al., arXiv 1502.02551, section 3). Otherwise they are
    /// rounded to the nearest value, and changes of less than half the distance to the next bf16 value are lost. The random
    /// numbers depend on the seed, the step, the parameter's name and the element only. Parameters in f32 and with masters
    /// are not affected.
    pub stochastic_rounding: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, max_norm: 1.0, stochastic_rounding: false }
    }
}

impl Optimizer for AdamW {
    fn check(&self) -> Result<()> {
        let fail = |why: String, remedy| Err(Error::config("optimizer", why, remedy));
        if !(0.0..1.0).contains(&self.beta1) || !(0.0..1.0).contains(&self.beta2) {
            return fail(
                "beta1 or beta2 is outside [0, 1)".into(),
                "set both to at least 0 and below 1; 0.9 and 0.95 are usual",
            );
        }
        let Self { eps, weight_decay, max_norm, .. } = self;
        if !(*eps > 0.0 && *weight_decay >= 0.0 && *max_norm > 0.0) {
            let why = format!("eps {eps}, weight_decay {weight_decay}, max_norm {max_norm}");
            return fail(why, "set eps and max_norm above 0, and weight_decay to at least 0");
        }
        Ok(())
    }

    fn needs_norm(&self) -> bool {
        self.max_norm.is_finite()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let spec = || Spec { shape: parameter.dims.into(), dtype: self.sum_dtype(parameter) };
        let moment = |name| State { name, spec: spec(), init: Init::Const(0.0).into() };
        let mut states = vec![moment("exp_avg"), moment("exp_avg_sq")];
        if self.has_master(parameter) {
            states.push(State { name: "master", spec: spec(), init: StateInit::Parameter });
        }
        states
    }

    fn sum_dtype(&self, parameter: &ParameterInfo<'_>) -> DType {
        parameter.state_dtype()
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        // 1 − βᵗ is computed in f64, because t may be large. After i32::MAX steps, the bias corrections of both moments
        // are exactly 1 in f64.
        let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
        let mut scalars = [0.0; SCALARS];
        scalars[0] = lr as f32;
        scalars[1] = (1.0 - self.beta1.powi(power)) as f32;
        scalars[2] = (1.0 - self.beta2.powi(power)) as f32;
        scalars
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let (decay, has_master) = (self.decay(&update.info), self.has_master(&update.info));
        let ParameterUpdate { parameter, info, part, gradient, norm, scalars, .. } = update;
        let rounding = self.stochastic_rounding && info.dtype == DType::BF16 && !has_master;
        let rounding = match (rounding, part) {
            (false, _) => None,
            (true, Some(part)) => Some(StochasticRounding::of(info.name, part)),
            (true, None) => {
                let why = format!("tensor ranks divide {} by columns", info.name);
                return Err(Error::config("optimizer.stochastic_rounding", why, "use one tensor rank, or f32 masters"));
            }
        };
        let op = AdamWUpdate { rule: *self, decay, has_master, rounding };
        match update.states {
            [m, v] => {
                let inputs = [parameter, gradient, m, v, norm, scalars];
                Tensor::apply_op::<3>(op, &inputs).map(|[parameter, ..]| parameter)
            }
            [m, v, master] => {
                let inputs = [parameter, gradient, m, v, norm, scalars, master];
                Tensor::apply_op::<4>(op, &inputs).map(|[parameter, ..]| parameter)
            }
            _ => unreachable!("two or three states were asked for"),
        }
    }
}

impl AdamW {
    /// Returns the weight decay of a parameter: 0 for vectors.
    pub(super) fn decay(&self, parameter: &ParameterInfo<'_>) -> f64 {
        if parameter.has_matrices() { self.weight_decay } else { 0.0 }
    }

    /// Checks the settings of a rule that another optimizer contains. Such an optimizer rounds to the nearest value.
    pub(super) fn check_within(&self) -> Result<()> {
        if self.stochastic_rounding {
            let why = "only AdamW itself has stochastic rounding";
            return Err(Error::config("optimizer.stochastic_rounding", why, "leave it out, or choose AdamW"));
        }
        self.check()
    }

    /// True if the optimizer keeps a master copy of the parameter in a more precise type.
    fn has_master(&self, parameter: &ParameterInfo<'_>) -> bool {
        self.sum_dtype(parameter) != parameter.dtype
    }

    /// Returns the multipliers of a step for the f32 kernels, or `None` if the norm is not finite and the step must be
    /// skipped.
    pub(super) fn step_factors(&self, decay: f64, norm: f32, scalars: &[f32]) -> Option<AdamWStep> {
        norm.is_finite().then(|| AdamWStep {
            clip: (self.max_norm as f32 / (norm + 1e-6)).min(1.0),
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
            keep: 1.0 - scalars[0] * decay as f32,
            step: scalars[0] / scalars[1],
            root_correction: 1.0 / scalars[2].sqrt(),
        })
    }

    /// Returns the settings in the form that the CUDA kernels take.
    pub(super) fn on_device(&self) -> gapless_kernels::cuda::launch::AdamWRule {
        gapless_kernels::cuda::launch::AdamWRule {
            max_norm: self.max_norm as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
        }
    }

    /// The reference implementation in f64. Returns the new parameter and moments. `p` is the parameter; the inputs are
    /// (any tensor, gradient, m, v, norm, scalars).
    pub(super) fn exact(&self, decay: f64, p: &Array, args: &Reference<'_>) -> Vec<Array> {
        let (gradient, m, v) = (args.input(1), args.input(2), args.input(3));
        let (norm, scalars) = (args.input(4).data[0], &args.input(5).data);
        let clip = (self.max_norm / (norm + 1e-6)).min(1.0);
        let m = m.zip(gradient, |m, g| self.beta1 * m + (1.0 - self.beta1) * g * clip);
        let v = v.zip(gradient, |v, g| self.beta2 * v + (1.0 - self.beta2) * (g * clip).powi(2));
        let change = m.zip(&v, |m, v| m / scalars[1] / ((v / scalars[2]).sqrt() + self.eps));
        let p = p.zip(&change, |p, change| p * (1.0 - scalars[0] * decay) - scalars[0] * change);
        vec![p, m, v]
    }
}

/// The multipliers that one step of AdamW applies to every element.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdamWStep {
    clip: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    /// Multiplier of the parameter for weight decay: 1 − lr·decay.
    pub keep: f32,
    /// Learning rate divided by the bias correction of the first moment.
    pub step: f32,
    root_correction: f32,
}

impl AdamWStep {
    /// Returns the new moments, given the gradient `g` and the old moments.
    #[inline(always)]
    pub fn moments(&self, g: f32, m: f32, v: f32) -> (f32, f32) {
        let g = g * self.clip;
        (self.beta1 * m + (1.0 - self.beta1) * g, self.beta2 * v + (1.0 - self.beta2) * g * g)
    }

    /// Returns the change of a parameter for these moments. The update subtracts it.
    #[inline(always)]
    pub fn change(&self, m: f32, v: f32) -> f32 {
        self.step * m / (v.sqrt() * self.root_correction + self.eps)
    }

    /// Returns the parameter after the step.
    #[inline(always)]
    fn changed(&self, p: f32, m: f32, v: f32) -> f32 {
        p * self.keep - self.change(m, v)
    }
}

/// Updates (parameter, m, v) in place from (parameter, gradient, m, v, norm, scalars). If `has_master` is true, an f32
/// master copy is an additional input and output, and the parameter becomes the rounded master. If the norm is not
/// finite, nothing is updated, so a failed step leaves the model unchanged.
#[derive(Debug, Clone, Copy)]
struct AdamWUpdate {
    rule: AdamW,
    decay: f64,
    has_master: bool,
    /// Stochastic rounding of the outputs; `None` rounds them to the nearest value.
    rounding: Option<StochasticRounding>,
}

impl AdamWUpdate {
    /// Runs the kernel for parameters, moments and gradients stored in these types.
    fn run_on<P: Float, M: Float, G: Float>(&self, args: &mut Args<'_>) {
        let (p, m, v) = (args.output::<P>(0), args.output::<M>(1), args.output::<M>(2));
        let (gradient, norm, scalars) = (args.input::<G>(1), args.input::<f32>(4)[0], args.input::<f32>(5));
        let Some(step) = self.rule.step_factors(self.decay, norm, scalars) else { return };
        let numbers = self.rounding.map(|rounding| rounding.numbers(args.random(), p.len()));
        let moments = m.pieces_mut(BLOCK).zip(v.pieces_mut(BLOCK));
        if self.has_master {
            let masters = args.output::<M>(3).pieces_mut(BLOCK).zip(p.pieces_mut(BLOCK));
            masters.zip(gradient.pieces(BLOCK)).zip(moments).for_each(|(((master, p), g), (m, v))| {
                vectorize!({
                    #[expect(
                        clippy::redundant_locals,
                        reason = "in registers: a write might lie where a reference leads"
                    )]
                    let step = step;
                    for (((master, p), g), (m, v)) in master.iter_mut().zip(p).zip(g).zip(m.iter_mut().zip(v)) {
                        let (next_m, next_v) = step.moments(g.load(), m.load(), v.load());
                        (*m, *v) = (M::store(next_m), M::store(next_v));
                        *master = M::store(step.changed(master.load(), next_m, next_v));
                        *p = P::store(master.load());
                    }
                });
            });
            return;
        }
        let all = p.pieces_mut(BLOCK).zip(gradient.pieces(BLOCK)).zip(moments);
        if let Some(numbers) = numbers {
            all.enumerate().for_each(|(block, ((p, g), (m, v)))| {
                vectorize!({
                    #[expect(clippy::redundant_locals, reason = "as above")]
                    let step = step;
                    for (i, ((p, &g), (m, v))) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)).enumerate() {
                        let (next_m, next_v) = step.moments(g.load(), m.load(), v.load());
                        let random = numbers.bits(block * BLOCK + i);
                        *p = P::store_stochastically(step.changed(p.load(), next_m, next_v), random as u16);
                        *m = M::store_stochastically(next_m, (random >> 16) as u16);
                        *v = M::store_stochastically(next_v, (random >> 32) as u16);
                    }
                });
            });
            return;
        }
        all.for_each(|((p, g), (m, v))| {
            vectorize!({
                #[expect(clippy::redundant_locals, reason = "as above")]
                let step = step;
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
                    let (next_m, next_v) = step.moments(g.load(), m.load(), v.load());
                    (*m, *v) = (M::store(next_m), M::store(next_v));
                    *p = P::store(step.changed(p.load(), next_m, next_v));
                }
            });
        });
    }
}

impl Op for AdamWUpdate {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let [parameter, gradient, m, v, _, _, master @ ..] = inputs else {
            return Err("it must have 6 or 7 inputs".into());
        };
        if ![parameter.dtype, m.dtype].contains(&gradient.dtype) {
            return Err(format!(
                "the gradient is {:?}; it must have the type of the parameter or of the moments",
                gradient.dtype
            ));
        }
        let in_f32 = |spec: &Spec| Spec { dtype: m.dtype, ..spec.clone() };
        crate::ops::expect_equal(&[in_f32(parameter), in_f32(gradient), m.clone(), v.clone()])?;
        crate::ops::expect_equal(&[std::slice::from_ref(m), master].concat())?;
        let outputs = [parameter, m, v].into_iter().chain(master);
        Ok(outputs.cloned().collect())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        15 * inputs[0].elements() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        if self.has_master { &[(0, 0), (2, 1), (3, 2), (6, 3)] } else { &[(0, 0), (2, 1), (3, 2)] }
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), P => with_float!(args.output_dtype(1), M => {
            with_float!(args.input_dtype(1), G => self.run_on::<P, M, G>(args))
        }));
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::adamw(self.rule.on_device(), self.decay, self.rounding, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        if !self.has_master {
            return self.rule.exact(self.decay, args.input(0), args);
        }
        let mut all = self.rule.exact(self.decay, args.input(6), args);
        all.push(all[0].clone());
        all
    }
}
