//! Lowers a plan step by step to a goal.

use super::eject::Ejection;
use super::meter::Meter;
use super::part::Part;
use super::portfolio::Placed;

/// The lowest plan that repairs of `places` lead to, not below `goal`, before the meter stops. Items without a place are
/// filled in. `None` when the address space ends.
///
/// First the goal itself is tried, then ever smaller steps from above. An attempt may cost little at first; where all
/// have failed, the next round of them may cost more.
pub(crate) fn descend(part: &Part, places: &[Option<u64>], goal: u64, meter: &mut Meter) -> Option<Placed> {
    let mut ejection = Ejection::new(part, places, meter)?;
    let grain = part.grain();
    let mut patience = FIRST_ATTEMPT;
    // Nothing at or below this height is tried again in this round.
    let mut lowest = goal;
    let mut target = goal;
    while ejection.plan.height > goal && meter.stopped().is_none() {
        let allowed = patience.min(meter.left());
        if !ejection.lower(target, allowed, meter) {
            lowest = target;
        }
        let height = ejection.plan.height;
        let range = height.saturating_sub(lowest);
        let is_narrow = range <= grain || range <= (height - goal.min(height)) / 16;
        if is_narrow {
            patience = patience.saturating_mul(4);
            lowest = goal;
        }
        let step = (height.saturating_sub(lowest) / 4).max(grain);
        let next = height.saturating_sub(step);
        target = if is_narrow { goal } else { (next - next % grain).max(lowest) };
    }
    Some(ejection.plan)
}

/// Work of an attempt in the first round.
const FIRST_ATTEMPT: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check;
    use crate::planner::part::Whole;
    use crate::synthetic::{Order, Step};

    /// From a tower of everything: always a plan, a lower one for more work, and no more work than allowed but for one
    /// last attempt.
    #[test]
    fn a_tower_comes_down() {
        let step =
            Step { order: Order::Interleaved, layers: 2, micro_batches: 5, tokens: &[512, 768], ..Step::default() };
        let problem = step.problem().unwrap();
        let whole = Whole::new(&problem, true);
        let [part] = whole.parts.as_slice() else { panic!("one part") };
        let mut top = 0;
        let tower: Vec<Option<u64>> = part
            .items
            .iter()
            .map(|item| {
                top += item.bytes;
                Some(top - item.bytes)
            })
            .collect();
        let heights = [0, 500_000, 20_000_000].map(|work| {
            let mut meter = Meter { work, ..Meter::default() };
            let placed = descend(part, &tower, part.bound, &mut meter).unwrap();
            let mut offsets = vec![0; problem.len()];
            part.sources.iter().zip(&placed.offsets).for_each(|(&i, &at)| offsets[i as usize] = at);
            check(&problem, &offsets, Some(placed.height)).unwrap();
            assert!(meter.spent <= work + 200_000, "{} spent of {work}", meter.spent);
            placed.height
        });
        assert_eq!(heights[0], top);
        assert!(heights[2] <= heights[1] && heights[1] < top, "{heights:?}");
        assert!(heights[2] < part.bound + part.bound / 10, "{heights:?}, bound {}", part.bound);
    }
}
