//! Writing a checkpoint: files, hashes, manifest, and one rename that makes it be.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use candle_core::DType;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::Value;

use crate::disk::{Disk, RealDisk};
use crate::folder::{State, path_for};
use crate::manifest::{FORMAT, FileEntry, MANIFEST, MANIFEST_HASH, Manifest, hash_line};
use crate::{Checkpoint, CheckpointError};

/// Most bytes per write, so that hashing and writing take turns on memory that is still in the cache.
const WRITE_BYTES: usize = 1 << 20;

/// A tensor to save: where its bytes are.
#[derive(Debug, Clone, Copy)]
pub struct TensorBytes<'a> {
    /// Unique in its section.
    pub name: &'a str,
    /// Candle's type.
    pub dtype: DType,
    /// Row-major.
    pub shape: &'a [usize],
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// The tensors that go into one file.
#[derive(Debug, Clone)]
pub struct Section<'a> {
    /// The file's name, like `model.safetensors`.
    pub file: &'a str,
    /// What is in it.
    pub tensors: Vec<TensorBytes<'a>>,
}

impl Checkpoint {
    /// Saves `dir/step-…` and answers its path. Every byte is on the disk when this returns. A checkpoint of the same step
    /// is replaced.
    ///
    /// Tensors are streamed from where they lie; besides them only the header of a file is in memory.
    ///
    /// # Errors
    /// Bytes that don't fit their shape, two tensors or sections of a name, or a write that fails: then what was written is
    /// removed again, and earlier checkpoints stay as they were.
    pub fn save(dir: &Path, step: u64, sections: &[Section<'_>], metadata: Value) -> Result<PathBuf, CheckpointError> {
        save_on(&mut RealDisk, dir, step, sections, metadata)
    }
}

/// A checkpoint that several writers make together, each its own files: one begins it, all write, and the one commits it
/// once it has the [`WrittenFiles`] of all. Until then it doesn't count.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    step: u64,
}

/// Sizes and hashes of files that were written.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WrittenFiles(BTreeMap<String, FileEntry>);

impl WrittenFiles {
    /// These and others.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }
}

impl Draft {
    /// Makes the empty folder that all writers write into.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn begin(dir: &Path, step: u64) -> Result<Self, CheckpointError> {
        create_partial(&mut RealDisk, dir, &path_for(dir, step, State::Partial))?;
        Ok(Self::join(dir, step))
    }

    /// What another writer has begun.
    pub fn join(dir: &Path, step: u64) -> Self {
        Self { dir: dir.to_owned(), step }
    }

    /// Writes this writer's files. Every byte is on the disk when this returns.
    ///
    /// # Errors
    /// As [`Checkpoint::save`].
    pub fn write(&self, sections: &[Section<'_>]) -> Result<WrittenFiles, CheckpointError> {
        let headers = headers(sections)?;
        write_on(&mut RealDisk, &path_for(&self.dir, self.step, State::Partial), sections, &headers)
    }

    /// Makes it a checkpoint, once all have written.
    ///
    /// # Errors
    /// When the manifest cannot be written, or the folder not be renamed.
    pub fn commit(&self, files: WrittenFiles, metadata: Value) -> Result<PathBuf, CheckpointError> {
        commit_on(&mut RealDisk, &self.dir, self.step, files, metadata)
    }

    /// Removes it.
    pub fn discard(&self) {
        // What cannot be removed is passed over by `latest`.
        let _ = RealDisk.remove_folder(&path_for(&self.dir, self.step, State::Partial));
    }
}

pub(super) fn save_on(
    disk: &mut impl Disk,
    dir: &Path,
    step: u64,
    sections: &[Section<'_>],
    metadata: Value,
) -> Result<PathBuf, CheckpointError> {
    let headers = headers(sections)?; // before anything is written
    let partial = path_for(dir, step, State::Partial);
    let save = || {
        create_partial(disk, dir, &partial)?;
        let files = write_on(disk, &partial, sections, &headers)?;
        commit_on(disk, dir, step, files, metadata)
    };
    let saved = save();
    if saved.is_err() {
        // The error that is told is the first one; what cannot be removed is passed over by `latest`.
        let _ = disk.remove_folder(&partial);
    }
    saved
}

fn write_on(
    disk: &mut impl Disk,
    partial: &Path,
    sections: &[Section<'_>],
    headers: &[Header<'_>],
) -> Result<WrittenFiles, CheckpointError> {
    let mut files = WrittenFiles::default();
    for (section, header) in sections.iter().zip(headers) {
        let path = partial.join(section.file);
        files.0.insert(section.file.to_owned(), write_section(disk, &path, header).map_err(write_error(&path))?);
    }
    Ok(files)
}

fn commit_on(
    disk: &mut impl Disk,
    dir: &Path,
    step: u64,
    files: WrittenFiles,
    metadata: Value,
) -> Result<PathBuf, CheckpointError> {
    write_manifest(
        disk,
        &path_for(dir, step, State::Partial),
        &Manifest { format: FORMAT, step, files: files.0, metadata },
    )?;
    rename_into_place(disk, dir, step)
}

/// An empty folder whose name says that it doesn't count yet.
fn create_partial(disk: &mut impl Disk, dir: &Path, partial: &Path) -> Result<(), CheckpointError> {
    if is_there(partial) {
        disk.remove_folder(partial).map_err(write_error(partial))?;
    }
    tell_of_other_name(partial);
    let is_new = !is_there(dir);
    disk.create_folder(partial).map_err(write_error(partial))?;
    match dir.parent() {
        Some(parent) if is_new => {
            let parent = if parent == Path::new("") { Path::new(".") } else { parent };
            disk.sync_folder(parent).map_err(write_error(parent))
        }
        _ => Ok(()),
    }
}

/// The manifest's hash, then the manifest, by rename.
fn write_manifest(disk: &mut impl Disk, partial: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    let json = serde_json::to_vec_pretty(manifest).expect("strings, numbers and JSON make valid JSON");
    write_file(disk, &partial.join(MANIFEST_HASH), hash_line(&json).as_bytes())?;
    let (path, temporary) = (partial.join(MANIFEST), partial.join("manifest.json.tmp"));
    write_file(disk, &temporary, &json)?;
    disk.rename(&temporary, &path).map_err(write_error(&path))?;
    disk.sync_folder(partial).map_err(write_error(partial))
}

/// Gives the folder its name. One of the same step steps aside first, under a name that `latest` still knows. What only has the
/// name, a file or a checkpoint of another step, stays, and the folder gets the next name.
fn rename_into_place(disk: &mut impl Disk, dir: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let [partial, path, replaced] =
        [State::Partial, State::Committed, State::Replaced].map(|state| path_for(dir, step, state));
    tell_of_other_name(&path);
    let replacing = is_there(&path);
    if replacing {
        if is_there(&replaced) {
            disk.remove_folder(&replaced).map_err(write_error(&replaced))?;
        }
        disk.rename(&path, &replaced).map_err(write_error(&replaced))?;
    }
    if let Err(error) = disk.rename(&partial, &path) {
        if replacing {
            let _ = disk.rename(&replaced, &path);
        }
        return Err(write_error(&path)(error));
    }
    disk.sync_folder(dir).map_err(write_error(dir))?;
    if replacing {
        // It may stay: the new one goes before it.
        let _ = disk.remove_folder(&replaced);
    }
    Ok(path)
}

/// Says that a folder of checkpoints has something in it that is none, or one that was renamed.
fn tell_of_other_name(path: &Path) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.matches('-').count() > 1 {
        let path = path.display();
        tracing::warn!(%path, "a checkpoint gets another name: what has its own is no checkpoint of this step");
    }
}

/// Whether something has the path; what cannot be looked at is treated as if there were, so that the error is told.
fn is_there(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// A file's head and its tensors in the file's order.
struct Header<'a> {
    bytes: Vec<u8>,
    tensors: Vec<TensorBytes<'a>>,
}

/// Checks all sections and makes their safetensors headers.
fn headers<'a>(sections: &[Section<'a>]) -> Result<Vec<Header<'a>>, CheckpointError> {
    let mut seen = BTreeSet::new();
    sections
        .iter()
        .map(|section| {
            let wrong =
                |reason: &str| CheckpointError::Section { file: section.file.to_owned(), reason: reason.to_owned() };
            if Path::new(section.file).file_name() != Some(section.file.as_ref()) {
                return Err(wrong("its name must be a file name without folders"));
            }
            if !section.file.ends_with(".safetensors") {
                return Err(wrong("its name must end with .safetensors"));
            }
            if !seen.insert(section.file) {
                return Err(wrong("there are two sections of this name"));
            }
            header(section)
        })
        .collect()
}

fn header<'a>(section: &Section<'a>) -> Result<Header<'a>, CheckpointError> {
    let wrong = |reason: String| CheckpointError::Section { file: section.file.to_owned(), reason };
    // The order that safetensors' own writer has: widest type first, so that all stay aligned, then by name.
    let mut tensors = section.tensors.clone();
    tensors.sort_by(|a, b| Dtype::from(b.dtype).cmp(&Dtype::from(a.dtype)).then(a.name.cmp(b.name)));

    let mut names: Vec<_> = tensors.iter().map(|tensor| tensor.name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(wrong(format!("there are two tensors named {}", pair[0])));
    }
    if names.binary_search(&"__metadata__").is_ok() {
        return Err(wrong("the format reserves the name __metadata__; rename the tensor".into()));
    }
    let mut infos = Vec::with_capacity(tensors.len());
    let mut offset = 0;
    for tensor in &tensors {
        let dtype = Dtype::from(tensor.dtype);
        let expected = bytes_of(dtype, tensor.shape).ok_or_else(|| wrong(format!("{} is too large", tensor.name)))?;
        if expected != tensor.bytes.len() {
            return Err(CheckpointError::TensorSize {
                name: tensor.name.to_owned(),
                dtype: tensor.dtype,
                shape: tensor.shape.to_vec(),
                expected,
                found: tensor.bytes.len(),
            });
        }
        let data_offsets = (offset, offset + expected);
        offset += expected;
        infos.push((tensor.name.to_owned(), TensorInfo { dtype, shape: tensor.shape.to_vec(), data_offsets }));
    }
    let metadata = Metadata::new(None, infos).map_err(|error| wrong(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| wrong(error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' '); // The format's own padding: data starts 8-byte aligned.
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    Ok(Header { bytes, tensors })
}

/// Bytes of a dense tensor; nothing where they overflow.
pub(super) fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent))?;
    Some(elements.checked_mul(dtype.bitsize())?.div_ceil(8))
}

fn write_section(disk: &mut impl Disk, path: &Path, header: &Header<'_>) -> io::Result<FileEntry> {
    let mut file = disk.create(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut bytes = 0;
    let parts = std::iter::once(header.bytes.as_slice()).chain(header.tensors.iter().map(|tensor| tensor.bytes));
    for chunk in parts.flat_map(|part| part.chunks(WRITE_BYTES)) {
        hasher.update(chunk);
        disk.write(&mut file, chunk)?;
        bytes += chunk.len() as u64;
    }
    disk.sync(&file)?;
    Ok(FileEntry { bytes, blake3: hasher.finalize().to_hex().to_string() })
}

fn write_file(disk: &mut impl Disk, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut write = || {
        let mut file = disk.create(path)?;
        disk.write(&mut file, bytes)?;
        disk.sync(&file)
    };
    write().map_err(write_error(path))
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Write { path, source }
}
