//! The report of one or more runs as an HTML page: curves, configurations, samples, memory maps and summaries.
//!
//! In: folders of runs that [`train`](super::train) has finished or is still writing. Out: a self-contained page, or a
//! page that is served on the loopback address and follows the runs. A missing or incomplete file is not an error,
//! because a run in progress may still write the file.

mod metrics;
mod serve;
mod tensorboard;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use gapless_alloc::draw::escape;
use serde::Serialize;
use serde_json::Value;

use self::metrics::{Curve, Metrics};
pub use self::serve::ReportServer;
use crate::page::{self, Page};

/// The reason why a report cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The path contains no run.
    #[error("{} is not the folder of a run: it has none of run.toml, metrics.jsonl and summary.json", path.display())]
    NoRun {
        /// The path as given.
        path: PathBuf,
    },
    /// A file exists but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A report on the folders of runs, with the contents that were read so far.
///
/// ```
/// use gapless::run::Report;
///
/// # let folder = tempfile::tempdir()?;
/// # let run = folder.path().to_owned();
/// std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"loss\":5.5}\n{\"step\":2,\"loss\":5.25}\n")?;
/// let report = Report::open(&[run.clone()])?;
/// assert_eq!(report.runs()[0].steps(), Some(2));
/// std::fs::write(run.join("report.html"), report.html()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Report {
    runs: Vec<RunRecord>,
}

impl Report {
    /// Reads the folders of finished or running runs.
    ///
    /// # Errors
    /// Returns a [`ReportError`] if a path is not the folder of a run, or if a file cannot be read. A missing file is
    /// not an error; [`RunRecord::missing`] lists such files.
    pub fn open(folders: &[PathBuf]) -> Result<Self, ReportError> {
        let mut report = Self { runs: names(folders).into_iter().zip(folders).map(RunRecord::new).collect() };
        report.refresh()?;
        match report.runs.iter().find(|run| run.is_empty()) {
            Some(run) => Err(ReportError::NoRun { path: run.path.clone() }),
            None => Ok(report),
        }
    }

    /// The runs, in the order in which they were given.
    pub fn runs(&self) -> &[RunRecord] {
        &self.runs
    }

    /// Reads everything that the runs have written into their files since the last call.
    ///
    /// # Errors
    /// Returns [`ReportError::Read`] if a file cannot be read.
    pub fn refresh(&mut self) -> Result<(), ReportError> {
        self.runs.iter_mut().try_for_each(RunRecord::refresh)
    }

    /// Returns the report as a self-contained HTML page, including the memory maps.
    ///
    /// # Errors
    /// Returns [`ReportError::Read`] if a memory map cannot be read.
    pub fn html(&self) -> Result<String, ReportError> {
        self.page(false)
    }

    fn page(&self, is_served: bool) -> Result<String, ReportError> {
        let title = self.title();
        let mut body = include_str!("assets/report.html").replace("{title}", &escape(&title));
        for (index, run) in self.runs.iter().enumerate() {
            if let Some(map) = text_of(&run.path.join("memory.html"))? {
                let map = page::json(&map);
                body += &format!("<script type=\"application/json\" id=\"memory-{index}\">{map}</script>\n");
            }
        }
        Ok(Page {
            title: &title,
            kind: "runs",
            style: include_str!("assets/report.css"),
            body: &body,
            script: concat!(include_str!("assets/chart.js"), include_str!("assets/report.js")),
            data: &self.data(is_served),
            is_served,
        }
        .html())
    }

    /// The data of the page, as JSON.
    fn data(&self, is_served: bool) -> String {
        #[derive(Serialize)]
        struct Data<'a> {
            is_served: bool,
            runs: Vec<PageRun<'a>>,
        }
        page::json(&Data { is_served, runs: self.runs.iter().map(PageRun::new).collect() })
    }

    fn title(&self) -> String {
        match &self.runs[..] {
            runs @ ([] | [_] | [_, _] | [_, _, _]) => {
                runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ")
            }
            runs => format!("{} runs", runs.len()),
        }
    }
}

/// Returns a name for each path, which is its last component. If two of these names are equal, returns all paths in
/// full.
fn names(folders: &[PathBuf]) -> Vec<String> {
    let last = |path: &PathBuf| {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
    };
    let names: Vec<String> = folders.iter().map(last).collect();
    if names.iter().collect::<BTreeSet<_>>().len() == names.len() {
        return names;
    }
    folders.iter().map(|path| path.display().to_string()).collect()
}

/// The contents of a run's folder.
#[derive(Debug)]
pub struct RunRecord {
    name: String,
    path: PathBuf,
    metrics: Metrics,
    /// Text of `run.toml`.
    config: Option<String>,
    summary: Option<Value>,
    /// Samples, by the number of steps done.
    samples: BTreeMap<u64, String>,
}

impl RunRecord {
    fn new((name, path): (String, &PathBuf)) -> Self {
        let (path, metrics) = (path.clone(), Metrics::default());
        Self { name, path, metrics, config: None, summary: None, samples: BTreeMap::new() }
    }

    fn refresh(&mut self) -> Result<(), ReportError> {
        self.config = text_of(&self.path.join("run.toml"))?;
        let summary = text_of(&self.path.join("summary.json"))?;
        self.summary = summary.and_then(|text| serde_json::from_str(&text).ok());
        self.samples = text_of(&self.path.join("samples.txt"))?.map_or_else(BTreeMap::new, |text| samples(&text));
        self.metrics.refresh(&self.path)
    }

    fn is_empty(&self) -> bool {
        self.config.is_none() && self.summary().is_none() && !self.metrics.is_there()
    }

    /// The run's name on the page.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the run's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the run's metrics as a TensorBoard event file. TensorBoard requires a file name that contains
    /// `tfevents`.
    pub fn events(&self) -> Vec<u8> {
        self.metrics.events()
    }

    /// Number of steps that were done at the last row; `None` if there are no rows.
    pub fn steps(&self) -> Option<u64> {
        self.metrics.last_step()
    }

    /// Returns the summary from `summary.json`. If there is no such file, returns the last row without a step, as
    /// `examples/train_gpt.rs` writes it. Returns `None` if there is no such row either.
    fn summary(&self) -> Option<&Value> {
        self.summary.as_ref().or(self.metrics.summary.as_ref())
    }

    /// Returns the error that ended the run, or `None` if the run has not failed.
    pub fn error(&self) -> Option<&str> {
        self.summary()?.get("error")?.as_str()
    }

    /// Describes the files that are missing from the folder, and the lines that are not rows. The list is empty if the
    /// folder is complete.
    pub fn missing(&self) -> Vec<String> {
        let files = [
            ("run.toml", self.config.is_some()),
            ("metrics.jsonl", self.metrics.is_there()),
            ("summary.json", self.summary().is_some()),
            ("memory.html", self.path.join("memory.html").exists()),
            ("samples.txt", !self.samples.is_empty()),
        ];
        let absent = files.into_iter().filter(|(_, is_there)| !is_there).map(|(name, _)| format!("no {name}"));
        let broken = match self.metrics.broken {
            0 => None,
            1 => Some("1 line of its metrics is not a row".to_owned()),
            lines => Some(format!("{lines} lines of its metrics are not rows")),
        };
        absent.chain(broken).collect()
    }
}

impl fmt::Display for RunRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} steps", self.path.display(), self.steps().unwrap_or(0))?;
        self.missing().iter().try_for_each(|missing| write!(f, ", {missing}"))?;
        self.error().map_or(Ok(()), |error| write!(f, ", failed: {error}"))
    }
}

/// The JSON of a run, as the page reads it.
#[derive(Serialize)]
struct PageRun<'a> {
    name: &'a str,
    missing: Vec<String>,
    curves: BTreeMap<&'a str, Curve>,
    /// Values of `run.toml` as text, by their full keys with dots.
    config: BTreeMap<String, String>,
    toml: Option<&'a str>,
    summary: Option<&'a Value>,
    samples: Vec<(u64, &'a str)>,
}

impl<'a> PageRun<'a> {
    fn new(run: &'a RunRecord) -> Self {
        let toml = run.config.as_deref();
        let table = toml.and_then(|text| text.parse::<toml::Table>().ok()).unwrap_or_default();
        let mut config = BTreeMap::new();
        table.into_iter().for_each(|(key, value)| flatten(key, value, &mut config));
        Self {
            name: &run.name,
            missing: run.missing(),
            curves: run.metrics.curves(),
            config,
            toml,
            summary: run.summary(),
            samples: run.samples.iter().map(|(&steps, text)| (steps, text.as_str())).collect(),
        }
    }
}

fn flatten(key: String, value: toml::Value, to: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            table.into_iter().for_each(|(part, value)| flatten(format!("{key}.{part}"), value, to));
        }
        toml::Value::String(text) => drop(to.insert(key, text)),
        other => drop(to.insert(key, other.to_string())),
    }
}

/// Parses the samples that [`train`](super::train) has written. Returns them by the number of steps done. If a resumed
/// run has sampled again after the same step, the last sample counts.
fn samples(text: &str) -> BTreeMap<u64, String> {
    let mut samples = BTreeMap::new();
    let mut last: Option<&mut String> = None;
    for line in text.lines() {
        if let Some(steps) = line.strip_prefix("=== step ").and_then(|steps| steps.parse().ok()) {
            let sample: &mut String = samples.entry(steps).or_default();
            sample.clear();
            last = Some(sample);
        } else if let Some(sample) = &mut last {
            sample.push_str(line);
            sample.push('\n');
        }
    }
    samples
}

/// Reads a file as text. Returns `None` if the file does not exist. Invalid UTF-8 is replaced, since a sample may end
/// within a character.
fn text_of(path: &Path) -> Result<Option<String>, ReportError> {
    let read = || {
        let Some(mut file) = open(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    };
    read().map_err(|source| ReportError::Read { path: path.to_owned(), source })
}

/// Opens a regular file. Returns `None` if the file does not exist. Returns an error for pipes and devices, because
/// opening a pipe could block, and a device may never end.
fn open(path: &Path) -> io::Result<Option<File>> {
    match fs::metadata(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Ok(metadata) if !metadata.is_file() => {
            Err(io::Error::other("it is not a regular file; move it out of the folder"))
        }
        metadata => metadata.and_then(|_| File::open(path)).map(Some),
    }
}
