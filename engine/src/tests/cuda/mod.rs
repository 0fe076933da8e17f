//! Tests of kernels without a GPU. NVRTC compiles the kernels for GPUs, and their results are checked by running them
//! on the CPU.

mod architectures;
mod attention;
mod cache;
#[cfg(target_os = "linux")]
mod double;
mod elementwise;
mod experts;
mod fused;
mod gpu;
mod grouped;
mod host;
mod judge;
mod memory;
mod mixture;
mod model;
mod norm;
mod one_pass;
mod optim;
mod optimizers;
mod own_operation;
mod processor;
mod products;
mod quantized;
mod ranks;
mod refused;
mod rounding;
mod routing;
mod rows;
mod slots;
mod small;
mod step;
mod storage;
mod trainer;
mod vocabulary;
mod warpgroups;
