//! Durations in ticks: the same for all stages, per stage, or by a rule of the caller.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Action, Kind, StageId};

/// The durations that the simulator uses. A tick is a unit of time that the caller chooses.
pub trait Durations {
    /// Returns the ticks of one action that runs alone.
    fn action(&self, action: Action) -> u64;

    /// Returns the ticks of a forward of one stage and a backward of another that run at the same time.
    fn overlapped(&self, forward: Action, backward: Action) -> u64 {
        self.action(forward) + self.action(backward)
    }

    /// Returns the ticks from the end of an action until a neighbouring rank can use its result.
    fn transfer(&self, _from: Action) -> u64 {
        0
    }

    /// Returns the ticks of the optimizer's step on a stage's weights.
    fn update(&self, _stage: StageId) -> u64 {
        0
    }
}

/// Ticks of each action of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// Ticks of F.
    pub forward: u64,
    /// Ticks of I.
    pub backward_input: u64,
    /// Ticks of W.
    pub backward_weight: u64,
    /// Ticks of a forward and a whole backward that run at the same time. If the backward of the pair is only an input
    /// or a weight gradient, the pair takes less time: the ticks that the backward lacks are subtracted.
    pub overlapped: u64,
    /// Ticks from the end of an action until a neighbouring rank can use its result.
    pub transfer: u64,
}

/// One tick each for F, I and W, three ticks for a pair, and no transfer time.
impl Default for Costs {
    fn default() -> Self {
        Self { forward: 1, backward_input: 1, backward_weight: 1, overlapped: 3, transfer: 0 }
    }
}

impl Costs {
    fn ticks(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Forward => self.forward,
            Kind::Backward => self.backward_input + self.backward_weight,
            Kind::BackwardInput => self.backward_input,
            Kind::BackwardWeight => self.backward_weight,
        }
    }

    /// Returns the ticks saved by running a pair at the same time. The number is negative if the pair takes longer than
    /// its two actions one by one.
    fn saved(&self) -> i128 {
        i128::from(self.ticks(Kind::Forward)) + i128::from(self.ticks(Kind::Backward)) - i128::from(self.overlapped)
    }
}

impl Durations for Costs {
    fn action(&self, action: Action) -> u64 {
        self.ticks(action.kind)
    }

    fn overlapped(&self, forward: Action, backward: Action) -> u64 {
        side_by_side(self, forward.kind, self, backward.kind)
    }

    fn transfer(&self, _: Action) -> u64 {
        self.transfer
    }
}

/// The costs of each stage, indexed by stage. A stage past the end has the costs of the last entry. With an empty
/// slice, everything takes zero ticks.
///
/// A pair of two stages has one number of ticks saved by the forward's costs, and one by the backward's costs. The pair
/// saves the smaller number.
impl Durations for [Costs] {
    fn action(&self, action: Action) -> u64 {
        costs_of_stage(self, action.stage).ticks(action.kind)
    }

    fn overlapped(&self, forward: Action, backward: Action) -> u64 {
        side_by_side(
            &costs_of_stage(self, forward.stage),
            forward.kind,
            &costs_of_stage(self, backward.stage),
            backward.kind,
        )
    }

    fn transfer(&self, from: Action) -> u64 {
        costs_of_stage(self, from.stage).transfer
    }
}

fn costs_of_stage(costs: &[Costs], stage: StageId) -> Costs {
    let nothing = Costs { forward: 0, backward_input: 0, backward_weight: 0, overlapped: 0, transfer: 0 };
    costs.get(stage.0 as usize).or(costs.last()).copied().unwrap_or(nothing)
}

fn side_by_side(forward: &Costs, forward_kind: Kind, backward: &Costs, backward_kind: Kind) -> u64 {
    let alone = i128::from(forward.ticks(forward_kind)) + i128::from(backward.ticks(backward_kind));
    u64::try_from(alone - forward.saved().min(backward.saved())).unwrap_or(0)
}

/// The speed of a device. It yields costs from a graph's operation and byte counts, without measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Floating-point operations per second.
    pub flops: f64,
    /// Bytes read and written per second.
    pub bytes: f64,
}

impl Rates {
    /// True if both rates are positive finite numbers.
    pub fn are_sound(&self) -> bool {
        [self.flops, self.bytes].iter().all(|rate| rate.is_finite() && *rate > 0.0)
    }

    /// Returns the time of some work in nanoseconds: the time of its arithmetic or of its memory traffic, whichever is
    /// longer (the roofline model of Williams et al., 2009).
    pub fn nanoseconds(&self, flops: u64, bytes: u64) -> u64 {
        let seconds = (flops as f64 / self.flops).max(bytes as f64 / self.bytes);
        (seconds * 1e9).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_their_own_cost() {
        let cheap = Costs { forward: 2, backward_input: 3, backward_weight: 1, overlapped: 5, transfer: 1 };
        let dear = Costs { forward: 20, backward_input: 30, backward_weight: 10, overlapped: 60, transfer: 7 };
        let costs = &[cheap, dear][..];
        for (action, ticks, transfer) in [
            (Action::new(Kind::Forward, 0, 3), 2, 1),
            (Action::new(Kind::Backward, 0, 3), 4, 1),
            (Action::new(Kind::BackwardWeight, 1, 0), 10, 7),
            (Action::new(Kind::BackwardInput, 9, 0), 30, 7),
        ] {
            assert_eq!((costs.action(action), costs.transfer(action)), (ticks, transfer), "{action}");
        }
        let pair = |forward, backward, kind| {
            costs.overlapped(Action::new(Kind::Forward, forward, 1), Action::new(kind, backward, 0))
        };
        // A pair of two cheap stages saves one tick. A pair with the expensive stage saves none, whichever its partner.
        assert_eq!(pair(0, 0, Kind::Backward), 5);
        assert_eq!(pair(0, 0, Kind::BackwardInput), 4);
        assert_eq!(pair(1, 1, Kind::Backward), 60);
        assert_eq!(pair(0, 1, Kind::Backward), 42);
    }

    #[test]
    fn the_slower_of_arithmetic_and_memory() {
        let rates = Rates { flops: 1e12, bytes: 1e11 };
        assert_eq!(rates.nanoseconds(2_000_000, 100), 2_000);
        assert_eq!(rates.nanoseconds(2_000, 1_000_000), 10_000);
        assert_eq!(rates.nanoseconds(0, 1), 1);
    }
}
