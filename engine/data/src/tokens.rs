//! A stream of token ids, in files or in memory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::compressed::{open_file, read_exact_at};

/// Bytes per token id in a file, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// Two bytes, for vocabularies of up to 65,536 tokens.
    U16,
    /// Four bytes.
    U32,
    /// Eight bytes, the default width of NumPy's integers.
    U64,
}

/// Bytes of the header of llm.c's files. It has 256 integers of 32 bits: magic number, version, number of ids, and
/// zeros.
const HEADER_BYTES: u64 = 1024;

/// Magic number, version and width of llm.c's files, for GPT-2 and for Llama 3 (`HEADERS_INFO` in llm.c's
/// dev/data/data_common.py).
const HEADERS: [(u32, u32, TokenWidth); 2] = [(20_240_520, 1, TokenWidth::U16), (20_240_801, 7, TokenWidth::U32)];

/// Token ids that can be read from any position.
///
/// Files stay on disk and are read at the requested position, through the page cache. So files of any size can be used,
/// and reads allocate nothing.
#[derive(Debug)]
pub struct Tokens {
    storage: Storage,
    count: u64,
}

#[derive(Debug)]
enum Storage {
    Memory(Vec<u32>),
    Shards(Vec<Shard>),
}

/// A file of ids.
#[derive(Debug)]
struct Shard {
    file: File,
    path: PathBuf,
    width: TokenWidth,
    /// Bytes of the header before the ids; 0 if there is none.
    header: u64,
    /// The position in the stream of the file's first id.
    first: u64,
}

/// The result of a pass over a whole stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scan {
    /// The blake3 hash of the bytes, as hexadecimal digits.
    pub hash: String,
    /// Position and value of the first token outside the vocabulary, if there is one.
    pub outside: Option<(u64, u32)>,
    /// The largest token.
    pub largest: u32,
}

impl Tokens {
    /// Creates a stream from tokens in memory.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        Self { count: ids.len() as u64, storage: Storage::Memory(ids) }
    }

    /// Opens a file of little-endian ids. The file may have llm.c's header. Without a header, as in nanoGPT's files,
    /// ids have the given width.
    ///
    /// # Errors
    /// Returns an error if the file is missing or unreadable, if its size is not a whole number of ids, or if its
    /// header states another number of ids.
    pub fn open(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        Self::open_all(&[path], width)
    }

    /// Opens files of ids as one stream. If no width is given, ids are read with the narrowest width for the
    /// vocabulary, and their values are checked to have that width.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::open`], or [`DataError::Width`] if no width is given and the ids
    /// appear to be wider than the vocabulary requires.
    pub fn open_for(
        paths: &[impl AsRef<Path>],
        width: Option<TokenWidth>,
        vocabulary: usize,
    ) -> Result<Self, DataError> {
        let read_as = width.unwrap_or(TokenWidth::of_vocabulary(vocabulary));
        let tokens = Self::open_all(paths, read_as)?;
        match tokens.looks_like()?.filter(|_| width.is_none()) {
            Some(wider) => {
                let path = paths.first().map_or(Path::new(MEMORY), AsRef::as_ref).to_owned();
                Err(DataError::Width { path, read_as: read_as.bytes(), bytes: wider.bytes() })
            }
            None => Ok(tokens),
        }
    }

    /// Like [`Self::open`], for several files as one stream.
    pub(super) fn open_all(paths: &[impl AsRef<Path>], width: TokenWidth) -> Result<Self, DataError> {
        let (mut shards, mut count) = (Vec::new(), 0);
        for path in paths {
            let (shard, ids) = Shard::open(path.as_ref(), width, count, true)?;
            shards.push(shard);
            count += ids;
        }
        Ok(Self { storage: Storage::Shards(shards), count })
    }

    /// Returns the width that the ids of files without a header appear to have, or `None` if they appear to have the
    /// width with which they are read. If wider ids are read in halves, every second value is the upper half of an id
    /// and nearly zero.
    fn looks_like(&self) -> Result<Option<TokenWidth>, DataError> {
        /// The most values that are examined in each file, and the fewest from which a width is concluded.
        const LOOKED_AT: (usize, u64) = (1 << 16, 16);
        /// Upper halves are below this, since vocabularies have fewer than 2²⁰ tokens.
        const HALF_ABOVE: u32 = 16;
        let Storage::Shards(shards) = &self.storage else { return Ok(None) };
        for (index, shard) in shards.iter().enumerate().filter(|(_, shard)| shard.header == 0) {
            let end = shards.get(index + 1).map_or(self.count, |next| next.first);
            let count = (end - shard.first).min(LOOKED_AT.0 as u64);
            let wider = match shard.width {
                TokenWidth::U16 => TokenWidth::U32,
                TokenWidth::U32 => TokenWidth::U64,
                TokenWidth::U64 => continue,
            };
            let mut ids = vec![0; count as usize];
            self.read(shard.first, &mut ids)?;
            let are_halves = |stride: usize| {
                ids.chunks_exact(stride).all(|id| id[stride / 2..].iter().all(|&half| half < HALF_ABOVE))
                    && ids.chunks_exact(stride).any(|id| id[0] >= HALF_ABOVE)
            };
            if count < LOOKED_AT.1 || !are_halves(2) {
                continue;
            }
            let is_quarter = shard.width == TokenWidth::U16 && are_halves(4) && count % 4 == 0;
            return Ok(Some(if is_quarter { TokenWidth::U64 } else { wider }));
        }
        Ok(None)
    }

    /// Opens a file that has only ids, without looking for a header.
    pub(super) fn open_bare(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        let (shard, count) = Shard::open(path, width, 0, false)?;
        Ok(Self { storage: Storage::Shards(vec![shard]), count })
    }

    /// Returns the file that holds a position of the stream, and the position within that file.
    pub(super) fn place(&self, position: u64) -> (&Path, u64) {
        match &self.storage {
            Storage::Memory(_) => (Path::new(MEMORY), position),
            Storage::Shards(shards) => {
                let shard = &shards[shard_of(shards, position)];
                (&shard.path, position - shard.first)
            }
        }
    }

    /// Number of tokens.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Fills `out` with the tokens from position `start` on. Allocates nothing.
    ///
    /// # Errors
    /// Returns an error if a read fails or goes past the end.
    pub fn read(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        match &self.storage {
            Storage::Memory(ids) => {
                let slice = usize::try_from(start).ok().and_then(|start| ids.get(start..)?.get(..out.len()));
                out.copy_from_slice(slice.ok_or_else(|| DataError::Read {
                    path: PathBuf::from(MEMORY),
                    source: io::ErrorKind::UnexpectedEof.into(),
                })?);
                Ok(())
            }
            Storage::Shards(shards) => self.read_shards(shards, start, out),
        }
    }

    fn read_shards(&self, shards: &[Shard], mut start: u64, mut out: &mut [u32]) -> Result<(), DataError> {
        let mut index = shard_of(shards, start);
        while !out.is_empty() {
            let shard = &shards[index];
            // A read past the end goes to the last shard, whose file returns the error.
            let end = shards.get(index + 1).map_or(u64::MAX, |next| next.first);
            let here = usize::try_from(end - start).map_or(out.len(), |here| here.min(out.len()));
            let (ids, rest) = out.split_at_mut(here);
            let position = shard.header + (start - shard.first) * shard.width.bytes();
            read_ids(&shard.file, shard.width, position, ids).map_err(|error| DataError::read(&shard.path, error))?;
            (start, out, index) = (start + here as u64, rest, index + 1);
        }
        Ok(())
    }

    /// Reads all tokens once. Returns their hash, the largest token, and the first token outside the vocabulary.
    pub(super) fn scan(&self, vocabulary: usize) -> Result<Scan, DataError> {
        const CHUNK: u64 = 1 << 14;
        let mut hasher = blake3::Hasher::new();
        let (mut outside, mut largest) = (None, 0);
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
            largest = ids.iter().fold(largest, |largest, &id| largest.max(id));
            position += ids.len() as u64;
        }
        Ok(Scan { hash: hasher.finalize().to_hex().to_string(), outside, largest })
    }

    fn width(&self) -> TokenWidth {
        match self.storage {
            Storage::Memory(_) => TokenWidth::U32,
            Storage::Shards(ref shards) if shards.iter().all(|shard| shard.width == TokenWidth::U16) => TokenWidth::U16,
            // Ids of 64 bits are hashed as the 32-bit values that reading returns.
            Storage::Shards(_) => TokenWidth::U32,
        }
    }
}

/// The name that messages use for tokens in memory.
const MEMORY: &str = "tokens in memory";

/// The shard that contains a position, or the last one.
fn shard_of(shards: &[Shard], position: u64) -> usize {
    shards.partition_point(|shard| shard.first <= position) - 1
}

impl Shard {
    /// Opens a file whose first id is at position `first` of the stream. Also returns its number of ids. If the file
    /// has a header, the header's width overrides the given one.
    fn open(path: &Path, width: TokenWidth, first: u64, may_have_header: bool) -> Result<(Self, u64), DataError> {
        let read = |error| DataError::read(path, error);
        let file = open_file(path)?;
        let bytes = file.metadata().map_err(read)?.len();
        let mut start = [0; 12];
        if may_have_header && bytes >= HEADER_BYTES {
            read_exact_at(&file, &mut start, 0).map_err(read)?;
        }
        let [magic, version, ids] = [0, 4, 8].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| start[at + byte])));
        let Some(&(_, known, of_header)) = HEADERS.iter().find(|known| known.0 == magic) else {
            if bytes % width.bytes() != 0 {
                return Err(DataError::CutOff { path: path.to_owned(), bytes, width: width.bytes() });
            }
            let path = path.to_owned();
            return Ok((Self { file, path, width, header: 0, first }, bytes / width.bytes()));
        };
        let wanted = HEADER_BYTES + u64::from(ids) * of_header.bytes();
        if version != known || bytes != wanted {
            let reason = match version == known {
                true => format!("its header says {ids} ids, {wanted} bytes in all, but it has {bytes} bytes"),
                false => format!("its header has version {version}, not {known}"),
            };
            return Err(DataError::Header { path: path.to_owned(), reason });
        }
        let path = path.to_owned();
        Ok((Self { file, path, width: of_header, header: HEADER_BYTES, first }, ids.into()))
    }
}

impl TokenWidth {
    /// Returns the narrowest width that can hold every token of a vocabulary of this size.
    pub fn of_vocabulary(size: usize) -> Self {
        if size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Bytes per token.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
            Self::U64 => 8,
        }
    }

    /// Appends ids to a buffer in their file format.
    pub(super) fn append(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::U16 => bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            Self::U32 => bytes.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
            Self::U64 => bytes.extend(ids.iter().flat_map(|&id| u64::from(id).to_le_bytes())),
        }
    }
}

/// Reads ids from a byte position on.
fn read_ids(file: &File, width: TokenWidth, mut position: u64, out: &mut [u32]) -> io::Result<()> {
    let mut buffer = [0; 8192];
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
            // An id that exceeds 32 bits is replaced by an id that is outside any vocabulary.
            TokenWidth::U64 => {
                for (id, bytes) in ids.iter_mut().zip(bytes.as_chunks().0) {
                    *id = u32::try_from(u64::from_le_bytes(*bytes)).unwrap_or(u32::MAX);
                }
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
        /// Reading a file at any position gives the same ids as reading from memory.
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

        /// Shards of any kinds and sizes, including empty ones, form the stream of their ids.
        #[test]
        fn shards_are_one_stream(
            parts in prop::collection::vec((prop::collection::vec(0u32..1 << 16, 0..40), 0u8..3), 1..6),
            start in 0usize..100, count in 0usize..100,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let paths: Vec<PathBuf> = (0..parts.len()).map(|part| folder.path().join(part.to_string())).collect();
            for (path, (ids, kind)) in paths.iter().zip(&parts) {
                let count = ids.len() as u32;
                let mut bytes = Vec::new();
                match kind {
                    0 => TokenWidth::U16.append(ids, &mut bytes),
                    1 => bytes = with_header(20_240_520, 1, count, ids, TokenWidth::U16),
                    _ => bytes = with_header(20_240_801, 7, count, ids, TokenWidth::U32),
                }
                std::fs::write(path, bytes).unwrap();
            }
            let ids: Vec<u32> = parts.iter().flat_map(|(ids, _)| ids.iter().copied()).collect();
            let tokens = Tokens::open_all(&paths, TokenWidth::U16).unwrap();
            prop_assert_eq!(tokens.count(), ids.len() as u64);
            let mut read = vec![0; count];
            let inside = start + count <= ids.len();
            prop_assert_eq!(tokens.read(start as u64, &mut read).is_ok(), inside || count == 0);
            if inside {
                prop_assert_eq!(&read, &ids[start..start + count]);
            }
        }
    }

    #[test]
    fn the_first_token_outside_is_named() {
        let tokens = Tokens::from_ids([vec![3; 20_000], vec![7, 9]].concat());
        assert_eq!(tokens.scan(10).unwrap().outside, None);
        assert_eq!(tokens.scan(7).unwrap().outside, Some((20_000, 7)));
    }

    /// A file in llm.c's format.
    fn with_header(magic: u32, version: u32, count: u32, ids: &[u32], width: TokenWidth) -> Vec<u8> {
        let mut bytes: Vec<u8> = [magic, version, count].iter().flat_map(|number| number.to_le_bytes()).collect();
        bytes.resize(HEADER_BYTES as usize, 0);
        width.append(ids, &mut bytes);
        bytes
    }

    #[test]
    fn headers_that_do_not_fit_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (magic, version, count, expected) in [
            (20_240_520, 2, 3, "has version 2, not 1"),
            (20_240_801, 1, 3, "has version 1, not 7"),
            (20_240_520, 1, 4, "says 4 ids, 1032 bytes in all, but it has 1030 bytes"),
            (20_240_801, 7, 3, "says 3 ids, 1036 bytes in all, but it has 1030 bytes"),
        ] {
            std::fs::write(file.path(), with_header(magic, version, count, &[1, 2, 3], TokenWidth::U16)).unwrap();
            let error = Tokens::open(file.path(), TokenWidth::U16).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(&*file.path().to_string_lossy()), "{error}");
            assert_eq!(Tokens::open_bare(file.path(), TokenWidth::U16).unwrap().count(), 515);
        }
    }

    #[test]
    fn half_a_token_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1, 0, 2]).unwrap();
        let error = Tokens::open(file.path(), TokenWidth::U16).unwrap_err();
        assert!(matches!(error, DataError::CutOff { bytes: 3, width: 2, .. }), "{error}");
    }
}
