//! The comparison as one self-contained HTML page.

use std::fmt::Write;

use gapless_alloc::draw::{Bytes, THEME, escape};
use serde_json::json;

use super::{Compared, Entry, timeline::Column};

/// Rows of a picture. An idle range smaller than one row is not drawn.
const ROWS: u64 = 260;

/// Draws the allocators side by side over time. Each picture divides the reserved bytes into bytes that the program
/// holds, bytes that are idle but needed at the peak, and bytes lost to fragmentation. The lost bytes are the reserved
/// bytes beyond the most bytes ever alive. Entries without a timeline are listed but not drawn.
pub fn page(compared: &Compared, title: &str) -> String {
    let drawn = compared.allocators.iter().filter_map(|entry| entry.timeline.as_ref());
    let most = drawn.flat_map(|timeline| timeline.columns()).map(|column| column.reserved).max().unwrap_or(0).max(1);
    // All pictures have the same scale. An allocator that reserves several times as much must not flatten the other
    // pictures, so the scale is limited.
    let top = most.min(compared.peak_live.saturating_mul(9) / 4).max(1);
    let (mut rows, mut figures, mut pictures) = (String::new(), String::new(), Vec::new());
    for entry in &compared.allocators {
        rows += &row(entry, compared.peak_live);
        let Entry { kind, outcome, timeline: Some(timeline), .. } = entry else { continue };
        let summary = match outcome {
            Ok(report) => {
                let lost = report.peak_reserved().saturating_sub(compared.peak_live);
                format!("{} reserved, {} lost", Bytes(report.peak_reserved()), Bytes(lost))
            }
            Err(_) => "out of memory".to_owned(),
        };
        let _ = write!(
            figures,
            "<figure><figcaption><b>{kind}</b><span>{summary}</span></figcaption><canvas></canvas></figure>"
        );
        let scale = |bytes: u64| (u128::from(bytes) * u128::from(ROWS)).div_ceil(u128::from(top)) as u64;
        let column =
            |column: &Column| json!([scale(column.reserved), scale(column.allocated), in_rows(&column.layout, top)]);
        pictures.push(timeline.columns().iter().map(column).collect::<Vec<_>>());
    }
    let live = compared.peak_live as f64 / top as f64 * ROWS as f64;
    let data = json!({ "rows": ROWS, "live": live, "pictures": pictures });
    let times = if compared.iterations == 1 { "once".to_owned() } else { format!("{} times", compared.iterations) };
    let clipped = if top < most { "; what lies higher is cut off" } else { "" };
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>{title}: allocators compared</title><style>{THEME}{STYLE}</style><h1>{title}</h1>\
         <p>Each allocator serves the same requests: the program runs {times} on a device of {capacity}. At most {peak} are alive at \
         once; what an allocator reserves beyond that is lost to fragmentation.\
         <table><tr><th>allocator<th>reserved<th>reserved ÷ peak live<th>lost<th>allocated<th>fragmentation<th>segments\
         <th>device calls{rows}</table>\
         <p class=key><span><i style=\"background:var(--held)\"></i>held by the program</span>\
         <span><i style=\"background:var(--idle)\"></i>idle now, needed at the peak</span>\
         <span><i style=\"background:var(--lost)\"></i>lost: reserved beyond the peak live bytes</span>\
         <span><i class=line style=\"border-color:var(--bound)\"></i>reserved</span>\
         <span><i class=line style=\"border-color:var(--text)\"></i>allocated</span>\
         <span><i class=\"line dashed\" style=\"border-color:var(--quiet)\"></i>peak live bytes</span></p>\
         <p>Across: requests. Up: reserved memory from the lowest address, segments on top of each other, to {top} in every \
         picture{clipped}.\
         <main>{figures}</main><script type=\"application/json\" id=data>{data}</script><script>{SCRIPT}</script></html>\n",
        title = escape(title),
        capacity = Bytes(compared.capacity),
        peak = Bytes(compared.peak_live),
        top = Bytes(top),
    )
}

/// A row of the table.
fn row(Entry { kind, outcome, .. }: &Entry, peak_live: u64) -> String {
    match outcome {
        Ok(report) => format!(
            "<tr><th>{kind}<td>{}<td>{:.4}<td>{}<td>{}<td>{:.2} %<td>{}<td>{}",
            Bytes(report.peak_reserved()),
            report.peak_reserved() as f64 / peak_live.max(1) as f64,
            Bytes(report.peak_reserved().saturating_sub(peak_live)),
            Bytes(report.peak_allocated()),
            100.0 * report.fragmentation(),
            report.statistics.segments,
            report.statistics.device_calls()
        ),
        Err(error) => format!("<tr><th>{kind}<td class=why colspan=7>{}", escape(&error.to_string())),
    }
}

/// Converts runs of bytes to runs of rows by rounding their ends. Runs of less than a row join their neighbours.
fn in_rows(layout: &[u64], top: u64) -> Vec<u64> {
    let mut rows: Vec<u64> = Vec::new();
    let (mut bytes, mut drawn) = (0u128, 0u64);
    for (index, &run) in layout.iter().enumerate() {
        bytes += u128::from(run);
        let end = ((bytes * u128::from(ROWS) + u128::from(top) / 2) / u128::from(top)) as u64;
        if end == drawn && index > 0 {
            continue;
        }
        let is_hole = index % 2 == 1;
        if (rows.len() % 2 == 1) == is_hole {
            rows.push(end - drawn);
        } else if let Some(last) = rows.last_mut() {
            *last += end - drawn;
        }
        drawn = end;
    }
    rows
}

const STYLE: &str = include_str!("assets/page.css");
const SCRIPT: &str = include_str!("assets/page.js");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_keep_their_places() {
        let check =
            |layout: &[u64], top: u64, expected: &[u64]| assert_eq!(in_rows(layout, top), expected, "{layout:?}");
        check(&[ROWS], ROWS, &[ROWS]);
        check(&[10, 20, 30], ROWS, &[10, 20, 30]);
        check(&[0, 20, 30], ROWS, &[0, 20, 30]);
        check(&[1000, 1, 1000], 1000 * ROWS, &[2]); // a hole too small to be drawn
        check(&[1000, 1, 1000, 2000], 1000 * ROWS, &[2, 2]);
    }
}
