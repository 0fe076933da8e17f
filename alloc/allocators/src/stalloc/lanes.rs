//! Layers of groups (`merge_candidates` in the released planner). Groups are placed by size, the largest first. The
//! groups of one size go into lanes within the existing layers, then into layers of their own.

use gapless_alloc::Lifetime;

use super::Rectangle;
use super::chains::{Chain, Echo, chains};
use super::groups::{self, Group};
use super::layers::{Layers, occupied};
use super::skyline::Skyline;

/// Places groups and then single rectangles. Records their offsets and returns the height. `spans` has the iteration,
/// first phase and last phase of each rectangle.
pub(super) fn place(rectangles: &[Rectangle], spans: &[(u64, usize, usize)], offsets: &mut [u64]) -> u64 {
    let echo = echo(rectangles, spans);
    let (groups, single) = groups::form(rectangles, spans);
    let groups = groups::fuse(rectangles, groups);
    let mut layers = Layers::default();
    for layer in stack(&groups, &echo) {
        // In the released code, everything in a layer below its highest lane counts as occupied at all times.
        let floor = layer.lanes.iter().map(|lane| lane.offset).max().unwrap_or(0);
        let mut skyline = Skyline::flat(floor);
        for (lane, &(number, offset)) in layer.members(&groups) {
            let Rectangle { lifetime, bytes } = &rectangles[number];
            skyline.raise(&occupied(lifetime), lane + offset + bytes);
            offsets[number] = layers.height + lane + offset;
        }
        layers.push(layer.bytes, skyline);
    }
    layers.fill(rectangles, &single, &echo, offsets);
    layers.height
}

/// Returns the echo of the last iteration. Its ticks come from rectangles that live within one phase.
fn echo(rectangles: &[Rectangle], spans: &[(u64, usize, usize)]) -> Echo {
    let last = spans.iter().map(|span| span.0).max().unwrap_or(0);
    let single = || rectangles.iter().zip(spans).filter(|(_, s)| s.0 == last && s.1 == s.2).map(|(r, _)| &r.lifetime);
    let Some(start) = single().map(|lifetime| lifetime.start).min() else { return Echo::default() };
    let length = single().map(|lifetime| lifetime.end).max().unwrap_or(start) - start;
    let end = rectangles.iter().map(|rectangle| rectangle.lifetime.end).max().unwrap_or(start);
    Echo { start, length, end }
}

/// A range of offsets that is divided into lanes.
struct Layer {
    bytes: u64,
    lanes: Vec<Lane>,
}

/// A part of a layer in which groups take turns.
struct Lane {
    offset: u64,
    bytes: u64,
    groups: Vec<usize>,
    /// Ticks during which the lane is occupied.
    ticks: Vec<Lifetime>,
}

/// Puts all groups into layers, the largest first.
fn stack(groups: &[Group], echo: &Echo) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    for class in groups::by_size(groups) {
        let bytes = groups[class[0]].bytes;
        let mut left = class;
        for layer in &mut layers {
            left.sort_by_key(|&number| groups[number].lifetime.start);
            layer.take(groups, bytes, &mut left, echo);
        }
        for chain in chains(&left, |number| &groups[number].lifetime, echo) {
            layers.push(Layer { bytes, lanes: vec![Lane::of(groups, 0, bytes, chain)] });
        }
    }
    layers
}

impl Layer {
    /// Moves groups from `left` to lanes of `bytes`. Lanes are first created within existing lanes that are large
    /// enough, then above all existing lanes.
    fn take(&mut self, groups: &[Group], bytes: u64, left: &mut Vec<usize>, echo: &Echo) {
        let (mut above, mut at) = (0, 0);
        while at < self.lanes.len() {
            let (offset, room) = (self.lanes[at].offset, self.lanes[at].bytes);
            at += 1;
            if room < bytes {
                continue;
            }
            if offset + room + bytes < self.bytes {
                above = above.max(offset + room);
            }
            // The released code uses the size of the lane as its end.
            self.take_from(groups, offset, room, bytes, left, echo);
        }
        self.take_from(groups, above, self.bytes, bytes, left, echo);
    }

    /// Adds one lane after another from `offset` to `end`, until a lane takes no group.
    fn take_from(
        &mut self,
        groups: &[Group],
        mut offset: u64,
        end: u64,
        bytes: u64,
        left: &mut Vec<usize>,
        echo: &Echo,
    ) {
        while offset + bytes <= end && !left.is_empty() {
            let mut busy: Vec<Lifetime> = self
                .lanes
                .iter()
                .filter(|lane| lane.meets(offset, bytes))
                .flat_map(|lane| lane.ticks.iter().cloned())
                .collect();
            let mut taken = Chain::default();
            left.retain(|&number| {
                let lifetime = &groups[number].lifetime;
                let fits = busy.iter().all(|other| other.end <= lifetime.start || lifetime.end <= other.start);
                if fits {
                    busy.push(lifetime.clone());
                    taken.members.push(number);
                    taken.echoes.extend(echo.of(lifetime));
                }
                !fits
            });
            if taken.members.is_empty() {
                return;
            }
            self.lanes.push(Lane::of(groups, offset, bytes, taken));
            offset += bytes;
        }
    }

    /// The members of all groups in the layer, each with the offset of its lane.
    fn members<'l>(&'l self, groups: &'l [Group]) -> impl Iterator<Item = (u64, &'l (usize, u64))> {
        let of_lane = |lane: &'l Lane| lane.groups.iter().map(|&number| (lane.offset, number));
        let members = |(offset, number): (u64, usize)| groups[number].members.iter().map(move |m| (offset, m));
        self.lanes.iter().flat_map(of_lane).flat_map(members)
    }
}

impl Lane {
    fn of(groups: &[Group], offset: u64, bytes: u64, chain: Chain) -> Self {
        let ticks = chain.members.iter().map(|&number| groups[number].lifetime.clone()).chain(chain.echoes).collect();
        Self { offset, bytes, groups: chain.members, ticks }
    }

    fn meets(&self, offset: u64, bytes: u64) -> bool {
        self.offset < offset + bytes && offset < self.offset + self.bytes
    }
}
