//! Saves checkpoints: files, hashes, manifest, and a final rename that makes the checkpoint valid.

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

/// The most bytes per write. The size is so small that hashed bytes are still in the processor's cache when they are
/// written.
const WRITE_BYTES: usize = 1 << 20;

/// A tensor to save, whose bytes are borrowed.
#[derive(Debug, Clone, Copy)]
pub struct TensorBytes<'a> {
    /// Name of the tensor, unique in its section.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Shape; the elements are in row-major order.
    pub shape: &'a [usize],
    /// The elements in little-endian order.
    pub bytes: &'a [u8],
}

/// The tensors of one file.
#[derive(Debug, Clone)]
pub struct Section<'a> {
    /// Name of the file, e.g. `model.safetensors`.
    pub file: &'a str,
    /// Tensors of the file.
    pub tensors: Vec<TensorBytes<'a>>,
}

impl Checkpoint {
    /// Saves a checkpoint as `dir/step-…` and returns its path. Every byte is on the disk when this returns. An
    /// existing checkpoint of the same step is replaced.
    ///
    /// Tensors are written directly from the given memory. The only additional memory is for the headers of the files.
    ///
    /// # Errors
    /// Returns an error if the bytes of a tensor do not fit its shape, if two tensors or sections have the same name,
    /// or if a write fails. In that case, the files written so far are removed, and earlier checkpoints are not
    /// changed.
    pub fn save(dir: &Path, step: u64, sections: &[Section<'_>], metadata: Value) -> Result<PathBuf, CheckpointError> {
        save_on(&mut RealDisk, dir, step, sections, metadata)
    }
}

/// A checkpoint that several writers save together, each with files of its own. One writer begins it, and all writers
/// write. Then the first writer commits it with the [`WrittenFiles`] of all writers. Until then it is not a valid
/// checkpoint.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    step: u64,
}

/// Sizes and hashes of the files that a writer has written.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WrittenFiles(BTreeMap<String, FileEntry>);

impl WrittenFiles {
    /// Adds the files of another writer.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }
}

impl Draft {
    /// Creates the empty folder for the files of all writers.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created.
    pub fn begin(dir: &Path, step: u64) -> Result<Self, CheckpointError> {
        create_partial(&mut RealDisk, dir, &path_for(dir, step, State::Partial))?;
        Ok(Self::join(dir, step))
    }

    /// Joins a checkpoint that another writer has begun.
    pub fn join(dir: &Path, step: u64) -> Self {
        Self { dir: dir.to_owned(), step }
    }

    /// Writes this writer's files. Every byte is on the disk when this returns.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Checkpoint::save`].
    pub fn write(&self, sections: &[Section<'_>]) -> Result<WrittenFiles, CheckpointError> {
        let headers = headers(sections)?;
        write_on(&mut RealDisk, &path_for(&self.dir, self.step, State::Partial), sections, &headers)
    }

    /// Makes the draft a valid checkpoint and returns its path. All writers must have written their files.
    ///
    /// # Errors
    /// Returns an error if the manifest cannot be written, or if the folder cannot be renamed.
    pub fn commit(&self, files: WrittenFiles, metadata: Value) -> Result<PathBuf, CheckpointError> {
        commit_on(&mut RealDisk, &self.dir, self.step, files, metadata)
    }

    /// Removes the draft's files.
    pub fn discard(&self) {
        // An error is ignored, because `latest` skips folders that could not be removed.
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
        // The first error is returned. An error of this removal is ignored, because `latest` skips such a folder.
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

/// Creates an empty folder with the name of an incomplete checkpoint.
fn create_partial(disk: &mut impl Disk, dir: &Path, partial: &Path) -> Result<(), CheckpointError> {
    if exists(partial) {
        disk.remove_folder(partial).map_err(write_error(partial))?;
    }
    warn_of_numbered_name(partial);
    let is_new = !exists(dir);
    disk.create_folder(partial).map_err(write_error(partial))?;
    match dir.parent() {
        Some(parent) if is_new => {
            let parent = if parent == Path::new("") { Path::new(".") } else { parent };
            disk.sync_folder(parent).map_err(write_error(parent))
        }
        _ => Ok(()),
    }
}

/// Writes the hash of the manifest. Then writes the manifest itself under another name, and finally renames it.
fn write_manifest(disk: &mut impl Disk, partial: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    let json = serde_json::to_vec_pretty(manifest).expect("strings, numbers and JSON make valid JSON");
    write_file(disk, &partial.join(MANIFEST_HASH), hash_line(&json).as_bytes())?;
    let (path, temporary) = (partial.join(MANIFEST), partial.join("manifest.json.tmp"));
    write_file(disk, &temporary, &json)?;
    disk.rename(&temporary, &path).map_err(write_error(&path))?;
    disk.sync_folder(partial).map_err(write_error(partial))
}

/// Renames the folder to its final name. An older checkpoint of the same step is first renamed to a name that `latest`
/// still finds. If the final name belongs to a file or to a checkpoint of another step, the new folder gets the next
/// free name.
fn rename_into_place(disk: &mut impl Disk, dir: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let [partial, path, replaced] =
        [State::Partial, State::Complete, State::Replaced].map(|state| path_for(dir, step, state));
    warn_of_numbered_name(&path);
    let replacing = exists(&path);
    if replacing {
        if exists(&replaced) {
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
        // An error is ignored, because the new checkpoint takes precedence over the old one.
        let _ = disk.remove_folder(&replaced);
    }
    Ok(path)
}

/// Logs a warning if a checkpoint gets a numbered name because its usual name is taken.
fn warn_of_numbered_name(path: &Path) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.matches('-').count() > 1 {
        let path = path.display();
        tracing::warn!(%path, "a checkpoint gets another name: what has its own is no checkpoint of this step");
    }
}

/// True if the path exists. A path that cannot be examined counts as existing, so that the next operation reports the
/// error.
fn exists(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// The safetensors header of a file, and the file's tensors in the order of their data.
struct Header<'a> {
    bytes: Vec<u8>,
    tensors: Vec<TensorBytes<'a>>,
}

/// Checks all sections and creates their safetensors headers.
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
    // Tensors are in the order of safetensors' own writer. They are sorted by type, with the widest type first, so that
    // all tensors are aligned. Tensors of one type are sorted by name.
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
    json.resize(json.len().next_multiple_of(8), b' '); // The format pads with blanks, so that the data is aligned to 8 bytes.
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    Ok(Header { bytes, tensors })
}

/// Returns the size of a tensor in bytes, or `None` if it overflows.
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
