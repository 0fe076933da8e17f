//! Pictures of a timeline: text, SVG, and a trace for Chrome's and Perfetto's viewers.

mod gantt;
mod svg;
mod trace;

use crate::{Cell, Span, Timeline};

impl Timeline {
    /// Returns the ticks of the shortest span that takes any time. Every picture must be able to show a span of this
    /// length.
    fn shortest(&self) -> u64 {
        let lengths = self.ranks.iter().flatten().map(|span| span.end - span.start);
        lengths.filter(|&length| length > 0).min().unwrap_or(1)
    }

    /// Returns the spans that take time, each with its rank.
    fn boxes(&self) -> impl Iterator<Item = (usize, &Span)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.flat_map(|(rank, spans)| spans.iter().map(move |span| (rank, span))).filter(|(_, s)| s.end > s.start)
    }
}

/// Returns the short text in a box: `0F3`, or `0F3+3B1` for a pair.
fn label(cell: &Cell) -> String {
    match cell {
        Cell::Overlap(first, second) => format!("{first}+{second}"),
        cell => cell.to_string(),
    }
}
