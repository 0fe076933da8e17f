//! Idle ranges of mapped memory, by address and by size.
//!
//! Each range has the stream on which its bytes were last used. Work on that stream may reuse the bytes at once;
//! another stream must first wait for an event. Neighbours with the same stream are merged.

use std::collections::{BTreeMap, BTreeSet};

use crate::pages::Stream;

/// An idle range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub start: u64,
    pub bytes: u64,
    pub stream: Stream,
}

impl Extent {
    pub fn end(self) -> u64 {
        self.start + self.bytes
    }
}

/// Disjoint idle ranges.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    by_start: BTreeMap<u64, (u64, Stream)>,
    by_size: BTreeSet<(Stream, u64, u64)>,
    bytes: u64,
}

impl Extents {
    /// Bytes of all ranges together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.by_start.iter().map(|(&start, &(bytes, stream))| Extent { start, bytes, stream })
    }

    /// Adds a range, merged with its neighbours of the same stream.
    pub fn insert(&mut self, start: u64, bytes: u64, stream: Stream) {
        if bytes == 0 {
            return;
        }
        let (mut first, mut end) = (start, start + bytes);
        if let Some(below) = self.ending_at(start).filter(|e| e.stream == stream) {
            self.remove(below);
            first = below.start;
        }
        if let Some(above) = self.starting_at(end).filter(|e| e.stream == stream) {
            self.remove(above);
            end = above.end();
        }
        self.add(Extent { start: first, bytes: end - first, stream });
    }

    /// The range that ends at `address`.
    pub fn ending_at(&self, address: u64) -> Option<Extent> {
        let (&start, &(bytes, stream)) = self.by_start.range(..address).next_back()?;
        (start + bytes == address).then_some(Extent { start, bytes, stream })
    }

    /// The range that starts at `address`.
    pub fn starting_at(&self, address: u64) -> Option<Extent> {
        self.by_start.get(&address).map(|&(bytes, stream)| Extent { start: address, bytes, stream })
    }

    /// The smallest range of a stream with at least `bytes`, the lowest of several.
    pub fn best(&self, bytes: u64, stream: Stream) -> Option<Extent> {
        let &(_, found, start) = self.by_size.range((stream, bytes, 0)..=(stream, u64::MAX, u64::MAX)).next()?;
        Some(Extent { start, bytes: found, stream })
    }

    /// The largest range of a stream.
    pub fn largest(&self, stream: Stream) -> Option<Extent> {
        let &(_, bytes, start) = self.by_size.range((stream, 0, 0)..=(stream, u64::MAX, u64::MAX)).next_back()?;
        Some(Extent { start, bytes, stream })
    }

    /// All streams with a range.
    pub fn streams(&self) -> Vec<Stream> {
        let mut streams = Vec::new();
        let mut from = Some(0);
        while let Some(&(stream, ..)) = from.and_then(|from| self.by_size.range((from, 0, 0)..).next()) {
            streams.push(stream);
            from = stream.checked_add(1);
        }
        streams
    }

    /// Takes the first `bytes` of the best range of a stream.
    pub fn take(&mut self, bytes: u64, stream: Stream) -> Option<u64> {
        let extent = self.best(bytes, stream)?;
        self.cut(extent, extent.start, bytes);
        Some(extent.start)
    }

    /// Takes exactly these bytes if one range of the stream has all of them.
    pub fn take_at(&mut self, start: u64, bytes: u64, stream: Stream) -> bool {
        let Some((&first, &(size, owner))) = self.by_start.range(..=start).next_back() else { return false };
        if owner != stream || first + size < start + bytes {
            return false;
        }
        self.cut(Extent { start: first, bytes: size, stream }, start, bytes);
        true
    }

    /// The parts of ranges that lie in `[start, end)`.
    pub fn within(&self, start: u64, end: u64) -> Vec<Extent> {
        let first = self.by_start.range(..=start).next_back().map_or(start, |(&first, _)| first);
        let parts = self.by_start.range(first..end).map(|(&first, &(bytes, stream))| {
            let (from, to) = (first.max(start), (first + bytes).min(end));
            Extent { start: from, bytes: to.saturating_sub(from), stream }
        });
        parts.filter(|part| part.bytes > 0).collect()
    }

    /// Removes a part of one range.
    pub fn cut(&mut self, extent: Extent, start: u64, bytes: u64) {
        let (end, stream) = (start + bytes, extent.stream);
        self.remove(extent);
        self.add(Extent { start: extent.start, bytes: start - extent.start, stream });
        self.add(Extent { start: end, bytes: extent.end() - end, stream });
    }

    /// Gives all ranges of one stream to another, whose work now comes after.
    pub fn hand_over(&mut self, from: Stream, to: Stream) {
        let extents: Vec<Extent> = self.iter().filter(|e| e.stream == from).collect();
        for extent in extents {
            self.remove(extent);
            self.insert(extent.start, extent.bytes, to);
        }
    }

    fn add(&mut self, Extent { start, bytes, stream }: Extent) {
        if bytes > 0 {
            self.by_start.insert(start, (bytes, stream));
            self.by_size.insert((stream, bytes, start));
            self.bytes += bytes;
        }
    }

    fn remove(&mut self, Extent { start, bytes, stream }: Extent) {
        self.by_start.remove(&start);
        self.by_size.remove(&(stream, bytes, start));
        self.bytes -= bytes;
    }
}
