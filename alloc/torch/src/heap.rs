//! The caching allocator that serves requests without a plan.
//!
//! A request takes the smallest idle range that is large enough. If there is none, pages are mapped where the fewest are
//! needed, and idle pages elsewhere are moved before new ones are created. So memory is only lost in pages that are
//! partly in use.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::extents::{Extent, Extents};
use crate::pages::{Event, Pages, PagesError, Stream, StreamHandle};

/// Mapped memory in one range of addresses.
pub(crate) struct Heap {
    pub pages: Box<dyn Pages>,
    /// Handles of the streams, by number. A saved plan may have streams whose handles are not known yet.
    streams: Vec<Option<StreamHandle>>,
    idle: Extents,
    /// Ranges of addresses without memory: bytes by first address.
    unmapped: BTreeMap<u64, u64>,
    addresses: Range<u64>,
    mapped: u64,
    most_mapped: u64,
    /// Up to so many mapped bytes, new pages are created before idle ones are moved.
    pub reserve: u64,
    /// Calls that mapped or unmapped pages.
    device_calls: u64,
}

impl Heap {
    /// Reserves addresses for four times the device's memory, and maps nothing yet.
    ///
    /// # Errors
    /// Returns the driver's error if the addresses cannot be reserved.
    pub fn new(mut pages: Box<dyn Pages>) -> Result<Self, PagesError> {
        let bytes = (4 * pages.memory().1).next_multiple_of(pages.page());
        let base = pages.reserve(bytes)?;
        let unmapped = BTreeMap::from([(base, bytes)]);
        Ok(Self {
            pages,
            streams: Vec::new(),
            idle: Extents::default(),
            unmapped,
            addresses: base..base + bytes,
            mapped: 0,
            most_mapped: 0,
            reserve: 0,
            device_calls: 0,
        })
    }

    /// The number of a stream.
    pub fn stream(&mut self, handle: StreamHandle) -> Stream {
        if let Some(known) = self.streams.iter().position(|&known| known == Some(handle)) {
            return known as Stream;
        }
        let free = self.streams.iter().position(Option::is_none);
        match free {
            Some(number) => self.streams[number] = Some(handle),
            None => self.streams.push(Some(handle)),
        }
        free.unwrap_or(self.streams.len() - 1) as Stream
    }

    /// Reserves a number for a stream of a saved plan.
    pub fn expect_stream(&mut self, stream: Stream) {
        while self.streams.len() <= stream as usize {
            self.streams.push(None);
        }
    }

    /// Records an event after the stream's work so far.
    pub fn record(&mut self, stream: Stream) -> Event {
        // A stream without a handle has done no work yet, and the default stream has an event as good as any.
        let handle = self.streams.get(stream as usize).copied().flatten().unwrap_or(0);
        self.pages.record(handle)
    }

    /// The reserved range of addresses.
    pub fn addresses(&self) -> Range<u64> {
        self.addresses.clone()
    }

    /// Mapped bytes.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// The most bytes that were mapped at once.
    pub fn most_mapped(&self) -> u64 {
        self.most_mapped
    }

    /// Mapped bytes that nothing uses.
    pub fn idle(&self) -> u64 {
        self.idle.bytes()
    }

    /// Number of calls that mapped or unmapped pages.
    pub fn device_calls(&self) -> u64 {
        self.device_calls
    }

    /// Takes idle memory of the stream.
    pub fn take(&mut self, bytes: u64, stream: Stream) -> Option<u64> {
        self.idle.take(bytes, stream)
    }

    /// Takes the first bytes of the stream's largest idle range. So requests that follow one another lie side by side,
    /// whatever is freed between other requests. If most idle memory lies elsewhere, its pages are moved to that range
    /// first. If the range is too small, new pages make it larger.
    pub fn take_beside_last(&mut self, bytes: u64, stream: Stream) -> Option<u64> {
        let largest = self.idle.largest(stream);
        let spread = self.idle.bytes() - largest.map_or(0, |extent| extent.bytes);
        if spread > largest.map_or(0, |extent| extent.bytes).max(16 * self.pages.page()) {
            self.gather(largest, stream);
        }
        match self.idle.largest(stream).filter(|extent| extent.bytes >= bytes) {
            Some(extent) => {
                self.idle.cut(extent, extent.start, bytes);
                Some(extent.start)
            }
            None => {
                let last = self.unmapped.iter().max_by_key(|&(_, &size)| size)?;
                let place = self.growth_at(last, bytes, stream)?;
                self.grow_at(place, bytes, stream).ok()
            }
        }
    }

    /// Takes exactly these bytes if they are idle and the stream may use them.
    pub fn take_at(&mut self, start: u64, bytes: u64, stream: Stream) -> bool {
        self.idle.take_at(start, bytes, stream)
    }

    /// Takes exactly these bytes if all are idle and the work of other streams on them is complete.
    pub fn claim_at(&mut self, start: u64, bytes: u64, stream: Stream) -> bool {
        let parts = self.idle.within(start, start + bytes);
        if parts.iter().map(|part| part.bytes).sum::<u64>() < bytes {
            return false;
        }
        for part in parts.iter().filter(|part| part.stream != stream) {
            let event = self.record(part.stream);
            if !self.pages.is_done(event) {
                self.pages.forget(event);
                return false;
            }
        }
        for part in parts {
            assert!(self.idle.take_at(part.start, part.bytes, part.stream), "the part is idle");
        }
        true
    }

    /// Makes bytes idle that the stream used last.
    pub fn give(&mut self, start: u64, bytes: u64, stream: Stream) {
        self.idle.insert(start, bytes, stream);
    }

    /// Takes idle memory that other streams used, if their work is complete. With `wait`, waits for that work.
    pub fn take_from_others(&mut self, bytes: u64, stream: Stream, wait: bool) -> Option<u64> {
        for other in self.idle.streams() {
            if other == stream || (!wait && self.idle.best(bytes, other).is_none()) {
                continue;
            }
            let event = self.record(other);
            match wait {
                true => self.pages.wait(event),
                false if !self.pages.is_done(event) => {
                    self.pages.forget(event);
                    continue;
                }
                false => {}
            }
            self.idle.hand_over(other, stream);
        }
        self.idle.take(bytes, stream)
    }

    /// Maps pages for a request, and takes the request's bytes.
    ///
    /// # Errors
    /// Returns the driver's error. Idle pages may then have been returned to the device.
    pub fn grow(&mut self, bytes: u64, stream: Stream) -> Result<u64, PagesError> {
        let places = self.unmapped.iter().filter_map(|hole| self.growth_at(hole, bytes, stream));
        let place = places.min_by_key(|place| (place.pages_bytes, place.start)).ok_or(PagesError::OutOfMemory)?;
        self.grow_at(place, bytes, stream)
    }

    fn grow_at(&mut self, place: Growth, bytes: u64, stream: Stream) -> Result<u64, PagesError> {
        // To move a page, the host waits for the work that used it; a new one needs no wait, but memory.
        let within_reserve = self.mapped + place.pages_bytes <= self.reserve;
        if !within_reserve || self.map(place.pages_start, place.pages_bytes).is_err() {
            self.move_pages_aside(place.pages_bytes, Some((place.start, place.start + bytes)));
            self.map(place.pages_start, place.pages_bytes)?;
        }
        self.idle.insert(place.pages_start, place.pages_bytes, stream);
        assert!(self.idle.take_at(place.start, bytes, stream), "pages were mapped for these bytes");
        Ok(place.start)
    }

    /// Maps a new range and returns its first address. The caller has its bytes; only those between the last one and the
    /// page's end are idle, for `stream`.
    ///
    /// # Errors
    /// Returns the driver's error. Idle pages may then have been returned to the device.
    pub fn map_region(&mut self, bytes: u64, stream: Stream) -> Result<u64, PagesError> {
        let whole = bytes.next_multiple_of(self.pages.page());
        let hole = self.unmapped.iter().filter(|&(_, &size)| size >= whole).min_by_key(|&(_, &size)| size);
        let (&start, _) = hole.ok_or(PagesError::OutOfMemory)?;
        self.move_pages_aside(whole, None);
        self.map(start, whole)?;
        self.idle.insert(start + bytes, whole - bytes, stream);
        Ok(start)
    }

    /// Maps pages to those addresses of a range that have lost theirs. They become idle.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn refill(&mut self, start: u64, end: u64) -> Result<(), PagesError> {
        let page = self.pages.page();
        let (first, last) = (start / page * page, end.next_multiple_of(page));
        let holes: Vec<(u64, u64)> = (self.unmapped.range(..last))
            .map(|(&hole, &size)| (hole.max(first), (hole + size).min(last)))
            .filter(|(from, to)| from < to)
            .collect();
        for (from, to) in holes {
            self.move_pages_aside(to - from, Some((first, last)));
            self.map(from, to - from)?;
            self.idle.insert(from, to - from, 0);
        }
        Ok(())
    }

    /// Returns idle pages to the device, after the work that used them.
    pub fn trim(&mut self) {
        self.move_pages_aside(u64::MAX, None);
        self.pages.trim();
    }

    /// Moves idle pages that lie elsewhere to the largest range of addresses without memory. An idle range that ends there
    /// grows by them.
    fn gather(&mut self, largest: Option<Extent>, stream: Stream) {
        let Some((&hole, &size)) = self.unmapped.iter().max_by_key(|&(_, &size)| size) else { return };
        let keep = largest.filter(|extent| extent.end() == hole).map(|extent| (extent.start, extent.end()));
        let bytes = self.move_pages_aside(size, keep);
        if bytes > 0 && self.map(hole, bytes).is_ok() {
            self.idle.insert(hole, bytes, stream);
        }
    }

    /// The place for a request in a range of addresses without memory, and in idle memory at its ends, where the fewest
    /// pages are needed.
    fn growth_at(&self, (&hole, &size): (&u64, &u64), bytes: u64, stream: Stream) -> Option<Growth> {
        let page = self.pages.page();
        let usable = |extent: Option<Extent>| extent.filter(|e| e.stream == stream).map_or(0, |e| e.bytes);
        let below = usable(self.idle.ending_at(hole));
        let above = usable(self.idle.starting_at(hole + size));
        let from_below = bytes.saturating_sub(below).next_multiple_of(page).max(page);
        let from_above = bytes.saturating_sub(above).next_multiple_of(page).max(page);
        if above > below && from_above < from_below && from_above <= size {
            let pages_start = hole + size - from_above;
            Some(Growth { pages_start, pages_bytes: from_above, start: pages_start })
        } else if from_below <= size {
            Some(Growth { pages_start: hole, pages_bytes: from_below, start: hole - below })
        } else {
            let fits = below + size + above >= bytes;
            fits.then_some(Growth { pages_start: hole, pages_bytes: size, start: hole - below })
        }
    }

    /// Unmaps idle pages, from the smallest idle ranges first, until `bytes` are set aside. Leaves ranges alone that
    /// touch `keep`. Returns the bytes of the pages.
    fn move_pages_aside(&mut self, bytes: u64, keep: Option<(u64, u64)>) -> u64 {
        let page = self.pages.page();
        let whole = |extent: &Extent| (extent.start.next_multiple_of(page), extent.end() / page * page);
        let kept = |e: &Extent| keep.is_some_and(|(start, end)| e.start < end && start < e.end());
        let mut sources: Vec<Extent> = self.idle.iter().filter(|e| !kept(e)).collect();
        sources.retain(|extent| whole(extent).0 < whole(extent).1);
        sources.sort_unstable_by_key(|extent| (extent.bytes, std::cmp::Reverse(extent.start)));
        let (mut aside, mut waited) = (0, Vec::new());
        for extent in sources {
            if aside >= bytes {
                break;
            }
            let (first, end) = whole(&extent);
            let first = first.max(end.saturating_sub((bytes - aside).checked_next_multiple_of(page).unwrap_or(end)));
            if !waited.contains(&extent.stream) {
                let event = self.record(extent.stream);
                self.pages.wait(event);
                waited.push(extent.stream);
            }
            self.idle.cut(extent, first, end - first);
            self.unmap(first, end - first);
            aside += end - first;
        }
        aside
    }

    fn map(&mut self, start: u64, bytes: u64) -> Result<(), PagesError> {
        self.device_calls += 1;
        if let Err(error) = self.pages.map(start, bytes) {
            // Pages that were set aside would be lost to everyone else.
            self.pages.trim();
            return Err(error);
        }
        self.mapped += bytes;
        self.most_mapped = self.most_mapped.max(self.mapped);
        let (&hole, &size) = self.unmapped.range(..=start).next_back().expect("pages are mapped to reserved addresses");
        self.unmapped.remove(&hole);
        if hole < start {
            self.unmapped.insert(hole, start - hole);
        }
        if start + bytes < hole + size {
            self.unmapped.insert(start + bytes, hole + size - start - bytes);
        }
        Ok(())
    }

    fn unmap(&mut self, start: u64, bytes: u64) {
        self.device_calls += 1;
        self.pages.unmap(start, bytes);
        self.mapped -= bytes;
        let (mut first, mut end) = (start, start + bytes);
        if let Some((&below, &size)) = self.unmapped.range(..start).next_back().filter(|&(&s, &b)| s + b == first) {
            self.unmapped.remove(&below);
            debug_assert_eq!(below + size, start);
            first = below;
        }
        if let Some(size) = self.unmapped.remove(&end) {
            end += size;
        }
        self.unmapped.insert(first, end - first);
    }
}

/// Where pages are mapped for a request.
struct Growth {
    pages_start: u64,
    pages_bytes: u64,
    /// The request's first address.
    start: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::CountedPages;

    /// Within the reserve, new pages are created; beyond it, or on a full device, idle pages are moved.
    #[test]
    fn a_reserve_spares_moves() {
        const PAGE: u64 = 2 << 20;
        for (reserve, device, mapped) in [(0, 100, 4), (100, 100, 6), (5, 100, 4), (100, 4, 4)] {
            let mut heap = Heap::new(Box::new(CountedPages::new(device * PAGE))).unwrap();
            let first = heap.grow(2 * PAGE, 0).unwrap();
            heap.grow(PAGE, 0).unwrap();
            heap.give(first, 2 * PAGE, 0);
            heap.reserve = reserve * PAGE;
            heap.grow(3 * PAGE, 0).unwrap();
            assert_eq!(heap.mapped(), mapped * PAGE, "{reserve} {device}");
        }
    }

    /// Requests that stay lie side by side, in pages that were idle elsewhere.
    #[test]
    fn requests_beside_one_another_gather_pages() {
        const PAGE: u64 = 2 << 20;
        let mut heap = Heap::new(Box::new(CountedPages::new(300 * PAGE))).unwrap();
        let all: Vec<u64> = (0..60).map(|_| heap.grow(2 * PAGE, 0).unwrap()).collect();
        all.iter().step_by(2).for_each(|&start| heap.give(start, 2 * PAGE, 0));
        let placed: Vec<u64> = (0..40).map(|_| heap.take_beside_last(PAGE + 512, 0).unwrap()).collect();
        assert!(placed.windows(2).all(|pair| pair[1] == pair[0] + PAGE + 512), "{placed:?}");
        assert_eq!(heap.mapped(), 120 * PAGE);
    }
}
