//! Pictures of a plan: the memory map, bytes × time, with every byte accounted to a named tensor.
//!
//! In: a problem, its offsets, one label per buffer, and the phases of the step. Out: the map as text for a terminal,
//! as SVG for a page of documentation, or as one self-contained HTML page to explore, and a [`Summary`] in numbers. The
//! output depends only on this input. The plan is not checked here; [`check`](crate::check()) does that.
//!
//! Time runs from left to right and addresses from bottom to top. A tensor of any role is called *persistent* if it is
//! alive at every tick of the map. Persistent tensors are hatched in pictures, and shown as capital letters in text.

mod curve;
#[cfg(feature = "page")]
mod html;
mod palette;
mod quantity;
mod summary;
mod svg;
#[cfg(all(test, feature = "page"))]
mod tests;
mod text;

use std::ops::Range;

use crate::{BufferId, Error, Label, Lifetime, Problem, lower_bound, peak_tick};

use curve::Curve;
/// The colours of all pages as CSS variables, for light and dark: `--ground`, `--panel`, `--free`, `--line`, `--text`, `--quiet`,
/// `--accent`, `--bound`.
pub const THEME: &str = include_str!("assets/theme.css");

pub use quantity::{Bytes, NotBytes};
pub use summary::{RoleBytes, Span, Summary, TensorAtPeak, Unused};
pub use svg::{SvgOptions, escape};
pub use text::TextOptions;

/// A named phase of the step, such as `forward 0` or `update`. Phases may overlap or leave ticks unnamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Half-open ticks of the phase.
    pub ticks: Range<u64>,
    /// The name that pictures show.
    pub name: String,
}

impl Mark {
    /// A phase over `ticks`.
    pub fn new(ticks: Range<u64>, name: impl Into<String>) -> Self {
        Self { ticks, name: name.into() }
    }
}

/// A placed and labelled problem, ready to be drawn.
///
/// ```
/// use gapless_alloc::draw::{Mark, MemoryMap, TextOptions};
/// use gapless_alloc::{Buffer, Label, Problem, Role};
///
/// let label = |tensor: &str, role| Label { tensor: tensor.into(), op: "linear".into(), layer: "h.0".into(), role };
/// let problem = Problem::new(vec![Buffer::new(0..4, 1024), Buffer::new(0..2, 512), Buffer::new(2..4, 512)])?;
/// let labels = [label("w", Role::Parameter), label("x", Role::Activation), label("dx", Role::Activation)];
/// let marks = [Mark::new(0..2, "forward 0"), Mark::new(2..4, "backward 0")];
/// let map = MemoryMap::new("one layer", &problem, &[0, 1024, 1024], &labels)?.with_marks(&marks)?;
/// println!("{}", map.text(&TextOptions::default()));
/// println!("{}", map.summary(10));
/// # #[cfg(feature = "page")]
/// std::fs::write(std::env::temp_dir().join("map.html"), map.html()).unwrap();
/// # Ok::<(), gapless_alloc::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MemoryMap<'a> {
    title: &'a str,
    problem: &'a Problem,
    offsets: &'a [u64],
    labels: &'a [Label],
    marks: &'a [Mark],
    ticks: Range<u64>,
    height: u64,
}

impl<'a> MemoryMap<'a> {
    /// Combines a problem with its offsets and labels, both indexed by [`BufferId`].
    ///
    /// # Errors
    /// Returns [`Error::NotOnePerBuffer`] if `offsets` or `labels` doesn't have one entry per buffer, and
    /// [`Error::OutOfAddressSpace`] if a buffer ends past 2^64 - 1 bytes. Overlapping buffers are not detected.
    pub fn new(title: &'a str, problem: &'a Problem, offsets: &'a [u64], labels: &'a [Label]) -> Result<Self, Error> {
        for (table, entries) in [("offsets", offsets.len()), ("labels", labels.len())] {
            if entries != problem.len() {
                return Err(Error::NotOnePerBuffer { table, entries, buffers: problem.len() });
            }
        }
        let mut height = 0;
        for (buffer, (b, &offset)) in problem.buffers().iter().zip(offsets).enumerate() {
            let end = offset.checked_add(b.bytes);
            let end = end.ok_or(Error::OutOfAddressSpace { buffer, offset, bytes: b.bytes })?;
            // A buffer of no bytes takes no space, wherever it is.
            height = if b.bytes > 0 { end.max(height) } else { height };
        }
        let start = problem.buffers().iter().map(|b| b.lifetime.start).min().unwrap_or(0);
        Ok(Self { title, problem, offsets, labels, marks: &[], ticks: start..problem.end(), height })
    }

    /// Adds the phases of the step to the map.
    ///
    /// # Errors
    /// Returns [`Error::EmptyMark`] for the first phase that ends before it starts or has no ticks.
    pub fn with_marks(self, marks: &'a [Mark]) -> Result<Self, Error> {
        match marks.iter().find(|m| m.ticks.is_empty()) {
            Some(m) => Err(Error::EmptyMark { name: m.name.clone(), start: m.ticks.start, end: m.ticks.end }),
            None => Ok(Self { marks, ..self }),
        }
    }

    /// One past the highest byte in use.
    pub fn height(&self) -> u64 {
        self.height
    }

    /// Ticks from the first birth to the last death.
    pub fn ticks(&self) -> Range<u64> {
        self.ticks.clone()
    }

    /// Renders the map as text for a terminal.
    pub fn text(&self, options: &TextOptions) -> String {
        text::render(self, options)
    }

    /// Renders the map as one SVG document with one `<rect>` per buffer. Viewers may be slow from some thousands of
    /// buffers on.
    pub fn svg(&self, options: &SvgOptions) -> String {
        svg::render(self, options)
    }

    /// Renders the map as one HTML page that needs no network and no server. The page is meant for up to some 100,000
    /// buffers.
    #[cfg(feature = "page")]
    pub fn html(&self) -> String {
        html::render(self)
    }

    /// Summarizes the plan in numbers. The summary lists at most `largest` tensors: the largest of those alive at the
    /// peak tick.
    pub fn summary(&self, largest: usize) -> Summary {
        summary::summarize(self, largest)
    }

    fn lower_bound(&self) -> u64 {
        lower_bound(self.problem)
    }

    fn peak_tick(&self) -> Option<u64> {
        peak_tick(self.problem)
    }

    fn curve(&self) -> Curve {
        Curve::of(self.problem, &self.ticks)
    }

    /// Every buffer, in id order.
    fn rectangles(&self) -> impl ExactSizeIterator<Item = Rectangle<'_>> + '_ {
        self.problem.ids().map(|id| self.rectangle(id))
    }

    fn rectangle(&self, id: BufferId) -> Rectangle<'_> {
        let b = self.problem.buffer(id);
        Rectangle {
            ticks: b.lifetime.clone(),
            offset: self.offsets[id.index()],
            bytes: b.bytes,
            label: &self.labels[id.index()],
            is_persistent: b.lifetime == self.ticks,
        }
    }

    /// The marks, clipped to the ticks of the map. Marks outside of these ticks are left out.
    fn visible_marks(&self) -> impl Iterator<Item = (Range<u64>, &str)> + '_ {
        self.marks.iter().filter_map(|m| {
            let ticks = m.ticks.start.max(self.ticks.start)..m.ticks.end.min(self.ticks.end);
            (!ticks.is_empty()).then_some((ticks, m.name.as_str()))
        })
    }

    /// Position of `tick` between the first (0) and the last (1).
    fn time_fraction(&self, tick: u64) -> f64 {
        let length = (self.ticks.end - self.ticks.start).max(1);
        (tick - self.ticks.start) as f64 / length as f64
    }

    /// Position of an address between the bottom (0) and the height (1).
    fn byte_fraction(&self, address: u64) -> f64 {
        address.min(self.height) as f64 / self.height.max(1) as f64
    }
}

/// One buffer as it is drawn.
struct Rectangle<'m> {
    ticks: Lifetime,
    offset: u64,
    bytes: u64,
    label: &'m Label,
    is_persistent: bool,
}

impl Rectangle<'_> {
    fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}
