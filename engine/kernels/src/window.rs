//! The part of a tensor that a rank holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The part of a tensor that a rank holds: for each dimension some ranges of its indices, and of the elements at these
/// indices in row-major order, a range.
///
/// Splits of a matrix by rows or columns, fused projections of which each block is split, and ranges of a flattened
/// tensor (ZeRO) are all of this form.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// The extents of the whole tensor.
    whole: Vec<usize>,
    /// For each dimension, the held indices: ascending ranges that neither are empty nor touch.
    held: Vec<Vec<Range<usize>>>,
    /// The range of the elements at these indices.
    flat: Range<usize>,
}

impl Window {
    /// All of a tensor of these extents.
    pub fn whole(dims: &[usize]) -> Self {
        Self::of(dims, dims.iter().map(|&extent| vec![0..extent]).collect())
    }

    /// The elements of a tensor of extents `whole` at the indices `held`, which has ascending ranges for each dimension.
    ///
    /// # Panics
    /// Panics if `held` has another number of dimensions than `whole`, or exceeds it.
    pub fn of(whole: &[usize], held: Vec<Vec<Range<usize>>>) -> Self {
        assert_eq!(whole.len(), held.len(), "one list of ranges per dimension");
        let held: Vec<Vec<Range<usize>>> = held.into_iter().map(joined).collect();
        for (ranges, &extent) in held.iter().zip(whole) {
            assert!(ranges.last().is_none_or(|range| range.end <= extent), "{ranges:?} exceeds {extent}");
        }
        let elements = held.iter().map(|ranges| total(ranges)).product();
        Self { whole: whole.to_vec(), held, flat: 0..elements }
    }

    /// The elements `range` of the elements that this window holds, which are counted in row-major order.
    ///
    /// # Panics
    /// Panics if the window has fewer elements.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.elements(), "{range:?} exceeds {}", self.elements());
        Self { flat: self.flat.start + range.start..self.flat.start + range.end, ..self.clone() }
    }

    /// The extents of the whole tensor.
    pub fn whole_dims(&self) -> &[usize] {
        &self.whole
    }

    /// The number of held indices of each dimension.
    pub fn dims(&self) -> Vec<usize> {
        self.held.iter().map(|ranges| total(ranges)).collect()
    }

    /// The held indices of a dimension, as ascending ranges.
    pub fn held(&self, dim: usize) -> &[Range<usize>] {
        &self.held[dim]
    }

    /// The number of held indices of a dimension that are below `index`.
    pub fn held_below(&self, dim: usize, index: usize) -> usize {
        self.held[dim].iter().map(|range| range.end.min(index).saturating_sub(range.start)).sum()
    }

    /// The number of elements in the window.
    pub fn elements(&self) -> usize {
        self.flat.len()
    }

    /// True if the window holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.elements() == self.whole.iter().product::<usize>()
    }

    /// Returns the index in the whole tensor, in row-major order, of the element with index `at` in the window.
    ///
    /// # Panics
    /// Panics if the window has no such element.
    pub fn index(&self, at: usize) -> usize {
        assert!(at < self.elements(), "{at} of {} elements", self.elements());
        let (mut rest, mut index, mut stride) = (self.flat.start + at, 0, 1);
        for (ranges, &extent) in self.held.iter().zip(&self.whole).rev() {
            let held = total(ranges);
            index += stride * nth(ranges, rest % held);
            (rest, stride) = (rest / held, stride * extent);
        }
        index
    }

    /// Returns the runs of elements that are contiguous in the whole tensor, in the order of the window: for each run,
    /// the range of its elements' indices in the whole tensor, in row-major order. Adjacent runs are joined where whole
    /// dimensions allow it, not in general.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        // The last dimension that is not whole, and the number of elements below each of its indices.
        let cut = self.held.iter().zip(&self.whole).rposition(|(ranges, &extent)| total(ranges) != extent);
        let inner: usize = self.whole[cut.map_or(0, |dim| dim + 1)..].iter().product();
        let mut at = self.flat.start;
        std::iter::from_fn(move || {
            if at >= self.flat.end {
                return None;
            }
            let first = self.index(at - self.flat.start);
            let Some(dim) = cut else {
                let run = first..first + self.flat.end - at;
                at = self.flat.end;
                return Some(run);
            };
            // The elements up to the end of the range of the cut dimension.
            let index = first / inner % self.whole[dim];
            let range = self.held[dim].iter().find(|range| range.contains(&index)).expect("the index is held");
            let len = ((range.end - index) * inner - first % inner).min(self.flat.end - at);
            at += len;
            Some(first..first + len)
        })
    }
}

/// Ascending ranges without empty ones, where those that touch are joined.
///
/// # Panics
/// Panics if the ranges overlap or are not ascending.
fn joined(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            last => {
                assert!(last.is_none_or(|last| last.end < range.start), "ranges must ascend");
                joined.push(range);
            }
        }
    }
    joined
}

fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).sum()
}

/// Returns the index with number `at` of those in the ranges.
fn nth(ranges: &[Range<usize>], mut at: usize) -> usize {
    for range in ranges {
        if at < range.len() {
            return range.start + at;
        }
        at -= range.len();
    }
    unreachable!("the caller has checked the number of indices")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements' indices, by way of all indices of the whole tensor.
    fn reference(whole: &[usize], held: &[Vec<Range<usize>>], flat: Range<usize>) -> Vec<usize> {
        let count: usize = whole.iter().product();
        let is_held = |&index: &usize| {
            let mut rest = index;
            held.iter().zip(whole).rev().all(|(ranges, extent)| {
                let at = rest % extent;
                rest /= extent;
                ranges.iter().any(|range| range.contains(&at))
            })
        };
        (0..count).filter(is_held).collect::<Vec<_>>()[flat].to_vec()
    }

    #[test]
    fn runs_and_indices_name_the_held_elements() {
        let cases: [(&[usize], Vec<Vec<Range<usize>>>); 7] = [
            (&[4, 6], vec![vec![0..4], vec![0..6]]),
            (&[4, 6], vec![vec![1..3], vec![0..6]]),
            (&[4, 6], vec![vec![0..4], vec![2..4]]),
            (&[12, 2], vec![vec![0..2, 4..6, 8..10], vec![0..2]]),
            (&[3, 4, 5], vec![vec![0..1, 2..3], vec![1..2, 3..4], vec![0..5]]),
            (&[3, 4, 5], vec![vec![0..3], vec![1..4], vec![2..3]]),
            (&[], vec![]),
        ];
        for (whole, held) in cases {
            let all = Window::of(whole, held.clone());
            for first in 0..=all.elements() {
                for last in first..=all.elements() {
                    let window = all.range(first..last);
                    let expected = reference(whole, &held, first..last);
                    assert_eq!(window.runs().flatten().collect::<Vec<_>>(), expected, "{window:?}");
                    assert_eq!((0..window.elements()).map(|at| window.index(at)).collect::<Vec<_>>(), expected);
                }
            }
        }
    }

    #[test]
    fn touching_ranges_are_one_run() {
        let window = Window::of(&[4, 3], vec![vec![0..1, 1..2, 3..4], vec![0..3]]);
        assert_eq!(window.runs().collect::<Vec<_>>(), [0..6, 9..12]);
        assert_eq!(Window::whole(&[2, 3, 4]).runs().collect::<Vec<_>>(), [0..24]);
        assert!(Window::whole(&[2, 3, 4]).is_whole() && !window.is_whole());
    }
}
