//! The map as characters: a letter per role, the live bytes below the map, and a legend at the bottom.
//!
//! A cell shows the role that covers most of the cell, or `·` if more than half of the cell is free. So a thin buffer
//! may not show at all; the legend counts such a buffer nevertheless.

use super::curve::split;
use super::palette::look;
use super::{Bytes, MemoryMap};
use crate::Role;

/// Size and looks of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextOptions {
    /// Characters per line, at least 48. The legend wraps at this width.
    pub columns: usize,
    /// Lines above the legend, at least 12.
    pub rows: usize,
    /// Colours the cells by 24-bit terminal escapes.
    pub colour: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { columns: 100, rows: 30, colour: false }
    }
}

/// Rows of the panel of live bytes.
const CURVE_ROWS: usize = 5;
/// Number of lines besides the map, the bars of live bytes and the legend: the title, the phases, the floor of the map,
/// the bound, the floor of the panel of live bytes, and the ticks.
const OTHER_ROWS: usize = 6;
/// Characters left of the map: a size and the axis.
const MARGIN: usize = 12;

pub(super) fn render(map: &MemoryMap<'_>, options: &TextOptions) -> String {
    let columns = options.columns.max(48) - MARGIN;
    let map_rows = options.rows.max(12) - CURVE_ROWS.min(options.rows.max(12) / 4) - OTHER_ROWS;
    let curve_rows = options.rows.max(12) - map_rows - OTHER_ROWS;
    let mut lines = vec![headline(map, columns + MARGIN)];
    lines.push(format!("{:MARGIN$}{}", "", phases(map, columns)));
    lines.extend(cells(map, columns, map_rows, options.colour));
    lines.push(format!("{:>10} └{}", "0 B", "─".repeat(columns)));
    lines.extend(live_bytes(map, columns, curve_rows));
    let (first, last) = (format!("tick {}", map.ticks.start), map.ticks.end.to_string());
    lines.push(format!("{:MARGIN$}{first}{last:>1$}", "", columns.saturating_sub(first.len())));
    lines.extend(legend(map, columns + MARGIN, options.colour));
    let mut text = String::new();
    for line in lines {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Replaces control characters, and marks that reorder text, so that user text is safe to print.
pub(super) fn printable(text: &str) -> String {
    let reorders = ['\u{200b}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    let is_harmful = |c: char| c.is_control() || c == '\u{feff}' || reorders.iter().any(|range| range.contains(&c));
    text.chars().map(|c| if is_harmful(c) { '\u{fffd}' } else { c }).collect()
}

fn headline(map: &MemoryMap<'_>, width: usize) -> String {
    let (height, bound) = (map.height, map.lower_bound());
    let gap = if bound == 0 { 1.0 } else { height as f64 / bound as f64 };
    let figures = format!("{} high, bound {}, gap {gap:.4}", Bytes(height), Bytes(bound));
    let title: String = printable(map.title).chars().take(width.saturating_sub(figures.len() + 2)).collect();
    format!("{title}  {figures}")
}

/// A line with the names of the phases, each at the phase's first column and cut off at its last.
fn phases(map: &MemoryMap<'_>, columns: usize) -> String {
    let mut line = vec![' '; columns];
    for (ticks, name) in map.visible_marks() {
        let column = |tick| ((map.time_fraction(tick) * columns as f64).round() as usize).min(columns);
        let (from, to) = (column(ticks.start), column(ticks.end));
        let text = ['▏'].into_iter().chain(printable(name).chars().collect::<Vec<_>>());
        // Blanks fill the rest of the phase, so that no earlier name shows through where phases overlap.
        for (cell, c) in line[from..to].iter_mut().zip(text.chain(std::iter::repeat(' '))) {
            *cell = c;
        }
    }
    line.into_iter().collect()
}

/// The lines of the map, highest addresses first.
fn cells(map: &MemoryMap<'_>, columns: usize, rows: usize, colour: bool) -> Vec<String> {
    // Covered area per cell, role and persistence.
    let mut area = vec![[[0f64; 2]; Role::ALL.len()]; columns * rows];
    for r in map.rectangles().filter(|r| r.bytes > 0) {
        let (left, right) = (map.time_fraction(r.ticks.start), map.time_fraction(r.ticks.end));
        let (bottom, top) = (map.byte_fraction(r.offset), map.byte_fraction(r.end()));
        for (row, tall) in overlapped(bottom, top, rows) {
            for (column, wide) in overlapped(left, right, columns) {
                area[row * columns + column][r.label.role as usize][usize::from(r.is_persistent)] += tall * wide;
            }
        }
    }
    let line = |row: usize| {
        let axis = match row + 1 == rows {
            true => format!("{:>10} ┤", Bytes(map.height).to_string()),
            false => format!("{:>10} │", ""),
        };
        let cell = |column: usize| match winner(&area[row * columns + column]) {
            Some((role, is_persistent)) => paint(role, is_persistent, colour),
            None => "·".to_owned(),
        };
        axis + &(0..columns).map(cell).collect::<String>()
    };
    (0..rows).rev().map(line).collect()
}

/// The cells, of `count` in all, that the fractions `[from, to)` overlap, each with the share of the cell that is
/// overlapped.
fn overlapped(from: f64, to: f64, count: usize) -> impl Iterator<Item = (usize, f64)> {
    let (from, to) = (from * count as f64, to * count as f64);
    let cells = from.floor() as usize..(to.ceil() as usize).min(count);
    cells.map(move |cell| (cell, (to.min(cell as f64 + 1.0) - from.max(cell as f64)).max(0.0)))
}

fn winner(area: &[[f64; 2]; Role::ALL.len()]) -> Option<(Role, bool)> {
    let all = Role::ALL.iter().zip(area).flat_map(|(&role, a)| [(role, false, a[0]), (role, true, a[1])]);
    // Just below one half, so that rounding does not free a cell that is exactly half covered.
    if area.iter().flatten().sum::<f64>() < 0.499_999 {
        return None;
    }
    all.reduce(|most, next| if next.2 > most.2 { next } else { most })
        .map(|(role, is_persistent, _)| (role, is_persistent))
}

fn paint(role: Role, is_persistent: bool, colour: bool) -> String {
    let look = look(role);
    let letter = if is_persistent { look.letter.to_ascii_uppercase() } else { look.letter };
    if !colour {
        return letter.into();
    }
    let [_, r, g, b] = look.light.to_be_bytes();
    format!("\x1b[48;2;{r};{g};{b};38;2;0;0;0m{letter}\x1b[0m")
}

/// The panel of live bytes: bars show the most live bytes of each column, and a line above them shows the bound.
fn live_bytes(map: &MemoryMap<'_>, columns: usize, rows: usize) -> Vec<String> {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (curve, bound) = (map.curve(), map.lower_bound());
    let bars: Vec<u64> = split(&map.ticks, columns).map(|ticks| curve.most_within(ticks)).collect();
    let eighths = |live: u64| (live as f64 / bound.max(1) as f64 * (rows * 8) as f64).round() as usize;
    let mut lines =
        vec![format!("{:>10} ┤{:╌<columns$}", Bytes(bound).to_string(), "╌ lower bound, live bytes below ")];
    for row in (0..rows).rev() {
        let bar = |&live: &u64| EIGHTHS[eighths(live).saturating_sub(row * 8).min(8)];
        lines.push(format!("{:>10} │{}", "", bars.iter().map(bar).collect::<String>()));
    }
    lines.push(format!("{:>10} └{}", "0 B", "─".repeat(columns)));
    lines
}

/// The letters in use, with the number of buffers that each stands for.
fn legend(map: &MemoryMap<'_>, width: usize, colour: bool) -> Vec<String> {
    let mut entries: Vec<(usize, String)> = Vec::new();
    for role in Role::ALL {
        for is_persistent in [true, false] {
            let is_this = |r: &super::Rectangle<'_>| r.label.role == role && r.is_persistent == is_persistent;
            let count = map.rectangles().filter(is_this).count();
            if count > 0 {
                let words = format!("{}{} ×{count}", if is_persistent { "persistent " } else { "" }, role.name());
                entries.push((words.chars().count() + 4, format!("{} {words}", paint(role, is_persistent, colour))));
            }
        }
    }
    entries.push((8, "· free".into()));
    let (mut lines, mut used) = (vec![String::new()], 0);
    for (length, entry) in entries {
        if used + length > width + 2 && used > 0 {
            lines.push(String::new());
            used = 0;
        }
        used += length;
        let line = lines.last_mut().expect("starts with one line");
        line.push_str(&entry);
        line.push_str("  ");
    }
    lines
}
