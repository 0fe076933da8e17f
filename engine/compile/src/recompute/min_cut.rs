//! The best choices of a layer in bytes and time alone. They are found by minimal cuts instead of trying all subsets.
//!
//! - In: a [`Layer`].
//! - Out: for every weight λ, the candidates to drop so that (bytes kept) + λ · (recomputation time) is minimal. These
//!   choices are the corners of the lower convex hull of all choices.
//! - Never: the peak of the layer's backward.
//!
//! For one λ, the choice is a minimal cut, as in the partitioner of PyTorch's compiler (He and Yu, *Transcending
//! Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware*, MLSys 2023). Here it is solved as a maximal
//! closure (Picard, Management Science 22, 1976). A node is on the source's side of the cut if it is recomputed:
//!
//! ```text
//! source ──bytes──▶ n          cut where candidate n is kept
//!             n ──∞──▶ m       n reads a value of m that is not kept: m runs too
//!             n ──λ·time──▶ sink   cut where n runs again
//! ```
//!
//! The partitioner's network has two nodes per value: one for "needed" and one for "recomputed". A value that the
//! backward reads is always needed, so here the node for "needed" is merged with the source.
//!
//! The values of λ to try come from the known corners: λ is the slope between two neighbouring corners. The cut for
//! this λ either is a corner between the two, or proves that there is none (Eisner and Severance, Journal of the ACM
//! 23, 1976).

use super::layer::{Candidates, Layer};

/// Returns the sets of candidates to drop at the corners, from the empty set to all candidates.
pub(super) fn hull(layer: &Layer) -> Vec<Candidates> {
    let network = Network::new(layer);
    let all = Candidates::MAX.checked_shr(Candidates::BITS - layer.candidates.len() as u32).unwrap_or(0);
    let (nothing, everything) = (network.corner(0), network.corner(all));
    let mut corners = vec![nothing];
    // Corners that are still to be visited. The nearest one is the last.
    let mut ahead = vec![everything];
    while let (Some(&from), Some(&to)) = (corners.last(), ahead.last()) {
        match network.between(&from, &to) {
            Some(corner) => ahead.push(corner),
            None => corners.extend(ahead.pop()),
        }
    }
    corners.iter().map(|corner| corner.dropped).collect()
}

/// A choice, with the bytes and time of a corner of the hull.
#[derive(Debug, Clone, Copy)]
struct Corner {
    dropped: Candidates,
    saved_bytes: u64,
    nanoseconds: u64,
}

/// The flow network of a layer.
struct Network {
    /// By recomputable node: the candidate that it computes, with its bytes.
    candidates: Vec<Option<(usize, u64)>>,
    /// By recomputable node: its time.
    nanoseconds: Vec<u64>,
    /// By node: the nodes that must be recomputed with it.
    dependencies: Vec<Vec<usize>>,
}

impl Network {
    fn new(layer: &Layer) -> Self {
        let makers = layer.makers();
        let mut is_there = vec![false; layer.bytes.len()];
        layer.saved.iter().for_each(|&value| is_there[value] = true);
        let mut candidates = vec![None; layer.forward.len()];
        for (index, values) in layer.candidates.iter().enumerate() {
            if let Some(maker) = values.first().and_then(|&value| makers[value]) {
                candidates[maker] = Some((index, layer.candidate_bytes(index)));
            }
        }
        let unkept = |local: &super::layer::Local| {
            let missing = local.reads.iter().filter(|&&value| !is_there[value]);
            missing.filter_map(|&value| makers[value]).collect()
        };
        let dependencies = layer.forward.iter().map(unkept).collect();
        Self { candidates, nanoseconds: layer.forward.iter().map(|local| local.nanoseconds).collect(), dependencies }
    }

    /// Returns the corner that drops these candidates: the bytes that this saves, and the time that it costs.
    fn corner(&self, dropped: Candidates) -> Corner {
        let is_dropped =
            |candidate: &Option<(usize, u64)>| candidate.is_some_and(|(index, _)| dropped >> index & 1 == 1);
        let mut runs: Vec<bool> = self.candidates.iter().map(is_dropped).collect();
        // Nodes on which a dropped candidate depends may have to be recomputed as well.
        for node in (0..runs.len()).rev().filter(|&node| runs[node]).collect::<Vec<_>>() {
            let mut wanted = vec![node];
            while let Some(node) = wanted.pop() {
                runs[node] = true;
                wanted.extend(self.dependencies[node].iter().filter(|&&need| !runs[need]));
            }
        }
        self.corner_of(&runs)
    }

    /// Returns the corner at which the nodes `runs` are recomputed. All candidates among these nodes are dropped.
    fn corner_of(&self, runs: &[bool]) -> Corner {
        let mut corner = Corner { dropped: 0, saved_bytes: 0, nanoseconds: 0 };
        for node in (0..runs.len()).filter(|&node| runs[node]) {
            corner.nanoseconds = corner.nanoseconds.saturating_add(self.nanoseconds[node]);
            if let Some((candidate, bytes)) = self.candidates[node] {
                corner.dropped |= 1 << candidate;
                corner.saved_bytes += bytes;
            }
        }
        corner
    }

    /// Returns the corner between two other corners that is farthest beyond the line through these two, or `None` if
    /// there is no corner between them.
    fn between(&self, from: &Corner, to: &Corner) -> Option<Corner> {
        let bytes = u128::from(to.saved_bytes.checked_sub(from.saved_bytes)?);
        let nanoseconds = u128::from(to.nanoseconds.checked_sub(from.nanoseconds)?);
        let runs = self.cut(nanoseconds, bytes);
        let found = self.corner_of(&runs);
        // The weighted gain in bytes, and the weighted loss in time. The found corner is beyond the line if gain minus
        // loss is greater at the corner than at `from`, an end of the line.
        let gain = |corner: &Corner| {
            let gain = nanoseconds.saturating_mul(corner.saved_bytes.into());
            (gain, bytes.saturating_mul(corner.nanoseconds.into()))
        };
        let ((more, less), (more_before, less_before)) = (gain(&found), gain(from));
        (more.saturating_add(less_before) > more_before.saturating_add(less)).then_some(found)
    }

    /// Returns the nodes that are recomputed if `byte` · (bytes kept) + `nanosecond` · (time) is minimal. Of several
    /// such sets of nodes, returns the smallest.
    fn cut(&self, byte: u128, nanosecond: u128) -> Vec<bool> {
        let nodes = self.dependencies.len();
        let (source, sink) = (nodes, nodes + 1);
        let mut flow = Flow::new(nodes + 2);
        for node in 0..nodes {
            if let Some((_, bytes)) = self.candidates[node] {
                flow.edge(source, node, byte.saturating_mul(bytes.into()));
            }
            flow.edge(node, sink, nanosecond.saturating_mul(self.nanoseconds[node].into()));
            self.dependencies[node].iter().for_each(|&need| flow.edge(node, need, u128::MAX));
        }
        let mut reached = flow.saturate(source, sink);
        reached.truncate(nodes);
        reached
    }
}

/// A flow network with residual capacities. The reverse of edge i is edge i ^ 1.
struct Flow {
    to: Vec<usize>,
    residual: Vec<u128>,
    /// Outgoing edges of each node.
    outgoing: Vec<Vec<usize>>,
}

impl Flow {
    fn new(nodes: usize) -> Self {
        Self { to: Vec::new(), residual: Vec::new(), outgoing: vec![Vec::new(); nodes] }
    }

    fn edge(&mut self, from: usize, to: usize, capacity: u128) {
        for (from, to, residual) in [(from, to, capacity), (to, from, 0)] {
            self.outgoing[from].push(self.to.len());
            self.to.push(to);
            self.residual.push(residual);
        }
    }

    /// Computes a maximum flow along shortest augmenting paths (Edmonds and Karp, 1972). Returns the nodes that the
    /// source still reaches, which are the source's side of the smallest minimal cut.
    fn saturate(&mut self, source: usize, sink: usize) -> Vec<bool> {
        loop {
            let mut by: Vec<Option<usize>> = vec![None; self.outgoing.len()];
            let mut queue = std::collections::VecDeque::from([source]);
            while let Some(node) = queue.pop_front() {
                for &edge in &self.outgoing[node] {
                    let to = self.to[edge];
                    if to != source && by[to].is_none() && self.residual[edge] > 0 {
                        by[to] = Some(edge);
                        queue.push_back(to);
                    }
                }
            }
            if by[sink].is_none() {
                let mut reached: Vec<bool> = by.iter().map(Option::is_some).collect();
                reached[source] = true;
                return reached;
            }
            let way: Vec<usize> = std::iter::successors(by[sink], |&edge| by[self.to[edge ^ 1]]).collect();
            let least = way.iter().map(|&edge| self.residual[edge]).min().unwrap_or(0);
            for edge in way {
                self.residual[edge] -= least;
                self.residual[edge ^ 1] = self.residual[edge ^ 1].saturating_add(least);
            }
        }
    }
}
