//! Covers: few intervals whose bytes meet a demand at every place. The size of the smallest cover is a lower bound on
//! the changes that any remedy needs. Each place demands a number of bytes, and each candidate spans some neighbouring
//! places. In: places in order with their demands, and candidates. Out: the smallest cover found, and a proven lower
//! bound on the size of every cover. The search is a branch-and-bound from left to right. At the leftmost place that
//! still lacks bytes, the search skips a candidate if another candidate has at least as many bytes and ends at least as
//! late. If a cover takes too many candidates for an exact search, a greedy search takes its place.

use std::cmp::Reverse;
use std::ops::Range;

use crate::deadline::Deadline;
use crate::order::sort_by_key;

/// An interval that may be chosen for a cover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Places at which the candidate helps.
    pub span: Range<usize>,
    /// Bytes that the candidate gives at each of these places.
    pub bytes: u64,
}

impl Candidate {
    /// Returns the value of this candidate at `place`: the candidate's bytes, at most `lacking`, times the number of
    /// places of the span from `place` on.
    fn gives(&self, place: usize, lacking: u64) -> u128 {
        u128::from(self.bytes.min(lacking)) * (self.span.end - place) as u128
    }
}

/// The result of [`fewest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fewest {
    /// Indices of the candidates of the smallest cover found, ascending; `None` if none was found.
    pub chosen: Option<Vec<usize>>,
    /// Proven lower bound on the size of every cover; `None` if there is no cover at all.
    pub at_least: Option<usize>,
}

/// Largest cover for which the search is exact.
const MOST: usize = 64;

/// Searches for the smallest cover of `demand`. The search ends after looking at `work` candidates, or when the
/// `deadline` has passed.
pub(super) fn fewest(demand: &[u64], candidates: &[Candidate], work: u64, deadline: Deadline) -> Fewest {
    if deadline.has_passed() {
        return Fewest { chosen: None, at_least: Some(0) };
    }
    let places = undominated(demand, candidates);
    let rank = |place: usize| places.partition_point(|&p| p < place);
    let mut spans: Vec<(usize, Candidate)> = candidates
        .iter()
        .enumerate()
        .map(|(k, c)| (k, Candidate { span: rank(c.span.start)..rank(c.span.end), bytes: c.bytes }))
        .filter(|(_, c)| c.span.start < c.span.end && c.bytes > 0)
        .collect();
    sort_by_key(&mut spans, |(k, c)| (c.span.start, *k));
    let left: Vec<u64> = places.iter().map(|&p| demand[p]).collect();
    let candidates: Vec<Candidate> = spans.iter().map(|(_, c)| c.clone()).collect();
    let Some(after) = suffix_bounds(&left, &candidates, deadline) else {
        return Fewest { chosen: None, at_least: deadline.has_passed().then_some(0) };
    };
    let at_least = after[0];
    let as_given = |cover: &[usize]| {
        let mut chosen: Vec<usize> = cover.iter().map(|&c| spans[c].0).collect();
        chosen.sort_unstable();
        chosen
    };
    if at_least > MOST {
        let chosen = greedily(left, &candidates, work, deadline).as_deref().map(as_given);
        return Fewest { chosen, at_least: Some(at_least) };
    }
    let state = vec![State::Open; candidates.len()];
    let (chosen, best) = (Vec::new(), None);
    let mut search =
        Search { candidates: &candidates, after, left: left.clone(), state, chosen, best, at_least, work, deadline };
    search.deepen(0, 0);
    let complete = search.work > 0;
    let at_least = match &search.best {
        Some(best) if complete => best.len(),
        None if complete => MOST + 1,
        _ => at_least,
    };
    let best = search.best.or_else(|| greedily(left, &candidates, work, deadline));
    Fewest { chosen: best.as_deref().map(as_given), at_least: Some(at_least) }
}

/// Searches greedily: at the leftmost place that still lacks bytes, takes the candidate that has the highest value at
/// this place. Returns `None` if the candidates don't meet the demand, the work is spent or the deadline has passed.
fn greedily(mut left: Vec<u64>, candidates: &[Candidate], work: u64, deadline: Deadline) -> Option<Vec<usize>> {
    let mut is_open = vec![true; candidates.len()];
    let (mut chosen, mut spent) = (Vec::new(), 0);
    for place in 0..left.len() {
        while left[place] > 0 {
            let begun = candidates.partition_point(|c| c.span.start <= place);
            let open = (0..begun).filter(|&c| is_open[c] && place < candidates[c].span.end);
            let best = open.max_by_key(|&c| candidates[c].gives(place, left[place]))?;
            let span = place..candidates[best].span.end;
            spent += (begun + span.len()) as u64;
            if spent > work || deadline.has_passed() {
                return None;
            }
            left[span].iter_mut().for_each(|left| *left = left.saturating_sub(candidates[best].bytes));
            is_open[best] = false;
            chosen.push(best);
        }
    }
    Some(chosen)
}

/// Returns the bytes to take off each candidate so that every demand is met with the fewest bytes in all. Returns
/// `None` if all candidates together don't suffice.
///
/// The search goes from left to right. At each place that lacks bytes, the search takes the missing bytes off the open
/// candidate whose span ends last. This greedy choice is optimal: every byte costs the same, and from this place on,
/// the chosen candidate spans every place that another open candidate spans.
pub(super) fn fewest_bytes(demand: &[u64], candidates: &[Candidate]) -> Option<Vec<u64>> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    sort_by_key(&mut order, |&c| candidates[c].span.start);
    let mut order = order.into_iter().peekable();
    // `open` orders the candidates by the end of their span. `ends[p]` is the number of bytes taken off that no longer
    // help from place `p` on.
    let mut open = std::collections::BinaryHeap::new();
    let mut taken = vec![0u64; candidates.len()];
    let mut ends = vec![0u64; demand.len() + 1];
    let mut helps = 0u64;
    for (place, &demand) in demand.iter().enumerate() {
        helps -= ends[place];
        while let Some(c) = order.next_if(|&c| candidates[c].span.start <= place) {
            open.push((candidates[c].span.end, Reverse(c)));
        }
        while helps < demand {
            let &(end, Reverse(c)) = open.peek()?;
            let rest = candidates[c].bytes - taken[c];
            if end <= place || rest == 0 {
                open.pop();
                continue;
            }
            let take = rest.min(demand - helps);
            taken[c] += take;
            ends[end] += take;
            helps += take;
        }
    }
    Some(taken)
}

/// Returns the places whose demand is not implied by a neighbour's. A larger demand implies a neighbour's smaller
/// demand if the candidates that span the place of the larger demand but not the neighbour have no more bytes than the
/// difference of the two demands.
fn undominated(demand: &[u64], candidates: &[Candidate]) -> Vec<usize> {
    let mut begins = vec![0u128; demand.len() + 1];
    let mut ends = begins.clone();
    for c in candidates.iter().filter(|c| c.span.start < c.span.end) {
        begins[c.span.start] += u128::from(c.bytes);
        ends[c.span.end] += u128::from(c.bytes);
    }
    let mut kept: Vec<usize> = Vec::new();
    // Bytes of the candidates that began since the last kept place, and of those that ended since then.
    let (mut began, mut ended) = (0, 0);
    for place in 0..demand.len() {
        began += begins[place];
        ended += ends[place];
        if demand[place] == 0 {
            continue;
        }
        while let Some(&last) = kept.last() {
            let (before, here) = (u128::from(demand[last]), u128::from(demand[place]));
            if ended == 0 && before + began <= here {
                kept.pop();
                // Candidates that begin or end between the kept place before and the dropped one now count as well.
                let from = kept.last().map_or(0, |&p| p + 1);
                began += begins[from..=last].iter().sum::<u128>();
                ended += ends[from..=last].iter().sum::<u128>();
            } else {
                break;
            }
        }
        let implied = kept
            .last()
            .is_some_and(|&last| began == 0 && u128::from(demand[place]) + ended <= u128::from(demand[last]));
        if !implied {
            kept.push(place);
            (began, ended) = (0, 0);
        }
    }
    kept
}

/// Returns, for each place, a lower bound on the number of candidates that are needed to meet the demands from that
/// place on. The bound adds up the numbers of candidates needed at places that have no candidate in common. If there
/// are very many places, only some are used. Returns `None` if a demand can't be met or the deadline has passed.
fn suffix_bounds(demand: &[u64], candidates: &[Candidate], deadline: Deadline) -> Option<Vec<usize>> {
    let cells: usize = candidates.iter().map(|c| c.span.len()).sum();
    let stride = cells.div_ceil(MAX_CELLS).max(1);
    let mut here: Vec<Vec<u32>> = vec![Vec::new(); demand.len().div_ceil(stride)];
    for (k, c) in candidates.iter().enumerate() {
        let looked_at = c.span.start.div_ceil(stride)..c.span.end.div_ceil(stride);
        here[looked_at].iter_mut().for_each(|list| list.push(k as u32));
    }
    let mut after = vec![0; demand.len() + 1];
    for place in (0..demand.len()).rev() {
        after[place] = after[place + 1];
        if place % stride == 0 {
            if deadline.has_passed() {
                return None;
            }
            let here = &here[place / stride];
            let mut bytes: Vec<u64> = here.iter().map(|&k| candidates[k as usize].bytes).collect();
            let need = largest_first(&mut bytes, demand[place])?;
            let reach = here.iter().map(|&k| candidates[k as usize].span.end).fold(place + 1, usize::max);
            after[place] = after[place].max(need + after[reach]);
        }
    }
    Some(after)
}

/// Most pairs of a place and a candidate that the suffix bounds look at.
const MAX_CELLS: usize = 20_000_000;

/// Returns the number of the largest values that add up to the demand, or `None` if all values together are less than
/// the demand.
fn largest_first(bytes: &mut [u64], demand: u64) -> Option<usize> {
    bytes.sort_unstable_by_key(|&b| Reverse(b));
    let mut sum = 0u64;
    if demand == 0 {
        return Some(0);
    }
    bytes
        .iter()
        .position(|&b| {
            sum = sum.saturating_add(b);
            sum >= demand
        })
        .map(|last| last + 1)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Chosen,
    /// Excluded from this branch.
    Out,
}

struct Search<'c> {
    /// Sorted by the start of their spans.
    candidates: &'c [Candidate],
    /// See [`suffix_bounds`].
    after: Vec<usize>,
    /// Bytes still lacking, by place.
    left: Vec<u64>,
    state: Vec<State>,
    chosen: Vec<usize>,
    best: Option<Vec<usize>>,
    at_least: usize,
    /// Work that is left.
    work: u64,
    deadline: Deadline,
}

impl Search<'_> {
    /// Covers the remaining demand from place `from` on. All chosen candidates end at `reach` or before.
    fn deepen(&mut self, from: usize, reach: usize) {
        let Some(place) = (from..self.left.len()).find(|&p| self.left[p] > 0) else {
            if self.best.as_ref().is_none_or(|best| self.chosen.len() < best.len()) {
                self.best = Some(self.chosen.clone());
            }
            return;
        };
        let begun = self.candidates.partition_point(|c| c.span.start <= place);
        let here = |c: &usize| self.state[*c] == State::Open && place < self.candidates[*c].span.end;
        let mut open: Vec<usize> = (0..begun).filter(here).collect();
        let mut out = Vec::new();
        loop {
            self.work = self.work.saturating_sub(1 + begun as u64);
            if self.deadline.has_passed() {
                self.work = 0;
            }
            if self.work == 0 || self.best.as_ref().is_some_and(|best| best.len() <= self.at_least) {
                break;
            }
            let mut bytes: Vec<u64> = open.iter().map(|&c| self.candidates[c].bytes).collect();
            let Some(need) = largest_first(&mut bytes, self.left[place]) else { break };
            let far = open.iter().map(|&c| self.candidates[c].span.end).fold(reach.max(place + 1), usize::max);
            let least = self.chosen.len() + need + self.after[far];
            if least > MOST || self.best.as_ref().is_some_and(|best| least >= best.len()) {
                break;
            }
            let gain = |&&c: &&usize| self.candidates[c].gives(place, self.left[place]);
            let Some(&best) = open.iter().max_by_key(gain) else { break };
            let c = self.candidates[best].clone();
            let before: Vec<u64> = self.left[place..c.span.end].to_vec();
            self.work = self.work.saturating_sub(before.len() as u64);
            self.left[place..c.span.end].iter_mut().for_each(|left| *left = left.saturating_sub(c.bytes));
            self.state[best] = State::Chosen;
            self.chosen.push(best);
            self.deepen(place, reach.max(c.span.end));
            self.chosen.pop();
            self.left[place..c.span.end].copy_from_slice(&before);
            // Covers without this candidate come next. They also exclude every candidate that this one could replace.
            open.retain(|&other| {
                let dominated =
                    self.candidates[other].bytes <= c.bytes && self.candidates[other].span.end <= c.span.end;
                if dominated {
                    self.state[other] = State::Out;
                    out.push(other);
                }
                !dominated
            });
        }
        out.into_iter().for_each(|c| self.state[c] = State::Open);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gapless_testing::prelude::*;

    use super::*;

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let candidate = (0..6usize, 1..=6usize, 1..6u64);
        prop::collection::vec(candidate, 0..9).prop_map(|list| {
            list.into_iter().map(|(s, n, bytes)| Candidate { span: s..(s + n).min(6), bytes }).collect()
        })
    }

    generated! {
        #![cases(512)]

        /// Checked against all subsets.
        #[test]
        fn the_fewest_are_found(candidates in candidates(), demand in prop::collection::vec(0..12u64, 6)) {
            let covers = |set: u32| (0..6).all(|place| {
                let chosen = (0..candidates.len()).filter(|k| set >> k & 1 == 1).map(|k| &candidates[k]);
                chosen.filter(|c| c.span.contains(&place)).map(|c| c.bytes).sum::<u64>() >= demand[place]
            });
            let least = (0..1u32 << candidates.len()).filter(|&set| covers(set)).map(u32::count_ones).min();
            let found = fewest(&demand, &candidates, 1_000_000, Deadline::default());
            prop_assert_eq!(found.at_least, least.map(|n| n as usize));
            prop_assert_eq!(found.chosen.as_ref().map(Vec::len), found.at_least);
            let set = found.chosen.iter().flatten().fold(0, |set, k| set | 1 << k);
            prop_assert!(least.is_none() || covers(set));
            // With little work the bound may be lower, but it still holds.
            let hasty = fewest(&demand, &candidates, 10, Deadline::default());
            prop_assert!(hasty.at_least <= found.at_least);
            let late = fewest(&demand, &candidates, 1_000_000, Deadline::after(Some(Duration::ZERO)));
            prop_assert_eq!(late, Fewest { chosen: None, at_least: Some(0) });
        }

        /// A cover is found even if it takes many candidates.
        #[test]
        fn many_are_found(candidates in candidates(), demand in prop::collection::vec(0..12u64, 6), copies in 40..60u64) {
            let many: Vec<Candidate> = candidates.iter().flat_map(|c| (0..copies).map(|_| c.clone())).collect();
            let demand: Vec<u64> = demand.iter().map(|demand| demand * copies).collect();
            let found = fewest(&demand, &many, 1_000_000, Deadline::default());
            let helps = |chosen: &[usize], place: usize| -> u64 {
                chosen.iter().map(|&k| &many[k]).filter(|c| c.span.contains(&place)).map(|c| c.bytes).sum()
            };
            let all: Vec<usize> = (0..many.len()).collect();
            let can = (0..6).all(|place| helps(&all, place) >= demand[place]);
            prop_assert_eq!((found.chosen.is_some(), found.at_least.is_some()), (can, can));
            if let (Some(chosen), Some(at_least)) = (found.chosen, found.at_least) {
                prop_assert!((0..6).all(|place| helps(&chosen, place) >= demand[place]));
                prop_assert!(chosen.is_sorted_by(|a, b| a < b) && at_least <= chosen.len());
            }
        }

        /// Checked against all ways to take bytes off.
        #[test]
        fn the_fewest_bytes_are_found(
            mut candidates in candidates(),
            demand in prop::collection::vec(0..6u64, 6),
        ) {
            candidates.truncate(4);
            candidates.iter_mut().for_each(|c| c.bytes = c.bytes.min(3));
            let covers = |taken: &[u64]| (0..6).all(|place| {
                let here = candidates.iter().zip(taken).filter(|(c, _)| c.span.contains(&place));
                here.map(|(_, taken)| taken).sum::<u64>() >= demand[place]
            });
            let ways = (0..256u64).map(|n| (0..candidates.len()).map(|k| n >> (2 * k) & 3).collect::<Vec<u64>>());
            let allowed = |taken: &Vec<u64>| taken.iter().zip(&candidates).all(|(taken, c)| *taken <= c.bytes);
            let least = ways.filter(allowed).filter(|taken| covers(taken)).map(|taken| taken.iter().sum::<u64>()).min();
            let found = fewest_bytes(&demand, &candidates);
            prop_assert!(found.as_ref().is_none_or(|taken| allowed(taken) && covers(taken)));
            prop_assert_eq!(found.map(|taken| taken.iter().sum::<u64>()), least);
        }
    }
}
