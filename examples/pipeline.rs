//! Trains a model on several pipeline ranks, which are threads of this process, under every schedule. Prints each
//! schedule's timeline, its bubble, the bytes of each rank, and the losses. The losses of all schedules are the same,
//! up to rounding.
//!
//! To run the same code with several processes, use the MPI communicator in place of `on_threads`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gapless::communicator::on_threads;
use gapless::models::{Gpt, GptConfig};
use gapless::parallel::{self, Costs, Shape, simulate};
use gapless::{DeviceChoice, Mesh, Pipeline, StepOptions, TrainOptions, Trainer};

#[derive(Parser)]
#[command(about = "Train a small GPT over four ranks with every schedule")]
struct Args {
    /// Only this schedule; by default all
    #[arg(long)]
    schedule: Option<String>,
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Columns of the charts
    #[arg(long, default_value_t = 100)]
    width: usize,
}

/// The results of a rank's steps.
struct RankReport {
    losses: Vec<f32>,
    arena_bytes: u64,
    gap: f64,
}

fn model() -> GptConfig {
    GptConfig { vocabulary: 256, sequence: 128, layers: 8, heads: 4, width: 128, dropout: 0.1, ..GptConfig::default() }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let plain = TrainOptions {
        step: StepOptions {
            batch: args.micro_batches,
            micro_batches: args.micro_batches,
            sequence: model().sequence,
            ..StepOptions::default()
        },
        threads: 1,
        device: DeviceChoice::Cpu,
        ..TrainOptions::default()
    };
    let alone = train(&plain, args.steps)?.remove(0);
    println!("one rank alone: losses {:?}, arena {:.1} MiB\n", alone.losses, mib(alone.arena_bytes));

    let schedules = match &args.schedule {
        Some(name) => vec![parallel::by_name(name)?],
        None => parallel::all(),
    };
    for schedule in schedules {
        let name = schedule.name();
        // Two stages per rank, unless the schedule only supports one.
        let shape = |chunks| Shape { ranks: args.ranks as u32, chunks, micro_batches: args.micro_batches as u32 };
        let found = [2, 1].into_iter().find(|&chunks| schedule.actions(&shape(chunks)).is_ok());
        let Some(chunks) = found else {
            println!("{name}: not possible for {} ranks\n", args.ranks);
            continue;
        };
        let timeline = simulate(&schedule.table(&shape(chunks))?, &Costs::default())?;
        println!("{name}: {} ranks × {chunks} stages, bubble {:.0} %", args.ranks, 100.0 * timeline.bubble_share());
        print!("{}", timeline.gantt_folded(args.width));

        let options = TrainOptions {
            step: StepOptions {
                mesh: Mesh::pipeline(args.ranks),
                pipeline: Pipeline { schedule: schedule.into(), chunks: chunks as usize, ..Pipeline::default() },
                ..plain.step.clone()
            },
            ..plain.clone()
        };
        let ranks = train(&options, args.steps)?;
        for (rank, report) in ranks.iter().enumerate() {
            println!("  rank {rank}: arena {:.2} MiB, gap {:.4}", mib(report.arena_bytes), report.gap);
        }
        let losses = &ranks[0].losses;
        ensure!(ranks.iter().all(|report| report.losses == *losses), "{name}: ranks disagree on the loss");
        let furthest = losses.iter().zip(&alone.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        match furthest {
            0.0 => println!("  losses: the same bits as one rank alone\n"),
            // This schedule's backwards take the micro-batches in reverse order. So gradients are summed in another
            // order than on one rank.
            _ => println!("  losses: within {furthest:.1e} of one rank alone (another order of summation)\n"),
        }
        ensure!(furthest < 1e-4, "{name}: {losses:?} instead of {:?}", alone.losses);
    }
    Ok(())
}

/// Trains `steps` steps on all ranks of the mesh. Returns the results of each rank.
fn train(options: &TrainOptions, steps: usize) -> Result<Vec<RankReport>> {
    let text = include_bytes!("pipeline.rs");
    let tokens: Vec<u32> = text.iter().map(|&byte| byte.into()).collect();
    let count = options.step.batch * options.step.sequence;
    ensure!(tokens.len() > count + steps, "this file is too short for {count} tokens");
    let build = |vb| Gpt::new(&model(), vb);
    let run = |mut trainer: Trainer| {
        let step = |i| trainer.step(&tokens[i..i + count], &tokens[i + 1..=i + count]).map(|report| report.loss);
        let losses = (0..steps).map(step).collect::<Result<_, gapless::TrainError>>()?;
        let report = trainer.report();
        Ok(RankReport { losses, arena_bytes: report.arena_bytes, gap: report.gap })
    };
    let ranks = options.step.mesh.ranks()?;
    let reports = match ranks {
        1 => Trainer::new(build, options.clone()).and_then(run).map(|report| vec![report]),
        _ => on_threads(ranks, |world| run(Trainer::builder(build, options.clone()).distributed(world).build()?)),
    };
    reports.context("training failed")
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
