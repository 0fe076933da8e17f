//! Element-wise functions.

use candle_core::DType;

use super::Tensor;
use crate::error::Result;
use crate::graph::lock;
use crate::ops;

/// Element-wise functions.
impl Tensor {
    pub(super) fn binary(&self, rhs: &Self, kind: ops::BinaryKind) -> Result<Self> {
        Self::apply_op::<1>(ops::Binary { kind }, &[self, rhs]).map(|[out]| out)
    }

    pub(super) fn broadcast_binary(&self, rhs: &Self, kind: ops::BinaryKind) -> Result<Self> {
        let shape = self.shape().broadcast_shape_binary_op(rhs.shape(), kind.name())?;
        self.broadcast_as(shape.clone())?.binary(&rhs.broadcast_as(shape)?, kind)
    }

    fn unary(&self, kind: ops::UnaryKind) -> Result<Self> {
        self.apply1(ops::Unary { kind })
    }

    /// Returns x·scale + shift. For a constant, the result is also a constant. So the gradient of a mean remains a
    /// known constant ([`Gradient::constant`](crate::Gradient::constant)).
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn affine(&self, scale: f64, shift: f64) -> Result<Self> {
        let number = lock(&self.graph).number(self.id);
        if let Some(number) = number {
            return Ok(self.constant(number * scale + shift, self.shape().clone()));
        }
        self.apply1(ops::Affine { scale, shift })
    }

    /// Casts to another type. If the tensor already has that type, returns the tensor itself.
    ///
    /// # Errors
    /// Returns an error if the new type is not one of [`FLOATS`](crate::graph::FLOATS), unless the elements are known
    /// when the model is recorded.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        match self.data_in(dtype) {
            Some(constant) => Ok(constant),
            None => self.apply1(ops::Cast { dtype }),
        }
    }

    /// Soft cap cap·tanh(x/cap): close to x near 0, and never beyond the cap (Gemma 2, arXiv 2408.00118, section 2).
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn cap(&self, cap: f64) -> Result<Self> {
        self.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)
    }

    /// −x.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn neg(&self) -> Result<Self> {
        self.affine(-1.0, 0.0)
    }

    /// xᵉ.
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn powf(&self, exponent: f64) -> Result<Self> {
        match exponent {
            0.0 => self.ones_like(),
            1.0 => Ok(self.clone()),
            2.0 => self.sqr(),
            _ => self.apply1(ops::Powf { exponent }),
        }
    }

    /// selfʳʰˢ for positive elements, computed as e^(rhs·ln self).
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn pow(&self, rhs: &Self) -> Result<Self> {
        rhs.mul(&self.log()?)?.exp()
    }

    /// Like [`Self::pow`], for shapes that broadcast.
    ///
    /// # Errors
    /// Returns an error if the shapes do not broadcast.
    pub fn broadcast_pow(&self, rhs: &Self) -> Result<Self> {
        rhs.broadcast_mul(&self.log()?)?.exp()
    }

    /// x where x is positive, α(eˣ − 1) elsewhere (Clevert et al., arXiv 1511.07289).
    ///
    /// # Errors
    /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn elu(&self, alpha: f64) -> Result<Self> {
        let below = (self.minimum(0.0)?.exp()? - 1.0)? * alpha;
        self.relu()? + below
    }

    /// Copies to contiguous memory. If the tensor is already contiguous, returns the tensor itself.
    ///
    /// # Errors
    /// Returns an error if the type has no kernels, e.g. f64.
    pub fn contiguous(&self) -> Result<Self> {
        if lock(&self.graph).value(self.id).layout.is_contiguous() {
            return Ok(self.clone());
        }
        self.apply1(ops::Contiguous)
    }

    /// Returns a view of the same elements that counts as a constant in the backward: no gradient passes through it.
    pub fn detach(&self) -> Self {
        self.apply1(ops::Detach).expect("everything can be seen as it is")
    }

    /// Sets elements to zero with probability `p`, and multiplies the others by 1/(1−p) (Srivastava et al., 2014). The
    /// mask is never stored. It is a pure function of the seed, the step, the micro-batch and the position of this
    /// operation in the model.
    ///
    /// # Errors
    /// Returns an error if p is outside [0, 1).
    pub fn dropout(&self, p: f64) -> Result<Self> {
        if p == 0.0 {
            return Ok(self.clone());
        }
        let key = self.next_random();
        self.apply1(ops::Dropout { p, key, part: None })
    }

    /// silu(self)·up (Shazeer, arXiv 2002.05202).
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub fn swiglu(&self, up: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::SwiGlu, &[self, up]).map(|[out]| out)
    }
}

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident => $kind:ident;)*) => {
        /// Element-wise functions of one tensor.
        impl Tensor {
            $($(#[$doc])*
            ///
            /// # Errors
            /// Returns an error if the type is not one of [`FLOATS`](crate::graph::FLOATS).
            pub fn $name(&self) -> Result<Self> {
                self.unary(ops::UnaryKind::$kind)
            })*
        }
    };
}

unary_methods! {
    /// eˣ.
    exp => Exp;
    /// ln x.
    log => Log;
    /// x².
    sqr => Sqr;
    /// |x|; the gradient is zero at 0.
    abs => Abs;
    /// sin x.
    sin => Sin;
    /// cos x.
    cos => Cos;
    /// The error function.
    erf => Erf;
    /// √x.
    sqrt => Sqrt;
    /// 1/x.
    recip => Recip;
    /// tanh x.
    tanh => Tanh;
    /// 1/(1+e⁻ˣ).
    sigmoid => Sigmoid;
    /// max(x, 0).
    relu => Relu;
    /// x·sigmoid(x).
    silu => Silu;
    /// GELU in its tanh form (Hendrycks & Gimpel, arXiv 1606.08415), like candle's `gelu`.
    gelu => Gelu;
    /// GELU with the exact error function, like candle's `gelu_erf`.
    gelu_erf => GeluErf;
}

macro_rules! binary_methods {
    ($($name:ident, $broadcast:ident => $kind:ident, $sign:literal;)*) => {
        /// Element-wise functions of two tensors, of equal or broadcast shapes.
        impl Tensor {
            $(#[doc = concat!("self ", $sign, " rhs, for equal shapes.")]
            ///
            /// # Errors
            /// Returns an error if the shapes differ.
            pub fn $name(&self, rhs: &Self) -> Result<Self> {
                self.binary(rhs, ops::BinaryKind::$kind)
            }

            #[doc = concat!("self ", $sign, " rhs, for shapes that broadcast.")]
            ///
            /// # Errors
            /// Returns an error if the shapes do not broadcast.
            pub fn $broadcast(&self, rhs: &Self) -> Result<Self> {
                self.broadcast_binary(rhs, ops::BinaryKind::$kind)
            })*
        }
    };
}

binary_methods! {
    add, broadcast_add => Add, "+";
    sub, broadcast_sub => Sub, "−";
    mul, broadcast_mul => Mul, "×";
    div, broadcast_div => Div, "÷";
}
