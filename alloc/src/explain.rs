//! Why a problem does not fit a capacity, and what would have to change.
//!
//! In: a problem, its best plan, a capacity below the plan's height, and the buffers' labels where there are any. Out:
//! the tick of the peak, who is alive there, and a small set of buffers without which (shortened, shrunk or moved out)
//! the rest fits; that it does is checked by a plan.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use crate::{Buffer, BufferId, Label, Options, Problem, Role, Solution, live_at, peak_tick, plan};

/// Why a problem does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The bytes that there are.
    pub capacity: u64,
    /// The bytes that the plan needs.
    pub height: u64,
    /// The first tick at which the most bytes are alive.
    pub peak_tick: u64,
    /// The bytes alive there.
    pub peak_bytes: u64,
    /// Bytes and buffers alive there by role, most bytes first; empty without labels.
    pub roles: Vec<(Role, u64, usize)>,
    /// Who is alive there, most bytes first.
    pub alive: Vec<BufferId>,
    /// Buffers without which the rest fits: as few as a greedy choice finds. Ending them before the ticks that are too
    /// full, or starting them after, does the same.
    pub remedy: Vec<BufferId>,
    /// Bytes by which the peak exceeds the capacity: what must be saved there at least, whatever is chosen.
    pub excess: u64,
    /// The remedy's names, where there are labels.
    names: Vec<String>,
}

/// Explains why `problem` does not fit `capacity`; `None` when `solution` does fit it. `labels` are indexed by
/// [`BufferId`] and may be empty.
pub fn explain(problem: &Problem, labels: &[Label], solution: &Solution, capacity: u64) -> Option<Explanation> {
    if solution.height <= capacity {
        return None;
    }
    let peak_tick = peak_tick(problem)?;
    let mut alive: Vec<BufferId> = live_at(problem, peak_tick).collect();
    alive.sort_by_key(|&id| (Reverse(problem.buffer(id).bytes), id));
    let peak_bytes = alive.iter().map(|&id| problem.buffer(id).bytes).sum::<u64>();
    let mut by_role: BTreeMap<Role, (u64, usize)> = BTreeMap::new();
    for (label, &id) in alive.iter().filter_map(|id| Some((labels.get(id.index())?, id))) {
        let entry = by_role.entry(label.role).or_default();
        *entry = (entry.0 + problem.buffer(id).bytes, entry.1 + 1);
    }
    let mut roles: Vec<_> = by_role.into_iter().map(|(role, (bytes, buffers))| (role, bytes, buffers)).collect();
    roles.sort_by_key(|&(role, bytes, _)| (Reverse(bytes), role));
    let remedy = remedy(problem, solution, capacity);
    let name = |id: &BufferId| match labels.get(id.index()) {
        Some(label) => format!("{} ({})", label.tensor, label.role.name()),
        None => format!("buffer {}", id.0),
    };
    let names = remedy.iter().map(name).collect();
    let excess = peak_bytes.saturating_sub(capacity);
    Some(Explanation { capacity, height: solution.height, peak_tick, peak_bytes, roles, alive, remedy, excess, names })
}

/// The smaller of two sets that are known to suffice: who ends above the capacity in the plan, and who covers the excess
/// of all ticks that are too full, if a plan of the others fits.
fn remedy(problem: &Problem, solution: &Solution, capacity: u64) -> Vec<BufferId> {
    let end = |id: BufferId| solution.offsets.get(id.index()).map_or(u64::MAX, |at| at + problem.buffer(id).bytes);
    let above: Vec<BufferId> = problem.ids().filter(|&id| problem.buffer(id).bytes > 0 && end(id) > capacity).collect();
    let covering = covering(problem, capacity);
    let fits = || {
        // The others keep their ids; who left takes no space. Pins and groups of theirs don't matter to the rest.
        let others = problem.ids().map(|id| match covering.binary_search(&id) {
            Ok(_) => Buffer { bytes: 0, offset: None, ..problem.buffer(id).clone() },
            Err(_) => problem.buffer(id).clone(),
        });
        let rest = Problem::new(others.collect()).ok()?;
        let rest = problem.forbidden().iter().try_fold(rest, |rest, range| rest.forbid(range.clone())).ok()?;
        let options = Options { capacity: Some(capacity), work: 20_000_000, ..Options::default() };
        Some(plan(&rest, &options).height <= capacity)
    };
    let suffices = !covering.is_empty() && covering.len() < above.len() && problem.groups().is_empty();
    if suffices && fits() == Some(true) { covering } else { above }
}

/// Buffers that cover at every tick what is alive beyond the capacity, each time the one that covers the most of what is
/// left; sorted by id.
fn covering(problem: &Problem, capacity: u64) -> Vec<BufferId> {
    let mut ticks: Vec<u64> = problem.buffers().iter().map(|b| b.lifetime.start).collect();
    ticks.sort_unstable();
    ticks.dedup();
    let span = |b: &Buffer| {
        let of = |tick| ticks.partition_point(|&t| t < tick);
        of(b.lifetime.start)..of(b.lifetime.end)
    };
    let mut live = vec![0i128; ticks.len() + 1];
    for b in problem.buffers() {
        live[span(b).start] += i128::from(b.bytes);
        live[span(b).end] -= i128::from(b.bytes);
    }
    for k in 1..live.len() {
        live[k] += live[k - 1];
    }
    let mut excess: Vec<i128> = live[..ticks.len()].iter().map(|&l| (l - i128::from(capacity)).max(0)).collect();
    let mut chosen = Vec::new();
    let mut left: Vec<BufferId> = problem.ids().filter(|&id| problem.buffer(id).bytes > 0).collect();
    while excess.iter().any(|&e| e > 0) && chosen.len() < MOST {
        // How many ticks before each are too full: who covers the most of them, times bytes that help, goes first.
        let mut full = vec![0];
        for (k, &e) in excess.iter().enumerate() {
            full.push(full[k] + i128::from(e > 0));
        }
        let most = excess.iter().copied().max().unwrap_or(0);
        let gain = |id: BufferId| {
            let b = problem.buffer(id);
            (full[span(b).end] - full[span(b).start]) * i128::from(b.bytes).min(most)
        };
        left.retain(|&id| gain(id) > 0);
        let Some(&best) = left.iter().max_by_key(|&&id| (gain(id), Reverse(id))) else { break };
        left.retain(|&id| id != best);
        excess[span(problem.buffer(best))]
            .iter_mut()
            .for_each(|e| *e = (*e - i128::from(problem.buffer(best).bytes)).max(0));
        chosen.push(best);
    }
    chosen.sort_unstable();
    if excess.iter().any(|&e| e > 0) { Vec::new() } else { chosen }
}

/// Remedies longer than this help nobody.
const MOST: usize = 64;

impl Explanation {
    /// The same explanation with other names for its buffers.
    pub fn named(mut self, name: impl Fn(BufferId) -> String) -> Self {
        self.names = self.remedy.iter().map(|&id| name(id)).collect();
        self
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "needs {} bytes, {} more than the {} there are",
            self.height,
            self.height - self.capacity,
            self.capacity
        )?;
        writeln!(
            f,
            "peak: {} bytes in {} buffers alive at tick {}",
            self.peak_bytes,
            self.alive.len(),
            self.peak_tick
        )?;
        for (role, bytes, buffers) in &self.roles {
            writeln!(f, "  {bytes:>16} bytes of {buffers} × {}", role.name())?;
        }
        match self.excess {
            0 => writeln!(f, "the peak would fit: what is missing is a place without gaps")?,
            excess => writeln!(f, "at least {excess} bytes must not be alive at the peak")?,
        }
        writeln!(f, "it would fit without (or with shorter lives or smaller sizes of):")?;
        for name in self.names.iter().take(16) {
            writeln!(f, "  {name}")?;
        }
        if self.names.len() > 16 {
            writeln!(f, "  and {} more", self.names.len() - 16)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(tensor: &str, role: Role) -> Label {
        Label { tensor: tensor.into(), op: String::new(), layer: String::new(), role }
    }

    #[test]
    fn names_the_peak_its_roles_and_a_remedy() {
        let buffers = vec![Buffer::new(0..9, 100), Buffer::new(1..4, 60), Buffer::new(2..6, 50), Buffer::new(5..9, 20)];
        let problem = Problem::new(buffers).unwrap();
        let labels = [
            label("w", Role::Parameter),
            label("q", Role::Activation),
            label("k", Role::Activation),
            label("dq", Role::Gradient),
        ];
        let solution = plan(&problem, &Options::default());
        assert_eq!(explain(&problem, &labels, &solution, 210), None);
        let explanation = explain(&problem, &labels, &solution, 170).unwrap();
        insta::assert_snapshot!(explanation, @r"
        needs 210 bytes, 40 more than the 170 there are
        peak: 210 bytes in 3 buffers alive at tick 2
                       110 bytes of 2 × activation
                       100 bytes of 1 × parameter
        at least 40 bytes must not be alive at the peak
        it would fit without (or with shorter lives or smaller sizes of):
          q (activation)
        ");
    }

    /// What is left after the remedy must fit, whichever of the two sets it is.
    #[test]
    fn the_remedy_suffices() {
        let step = crate::synthetic::Step::default();
        let problem = step.problem().unwrap();
        let solution = plan(&problem, &Options::default());
        for percent in [95, 80, 50] {
            let capacity = solution.height / 100 * percent;
            let remedy = explain(&problem, &[], &solution, capacity).unwrap().remedy;
            let rest = problem.ids().filter(|id| !remedy.contains(id)).map(|id| problem.buffer(id).clone()).collect();
            let plan = plan(&Problem::new(rest).unwrap(), &Options { capacity: Some(capacity), ..Options::default() });
            assert!(plan.height <= capacity, "{percent} %: {} buffers", remedy.len());
        }
    }
}
