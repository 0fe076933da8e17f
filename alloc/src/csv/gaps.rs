//! Gaps: ticks inside of a lifetime at which a buffer needs only a part of its bytes, or none. They are written `3-5`
//! (no bytes needed) and `7-9@0:64` (only bytes 0 to 64 needed).
//!
//! In: a field. Out: [`Gap`]s.

use std::ops::Range;

use crate::{Buffer, BufferId, Gap};

/// Parses the gaps of a field, which are separated by spaces and in order of time. `after_last` is added to the end of
/// each gap as written, which gives the tick after the gap's last tick.
pub(super) fn parse(field: &str, id: BufferId, buffer: &Buffer, after_last: u64) -> Result<Vec<Gap>, String> {
    let mut gaps: Vec<Gap> = Vec::new();
    for text in field.split_ascii_whitespace() {
        let gap = gap(text, id, after_last).ok_or("write each gap like 3-5 or 3-5@0:64")?;
        let from = gaps.last().map_or(buffer.lifetime.start, |last| last.ticks.end);
        if gap.ticks.is_empty() || gap.ticks.start < from || gap.ticks.end > buffer.lifetime.end {
            return Err("a gap is empty, out of order or outside the lifetime".into());
        }
        if gap.window.as_ref().is_some_and(|window| window.start > window.end || window.end > buffer.bytes) {
            return Err(format!("a gap keeps bytes beyond the buffer's {}", buffer.bytes));
        }
        gaps.push(gap);
    }
    Ok(gaps)
}

fn gap(text: &str, buffer: BufferId, after_last: u64) -> Option<Gap> {
    let pair = |text: &str, between| -> Option<Range<u64>> {
        let (start, end) = text.split_once(between)?;
        Some(start.parse().ok()?..end.parse().ok()?)
    };
    let (ticks, window) = match text.split_once('@') {
        Some((ticks, window)) => (ticks, Some(pair(window, ':')?)),
        None => (text, None),
    };
    let ticks = pair(ticks, '-')?;
    Some(Gap { buffer, ticks: ticks.start..ticks.end.checked_add(after_last)?, window })
}
