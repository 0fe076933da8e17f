//! What goes to and from other ranks while a program runs: messages of a pipeline, and collectives.
//!
//! In: instructions, and where the arena is. Out: requests to the communicators, each until the instruction that waits for it.
//! Never: a heap allocation while a program runs.

use super::args::{Address, Places};
use super::run::{Base, range};
use crate::communicator::{self, Communicator, CommunicatorError, Request};
use crate::compile::{Instruction, Message, Work};
use crate::ops::{Collective, Group};

/// The ways to the other ranks.
#[derive(Debug, Default)]
pub struct Communicators {
    /// To the other ranks of the pipeline.
    pub pipeline: Option<Box<dyn Communicator>>,
    /// To all with the same stages and another share of the batch.
    pub batch: Option<Box<dyn Communicator>>,
    /// To those of them that share this copy's experts.
    pub experts: Option<Box<dyn Communicator>>,
    /// To those of them that have the same experts.
    pub replicas: Option<Box<dyn Communicator>>,
}

impl Communicators {
    fn of(&mut self, group: Group) -> communicator::Result<&mut Box<dyn Communicator>> {
        let group = match group {
            Group::Batch => &mut self.batch,
            Group::Experts => &mut self.experts,
            Group::Replicas => &mut self.replicas,
        };
        group.as_mut().ok_or(NO_COMMUNICATOR)
    }
}

const OTHER_RANKS: CommunicatorError = CommunicatorError::Unsupported {
    what: "a collective of another number of ranks than the mesh has",
    remedy: "ask VarBuilder::expert_ranks for their number",
};

const OTHER_ROWS: CommunicatorError = CommunicatorError::Unsupported {
    what: "an exchange of more rows than its tensors have",
    remedy: "give it the starts of the rows that it is given",
};

const NO_COMMUNICATOR: CommunicatorError = CommunicatorError::Unsupported {
    what: "a program for several ranks without a communicator, or after one of them has failed",
    remedy: "make the trainer anew, with the communicator of all its ranks",
};

/// The ways to the other ranks, and what is under way to and from them.
#[derive(Debug, Default)]
pub(super) struct Links {
    communicators: Communicators,
    requests: Vec<Option<Under>>,
    /// Sizes of what goes to and comes from each expert rank, by request.
    lens: Vec<[Vec<usize>; 2]>,
}

impl Links {
    /// For programs of at most so many requests.
    pub fn new(communicators: Communicators, requests: usize) -> Self {
        let experts = communicators.experts.as_ref().map_or(0, |experts| experts.size());
        let lens = (0..requests).map(|_| [vec![0; experts], vec![0; experts]]).collect();
        Self { communicators, requests: (0..requests).map(|_| None).collect(), lens }
    }
}

/// What is under way.
#[derive(Debug)]
enum Under {
    Message(Request),
    Collective(Request, Group),
}

/// What messages under way hold of the arena; a run that fails or panics takes it back before the arena is let go.
pub(super) struct Lent<'l> {
    pub links: &'l mut Links,
    pub over: bool,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if !self.over {
            *self.links = Links::default();
        }
    }
}

/// Starts or ends a message.
///
/// # Safety
/// The operand lies in the arena at `base`, and nobody touches it until the message's wait.
pub(super) unsafe fn transfer(
    instruction: &Instruction,
    message: Message,
    base: Base,
    links: &mut Links,
) -> communicator::Result<()> {
    let Message { peer, tag, request } = message;
    let pipeline = links.communicators.pipeline.as_mut().ok_or(NO_COMMUNICATOR)?;
    // SAFETY: by this function's contract.
    let range = |address| unsafe { range(base, address, Places::NONE) };
    match &instruction.work {
        Work::Send(_) => {
            let (from, bytes) = range(&instruction.inputs[0]);
            // SAFETY: by this function's contract.
            links.requests[request] =
                Some(Under::Message(unsafe { pipeline.isend(from.cast_const(), bytes, peer, tag) }?));
        }
        Work::Receive(_) => {
            let (to, bytes) = range(&instruction.outputs[0]);
            // SAFETY: by this function's contract.
            links.requests[request] = Some(Under::Message(unsafe { pipeline.irecv(to, bytes, peer, tag) }?));
        }
        _ => {
            let Some(Under::Message(under_way)) = links.requests[request].take() else {
                unreachable!("lowering starts every message that it waits for")
            };
            pipeline.wait(under_way)?;
        }
    }
    Ok(())
}

/// Starts a collective.
///
/// # Safety
/// The operands lie in the arena at `base`, and nobody else touches them until it is finished.
pub(super) unsafe fn begin(
    collective: Collective,
    request: usize,
    instruction: &Instruction,
    (base, places): (Base, Places<'_>),
    links: &mut Links,
) -> communicator::Result<()> {
    // SAFETY: by this function's contract.
    let range = |address: Option<&Address>| address.map(|address| unsafe { range(base, address, places) });
    let inputs = [range(instruction.inputs.first()), range(instruction.inputs.get(1))];
    let output = range(instruction.outputs.first()).expect("a collective has an output");
    let group = collective.group();
    let communicator = links.communicators.of(group)?;
    if collective.ranks().is_some_and(|ranks| ranks != communicator.size()) {
        return Err(OTHER_RANKS);
    }
    // Links that have failed have none.
    let lens = links.lens.get_mut(request).ok_or(NO_COMMUNICATOR)?;
    match collective {
        Collective::AllToAll { ranks } => lens.iter_mut().for_each(|lens| lens.fill(output.1 / ranks)),
        Collective::AllToAllRows { ranks, rows, .. } => {
            let bytes = instruction.outputs[0].span / rows * size_of::<f32>();
            for (lens, starts) in lens.iter_mut().zip(&instruction.inputs[1..]) {
                // SAFETY: by this function's contract; starts are u32 without gaps, and nobody writes them now.
                let starts = unsafe {
                    std::slice::from_raw_parts(
                        base.0.add(starts.offset as usize).cast::<u32>().cast_const(),
                        starts.span,
                    )
                };
                let runs = (starts.len() - 1) / ranks;
                for (rank, len) in lens.iter_mut().enumerate() {
                    *len = (starts[(rank + 1) * runs] - starts[rank * runs]) as usize * bytes;
                }
            }
            let [sent, received] = lens.each_ref().map(|lens| lens.iter().sum::<usize>());
            if received > output.1 || inputs[0].is_none_or(|input| sent > input.1) {
                return Err(OTHER_ROWS);
            }
            // SAFETY: what comes ends within the output, and behind it nobody writes.
            unsafe { std::slice::from_raw_parts_mut(output.0.add(received), output.1 - received) }.fill(0);
        }
        _ => {}
    }
    let request_of = collective.request(inputs, output, [&lens[0], &lens[1]]);
    // SAFETY: by this function's contract; the plan keeps inputs and outputs apart, or makes them one. The sizes stay as
    // they are until this request is finished.
    let started = unsafe { communicator.start(request_of) }?;
    links.requests[request] = Some(Under::Collective(started, group));
    Ok(())
}

/// Ends a collective.
pub(super) fn finish(request: usize, links: &mut Links) -> communicator::Result<()> {
    let Some(Under::Collective(under_way, group)) = links.requests[request].take() else {
        unreachable!("lowering starts every collective that it finishes")
    };
    links.communicators.of(group)?.wait(under_way)
}
