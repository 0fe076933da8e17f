//! Learning rate schedules, as pure functions of the step.
//!
//! ```
//! use gapless_engine::learning_rate::{LearningRate, Shape};
//!
//! let schedule = LearningRate { peak: 3e-4, floor: 3e-5, warmup_steps: 10, steps: 110, shape: Shape::Cosine }.check()?;
//! assert!((schedule.at(0) - 3e-5).abs() < 1e-12); // a tenth of the way up: no step is lost to a rate of zero
//! assert_eq!(schedule.at(9), 3e-4);
//! assert!((schedule.at(60) - 1.65e-4).abs() < 1e-12); // half-way down
//! assert_eq!(schedule.at(110), 3e-5);
//! # Ok::<(), gapless_engine::learning_rate::LearningRateError>(())
//! ```
//!
//! ```text
//!  peak ┤   ╭──╮               ╭───────────╮            ╭─────────────────
//!       │  ╱    ╲             ╱             ╲          ╱
//! floor ┤ ╱      ╰───────    ╱               ╲────    ╱
//!       └─┴──────────────   ─┴────────────────────   ─┴─────────────────▶ step
//!          cosine             WSD                     constant
//! ```

use serde::{Deserialize, Serialize};

/// The configuration of a schedule. [`LearningRate::check`] turns it into a [`Schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRate {
    /// The highest rate, reached at the last step of the warm-up.
    pub peak: f64,
    /// The final rate; unused by [`Shape::Constant`].
    #[serde(default)]
    pub floor: f64,
    /// Number of steps of the linear warm-up.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Number of steps of the whole run, including the warm-up. From step `steps` on, the rate is `floor`. The rates of
    /// [`Shape::Constant`] and [`Shape::InverseSqrt`] do not depend on this number.
    pub steps: u64,
    /// The shape of the schedule after the warm-up.
    pub shape: Shape,
}

/// The shape of a schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// The rate stays at the peak.
    Constant,
    /// The rate falls linearly to the floor.
    Linear,
    /// The rate falls with the inverse square root of the step (Vaswani et al., arXiv 1706.03762, section 5.3), but
    /// never below the floor. At four times the warm-up's number of steps, the rate is half the peak.
    InverseSqrt,
    /// The rate falls to the floor by half a cosine (Loshchilov and Hutter, 2017, without restarts).
    Cosine,
    /// Warm-up, stable, decay: the rate stays at the peak, and then falls linearly to the floor over the last steps (Hu
    /// et al., 2024).
    Wsd {
        /// Number of steps of the decay.
        decay_steps: u64,
    },
}

/// The reason why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LearningRateError {
    /// A rate that is negative, infinite or not a number.
    #[error("the {which} learning rate is {rate}; set it to a finite number of at least 0")]
    Rate {
        /// `peak` or `floor`.
        which: &'static str,
        /// The given rate.
        rate: f64,
    },
    /// The floor is above the peak.
    #[error("the learning rate's floor {floor} is above its peak {peak}; lower the floor")]
    FloorAbovePeak {
        /// The final rate.
        floor: f64,
        /// The highest rate.
        peak: f64,
    },
    /// Warm-up and decay together take more steps than the run.
    #[error(
        "a warm-up of {warmup_steps} steps and a decay of {decay_steps} do not fit into {steps} steps; shorten one, or train longer"
    )]
    TooLong {
        /// Number of steps of the warm-up.
        warmup_steps: u64,
        /// Number of steps of the decay.
        decay_steps: u64,
        /// Number of steps of the run.
        steps: u64,
    },
}

/// A checked schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    config: LearningRate,
}

impl LearningRate {
    /// The peak of every run and trainer that does not set its own.
    pub const DEFAULT_PEAK: f64 = 3e-4;

    /// Returns a cosine schedule. The warm-up takes 20 steps, or a quarter of all steps if a quarter is less than 20.
    /// The rate then falls to a tenth of the peak.
    pub fn cosine(peak: f64, steps: u64) -> Self {
        Self { peak, floor: peak / 10.0, warmup_steps: 20.min(steps / 4), steps, shape: Shape::Cosine }
    }

    /// A schedule that has the same rate at every step.
    pub fn constant(rate: f64) -> Self {
        Self { peak: rate, floor: rate, warmup_steps: 0, steps: 0, shape: Shape::Constant }
    }

    /// Checks the configuration.
    ///
    /// # Errors
    /// Returns an error if a rate is negative or not finite, or if warm-up and decay together take more steps than the
    /// run. Also returns an error if the floor is above the peak, unless the shape is [`Shape::Constant`].
    pub fn check(self) -> Result<Schedule, LearningRateError> {
        for (which, rate) in [("peak", self.peak), ("floor", self.floor)] {
            if !rate.is_finite() || rate < 0.0 {
                return Err(LearningRateError::Rate { which, rate });
            }
        }
        let (peak, floor, warmup_steps, steps) = (self.peak, self.floor, self.warmup_steps, self.steps);
        if floor > peak && self.shape != Shape::Constant {
            return Err(LearningRateError::FloorAbovePeak { floor, peak });
        }
        let decay_steps = match self.shape {
            Shape::Wsd { decay_steps } => decay_steps,
            Shape::Constant | Shape::Linear | Shape::InverseSqrt | Shape::Cosine => 0,
        };
        if warmup_steps.checked_add(decay_steps).is_none_or(|needed| needed > steps) {
            return Err(LearningRateError::TooLong { warmup_steps, decay_steps, steps });
        }
        Ok(Schedule { config: self })
    }
}

impl Schedule {
    /// Returns the learning rate of a step; steps are counted from 0. Step `warmup_steps - 1` is the first at the peak.
    /// For shapes that end at the floor, step `steps` is the first at the floor; it would be the first after the run.
    pub fn at(&self, step: u64) -> f64 {
        let LearningRate { peak, floor, warmup_steps, steps, shape } = self.config;
        if step < warmup_steps {
            return peak * ((step + 1) as f64 / warmup_steps as f64);
        }
        let falling_from = |start: u64, fall: fn(f64) -> f64| {
            if step >= steps {
                floor
            } else if step <= start {
                peak
            } else {
                floor + (peak - floor) * fall((step - start) as f64 / (steps - start) as f64)
            }
        };
        match shape {
            Shape::Constant => peak,
            Shape::Linear => falling_from(warmup_steps, |progress| 1.0 - progress),
            Shape::InverseSqrt => {
                let warm = warmup_steps.max(1) as f64;
                (peak * (warm / (step as f64 + 1.0)).sqrt()).max(floor)
            }
            Shape::Cosine => {
                falling_from(warmup_steps, |progress| 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
            }
            Shape::Wsd { decay_steps } => falling_from(steps - decay_steps, |progress| 1.0 - progress),
        }
    }

    /// The configuration of the schedule.
    pub fn config(&self) -> &LearningRate {
        &self.config
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;

    const COSINE: LearningRate =
        LearningRate { peak: 1.0, floor: 0.125, warmup_steps: 4, steps: 20, shape: Shape::Cosine };
    const WSD: LearningRate = LearningRate { shape: Shape::Wsd { decay_steps: 8 }, ..COSINE };
    const LINEAR: LearningRate = LearningRate { shape: Shape::Linear, ..COSINE };
    const INVERSE_SQRT: LearningRate = LearningRate { shape: Shape::InverseSqrt, ..COSINE };
    const CONSTANT: LearningRate = LearningRate { shape: Shape::Constant, ..COSINE };

    fn check(config: LearningRate, expected: &[(u64, f64)]) {
        let schedule = config.check().unwrap();
        for &(step, rate) in expected {
            assert_eq!(schedule.at(step), rate, "step {step} of {config:?}");
        }
    }

    #[test]
    fn corners() {
        let warmup = [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (4, 1.0)];
        for config in [COSINE, WSD, CONSTANT, LINEAR] {
            check(config, &warmup);
        }
        check(LINEAR, &[(12, 0.5625), (20, 0.125), (u64::MAX, 0.125)]);
        check(INVERSE_SQRT, &[(1, 0.5), (3, 1.0), (15, 0.5), (63, 0.25), (u64::MAX, 0.125)]);
        check(LearningRate { warmup_steps: 0, ..INVERSE_SQRT }, &[(0, 1.0), (3, 0.5), (15, 0.25)]);
        check(COSINE, &[(12, 0.5625), (20, 0.125), (u64::MAX, 0.125)]);
        check(WSD, &[(12, 1.0), (13, 0.890625), (16, 0.5625), (19, 0.234375), (20, 0.125), (1 << 60, 0.125)]);
        check(CONSTANT, &[(19, 1.0), (20, 1.0), (u64::MAX, 1.0)]);

        check(LearningRate { warmup_steps: 0, ..COSINE }, &[(0, 1.0), (10, 0.5625), (20, 0.125)]);
        check(LearningRate { warmup_steps: 20, ..COSINE }, &[(19, 1.0), (20, 0.125)]);
        check(LearningRate { shape: Shape::Wsd { decay_steps: 16 }, ..WSD }, &[(3, 1.0), (4, 1.0), (12, 0.5625)]);
        check(LearningRate { shape: Shape::Wsd { decay_steps: 0 }, ..WSD }, &[(19, 1.0), (20, 0.125)]);
        check(LearningRate { warmup_steps: 0, steps: 0, ..COSINE }, &[(0, 0.125)]);
    }

    #[test]
    fn mistakes_have_remedies() {
        let refused = |config: LearningRate, part: &str| {
            let message = config.check().unwrap_err().to_string();
            assert!(message.contains(part), "{message} lacks {part}");
        };
        refused(LearningRate { peak: f64::NAN, ..COSINE }, "the peak learning rate is NaN");
        refused(LearningRate { floor: -1.0, ..COSINE }, "the floor learning rate is -1");
        refused(LearningRate { floor: 2.0, ..COSINE }, "above its peak 1");
        refused(LearningRate { warmup_steps: 21, ..COSINE }, "do not fit into 20 steps");
        refused(LearningRate { warmup_steps: 13, ..WSD }, "a decay of 8 do not fit");
        refused(LearningRate { warmup_steps: u64::MAX, ..WSD }, "do not fit");
    }

    generated! {
        /// The rate rises to the peak, never rises again, and stays within its bounds.
        #[test]
        fn rises_once_and_falls_once(warmup_steps in 0u64..20, decay_steps in 0u64..20, rest in 0u64..20, cosine: bool) {
            let steps = warmup_steps + decay_steps + rest;
            let shape = if cosine { Shape::Cosine } else { Shape::Wsd { decay_steps } };
            let schedule = LearningRate { peak: 0.7, floor: 0.1, warmup_steps, steps, shape }.check().unwrap();
            let rates: Vec<f64> = (0..steps + 3).map(|step| schedule.at(step)).collect();
            let (rising, falling) = rates.split_at(warmup_steps as usize);
            prop_assert!(rising.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(falling.windows(2).all(|pair| pair[0] >= pair[1]));
            prop_assert!(rates.iter().all(|&rate| rate > 0.0 && rate <= 0.7));
            prop_assert_eq!(rates[steps as usize], 0.1);
        }
    }
}
