//! The tokens that the elements of a value depend on, by their index along each dimension.

use std::rc::Rc;

/// Maximum number of entries of a table along merged dimensions.
const MAX_MERGED: usize = 1 << 22;

/// A range of tokens or indices, from `first` to `last`, or no token at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    first: u32,
    last: u32,
}

impl Span {
    /// No token.
    pub const NONE: Self = Self { first: u32::MAX, last: 0 };

    pub fn of(token: usize) -> Self {
        Self { first: token as u32, last: token as u32 }
    }

    /// The first `tokens` tokens.
    pub fn all(tokens: usize) -> Self {
        if tokens == 0 { Self::NONE } else { Self::of(0).join(Self::of(tokens - 1)) }
    }

    pub fn is_none(self) -> bool {
        self.first > self.last
    }

    pub fn join(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    pub fn join_all(spans: &[Self]) -> Self {
        spans.iter().fold(Self::NONE, |all, &span| all.join(span))
    }

    /// True if a token after `index` is among these.
    pub fn is_after(self, index: usize) -> bool {
        !self.is_none() && self.last as usize > index
    }

    /// True if no token other than `index` is among these.
    pub fn is_only(self, index: usize) -> bool {
        self.is_none() || self == Self::of(index)
    }

    /// The entries of a table at these indices.
    pub fn of_table(self, table: &[Self]) -> Self {
        if self.is_none() { Self::NONE } else { Self::join_all(&table[self.first as usize..=self.last as usize]) }
    }
}

/// The tokens on which elements depend because of their index along one dimension.
#[derive(Debug, Clone)]
pub(super) enum Along {
    /// No tokens: elements at different indices are equal, or there is only one index.
    Same,
    /// No tokens.
    Free,
    /// For each index, the tokens on which the elements at this index depend.
    Tokens(Rc<[Span]>),
}

impl Along {
    pub fn free(extent: usize) -> Self {
        if extent == 1 { Self::Same } else { Self::Free }
    }

    pub fn table(&self) -> Option<&Rc<[Span]>> {
        if let Self::Tokens(table) = self { Some(table) } else { None }
    }

    /// The tokens of both, of dimensions of the same extent.
    pub fn join(&self, other: &Self) -> Self {
        match (self, other) {
            // No rule joins such tables. If one did, every index would depend on all of their tokens.
            (Self::Tokens(a), Self::Tokens(b)) if a.len() != b.len() => {
                let all = Span::join_all(a).join(Span::join_all(b));
                Self::Tokens(vec![all; a.len()].into())
            }
            (Self::Tokens(a), Self::Tokens(b)) if !Rc::ptr_eq(a, b) && a != b => {
                let joined: Vec<Span> = a.iter().zip(&**b).map(|(a, b)| a.join(*b)).collect();
                // Layers usually add nothing new. Then the table is shared, because sequences may be long.
                let known = [a, b].into_iter().find(|table| table[..] == joined);
                Self::Tokens(known.cloned().unwrap_or_else(|| joined.into()))
            }
            (Self::Tokens(_), _) => self.clone(),
            (_, Self::Tokens(_)) | (Self::Same, _) => other.clone(),
            (Self::Free, _) => Self::Free,
        }
    }
}

/// The keys that each row of scores sees. All other scores are constants.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// Dimension of the rows.
    pub rows: usize,
    /// Dimension of the keys.
    pub keys: usize,
    /// Indices of the keys that each row sees.
    pub spans: Rc<[Span]>,
    /// True if the other scores are zeros, false if they are so low that a softmax makes them zeros.
    pub is_zero: bool,
}

/// The tokens on which each element of a value depends: those of `all`, and those that `dims` has for each of the
/// element's indices. An element that `seen` excludes depends on no token.
#[derive(Debug, Clone)]
pub(super) struct Flow {
    pub dims: Vec<Along>,
    pub all: Span,
    pub seen: Option<Seen>,
    /// If the rows of the value are sorted by expert: the tokens on which the row of each token depends, by the indices
    /// of the token.
    pub routed: Option<Vec<Along>>,
    /// True if elements may depend on fewer tokens than this value says.
    pub is_guess: bool,
}

impl Flow {
    pub fn new(dims: Vec<Along>) -> Self {
        Self { dims, all: Span::NONE, seen: None, routed: None, is_guess: false }
    }

    /// A value of these extents that depends on no token.
    pub fn fixed(dims: &[usize]) -> Self {
        Self::new(dims.iter().map(|&extent| Along::free(extent)).collect())
    }

    pub fn depends(&self) -> bool {
        let along = |dims: &[Along]| dims.iter().any(|dim| dim.table().is_some());
        !self.all.is_none() || along(&self.dims) || self.routed.as_deref().is_some_and(along)
    }

    /// The dimensions whose indices select tokens.
    pub fn token_dims(&self) -> impl Iterator<Item = usize> {
        (0..self.dims.len()).filter(|&dim| self.dims[dim].table().is_some())
    }

    /// True if an element may depend on a token after its own index.
    pub fn is_ahead(&self) -> bool {
        self.all.is_after(0) || self.tables().any(|table| table.iter().enumerate().any(|(i, span)| span.is_after(i)))
    }

    /// True if every element depends at most on the token of its own index, of `tokens` tokens.
    pub fn is_own(&self, tokens: usize) -> bool {
        let is_own =
            |table: &[Span]| table.len() == tokens && table.iter().enumerate().all(|(i, span)| span.is_only(i));
        self.all.is_none() && self.tables().count() <= 1 && self.tables().all(|table| is_own(table))
    }

    fn tables(&self) -> impl Iterator<Item = &Rc<[Span]>> {
        self.dims.iter().chain(self.routed.iter().flatten()).filter_map(Along::table)
    }

    /// Adds what `other` depends on regardless of its indices.
    pub fn absorb(&mut self, other: &Self) {
        self.all = self.all.join(other.all);
        self.is_guess |= other.is_guess;
        self.routed = match (self.routed.take(), &other.routed) {
            (Some(a), Some(b)) => Some(a.iter().zip(b).map(|(a, b)| a.join(b)).collect()),
            (a, b) => a.or_else(|| b.clone()),
        };
    }

    /// Replaces one dimension by one in which every element depends on all elements along this dimension.
    pub fn fold(&mut self, dim: usize, extent: usize) {
        let Along::Tokens(table) = std::mem::replace(&mut self.dims[dim], Along::free(extent)) else { return };
        match self.seen.take() {
            // A row depends on the keys that it sees.
            Some(seen) if seen.keys == dim => {
                let keys = seen.spans.iter().map(|span| span.of_table(&table)).collect();
                self.dims[seen.rows] = self.dims[seen.rows].join(&Along::Tokens(keys));
            }
            seen => {
                self.is_guess |= seen.is_some();
                self.all = self.all.join(Span::join_all(&table));
            }
        }
    }

    /// Moves the tokens of dimensions with one index to `all`, because such dimensions are reshaped and broadcast
    /// freely. The value has the extents `dims`.
    pub fn normalize(&mut self, dims: &[usize]) {
        for (along, &extent) in self.dims.iter_mut().zip(dims) {
            let Some(table) = along.table().filter(|table| extent == 1 || table.len() != extent) else { continue };
            self.all = self.all.join(Span::join_all(table));
            *along = Along::free(extent);
        }
    }

    /// The same elements in another shape.
    pub fn reshape(&self, from: &[usize], to: &[usize]) -> Self {
        let mut shaped = Self { dims: vec![Along::Same; to.len()], seen: None, ..self.clone() };
        let large = |dims: &[usize]| -> Vec<usize> { (0..dims.len()).filter(|&dim| dims[dim] != 1).collect() };
        let (olds, news) = (large(from), large(to));
        let mut moved = vec![None; from.len()];
        let (mut old, mut new) = (0, 0);
        while old < olds.len() {
            // The smallest next groups of dimensions with equal numbers of elements.
            let (first_old, first_new) = (old, new);
            let (mut had, mut has) = (from[olds[old]], to[news[new]]);
            (old, new) = (old + 1, new + 1);
            while had != has {
                if had < has {
                    (had, old) = (had * from[olds[old]], old + 1);
                } else {
                    (has, new) = (has * to[news[new]], new + 1);
                }
            }
            match (&olds[first_old..old], &news[first_new..new]) {
                (&[a], &[b]) => {
                    moved[a] = Some(b);
                    shaped.dims[b] = self.dims[a].clone();
                }
                (olds, news) => shaped.regroup(self, (from, olds), (to, news)),
            }
        }
        shaped.seen = self
            .seen
            .as_ref()
            .and_then(|seen| Some(Seen { rows: moved[seen.rows]?, keys: moved[seen.keys]?, ..seen.clone() }));
        shaped.is_guess |= self.seen.is_some() && shaped.seen.is_none();
        shaped
    }

    /// Divides the elements along the dimensions `olds` of `source` into the dimensions `news`.
    fn regroup(&mut self, source: &Self, (from, olds): (&[usize], &[usize]), (to, news): (&[usize], &[usize])) {
        let count: usize = olds.iter().map(|&dim| from[dim]).product();
        if olds.iter().all(|&dim| source.dims[dim].table().is_none()) {
            let is_free = olds.iter().any(|&dim| matches!(source.dims[dim], Along::Free));
            news.iter().for_each(|&dim| self.dims[dim] = if is_free { Along::Free } else { Along::Same });
            return;
        }
        if count > MAX_MERGED {
            let tables = olds.iter().filter_map(|&dim| source.dims[dim].table());
            self.all = tables.fold(self.all, |all, table| all.join(Span::join_all(table)));
            self.is_guess = true;
            news.iter().for_each(|&dim| self.dims[dim] = Along::Free);
            return;
        }
        // The tokens of each element along the merged dimensions.
        let mut merged = vec![Span::NONE; count];
        let mut inner = count;
        for &dim in olds {
            inner /= from[dim];
            if let Some(table) = source.dims[dim].table() {
                merged.iter_mut().enumerate().for_each(|(i, span)| *span = span.join(table[i / inner % from[dim]]));
            }
        }
        for &dim in news {
            let inner = merged.len() / to[dim];
            let mut chunks = merged.chunks_exact(inner);
            let first = chunks.next().unwrap_or_default().to_vec();
            self.dims[dim] = Along::Free;
            if chunks.all(|chunk| chunk == first) {
                merged = first;
                continue;
            }
            self.is_guess |= merged.chunks_exact(inner).any(|chunk| chunk.iter().any(|span| *span != chunk[0]));
            self.dims[dim] = Along::Tokens(merged.chunks_exact(inner).map(Span::join_all).collect());
            merged = vec![Span::NONE; inner];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(count: usize) -> Along {
        Along::Tokens((0..count).map(Span::of).collect())
    }

    /// Describes dimensions: `=` for equal elements, `.` for no tokens, and otherwise the tokens of each index.
    fn text(flow: &Flow) -> String {
        let along = |dim: &Along| match dim {
            Along::Same => "=".to_owned(),
            Along::Free => ".".to_owned(),
            Along::Tokens(table) => {
                let spans = table.iter().map(|span| match span.is_none() {
                    true => "-".to_owned(),
                    false if span.first == span.last => format!("{}", span.first),
                    false => format!("{}–{}", span.first, span.last),
                });
                spans.collect::<Vec<_>>().join(",")
            }
        };
        let dims = flow.dims.iter().map(along).collect::<Vec<_>>().join(" ");
        if flow.is_guess { format!("{dims} ?") } else { dims }
    }

    #[test]
    fn reshaped_dimensions_keep_their_tokens() {
        let check = |dims: Vec<Along>, from: &[usize], to: &[usize], expected: &str| {
            assert_eq!(text(&Flow::new(dims).reshape(from, to)), expected, "{from:?} to {to:?}");
        };
        let x = || vec![Along::Same, tokens(3), Along::Free];
        check(x(), &[1, 3, 4], &[3, 4], "0,1,2 .");
        check(x(), &[1, 3, 4], &[1, 3, 2, 2], "= 0,1,2 . .");
        check(x(), &[1, 3, 4], &[1, 1, 3, 4, 1], "= = 0,1,2 . =");
        check(x(), &[1, 3, 4], &[12], "0,0,0,0,1,1,1,1,2,2,2,2");
        check(x(), &[1, 3, 4], &[6, 2], "0,0,1,1,2,2 .");
        check(x(), &[1, 3, 4], &[2, 6], "0–1,1–2 . ?");
        let merged = Flow::new(vec![Along::Free, tokens(3)]).reshape(&[2, 3], &[6]);
        assert_eq!(text(&merged), "0,1,2,0,1,2");
        assert_eq!(text(&merged.reshape(&[6], &[2, 3])), ". 0,1,2");
    }
}
