//! Explains why a problem does not fit a capacity, and what would have to change.
//!
//! In: a problem, its best plan, a capacity below the plan's height, optionally the buffers' labels, and optionally a
//! deadline. Out: the tick of the peak, the buffers alive there, and [`Remedy`]s: few buffers to leave out, few bytes
//! to take off, few lifetimes to interrupt. Each remedy is checked by a plan of the changed problem, and [`cover`]
//! bounds how small a remedy can be.

mod cover;
mod part;
mod remedy;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use crate::deadline::Deadline;
use crate::draw::{Bytes, ExactBytes, Mark};
use crate::order::sort_by_key;
use crate::{BufferId, Label, Options, Problem, Role, Solution, live_at, peak_tick};
use remedy::RemedySearch;
pub use remedy::{Change, Remedy};

/// The reasons why a problem does not fit, and what would help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The capacity in bytes.
    pub capacity: u64,
    /// Bytes that the plan needs.
    pub height: u64,
    /// The first tick at which the most bytes are alive.
    pub peak_tick: u64,
    /// Bytes alive at the peak tick.
    pub peak_bytes: u64,
    /// Bytes and number of buffers alive at the peak tick by role, most bytes first; empty without labels.
    pub roles: Vec<(Role, u64, usize)>,
    /// Buffers with bytes that are alive at the peak tick, the largest first.
    pub alive: Vec<BufferId>,
    /// Bytes by which the peak exceeds the capacity. Any remedy must save at least this much at the peak tick.
    pub excess: u64,
    /// The fewest buffers found that do not fit, even without all other buffers; empty if no part is proven not to fit.
    pub part: Vec<BufferId>,
    /// The fewest buffers found such that all other buffers fit.
    pub leave_out: Remedy,
    /// The buffers to shrink so that the problem fits, by the fewest bytes found in total.
    pub shrink: Remedy,
    /// The fewest lifetimes found whose interruption makes the problem fit; `None` if no such remedy was found.
    pub free: Option<Remedy>,
    /// True if the deadline passed. With more time, smaller remedies or higher lower bounds might be found.
    pub cut_short: bool,
    /// Phases of the step that the peak is in.
    phases: Vec<String>,
    /// Names of the buffers to change.
    names: BTreeMap<BufferId, String>,
    /// True if a buffer of the user's may be several buffers of the problem.
    in_pieces: bool,
}

/// Explains why `problem` does not fit the capacity of `options`. Returns `None` if `solution` fits, or if there is no
/// capacity. `labels` are indexed by [`BufferId`] and may be empty. With labels, only the lifetimes of activations are
/// interrupted.
///
/// An explanation makes many plans, with the threads and within the deadline of `options`; see
/// [`Explanation::cut_short`].
pub fn explain(problem: &Problem, labels: &[Label], solution: &Solution, options: &Options) -> Option<Explanation> {
    let deadline = Deadline::after(options.deadline);
    let capacity = options.capacity.filter(|&capacity| solution.height > capacity)?;
    let peak_tick = peak_tick(problem)?;
    let mut alive: Vec<BufferId> = live_at(problem, peak_tick).filter(|&id| problem.buffer(id).bytes > 0).collect();
    sort_by_key(&mut alive, |&id| (Reverse(problem.buffer(id).bytes), id));
    let peak_bytes = alive.iter().map(|&id| problem.buffer(id).bytes).sum::<u64>();
    let mut by_role: BTreeMap<Role, (u64, usize)> = BTreeMap::new();
    for (label, &id) in alive.iter().filter_map(|id| Some((labels.get(id.index())?, id))) {
        let entry = by_role.entry(label.role).or_default();
        *entry = (entry.0 + problem.buffer(id).bytes, entry.1 + 1);
    }
    let mut roles: Vec<_> = by_role.into_iter().map(|(role, (bytes, buffers))| (role, bytes, buffers)).collect();
    sort_by_key(&mut roles, |&(role, bytes, _)| (Reverse(bytes), role));
    let patient = RemedySearch { problem, labels, solution, capacity, threads: options.threads, deadline };
    let (leave_out, shrink, free) = (patient.leave_out(), patient.shrink(), patient.free());
    let explanation = Explanation {
        capacity,
        height: solution.height,
        peak_tick,
        peak_bytes,
        roles,
        alive,
        excess: peak_bytes.saturating_sub(capacity),
        part: patient.smallest_part(),
        leave_out,
        shrink,
        free,
        cut_short: deadline.has_passed(),
        phases: Vec::new(),
        names: BTreeMap::new(),
        in_pieces: false,
    };
    Some(explanation.named(|id| match labels.get(id.index()) {
        Some(label) => format!("{} ({})", label.tensor, label.role.name()),
        None => format!("buffer {}", id.0),
    }))
}

impl Explanation {
    /// The remedies that were found.
    pub fn remedies(&self) -> impl Iterator<Item = &Remedy> {
        [&self.leave_out, &self.shrink].into_iter().chain(&self.free)
    }

    /// Returns the problem after a remedy's changes, or `None` if pins or groups don't allow the changes. Buffers keep
    /// their ids. Buffers that are left out take no bytes. The second half of each interrupted lifetime becomes a new
    /// buffer after all others.
    pub fn apply(problem: &Problem, remedy: &Remedy) -> Option<Problem> {
        remedy::apply(problem, &remedy.changes)
    }

    /// Returns the same explanation with other names for the buffers.
    pub fn named(mut self, name: impl Fn(BufferId) -> String) -> Self {
        let changed = self.remedies().flat_map(|remedy| &remedy.changes).map(Change::buffer);
        self.names = changed.chain(self.part.iter().copied()).map(|id| (id, name(id))).collect();
        self
    }

    /// Returns the same explanation of a problem whose buffers are [`Pieces`](crate::Pieces) of the user's. The text then
    /// counts pieces and claims no minimum: a change of a whole buffer may change several pieces at once.
    pub fn of_pieces(self) -> Self {
        Self { in_pieces: true, ..self }
    }

    /// Returns the same explanation, which then also names the phases of `marks` that contain the peak tick.
    pub fn during(mut self, marks: &[Mark]) -> Self {
        let there = marks.iter().filter(|mark| mark.ticks.contains(&self.peak_tick));
        self.phases = there.map(|mark| mark.name.clone()).collect();
        self
    }

    /// The word for a buffer of the problem.
    fn unit(&self) -> &'static str {
        if self.in_pieces { "piece" } else { "buffer" }
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, remedy: &Remedy) -> fmt::Result {
        let Remedy { changes, size, at_least } = remedy;
        let s = if *size == 1 { "" } else { "s" };
        match changes.first() {
            Some(Change::LeaveOut(_)) => write!(f, "it would fit without {size} {}{s}", self.unit())?,
            Some(Change::Shrink(..)) => write!(f, "it would fit with {} less", Bytes(*size))?,
            Some(Change::Free(..)) => write!(f, "it would fit with {size} lifetime{s} interrupted")?,
            None => return Ok(()),
        }
        match at_least {
            _ if self.in_pieces => writeln!(f, "; a smaller change may exist:")?,
            _ if remedy.is_smallest() => writeln!(f, ", which is the minimum:")?,
            0 => writeln!(f, "; a smaller change may exist:")?,
            _ => writeln!(f, "; at least {at_least} are needed:")?,
        }
        for change in changes.iter().take(LINES) {
            let name = self.names.get(&change.buffer()).map_or("?", String::as_str);
            match change {
                Change::LeaveOut(_) => writeln!(f, "  {name}")?,
                Change::Shrink(_, bytes) => writeln!(f, "  {name}: {}", Bytes(*bytes))?,
                Change::Free(_, ticks) => writeln!(f, "  {name}: ticks {} to {}", ticks.start, ticks.end)?,
            }
        }
        match changes.len().saturating_sub(LINES) {
            0 => Ok(()),
            more => writeln!(f, "  and {more} more"),
        }
    }
}

/// Most changes of a remedy that are printed.
const LINES: usize = 16;

/// Most buffers of the part that does not fit that are printed.
const PART_NAMES: usize = 8;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (height, more, capacity) = (self.height, self.height - self.capacity, self.capacity);
        writeln!(
            f,
            "needs {}, {} more than the capacity of {}",
            ExactBytes(height),
            ExactBytes(more),
            ExactBytes(capacity)
        )?;
        let phases: String = self.phases.iter().map(|phase| format!(", in {phase}")).collect();
        writeln!(
            f,
            "peak: {} in {} buffers alive at tick {}{phases}",
            Bytes(self.peak_bytes),
            self.alive.len(),
            self.peak_tick
        )?;
        for (role, bytes, buffers) in &self.roles {
            writeln!(f, "  {:>12} of {buffers} × {}", Bytes(*bytes), role.name())?;
        }
        match self.excess {
            0 => writeln!(f, "the peak fits; what is missing is a placement without gaps")?,
            excess => writeln!(f, "at least {} too many are alive at the peak", Bytes(excess))?,
        }
        if let [first, rest @ ..] = &self.part[..] {
            let name = |id: &BufferId| self.names.get(id).map_or("?", String::as_str);
            let (s, verb) = if rest.is_empty() { ("", "does") } else { ("s", "do") };
            write!(f, "{} {}{s} alone {verb} not fit: {}", self.part.len(), self.unit(), name(first))?;
            rest.iter().take(PART_NAMES - 1).try_for_each(|id| write!(f, ", {}", name(id)))?;
            match self.part.len().saturating_sub(PART_NAMES) {
                0 => writeln!(f)?,
                more => writeln!(f, " and {more} more")?,
            }
        }
        self.remedies().try_for_each(|remedy| self.write(f, remedy))?;
        match self.cut_short {
            true => writeln!(f, "the deadline passed; with more time, a smaller change may be found"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, Gap, Options, Pieces, plan};

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
        let at = |capacity| explain(&problem, &labels, &solution, &Options { capacity, ..Options::default() });
        assert_eq!((at(None), at(Some(210))), (None, None));
        let marks = [("forward", 0..2), ("backward", 2..5), ("layer 1", 1..3)];
        let explanation = at(Some(170)).unwrap().during(&marks.map(|(name, ticks)| Mark::new(ticks, name)));
        insta::assert_snapshot!(explanation, @r"
        needs 210 bytes, 40 bytes more than the capacity of 170 bytes
        peak: 210 B in 3 buffers alive at tick 2, in backward, in layer 1
                 110 B of 2 × activation
                 100 B of 1 × parameter
        at least 40 B too many are alive at the peak
        3 buffers alone do not fit: w (parameter), q (activation), k (activation)
        it would fit without 1 buffer, which is the minimum:
          q (activation)
        it would fit with 40 B less, which is the minimum:
          q (activation): 40 B
        it would fit with 2 lifetimes interrupted, which is the minimum:
          q (activation): ticks 2 to 3
          k (activation): ticks 3 to 4
        ");
    }

    /// The buffer with a gap is two pieces. Either one alone is too little, but the whole buffer is one change.
    #[test]
    fn pieces_are_no_minimum() {
        let buffers = vec![Buffer::new(0..6, 60), Buffer::new(0..2, 50), Buffer::new(4..6, 50)];
        let gaps = [Gap { buffer: BufferId(0), ticks: 2..4, window: None }];
        let pieces = Pieces::new(&Problem::new(buffers).unwrap(), &gaps).unwrap();
        let options = Options { capacity: Some(70), ..Options::default() };
        let solution = plan(&pieces.problem, &options);
        let text = explain(&pieces.problem, &[], &solution, &options).unwrap().of_pieces().to_string();
        assert!(text.contains("it would fit without 2 pieces; a smaller change may exist:"), "{text}");
        assert!(text.contains("2 pieces alone do not fit"), "{text}");
        assert!(!text.contains("minimum") && !text.contains("at least 2"), "{text}");
    }
}
