//! CUDA kernels as source text, and the launches of each operation.
//!
//! ```text
//! Launch ─┬─▶ Product{a, b, c, epilogue, …}
//!         └─▶ Kernel{family, name, grid, arguments} ──▶ Family::source, a file or generated
//! ```

mod family;
mod fusible;
pub mod generate;
pub mod launch;

#[doc(hidden)]
pub use family::HEADERS;
pub use family::{Family, Generated};
pub use fusible::{Constant, Fusible};
pub use launch::{Features, HostCopy, Kernel, Launch, Operand, Operands, Product, Random};
