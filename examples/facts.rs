//! Reads a file of measured figures: a CSV file, gzipped, with a line for each figure.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::GzDecoder;

use super::csv::fields;

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

/// Returns a number, or 1 if the column has none.
pub fn number(columns: &Columns, key: &str) -> usize {
    text(columns, key).parse().unwrap_or(1)
}

/// Returns the preset of a published model.
pub fn preset(model: &str) -> Option<&'static str> {
    Some(match model {
        "Llama 3.1 8B" => "llama3-8b",
        "LLAMA3_70B" | "Llama 3.1 70B" => "llama3-70b",
        "LLAMA3.1_405B" | "Llama 3.1 405B" => "llama3-405b",
        "Qwen3_30B_a3B" => "qwen3-30b-a3b",
        "Qwen3_235B_a22B" => "qwen3-235b-a22b",
        "DeepSeekV3" => "deepseek-v3",
        _ => return None,
    })
}
