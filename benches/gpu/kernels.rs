//! Measures the time of a step by operation, by operation and kind of layer, and by launch. Each time is compared
//! with the minimum that the device needs for the arithmetic and bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use gapless::engine::cuda::{LaunchWork, Timed};
use serde::Serialize;

use super::figures::{Peak, PeakArguments, median};
use super::plan::Shape;
use super::probe::{Card, Gpu};
use super::record::Found;
use super::step::Step;
use super::tokens::Tokens;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    /// Measured steps.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    #[arg(long, default_value_t = 8)]
    micro_batch: usize,
    #[command(flatten)]
    peak: PeakArguments,
}

/// The measurements of a group of instructions.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    name: String,
    calls: usize,
    /// Milliseconds per step: the median over the steps.
    ms: f64,
    flops_per_second: f64,
    bytes_per_second: f64,
    /// The sum of the minimum times at the device's peak rates, divided by the measured time.
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
    by_launch: Vec<Row>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let step = arguments.shape.step(arguments.micro_batch);
    let Step { dtype, micro_batch, sequence, .. } = step;
    let mut trainer = step.trainer(arguments.device.choice())?;
    let (tokens, targets) = Tokens::uniform(step.config().vocabulary(), step.seed).batch(micro_batch, sequence);
    trainer.profile(&tokens, &targets)?; // The first run is slower, because it touches memory for the first time.
    let steps = (0..arguments.steps).map(|_| trainer.profile(&tokens, &targets)).collect::<Result<Vec<_>, _>>()?;
    let peak = arguments.peak.peak(&card.card, dtype);
    let by_operation = rows(&steps, peak, |timed| Item::whole(timed, timed.operation.to_owned()));
    let by_layer =
        rows(&steps, peak, |timed| Item::whole(timed, format!("{} {}", timed.operation, any_block(&timed.layer))));
    let by_launch = rows(&steps, peak, Item::launches);
    let whole_ms = by_operation.iter().map(|row| row.ms).sum();
    let rates = match peak {
        Some(Peak { flops, bytes }) => format!("roofline of {:.0} TFLOP/s and {:.0} GB/s", flops / 1e12, bytes / 1e9),
        None => "no roofline: the device's rates are unknown; give --peak-tflops and --peak-gbs".into(),
    };
    let text = format!(
        "{card}: launches one by one, {whole_ms:.2} ms per step of {micro_batch} × {sequence} in {dtype}, median of {}; {rates}\n{}\n{}\n{}",
        steps.len(),
        table("operation", &by_operation, whole_ms),
        table("operation and layer", &by_layer, whole_ms),
        table("launch", &by_launch, whole_ms),
    );
    Found::new(true, text, &Figures { card, step, peak, whole_ms, by_operation, by_layer, by_launch })
}

/// Returns the name of a layer with its index replaced, so that equal layers form a group. For example, h.3.mlp
/// becomes h.*.mlp.
fn any_block(layer: &str) -> String {
    let star = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    layer.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// The totals of a group in one step.
#[derive(Debug, Default)]
struct Sum {
    calls: usize,
    seconds: f64,
    flops: u64,
    bytes: u64,
    least_seconds: f64,
}

/// A timed instruction or launch, and the name of its group.
struct Item {
    name: String,
    time: Duration,
    flops: u64,
    bytes: u64,
}

impl Item {
    /// Returns an instruction as one item.
    fn whole(timed: &Timed, name: String) -> Vec<Self> {
        vec![Self { name, time: timed.time, flops: timed.flops, bytes: timed.bytes }]
    }

    /// Returns one item per launch, named after its operation, its kernel or product, and the library's algorithm.
    fn launches(timed: &Timed) -> Vec<Self> {
        let each = timed.launches.iter().zip(&timed.times).zip(&timed.algorithms);
        let item = |((launch, &time), algorithm): ((&LaunchWork, &Duration), &Option<String>)| {
            let algorithm = algorithm.as_ref().map_or(String::new(), |algorithm| format!(" ({algorithm})"));
            let off = if launch.is_aligned { "" } else { ", not aligned" };
            let name = format!("{}: {}{algorithm}{off}", timed.operation, launch.name);
            Self { name, time, flops: launch.flops, bytes: launch.bytes }
        };
        each.map(item).collect()
    }
}

/// Returns the groups' measurements, slowest group first.
fn rows(steps: &[Vec<Timed>], peak: Option<Peak>, items: impl Fn(&Timed) -> Vec<Item>) -> Vec<Row> {
    let mut groups: BTreeMap<String, Vec<Sum>> = BTreeMap::new();
    for (index, step) in steps.iter().enumerate() {
        for item in step.iter().flat_map(&items) {
            let sums = groups.entry(item.name).or_default();
            sums.resize_with(index + 1, Sum::default);
            let sum = &mut sums[index];
            sum.calls += 1;
            sum.seconds += item.time.as_secs_f64();
            sum.flops += item.flops;
            sum.bytes += item.bytes;
            sum.least_seconds += peak.map_or(0.0, |peak| peak.seconds(item.flops, item.bytes));
        }
    }
    let row = |(name, sums): (String, Vec<Sum>)| {
        let seconds = median(sums.iter().map(|sum| sum.seconds).collect())?;
        // All steps have the same instructions.
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
    use gapless::engine::cuda::Work;

    use super::*;

    fn timed(operation: &'static str, layer: &str, ms: u64) -> Timed {
        let time = Duration::from_millis(ms);
        let launch = |is_product| LaunchWork {
            name: if is_product { "product 8×8×8" } else { "kernel" }.to_owned(),
            is_product,
            is_aligned: true,
            flops: 500_000,
            bytes: 10_000,
        };
        let launches = vec![launch(true), launch(false)];
        let work =
            Work { operation, layer: layer.to_owned(), micro_batch: 0, launches, flops: 1_000_000, bytes: 20_000 };
        Timed { work, time, times: vec![time / 4, time * 3 / 4], algorithms: vec![Some("tile 3".to_owned()), None] }
    }

    #[test]
    fn rows_are_medians_of_sums_beside_the_roofline() {
        let step = |ms| vec![timed("linear", "h.0.mlp", ms), timed("linear", "h.11.mlp", ms), timed("add", "h.0", 1)];
        let steps = [step(2), step(8), step(4)];
        // The arithmetic alone takes 1 ms, and the bytes alone 2 ms.
        let peak = Some(Peak { flops: 1e9, bytes: 1e7 });
        let by_layer = |timed: &Timed| Item::whole(timed, format!("{} {}", timed.operation, any_block(&timed.layer)));
        let by_launch = rows(&steps, peak, Item::launches);
        let rows = rows(&steps, peak, by_layer);
        let short: Vec<_> = rows.iter().map(|row| (&row.name[..], row.calls, row.ms, row.of_roofline)).collect();
        assert_eq!(short, [("linear h.*.mlp", 2, 8.0, Some(0.5)), ("add h.*", 1, 1.0, Some(2.0))]);
        assert_eq!((rows[0].flops_per_second, rows[0].bytes_per_second), (2.5e8, 5e6));
        let launches: Vec<_> = by_launch.iter().map(|row| (&row.name[..], row.calls, row.ms)).collect();
        let expected = [
            ("linear: kernel", 2, 6.0),
            ("linear: product 8×8×8 (tile 3)", 2, 2.0),
            ("add: kernel", 1, 0.75),
            ("add: product 8×8×8 (tile 3)", 1, 0.25),
        ];
        assert_eq!(launches, expected);
        let text = table("operation", &rows, 9.0);
        assert!(text.contains("  88.9%      0.00       0.0         50.0%"), "{text}");
    }
}
