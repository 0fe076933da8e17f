//! The map as one HTML page, drawn on canvases. The page contains its style, script and data, and fetches nothing.
//!
//! As JSON objects, 100,000 buffers would take some 30 MB. Instead, every distinct string is written once, and each
//! buffer is eight base-128 integers, low bits first (LEB128, as in DWARF): first tick minus the map's first tick,
//! length, offset, bytes, then the string indices of tensor, op and layer, then the role. The curve of live bytes
//! follows in the same encoding. `assets/data.js` decodes it.

use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use super::palette::look;
use super::svg::escape;
use super::{MemoryMap, Rectangle};
use crate::Role;

/// The data that the page reads. Numbers that may exceed 2^53 are strings, since JavaScript would lose digits.
#[derive(Serialize)]
struct Page<'m> {
    title: &'m str,
    count: usize,
    first_tick: String,
    end_tick: String,
    height: String,
    lower_bound: String,
    peak_tick: Option<String>,
    roles: Vec<PageRole>,
    /// `[start, end, name]`.
    marks: Vec<(String, String, &'m str)>,
    strings: Vec<&'m str>,
    steps: usize,
    /// The encoded integers: first the buffers in id order, then the entries of the curve. A curve entry consists of
    /// the ticks since the previous entry and the live bytes.
    numbers: String,
}

#[derive(Serialize)]
struct PageRole {
    name: &'static str,
    light: String,
    dark: String,
}

pub(super) fn render(map: &MemoryMap<'_>) -> String {
    let title = escape(map.title);
    let style = concat!(include_str!("assets/theme.css"), include_str!("assets/page.css"));
    let script =
        concat!(include_str!("assets/data.js"), include_str!("assets/paint.js"), include_str!("assets/explore.js"));
    let data = serde_json::to_string(&page(map)).expect("strings and numbers are always JSON");
    // Inside of a script element, only `<` can end the data. Its escaped form is the same JSON string.
    let data = data.replace('<', "\\u003c");
    format!(include_str!("assets/page.html"), title = title, style = style, script = script, data = data)
}

fn page<'m>(map: &'m MemoryMap<'_>) -> Page<'m> {
    let mut strings = Strings::default();
    let mut numbers = Vec::with_capacity(map.problem.len() * 20);
    for r in map.rectangles() {
        let Rectangle { ticks, offset, bytes, label, .. } = r;
        let names = [&label.tensor, &label.op, &label.layer].map(|name| strings.number(name));
        let place = [ticks.start - map.ticks.start, ticks.end - ticks.start, offset, bytes];
        place.into_iter().chain(names).chain([label.role as u64]).for_each(|n| push(&mut numbers, n));
    }
    let curve = map.curve();
    let mut before = map.ticks.start;
    for &(tick, live) in &curve.steps {
        push(&mut numbers, tick - before);
        push(&mut numbers, live);
        before = tick;
    }
    let role = |&role: &Role| {
        let look = look(role);
        PageRole { name: role.name(), light: format!("#{:06x}", look.light), dark: format!("#{:06x}", look.dark) }
    };
    Page {
        title: map.title,
        count: map.problem.len(),
        first_tick: map.ticks.start.to_string(),
        end_tick: map.ticks.end.to_string(),
        height: map.height.to_string(),
        lower_bound: map.lower_bound().to_string(),
        peak_tick: map.peak_tick().map(|tick| tick.to_string()),
        roles: Role::ALL.iter().map(role).collect(),
        marks: map.visible_marks().map(|(t, name)| (t.start.to_string(), t.end.to_string(), name)).collect(),
        strings: strings.all,
        steps: curve.steps.len(),
        numbers: STANDARD.encode(&numbers),
    }
}

/// Strings, numbered in the order in which they first occur.
#[derive(Default)]
struct Strings<'m> {
    all: Vec<&'m str>,
    numbers: HashMap<&'m str, u64>,
}

impl<'m> Strings<'m> {
    fn number(&mut self, text: &'m str) -> u64 {
        *self.numbers.entry(text).or_insert_with(|| {
            self.all.push(text);
            self.all.len() as u64 - 1
        })
    }
}

/// Appends `number` seven bits per byte, lowest bits first. The high bit is set on all bytes but the last.
fn push(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_leb128() {
        let check = |number: u64, expected: &[u8]| {
            let mut out = Vec::new();
            push(&mut out, number);
            assert_eq!(out, expected);
        };
        check(0, &[0]);
        check(127, &[0x7f]);
        check(128, &[0x80, 1]);
        check(624_485, &[0xe5, 0x8e, 0x26]);
        check(u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
    }
}
