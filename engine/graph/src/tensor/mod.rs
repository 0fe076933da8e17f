//! The builder: candle's tensor operations, recorded as a graph instead of computed.
//!
//! A candle model is ported by changing its imports. Methods with the same names and shape rules record nodes here,
//! which the compiled program computes later.

mod attention;
mod cached;
mod choose;
mod convolution;
mod create;
mod elements;
mod index;
mod operators;
mod reduce;
mod views;

pub use choose::TensorOrScalar;
pub use create::Device;
pub use index::{IndexOp, TensorIndexer};

use std::sync::{Arc, Mutex};

use candle_core::shape::Dim;
use candle_core::{DType, Shape};
use gapless_kernels::LossTerms;

use super::{Graph, LossPart, Phase, ReportedLoss, Spec, ValueId, lock};
use crate::error::{Error, Result};
use crate::nn::{Module, ModuleT};
use crate::op::Op;
use crate::ops;

/// A symbolic tensor, whose elements exist when the program runs.
#[derive(Debug, Clone)]
pub struct Tensor {
    graph: Device,
    id: ValueId,
    spec: Spec,
}

/// A guard that records nodes under a layer's name until it is dropped. [`Tensor::enter`] returns it.
#[derive(Debug)]
pub struct LayerGuard(Arc<Mutex<Graph>>);

impl Drop for LayerGuard {
    fn drop(&mut self) {
        lock(&self.0).leave_layer();
    }
}

impl Tensor {
    #[doc(hidden)]
    pub fn of(graph: &Arc<Mutex<Graph>>, id: ValueId) -> Self {
        let spec = lock(graph).value(id).spec.clone();
        Self { graph: Device::of(graph), id, spec }
    }

    #[doc(hidden)]
    pub fn graph(&self) -> &Arc<Mutex<Graph>> {
        &self.graph
    }

    /// The value to which this handle refers.
    pub fn id(&self) -> ValueId {
        self.id
    }

    /// Shape and element type.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Extents of the dimensions.
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
    /// Returns an error if there is no such dimension.
    pub fn dim<D: Dim>(&self, dim: D) -> Result<usize> {
        Ok(self.spec.shape.dim(dim)?)
    }

    /// The only extent of a vector.
    ///
    /// # Errors
    /// Returns an error if the rank is not 1.
    pub fn dims1(&self) -> Result<usize> {
        self.extents::<1>().map(|[a]| a)
    }

    /// Both extents of a matrix.
    ///
    /// # Errors
    /// Returns an error if the rank is not 2.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        self.extents().map(|[a, b]| (a, b))
    }

    /// The three extents of a tensor of rank 3.
    ///
    /// # Errors
    /// Returns an error if the rank is not 3.
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        self.extents().map(|[a, b, c]| (a, b, c))
    }

    /// The four extents of a tensor of rank 4.
    ///
    /// # Errors
    /// Returns an error if the rank is not 4.
    pub fn dims4(&self) -> Result<(usize, usize, usize, usize)> {
        self.extents().map(|[a, b, c, d]| (a, b, c, d))
    }

    /// The five extents of a tensor of rank 5.
    ///
    /// # Errors
    /// Returns an error if the rank is not 5.
    pub fn dims5(&self) -> Result<(usize, usize, usize, usize, usize)> {
        self.extents().map(|[a, b, c, d, e]| (a, b, c, d, e))
    }

    fn extents<const RANK: usize>(&self) -> Result<[usize; RANK]> {
        <[usize; RANK]>::try_from(self.dims()).map_err(|_| {
            self.shape_error("dims", format!("the tensor must have {RANK} dimensions, but has {}", self.rank()))
        })
    }

    /// The graph of this tensor, in which further tensors can be created.
    pub fn device(&self) -> &Device {
        &self.graph
    }

    /// True if the elements are contiguous in memory.
    pub fn is_contiguous(&self) -> bool {
        lock(&self.graph).value(self.id).layout.is_contiguous()
    }

    /// Applies a layer to this tensor.
    ///
    /// # Errors
    /// Returns the errors of the layer.
    pub fn apply<M: Module>(&self, layer: &M) -> Result<Self> {
        layer.forward(self)
    }

    /// Applies a layer that may behave differently while training.
    ///
    /// # Errors
    /// Returns the errors of the layer.
    pub fn apply_t<M: ModuleT>(&self, layer: &M, train: bool) -> Result<Self> {
        layer.forward_t(self, train)
    }

    /// Records the following nodes under `layer` (e.g. `h.3.attn`) until the guard is dropped. The names appear in
    /// reports, memory maps and errors.
    pub fn enter(&self, layer: &str) -> LayerGuard {
        lock(&self.graph).enter_layer(layer.into());
        LayerGuard(Arc::clone(&self.graph))
    }

    /// Applies an operation, which may be your own, and returns the operation's outputs.
    ///
    /// # Errors
    /// Returns an error if the operation's shape rule rejects the inputs, if the operation does not have `OUTPUTS`
    /// outputs, or if there are no inputs.
    pub fn apply_op<const OUTPUTS: usize>(op: impl Op, inputs: &[&Self]) -> Result<[Self; OUTPUTS]> {
        let name = op.name();
        <[Self; OUTPUTS]>::try_from(Self::apply_shared(Arc::new(op), inputs)?).map_err(|outputs| {
            Error::msg(format!(
                "{name} has {} outputs, not {OUTPUTS}; ask for as many as its `infer` returns",
                outputs.len()
            ))
        })
    }

    /// Like [`Self::apply_op`], for an operation that is already shared, such as one that [`Op::on_parts`] returns.
    ///
    /// # Errors
    /// Returns an error if the operation's shape rule rejects the inputs, or if there are no inputs.
    pub fn apply_shared(op: Arc<dyn Op>, inputs: &[&Self]) -> Result<Vec<Self>> {
        let Some(Self { graph, .. }) = inputs.first() else {
            return Err(Error::msg(format!("{} has no inputs; give it at least one tensor", op.name())));
        };
        if inputs.iter().any(|t| !Arc::ptr_eq(&t.graph, graph)) {
            return Err(Error::TwoGraphs { op: op.name().into() });
        }
        let ids: Vec<ValueId> = inputs.iter().map(|t| t.id).collect();
        let outputs = lock(graph).apply(op, &ids)?;
        Ok(outputs.into_iter().map(|id| Self::of(graph, id)).collect())
    }

    fn apply1(&self, op: impl Op) -> Result<Self> {
        Self::apply_op::<1>(op, &[self]).map(|[out]| out)
    }

    /// Returns a constant of the given shape in this tensor's graph. The constant has this tensor's type or, if this
    /// tensor holds ids or a mask, f32.
    pub fn constant(&self, number: f64, shape: impl Into<Shape>) -> Self {
        let dtype = if self.dtype().is_float() { self.dtype() } else { DType::F32 };
        self.graph.constant(number, Spec { shape: shape.into(), dtype })
    }

    /// Reports this value in each step (`Trainer::watched`), summed over the micro-batches and data ranks. The bytes of
    /// the value stay occupied until the next step. If a name is used several times, a number is appended to each name
    /// but the first: `name.2`.
    pub fn watch(&self, name: &str) {
        lock(&self.graph).watch(name, self.id);
    }

    /// Reports the mean of this tensor as a summand of `part`, for every loss that depends on `depends_on`. The value
    /// that a step reports for a part is the sum of the part's summands, averaged over micro-batches and data ranks.
    ///
    /// # Errors
    /// Returns the errors of [`Self::mean_all`].
    pub fn report_loss(&self, part: LossPart, depends_on: &Self) -> Result<()> {
        let scalar = self.mean_all()?.id;
        lock(&self.graph).report_loss(ReportedLoss { part, depends_on: depends_on.id, scalar });
        Ok(())
    }

    /// Returns a key for an operation that draws random numbers.
    pub(crate) fn next_random(&self) -> u64 {
        lock(&self.graph).next_random()
    }

    #[doc(hidden)]
    pub fn set_phase(&self, phase: Phase) {
        lock(&self.graph).set_phase(phase);
    }
}

impl AsRef<Tensor> for Tensor {
    fn as_ref(&self) -> &Tensor {
        self
    }
}

/// The operations of typical models.
impl Tensor {
    /// Matrix product over the last two dimensions; the leading (batch) dimensions must be equal.
    ///
    /// # Errors
    /// Returns an error if the inner extents or the leading dimensions differ.
    pub fn matmul(&self, rhs: &Self) -> Result<Self> {
        Self::apply_op::<1>(ops::MatMul, &[self, rhs]).map(|[out]| out)
    }

    /// Like [`Self::matmul`], but leading dimensions broadcast. If `rhs` is a matrix, it is read only once for the
    /// whole batch, like the weight of a linear layer.
    ///
    /// # Errors
    /// Returns an error if the inner extents differ or the leading dimensions do not broadcast.
    pub fn broadcast_matmul(&self, rhs: &Self) -> Result<Self> {
        if rhs.rank() == 2 {
            return self.linear(&rhs.t()?, None);
        }
        let ([left @ .., m, k], [right @ .., k_rhs, n]) = (self.dims(), rhs.dims()) else {
            return Err(self.shape_error("broadcast_matmul", "both inputs must have at least two dimensions".into()));
        };
        let batch = Shape::from(left).broadcast_shape_binary_op(&Shape::from(right), "broadcast_matmul")?;
        let left = self.broadcast_as([batch.dims(), &[*m, *k]].concat())?;
        left.matmul(&rhs.broadcast_as([batch.dims(), &[*k_rhs, *n]].concat())?)
    }

    /// Returns x·Wᵀ + b over the last dimension. `weight` is [out, in], and `bias` is `[out]`.
    ///
    /// # Errors
    /// Returns an error if the extents do not match.
    pub fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        Self::apply_op::<1>(ops::Linear { has_bias: bias.is_some() }, &inputs).map(|[out]| out)
    }

    /// Returns x·Wᵀ + b like [`Self::linear`], for a quantized weight that is not trained. `stored` are the tensors of
    /// [`QuantizedWeight::stored`](ops::QuantizedWeight::stored).
    ///
    /// # Errors
    /// Returns an error if the extents or types do not match.
    pub fn quantized_linear(&self, weight: ops::QuantizedWeight, stored: &[Self], bias: Option<&Self>) -> Result<Self> {
        let inputs: Vec<&Self> = [self].into_iter().chain(stored).chain(bias).collect();
        Self::apply_op::<1>(ops::QuantizedLinear { weight, has_bias: bias.is_some() }, &inputs).map(|[out]| out)
    }

    /// Looks up rows of `self` [vocabulary, width] by `ids` (u32, any shape).
    ///
    /// # Errors
    /// Returns an error if `self` is not a matrix, if `ids` is not u32, or if the ids are known when the model is
    /// recorded and one of them is out of range.
    pub fn embedding(&self, ids: &Self) -> Result<Self> {
        self.padded_embedding(ids, None)
    }

    /// Like [`Self::embedding`], but the row of the id `padding` gets no gradient, as with PyTorch's `padding_idx`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::embedding`].
    pub fn padded_embedding(&self, ids: &Self, padding: Option<u32>) -> Result<Self> {
        if self.rank() == 2 {
            self.expect_inside(ids, 0, "embedding")?;
        }
        Self::apply_op::<1>(ops::Embedding { padding, first: 0 }, &[self, ids]).map(|[out]| out)
    }

    /// Layer normalisation over the last dimension (Ba et al., arXiv 1607.06450).
    ///
    /// # Errors
    /// Returns an error if `weight` or `bias` is not `[width]`.
    pub fn layer_norm(&self, weight: &Self, bias: &Self, eps: f64) -> Result<Self> {
        Self::apply_op::<2>(ops::LayerNorm { eps }, &[self, weight, bias]).map(|[out, _]| out)
    }

    /// Root-mean-square normalisation over the last dimension (Zhang & Sennrich, arXiv 1910.07467).
    ///
    /// # Errors
    /// Returns an error if `weight` is not `[width]`.
    pub fn rms_norm(&self, weight: &Self, eps: f64) -> Result<Self> {
        Self::apply_op::<2>(ops::RmsNorm { eps }, &[self, weight]).map(|[out, _]| out)
    }

    /// Rotary position embedding (Su et al., arXiv 2104.09864) of [batch, heads, tokens, head size]. Pairs of elements
    /// half a head apart are rotated, as in Llama and candle's `rope`.
    ///
    /// # Errors
    /// Returns an error if the rank is not 4 or the head size is odd.
    pub fn rope(&self, theta: f64) -> Result<Self> {
        self.rope_scaled(theta, ops::RopeScaling::None)
    }

    /// Like [`Self::rope`], with scaled frequencies.
    ///
    /// # Errors
    /// Returns the errors of [`Self::rope`].
    pub fn rope_scaled(&self, theta: f64, scaling: ops::RopeScaling) -> Result<Self> {
        self.rotated(theta, scaling, false)
    }

    /// Like [`Self::rope_scaled`], but rotates pairs of adjacent elements, as in the paper and candle's `rope_i`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::rope`].
    pub fn rope_i_scaled(&self, theta: f64, scaling: ops::RopeScaling) -> Result<Self> {
        self.rotated(theta, scaling, true)
    }

    fn rotated(&self, theta: f64, scaling: ops::RopeScaling, neighbours: bool) -> Result<Self> {
        if self.rank() != 4 {
            return Err(self.shape_error("rope", "the input must be [batch, heads, tokens, head size]".into()));
        }
        let x = self.transpose(1, 2)?;
        let op = ops::Rope { frequencies: scaling.frequencies(theta), neighbours, inverse: false };
        let [rotated] = match self.positions() {
            Some(positions) => Self::apply_op(op, &[&x, &positions]),
            None => Self::apply_op(op, &[&x]),
        }?;
        rotated.transpose(1, 2)
    }

    /// Negative log-likelihood of `targets` (u32, [..]) under the logits `self` [.., vocabulary], with one loss per
    /// target. The gradient overwrites the logits, so neither a softmax nor a second tensor of the logits' size is
    /// stored.
    ///
    /// If documents are packed ([`Sequences`](crate::Sequences)), each loss is multiplied by the weight of its token.
    /// In a training step, the loss also has the terms of `TrainOptions::loss`, and −log p is reported separately. In
    /// training on preferences, all results are the mean loss of the pairs ([`Preference`](crate::nn::Preference)).
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if documents are packed and there is not exactly one target per
    /// token.
    pub fn cross_entropy(&self, targets: &Self) -> Result<Self> {
        let terms = self.loss_terms();
        let [losses, lse] = Self::apply_op(ops::CrossEntropy { terms }, &[self, targets])?;
        let weights = self.target_weights(targets)?;
        let weighted = |losses: Self| weights.as_ref().map_or(Ok(losses.clone()), |weights| losses.mul(weights));
        if terms != LossTerms::NONE {
            let last = self.rank() - 1;
            let logits = self.gather(&targets.unsqueeze(last)?, last)?.squeeze(last)?.to_dtype(DType::F32)?;
            weighted(lse.sub(&logits)?)?.report_loss(LossPart::Likelihood, &losses)?;
        }
        weighted(losses)?.compared()
    }

    /// Negative log-likelihood of `targets` (u32, [..]) under the logits `self`·`weight`ᵀ, with one loss per target.
    /// `self` is [.., width], and `weight` is [vocabulary, width].
    ///
    /// The result equals that of [`Self::linear`] followed by [`Self::cross_entropy`]. The operation works on chunks of
    /// rows, so that the logits are never stored as a whole. If the gradient of the losses is a known constant, as
    /// under a mean, the gradients of `self` and `weight` are computed in the same pass (Liger Kernel, arXiv
    /// 2410.10989, section 3.2).
    ///
    /// # Errors
    /// Returns the errors of [`Self::cross_entropy`].
    pub fn linear_cross_entropy(&self, weight: &Self, targets: &Self) -> Result<Self> {
        self.capped_cross_entropy(weight, targets, None)
    }

    /// Like [`Self::linear_cross_entropy`]. If `cap` is given, logits x are replaced by cap·tanh(x/cap) (Gemma 2, arXiv
    /// 2408.00118, section 2).
    ///
    /// # Errors
    /// Returns the errors of [`Self::linear_cross_entropy`], and an error if the cap is not positive.
    pub fn capped_cross_entropy(&self, weight: &Self, targets: &Self, cap: Option<f64>) -> Result<Self> {
        let weights = self.target_weights(targets)?;
        let inputs: Vec<&Self> = [self, weight, targets].into_iter().chain(&weights).collect();
        let terms = self.loss_terms();
        let op = ops::LinearCrossEntropy::new(None).with_terms(terms).with_cap(cap);
        if terms == LossTerms::NONE {
            let [losses] = Self::apply_op(op, &inputs)?;
            return losses.compared();
        }
        let [losses, likelihoods] = Self::apply_op(op.with_likelihoods(), &inputs)?;
        likelihoods.report_loss(LossPart::Likelihood, &losses)?;
        Ok(losses)
    }
}
