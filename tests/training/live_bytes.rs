//! The bytes that a rank keeps alive equal those that the simulator predicts. The rank's program passes the checker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gapless::engine::compile::Program;
use gapless::models::{Gpt, GptConfig};
use gapless::parallel::{self, Action, Cell, Kind, Schedule, Sends, Shape, peak_bytes};
use gapless::{Mesh, Pipeline, StepOptions, TrainOptions};
use gapless_testing::few;

use crate::common::{VOCABULARY, on_cpu};

const MICRO_BATCHES: u32 = 8;

/// A schedule that runs one micro-batch, forward and backward, with the stages that another schedule gives to each
/// rank.
struct Once {
    schedule: Arc<dyn Schedule + Send + Sync>,
    /// The stages with a split backward.
    split: BTreeSet<u32>,
}

impl Schedule for Once {
    fn name(&self) -> &'static str {
        "once"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, parallel::Error> {
        let rows = self.schedule.actions(&Shape { micro_batches: MICRO_BATCHES, ..*shape })?;
        let once = |row: Vec<Action>| {
            let mut stages: Vec<u32> = row.iter().map(|action| action.stage.0).collect();
            stages.sort_unstable();
            stages.dedup();
            let up = |stage| match self.split.contains(&stage) {
                true => [Kind::BackwardInput, Kind::BackwardWeight].as_slice(),
                false => &[Kind::Backward],
            };
            let forward = stages.iter().map(|&stage| Action::new(Kind::Forward, stage, 0));
            let backward = stages.iter().rev().flat_map(|&s| up(s).iter().map(move |&kind| Action::new(kind, s, 0)));
            forward.chain(backward).collect()
        };
        Ok(rows.into_iter().map(once).collect())
    }
}

fn program(schedule: Arc<dyn Schedule + Send + Sync>, shape: &Shape, rank: usize) -> Program {
    let vocabulary = VOCABULARY as usize;
    let config =
        GptConfig { vocabulary, sequence: 16, layers: 4, heads: 2, width: 32, dropout: 0.1, ..GptConfig::default() };
    program_of(&config, schedule, shape, rank)
}

fn program_of(config: &GptConfig, schedule: Arc<dyn Schedule + Send + Sync>, shape: &Shape, rank: usize) -> Program {
    let micro_batches = shape.micro_batches as usize;
    let options = TrainOptions {
        step: StepOptions {
            batch: 2 * micro_batches,
            micro_batches,
            sequence: 16,
            mesh: Mesh::pipeline(shape.ranks as usize),
            pipeline: Pipeline { schedule, chunks: shape.chunks as usize, ..Pipeline::default() },
            ..on_cpu().step
        },
        threads: 1,
        ..on_cpu()
    };
    gapless::plan::program(|vb| Gpt::new(config, vb), &options, rank).unwrap()
}

/// For each micro-batch of a row, returns the stages whose backward is split.
fn split_backwards(row: &[Cell]) -> Vec<BTreeSet<u32>> {
    let mut split = vec![BTreeSet::new(); MICRO_BATCHES as usize];
    for action in row.iter().flat_map(|cell| cell.actions()).filter(|action| action.kind == Kind::BackwardInput) {
        split[action.micro_batch.0 as usize].insert(action.stage.0);
    }
    split
}

#[test]
fn every_schedule_keeps_what_the_simulator_says_to_the_byte() {
    let mut of_two_ways = 0;
    for name in parallel::all().iter().map(|schedule| schedule.name()) {
        let schedule: Arc<dyn Schedule + Send + Sync> = parallel::by_name(name).unwrap().into();
        for &(ranks, chunks) in few(&[(4, 1), (2, 2), (4, 2), (1, 1), (1, 2), (2, 1)], 3) {
            let shape = Shape { ranks, chunks, micro_batches: MICRO_BATCHES };
            if schedule.actions(&shape).is_err() {
                continue;
            }
            let programs: Vec<_> = (0..ranks as usize).map(|rank| program(schedule.clone(), &shape, rank)).collect();
            let table: Vec<Vec<Cell>> = programs.iter().map(|program| program.cells()).collect();
            let violations = parallel::check(&table, ranks * chunks, MICRO_BATCHES, Sends::Buffered);
            assert!(violations.is_empty(), "{name}, {ranks} × {chunks}: {violations:?}");
            for (rank, (program, row)) in programs.iter().zip(&table).enumerate() {
                let split = split_backwards(row);
                let kept: BTreeMap<_, _> = split
                    .iter()
                    .map(|split| {
                        let once = Once { schedule: schedule.clone(), split: split.clone() };
                        (split, self::program(Arc::new(once), &Shape { micro_batches: 1, ..shape }, rank).kept())
                    })
                    .collect();
                let simulated = peak_bytes(row, |micro_batch| &kept[&split[micro_batch.0 as usize]]);
                let name = format!("{name}, {ranks} × {chunks}, rank {rank}");
                assert_eq!(program.peak_bytes_between_cells(), simulated, "{name}");
                assert!(simulated > 0, "{name}");
                of_two_ways += usize::from(kept.len() > 1);
            }
        }
    }
    assert!(of_two_ways > 0, "DualPipeV splits the backward of some micro-batches only");
}

/// With a large vocabulary, the last stage only consists of the head. The head's gradients are computed in its
/// forward, so nothing remains for its backward.
#[test]
fn a_head_that_is_a_stage_of_its_own_has_a_backward() {
    let config = GptConfig { vocabulary: 50_257, sequence: 16, layers: 4, heads: 2, width: 64, ..GptConfig::default() };
    for name in ["gpipe", "1f1b", "zb-h1"] {
        let shape = Shape { ranks: 2, chunks: 1, micro_batches: 4 };
        let schedule: Arc<dyn Schedule + Send + Sync> = parallel::by_name(name).unwrap().into();
        let programs = [0, 1].map(|rank| program_of(&config, schedule.clone(), &shape, rank));
        let table: Vec<Vec<Cell>> = programs.iter().map(|program| program.cells()).collect();
        let violations = parallel::check(&table, 2, 4, Sends::Buffered);
        assert!(violations.is_empty(), "{name}: {violations:?}");
        let of_the_head = table[1].iter().flat_map(|cell| cell.actions());
        assert_eq!(of_the_head.filter(|action| action.kind != Kind::Forward).count(), 4, "{name}: {:?}", table[1]);
    }
}
