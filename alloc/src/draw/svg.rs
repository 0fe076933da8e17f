//! The map as one SVG document: phases, rectangles with tooltips, axes, live bytes, legend; light and dark.

use std::fmt::Write;

use super::curve::split;
use super::palette::look;
use super::{Bytes, MemoryMap, Rectangle};
use crate::Role;

/// Size of the picture in CSS pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SvgOptions {
    /// Width, at least 320.
    pub width: u32,
    /// Height, at least 320.
    pub height: u32,
}

impl Default for SvgOptions {
    fn default() -> Self {
        Self { width: 1200, height: 700 }
    }
}

/// Margin left of the plot, where the sizes are written.
const LEFT: f64 = 84.0;
/// Margin right of the plot.
const RIGHT: f64 = 16.0;
/// Margin above the plot: title and figures, then phases.
const TOP: f64 = 72.0;
/// Distance between the map and the panel of live bytes below it.
const BETWEEN: f64 = 16.0;
/// Height of the panel of live bytes, in CSS pixels.
const CURVE: f64 = 80.0;
/// Margin below the plot: ticks and legend.
const BOTTOM: f64 = 56.0;

/// The size of the map in the picture.
struct Plot {
    width: f64,
    height: f64,
}

impl Plot {
    fn x(&self, map: &MemoryMap<'_>, tick: u64) -> f64 {
        LEFT + self.width * map.time_fraction(tick)
    }

    fn y(&self, map: &MemoryMap<'_>, address: u64) -> f64 {
        TOP + self.height * (1.0 - map.byte_fraction(address))
    }

    fn curve_top(&self) -> f64 {
        TOP + self.height + BETWEEN
    }
}

pub(super) fn render(map: &MemoryMap<'_>, options: &SvgOptions) -> String {
    let (width, height) = (options.width.max(320), options.height.max(320));
    let plot =
        Plot { width: f64::from(width) - LEFT - RIGHT, height: f64::from(height) - TOP - BETWEEN - CURVE - BOTTOM };
    let mut out = String::new();
    write(&mut out, map, &plot, width, height).expect("writing to a String cannot fail");
    out
}

fn write(out: &mut String, map: &MemoryMap<'_>, plot: &Plot, width: u32, height: u32) -> std::fmt::Result {
    let name = escape(map.title);
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">"#
    )?;
    style(out)?;
    writeln!(out, r#"<rect class="ground" width="{width}" height="{height}"/>"#)?;
    writeln!(out, r#"<text class="title" x="{LEFT}" y="26">{name}</text>"#)?;
    let (high, bound) = (map.height, map.lower_bound());
    let gap = if bound == 0 { 1.0 } else { high as f64 / bound as f64 };
    let figures = format!("height {} · lower bound {} · gap {gap:.4}", Bytes(high), Bytes(bound));
    writeln!(out, r#"<text x="{LEFT}" y="44">{figures} · {} buffers</text>"#, map.problem.len())?;
    phases(out, map, plot)?;
    writeln!(
        out,
        r#"<rect class="free" x="{LEFT}" y="{TOP}" width="{:.2}" height="{:.2}"/>"#,
        plot.width, plot.height
    )?;
    for role in Role::ALL {
        rectangles(out, map, plot, role)?;
    }
    axes(out, map, plot)?;
    live_bytes(out, map, plot)?;
    legend(out, map, f64::from(height) - 14.0)?;
    writeln!(out, "</svg>")
}

fn style(out: &mut String) -> std::fmt::Result {
    let lines = r#"width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)""#;
    writeln!(out, r#"<defs><pattern id="hatch" {lines}><path d="M0 0V6"/></pattern></defs>"#)?;
    writeln!(out, "<style>")?;
    writeln!(out, "{}", include_str!("assets/picture.css").trim_end())?;
    for role in Role::ALL {
        writeln!(out, ".{} {{ fill: #{:06x}; }}", class(role), look(role).light)?;
    }
    writeln!(out, "@media (prefers-color-scheme: dark) {{")?;
    for role in Role::ALL {
        writeln!(out, "  .{} {{ fill: #{:06x}; }}", class(role), look(role).dark)?;
    }
    writeln!(out, "}}\n</style>")
}

fn class(role: Role) -> String {
    role.name().replace(' ', "-")
}

fn phases(out: &mut String, map: &MemoryMap<'_>, plot: &Plot) -> std::fmt::Result {
    for (ticks, name) in map.visible_marks() {
        let (x, end) = (plot.x(map, ticks.start), plot.x(map, ticks.end));
        // About seven pixels a character at this size.
        let fits = ((end - x - 6.0) / 7.0).max(0.0) as usize;
        let short: String = if fits < 2 { String::new() } else { name.chars().take(fits).collect() };
        write!(out, r#"<g class="phase"><title>{} [{}, {})</title>"#, escape(name), ticks.start, ticks.end)?;
        let (line, from, to) = (TOP - 4.0, TOP - 18.0, plot.curve_top() + CURVE);
        write!(out, r#"<path d="M{x:.2} {line:.2}H{end:.2}"/><path d="M{x:.2} {from:.2}V{to:.2}"/>"#)?;
        writeln!(out, r#"<text x="{:.2}" y="{:.2}">{}</text></g>"#, x + 4.0, TOP - 8.0, escape(&short))?;
    }
    Ok(())
}

fn rectangles(out: &mut String, map: &MemoryMap<'_>, plot: &Plot, role: Role) -> std::fmt::Result {
    for is_persistent in [true, false] {
        let mut these =
            map.rectangles().filter(|r| r.label.role == role && r.is_persistent == is_persistent).peekable();
        if these.peek().is_none() {
            continue;
        }
        writeln!(out, r#"<g class="buffer {}">"#, class(role))?;
        for r in these {
            let (x, y) = (plot.x(map, r.ticks.start), plot.y(map, r.end()));
            let (wide, tall) = (plot.x(map, r.ticks.end) - x, plot.y(map, r.offset) - y);
            let shape = format!(r#"x="{x:.2}" y="{y:.2}" width="{wide:.2}" height="{tall:.2}""#);
            // A border would cover so thin a rectangle.
            let thin = if wide < 4.0 || tall < 3.0 { r#"class="thin" "# } else { "" };
            writeln!(out, r#"<rect {thin}{shape}><title>{}</title></rect>"#, escape(&tooltip(&r)))?;
            if is_persistent {
                writeln!(out, r#"<path class="hatch" d="M{x:.2} {y:.2}h{wide:.2}v{tall:.2}h-{wide:.2}z"/>"#)?;
            }
            // About six pixels a character.
            if tall >= 11.0 && wide >= 6.0 * r.label.tensor.chars().count() as f64 + 8.0 {
                let (x, y) = (x + 5.0, y + tall / 2.0 + 3.5);
                writeln!(out, r#"<text x="{x:.2}" y="{y:.2}">{}</text>"#, escape(&r.label.tensor))?;
            }
        }
        writeln!(out, "</g>")?;
    }
    Ok(())
}

fn tooltip(r: &Rectangle<'_>) -> String {
    let label = r.label;
    let layer = if label.layer.is_empty() { String::new() } else { format!(" in {}", label.layer) };
    let persistent = if r.is_persistent { "persistent " } else { "" };
    format!(
        "{}\n{}{layer}\n{persistent}{}\n{} ({} bytes) at {}\nticks [{}, {})",
        label.tensor,
        label.op,
        label.role.name(),
        Bytes(r.bytes),
        r.bytes,
        r.offset,
        r.ticks.start,
        r.ticks.end
    )
}

fn axes(out: &mut String, map: &MemoryMap<'_>, plot: &Plot) -> std::fmt::Result {
    let step = (map.height / 5).max(1).next_power_of_two();
    let marks = (0..=map.height / step).map(|i| i * step);
    for address in marks {
        let y = plot.y(map, address);
        writeln!(out, r#"<path class="axis" d="M{:.2} {y:.2}h5"/>"#, LEFT - 5.0)?;
        writeln!(out, r#"<text class="size" x="{:.2}" y="{:.2}">{}</text>"#, LEFT - 8.0, y + 4.0, Bytes(address))?;
    }
    let y = plot.curve_top() + CURVE + 14.0;
    let end = LEFT + plot.width;
    writeln!(out, r#"<text x="{LEFT}" y="{y:.2}">tick {}</text>"#, map.ticks.start)?;
    writeln!(out, r#"<text class="size" x="{end:.2}" y="{y:.2}">{}</text>"#, map.ticks.end)
}

/// Draws the live bytes and the lower bound. The full height of the panel stands for the arena's height.
fn live_bytes(out: &mut String, map: &MemoryMap<'_>, plot: &Plot) -> std::fmt::Result {
    let curve = map.curve();
    let y = |bytes| plot.curve_top() + CURVE * (1.0 - map.byte_fraction(bytes));
    let floor = plot.curve_top() + CURVE;
    // At most one point per pixel: the most bytes alive at any tick of that pixel.
    write!(out, r#"<path class="live" d="M{LEFT:.2} {floor:.2}"#)?;
    let columns = plot.width as usize;
    let mut last = None;
    for (column, ticks) in split(&map.ticks, columns).enumerate() {
        let live = curve.most_within(ticks);
        if last != Some(live) {
            write!(out, "H{:.2}V{:.2}", LEFT + plot.width * column as f64 / columns as f64, y(live))?;
            last = Some(live);
        }
    }
    let (end, bound) = (LEFT + plot.width, y(map.lower_bound()));
    writeln!(out, r#"H{end:.2}V{floor:.2}z"/>"#)?;
    writeln!(out, r#"<path class="height" d="M{LEFT:.2} {:.2}H{end:.2}"/>"#, plot.curve_top())?;
    writeln!(out, r#"<path class="bound" d="M{LEFT:.2} {bound:.2}H{end:.2}"/>"#)?;
    writeln!(out, r#"<text class="size" x="{:.2}" y="{:.2}">live bytes</text>"#, LEFT - 8.0, plot.curve_top() + 10.0)
}

fn legend(out: &mut String, map: &MemoryMap<'_>, y: f64) -> std::fmt::Result {
    let mut x = LEFT;
    for role in Role::ALL {
        if map.rectangles().any(|r| r.label.role == role) {
            writeln!(out, r#"<rect class="{}" x="{x:.2}" y="{:.2}" width="11" height="11"/>"#, class(role), y - 10.0)?;
            writeln!(out, r#"<text x="{:.2}" y="{y:.2}">{}</text>"#, x + 16.0, role.name())?;
            x += 34.0 + 7.0 * role.name().len() as f64;
        }
    }
    writeln!(out, r#"<rect class="swatch" x="{x:.2}" y="{:.2}" width="11" height="11"/>"#, y - 10.0)?;
    writeln!(out, r#"<path class="hatch" d="M{x:.2} {:.2}h11v11h-11z"/>"#, y - 10.0)?;
    writeln!(out, r#"<text x="{:.2}" y="{y:.2}">hatched: alive at every tick</text>"#, x + 16.0)
}

/// Escapes user text for XML; characters that XML forbids are replaced.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
