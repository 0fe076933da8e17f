//! Memory in which a write outside of the elements is detected.

use candle_core::DType;

use super::gpu::Bytes;

/// Returns the bits of the nearest bf16.
pub(super) fn to_bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// Length of a guard, and alignment of regions, in bytes.
const LINE: usize = 64;

/// The byte that fills memory before anything is written there. Repeated, it is NaN in every float type.
const POISON: u8 = 0xff;

/// Elements of one type between two guards. They are aligned like the tensors of an arena.
#[derive(Debug)]
pub struct Region {
    /// All bytes, including guards and padding for the alignment.
    all: Bytes,
    /// The offset of the first element.
    start: usize,
    bytes: usize,
    dtype: DType,
}

impl Region {
    pub fn from_bytes(bytes: Vec<u8>, dtype: DType) -> Self {
        let mut all = Bytes::filled(bytes.len() + 3 * LINE, POISON);
        let start = LINE + all.as_ptr().align_offset(LINE);
        all[start..start + bytes.len()].copy_from_slice(&bytes);
        Self { all, start, bytes: bytes.len(), dtype }
    }

    /// Elements that are all NaN.
    pub fn poisoned(elements: usize, dtype: DType) -> Self {
        Self::from_bytes(vec![POISON; elements * dtype.size_in_bytes()], dtype)
    }

    /// Values rounded to the type.
    pub fn of(numbers: &[f64], dtype: DType) -> Self {
        let bytes = match dtype {
            DType::F32 => numbers.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
            DType::BF16 => numbers.iter().flat_map(|&x| to_bf16(x as f32).to_ne_bytes()).collect(),
            DType::U32 => numbers.iter().flat_map(|&x| (x as u32).to_ne_bytes()).collect(),
            DType::U8 => numbers.iter().map(|&x| x as u8).collect(),
            DType::F64 => numbers.iter().flat_map(|&x| x.to_ne_bytes()).collect(),
            dtype => panic!("no kernel takes {dtype:?}"),
        };
        Self::from_bytes(bytes, dtype)
    }

    pub fn address(&self) -> u64 {
        self.all[self.start..].as_ptr().expose_provenance() as u64
    }

    pub fn bytes(&self) -> &[u8] {
        &self.all[self.start..self.start + self.bytes]
    }

    /// The elements as f64.
    pub fn numbers(&self) -> Vec<f64> {
        fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.chunks_exact(N).map(|chunk| f(chunk.try_into().expect("whole chunks"))).collect()
        }
        match self.dtype {
            DType::F32 => each(self.bytes(), |b| f64::from(f32::from_ne_bytes(b))),
            DType::BF16 => each(self.bytes(), |b| f64::from(from_bf16(u16::from_ne_bytes(b)))),
            DType::U32 => each(self.bytes(), |b| f64::from(u32::from_ne_bytes(b))),
            DType::U8 => self.bytes().iter().map(|&byte| f64::from(byte)).collect(),
            DType::F64 => each(self.bytes(), f64::from_ne_bytes),
            dtype => panic!("no kernel gives {dtype:?}"),
        }
    }

    /// True if no guard has been overwritten.
    pub fn is_intact(&self) -> bool {
        self.all[..self.start].iter().chain(&self.all[self.start + self.bytes..]).all(|&byte| byte == POISON)
    }
}

pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
