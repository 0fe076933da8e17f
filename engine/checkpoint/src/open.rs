//! Opening a checkpoint: every byte is verified, none is kept, and what is read later is compared with what was verified.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::Metadata;
use serde_json::Value;

use crate::manifest::{FileEntry, Manifest};
use crate::save::bytes_of;
use crate::{CheckpointError, differences};

/// Bytes that are read and hashed together, so that a part of a tensor is verified without reading all of its file.
const CHUNK_BYTES: usize = 1 << 20;
/// The longest header that the safetensors library reads.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// A sound checkpoint: all its files have the sizes and hashes that they were written with.
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
    /// Where the data begins in the file.
    data_start: u64,
    /// The file's size.
    bytes: u64,
    /// Hashes of its chunks, made while the file's own was.
    chunks: Vec<blake3::Hash>,
}

/// What a section's header says of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedTensor {
    /// Its name.
    pub name: String,
    /// Candle's type.
    pub dtype: DType,
    /// Row-major.
    pub shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and verifies all of it, reading each file once.
    ///
    /// # Errors
    /// A folder that is missing or incomplete; a file that is missing, cut off or changed; a newer format.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        let sections = manifest
            .files
            .iter()
            .map(|(file, entry)| SavedSection::open(path, file, entry))
            .collect::<Result<_, _>>()?;
        Ok(Self { path: path.to_owned(), step: manifest.step, metadata: manifest.metadata, sections })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The step after which it was saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What the caller of [`Checkpoint::save`] gave.
    pub fn metadata(&self) -> &Value {
        &self.metadata
    }

    /// Its files, sorted by name.
    pub fn sections(&self) -> &[SavedSection] {
        &self.sections
    }

    /// One of its files.
    ///
    /// # Errors
    /// A name that is not there; the error lists those that are.
    pub fn section(&self, file: &str) -> Result<&SavedSection, CheckpointError> {
        self.sections.iter().find(|section| section.file == file).ok_or_else(|| CheckpointError::NoSection {
            path: self.path.clone(),
            file: file.to_owned(),
            present: self.sections.iter().map(|section| section.file.clone()).collect(),
        })
    }

    /// Checks that the metadata's `key` has this value: that the checkpoint is of the same model, of the same data.
    ///
    /// # Errors
    /// [`CheckpointError::Other`] with every key that differs.
    pub fn expect(&self, key: &str, expected: &Value) -> Result<(), CheckpointError> {
        let differences = differences(self.metadata.get(key).unwrap_or(&Value::Null), expected);
        if differences.is_empty() {
            return Ok(());
        }
        // The run's own differences name what of the configuration differs.
        let config = self.metadata["run"].get("config").filter(|_| key != "run").cloned();
        Err(CheckpointError::Other { path: self.path.clone(), key: key.to_owned(), differences, config })
    }
}

impl SavedSection {
    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A tensor's description, if it is there.
    pub fn find(&self, name: &str) -> Option<SavedTensor> {
        self.info(name).ok().map(|(tensor, _)| tensor)
    }

    /// Its tensors in the order of the file.
    ///
    /// # Errors
    /// A type that candle doesn't have.
    pub fn tensors(&self) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.header.offset_keys().into_iter().map(|name| self.info(&name).map(|(tensor, _)| tensor)).collect()
    }

    /// Reads a tensor's little-endian elements. They are those that were verified when the checkpoint was opened.
    ///
    /// # Errors
    /// A tensor that is not there, a slice of another size, a read that fails; [`CheckpointError::Damaged`] when the file has
    /// changed since, and then the slice is not to be used.
    pub fn read_into(&self, name: &str, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let (SavedTensor { name, dtype, shape }, _) = self.info(name)?;
        let expected = self.bytes(&name);
        if expected != bytes.len() {
            return Err(CheckpointError::TensorSize { name, dtype, shape, expected, found: bytes.len() });
        }
        self.read_part_into(&name, 0, bytes)
    }

    /// Reads a range of a tensor's little-endian bytes, from byte `start` on.
    ///
    /// # Errors
    /// As [`Self::read_into`], or a range that reaches beyond the tensor's end.
    pub fn read_part_into(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let (SavedTensor { name, dtype, shape }, offset) = self.info(name)?;
        let expected = self.bytes(&name);
        let end = start.saturating_add(bytes.len());
        if end > expected {
            return Err(CheckpointError::TensorSize { name, dtype, shape, expected, found: end });
        }
        self.read_verified(self.data_start + offset + start as u64, bytes)
    }

    /// Fills `bytes` from position `start` of the file on. Each chunk is hashed where it was read to, and nothing of it is read
    /// again: what is compared is what the caller gets.
    fn read_verified(&self, start: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let error = |error| read_error(&self.path, error);
        let mut file = File::open(&self.path).map_err(error)?;
        let (mut at, mut rest, mut edge) = (start, bytes, Vec::new());
        while !rest.is_empty() {
            // The part of a chunk that is wanted next.
            let index = at / CHUNK_BYTES as u64;
            let chunk_start = index * CHUNK_BYTES as u64;
            let chunk_bytes = (self.bytes - chunk_start).min(CHUNK_BYTES as u64) as usize;
            let skipped = (at - chunk_start) as usize;
            let wanted = rest.len().min(chunk_bytes - skipped);
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(wanted);
            let is_whole = part.len() == chunk_bytes;
            // All of the chunk, in place if it is wanted whole.
            let chunk = if is_whole {
                &mut *part
            } else {
                edge.resize(chunk_bytes, 0);
                &mut edge[..]
            };
            file.seek(SeekFrom::Start(chunk_start)).and_then(|_| file.read_exact(chunk)).map_err(error)?;
            if blake3::hash(chunk) != self.chunks[index as usize] {
                let reason = "it has changed since it was opened".into();
                return Err(CheckpointError::Damaged { path: self.path.clone(), reason });
            }
            if !is_whole {
                part.copy_from_slice(&edge[skipped..skipped + part.len()]);
            }
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    /// Size of a tensor; 0 where there is none.
    fn bytes(&self, name: &str) -> usize {
        self.header.info(name).and_then(|info| bytes_of(info.dtype, &info.shape)).unwrap_or(0)
    }

    /// Reads a tensor as candle's, on the CPU.
    ///
    /// # Errors
    /// A tensor that is not there, or of a type that candle cannot make; a read that fails.
    pub fn tensor(&self, name: &str) -> Result<Tensor, CheckpointError> {
        let (tensor, _) = self.info(name)?;
        let mut bytes = vec![0; self.bytes(name)];
        self.read_into(name, &mut bytes)?;
        Tensor::from_raw_buffer(&bytes, tensor.dtype, &tensor.shape, &Device::Cpu)
            .map_err(|source| CheckpointError::Candle { name: name.to_owned(), source: Box::new(source) })
    }

    /// A tensor's description, and its offset from the start of the data.
    fn info(&self, name: &str) -> Result<(SavedTensor, u64), CheckpointError> {
        let info = self
            .header
            .info(name)
            .ok_or_else(|| CheckpointError::NoTensor { path: self.path.clone(), name: name.to_owned() })?;
        let dtype = DType::try_from(info.dtype)
            .map_err(|source| CheckpointError::Candle { name: name.to_owned(), source: Box::new(source) })?;
        Ok((SavedTensor { name: name.to_owned(), dtype, shape: info.shape.clone() }, info.data_offsets.0 as u64))
    }

    /// Verifies a file against its entry and reads its header.
    fn open(folder: &Path, file: &str, entry: &FileEntry) -> Result<Self, CheckpointError> {
        let path = folder.join(file);
        let read = |error| read_error(&path, error);
        let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };

        let mut reader = File::open(&path).map_err(read)?;
        let found = reader.metadata().map_err(read)?.len();
        if found != entry.bytes {
            return Err(CheckpointError::Truncated { path, expected: entry.bytes, found });
        }
        // Chunk by chunk: the file's hash, those of the chunks, and the header.
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
            if head_bytes <= MOST_HEADER_BYTES {
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

fn read_error(path: &Path, source: io::Error) -> CheckpointError {
    match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::MissingFile { path: path.to_owned() },
        io::ErrorKind::UnexpectedEof => {
            CheckpointError::Damaged { path: path.to_owned(), reason: "it was cut off while it was read".into() }
        }
        _ => CheckpointError::Read { path: path.to_owned(), source },
    }
}
