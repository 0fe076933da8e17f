//! Checks a run: static buffers and served requests together. The checker uses no plans, ranges or homes, and compares
//! every pair of buffers.

use std::fmt;
use std::ops::Range;

use super::{Request, RequestId};
use crate::{BufferId, Problem};

/// A request that was served in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// The request.
    pub request: RequestId,
    /// Offset of its first byte.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A violation found in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum RunViolation {
    Misaligned { request: RequestId, offset: u64, alignment: u64 },
    OutOfRange { request: RequestId, end: u128, limit: u64 },
    Twice { request: RequestId },
    OnStatic { request: RequestId, buffer: BufferId },
    Forbidden { request: RequestId, start: u64, end: u64 },
    Overlap { first: RequestId, second: RequestId },
}

impl fmt::Display for RunViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Misaligned { request, offset, alignment } => {
                write!(f, "request {}: offset {offset} is not a multiple of {alignment}", request.0)
            }
            Self::OutOfRange { request, end, limit } => {
                write!(f, "request {}: ends at byte {end}, past {limit}", request.0)
            }
            Self::Twice { request } => write!(f, "request {}: served twice in one step", request.0),
            Self::OnStatic { request, buffer } => {
                write!(f, "request {} shares bytes with buffer {} of the static plan", request.0, buffer.0)
            }
            Self::Forbidden { request, start, end } => {
                write!(f, "request {} touches the forbidden range [{start}, {end})", request.0)
            }
            Self::Overlap { first, second } => write!(f, "requests {} and {} share bytes", first.0, second.0),
        }
    }
}

impl std::error::Error for RunViolation {}

/// Checks the requests served in one step. No request may overlap a static buffer or another request while both are
/// alive, and no request may end above `limit` bytes.
///
/// # Errors
/// Returns all violations if there are any, in the order of `served`.
pub fn check_run(
    problem: &Problem,
    offsets: &[u64],
    requests: &[Request],
    served: &[Served],
    limit: u64,
) -> Result<(), Vec<RunViolation>> {
    let mut violations = Vec::new();
    for (index, one) in served.iter().enumerate() {
        let (request, offset) = (one.request, one.offset);
        let Request { ticks, alignment, .. } = &requests[request.index()];
        if offset % alignment != 0 {
            violations.push(RunViolation::Misaligned { request, offset, alignment: *alignment });
        }
        if served[..index].iter().any(|other| other.request == request) {
            violations.push(RunViolation::Twice { request });
        }
        if one.bytes == 0 {
            continue;
        }
        let end = u128::from(offset) + u128::from(one.bytes);
        if end > u128::from(limit) {
            violations.push(RunViolation::OutOfRange { request, end, limit });
            continue;
        }
        let bytes = offset..offset + one.bytes;
        for (buffer, (b, &at)) in problem.ids().zip(problem.buffers().iter().zip(offsets)) {
            if meet(ticks, &b.lifetime) && meet(&bytes, &(at..at + b.bytes)) {
                violations.push(RunViolation::OnStatic { request, buffer });
            }
        }
        for range in problem.forbidden().iter().filter(|range| meet(&bytes, range)) {
            violations.push(RunViolation::Forbidden { request, start: range.start, end: range.end });
        }
        for other in &served[..index] {
            let other_bytes = other.offset..other.offset.saturating_add(other.bytes);
            if meet(ticks, &requests[other.request.index()].ticks) && meet(&bytes, &other_bytes) {
                violations.push(RunViolation::Overlap { first: other.request, second: request });
            }
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    !one.is_empty() && !other.is_empty() && one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn names_every_kind_of_violation() {
        let problem =
            Problem::new(vec![Buffer::new(0..4, 64), Buffer::new(4..8, 64)]).unwrap().forbid(640..700).unwrap();
        let requests = [Request::new(0..4, 64, 64), Request::new(2..6, 64, 128), Request::new(4..6, 64, 64)];
        let count = |served: &[(u32, u64, u64)]| {
            let one = |&(request, offset, bytes)| Served { request: RequestId(request), offset, bytes };
            let served: Vec<Served> = served.iter().map(one).collect();
            check_run(&problem, &[0, 64], &requests, &served, 1024).map_or_else(|v| v.len(), |()| 0)
        };
        assert_eq!(count(&[(0, 64, 64), (1, 128, 128), (2, 0, 64)]), 0);
        assert_eq!(count(&[(0, 0, 64)]), 1);
        assert_eq!(count(&[(0, 65, 63)]), 1);
        assert_eq!(count(&[(0, 64, 0), (0, 64, 0)]), 1);
        assert_eq!(count(&[(0, 960, 65)]), 1);
        assert_eq!(count(&[(1, 64, 64)]), 1);
        assert_eq!(count(&[(1, 0, 128)]), 2);
        assert_eq!(count(&[(0, 128, 64), (1, 128, 128)]), 1);
        assert_eq!(count(&[(0, 128, 64), (2, 128, 64)]), 0);
        assert_eq!(count(&[(0, 128, 64), (1, 128, 0)]), 0);
        assert_eq!(count(&[(2, 576, 65)]), 1);
        assert_eq!(count(&[(2, u64::MAX - 63, 64)]), 1);
    }
}
