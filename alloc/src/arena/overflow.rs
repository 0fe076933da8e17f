//! A request that could not be served.

use std::fmt;
use std::sync::Arc;

use super::RequestId;
use crate::Label;

/// A refused request: the bytes asked for, the bytes that were free, and the remedies. Creating this error allocates no
/// heap memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overflow {
    /// The request.
    pub request: RequestId,
    /// The names of the request.
    pub label: Arc<Label>,
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes of one row; 0 if the request has no rows.
    pub bytes_per_row: u64,
    /// Bytes if routing is balanced.
    pub balanced: u64,
    /// The request's bound in bytes.
    pub most: u64,
    /// Bytes promised to the request, if any.
    pub promised: Option<u64>,
    /// Size of the largest address range that was free for the request's whole lifetime.
    pub largest_hole: u64,
    /// Total bytes of all address ranges that were free for the request's whole lifetime.
    pub free: u64,
    /// Size of the reserve in bytes.
    pub reserve: u64,
    /// Size of the reserve in which this request could have been placed above all other requests.
    pub enough: u64,
    /// Factor of balanced sizes that covers all requests of the step so far, this one included, in hundredths.
    pub factor_hundredths: u64,
}

impl std::error::Error for Overflow {}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, balanced, most, largest_hole, free, reserve, .. } = *self;
        let Label { tensor, op, layer, .. } = &*self.label;
        write!(f, "the arena of routing buffers cannot serve request {}", self.request.0)?;
        if !tensor.is_empty() {
            write!(f, ", {tensor} ({op}) of layer {layer}")?;
        }
        write!(f, ": {bytes} bytes")?;
        if let Some(rows) = bytes.checked_div(self.bytes_per_row) {
            write!(f, " ({rows} rows of {} bytes)", self.bytes_per_row)?;
        }
        write!(f, " requested, {balanced} when balanced, {most} at most")?;
        if let Some(promised) = self.promised {
            write!(f, ", {promised} promised")?;
        }
        write!(f, "; {largest_hole} free in one piece, {free} in total, with a reserve of {reserve} bytes; ")?;
        if bytes > most {
            return write!(f, "the request exceeds its own bound; correct the bound (Request::most)");
        }
        if self.promised.is_some_and(|promised| bytes <= promised) {
            write!(f, "an earlier request exceeded its promised size; ")?;
        }
        let factor = self.factor_hundredths as f64 / 100.0;
        write!(
            f,
            "use Reserve::Worst, Reserve::Balanced with a factor of at least {factor:.2}, or Reserve::Bytes({}); or recompute \
             the layer, or bound its rows by a capacity factor",
            self.enough
        )
    }
}
