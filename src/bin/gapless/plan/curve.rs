//! The curve of a rank's busy time over memory budget, which shows how much time a smaller arena costs.

use std::fmt;

use gapless::TrainError;
use gapless::engine::compile::Error as CompileError;
use gapless::step::Step;
use gapless_alloc::draw::{Bytes, THEME, escape};
use serde::Serialize;

use super::step::{Planned, plan_rank};

/// Plans of one step under several budgets, from the smallest budget that fits to the one that requires no
/// recomputation.
#[derive(Debug, Serialize)]
pub struct Curve {
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    budget: u64,
    arena_bytes: u64,
    rank_ms: f64,
    overhead: f64,
}

/// Plans a rank under `count` budgets. They are evenly spaced, from the smallest budget that fits to the one that
/// requires no recomputation.
pub fn curve(step: &Step, rank: usize, count: usize) -> Result<Curve, TrainError> {
    let all = plan_rank(&step.within(None), rank)?.0.arena_bytes;
    let under = |bytes| plan_rank(&step.within(Some(bytes)), rank);
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
                let Planned { arena_bytes, rank_ms, overhead, .. } = planned;
                points.push(Point { budget, arena_bytes, rank_ms, overhead });
            }
            // This budget is so close to the smallest one that the search finds no recomputation for it. It is left
            // out.
            Err(TrainError::Compile(CompileError::OverBudget { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Curve { points })
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>12} {:>12} {:>12} {:>9}", "budget", "arena", "busy", "overhead")?;
        for point in &self.points {
            let (budget, arena) = (Bytes(point.budget), Bytes(point.arena_bytes));
            let overhead = 100.0 * point.overhead;
            writeln!(f, "{budget:>12} {arena:>12} {:>9.2} ms {overhead:>7.2} %", point.rank_ms)?;
        }
        Ok(())
    }
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
/// Space around the plot in pixels, for titles and ticks: left, top, right, bottom.
const MARGINS: [f64; 4] = [72.0, 64.0, 28.0, 56.0];

/// An axis, which maps values to pixels.
struct Axis {
    values: [f64; 2],
    pixels: [f64; 2],
    /// Distance between ticks.
    step: f64,
}

impl Axis {
    /// Creates an axis that covers all values. `steps` has the possible distances of ticks, in ascending order. The
    /// first distance that needs at most about seven ticks is used.
    fn new(values: impl Iterator<Item = f64> + Clone, pixels: [f64; 2], mut steps: impl Iterator<Item = f64>) -> Self {
        let (least, most) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max));
        let step = steps.find(|step| (most - least) / step <= 6.0).unwrap_or(1.0);
        let least = (least / step).floor() * step;
        Self { values: [least, ((most / step).ceil() * step).max(least + step)], pixels, step }
    }

    fn at(&self, value: f64) -> f64 {
        let [[first, last], [from, to]] = [self.values, self.pixels];
        from + (value - first) / (last - first) * (to - from)
    }

    /// Returns the ticks, each as its value and its pixel.
    fn ticks(&self) -> impl Iterator<Item = (f64, f64)> {
        let count = ((self.values[1] - self.values[0]) / self.step).round() as u32;
        (0..=count).map(|i| self.values[0] + f64::from(i) * self.step).map(|value| (value, self.at(value)))
    }
}

impl Curve {
    /// Draws the curve as SVG. The x axis has the arena bytes, and the y axis the time for which the rank is busy. A ring
    /// marks the plan `chosen`, which is given by its bytes and milliseconds.
    pub fn svg(&self, title: &str, chosen: (u64, f64)) -> String {
        let [left, top, right, bottom] = [MARGINS[0], MARGINS[1], WIDTH - MARGINS[2], HEIGHT - MARGINS[3]];
        let points = || self.points.iter().map(|point| (point.arena_bytes, point.rank_ms)).chain([chosen]);
        let binary = (0..60).map(|power| (1u64 << power) as f64);
        let x = Axis::new(points().map(|(bytes, _)| bytes as f64), [left, right], binary);
        let decimal = (-9..12).flat_map(|power| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(power)));
        let y = Axis::new(points().map(|(_, time)| time), [bottom, top], decimal);

        let mut drawn = String::new();
        for (bytes, x) in x.ticks() {
            let bytes = Bytes(bytes as u64);
            drawn += &format!("<path class=\"line\" d=\"M{x:.1} {top}V{bottom}\"/>");
            drawn += &format!("<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{bytes}</text>\n", bottom + 18.0);
        }
        for (time, y) in y.ticks() {
            // Without this rounding, the label would show the rounding error of the sum.
            let time = (time * 1e9).round() / 1e9;
            drawn += &format!("<path class=\"line\" d=\"M{left} {y:.1}H{right}\"/>");
            drawn += &format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{time}</text>\n", left - 8.0, y + 4.0);
        }
        let at = |bytes: u64, time: f64| (x.at(bytes as f64), y.at(time));
        let places: Vec<String> = self
            .points
            .iter()
            .map(|point| at(point.arena_bytes, point.rank_ms))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        drawn += &format!("<polyline class=\"curve\" points=\"{}\"/>\n", places.join(" "));
        for Point { arena_bytes, rank_ms, overhead, .. } in &self.points {
            let (x, y) = at(*arena_bytes, *rank_ms);
            let says = format!("{}: {rank_ms:.2} ms, {:.2} % recomputed", Bytes(*arena_bytes), 100.0 * overhead);
            drawn += &format!(
                "<circle class=\"point\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{says}</title></circle>\n"
            );
        }
        let (chosen_x, chosen_y) = at(chosen.0, chosen.1);
        let says = format!("chosen: {}, {:.2} ms", Bytes(chosen.0), chosen.1);
        drawn += &format!(
            "<circle class=\"chosen\" cx=\"{chosen_x:.1}\" cy=\"{chosen_y:.1}\" r=\"8\"><title>{says}</title></circle>\n"
        );
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n\
             <style>{THEME}{STYLE}</style>\n<rect class=\"ground\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n\
             <text class=\"title\" x=\"{left}\" y=\"26\">{title}</text>\n\
             <text x=\"{left}\" y=\"46\">modelled milliseconds per step for which the rank is busy; ring: {says}</text>\n{drawn}\
             <text x=\"{right}\" y=\"{}\" text-anchor=\"end\">arena</text>\n</svg>\n",
            HEIGHT - 14.0,
        )
    }
}

const STYLE: &str = "
text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
.title { font-size: 15px; font-weight: 600; fill: var(--text); }
.ground { fill: var(--ground); }
.line { stroke: var(--line); }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.6; }
.point { fill: var(--accent); }
.chosen { fill: none; stroke: var(--bound); stroke-width: 2; }
";
