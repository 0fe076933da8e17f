//! Values whose rows are counted while the step runs: which of them need not be planned for the most rows that they may have.
//!
//! Operations that know of counted rows ([`Rows`]) read and write no more than those; so their buffers may be as large as the
//! count says, which only an arena that serves them while the step runs can use. Where anything else looks at one of the values
//! that share a count (an operation that knows of shapes alone, another rank, the update), all of them are planned at their
//! largest.

use std::collections::{HashMap, HashSet};

use gapless_graph::Rows;
use gapless_graph::{Graph, Phase, Place, RowCount, Value, ValueId};

use super::{Lowerer, Lowering};
use crate::cross_rank::CrossRankValues;
use crate::program::DynamicRows;
use crate::recompute::Variant;

/// The counts of a program.
#[derive(Debug)]
pub(super) struct Counts {
    /// Roots that are counted here.
    roots: HashMap<ValueId, RowCount>,
    /// What counts them.
    starts: HashSet<ValueId>,
    /// The number of each count, by what counts and its micro-batch.
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
            // Rows of two counts do not go together; and what is counted is the first output of what counts.
            if counts.len() > 1 {
                refused.extend(&counts);
            }
            let counts_first = |starts: &ValueId| {
                let root = graph.value(*starts).root;
                graph.producer(root).is_some_and(|maker| maker.outputs[0] == root)
            };
            refused.extend(counts.into_iter().filter(|starts| !counts_first(starts)));
        }
        // Putting away knows of shapes alone.
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
    /// What counts the rows of a root, if they are counted.
    pub(super) fn starts_of(&self, graph: &Graph, root: ValueId) -> Option<ValueId> {
        self.roots.get(&root).map(|rows| graph.value(rows.starts).root)
    }
}

/// Whether a value shows its root as it lies.
fn is_whole(graph: &Graph, id: ValueId) -> bool {
    let value = graph.value(id);
    let Value { spec, layout, .. } = value;
    layout.is_contiguous() && layout.start_offset() == 0 && spec.dims() == graph.value(value.root).spec.dims()
}

impl Lowerer<'_> {
    /// What is counted of a value's rows, if they are.
    pub(super) fn counted(&mut self, id: ValueId, micro_batch: u32) -> Option<DynamicRows> {
        let rows = *self.counts.roots.get(&id)?;
        let spec = &self.of.graph.value(id).spec;
        let row_bytes = spec.bytes() / spec.dims()[0] as u64;
        let count = self.number(self.of.graph.value(rows.starts).root, micro_batch);
        Some(DynamicRows { count, row_bytes, balanced: (rows.balanced as u64).saturating_mul(row_bytes) })
    }

    /// The count that a value makes, if any is made of it.
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
