//! The arena as a running step uses it.
//!
//! In: one request size after another, and releases. Out: offsets. Never: a heap allocation, a lock or a system call;
//! nor the same bytes for two requests that are alive at one tick.

use std::ops::Range;
use std::sync::Arc;

use super::blocks::Blocks;
use super::{ArenaPlan, ArenaReport, Overflow, RequestId};
use crate::Label;

/// Most gaps of one range that a request considers.
const GAPS: usize = 8;

/// Serves the requests of an [`ArenaPlan`].
///
/// A request tries its ranges, the shortest first, so that long ranges stay whole. In the first range with room, the
/// request takes the tightest of the lowest eight gaps that fit. A long-lived request goes to the lower end of the gap,
/// and a short-lived request goes to the upper end, so that the space freed by short-lived requests is in one piece.
/// With `n` blocks in use, a request takes O(log n), since it has at most 16 ranges.
///
/// As long as all requests of a step stay within their promised sizes, only *spare* ranges are used. A spare range of a
/// request overlaps no home that a later request needs in the meantime. So a block in use never covers a part of the
/// home of a request that comes during the block's lifetime, and every request finds at least its own home. After the
/// first request that exceeds its promised size, the promises no longer hold. Until [`reset`](Self::reset), requests
/// then use all *idle* ranges: those that the static plan does not use.
#[derive(Debug)]
pub struct Arena {
    plan: ArenaPlan,
    labels: Box<[Arc<Label>]>,
    blocks: Blocks,
    /// Offset and size of each request in use.
    live: Box<[Option<Live>]>,
    live_count: usize,
    live_in_reserve: u64,
    /// Highest byte of the reserve that was ever in use, rounded up to the grain and counted from the reserve's start.
    high_water: u64,
    /// Whether all requests of this step so far stayed within their promised sizes.
    is_within_promises: bool,
    /// The factor of balanced sizes that covers all requests of this step so far, in hundredths.
    factor_hundredths: u64,
    report: ArenaReport,
}

#[derive(Debug, Clone, Copy)]
struct Live {
    offset: u64,
    bytes: u64,
}

impl Arena {
    /// Builds the arena and allocates all memory that it will ever use.
    pub fn new(plan: ArenaPlan) -> Self {
        let count = plan.requests().len();
        let reserve_bytes = plan.reserve().end - plan.reserve().start;
        Self {
            labels: plan.requests().iter().map(|r| Arc::new(r.label.clone())).collect(),
            blocks: Blocks::new(count),
            live: vec![None; count].into(),
            live_count: 0,
            live_in_reserve: 0,
            high_water: 0,
            is_within_promises: true,
            factor_hundredths: 0,
            report: ArenaReport { reserve_bytes, first_reserve_bytes: reserve_bytes, ..ArenaReport::default() },
            plan,
        }
    }

    /// The plan that the arena was built from.
    pub fn plan(&self) -> &ArenaPlan {
        &self.plan
    }

    /// The statistics since the arena was built.
    pub fn report(&self) -> ArenaReport {
        self.report
    }

    /// Returns the smallest factor of [`Reserve::Balanced`](super::Reserve::Balanced) that would have covered all
    /// requests since the last [`reset`](Self::reset), rounded up to hundredths.
    pub fn factor(&self) -> f64 {
        self.factor_hundredths as f64 / 100.0
    }

    /// True if no request is in use. Between steps this is always true, unless a step was aborted without a
    /// [`reset`](Self::reset).
    pub fn is_idle(&self) -> bool {
        self.live_count == 0
    }

    /// Replaces the plan by a plan of the same requests with a larger reserve. The sums of the report continue from
    /// their current values.
    ///
    /// # Panics
    /// Panics if the new plan has a different number of requests, or if a request is in use. Either is an error in the
    /// caller's own code.
    pub fn grow(&mut self, plan: ArenaPlan) {
        assert_eq!(plan.requests().len(), self.plan.requests().len(), "a larger plan is of the same requests");
        assert_eq!(self.live_count, 0, "an arena grows between steps");
        let (report, high_water, new) = (self.report, self.high_water, Self::new(plan));
        let reserve_bytes = new.report.reserve_bytes;
        let report = ArenaReport { reserve_bytes, growths: report.growths + 1, ..report };
        *self = Self { high_water, report, ..new };
    }

    /// Records that the caller served a refused request of `bytes` outside of the arena, and that `in_use` bytes are
    /// now in use there.
    pub fn record_outside(&mut self, bytes: u64, in_use: u64) {
        self.report.outside_bytes += bytes;
        self.report.most_outside_bytes = self.report.most_outside_bytes.max(in_use);
    }

    /// Returns the offset of `bytes` bytes, which stay reserved for the request until it is released. A request of zero
    /// bytes takes no space.
    ///
    /// # Errors
    /// Returns [`Overflow`] if no range that is free for the request's whole lifetime is long enough, or if `bytes` is
    /// more than the request's bound. The arena then takes no bytes for the request.
    ///
    /// # Panics
    /// Panics if the request is in use already, which is an error in the caller's own code.
    pub fn request(&mut self, id: RequestId, bytes: u64) -> Result<u64, Overflow> {
        assert!(self.live[id.index()].is_none(), "request {} is released before it is made again", id.0);
        self.report.requests += 1;
        self.report.asked_bytes = self.report.asked_bytes.saturating_add(bytes);
        self.is_within_promises &= self.plan.promised(id).is_some_and(|promised| bytes <= promised);
        let balanced = self.plan.request(id).balanced.max(1);
        // Rounded up, so that the factor suffices.
        let hundredths = (100 * u128::from(bytes)).div_ceil(u128::from(balanced));
        self.factor_hundredths = self.factor_hundredths.max(u64::try_from(hundredths).unwrap_or(u64::MAX));
        let Some(offset) = self.place(id, bytes, self.is_within_promises) else {
            self.report.overflows += 1;
            self.report.refused_bytes = self.report.refused_bytes.saturating_add(bytes);
            return Err(self.overflow(id, bytes));
        };
        self.take(id, offset, bytes);
        Ok(offset)
    }

    /// Like [`request`](Self::request), but for a request that the caller can do without
    /// ([`Need::Optional`](super::Need::Optional)). Returns the offset, or `None` if the request cannot be served. It
    /// can be served if `bytes` fit into addresses that are not promised to other requests, and are at most the
    /// request's bound. If the reserve promises nothing, only a request of zero bytes is served. The promises of the
    /// step continue to hold, even if `bytes` exceeds the promise of this request.
    ///
    /// # Panics
    /// Panics in the same cases as [`request`](Self::request).
    pub fn try_request(&mut self, id: RequestId, bytes: u64) -> Option<u64> {
        assert!(self.live[id.index()].is_none(), "request {} is released before it is made again", id.0);
        let offset = self.place(id, bytes, true)?;
        self.report.requests += 1;
        self.report.asked_bytes += bytes;
        self.take(id, offset, bytes);
        Some(offset)
    }

    /// Records that the caller evicted optional buffers.
    pub fn record_eviction(&mut self) {
        self.report.evicted += 1;
    }

    fn take(&mut self, id: RequestId, offset: u64, bytes: u64) {
        self.live[id.index()] = Some(Live { offset, bytes });
        self.live_count += 1;
        if bytes > 0 {
            let end = offset + self.rounded(bytes).expect("it was placed");
            self.blocks.insert(id.0, offset..end);
            self.high_water = self.high_water.max(end.saturating_sub(self.plan.reserve().start));
            self.account(offset, bytes);
        }
    }

    /// Frees a request's bytes. The arena may give these bytes to another request at once, so the last reader of the
    /// buffer must be done.
    ///
    /// # Panics
    /// Panics if the request is not in use, which is an error in the caller's own code.
    pub fn release(&mut self, id: RequestId) {
        let live = self.live[id.index()].take();
        let Live { offset, bytes } = live.expect("only requests in use are released");
        self.live_count -= 1;
        if bytes > 0 {
            self.blocks.remove(offset);
            self.live_in_reserve -= self.in_reserve(offset, bytes);
        }
    }

    /// Prepares for the next step: frees everything that an aborted step did not release, and makes promises hold
    /// again. The sums of the report continue from their current values.
    pub fn reset(&mut self) {
        self.is_within_promises = true;
        self.factor_hundredths = 0;
        if self.live_count > 0 {
            self.live.fill(None);
            self.blocks.clear();
            (self.live_count, self.live_in_reserve) = (0, 0);
        }
    }

    fn place(&self, id: RequestId, bytes: u64, spares_homes: bool) -> Option<u64> {
        if bytes == 0 {
            return Some(self.plan.reserve().start);
        }
        // The caller's tensors are only guaranteed to be as large as the bound.
        if bytes > self.plan.request(id).most {
            return None;
        }
        let bytes = self.rounded(bytes)?;
        let ranges = match spares_homes {
            true => self.plan.spare_ranges(id),
            false => self.plan.idle_ranges(id),
        };
        let gap = ranges.iter().filter(|r| r.end - r.start >= bytes).find_map(|range| self.tightest(range, bytes))?;
        if self.plan.lives_long(id) {
            return Some(gap.start);
        }
        // A short-lived block that would end above the high-water mark ends at the mark, or as little above as
        // possible.
        let high_water = self.plan.reserve().start + self.high_water;
        Some(gap.end.min(high_water.max(gap.start + bytes)) - bytes)
    }

    /// Returns the tightest gap among the lowest eight of a range that have at least `bytes`; of equally tight gaps,
    /// the lower one. The last gap extends to the end of the range, whether those bytes were ever used or not, so that
    /// large gaps stay whole.
    fn tightest(&self, range: &Range<u64>, bytes: u64) -> Option<Range<u64>> {
        let mut floor = range.start;
        let gaps = std::iter::from_fn(|| {
            let gap = self.blocks.gap(floor..range.end, bytes)?;
            floor = gap.end;
            Some(gap)
        });
        gaps.take(GAPS).min_by_key(|gap| gap.end - gap.start)
    }

    fn rounded(&self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(self.plan.grain())
    }

    fn in_reserve(&self, offset: u64, bytes: u64) -> u64 {
        (offset + bytes).saturating_sub(offset.max(self.plan.reserve().start))
    }

    fn account(&mut self, offset: u64, bytes: u64) {
        let in_reserve = self.in_reserve(offset, bytes);
        self.live_in_reserve += in_reserve;
        let report = &mut self.report;
        report.reserve_served_bytes += in_reserve;
        report.reused_bytes += bytes - in_reserve;
        report.most_live_bytes = report.most_live_bytes.max(self.live_in_reserve);
        let height = (offset + bytes).saturating_sub(self.plan.reserve().start);
        report.high_water_bytes = report.high_water_bytes.max(height);
    }

    fn overflow(&self, id: RequestId, bytes: u64) -> Overflow {
        let request = self.plan.request(id);
        let (mut largest_hole, mut free) = (0, 0);
        let mut gap = |start: u64, end: u64| {
            largest_hole = largest_hole.max(end.saturating_sub(start));
            free += end.saturating_sub(start);
        };
        for range in self.plan.idle_ranges(id) {
            let mut floor = range.start;
            self.blocks.each(range, &mut |block| {
                gap(floor, block.start);
                floor = block.end;
            });
            gap(floor, range.end);
        }
        let reserve = self.plan.reserve();
        let reserve = reserve.end - reserve.start;
        Overflow {
            request: id,
            label: Arc::clone(&self.labels[id.index()]),
            bytes,
            bytes_per_row: request.bytes_per_row,
            balanced: request.balanced,
            most: request.most,
            promised: self.plan.promised(id),
            largest_hole,
            free,
            reserve,
            enough: self.rounded(bytes).and_then(|bytes| reserve.checked_add(bytes)).unwrap_or(u64::MAX),
            factor_hundredths: self.factor_hundredths,
        }
    }
}
