//! Decides which values have dynamic rows, that is, buffers sized by a row count that is known only while the step
//! runs.
//!
//! An operation that supports dynamic rows ([`Rows`]) touches only as many rows as the row count says, so its buffers
//! need no more. The online arena allocates them at run time. All values that share a row count are planned at their
//! maximum size instead if one of these values is used by
//!
//! - an operation that supports only static shapes,
//! - another rank, or
//! - the update.

use std::collections::{HashMap, HashSet};

use gapless_graph::Rows;
use gapless_graph::{Graph, Phase, Place, RowCount, Value, ValueId};

use super::{Lowerer, Lowering};
use crate::cross_rank::CrossRankValues;
use crate::program::DynamicRows;
use crate::recompute::Variant;

/// The row counts of a program.
#[derive(Debug)]
pub(super) struct Counts {
    /// Roots with dynamic rows.
    roots: HashMap<ValueId, RowCount>,
    /// Roots that hold row offsets; their last element is the row count.
    starts: HashSet<ValueId>,
    /// The index of each row count, by the value that holds its offsets, and by micro-batch.
    numbers: HashMap<(ValueId, u32), u32>,
}

impl Counts {
    pub(super) fn new(of: &Lowering<'_>, alive: &[bool], crossings: &CrossRankValues) -> Self {
        let graph = of.graph;
        let counted = |id: ValueId| graph.value(graph.value(id).root).rows;
        let here = |place: Place| crossings.ranks_of(place) == (of.rank..of.rank + 1);
        let mut roots = HashMap::new();
        let mut refused: HashSet<ValueId> = HashSet::new();
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            for (&output, rows) in node.outputs.iter().filter_map(|output| Some((output, counted(*output)?))) {
                roots.insert(output, rows);
                let crosses = crossings.per_micro_batch(output).next().is_some();
                let starts_here = graph.place_of(rows.starts).is_some_and(here);
                if crosses || !here(node.place) || !starts_here || node.phase == Phase::Update {
                    refused.insert(rows.starts);
                }
            }
            for (&input, rows) in node.inputs.iter().filter_map(|input| Some((input, counted(*input)?))) {
                let knows = !matches!(node.op.rows(), Rows::Unaware) && node.phase != Phase::Update;
                if !knows || !is_whole(graph, input) || !here(node.place) {
                    refused.insert(rows.starts);
                }
            }
            let counts: HashSet<ValueId> =
                node.inputs.iter().chain(&node.outputs).filter_map(|&id| Some(counted(id)?.starts)).collect();
            // A node cannot combine rows of two counts. Besides, the runtime reads a row count from the first output of
            // its producer only.
            if counts.len() > 1 {
                refused.extend(&counts);
            }
            let counts_first = |starts: &ValueId| {
                let root = graph.value(*starts).root;
                graph.producer(root).is_some_and(|maker| maker.outputs[0] == root)
            };
            refused.extend(counts.into_iter().filter(|starts| !counts_first(starts)));
        }
        // Compression and offloading support static shapes only.
        for (root, _) in of.recomputation.variants().iter().flat_map(Variant::stashed) {
            refused.extend(counted(root).map(|rows| rows.starts));
        }
        for output in of.outputs {
            refused.extend(counted(output.value).map(|rows| rows.starts));
        }
        roots.retain(|_, rows| !refused.contains(&rows.starts));
        let starts = roots.values().map(|rows| graph.value(rows.starts).root).collect();
        Self { roots, starts, numbers: HashMap::new() }
    }
}

impl Counts {
    /// Returns the value whose last element is the row count of a root, or `None` if the root's rows are not dynamic.
    pub(super) fn starts_of(&self, graph: &Graph, root: ValueId) -> Option<ValueId> {
        self.roots.get(&root).map(|rows| graph.value(rows.starts).root)
    }
}

/// True if a value has all elements of its root, in the root's layout.
fn is_whole(graph: &Graph, id: ValueId) -> bool {
    let value = graph.value(id);
    let Value { spec, layout, .. } = value;
    layout.is_contiguous() && layout.start_offset() == 0 && spec.dims() == graph.value(value.root).spec.dims()
}

impl Lowerer<'_> {
    /// Returns the dynamic size of a value, or `None` if the value's rows are not dynamic.
    pub(super) fn counted(&mut self, id: ValueId, micro_batch: u32) -> Option<DynamicRows> {
        let rows = *self.counts.roots.get(&id)?;
        let spec = &self.of.graph.value(id).spec;
        let row_bytes = spec.bytes() / spec.dims()[0] as u64;
        let count = self.number(self.of.graph.value(rows.starts).root, micro_batch);
        Some(DynamicRows { count, row_bytes, balanced: (rows.balanced as u64).saturating_mul(row_bytes) })
    }

    /// Returns the index of the row count that a value defines, or `None` if it defines none.
    pub(super) fn count_made(&mut self, root: ValueId, micro_batch: u32) -> Option<u32> {
        self.counts.starts.contains(&root).then(|| self.number(root, micro_batch))
    }

    pub(super) fn number(&mut self, starts: ValueId, micro_batch: u32) -> u32 {
        let next = self.counts.numbers.len() as u32;
        let number = *self.counts.numbers.entry((starts, micro_batch)).or_insert(next);
        self.program.counts = self.counts.numbers.len();
        number
    }
}
