//! The blocks in use, in order of address, and the gaps between them.
//!
//! In: blocks that don't overlap. Out: the lowest gap of a given size inside a range, in O(log n). Never: a heap
//! allocation after construction, since each block number has a node of its own.
//!
//! The blocks form an AVL tree. Each node also stores the address span of its subtree and the largest gap in that
//! subtree.

use std::ops::Range;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Node {
    addresses: Range<u64>,
    /// The child with lower addresses and the one with higher addresses.
    children: [u32; 2],
    height: u8,
    /// The addresses from the first byte of the subtree's lowest block to the end of the subtree's highest block.
    span: Range<u64>,
    /// Largest gap between two neighbouring blocks of the subtree.
    gap: u64,
}

/// Disjoint address ranges, one for each block number below a fixed count.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    nodes: Box<[Node]>,
    root: u32,
}

impl Blocks {
    /// Makes room for blocks 0 to `count` − 1.
    pub(super) fn new(count: usize) -> Self {
        let empty = Node { addresses: 0..0, children: [NONE; 2], height: 0, span: 0..0, gap: 0 };
        Self { nodes: vec![empty; count].into(), root: NONE }
    }

    /// Removes all blocks.
    pub(super) fn clear(&mut self) {
        self.root = NONE;
    }

    /// Inserts block `index` at `addresses`, which must not overlap any block in use.
    pub(super) fn insert(&mut self, index: u32, addresses: Range<u64>) {
        let span = addresses.clone();
        self.nodes[index as usize] = Node { addresses, children: [NONE; 2], height: 1, span, gap: 0 };
        self.root = self.inserted(self.root, index);
    }

    /// Removes the block that begins at `start`.
    pub(super) fn remove(&mut self, start: u64) {
        self.root = self.removed(self.root, start);
    }

    /// Returns the lowest gap inside `within` that has at least `bytes`, or `None` if no gap is that large.
    pub(super) fn gap(&self, within: Range<u64>, bytes: u64) -> Option<Range<u64>> {
        let mut floor = within.start;
        let ceiling = self.search(self.root, &mut floor, bytes).unwrap_or(within.end).min(within.end);
        fits(floor, ceiling, bytes).then_some(floor..ceiling)
    }

    /// Visits the blocks that overlap `within`, in the order of addresses.
    pub(super) fn each(&self, within: &Range<u64>, visit: &mut impl FnMut(&Range<u64>)) {
        self.each_below(self.root, within, visit);
    }

    fn each_below(&self, at: u32, within: &Range<u64>, visit: &mut impl FnMut(&Range<u64>)) {
        if at == NONE || self.node(at).span.end <= within.start || within.end <= self.node(at).span.start {
            return;
        }
        let node = self.node(at);
        self.each_below(node.children[0], within, visit);
        if node.addresses.start < within.end && within.start < node.addresses.end {
            visit(&node.addresses);
        }
        self.each_below(node.children[1], within, visit);
    }

    /// Raises `floor` to the start of the lowest gap that has at least `bytes` and ends at a block of this subtree, and
    /// returns the first address of that block. If there is no such gap, returns `None`, and `floor` is then past the
    /// whole subtree.
    fn search(&self, at: u32, floor: &mut u64, bytes: u64) -> Option<u64> {
        if at == NONE {
            return None;
        }
        let node = self.node(at);
        if node.span.end <= *floor {
            return None;
        }
        if fits(*floor, node.span.start, bytes) {
            return Some(node.span.start);
        }
        if node.gap < bytes {
            *floor = node.span.end;
            return None;
        }
        if let Some(ceiling) = self.search(node.children[0], floor, bytes) {
            return Some(ceiling);
        }
        if fits(*floor, node.addresses.start, bytes) {
            return Some(node.addresses.start);
        }
        *floor = node.addresses.end.max(*floor);
        self.search(node.children[1], floor, bytes)
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn inserted(&mut self, at: u32, index: u32) -> u32 {
        if at == NONE {
            return index;
        }
        let side = usize::from(self.node(at).addresses.start < self.node(index).addresses.start);
        let child = self.inserted(self.node(at).children[side], index);
        self.nodes[at as usize].children[side] = child;
        self.balanced(at)
    }

    fn removed(&mut self, at: u32, start: u64) -> u32 {
        assert_ne!(at, NONE, "only blocks in use are removed");
        let Node { addresses, children: [lower, higher], .. } = self.node(at).clone();
        if addresses.start != start {
            let side = usize::from(addresses.start < start);
            let child = self.removed([lower, higher][side], start);
            self.nodes[at as usize].children[side] = child;
            return self.balanced(at);
        }
        if higher == NONE {
            return lower;
        }
        let (next, rest) = self.without_first(higher);
        self.nodes[next as usize].children = [lower, rest];
        self.balanced(next)
    }

    /// Splits a subtree into its lowest node and the rest.
    fn without_first(&mut self, at: u32) -> (u32, u32) {
        let [lower, higher] = self.node(at).children;
        if lower == NONE {
            return (at, higher);
        }
        let (first, rest) = self.without_first(lower);
        self.nodes[at as usize].children[0] = rest;
        (first, self.balanced(at))
    }

    /// Restores the balance of a node whose children are balanced and differ in height by at most two.
    fn balanced(&mut self, at: u32) -> u32 {
        let heights = self.node(at).children.map(|child| self.height(child));
        for (side, other) in [(0, 1), (1, 0)] {
            if heights[side] > heights[other] + 1 {
                let child = self.node(at).children[side];
                let [outer, inner] = [side, other].map(|s| self.height(self.node(child).children[s]));
                if inner > outer {
                    self.nodes[at as usize].children[side] = self.rotated(child, other);
                }
                return self.rotated(at, side);
            }
        }
        self.update(at);
        at
    }

    /// Rotates the tree: the child on `side` takes the place of its parent.
    fn rotated(&mut self, at: u32, side: usize) -> u32 {
        let child = self.node(at).children[side];
        self.nodes[at as usize].children[side] = self.node(child).children[1 - side];
        self.nodes[child as usize].children[1 - side] = at;
        self.update(at);
        self.update(child);
        child
    }

    fn height(&self, at: u32) -> u8 {
        if at == NONE { 0 } else { self.node(at).height }
    }

    fn update(&mut self, at: u32) {
        let node = self.node(at);
        let [lower, higher] = node.children;
        let (mut span, mut gap) = (node.addresses.clone(), 0);
        if lower != NONE {
            let lower = self.node(lower);
            gap = lower.gap.max(node.addresses.start - lower.span.end);
            span.start = lower.span.start;
        }
        if higher != NONE {
            let higher = self.node(higher);
            gap = gap.max(higher.gap).max(higher.span.start - node.addresses.end);
            span.end = higher.span.end;
        }
        let height = 1 + self.height(lower).max(self.height(higher));
        let node = &mut self.nodes[at as usize];
        (node.span, node.gap, node.height) = (span, gap, height);
    }
}

/// True if `bytes` fit between two addresses. `end` may be below `start`, in which case nothing fits.
fn fits(start: u64, end: u64, bytes: u64) -> bool {
    end.checked_sub(start).is_some_and(|gap| gap >= bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;

    /// Reference implementation: finds the lowest gap by looking at every byte.
    fn twin(used: &[Option<Range<u64>>], within: &Range<u64>, bytes: u64) -> Option<Range<u64>> {
        let is_free = |at: &u64| within.contains(at) && used.iter().flatten().all(|b| !b.contains(at));
        let mut from = within.start;
        loop {
            let start = (from..within.end).find(is_free)?;
            let end = (start..=within.end).find(|at| !is_free(at))?;
            if end - start >= bytes {
                return Some(start..end);
            }
            from = end;
        }
    }

    fn depth(blocks: &Blocks, at: u32) -> u32 {
        if at == NONE {
            0
        } else {
            1 + blocks.node(at).children.map(|child| depth(blocks, child)).into_iter().max().unwrap()
        }
    }

    generated! {
        #[test]
        fn finds_what_looking_at_every_byte_finds(
            steps in prop::collection::vec((0..40usize, 1..9u64, any::<bool>(), 0..150u64, 0..60u64), 1..120),
        ) {
            let mut blocks = Blocks::new(40);
            let mut used: Vec<Option<Range<u64>>> = vec![None; 40];
            for (index, bytes, up, from, length) in steps {
                let within = from..from + length;
                let gap = blocks.gap(within.clone(), bytes);
                prop_assert_eq!(&gap, &twin(&used, &within, bytes));
                match (used[index].take(), gap) {
                    (Some(block), _) => blocks.remove(block.start),
                    (None, Some(gap)) => {
                        let at = if up { gap.start } else { gap.end - bytes };
                        blocks.insert(index as u32, at..at + bytes);
                        used[index] = Some(at..at + bytes);
                    }
                    (None, None) => {}
                }
                let mut seen = Vec::new();
                blocks.each(&within, &mut |block| seen.push(block.clone()));
                let mut meets: Vec<_> =
                    used.iter().flatten().filter(|b| b.start < within.end && within.start < b.end).cloned().collect();
                meets.sort_by_key(|b| b.start);
                prop_assert_eq!(seen, meets);
                let count = used.iter().flatten().count() as f64;
                prop_assert!(f64::from(depth(&blocks, blocks.root)) <= 1.45 * (count + 2.0).log2());
            }
        }
    }
}
