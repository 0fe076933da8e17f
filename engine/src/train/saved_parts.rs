//! Reads tensors of a checkpoint, in parts that may differ from the saved parts.
//!
//! - In: the parts of a tensor that the ranks of one mesh have saved, and the part that a rank of another mesh needs.
//! - Out: each element of the needed part, from the one saved part that has it.
//! - Never: a buffer of a tensor's size. The saved parts are read one after another, each in the order of its file.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::path::PathBuf;

use candle_core::DType;
use gapless_kernels::Window;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, CheckpointError, SavedSection, TensorReader};

/// A part of a tensor in a checkpoint's manifest. It may be invalid.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Part {
    /// Index of the first element of a range of the flattened tensor, as format 1 has it.
    From(usize),
    /// A window.
    Window {
        /// For each dimension, the ranges of held indices.
        held: Vec<Vec<[usize; 2]>>,
        /// The range of the elements at these indices.
        range: [usize; 2],
    },
}

/// Returns the manifest's description of a window.
pub(super) fn described(window: &Window) -> Value {
    let pair = |range: &Range<usize>| [range.start, range.end];
    let held = window.held().iter().map(|ranges| ranges.iter().map(pair).collect()).collect();
    json!(Part::Window { held, range: pair(&window.flat()) })
}

/// Returns the window that the manifest describes, for a saved part of `elements` elements of a tensor of extents
/// `whole`. A part without a description is the whole tensor.
fn window_of(described: &Value, whole: &[usize], elements: usize) -> Result<Window, String> {
    let all = || whole.iter().map(|&extent| vec![0..extent]).collect();
    let window = match described {
        Value::Null => Window::checked(whole, all(), None)?,
        described => match Part::deserialize(described).map_err(|error| error.to_string())? {
            Part::From(first) => Window::checked(whole, all(), Some(first..first.saturating_add(elements)))?,
            Part::Window { held, range: [start, end] } => {
                let ranges = |ranges: Vec<[usize; 2]>| ranges.into_iter().map(|[start, end]| start..end).collect();
                Window::checked(whole, held.into_iter().map(ranges).collect(), Some(start..end))?
            }
        },
    };
    match window.elements() == elements {
        true => Ok(window),
        false => Err(format!("{window} of {whole:?} has {} elements, but the file has {elements}", window.elements())),
    }
}

/// The files of a checkpoint that contain tensors of one role.
pub(super) struct SavedParts<'a> {
    sections: Vec<&'a SavedSection>,
    /// Descriptions of windows, by file and name.
    windows: &'a Value,
    path: PathBuf,
}

/// Copies elements of a saved part into the needed part, given a reader of the saved part, the index of the first element
/// in the saved part, and the range of these elements in the needed part.
pub(super) type Copy<'a> = dyn FnMut(&mut TensorReader<'_>, usize, Range<usize>) -> Result<(), CheckpointError> + 'a;

impl<'a> SavedParts<'a> {
    /// The files whose names begin with `kind`.
    pub fn of(checkpoint: &'a Checkpoint, kind: &str) -> Self {
        let sections = checkpoint.sections().iter().filter(|section| section.file().starts_with(kind)).collect();
        Self { sections, windows: &checkpoint.metadata()["parts"], path: checkpoint.path().to_owned() }
    }

    /// True if a file contains the tensor or a part of it.
    pub fn contains(&self, name: &str) -> bool {
        self.sections.iter().any(|section| section.find(name).is_some())
    }

    /// Fills `bytes` with the elements of `window` of a tensor.
    ///
    /// # Errors
    /// Returns the errors of [`Self::read`].
    pub fn fill(&self, name: &str, dtype: DType, window: &Window, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let size = dtype.size_in_bytes();
        self.read(name, dtype, window, &mut |reader, from, to| {
            reader.read_into(from * size, &mut bytes[to.start * size..to.end * size])
        })
    }

    /// Calls `copy` for all elements of `window` of a tensor, each of them once. For each saved part, the elements
    /// ascend.
    ///
    /// # Errors
    /// Returns the errors of `copy`. Returns [`CheckpointError::NoTensor`] if elements of the window were not saved with
    /// this type, and [`CheckpointError::Damaged`] if the manifest's description of a part is not valid, or if saved parts
    /// overlap.
    pub fn read(&self, name: &str, dtype: DType, window: &Window, copy: &mut Copy<'_>) -> Result<(), CheckpointError> {
        let mut parts: Vec<(Window, &SavedSection)> = Vec::new();
        for section in &self.sections {
            let Some(tensor) = section.find(name).filter(|tensor| tensor.dtype == dtype) else { continue };
            let part =
                window_of(&self.windows[section.file()][name], window.whole_dims(), tensor.shape.iter().product());
            let damaged = |why| CheckpointError::Damaged {
                path: section.path().to_owned(),
                reason: format!("the manifest describes no valid part of {name}: {why}"),
            };
            let part = part.map_err(damaged)?;
            // Several stages save a frozen parameter that they share.
            if parts.iter().all(|(other, _)| *other != part) {
                parts.push((part, section));
            }
        }
        if let Some(index) = overlap(&parts) {
            let path = self.path.clone();
            return Err(CheckpointError::Damaged { path, reason: format!("two files have element {index} of {name}") });
        }
        let mut filled = 0;
        for (part, section) in &parts {
            let mut reader = None;
            each_common(part, window, |from, to| {
                let reader = match &mut reader {
                    Some(reader) => reader,
                    none => none.insert(section.reader(name)?),
                };
                filled += to.len();
                copy(reader, from, to)
            })?;
        }
        let (all, path) = (window.elements(), self.path.clone());
        match filled == all {
            true => Ok(()),
            false => {
                Err(CheckpointError::NoTensor { path, name: format!("{name}: {} of {all} elements", all - filled) })
            }
        }
    }
}

/// Returns the index of an element of the whole tensor that two parts have, or `None` if there is no such element.
fn overlap(parts: &[(Window, &SavedSection)]) -> Option<usize> {
    if parts.len() < 2 {
        return None;
    }
    // The next run of each part, in ascending order.
    let mut runs: Vec<_> = parts.iter().map(|(window, _)| window.runs()).collect();
    let next = |part: usize, run: Option<Range<usize>>| run.map(|run| Reverse((run.start, run.end, part)));
    let mut heap: BinaryHeap<_> =
        runs.iter_mut().enumerate().filter_map(|(part, runs)| next(part, runs.next())).collect();
    let mut end = 0;
    while let Some(Reverse((start, run_end, part))) = heap.pop() {
        if start < end {
            return Some(start);
        }
        end = run_end;
        heap.extend(next(part, runs[part].next()));
    }
    None
}

/// Calls `copy` for the elements that two windows of a tensor share: for each range of elements that is contiguous in both
/// windows, with the index of its first element in `from`, and its range in `to`. Both ascend.
fn each_common<E>(
    from: &Window,
    to: &Window,
    mut copy: impl FnMut(usize, Range<usize>) -> Result<(), E>,
) -> Result<(), E> {
    let (mut from_runs, mut to_runs) = (from.runs(), to.runs());
    let (mut next, mut next_to) = (from_runs.next(), to_runs.next());
    // The index of the first element of each run in its window.
    let (mut at, mut at_to) = (0, 0);
    // The last range, which may continue.
    let (mut first, mut range) = (0, 0..0);
    while let (Some(run), Some(run_to)) = (next.clone(), next_to.clone()) {
        let (start, end) = (run.start.max(run_to.start), run.end.min(run_to.end));
        if start < end {
            let (start, start_to, len) = (at + start - run.start, at_to + start - run_to.start, end - start);
            if (start, start_to) != (first + range.len(), range.end) {
                if !range.is_empty() {
                    copy(first, range)?;
                }
                (first, range) = (start, start_to..start_to);
            }
            range.end += len;
        }
        if run.end <= run_to.end {
            (at, next) = (at + run.len(), from_runs.next());
        } else {
            (at_to, next_to) = (at_to + run_to.len(), to_runs.next());
        }
    }
    if range.is_empty() { Ok(()) } else { copy(first, range) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::{Draft, Section, TensorBytes, WrittenFiles};

    const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
    /// Extents of a matrix of three blocks, of a tensor of three dimensions, and of a vector.
    const TENSORS: [&[usize]; 3] = [&[12, 5], &[3, 7, 4], &[9]];

    /// A rank's part of each tensor.
    type Parts = Vec<Window>;

    /// Divides `range` into parts of nearly equal lengths, of which the last may be empty.
    fn share(range: Range<usize>, ranks: usize, rank: usize) -> Range<usize> {
        let len = range.len().div_ceil(ranks);
        let at = |rank: usize| (range.start + rank * len).min(range.end);
        at(rank)..at(rank + 1)
    }

    /// Windows that hold parts of one dimension of a tensor, each of `blocks` blocks of which is divided among ranks.
    fn divided(dims: &[usize], dim: usize, blocks: usize, ranks: usize) -> Parts {
        let part = |rank| {
            let mut held: Vec<Vec<Range<usize>>> = dims.iter().map(|&extent| vec![0..extent]).collect();
            let block = dims[dim] / blocks;
            held[dim] = (0..blocks).map(|index| share(index * block..(index + 1) * block, ranks, rank)).collect();
            Window::of(dims, held)
        };
        (0..ranks).map(part).collect()
    }

    /// Divides each window among two ranks.
    fn flat(windows: Parts, ranks: usize) -> Parts {
        let parts = |window: &Window| {
            (0..ranks).map(|rank| window.range(share(0..window.elements(), ranks, rank))).collect::<Parts>()
        };
        windows.iter().flat_map(parts).collect()
    }

    /// All ways in which a tensor is divided.
    fn layouts(dims: &[usize]) -> Vec<Parts> {
        let of_ranks = |ranks| {
            [
                divided(dims, 0, 1, ranks),
                divided(dims, dims.len() - 1, 1, ranks),
                divided(dims, 0, 3, ranks),
                flat(vec![Window::whole(dims)], ranks),
                flat(divided(dims, dims.len() - 1, 1, ranks), 2),
            ]
        };
        RANKS.into_iter().flat_map(of_ranks).collect()
    }

    /// The bytes of a window's elements, each of which is its index.
    fn bytes(window: &Window, dtype: DType) -> Vec<u8> {
        let bytes = |index: usize| (index as u32).to_le_bytes()[..dtype.size_in_bytes()].to_vec();
        window.runs().flatten().flat_map(bytes).collect()
    }

    /// Saves parts of a tensor `w` with the descriptions that `described` returns for them.
    fn save(
        folder: &Path,
        parts: &[Window],
        dtype: DType,
        described: impl Fn(&Window) -> Value,
    ) -> Result<Checkpoint, CheckpointError> {
        let draft = Draft::begin(folder, 1)?;
        let (mut files, mut windows) = (WrittenFiles::default(), serde_json::Map::new());
        for (rank, part) in parts.iter().enumerate() {
            let (file, shape) = (format!("model-{rank}.safetensors"), [part.elements()]);
            let bytes = bytes(part, dtype);
            let tensors = vec![TensorBytes { name: "w", dtype, shape: &shape, bytes: &bytes }];
            files.extend(draft.write(&[Section { file: &file, tensors }])?);
            windows.insert(file, json!({ "w": described(part) }));
        }
        Checkpoint::open(&draft.commit(files, json!({ "parts": windows }))?)
    }

    fn read(checkpoint: &Checkpoint, dtype: DType, window: &Window) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0xff; window.elements() * dtype.size_in_bytes()];
        SavedParts::of(checkpoint, "model").fill("w", dtype, window, &mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn every_layout_is_read_in_every_other() {
        for (dims, dtype) in TENSORS.into_iter().zip([DType::F32, DType::BF16, DType::U8]) {
            let layouts = layouts(dims);
            for saved in &layouts {
                let folder = tempfile::tempdir().unwrap();
                let checkpoint = save(folder.path(), saved, dtype, described).unwrap();
                for part in layouts.iter().flatten() {
                    assert_eq!(read(&checkpoint, dtype, part).unwrap(), bytes(part, dtype), "{part} from {saved:?}");
                }
            }
        }
    }

    /// Format 1 has ranges of the flattened tensor, by the index of the first element.
    #[test]
    fn flat_parts_of_format_1_are_read() {
        for ranks in RANKS {
            let folder = tempfile::tempdir().unwrap();
            let saved = flat(vec![Window::whole(TENSORS[0])], ranks);
            let checkpoint = save(folder.path(), &saved, DType::F32, |part| json!(part.flat().start)).unwrap();
            for part in layouts(TENSORS[0]).iter().flatten() {
                assert_eq!(read(&checkpoint, DType::F32, part).unwrap(), bytes(part, DType::F32), "{part}");
            }
        }
    }

    #[test]
    fn parts_that_are_not_valid_are_errors() {
        let max = usize::MAX;
        let halves = divided(&[4, 2], 0, 1, 2);
        let cases: [(Value, &str); 12] = [
            (json!(null), "has 8 elements, but the file has 4"),
            (json!(5), "not among 8"),
            (json!(max), "not among 8"),
            (json!(-1), "untagged"),
            (json!("0"), "untagged"),
            (json!({ "held": [[[0, 2]], [[0, 2]]] }), "untagged"),
            (json!({ "held": [[[0, 2]]], "range": [0, 4] }), "a window of 1 dimensions"),
            (json!({ "held": [[[0, 2]], [[0, 3]]], "range": [0, 4] }), "exceed the extent 2"),
            (json!({ "held": [[[2, 4], [0, 2]], [[0, 2]]], "range": [0, 4] }), "do not follow"),
            (json!({ "held": [[[0, max]], [[0, max]]], "range": [0, max] }), "exceed the extent 4"),
            (json!({ "held": [[[0, 2]], [[0, 2]]], "range": [3, 2] }), "not among 4"),
            (json!({ "held": [[[0, 2]], [[0, 2]]], "range": [0, 3] }), "has 3 elements, but the file has 4"),
        ];
        for (described, expected) in cases {
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = save(folder.path(), &halves, DType::F32, |_| described.clone()).unwrap();
            let error = read(&checkpoint, DType::F32, &halves[0]).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("no valid part of w"), "{described}: {error}");
        }
    }

    #[test]
    fn each_element_is_in_one_file() {
        let [rows, columns] = [divided(&[4, 6], 0, 1, 2), divided(&[4, 6], 1, 1, 3)];
        let check = |parts: &[&Window], wanted: &Window| {
            let folder = tempfile::tempdir().unwrap();
            let parts: Vec<Window> = parts.iter().map(|&part| part.clone()).collect();
            let checkpoint = save(folder.path(), &parts, DType::F32, described).unwrap();
            read(&checkpoint, DType::F32, wanted).map_err(|error| error.to_string())
        };
        let whole = Window::whole(&[4, 6]);
        let missing = check(&[&rows[0]], &whole).unwrap_err();
        assert!(missing.contains("no tensor w: 12 of 24 elements"), "{missing}");
        assert_eq!(check(&[&rows[0]], &rows[0]).unwrap(), bytes(&rows[0], DType::F32));
        let twice = check(&[&rows[0], &rows[1], &columns[1]], &whole).unwrap_err();
        assert!(twice.contains("two files have element 2 of w"), "{twice}");
        let copies = check(&[&rows[0], &rows[1], &rows[0]], &whole).unwrap();
        assert_eq!(copies, bytes(&whole, DType::F32), "stages save copies of a frozen parameter");
    }
}
