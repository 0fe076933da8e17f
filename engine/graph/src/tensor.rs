//! The builder: candle's tensor vocabulary over a graph instead of data.
//!
//! A candle model is ported by changing its imports: the same methods with the same names and shape rules record nodes
//! here, and everything is computed later by the compiled program.

use std::sync::{Arc, Mutex};

use candle_core::shape::{Dim, ShapeWithOneHole};
use candle_core::{DType, Shape};

use super::{Graph, Phase, Spec, ValueId, lock};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::ops;

/// A tensor that will exist when the program runs.
#[derive(Debug, Clone)]
pub struct Tensor {
    graph: Arc<Mutex<Graph>>,
    id: ValueId,
    spec: Spec,
}

/// While it lives, nodes are recorded under a layer's name. Made by [`Tensor::enter`].
#[derive(Debug)]
pub struct LayerGuard(Arc<Mutex<Graph>>);

impl Drop for LayerGuard {
    fn drop(&mut self) {
        lock(&self.0).leave_layer();
    }
}

impl Tensor {
    #[doc(hidden)]
    pub fn new(graph: &Arc<Mutex<Graph>>, id: ValueId) -> Self {
        let spec = lock(graph).value(id).spec.clone();
        Self { graph: graph.clone(), id, spec }
    }

    /// The value that this handle stands for.
    pub fn id(&self) -> ValueId {
        self.id
    }

    /// Shape and element type.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Extents.
    pub fn dims(&self) -> &[usize] {
        self.spec.dims()
    }

    /// Shape.
    pub fn shape(&self) -> &Shape {
        &self.spec.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.spec.shape.rank()
    }

    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.spec.elements()
    }

    /// Extent of one dimension.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn dim<D: Dim>(&self, dim: D) -> Result<usize> {
        Ok(self.spec.shape.dim(dim)?)
    }

    /// Both extents of a matrix.
    ///
    /// # Errors
    /// When the rank is not 2.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        Ok(self.spec.shape.dims2()?)
    }

    /// All three extents.
    ///
    /// # Errors
    /// When the rank is not 3.
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        Ok(self.spec.shape.dims3()?)
    }

    /// All four extents.
    ///
    /// # Errors
    /// When the rank is not 4.
    pub fn dims4(&self) -> Result<(usize, usize, usize, usize)> {
        Ok(self.spec.shape.dims4()?)
    }

    /// Records what follows under `layer` (e.g. `h.3.attn`) until the guard is dropped. Names show in reports,
    /// memory maps and errors.
    pub fn enter(&self, layer: &str) -> LayerGuard {
        lock(&self.graph).enter_layer(layer.into());
        LayerGuard(self.graph.clone())
    }

    /// Applies an operation, a user's own included, and returns its outputs.
    ///
    /// # Errors
    /// When the operation's shape rule refuses the inputs.
    pub fn apply_op<const OUTPUTS: usize>(op: impl Op, inputs: &[&Self]) -> Result<[Self; OUTPUTS]> {
        let outputs = Self::apply_shared(Arc::new(op), inputs)?;
        Ok(outputs.try_into().expect("the caller asks for as many outputs as the operation has"))
    }

    fn apply_shared(op: Arc<dyn Op>, inputs: &[&Self]) -> Result<Vec<Self>> {
        let graph = &inputs.first().expect("an operation has inputs").graph;
        if inputs.iter().any(|t| !Arc::ptr_eq(&t.graph, graph)) {
            return Err(Error::TwoGraphs { op: op.name().into() });
        }
        let ids: Vec<ValueId> = inputs.iter().map(|t| t.id).collect();
        let outputs = lock(graph).apply(op, &ids)?;
        Ok(outputs.into_iter().map(|id| Self::new(graph, id)).collect())
    }

    fn apply1(&self, op: impl Op) -> Result<Self> {
        Self::apply_op::<1>(op, &[self]).map(|[out]| out)
    }

    /// The same number in every element, in this tensor's graph and type; f32 beside ids.
    pub fn constant(&self, number: f64, shape: impl Into<Shape>) -> Self {
        let dtype = if self.dtype().is_float() { self.dtype() } else { DType::F32 };
        let id = lock(&self.graph).add_constant(number, Spec { shape: shape.into(), dtype });
        Self::new(&self.graph, id)
    }

    /// Shows the value to whoever trains, as a figure of each step (`Trainer::watched`): summed over
    /// the micro-batches and data ranks. Costs its bytes until the next step. Of several of one name, the later ones have a number
    /// behind it: `name.2`.
    pub fn watch(&self, name: &str) {
        lock(&self.graph).watch(name, self.id);
    }

    /// A key for numbers that are drawn here.
    pub(crate) fn next_random(&self) -> u64 {
        lock(&self.graph).next_random()
    }

    #[doc(hidden)]
    pub fn set_phase(&self, phase: Phase) {
        lock(&self.graph).set_phase(phase);
    }
}

/// Views: no data moves.
impl Tensor {
    /// The same elements in another shape; one dimension may be `()`. Copies if the strides leave no other way.
    ///
    /// # Errors
    /// When the numbers of elements differ.
    pub fn reshape(&self, shape: impl ShapeWithOneHole) -> Result<Self> {
        let shape = shape.into_shape(self.elem_count())?;
        let layout = lock(&self.graph).value(self.id).layout.clone();
        let source =
            if ops::reshaped(&layout, &shape).is_some() { self.clone() } else { self.apply1(ops::Contiguous)? };
        source.apply1(ops::Reshape { shape })
    }

    /// Swaps two dimensions.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn transpose<D1: Dim, D2: Dim>(&self, dim1: D1, dim2: D2) -> Result<Self> {
        let dim1 = dim1.to_index(self.shape(), "transpose")?;
        let dim2 = dim2.to_index(self.shape(), "transpose")?;
        self.apply1(ops::Transpose { dim1, dim2 })
    }

    /// Swaps the last two dimensions.
    ///
    /// # Errors
    /// When the rank is below 2.
    pub fn t(&self) -> Result<Self> {
        self.transpose(candle_core::D::Minus2, candle_core::D::Minus1)
    }

    /// `len` indices of one dimension, from `start`.
    ///
    /// # Errors
    /// When the range leaves the dimension.
    pub fn narrow<D: Dim>(&self, dim: D, start: usize, len: usize) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "narrow")?;
        if start == 0 && len == self.dims()[dim] {
            return Ok(self.clone());
        }
        self.apply1(ops::Narrow { dim, start, len })
    }

    /// Cuts one dimension into equal parts.
    ///
    /// # Errors
    /// When the dimension is not divisible by `chunks`.
    pub fn chunk<D: Dim>(&self, chunks: usize, dim: D) -> Result<Vec<Self>> {
        let dim = dim.to_index(self.shape(), "chunk")?;
        let extent = self.dims()[dim];
        if !extent.is_multiple_of(chunks) {
            return Err(self.shape_error("chunk", format!("{extent} does not divide into {chunks} equal parts")));
        }
        (0..chunks).map(|i| self.narrow(dim, i * (extent / chunks), extent / chunks)).collect()
    }

    /// Repeats dimensions of extent 1, and adds leading ones, without copying.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    pub fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if &shape == self.shape() {
            return Ok(self.clone());
        }
        self.apply1(ops::BroadcastAs { shape })
    }

    /// Inserts a dimension of extent 1.
    ///
    /// # Errors
    /// When there is no such place.
    pub fn unsqueeze<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index_plus_one(self.shape(), "unsqueeze")?;
        let mut dims = self.dims().to_vec();
        dims.insert(dim, 1);
        self.reshape(dims)
    }

    /// Removes a dimension of extent 1.
    ///
    /// # Errors
    /// When its extent is not 1.
    pub fn squeeze<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "squeeze")?;
        let mut dims = self.dims().to_vec();
        if dims[dim] != 1 {
            return Err(self.shape_error("squeeze", format!("dimension {dim} has extent {}, not 1", dims[dim])));
        }
        dims.remove(dim);
        self.reshape(dims)
    }

    fn shape_error(&self, op: &str, what: String) -> Error {
        let layer = lock(&self.graph).layer().to_string();
        Error::Shape { op: op.into(), layer, what, shapes: vec![self.shape().clone()] }
    }
}

/// Element by element.
impl Tensor {
    fn binary(&self, rhs: &Self, kind: ops::BinaryKind) -> Result<Self> {
        Self::apply_op::<1>(ops::Binary { kind }, &[self, rhs]).map(|[out]| out)
    }

    fn broadcast_binary(&self, rhs: &Self, kind: ops::BinaryKind) -> Result<Self> {
        let shape = self.shape().broadcast_shape_binary_op(rhs.shape(), kind.name())?;
        self.broadcast_as(shape.clone())?.binary(&rhs.broadcast_as(shape)?, kind)
    }

    fn unary(&self, kind: ops::UnaryKind) -> Result<Self> {
        self.apply1(ops::Unary { kind })
    }

    /// x·scale + shift. Of a constant it is another constant, so that [`Gradient::constant`](crate::Gradient::constant)
    /// sees through means.
    ///
    /// # Errors
    /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn affine(&self, scale: f64, shift: f64) -> Result<Self> {
        let number = lock(&self.graph).number(self.id);
        if let Some(number) = number {
            return Ok(self.constant(number * scale + shift, self.shape().clone()));
        }
        self.apply1(ops::Affine { scale, shift })
    }

    /// The same numbers in another type of float; the tensor itself if it has that.
    ///
    /// # Errors
    /// When either type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        self.apply1(ops::Cast { dtype })
    }

    /// −x.
    ///
    /// # Errors
    /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn neg(&self) -> Result<Self> {
        self.affine(-1.0, 0.0)
    }

    /// A copy without gaps; the tensor itself if it has none.
    ///
    /// # Errors
    /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn contiguous(&self) -> Result<Self> {
        if lock(&self.graph).value(self.id).layout.is_contiguous() {
            return Ok(self.clone());
        }
        self.apply1(ops::Contiguous)
    }

    /// Zeroes elements with the given probability and scales the others by 1/(1−p) (Srivastava et al., 2014). The mask
    /// is a pure function of seed, step, micro-batch and this place in the model: it is never stored.
    ///
    /// # Errors
    /// When p is outside [0, 1).
    pub fn dropout(&self, p: f64) -> Result<Self> {
        if p == 0.0 {
            return Ok(self.clone());
        }
        let key = self.next_random();
        self.apply1(ops::Dropout { p, key })
    }

    /// silu(self)·up (Shazeer, arXiv 2002.05202).
    ///
    /// # Errors
    /// When the shapes differ.
    pub fn swiglu(&self, up: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::SwiGlu, &[self, up]).map(|[out]| out)
    }
}

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident => $kind:ident;)*) => {
        /// Functions of one element.
        impl Tensor {
            $($(#[$doc])*
            ///
            /// # Errors
            /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
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
    /// GELU in its tanh form (Hendrycks & Gimpel, arXiv 1606.08415), as candle's `gelu`.
    gelu => Gelu;
    /// GELU with the exact error function, as candle's `gelu_erf`.
    gelu_erf => GeluErf;
}

macro_rules! binary_methods {
    ($($name:ident, $broadcast:ident => $kind:ident, $sign:literal;)*) => {
        /// Functions of two elements, of equal or of broadcast shapes.
        impl Tensor {
            $(#[doc = concat!("self ", $sign, " rhs, for equal shapes.")]
            ///
            /// # Errors
            /// When the shapes differ.
            pub fn $name(&self, rhs: &Self) -> Result<Self> {
                self.binary(rhs, ops::BinaryKind::$kind)
            }

            #[doc = concat!("self ", $sign, " rhs, for shapes that broadcast.")]
            ///
            /// # Errors
            /// When the shapes do not broadcast.
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

/// Reductions.
impl Tensor {
    /// Sum over one dimension, which is removed.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn sum<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "sum")?;
        let summed = self.apply1(ops::Sum { dims: vec![dim] })?;
        summed.squeeze(dim)
    }

    /// Sum over one dimension, which keeps extent 1.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn sum_keepdim<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "sum_keepdim")?;
        self.apply1(ops::Sum { dims: vec![dim] })
    }

    /// Mean over one dimension, which keeps extent 1.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn mean_keepdim<D: Dim>(&self, dim: D) -> Result<Self> {
        let dim = dim.to_index(self.shape(), "mean_keepdim")?;
        let extent = self.dims()[dim].max(1);
        self.sum_keepdim(dim)?.affine(1.0 / extent as f64, 0.0)
    }

    /// Sum of all elements: a scalar.
    ///
    /// # Errors
    /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn sum_all(&self) -> Result<Self> {
        self.apply1(ops::ScaledSum { scale: 1.0 })
    }

    /// Mean of all elements: a scalar.
    ///
    /// # Errors
    /// When the type is not one of [`FLOATS`](crate::graph::FLOATS).
    pub fn mean_all(&self) -> Result<Self> {
        self.apply1(ops::ScaledSum { scale: 1.0 / self.elem_count().max(1) as f64 })
    }

    /// ln Σ eˣ over the last dimension, which is removed.
    ///
    /// # Errors
    /// When the rank is 0.
    pub fn log_sum_exp(&self) -> Result<Self> {
        self.apply1(ops::LogSumExp)
    }

    /// Softmax over the last dimension.
    ///
    /// # Errors
    /// When the rank is 0.
    pub fn softmax_last_dim(&self) -> Result<Self> {
        self.apply1(ops::Softmax)
    }
}

/// What models are made of.
impl Tensor {
    /// Matrix product over the last two dimensions; leading dimensions are equal (batches).
    ///
    /// # Errors
    /// When the inner extents or the leading dimensions differ.
    pub fn matmul(&self, rhs: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::MatMul, &[self, rhs]).map(|[out]| out)
    }

    /// x·Wᵀ + b over the last dimension: `weight` is [out, in], `bias` is `[out]`.
    ///
    /// # Errors
    /// When the extents do not match.
    pub fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        Self::apply_op::<1>(ops::Linear { has_bias: bias.is_some() }, &inputs).map(|[out]| out)
    }

    /// Rows of `self` [vocabulary, width] chosen by `ids` (u32, any shape).
    ///
    /// # Errors
    /// When `self` is not a matrix or `ids` is not u32.
    pub fn embedding(&self, ids: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::Embedding, &[self, ids]).map(|[out]| out)
    }

    /// Layer normalisation over the last dimension (Ba et al., arXiv 1607.06450).
    ///
    /// # Errors
    /// When `weight` or `bias` is not `[width]`.
    pub fn layer_norm(&self, weight: &Self, bias: &Self, eps: f64) -> Result<Self> {
        Self::apply_op::<2>(ops::LayerNorm { eps }, &[self, weight, bias]).map(|[out, _]| out)
    }

    /// Root-mean-square normalisation over the last dimension (Zhang & Sennrich, arXiv 1910.07467).
    ///
    /// # Errors
    /// When `weight` is not `[width]`.
    pub fn rms_norm(&self, weight: &Self, eps: f64) -> Result<Self> {
        Self::apply_op::<2>(ops::RmsNorm { eps }, &[self, weight]).map(|[out, _]| out)
    }

    /// Rotary position embedding (Su et al., arXiv 2104.09864) of [batch, heads, tokens, head size], rotating the two
    /// halves of the head against each other as Llama and candle's `rope` do.
    ///
    /// # Errors
    /// When the rank is not 4 or the head size is odd.
    pub fn rope(&self, theta: f64) -> Result<Self> {
        self.rope_scaled(theta, ops::RopeScaling::None)
    }

    /// [`Self::rope`] with stretched frequencies.
    ///
    /// # Errors
    /// As [`Self::rope`].
    pub fn rope_scaled(&self, theta: f64, scaling: ops::RopeScaling) -> Result<Self> {
        if self.rank() != 4 {
            return Err(self.shape_error("rope", "[batch, heads, tokens, head size] is needed".into()));
        }
        let frequencies = scaling.frequencies(theta);
        self.transpose(1, 2)?.apply1(ops::Rope { frequencies, inverse: false })?.transpose(1, 2)
    }

    /// Fused causal attention of `self` (the queries): [batch, heads, tokens, head size], with keys and values of
    /// [batch, key-value heads, tokens, head size]. Never makes the tokens × tokens scores
    /// (FlashAttention, arXiv 2205.14135).
    ///
    /// # Errors
    /// When the shapes do not fit or the heads are not a multiple of the key-value heads.
    pub fn causal_attention(&self, k: &Self, v: &Self, scale: f64) -> Result<Self> {
        let [out, _] = Self::apply_op::<2>(ops::Attention { scale, causal: true }, &[self, k, v])?;
        out.transpose(1, 2)
    }

    /// Negative log-likelihood of `targets` (u32, [..]) under `self` as logits [.., vocabulary]: one number per target.
    /// The gradient overwrites the logits; neither a softmax nor a second copy of the logits is ever stored.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn cross_entropy(&self, targets: &Self) -> Result<Self> {
        Self::apply_op::<2>(ops::CrossEntropy, &[self, targets]).map(|[loss, _]| loss)
    }

    /// Negative log-likelihood of `targets` (u32, [..]) under the logits `self`·`weight`ᵀ, for `self` [.., width] and `weight`
    /// [vocabulary, width]: one number per target. As [`Self::linear`] and [`Self::cross_entropy`], but chunk by chunk of the
    /// rows, so that the logits never exist whole; and where the gradient of the losses is one known number, as under a mean,
    /// both gradients are made on the way (Liger Kernel, arXiv 2410.10989, section 3.2).
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn linear_cross_entropy(&self, weight: &Self, targets: &Self) -> Result<Self> {
        let op = ops::LinearCrossEntropy::new(None);
        Self::apply_op::<1>(op, &[self, weight, targets]).map(|[losses]| losses)
    }

    /// Joins tensors along one dimension.
    ///
    /// # Errors
    /// When they differ in another dimension.
    pub fn cat<D: Dim>(tensors: &[&Self], dim: D) -> Result<Self> {
        let first = tensors.first().ok_or_else(|| Error::Shape {
            op: "cat".into(),
            layer: String::new(),
            what: "nothing to join".into(),
            shapes: vec![],
        })?;
        let dim = dim.to_index(first.shape(), "cat")?;
        Self::apply_op::<1>(ops::Cat { dim }, tensors).map(|[out]| out)
    }
}

macro_rules! operators {
    ($($trait:ident, $method:ident;)*) => {
        $(impl std::ops::$trait<&Tensor> for &Tensor {
            type Output = Result<Tensor>;

            fn $method(self, rhs: &Tensor) -> Result<Tensor> {
                Tensor::$method(self, rhs)
            }
        }

        impl std::ops::$trait<Tensor> for &Tensor {
            type Output = Result<Tensor>;

            fn $method(self, rhs: Tensor) -> Result<Tensor> {
                Tensor::$method(self, &rhs)
            }
        })*
    };
}

operators! {
    Add, add;
    Sub, sub;
    Mul, mul;
    Div, div;
}
