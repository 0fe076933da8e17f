//! A page that shows the actions of each rank over time, one row per rank. Below each row is the number of activations
//! that the rank keeps. The page can be zoomed.
//!
//! ```
//! use gapless::parallel::{Costs, Shape, by_name, simulate};
//!
//! let table = by_name("zbv")?.table(&Shape { ranks: 4, chunks: 2, micro_batches: 8 })?;
//! let timeline = simulate(&table, &Costs::default())?;
//! std::fs::write(std::env::temp_dir().join("zbv.html"), gapless::timeline::page("zbv", &timeline, "ticks")).unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use gapless_alloc::draw::escape;
use gapless_parallel::{Cell, Timeline};
use serde::Serialize;

use crate::page::{self, Page};

/// The JSON in the page's data element.
#[derive(Serialize)]
struct Data<'a> {
    unit: &'a str,
    makespan: u64,
    bubble: f64,
    ranks: Vec<Rank>,
}

#[derive(Serialize)]
struct Rank {
    /// The rank's cells, separated by blanks. The two actions of an overlapped cell are joined by `+`.
    cells: String,
    /// Start and end of each cell.
    times: Vec<(u64, u64)>,
    /// Pairs of a time and the number of activations that are alive from this time on.
    live: Vec<(u64, i64)>,
    idle: u64,
}

/// Returns the page as HTML. Times are in `unit`; nanoseconds (`ns`) are shown as milliseconds.
pub fn page(title: &str, timeline: &Timeline, unit: &str) -> String {
    let rank = |rank: usize| {
        // Spans without duration would be invisible.
        let spans = timeline.ranks[rank].iter().filter(|span| span.end > span.start);
        let cell = |cell: &Cell| match cell {
            Cell::Overlap(first, second) => format!("{first}+{second}"),
            other => other.to_string(),
        };
        Rank {
            cells: spans.clone().map(|span| cell(&span.cell)).collect::<Vec<_>>().join(" "),
            times: spans.map(|span| (span.start, span.end)).collect(),
            live: timeline.live(rank),
            idle: timeline.bubble(rank),
        }
    };
    let ranks = (0..timeline.ranks.len()).map(rank).collect();
    let data = Data { unit, makespan: timeline.makespan(), bubble: timeline.bubble_share(), ranks };
    Page {
        title,
        kind: "schedule",
        style: include_str!("timeline.css"),
        body: &include_str!("timeline.html").replace("{title}", &escape(title)),
        script: include_str!("timeline.js"),
        data: &page::json(&data),
        is_served: false,
    }
    .html()
}
