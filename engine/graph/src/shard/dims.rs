//! The dimensions of all values, and which of them belong together.
//!
//! In: the rules of operations ([`Rule`](super::Rule)). Out: for each dimension of each value, a tree whose leaves are
//! shared with the dimensions that have to be split in the same way. Never: a decision about what is split.
//!
//! A dimension is a leaf, a product of dimensions (outermost first: heads × head size), or several dimensions one after
//! another (a fused projection of queries, keys and values). Dimensions that a rule relates are unified. If their trees
//! do not fit together, all their leaves are marked as whole, which is always correct.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gapless_kernels::Fold;

/// Index of a dimension in [`Dims`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim(usize);

#[derive(Debug, Clone)]
enum Form {
    /// A dimension without structure. It is whole if no rank may hold a part of it.
    Leaf { is_whole: bool },
    /// The same dimension as another.
    Same(Dim),
    /// A product, outermost factor first. No factor has extent 1.
    Product(Vec<Dim>),
    /// Segments, one after another.
    Segments(Vec<Dim>),
}

#[derive(Debug, Default)]
pub struct Dims {
    extents: Vec<usize>,
    forms: Vec<Form>,
}

/// The way in which a dimension consists of others.
#[derive(Debug, Clone, Copy)]
enum Join {
    Product,
    Segments,
}

impl Join {
    /// Returns the extent that completes `part` to `whole`, or `None` if there is none.
    fn rest(self, whole: usize, part: usize) -> Option<usize> {
        match self {
            Self::Product => whole.is_multiple_of(part).then(|| whole / part),
            Self::Segments => Some(whole - part),
        }
    }
}

/// A rank's part of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// One of several ranges of nearly equal length.
    Range {
        /// Number of ranges.
        of: usize,
        /// Index of the range.
        index: usize,
    },
    /// Some tokens of a sequence.
    Fold(Fold),
    /// At most this many rows of the rank's own tokens.
    Own(usize),
}

/// The leaves that ranks divide among themselves, and a rank's part of each.
pub type Parts = BTreeMap<Dim, Part>;

impl Dims {
    /// A new dimension, which belongs together with no other.
    pub fn leaf(&mut self, extent: usize) -> Dim {
        self.push(extent, Form::Leaf { is_whole: extent == 1 })
    }

    pub fn extent(&self, dim: Dim) -> usize {
        self.extents[dim.0]
    }

    fn push(&mut self, extent: usize, form: Form) -> Dim {
        self.extents.push(extent);
        self.forms.push(form);
        Dim(self.forms.len() - 1)
    }

    fn root(&self, mut dim: Dim) -> Dim {
        while let Form::Same(other) = self.forms[dim.0] {
            dim = other;
        }
        dim
    }

    /// Makes each dimension name its root directly. Before, dimensions that all layers share form chains that are as long as
    /// the graph.
    pub fn shorten(&mut self) {
        for index in 0..self.forms.len() {
            let root = self.root(Dim(index));
            let mut dim = Dim(index);
            while let Form::Same(next) = self.forms[dim.0] {
                self.forms[dim.0] = Form::Same(root);
                dim = next;
            }
        }
    }

    /// Returns the product of dimensions. Factors of extent 1 are left out.
    pub fn product(&mut self, factors: &[Dim]) -> Dim {
        let factors: Vec<Dim> = factors.iter().copied().filter(|&dim| self.extent(dim) != 1).collect();
        match factors[..] {
            [] => self.leaf(1),
            [dim] => dim,
            _ => {
                let extent = factors.iter().map(|&dim| self.extent(dim)).product();
                self.push(extent, Form::Product(factors))
            }
        }
    }

    /// Returns the dimension that consists of these segments.
    pub fn segments(&mut self, segments: &[Dim]) -> Dim {
        let segments: Vec<Dim> = segments.iter().copied().filter(|&dim| self.extent(dim) != 0).collect();
        match segments[..] {
            [dim] => dim,
            _ => {
                let extent = segments.iter().map(|&dim| self.extent(dim)).sum();
                self.push(extent, Form::Segments(segments))
            }
        }
    }

    /// Divides a dimension into segments of these extents, and returns them.
    pub fn cut(&mut self, dim: Dim, extents: &[usize]) -> Vec<Dim> {
        let segments: Vec<Dim> = extents.iter().map(|&extent| self.leaf(extent)).collect();
        let whole = self.segments(&segments);
        self.unify(dim, whole);
        segments
    }

    /// Relates the dimensions of two shapes that have the same elements in the same order.
    pub fn reshape(&mut self, from: &[Dim], to: &[Dim]) {
        let (from, to) = (self.factors(from), self.factors(to));
        self.align(from, to, Join::Product);
    }

    /// The factors of several dimensions, without those of extent 1.
    pub fn factors(&self, dims: &[Dim]) -> Vec<Dim> {
        let mut factors = Vec::new();
        for &dim in dims {
            let dim = self.root(dim);
            match &self.forms[dim.0] {
                Form::Product(inner) => factors.extend(self.factors(inner)),
                _ if self.extent(dim) == 1 => {}
                _ => factors.push(dim),
            }
        }
        factors
    }

    /// Makes two dimensions of the same extent one.
    pub fn unify(&mut self, a: Dim, b: Dim) {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return;
        }
        if self.extent(a) != self.extent(b) {
            self.mark_whole(a);
            self.mark_whole(b);
            return;
        }
        match (self.forms[a.0].clone(), self.forms[b.0].clone()) {
            (Form::Leaf { is_whole }, _) => {
                self.forms[a.0] = Form::Same(b);
                if is_whole {
                    self.mark_whole(b);
                }
            }
            (_, Form::Leaf { .. }) => self.unify(b, a),
            (Form::Product(_), Form::Product(_)) => {
                let (p, q) = (self.factors(&[a]), self.factors(&[b]));
                if self.align(p, q, Join::Product) {
                    self.forms[a.0] = Form::Same(b);
                }
            }
            (Form::Segments(p), Form::Segments(q)) => {
                if self.align(p, q, Join::Segments) {
                    self.forms[a.0] = Form::Same(b);
                }
            }
            _ => {
                self.mark_whole(a);
                self.mark_whole(b);
            }
        }
    }

    /// Unifies two lists of factors with the same product, from the outermost on, or two lists of segments with the same
    /// total. Returns false if what is left of them does not fit together, and was marked as whole.
    fn align(&mut self, mut p: Vec<Dim>, mut q: Vec<Dim>, join: Join) -> bool {
        p.reverse();
        q.reverse();
        while let (Some(a), Some(b)) = (p.pop(), q.pop()) {
            let (a, b) = (self.root(a), self.root(b));
            if self.extent(a) == self.extent(b) {
                self.unify(a, b);
                continue;
            }
            let is_first_small = self.extent(a) < self.extent(b);
            let (small, large) = if is_first_small { (a, b) } else { (b, a) };
            let (of_small, of_large) = if is_first_small { (&mut p, &mut q) } else { (&mut q, &mut p) };
            let rest = join.rest(self.extent(large), self.extent(small));
            match (self.forms[large.0].clone(), join, rest) {
                (Form::Product(inner), Join::Product, _) | (Form::Segments(inner), Join::Segments, _) => {
                    of_large.extend(inner.into_iter().rev());
                    of_small.push(small);
                }
                // The large dimension consists of the small one and a new one.
                (Form::Leaf { .. }, _, Some(rest)) => {
                    let rest = self.leaf(rest);
                    let both = match join {
                        Join::Product => self.product(&[small, rest]),
                        Join::Segments => self.segments(&[small, rest]),
                    };
                    self.unify(large, both);
                    of_large.push(rest);
                }
                _ => {
                    p.into_iter().chain(q).chain([a, b]).for_each(|dim| self.mark_whole(dim));
                    return false;
                }
            }
        }
        true
    }

    /// Keeps a dimension whole on all ranks.
    pub fn mark_whole(&mut self, dim: Dim) {
        let dim = self.root(dim);
        match self.forms[dim.0].clone() {
            Form::Product(parts) | Form::Segments(parts) => parts.into_iter().for_each(|dim| self.mark_whole(dim)),
            _ => self.forms[dim.0] = Form::Leaf { is_whole: true },
        }
    }

    /// True if a leaf is kept whole.
    pub fn is_whole(&self, leaf: Dim) -> bool {
        matches!(self.forms[leaf.0], Form::Leaf { is_whole: true })
    }

    /// Returns the leaves of a dimension.
    pub fn leaves(&self, dim: Dim) -> BTreeSet<Dim> {
        let dim = self.root(dim);
        match &self.forms[dim.0] {
            Form::Product(parts) | Form::Segments(parts) => parts.iter().flat_map(|&part| self.leaves(part)).collect(),
            _ => BTreeSet::from([dim]),
        }
    }

    /// Returns the indices of a dimension that a rank with these parts holds, as ascending ranges.
    pub fn held(&self, dim: Dim, parts: &Parts) -> Vec<Range<usize>> {
        let dim = self.root(dim);
        match &self.forms[dim.0] {
            Form::Segments(segments) => {
                let mut start = 0;
                let mut held = Vec::new();
                for &segment in segments {
                    held.extend(self.held(segment, parts).into_iter().map(|r| start + r.start..start + r.end));
                    start += self.extent(segment);
                }
                held
            }
            Form::Product(factors) => {
                let mut held = vec![0..1];
                let mut inner = 1;
                for &factor in factors.iter().rev() {
                    let extent = self.extent(factor);
                    let outer = self.held(factor, parts);
                    held = match held[..] {
                        [Range { start: 0, end }] if end == inner => {
                            outer.into_iter().map(|r| r.start * inner..r.end * inner).collect()
                        }
                        _ => {
                            // Flat results of collectives may have a range for each token.
                            let count = held.len() * outer.iter().map(ExactSizeIterator::len).sum::<usize>();
                            let mut all = Vec::with_capacity(count);
                            for i in outer.into_iter().flatten() {
                                all.extend(held.iter().map(|r| i * inner + r.start..i * inner + r.end));
                            }
                            all
                        }
                    };
                    inner *= extent;
                }
                held
            }
            _ => {
                let extent = self.extent(dim);
                match parts.get(&dim) {
                    Some(&Part::Range { of, index }) => vec![extent * index / of..extent * (index + 1) / of],
                    Some(Part::Fold(fold)) => fold.ranges().collect(),
                    Some(&Part::Own(rows)) => vec![0..rows],
                    None => vec![0..extent],
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fused_projection_is_split_by_heads() {
        // [3·4·2] in three segments, each of which is reshaped to 4 heads of 2.
        let mut dims = Dims::default();
        let fused = dims.leaf(24);
        let segments = dims.cut(fused, &[8, 8, 8]);
        let heads = dims.leaf(4);
        for segment in segments {
            let size = dims.leaf(2);
            dims.reshape(&[segment], &[heads, size]);
            dims.mark_whole(size);
        }
        let leaves: Vec<Dim> = dims.leaves(fused).into_iter().filter(|&leaf| !dims.is_whole(leaf)).collect();
        let [leaf] = leaves[..] else { panic!("{leaves:?}") };
        assert_eq!(dims.held(fused, &Parts::from([(leaf, Part::Range { of: 2, index: 1 })])), [4..8, 12..16, 20..24]);
        assert_eq!(dims.held(fused, &Parts::from([(leaf, Part::Range { of: 3, index: 1 })])), [2..4, 10..12, 18..20]);
    }

    #[test]
    fn groups_of_heads_are_factors() {
        // 6 query heads are 2 key heads of 3 each.
        let mut dims = Dims::default();
        let (queries, keys, group) = (dims.leaf(12), dims.leaf(2), dims.leaf(3));
        let size = dims.leaf(2);
        let heads = dims.product(&[keys, group]);
        dims.reshape(&[queries], &[heads, size]);
        assert_eq!(dims.held(queries, &Parts::from([(keys, Part::Range { of: 2, index: 1 })])), [6..12]);
        assert_eq!(dims.held(queries, &Parts::from([(group, Part::Range { of: 3, index: 1 })])), [2..4, 8..10]);
    }

    #[test]
    fn shapes_that_do_not_fit_together_stay_whole() {
        let mut dims = Dims::default();
        let (a, b, c, d) = (dims.leaf(4), dims.leaf(6), dims.leaf(6), dims.leaf(4));
        dims.reshape(&[a, b], &[c, d]);
        for dim in [a, b, c, d] {
            assert!(dims.leaves(dim).into_iter().all(|leaf| dims.is_whole(leaf)), "{dim:?}");
        }
        let (x, y) = (dims.leaf(6), dims.leaf(6));
        dims.cut(x, &[2, 4]);
        let factors = [dims.leaf(2), dims.leaf(3)];
        dims.reshape(&[y], &factors);
        dims.unify(x, y);
        for dim in [x, y] {
            assert!(dims.leaves(dim).into_iter().all(|leaf| dims.is_whole(leaf)), "{dim:?}");
        }
    }
}
