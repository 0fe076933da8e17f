//! Reads a file of measured figures: a CSV file, gzipped, with a line for each figure.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::GzDecoder;

/// The fields of a line by their columns.
pub type Columns = HashMap<String, String>;

/// Reads all lines.
pub fn read(path: &Path) -> Result<Vec<Columns>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text)?;
    let mut lines = text.lines().map(fields);
    let head = lines.next().context("the file is empty")?;
    Ok(lines.map(|line| head.iter().cloned().zip(line).collect()).collect())
}

/// Returns a field; a column that the file lacks is empty.
pub fn text<'a>(columns: &'a Columns, key: &str) -> &'a str {
    columns.get(key).map_or("", String::as_str)
}

/// Returns the fields of a line of CSV.
pub fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut is_quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => fields.push(String::new()),
            letter => fields.last_mut().expect("there is one").push(letter),
        }
    }
    fields
}
