//! Kernels for the CPU, and their building blocks.

pub mod args;
pub mod attention;
pub mod bf16;
mod elementwise;
pub mod gemm;
pub mod math;
pub mod overflow_heap;
pub mod peak;
mod pieces;
pub mod quantized;
pub mod reduce;
pub mod scratch;
pub mod simd;
mod tasks;

pub use args::{Args, Element};
pub use bf16::{Float, with_float};
pub use elementwise::{
    BLOCK, CalledOnce, arch, columns_per_task, copy_row, each_row, last_extent, map, row_of, rows_per_task, vectorize,
    zip,
};
pub use pieces::{InPieces, Pieces};
pub use scratch::{Scratch, ScratchMemory};
