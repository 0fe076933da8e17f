//! Tensors in safetensors files, read in pieces.
//!
//! In: a file. Out: names, types and shapes of its tensors, and elements as f32 on request. Never: more of a file in
//! memory than the header and one piece of a tensor.
//!
//! Files are read, not mapped. Mapped pages would count as resident memory, and truncating a mapped file while it is
//! read would kill the process.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use gapless_engine::data::{open_regular, read_exact_at};
use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};

pub use safetensors::tensor::Dtype;

use super::error::{HfError, Result, WeightProblem};

/// The greatest size of a header in bytes, the same as in the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Number of bytes that are read at once: a multiple of every type's size.
const PIECE_BYTES: usize = 1 << 20;

/// A safetensors file whose header has been read and checked. Several threads can read it at once.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Opens a file and checks its header. Every tensor must have a known type, and a size that matches its shape. The
    /// tensors must cover the file without gaps or overlap.
    ///
    /// # Errors
    /// Returns [`HfError::Header`] if the header is invalid, or [`HfError::Read`] if the file cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let read = |source| HfError::Read { path: path.clone(), source };
        let bad = |why: String| HfError::Header { path: path.clone(), why };
        let mut file = open_regular(&path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        if bytes < 8 {
            return Err(bad(format!("it has {bytes} bytes, fewer than the 8 of the header's length")));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(read)?;
        let length = u64::from_le_bytes(length);
        if length > bytes - 8 || length > MAX_HEADER_BYTES {
            return Err(bad(format!("it declares a header of {length} bytes, but has {bytes} bytes")));
        }
        let mut json = vec![0; length as usize];
        file.read_exact(&mut json).map_err(read)?;
        let header: Metadata = serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
        let data_start = 8 + length;
        let described = header.data_len() as u64;
        if described != bytes - data_start {
            let found = bytes - data_start;
            return Err(bad(format!("its header describes {described} bytes of data, but it has {found}")));
        }
        Ok(Self { path, file, header, data_start })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names, types and shapes of the file's tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Dtype, Vec<usize>)> {
        self.header.tensors().into_iter().map(|(name, info)| (name, info.dtype, info.shape.clone()))
    }

    /// Returns the metadata in the file's header, or `None` if the header has none.
    pub(super) fn metadata(&self) -> Option<HashMap<String, String>> {
        self.header.metadata().clone()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Calls `with` on the bytes of the elements `first..first + count` of a tensor, piece by piece.
    pub(super) fn read(
        &self,
        info: &TensorInfo,
        first: usize,
        count: usize,
        with: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let size = info.dtype.bitsize() / 8;
        self.read_bytes(info.data_offsets.0 + first * size, count * size, with)
            .map_err(|source| HfError::Read { path: self.path.clone(), source })
    }

    fn read_bytes(&self, first: usize, mut left: usize, with: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let mut position = self.data_start + first as u64;
        let mut piece = vec![0; left.min(PIECE_BYTES)];
        while left > 0 {
            let bytes = &mut piece[..left.min(PIECE_BYTES)];
            read_exact_at(&self.file, bytes, position)?;
            with(bytes);
            position += bytes.len() as u64;
            left -= bytes.len();
        }
        Ok(())
    }

    /// Calls `with` on the elements `first..first + count` of a tensor as f32, in order. Returns an error if an element
    /// is not finite, but only after `with` has been called on all elements.
    pub(super) fn read_elements(
        &self,
        name: &str,
        first: usize,
        count: usize,
        mut with: impl FnMut(f32),
    ) -> Result<()> {
        let info = self.info(name).expect("only tensors of the file are read");
        let mut unsound = None;
        let mut with = |element: f32| {
            if !element.is_finite() {
                unsound.get_or_insert(element);
            }
            with(element);
        };
        self.read(info, first, count, &mut |bytes| match info.dtype {
            Dtype::BF16 => bytes.as_chunks().0.iter().for_each(|&one| with(bf16::from_le_bytes(one).to_f32())),
            Dtype::F16 => bytes.as_chunks().0.iter().for_each(|&one| with(f16::from_le_bytes(one).to_f32())),
            Dtype::F32 => bytes.as_chunks().0.iter().for_each(|&one| with(f32::from_le_bytes(one))),
            other => unreachable!("{other:?} was refused when the folder was opened"),
        })?;
        match unsound {
            None => Ok(()),
            Some(value) => {
                let problem = WeightProblem::NotFinite { name: name.to_owned(), value: value.to_string() };
                Err(HfError::Weights { path: self.path.clone(), problems: vec![problem] })
            }
        }
    }
}

/// Converts elements to a stored type, and appends their bytes to `bytes`.
pub(super) fn narrow(elements: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::BF16 => bytes.extend(elements.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        Dtype::F16 => bytes.extend(elements.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        Dtype::F32 => bytes.extend(elements.iter().flat_map(|&x| x.to_le_bytes())),
        other => unreachable!("{other:?} was refused when the folder was opened"),
    }
}

/// True if parameters can be stored in this type.
pub(super) fn is_supported(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32)
}
