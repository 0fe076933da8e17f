//! Compares steps of LoRA in bf16 with steps whose frozen weights are quantized, and with DoRA.

use std::time::Instant;

use cpu_time::ProcessTime;
use gapless::nn::{Quantize, QuantizedFormat};
use gapless::{DeviceChoice, Lora, StepOptions, TrainOptions, Trainable};

use crate::{Model, Options, median, side, sorted};

/// Prints the time of a step of each kind, the time of all threads, and the ratios to LoRA in bf16. The kinds take their steps
/// in turn.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let model = Model::new(options);
    let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(str::to_owned);
    let lora = Lora { rank: 16, alpha: 32.0, targets: targets.to_vec(), ..Lora::default() };
    let quantized = |format| Lora { quantize: Some(Quantize { format, ..Quantize::default() }), ..lora.clone() };
    let kinds = [
        ("LoRA", lora.clone()),
        ("LoRA on nf4", quantized(QuantizedFormat::Nf4)),
        ("LoRA on int8", quantized(QuantizedFormat::Int8)),
        ("DoRA", Lora { dora: true, ..lora.clone() }),
    ];
    let mut trainers = Vec::new();
    for (name, lora) in kinds {
        let step = side::step_options(options, candle_core::DType::BF16)?;
        let step = StepOptions { trainable: Trainable::Lora(lora), ..step };
        let train =
            TrainOptions { step, threads: options.threads, device: DeviceChoice::Cpu, ..TrainOptions::default() };
        trainers.push((name, model.trainer(train)?));
    }
    let (tokens, targets) = side::batch(options);
    let mut times = vec![Vec::new(); trainers.len()];
    for round in 0..=options.steps {
        for ((_, trainer), times) in trainers.iter_mut().zip(&mut times) {
            let (begin, cpu) = (Instant::now(), ProcessTime::now());
            trainer.step(&tokens, &targets)?;
            // The first step touches memory for the first time.
            if round > 0 {
                times.push([begin.elapsed(), cpu.elapsed()].map(|time| time.as_secs_f64() * 1e3));
            }
        }
    }
    println!(
        "{}; batch {} × {} tokens; bf16, adapters of rank 16",
        model.describe(),
        options.batch(),
        options.sequence()
    );
    println!("trained            ms/step   ÷ LoRA   CPU ms/step   ÷ LoRA   arena MiB");
    for ((name, trainer), of_kind) in trainers.iter().zip(&times) {
        // Steps of one round run under the same conditions, so this is the median of their ratios.
        let [(ms, ratio), (cpu_ms, cpu_ratio)] = [0, 1].map(|clock| {
            let ratios = of_kind.iter().zip(&times[0]).map(|(step, of_lora)| step[clock] / of_lora[clock]);
            (median(&sorted(of_kind.iter().map(|step| step[clock]))), median(&sorted(ratios)))
        });
        let arena = trainer.report().arena_bytes as f64 / f64::from(1 << 20);
        println!("{name:16} {ms:9.1} {ratio:8.2} {cpu_ms:13.1} {cpu_ratio:8.2} {arena:11.1}");
    }
    Ok(())
}
