//! Statistics of an arena.

use std::fmt;

use crate::draw::Bytes;

/// The statistics of an arena since it was built. Sizes are the bytes that requests asked for, unless stated otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ArenaReport {
    /// Requests that were made.
    pub requests: u64,
    /// Requests that could not be served in the arena.
    pub overflows: u64,
    /// Bytes of all requests, including those not served.
    pub asked_bytes: u64,
    /// Bytes that were placed in idle ranges of the static plan.
    pub reused_bytes: u64,
    /// Bytes that were placed in the reserve.
    pub reserve_served_bytes: u64,
    /// Bytes of requests that could not be served.
    pub refused_bytes: u64,
    /// Size of the reserve.
    pub reserve_bytes: u64,
    /// High-water mark: the end of the highest bytes that were ever in use in the reserve, counted from the reserve's
    /// start.
    pub high_water_bytes: u64,
    /// The most bytes in use in the reserve at once.
    pub most_live_bytes: u64,
    /// Number of times that optional buffers were evicted.
    pub evicted: u64,
    /// Number of times that the arena continued with a larger reserve.
    pub growths: u64,
    /// Size of the reserve when the arena was built.
    pub first_reserve_bytes: u64,
    /// Bytes of refused requests that were served outside of the arena.
    pub outside_bytes: u64,
    /// The most bytes in use outside of the arena at once.
    pub most_outside_bytes: u64,
}

impl ArenaReport {
    /// Share of the bytes served that lie in addresses idle in the static plan; 1 if nothing was served.
    pub fn reuse_share(&self) -> f64 {
        let served = self.reused_bytes + self.reserve_served_bytes;
        if served == 0 { 1.0 } else { self.reused_bytes as f64 / served as f64 }
    }

    /// High-water mark ÷ most bytes in use; 1 means that the reserve has no gaps, or that the reserve was never in use.
    pub fn fragmentation(&self) -> f64 {
        if self.most_live_bytes == 0 { 1.0 } else { self.high_water_bytes as f64 / self.most_live_bytes as f64 }
    }
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "routing arena   {} requests for {}", self.requests, Bytes(self.asked_bytes))?;
        writeln!(f, "  reused        {} ({:.1}%)", Bytes(self.reused_bytes), 100.0 * self.reuse_share())?;
        let (high, reserve) = (Bytes(self.high_water_bytes), Bytes(self.reserve_bytes));
        writeln!(f, "  reserve       {high} of {reserve} used, fragmentation {:.4}", self.fragmentation())?;
        writeln!(f, "  overflows     {} ({})", self.overflows, Bytes(self.refused_bytes))?;
        if self.outside_bytes > 0 {
            let (outside, most) = (Bytes(self.outside_bytes), Bytes(self.most_outside_bytes));
            writeln!(f, "  outside       {outside}, at most {most} at once")?;
        }
        if self.evicted > 0 {
            writeln!(f, "  evicted       {} times, and recomputed", self.evicted)?;
        }
        if self.growths > 0 {
            writeln!(
                f,
                "  grown         {} times, from {} to {reserve}",
                self.growths,
                Bytes(self.first_reserve_bytes)
            )?;
        }
        Ok(())
    }
}
