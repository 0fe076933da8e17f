//! A timeline as text.

use super::label;
use crate::Timeline;

/// Maximum number of characters of a line that is not folded. Longer timelines are drawn with narrower ticks and cut
/// labels.
const LONGEST_LINE: u128 = 20_000;

impl Timeline {
    /// Draws one line per rank, wide enough for every label to fit. Idle time is drawn as dots.
    pub fn gantt(&self) -> String {
        self.gantt_folded(usize::MAX)
    }

    /// Like [`Timeline::gantt`], but folded into parts with lines of at most `columns` characters. If there are several
    /// parts, each names its first tick. A box that continues in the next part is marked with an ellipsis.
    pub fn gantt_folded(&self, columns: usize) -> String {
        let scale = Scale::fitting(self);
        let digits = self.ranks.len().saturating_sub(1).to_string().len();
        let head = |rank: usize| format!("rank {rank:digits$} │ ");
        let room = columns.saturating_sub(head(0).chars().count()) / scale.width * scale.width;
        let room = room.clamp(scale.width, scale.column(self.makespan()).max(scale.width));
        let lines: Vec<Vec<char>> = (0..self.ranks.len()).map(|rank| self.line(rank, &scale, room)).collect();
        let parts = scale.column(self.makespan()).div_ceil(room).max(1);
        let part = |part: usize| {
            let title = match parts {
                1 => String::new(),
                _ => format!("{}from tick {}\n", if part > 0 { "\n" } else { "" }, scale.tick(part * room)),
            };
            let line = |(rank, line): (usize, &Vec<char>)| {
                let line: String = line.iter().skip(part * room).take(room).collect();
                (head(rank) + &line).trim_end().to_owned() + "\n"
            };
            title + &lines.iter().enumerate().map(line).collect::<String>()
        };
        (0..parts).map(part).collect()
    }

    /// Returns the line of one rank, which is cut every `room` characters.
    fn line(&self, rank: usize, scale: &Scale, room: usize) -> Vec<char> {
        let mut line = vec![' '; scale.column(self.makespan())];
        let idle = |line: &mut Vec<char>, start, end| {
            (scale.column(start)..scale.column(end)).step_by(scale.width).for_each(|at| line[at] = '·');
        };
        let mut now = 0;
        for span in self.ranks[rank].iter().filter(|span| span.end > span.start) {
            idle(&mut line, now, span.start);
            let (start, end) = (scale.column(span.start), scale.column(span.end));
            let label: Vec<char> = label(&span.cell).chars().collect();
            let cut = (start / room + 1) * room;
            let borders = (cut..end).step_by(room);
            borders.for_each(|border| line[border] = '…');
            // A box of more than one character ends with a blank, which separates it from the next box.
            let last = if end > start + 1 { end - 1 } else { end };
            // A label that a fold would cut moves past the fold if the rest of the box has room for the label.
            let fits_before = last <= cut || start + label.len() <= cut;
            let (from, to) = match fits_before {
                true => (start, last),
                false if cut + label.len() <= last => (cut, last),
                false => (start, cut),
            };
            if from > start {
                line[start] = '…';
            }
            for (at, letter) in (from..to).zip(label) {
                line[at] = letter;
            }
            now = span.end;
        }
        idle(&mut line, now, self.makespan());
        line
    }
}

/// The scale that maps ticks to characters.
struct Scale {
    /// Number of characters of the shortest span.
    width: usize,
    /// Number of ticks that `width` characters stand for.
    unit: u64,
}

impl Scale {
    /// Returns the narrowest scale at which every label fits into its box.
    fn fitting(timeline: &Timeline) -> Self {
        let unit = timeline.shortest();
        let needs = |start: u64, end: u64, letters: usize| {
            let per_unit = (letters as u128 + 1) * u128::from(unit);
            per_unit.div_ceil(u128::from(end - start)) as usize
        };
        let widths = timeline.boxes().map(|(_, span)| needs(span.start, span.end, label(&span.cell).chars().count()));
        let width = widths.max().unwrap_or(1);
        let widest = u128::from(timeline.makespan()) * width as u128 / LONGEST_LINE;
        Self { width, unit: unit.max(u64::try_from(widest).unwrap_or(u64::MAX)) }
    }

    fn column(&self, tick: u64) -> usize {
        ((u128::from(tick) * self.width as u128 + u128::from(self.unit) / 2) / u128::from(self.unit)) as usize
    }

    fn tick(&self, column: usize) -> u64 {
        (column as u128 * u128::from(self.unit) / self.width as u128) as u64
    }
}
