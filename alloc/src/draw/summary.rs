//! The plan in numbers: the tensors that fill the arena at its peak, and the bytes that stay unused over time.

use std::fmt;
use std::ops::Range;

use super::curve::split;
use super::text::printable;
use super::{Bytes, MemoryMap};
use crate::order::sort_by_key;
use crate::{Role, live_at};

/// Number of equal spans of time in [`Summary::spans`].
const SPANS: usize = 24;

/// A plan in numbers. Sizes are exact bytes; `Display` prints it as a report.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Summary {
    /// Title of the map.
    pub title: String,
    /// Number of buffers.
    pub buffers: usize,
    /// Ticks from the first birth to the last death.
    pub ticks: Range<u64>,
    /// One past the highest byte in use.
    pub height_bytes: u64,
    /// The most bytes alive at one tick.
    pub lower_bound_bytes: u64,
    /// Height ÷ lower bound; 1 means no gaps.
    pub gap: f64,
    /// First tick at which the most bytes are alive; `None` for an empty problem.
    pub peak_tick: Option<u64>,
    /// Bytes at the peak tick by role, in the order of [`Role::ALL`], without the roles that have none.
    pub roles: Vec<RoleBytes>,
    /// The largest tensors alive at the peak tick, descending.
    pub largest: Vec<TensorAtPeak>,
    /// Arena bytes that no tensor holds, over all ticks.
    pub unused: Unused,
    /// Live and unused bytes over equal spans of time, in order.
    pub spans: Vec<Span>,
}

/// One role's share of the peak tick.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RoleBytes {
    /// The role.
    pub role: Role,
    /// Live tensors of this role.
    pub tensors: usize,
    /// Total size of these tensors in bytes.
    pub bytes: u64,
    /// Bytes of this role's tensors that are alive at every tick.
    pub persistent_bytes: u64,
}

/// A tensor alive at the peak tick.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TensorAtPeak {
    /// Name of the tensor.
    pub tensor: String,
    /// The operation that first writes the tensor, e.g. `linear`.
    pub op: String,
    /// The layer of the tensor; empty outside of layers.
    pub layer: String,
    /// The role of the tensor.
    pub role: Role,
    /// Size of the tensor in bytes.
    pub bytes: u64,
    /// Offset of the tensor in the arena, in bytes.
    pub offset: u64,
    /// Lifetime of the tensor.
    pub ticks: Range<u64>,
}

/// Bytes below the height that no tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Unused {
    /// Unused bytes at the peak tick: height − lower bound.
    pub least_bytes: u64,
    /// Unused bytes averaged over all ticks, rounded down.
    pub mean_bytes: u64,
    /// Unused bytes at the emptiest tick.
    pub most_bytes: u64,
}

/// A stretch of time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Span {
    /// Half-open ticks of the span.
    pub ticks: Range<u64>,
    /// The most bytes alive at one tick of the span.
    pub most_live_bytes: u64,
    /// Unused bytes averaged over the ticks of the span, rounded down.
    pub mean_unused_bytes: u64,
}

pub(super) fn summarize(map: &MemoryMap<'_>, largest: usize) -> Summary {
    let (height_bytes, lower_bound_bytes) = (map.height, map.lower_bound());
    let curve = map.curve();
    let unused_within = |ticks: Range<u64>| {
        let length = u128::from(ticks.end - ticks.start).max(1);
        let area = curve
            .within(ticks)
            .map(|(t, live)| u128::from(height_bytes.saturating_sub(live)) * u128::from(t.end - t.start));
        u64::try_from(area.sum::<u128>() / length).expect("a mean of u64 is a u64")
    };
    let spans_count = SPANS.min(usize::try_from(map.ticks.end - map.ticks.start).unwrap_or(SPANS));
    let spans = split(&map.ticks, spans_count).map(|ticks| Span {
        most_live_bytes: curve.most_within(ticks.clone()),
        mean_unused_bytes: unused_within(ticks.clone()),
        ticks,
    });
    let emptiest = curve.within(map.ticks()).map(|(_, live)| live).min().unwrap_or(0);
    Summary {
        title: map.title.to_owned(),
        buffers: map.problem.len(),
        ticks: map.ticks(),
        height_bytes,
        lower_bound_bytes,
        gap: if lower_bound_bytes == 0 { 1.0 } else { height_bytes as f64 / lower_bound_bytes as f64 },
        peak_tick: map.peak_tick(),
        roles: roles_at_peak(map),
        largest: largest_at_peak(map, largest),
        unused: Unused {
            least_bytes: height_bytes.saturating_sub(lower_bound_bytes),
            mean_bytes: unused_within(map.ticks()),
            most_bytes: height_bytes.saturating_sub(emptiest),
        },
        spans: spans.collect(),
    }
}

fn roles_at_peak(map: &MemoryMap<'_>) -> Vec<RoleBytes> {
    let mut roles = Role::ALL.map(|role| RoleBytes { role, tensors: 0, bytes: 0, persistent_bytes: 0 });
    for id in map.peak_tick().into_iter().flat_map(|tick| live_at(map.problem, tick)) {
        let rectangle = map.rectangle(id);
        let share = roles.iter_mut().find(|r| r.role == rectangle.label.role).expect("Role::ALL holds every role");
        share.tensors += 1;
        share.bytes += rectangle.bytes;
        share.persistent_bytes += if rectangle.is_persistent { rectangle.bytes } else { 0 };
    }
    roles.into_iter().filter(|r| r.tensors > 0).collect()
}

fn largest_at_peak(map: &MemoryMap<'_>, largest: usize) -> Vec<TensorAtPeak> {
    let mut ids: Vec<_> = map.peak_tick().into_iter().flat_map(|tick| live_at(map.problem, tick)).collect();
    sort_by_key(&mut ids, |&id| (std::cmp::Reverse(map.problem.buffer(id).bytes), id));
    let tensor = |id| {
        let rectangle = map.rectangle(id);
        let label = rectangle.label.clone();
        TensorAtPeak {
            tensor: label.tensor,
            op: label.op,
            layer: label.layer,
            role: label.role,
            bytes: rectangle.bytes,
            offset: rectangle.offset,
            ticks: rectangle.ticks,
        }
    };
    ids.into_iter().take(largest).map(tensor).collect()
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { height_bytes: height, lower_bound_bytes: bound, .. } = *self;
        writeln!(f, "{}", printable(&self.title))?;
        writeln!(f, "  buffers      {} over ticks {}..{}", self.buffers, self.ticks.start, self.ticks.end)?;
        writeln!(f, "  height       {} ({height} bytes)", Bytes(height))?;
        writeln!(f, "  lower bound  {} ({bound} bytes)", Bytes(bound))?;
        writeln!(f, "  gap          {:.6} ({} bytes above the bound)", self.gap, height.saturating_sub(bound))?;
        let Some(peak) = self.peak_tick else { return Ok(()) };
        let share = |bytes: u64| 100.0 * bytes as f64 / height.max(1) as f64;

        writeln!(f, "\nby role at peak tick {peak}{:>18}{:>9}{:>9}{:>14}", "bytes", "share", "tensors", "persistent")?;
        for r in &self.roles {
            let (name, bytes, persistent) = (r.role.name(), Bytes(r.bytes), Bytes(r.persistent_bytes));
            writeln!(f, "  {name:<24}{bytes:>14}{:>8.1}%{:>9}{persistent:>14}", share(r.bytes), r.tensors)?;
        }

        if !self.largest.is_empty() {
            writeln!(f, "\nlargest at peak tick {peak}")?;
            let width = |column: fn(&TensorAtPeak) -> &str| {
                self.largest.iter().map(|t| printable(column(t)).chars().count()).max().unwrap_or(0).min(48)
            };
            let (tensor, op, layer) = (width(|t| &t.tensor), width(|t| &t.op), width(|t| &t.layer));
            for t in &self.largest {
                write!(f, "  {:>10}  {:<tensor$}  {:<op$}  ", Bytes(t.bytes), printable(&t.tensor), printable(&t.op))?;
                write!(f, "{:<layer$}  {:<15}  ", printable(&t.layer), t.role.name())?;
                writeln!(f, "at {} for {}..{}", t.offset, t.ticks.start, t.ticks.end)?;
            }
        }

        let Unused { least_bytes, mean_bytes, most_bytes } = self.unused;
        writeln!(f, "\nunused over time, of {}", Bytes(height))?;
        let mean = format!("mean {} ({:.1}%)", Bytes(mean_bytes), share(mean_bytes));
        writeln!(f, "  {mean}, least {}, most {}", Bytes(least_bytes), Bytes(most_bytes))?;
        let level = |bytes: u64| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][((share(bytes) / 12.5) as usize).min(7)];
        let bars: String = self.spans.iter().map(|s| level(s.mean_unused_bytes)).collect();
        writeln!(f, "  {bars}  mean of each of {} spans, full bar: the height", self.spans.len())
    }
}
