//! Whether a model is causal, and whether its sequences can be continued with caches.
//!
//! In: the graph of a forward pass of one sequence. Out: the first operation by which a token depends on others in a
//! way that is not allowed. Never: a change of the graph.
//!
//! Every value gets a [`Flow`]: the tokens on which its elements depend, by their index along each dimension. A rule
//! per operation derives the flows of the outputs from those of the inputs. An operation without a rule may depend on
//! all elements of its inputs.

mod flow;
mod rules;

use std::collections::HashSet;
use std::fmt;

use self::flow::Flow;
use self::rules::{Attend, Rules};
use crate::graph::{Graph, Node, ValueId};

/// Whether the logits of a token depend on later tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Causality {
    /// They depend on the token itself and on earlier tokens only.
    Causal,
    /// They depend on later tokens, through this operation.
    NotCausal(Culprit),
    /// The dependence of this operation's outputs on its inputs is not known.
    Unknown(Culprit),
}

/// An operation by which a token depends on other tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Culprit {
    /// Name of the operation.
    pub op: String,
    /// The layer that the operation belongs to; empty outside of layers.
    pub layer: String,
}

impl Culprit {
    fn of(node: &Node) -> Self {
        Self { op: node.op.name().to_owned(), layer: node.layer.to_string() }
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer.as_str() {
            "" => write!(f, "the operation {:?}", self.op),
            layer => write!(f, "the operation {:?} of layer {layer:?}", self.op),
        }
    }
}

/// Returns whether `logits` [1, tokens, vocabulary] are causal in `tokens` [1, tokens]. Both are values of a forward
/// pass over whole sequences.
///
/// Mixtures of experts are assumed to process each token on its own. Experts that choose tokens or drop tokens do not
/// ([`Route`](crate::ops::Route)).
pub fn causality(graph: &Graph, tokens: ValueId, logits: ValueId) -> Causality {
    let walk = Walk::new(graph, tokens, logits, Attend::Past, |flow, _| !flow.is_ahead());
    // A distribution over the vocabulary depends on all logits of a token.
    let mut flow = walk.rules.flow(logits).clone();
    let last = flow.dims.len() - 1;
    flow.fold(last, graph.value(logits).spec.dims()[last]);
    let of_logits = || graph.nodes().iter().rev().find(|node| node.outputs.contains(&logits)).map(Culprit::of);
    match walk.culprit.filter(|_| walk.is_broken).or_else(of_logits) {
        Some(culprit) if flow.is_ahead() && flow.is_guess => Causality::Unknown(culprit),
        Some(culprit) if flow.is_ahead() => Causality::NotCausal(culprit),
        _ => Causality::Causal,
    }
}

/// Returns the first operation by which `logits` [1, tokens, vocabulary] depend on tokens other than their own, except
/// through causal attention over caches. Returns `None` if there is no such operation, so that a sequence can be
/// continued with caches.
///
/// If the graph continues sequences ([`Sequences::Continued`](crate::Sequences::Continued)), an operation that combines tokens with elements that
/// differ by the token's index in the run is such an operation, too. An example is the sum of embeddings and the first
/// rows of a table of positions, because a token's index in a run is not its position in the text.
pub fn cache_obstacle(graph: &Graph, tokens: ValueId, logits: ValueId) -> Option<Culprit> {
    let walk = Walk::new(graph, tokens, logits, Attend::Caches, Flow::is_own);
    let (caches_others, misplaced) = (walk.rules.caches_others, walk.rules.misplaced);
    let of_node = || caches_others.or(misplaced).map(|node| Culprit::of(graph.node(node)));
    walk.culprit.filter(|_| walk.is_broken || caches_others.is_some()).or_else(of_node)
}

/// The flows of all values on which logits depend.
struct Walk<'a> {
    rules: Rules<'a>,
    /// The first operation that breaks the invariant: it holds for all inputs, and not for an output.
    culprit: Option<Culprit>,
    /// True if the invariant does not hold for the logits.
    is_broken: bool,
}

impl<'a> Walk<'a> {
    fn new(
        graph: &'a Graph,
        tokens: ValueId,
        logits: ValueId,
        attend: Attend,
        invariant: impl Fn(&Flow, usize) -> bool,
    ) -> Self {
        let mut needed = HashSet::from([logits]);
        for node in graph.nodes().iter().rev() {
            if node.outputs.iter().any(|output| needed.contains(output)) {
                needed.extend(&node.inputs);
            }
        }
        let count = graph.value(tokens).spec.elements();
        let mut rules = Rules::new(graph, count, attend);
        let mut culprit = None;
        for id in graph.node_ids() {
            let node = graph.node(id);
            if !node.outputs.iter().any(|output| needed.contains(output)) {
                continue;
            }
            rules.apply(id);
            let holds = |ids: &[ValueId]| ids.iter().all(|&id| invariant(rules.flow(id), count));
            if culprit.is_none() && !holds(&node.outputs) && holds(&node.inputs) {
                culprit = Some(Culprit::of(node));
            }
        }
        let is_broken = !invariant(rules.flow(logits), count);
        Self { rules, culprit, is_broken }
    }
}

#[cfg(test)]
mod tests;
