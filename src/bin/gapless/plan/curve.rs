//! Budget against time: what each smaller arena costs.

use std::fmt;

use gapless::engine::compile::Error as CompileError;
use gapless::step::Step;
use gapless::{Recompute, TrainError};
use gapless_alloc::draw::Bytes;
use serde::Serialize;

use super::step::{Planned, plan_rank};

/// Steps of one model under budgets, from the smallest to everything kept.
#[derive(Debug, Serialize)]
pub struct Curve {
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    budget: u64,
    arena_bytes: u64,
    step_ms: f64,
    overhead: f64,
}

/// Plans `count` budgets of a rank, evenly spaced from the smallest that works to what takes no recomputation.
pub fn curve(step: &Step, rank: usize, count: usize) -> Result<Curve, TrainError> {
    let graph = step.record()?;
    let all = plan_rank(&step.recomputing(Recompute::None), &graph, rank)?.0.arena_bytes;
    let rates = step.device.rates(step.precision);
    let under = |bytes| plan_rank(&step.recomputing(Recompute::Budget { bytes, rates }), &graph, rank);
    let smallest = match under(1) {
        Err(TrainError::Compile(CompileError::OverBudget { smallest, .. })) => smallest.min(all),
        planned => planned?.0.arena_bytes,
    };
    let steps = count.saturating_sub(1).max(1) as u128;
    let budgets = (0..=steps).map(|i| smallest + (u128::from(all - smallest) * i / steps) as u64);
    let mut points = Vec::new();
    for budget in budgets {
        match under(budget) {
            Ok((planned, _)) => {
                let Planned { arena_bytes, step_ms, overhead, .. } = planned;
                points.push(Point { budget, arena_bytes, step_ms, overhead });
            }
            // So close to the smallest that the search does not meet it again.
            Err(TrainError::Compile(CompileError::OverBudget { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Curve { points })
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>12} {:>12} {:>12} {:>9}", "budget", "arena", "step", "overhead")?;
        for point in &self.points {
            let (budget, arena) = (Bytes(point.budget), Bytes(point.arena_bytes));
            let overhead = 100.0 * point.overhead;
            writeln!(f, "{budget:>12} {arena:>12} {:>9.2} ms {overhead:>7.2} %", point.step_ms)?;
        }
        Ok(())
    }
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
/// Pixels around the plot, for the names of the axes.
const MARGIN: f64 = 56.0;

impl Curve {
    /// Arena bytes to the right, overhead upwards.
    pub fn svg(&self) -> String {
        let bytes = || self.points.iter().map(|point| point.arena_bytes);
        let (least, most) = (bytes().min().unwrap_or(0), bytes().max().unwrap_or(0));
        let worst = self.points.iter().map(|point| point.overhead).fold(0.01, f64::max);
        let x = |bytes: u64| MARGIN + (bytes - least) as f64 / (most - least).max(1) as f64 * (WIDTH - 2.0 * MARGIN);
        let y = |overhead: f64| HEIGHT - MARGIN - overhead / worst * (HEIGHT - 2.0 * MARGIN);
        let path: Vec<String> =
            self.points.iter().map(|p| format!("{:.1},{:.1}", x(p.arena_bytes), y(p.overhead))).collect();
        let dots: String = self
            .points
            .iter()
            .map(|p| {
                format!(
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"><title>{}: {:.2} ms, {:.2} % computed again</title></circle>\n",
                    x(p.arena_bytes),
                    y(p.overhead),
                    Bytes(p.arena_bytes),
                    p.step_ms,
                    100.0 * p.overhead
                )
            })
            .collect();
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"monospace\" \
             font-size=\"11\" fill=\"#24527a\">\n\
             <path d=\"M{MARGIN} {MARGIN}V{bottom}H{right}\" fill=\"none\" stroke=\"#888\"/>\n\
             <polyline points=\"{path}\" fill=\"none\" stroke=\"#24527a\"/>\n{dots}\
             <text x=\"{MARGIN}\" y=\"{names}\">{least}</text>\
             <text x=\"{right}\" y=\"{names}\" text-anchor=\"end\">{most}</text>\
             <text x=\"{MARGIN}\" y=\"{top}\">{worst:.1} % more time</text>\n</svg>\n",
            bottom = HEIGHT - MARGIN,
            right = WIDTH - MARGIN,
            path = path.join(" "),
            names = HEIGHT - MARGIN + 18.0,
            top = MARGIN - 8.0,
            least = Bytes(least),
            most = Bytes(most),
            worst = 100.0 * worst,
        )
    }
}
