//! Where there is least to spare: the milestones of a course.

/// No clique so near to a milestone is fuller, and none so much nearer as full.
const NEAR: (u32, u32) = (12, 4);

/// Cliques between two milestones, at most.
const FAR: u32 = 40;

/// The cliques after `peak` with least to spare among those near them, and others in between where those are far apart.
pub(super) fn milestones(peak: u32, cliques: u32, slack: impl Fn(u32) -> u64) -> Vec<u32> {
    let is_narrow = |&k: &u32| {
        let mut near = k.saturating_sub(NEAR.0).max(peak + 1)..=(k + NEAR.0).min(cliques - 1);
        let is_first = |other: u32| k <= other || k - other > NEAR.1;
        k + 1 == cliques || near.all(|other| slack(k) < slack(other) || slack(k) == slack(other) && is_first(other))
    };
    let mut milestones = Vec::new();
    let mut last = peak;
    for k in (peak + 1..cliques).filter(is_narrow) {
        let strides = (k - last).div_ceil(FAR);
        milestones.extend((1..=strides).map(|stride| last + (k - last) * stride / strides));
        last = k;
    }
    milestones
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        /// The last clique is always one.
        #[test]
        fn milestones_are_never_far_apart(
            slack in prop::collection::vec(0..9u64, 2..200),
            peak in any::<prop::sample::Index>(),
        ) {
            let (cliques, peak) = (slack.len() as u32, peak.index(slack.len()) as u32);
            let found = milestones(peak, cliques, |k| slack[k as usize]);
            let all: Vec<u32> = std::iter::once(peak).chain(found).collect();
            prop_assert!(all.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= FAR));
            prop_assert_eq!(all.last(), Some(&(cliques - 1)));
        }
    }
}
