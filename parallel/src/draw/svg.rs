//! A timeline as a picture.

use super::label;
use crate::{Cell, Kind, Timeline};

const ROW: usize = 28;
/// Width in pixels of the shortest span, unless the whole picture would be wider than [`WIDEST`].
const SHORTEST: f64 = 28.0;
const WIDEST: f64 = 30_000.0;
/// Width in pixels of the left margin, which has the names of the ranks.
const MARGIN: f64 = 52.0;
const LETTER: f64 = 5.5;

impl Timeline {
    /// Draws one row per rank, coloured by kind. The tooltip of a box shows its cell and its ticks.
    pub fn svg(&self) -> String {
        let makespan = self.makespan().max(1) as f64;
        let scale = (SHORTEST / self.shortest() as f64).min(WIDEST / makespan);
        let (width, height) = (MARGIN + makespan * scale, self.ranks.len() * ROW);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.1}\" height=\"{height}\" \
             font-family=\"monospace\" font-size=\"9\">\n\
             <rect x=\"{MARGIN}\" width=\"{:.1}\" height=\"{height}\" fill=\"#eee\"/>\n",
            width - MARGIN
        );
        for rank in 0..self.ranks.len() {
            svg += &format!("<text x=\"4\" y=\"{}\">rank {rank}</text>\n", rank * ROW + ROW / 2 + 3);
        }
        for (rank, span) in self.boxes() {
            let (x, width) = (MARGIN + span.start as f64 * scale, (span.end - span.start) as f64 * scale);
            let mut label = label(&span.cell);
            label.truncate(((width - 3.0) / LETTER).max(0.0) as usize);
            svg += &format!(
                "<g><title>{cell} [{start}, {end})</title><rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" \
                 height=\"{ROW}\" fill=\"{colour}\" stroke=\"white\"/>\
                 <text x=\"{text_x:.1}\" y=\"{text_y}\">{label}</text></g>\n",
                cell = span.cell,
                start = span.start,
                end = span.end,
                y = rank * ROW,
                colour = colour(&span.cell),
                text_x = x + 2.0,
                text_y = rank * ROW + ROW / 2 + 3,
            );
        }
        svg + "</svg>\n"
    }
}

fn colour(cell: &Cell) -> &'static str {
    match cell {
        Cell::Overlap(..) => "#c9a0dc",
        Cell::Communicate(_) => "#999999",
        Cell::Update(_) => "#f28482",
        Cell::One(action) => match action.kind {
            Kind::Forward => "#8ecae6",
            Kind::Backward => "#90be6d",
            Kind::BackwardInput => "#b5e48c",
            Kind::BackwardWeight => "#ffd166",
        },
    }
}
