//! What goes to and comes from other ranks: messages between the ranks of a pipeline, collectives of data ranks.

use std::sync::Arc;

use gapless_alloc::Role;
use gapless_graph::{Phase, Place, ValueId};

use super::again::Life;
use super::{Lowerer, Placed, SUM};
use crate::program::{BufferId, Message, Operand, Step, Work};

/// A send under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    pub(super) key: (ValueId, u32),
    pub(super) buffer: BufferId,
    pub(super) message: Message,
    /// The action before which it has been taken; none for all that is certain only in the end.
    pub(super) taken: Option<usize>,
}

/// A collective under way.
#[derive(Debug)]
pub(super) struct Collecting {
    pub(super) request: usize,
    /// All that it reads and writes.
    pub(super) operands: Vec<Operand>,
    /// What it reads, for it counts as a reader until its end.
    pub(super) reads: Vec<(ValueId, u32)>,
    /// What it makes, for its layer's name.
    pub(super) makes: ValueId,
    /// If it was only begun where the rows of a count were let go.
    pub(super) only_if: Option<u32>,
}

impl Lowerer<'_> {
    /// Sends what was just made for the update, or for the host, to everyone else who reads it.
    pub(super) fn send_per_step(&mut self, root: ValueId) {
        let (_, instance) = self.key(root, Phase::Update, 0);
        let to: Vec<usize> = self.crossings.per_step(root).collect();
        to.into_iter().for_each(|to| self.send((root, instance), to, None));
    }

    /// Receives what the update, or the host, reads, if it is made elsewhere and not here yet.
    pub(super) fn receive_per_step(&mut self, root: ValueId) {
        let (_, instance) = self.key(root, Phase::Update, 0);
        let elsewhere = self.of.graph.place_of(root).is_some_and(|place| !self.is_here(place));
        if elsewhere && !self.placed.contains_key(&(root, instance)) {
            self.receive((root, instance), None);
        }
    }

    /// Brings a persistent tensor that changed on one rank to the others that read it.
    pub(super) fn refresh(&mut self, root: ValueId, place: Place, here: bool) {
        let replicas: Vec<usize> = self.crossings.replicas(root).collect();
        if here {
            replicas.into_iter().for_each(|to| self.send((root, 0), to, None));
        } else if replicas.contains(&self.of.rank) {
            let buffer = self.instance(root, Phase::Update, 0);
            let from = self.crossings.ranks_of(place).start;
            self.receive_into((root, 0), buffer, from, None);
        }
    }

    /// Sends an instance: of a micro-batch, or once per step.
    pub(super) fn send(&mut self, key: (ValueId, u32), to: usize, micro_batch: Option<u32>) {
        self.finish_with(key);
        let buffer = self.placed[&key].buffer;
        let message = self.message(key.0, to, micro_batch);
        let operand = Operand::new(buffer, self.of.graph.value(key.0));
        self.transfer(Work::Send(message), vec![operand], Vec::new(), key);
        let taken = micro_batch.and_then(|micro_batch| self.taken.get(&(key.0, micro_batch, to)).copied());
        self.sending.push(Sending { key, buffer, message, taken });
    }

    pub(super) fn receive(&mut self, key: (ValueId, u32), micro_batch: Option<u32>) {
        let graph = self.of.graph;
        let (root, instance) = key;
        let maker = graph.producer(root).expect("what is received is made by a node elsewhere");
        let output = maker.outputs.iter().position(|&output| output == root).unwrap_or(0);
        let buffer = self.fresh(maker, root, output, micro_batch.unwrap_or(0));
        self.program.buffers[buffer.index()].label.role = Role::Communication;
        let (per_micro_batch, per_step) =
            (self.reads.per_micro_batch(root, micro_batch.unwrap_or(0), Life::First), self.reads.per_step(root));
        let reads_left = match (self.accumulated[root.index()], instance) {
            (true, SUM) => per_step,
            (true, _) => per_micro_batch,
            (false, _) => per_micro_batch + per_step,
        };
        self.placed.insert(key, Placed { buffer, reads_left });
        let from = self.crossings.ranks_of(maker.place).start;
        self.receive_into(key, buffer, from, micro_batch);
    }

    pub(super) fn receive_into(
        &mut self,
        key: (ValueId, u32),
        buffer: BufferId,
        from: usize,
        micro_batch: Option<u32>,
    ) {
        let message = self.message(key.0, from, micro_batch);
        let operand = Operand::new(buffer, self.of.graph.value(key.0));
        self.transfer(Work::Receive(message), Vec::new(), vec![operand.clone()], key);
        self.transfer(Work::Wait(message), vec![operand], Vec::new(), key);
    }

    /// Takes one of its reads from what stands at a key.
    pub(super) fn read(&mut self, key: (ValueId, u32)) {
        self.placed.get_mut(&key).expect("what is read is placed").reads_left -= 1;
    }

    /// Waits for the collectives that read or write what stands at a key.
    pub(super) fn finish_with(&mut self, key: (ValueId, u32)) {
        if let Some(buffer) = self.placed.get(&key).map(|placed| placed.buffer) {
            self.finish_collectives(|collecting| collecting.operands.iter().any(|operand| operand.buffer == buffer));
        }
    }

    pub(super) fn finish_collectives(&mut self, which: impl Fn(&Collecting) -> bool) {
        let (over, left) = std::mem::take(&mut self.collecting).into_iter().partition(which);
        self.collecting = left;
        let over: Vec<Collecting> = over;
        for Collecting { request, operands, reads, makes, only_if } in over {
            self.transfer(Work::Finish(request), operands, Vec::new(), (makes, 0));
            self.program.steps.iter_mut().next_back().into_iter().for_each(|finish| finish.only_if = only_if);
            reads.into_iter().for_each(|key| self.read(key));
        }
    }

    pub(super) fn wait_for_sends(&mut self, which: impl Fn(&Sending) -> bool) {
        let (over, left): (Vec<Sending>, Vec<Sending>) = self.sending.iter().partition(|&sending| which(sending));
        self.sending = left;
        for Sending { key, buffer, message, .. } in over {
            let operand = Operand::new(buffer, self.of.graph.value(key.0));
            self.transfer(Work::Wait(message), vec![operand], Vec::new(), key);
            self.read(key);
        }
    }

    pub(super) fn message(&mut self, root: ValueId, peer: usize, micro_batch: Option<u32>) -> Message {
        let request = self.program.requests;
        self.program.requests += 1;
        Message { peer, tag: self.crossings.tag(root, micro_batch), request }
    }

    pub(super) fn transfer(
        &mut self,
        work: Work,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
        (root, instance): (ValueId, u32),
    ) {
        let layer = self.of.graph.producer(root).map_or_else(|| Arc::from(""), |maker| maker.layer.clone());
        let micro_batch = if instance == SUM { 0 } else { instance };
        self.program.steps.push(Step::plain(work, inputs, outputs, micro_batch, layer));
    }
}
