//! The distribution of tokens over experts that plans and comparisons assume.

use std::fmt::{self, Display};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The distribution of the tokens of a step over the experts of each layer, for commands that run no step.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertLoad {
    /// `skewed:A`: in each layer, the n-th most popular expert is chosen n^−A times as often as the most popular one.
    /// `even` is `skewed:0`, where every expert has the same chance.
    Skewed(f64),
    /// `worst`: every token of every expert rank chooses experts of one rank, and always the same ones, up to their
    /// capacity. No routing sends more rows to a rank.
    Worst,
    /// `recorded:FILE`: the tokens that chose each expert in training.
    Recorded(Arc<RecordedLoad>),
}

/// Loads of experts that were recorded in training. If they cannot be read, no step can be made of the run, but it can be
/// trained, because training does not need them.
#[derive(PartialEq)]
pub struct RecordedLoad {
    /// The absolute path of the file.
    source: String,
    /// Hash of the file.
    digest: blake3::Hash,
    /// The number of tokens that chose an expert, by recorded step, layer of experts and expert, or the reason why they
    /// cannot be read. In each layer of each step, some expert was chosen.
    tokens: Result<Vec<Vec<Vec<u64>>>, String>,
}

impl RecordedLoad {
    /// Reads a CSV file with the columns `step,layer,expert,tokens`. The lines of a step follow each other. Layers are
    /// those of the model with experts, in the order of their first lines, whatever their names. Experts count from 0.
    /// An expert that is left out was chosen by no token. [`Self::error`] says why a file cannot be read.
    pub fn read(path: &Path) -> Arc<Self> {
        /// The recordings in use. All configurations of a sweep share one.
        static KNOWN: Mutex<Vec<Weak<RecordedLoad>>> = Mutex::new(Vec::new());
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let source = path.display().to_string();
        let text = std::fs::read_to_string(&path);
        let digest = blake3::hash(text.as_deref().unwrap_or_default().as_bytes());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut in_use = known.iter().filter_map(Weak::upgrade);
        if let Some(same) = in_use.find(|load| load.source == source && load.digest == digest) {
            return same;
        }
        let tokens = text.map_err(|why| format!("cannot be read: {why}")).and_then(|text| parse(&text));
        let load = Arc::new(Self { source, digest, tokens });
        known.retain(|load| load.strong_count() > 0);
        known.push(Arc::downgrade(&load));
        load
    }

    /// The reason why the file cannot be read: it is missing, has another form, or a step has no tokens in a layer.
    pub fn error(&self) -> Option<String> {
        self.tokens.as_ref().err().map(|why| format!("{}: {why}", self.source))
    }

    fn steps(&self) -> &[Vec<Vec<u64>>] {
        self.tokens.as_deref().unwrap_or_default()
    }

    /// Number of layers with experts.
    pub fn layers(&self) -> usize {
        self.steps().first().map_or(0, Vec::len)
    }

    /// Number of experts of a layer, as far as any was chosen.
    pub fn experts(&self) -> usize {
        self.steps().iter().flatten().map(Vec::len).max().unwrap_or(0)
    }

    /// The number of tokens that chose each expert of the n-th layer in a step. Steps are repeated.
    pub fn of_layer(&self, step: usize, layer: usize) -> &[u64] {
        let steps = self.steps();
        let found = steps.get(step % steps.len().max(1)).and_then(|step| step.get(layer));
        found.map_or(&[], Vec::as_slice)
    }
}

impl fmt::Debug for RecordedLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, digest, .. } = self;
        f.debug_struct("RecordedLoad").field("source", source).field("digest", digest).finish_non_exhaustive()
    }
}

/// Parses the lines of [`RecordedLoad::read`].
fn parse(text: &str) -> Result<Vec<Vec<Vec<u64>>>, String> {
    const COLUMNS: &str = "step,layer,expert,tokens";
    let mut lines = (1..).zip(text.lines());
    if lines.next().is_none_or(|(_, head)| head.trim() != COLUMNS) {
        return Err(format!("the first line is not {COLUMNS}; write these columns"));
    }
    let (mut names, mut last): (Vec<&str>, Option<&str>) = Default::default();
    let mut steps: Vec<Vec<Vec<u64>>> = Vec::new();
    for (number, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let parsed = match fields[..] {
            [step, layer, expert, tokens] => {
                expert.parse::<u16>().ok().zip(tokens.parse::<u32>().ok()).map(|it| (step, layer, it))
            }
            _ => None,
        };
        let Some((step, layer, (expert, tokens))) = parsed else {
            return Err(format!(
                "line {number} is {line:?}; write a step, a layer, an expert below 65536 and a number of tokens below 2^32"
            ));
        };
        if last.replace(step) != Some(step) {
            steps.push(Vec::new());
        }
        let layer = names.iter().position(|name| *name == layer).unwrap_or_else(|| {
            names.push(layer);
            names.len() - 1
        });
        let Some(layers) = steps.last_mut() else { continue };
        layers.resize(layers.len().max(layer + 1), Vec::new());
        let experts = &mut layers[layer];
        experts.resize(experts.len().max(usize::from(expert) + 1), 0);
        experts[usize::from(expert)] += u64::from(tokens);
    }
    if steps.is_empty() {
        return Err("it has no steps; record some".to_owned());
    }
    for (at, layers) in (1..).zip(&mut steps) {
        layers.resize(names.len(), Vec::new());
        if let Some(layer) = layers.iter().position(|experts| experts.iter().all(|&tokens| tokens == 0)) {
            return Err(format!("step number {at} has no tokens in layer {}; record whole steps", names[layer]));
        }
    }
    Ok(steps)
}

impl ExpertLoad {
    /// Every expert has the same chance.
    pub const EVEN: Self = Self::Skewed(0.0);
}

impl Default for ExpertLoad {
    fn default() -> Self {
        Self::EVEN
    }
}

impl Display for ExpertLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skewed(0.0) => f.write_str("even"),
            Self::Skewed(exponent) => write!(f, "skewed:{exponent}"),
            Self::Worst => f.write_str("worst"),
            Self::Recorded(load) => write!(f, "recorded:{}", load.source),
        }
    }
}

impl FromStr for ExpertLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let exponent = |text: &str| text.parse().ok().filter(|exponent| (0.0..=16.0).contains(exponent));
        match text {
            "even" => return Ok(Self::EVEN),
            "worst" => return Ok(Self::Worst),
            _ => {}
        }
        if let Some(file) = text.strip_prefix("recorded:").filter(|file| !file.is_empty()) {
            return Ok(Self::Recorded(RecordedLoad::read(Path::new(file))));
        }
        text.strip_prefix("skewed:").and_then(exponent).map(Self::Skewed).ok_or_else(|| {
            format!(
                "{text:?} is not a load of experts; write even, worst, recorded:FILE.csv, or skewed:A with A from 0 to 16"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_they_are_written() {
        for text in ["even", "skewed:0.6", "skewed:2", "worst"] {
            assert_eq!(text.parse::<ExpertLoad>().unwrap().to_string(), text);
        }
        assert_eq!("skewed:0".parse(), Ok(ExpertLoad::EVEN));
        for text in ["", "zipf", "recorded:", "skewed", "skewed:", "skewed:-1", "skewed:NaN", "skewed:17"] {
            assert!(text.parse::<ExpertLoad>().unwrap_err().contains("skewed:A with A from 0 to 16"), "{text}");
        }
    }

    #[test]
    fn recordings_are_read_by_step_and_layer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("load.csv");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            format!("recorded:{}", path.display()).parse::<ExpertLoad>()
        };
        let load = read("step,layer,expert,tokens\n7,b,1,3\n7,a,0,2\n\n9,a,2,5\n9, b, 0, 1\n").unwrap();
        assert_eq!(load.to_string(), format!("recorded:{}", path.display()));
        assert_eq!(load.to_string().parse(), Ok(load.clone()));
        let ExpertLoad::Recorded(load) = load else { panic!("it is recorded") };
        assert_eq!((load.layers(), load.experts()), (2, 3));
        let found = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)].map(|(step, layer)| load.of_layer(step, layer));
        assert_eq!(found, [&[0, 3][..], &[2], &[1], &[0, 0, 5], &[0, 3], &[]]);
        for (text, why) in [
            ("", "the first line is not step,layer,expert,tokens"),
            ("step,layer,expert,tokens\n", "it has no steps"),
            ("step,layer,expert,tokens\n1,a,0\n", "line 2 is \"1,a,0\""),
            ("step,layer,expert,tokens\n1,a,70000,1\n", "an expert below 65536"),
            ("step,layer,expert,tokens\n1,a,0,-1\n", "line 2"),
            ("step,layer,expert,tokens\n1,a,0,1\n1,b,0,1\n2,a,0,1\n", "step number 2 has no tokens in layer b"),
        ] {
            let Ok(ExpertLoad::Recorded(load)) = read(text) else { panic!("it is recorded") };
            assert!(load.error().is_some_and(|error| error.contains(why)) && load.layers() == 0, "{text}");
        }
        assert!(RecordedLoad::read(Path::new("missing.csv")).error().unwrap().contains("cannot be read"));
    }
}
