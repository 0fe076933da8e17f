//! What is kept from the forward to the backward otherwise than as it is.
//!
//! In: names of operations, and what the backward reads. Out: per value, whether it waits in eight bits or in a file. Never:
//! whether it is kept at all; what is computed again is not.

use std::collections::BTreeSet;

use gapless_graph::{FLOATS, ValueId};

use super::SavedActivations;
use crate::error::{Error, Result};

/// How a value waits for its backward, if not as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stash {
    /// In eight bits per number: it comes back rounded.
    Compressed,
    /// In a file: it comes back as it was.
    Offloaded,
}

/// Which operations' results wait otherwise than as they are.
#[derive(Debug, Clone, Copy)]
pub struct Stashing<'a> {
    pub compress: &'a [String],
    pub offload: &'a [String],
}

impl Stashing<'_> {
    /// Resolves the names.
    ///
    /// # Errors
    /// When the backward reads no result of an operation of a name, or one is asked to wait in two ways.
    pub(super) fn resolve(&self, saved: &SavedActivations<'_>) -> Result<Vec<(ValueId, Stash)>> {
        if let Some(name) = self.compress.iter().find(|name| self.offload.contains(name)) {
            let why = format!("{name:?} is in memory.compress too");
            return Err(Error::config("memory.offload", why, "leave it in one of the two"));
        }
        let mut stash = Vec::new();
        for (how, names) in [(Stash::Compressed, self.compress), (Stash::Offloaded, self.offload)] {
            let can = |root: &ValueId| how == Stash::Offloaded || FLOATS.contains(&saved.spec(*root).dtype);
            // Its result, not the statistics that it makes beside it.
            let results = saved.roots().iter().copied().filter(|&root| saved.maker(root).outputs[0] == root);
            let results: Vec<ValueId> = results.filter(can).collect();
            let op = |root: ValueId| saved.maker(root).op.name();
            let made_by: BTreeSet<&str> = results.iter().map(|&root| op(root)).collect();
            if let Some(name) = names.iter().find(|name| !made_by.contains(name.as_str())) {
                let there = made_by.into_iter().collect::<Vec<_>>().join(", ");
                let key = if how == Stash::Compressed { "memory.compress" } else { "memory.offload" };
                let done = if how == Stash::Compressed { "compressed" } else { "offloaded" };
                let why = format!("the backward reads no result of {name:?} that can be {done}");
                let remedy = "choose from these operations";
                return Err(Error::config(key, format!("{why}; it reads results of {there}"), remedy));
            }
            let named = results.into_iter().filter(|&root| names.iter().any(|name| name == op(root)));
            stash.extend(named.map(|root| (root, how)));
        }
        Ok(stash)
    }
}
