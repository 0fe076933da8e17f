//! Reads `metrics.jsonl` into curves, one for each field of its rows.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;

use super::tensorboard::Events;
use super::{ReportError, open};

/// The rows of a file that may still grow. If the last line is incomplete, the next refresh reads it again.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    path: Option<PathBuf>,
    /// Number of bytes read, up to the end of the last complete line.
    read: u64,
    /// Values by name, then by step. If a step occurs in several rows, because a resumed run repeated the step, the
    /// last row counts.
    values: BTreeMap<String, BTreeMap<u64, f32>>,
    /// The last row without a step.
    pub summary: Option<Value>,
    /// Number of complete lines that are not rows.
    pub broken: usize,
}

/// A curve for the page, in a compact form: 100,000 points take half a megabyte.
#[derive(Debug, Serialize)]
pub(super) struct Curve {
    /// The steps, as ranges of equal distance: each has the first step, the distance between steps, and the number of
    /// steps.
    steps: Vec<(u64, u64, u64)>,
    /// The values as little-endian `f32` in base64. A null in the file becomes NaN.
    values: String,
}

impl Metrics {
    pub fn is_there(&self) -> bool {
        self.path.is_some()
    }

    pub fn last_step(&self) -> Option<u64> {
        self.values.values().filter_map(|points| points.keys().next_back().copied()).max()
    }

    pub fn curves(&self) -> BTreeMap<&str, Curve> {
        self.values.iter().map(|(name, points)| (name.as_str(), Curve::new(points))).collect()
    }

    /// Returns the rows as a TensorBoard event file. Every row gets the same time, at which `metrics.jsonl` was last
    /// modified.
    pub fn events(&self) -> Vec<u8> {
        let modified = self.path.as_ref().and_then(|path| fs::metadata(path).ok()?.modified().ok());
        let time = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let mut steps: BTreeMap<u64, Vec<(&str, f32)>> = BTreeMap::new();
        for (name, points) in &self.values {
            points.iter().for_each(|(step, value)| steps.entry(*step).or_default().push((name, *value)));
        }
        let mut events = Events::new(time.as_secs_f64());
        steps.into_iter().for_each(|(step, values)| events.step(step, values));
        events.into_bytes()
    }

    /// Reads the rows that were written since the last call. If the file has become shorter, it belongs to another run
    /// and is read from the start.
    pub fn refresh(&mut self, folder: &Path) -> Result<(), ReportError> {
        let Some(path) = find(folder) else {
            *self = Self::default();
            return Ok(());
        };
        if self.path.as_ref() != Some(&path) {
            *self = Self { path: Some(path.clone()), ..Self::default() };
        }
        let cannot = |source| ReportError::Read { path: path.clone(), source };
        let text = match read_from(&path, self.read).map_err(cannot)? {
            Some(text) => text,
            None => {
                *self = Self { path: Some(path.clone()), ..Self::default() };
                read_from(&path, 0).map_err(cannot)?.unwrap_or_default()
            }
        };
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        self.read += whole as u64;
        for line in text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
            self.broken += usize::from(!self.add(line));
        }
        // The last line may be complete although it has no line break, as in a file written by hand. If it is
        // incomplete, it is not valid JSON, and `add` ignores it.
        self.add(&text[whole..]);
        Ok(())
    }

    /// Adds the values of a row. Returns false if the line is not a row.
    fn add(&mut self, line: &[u8]) -> bool {
        let Ok(Value::Object(row)) = serde_json::from_slice(line) else { return false };
        let Some(step) = row.get("step").and_then(Value::as_u64) else {
            self.summary = Some(Value::Object(row));
            return true;
        };
        for (name, value) in row.iter().filter(|(name, _)| *name != "step") {
            self.put(name, step, value);
        }
        true
    }

    fn put(&mut self, name: &str, step: u64, value: &Value) {
        let number = match value {
            Value::Number(number) => number.as_f64().map_or(f32::NAN, |number| number as f32),
            // The value is not finite, or was not measured.
            Value::Null => f32::NAN,
            Value::Array(parts) => {
                parts.iter().enumerate().for_each(|(index, part)| self.put(&format!("{name}.{index}"), step, part));
                return;
            }
            Value::Object(parts) => {
                parts.iter().for_each(|(key, part)| self.put(&format!("{name}.{key}"), step, part));
                return;
            }
            // Rows contain a boolean only if it is true.
            Value::Bool(is_so) => f32::from(u8::from(*is_so)),
            Value::String(_) => return,
        };
        match self.values.get_mut(name) {
            Some(points) => drop(points.insert(step, number)),
            None => drop(self.values.insert(name.to_owned(), BTreeMap::from([(step, number)]))),
        }
    }
}

impl Curve {
    fn new(points: &BTreeMap<u64, f32>) -> Self {
        let mut steps: Vec<(u64, u64, u64)> = Vec::new();
        for &step in points.keys() {
            match steps.last_mut() {
                Some((first, distance, count)) if *count == 1 => (*distance, *count) = (step - *first, 2),
                Some((first, distance, count)) if *first + *distance * *count == step => *count += 1,
                _ => steps.push((step, 1, 1)),
            }
        }
        let values: Vec<u8> = points.values().flat_map(|value| value.to_le_bytes()).collect();
        Self { steps, values: STANDARD.encode(values) }
    }
}

/// Returns the path of `metrics.jsonl`. If there is no such file, but exactly one other .jsonl file, returns the path
/// of that file. Otherwise returns `None`.
fn find(folder: &Path) -> Option<PathBuf> {
    let usual = folder.join("metrics.jsonl");
    if usual.is_file() {
        return Some(usual);
    }
    let entries = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found = entries.filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    found.next().filter(|_| found.next().is_none())
}

/// Returns the contents of a file from byte `start` on. Returns `None` if the file does not exist or has fewer than
/// `start` bytes.
fn read_from(path: &Path, start: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(mut file) = open(path)? else { return Ok(None) };
    if file.metadata()?.len() < start {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}
