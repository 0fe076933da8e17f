//! The identity of a plan: same problem, same offsets, same hash.

use std::fmt;

use crate::Problem;

/// First 128 bits of a BLAKE3 hash over every buffer's lifetime, size, alignment and offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanHash([u8; 16]);

impl fmt::Display for PlanHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Hashes a placed problem.
pub fn plan_hash(problem: &Problem, offsets: &[u64]) -> PlanHash {
    let mut hasher = blake3::Hasher::new();
    for (b, offset) in problem.buffers().iter().zip(offsets) {
        for word in [b.lifetime.start, b.lifetime.end, b.bytes, b.alignment, *offset] {
            hasher.update(&word.to_le_bytes());
        }
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    PlanHash(short)
}
