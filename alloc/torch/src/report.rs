//! Figures of a device's allocator.

use serde::Serialize;

/// Figures of an allocator's work so far. Sizes are in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The device's index.
    pub device: usize,
    /// Iterations that have ended.
    pub iterations: u64,
    /// Requests so far.
    pub requests: u64,
    /// Requests that a plan placed.
    pub planned_requests: u64,
    /// Requests and frees that were not the plan's next, while a plan was played.
    pub deviations: u64,
    /// Iterations that were played without a deviation.
    pub exact_iterations: u64,
    /// Bytes alive now, each request rounded up to 512.
    pub alive: u64,
    /// The most bytes alive at once.
    pub most_requested: u64,
    /// Bytes alive now outside of the plan: tensors that stay across iterations, and deviations.
    pub online: u64,
    /// Mapped bytes now.
    pub reserved: u64,
    /// The most bytes mapped at once.
    pub most_reserved: u64,
    /// Calls that mapped or unmapped pages.
    pub device_calls: u64,
    /// Such calls after the first iteration.
    pub later_device_calls: u64,
    /// Plans made so far.
    pub plans: u64,
    /// Bytes of the plan that is played; 0 without a plan.
    pub planned: u64,
    /// The most planned bytes alive at once. No plan is lower.
    pub lower_bound: u64,
    /// Milliseconds that the last plan took, beside the running iterations.
    pub planning_ms: u64,
    /// Why there is no plan, or why a saved plan was not used or not written.
    pub remark: Option<String>,
}
