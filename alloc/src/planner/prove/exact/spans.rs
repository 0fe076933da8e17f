//! Maxima over spans of cliques, and minima that spans impose on cliques.
//!
//! Level `l` of the table has one entry for each run of `2^l` cliques. Two such runs, which may overlap, cover any span
//! of `2^l` to `2^(l+1)` cliques. So a span is read or changed in two places, whatever its length.

/// The places of the two runs that cover a span.
pub(super) type Runs = (u32, u32);

/// A sparse table.
#[derive(Clone)]
pub(super) struct Spans {
    /// Number of cliques.
    width: usize,
    /// The levels, one after the other. In each level, a run's place is the number of its first clique.
    levels: Vec<u64>,
}

impl Spans {
    /// A table for spans of at most `longest` of `cliques`.
    pub fn new(cliques: u32, longest: u32) -> Self {
        let (width, count) = (cliques as usize, longest.max(1).ilog2() as usize + 1);
        Self { width, levels: vec![0; count * width] }
    }

    /// The runs that cover cliques `[from, to)`.
    pub fn runs(&self, from: u32, to: u32) -> Runs {
        let level = (to - from).ilog2();
        let base = level * self.width as u32;
        (base + from, base + to - (1 << level))
    }

    /// Computes the maxima of `values` over the spans within cliques `[from, to)`.
    pub fn read(&mut self, values: &[u64], from: u32, to: u32) {
        self.levels[from as usize..to as usize].copy_from_slice(&values[from as usize..to as usize]);
        for level in 1..self.count(from, to) {
            let (half, below, here) = self.level(level, from, to);
            for ((here, first), second) in here.iter_mut().zip(&*below).zip(&below[half..]) {
                *here = *first.max(second);
            }
        }
    }

    /// The maximum of a span.
    pub fn max(&self, (first, second): Runs) -> u64 {
        self.levels[first as usize].max(self.levels[second as usize])
    }

    /// Forgets the minima of cliques `[from, to)`.
    pub fn clear(&mut self, from: u32, to: u32) {
        self.levels[from as usize..to as usize].fill(u64::MAX);
        for level in 1..self.count(from, to) {
            self.level(level, from, to).2.fill(u64::MAX);
        }
    }

    /// Lowers the minima of a span's cliques to `value`.
    pub fn lower(&mut self, (first, second): Runs, value: u64) {
        for run in [first, second] {
            self.levels[run as usize] = self.levels[run as usize].min(value);
        }
    }

    /// Computes the minima of cliques `[from, to)` from those of the spans.
    pub fn minima(&mut self, from: u32, to: u32) {
        for level in (1..self.count(from, to)).rev() {
            let (half, below, here) = self.level(level, from, to);
            below.iter_mut().zip(&*here).for_each(|(below, here)| *below = *here.min(below));
            below[half..].iter_mut().zip(&*here).for_each(|(below, here)| *below = *here.min(below));
        }
    }

    /// The minimum of a clique; `u64::MAX` if no span has the clique.
    pub fn minimum(&self, clique: u32) -> u64 {
        self.levels[clique as usize]
    }

    /// Number of levels whose runs fit into cliques `[from, to)`.
    fn count(&self, from: u32, to: u32) -> usize {
        (self.levels.len() / self.width).min((to - from).ilog2() as usize + 1)
    }

    /// Half the length of a level's runs, and the runs within cliques `[from, to)` of the level below and of the level.
    fn level(&mut self, level: usize, from: u32, to: u32) -> (usize, &mut [u64], &mut [u64]) {
        let (half, from, to) = (1 << (level - 1), from as usize, to as usize);
        let (below, here) = self.levels[(level - 1) * self.width..].split_at_mut(self.width);
        (half, &mut below[from..to + 1 - half], &mut here[from..to + 1 - 2 * half])
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// Compared with one clique after another.
        #[test]
        fn spans_have_the_maxima_and_minima_of_their_cliques(
            values in prop::collection::vec(any::<u64>(), 1..40),
            spans in prop::collection::vec((0..40u32, 1..40u32, any::<u64>()), 1..20),
        ) {
            let width = values.len() as u32;
            let within = |&(from, count, value): &(u32, u32, u64)| {
                let from = from % width;
                (from, (from + count).min(width), value)
            };
            let spans: Vec<(u32, u32, u64)> = spans.iter().map(within).collect();
            let longest = spans.iter().map(|(from, to, _)| to - from).max().unwrap();
            let (first, last) = spans.iter().fold((width, 0), |(a, b), &(from, to, _)| (a.min(from), b.max(to)));
            let mut table = Spans::new(width, longest);
            table.read(&values, first, last);
            for &(from, to, _) in &spans {
                let expected = values[from as usize..to as usize].iter().copied().max();
                prop_assert_eq!(Some(table.max(table.runs(from, to))), expected);
            }
            table.clear(first, last);
            spans.iter().for_each(|&(from, to, value)| table.lower(table.runs(from, to), value));
            table.minima(first, last);
            for k in first..last {
                let over = spans.iter().filter(|(from, to, _)| (*from..*to).contains(&k)).map(|span| span.2);
                prop_assert_eq!(table.minimum(k), over.min().unwrap_or(u64::MAX));
            }
        }
    }
}
