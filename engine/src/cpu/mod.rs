//! Kernels for the CPU: what runs inside a step. None of them allocates; scratch is given by the caller.

pub mod attention;
pub mod gemm;
pub mod math;
pub mod simd;
mod tasks;
