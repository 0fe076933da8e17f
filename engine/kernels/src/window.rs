//! The part of a tensor that a rank holds.

use std::fmt;
use std::ops::Range;

/// The part of a tensor that a rank holds: for each dimension some ranges of its indices, and of the elements at these
/// indices in row-major order, a range.
///
/// Splits of a matrix by rows or columns, fused projections of which each block is split, and ranges of a flattened
/// tensor (ZeRO) are all of this form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
    /// Panics if `held` has another number of dimensions than `whole`, does not ascend, or exceeds it.
    pub fn of(whole: &[usize], held: Vec<Vec<Range<usize>>>) -> Self {
        Self::checked(whole, held, None).unwrap_or_else(|why| panic!("{why}"))
    }

    /// Like [`Self::of`] and then [`Self::range`], for ranges that may be invalid. Without `flat`, the window has all
    /// elements at the indices `held`.
    ///
    /// # Errors
    /// Returns what is wrong with the ranges.
    pub fn checked(whole: &[usize], held: Vec<Vec<Range<usize>>>, flat: Option<Range<usize>>) -> Result<Self, String> {
        if whole.len() != held.len() {
            return Err(format!("a window of {} dimensions does not fit {whole:?}", held.len()));
        }
        let held = held.into_iter().map(joined).collect::<Result<Vec<_>, String>>()?;
        for (ranges, &extent) in held.iter().zip(whole) {
            if let Some(last) = ranges.last().filter(|last| last.end > extent) {
                return Err(format!("the indices {last:?} exceed the extent {extent} of {whole:?}"));
            }
        }
        if whole.iter().try_fold(1usize, |all, &extent| all.checked_mul(extent)).is_none() {
            return Err(format!("{whole:?} has more elements than can be counted"));
        }
        let elements = held.iter().map(|ranges| total(ranges)).product();
        let flat = flat.unwrap_or(0..elements);
        if flat.start > flat.end || flat.end > elements {
            return Err(format!("the elements {flat:?} are not among {elements}"));
        }
        Ok(Self { whole: whole.to_vec(), held, flat })
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

    /// The elements that `part` holds of a tensor of extents [`Self::dims`], which are all elements of this window.
    ///
    /// # Panics
    /// Panics if the extents are others, or if one of the two is a [range](Self::range) of its elements.
    #[must_use]
    pub fn part(&self, part: &Self) -> Self {
        assert_eq!(part.whole, self.dims(), "a part of another tensor");
        let is_box = |window: &Self| window.dims().iter().product::<usize>() == window.elements();
        assert!(is_box(self) && is_box(part), "a part of a range of elements is not one of indices");
        let of_dim = |(held, parts): (&Vec<Range<usize>>, &Vec<Range<usize>>)| {
            let (mut start, mut ranges) = (0, Vec::new());
            for range in held {
                let inside = parts.iter().map(|part| part.start.max(start)..part.end.min(start + range.len()));
                let inside = inside.filter(|part| part.start < part.end);
                ranges.extend(inside.map(|part| range.start + part.start - start..range.start + part.end - start));
                start += range.len();
            }
            ranges
        };
        Self::of(&self.whole, self.held.iter().zip(&part.held).map(of_dim).collect())
    }

    /// The extents of the whole tensor.
    pub fn whole_dims(&self) -> &[usize] {
        &self.whole
    }

    /// The number of held indices of each dimension.
    pub fn dims(&self) -> Vec<usize> {
        self.held.iter().map(|ranges| total(ranges)).collect()
    }

    /// For each dimension, the held indices: ascending ranges that neither are empty nor touch.
    pub fn held(&self) -> &[Vec<Range<usize>>] {
        &self.held
    }

    /// The number of held indices of a dimension that are below `index`.
    pub fn held_below(&self, dim: usize, index: usize) -> usize {
        self.held[dim].iter().map(|range| range.end.min(index).saturating_sub(range.start)).sum()
    }

    /// The range of the window's elements among all elements at the held indices.
    pub fn flat(&self) -> Range<usize> {
        self.flat.clone()
    }

    /// The number of elements in the window.
    pub fn elements(&self) -> usize {
        self.flat.len()
    }

    /// True if the window holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.elements() == self.whole.iter().product::<usize>()
    }

    /// Returns the range of this window's elements among those of `outer`, or `None` unless this window is a range of
    /// `outer`, as [`Self::range`] returns it.
    pub fn within(&self, outer: &Self) -> Option<Range<usize>> {
        let is_range = self.whole == outer.whole && self.held == outer.held && self.flat.end <= outer.flat.end;
        let start = self.flat.start.checked_sub(outer.flat.start).filter(|_| is_range)?;
        Some(start..start + self.elements())
    }

    /// Returns the same part of a tensor of other extents, whose elements in row-major order correspond to those of this
    /// window's tensor in equal blocks, as scales do that are stored for each block. Returns `None` if the part does not
    /// consist of whole blocks, or if it is several runs of blocks and the other tensor has several dimensions.
    pub fn scaled(&self, dims: &[usize]) -> Option<Self> {
        if self.whole == dims {
            return Some(self.clone());
        }
        let [own, other] = [&self.whole[..], dims].map(|dims| dims.iter().product::<usize>() as u128);
        let scaled = |index: usize| {
            let scaled = index as u128 * other;
            scaled.is_multiple_of(own.max(1)).then(|| (scaled / own.max(1)) as usize)
        };
        let blocks = self.runs().map(|run| Some(scaled(run.start)?..scaled(run.end)?));
        let blocks = joined(blocks.collect::<Option<_>>()?).expect("runs ascend and do not overlap");
        match (&blocks[..], dims) {
            ([], _) => Some(Self::whole(dims).range(0..0)),
            ([blocks], _) => Some(Self::whole(dims).range(blocks.clone())),
            (_, [_]) => Some(Self::of(dims, vec![blocks])),
            _ => None,
        }
    }

    /// Returns the places of the window's elements in the form that kernels compute with, or `None` if the window does
    /// not have this form: its runs of elements must be of one length, at distances that are equal or alternate.
    pub fn spread(&self) -> Option<Spread> {
        Spread::of(self.runs(), self.whole.iter().product())
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
            let (range, within) = nth(ranges, rest % held);
            index += stride * (ranges[range].start + within);
            (rest, stride) = (rest / held, stride * extent);
        }
        index
    }

    /// Returns the runs of elements that are contiguous in the whole tensor, in the order of the window: for each run,
    /// the range of its elements' indices in the whole tensor, in row-major order. Adjacent runs are joined where whole
    /// dimensions allow it, not in general.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        // The dimensions up to the last one that is not whole, and the number of elements below each index of that one.
        let cut = self.held.iter().zip(&self.whole).rposition(|(ranges, &extent)| total(ranges) != extent);
        let walked = cut.map_or(0, |dim| dim + 1);
        let inner: usize = self.whole[walked..].iter().product();
        // For each of these dimensions, the range that the next run begins in, and the index within it.
        let mut places = vec![(0, 0); walked];
        let mut rest = self.flat.start / inner.max(1);
        for (place, ranges) in places.iter_mut().zip(&self.held).rev() {
            let held = total(ranges).max(1);
            *place = nth(ranges, rest % held);
            rest /= held;
        }
        let mut at = self.flat.start;
        std::iter::from_fn(move || {
            if at >= self.flat.end {
                return None;
            }
            let index = |index: usize, dim: usize| {
                let (range, within) = places[dim];
                index * self.whole[dim] + self.held[dim][range].start + within
            };
            let (within, left) = (at % inner, self.flat.end - at);
            let first = (0..walked).fold(0, index) * inner + within;
            let len = match places.last() {
                None => left,
                // The elements up to the end of the range of the last walked dimension.
                Some(&(range, index)) => ((self.held[walked - 1][range].len() - index) * inner - within).min(left),
            };
            at += len;
            if let Some((range, index)) = places.last_mut() {
                (*range, *index) = (*range + 1, 0);
            }
            for dim in (1..walked).rev() {
                if places[dim].0 < self.held[dim].len() {
                    break;
                }
                places[dim].0 = 0;
                let (range, index) = &mut places[dim - 1];
                *index += 1;
                if *index == self.held[dim - 1][*range].len() {
                    (*range, *index) = (*range + 1, 0);
                }
            }
            Some(first..first + len)
        })
    }
}

impl fmt::Display for Window {
    /// Writes the held indices of each dimension, and the range of their elements if it is not all of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self.held.iter().map(|ranges| {
            let ranges: Vec<String> = ranges.iter().map(|range| format!("{range:?}")).collect();
            ranges.join("+")
        });
        write!(f, "[{}]", dims.collect::<Vec<_>>().join(", "))?;
        if self.flat != (0..self.held.iter().map(|ranges| total(ranges)).product()) {
            write!(f, ", elements {:?}", self.flat)?;
        }
        Ok(())
    }
}

/// The places of a part's elements in the whole tensor. The part is a list of runs of `inner` elements that are neighbours in
/// the whole tensor. The first run of each pair begins `stride` elements behind that of the pair before, and the second one
/// `near` elements behind the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    /// The index of the first element.
    pub start: usize,
    /// The number of elements in a run.
    pub inner: usize,
    /// The distance between the first elements of the two runs of a pair.
    pub near: usize,
    /// The distance between the first elements of two pairs that follow one another.
    pub stride: usize,
    /// The number of elements in the whole tensor.
    pub elements: usize,
}

impl Spread {
    /// All elements of a tensor with this many elements.
    pub fn whole(elements: usize) -> Self {
        Self { start: 0, inner: elements.max(1), near: 0, stride: 0, elements }
    }

    /// Returns the places of these runs of elements, or `None` if they do not have this form.
    fn of(runs: impl Iterator<Item = Range<usize>> + Clone, elements: usize) -> Option<Self> {
        // Runs that touch may be joined, so a run may stand for several.
        let inner = runs.clone().map(|run| run.len()).min().unwrap_or(1).max(1);
        if runs.clone().any(|run| !run.len().is_multiple_of(inner)) {
            return None;
        }
        let mut starts = runs.flat_map(|run| run.step_by(inner));
        let start = starts.next().unwrap_or(0);
        let mut before = start;
        let mut distances = starts.map(|start| start.wrapping_sub(std::mem::replace(&mut before, start)));
        let near = distances.next().unwrap_or(0);
        let far = distances.next().unwrap_or(near);
        // The distance behind the far one is the near one again.
        let alternates = distances.enumerate().all(|(at, distance)| distance == [near, far][at % 2]);
        alternates.then(|| Self { start, inner, near, stride: near.wrapping_add(far), elements })
    }

    /// Returns the places in the whole tensor of the elements in a window of the part, or `None` if they do not have this
    /// form.
    pub fn part(self, window: &Window) -> Option<Self> {
        let runs = window.runs().flat_map(move |run| self.runs(run));
        Self::of(runs.map(|(run, first)| first..first + run.len()), self.elements)
    }

    /// Returns the index in the whole tensor of the part's element `at`.
    pub fn index(self, at: usize) -> usize {
        let (run, within) = (at / self.inner, at % self.inner);
        self.start + run / 2 * self.stride + run % 2 * self.near + within
    }

    /// Divides a range of the part's elements into runs that are contiguous in the whole tensor. For each run, returns
    /// its elements, counted from the start of `range`, and the index of its first element in the whole tensor.
    pub fn runs(self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + Clone {
        let mut at = range.start;
        std::iter::from_fn(move || {
            (at < range.end).then(|| {
                let len = (self.inner - at % self.inner).min(range.end - at);
                let run = (at - range.start..at - range.start + len, self.index(at));
                at += len;
                run
            })
        })
    }
}

/// Ascending ranges without empty ones, where those that touch are joined.
///
/// # Errors
/// Returns an error if a range ends before it starts, or if the ranges overlap or do not ascend.
pub(crate) fn joined(ranges: Vec<Range<usize>>) -> Result<Vec<Range<usize>>, String> {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let last = joined.last_mut();
        if range.start > range.end || last.as_ref().is_some_and(|last| last.end > range.start) {
            return Err(format!("the indices {range:?} do not follow those before them"));
        }
        match last {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    Ok(joined)
}

pub(crate) fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).sum()
}

/// Returns the range that contains the index with number `at` of those in the ranges, and the place of this index in it.
fn nth(ranges: &[Range<usize>], mut at: usize) -> (usize, usize) {
    for (number, range) in ranges.iter().enumerate() {
        if at < range.len() {
            return (number, at);
        }
        at -= range.len();
    }
    (0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Held = Vec<Vec<Range<usize>>>;

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
    fn a_part_of_a_part_holds_its_elements() {
        let outer = Window::of(&[12, 6], vec![vec![0..2, 4..6, 8..11], vec![2..6]]);
        let inner = Window::of(&[7, 4], vec![vec![1..3, 5..7], vec![0..1, 3..4]]);
        let expected: Vec<usize> = inner.runs().flatten().map(|at| outer.index(at)).collect();
        assert_eq!(outer.part(&inner).runs().flatten().collect::<Vec<_>>(), expected);
        assert_eq!(outer.part(&Window::whole(&[7, 4])), outer);
        assert_eq!(Window::whole(&[7, 4]).part(&inner), inner);
    }

    #[test]
    fn runs_and_indices_name_the_held_elements() {
        let cases: [(&[usize], Held); 7] = [
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
    fn a_spread_names_the_same_elements() {
        let cases: [(&[usize], Held, bool); 10] = [
            (&[4, 6], vec![vec![0..4], vec![0..6]], true),
            (&[4, 6], vec![vec![1..3], vec![0..6]], true),
            (&[4, 6], vec![vec![0..4], vec![2..4]], true),
            (&[3, 4, 5], vec![vec![0..3], vec![1..3], vec![0..5]], true),
            (&[12, 2], vec![vec![0..2, 4..6, 8..10], vec![0..2]], true),
            (&[4, 6], vec![vec![0..4], vec![2..2]], true),
            (&[3, 4, 5], vec![vec![0..3], vec![1..3], vec![0..2]], true),
            (&[2, 12, 2], vec![vec![0..2], vec![0..2, 10..12], vec![0..2]], true),
            (&[2, 24], vec![vec![0..2], vec![4..8, 16..20]], true),
            (&[3, 4, 5], vec![vec![0..3], vec![0..3], vec![0..2]], false),
        ];
        for (whole, held, has_form) in cases {
            let window = Window::of(whole, held);
            let Some(spread) = window.spread() else {
                assert!(!has_form, "{window}");
                continue;
            };
            assert!(has_form && spread.elements == whole.iter().product::<usize>(), "{window}");
            let expected: Vec<usize> = window.runs().flatten().collect();
            let count = expected.len();
            assert_eq!((0..count).map(|at| spread.index(at)).collect::<Vec<_>>(), expected, "{window}");
            for first in 0..count {
                let runs = spread.runs(first..count);
                let indices: Vec<usize> = runs.flat_map(|(run, start)| start..start + run.len()).collect();
                assert_eq!(indices, expected[first..], "{window}");
            }
        }
    }

    #[test]
    fn parts_of_other_tensors_consist_of_whole_blocks() {
        let scaled = |window: &Window, dims: &[usize]| window.scaled(dims).map(|window| window.flat());
        let rows = Window::of(&[8, 4], vec![vec![2..6], vec![0..4]]);
        assert_eq!(rows.scaled(&[8, 4]).as_ref(), Some(&rows));
        assert_eq!([32, 8, 4].map(|blocks| scaled(&rows, &[blocks])), [Some(8..24), Some(2..6), Some(1..3)]);
        assert_eq!(scaled(&rows, &[2]), None, "half a block");
        let columns = Window::of(&[8, 4], vec![vec![0..8], vec![0..2]]);
        assert_eq!(scaled(&columns, &[8]), None, "half a row");
        assert_eq!(columns.scaled(&[8, 2, 2]), None, "columns of several dimensions");
        let pairs = Window::of(&[16], vec![(0..8).map(|row| 2 * row..2 * row + 1).collect()]);
        assert_eq!(columns.scaled(&[16]), Some(pairs.clone()));
        assert_eq!(pairs.range(2..5).runs().collect::<Vec<_>>(), [4..5, 6..7, 8..9]);
        assert_eq!(columns.range(4..10).scaled(&[16]).map(|part| part.runs().collect()), Some(vec![4..5, 6..7, 8..9]));
        assert_eq!(scaled(&rows.range(4..4), &[2]), Some(0..0));
    }

    #[test]
    fn ranges_of_a_window_are_within_it() {
        let rows = Window::of(&[8, 4], vec![vec![2..6], vec![0..4]]);
        assert_eq!(rows.range(4..12).range(2..3).within(&rows.range(4..12)), Some(2..3));
        assert_eq!(rows.within(&rows), Some(0..16));
        assert_eq!(rows.within(&rows.range(1..16)), None);
        assert_eq!(rows.within(&Window::whole(&[8, 4])), None);
    }

    #[test]
    fn absurd_windows_are_errors() {
        const MAX: usize = usize::MAX;
        type Ranges<'a> = &'a [&'a [[usize; 2]]];
        type Case<'a> = (&'a [usize], Ranges<'a>, Option<Range<usize>>, &'a str);
        let cases: [Case<'_>; 8] = [
            (&[4], &[], None, "dimensions"),
            (&[4], &[&[[2, 5]]], None, "exceed the extent 4"),
            (&[4], &[&[[2, 3], [0, 1]]], None, "do not follow"),
            (&[4], &[&[[0, 2], [1, 3]]], None, "do not follow"),
            (&[4], &[&[[3, 1]]], None, "do not follow"),
            (&[4], &[&[[0, 4]]], Some(2..5), "not among 4"),
            (&[MAX, MAX], &[&[[0, MAX]], &[[0, MAX]]], None, "more elements than can be counted"),
            (&[MAX, MAX], &[&[[0, 1]], &[[0, 1]]], None, "more elements than can be counted"),
        ];
        for (whole, held, flat, expected) in cases {
            let held = held.iter().map(|ranges| ranges.iter().map(|&[start, end]| start..end).collect());
            let why = Window::checked(whole, held.collect(), flat).unwrap_err();
            assert!(why.contains(expected), "{why}");
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
