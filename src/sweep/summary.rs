//! What a sweep's rows say together: what each allocator wastes, and how fast the fastest step is that fits a budget under it.
//!
//! Fragmentation is what is reserved beyond what is allocated, at their peaks; of a plan, what its arena has beyond the live bytes. What a
//! plan takes off it is counted in bytes, as STAlloc's paper does (arXiv 2507.16274, figure 8).

use gapless_allocators::Kind;
use serde::Serialize;

use super::row::Figures;
use super::{Row, Sweep};

/// Budgets that throughput is compared at, about.
const BUDGETS: u64 = 64;
/// A plan that is further above its bound is an exception, by this part.
const EXCEPTION: f64 = 0.0005;

/// What an allocator wastes on the configurations that were both planned and replayed through it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fragmentation {
    /// Its name.
    pub allocator: &'static str,
    /// So many configurations.
    pub configurations: usize,
    /// Its mean fragmentation.
    pub mean: f64,
    /// The most.
    pub most: f64,
    /// The plans' mean on the same configurations.
    pub planned: f64,
    /// The mean of what plans take off it, each as a part of it; of the configurations where there is something to take off.
    pub reduction: f64,
}

/// The most tokens per second of what fits a budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Throughput {
    /// Bytes of each rank.
    pub budget: u64,
    /// By menu ([`Sweep::menus`]), then of plans and of each allocator ([`Sweep::allocators`]); none where nothing fits.
    pub tokens_per_second: Vec<Vec<Option<f64>>>,
}

/// How much faster the fastest step is that fits under plans, than the one that fits under an allocator, over the same budgets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gain {
    /// The allocator.
    pub allocator: &'static str,
    /// The menu to choose from.
    pub menu: String,
    /// Budgets at which something fits under both.
    pub budgets: usize,
    /// Those of them at which nothing is gained.
    pub without: usize,
    /// Budgets at which something fits under plans alone.
    pub only_planned: usize,
    /// The mean gain over the former, as a part of the allocator's tokens per second.
    pub mean: f64,
    /// The most.
    pub most: f64,
    /// At that budget, the least of them.
    pub most_at: u64,
}

impl Figures {
    /// Bytes that an allocator reserves, `None` being the plan, beside those that it has to hold.
    fn reserved_and_allocated(&self, kind: Option<Kind>) -> Option<(u64, u64)> {
        match kind {
            None => Some((self.arena()?, self.live())),
            Some(kind) => Some((*self.reserved.get(kind.name())?, self.allocated)),
        }
    }

    /// The part of what is reserved that nothing is in.
    pub fn fragmentation(&self, kind: Option<Kind>) -> Option<f64> {
        let (reserved, allocated) = self.reserved_and_allocated(kind)?;
        (reserved > 0).then(|| 1.0 - allocated as f64 / reserved as f64)
    }

    /// The part of an allocator's wasted bytes that the plan takes off, where there are any.
    pub fn reduction(&self, kind: Kind) -> Option<f64> {
        let wasted = |kind| {
            let (reserved, allocated) = self.reserved_and_allocated(kind)?;
            Some(reserved.saturating_sub(allocated) as f64)
        };
        let (before, after) = (wasted(Some(kind))?, wasted(None)?);
        (before > 0.0).then(|| 1.0 - after / before)
    }
}

/// What each allocator wastes; those that no configuration was replayed through are left out.
pub fn fragmentation(sweep: &Sweep, rows: &[Row]) -> Vec<Fragmentation> {
    let of_kind = |&kind: &Kind| {
        let both = |figures: &Figures| {
            let (of, planned) = (figures.fragmentation(Some(kind))?, figures.fragmentation(None)?);
            Some([of, planned])
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

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

/// The fastest of what fits, over budgets in equal steps up to the largest device.
pub fn throughput(sweep: &Sweep, rows: &[Row]) -> Vec<Throughput> {
    let capacity = |row: &Row| row.figures.as_ref().and_then(Figures::arena);
    let Some(largest) = rows.iter().filter_map(capacity).max() else { return Vec::new() };
    let step = (largest / BUDGETS).max(1).next_power_of_two();
    let kinds: Vec<Option<Kind>> = std::iter::once(None).chain(sweep.allocators.iter().copied().map(Some)).collect();
    let at = |budget: u64| {
        let mut best = vec![vec![None; kinds.len()]; sweep.menus.len()];
        for (of, row) in sweep.configurations.iter().zip(rows) {
            let Some(figures) = &row.figures else { continue };
            for (at, &kind) in kinds.iter().enumerate() {
                if figures.reserved_and_allocated(kind).is_none_or(|(reserved, _)| reserved > budget) {
                    continue;
                }
                for &menu in &of.menus {
                    let best: &mut Option<f64> = &mut best[menu][at];
                    *best = Some(best.unwrap_or(0.0).max(figures.tokens_per_second));
                }
            }
        }
        Throughput { budget, tokens_per_second: best }
    };
    let all = (1..=largest.div_ceil(step)).map(|number| at(number * step));
    all.filter(|of| of.tokens_per_second.iter().flatten().any(Option::is_some)).collect()
}

/// What plans gain over each allocator, from each menu.
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

/// Throughput as a table: a line for each budget and menu.
pub(super) fn csv(sweep: &Sweep, throughput: &[Throughput]) -> String {
    let names: Vec<&str> = [Kind::Gapless].iter().chain(&sweep.allocators).map(|kind| kind.name()).collect();
    let mut text = format!("budget_bytes,menu,{}\n", names.join(","));
    for Throughput { budget, tokens_per_second } in throughput {
        for (menu, best) in sweep.menus.iter().zip(tokens_per_second) {
            let best = best.iter().map(|best| best.map_or_else(String::new, |best| format!("{best:.1}")));
            text += &format!("{budget},{menu},{}\n", best.collect::<Vec<_>>().join(","));
        }
    }
    text
}

/// The rows whose plan ends above the bytes that are alive at once, by more than rounding to a tenth of a percent shows.
pub fn above_bound(rows: &[Row]) -> Vec<&Row> {
    let is_above = |row: &&Row| {
        let fragmentation = row.figures.as_ref().and_then(|figures| figures.fragmentation(None));
        fragmentation.is_some_and(|part| part >= EXCEPTION)
    };
    rows.iter().filter(is_above).collect()
}
