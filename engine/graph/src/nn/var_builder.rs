//! Names for parameters.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Shape};
use gapless_kernels::Spec;

use super::{Init, Lora, Trainable};
use crate::error::{Error, Result};
use crate::graph::{Graph, ValueId, lock};
use crate::optim::Optimizer;
use crate::tensor::{Device, Tensor};

/// Declares parameters under a path, as candle's does: `vb.pp("h").pp(3).get((4, 4), "weight")` is `h.3.weight`.
#[derive(Debug, Clone)]
pub struct VarBuilder {
    graph: Device,
    path: String,
    dtype: DType,
    expert_ranks: (usize, usize),
    trainable: Arc<Trainable>,
    is_training: bool,
}

impl VarBuilder {
    /// Declares parameters of a type in a graph.
    pub fn new(graph: &Arc<Mutex<Graph>>, dtype: DType) -> Self {
        let trainable = Arc::new(Trainable::All);
        Self {
            graph: Device::of(graph),
            path: String::new(),
            dtype,
            expert_ranks: (1, 0),
            trainable,
            is_training: true,
        }
    }

    /// For a model of which a part is trained.
    #[must_use]
    pub fn with_trainable(self, trainable: &Trainable) -> Self {
        Self { trainable: Arc::new(trainable.clone()), ..self }
    }

    /// For a forward that is trained, or only evaluated: adapters have dropout in the former.
    #[must_use]
    pub fn with_training(self, is_training: bool) -> Self {
        Self { is_training, ..self }
    }

    /// What adapters are to be like, if there are any.
    pub(super) fn lora(&self) -> Option<&Lora> {
        match &*self.trainable {
            Trainable::Lora(lora) => Some(lora),
            _ => None,
        }
    }

    pub(super) fn is_training(&self) -> bool {
        self.is_training
    }

    /// For rank `rank` of `ranks` that share the experts.
    pub fn with_expert_ranks(self, ranks: usize, rank: usize) -> Self {
        Self { expert_ranks: (ranks, rank), ..self }
    }

    /// Number of ranks that share the experts: [`Mesh::expert`](gapless_parallel::Mesh::expert).
    pub fn expert_ranks(&self) -> usize {
        self.expert_ranks.0
    }

    /// A parameter [experts, ..] of which each expert rank has its equal share of the experts, normal with standard deviation
    /// 0.02: [experts ÷ ranks, ..].
    ///
    /// # Errors
    /// When the ranks do not divide the experts, or the name was used with another shape.
    pub fn get_share(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        let whole = Spec { shape: shape.into(), dtype: self.dtype };
        let (ranks, _) = self.expert_ranks;
        let Some(experts) = whole.dims().first().copied().filter(|experts| experts.is_multiple_of(ranks)) else {
            let why = format!("{ranks} expert ranks cannot share {:?} of {:?} equally", whole.dims(), self.full(name));
            return Err(Error::config("mesh.expert", why, "choose a divisor of the number of experts"));
        };
        if ranks == 1 || experts == 0 {
            return self.get(whole.shape, name);
        }
        let init = Init::Randn { mean: 0.0, stdev: 0.02 };
        let name = self.full(name);
        let mut graph = lock(&self.graph);
        let id = graph.add_share(&name, whole, init, self.expert_ranks)?;
        self.freeze(&mut graph, &name, id);
        drop(graph);
        Ok(Tensor::of(&self.graph, id))
    }

    /// The builder one level down.
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { path: self.full(&name.to_string()), ..self.clone() }
    }

    /// The path so far, e.g. `h.3`: what [`Tensor::enter`] takes.
    pub fn prefix(&self) -> &str {
        &self.path
    }

    /// Where tensors beside the parameters are made.
    pub fn device(&self) -> &Device {
        &self.graph
    }

    /// The type of the parameters: `TrainOptions::dtype`.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A parameter, normal with standard deviation 0.02. The same name gives the same parameter.
    ///
    /// # Errors
    /// When the name was used with another shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.02 })
    }

    /// A parameter with its own initial values.
    ///
    /// # Errors
    /// When the name was used with another shape.
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

    /// A parameter that changes by a rule of its own, whatever the optimizer is: what its operation sends as a gradient need
    /// not be one, and has no part in the norm of all gradients.
    ///
    /// # Errors
    /// When the name was used with another shape.
    pub fn get_with_rule(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        init: Init,
        rule: impl Into<Arc<dyn Optimizer>>,
    ) -> Result<Tensor> {
        let tensor = self.get_with_hints(shape, name, init)?;
        lock(&self.graph).set_rule(tensor.id(), rule.into());
        Ok(tensor)
    }

    fn full(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }
}
