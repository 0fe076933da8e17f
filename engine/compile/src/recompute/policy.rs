//! Recomputation policies as users write them, and the resolution of a policy against a graph.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use gapless_graph::{Graph, Node, Phase, Spec, ValueId};
use gapless_parallel::{Action, Kind, Rates};

use super::block::blocks;
use super::budget::{Budget, first_backward, in_flight};
use super::{RematPlan, SavedActivations, StorageOptions, Variant};
use crate::error::{Error, Result};

/// A policy: the forward values that a micro-batch recomputes in its backward instead of keeping them.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Recompute {
    /// Everything is kept.
    #[default]
    None,
    /// Only the results of these layers are kept, and everything inside a layer is recomputed (full recomputation). A
    /// layer is a part of the model whose name ends in a number, e.g. `h.3` or `model.layers.7`.
    Layers(Layers),
    /// The results of these operations are recomputed (selective recomputation). Operations have the names that
    /// profiles and memory maps use, e.g. `layer_norm`, `gelu`, `swiglu`.
    Ops(Vec<String>),
    /// Micro-batch m uses policy m mod n of these n policies. If one of the policies is `None`, and n micro-batches
    /// are in flight, this is Megatron's partial checkpointing.
    Cycle(Vec<Recompute>),
    /// The values chosen by a policy of your own are recomputed.
    Custom(CustomPolicy),
}

/// Decides which of the values that a backward reads are dropped and recomputed.
pub trait RecomputePolicy: fmt::Debug + Send + Sync {
    /// Returns true if a value of this shape and type, computed by the forward node `maker`, is to be recomputed. The
    /// method is called for every value that can be recomputed, in the order in which the values are computed. It must
    /// always return the same result for the same value.
    fn drops(&self, value: &Spec, maker: &Node) -> bool;
}

/// A user's policy. Two such policies are equal only if one is a clone of the other.
#[derive(Debug, Clone)]
pub struct CustomPolicy(pub Arc<dyn RecomputePolicy>);

/// The policies that the program added with [`Recompute::register`], by name.
static ADDED: RwLock<Vec<(String, CustomPolicy)>> = RwLock::new(Vec::new());

impl Recompute {
    /// Gives a policy a name, which run files and sweeps can then use for `memory.recompute`. Returns the policy.
    ///
    /// # Errors
    /// Returns an error if the name already means a policy.
    pub fn register(name: &str, policy: impl RecomputePolicy + 'static) -> Result<Self> {
        // Two threads that register the same name must not both find it free.
        let mut added = ADDED.write().unwrap_or_else(PoisonError::into_inner);
        if Self::built_in(name).is_some() || added.iter().any(|(other, _)| other == name) {
            let why = format!("{name:?} already means a policy");
            return Err(Error::config("memory.recompute", why, "register the policy under another name"));
        }
        let policy = CustomPolicy(Arc::new(policy));
        added.push((name.to_owned(), policy.clone()));
        Ok(Self::Custom(policy))
    }

    /// Parses a policy that needs no registration. Returns `None` if the text names none.
    fn built_in(text: &str) -> Option<Self> {
        let names = |names: &str| names.split(',').map(str::to_owned).collect();
        match text.split_once(':') {
            None if text == "none" => Some(Self::None),
            None if text == "layers" => Some(Self::Layers(Layers::All)),
            Some(("layers", layers)) => Some(Self::Layers(Layers::Named(names(layers)))),
            Some(("ops", ops)) => Some(Self::Ops(names(ops))),
            Some(("first", count)) => Some(Self::Layers(Layers::First(count.parse().ok()?))),
            _ => None,
        }
    }
}

impl PartialEq for CustomPolicy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Formats the policy as [`FromStr`] parses it. A policy that cannot be parsed from text is formatted with `Debug`.
impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Layers(Layers::All) => f.write_str("layers"),
            Self::Layers(Layers::First(count)) => write!(f, "first:{count}"),
            Self::Layers(Layers::Named(names)) => write!(f, "layers:{}", names.join(",")),
            Self::Ops(names) => write!(f, "ops:{}", names.join(",")),
            Self::Custom(policy) => {
                let added = ADDED.read().unwrap_or_else(PoisonError::into_inner);
                match added.iter().find(|(_, other)| other == policy) {
                    Some((name, _)) => f.write_str(name),
                    None => write!(f, "{policy:?}"),
                }
            }
            Self::Cycle(_) => write!(f, "{self:?}"),
        }
    }
}

/// Parses `none`, `layers` (all layers), `first:8`, `layers:h.3,h.7`, `ops:layer_norm,gelu`, or the name of a registered
/// policy.
impl FromStr for Recompute {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(policy) = Self::built_in(text) {
            return Ok(policy);
        }
        let added = ADDED.read().unwrap_or_else(PoisonError::into_inner);
        let found = added.iter().find(|(name, _)| name == text).map(|(_, policy)| policy.clone());
        found.map(Self::Custom).ok_or_else(|| {
            Error::config(
                "memory.recompute",
                format!("{text:?} is not a policy"),
                "use none, layers, first:8, layers:h.3,h.7, ops:layer_norm,gelu, or the name of a registered policy",
            )
        })
    }
}

/// A selection of layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layers {
    /// All layers.
    All,
    /// The first N layers.
    First(usize),
    /// The layers with these names.
    Named(Vec<String>),
}

/// The context in which a policy is resolved.
pub struct Resolving<'a> {
    /// The graph of a whole step.
    pub graph: &'a Graph,
    /// By node of the graph: whether it runs.
    pub alive: &'a [bool],
    /// The actions of this rank.
    pub row: &'a [Action],
    /// The activations that are compressed or offloaded.
    pub stashing: StorageOptions<'a>,
    /// Whether values that are recomputed for the input gradients of a split backward may be freed after the input
    /// gradients, and recomputed once more for the weight gradients.
    pub can_be_twice: bool,
}

impl Resolving<'_> {
    /// Resolves a policy. If there is a budget, ignores the policy and searches for the fastest recomputation that fits
    /// the budget. [`Budget::fit`] describes `place`, under the name `plan_size`.
    ///
    /// # Errors
    /// Returns an error if the model has no layer or operation with a name in the policy, or if a cycle is empty or
    /// nested. Returns [`Error::OverBudget`] if nothing fits the budget.
    pub fn resolve(
        &self,
        policy: &Recompute,
        budget: Option<(u64, Rates)>,
        place: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<RematPlan> {
        let saved = match budget {
            Some(_) => SavedActivations::new(self.graph, self.alive),
            None => SavedActivations::repeating_collectives(self.graph, self.alive),
        };
        let stash = self.stashing.resolve(&saved)?;
        let saved = saved.stashing(stash);
        if let Some((bytes, rates)) = budget {
            return self.fit(&saved, bytes, &rates, place);
        }
        match policy {
            Recompute::Cycle(policies) if policies.is_empty() => Err(config("a cycle has no policies".into())),
            Recompute::Cycle(policies) => self.cycle(&saved, policies),
            one => Ok(RematPlan::uniform(self.variant(&saved, one)?)),
        }
    }

    fn fit(
        &self,
        saved: &SavedActivations<'_>,
        bytes: u64,
        rates: &Rates,
        place: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<RematPlan> {
        let in_flight = in_flight(self.row);
        let is_split = self.can_be_twice && self.row.iter().any(|action| action.kind == Kind::BackwardInput);
        let mut blocks = blocks(self.graph, self.alive, saved, is_split, |node| self.nanoseconds(node, rates));
        blocks.retain(|block| in_flight.contains_key(&block.place));
        Budget { bytes, saved, blocks: &blocks, in_flight, first_backward: first_backward(self.row) }.fit(place)
    }

    fn nanoseconds(&self, node: &Node, rates: &Rates) -> u64 {
        let (inputs, outputs) = (self.graph.specs(&node.inputs), self.graph.specs(&node.outputs));
        rates.nanoseconds(node.op.flops(&inputs, &outputs), node.op.bytes_moved(&inputs, &outputs))
    }

    fn cycle(&self, saved: &SavedActivations<'_>, policies: &[Recompute]) -> Result<RematPlan> {
        let mut recomputation = RematPlan::default();
        let mut known: Vec<&Recompute> = Vec::new();
        for policy in policies {
            let variant = known.iter().position(|other| *other == policy);
            recomputation.cycle.push(variant.unwrap_or(known.len()));
            if variant.is_none() {
                known.push(policy);
                recomputation.variants.push(self.variant(saved, policy)?);
            }
        }
        Ok(recomputation)
    }

    fn variant(&self, saved: &SavedActivations<'_>, policy: &Recompute) -> Result<Variant> {
        match policy {
            Recompute::None => Ok(saved.dropping([])),
            Recompute::Layers(layers) => {
                let layers = select(&layers_of(self.graph), layers)?;
                let inside = |root: &ValueId| {
                    let block = block_of(&saved.maker(*root).layer);
                    block.is_some_and(|block| layers.contains(block)) && !saved.leaves_layer(*root)
                };
                Ok(saved.dropping(saved.roots().iter().copied().filter(inside)))
            }
            Recompute::Ops(names) => {
                let made_by: BTreeSet<&str> = saved.roots().iter().map(|&root| saved.maker(root).op.name()).collect();
                if let Some(name) = names.iter().find(|name| !made_by.contains(name.as_str())) {
                    let there = made_by.into_iter().collect::<Vec<_>>().join(", ");
                    return Err(config(format!(
                        "the backward reads no result of {name:?}; it reads results of {there}"
                    )));
                }
                let named = |root: &ValueId| names.iter().any(|name| name == saved.maker(*root).op.name());
                Ok(saved.dropping(saved.roots().iter().copied().filter(named)))
            }
            Recompute::Custom(policy) => {
                let is_dropped = |root: &ValueId| policy.0.drops(saved.spec(*root), saved.maker(*root));
                Ok(saved.dropping(saved.roots().iter().copied().filter(is_dropped)))
            }
            Recompute::Cycle(_) => Err(config("a cycle contains another cycle".into())),
        }
    }
}

pub(super) fn config(why: String) -> Error {
    Error::config("memory.recompute", why, "choose another policy, or names from the memory map")
}

/// Returns the layer to which a node belongs: the shortest prefix of the name that ends in a number. Returns `None` if
/// there is no such prefix.
pub fn block_of(layer: &str) -> Option<&str> {
    let mut end = 0;
    for part in layer.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&layer[..end]);
        }
        end += 1;
    }
    None
}

/// Returns the layers of a model, in the order in which they run.
pub(crate) fn layers_of(graph: &Graph) -> Vec<&str> {
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate().filter(|(_, node)| node.phase == Phase::Forward) {
        if let Some(block) = block_of(&node.layer) {
            first.entry(block).or_insert(index);
        }
    }
    let mut blocks: Vec<&str> = first.keys().copied().collect();
    blocks.sort_by_key(|block| first[block]);
    blocks
}

fn select<'g>(blocks: &[&'g str], layers: &Layers) -> Result<BTreeSet<&'g str>> {
    if blocks.is_empty() {
        return Err(config("the model has no layers with a number in their name".into()));
    }
    match layers {
        Layers::All => Ok(blocks.iter().copied().collect()),
        Layers::First(count) => Ok(blocks.iter().copied().take(*count).collect()),
        Layers::Named(names) => {
            let find = |name: &String| {
                let block = blocks.iter().copied().find(|block| block == name);
                block.ok_or_else(|| {
                    config(format!("the model has no layer {name:?}; its layers are {}", blocks.join(", ")))
                })
            };
            names.iter().map(find).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;

    impl RecomputePolicy for Nothing {
        fn drops(&self, _: &Spec, _: &Node) -> bool {
            false
        }
    }

    /// One of several threads that register the same name at once succeeds.
    #[test]
    fn a_name_is_registered_once() {
        let register = || std::thread::spawn(|| Recompute::register("registered-once", Nothing).is_ok());
        let threads: Vec<_> = (0..16).map(|_| register()).collect();
        let registered: Vec<bool> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(registered.iter().filter(|&&is_registered| is_registered).count(), 1);
        assert!(Recompute::register("first:2", Nothing).is_err());
        assert!(matches!("registered-once".parse(), Ok(Recompute::Custom(_))));
    }

    #[test]
    fn a_layer_is_named_up_to_its_number() {
        for (name, block) in [
            ("h.3.attn.c_attn", Some("h.3")),
            ("h.3", Some("h.3")),
            ("model.layers.17.mlp", Some("model.layers.17")),
            ("wte", None),
            ("", None),
            ("h2.x", None),
        ] {
            assert_eq!(block_of(name), block, "{name:?}");
        }
    }
}
