//! Element-wise functions of one tensor, and their derivatives.

use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, map, math, zip};

use crate::error::Result;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;
use crate::{Gradient, Op, RowUse};

/// The function of [`Unary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the methods of Tensor say what each is")]
pub enum UnaryKind {
    Exp,
    Log,
    Sqr,
    Sqrt,
    Recip,
    Abs,
    Sin,
    Cos,
    Erf,
    Tanh,
    Sigmoid,
    Relu,
    Silu,
    Gelu,
    GeluErf,
}

impl UnaryKind {
    fn name(self) -> &'static str {
        match self {
            Self::Exp => "exp",
            Self::Log => "log",
            Self::Sqr => "sqr",
            Self::Sqrt => "sqrt",
            Self::Recip => "recip",
            Self::Abs => "abs",
            Self::Sin => "sin",
            Self::Cos => "cos",
            Self::Erf => "erf",
            Self::Tanh => "tanh",
            Self::Sigmoid => "sigmoid",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluErf => "gelu_erf",
        }
    }

    fn gradient_name(self) -> &'static str {
        match self {
            Self::Exp => "exp_grad",
            Self::Log => "log_grad",
            Self::Sqr => "sqr_grad",
            Self::Sqrt => "sqrt_grad",
            Self::Recip => "recip_grad",
            Self::Abs => "abs_grad",
            Self::Sin => "sin_grad",
            Self::Cos => "cos_grad",
            Self::Erf => "erf_grad",
            Self::Tanh => "tanh_grad",
            Self::Sigmoid => "sigmoid_grad",
            Self::Relu => "relu_grad",
            Self::Silu => "silu_grad",
            Self::Gelu => "gelu_grad",
            Self::GeluErf => "gelu_erf_grad",
        }
    }
}

/// y = f(x).
#[derive(Debug, Clone, Copy)]
pub struct Unary {
    /// The function f.
    pub kind: UnaryKind,
}

impl Op for Unary {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn rows(&self) -> RowUse {
        RowUse::InheritsRows
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_float(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<()> {
        let [dx] = Tensor::apply_op(UnaryGrad { kind: self.kind }, &[&g.input(0), &g.grad(0)])?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match self.kind {
            UnaryKind::Exp => map(args, math::exp),
            UnaryKind::Log => map(args, f32::ln),
            UnaryKind::Sqr => map(args, |x| x * x),
            UnaryKind::Sqrt => map(args, f32::sqrt),
            UnaryKind::Recip => map(args, |x| 1.0 / x),
            UnaryKind::Abs => map(args, f32::abs),
            UnaryKind::Sin => map(args, f32::sin),
            UnaryKind::Cos => map(args, f32::cos),
            UnaryKind::Erf => map(args, |x| erf(f64::from(x)) as f32),
            UnaryKind::Tanh => map(args, math::tanh),
            UnaryKind::Sigmoid => map(args, math::sigmoid),
            UnaryKind::Relu => map(args, |x| x.max(0.0)),
            UnaryKind::Silu => map(args, |x| x * math::sigmoid(x)),
            UnaryKind::Gelu => map(args, gelu),
            UnaryKind::GeluErf => map(args, |x| 0.5 * x * (1.0 + erf(f64::from(x) / std::f64::consts::SQRT_2) as f32)),
        }
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each(format!("of_{}($0)", self.kind.name())))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| value(self.kind, x))]
    }
}

/// The gradient dx = dy·f′(x).
#[derive(Debug, Clone, Copy)]
struct UnaryGrad {
    kind: UnaryKind,
}

impl Op for UnaryGrad {
    fn name(&self) -> &'static str {
        self.kind.gradient_name()
    }

    fn rows(&self) -> RowUse {
        RowUse::InheritsRows
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_equal(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &[(1, 0), (0, 0)]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match self.kind {
            UnaryKind::Exp => zip(args, |x, dy| dy * math::exp(x)),
            UnaryKind::Log => zip(args, |x, dy| dy / x),
            UnaryKind::Sqr => zip(args, |x, dy| dy * 2.0 * x),
            UnaryKind::Sqrt => zip(args, |x, dy| dy * 0.5 / x.sqrt()),
            UnaryKind::Recip => zip(args, |x, dy| -dy / (x * x)),
            UnaryKind::Abs => zip(args, |x, dy| if x == 0.0 { 0.0 } else { dy * x.signum() }),
            UnaryKind::Sin => zip(args, |x, dy| dy * x.cos()),
            UnaryKind::Cos => zip(args, |x, dy| -dy * x.sin()),
            UnaryKind::Erf => zip(args, |x, dy| dy * std::f32::consts::FRAC_2_SQRT_PI * math::exp(-x * x)),
            UnaryKind::Tanh => zip(args, |x, dy| {
                let y = math::tanh(x);
                dy * (1.0 - y * y)
            }),
            UnaryKind::Sigmoid => zip(args, |x, dy| {
                let y = math::sigmoid(x);
                dy * y * (1.0 - y)
            }),
            UnaryKind::Relu => zip(args, |x, dy| if x > 0.0 { dy } else { 0.0 }),
            UnaryKind::Silu => zip(args, |x, dy| dy * silu_derivative(x)),
            UnaryKind::Gelu => zip(args, |x, dy| dy * gelu_derivative(x)),
            UnaryKind::GeluErf => zip(args, |x, dy| dy * derivative(UnaryKind::GeluErf, f64::from(x)) as f32),
        }
    }
    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        Some(gapless_kernels::cuda::Fusible::each(format!("of_{}($0, $1)", self.kind.gradient_name())))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).zip(args.input(1), |x, dy| dy * derivative(self.kind, x))]
    }
}

/// √(2/π), a constant of GELU's tanh approximation.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044_715;

#[inline(always)]
fn gelu(x: f32) -> f32 {
    // ½x(1 + tanh u) = x·sigmoid(2u).
    x * math::sigmoid(2.0 * GELU_SCALE as f32 * x * (1.0 + GELU_CUBE as f32 * x * x))
}

#[inline(always)]
fn gelu_derivative(x: f32) -> f32 {
    let (scale, cube) = (2.0 * GELU_SCALE as f32, GELU_CUBE as f32);
    let s = math::sigmoid(scale * x * (1.0 + cube * x * x));
    s + x * s * (1.0 - s) * scale * (1.0 + 3.0 * cube * x * x)
}

/// The derivative of x·sigmoid(x).
#[inline(always)]
pub(super) fn silu_derivative(x: f32) -> f32 {
    let s = math::sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

fn value(kind: UnaryKind, x: f64) -> f64 {
    match kind {
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => x.ln(),
        UnaryKind::Sqr => x * x,
        UnaryKind::Sqrt => x.sqrt(),
        UnaryKind::Recip => 1.0 / x,
        UnaryKind::Abs => x.abs(),
        UnaryKind::Sin => x.sin(),
        UnaryKind::Cos => x.cos(),
        UnaryKind::Erf => erf(x),
        UnaryKind::Tanh => x.tanh(),
        UnaryKind::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        UnaryKind::Relu => x.max(0.0),
        UnaryKind::Silu => x / (1.0 + (-x).exp()),
        UnaryKind::Gelu => 0.5 * x * (1.0 + (GELU_SCALE * (x + GELU_CUBE * x * x * x)).tanh()),
        UnaryKind::GeluErf => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
    }
}

fn derivative(kind: UnaryKind, x: f64) -> f64 {
    let sigmoid = value(UnaryKind::Sigmoid, x);
    match kind {
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => 1.0 / x,
        UnaryKind::Sqr => 2.0 * x,
        UnaryKind::Sqrt => 0.5 / x.sqrt(),
        UnaryKind::Recip => -1.0 / (x * x),
        UnaryKind::Abs => f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
        UnaryKind::Sin => x.cos(),
        UnaryKind::Cos => -x.sin(),
        UnaryKind::Erf => std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp(),
        UnaryKind::Tanh => 1.0 - x.tanh() * x.tanh(),
        UnaryKind::Sigmoid => sigmoid * (1.0 - sigmoid),
        UnaryKind::Relu => f64::from(u8::from(x > 0.0)),
        UnaryKind::Silu => sigmoid * (1.0 + x * (1.0 - sigmoid)),
        UnaryKind::Gelu => {
            let t = (GELU_SCALE * (x + GELU_CUBE * x * x * x)).tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x)
        }
        UnaryKind::GeluErf => {
            let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
            0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2)) + x * density
        }
    }
}

/// The error function in double precision (candle's implementation).
fn erf(x: f64) -> f64 {
    candle_core::cpu::erf::erf_f64(x)
}
