//! Declaration of named parameters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Shape};
use gapless_kernels::{Spec, Window};
use gapless_parallel::Axes;

use super::{Init, Lora, Quantize, Trainable};
use crate::error::{Error, Result};
use crate::graph::{Graph, ValueId, lock};
use crate::optim::Optimizer;
use crate::tensor::{Device, Tensor};

/// The ranks that divide the experts of a layer, and one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRanks {
    /// The axes of the mesh along which these ranks lie.
    pub axes: Axes,
    /// Number of ranks.
    pub ranks: usize,
    /// Index of this rank.
    pub rank: usize,
}

impl Default for ExpertRanks {
    /// Returns a single rank, which has all experts.
    fn default() -> Self {
        Self { axes: Axes::EXPERT, ranks: 1, rank: 0 }
    }
}

/// A builder that declares parameters under a path, like candle's: `vb.pp("h").pp(3).get((4, 4), "weight")` declares
/// `h.3.weight`.
#[derive(Debug, Clone)]
pub struct VarBuilder {
    graph: Device,
    path: String,
    dtype: DType,
    expert_ranks: ExpertRanks,
    trainable: Arc<Trainable>,
    is_training: bool,
    /// True if weights under this path are never quantized.
    is_unquantized: bool,
    /// Other names of levels of the path.
    names: Arc<BTreeMap<String, String>>,
}

impl VarBuilder {
    /// Creates a builder for parameters of the given type in a graph.
    pub fn new(graph: &Arc<Mutex<Graph>>, dtype: DType) -> Self {
        let trainable = Arc::new(Trainable::All);
        Self {
            graph: Device::of(graph),
            path: String::new(),
            dtype,
            expert_ranks: ExpertRanks::default(),
            trainable,
            is_training: true,
            is_unquantized: false,
            names: Arc::default(),
        }
    }

    /// Sets the part of the model that is trained.
    #[must_use]
    pub fn with_trainable(self, trainable: &Trainable) -> Self {
        Self { trainable: Arc::new(trainable.clone()), ..self }
    }

    /// Sets whether the recorded forward is for training or only for evaluation. Adapters apply dropout only in
    /// training.
    #[must_use]
    pub fn with_training(self, is_training: bool) -> Self {
        Self { is_training, ..self }
    }

    /// Returns the settings of adapters, or `None` if the model has none.
    pub(super) fn lora(&self) -> Option<&Lora> {
        match &*self.trainable {
            Trainable::Lora(lora) => Some(lora),
            _ => None,
        }
    }

    /// Returns the storage of the weight of a layer with the builder's path, or `None` if it is not quantized.
    pub(super) fn quantize(&self) -> Option<&Quantize> {
        self.lora()?.quantize.as_ref().filter(|quantize| !self.is_unquantized && !quantize.skips(&self.path))
    }

    /// Returns the same builder for layers whose weights are never quantized, such as a head.
    #[must_use]
    pub fn unquantized(self) -> Self {
        Self { is_unquantized: true, ..self }
    }

    pub(super) fn is_training(&self) -> bool {
        self.is_training
    }

    /// Sets the ranks that divide the experts of a layer.
    #[must_use]
    pub fn with_expert_ranks(self, expert_ranks: ExpertRanks) -> Self {
        Self { expert_ranks, ..self }
    }

    /// Returns the ranks that divide the experts of a layer; see [`Mesh::experts`](gapless_parallel::Mesh::experts).
    pub fn expert_ranks(&self) -> ExpertRanks {
        self.expert_ranks
    }

    /// Declares a parameter [experts, ..] of which each expert rank holds an equal share [experts ÷ ranks, ..].
    ///
    /// # Errors
    /// Returns an error if the number of experts is not a multiple of the number of expert ranks, or if a parameter of
    /// this name is already declared with another shape.
    pub fn get_share(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let whole = Spec { shape: shape.into(), dtype: self.dtype };
        let ExpertRanks { ranks, rank, .. } = self.expert_ranks;
        let Some(experts) = whole.dims().first().copied().filter(|experts| experts.is_multiple_of(ranks)) else {
            let why = format!("{ranks} expert ranks cannot share {:?} of {:?} equally", whole.dims(), self.full(name));
            return Err(Error::config("mesh.expert", why, "choose a divisor of the number of experts"));
        };
        if ranks == 1 || experts == 0 {
            return self.get_with_hints(whole.shape, name, init);
        }
        let name = self.full(name);
        let mut graph = lock(&self.graph);
        let share = experts / ranks;
        let mut held: Vec<Vec<_>> = whole.dims().iter().map(|&extent| vec![0..extent]).collect();
        held[0] = vec![rank * share..(rank + 1) * share];
        let window = Window::of(whole.dims(), held);
        let mut dims = whole.dims().to_vec();
        dims[0] = share;
        let id = graph.add_part(&name, whole.in_shape(dims), init, window)?;
        self.freeze(&mut graph, &name, id);
        drop(graph);
        Ok(Tensor::of(&self.graph, id))
    }

    /// Renames levels of the path: [`Self::pp`] extends the path by the value of `names` instead of by the key. The last
    /// part of a parameter's name, which [`Self::get`] gets, is not renamed.
    #[must_use]
    pub fn with_names(self, names: &BTreeMap<String, String>) -> Self {
        Self { names: Arc::new(names.clone()), ..self }
    }

    /// Returns a builder one level down, whose path is extended by `name`.
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Self {
        let name = name.to_string();
        Self { path: self.full(self.names.get(&name).unwrap_or(&name)), ..self.clone() }
    }

    /// Returns a builder of parameters of another type under the same path, like candle's.
    #[must_use]
    pub fn to_dtype(&self, dtype: DType) -> Self {
        Self { dtype, ..self.clone() }
    }

    /// The path of the builder, e.g. `h.3`. Models pass it to [`Tensor::enter`] as the layer's name.
    pub fn prefix(&self) -> &str {
        &self.path
    }

    /// The graph in which further tensors can be created.
    pub fn device(&self) -> &Device {
        &self.graph
    }

    /// The type of the parameters: `TrainOptions::dtype`.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Declares a parameter whose initial values are drawn from a normal distribution with standard deviation 0.02. A
    /// second call with the same name returns the same parameter.
    ///
    /// # Errors
    /// Returns an error if a parameter of this name is already declared with another shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.02 })
    }

    /// Declares a parameter with the given initial values.
    ///
    /// # Errors
    /// Returns an error if a parameter of this name is already declared with another shape.
    pub fn get_with_hints(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let spec = Spec { shape: shape.into(), dtype: self.dtype };
        let name = self.full(name);
        let mut graph = lock(&self.graph);
        let id = graph.add_persistent(&name, spec, init)?;
        self.freeze(&mut graph, &name, id);
        drop(graph);
        Ok(Tensor::of(&self.graph, id))
    }

    fn freeze(&self, graph: &mut Graph, name: &str, id: ValueId) {
        if !self.trainable.trains(name) {
            graph.freeze(id);
        }
    }

    /// Declares a parameter that `rule` updates, and not the optimizer of the training step. `rule` gets the tensor
    /// that operations accumulate as the gradient of the parameter. This tensor need not be a gradient in the
    /// mathematical sense, and does not count in the global norm.
    ///
    /// # Errors
    /// Returns an error if a parameter of this name is already declared with another shape.
    pub fn get_with_rule(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        init: Init,
        rule: impl Into<Arc<dyn Optimizer>>,
    ) -> Result<Tensor> {
        let tensor = self.get_with_hints(shape, name, init)?;
        lock(&self.graph).set_optimizer(tensor.id(), rule.into());
        Ok(tensor)
    }

    fn full(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }
}
