//! Summaries over all rows of a sweep: how much memory each allocator wastes, and the throughput of the fastest step
//! within each budget.
//!
//! Fragmentation is (reserved − allocated) ÷ reserved at the peak. For a plan, the arena counts as reserved and the
//! live bytes as allocated. A plan's reduction is the fraction of the wasted bytes that it saves, as in STAlloc's paper
//! (arXiv 2507.16274, figure 8).

use gapless_allocators::Kind;
use serde::Serialize;

use super::row::Figures;
use super::{Row, Sweep};
use crate::step::Origin;

/// Approximate number of budgets at which throughput is compared.
const BUDGETS: u64 = 64;
/// A plan that wastes at least this fraction of its arena is listed as an exception.
const EXCEPTION: f64 = 0.0005;

/// Fragmentation of an allocator, over the configurations that were both planned and replayed through this allocator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fragmentation {
    /// Name of the allocator.
    pub allocator: &'static str,
    /// Number of configurations counted.
    pub configurations: usize,
    /// Mean fragmentation of the allocator.
    pub mean: f64,
    /// Largest fragmentation of the allocator.
    pub most: f64,
    /// Mean fragmentation of the plans of the same configurations.
    pub planned: f64,
    /// Mean fraction of the allocator's wasted bytes that a plan saves. The mean is over the configurations for which
    /// the allocator wastes bytes.
    pub reduction: f64,
}

/// Throughput of the fastest configurations that fit one budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Throughput {
    /// Budget in bytes per rank.
    pub budget: u64,
    /// Tokens per second, indexed by menu ([`Sweep::menus`]) and then by allocator. Allocator 0 is the plan, and the
    /// others are [`Sweep::allocators`]. `None` if no configuration fits the budget.
    pub tokens_per_second: Vec<Vec<Option<f64>>>,
}

/// Speedup by plans. For each budget, compares the fastest step that fits when planned with the fastest step that fits
/// under an allocator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gain {
    /// Name of the allocator.
    pub allocator: &'static str,
    /// Menu from which the steps are chosen.
    pub menu: String,
    /// Number of budgets that at least one configuration fits when planned, and at least one under the allocator.
    pub budgets: usize,
    /// Number of these budgets at which plans do not raise the throughput.
    pub without: usize,
    /// Number of budgets that a configuration fits only when planned.
    pub only_planned: usize,
    /// Mean gain over these `budgets`, as a fraction of the throughput under the allocator.
    pub mean: f64,
    /// Largest gain at one of these budgets.
    pub most: f64,
    /// Budget in bytes at which the gain is largest; the smallest if there are several.
    pub most_at: u64,
}

impl Figures {
    /// Returns the reserved bytes and the live bytes at the peak of an allocator. If `kind` is `None`, returns those of
    /// the plan. The result is `None` if the step was not planned, or was not replayed through the allocator.
    fn reserved_and_allocated(&self, kind: Option<Kind>) -> Option<(u64, u64)> {
        match kind {
            None => Some((self.arena()?, self.live())),
            Some(kind) => Some((*self.reserved.get(kind.name())?, self.allocated)),
        }
    }

    /// Returns the fraction of the reserved bytes that is unused at the peak. Returns `None` if the step was not
    /// planned, or was not replayed through the allocator.
    pub fn fragmentation(&self, kind: Option<Kind>) -> Option<f64> {
        let (reserved, allocated) = self.reserved_and_allocated(kind)?;
        (reserved > 0).then(|| 1.0 - allocated as f64 / reserved as f64)
    }

    /// Returns the fraction of an allocator's wasted bytes that the plan saves, or `None` if the allocator wastes none
    /// or was not replayed.
    pub fn reduction(&self, kind: Kind) -> Option<f64> {
        let wasted = |kind| {
            let (reserved, allocated) = self.reserved_and_allocated(kind)?;
            Some(reserved.saturating_sub(allocated) as f64)
        };
        let (before, after) = (wasted(Some(kind))?, wasted(None)?);
        (before > 0.0).then(|| 1.0 - after / before)
    }
}

/// Computes the waste of each allocator through which some configuration was replayed.
pub fn fragmentation(sweep: &Sweep, rows: &[Row]) -> Vec<Fragmentation> {
    let of_kind = |&kind: &Kind| {
        let both = |figures: &Figures| {
            let (waste, planned) = (figures.fragmentation(Some(kind))?, figures.fragmentation(None)?);
            Some([waste, planned])
        };
        let figures: Vec<&Figures> = rows.iter().filter_map(|row| row.figures.as_ref()).collect();
        let all: Vec<[f64; 2]> = figures.iter().filter_map(|figures| both(figures)).collect();
        let reductions: Vec<f64> = figures.iter().filter_map(|figures| figures.reduction(kind)).collect();
        let mean_of = |at: usize| mean(&all.iter().map(|pair| pair[at]).collect::<Vec<_>>());
        (!all.is_empty()).then(|| Fragmentation {
            allocator: kind.name(),
            configurations: all.len(),
            mean: mean_of(0),
            most: all.iter().map(|pair| pair[0]).fold(0.0, f64::max),
            planned: mean_of(1),
            reduction: mean(&reductions),
        })
    };
    sweep.allocators.iter().filter_map(of_kind).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Computes the best throughput at equally spaced budgets, up to the largest arena. Budgets that no configuration fits
/// are omitted.
pub fn throughput(sweep: &Sweep, rows: &[Row]) -> Vec<Throughput> {
    let capacity = |row: &Row| row.figures.as_ref().and_then(Figures::arena);
    let Some(largest) = rows.iter().filter_map(capacity).max() else { return Vec::new() };
    let step = (largest / BUDGETS).max(1).next_power_of_two();
    let kinds: Vec<Option<Kind>> = std::iter::once(None).chain(sweep.allocators.iter().copied().map(Some)).collect();
    let at = |budget: u64| {
        let mut best = vec![vec![None; kinds.len()]; sweep.menus.len()];
        for (configuration, row) in sweep.configurations.iter().zip(rows) {
            let Some(figures) = &row.figures else { continue };
            for (at, &kind) in kinds.iter().enumerate() {
                if figures.reserved_and_allocated(kind).is_none_or(|(reserved, _)| reserved > budget) {
                    continue;
                }
                for &menu in &configuration.menus {
                    let best: &mut Option<f64> = &mut best[menu][at];
                    *best = Some(best.unwrap_or(0.0).max(figures.tokens_per_second));
                }
            }
        }
        Throughput { budget, tokens_per_second: best }
    };
    let all = (1..=largest.div_ceil(step)).map(|number| at(number * step));
    all.filter(|throughput| throughput.tokens_per_second.iter().flatten().any(Option::is_some)).collect()
}

/// Computes the gain of plans over each allocator, for each menu.
pub fn gains(sweep: &Sweep, throughput: &[Throughput]) -> Vec<Gain> {
    let mut gains = Vec::new();
    for (menu, name) in sweep.menus.iter().enumerate() {
        for (at, kind) in (1..).zip(&sweep.allocators) {
            let mut gain = Gain {
                allocator: kind.name(),
                menu: name.clone(),
                budgets: 0,
                without: 0,
                only_planned: 0,
                mean: 0.0,
                most: 0.0,
                most_at: 0,
            };
            for Throughput { budget, tokens_per_second } in throughput {
                match (tokens_per_second[menu][0], tokens_per_second[menu][at]) {
                    (Some(_), None) => gain.only_planned += 1,
                    (Some(planned), Some(other)) => {
                        let part = planned / other - 1.0;
                        gain.budgets += 1;
                        gain.without += usize::from(part <= 0.0);
                        gain.mean += part;
                        if part > gain.most {
                            (gain.most, gain.most_at) = (part, *budget);
                        }
                    }
                    (None, _) => {}
                }
            }
            gain.mean /= gain.budgets.max(1) as f64;
            gains.push(gain);
        }
    }
    gains
}

/// Returns the contents of `throughput.csv`, which has a line for each budget and menu.
pub(super) fn csv(sweep: &Sweep, throughput: &[Throughput]) -> String {
    let names: Vec<&str> = [Kind::Gapless].iter().chain(&sweep.allocators).map(|kind| kind.name()).collect();
    let mut text = format!("budget_bytes,menu,{},version,commit,sweep\n", names.join(","));
    let Origin { version, commit, .. } = Origin::new(None);
    let origin = format!("{version},{},{}", commit.unwrap_or_default(), sweep.digest());
    for Throughput { budget, tokens_per_second } in throughput {
        for (menu, best) in sweep.menus.iter().zip(tokens_per_second) {
            let best = best.iter().map(|best| best.map_or_else(String::new, |best| format!("{best:.1}")));
            text += &format!("{budget},{menu},{},{origin}\n", best.collect::<Vec<_>>().join(","));
        }
    }
    text
}

/// Returns the rows whose plan wastes at least the fraction `EXCEPTION` of its arena.
pub fn above_bound(rows: &[Row]) -> Vec<&Row> {
    let is_above = |row: &&Row| {
        let fragmentation = row.figures.as_ref().and_then(|figures| figures.fragmentation(None));
        fragmentation.is_some_and(|part| part >= EXCEPTION)
    };
    rows.iter().filter(is_above).collect()
}
