//! Inserts the messages between ranks, and the waits for messages and collectives.
//!
//! - In: a program that reads values of other ranks as if they were local.
//! - Out: the same program with messages. A value that another rank reads is sent after the action that computes it,
//!   and received before the first action that reads it. In the update, a value is sent right after the node that
//!   computes it, and received right before the first node that reads it.
//! - Never: a buffer.
//!
//! The wait for a send is placed where the schedule proves that the message has been received, so the wait never blocks
//! between actions. Until then, the sent buffer must not change. The wait for a collective is placed before the next
//! instruction that touches one of its operands.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use gapless_graph::{NodeId, Phase, Place, Source, ValueId};

use super::{Context, UPDATE};
use crate::error::Result;
use crate::program::{BufferId, Instance, Instr, InstrKind, Message, Operand, Part, Program};

pub(super) fn run(program: &mut Program, context: &Context<'_>) -> Result<()> {
    let graph = context.lowering.graph;
    let received_before = context.crossings.received_before(graph, context.lowering.table, context.lowering.rank)?;
    let instrs = std::mem::take(&mut program.instrs).into();
    let parts = std::mem::take(&mut program.parts);
    let (sends_in_flight, collectives_in_flight, received) = (Vec::new(), Vec::new(), HashSet::new());
    let in_collectives = HashMap::new();
    let mut messages = Messages {
        context: *context,
        program,
        instrs,
        received_before,
        sends_in_flight,
        collectives_in_flight,
        in_collectives,
        received,
    };
    let mut actions = 0;
    for part in parts {
        let (first, count) = (messages.program.instrs.len(), part.instrs.len());
        match part.action {
            Some(_) => {
                messages.action(actions, &part, count);
                actions += 1;
            }
            None if part.name == UPDATE => messages.update(count),
            None => messages.finish(),
        }
        let last = messages.program.instrs.len();
        if last > first {
            messages.program.parts.push(Part { instrs: first..last, ..part });
        }
    }
    Ok(())
}

struct Messages<'a> {
    context: Context<'a>,
    program: &'a mut Program,
    /// Instructions that are still to be emitted.
    instrs: VecDeque<Instr>,
    /// The first action before which a message has certainly been received, by root, micro-batch and receiver.
    received_before: HashMap<(ValueId, u32, usize), usize>,
    /// Sends in flight: their waits have not been emitted yet.
    sends_in_flight: Vec<Sending>,
    /// Collectives in flight: their waits have not been emitted yet.
    collectives_in_flight: Vec<Collecting>,
    /// For each buffer, the number of operands of collectives in flight that are in the buffer.
    in_collectives: HashMap<BufferId, usize>,
    /// Values that have been received from other ranks.
    received: HashSet<Instance>,
}

/// A send in flight.
#[derive(Debug, Clone, Copy)]
struct Sending {
    instance: Instance,
    message: Message,
    /// The action before which the message has certainly been received. `None` if this is certain only at the end of
    /// the step.
    received_before: Option<usize>,
}

/// A collective in flight, with all operands that it reads or writes.
#[derive(Debug)]
struct Collecting {
    request: usize,
    operands: Vec<Operand>,
    layer: Arc<str>,
    predicate: Option<u32>,
}

impl Messages<'_> {
    /// Emits an action: F, B, I or W of one stage and micro-batch.
    fn action(&mut self, index: usize, part: &Part, count: usize) {
        let graph = self.context.lowering.graph;
        let action = part.action.expect("the part of an action");
        let micro_batch = action.micro_batch.0;
        for root in self.context.crossings.needs(&action).collect::<Vec<_>>() {
            self.receive(Instance::micro_batch(root, micro_batch), Some(micro_batch));
        }
        self.wait_for_sends(|sending| sending.received_before.is_some_and(|taken| taken <= index));
        // Recomputed values are not sent to other ranks.
        let mut made: Vec<NodeId> = Vec::new();
        for _ in 0..count {
            let instr = self.instrs.pop_front().expect("as many as the part has");
            let node = instr
                .node
                .filter(|node| !instr.rematerialized && instr.predicate.is_none() && made.last() != Some(node));
            made.extend(node);
            self.emit(instr);
        }
        for root in made.into_iter().flat_map(|node| graph.node(node).outputs.iter().copied()) {
            for to in self.context.crossings.per_micro_batch(root).collect::<Vec<_>>() {
                self.send(Instance::micro_batch(root, micro_batch), to, Some(micro_batch));
            }
        }
    }

    /// Emits the update, which runs once per step after the last action.
    fn update(&mut self, count: usize) {
        let Context { lowering, alive, crossings, .. } = self.context;
        let graph = lowering.graph;
        self.wait_for_sends(|_| true);
        for root in crossings.all_per_step() {
            let maker = graph.producer(root).expect("what crosses is made by a node");
            if maker.phase != Phase::Update && self.is_here(maker.place) {
                self.send_per_step(root);
            }
        }
        let early: HashSet<NodeId> = self.program.instrs.iter().filter_map(|instr| instr.node).collect();
        let last = self.instrs.len() - count;
        for id in graph.node_ids().filter(|id| alive[id.index()] && !early.contains(id)) {
            let node = graph.node(id);
            if node.phase != Phase::Update {
                continue;
            }
            let is_here = self.is_here(node.place);
            if is_here {
                node.inputs.iter().for_each(|&input| self.receive_per_step(graph.value(input).root));
                while self.instrs.len() > last && self.instrs.front().is_some_and(|instr| instr.node == Some(id)) {
                    let instr = self.instrs.pop_front().expect("there is a front");
                    self.emit(instr);
                }
                node.outputs.iter().for_each(|&output| self.send_per_step(output));
            }
            node.mutated_inputs().for_each(|input| self.refresh(graph.value(input).root, node.place, is_here));
        }
    }

    /// Receives the outputs that the host reads on every rank, then waits for everything that is in flight.
    fn finish(&mut self) {
        for output in self.context.lowering.outputs.iter().filter(|output| output.everywhere) {
            self.receive_per_step(self.context.lowering.graph.value(output.value).root);
        }
        self.finish_collectives(|_| true);
        self.wait_for_sends(|_| true);
    }

    /// Emits an instruction, preceded by the waits for collectives that use its operands.
    fn emit(&mut self, instr: Instr) {
        match &instr.kind {
            InstrKind::Finish(request) => drop(self.take_collectives(|collecting| collecting.request == *request)),
            _ => {
                for buffer in instr.inputs.iter().chain(&instr.outputs).map(|operand| operand.buffer) {
                    if self.in_collectives.get(&buffer).is_some_and(|&operands| operands > 0) {
                        self.finish_collectives(|collecting| {
                            collecting.operands.iter().any(|other| other.buffer == buffer)
                        });
                    }
                }
            }
        }
        if let InstrKind::Collective(_, request) = instr.kind {
            let operands = instr.inputs.iter().chain(&instr.outputs);
            let operands: Vec<Operand> =
                operands.map(|operand| Operand { overwritten_by: None, ..operand.clone() }).collect();
            operands.iter().for_each(|operand| *self.in_collectives.entry(operand.buffer).or_default() += 1);
            let (layer, predicate) = (instr.layer.clone(), instr.predicate);
            self.collectives_in_flight.push(Collecting { request, operands, layer, predicate });
        }
        self.program.instrs.push(instr);
    }

    fn is_here(&self, place: Place) -> bool {
        self.context.crossings.ranks_of(place).contains(&self.context.lowering.rank)
    }

    /// Returns the instance of a root that the update and the host read.
    fn per_step(&self, root: ValueId) -> Instance {
        let is_summed = self.context.first_buffer.contains_key(&Instance::sum(root));
        if is_summed { Instance::sum(root) } else { Instance::micro_batch(root, 0) }
    }

    /// Sends a value that was just computed to all other ranks whose update or host reads it.
    fn send_per_step(&mut self, root: ValueId) {
        for to in self.context.crossings.per_step(root).collect::<Vec<_>>() {
            self.send(self.per_step(root), to, None);
        }
    }

    /// Receives a value that the update or the host reads, if another rank computes the value and it has not been
    /// received yet.
    fn receive_per_step(&mut self, root: ValueId) {
        let is_elsewhere = self.context.lowering.graph.place_of(root).is_some_and(|place| !self.is_here(place));
        if is_elsewhere {
            self.receive(self.per_step(root), None);
        }
    }

    /// Sends a persistent tensor from the rank that changes it to the other ranks that read it.
    fn refresh(&mut self, root: ValueId, place: Place, is_here: bool) {
        let Context { lowering, crossings, .. } = self.context;
        let replicas: Vec<usize> = crossings.replicas(root).collect();
        if is_here {
            replicas.into_iter().for_each(|to| self.send(Instance::micro_batch(root, 0), to, None));
        } else if replicas.contains(&lowering.rank) {
            self.receive_from(Instance::micro_batch(root, 0), crossings.ranks_of(place).start, None);
        }
    }

    /// Receives an instance of a value, if this rank reads it and has not received it yet.
    fn receive(&mut self, instance: Instance, micro_batch: Option<u32>) {
        let Context { lowering, crossings, .. } = self.context;
        let Source::Node { node, .. } = lowering.graph.value(instance.root).source else { return };
        if self.context.first_buffer.contains_key(&instance) && self.received.insert(instance) {
            self.receive_from(instance, crossings.ranks_of(lowering.graph.node(node).place).start, micro_batch);
        }
    }

    fn receive_from(&mut self, instance: Instance, from: usize, micro_batch: Option<u32>) {
        let message = self.message(instance.root, from, micro_batch);
        let operand = self.operand(instance);
        self.transfer(InstrKind::Receive(message), instance, Vec::new(), vec![operand.clone()]);
        self.transfer(InstrKind::Wait(message), instance, vec![operand], Vec::new());
    }

    fn send(&mut self, instance: Instance, to: usize, micro_batch: Option<u32>) {
        let message = self.message(instance.root, to, micro_batch);
        let operand = self.operand(instance);
        self.transfer(InstrKind::Send(message), instance, vec![operand], Vec::new());
        let received_before =
            micro_batch.and_then(|micro_batch| self.received_before.get(&(instance.root, micro_batch, to)).copied());
        self.sends_in_flight.push(Sending { instance, message, received_before });
    }

    fn wait_for_sends(&mut self, which: impl Fn(&Sending) -> bool) {
        let (over, left): (Vec<Sending>, Vec<Sending>) =
            self.sends_in_flight.iter().partition(|&sending| which(sending));
        self.sends_in_flight = left;
        for Sending { instance, message, .. } in over {
            let operand = self.operand(instance);
            self.transfer(InstrKind::Wait(message), instance, vec![operand], Vec::new());
        }
    }

    fn finish_collectives(&mut self, which: impl Fn(&Collecting) -> bool) {
        for Collecting { request, operands, layer, predicate } in self.take_collectives(which) {
            let instr = Instr::plain(InstrKind::Finish(request), operands, Vec::new(), 0, layer);
            self.program.instrs.push(Instr { predicate, ..instr });
        }
    }

    /// Removes collectives from those in flight, and returns them.
    fn take_collectives(&mut self, which: impl Fn(&Collecting) -> bool) -> Vec<Collecting> {
        let over: Vec<Collecting> = self.collectives_in_flight.extract_if(.., |collecting| which(collecting)).collect();
        for operand in over.iter().flat_map(|collecting| &collecting.operands) {
            *self.in_collectives.entry(operand.buffer).or_default() -= 1;
        }
        over
    }

    fn message(&mut self, root: ValueId, peer: usize, micro_batch: Option<u32>) -> Message {
        let request = self.program.add_request();
        Message { peer, tag: self.context.crossings.tag(root, micro_batch), request }
    }

    fn operand(&self, instance: Instance) -> Operand {
        Operand::new(self.context.first_buffer[&instance], self.context.lowering.graph.value(instance.root))
    }

    fn transfer(&mut self, kind: InstrKind, instance: Instance, inputs: Vec<Operand>, outputs: Vec<Operand>) {
        let maker = self.context.lowering.graph.producer(instance.root);
        let layer = maker.map_or_else(|| Arc::from(""), |maker| maker.layer.clone());
        self.emit(Instr::plain(kind, inputs, outputs, instance.micro_batch, layer));
    }
}
