//! Activations that are compressed or offloaded between forward and backward.
//!
//! - In: names of operations, and the values that the backward reads.
//! - Out: per value, whether it is compressed to eight bits or offloaded to a file.
//! - Never: whether a value is kept at all. A value that is recomputed is not stored.

use std::collections::BTreeSet;

use gapless_graph::{FLOATS, ValueId};

use super::SavedActivations;
use crate::error::{Error, Result};

/// The storage of a kept value between forward and backward, if it is not left unchanged in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationStorage {
    /// The value is compressed to eight bits per element. The restored value is rounded.
    Compressed,
    /// The value is offloaded to a file. The restored value is unchanged.
    Offloaded,
}

/// Names of operations whose results are compressed, and of operations whose results are offloaded.
#[derive(Debug, Clone, Copy)]
pub struct StorageOptions<'a> {
    pub compress: &'a [String],
    pub offload: &'a [String],
}

impl StorageOptions<'_> {
    /// Finds the values to which the names refer.
    ///
    /// # Errors
    /// Returns an error if a name is in both lists. Returns an error if the backward reads no result of a named
    /// operation that can be compressed or offloaded.
    pub(super) fn resolve(&self, saved: &SavedActivations<'_>) -> Result<Vec<(ValueId, ActivationStorage)>> {
        if let Some(name) = self.compress.iter().find(|name| self.offload.contains(name)) {
            let why = format!("{name:?} is in memory.compress too");
            return Err(Error::config("memory.offload", why, "leave it in one of the two"));
        }
        let mut stash = Vec::new();
        for (how, names) in
            [(ActivationStorage::Compressed, self.compress), (ActivationStorage::Offloaded, self.offload)]
        {
            let can = |root: &ValueId| how == ActivationStorage::Offloaded || FLOATS.contains(&saved.spec(*root).dtype);
            // Only an operation's main result is compressed or offloaded, not the statistics that are computed with it.
            let results = saved.roots().iter().copied().filter(|&root| saved.maker(root).outputs[0] == root);
            let results: Vec<ValueId> = results.filter(can).collect();
            let op = |root: ValueId| saved.maker(root).op.name();
            let made_by: BTreeSet<&str> = results.iter().map(|&root| op(root)).collect();
            if let Some(name) = names.iter().find(|name| !made_by.contains(name.as_str())) {
                let there = made_by.into_iter().collect::<Vec<_>>().join(", ");
                let key = if how == ActivationStorage::Compressed { "memory.compress" } else { "memory.offload" };
                let done = if how == ActivationStorage::Compressed { "compressed" } else { "offloaded" };
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
