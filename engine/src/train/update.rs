//! The update part of a step: loss and norm for everyone, every parameter changed by whoever owns it.
//!
//! With several data ranks the gradient of a parameter is summed over them in parts (reduce-scatter), each rank updates its
//! part with its part of the optimizer's states, and the parts are brought together again (all-gather): ZeRO stage 1
//! (Rajbhandari et al., arXiv 1910.02054, section 5). Parameters that do not divide as the optimizer needs it, or are too
//! small to be worth it, are summed and updated whole by all.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::Role;
use gapless_parallel::StageId;

use super::Model;
use super::compile_step::{SCALARS_INPUT, Trace};
use crate::error::{Error, Result};
use crate::graph::{Place, Spec, Tensor, ValueId};
use crate::ops::{Collective, Contiguous};
use crate::optim::{GlobalNorm, Optimizer, ParameterUpdate, SCALARS, SquaredNorms, State, Updated};

/// A parameter with the gradient that this rank has of it.
pub(super) struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    /// Summed over this rank's micro-batches.
    pub gradient: Tensor,
    /// The stage whose ranks update it.
    pub owner: StageId,
}

/// Elements per rank below which a parameter is updated whole.
const SMALLEST_PART: usize = 256;

pub(super) struct Update<'a, M> {
    pub trace: &'a Trace<M>,
    /// Data ranks.
    pub ranks: usize,
    pub data_rank: usize,
    /// Whether each parameter is updated as soon as its gradient is complete.
    pub release: bool,
}

/// What there is to update on this rank: a parameter, or its part of it.
struct Target<'a> {
    parameter: &'a Parameter,
    of: Updated<'a>,
    gradient: Tensor,
    sharded: bool,
    /// Its own rule, in the optimizer's place.
    rule: Option<Arc<dyn Optimizer>>,
}

/// Roles of the states that an update declares.
type Roles = HashMap<ValueId, Role>;

/// What the whole mesh keeps between steps.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Extents of every parameter and state, by name.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Those that no update changes.
    pub frozen: BTreeSet<String>,
    /// The first element of those of which this rank has only a part.
    pub parts: HashMap<String, usize>,
}

/// What recording an update gives.
pub(super) struct Recorded {
    /// The norm of all gradients.
    pub norm: Tensor,
    pub roles: Roles,
    pub kept: Kept,
}

impl<M: Model> Update<'_, M> {
    /// The loss of the whole batch, from the sum over this rank's micro-batches.
    pub fn mean_loss(&self, loss: &Tensor, share: f64) -> Result<Tensor> {
        let place = self.trace.lock().place_of(loss.id()).unwrap_or_default();
        self.place(place);
        let mean = loss.affine(share, 0.0)?;
        if self.ranks == 1 { Ok(mean) } else { self.all_reduce(&mean) }
    }

    /// What a value of every micro-batch is in all, for whoever trains.
    pub fn total(&self, value: &Tensor) -> Result<Tensor> {
        let place = self.trace.lock().place_of(value.id()).unwrap_or_default();
        self.place(place);
        let [total] = Tensor::apply_op(Contiguous, &[value])?;
        if self.ranks == 1 { Ok(total) } else { self.all_reduce(&total) }
    }

    /// Records the update of all parameters.
    pub fn record(&self, parameters: &[Parameter], loss: &Tensor, optimizer: &dyn Optimizer) -> Result<Recorded> {
        let looked_up = self.trace.looked_up();
        let target = |p| self.target(p, &looked_up, optimizer);
        let targets = parameters.iter().map(target).collect::<Result<Vec<Target<'_>>>>()?;
        let norm = self.norm(&targets, loss)?;
        // Nothing to wait for: neither clipped nor left out.
        let clip = if self.release { loss.constant(0.0, ()) } else { norm.clone() };
        let scalars = self.trace.input(SCALARS_INPUT, Spec::f32(SCALARS))?;
        let (mut roles, mut kept) = (Roles::new(), Kept::default());
        for target in &targets {
            self.place(Place::Stage(target.parameter.owner));
            let Parameter { name, tensor: whole, .. } = target.parameter;
            kept.shapes.insert(name.clone(), whole.dims().to_vec());
            let mut states = Vec::new();
            let optimizer = target.rule.as_deref().unwrap_or(optimizer);
            for State { name: kind, spec, init } in optimizer.states(&target.of) {
                let state = format!("{kind}/{name}");
                if ![target.of.dtype, DType::F32, DType::U8].contains(&spec.dtype) {
                    let (why, remedy) = (format!("{state} is {:?}", spec.dtype), "keep states in f32 or u8");
                    return Err(Error::Config { what: "optimizer", why, remedy });
                }
                kept.shapes.insert(state.clone(), spec.dims().to_vec());
                let own = if target.sharded { self.part_of_state(&state, &spec)? } else { spec };
                if target.sharded {
                    kept.parts.insert(state.clone(), self.data_rank * own.elements());
                }
                let id = self.trace.lock().add_persistent(&state, own, init)?;
                roles.insert(id, Role::OptimizerState);
                states.push(self.trace.tensor(id));
            }
            let parameter = if target.sharded { self.part_of(whole)? } else { whole.clone() };
            let updated = optimizer.update(ParameterUpdate {
                parameter: &parameter,
                of: target.of,
                gradient: &target.gradient,
                states: &states,
                norm: &clip,
                scalars: &scalars,
            })?;
            if target.sharded {
                Tensor::apply_op::<1>(Collective::Refill { ranks: self.ranks }, &[whole, &updated])?;
            }
        }
        Ok(Recorded { norm, roles, kept })
    }

    fn target<'p>(
        &self,
        parameter: &'p Parameter,
        looked_up: &HashSet<ValueId>,
        optimizer: &dyn Optimizer,
    ) -> Result<Target<'p>> {
        self.place(Place::Stage(parameter.owner));
        let Parameter { name, tensor, gradient, .. } = parameter;
        let of =
            Updated { name, dims: tensor.dims(), dtype: tensor.dtype(), looked_up: looked_up.contains(&tensor.id()) };
        let rule = self.trace.lock().rule(tensor.id()).cloned();
        let optimizer = rule.as_deref().unwrap_or(optimizer);
        let divides = |grain: usize| of.elements().is_multiple_of(self.ranks.saturating_mul(grain));
        let sharded =
            self.ranks > 1 && optimizer.grain(&of).is_some_and(divides) && of.elements() / self.ranks >= SMALLEST_PART;
        let gradient = match (self.ranks, sharded) {
            (1, _) => gradient.clone(),
            (_, false) => {
                // Summed in place, so in a copy: two parameters may have one gradient.
                let [own] = Tensor::apply_op(Contiguous, &[gradient])?;
                self.all_reduce(&own)?
            }
            (ranks, true) => {
                let [part] = Tensor::apply_op(Collective::ReduceScatter { ranks }, &[gradient])?;
                part
            }
        };
        Ok(Target { parameter, of, gradient, sharded, rule })
    }

    /// The norm of all gradients: each stage squares its own, and everyone adds up. What changes by a rule of its own has none.
    fn norm(&self, targets: &[Target<'_>], loss: &Tensor) -> Result<Tensor> {
        let mut groups: BTreeMap<(StageId, bool, usize), Vec<&Tensor>> = BTreeMap::new();
        for (index, target) in targets.iter().enumerate().filter(|(_, target)| target.rule.is_none()) {
            // A gradient that is let go of is squared by itself.
            let group = if self.release { index } else { 0 };
            groups.entry((target.parameter.owner, target.sharded, group)).or_default().push(&target.gradient);
        }
        let mut squares = Vec::new();
        for ((owner, sharded, _), gradients) in groups {
            self.place(Place::Stage(owner));
            let [own] = Tensor::apply_op(SquaredNorms, &gradients)?;
            squares.push(match sharded {
                true => Tensor::apply_op::<1>(Collective::AllGather { ranks: self.ranks }, &[&own])?[0].clone(),
                false => own,
            });
        }
        self.place(Place::Everywhere);
        let [norm] = Tensor::apply_op(GlobalNorm, &squares.iter().collect::<Vec<_>>())?;
        // A loss that is not finite makes the norm not finite, and the update then leaves the model alone.
        norm.add(&loss.affine(0.0, 0.0)?)
    }

    /// This rank's flat part of a state.
    fn part_of_state(&self, name: &str, whole: &Spec) -> Result<Spec> {
        if !whole.elements().is_multiple_of(self.ranks) {
            let why = format!("{name}, of {} elements, does not divide into {} parts", whole.elements(), self.ranks);
            let remedy = "let Optimizer::grain say into which parts its states divide, or None for no parts";
            return Err(Error::Config { what: "optimizer", why, remedy });
        }
        Ok(Spec { shape: (whole.elements() / self.ranks).into(), dtype: whole.dtype })
    }

    /// A copy of this rank's part of a parameter.
    fn part_of(&self, whole: &Tensor) -> Result<Tensor> {
        let part = whole.elem_count() / self.ranks;
        let view = whole.reshape(whole.elem_count())?.narrow(0, self.data_rank * part, part)?;
        let [copy] = Tensor::apply_op(Contiguous, &[&view])?;
        Ok(copy)
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        let [sum] = Tensor::apply_op(Collective::AllReduce, &[x])?;
        Ok(sum)
    }

    fn place(&self, place: Place) {
        self.trace.lock().set_place(place);
    }
}
