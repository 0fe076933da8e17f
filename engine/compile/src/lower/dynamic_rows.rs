//! Decides which values have dynamic rows, that is, buffers sized by a row count that is known only while the step
//! runs.
//!
//! An operation that supports dynamic rows ([`Rows`]) touches only as many rows as the row count says, so its buffers
//! need no further rows. The online arena allocates these buffers at run time. All values that share a row count are
//! planned at their maximum size instead if one of these values is used by
//!
//! - an operation that supports only static shapes,
//! - another rank, or
//! - the update.

use std::collections::{HashMap, HashSet};

use gapless_graph::RowUse;
use gapless_graph::{Graph, Phase, Place, RowCount, Value, ValueId};

use super::{Lowerer, Lowering};
use crate::cross_rank::CrossRankValues;
use crate::program::DynamicRows;
use crate::recompute::Variant;

/// The row counts of a program.
#[derive(Debug)]
pub(super) struct RowCounts {
    /// Roots with dynamic rows.
    roots: HashMap<ValueId, RowCount>,
    /// Roots that hold row offsets; their last element is the row count.
    row_offsets: HashSet<ValueId>,
    /// The index of each row count, by the value that holds its offsets, and by micro-batch.
    count_ids: HashMap<(ValueId, u32), u32>,
}

impl RowCounts {
    pub(super) fn new(lowering: &Lowering<'_>, alive: &[bool], crossings: &CrossRankValues) -> Self {
        let graph = lowering.graph;
        let row_count = |id: ValueId| graph.value(graph.value(id).root).row_count;
        let here = |place: Place| crossings.ranks_of(place) == (lowering.rank..lowering.rank + 1);
        let mut roots = HashMap::new();
        let mut refused: HashSet<ValueId> = HashSet::new();
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            for (&output, rows) in node.outputs.iter().filter_map(|output| Some((output, row_count(*output)?))) {
                roots.insert(output, rows);
                let crosses = crossings.per_micro_batch(output).next().is_some();
                let starts_here = graph.place_of(rows.offsets).is_some_and(here);
                if crosses || !here(node.place) || !starts_here || node.phase == Phase::Update {
                    refused.insert(rows.offsets);
                }
            }
            for (&input, rows) in node.inputs.iter().filter_map(|input| Some((input, row_count(*input)?))) {
                let knows = !matches!(node.op.rows(), RowUse::Unaware) && node.phase != Phase::Update;
                if !knows || !is_whole(graph, input) || !here(node.place) {
                    refused.insert(rows.offsets);
                }
            }
            let offsets: HashSet<ValueId> =
                node.inputs.iter().chain(&node.outputs).filter_map(|&id| Some(row_count(id)?.offsets)).collect();
            // A node cannot combine rows of two counts. Besides, the runtime reads a row count only from the first
            // output of the node that produces the count.
            if offsets.len() > 1 {
                refused.extend(&offsets);
            }
            let counts_first = |offsets_value: &ValueId| {
                let root = graph.value(*offsets_value).root;
                graph.producer(root).is_some_and(|maker| maker.outputs[0] == root)
            };
            refused.extend(offsets.into_iter().filter(|offsets_value| !counts_first(offsets_value)));
        }
        // Compression and offloading support static shapes only.
        for (root, _) in lowering.recomputation.variants().iter().flat_map(Variant::stashed) {
            refused.extend(row_count(root).map(|rows| rows.offsets));
        }
        for output in lowering.outputs {
            refused.extend(row_count(output.value).map(|rows| rows.offsets));
        }
        roots.retain(|_, rows| !refused.contains(&rows.offsets));
        let row_offsets = roots.values().map(|rows| graph.value(rows.offsets).root).collect();
        Self { roots, row_offsets, count_ids: HashMap::new() }
    }
}

impl RowCounts {
    /// Returns the value whose last element is the row count of a root, or `None` if the root's rows are not dynamic.
    pub(super) fn offsets_of(&self, graph: &Graph, root: ValueId) -> Option<ValueId> {
        self.roots.get(&root).map(|rows| graph.value(rows.offsets).root)
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
    pub(super) fn dynamic_rows(&mut self, id: ValueId, micro_batch: u32) -> Option<DynamicRows> {
        let rows = *self.row_counts.roots.get(&id)?;
        let spec = &self.lowering.graph.value(id).spec;
        let row_bytes = spec.bytes() / spec.dims()[0] as u64;
        let count = self.count_id(self.lowering.graph.value(rows.offsets).root, micro_batch);
        Some(DynamicRows { count, row_bytes, balanced: (rows.balanced as u64).saturating_mul(row_bytes) })
    }

    /// Returns the index of the row count that a value defines, or `None` if it defines none.
    pub(super) fn count_defined(&mut self, root: ValueId, micro_batch: u32) -> Option<u32> {
        self.row_counts.row_offsets.contains(&root).then(|| self.count_id(root, micro_batch))
    }

    pub(super) fn count_id(&mut self, offsets: ValueId, micro_batch: u32) -> u32 {
        let next = self.row_counts.count_ids.len() as u32;
        let id = *self.row_counts.count_ids.entry((offsets, micro_batch)).or_insert(next);
        self.program.row_counts = self.row_counts.count_ids.len();
        id
    }
}
