//! Experts on the rows of a rank's own tokens.
//!
//! In: nodes that route tokens, or that read rows. Out: the same nodes on the rank's own tokens and rows. A routing without
//! a capacity treats each token on its own. A capacity counts the choices of whole sequences: then every rank routes all
//! tokens, of which it gathers the choices and no more, and gives rows to those of its own choices that were not dropped.
//! Never: an exchange of rows; the only one is that which the model records for ranks with other experts.

use std::any::Any;
use std::sync::Arc;

use gapless_kernels::Window;

use super::dims::{Dim, Part};
use super::{Pass, State};
use crate::error::{Error, Result};
use crate::graph::{Node, NodeId, ValueId};
use crate::op::Op;
use crate::ops::{Chooses, Collective, Route, RouteKept};

/// The indices of the outputs of a routing.
const PLACES: usize = 0;
const SLOTS: usize = 1;
const STARTS: usize = 2;

/// True if an operation assigns rows to tokens.
pub fn routes(op: &dyn Op) -> bool {
    let op: &dyn Any = op;
    op.is::<Route>() || op.is::<RouteKept>()
}

impl Pass<'_> {
    /// True if a node runs on the rank's own tokens or rows.
    pub(super) fn is_own(&self, id: NodeId) -> bool {
        let node = self.old.node(id);
        // A routing of all tokens, of which only the dropped choices are read, stays as it is.
        let routes_own = || {
            let is_divided = self.sharing.folds || self.sharing.divides_tokens();
            is_divided && routes(&*node.op) && self.readers.contains_key(&node.outputs[SLOTS])
        };
        node.inputs.iter().any(|input| self.states[input].is_own) || routes_own()
    }

    /// Rebuilds a node on the rank's own tokens and rows.
    pub(super) fn own_node(&mut self, id: NodeId) -> Result<()> {
        let node = self.old.node(id);
        let rows = self.rows.filter(|&rows| !routes(&*node.op) || self.has_all(rows, node.outputs[PLACES]));
        let Some(rows) = rows else {
            let why = "a mixture routes something other than the model's tokens";
            return Err(Error::config("mesh", why, "use one context rank, and leave mesh.fold out"));
        };
        let outputs = match routes(&*node.op) {
            true => self.route(node, rows)?,
            false => self.on_own_rows(node, rows)?,
        };
        let sums: Vec<bool> = node.outputs.iter().map(|&output| self.sums_rows(node, output)).collect();
        for ((&output, id), sums) in node.outputs.iter().zip(outputs).zip(sums) {
            let state = match sums {
                _ if self.has_all(rows, output) => State::part(id, Some(rows)),
                // The rows of an expert come from all ranks if each of them has other experts.
                true if !self.sharing.folds => State::summand(id),
                _ => State::own(id),
            };
            self.set(output, state);
        }
        self.resolve(node)
    }

    /// Gives rows to the rank's own tokens.
    fn route(&mut self, node: &Node, rows: usize) -> Result<Vec<ValueId>> {
        let op: &dyn Any = &*node.op;
        let [places, slots] = [PLACES, SLOTS].map(|output| node.outputs[output]);
        let most = self.most_rows(node, rows);
        let outputs = match (op.downcast_ref::<Route>(), op.downcast_ref::<RouteKept>()) {
            (Some(&Route { experts, chooses, capacity: Some(_) }), _) => {
                let all = self.bring_all(node, None)?;
                let all = self.apply(node, node.op.clone(), &all)?[PLACES];
                let kept = self.slice(all, places, rows, node)?;
                let mut inputs = vec![kept];
                if chooses == Chooses::Tokens {
                    inputs.push(self.bring(node.inputs[0], Some(rows), node)?);
                }
                self.apply(node, Arc::new(RouteKept { experts, chooses, rows: most }), &inputs)?
            }
            (_, kept) => {
                let inputs = self.bring_all(node, Some(rows))?;
                let op = kept.map(|kept| Arc::new(RouteKept { rows: most, ..*kept }) as Arc<dyn Op>);
                self.apply(node, op.unwrap_or_else(|| node.op.clone()), &inputs)?
            }
        };
        let most = self.new.value(outputs[SLOTS]).spec.elements();
        self.set_own_rows(slots, most)?;
        self.sent.insert(node.outputs[STARTS], most);
        Ok(outputs)
    }

    /// Returns the parts of a node's inputs that it reads when it runs along a cut.
    fn bring_all(&mut self, node: &Node, cut: Option<usize>) -> Result<Vec<ValueId>> {
        node.inputs.iter().map(|&input| self.bring(input, cut, node)).collect()
    }

    /// Returns the maximum number of rows of the rank's own tokens.
    fn most_rows(&self, node: &Node, rows: usize) -> usize {
        let own = self.windows_of_ranks(node.outputs[PLACES], rows).map(|window| window.elements());
        let most = own.max().unwrap_or(0);
        self.old.value(node.outputs[SLOTS]).spec.elements().min(most)
    }

    /// Sets the maximum number of rows of a rank's own tokens, of which a value of the old graph has all.
    fn set_own_rows(&mut self, value: ValueId, rows: usize) -> Result<()> {
        let dim = self.analysis.shapes[value.index()][0];
        let leaves: Vec<Dim> = self.analysis.dims.leaves(dim).into_iter().collect();
        match leaves[..] {
            [leaf] if self.analysis.dims.extent(leaf) == self.analysis.dims.extent(dim) => {
                self.own.iter_mut().for_each(|parts| _ = parts.insert(leaf, Part::Own(rows)));
                Ok(())
            }
            _ => {
                let why = "an operation of the model takes rows of experts apart";
                Err(Error::config("mesh", why, "use one context rank, and leave mesh.fold out"))
            }
        }
    }

    /// Applies a node's operation to the rank's own rows.
    fn on_own_rows(&mut self, node: &Node, rows: usize) -> Result<Vec<ValueId>> {
        let inputs = self.bring_all(node, Some(rows))?;
        if let Some(Collective::AllToAllRows { ranks, .. }) = Collective::of(node) {
            // Rows that come back are as many as were sent. Each rank sends at most all of its rows to this one.
            let [_, from, to] = node.inputs[..] else { unreachable!("rows, and the starts on both sides") };
            let whole = self.old.value(node.outputs[0]).spec.dims()[0];
            let rows = match (self.sent.get(&to), self.sent.get(&from)) {
                (Some(&back), _) => back,
                (None, Some(sent)) => whole.min(ranks * sent),
                (None, None) => whole,
            };
            self.set_own_rows(node.outputs[0], rows)?;
        }
        let op = node.op.on_rows_of(self.sharing.ranks).unwrap_or_else(|| node.op.clone());
        let windows = |ids: &[ValueId]| -> Vec<Window> { self.windows_of(ids, Some(rows)) };
        let op = op.on_parts(&windows(&node.inputs), &windows(&node.outputs)).unwrap_or(op);
        self.apply(node, op, &inputs)
    }

    /// True if an output is a sum over rows.
    fn sums_rows(&self, node: &Node, output: ValueId) -> bool {
        let has_rows = |&id: &ValueId| {
            let leaves = &self.analysis.leaves[id.index()];
            self.own[0].keys().any(|leaf| leaves.contains(leaf))
        };
        !has_rows(&output) && node.inputs.iter().any(has_rows)
    }
}
