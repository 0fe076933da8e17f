//! A schedule of your own: like 1F1B, but every rank starts with one more forward.

use anyhow::Result;
use gapless::parallel::{Action, Error, Kind, Schedule, Sends, Shape, by_name, check, register};
use gapless::step::Step;

#[derive(Clone)]
struct Eager1F1B;

impl Schedule for Eager1F1B {
    fn name(&self) -> &'static str {
        "eager-1f1b"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        let row = |rank: u32| {
            let ahead = (shape.ranks - rank + 1).min(shape.micro_batches);
            let forward = |micro_batch| Action::new(Kind::Forward, rank, micro_batch);
            let mut row: Vec<Action> = (0..ahead).map(forward).collect();
            for micro_batch in 0..shape.micro_batches {
                row.push(Action::new(Kind::Backward, rank, micro_batch));
                row.extend(Some(micro_batch + ahead).filter(|&next| next < shape.micro_batches).map(forward));
            }
            row
        };
        Ok((0..shape.ranks).map(row).collect())
    }
}

/// Registers this schedule, and compares its time and exact bytes with those of 1F1B.
pub fn run(mut step: Step) -> Result<()> {
    let shape = step.shape();
    let table = Eager1F1B.table(&shape)?;
    let stages = shape.ranks * shape.chunks;
    anyhow::ensure!(check(&table, stages, shape.micro_batches, Sends::Buffered).is_empty(), "it does not train");
    register(Eager1F1B)?;
    for name in ["1f1b", "eager-1f1b"] {
        step.options.pipeline.schedule = by_name(name)?.into();
        let programs = step.programs(&step.record()?)?;
        let nanoseconds = step.timing(&programs)?.nanoseconds();
        let arenas: Vec<u64> =
            programs.iter().map(|program| Ok(step.plan(program)?.arena_bytes())).collect::<Result<_>>()?;
        println!("{name}: {nanoseconds} ns, arenas of {arenas:?} bytes");
    }
    Ok(())
}
