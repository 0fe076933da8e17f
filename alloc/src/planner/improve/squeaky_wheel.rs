//! Squeaky-wheel optimisation (Joslin and Clements, 1999): items that were placed badly are placed first in the next
//! round.

/// Rounds without a lower plan after which the search ends.
const PATIENCE: u32 = 5;

/// Calls `attempt` for at most `rounds` rounds and returns the number of rounds run. `attempt` gets the items to place
/// first. It returns the height of its plan and further items to place first from then on, or `None` to stop. The
/// rounds also end when `attempt` returns no further items, or after several rounds without a lower plan.
pub(crate) fn squeaky_wheel(
    rounds: u32,
    mut first: Vec<u32>,
    mut attempt: impl FnMut(&mut [u32]) -> Option<(u64, Vec<u32>)>,
) -> u32 {
    let (mut lowest, mut lowest_in) = (u64::MAX, 0);
    for round in 1..=rounds {
        let Some((height, joining)) = attempt(&mut first) else { return round };
        if height < lowest {
            (lowest, lowest_in) = (height, round);
        }
        if joining.is_empty() || round > lowest_in + PATIENCE {
            return round;
        }
        first.extend(joining);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs rounds that end at these heights and add one item each. Returns, for each round, the number of items that
    /// were to be placed first.
    fn rounds(heights: &[u64]) -> Vec<usize> {
        let mut calls = Vec::new();
        squeaky_wheel(20, vec![7], |first| {
            calls.push(first.len());
            heights.get(calls.len() - 1).map(|&height| (height, vec![0]))
        });
        calls
    }

    #[test]
    fn rounds_end_where_none_gets_lower() {
        assert_eq!(rounds(&[5, 4, 4, 4, 4, 4, 4, 3]), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(rounds(&[5, 5, 5, 5, 5, 5, 5, 3]), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(squeaky_wheel(20, vec![], |_| Some((5, vec![]))), 1);
    }
}
