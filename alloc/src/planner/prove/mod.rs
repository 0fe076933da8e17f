//! Proofs that no plan is lower.

pub(crate) mod exact;
