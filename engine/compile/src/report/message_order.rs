//! The calls that a program makes to the pipeline's communicator. Ranks use this list to agree on an order of messages.

use gapless_communicator::launch_order::{Call, Start};

use crate::program::{InstrKind, Operand, Program};

impl Program {
    /// Returns the starts and waits of messages, and the computation between them, in order.
    /// [`LaunchOrder::agree`](gapless_communicator::launch_order::LaunchOrder::agree) takes this list. Collectives of
    /// data ranks are not listed: they belong to another communicator, and keep the order of the program.
    pub fn messages(&self) -> Vec<Call> {
        let mut calls = Vec::new();
        // By request: the index of the request's start.
        let mut numbers = vec![0; self.requests];
        let mut starts = 0;
        for (index, instr) in self.instrs.iter().enumerate() {
            let (message, start) = match &instr.kind {
                InstrKind::Send(m) => (m, Start::Send { to: m.peer, tag: m.tag, len: bytes(&instr.inputs[0]) }),
                InstrKind::Receive(m) => {
                    (m, Start::Receive { from: m.peer, tag: m.tag, len: bytes(&instr.outputs[0]) })
                }
                InstrKind::Wait(message) => {
                    calls.push(Call::Wait(numbers[message.request]));
                    continue;
                }
                InstrKind::Compute(_) => {
                    let flops = self.flops_of(index..index + 1);
                    if let Some(Call::Compute(before)) = calls.last_mut() {
                        *before = before.saturating_add(flops);
                    } else {
                        calls.push(Call::Compute(flops));
                    }
                    continue;
                }
                InstrKind::Collective(..)
                | InstrKind::Finish(_)
                | InstrKind::Offload(_)
                | InstrKind::Offloaded(_)
                | InstrKind::Fetch(_)
                | InstrKind::Fetched(_)
                | InstrKind::Vote(_)
                | InstrKind::ApplyVote(_) => {
                    continue;
                }
            };
            numbers[message.request] = starts;
            starts += 1;
            calls.push(Call::Start(start));
        }
        calls
    }
}

fn bytes(operand: &Operand) -> usize {
    operand.layout.shape().elem_count() * operand.dtype.size_in_bytes()
}

#[cfg(test)]
mod tests {
    use gapless_parallel::{Mesh, all, by_name};

    use gapless_communicator::launch_order::{Call, Launch, LaunchOrder, Start, judge};
    use gapless_graph::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
    use gapless_graph::{Model, Result, Tensor};

    use crate::step::{Pipeline, StepOptions, program};
    use crate::{Error, Target};

    /// A model with an embedding tied to its head, and 16 residual layers between them.
    struct Tied {
        embed: Embedding,
        layers: Vec<Linear>,
    }

    impl Tied {
        fn new(vb: VarBuilder) -> Result<Self> {
            let layers = (0..16).map(|i| linear(8, 8, vb.pp("layers").pp(i)));
            Ok(Self { layers: layers.collect::<Result<_>>()?, embed: embedding(16, 8, vb.pp("embed"))? })
        }
    }

    impl Model for Tied {
        fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
            let first = self.embed.forward(tokens)?;
            let x = self.layers.iter().try_fold(first, |x, layer| x.add(&layer.forward(&x)?.gelu()?))?;
            x.linear(self.embed.embeddings(), None)
        }
    }

    fn programs(schedule: &str, ranks: usize, chunks: usize) -> Result<Vec<Vec<Call>>, Error> {
        let options = StepOptions {
            batch: 8,
            micro_batches: 8,
            sequence: 4,
            mesh: Mesh::pipeline(ranks),
            pipeline: Pipeline { schedule: by_name(schedule)?.into(), chunks, ..Pipeline::default() },
            ..StepOptions::default()
        };
        (0..ranks).map(|rank| Ok(program(Tied::new, &options, rank, Target::Cpu { threads: 1 })?.messages())).collect()
    }

    /// Returns the number of a rank's sends that are launched after a send that the program starts later.
    fn held_back(order: &LaunchOrder) -> usize {
        let starts = order.launches().iter().map(|launch| match *launch {
            Launch::One(start) | Launch::Oneself { send: start, .. } => start,
        });
        let mut latest = 0;
        starts.fold(0, |count, start| {
            let is_send = matches!(order.starts()[start], Start::Send { .. });
            let overtaken = start < latest;
            latest = latest.max(start);
            count + usize::from(is_send && overtaken)
        })
    }

    #[test]
    fn every_schedule_has_an_order_that_a_device_without_tags_runs() {
        let mut cases = 0;
        for schedule in all() {
            let mut most = 0;
            for (ranks, chunks) in [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)] {
                // Some schedules do not support every number of ranks and chunks.
                let Ok(programs) = programs(schedule.name(), ranks, chunks) else { continue };
                let orders = LaunchOrder::of(&programs).unwrap();
                most = most.max(orders.iter().map(held_back).max().unwrap());
                (1..4).for_each(|seed| judge::run(&programs, orders.clone(), seed));
                cases += 1;
            }
            println!("{}: at most {most} sends of a rank held back", schedule.name());
        }
        assert!(cases > 30, "{cases} cases");
    }

    /// If ranks of 1F1B launched messages in program order instead of the agreed order, the ranks would wait for each
    /// other in a cycle.
    #[test]
    #[should_panic(expected = "hangs")]
    fn the_order_of_the_programs_themselves_hangs() {
        let programs = programs("1f1b", 4, 1).unwrap();
        let orders = LaunchOrder::of(&programs).unwrap();
        judge::run(&programs, orders.iter().map(LaunchOrder::as_started).collect(), 1);
    }
}
