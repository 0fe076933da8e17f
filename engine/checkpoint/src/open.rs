//! Opening a checkpoint. Every byte is verified, but the data is not kept in memory. Data that is read later is
//! compared with the verified hashes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::Metadata;
use serde_json::Value;

use crate::manifest::{FileEntry, Manifest};
use crate::save::bytes_of;
use crate::{CheckpointError, differences};

/// Number of bytes that share one hash. So reading a part of a tensor verifies only the chunks around that part, not
/// the whole file.
const CHUNK_BYTES: usize = 1 << 20;
/// The largest header, in bytes, that the safetensors library reads.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An opened checkpoint. All its files have the sizes and hashes with which they were saved.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    step: u64,
    metadata: Value,
    sections: Vec<SavedSection>,
}

/// One safetensors file of a checkpoint.
#[derive(Debug)]
pub struct SavedSection {
    file: String,
    path: PathBuf,
    header: Metadata,
    /// Offset of the tensors' data in the file.
    data_start: u64,
    /// Size of the file in bytes.
    bytes: u64,
    /// Hashes of the file's chunks, computed when the file was verified.
    chunks: Vec<blake3::Hash>,
}

/// A tensor as described by its section's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedTensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape; the elements are in row-major order.
    pub shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and verifies all files in it. Each file is read once.
    ///
    /// # Errors
    /// Returns an error if the folder is missing or incomplete, if a file is missing, truncated or changed, or if the
    /// format is newer than this program knows.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        let sections = manifest
            .files
            .iter()
            .map(|(file, entry)| SavedSection::open(path, file, entry))
            .collect::<Result<_, _>>()?;
        Ok(Self { path: path.to_owned(), step: manifest.step, metadata: manifest.metadata, sections })
    }

    /// The path of the checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The step after which the checkpoint was saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The metadata that was given to [`Checkpoint::save`].
    pub fn metadata(&self) -> &Value {
        &self.metadata
    }

    /// The sections, sorted by file name.
    pub fn sections(&self) -> &[SavedSection] {
        &self.sections
    }

    /// Returns the section with this file name.
    ///
    /// # Errors
    /// Returns an error with the names of all sections if no section has this name.
    pub fn section(&self, file: &str) -> Result<&SavedSection, CheckpointError> {
        self.sections.iter().find(|section| section.file == file).ok_or_else(|| CheckpointError::NoSection {
            path: self.path.clone(),
            file: file.to_owned(),
            present: self.sections.iter().map(|section| section.file.clone()).collect(),
        })
    }

    /// Checks that `key` of the metadata has the expected value, for example that the checkpoint belongs to the same
    /// model or the same data.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Other`] with every key whose value differs.
    pub fn expect(&self, key: &str, expected: &Value) -> Result<(), CheckpointError> {
        let differences = differences(self.metadata.get(key).unwrap_or(&Value::Null), expected);
        if differences.is_empty() {
            return Ok(());
        }
        // For the key "run", the differences already include those of the configuration.
        let config = self.metadata["run"].get("config").filter(|_| key != "run").cloned();
        Err(CheckpointError::Other { path: self.path.clone(), key: key.to_owned(), differences, config })
    }
}

impl SavedSection {
    /// The name of the file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a tensor's description, or `None` if there is no such tensor or candle lacks its type.
    pub fn find(&self, name: &str) -> Option<SavedTensor> {
        self.info(name).ok().map(|(tensor, _)| tensor)
    }

    /// Returns the descriptions of all tensors, in the order of the file.
    ///
    /// # Errors
    /// Returns an error if a tensor has a type that candle lacks.
    pub fn tensors(&self) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.header.offset_keys().into_iter().map(|name| self.info(&name).map(|(tensor, _)| tensor)).collect()
    }

    /// Fills `bytes` with a tensor's elements in little-endian order. They are compared with the hashes that were
    /// verified when the checkpoint was opened.
    ///
    /// # Errors
    /// Returns an error if there is no such tensor, if the slice does not have the tensor's size, or if reading fails.
    /// Returns [`CheckpointError::Damaged`] if the file has changed since it was opened. After an error, the contents
    /// of the slice must not be used.
    pub fn read_into(&self, name: &str, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let (SavedTensor { name, dtype, shape }, _) = self.info(name)?;
        let expected = self.bytes(&name);
        if expected != bytes.len() {
            return Err(CheckpointError::TensorSize { name, dtype, shape, expected, found: bytes.len() });
        }
        self.read_part_into(&name, 0, bytes)
    }

    /// Fills `bytes` with a range of a tensor's little-endian bytes, from byte `start` of the tensor on.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::read_into`], or if the range exceeds the tensor.
    pub fn read_part_into(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        self.reader(name)?.read_into(start, bytes)
    }

    /// Returns a reader of ranges of a tensor.
    ///
    /// # Errors
    /// Returns an error if there is no such tensor, or if the file cannot be opened.
    pub fn reader(&self, name: &str) -> Result<TensorReader<'_>, CheckpointError> {
        let (tensor, offset) = self.info(name)?;
        let file = File::open(&self.path).map_err(|error| read_error(&self.path, error))?;
        Ok(TensorReader {
            section: self,
            tensor,
            start: self.data_start + offset,
            file,
            chunk: Vec::new(),
            index: None,
        })
    }

    /// Returns the size of a tensor in bytes, or 0 if there is no such tensor.
    fn bytes(&self, name: &str) -> usize {
        self.header.info(name).and_then(|info| bytes_of(info.dtype, &info.shape)).unwrap_or(0)
    }

    /// Reads a tensor into a new candle tensor on the CPU.
    ///
    /// # Errors
    /// Returns an error if there is no such tensor, if candle cannot represent it, or if reading fails.
    pub fn tensor(&self, name: &str) -> Result<Tensor, CheckpointError> {
        let (tensor, _) = self.info(name)?;
        let mut bytes = vec![0; self.bytes(name)];
        self.read_into(name, &mut bytes)?;
        Tensor::from_raw_buffer(&bytes, tensor.dtype, &tensor.shape, &Device::Cpu)
            .map_err(|source| CheckpointError::Candle { name: name.to_owned(), source: Box::new(source) })
    }

    /// Returns a tensor's description, and its offset from the start of the file's tensor data.
    fn info(&self, name: &str) -> Result<(SavedTensor, u64), CheckpointError> {
        let info = self
            .header
            .info(name)
            .ok_or_else(|| CheckpointError::NoTensor { path: self.path.clone(), name: name.to_owned() })?;
        let dtype = DType::try_from(info.dtype)
            .map_err(|source| CheckpointError::Candle { name: name.to_owned(), source: Box::new(source) })?;
        Ok((SavedTensor { name: name.to_owned(), dtype, shape: info.shape.clone() }, info.data_offsets.0 as u64))
    }

    /// Verifies a file against its manifest entry and reads its header.
    fn open(folder: &Path, file: &str, entry: &FileEntry) -> Result<Self, CheckpointError> {
        let path = folder.join(file);
        let read = |error| read_error(&path, error);
        let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };

        let mut reader = File::open(&path).map_err(read)?;
        let found = reader.metadata().map_err(read)?.len();
        if found != entry.bytes {
            return Err(CheckpointError::Truncated { path, expected: entry.bytes, found });
        }
        // Each chunk updates the hash of the file, gets a hash of its own, and may contain a part of the header.
        let (mut hasher, mut chunks) = (blake3::Hasher::new(), Vec::new());
        let (mut buffer, mut head, mut head_bytes) = (vec![0; CHUNK_BYTES], Vec::new(), 0);
        let mut at = 0;
        while at < found {
            let chunk = &mut buffer[..(found - at).min(CHUNK_BYTES as u64) as usize];
            reader.read_exact(chunk).map_err(read)?;
            hasher.update(chunk);
            chunks.push(blake3::hash(chunk));
            if let (0, Some(length)) = (at, chunk.first_chunk()) {
                head_bytes = u64::from_le_bytes(*length).saturating_add(8);
            }
            if head_bytes <= MAX_HEADER_BYTES {
                head.extend_from_slice(&chunk[..head_bytes.saturating_sub(at).min(chunk.len() as u64) as usize]);
            }
            at += chunk.len() as u64;
        }
        if hasher.finalize().to_hex().as_str() != entry.blake3 {
            return Err(damaged("its hash is not the one it was written with".into()));
        }
        if head.len() < 8 || (head.len() as u64) < head_bytes {
            return Err(damaged("its header is longer than the file, or than the limit".into()));
        }
        let header: Metadata = serde_json::from_slice(&head[8..]).map_err(|error| damaged(error.to_string()))?;
        let data_start = head_bytes;
        if data_start + header.data_len() as u64 != found {
            return Err(damaged("its header does not describe the whole file".into()));
        }
        Ok(Self { file: file.to_owned(), path, header, data_start, bytes: found, chunks })
    }
}

/// Reads ranges of a tensor. It keeps the last chunk of the file that it has read in part, of at most 1 MiB. So if the
/// ranges ascend, each chunk is read and verified once, however small the ranges are.
#[derive(Debug)]
pub struct TensorReader<'a> {
    section: &'a SavedSection,
    tensor: SavedTensor,
    /// Offset of the tensor in the file.
    start: u64,
    file: File,
    /// The kept chunk.
    chunk: Vec<u8>,
    /// Index of the kept chunk.
    index: Option<u64>,
}

impl TensorReader<'_> {
    /// Fills `bytes` with a range of the tensor's little-endian bytes, from byte `start` of the tensor on. Each chunk is
    /// hashed in the memory into which it was read, and is not read again. So the caller gets exactly the bytes that
    /// were verified.
    ///
    /// # Errors
    /// Returns an error if the range exceeds the tensor, or if reading fails. Returns [`CheckpointError::Damaged`] if the
    /// file has changed since it was opened. After an error, the contents of the slice must not be used.
    pub fn read_into(&mut self, start: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let expected = self.section.bytes(&self.tensor.name);
        let end = start.saturating_add(bytes.len());
        if end > expected {
            let SavedTensor { name, dtype, shape } = self.tensor.clone();
            return Err(CheckpointError::TensorSize { name, dtype, shape, expected, found: end });
        }
        let (mut at, mut rest) = (self.start + start as u64, bytes);
        while !rest.is_empty() {
            let index = at / CHUNK_BYTES as u64;
            let chunk_start = index * CHUNK_BYTES as u64;
            let chunk_bytes = (self.section.bytes - chunk_start).min(CHUNK_BYTES as u64) as usize;
            let skipped = (at - chunk_start) as usize;
            let wanted = rest.len().min(chunk_bytes - skipped);
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(wanted);
            if self.index != Some(index) && part.len() == chunk_bytes {
                // All bytes of the chunk are requested, so they are read into `bytes` directly.
                read_chunk(self.section, &mut self.file, index, part)?;
            } else {
                if self.index != Some(index) {
                    self.index = None;
                    if self.chunk.len() != chunk_bytes {
                        // New memory is zero already.
                        self.chunk = vec![0; chunk_bytes];
                    }
                    read_chunk(self.section, &mut self.file, index, &mut self.chunk)?;
                    self.index = Some(index);
                }
                part.copy_from_slice(&self.chunk[skipped..skipped + part.len()]);
            }
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }
}

/// Reads a chunk of a section's file, and compares it with its hash.
fn read_chunk(section: &SavedSection, file: &mut File, index: u64, chunk: &mut [u8]) -> Result<(), CheckpointError> {
    let start = SeekFrom::Start(index * CHUNK_BYTES as u64);
    file.seek(start).and_then(|_| file.read_exact(chunk)).map_err(|error| read_error(&section.path, error))?;
    if blake3::hash(chunk) != section.chunks[index as usize] {
        let reason = "it has changed since it was opened".into();
        return Err(CheckpointError::Damaged { path: section.path.clone(), reason });
    }
    Ok(())
}

fn read_error(path: &Path, source: io::Error) -> CheckpointError {
    match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::MissingFile { path: path.to_owned() },
        io::ErrorKind::UnexpectedEof => {
            CheckpointError::Damaged { path: path.to_owned(), reason: "it was cut off while it was read".into() }
        }
        _ => CheckpointError::Read { path: path.to_owned(), source },
    }
}
