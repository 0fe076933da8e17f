//! A stream of token ids, in a file or in memory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::DataError;

/// Bytes per token id in a file, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// Vocabularies of up to 65,536 tokens.
    U16,
    /// Larger ones.
    U32,
}

/// Token ids that can be read from any position.
///
/// A file is read where it lies (positioned reads through the page cache), so that its size doesn't matter and nothing
/// is allocated.
#[derive(Debug)]
pub struct Tokens {
    storage: Storage,
    count: u64,
}

#[derive(Debug)]
enum Storage {
    Memory(Vec<u32>),
    File { file: File, path: PathBuf, width: TokenWidth },
}

/// What a pass over a whole stream found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scan {
    /// blake3 of the bytes, in hexadecimal.
    pub hash: String,
    /// The first token that is not below the vocabulary, with its position.
    pub outside: Option<(u64, u32)>,
}

impl Tokens {
    /// Tokens that are already in memory.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        Self { count: ids.len() as u64, storage: Storage::Memory(ids) }
    }

    /// Opens a file of little-endian ids.
    ///
    /// # Errors
    /// A missing or unreadable file; one that doesn't hold a whole number of ids.
    pub fn open(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        let read = |error| DataError::read(path, error);
        let file = File::open(path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        if bytes % width.bytes() != 0 {
            return Err(DataError::CutOff { path: path.to_owned(), bytes, width: width.bytes() });
        }
        Ok(Self { storage: Storage::File { file, path: path.to_owned(), width }, count: bytes / width.bytes() })
    }

    /// How many tokens there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Copies the tokens from `start` on into `out`. Allocates nothing.
    ///
    /// # Errors
    /// A read that fails, or goes past the end.
    pub fn read(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        match &self.storage {
            Storage::Memory(ids) => {
                let slice = usize::try_from(start).ok().and_then(|start| ids.get(start..)?.get(..out.len()));
                out.copy_from_slice(slice.ok_or_else(|| DataError::Read {
                    path: PathBuf::from("tokens in memory"),
                    source: io::ErrorKind::UnexpectedEof.into(),
                })?);
                Ok(())
            }
            Storage::File { file, path, width } => {
                read_ids(file, *width, start, out).map_err(|error| DataError::read(path, error))
            }
        }
    }

    /// Reads everything once: its hash, and whether each token is below `vocabulary`.
    pub(super) fn scan(&self, vocabulary: usize) -> Result<Scan, DataError> {
        const CHUNK: u64 = 1 << 14;
        let mut hasher = blake3::Hasher::new();
        let mut outside = None;
        let mut ids = vec![0; CHUNK as usize];
        let mut bytes = Vec::new();
        let mut position = 0;
        while position < self.count {
            let ids = &mut ids[..CHUNK.min(self.count - position) as usize];
            self.read(position, ids)?;
            bytes.clear();
            self.width().append(ids, &mut bytes);
            hasher.update(&bytes);
            if outside.is_none() {
                let first = ids.iter().position(|&id| id as usize >= vocabulary);
                outside = first.map(|index| (position + index as u64, ids[index]));
            }
            position += ids.len() as u64;
        }
        Ok(Scan { hash: hasher.finalize().to_hex().to_string(), outside })
    }

    fn width(&self) -> TokenWidth {
        match self.storage {
            Storage::Memory(_) => TokenWidth::U32,
            Storage::File { width, .. } => width,
        }
    }
}

impl TokenWidth {
    /// The narrowest that holds every token of a vocabulary.
    pub fn of_vocabulary(size: usize) -> Self {
        if size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Bytes per token.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Appends ids to a buffer of file bytes.
    pub(super) fn append(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::U16 => bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            Self::U32 => bytes.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
        }
    }
}

fn read_ids(file: &File, width: TokenWidth, start: u64, out: &mut [u32]) -> io::Result<()> {
    let mut buffer = [0; 8192];
    let mut position = start * width.bytes();
    let ids_per_read = buffer.len() / width.bytes() as usize;
    for ids in out.chunks_mut(ids_per_read) {
        let bytes = &mut buffer[..ids.len() * width.bytes() as usize];
        read_exact_at(file, bytes, position)?;
        position += bytes.len() as u64;
        match width {
            TokenWidth::U16 => {
                for (id, bytes) in ids.iter_mut().zip(bytes.as_chunks().0) {
                    *id = u32::from(u16::from_le_bytes(*bytes));
                }
            }
            TokenWidth::U32 => {
                for (id, bytes) in ids.iter_mut().zip(bytes.as_chunks().0) {
                    *id = u32::from_le_bytes(*bytes);
                }
            }
        }
    }
    Ok(())
}

#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], position: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, position)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut bytes: &mut [u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, position)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                bytes = &mut bytes[read..];
                position += read as u64;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_testing::prelude::*;

    generated! {
        /// A file read in pieces gives what the ids in memory give.
        #[test]
        fn file_and_memory_agree(
            ids in prop::collection::vec(0u32..1 << 16, 1..9000), wide: bool, start in 0usize..9000, count in 0usize..9000,
        ) {
            let width = if wide { TokenWidth::U32 } else { TokenWidth::U16 };
            let mut bytes = Vec::new();
            width.append(&ids, &mut bytes);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();

            let from_file = Tokens::open(file.path(), width).unwrap();
            prop_assert_eq!(from_file.count(), ids.len() as u64);
            prop_assert_eq!(from_file.scan(usize::MAX).unwrap().hash, blake3::hash(&bytes).to_hex().to_string());
            let memory = Tokens::from_ids(ids.clone());
            let (mut a, mut b) = (vec![0; count], vec![0; count]);
            let inside = start + count <= ids.len();
            prop_assert_eq!(from_file.read(start as u64, &mut a).is_ok(), inside || count == 0);
            prop_assert_eq!(memory.read(start as u64, &mut b).is_ok(), inside);
            if inside {
                prop_assert_eq!(&a, &ids[start..start + count]);
                prop_assert_eq!(&a, &b);
            }
        }
    }

    #[test]
    fn the_first_token_outside_is_named() {
        let tokens = Tokens::from_ids([vec![3; 20_000], vec![7, 9]].concat());
        assert_eq!(tokens.scan(10).unwrap().outside, None);
        assert_eq!(tokens.scan(7).unwrap().outside, Some((20_000, 7)));
    }

    #[test]
    fn half_a_token_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1, 0, 2]).unwrap();
        let error = Tokens::open(file.path(), TokenWidth::U16).unwrap_err();
        assert!(matches!(error, DataError::CutOff { bytes: 3, width: 2, .. }), "{error}");
    }
}
