//! Draws a table of buffers: `cargo run -p gapless-alloc --example memory_map -- table.csv map.html`.
//!
//! The file ending selects the output: `.html`, `.svg`, or anything else for text. A table with an offset in every line
//! is drawn as it is. Any other table is planned first, with the offsets that it has as pins. A table has no names, so
//! every buffer is named after its id.

use std::io::BufReader;

use gapless_alloc::draw::{MemoryMap, SvgOptions, TextOptions};
use gapless_alloc::{Label, Options, Role, csv, plan};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [table, picture] =
        std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "usage: memory_map TABLE PICTURE")?;
    let read = csv::read(BufReader::new(std::fs::File::open(&table)?))?;
    let offsets = match read.plan() {
        Some(offsets) => offsets,
        None => plan(&read.pinned()?, &Options::default()).offsets,
    };
    let label = |id: String| Label { tensor: id, op: String::new(), layer: String::new(), role: Role::Activation };
    let labels: Vec<Label> = read.ids.into_iter().map(label).collect();
    let map = MemoryMap::new(&table, &read.problem, &offsets, &labels)?;
    let drawn = match picture.rsplit('.').next() {
        Some("html") => map.html(),
        Some("svg") => map.svg(&SvgOptions::default()),
        _ => map.text(&TextOptions::default()),
    };
    std::fs::write(picture, drawn)?;
    print!("{}", map.summary(10));
    Ok(())
}
