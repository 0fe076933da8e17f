//! The update of a step: the loss and the norm on every rank, and the update of every parameter on the ranks that own
//! it.
//!
//! If several ranks share the batch, each parameter is updated in parts, as in ZeRO stage 1 (Rajbhandari et al., arXiv
//! 1910.02054, section 5). A reduce-scatter sums the gradient, each rank updates its part of the parameter with the
//! same part of the optimizer states, and an all-gather completes the parameter. A parameter that is too small, or that
//! cannot be divided as the optimizer requires, is not split: its gradient is summed by an all-reduce, and every rank
//! updates the whole parameter.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::Role;
use gapless_graph::nn::{Init, names};
use gapless_graph::ops::{Collective, Contiguous};
use gapless_graph::optim::{
    GlobalNorm, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, SquaredNorms, State, StateInit, WeightAverage,
};
use gapless_graph::{Error, Result};
use gapless_graph::{LossPart, Place, Spec, Tensor, ValueId, Window};
use gapless_parallel::{Axes, Coordinate, Mesh, StageId};

use super::record::{Held, Trace};
use super::{LIMITS_INPUT, RankPlan, StepOptions};

/// A parameter, with this rank's gradient of it.
#[derive(Debug, Clone)]
pub(super) struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    /// Extents of the whole parameter.
    pub dims: Vec<usize>,
    /// Whether it is a table whose rows are looked up by ids.
    pub looked_up: bool,
    /// The gradient, summed over this rank's micro-batches. If shard ranks divide the parameter ([`Held::divided`]), this
    /// rank's part of the sum over these ranks.
    pub gradient: Tensor,
    /// The stage whose ranks update the parameter.
    pub owner: StageId,
}

/// A parameter whose parts would have fewer elements than this is not split.
pub(super) const SMALLEST_PART: usize = 256;

pub(super) struct Update<'a> {
    pub trace: &'a Trace,
    pub plan: &'a RankPlan,
    pub options: &'a StepOptions,
    pub held: &'a Held,
}

/// The part of a parameter that this rank updates, which may be the whole.
struct UpdateTarget<'a> {
    parameter: &'a Parameter,
    info: ParameterInfo<'a>,
    gradient: Tensor,
    part: Ownership,
    rule: Arc<dyn Optimizer>,
    /// Index of the group whose scalars the update rule reads.
    group: usize,
    /// Whether the rule of this parameter is set by the model itself.
    is_own: bool,
}

/// The inputs that all updates of a step share.
struct Inputs {
    norm: Tensor,
    /// The scalars of each group.
    scalars: Vec<Tensor>,
}

/// The part of a parameter that a rank holds, and the part that the rank updates. Along axes that are in neither set, all
/// ranks hold and update the same elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ownership {
    /// The axes along which each rank holds another part of the parameter.
    held: Axes,
    /// The axes along which each rank updates another part of what it holds.
    updated: Axes,
}

impl Ownership {
    const WHOLE: Self = Self { held: Axes::NONE, updated: Axes::NONE };

    /// Returns the axes along which each rank updates another part of the parameter.
    fn axes(self) -> Axes {
        self.held | self.updated
    }
}

/// Roles of the states that an update declares.
type Roles = HashMap<ValueId, Role>;

/// The tensors that the ranks of the mesh keep between steps, as a checkpoint stores them.
#[derive(Debug, Clone, Default)]
pub struct CheckpointLayout {
    /// Extents of every parameter and state, by name.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// The stage that owns each tensor that an update changes.
    pub stages: BTreeMap<String, StageId>,
    /// Tensors that no update changes, with the number of the model's weights that each stores.
    pub frozen: BTreeMap<String, u64>,
    /// For each tensor of which this rank has only a part: that part.
    pub parts: HashMap<String, Shard>,
    /// States that are initialized with the value of their parameter (masters and averages), by the parameter's name.
    pub copies: HashMap<String, Vec<String>>,
}

impl CheckpointLayout {
    /// True if the rank at a coordinate is the first of those with the same part of a tensor, or with the whole tensor.
    pub fn is_first_copy(&self, name: &str, mesh: Mesh, at: Coordinate) -> bool {
        self.parts.get(name).map_or_else(|| is_first_copy(mesh, at, Axes::NONE), |part| part.is_first_copy)
    }

    /// Returns the number of the model's weights that no update changes.
    pub fn frozen_elements(&self) -> u64 {
        self.frozen.values().sum()
    }
}

/// The part of a tensor that a rank keeps.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The elements of the part.
    pub window: Window,
    /// Whether this rank is the first of the ranks that have this part.
    pub is_first_copy: bool,
}

/// True if the rank at a coordinate is the first of those that keep the same part of a tensor of its stage, if along `axes`,
/// each rank keeps another part.
fn is_first_copy(mesh: Mesh, at: Coordinate, axes: Axes) -> bool {
    mesh.color(at, axes | Axes::PIPELINE) == 0
}

/// The result of recording an update.
pub(super) struct Recorded {
    /// The norm of all gradients.
    pub norm: Tensor,
    pub roles: Roles,
    pub layout: CheckpointLayout,
}

impl Update<'_> {
    /// Returns the loss of the whole batch. `loss` is the sum over this rank's micro-batches, and `share` is the weight
    /// of a micro-batch's loss in the loss of the whole batch.
    pub fn mean_loss(&self, loss: &Tensor, share: f64) -> Result<Tensor> {
        let place = self.trace.lock().place_of(loss.id()).unwrap_or_default();
        self.place(place);
        let mean = loss.affine(share, 0.0)?;
        self.all_reduce(&mean, Axes::BATCH)
    }

    /// Returns one term of the loss of the whole batch, or `None` if the loss has no such term. Each stage adds its own
    /// summands, then every rank adds the sums of the stages.
    pub fn mean_loss_part(&self, part: LossPart, loss: &Tensor, share: f64) -> Result<Option<Tensor>> {
        let mut stages: BTreeMap<Place, Vec<Tensor>> = BTreeMap::new();
        let summands = self.trace.lock().parts_of_loss(loss.id(), part);
        for id in summands {
            let place = self.trace.lock().place_of(id).unwrap_or_default();
            stages.entry(place).or_default().push(self.trace.tensor(id));
        }
        let sum = |summands: Vec<Tensor>| summands.into_iter().map(Ok).reduce(|a, b| a?.add(&b?)).transpose();
        let mut means = Vec::new();
        for (place, summands) in stages {
            self.place(place);
            if let Some(sum) = sum(summands)? {
                means.push(self.all_reduce(&sum.affine(share, 0.0)?, Axes::BATCH)?);
            }
        }
        self.place(Place::Everywhere);
        sum(means)
    }

    /// Returns the sum of a value over all micro-batches and over all ranks that share the batch.
    pub fn total(&self, value: &Tensor) -> Result<Tensor> {
        let place = self.trace.lock().place_of(value.id()).unwrap_or_default();
        self.place(place);
        let [total] = Tensor::apply_op(Contiguous, &[value])?;
        self.all_reduce(&total, Axes::BATCH)
    }

    /// Records the update of all parameters.
    pub fn record(&self, parameters: &[Parameter], loss: &Tensor) -> Result<Recorded> {
        let targets = parameters.iter().map(|p| self.target(p)).collect::<Result<Vec<UpdateTarget<'_>>>>()?;
        self.check_groups(&targets)?;
        let norm = self.norm(&targets, loss)?;
        let inputs = Inputs {
            // If gradients are released early, the updates must not wait for the norm, so they neither clip gradients
            // nor skip the step.
            norm: if self.options.memory.release_gradients {
                loss.constant(0.0, ())
            } else {
                self.guarded(&norm, loss)?
            },
            scalars: {
                let names = self.options.update.scalars_inputs();
                names.iter().map(|name| self.trace.input(name, Spec::f32(SCALARS))).collect::<Result<_>>()?
            },
        };
        let (mut roles, mut layout) = (Roles::new(), CheckpointLayout::default());
        for target in &targets {
            self.update(target, &inputs, &mut roles, &mut layout)?;
        }
        Ok(Recorded { norm, roles, layout })
    }

    /// Records the update of one parameter and its states.
    fn update(
        &self,
        target: &UpdateTarget<'_>,
        inputs: &Inputs,
        roles: &mut Roles,
        layout: &mut CheckpointLayout,
    ) -> Result<()> {
        self.place(Place::Stage(target.parameter.owner));
        let Parameter { name, tensor: here, .. } = target.parameter;
        layout.shapes.insert(name.clone(), target.info.dims.to_vec());
        layout.stages.insert(name.clone(), target.parameter.owner);
        let Ownership { held, updated: split } = target.part;
        let window = self.trace.lock().window(here.id());
        if !window.is_whole() {
            layout.parts.insert(name.clone(), self.kept_part(held, window));
        }
        let mut states = target.rule.states(&target.info);
        let average = self.options.update.average.filter(|_| !target.is_own);
        if average.is_some() {
            let spec = Spec { shape: target.info.dims.into(), dtype: DType::F32 };
            states.push(State { name: "average", spec, init: StateInit::Parameter });
        }
        let states = states.into_iter().map(|state| self.state(target, state, roles, layout));
        let states = states.collect::<Result<Vec<_>>>()?;
        let of_rule = &states[..states.len() - usize::from(average.is_some())];
        let parameter = match target.part {
            Ownership::WHOLE => here.clone(),
            _ if split == Axes::NONE => here.reshape(here.elem_count())?,
            _ => self.shard_of(here, split)?,
        };
        let updated = target.rule.update(ParameterUpdate {
            parameter: &parameter,
            info: target.info,
            part: self.index_of_part(target),
            gradient: &target.gradient,
            states: of_rule,
            norm: &inputs.norm,
            scalars: &inputs.scalars[target.group],
        })?;
        if let Some((decay, average)) = average.zip(states.last()) {
            Tensor::apply_op::<1>(WeightAverage { decay }, &[average, &updated, &inputs.norm])?;
        }
        if split != Axes::NONE {
            let refill = Collective::Refill { axes: split, ranks: self.plan.mesh.size(split) };
            Tensor::apply_op::<1>(refill, &[here, &updated])?;
        }
        Ok(())
    }

    /// Declares this rank's part of a state of a parameter.
    fn state(
        &self,
        target: &UpdateTarget<'_>,
        State { name: kind, spec, init }: State,
        roles: &mut Roles,
        layout: &mut CheckpointLayout,
    ) -> Result<Tensor> {
        let Parameter { name, tensor: here, owner, .. } = target.parameter;
        let state = format!("{kind}/{name}");
        if ![target.info.dtype, DType::F32, DType::U8].contains(&spec.dtype) {
            let (why, remedy) = (format!("state {state} is {:?}", spec.dtype), "keep states in f32 or u8");
            return Err(Error::config("optimizer", why, remedy));
        }
        layout.shapes.insert(state.clone(), spec.dims().to_vec());
        layout.stages.insert(state.clone(), *owner);
        let (own, window) = self.part_of_state(&state, spec, target)?;
        if !window.is_whole() {
            layout.parts.insert(state.clone(), self.kept_part(target.part.axes(), window.clone()));
        }
        let id = match init {
            StateInit::Init(init) => self.trace.lock().add_part(&state, own, init, window)?,
            StateInit::Parameter => {
                let mut graph = self.trace.lock();
                let id = graph.add_part(&state, own, Init::Const(0.0), window)?;
                graph.initialize_from(id, here.id());
                layout.copies.entry(name.clone()).or_default().push(state.clone());
                id
            }
        };
        roles.insert(id, Role::OptimizerState);
        Ok(self.trace.tensor(id))
    }

    /// Checks that every pattern of a group matches a trained parameter.
    fn check_groups(&self, targets: &[UpdateTarget<'_>]) -> Result<()> {
        let is_there = |pattern: &String| targets.iter().any(|target| names(pattern, &target.parameter.name));
        match self.options.update.groups.iter().flat_map(|group| &group.names).find(|pattern| !is_there(pattern)) {
            Some(pattern) => {
                let why = format!("{pattern:?} names no trained parameter of this model");
                Err(Error::config("optimizer.groups", why, "choose from Trainer::parameter_names"))
            }
            None => Ok(()),
        }
    }

    /// Returns the norm, or infinity if the step must be skipped.
    fn guarded(&self, norm: &Tensor, loss: &Tensor) -> Result<Tensor> {
        if !self.options.update.guarded {
            return Ok(norm.clone());
        }
        self.place(Place::Everywhere);
        let limits = self.trace.input(LIMITS_INPUT, Spec::f32(2))?;
        let limit = |index: usize| limits.narrow(0, index, 1)?.reshape(());
        let infinite = norm.constant(f64::INFINITY, ());
        let norm = norm.gt(&limit(1)?)?.where_cond(&infinite, norm)?;
        loss.gt(&limit(0)?)?.where_cond(&infinite, &norm)
    }

    fn target<'p>(&self, parameter: &'p Parameter) -> Result<UpdateTarget<'p>> {
        self.place(Place::Stage(parameter.owner));
        let Parameter { name, tensor, dims, looked_up, .. } = parameter;
        let parameter_info = self.trace.info(tensor, (name, dims), *looked_up, self.options);
        let own = self.trace.lock().optimizer_of(tensor.id()).cloned();
        let (is_own, group) = (own.is_some(), self.options.update.group_of(name));
        let rule = own.unwrap_or_else(|| self.options.rule_of(name).clone());
        let (gradient, part) = self.reduced_gradient(parameter, &parameter_info, &*rule)?;
        let gradient = match self.options.update.max_value.filter(|_| !is_own) {
            Some(most) => gradient.clamp(-most, most)?,
            None => gradient,
        };
        Ok(UpdateTarget { parameter, info: parameter_info, gradient, part, rule, group, is_own })
    }

    /// Sums a parameter's gradient over all ranks that share the batch, and returns the part of the sum that this rank
    /// updates.
    fn reduced_gradient(
        &self,
        Parameter { name, tensor, gradient, .. }: &Parameter,
        info: &ParameterInfo<'_>,
        rule: &dyn Optimizer,
    ) -> Result<(Tensor, Ownership)> {
        let grain = rule.shard_granularity(info);
        let window = self.trace.lock().window(tensor.id());
        let held = self.held.axes(name);
        // The axes along which the gradient is divided further than the parameter.
        let divided = match self.held.divided.contains(name) {
            true => Axes::SHARD & !held,
            false => Axes::NONE,
        };
        if !window.is_whole() {
            // Blocks of the whole parameter's elements are blocks of the part, if each run of elements has whole blocks.
            let divides =
                |grain| window.runs().all(|run| run.start.is_multiple_of(grain) && run.end.is_multiple_of(grain));
            if !grain.is_some_and(divides) {
                let why = format!("it cannot update a part of {}, which {held:?} ranks share", info.name);
                return Err(Error::config("optimizer", why, "use AdamW, or one rank along these axes"));
            }
        }
        // The batch is shared by the ranks that have the same part of the gradient.
        let batch = Axes::BATCH & !(held | divided);
        let ranks = self.plan.mesh.size(batch);
        let part = Ownership { held, updated: batch };
        // The ranks that hold other parts must come to the same answer, so uneven parts are not divided further.
        let is_even = window.elements() * self.plan.mesh.size(held) == info.elements();
        let divides = |grain: usize| is_even && window.elements().is_multiple_of(ranks.saturating_mul(grain));
        let is_large = window.elements() / ranks >= SMALLEST_PART;
        let is_split = divided != Axes::NONE || self.held.is_share(name);
        if ranks > 1 && !is_split && is_large && grain.is_some_and(divides) {
            let [sum] = Tensor::apply_op(Collective::ReduceScatter { axes: batch, ranks }, &[gradient])?;
            let sum = if sum.dims().len() == 1 { sum } else { sum.reshape(sum.elem_count())? };
            return Ok((sum, part));
        }
        let sum = if ranks > 1 { self.all_reduce(&self.own(gradient)?, batch)? } else { gradient.clone() };
        let sum = if held == Axes::NONE { sum } else { sum.reshape(sum.elem_count())? };
        Ok((sum, Ownership { updated: divided, ..part }))
    }

    /// Returns a copy of a gradient. A sum in place needs a tensor of its own, because two parameters may have the same
    /// gradient.
    fn own(&self, gradient: &Tensor) -> Result<Tensor> {
        Tensor::apply_op::<1>(Contiguous, &[gradient]).map(|[own]| own)
    }

    /// Returns the norm of all gradients. Each stage computes the sum of squares of its own gradients, and every rank
    /// adds up the sums of all stages. Parameters whose rule is set by the model are left out.
    fn norm(&self, targets: &[UpdateTarget<'_>], loss: &Tensor) -> Result<Tensor> {
        let mut groups: BTreeMap<(StageId, Ownership, usize), Vec<&Tensor>> = BTreeMap::new();
        for (index, target) in targets.iter().enumerate().filter(|(_, target)| !target.is_own) {
            // If gradients are released early, the squares of each gradient are computed separately.
            let group = if self.options.memory.release_gradients { index } else { 0 };
            groups.entry((target.parameter.owner, target.part, group)).or_default().push(&target.gradient);
        }
        let mut squares = Vec::new();
        for ((owner, part, _), gradients) in groups {
            self.place(Place::Stage(owner));
            let [own] = Tensor::apply_op(SquaredNorms, &gradients)?;
            squares.push(match part {
                Ownership::WHOLE => own,
                _ => {
                    let gather = Collective::AllGather { axes: part.axes(), ranks: self.ranks(part) };
                    Tensor::apply_op::<1>(gather, &[&own]).map(|[all]| all)?
                }
            });
        }
        self.place(Place::Everywhere);
        let [norm] = Tensor::apply_op(GlobalNorm, &squares.iter().collect::<Vec<_>>())?;
        // If the loss is not finite, this makes the norm non-finite, so that the update leaves the model unchanged.
        norm.add(&loss.affine(0.0, 0.0)?)
    }

    /// Returns the part of a parameter that this rank updates.
    fn updated(&self, target: &UpdateTarget<'_>) -> Window {
        let window = self.trace.lock().window(target.parameter.tensor.id());
        window.range(self.own_range(window.elements(), target.part.updated))
    }

    /// Returns the index of the part that this rank updates among equal parts of the flattened parameter, or `None` if it
    /// is not such a part.
    fn index_of_part(&self, target: &UpdateTarget<'_>) -> Option<usize> {
        let window = self.updated(target);
        let mut runs = window.runs();
        let run = runs.next().filter(|run| run.len() == window.elements() && run.start.is_multiple_of(run.len()))?;
        target.info.elements().is_multiple_of(run.len()).then_some(run.start / run.len())
    }

    /// Returns the shape, the type and the window of this rank's part of a state.
    fn part_of_state(&self, name: &str, whole: Spec, target: &UpdateTarget<'_>) -> Result<(Spec, Window)> {
        let Some(window) = self.updated(target).scaled(whole.dims()) else {
            let ranks = self.ranks(target.part);
            let why = format!("{name} has {} elements, which {ranks} ranks cannot share equally", whole.elements());
            let remedy = "let Optimizer::shard_granularity return the elements of a part, or None";
            return Err(Error::config("optimizer", why, remedy));
        };
        let own = if window.is_whole() { whole } else { whole.in_shape(window.elements()) };
        Ok((own, window))
    }

    /// Returns a copy of the part of a tensor that this rank updates, if each rank along these axes updates another part.
    fn shard_of(&self, whole: &Tensor, axes: Axes) -> Result<Tensor> {
        let own = self.own_range(whole.elem_count(), axes);
        let view = whole.reshape(whole.elem_count())?.narrow(0, own.start, own.len())?;
        self.own(&view)
    }

    /// Returns this rank's range of elements, if ranks along these axes divide them equally.
    fn own_range(&self, elements: usize, axes: Axes) -> Range<usize> {
        let &RankPlan { mesh, at, .. } = self.plan;
        let (part, index) = (elements / mesh.size(axes), mesh.index(at, axes));
        index * part..(index + 1) * part
    }

    /// Returns the number of ranks among which the update of a parameter is divided.
    fn ranks(&self, part: Ownership) -> usize {
        self.plan.mesh.size(part.axes())
    }

    /// Returns a part of a tensor as a checkpoint stores it. Along `axes`, each rank keeps another part.
    pub fn kept_part(&self, axes: Axes, window: Window) -> Shard {
        let &RankPlan { mesh, at, .. } = self.plan;
        Shard { window, is_first_copy: is_first_copy(mesh, at, axes) }
    }

    /// Sums a value over the ranks of a group, in place. If the group has only one rank, returns the value unchanged.
    fn all_reduce(&self, x: &Tensor, axes: Axes) -> Result<Tensor> {
        if self.plan.mesh.size(axes) == 1 {
            return Ok(x.clone());
        }
        Tensor::apply_op::<1>(Collective::AllReduce { axes }, &[x]).map(|[sum]| sum)
    }

    fn place(&self, place: Place) {
        self.trace.lock().set_place(place);
    }
}
