//! Where the time of a step goes: by operation, and by operation and kind of layer, each beside the least time that its
//! arithmetic and bytes take on the device.

use std::collections::BTreeMap;

use gapless::engine::cuda::Timed;
use serde::Serialize;

use super::figures::{Peak, PeakArguments, median};
use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::{Float, Model, Step};
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[arg(long, value_enum, default_value_t = Model::Gpt2)]
    model: Model,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    #[arg(long, value_enum, default_value_t = Float::Bf16)]
    dtype: Float,
    /// Measured steps.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    #[arg(long, default_value_t = 8)]
    micro_batch: usize,
    #[arg(long, default_value_t = 1024)]
    sequence: usize,
    #[command(flatten)]
    peak: PeakArguments,
}

/// Instructions of one group in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    name: String,
    calls: usize,
    /// Median over the steps.
    ms: f64,
    flops_per_second: f64,
    bytes_per_second: f64,
    /// The least time that each takes by the device's rates, added up, as a part of the time that they took.
    of_roofline: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    card: Card,
    #[serde(flatten)]
    step: Step,
    peak: Option<Peak>,
    whole_ms: f64,
    by_operation: Vec<Row>,
    by_layer: Vec<Row>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let &Arguments { model, dtype, micro_batch, sequence, .. } = arguments;
    let step = Step { model, dtype, micro_batch, sequence, seed: 0 };
    let mut trainer = step.trainer(arguments.device.choice())?;
    let (tokens, targets) = Tokens::uniform(step.config().vocabulary, step.seed).batch(micro_batch, sequence);
    trainer.profile(&tokens, &targets)?; // it is the first to touch memory
    let steps = (0..arguments.steps).map(|_| trainer.profile(&tokens, &targets)).collect::<Result<Vec<_>, _>>()?;
    let peak = arguments.peak.peak(&card.card, dtype);
    let by_operation = rows(&steps, peak, |timed| timed.operation.to_owned());
    let by_layer = rows(&steps, peak, |timed| format!("{} {}", timed.operation, any_block(&timed.layer)));
    let whole_ms = by_operation.iter().map(|row| row.ms).sum();
    let rates = match peak {
        Some(Peak { flops, bytes }) => format!("roofline of {:.0} TFLOP/s and {:.0} GB/s", flops / 1e12, bytes / 1e9),
        None => "no roofline: the device's rates are unknown; give --peak-tflops and --peak-gbs".into(),
    };
    let text = format!(
        "{card}: instructions one by one, {whole_ms:.2} ms per step of {micro_batch} × {sequence} in {dtype}, median of {}; {rates}\n{}\n{}",
        steps.len(),
        table("operation", &by_operation, whole_ms),
        table("operation and layer", &by_layer, whole_ms),
    );
    Found::new(true, text, &Figures { card, step, peak, whole_ms, by_operation, by_layer })
}

/// One layer stands for all of its kind: h.3.mlp becomes h.*.mlp.
fn any_block(layer: &str) -> String {
    let star = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    layer.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// What a group did in one step.
#[derive(Debug, Default)]
struct Sum {
    calls: usize,
    seconds: f64,
    flops: u64,
    bytes: u64,
    least_seconds: f64,
}

/// The groups, the longest first.
fn rows(steps: &[Vec<Timed>], peak: Option<Peak>, group: impl Fn(&Timed) -> String) -> Vec<Row> {
    let mut groups: BTreeMap<String, Vec<Sum>> = BTreeMap::new();
    for (index, step) in steps.iter().enumerate() {
        for timed in step {
            let sums = groups.entry(group(timed)).or_default();
            sums.resize_with(index + 1, Sum::default);
            let sum = &mut sums[index];
            sum.calls += 1;
            sum.seconds += timed.time.as_secs_f64();
            sum.flops += timed.flops;
            sum.bytes += timed.bytes;
            sum.least_seconds += peak.map_or(0.0, |peak| peak.seconds(timed.flops, timed.bytes));
        }
    }
    let row = |(name, sums): (String, Vec<Sum>)| {
        let seconds = median(sums.iter().map(|sum| sum.seconds).collect())?;
        // Every step has the same instructions.
        let &Sum { calls, flops, bytes, least_seconds, .. } = sums.first()?;
        let (flops_per_second, bytes_per_second) = (flops as f64 / seconds, bytes as f64 / seconds);
        let of_roofline = peak.map(|_| least_seconds / seconds);
        Some(Row { name, calls, ms: seconds * 1e3, flops_per_second, bytes_per_second, of_roofline })
    };
    let mut rows: Vec<Row> = groups.into_iter().filter_map(row).collect();
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

fn table(title: &str, rows: &[Row], whole_ms: f64) -> String {
    let mut text = format!("\n{title:40}  calls   ms/step   share   TFLOP/s      GB/s   of roofline");
    for Row { name, calls, ms, flops_per_second, bytes_per_second, of_roofline } in rows {
        text += &format!(
            "\n{name:40} {calls:6} {ms:9.3} {:6.1}% {:9.2} {:9.1} {:>13}",
            100.0 * ms / whole_ms,
            flops_per_second / 1e12,
            bytes_per_second / 1e9,
            of_roofline.map_or("unknown".into(), |part| format!("{:.1}%", part * 100.0)),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gapless::engine::cuda::Work;

    use super::*;

    fn timed(operation: &'static str, layer: &str, ms: u64) -> Timed {
        let time = Duration::from_millis(ms);
        let (layer, kernels) = (layer.to_owned(), Vec::new());
        let work = Work { operation, layer, micro_batch: 0, kernels, flops: 1_000_000, bytes: 20_000 };
        Timed { work, time }
    }

    #[test]
    fn rows_are_medians_of_sums_beside_the_roofline() {
        let step = |ms| vec![timed("linear", "h.0.mlp", ms), timed("linear", "h.11.mlp", ms), timed("add", "h.0", 1)];
        let steps = [step(2), step(8), step(4)];
        // Arithmetic takes 1 ms, bytes take 2.
        let peak = Some(Peak { flops: 1e9, bytes: 1e7 });
        let rows = rows(&steps, peak, |timed| format!("{} {}", timed.operation, any_block(&timed.layer)));
        let short: Vec<_> = rows.iter().map(|row| (&row.name[..], row.calls, row.ms, row.of_roofline)).collect();
        assert_eq!(short, [("linear h.*.mlp", 2, 8.0, Some(0.5)), ("add h.*", 1, 1.0, Some(2.0))]);
        assert_eq!((rows[0].flops_per_second, rows[0].bytes_per_second), (2.5e8, 5e6));
        let text = table("operation", &rows, 9.0);
        assert!(text.contains("  88.9%      0.00       0.0         50.0%"), "{text}");
    }
}
