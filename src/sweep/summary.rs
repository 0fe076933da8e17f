//! Summaries over all rows of a sweep: how much memory each allocator wastes, and the throughput of the fastest step
//! within each budget.
//!
//! Wasted bytes are reserved − allocated at the peak, and fragmentation is their fraction of the reserved bytes. For a
//! plan, the live bytes count as allocated, and the bytes of the arena that the step uses as reserved. What expert ranks
//! reserve for other rows than those of the step is counted separately, because the other allocators reserve nothing
//! for such rows. A reduction compares the wasted bytes of a plan and of an allocator, as in STAlloc's paper (arXiv
//! 2507.16274, figure 8). If `lowering` selects an eager framework, the plan is for gapless's own step and the allocators
//! replay the eager one, so a reduction compares two programs ([`Sweep::replays_eager`]).

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
    /// Bytes that the allocator wastes, summed over these configurations.
    pub wasted_bytes: u64,
    /// Bytes that the plans waste, summed over these configurations.
    pub planned_wasted_bytes: u64,
    /// The fraction of `wasted_bytes` that the plans save. Negative if the plans waste more: then its magnitude is the
    /// fraction of `planned_wasted_bytes` that the allocator saves.
    pub reduction: f64,
}

/// The bytes that expert ranks reserve for other rows than those of the step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnusedReserve {
    /// Number of planned configurations.
    pub configurations: usize,
    /// Mean of the unused bytes of the arena.
    pub mean_bytes: u64,
    /// The most unused bytes of an arena.
    pub most_bytes: u64,
    /// Number of configurations whose reserve is too small for the rows, so that it grows.
    pub grown: usize,
}

/// Throughput of the fastest configurations that fit one budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Throughput {
    /// Budget in bytes per rank.
    pub budget: u64,
    /// Tokens per second, indexed by menu ([`Sweep::menus`]) and then by allocator. Allocator 0 is the plan, whose whole
    /// arena must fit, and the next are [`Sweep::allocators`]. If expert ranks have reserves, the last is the plan again,
    /// of which only the bytes that the step uses must fit. `None` if no configuration fits the budget.
    pub tokens_per_second: Vec<Vec<Option<f64>>>,
}

/// Speedup by plans. For each budget, compares the fastest step that fits when planned with the fastest step that fits
/// under an allocator. What expert ranks reserve for other rows than those of the step does not count, except in
/// [`Gain::mean_with_reserve`].
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
    /// Number of budgets that a configuration fits only under the allocator.
    pub only_allocator: usize,
    /// Mean gain over these `budgets`, as a fraction of the throughput under the allocator.
    pub mean: f64,
    /// Largest gain at one of these budgets.
    pub most: f64,
    /// Budget in bytes at which the gain is largest; the smallest if there are several.
    pub most_at: u64,
    /// If expert ranks have reserves: the mean gain if the whole arena must fit the budget, over `budgets_with_reserve`.
    pub mean_with_reserve: Option<f64>,
    /// If expert ranks have reserves: the number of budgets that at least one configuration fits with its whole arena,
    /// and at least one under the allocator.
    pub budgets_with_reserve: Option<usize>,
}

impl Figures {
    /// Returns the reserved bytes and the live bytes at the peak of an allocator. If `kind` is `None`, returns the bytes
    /// of the arena that the step uses, and the live bytes of the plan. The result is `None` if the step was not planned,
    /// or was not replayed through the allocator.
    fn reserved_and_allocated(&self, kind: Option<Kind>) -> Option<(u64, u64)> {
        match kind {
            None => Some((self.served()?, self.live())),
            Some(kind) => Some((*self.reserved.get(kind.name())?, self.allocated)),
        }
    }

    /// Returns the fraction of the reserved bytes that is unused at the peak. Returns `None` if the step was not
    /// planned, or was not replayed through the allocator.
    pub fn fragmentation(&self, kind: Option<Kind>) -> Option<f64> {
        let (reserved, allocated) = self.reserved_and_allocated(kind)?;
        (reserved > 0).then(|| 1.0 - allocated as f64 / reserved as f64)
    }

    /// Returns the bytes that an allocator wastes, and those that the plan wastes.
    fn wasted(&self, kind: Kind) -> Option<[u64; 2]> {
        let wasted = |kind| {
            let (reserved, allocated) = self.reserved_and_allocated(kind)?;
            Some(reserved.saturating_sub(allocated))
        };
        Some([wasted(Some(kind))?, wasted(None)?])
    }

    /// Returns the fraction of an allocator's wasted bytes that the plan saves, as [`Fragmentation::reduction`].
    /// Returns `None` if neither wastes bytes, or if the step was not planned and replayed.
    pub fn reduction(&self, kind: Kind) -> Option<f64> {
        self.wasted(kind).and_then(reduction)
    }
}

/// Returns (before − after) ÷ the larger of both: a number from −1 to 1. Returns `None` if both are 0.
fn reduction([before, after]: [u64; 2]) -> Option<f64> {
    let larger = before.max(after);
    (larger > 0).then(|| (before as f64 - after as f64) / larger as f64)
}

/// Sums up what expert ranks reserve for other rows. Returns `None` if no arena has unused bytes, and none had to grow.
pub fn unused_reserve(rows: &[Row]) -> Option<UnusedReserve> {
    let figures = || rows.iter().filter_map(|row| row.figures.as_ref());
    let unused: Vec<u64> = figures().filter_map(|figures| Some(figures.arena()? - figures.served()?)).collect();
    let most_bytes = unused.iter().copied().max()?;
    let grown = figures().filter(|figures| figures.reserve_grown_to.is_some()).count();
    (most_bytes > 0 || grown > 0).then(|| UnusedReserve {
        configurations: unused.len(),
        mean_bytes: unused.iter().sum::<u64>() / unused.len() as u64,
        most_bytes,
        grown,
    })
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
        let wasted = figures.iter().filter_map(|figures| figures.wasted(kind));
        let [wasted_bytes, planned_wasted_bytes] =
            wasted.fold([0, 0], |[a, b], [more, planned]| [a + more, b + planned]);
        let mean_of = |at: usize| mean(&all.iter().map(|pair| pair[at]).collect::<Vec<_>>());
        (!all.is_empty()).then(|| Fragmentation {
            allocator: kind.name(),
            configurations: all.len(),
            mean: mean_of(0),
            most: all.iter().map(|pair| pair[0]).fold(0.0, f64::max),
            planned: mean_of(1),
            wasted_bytes,
            planned_wasted_bytes,
            reduction: reduction([wasted_bytes, planned_wasted_bytes]).unwrap_or(0.0),
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
    let columns: Vec<Column> = columns(sweep, rows);
    let at = |budget: u64| {
        let mut best = vec![vec![None; columns.len()]; sweep.menus.len()];
        for (configuration, row) in sweep.configurations.iter().zip(rows) {
            let Some(figures) = &row.figures else { continue };
            for (at, column) in columns.iter().enumerate() {
                if column.bytes(figures).is_none_or(|bytes| bytes > budget) {
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

/// A number of bytes by which configurations are chosen: a column of [`Throughput`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    Arena,
    Allocator(Kind),
    /// The bytes of the arena that the step uses.
    Served,
}

impl Column {
    pub fn name(self) -> &'static str {
        match self {
            Self::Arena => Kind::GAPLESS.name(),
            Self::Allocator(kind) => kind.name(),
            Self::Served => "gapless-without-unused-reserve",
        }
    }

    /// Returns the bytes, or `None` if the step was not planned or not replayed.
    pub fn bytes(self, figures: &Figures) -> Option<u64> {
        match self {
            Self::Arena => figures.arena(),
            Self::Allocator(kind) => figures.reserved.get(kind.name()).copied(),
            Self::Served => figures.served(),
        }
    }
}

/// Returns the columns of [`Throughput`].
pub(super) fn columns(sweep: &Sweep, rows: &[Row]) -> Vec<Column> {
    let allocators = sweep.allocators.iter().copied().map(Column::Allocator);
    let served = unused_reserve(rows).filter(|reserve| reserve.most_bytes > 0).map(|_| Column::Served);
    std::iter::once(Column::Arena).chain(allocators).chain(served).collect()
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
                only_allocator: 0,
                mean: 0.0,
                most: 0.0,
                most_at: 0,
                mean_with_reserve: None,
                budgets_with_reserve: None,
            };
            let mut with_reserve = Vec::new();
            for Throughput { budget, tokens_per_second } in throughput {
                let tokens = &tokens_per_second[menu];
                let served = tokens.get(1 + sweep.allocators.len());
                if served.is_some() {
                    let both = tokens[0].zip(tokens[at]);
                    with_reserve.extend(both.map(|(arena, other)| arena / other - 1.0));
                    gain.budgets_with_reserve = Some(with_reserve.len());
                }
                match (*served.unwrap_or(&tokens[0]), tokens[at]) {
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
                    (None, Some(_)) => gain.only_allocator += 1,
                    (None, None) => {}
                }
            }
            gain.mean /= gain.budgets.max(1) as f64;
            gain.mean_with_reserve = (!with_reserve.is_empty()).then(|| mean(&with_reserve));
            gains.push(gain);
        }
    }
    gains
}

/// Returns the contents of `throughput.csv`, which has a line for each budget and menu.
pub(super) fn csv(sweep: &Sweep, rows: &[Row], throughput: &[Throughput]) -> String {
    let names: Vec<&str> = columns(sweep, rows).into_iter().map(Column::name).collect();
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

/// Returns the number of rows that a build of another commit computed. A row is reused as long as the version of
/// gapless is the same, so that no commit loses a long sweep.
pub fn of_other_commits(rows: &[Row]) -> usize {
    let here = Origin::new(None).commit;
    rows.iter().filter(|row| row.origin.commit != here).count()
}

/// Returns the rows whose plan wastes at least the fraction `EXCEPTION` of its arena.
pub fn above_bound(rows: &[Row]) -> Vec<&Row> {
    let is_above = |row: &&Row| {
        let fragmentation = row.figures.as_ref().and_then(|figures| figures.fragmentation(None));
        fragmentation.is_some_and(|part| part >= EXCEPTION)
    };
    rows.iter().filter(is_above).collect()
}
