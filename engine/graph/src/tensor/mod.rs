//! The builder: candle's tensor vocabulary over a graph instead of data.
//!
//! A candle model is ported by changing its imports: the same methods with the same names and shape rules record nodes
//! here, and everything is computed later by the compiled program.

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

/// A tensor that will exist when the program runs.
#[derive(Debug, Clone)]
pub struct Tensor {
    graph: Device,
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
    pub fn of(graph: &Arc<Mutex<Graph>>, id: ValueId) -> Self {
        let spec = lock(graph).value(id).spec.clone();
        Self { graph: Device::of(graph), id, spec }
    }

    #[doc(hidden)]
    pub fn graph(&self) -> &Arc<Mutex<Graph>> {
        &self.graph
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

    /// The only extent of a vector.
    ///
    /// # Errors
    /// When the rank is not 1.
    pub fn dims1(&self) -> Result<usize> {
        self.extents::<1>().map(|[a]| a)
    }

    /// Both extents of a matrix.
    ///
    /// # Errors
    /// When the rank is not 2.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        self.extents().map(|[a, b]| (a, b))
    }

    /// All three extents.
    ///
    /// # Errors
    /// When the rank is not 3.
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        self.extents().map(|[a, b, c]| (a, b, c))
    }

    /// All four extents.
    ///
    /// # Errors
    /// When the rank is not 4.
    pub fn dims4(&self) -> Result<(usize, usize, usize, usize)> {
        self.extents().map(|[a, b, c, d]| (a, b, c, d))
    }

    /// All five extents.
    ///
    /// # Errors
    /// When the rank is not 5.
    pub fn dims5(&self) -> Result<(usize, usize, usize, usize, usize)> {
        self.extents().map(|[a, b, c, d, e]| (a, b, c, d, e))
    }

    fn extents<const RANK: usize>(&self) -> Result<[usize; RANK]> {
        <[usize; RANK]>::try_from(self.dims()).map_err(|_| {
            self.shape_error("dims", format!("the tensor must have {RANK} dimensions, but has {}", self.rank()))
        })
    }

    /// Where new tensors beside this one are made.
    pub fn device(&self) -> &Device {
        &self.graph
    }

    /// Whether its elements lie one after another.
    pub fn is_contiguous(&self) -> bool {
        lock(&self.graph).value(self.id).layout.is_contiguous()
    }

    /// What a layer makes of this tensor.
    ///
    /// # Errors
    /// As the layer.
    pub fn apply<M: Module>(&self, layer: &M) -> Result<Self> {
        layer.forward(self)
    }

    /// What a layer makes of this tensor, which may do something else while training.
    ///
    /// # Errors
    /// As the layer.
    pub fn apply_t<M: ModuleT>(&self, layer: &M, train: bool) -> Result<Self> {
        layer.forward_t(self, train)
    }

    /// Records what follows under `layer` (e.g. `h.3.attn`) until the guard is dropped. Names show in reports,
    /// memory maps and errors.
    pub fn enter(&self, layer: &str) -> LayerGuard {
        lock(&self.graph).enter_layer(layer.into());
        LayerGuard(Arc::clone(&self.graph))
    }

    /// Applies an operation, a user's own included, and returns its outputs.
    ///
    /// # Errors
    /// When the operation's shape rule refuses the inputs, it has another number of outputs, or there are no inputs.
    pub fn apply_op<const OUTPUTS: usize>(op: impl Op, inputs: &[&Self]) -> Result<[Self; OUTPUTS]> {
        let name = op.name();
        <[Self; OUTPUTS]>::try_from(Self::apply_shared(Arc::new(op), inputs)?).map_err(|outputs| {
            Error::msg(format!(
                "{name} has {} outputs, not {OUTPUTS}; ask for as many as its `infer` returns",
                outputs.len()
            ))
        })
    }

    fn apply_shared(op: Arc<dyn Op>, inputs: &[&Self]) -> Result<Vec<Self>> {
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

    /// The same number in every element, in this tensor's graph and type; f32 beside ids and masks.
    pub fn constant(&self, number: f64, shape: impl Into<Shape>) -> Self {
        let dtype = if self.dtype().is_float() { self.dtype() } else { DType::F32 };
        self.graph.constant(number, Spec { shape: shape.into(), dtype })
    }

    /// Shows the value to whoever trains, as a figure of each step (`Trainer::watched`): summed over
    /// the micro-batches and data ranks. Costs its bytes until the next step. Of several of one name, the later ones have a number
    /// behind it: `name.2`.
    pub fn watch(&self, name: &str) {
        lock(&self.graph).watch(name, self.id);
    }

    /// Says that the mean of these numbers is a summand of the loss, if that is made of `of`: each step reports the sum of those of a part
    /// apart from the others, as the mean over micro-batches and data ranks.
    ///
    /// # Errors
    /// As [`Self::mean_all`].
    pub fn report_loss(&self, part: LossPart, of: &Self) -> Result<()> {
        let mean = self.mean_all()?.id;
        lock(&self.graph).report_loss(ReportedLoss { part, of: of.id, mean });
        Ok(())
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

impl AsRef<Tensor> for Tensor {
    fn as_ref(&self) -> &Tensor {
        self
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

    /// [`Self::matmul`] with leading dimensions that broadcast. A matrix on the right is a linear layer's, and read once.
    ///
    /// # Errors
    /// When the inner extents differ or the leading dimensions do not broadcast.
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
    /// When `self` is not a matrix, `ids` is not u32, or an id that is known here is outside.
    pub fn embedding(&self, ids: &Self) -> Result<Self> {
        self.padded_embedding(ids, None)
    }

    /// [`Self::embedding`], where the row of one id learns nothing from being looked up, as by PyTorch's `padding_idx`.
    ///
    /// # Errors
    /// As [`Self::embedding`].
    pub fn padded_embedding(&self, ids: &Self, padding: Option<u32>) -> Result<Self> {
        if self.rank() == 2 {
            self.expect_inside(ids, 0, "embedding")?;
        }
        Self::apply_op::<1>(ops::Embedding { padding }, &[self, ids]).map(|[out]| out)
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
        self.rotated(theta, scaling, false)
    }

    /// [`Self::rope_scaled`], rotating each element of even number against the one behind it, as the paper and candle's `rope_i` do.
    ///
    /// # Errors
    /// As [`Self::rope`].
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

    /// Negative log-likelihood of `targets` (u32, [..]) under `self` as logits [.., vocabulary]: one number per target.
    /// The gradient overwrites the logits; neither a softmax nor a second copy of the logits is ever stored. Where documents are
    /// packed ([`Sequences`](crate::Sequences)), each loss is multiplied by its token's weight. In a training step it counts the
    /// terms of `TrainOptions::loss` too, and reports the likelihood apart from them.
    ///
    /// # Errors
    /// When the shapes do not fit; where documents are packed, when there is not one target for each token.
    pub fn cross_entropy(&self, targets: &Self) -> Result<Self> {
        let terms = self.loss_terms();
        let [losses, lse] = Self::apply_op(ops::CrossEntropy { terms }, &[self, targets])?;
        let weights = self.weights_of(targets)?;
        let weighted = |losses: Self| weights.as_ref().map_or(Ok(losses.clone()), |weights| losses.mul(weights));
        if terms != LossTerms::NONE {
            let last = self.rank() - 1;
            let logits = self.gather(&targets.unsqueeze(last)?, last)?.squeeze(last)?.to_dtype(DType::F32)?;
            weighted(lse.sub(&logits)?)?.report_loss(LossPart::Likelihood, &losses)?;
        }
        weighted(losses)
    }

    /// Negative log-likelihood of `targets` (u32, [..]) under the logits `self`·`weight`ᵀ, for `self` [.., width] and `weight`
    /// [vocabulary, width]: one number per target. As [`Self::linear`] and [`Self::cross_entropy`], but chunk by chunk of the
    /// rows, so that the logits never exist whole; and where the gradient of the losses is one known number, as under a mean,
    /// both gradients are made on the way (Liger Kernel, arXiv 2410.10989, section 3.2).
    ///
    /// # Errors
    /// As [`Self::cross_entropy`].
    pub fn linear_cross_entropy(&self, weight: &Self, targets: &Self) -> Result<Self> {
        self.capped_cross_entropy(weight, targets, None)
    }

    /// [`Self::linear_cross_entropy`] of logits x that count as cap·tanh(x/cap) (Gemma 2, arXiv 2408.00118, section 2).
    ///
    /// # Errors
    /// As [`Self::linear_cross_entropy`]; a cap that is not a positive number.
    pub fn capped_cross_entropy(&self, weight: &Self, targets: &Self, cap: Option<f64>) -> Result<Self> {
        let weights = self.weights_of(targets)?;
        let inputs: Vec<&Self> = [self, weight, targets].into_iter().chain(&weights).collect();
        let terms = self.loss_terms();
        let op = ops::LinearCrossEntropy::new(None).with_terms(terms).with_cap(cap);
        if terms == LossTerms::NONE {
            return Self::apply_op::<1>(op, &inputs).map(|[losses]| losses);
        }
        let [losses, likelihoods] = Self::apply_op(op.with_likelihoods(), &inputs)?;
        likelihoods.report_loss(LossPart::Likelihood, &losses)?;
        Ok(losses)
    }
}
