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
        let place = self.growth(bytes, stream).ok_or(PagesError::OutOfMemory)?;
        self.move_pages_aside(place.pages_bytes, Some((place.start, place.start + bytes)));
        self.map(place.pages_start, place.pages_bytes)?;
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

    /// The place where a request needs the fewest new pages.
    fn growth(&self, bytes: u64, stream: Stream) -> Option<Growth> {
        let page = self.pages.page();
        let usable = |extent: Option<Extent>| extent.filter(|e| e.stream == stream).map_or(0, |e| e.bytes);
        let places = self.unmapped.iter().filter_map(|(&hole, &size)| {
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
                (below + size + above >= bytes).then_some(Growth {
                    pages_start: hole,
                    pages_bytes: size,
                    start: hole - below,
                })
            }
        });
        places.min_by_key(|place| (place.pages_bytes, place.start))
    }

    /// Unmaps idle pages, from the smallest idle ranges first, until `bytes` are set aside. Leaves ranges alone that
    /// touch `keep`.
    fn move_pages_aside(&mut self, bytes: u64, keep: Option<(u64, u64)>) {
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
