//! What waits for its backward otherwise than as it is: put away behind its last reader of the forward, and brought back in
//! front of its first of the backward, as a second life.

use std::sync::Arc;

use candle_core::Layout;
use gapless_alloc::Label;
use gapless_graph::Op;
use gapless_graph::ops::{Compress, Expand, packed};
use gapless_graph::{Node, Phase, Place, Spec, ValueId};
use gapless_parallel::StageId;

use super::again::Life;
use super::{Lowerer, Placed};
use crate::program::{BufferId, Held, HostBuffer, HostId, Operand, Step, Work, role_of_node};
use crate::recompute::Stash;

/// Where an instance has been put.
#[derive(Debug, Clone, Copy)]
pub(super) enum PutAway {
    /// Codes and ranges.
    Compressed([BufferId; 2]),
    /// A range of the file.
    Offloaded(HostId),
}

impl<'a> Lowerer<'a> {
    /// Puts away what a node of the forward was the last to read, or has made for the backward alone.
    pub(super) fn put_away(&mut self, node: &Node, micro_batch: u32) {
        let graph = self.of.graph;
        if node.phase == Phase::Forward {
            let roots = node.inputs.iter().map(|&input| graph.value(input).root).chain(node.outputs.iter().copied());
            roots.for_each(|root| self.put_away_root(root, micro_batch));
        }
    }

    /// Puts away what is left of a stage's values: what a collective was the last to read.
    pub(super) fn put_away_rest(&mut self, stage: StageId, micro_batch: u32) {
        let of = self.of;
        let Some(variant) = of.recomputation.of(micro_batch) else { return };
        for root in of.recomputation.variants()[variant].stashed() {
            if of.graph.place_of(root) == Some(Place::Stage(stage)) {
                self.finish_with((root, micro_batch));
                self.put_away_root(root, micro_batch);
            }
        }
    }

    /// Puts away a value that nothing else of the forward will read.
    fn put_away_root(&mut self, root: ValueId, micro_batch: u32) {
        let of = self.of;
        let variant = of.recomputation.of(micro_batch).map(|variant| &of.recomputation.variants()[variant]);
        let (Some(stash), key) = (variant.and_then(|variant| variant.stash(root)), (root, micro_batch)) else { return };
        if self.placed.get(&key).is_some_and(|placed| placed.reads_left == 1) {
            let away = match stash {
                Stash::Compressed => self.compress(root, micro_batch),
                Stash::Offloaded => self.offload(root, micro_batch),
            };
            self.away.insert(key, away);
            self.read(key);
        }
    }

    fn compress(&mut self, root: ValueId, micro_batch: u32) -> PutAway {
        let graph = self.of.graph;
        let (value, maker) = (graph.value(root), self.maker(root));
        let buffers = packed(&value.spec).map(|spec| {
            let tensor = format!("{}/{} in 8 bits of micro-batch {micro_batch}", maker.layer, maker.op.name());
            let (op, layer) = ("compress".into(), maker.layer.to_string());
            let label = Label { tensor, op, layer, role: role_of_node(Phase::Forward) };
            self.program.add(spec.bytes(), label, Held::No)
        });
        let input = Operand::new(self.placed[&(root, micro_batch)].buffer, value);
        let outputs = packed_operands(buffers, &value.spec);
        self.compute(Arc::new(Compress), vec![input], outputs, maker, micro_batch);
        PutAway::Compressed(buffers)
    }

    fn offload(&mut self, root: ValueId, micro_batch: u32) -> PutAway {
        let value = self.of.graph.value(root);
        let id = HostId(u32::try_from(self.program.host.len()).expect("fewer than 2^32 buffers"));
        self.program.host.push(HostBuffer { bytes: value.spec.bytes() });
        let input = Operand::new(self.placed[&(root, micro_batch)].buffer, value);
        self.transfer(Work::Offload(id), vec![input], Vec::new(), (root, micro_batch));
        PutAway::Offloaded(id)
    }

    /// Brings back what was put away, into a second life.
    pub(super) fn bring_back(&mut self, root: ValueId, micro_batch: u32) {
        let (value, maker) = (self.of.graph.value(root), self.maker(root));
        let away = self.away[&(root, micro_batch)];
        let buffer = self.fresh(maker, root, 0, micro_batch);
        let output = Operand::new(buffer, value);
        match away {
            PutAway::Compressed(buffers) => {
                let inputs = packed_operands(buffers, &value.spec);
                self.compute(Arc::new(Expand(value.spec.clone())), inputs, vec![output], maker, micro_batch);
            }
            PutAway::Offloaded(id) => {
                self.transfer(Work::Fetch(id), Vec::new(), vec![output], (root, micro_batch));
            }
        }
        let reads_left = self.reads.per_micro_batch(root, micro_batch, Life::Second);
        self.placed.insert((root, micro_batch), Placed { buffer, reads_left });
    }

    fn maker(&self, root: ValueId) -> &'a Node {
        self.of.graph.producer(root).expect("what is put away is made by a node")
    }

    fn compute(&mut self, op: Arc<dyn Op>, inputs: Vec<Operand>, outputs: Vec<Operand>, node: &Node, micro_batch: u32) {
        self.program.steps.push(Step::plain(Work::Compute(op), inputs, outputs, micro_batch, node.layer.clone()));
    }
}

fn packed_operands(buffers: [BufferId; 2], spec: &Spec) -> Vec<Operand> {
    let operand = |(buffer, spec): (BufferId, Spec)| {
        let (layout, dtype) = (Layout::contiguous(spec.shape.clone()), spec.dtype);
        Operand { buffer, layout, dtype, overwritten_by: None }
    };
    buffers.into_iter().zip(packed(spec)).map(operand).collect()
}
